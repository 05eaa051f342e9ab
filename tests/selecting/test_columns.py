"""Obs columns as classes, and strings that come in windows as codes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.selecting.columns import ObsColumn, StringCoder, as_labels, labels_as, plain_labels


@pytest.mark.parametrize(
    ("values", "classes", "n"),
    [
        (np.array([2.0, np.nan, 7.0, 2.0]), [0, -1, 1, 0], 2),  # integers with missing values arrive so
        (np.array([np.nan, np.nan]), [-1, -1], 0),
        (np.array([True, False]), [1, 0], 2),
        (np.array(["2024-01-02", "NaT", "2024-01-01"], "datetime64[s]"), [1, -1, 0], 2),
    ],
)
def test_numbers_and_dates_as_classes(values, classes, n):
    codes, distinct = ObsColumn(values=values).classes("passage")
    assert (codes.tolist(), distinct) == (classes, n)


@pytest.mark.parametrize("values", [[0.5, 1.0], [np.inf, 0.25], [np.nan, 1.5]])
def test_fractions_are_no_classes(values):
    with pytest.raises(OptionError, match="passage holds float64: choose a column of labels, whole numbers"):
        ObsColumn(values=np.array(values)).classes("passage")


WORDS = st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=40)


@given(words=WORDS, cuts=st.lists(st.integers(0, 40), max_size=5), masked=st.sets(st.integers(0, 39)))
def test_codes_do_not_depend_on_the_windows(words, cuts, masked):
    values, missing = np.array(words, object), np.isin(np.arange(len(words)), list(masked))
    coder = StringCoder(len(words))
    for window in np.split(np.arange(len(words)), sorted(cuts)):
        coder.add(values[window], missing[window])
    codes, labels = coder.sorted_codes()
    shown = [None if hidden else word for word, hidden in zip(words, missing, strict=True)]
    assert labels.tolist() == sorted({word for word in shown if word is not None})
    assert [None if code < 0 else labels[code] for code in codes.tolist()] == shown
    assert codes.dtype == np.int8
    assert labels.dtype == object


@pytest.mark.parametrize(
    ("n_labels", "dtype"), [(0, np.int8), (128, np.int8), (129, np.int16), (32768, np.int16), (32769, np.int32)]
)
def test_codes_have_the_narrowest_dtype(n_labels, dtype):
    words = [f"{number:05}" for number in range(n_labels)]
    coder = StringCoder(2 * n_labels + 1)
    coder.add(np.array([None], object))
    for window in (words[: n_labels // 2], words[n_labels // 2 :], words[::-1]):
        coder.add(np.array(window, object))
    codes, labels = coder.sorted_codes()
    assert codes.dtype == dtype
    assert labels.tolist() == words
    assert codes.tolist() == [-1, *range(n_labels), *reversed(range(n_labels))]


@pytest.mark.parametrize(
    "values",
    [
        np.array(["b", "a", "ä"], object),
        np.array(["b", "a", "ä"]),
        np.array(["b", "a", "ä"], np.dtypes.StringDType()),
        pd.array(["b", "a", "ä"], dtype="string"),
    ],
    ids=["objects", "fixed width", "NumPy's", "pandas'"],
)
def test_strings_of_every_dtype(values):
    coder = StringCoder(3)
    coder.add(values)
    codes, labels = coder.sorted_codes()
    assert (codes.tolist(), labels.tolist()) == ([1, 0, 2], ["a", "b", "ä"])


CATEGORIES = {
    "strings": np.array(["b", "a", "ä"], object),
    "of fixed length": np.array(["b", "a"]),
    "variable strings": np.array(["b", "a"], np.dtypes.StringDType()),
    "no strings": np.array([], object),
    "no integers": np.array([], np.int16),
    **{f"{dtype}": np.array([3, 1, 2], dtype) for dtype in ("int8", "uint16", "int64", "uint64")},
}
OTHERS = {
    "twice": np.array(["a", "a"], object),
    "integers twice": np.array([1, 1]),
    "missing": np.array(["a", None], object),
    "NaN": np.array(["a", np.nan], object),
    "mixed": np.array(["a", 1], object),
    "floats": np.array([0.5, 1]),
    "booleans": np.array([False, True]),
    "dates": np.array(["2024-01-01"], "datetime64[s]"),
    "two axes": np.array([[1, 2]]),
    "no array": pd.array(["a"], dtype="string"),
}


@pytest.mark.parametrize("stored", CATEGORIES.values(), ids=CATEGORIES)
def test_labels_without_pandas_are_those_of_pandas(stored) -> None:
    expected = as_labels(pd.Categorical.from_codes([], stored).categories)
    labels = plain_labels(stored)
    assert labels is not None
    codes = np.zeros(0, np.int8)
    pd.testing.assert_index_equal(ObsColumn(values=codes, coded=labels).categories, expected, exact=True)
    kept = labels_as(labels.tolist(), str(labels.dtype))  # as a mirror keeps them
    pd.testing.assert_index_equal(ObsColumn(values=codes, coded=kept).categories, expected, exact=True)
    assert list(map(type, expected.tolist())) == list(map(type, kept.tolist()))


@pytest.mark.parametrize("stored", OTHERS.values(), ids=OTHERS)
def test_other_categories_are_left_to_pandas(stored) -> None:
    assert plain_labels(stored) is None
