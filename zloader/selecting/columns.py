"""Turns obs columns into numbers (codes with categories, plain values, or dates) and checks obsm arrays. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import FormatError, OptionError, ZloaderError
from zloader.common.locks import cached_property
from zloader.common.machine import require_memory
from zloader.common.records import Rows, windows_of


@dataclass(frozen=True, kw_only=True)
class ObsColumn:
    """One obs column: a value per row. If `coded` is not None, the values are codes of these labels (-1: none).

    Dates and durations are datetime64 and timedelta64.
    """

    values: NDArray[Any]
    coded: pd.Index | NDArray[Any] | None = None
    from_strings: bool = False

    @cached_property
    def categories(self) -> pd.Index | None:
        """The labels of the codes, or None. Made when it is first asked for, because it takes pandas."""
        return self.coded if self.coded is None else pd.Index(self.coded, dtype=self.coded.dtype)

    @property
    def labels(self) -> pd.Index | np.dtype[Any]:
        """The meaning of the values: the labels in the order of their codes, or else the dtype of the values."""
        return self.values.dtype if self.categories is None else self.categories

    @property
    def minibatch_dtype(self) -> np.dtype[Any]:
        """int64 for codes, as torch needs for indexing and losses, and for dates; otherwise the stored dtype."""
        coded = self.coded is not None or is_time(self.values.dtype)
        return np.dtype(np.int64) if coded else self.values.dtype

    def taken(self, rows: Rows) -> NDArray[Any]:
        """The values of the given rows in the dtype of minibatches. NaT is the lowest int64."""
        return self.values[rows].astype(self.minibatch_dtype, copy=False)

    def labels_of(self, rows: Rows) -> NDArray[Any]:
        """The labels of the given rows (dtype object; NaN where one is missing), or their numbers or dates."""
        values = self.values[rows]
        if self.categories is None:
            return values
        return np.asarray(self._labels[values])

    @cached_property
    def _labels(self) -> NDArray[np.object_]:
        """The label of each code, and at the end that of -1."""
        assert self.categories is not None
        return np.append(self.categories.to_numpy(object), np.nan)

    def classes(self, name: str) -> tuple[NDArray[np.integer], int]:
        """The number of the class of each row, -1 for a missing value, and the number of classes.

        Classes are labels, or the distinct numbers or dates. Raises OptionError for numbers that are not whole; the
        message calls the column `name`.
        """
        if self.categories is not None:
            return self.values, len(self.categories)
        numbers = self.values.view(np.int64) if is_time(self.values.dtype) else self.values
        # Integers and booleans with missing values arrive as floats with NaN; factorize gives NaN the code -1.
        if numbers.dtype.kind not in "biu" and not (np.isnan(numbers) | (np.trunc(numbers) == numbers)).all():
            raise OptionError(
                f"{name} holds {numbers.dtype}: choose a column of labels, whole numbers, booleans or dates"
            )
        require_memory(16 * len(numbers), f"numbering the values of {name}", "store it as a column of categories")
        codes, distinct = pd.factorize(numbers, sort=True)
        if is_time(self.values.dtype) and len(distinct) and np.isnat(distinct[:1].view(self.values.dtype))[0]:
            return codes - 1, len(distinct) - 1  # NaT is the lowest number
        return codes, len(distinct)


NUMBERS, STRINGS = "biuf", "OUST"  # kinds of NumPy's dtypes
_KINDS = {
    **dict.fromkeys(NUMBERS, "numbers"),
    **dict.fromkeys(STRINGS, "strings"),
    "M": "dates",
    "m": "durations",
    "c": "complex numbers",
    "categorical": "categories",
    "nullable-integer": "numbers",
    "nullable-boolean": "numbers",
    "nullable-string-array": "strings",
}  # by the kind of dtype, or the encoding of a group
_USABLE = {*_KINDS.values()} - {"complex numbers"}
Column = Callable[[str], ObsColumn]  # looks up an obs column by name, like `Dataset.obs_column`


def is_time(dtype: np.dtype[Any]) -> bool:
    """Whether the values are dates or durations."""
    return dtype.kind in "mM"


def as_numbers(name: str, column: Any) -> ObsColumn:
    """Converts a column as read by anndata to numbers. Strings become codes of their sorted labels.

    Raises OptionError for values that a tensor cannot hold, such as complex numbers.
    """
    if isinstance(column, pd.Categorical):
        return ObsColumn(values=np.asarray(column.codes), coded=as_labels(column.categories))
    values = np.asarray(column)
    if isinstance(column, pd.api.extensions.ExtensionArray) and pd.api.types.is_numeric_dtype(column.dtype):
        return ObsColumn(values=_nullable(name, column))
    if values.dtype.kind in NUMBERS or is_time(values.dtype):
        return ObsColumn(values=native(values))
    if values.dtype.kind in STRINGS:
        strings = StringCoder(len(values))
        strings.add(values)
        return of_strings(strings)
    raise _unfit(name, _KINDS.get(values.dtype.kind, str(values.dtype)))


def of_strings(strings: StringCoder) -> ObsColumn:
    """A column of strings, after all of them were added."""
    codes, labels = strings.sorted_codes()
    return ObsColumn(values=codes, coded=labels, from_strings=True)


def _unfit(name: str, kind: str, where: str = "") -> OptionError:
    return OptionError(
        f"obs column {name!r} holds {kind}{where}: only numbers, categories, strings and dates become tensors. Leave "
        "it out"
    )


def as_names(index: Any) -> pd.Index:
    """Converts the index of a frame as read by anndata to an Index. Strings get the default string dtype of pandas."""
    if isinstance(index, np.ndarray) and index.dtype.kind == "S":
        index = np.char.decode(index, "utf-8", "replace").astype(object)
    return pd.Index(np.asarray(index, object) if isinstance(index.dtype, pd.StringDtype) else index)


def as_labels(categories: pd.Index) -> pd.Index:
    """Categories as Python strings (dtype object) or NumPy numbers, in the same form with every pandas version."""
    if isinstance(categories.dtype, pd.StringDtype):
        return pd.Index(categories.to_numpy(object), dtype=object)
    return pd.Index(categories.to_numpy(getattr(categories.dtype, "numpy_dtype", None)))


def plain_labels(stored: Any) -> NDArray[Any] | None:
    """Distinct strings or integers as the array that `as_labels` has of them; None for any other categories."""
    if not isinstance(stored, np.ndarray) or stored.ndim != 1 or stored.dtype.kind not in "OTUiu":
        return None
    labels = native(stored) if stored.dtype.kind in "iu" else stored.astype(object)
    listed = labels.tolist()
    known = all(type(label) is (str if labels.dtype == object else int) for label in listed)
    return labels if known and len(set(listed)) == len(listed) else None


def labels_as(labels: Sequence[Any], dtype: str) -> pd.Index | NDArray[Any]:
    """Labels that were listed, with the dtype that they had."""
    return np.array(labels, dtype) if dtype == "object" or dtype in np.sctypeDict else pd.Index(labels, dtype=dtype)


def native(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in native byte order, as torch requires."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _nullable(name: str, column: Any) -> NDArray[Any]:
    """A pandas nullable column as plain numbers; as floats with NaN if values are missing."""
    dtype, missing = column.dtype.numpy_dtype, np.asarray(column.isna())
    if not missing.any():
        return np.asarray(column.to_numpy(dtype=dtype))
    large = beyond_float64(column[~missing].to_numpy(dtype=dtype))
    if large is not None:
        raise OptionError(
            f"obs column {name!r} holds {large} and missing values: no dtype of a tensor holds both. Fill in the "
            "missing values, or leave the column out"
        )
    return np.asarray(column.to_numpy(dtype="float64", na_value=np.nan))


def beyond_float64(values: NDArray[Any]) -> np.integer | None:
    """An integer outside the range in which float64 is exact, or None."""
    if values.dtype.kind not in "iu" or values.size == 0:
        return None
    limit = 2 ** np.finfo(np.float64).nmant * 2
    return next((value for value in (values.min(), values.max()) if not -limit <= int(value) <= limit), None)


def common_integers(arrays: Sequence[NDArray[Any]]) -> np.dtype[Any] | None:
    """The dtype that holds the integers of all arrays, some of which a float would round. None if there is none."""
    common = np.result_type(*arrays)
    having = [array for array in arrays if array.size]
    low, high = min(int(array.min()) for array in having), max(int(array.max()) for array in having)
    if common.kind == "f":
        common = np.dtype(np.uint64 if low >= 0 else np.int64)
    return common if np.iinfo(common).min <= low and high <= np.iinfo(common).max else None


def require_exact(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Raises FormatError if the common dtype of the arrays of all stores would change one of their values."""
    common = np.result_type(*arrays)
    for array in arrays:
        if (changed := _changed(array, common)) is not None:
            dtypes = ", ".join(sorted({str(each.dtype) for each in arrays}))
            raise FormatError(
                f"{name} holds {changed} in one of the stores, whose dtypes are {dtypes}: the common dtype {common} "
                "cannot represent it. Leave it out, or write these stores again with the same dtype"
            )


