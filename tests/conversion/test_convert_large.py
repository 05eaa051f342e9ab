"""More than 2**31 values, which need int64 counts, without using the memory for them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from zloader.conversion.destination import Destination
from zloader.conversion.matrix import Checkpoints
from zloader.conversion.port import Matrix, Window


def test_the_row_of_an_element_beyond_two_billion() -> None:
    lengths = np.full(3_000_000, 2_000, np.uint32)  # 6 billion values
    lengths[7] = 0
    checkpoints = Checkpoints(cast("Destination", None), "X", frozenset())
    none = np.zeros(0, np.int64)
    checkpoints.add(0, Window(lengths=lengths, genes=none, values=none, mended=np.array([3])))
    matrix: Any = type("Sparse", (), {"dense": False})()
    for element in (0, 14_000, 2**31, 2**32 + 5, 5_999_997_999):
        row, skipped = checkpoints.row_at(element, cast("Matrix", matrix))
        before = int(lengths[:row].sum(dtype=np.int64))
        assert before + skipped == element
        assert 0 <= skipped < lengths[row]
    assert checkpoints.row_at(5_999_998_000, cast("Matrix", matrix)) == (3_000_000, 0)
