"""Normalisation of counts as torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from zloader.common.checks import is_number
from zloader.common.errors import OptionError
from zloader.common.keywords import answers


@answers
def log1p_normalize(x: torch.Tensor, target_sum: float = 1e4) -> torch.Tensor:
    """log(1 + counts per `target_sum`): each row is scaled to a total of `target_sum`, then log1p is applied.

    >>> loader = zl.Loader(dataset, batch_size=64)
    >>> x = zl.log1p_normalize(next(iter(loader)).x)
    >>> x.layout, x.dtype, round(float(torch.expm1(x.to_dense())[0].sum()))
    (torch.sparse_csr, torch.float32, 10000)

    `zl.transforms.LogNormalize` does the same ahead of the training loop, as `zl.Loader(transforms=[...])`.

    Without it, cells with many counts and genes with large ones outweigh all others, and a model hardly learns.
    The result equals scanpy's `normalize_total(target_sum=1e4)` followed by `log1p`.

    Args:
        x: rows x genes of counts, as torch.sparse_csr or as a dense tensor, on any device. Rows without counts stay 0.
        target_sum: the total of each row before log1p.

    Returns a new tensor of the same layout; integers become float32. Raises OptionError for other types and layouts,
    and for a negative value, because counts have none: such data are normalised or scaled already.
    """
    if not isinstance(x, torch.Tensor) or x.layout not in (torch.sparse_csr, torch.strided) or x.ndim != 2:
        raise OptionError(
            f"log1p_normalize needs rows x genes as a torch.sparse_csr or dense tensor, not {_kind(x)}: load with "
            "layout='csr' or layout='dense'"
        )
    if not is_number(target_sum) or not 0 < target_sum < float("inf"):
        raise OptionError(f"target_sum must be a number above 0, not {target_sum!r}")
    counts = x.values() if x.layout == torch.sparse_csr else x
    if counts.numel() and bool(counts.min() < 0):
        raise OptionError(
            f"x holds {counts.min().item()}, but counts are never negative: these data have been normalised or scaled "
            "already. Train on them as they are, or name the matrix of counts, such as Loader(x='raw/X')"
        )
    dtype = x.dtype if x.is_floating_point() else torch.float32
    counts = counts.to(torch.promote_types(dtype, torch.float32))  # totals may exceed float16
    if x.layout == torch.strided:
        return torch.log1p(counts * _scale(counts.sum(dim=1, keepdim=True), target_sum)).to(dtype)
    lengths = x.crow_indices().diff()
    totals = torch.segment_reduce(counts, "sum", lengths=lengths, unsafe=True)
    scale = _scale(totals, target_sum).repeat_interleave(lengths, output_size=len(counts))
    values = torch.log1p(counts * scale).to(dtype)
    return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)


def _scale(totals: torch.Tensor, target_sum: float) -> torch.Tensor:
    return target_sum / totals.where(totals > 0, 1.0)


def _kind(x: Any) -> str:
    return f"{x.layout} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
