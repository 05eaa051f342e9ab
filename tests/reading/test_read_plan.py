"""Reads are grouped into tasks that are neither too small nor too large."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.records import Span
from zloader.reading.read_plan import batches
from zloader.storage.layout import ChunkSpan

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
