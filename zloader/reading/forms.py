"""The forms in which x is gathered: the dtypes of its arrays, whether it is dense, and with which transforms. Pure.

A minibatch that is converted elsewhere, on a device, is gathered as narrow as it can be: its genes in the smallest
unsigned dtype, and its values in the stored dtype if converting them later cannot change a bit.

x with transforms is gathered in the dtype in which they compute, transformed in place, and made canonical. Transforms
that look at whole rows need all genes. If a loader chooses genes, rows of all genes are therefore gathered, and the
chosen columns are gathered from the result. The rows of all genes are CSR, which takes less memory, unless a transform
makes other values of their zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import CsrArrays, Rows, X
from zloader.reading import gather
from zloader.reading.loops import ascend_strictly
from zloader.selecting.genes import ChosenGenes
from zloader.transforms.transform import RowValues, Transform

Stored = Sequence[np.dtype[Any]]  # the dtypes of the values of a matrix in each store


def holds(wanted: str, stored: np.dtype[Any]) -> bool:
    """Whether x may have the dtype `wanted`, for values of a stored one.

    A float dtype holds all numbers, rounded to its precision, as in NumPy, torch and scanpy: float32 is exact up to
    2**24, and a float64 beyond its range becomes infinite. An integer dtype has to hold every value of the stored
    dtype. So fractions, NaN and numbers beyond its range cannot become others, and no value has to be looked at.
    """
    return np.dtype(wanted).kind == "f" or np.can_cast(stored, wanted, "safe")


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which all matrices of a minibatch are gathered.

    `dtype` is that of x, or None for the stored one, or for the common one if several stores differ. `narrow` says that
    x is converted later: then it is in CSR form unless it is stored dense and wanted dense, with genes in the smallest
    unsigned dtype and values as `value_dtype` says. If it is wanted dense, no row has a gene twice. `empty` makes large
    arrays, as far as that saves a copy: in memory from which a device copies, say.
    """

    dense: bool
    dtype: str | None
    narrow: bool = False
    empty: gather.Empty = np.empty

    def value_dtype(self, stored: Stored) -> str:
        """The dtype of gathered values.

        In the narrow form, whole numbers of at most 16 bits stay as they are stored, because every dtype of x holds
        them exactly: converting them later needs no rounding.
        """
        united = np.result_type(*stored)
        if self.dtype is None:
            return "float32" if united == np.float16 else united.name
        small = united.kind in "bui" and united.itemsize <= 2
        return united.name if self.narrow and small else self.dtype

    def value_bytes(self, stored: Stored) -> int:
        """Bytes per value while x is gathered."""
        return np.dtype(self.value_dtype(stored)).itemsize

    def gene_dtype(self, n_genes: int) -> np.dtype[Any] | None:
        """The dtype of gathered genes; None for the usual one of CSR."""
        return np.min_scalar_type(max(0, n_genes - 1)) if self.narrow else None

    def gene_bytes(self, n_genes: int) -> int:
        """Bytes per gene in CSR form."""
        dtype = self.gene_dtype(n_genes)
        return 4 if dtype is None else dtype.itemsize

    def gathered(self, parts: Sequence[gather.SourceRows], n_rows: int, *, n_genes: int, stored: Stored) -> X:
        """A minibatch of `n_rows` rows. Rows that no part holds are empty."""
        dtype, genes = self.value_dtype(stored), self.gene_dtype(n_genes)
        sparse = any(part.genes is not None for part in parts)
        if self.dense and not (self.narrow and sparse):
            return gather.dense_rows(parts, n_rows, n_genes=n_genes, dtype=dtype, empty=self.empty)
        x = gather.csr_rows(parts, n_rows, n_genes=n_genes, dtype=dtype, genes=genes, empty=self.empty)
        if not self.dense or ascend_strictly(x.indptr, x.indices):
            return x
        # Repeated genes are rare. Their values are summed here, because the sum may not fit into the narrow dtype.
        assert self.dtype is not None
        return gather.compressed(gather.dense_rows(parts, n_rows, n_genes=n_genes, dtype=self.dtype), genes=genes)


# ---- x with transforms


@compiled
def _drop_zeros(indptr: NDArray[Any], indices: NDArray[Any], values: NDArray[Any]) -> None:
    to, first = 0, 0
    for row in range(len(indptr) - 1):
        last = indptr[row + 1]
        for i in range(first, last):
            indices[to], values[to] = indices[i], values[i]
            to += values[i] != 0
        first = last
        indptr[row + 1] = to


