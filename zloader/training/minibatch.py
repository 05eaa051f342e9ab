"""What one training step gets: the arrays of a minibatch as tensors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import pandas as pd
import scipy.sparse
import torch

from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.dataset.table import as_scipy


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one training step gets; all in the same row order.

    `x` is a torch sparse CSR tensor (with int32 indices), a dense tensor, a scipy CSR matrix or an AnnData (rows x
    genes), or None; `obs` maps a column to a tensor of one value a row (int64 codes of categories, -1 for none; numbers
    as they are stored), `obsm` a name to a tensor of rows x dims, as stored; `index` (int64) holds the dataset's row
    numbers.
    """

    x: Any
    obs: dict[str, torch.Tensor]
    obsm: dict[str, torch.Tensor]
    index: torch.Tensor

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Minibatch:
        """The same minibatch on a device (x must be a tensor or None)."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Minibatch:
        """The same minibatch in page-locked memory (x must be a tensor or None); DataLoader calls this."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Any) -> Minibatch:
        return Minibatch(
            x=None if self.x is None else function(self.x),
            obs={name: function(column) for name, column in self.obs.items()},
            obsm={name: function(array) for name, array in self.obsm.items()},
            index=function(self.index),
        )


def _refuse_to_collate(minibatches: list[Minibatch], *, collate_fn_map: Any = None) -> NoReturn:
    raise OptionError(
        "a zl.Loader yields whole minibatches, and this DataLoader would make batches of them: write "
        "DataLoader(loader, batch_size=None). How many rows a minibatch has is said by zl.Loader(batch_size=...)"
    )


# A DataLoader asks this table of torch's how to make a batch of Minibatches. It is private: a version of torch that has
# none raises a TypeError of its own instead.
with contextlib.suppress(ImportError):
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Minibatch] = _refuse_to_collate


def as_minibatch(dataset: Dataset, layout: str, var: pd.DataFrame | None, arrays: MinibatchArrays) -> Minibatch:
    return Minibatch(
        x=_as_layout(layout, arrays) if var is None else dataset.to_anndata(arrays, var),
        obs={name: torch.from_numpy(column) for name, column in arrays.obs.items()},
        obsm={name: torch.from_numpy(array) for name, array in arrays.obsm.items()},
        index=torch.from_numpy(arrays.index),
    )


def _as_layout(layout: str, arrays: MinibatchArrays) -> torch.Tensor | scipy.sparse.csr_matrix | None:
    x = arrays.x
    if not isinstance(x, CsrArrays):
        return None if x is None else torch.from_numpy(x)
    if layout == "scipy":
        return as_scipy(x)
    return torch.sparse_csr_tensor(
        torch.from_numpy(x.indptr),
        torch.from_numpy(x.indices),
        torch.from_numpy(x.values),
        size=(len(x.indptr) - 1, x.n_genes),
        check_invariants=False,  # the gather makes them so; checking costs more than making
    )


@functools.cache
def silence_sparse_warnings() -> None:
    """Spends torch's once-a-process warnings on sparse CSR (in beta; invariants unchecked): nobody can act on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        empty = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(empty, empty[:0], empty[:0], size=(0, 0))
