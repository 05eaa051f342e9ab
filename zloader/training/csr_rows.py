"""Rows in CSR form as arrays of NumPy or JAX, and the tables that a model takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zloader.common.errors import OptionError


class Padded(NamedTuple):
    """Rows as tables of rows x length. Places beyond the end of a row have the gene `n_genes` and the value 0.

    genes: int64 (JAX: int32). An embedding of `n_genes + 1` entries takes them.
    values: the value of each gene.
    mask: bool, True for a value and False for padding.
    """

    genes: Any
    values: Any
    mask: Any


@dataclass(eq=False, repr=False)
class CsrRows:
    """Rows x genes as three arrays: `minibatch.x` of NumPy or JAX with layout "csr" or "packed".

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

    In JAX it is a pytree, so that a jitted function takes it. There `indices` and `values` end with zeros up to a
    rounded length, and the function is compiled for few lengths instead of one per minibatch.
    """

    indptr: Any
    indices: Any
    values: Any
    shape: tuple[int, int]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        rows, genes = self.shape
        return f"CsrRows({rows} x {genes}, indices {self.indices.dtype}, values {self.values.dtype})"

    def __getitem__(self, rows: slice) -> CsrRows:
        """The rows `[first, last)`, which share the memory of these if they are of NumPy. Raises OptionError."""
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
    def lengths(self) -> Any:
        """Values per row."""
        return self.indptr[1:] - self.indptr[:-1]

    def each(self, function: Callable[[Any], Any]) -> CsrRows:
        """The rows with a function applied to each of the three arrays."""
        return CsrRows(function(self.indptr), function(self.indices), function(self.values), self.shape)

    def dense(self, dtype: Any = "float32") -> Any:
        """The rows as a dense array of rows x genes. If a row has a gene twice, its values are summed."""
        xp = _namespace(self.values)
        n_values, half = self.values.shape[0], xp.dtype(dtype).itemsize < 4 and xp.dtype(dtype).kind not in "biu"
        values = self.values.astype("float32" if half else dtype)  # every step of a sum of half floats would be rounded
        if xp is np:
            out = np.zeros(self.shape, values.dtype)
            rows = np.repeat(np.arange(len(self)), self.lengths)
            np.add.at(out, (rows, self.indices), values)
        else:
            rows = xp.repeat(xp.arange(len(self)), self.lengths, total_repeat_length=n_values)
            out = xp.zeros(self.shape, values.dtype).at[rows, self.indices.astype("int32")].add(values)
        return out.astype(dtype)

    def padded(self, length: int | None = None, dtype: Any = "float32") -> Padded:
        """The rows as tables of rows x `length`, each with its first `length` genes, or fewer and padding.

        Without a `length` it is that of the longest row, which a jitted function cannot know.
        """
        xp, lengths, n_values = _namespace(self.values), self.lengths, self.values.shape[0]
        if length is None:
            length = int(lengths.max()) if len(self) else 0
        mask = xp.arange(length) < lengths[:, None]
        genes_dtype = "int64" if xp is np else "int32"
        if not n_values:
            shape = (len(self), length)
            return Padded(xp.full(shape, self.shape[1], genes_dtype), xp.zeros(shape, dtype), mask)
        at = xp.minimum(self.indptr[:-1, None] + xp.arange(length), n_values - 1)
        genes = xp.where(mask, self.indices[at].astype(genes_dtype), self.shape[1])
        return Padded(genes.astype(genes_dtype), xp.where(mask, self.values[at], 0).astype(dtype), mask)

    def bcsr(self) -> Any:
        """The rows as jax.experimental.sparse.BCSR, for products such as `x.bcsr() @ weight`. JAX only."""
        if isinstance(self.values, np.ndarray):
            raise OptionError("these rows are NumPy arrays: load with framework='jax', or layout='scipy' for SciPy")
        from jax.experimental.sparse import BCSR

        return BCSR((self.values, self.indices.astype("int32"), self.indptr), shape=self.shape)


def _namespace(array: Any) -> Any:
    """NumPy, or jax.numpy for the arrays of JAX and for those that it traces."""
    return np if isinstance(array, np.ndarray) else sys.modules["jax.numpy"]
