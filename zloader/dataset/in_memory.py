"""Rows of a dataset in the classes of other libraries: pandas and SciPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloader.common.deferred import pd
from zloader.common.records import CsrArrays

if TYPE_CHECKING:
    import scipy.sparse


def used_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """A shallow copy of a frame of obs or var without the categories that no row has."""
    frame = frame.copy(deep=False)
    for name, column in frame.select_dtypes("category").items():
        frame[name] = column.cat.remove_unused_categories()
    return frame


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The rows as a SciPy CSR matrix, without a copy."""
    # Imported here because minibatches of tensors do not need it.
    import scipy.sparse

    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))