def _changed(array: NDArray[Any], common: np.dtype[Any]) -> Any:
    """A value that `common` cannot represent, or None."""
    if common.kind == "f":
        return beyond_float64(array)
    if not is_time(common) or array.dtype == common:
        return None
    bounds = (np.fmin.reduce(array), np.fmax.reduce(array)) if array.size else ()
    return next((time for time in bounds if not np.isnat(time) and as_time(time, common) is None), None)


def as_time(time: Any, dtype: np.dtype[Any]) -> Any:
    """A date or duration in another unit; None if it is out of range or more precise than the unit."""
    try:
        converted = time.astype(dtype)
    except OverflowError:  # earlier versions of NumPy wrap around
        return None
    return converted if converted.astype(time.dtype) == time else None


def joined(name: str, columns: Sequence[ObsColumn]) -> ObsColumn:
    """Joins a column of several stores into one column over all rows.

    The categories are those of all stores in order of first appearance, or sorted if all columns were strings. Numbers
    get the common dtype of all stores. Raises FormatError if that dtype would round a number.
    """
    if len(columns) == 1:
        return columns[0]
    if columns[0].coded is None:
        return ObsColumn(values=_end_to_end(name, [column.values for column in columns]))
    from_strings = all(column.from_strings for column in columns)
    labels, tables = joined_labels([_labels(column) for column in columns], ordered=from_strings)
    recoded = []
    for column, codes in zip(columns, tables, strict=True):
        windows = windows_of(len(column.values))  # NumPy makes an index of 8 bytes per row
        recoded += [codes[column.values[window]] for window in windows]
    values = np.concatenate([tables[0][:0], *recoded])
    return ObsColumn(values=values, coded=labels, from_strings=from_strings)


