"""obs columns as numbers: codes and categories, or plain values; and which obsm arrays are fit for tensors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import FormatError, OptionError, ZloaderError
from zloader.common.records import Rows


@dataclass(frozen=True, kw_only=True)
class ObsColumn:
    """One obs column: a value for every row, and the labels that the values are codes of (None for plain numbers)."""

    values: NDArray[Any]
    categories: pd.Index | None
    from_strings: bool = False

    @property
    def minibatch_dtype(self) -> np.dtype[Any]:
        """int64 for codes (what torch indexes and computes losses with), else the stored dtype."""
        return np.dtype(np.int64) if self.categories is not None else self.values.dtype

    def taken(self, rows: Rows) -> NDArray[Any]:
        """The values of some rows, as minibatches have them."""
        return self.values[rows].astype(self.minibatch_dtype, copy=False)


Column = Callable[[str], ObsColumn]  # an obs column by its name, such as `Dataset.obs_column`


def as_numbers(name: str, column: Any) -> ObsColumn:
    """A column as anndata reads it, as numbers; strings become codes of their sorted labels.

    Raises OptionError for what no tensor can hold, such as dates.
    """
    if isinstance(column, pd.Categorical):
        return ObsColumn(values=np.asarray(column.codes), categories=as_labels(column.categories))
    values = np.asarray(column)
    if isinstance(column, pd.api.extensions.ExtensionArray) and pd.api.types.is_numeric_dtype(column.dtype):
        return ObsColumn(values=_nullable(name, column), categories=None)
    if values.dtype.kind in "biuf":
        return ObsColumn(values=native(values), categories=None)
    if values.dtype.kind in "OUST":
        codes, categories = pd.factorize(pd.Series(values, dtype="string"), sort=True)
        return ObsColumn(values=codes, categories=pd.Index(categories, dtype=object), from_strings=True)
    raise OptionError(f"obs column {name!r} holds {values.dtype}: only numbers, categories and strings become tensors")


def as_names(index: Any) -> pd.Index:
    """The index of a frame as anndata reads it, as an Index; strings have the dtype that pandas gives strings."""
    return pd.Index(np.asarray(index, object) if isinstance(index.dtype, pd.StringDtype) else index)


def as_labels(categories: pd.Index) -> pd.Index:
    """Categories as plain Python strings (dtype object) or NumPy numbers, the same in every version of pandas."""
    if isinstance(categories.dtype, pd.StringDtype):
        return pd.Index(categories.to_numpy(object), dtype=object)
    return pd.Index(categories.to_numpy(getattr(categories.dtype, "numpy_dtype", None)))


def native(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in this machine's byte order, as torch needs them."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _nullable(name: str, column: Any) -> NDArray[Any]:
    """A pandas nullable column as plain numbers; floats with NaN where there is a missing value."""
    dtype, missing = column.dtype.numpy_dtype, np.asarray(column.isna())
    if not missing.any():
        return np.asarray(column.to_numpy(dtype=dtype))
    large = _beyond_float64(column[~missing].to_numpy(dtype=dtype))
    if large is not None:
        raise OptionError(
            f"obs column {name!r} holds {large} and missing values: no dtype of a tensor holds both. Fill in what is "
            "missing, or leave the column out"
        )
    return np.asarray(column.to_numpy(dtype="float64", na_value=np.nan))


def _beyond_float64(values: NDArray[Any]) -> np.integer | None:
    """One of the integers up to which float64 does not hold all; None where there is none."""
    if values.dtype.kind not in "iu" or values.size == 0:
        return None
    most = 2 ** np.finfo(np.float64).nmant * 2
    return next((value for value in (values.min(), values.max()) if not -most <= int(value) <= most), None)


def require_exact(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Raises FormatError where the dtype that the arrays of all stores promote to rounds one of their numbers."""
    common = np.result_type(*arrays)
    for array in arrays if common.kind == "f" else ():
        if (large := _beyond_float64(array)) is not None:
            dtypes = ", ".join(sorted({str(each.dtype) for each in arrays}))
            raise FormatError(
                f"{name} holds {large} in one of the stores, which are of {dtypes}: together they would be {common}, "
                "which does not hold it. Leave it out, or write these stores again with it alike in all"
            )


