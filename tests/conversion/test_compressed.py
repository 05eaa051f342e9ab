"""Windows of compressed arrays are bounded and give every element once, in order."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from zloader.conversion.compressed import CompressedArrays, skip_rows
from zloader.conversion.nodes import Node
from zloader.conversion.port import Window


@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    max_elements=st.integers(1, 50),
    first=st.integers(0, 12),
    whole=st.booleans(),
    indptr_rows=st.integers(1, 5) | st.just(1 << 20),
)
def test_windows_hold_every_line_once_in_order(
    lengths: list[int], max_elements: int, first: int, whole: bool, indptr_rows: int
) -> None:
    rng = np.random.default_rng(len(lengths))
    indices = np.concatenate([np.sort(rng.choice(40, n, replace=False)) for n in lengths] or [np.zeros(0)]).astype(int)
    indptr = np.concatenate([[0], np.cumsum(lengths, dtype=int)])
    x = sp.csr_matrix((np.arange(len(indices)), indices, indptr), shape=(len(lengths), 40))
    arrays = CompressedArrays(Node(x, "x"), axes=("row", "gene"), major=len(lengths), minor=40)
    found = []
    for line, relative, minor, values in arrays.windows(max_elements, first, whole=whole, indptr_rows=indptr_rows):
        assert relative[0] == 0
        assert len(minor) == len(values) == relative[-1]
        assert len(values) <= max_elements or (whole and len(relative) == 2)
        lines = np.repeat(np.arange(line, line + len(relative) - 1), np.diff(relative))
        found += zip(lines.tolist(), minor.tolist(), values.tolist(), strict=True)
    lines = np.repeat(np.arange(len(lengths)), lengths)
    wanted = zip(lines.tolist(), indices.tolist(), range(len(indices)), strict=True)
    assert found == [entry for entry in wanted if entry[0] >= first]


@given(lengths=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4), first_row=st.integers(0, 17))
def test_skipped_rows_are_the_first(lengths: list[list[int]], first_row: int) -> None:
    rows = [(n, row) for row, n in enumerate(n for window in lengths for n in window)]
    windows, at = [], 0
    for window in lengths:
        values = np.repeat(np.arange(at, at + len(window)), window)
        windows.append(Window(lengths=np.array(window, np.int64), genes=values, values=values))
        at += len(window)
    found = [*skip_rows(iter(windows), first_row)]
    assert [n for window in found for n in window.lengths] == [n for n, _ in rows[first_row:]]
    wanted = [row for n, row in rows[first_row:] for _ in range(n)]
    assert [value for window in found for value in window.values] == wanted
    assert [gene for window in found for gene in window.genes] == wanted
