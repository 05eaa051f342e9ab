"""What an epoch costs: GETs and bytes, counted before they are spent.

The cost is counted, not guessed: the plan's own fetches become chunks, spans and reads by the functions that the
reader uses, with the real shard indexes, which are all that is read for it beside indptr. Walking a fetch takes some
7 ms (4 million rows, 245 fetches: 2 s), so of a longer epoch only some fetches are walked (100 million rows of 1 460
values: 4 fetches, the indexes of 1 300 shards, 60 MB).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from zloader.common.options import FetchOptions
from zloader.common.records import Rows, Span
from zloader.dataset.dataset import Dataset
from zloader.dataset.store import OpenedStore
from zloader.dataset.summary import stored_bytes
from zloader.order.plan import Plan
from zloader.reading.bridge import Bridge, Put
from zloader.reading.fetch import shares
from zloader.reading.reader import PADDING_BYTES
from zloader.storage.layout import (
    ArrayLayout,
    MatrixLayout,
    chunk_spans,
    chunks_of,
    closed,
    distinct,
    total_bytes,
    widened,
)

MOST_FETCHES = 256  # an epoch of more is walked in part
SAMPLED_FETCHES = 4  # each of hundreds of blocks from all over the dataset

Indexes = Mapping[int, NDArray[np.uint64]]
_DEFAULTS = FetchOptions()


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """GETs and bytes that the values of one epoch take, shard indexes included, as Loader.statistics() counts them.

    `exact` is False where some fetches stand for all; with a mirror it is then an upper bound.
    """

    gets: int
    bytes_read: int
    exact: bool


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """One epoch without a mirror, and the first one that fills a mirror; the epochs after that one read nothing."""

    unmirrored: EpochCost
    first_mirrored: EpochCost


def epoch_costs(
    dataset: Dataset, plan: Plan, *, x: str = "X", options: FetchOptions = _DEFAULTS, most_fetches: int = MOST_FETCHES
) -> EpochCosts:
    """Counts the reads that an epoch of `plan` makes for the matrix `x`; reads its indptr and shard indexes.

    An epoch of more than `most_fetches` is walked in part.
    Raises FormatError for a matrix that cannot be read, and any ReadError.
    """
    stores = list(zip(dataset.stores, dataset.matrices(x), strict=True))
    ends = np.cumsum([matrix.n_rows for _, matrix in stores], dtype=np.int64)
    numbers = _walked(plan, most_fetches)
    exact = len(numbers) == plan.n_fetches
    every, first = _Count(), _Count()
    for (store, matrix), fetches in zip(stores, _rows_by_store(plan, ends, numbers), strict=True):
        steps = list(_chunks_by_array(matrix, store.indptr(matrix), fetches))
        for array, wanted in zip(matrix.arrays, list(zip(*steps, strict=True)) or repeat(()), strict=False):
            indexes = read_indexes(store, array, _shards(array, wanted), options)
            every.add(array, wanted, indexes, options)
            run = array.chunks_in(options.least_read_bytes, store.object_sizes()) if plan.sweeps else 1
            gap = int(options.gap_bytes / max(1.0, array.chunk_bytes(store.object_sizes())))
            first.add(array, _unseen(array, wanted, run, gap), indexes, replace(options, gap_bytes=PADDING_BYTES))
            # Fetches that were not walked touch the other shards, too.
            with_index = _indexed(store, array, indexes if exact else range(array.n_shards))
            for count in (every, first):
                count.add_indexes(array, with_index)
    if exact:
        return EpochCosts(unmirrored=every.cost(), first_mirrored=first.cost())
    unmirrored = every.cost(scale=plan.n_rows / plan.world_size / (len(numbers) * plan.fetch_rows))
    return EpochCosts(unmirrored=unmirrored, first_mirrored=_at_most(stores, unmirrored))


def _at_most(stores: Sequence[tuple[OpenedStore, MatrixLayout]], unmirrored: EpochCost) -> EpochCost:
    """With a mirror no chunk is read twice, so an epoch takes no more than the whole matrix, chunk by chunk."""
    arrays = [(store, array) for store, matrix in stores for array in matrix.arrays]
    chunks = sum(array.n_chunks + array.n_shards for _, array in arrays)
    whole = sum(stored_bytes(store, array) for store, array in arrays)
    return EpochCost(gets=min(chunks, unmirrored.gets), bytes_read=min(whole, unmirrored.bytes_read), exact=False)


def _walked(plan: Plan, most_fetches: int) -> Sequence[int]:
    """The fetches to walk: all, or some that are spread evenly, without the last, which may be short."""
    if plan.n_fetches <= most_fetches:
        return range(plan.n_fetches)
    numbers: list[int] = np.unique(np.linspace(0, max(0, plan.n_fetches - 2), SAMPLED_FETCHES).astype(int)).tolist()
    return numbers


def _rows_by_store(plan: Plan, ends: Rows, numbers: Sequence[int]) -> list[list[Rows]]:
    """For each store the rows that each fetch takes of it, counted from its first."""
    taken: list[list[Rows]] = [[] for _ in ends]
    begins = np.append(0, ends[:-1])
    for number in numbers:
        rows = plan.fetch(number).rows
        for store, at in shares(ends, rows):
            taken[store].append(rows[at] - begins[store])
    return taken


def _chunks_by_array(
    matrix: MatrixLayout, indptr: NDArray[np.integer] | None, fetches: Sequence[Rows]
) -> Iterator[list[Rows]]:
    """For each fetch the chunks that it needs of each array."""
    for rows in fetches:
        starts, stops = matrix.elements_of(rows, indptr)
        yield [chunks_of(starts, stops, array.chunk_elements) for array in matrix.arrays]


def _shards(array: ArrayLayout, wanted: Sequence[Rows]) -> list[int]:
    found: list[int] = distinct(np.concatenate([np.empty(0, np.int64), *wanted]) // array.chunks_per_shard).tolist()
    return found


def _indexed(store: OpenedStore, array: ArrayLayout, shards: Iterable[int]) -> int:
    """How many of the shards have an index to read."""
    return sum(array.sharded and array.shard_key(shard) in store.objects for shard in shards)


def _unseen(array: ArrayLayout, wanted: Sequence[Rows], run: int, gap: int) -> list[Rows]:
    """The chunks that each fetch reads where a mirror keeps them.

    All but the first take whole runs of chunks, and all what lies in gaps of at most so many chunks.
    """
    seen = np.zeros(array.n_chunks, bool)
    unseen = []
    for turn, chunks in enumerate(wanted):
        wide = chunks if seen[chunks].all() else closed(array, widened(array, chunks, run if turn else 1), gap)
        unseen.append(wide[~seen[wide]])
        seen[wide] = True
    return unseen


@dataclass(kw_only=True)
class _Count:
    gets: int = 0
    n_bytes: int = 0
    index_gets: int = 0
    index_bytes: int = 0

    def add(self, array: ArrayLayout, wanted: Sequence[Rows], indexes: Indexes, options: FetchOptions) -> None:
        """Counts the reads that bring the chunks of each fetch."""
        for chunks in wanted:
            spans, _ = chunk_spans(
                array, chunks, indexes, gap_bytes=options.gap_bytes, max_read_bytes=options.max_read_bytes
            )
            self.gets += len(spans)
            self.n_bytes += total_bytes(spans)

    def add_indexes(self, array: ArrayLayout, shards: int) -> None:
        """Counts the index of each of so many shards."""
        self.index_gets += shards
        self.index_bytes += shards * array.index_bytes

    def cost(self, scale: float | None = None) -> EpochCost:
        """The epoch's cost; with a `scale`, of one that is so many times what was walked."""
        return EpochCost(
            gets=round(self.gets * (scale or 1)) + self.index_gets,
            bytes_read=round(self.n_bytes * (scale or 1)) + self.index_bytes,
            exact=scale is None,
        )


def read_indexes(
    store: OpenedStore, array: ArrayLayout, shards: Sequence[int], options: FetchOptions = _DEFAULTS
) -> dict[int, NDArray[np.uint64]]:
    """The index of each shard: offset and size of its chunks. One GET each, none for arrays without shards.

    Raises MissingObjectError for a shard that must be there, and any ReadError.
    """
    sizes = store.object_sizes()
    indexes: dict[int, NDArray[np.uint64]] = {}
    spans: dict[int, Span] = {}
    for shard in shards:
        found = array.find_index(shard, sizes.get(array.shard_key(shard)), store.location.url)
        if isinstance(found, Span):
            spans[shard] = found
        else:
            indexes[shard] = found
    source = store.source(options)

    async def produce(put: Put[list[bytes]]) -> None:
        await put([await source.read(list(spans.values()))], 0)

    (stored,) = Bridge(produce, ready_bytes=1, name="zloader-indexes") if spans else ([],)
    for shard, body in zip(spans, stored, strict=True):
        indexes[shard] = array.parse_index(body, shard=shard, object_size=sizes[array.shard_key(shard)])
    return indexes
