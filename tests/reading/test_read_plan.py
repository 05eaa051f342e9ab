"""Reads are grouped into tasks that are neither too small nor too large, and so are the blocks of a mirror."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import fetch_options, vector_layout
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.records import Span
from zloader.reading.read_plan import Elements, FillPlanner, batches
from zloader.storage.layout import MatrixLayout, Reads
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=30),
    stored_bytes=st.integers(1, 30),
    decoded_bytes=st.integers(1, 80),
)
def test_a_batch_is_full_at_its_stored_or_at_its_decoded_bytes(sizes, stored_bytes, decoded_bytes):
    """Chunks of 10 decoded bytes each. No batch is full before its last span, and every batch but the last is full."""
    numbers = np.repeat(np.arange(len(sizes)), [n_chunks for _, n_chunks in sizes])
    spans = [Span(key=str(number), start=0, stop=n_bytes) for number, (n_bytes, _) in enumerate(sizes)]
    chunks, empty = np.arange(len(numbers)), np.zeros(len(numbers), np.int64)
    reads = Reads(spans=spans, chunks=chunks, numbers=numbers, offsets=empty, sizes=empty, absent=empty[:0])

    def full(batch):
        stored, decoded = sum(sizes[number][0] for number in batch), 10 * sum(sizes[number][1] for number in batch)
        return stored >= stored_bytes or decoded >= decoded_bytes

    found = list(batches(reads, chunk_bytes=10, stored_bytes=stored_bytes, decoded_bytes=decoded_bytes))
    assert [number for batch in found for number in batch.tolist()] == list(range(len(sizes)))
    assert all(full(batch) for batch in found[:-1])
    assert not any(full(batch[:-1]) for batch in found)


@pytest.mark.parametrize(("sweeps", "run"), [(True, 8), (False, 1)], ids=["all rows", "some"])
def test_how_much_beside_a_block_is_read_for_a_mirror(sweeps, run):
    """Eight blocks are a run. Of some rows, too many bytes would be read that others need."""
    planner = planner_of_rows(chunk_rows=1, least_read_bytes=8000, sweeps=sweeps)
    for first_fetch, n in ((False, run), (True, 1)):  # the consumer waits for the first one
        wanted = planner.to_fill(np.array([20]), first_fetch=first_fetch)
        assert wanted.tolist() == (list(range(16, 24)) if n == 8 else [20])


@pytest.mark.parametrize(("sweeps", "first_fetch", "run"), [(True, False, 16), (True, True, 4), (False, False, 4)])
def test_a_chunk_of_several_blocks_is_decoded_with_all_of_them(sweeps, first_fetch, run):
    """Four chunks are a run, because the chunks at its ends are read with both neighbours."""
    planner = planner_of_rows(chunk_rows=4, least_read_bytes=0, sweeps=sweeps)
    wanted = planner.to_fill(np.array([18, 41]), first_fetch=first_fetch)
    firsts = [18 // run * run, 41 // run * run]
    assert wanted.tolist() == [block for first in firsts for block in range(first, first + run)]


def test_blocks_between_two_that_are_needed_are_read_if_they_are_few():
    planner = planner_of_rows(chunk_rows=1, least_read_bytes=0, sweeps=False, gap_bytes=2000)
    wanted = planner.to_fill(np.array([3, 6, 10]), first_fetch=False)
    assert wanted.tolist() == [3, 4, 5, 6, 10]


@given(
    blocks=st.lists(st.integers(0, 1023), unique=True).map(sorted),
    in_flight_bytes=st.sampled_from([1, 40_000, 1 << 30]),
)
def test_blocks_are_read_in_batches(blocks, in_flight_bytes):
    planner = planner_of_rows(chunk_rows=1, least_read_bytes=0, sweeps=True, in_flight_bytes=in_flight_bytes)
    found = list(planner.batches(np.array(blocks, np.int64)))
    assert [block for batch in found for block in batch.tolist()] == blocks
    assert all(len(batch) * 1000 <= max(1000, in_flight_bytes // 8) for batch in found)


def planner_of_rows(*, chunk_rows: int, least_read_bytes: int, sweeps: bool, **options: int) -> FillPlanner:
    """The planner of 1 024 blocks of one row of 1 000 bytes, stored in chunks of some rows."""
    values = vector_layout(
        "X", "u1", n_elements=1024 * 1000, chunk_elements=chunk_rows * 1000, chunks_per_shard=1024 // chunk_rows
    )
    matrix = MatrixLayout(path="X", n_rows=1024, n_genes=1000, values=values, genes=None)
    form = replace(RowForm.of(matrix, None, compact=False), block_rows=1)
    sizes = {values.shard_key(0): 1024 * 1000}
    fetching = fetch_options(least_read_bytes=least_read_bytes, **{"gap_bytes": 0, **options})
    return FillPlanner.of(matrix, form, fetching, sizes, sweeps=sweeps)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=30), chunk_elements=st.integers(1, 50)
)
def test_the_jobs_of_rows_bring_all_their_elements(pairs, chunk_elements):
    """Rows in any order, also the same one twice. The elements of a chunk are those of its first element and so on."""
    starts, lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    layout = vector_layout("a", "i8", n_elements=350, chunk_elements=chunk_elements, chunks_per_shard=1024)
    needed = Elements.of([layout], starts, starts + lengths)
    ((chunks, jobs),) = needed.jobs
    out = np.full(needed.n_elements, -1)
    for chunk, job in zip(chunks.tolist(), jobs, strict=True):
        assert 0 <= job["first"] < job["stop"] <= chunk_elements == job["elements"]
        taken = chunk * chunk_elements + np.arange(job["first"], job["stop"])
        out[job["begin"] : job["begin"] + len(taken)] = taken
    assert (np.diff(chunks) >= 0).all(), "the jobs of a chunk follow one another"
    assert needed.n_elements == lengths.sum()
    for start, length, begin in zip(starts, lengths, needed.begins, strict=True):
        assert out[begin : begin + length].tolist() == list(range(start, start + length))
