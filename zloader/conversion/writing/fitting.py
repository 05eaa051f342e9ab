"""New rows in the form in which a store has its rows.

Until the metadata of an append are committed, every object still reads correctly under the old metadata. So stored
arrays keep their dtypes, and columns their kinds and categories: new values are converted to them, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.common.errors import SourceError, StoreError
from zloader.common.messages import listed
from zloader.conversion.joining.union import NOTHING, kind_of, stored_kind
from zloader.conversion.sources.join import without_zeros
from zloader.conversion.sources.windows import Advance, SourceMatrix, Window
from zloader.conversion.writing.passes import MatrixScan

_CHECKED = 1 << 17  # values checked at once; fits in a core's cache
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")
_MISSING = {"f": np.nan, "c": np.nan, "m": "NaT", "M": "NaT"}  # by dtype kind


def first_unrepresentable(values: NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """The position of the first value that `dtype` cannot hold exactly, or None if all values fit."""
    if np.can_cast(values.dtype, dtype, "safe"):
        return None
    if values.itemsize > 8:  # complex numbers, long doubles
        return 0 if len(values) else None
    for start in range(0, len(values), _CHECKED):
        some = np.ascontiguousarray(values[start : start + _CHECKED])
        with np.errstate(invalid="ignore", over="ignore"):
            cast = some.astype(dtype)
            round_trip = cast.astype(some.dtype)
        bits = f"u{some.itemsize}"
        same = round_trip.view(bits) == some.view(bits)
        if some.dtype.kind in "iu" and dtype.kind in "iu":
            same &= (cast < 0) == (some < 0)  # -1 survives a round trip through 2**64 - 1
        if not same.all():
            return start + int(np.argmin(same))
    return None


def new_elements(node: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    """The elements to append to each array of a stored obs column, so that `column` follows it.

    `node` is the column's zarr array or group. The keys are the arrays' paths below it ("" for the node itself). New
    categories follow the stored ones. Raises SourceError without the column's name, and StoreError.
    """
    encoding = node.attrs.get("encoding-type")
    if encoding == "categorical":
        return _categorical(node, column)
    kind = stored_kind(node)
    if kind is None:
        raise SourceError(f"it is stored as {encoding}, which cannot be appended to")
    missing = column.isna().to_numpy(bool)
    found = NOTHING if missing.all() else kind_of(column)
    if found not in (kind, NOTHING):
        raise SourceError(f"it holds {found}, but the store's column holds {kind}")
    if encoding in _NULLABLE:
        return {"values": _values(node["values"], column, missing), "mask": missing}
    if missing.any() and node.dtype.kind not in _MISSING:
        raise SourceError(
            f"{int(missing.sum())} values are missing, but the store's {node.dtype} has no missing values"
        )
    return {"": _values(node, column, missing)}


def _values(array: zarr.Array[Any], column: pd.Series, missing: NDArray[np.bool_]) -> NDArray[Any]:
    """The values in the dtype of a stored array; missing values become NaN, NaT, 0 or empty text."""
    dtype = np.dtype(array.dtype)
    present = column[~missing]
    if isinstance(present.dtype, pd.CategoricalDtype):
        present = present.astype(present.cat.categories.dtype)
    if dtype.kind not in "biufcmM":  # text
        out = np.full(len(column), "", object)
        out[~missing] = present.to_numpy(object)
        return out
    found = present.to_numpy(getattr(present.dtype, "numpy_dtype", None) or present.infer_objects().dtype)
    bad = first_unrepresentable(found, dtype)
    if bad is not None:
        raise SourceError(f"it holds {found[bad]} ({found.dtype}), which the store's {dtype} cannot hold")
    out = np.full(len(column), _MISSING.get(dtype.kind, 0), dtype)
    out[~missing] = found.astype(dtype)
    return out


def _categorical(group: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    ordered = bool(group.attrs["ordered"])
    if not isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype("category")
    new = column.cat.categories
    old = _categories(group)
    added = new[~new.isin(old)]
    new_codes = old.append(added).get_indexer(new)
    disordered = ordered != column.cat.ordered or len(added) or (np.diff(new_codes) < 0).any()
    if (ordered or column.cat.ordered) and disordered:
        raise SourceError(
            f"its categories are {_order(new, column.cat.ordered)}, but in the store {_order(old, ordered)}: ordered "
            "categories must all be in the store, in the same order"
        )
    parts = new_elements(group["categories"], pd.Series(added))
    dtype = np.dtype(group["codes"].dtype)
    if len(old) + len(added) > np.iinfo(dtype).max:
        raise SourceError(
            f"its {len(added)} new categories make {len(old) + len(added)}, but the store has room for "
            f"{np.iinfo(dtype).max} ({dtype} codes)"
        )
    codes = np.append(new_codes, -1)[np.asarray(column.cat.codes)].astype(dtype)  # code -1 (missing) selects the last
    return {"codes": codes} | {f"categories/{part}".rstrip("/"): parts[part] for part in parts}


def _categories(group: Any) -> pd.Index:
    try:
        return pd.Index(ad.io.read_elem(group["categories"]))
    except (ValueError, OSError, RuntimeError) as error:
        raise StoreError(f"cannot read {group.path}/categories of the store: {error}") from error


def _order(categories: pd.Index, ordered: bool) -> str:
    return f"{listed(categories)} ({'ordered' if ordered else 'not ordered'})"


_MAX_OBJECTS = 10_000  # per array; 100 million cells take 2,200


class FittedMatrix(SourceMatrix):
    """A source matrix in the encoding and dtype of a stored matrix, which is `stored`: an array or a CSR group.

    Dense rows become sparse for a CSR matrix. Raises SourceError if the width or encoding does not fit, and for the
    first value that the stored dtype cannot hold exactly.
    """

    def __init__(self, inner: SourceMatrix, stored: Any) -> None:
        super().__init__(inner.name, n_rows=inner.n_rows, n_genes=inner.n_genes)
        is_dense = isinstance(stored, zarr.Array)
        width = stored.shape[1] if is_dense else stored.attrs["shape"][1]
        if inner.n_genes != width:
            raise SourceError(f"{self.name} has {inner.n_genes} columns, but {width} in the store")
        if is_dense and inner.encoding != "dense":
            raise SourceError(f"{self.name} is sparse, but dense in the store: convert all sources together")
        self._inner = inner
        self.encoding = "dense" if is_dense else "csr"
        self.dtype = np.dtype((stored if is_dense else stored["data"]).dtype)
        self.n_stored, self.genes_dtype, self.indptr_dtype = inner.n_stored, inner.genes_dtype, inner.indptr_dtype

    @property
    def n_reads(self) -> int | None:
        return self._inner.n_reads

    def first_pass(self, advance: Advance) -> Iterator[Window]:
        return self._fitted(self._inner.first_pass(advance), 0)

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        return self._fitted(self._inner.windows(first_row), first_row)

    def _fitted(self, windows: Iterator[Window], row: int) -> Iterator[Window]:
        for window in windows:
            if self.encoding == "csr" and self._inner.encoding == "dense":
                window = without_zeros(window, self.n_genes)
            bad = first_unrepresentable(window.values, self.dtype)
            if bad is not None:
                within = int(np.searchsorted(np.cumsum(window.lengths), bad, side="right"))
                at = row + within if window.positions is None else window.positions[within]
                raise SourceError(
                    f"{self.name} holds {window.values[bad]} ({window.values.dtype}) in row {at} of the new rows, but "
                    f"the store's {self.dtype} cannot hold it: convert all sources together, or convert the store "
                    "again with options=zl.ConvertOptions(preserve_dtype=True) (--preserve-dtype) before appending"
                )
            row += len(window.lengths)
            yield dataclasses.replace(window, values=window.values.astype(self.dtype, copy=False))

    def close(self) -> None:
        self._inner.close()


def check_capacity(stored: Any, scan: MatrixScan, n_rows: int) -> None:
    """Raises StoreError if the new rows exceed the capacity of a matrix's grid or of its indptr dtype."""
    if isinstance(stored, zarr.Array):
        check_object_count(stored, n_rows)
        return
    for name, length in (("data", scan.n_values), ("indices", scan.n_values), ("indptr", n_rows)):
        check_object_count(stored[name], length)
    values, most = stored["data"].shape[0] + scan.n_values, np.iinfo(stored["indptr"].dtype).max
    if values > most:
        raise StoreError(
            f"{stored.path} would have {values} values, but its indptr ({stored['indptr'].dtype}) can count only to "
            f"{most}: convert all sources together"
        )


def check_object_count(array: zarr.Array[Any], n_new: int) -> None:
    """Raises StoreError if an array with `n_new` more items would consist of more than 10,000 objects."""
    length, per_object = array.shape[0] + n_new, (array.shards or array.chunks)[0]
    n_objects = -(-length // per_object)
    if n_objects > _MAX_OBJECTS:
        raise StoreError(
            f"{array.path} would be split into {n_objects} objects, because the store was laid out for "
            f"{array.shape[0]} items, not {length}: convert all sources together"
        )
