"""Rows given as slices, masks, numbers or names mean what they mean in NumPy and AnnData."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.selecting.rows import positions_of

pytestmark = pytest.mark.any_version

N = 10
NAMES = pd.Index([f"cell {row}" for row in range(N)])


def not_asked() -> pd.Index:
    raise AssertionError("the names are read only if names are given")


bounds = st.none() | st.integers(-15, 15)
chosen = st.one_of(
    st.builds(slice, bounds, bounds, st.none() | st.integers(-4, 4).filter(bool)),
    st.lists(st.integers(-N, N - 1), min_size=1),
    st.lists(st.booleans(), min_size=N, max_size=N),
)


@given(chosen)
def test_rows_are_those_of_numpy(rows: Any) -> None:
    wanted = np.arange(N)[rows]
    kinds = [rows] if isinstance(rows, slice) else [rows, tuple(rows), np.array(rows), pd.Series(rows), pd.Index(rows)]
    for kind in kinds:
        found = positions_of(kind, N, not_asked)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (3, [3]),
        (np.int8(-1), [N - 1]),
        (range(2, 5), [2, 3, 4]),
        (np.array([9, 9, 0], np.uint8), [9, 9, 0]),
        (pd.array([True] * 3 + [False] * 7, dtype="boolean"), [0, 1, 2]),
        ([], []),
        (np.zeros(0), []),
        ("cell 4", [4]),
        (["cell 4", "cell 1", "cell 4"], [4, 1, 4]),
        (NAMES[::-3], [9, 6, 3, 0]),
        (pd.Categorical(["cell 2"]), [2]),
    ],
)
def test_other_rows(rows: Any, wanted: list[int]) -> None:
    assert positions_of(rows, N, lambda: NAMES).tolist() == wanted


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([N], f"row {N} does not exist: the dataset has rows 0 to {N - 1}"),
        (-N - 1, f"row {-N - 1} does not exist"),
        (np.array([2**63], np.uint64), "does not exist"),
        ([True] * 3, f"a mask over all {N} rows of the dataset, not one of shape"),
        (["cell 4", "cel 3"], "1 of 2 rows are not in the dataset: 'cel 3'. .* Did you mean 'cell 3'"),
        ("AAACCC", "1 of 1 rows are not in the dataset: 'AAACCC'. Its rows have names such as 'cell 0', 'cell 1'"),
        *[
            (rows, "rows must be a slice, a mask, a list of positions or of names")
            for rows in (1.5, [1.5], None, True, b"x", object(), {1, 2}, {"a": 1}, [[1]], [[1], [2, 3]], [1, "a"], ...)
        ],
        ([(1, 2), (3, 4)], "in one dimension"),
        (np.ones((2, 2), int), "in one dimension"),
        (pd.array([True, None], dtype="boolean"), "rows must be"),
        (slice("a", "b"), "a slice of rows must hold whole numbers"),
        (slice(0, 3, 0), "a slice of rows must hold whole numbers"),
    ],
)
def test_rows_that_cannot_be_used(rows: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        positions_of(rows, N, lambda: NAMES)


def test_names_that_occur_twice_are_ambiguous() -> None:
    names = pd.Index(["a", "b", "b", "c"])
    assert positions_of(["c", "a"], 4, lambda: names).tolist() == [3, 0]
    with pytest.raises(OptionError, match="'b' occurs more than once"):
        positions_of(["c", "b"], 4, lambda: names)
