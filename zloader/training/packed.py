"""Rows in CSR form with the dtypes in which they are stored, and their conversion in plain torch on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from zloader.common.checks import name_of_dtype
from zloader.common.errors import OptionError
from zloader.training.csr_rows import Padded

# torch stores these dtypes and converts them, but computes with them on few devices.
_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # it cannot pickle these
_SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = ("float16", "bfloat16", "float32", "float64", *_INTEGERS)

Dtype: TypeAlias = str | torch.dtype | np.dtype[Any] | type


@dataclass(eq=False, repr=False)
class PackedRows:
    """Rows x genes as three tensors, in the dtypes that take the least memory; `minibatch.x` with layout "packed".

    >>> loader = zl.Loader(dataset, batch_size=64, layout="packed")
    >>> x = next(iter(loader)).x
    >>> x.shape, x.genes.dtype, x.values.dtype
    (torch.Size([64, 97]), torch.uint8, torch.uint16)
    >>> x.csr().layout, x.dense("bfloat16").dtype, x.padded(32).genes.shape
    (torch.sparse_csr, torch.bfloat16, torch.Size([64, 32]))

    indptr: rows + 1 offsets, int32 (int64 from 2**31 values on). Row i has the values `[indptr[i], indptr[i + 1])`.
    genes: the column of each value, ascending in each row, in the smallest unsigned dtype that holds `n_genes - 1`.
    values: in the stored dtype, which `zl.convert` makes as small as it can; of several stores in their common dtype.
    n_genes: columns.

    A `dtype` is a name, such as "bfloat16", or a dtype of torch or NumPy. The methods compute where the tensors are,
    and return tensors there. torch can do little with unsigned integers of 16 bits and more beyond storing and
    converting them, so convert `genes` and `values` before you compute with them.
    """

    indptr: torch.Tensor
    genes: torch.Tensor
    values: torch.Tensor
    n_genes: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, rows: slice) -> PackedRows:
        """The rows `[first, last)`, which share the memory of these. Raises OptionError for any other choice."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            _refuse(f"x[{rows!r:.100}]")
        first, last, _ = rows.indices(len(self))
        indptr = self.indptr[first : max(first, last) + 1]
        begin, end = int(indptr[0]), int(indptr[-1])
        return PackedRows(indptr - begin, self.genes[begin:end], self.values[begin:end], self.n_genes)

    def __iter__(self) -> Any:
        """Raises OptionError, and so does `numpy.array`."""
        _refuse("one row after another")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("an array")

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"PackedRows({rows} x {columns}, {len(self.values)} values, genes {self.genes.dtype}, "
            f"values {self.values.dtype}, {self.device})"
        )

    @property
    def shape(self) -> torch.Size:
        """Rows and genes."""
        return torch.Size((len(self), self.n_genes))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.indptr.nbytes + self.genes.nbytes + self.values.nbytes

    @property
    def lengths(self) -> torch.Tensor:
        """Values per row."""
        return self.indptr.diff()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedRows:
        """A copy on the device. On mps, which lacks them, wider unsigned integers become signed ones of twice the size.

        Returns the same tensors if they are on the device already.
        """
        widen = torch.device(device).type == "mps"
        return self.each(lambda tensor: (_signed(tensor) if widen else tensor).to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedRows:
        """A copy in page-locked memory."""
        return self.each(lambda tensor: tensor.pin_memory())

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedRows:
        """The rows with a function applied to each of the three tensors."""
        return PackedRows(function(self.indptr), function(self.genes), function(self.values), self.n_genes)

    def csr(self, dtype: Dtype = "float32") -> torch.Tensor:
        """The rows as torch.sparse_csr, with values as `dtype` and with int32 indices, as from layout "csr"."""
        return torch.sparse_csr_tensor(
            self.indptr,
            self.genes.to(self.indptr.dtype),
            self.values.to(torch_dtype(dtype)),
            size=self.shape,
            check_invariants=False,  # the gather ensures them
        )

    def dense(self, dtype: Dtype = "float32") -> torch.Tensor:
        """The rows as a dense tensor of rows x genes. If a row has a gene twice, its values are summed."""
        dtype = torch_dtype(dtype)
        # The sum of several half floats would be rounded at every step, and atomic additions of them are slow.
        summed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else _SIGNED.get(dtype, dtype)
        out = torch.zeros(len(self) * self.n_genes, dtype=summed, device=self.device)
        return out.scatter_add_(0, self.places(), self.values.to(summed)).to(dtype).view(self.shape)

    def places(self) -> torch.Tensor:
        """The place of each value in the dense rows, one after another."""
        first = torch.arange(len(self), device=self.device) * self.n_genes
        return first.repeat_interleave(self.lengths, output_size=len(self.values)) + _signed(self.genes)

    def padded(self, length: int | None = None, dtype: Dtype = "float32") -> Padded:
        """The rows as tables of rows x `length`, each with its first `length` genes, or fewer and padding.

        Without a `length` it is that of the longest row. On a GPU this waits for the computation of the rows.
        """
        dtype, lengths = torch_dtype(dtype), self.lengths
        if length is None:
            length = int(lengths.max()) if len(self) else 0
        at = torch.arange(length, device=self.device)
        mask = at < lengths[:, None]
        if not len(self.values):
            shape = (len(self), length)
            none = torch.full(shape, self.n_genes, dtype=torch.int64, device=self.device)
            return Padded(none, torch.zeros(shape, dtype=dtype, device=self.device), mask)
        at = (self.indptr[:-1, None] + at).clamp_(max=len(self.values) - 1)
        genes, values = _signed(self.genes)[at].to(torch.int64), self.values.to(_SIGNED.get(dtype, dtype))[at]
        return Padded(genes.masked_fill_(~mask, self.n_genes), values.masked_fill_(~mask, 0).to(dtype), mask)

    def __reduce__(self) -> Any:
        tensors = (self.indptr, self.genes, self.values)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        bits = [tensor.view(_BITS.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
        return _unpickled, (bits, dtypes, self.n_genes)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The dtype of torch that is meant. Raises OptionError if it is not one of numbers."""
    found: torch.dtype = getattr(torch, name_of_dtype(_DTYPES, dtype=dtype))
    return found


def _refuse(what: str) -> NoReturn:
    raise OptionError(
        f"PackedRows cannot give {what}, only slices of rows that follow each other, such as x[2:5]: convert them "
        "first, as in x.dense()[::2]"
    )


def _unpickled(bits: list[torch.Tensor], dtypes: tuple[torch.dtype, ...], n_genes: int) -> PackedRows:
    indptr, genes, values = (tensor.view(dtype) for tensor, dtype in zip(bits, dtypes, strict=True))
    return PackedRows(indptr, genes, values, n_genes)


def dense_of_distinct(rows: PackedRows, dtype: torch.dtype) -> torch.Tensor:
    """As `rows.dense`, for rows that have no gene twice. No sums: half floats need no wider tensor meanwhile."""
    out = torch.zeros(len(rows) * rows.n_genes, dtype=dtype, device=rows.device)
    return out.scatter_(0, rows.places(), rows.values.to(dtype)).view(rows.shape)


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch computes with."""
    return tensor.to(_SIGNED.get(tensor.dtype, tensor.dtype))