def joined_labels(labels: Sequence[Sequence[Any]], *, ordered: bool) -> tuple[pd.Index, list[NDArray[np.integer]]]:
    """The labels of several stores as one index, and for each store a table of the new code of each of its codes.

    The last entry of a table is -1, so that code -1 selects it. Labels are in order of first appearance, or sorted if
    `ordered`.
    """
    found = list(dict.fromkeys(label for of_store in labels for label in of_store))
    if ordered:
        found.sort()
    code_of = {label: code for code, label in enumerate(found)}
    dtype = np.min_scalar_type(-max(1, len(found)))
    tables = [np.array([*(code_of[label] for label in of_store), -1], dtype) for of_store in labels]
    return as_labels(pd.Index(found)), tables


def _end_to_end(name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    integers = all(array.dtype.kind in "iu" for array in arrays)
    if integers and any(beyond_float64(array) is not None for array in arrays):
        common = common_integers(arrays)
        if common is not None:
            return np.concatenate(arrays, dtype=common, casting="unsafe")
    require_exact(f"obs column {name!r}", arrays)
    return np.concatenate(arrays)


def _labels(column: ObsColumn) -> Sequence[Any]:
    return [] if column.coded is None else column.coded.tolist()


def concatenated(name: str, columns: Sequence[Any]) -> Any:
    """Joins a column of several stores as read by anndata. Categories are joined as in `joined`."""
    if len(columns) == 1:
        return columns[0]
    if any(isinstance(column, pd.Categorical) for column in columns):
        codes = joined(name, [as_numbers(name, column) for column in columns])
        ordered = all(getattr(column, "ordered", False) and column.dtype == columns[0].dtype for column in columns)
        return pd.Categorical.from_codes(codes.values, _labels(codes), ordered=ordered)
    if all(isinstance(column, np.ndarray) for column in columns):
        exact = all(column.dtype.kind in NUMBERS or is_time(column.dtype) for column in columns)
        return _end_to_end(name, columns) if exact else np.concatenate(columns)
    # Empty columns are left out, because pandas is about to change how they affect the dtype.
    filled = [pd.Series(column) for column in columns if len(column)]
    return pd.concat(filled).array if filled else columns[0]


def kind_of(node: Any) -> str:
    """The kind of values of an obs column, given as a zarr node: one of _KINDS, else its encoding or dtype."""
    if hasattr(node, "dtype"):
        return _KINDS.get(node.dtype.kind, str(node.dtype))
    encoding = str(node.attrs.get("encoding-type", "group"))
    return _KINDS.get(encoding, encoding)


def unalike(name: str, kinds: Sequence[str], urls: Sequence[str]) -> FormatError | None:
    """The error if a column is numbers in one store and labels in another, given the kind in each store; else None."""
    for kind, url in zip(kinds, urls, strict=True):
        if kind != kinds[0] and not {kind, kinds[0]} <= {"strings", "categories"}:
            return FormatError(
                f"obs column {name!r} holds {kinds[0]} in {urls[0]} and {kind} in {url}: leave it out, or write these "
                "stores again with the same kind of values"
            )
    return None


def unfit_obs(name: str, kinds: Sequence[str], urls: Sequence[str]) -> ZloaderError | None:
    """The error if a column does not become a tensor, given its kind in each store; else None."""
    for kind, url in zip(kinds, urls, strict=True):
        if kind not in _USABLE:
            return _unfit(name, kind, f" in {url}")
    return unalike(name, kinds, urls)


def unfit_obsm(name: str, nodes: Sequence[Any], n_rows: Sequence[int], urls: Sequence[str]) -> ZloaderError | None:
    """The error if an obsm element, given as zarr nodes of all stores, is not a tensor of rows x dims; else None."""
    for node, rows, url in zip(nodes, n_rows, urls, strict=True):
        if not hasattr(node, "shape") or node.dtype.kind not in NUMBERS:
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
                "write these stores again with the same dims"
            )
    return None


