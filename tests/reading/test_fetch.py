"""The scheduler and the reader over a fake source: reads complete in any order, fail, and read each chunk once."""

from __future__ import annotations

import asyncio
import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import anndata
import numpy as np
import pytest
from fake_source import FakeSource, Fault
from helpers import counts, fetch_options, offsets_in_memory, plan_of, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.rows_file import Mirror, open_rows
from zloader.common.errors import CorruptChunkError, MissingObjectError, ReadError
from zloader.order.plan import Fetch
from zloader.reading import gather
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.matrix_reader import opened_readers
from zloader.reading.recipe import MatrixPart, Recipe
from zloader.reading.resources import BufferPool, Counters
from zloader.storage.layout import MatrixLayout
from zloader.storage.metadata import array_layout
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version

ADATA = counts(300, 61, seed=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def mirror_directory(directory: Path) -> MirrorDirectory:
    return MirrorDirectory(zl.Cache(directory=directory), "0" * 32, "store")


def mirror_of(part, directory: Path) -> Mirror:
    return open_rows(mirror_directory(directory), part.matrix, None)


def part_of(store: Path) -> MatrixPart:
    opened = zl.open_dataset(store).store
    return opened.part(opened.matrix("X"), zl.FetchOptions())


def scheduler_of(part, source, *, mirror=None, options=None) -> FetchScheduler:
    """Reads one part from `source`."""
    part = replace(part, open_source=lambda: source, mirror=mirror)
    recipe = Recipe(x={"X": [part]}, form=Form(dense=False, dtype="int64"))
    return FetchScheduler(recipe, options or zl.FetchOptions(), BufferPool())


def run(part, source, fetches, *, mirror=None, options=None):
    """All minibatches of some fetches, and the scheduler's counters."""
    options = options or zl.FetchOptions()
    scheduler = scheduler_of(part, source, mirror=mirror, options=options)
    return list(scheduler.start(fetches, name="test")), scheduler.counters


def plan(**options) -> list[Fetch]:
    sizes = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}
    whole = plan_of(dataset_rows=300, **(sizes | options))
    return [whole.fetch(number) for number in range(whole.n_fetches)]


def check(minibatches) -> np.ndarray:
    for minibatch in minibatches:
        wanted = ADATA.X[minibatch.index]
        np.testing.assert_array_equal(minibatch.x["X"].indptr, wanted.indptr)
        np.testing.assert_array_equal(minibatch.x["X"].indices, wanted.indices)
        np.testing.assert_array_equal(minibatch.x["X"].values, wanted.data)
    return np.concatenate([minibatch.index for minibatch in minibatches])


@dataclass(frozen=True)
class Large:
    """An item that takes 100 MB."""

    index: np.ndarray
    nbytes: int = 100_000_000


@pytest.mark.parametrize(("grows", "size"), [(False, 8), (True, 1)])
def test_minibatches_that_take_more_than_was_gathered_are_made_one_by_one(store, grows, size):
    def cut(together, cuts):
        return [Large(each.index) for each in gather.cut_apart(together, cuts)]

    recipe = Recipe(x={"X": [part_of(store)]}, form=Form(dense=False, dtype="int64"), cut=cut, grows=grows)
    put = []
    fetches = plan(fetch_factor=8, batch_size=4, drop_last=True)
    bridge = FetchScheduler(recipe, zl.FetchOptions(), BufferPool()).start(fetches, name="test")
    while group := bridge.next_group():
        put.append(group)
    assert max(map(len, put)) == size
    rows = np.concatenate([item.index for items in put for item in items])
    assert rows.tolist() == np.concatenate([fetch.rows[fetch.order] for fetch in fetches]).tolist()


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 299), min_size=1, max_size=80),
    seed=st.integers(0, 1000),
    gap_bytes=st.sampled_from([0, 100, 1 << 20]),
    max_read_bytes=st.sampled_from([1, 2_000, 1 << 20]),
)
def test_any_rows_in_any_order_with_reads_completing_in_any_order(store, rows, seed, gap_bytes, max_read_bytes):
    rows = np.array(rows)
    fetch = Fetch(number=0, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))
    options = fetch_options(gap_bytes=gap_bytes, max_read_bytes=max_read_bytes, in_flight_bytes=4_000)
    minibatches, _ = run(part_of(store), FakeSource(store, seed=seed), [fetch], options=options)
    assert check(minibatches).tolist() == rows.tolist()


