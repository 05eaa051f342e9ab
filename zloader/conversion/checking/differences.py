"""Finds the differences between two elements read by anndata. Equal bits, NaNs and missing values count as equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.records import Rows

_TEXT = "OUST"  # kinds of arrays that hold text
_SHOWN = 60  # characters of a value


def bits_differ(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Where two arrays of equal dtype and shape differ. -0.0 differs from 0.0; NaN equals NaN."""
    if one.dtype.names and one.size:
        fields = [bits_differ(one[name], other[name]) for name in one.dtype.names]
        differing: NDArray[np.bool_] = np.logical_or.reduce(
            [field.reshape(*one.shape, -1).any(axis=-1) for field in fields]
        )
        return differing
    if one.dtype.kind in "fmM" and one.dtype.itemsize <= 8:
        bits = f"u{one.dtype.itemsize}"
        differ = np.asarray(one, order="C").view(bits) != np.asarray(other, order="C").view(bits)
    else:
        differ = one != other
    differ = np.asarray(differ, bool)
    if one.dtype.kind in "fc" and differ.any():
        differ &= ~(np.isnan(one) & np.isnan(other))
    return differ


def shown(value: Any) -> str:
    """A value for a message; `nothing` for a missing value."""
    if value is None or value is pd.NA:
        return "nothing"
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def in_both(found: Any, wanted: Any) -> str:
    """A stored value and the value of the sources, for a message."""
    return f"{shown(found)} in the store, but {shown(wanted)} in the sources"


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """The values of a sparse matrix by `keys`, which are row * n_columns + column, ascending and unique."""

    keys: Rows
    values: NDArray[Any]

    @classmethod
    def of(cls, lengths: Rows, columns: NDArray[Any], values: NDArray[Any], n_columns: int) -> Sparse:
        """Rows with `lengths` values, of which `columns` are the columns, in any order. Repeated ones are added up."""
        keys = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths) * n_columns + columns
        if (keys[1:] > keys[:-1]).all():
            return cls(keys=keys, values=values)
        order = np.argsort(keys, kind="stable")
        keys, first = np.unique(keys[order], return_index=True)
        return cls(keys=keys, values=np.add.reduceat(values[order], first, dtype=values.dtype))

    def differing(self, other: Sparse) -> Rows:
        """The ascending keys of values that differ or that only one matrix has."""
        both, here, there = np.intersect1d(self.keys, other.keys, assume_unique=True, return_indices=True)
        changed = both[bits_differ(self.values[here], other.values[there])]
        return np.sort(np.concatenate([changed, np.setxor1d(self.keys, other.keys, assume_unique=True)]))

    def at(self, key: int) -> Any:
        """The value at a key, or None."""
        at = int(np.searchsorted(self.keys, key))
        return self.values[at] if at < len(self.keys) and self.keys[at] == key else None


