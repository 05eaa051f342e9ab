"""Gzip datasets inflated in threads equal those that h5py reads."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.conversion.sources.nodes import GzipDataset, in_threads


@given(
    length=st.integers(0, 400),
    chunk=st.integers(1, 90),
    bounds=st.lists(st.integers(0, 420), min_size=2, max_size=2),
    shuffle=st.booleans(),
    dtype=st.sampled_from(["<f4", ">i4", "u1", "<i8"]),
)
def test_any_slice_against_h5py(length: int, chunk: int, bounds: list[int], shuffle: bool, dtype: str) -> None:
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        elements = np.random.default_rng(length).integers(0, 100, length).astype(dtype)
        options: dict[str, Any] = {"compression": "gzip", "shuffle": shuffle, "maxshape": (None,)}
        dataset = file.create_dataset("a", data=elements, chunks=(chunk,), **options)
        threaded = in_threads(dataset)
        assert isinstance(threaded, GzipDataset)
        start, stop = sorted(bounds)
        out = threaded[start:stop]
        assert out.dtype == dataset.dtype
        np.testing.assert_array_equal(out, dataset[start:stop])


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("a", (100,), "f4", chunks=(10,), compression="gzip", fillvalue=7)
        dataset[35:48] = np.arange(13)
        np.testing.assert_array_equal(in_threads(dataset)[:], dataset[:])


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (10,)}, {"compression": "lzf"}, {"compression": "gzip", "fletcher32": True}],
    ids=["contiguous", "plain chunks", "lzf", "with fletcher32"],
)
def test_other_datasets_stay_with_h5py(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("a", data=np.arange(100), **options)
        assert in_threads(dataset) is dataset
        table = file.create_dataset("b", data=np.ones((4, 4)), compression="gzip")
        assert in_threads(table) is table


def test_a_chunk_that_does_not_inflate(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("a", data=np.arange(100), chunks=(50,), compression="gzip")
        dataset.id.write_direct_chunk((50,), b"not gzip")
        threaded = in_threads(dataset)
        np.testing.assert_array_equal(threaded[:50], np.arange(50))
        with pytest.raises(OSError, match="does not inflate"):
            threaded[50:]


def test_a_chunk_that_inflates_to_far_more_than_it_may_hold_is_refused_before(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.arange(100), chunks=(100,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 26)))
        tracemalloc.start()
        try:
            with pytest.raises(OSError, match="does not inflate to 800 bytes"):
                in_threads(dataset)[0:100]
            assert tracemalloc.get_traced_memory()[1] < 1 << 22
        finally:
            tracemalloc.stop()
