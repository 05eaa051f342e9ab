"""The forms in which x is gathered: the dtypes of its arrays, and whether it is dense. Pure.

A minibatch that is converted elsewhere, on a device, is gathered as narrow as it can be: its genes in the smallest
unsigned dtype, and its values in the stored dtype if converting them later cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zloader.common.records import X
from zloader.reading import gather, half_floats
from zloader.reading.gene_loops import ascend_strictly

Stored = Sequence[np.dtype[Any]]  # the dtypes of the values of a matrix in each store


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

        In the narrow form, whole numbers of at most 16 bits stay as they are stored if x has a wider dtype, because
        every dtype that is wider holds them exactly: converting them later needs no rounding and no limits.
        """
        united = np.result_type(*stored)
        if self.dtype is None:
            return united.name
        small = united.kind in "bui" and united.itemsize <= 2
        wanted = 2 if self.dtype in half_floats.HALVES else np.dtype(self.dtype).itemsize
        return united.name if self.narrow and small and united.itemsize < wanted else self.dtype

    def value_bytes(self, stored: Stored) -> int:
        """Bytes per value while x is gathered."""
        return half_floats.value_bytes(self.value_dtype(stored), stored)

    def gene_dtype(self, n_genes: int) -> np.dtype[Any] | None:
        """The dtype of gathered genes; None for the usual one of CSR."""
        return np.min_scalar_type(max(0, n_genes - 1)) if self.narrow else None

    def gene_bytes(self, n_genes: int) -> int:
        """Bytes per gene in CSR form."""
        dtype = self.gene_dtype(n_genes)
        return 4 if dtype is None else dtype.itemsize

    def gathered(self, parts: Sequence[gather.StoreRows], n_rows: int, *, n_genes: int, stored: Stored) -> X:
        """A minibatch of `n_rows` rows. `parts` together hold all its rows. Raises UnfitValue."""
        dtype, genes = self.value_dtype(stored), self.gene_dtype(n_genes)
        sparse = any(part.genes is not None for part in parts)
        if self.dense and not (self.narrow and sparse):
            return gather.dense_rows(parts, n_rows, n_genes=n_genes, dtype=dtype)
        x = gather.csr_rows(parts, n_rows, n_genes=n_genes, dtype=dtype, genes=genes, empty=self.empty)
        if not self.dense or ascend_strictly(x.indptr, x.indices):
            return x
        # Repeated genes are rare. Their values are summed here, because the sum may not fit into the narrow dtype.
        assert self.dtype is not None
        return gather.compressed(gather.dense_rows(parts, n_rows, n_genes=n_genes, dtype=self.dtype), genes=genes)
