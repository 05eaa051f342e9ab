"""Obs columns as classes."""

from __future__ import annotations

import numpy as np
import pytest

from zloader.common.errors import OptionError
from zloader.selecting.columns import ObsColumn


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
    codes, distinct = ObsColumn(values=values, categories=None).classes("passage")
    assert (codes.tolist(), distinct) == (classes, n)


@pytest.mark.parametrize("values", [[0.5, 1.0], [np.inf, 0.25], [np.nan, 1.5]])
def test_fractions_are_no_classes(values):
    with pytest.raises(OptionError, match="passage holds float64: choose a column of labels, whole numbers"):
        ObsColumn(values=np.array(values), categories=None).classes("passage")
