"""More than 2**31 values, which need int64 counts, without using the memory for them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from zloader.conversion.sources.anndata_input import open_matrix
from zloader.conversion.sources.nodes import Node
from zloader.conversion.writing.passes import _row_at

BIG = 2**31 + 11


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rows_behind_two_billion_values_are_read(tmp_path: Path, compression: str | None, dtype: str) -> None:
    """Row 0 has all values except the last nine. Its chunks are never written and never read."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": np.array([4, BIG])})
        group["indptr"] = np.array([0, BIG - 9, BIG - 4, BIG - 4, BIG], np.int64)
        for name, kind in (("data", "f4"), ("indices", dtype)):
            array = group.create_dataset(name, (BIG,), kind, chunks=(1 << 20,), compression=compression)
            array[BIG - 9 :] = np.arange(9) + (1 if name == "data" else 0)
    with (
        h5py.File(tmp_path / "a.h5") as file,
        open_matrix(Node(file["X"], "a.h5", "X"), "X", shape=(4, BIG), window_bytes=64) as matrix,
    ):
        assert matrix.n_stored == BIG
        windows = list(matrix.windows(first_row=1))
    assert np.concatenate([window.lengths for window in windows]).tolist() == [5, 0, 4]
    assert np.concatenate([window.genes for window in windows]).tolist() == list(range(9))
    assert np.concatenate([window.values for window in windows]).tolist() == list(range(1, 10))


def test_the_row_of_an_element_beyond_two_billion() -> None:
    lengths = np.full(3_000_000, 2_000, np.uint32)  # 6 billion values
    lengths[7] = 0
    for element in (0, 14_000, 2**31, 2**32 + 5, 5_999_997_999):
        row, skipped = _row_at(lengths, element)
        before = int(lengths[:row].sum(dtype=np.int64))
        assert before + skipped == element
        assert 0 <= skipped < lengths[row]
    assert _row_at(lengths, 5_999_998_000) == (3_000_000, 0)
