"""Rows of a dataset in the classes of other libraries: pandas, SciPy and anndata."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zloader.common.deferred import pd
from zloader.common.records import CsrArrays, X
from zloader.dataset.elements import load_anndata

if TYPE_CHECKING:
    import anndata as ad
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


def as_anndata(x: X | None, *, obs: pd.DataFrame, layers: Mapping[str, X] | None = None, **parts: Any) -> ad.AnnData:
    """An AnnData of rows, which may have the same name if rows are repeated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Observation names are not unique")
        return load_anndata().AnnData(
            X=_in_anndata(x),
            obs=obs,
            layers={name: _in_anndata(values) for name, values in (layers or {}).items()},
            **parts,
        )


def _in_anndata(x: X | None) -> Any:
    return as_scipy(x) if isinstance(x, CsrArrays) else x