def test_with_a_mirror_every_chunk_is_read_once_though_fetches_share_chunks(store, tmp_path):
    part = part_of(store)
    mirror = mirror_of(part, tmp_path)
    source = FakeSource(store, seed=1)
    # No gaps, because the bytes between two wanted chunks would be chunks read in vain.
    options = fetch_options(gap_bytes=0, prefetch=5)
    minibatches, counters = run(part, source, plan(), mirror=mirror, options=options)
    assert sorted(check(minibatches)) == list(range(300))
    chunks = sum(array.n_chunks for array in part.matrix.arrays)
    shards = sum(array.n_shards for array in part.matrix.arrays)
    assert counters.chunks_decoded == chunks
    assert counters.gets == len(source.reads)
    assert counters.bytes_read == sum(span.size for span in source.reads)
    stored = sum(part.object_sizes[a.shard_key(s)] for a in part.matrix.arrays for s in range(a.n_shards))
    assert counters.bytes_read == stored
    twice = Counter((span.key, byte) for span in source.reads for byte in range(span.start, span.stop))
    assert set(twice.values()) == {1}
    assert shards > 4  # so that fetches cross shards

    again = FakeSource(store)
    minibatches, counters = run(part, again, plan(epoch=1), mirror=mirror)
    assert sorted(check(minibatches)) == list(range(300))
    assert again.reads == []
    assert counters.chunks_decoded == 0


def test_with_a_mirror_a_chunk_at_the_end_of_what_is_read_is_read_with_both_neighbours(store, tmp_path):
    part, source = part_of(store), FakeSource(store)
    mirror, options = mirror_of(part, tmp_path), fetch_options(gap_bytes=0, least_read_bytes=0, prefetch=1)
    minibatches, counters = run(part, source, plan(sampling=zl.Streaming()), mirror=mirror, options=options)
    assert sorted(check(minibatches)) == list(range(300))
    assert mirror.rows.held.chunks_held == mirror.rows.form.n_blocks
    n_chunks = sum(array.n_chunks for array in part.matrix.arrays)
    runs = 5  # of two blocks, which together are about as long as a chunk
    assert n_chunks < counters.chunks_decoded <= n_chunks + len(part.matrix.arrays) * (runs - 1)