def _dims(node: Any) -> str:
    return " x ".join(map(str, node.shape[1:]))


class StringCoder:
    """Codes of the distinct strings among `n_rows` values that come in windows; -1 for a missing value.

    Neither the strings nor their positions are kept: only one byte per row (more if there are more than 128 distinct
    strings) and each distinct string once. 100 million strings of 60 bytes become 100 MB of codes.
    """

    def __init__(self, n_rows: int) -> None:
        self._codes: NDArray[np.signedinteger] = np.empty(n_rows, np.int8)
        self._code_of: dict[str, int] = {}
        self._filled = 0

    def add(self, values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> None:
        """Codes the next values. Those that are None, NaN or `missing` get the code -1."""
        strings = pd.array(values, dtype="string")
        if missing is not None:
            strings[np.asarray(missing, bool)] = pd.NA
        codes, distinct = pd.factorize(strings)
        numbers = [self._code_of.setdefault(string, len(self._code_of)) for string in distinct.tolist()]
        dtype = np.min_scalar_type(-max(1, len(self._code_of)))
        self._codes = self._codes.astype(np.promote_types(self._codes.dtype, dtype), copy=False)
        end = self._filled + len(codes)
        self._codes[self._filled : end] = np.array([*numbers, -1], self._codes.dtype)[codes]  # -1 selects the last
        self._filled = end

    def sorted_codes(self) -> tuple[NDArray[np.signedinteger], pd.Index]:
        """The codes of all values, numbered in the order of the sorted strings, and these strings (dtype object)."""
        labels = sorted(self._code_of)
        renumbered = np.full(len(labels) + 1, -1, self._codes.dtype)
        renumbered[[self._code_of[label] for label in labels]] = np.arange(len(labels))
        for window in windows_of(self._filled):
            self._codes[window] = renumbered[self._codes[window]]
        return self._codes, pd.Index(labels, dtype=object)