def joined(name: str, columns: Sequence[ObsColumn]) -> ObsColumn:
    """The same column of several stores as one column over all their rows.

    Codes are over all categories of all stores, in order of first appearance; over sorted labels where all were
    strings. Numbers have the dtype that all promote to. Raises FormatError where that rounds one.
    """
    if len(columns) == 1:
        return columns[0]
    from_strings = all(column.from_strings for column in columns)
    labels = list(dict.fromkeys(label for column in columns for label in _labels(column)))
    if from_strings:
        labels.sort()
    if columns[0].categories is None:
        return ObsColumn(values=_end_to_end(name, [column.values for column in columns]), categories=None)
    code_of = {label: code for code, label in enumerate(labels)}
    dtype = np.min_scalar_type(-max(1, len(labels)))
    recoded = []
    for column in columns:
        codes = np.array([*(code_of[label] for label in _labels(column)), -1], dtype)  # -1, none, is the last
        recoded.append(codes[column.values])
    return ObsColumn(values=np.concatenate(recoded), categories=as_labels(pd.Index(labels)), from_strings=from_strings)


def _end_to_end(name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    require_exact(f"obs column {name!r}", arrays)
    return np.concatenate(arrays)


def _labels(column: ObsColumn) -> Sequence[Any]:
    return [] if column.categories is None else column.categories.tolist()


def concatenated(name: str, columns: Sequence[Any]) -> Any:
    """The same column of several stores, as anndata reads it, over all their rows; categories as `joined` has them."""
    if len(columns) == 1:
        return columns[0]
    if any(isinstance(column, pd.Categorical) for column in columns):
        one = joined(name, [as_numbers(name, column) for column in columns])
        ordered = all(getattr(column, "ordered", False) and column.dtype == columns[0].dtype for column in columns)
        return pd.Categorical.from_codes(one.values, _labels(one), ordered=ordered)
    if all(isinstance(column, np.ndarray) for column in columns):
        numeric = all(column.dtype.kind in "biuf" for column in columns)
        return _end_to_end(name, columns) if numeric else np.concatenate(columns)
    filled = [pd.Series(column) for column in columns if len(column)]  # pandas is about to change what no rows weigh
    return pd.concat(filled).array if filled else columns[0]


def require_alike(name: str, columns: Sequence[Any], urls: Sequence[str]) -> None:
    """Raises FormatError for a column that holds numbers in one store and labels in another."""
    numeric = [bool(pd.api.types.is_numeric_dtype(column.dtype)) for column in columns]
    if len(set(numeric)) > 1:
        number, label = numeric.index(True), numeric.index(False)
        raise FormatError(
            f"obs column {name!r} holds numbers in {urls[number]} and {_kind(columns[label])} in {urls[label]}: "
            "leave it out, or write these stores again with it alike in all"
        )


def _kind(column: Any) -> str:
    return "categories" if isinstance(column, pd.Categorical) else "strings"


def unfit_obsm(name: str, nodes: Sequence[Any], n_rows: Sequence[int], urls: Sequence[str]) -> ZloaderError | None:
    """Why what the stores have as one obsm element, as zarr nodes, makes no tensor of rows x dims; None if it does."""
    for node, rows, url in zip(nodes, n_rows, urls, strict=True):
        if not hasattr(node, "shape") or node.dtype.kind not in "biuf":
            kind = node.attrs.get("encoding-type", "group") if not hasattr(node, "shape") else f"array of {node.dtype}"
            return OptionError(
                f"obsm {name!r} is a {kind} in {url}: only arrays of numbers become tensors. Leave it out, or write "
                "it as a dense array"
            )
        if not node.shape or node.shape[0] != rows:
            return FormatError(f"obsm {name!r} of {url} has shape {node.shape} for {rows} rows: the store is damaged")
        if node.shape[1:] != nodes[0].shape[1:]:
            return FormatError(
                f"obsm {name!r} has {_dims(nodes[0])} dims in {urls[0]}, but {_dims(node)} in {url}: leave it out, or "
                "write these stores again with it alike in all"
            )
    return None


def _dims(node: Any) -> str:
    return " x ".join(map(str, node.shape[1:]))
