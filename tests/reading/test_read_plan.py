"""Reads are grouped into tasks that are neither too small nor too large."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.read_plan import batches, planner_of
from zloader.storage.layout import ArrayLayout, ChunkSpan

pytestmark = pytest.mark.any_version


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=30),
    stored_bytes=st.integers(1, 30),
    decoded_bytes=st.integers(1, 80),
)
def test_a_batch_is_full_at_its_stored_or_at_its_decoded_bytes(sizes, stored_bytes, decoded_bytes):
    """Chunks of 10 decoded bytes each. No batch is full before its last span, and every batch but the last is full."""
    spans = []
    for number, (n_bytes, n_chunks) in enumerate(sizes):
        empty = np.zeros(n_chunks, np.int64)
        spans.append(
            ChunkSpan(span=Span(key=str(number), start=0, stop=n_bytes), chunks=empty, offsets=empty, sizes=empty)
        )

    def full(batch):
        stored, decoded = sum(each.span.size for each in batch), 10 * sum(len(each.chunks) for each in batch)
        return stored >= stored_bytes or decoded >= decoded_bytes

    found = list(batches(spans, chunk_bytes=10, stored_bytes=stored_bytes, decoded_bytes=decoded_bytes))
    assert [each for batch in found for each in batch] == spans
    assert all(full(batch) for batch in found[:-1])
    assert not any(full(batch[:-1]) for batch in found)


@pytest.mark.parametrize(
    ("share", "run"),
    [(1.0, 8), (0.0, 1), (0.5, 8), (96 / 1024, 8), (95 / 1024, 1)],
    ids=["the whole array", "unknown", "half", "twelve runs", "fewer"],
)
def test_how_much_beside_a_block_is_read_for_a_mirror(share, run):
    """Eight chunks are a run. In a piece of fewer than twelve runs, too many bytes are read that others need."""
    layout = ArrayLayout.plain("a", "u1", n_elements=1024 * 1000, chunk_elements=1000, chunks_per_shard=1024)
    options = FetchOptions(least_read_bytes=8000, gap_bytes=0)
    planner = planner_of(layout, options, {layout.shard_key(0): 1024 * 1000}, sweeping=share)
    wanted = planner.chunks_to_mirror(np.array([20]), first_fetch=False)
    assert wanted.tolist() == (list(range(16, 24)) if run == 8 else [20])
