"""Minibatches of torch tensors, and what torch must know of the Loader and its minibatches."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NoReturn

import torch.utils.data
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays
from zloader.training.arrays import NumPy, sparse_csr
from zloader.training.minibatch import Minibatch


class Torch(NumPy):
    """Makes tensors that share the memory of the gathered arrays."""

    def array(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values)

    def csr(self, x: CsrArrays) -> torch.Tensor:
        indptr, genes, values = map(torch.from_numpy, (x.indptr, x.indices, x.values))
        return sparse_csr(indptr, genes, values, x.n_genes)


# Triggers, unseen, torch's once-per-process warnings about sparse CSR, because users can do nothing about them.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    _empty = torch.zeros(1, dtype=torch.int64)
    torch.sparse_csr_tensor(_empty, _empty[:0], _empty[:0], size=(0, 0))


def _refuse_to_collate(minibatches: list[Minibatch], *, collate_fn_map: Any = None) -> NoReturn:
    raise OptionError(
        "a zl.Loader yields whole minibatches, and this DataLoader would batch them again: write "
        "DataLoader(loader, batch_size=None), and set the rows per minibatch with zl.Loader(batch_size=...)"
    )


# DataLoader looks up in this table how to collate Minibatches into a batch. The table is private to torch. A version
# of torch without it raises its own TypeError instead.
with contextlib.suppress(ImportError):
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Minibatch] = _refuse_to_collate
