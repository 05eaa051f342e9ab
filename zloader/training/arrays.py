"""Arrays of minibatches, in the memory of those that were gathered: packed rows, and what makes arrays of a framework.

torch is imported when a loader of tensors is made, or packed rows of tensors are converted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import name_of_dtype
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, X
from zloader.dataset.matrices import as_scipy
from zloader.reading.gather import csr_cut_apart

if TYPE_CHECKING:
    import torch

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = ("float16", "bfloat16", "float32", "float64", *_INTEGERS)
# torch stores these dtypes and converts them, but computes with them on few devices, and cannot pickle them.
_SIGNED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}

Dtype: TypeAlias = "str | torch.dtype | np.dtype[Any] | type"


class Padded(NamedTuple):
    """Rows as tables of rows x length. Places beyond the end of a row have the gene `n_genes` and the value 0.

    genes: int64. An embedding of `n_genes + 1` entries takes them.
    values: the value of each gene.
    mask: bool, True for a value and False for padding.
    """

    genes: Any
    values: Any
    mask: Any


@dataclass(eq=False, repr=False)
class PackedRows:
    """Rows x genes as three tensors, in the dtypes that take the least memory; `minibatch.x` with layout "packed".

    >>> loader = zl.Loader(dataset, batch_size=64, layout="packed")
    >>> x = next(iter(loader)).x
    >>> x.shape, x.genes.dtype, x.values.dtype
    ((64, 97), torch.uint8, torch.uint16)
    >>> x.csr().layout, x.dense("bfloat16").dtype, x.padded(32).genes.shape
    (torch.sparse_csr, torch.bfloat16, torch.Size([64, 32]))

    With framework "numpy" it has arrays of NumPy, and is `minibatch.x` with layout "csr", too.

    indptr: rows + 1 offsets, int32 (int64 from 2**31 values on). Row i has the values `[indptr[i], indptr[i + 1])`.
    genes: the column of each value, ascending in each row, in the smallest unsigned dtype; int32 in layout "csr".
    values: in the stored dtype (of several stores in their common one); in layout "csr" in the loader's `dtype`.
    n_genes: columns.

    A `dtype` is a name, such as "bfloat16", or a dtype of torch or NumPy. The methods compute where the tensors are,
    and return tensors there. torch can do little with unsigned integers of 16 bits and more beyond storing and
    converting them, so convert `genes` and `values` before you compute with them.
    """

    indptr: Any
    genes: Any
    values: Any
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

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("an array")

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"PackedRows({rows} x {columns}, {len(self.values)} values, genes {self.genes.dtype}, "
            f"values {self.values.dtype}, {self.device})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and genes."""
        return len(self), self.n_genes

    @property
    def device(self) -> Any:
        """The device of the tensors; "cpu" for arrays of NumPy."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return int(self.indptr.nbytes + self.genes.nbytes + self.values.nbytes)

    @property
    def lengths(self) -> Any:
        """Values per row."""
        return self.indptr[1:] - self.indptr[:-1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedRows:
        """A copy on the device. On mps, which lacks them, wider unsigned integers become signed ones of twice the size.

        Returns the same tensors if they are on the device already.
        """
        widen = str(device).startswith("mps")
        return self.each(lambda tensor: (_signed(tensor) if widen else tensor).to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedRows:
        """A copy in page-locked memory."""
        return self.each(lambda tensor: tensor.pin_memory())

    def each(self, function: Callable[[Any], Any]) -> PackedRows:
        """The rows with a function applied to each of the three tensors."""
        return PackedRows(function(self.indptr), function(self.genes), function(self.values), self.n_genes)

    def csr(self, dtype: Dtype = "float32") -> Any:
        """The rows as torch.sparse_csr with int32 indices, as from layout "csr"; of NumPy as a SciPy CSR matrix."""
        name = name_of_dtype(_DTYPES, dtype=dtype)
        genes, values = _cast(self.genes, _name_of(self.indptr)), _cast(self.values, name)
        if is_tensor(values):
            return sparse_csr(self.indptr, genes, values, self.n_genes)
        return as_scipy(CsrArrays(indptr=self.indptr, indices=genes, values=values, n_genes=self.n_genes))

    def dense(self, dtype: Dtype = "float32") -> Any:
        """The rows as a dense tensor of rows x genes. If a row has a gene twice, its values are summed."""
        name = name_of_dtype(_DTYPES, dtype=dtype)
        # The sum of several half floats would be rounded at every step, and atomic additions of them are slow.
        summed = "float32" if "float16" in name else _SIGNED.get(name, name)
        if not is_tensor(self.values):
            return _cast(self.csr(summed).toarray(), name)
        values = _cast(self.values, summed)
        out = values.new_zeros(len(self) * self.n_genes)
        return _cast(out.scatter_add_(0, self.places(), values), name).view(self.shape)

    def places(self) -> torch.Tensor:
        """The place of each value in the dense rows, one after another. The rows have tensors."""
        first = self._counted(len(self)) * self.n_genes
        places: torch.Tensor = first.repeat_interleave(self.lengths, output_size=len(self.values)) + _signed(self.genes)
        return places

    def padded(self, length: int | None = None, dtype: Dtype = "float32") -> Padded:
        """The rows as tables of rows x `length`, each with its first `length` genes, or fewer and padding.

        Without a `length` it is that of the longest row. On a GPU this waits for the computation of the rows.
        """
        name, lengths = name_of_dtype(_DTYPES, dtype=dtype), self.lengths
        if length is None:
            length = int(lengths.max()) if len(self) else 0
        mask = self._counted(length) < lengths[:, None]
        # Places of padding have the gene `n_genes` and the value 0, which stand before those of the rows.
        at = (self.indptr[:-1, None] + self._counted(length) + 1) * mask
        genes, values = _cast(self.genes, "int64"), _cast(self.values, _SIGNED.get(name, name))
        return Padded(_led_by(self.n_genes, genes)[at], _cast(_led_by(0, values)[at], name), mask)

    def _counted(self, stop: int) -> Any:
        """The numbers from 0 to `stop` where the rows are."""
        return sys.modules["torch"].arange(stop, device=self.device) if is_tensor(self.values) else np.arange(stop)

    def __reduce__(self) -> Any:
        arrays = (self.indptr, self.genes, self.values)
        names = [_name_of(array) for array in arrays]
        bits = [_seen_as(array, name.removeprefix("u")) for array, name in zip(arrays, names, strict=True)]
        return _unpickled, (bits, names, self.n_genes)


class NumPy:
    """Makes the arrays of minibatches of those that were gathered: these arrays themselves."""

    def array(self, values: NDArray[Any]) -> Any:
        """An array of one or several values per row, or of dense rows."""
        return values

    def packed(self, x: CsrArrays) -> Any:
        """x in CSR form, with its values as they are."""
        return PackedRows(self.array(x.indptr), self.array(x.indices), self.array(x.values), x.n_genes)

    csr = packed  # for layout "csr"

    def arrays(self, values: NDArray[Any], cuts: Sequence[int]) -> list[Any]:
        """The arrays of minibatches between successive cuts, each as `array` makes it."""
        return [self.array(values[first:last]) for first, last in pairwise(cuts)]

    def x(self, layout: str, x: X, cuts: Sequence[int]) -> list[Any]:
        """A matrix of minibatches between successive cuts in its layout."""
        if not isinstance(x, CsrArrays):
            return self.arrays(x, cuts)
        made = {"scipy": as_scipy, "packed": self.packed}.get(layout, self.csr)
        return [made(piece) for piece in csr_cut_apart(x, cuts)]


def is_tensor(found: Any) -> bool:
    """Whether it is a torch.Tensor. torch is not imported: what is not loaded has made nothing."""
    return isinstance(found, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_sparse(found: Any) -> bool:
    """Whether it is a torch.sparse_csr tensor."""
    return is_tensor(found) and str(found.layout) == "torch.sparse_csr"


def sparse_csr(indptr: torch.Tensor, genes: torch.Tensor, values: torch.Tensor, n_genes: int) -> torch.Tensor:
    """A torch.sparse_csr tensor of these parts."""
    import torch

    # The gather ensures the invariants, and checking costs more than gathering.
    return torch.sparse_csr_tensor(indptr, genes, values, size=(len(indptr) - 1, n_genes), check_invariants=False)


def _name_of(array: Any) -> str:
    """The name of the dtype of a tensor or an array."""
    return str(array.dtype).removeprefix("torch.")


def _cast(array: Any, name: str) -> Any:
    """A tensor or an array with the dtype of that name."""
    return array.to(getattr(sys.modules["torch"], name)) if is_tensor(array) else array.astype(name, copy=False)


def _seen_as(array: Any, name: str) -> Any:
    """The bits of a tensor or an array as another dtype."""
    return array.view(getattr(sys.modules["torch"], name) if is_tensor(array) else name)


def _signed(array: Any) -> Any:
    """The tensor in a dtype that torch computes with."""
    name = _name_of(array)
    return _cast(array, _SIGNED.get(name, name))


def _led_by(first: int, array: Any) -> Any:
    """A tensor or an array with one more value before its others."""
    if is_tensor(array):
        return sys.modules["torch"].cat([array.new_full((1,), first), array])
    return np.concatenate([np.array([first], array.dtype), array])


def _refuse(what: str) -> NoReturn:
    raise OptionError(f"PackedRows cannot give {what}, only slices of rows that follow each other, such as x[2:5]")


def _unpickled(bits: list[Any], names: list[str], n_genes: int) -> PackedRows:
    indptr, genes, values = (_seen_as(array, name) for array, name in zip(bits, names, strict=True))
    return PackedRows(indptr, genes, values, n_genes)