def element_differences(path: str, wanted: Any, found: Any) -> Iterator[tuple[str, str]]:
    """The path and the first difference of each part of an element that differs from `wanted`."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        yield from name_differences(path, list(wanted), list(found), in_order=False)
        for key in wanted:
            if key in found:
                yield from element_differences(f"{path}/{key}", wanted[key], found[key])
    elif isinstance(wanted, pd.DataFrame) and isinstance(found, pd.DataFrame):
        yield from frame_differences(path, wanted, found)
    else:
        what = _difference(wanted, found)
        if what is not None:
            yield path, what


def name_differences(path: str, wanted: list[str], found: list[str], *, in_order: bool) -> Iterator[tuple[str, str]]:
    """The names that only one of two lists has, and with `in_order` whether their order differs."""
    for name in wanted:
        if name not in found:
            yield f"{path}/{name}", "is in the sources, but not in the store"
    for name in found:
        if name not in wanted:
            yield f"{path}/{name}", "is in the store, but not in the sources"
    if in_order and wanted != found and sorted(wanted) == sorted(found):
        yield path, f"has its columns in a different order: {', '.join(found)} instead of {', '.join(wanted)}"


def frame_differences(
    path: str, wanted: pd.DataFrame, found: pd.DataFrame, axis: str = "entry"
) -> Iterator[tuple[str, str]]:
    """The path and the first difference of the index and of each column of a frame. `axis` names an entry."""
    what = column_difference(wanted.index, found.index, axis)
    if what is not None:
        yield path, f"names: {what}"
    yield from name_differences(path, list(wanted.columns), list(found.columns), in_order=True)
    for name in wanted.columns:
        if name in found.columns and len(wanted) == len(found):
            what = column_difference(wanted[name], found[name], axis)
            if what is not None:
                yield f"{path}/{name}", what


def _difference(wanted: Any, found: Any) -> str | None:
    if scipy.sparse.issparse(wanted) and scipy.sparse.issparse(found):
        return _sparse_difference(wanted, found)
    arrays = (pd.api.extensions.ExtensionArray, np.ndarray)
    if isinstance(wanted, arrays[0]) and isinstance(found, arrays):
        return column_difference(wanted, found, "entry")
    if wanted is None or found is None:
        return None if wanted is found else in_both(found, wanted)
    awkward = sys.modules.get("awkward")  # anndata has imported it if these are its arrays
    if awkward is not None and isinstance(wanted, awkward.Array) and isinstance(found, awkward.Array):
        return None if awkward.array_equal(wanted, found, equal_nan=True) else "differs from the sources"
    if not all(isinstance(value, np.ndarray | np.generic | str | bool | int | float) for value in (wanted, found)):
        return (
            f"is a {type(found).__name__} in the store, but a {type(wanted).__name__} in the sources, so it was not "
            "compared"
        )
    return _array_difference(np.asarray(wanted), np.asarray(found))


def _array_difference(wanted: NDArray[Any], found: NDArray[Any]) -> str | None:
    if wanted.dtype.kind in _TEXT and found.dtype.kind in _TEXT:
        wanted, found = wanted.astype(object), found.astype(object)
    for part in ("dtype", "shape"):
        if getattr(wanted, part) != getattr(found, part):
            return f"has {part} {getattr(found, part)}, but {getattr(wanted, part)} in the sources"
    differ = bits_differ(wanted, found)
    if not differ.any():
        return None
    first = tuple(np.argwhere(differ)[0].tolist())
    at = f"at {', '.join(map(str, first))}: " if first else ""
    return f"{at}{in_both(found[first], wanted[first])}; {np.count_nonzero(differ)} values differ"


def _sparse_difference(wanted: Any, found: Any) -> str | None:
    for part in ("format", "dtype", "shape"):
        if getattr(wanted, part) != getattr(found, part):
            return f"has {part} {getattr(found, part)}, but {getattr(wanted, part)} in the sources"
    n_columns = wanted.shape[1]
    one, other = (_by_key(matrix) for matrix in (wanted, found))
    keys = one.differing(other)
    if not len(keys):
        return None
    row, column = divmod(int(keys[0]), n_columns)
    return f"at {row}, {column}: {in_both(other.at(keys[0]), one.at(keys[0]))}; {len(keys)} values differ"


def _by_key(matrix: Any) -> Sparse:
    rows = matrix.tocsr(copy=True)
    rows.sum_duplicates()
    return Sparse.of(np.diff(rows.indptr), rows.indices, rows.data, matrix.shape[1])


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column as plain values. Values where `missing` is True have no meaning."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]
    categories: tuple[Any, ...] = ()
    ordered: bool = False

    @classmethod
    def of(cls, column: Any) -> _Column:
        if isinstance(column, pd.Series | pd.Index):
            column = column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array
        if isinstance(column, pd.Categorical):
            return cls._of_categorical(column)
        missing = np.zeros(len(column), bool) if _is_plain(column) else np.asarray(pd.isna(column), bool)
        if isinstance(column, pd.arrays.BooleanArray | pd.arrays.IntegerArray | pd.arrays.FloatingArray):
            values = column.to_numpy(dtype=column.dtype.numpy_dtype, na_value=0)
            return cls(kind=str(column.dtype), values=values, missing=missing)
        if isinstance(column.dtype, pd.StringDtype):
            return cls(kind="text", values=column.to_numpy(dtype=object, na_value=""), missing=missing)
        values = np.asarray(column)
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        if values.dtype.kind in _TEXT:
            values = values.astype(object)
            values[missing] = ""
            return cls(kind="text", values=values, missing=missing)
        return cls(kind=str(values.dtype), values=values, missing=missing)

    @classmethod
    def _of_categorical(cls, column: pd.Categorical) -> _Column:
        labels = cls.of(column.categories)
        missing = column.codes < 0
        padded = np.append(labels.values, labels.values[:1]) if len(labels.values) else np.zeros(1, object)
        return cls(
            kind=f"categorical ({labels.kind if len(labels.values) else 'empty'})",
            values=padded[column.codes],
            missing=missing,
            categories=tuple(labels.values.tolist()),
            ordered=bool(column.ordered),
        )


def _is_plain(column: Any) -> bool:
    """Whether no entry can be missing. NaN counts as a value, equal to itself."""
    return isinstance(column, np.ndarray) and column.dtype.kind not in _TEXT


def column_difference(wanted: Any, found: Any, axis: str) -> str | None:
    """The first difference between two columns, compared by labels, not codes. `axis` names an entry: row or gene."""
    one, other = _Column.of(wanted), _Column.of(found)
    if len(one.values) != len(other.values):
        return f"has {len(other.values)} entries, but {len(one.values)} in the sources"
    if one.kind != other.kind:
        return f"is {other.kind} in the store, but {one.kind} in the sources"
    differ = (bits_differ(one.values, other.values) & ~one.missing) | (one.missing != other.missing)
    if differ.any():
        first = int(differ.argmax())
        in_store, in_sources = (None if column.missing[first] else column.values[first] for column in (other, one))
        return f"{axis} {first}: {in_both(in_store, in_sources)}; {np.count_nonzero(differ)} differ"
    if (one.categories, one.ordered) != (other.categories, other.ordered):
        return "the categories or their order differ from the sources, but all labels are equal"
    return None