def test_a_half_filled_mirror_is_completed(store, tmp_path):
    part = part_of(store)
    streaming = plan(sampling=zl.Streaming())
    run(part, FakeSource(store), streaming[: len(streaming) // 2], mirror=mirror_of(part, tmp_path))
    minibatches, counters = run(part, FakeSource(store), plan(), mirror=mirror_of(part, tmp_path))
    assert sorted(check(minibatches)) == list(range(300))
    assert 0 < counters.chunks_decoded < sum(array.n_chunks for array in part.matrix.arrays)


def test_chunks_whose_read_failed_are_left_to_others(store, tmp_path):
    """Also while the epoch goes on that wanted them, or another process would wait for it until its deadline."""
    part = part_of(store)
    failing = FakeSource(store, faults=[Fault(kind="error", key="X/data/c/3$", skip=1)])  # after the index
    mirror, others = mirror_of(part, tmp_path), mirror_of(part, tmp_path)
    values = part.matrix.values
    in_shard = values.chunk_of(ADATA.X.indptr[:-1]) // values.chunks_per_shard == 3
    blocks = mirror.rows.blocks(np.flatnonzero(in_shard))

    async def run():
        parts, leases = [replace(part, open_source=lambda: failing, mirror=mirror)], Leases(others.directory.path)
        with opened_readers(parts, zl.FetchOptions(), Counters(), sweeps=False) as [reader]:
            with pytest.raises(ExceptionGroup) as raised:
                await reader.fill_mirror(blocks, 0)
            assert raised.group_contains(ReadError)
            free, leased = others.rows.acquire(blocks, leases)
            assert free.tolist() == blocks.tolist()
            assert leased.tolist() == []
        leases.close()

    asyncio.run(run())


def test_a_corrupt_chunk_is_not_mirrored_and_the_others_are_right(store, tmp_path):
    """Corrupt chunks are decoded together with others, which may be kept."""
    part = part_of(store)
    flipping = FakeSource(store, faults=[Fault(kind="flip", key="X/data/c/2", skip=1)])  # after the index
    with pytest.raises(CorruptChunkError, match="X/data/c/2"):
        run(part, flipping, plan(), mirror=mirror_of(part, tmp_path))
    minibatches, _ = run(part, FakeSource(store), plan(), mirror=mirror_of(part, tmp_path))
    assert sorted(check(minibatches)) == list(range(300))


@given(rows=st.lists(st.integers(0, 299), min_size=1, max_size=20, unique=True).map(sorted))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_buffers_hold_what_is_needed_and_keep_the_next_one_aligned(store, rows):
    part = part_of(store)
    starts, stops = part.matrix.elements_of(np.array(rows), part.indptr)
    with opened_readers([part], zl.FetchOptions(), Counters(), sweeps=False) as [reader]:
        needed = reader.needed(slice(None), np.array(rows))
        assert needed.ahead_bytes == needed.buffer_bytes
        buffer = np.empty(needed.buffer_bytes, np.uint8)
        begins = []
        for array, place in zip(part.matrix.arrays, needed.through.places(buffer), strict=True):
            assert place.size == (stops - starts).sum()
            assert place.dtype == array.dtype
            begins.append(place.__array_interface__["data"][0] - buffer.__array_interface__["data"][0])
            assert begins[-1] % 64 == 0
        ends = [begins[1], needed.buffer_bytes]
        for array, begin, end in zip(part.matrix.arrays, begins, ends, strict=True):
            assert 0 <= end - begin - (stops - starts).sum() * array.dtype.itemsize < 64


@pytest.mark.parametrize("seed", range(5))
def test_the_first_failed_read_is_raised_after_the_minibatches_before_it(store, seed):
    fetches = plan(sampling=zl.Streaming())
    source = FakeSource(store, faults=[Fault(kind="error", key="X/data/c/3$")], seed=seed)
    scheduler = scheduler_of(part_of(store), source, options=fetch_options(prefetch=1))
    taken = []
    with pytest.raises(ReadError, match="scripted fault: X/data/c/3 bytes"):
        taken.extend(scheduler.start(fetches, name="test"))
    rows = check(taken)
    assert rows.tolist() == list(range(len(rows)))  # a prefix, nothing skipped


def test_a_flipped_byte_is_read_again_and_only_that_span(store):
    source = FakeSource(store, faults=[Fault(kind="flip", key="X/indices/c/1$", skip=1, count=1)])
    minibatches, counters = run(part_of(store), source, plan())
    assert sorted(check(minibatches)) == list(range(300))
    assert counters.retries == 1


def test_a_flipped_byte_in_a_shard_index_is_read_again(store):
    source = FakeSource(store, faults=[Fault(kind="flip", key="X/indices/c/1$", count=1)])
    minibatches, counters = run(part_of(store), source, plan())
    assert sorted(check(minibatches)) == list(range(300))
    assert counters.retries == 1


@pytest.mark.parametrize("skip", [0, 1], ids=["index", "chunk"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_byte_that_stays_flipped_is_an_error_that_names_it(store, tmp_path, skip, mirrored):
    part = part_of(store)
    mirror = mirror_of(part, tmp_path) if mirrored else None
    source = FakeSource(store, faults=[Fault(kind="flip", key="X/data/c/2$", skip=skip)])
    with pytest.raises(CorruptChunkError, match="X/data/c/2") as caught:
        run(part, source, plan(sampling=zl.Streaming()), mirror=mirror)
    if skip:
        start, stop = map(int, re.search(r"bytes (\d+)-(\d+) of X/data/c/2", str(caught.value)).groups())
        assert 0 <= start < stop < part.object_sizes["X/data/c/2"]
    # The chunks in the mirror are right all the same.
    good, _ = run(part, FakeSource(store), plan(), mirror=mirror)
    assert sorted(check(good)) == list(range(300))


@pytest.mark.parametrize("mirrored", [False, True])
def test_an_absent_shard_is_an_error_in_our_stores_and_fill_values_in_others(store, tmp_path, mirrored):
    part = part_of(store)
    sizes = dict(part.object_sizes)
    del sizes["X/data/c/1"]
    lacking = replace(part, object_sizes=sizes)
    with pytest.raises(MissingObjectError, match="X/data/c/1 is not there"):
        run(lacking, FakeSource(store), plan())

    values = zl.open_dataset(store).store.root["X/data"].metadata.to_dict()
    matrix = replace(part.matrix, values=array_layout("X/data", values, absent_is_fill=True))
    foreign = replace(lacking, matrix=matrix)
    mirror = mirror_of(foreign, tmp_path) if mirrored else None
    minibatches, _ = run(foreign, FakeSource(store), plan(), mirror=mirror)
    if mirrored:
        again, counters = run(foreign, FakeSource(store), plan(epoch=1), mirror=mirror_of(foreign, tmp_path))
        assert counters.gets == 0
        minibatches += again
    first = part.matrix.values.chunk_elements * part.matrix.values.chunks_per_shard
    filled = ADATA.X.data.copy()
    filled[first : 2 * first] = 0
    for minibatch in minibatches:
        wanted = [filled[ADATA.X.indptr[row] : ADATA.X.indptr[row + 1]] for row in minibatch.index]
        np.testing.assert_array_equal(minibatch.x["X"].values, np.concatenate(wanted))


def test_bytes_in_flight_stay_within_their_bound(store):
    class Watched(FakeSource):
        in_flight = most = 0

        async def read(self, spans):
            self.in_flight += sum(span.size for span in spans)
            self.most = max(self.most, self.in_flight)
            try:
                return await super().read(spans)
            finally:
                self.in_flight -= sum(span.size for span in spans)

    whole = Watched(store, seed=0)
    run(part_of(store), whole, plan(), options=fetch_options(prefetch=8))
    bounded = Watched(store, seed=0)
    limit = whole.most // 4
    run(part_of(store), bounded, plan(), options=fetch_options(prefetch=8, in_flight_bytes=limit))
    largest = max(span.size for span in bounded.reads)
    assert bounded.most <= max(limit, largest)
    assert bounded.most < whole.most


def test_an_epoch_that_waits_for_reads_loads_further_ahead(store):
    """It begins with two fetches, and a third is ready to begin. More follow when two were not enough."""

    begun, begun_before, begun_at_first = [], [], []

    class Slow(FakeSource):
        async def read(self, spans):
            await asyncio.sleep(0.1)  # during which the threads have nothing to do
            begun_at_first[:] = begun_at_first or [len(begun)]  # no fetch is loaded yet
            return await super().read(spans)

    def fetches():
        for fetch in plan(batch_size=5, fetch_factor=2):
            begun.append(fetch)
            yield fetch

    scheduler = scheduler_of(part_of(store), Slow(store), options=fetch_options(prefetch=6))
    make = scheduler._make

    def counted(*arguments):
        begun_before.append(len(begun))
        return make(*arguments)

    scheduler._make = counted
    assert sum(len(minibatch.index) for minibatch in scheduler.start(fetches(), name="test")) == 300
    ahead = [n - first for first, n in enumerate(begun_before)]
    assert begun_at_first == [3]
    assert max(ahead) > 4


def test_chunks_on_their_way_to_mirrors_take_little_memory(tmp_path):
    """They take 4 MiB per thread, for any number of stores, although a single span here decodes to 16 MiB."""
    halves = anndata.AnnData(np.full((1024, 4096), 0.5, np.float32))
    halves.write_h5ad(tmp_path / "halves.h5ad")
    for name in ("1.zarr", "2.zarr"):
        zl.convert(tmp_path / "halves.h5ad", tmp_path / name, progress=False)

    def warm(cache):
        dataset = zl.open_dataset([tmp_path / "1.zarr", tmp_path / "2.zarr"], cache=cache)
        return zl.warm(dataset, options=zl.FetchOptions(threads=1))

    warm(tmp_path / "imports and compiles")
    tracemalloc.start()
    try:
        warmed = warm(tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert warmed.bytes_held == warmed.bytes_in_all == 2 * halves.X.nbytes


class Endless:
    """A ByteSource of two uncompressed arrays longer than 2**32, generated as they are read: element i is i % 251."""

    CHUNK = 1000
    retries = 0

    async def read(self, spans):
        def stored(span):
            first = int(span.key.rsplit("/", 1)[1]) * self.CHUNK
            elements = (np.arange(first, first + self.CHUNK) % 251).astype("<u2")
            return elements.tobytes()[span.start : span.stop]

        return [stored(span) for span in spans]


class EveryObject(dict):
    """Object sizes as if every object existed and held one chunk."""

    def get(self, key, default=None):
        return 2 * Endless.CHUNK


@pytest.mark.parametrize("mirrored", [False, True], ids=["no mirror", "mirror"])
def test_values_beyond_2_to_the_32(tmp_path, mirrored):
    """The rows lie across 2**31, across 2**32 and at the end. Each has a block of the mirror to itself."""
    n_elements = (1 << 32) + 5000
    metadata = {
        "zarr_format": 3,
        "shape": [n_elements],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [Endless.CHUNK]}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    genes, values = (array_layout(f"X/{name}", metadata, absent_is_fill=False) for name in ("indices", "data"))
    edges = [0, (1 << 31) - 7, (1 << 31) + 5, (1 << 32) - 3, (1 << 32) + 9, n_elements - 11, n_elements - 2]
    matrix = MatrixLayout(path="X", n_rows=7, n_genes=251, genes=genes, values=values)
    size = RowForm.of(matrix, None, compact=False).block_rows  # of which all rows but one are empty
    matrix = replace(matrix, n_rows=7 * size)
    indptr = np.append(np.repeat(edges, size), n_elements)
    part = MatrixPart(
        url="made up",
        matrix=matrix,
        indptr=offsets_in_memory(indptr),
        object_sizes=EveryObject(),
        open_source=Endless,
        mirror=None,
    )
    rows = np.array([5, 1, 3, 6, 1]) * size + size - 1
    fetch = Fetch(number=0, rows=rows, order=np.arange(5), cuts=np.array([0, 2, 5]))
    mirror = mirror_of(part, tmp_path) if mirrored else None
    for _ in range(2):
        minibatches, counters = run(part, Endless(), [fetch], mirror=mirror)
        wanted = np.concatenate([np.arange(indptr[row], indptr[row + 1]) % 251 for row in rows])
        np.testing.assert_array_equal(np.concatenate([minibatch.x["X"].values for minibatch in minibatches]), wanted)
        np.testing.assert_array_equal(np.concatenate([minibatch.x["X"].indices for minibatch in minibatches]), wanted)
        assert [minibatch.index.tolist() for minibatch in minibatches] == [rows[:2].tolist(), rows[2:].tolist()]
    assert (counters.gets == 0) == mirrored