@compiled
def _add_repeats(indptr: NDArray[Any], indices: NDArray[Any], values: NDArray[Any]) -> bool:
    """Adds the values of a gene that occurs twice to the first one, and sets the others to zero. Returns if any did."""
    found = False
    for row in range(len(indptr) - 1):
        first = indptr[row]
        for i in range(indptr[row] + 1, indptr[row + 1]):
            if indices[i] == indices[first]:
                values[first] += values[i]
                values[i] = 0
                found = True
            else:
                first = i
    return found


def without_zeros(x: CsrArrays) -> CsrArrays:
    """x without the zeros that it stores, in memory of its own size. Uses up x."""
    n_stored = len(x.values)
    _drop_zeros(x.indptr, x.indices, x.values)
    n_left = int(x.indptr[-1])
    return x if n_left == n_stored else replace(x, indices=x.indices[:n_left].copy(), values=x.values[:n_left].copy())


@dataclass(frozen=True, kw_only=True)
class Transforming:
    """How x of one matrix is made of gathered rows. `transforms` are bound to the columns of x.

    `genes` are the columns to choose among all genes, if the rows are gathered with all of them. `by_totals` says that
    they are gathered with the chosen genes, and that the totals of whole rows are known. `empty` makes x, as far as
    that saves a copy.
    """

    transforms: Sequence[Transform]
    seed: int
    epoch: int
    dense: bool
    dtype: str
    genes: ChosenGenes | None = None
    by_totals: bool = False
    empty: gather.Empty = np.empty

    @property
    def needs_only_totals(self) -> bool:
        """Whether x of the chosen genes and the totals of whole rows are enough."""
        return self._n_first == 1 and self.transforms[0].row_totals

    @property
    def _n_first(self) -> int:
        """The number of transforms that come before the choice of genes."""
        return max((number for number, each in enumerate(self.transforms, 1) if each.whole_rows), default=0)

    @property
    def gathers_dense(self) -> bool:
        """Whether to gather dense rows."""
        return self.dense and (self.genes is None or any(each.fills_zeros for each in self.transforms[: self._n_first]))

    @property
    def gathering(self) -> Form:
        """The form in which to gather rows."""
        empty = self.empty if self.genes is None else np.empty
        return Form(dense=self.gathers_dense, dtype=self.dtype, empty=empty)

    def more_bytes(self, n_rows: int, gathered_bytes: Any) -> Any:
        """Bytes that making x takes beside so many gathered rows, at most."""
        more: Any = 0
        if self.genes is not None:
            n_bytes = n_rows * len(self.genes) * np.dtype(self.dtype).itemsize
            more = gathered_bytes + n_bytes * (1 if self.dense and not self.gathers_dense else 2)
        if not self.dense and any(transform.makes_zeros for transform in self.transforms):
            more = np.maximum(more, gathered_bytes)
        return more

    def x(self, gathered: X, rows: Rows, totals: NDArray[np.float64] | None = None) -> X:
        """x of the gathered rows, which are `rows` of the dataset and have these totals, needed `by_totals` only.

        Uses up their memory. Raises RefusedValue.
        """
        x = _summed(gathered) if isinstance(gathered, CsrArrays) else gathered
        numbered = list(enumerate(self.transforms))
        if self.by_totals:
            x = self._applied(numbered[:1], x, rows, totals)
            numbered = numbered[1:]
        if self.genes is not None:
            x = self._chosen(self._applied(numbered[: self._n_first], x, rows), rows, self.genes)
            numbered = numbered[self._n_first :]
        x = self._applied(numbered, x, rows)
        makes_zeros = any(transform.makes_zeros for transform in self.transforms)
        return without_zeros(x) if makes_zeros and isinstance(x, CsrArrays) else x

    def _applied(
        self,
        numbered: Sequence[tuple[int, Transform]],
        x: X,
        rows: Rows,
        totals: NDArray[np.float64] | None = None,
    ) -> X:
        for number, transform in numbered:
            given = RowValues.of(x, rows, seed=self.seed, epoch=self.epoch, number=number)
            given.totals = totals
            transform.apply(given)
        return x

    def _chosen(self, x: X, rows: Rows, genes: ChosenGenes) -> X:
        whole = RowValues.of(x, rows)
        starts, lengths = whole.starts[:-1], np.diff(whole.starts)
        of_all = gather.SourceRows(
            at=slice(None), genes=whole.columns, values=whole.values, starts=(starts, starts), lengths=lengths
        )
        gathered = gather.dense_rows if self.dense else gather.csr_rows
        return gathered([gather.choose(of_all, genes)], len(rows), n_genes=len(genes), dtype=whole.values.dtype.name)


def _summed(x: CsrArrays) -> CsrArrays:
    """x with the values of a gene that occurs twice in a row added up, as in dense rows. Uses up x."""
    may_repeat = not ascend_strictly(x.indptr, x.indices)
    return without_zeros(x) if may_repeat and _add_repeats(x.indptr, x.indices, x.values) else x
