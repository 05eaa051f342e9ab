"""Rows in CSR form as arrays of NumPy, and the tables that a model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError


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
class CsrRows:
    """Rows x genes as three arrays: `minibatch.x` of NumPy with layout "csr" or "packed".

    >>> loader = zl.Loader(dataset, batch_size=64, layout="packed", framework="numpy")
    >>> x = next(iter(loader)).x
    >>> x.shape, x.indices.dtype, x.values.dtype
    ((64, 97), dtype('uint8'), dtype('uint16'))
    >>> x.dense().dtype, x.padded(32).genes.shape
    (dtype('float32'), (64, 32))

    indptr: rows + 1 offsets, int32 (int64 from 2**31 values on). Row i has the values `[indptr[i], indptr[i + 1])`.
    indices: the gene of each value, ascending in each row; int32, with layout "packed" the smallest unsigned dtype.
    values: with layout "packed" in the stored dtype, else in the loader's `dtype`.
    shape: rows and genes.
    """

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    values: NDArray[Any]
    shape: tuple[int, int]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        rows, genes = self.shape
        return f"CsrRows({rows} x {genes}, indices {self.indices.dtype}, values {self.values.dtype})"

    def __getitem__(self, rows: slice) -> CsrRows:
        """The rows `[first, last)`, which share the memory of these. Raises OptionError for any other choice."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise OptionError(
                f"CsrRows cannot give x[{rows!r:.100}], only slices of rows that follow each other, such as x[2:5]: "
                "convert them first, as in x.dense()[::2]"
            )
        first, last, _ = rows.indices(len(self))
        indptr = self.indptr[first : max(first, last) + 1]
        begin, end = int(indptr[0]), int(indptr[-1])
        shape = (len(indptr) - 1, self.shape[1])
        return CsrRows(indptr - begin, self.indices[begin:end], self.values[begin:end], shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return int(self.indptr.nbytes + self.indices.nbytes + self.values.nbytes)

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Values per row."""
        return np.diff(self.indptr)

    def dense(self, dtype: Any = "float32") -> NDArray[Any]:
        """The rows as a dense array of rows x genes. If a row has a gene twice, its values are summed."""
        half = np.dtype(dtype) == np.float16
        values = self.values.astype("float32" if half else dtype)  # every step of a sum of half floats would be rounded
        out = np.zeros(self.shape, values.dtype)
        np.add.at(out, (np.repeat(np.arange(len(self)), self.lengths), self.indices), values)
        return out.astype(dtype)

    def padded(self, length: int | None = None, dtype: Any = "float32") -> Padded:
        """The rows as tables of rows x `length`, each with its first `length` genes, or fewer and padding.

        Without a `length` it is that of the longest row.
        """
        lengths, n_values = self.lengths, len(self.values)
        if length is None:
            length = int(lengths.max()) if len(self) else 0
        mask = np.arange(length) < lengths[:, None]
        if not n_values:
            shape = (len(self), length)
            return Padded(np.full(shape, self.shape[1], np.int64), np.zeros(shape, dtype), mask)
        at = np.minimum(self.indptr[:-1, None] + np.arange(length), n_values - 1)
        genes = np.where(mask, self.indices[at].astype(np.int64), self.shape[1])
        return Padded(genes, np.where(mask, self.values[at], 0).astype(dtype), mask)
