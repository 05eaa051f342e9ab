"""Counts the GETs and bytes of an epoch before it runs.

The counts come from the plan's own fetches and the planner that the reader uses, so nothing is guessed. Only indptr and
the shard indexes are read. Planning one fetch takes about 7 ms (245 fetches of 4 million rows: 2 s), so a longer epoch
is sampled: for 100 million rows of 1 460 values, it plans 4 fetches and reads the indexes of 1 300 shards (60 MB).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from zloader.common.checks import one_or_more
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.dataset import Dataset
from zloader.dataset.store import OpenedStore
from zloader.order.plan import Plan
from zloader.reading.bridge import Bridge, Channel
from zloader.reading.chunks import ShardIndexes
from zloader.reading.read_plan import FillPlanner
from zloader.selecting.groups import shares
from zloader.storage.layout import ArrayLayout, MatrixLayout, ObjectIndex, chunks_of, distinct, reads_of
from zloader.storage.row_blocks import RowForm
from zloader.storage.row_offsets import RowOffsets

MOST_FETCHES = 256  # a longer epoch is sampled
SAMPLED_FETCHES = 4  # a few are enough, because each has hundreds of blocks from all over the dataset

Indexes = Mapping[int, ObjectIndex]
_DEFAULTS = FetchOptions()


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """GETs and bytes that an epoch reads of its matrices, including their shard indexes.

    Loader.statistics() counts the same, and beside it the reads of large obsm arrays of which each fetch reads its rows
    (obsm_arrays.py). Those are not counted here. `exact` is False if the epoch was sampled, and the cost is estimated.
    """

    gets: int
    bytes_read: int
    exact: bool


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """The cost of an epoch without a mirror, and of the first epoch that fills one. Later epochs read nothing.

    The mirror takes blocks of rows, and the chunks at the ends of a run of blocks are read with both of its neighbours.
    """

    unmirrored: EpochCost
    first_mirrored: EpochCost


def epoch_costs(
    dataset: Dataset,
    plan: Plan,
    *,
    x: str | Sequence[str] = "X",
    options: FetchOptions = _DEFAULTS,
    most_fetches: int = MOST_FETCHES,
) -> EpochCosts:
    """Counts the reads that an epoch of `plan` makes for the matrix `x`, or several; reads indptr and shard indexes.

    A matrix that is transposed in memory is read before the epoch.
    An epoch of more than `most_fetches` fetches is sampled.
    Raises FormatError if a matrix cannot be read, and any ReadError.
    """
    names = one_or_more(x=x)
    stores = [pair for name in names for pair in zip(dataset.stores, dataset.matrices.layouts(name), strict=True)]
    ends = np.cumsum([store.n_obs for store in dataset.stores], dtype=np.int64)
    numbers: Sequence[int] = range(plan.n_fetches)
    if plan.n_fetches > most_fetches:  # an evenly spaced few
        numbers = np.unique(np.linspace(0, plan.n_fetches - 1, SAMPLED_FETCHES).astype(int)).tolist()
    exact = len(numbers) == plan.n_fetches
    every, first, later, n_left, n_later = _Count(), _Count(), _Count(), 0, 0
    taken = _rows_by_store(plan, ends, numbers)
    for (store, matrix), fetches in zip(stores, taken * len(names), strict=True):
        if store.transposing_bytes(matrix):
            continue
        of_matrix = [store.rows_in(matrix.path, rows) for rows in fetches]
        sizes, form = store.object_sizes(), RowForm.of(matrix, None, compact=False)
        fill = FillPlanner.of(matrix, form, options, sizes, sweeps=plan.sweeps)
        filled = _unseen(fill, [distinct(rows // form.block_rows) for rows in of_matrix])
        of_first, of_later = (filled, []) if exact else (filled[:1], filled[1:])
        n_left += form.n_blocks - sum(map(len, of_first))
        n_later += sum(map(len, of_later))
        filling = [_rows_of(form, fill, some) for some in (of_first, of_later)]
        for count, of_reads in zip((every, first, later), (of_matrix, *filling), strict=True):
            steps = list(_chunks_by_array(matrix, store.offsets(matrix), of_reads))
            for array, wanted in zip(matrix.arrays, list(zip(*steps, strict=True)) or repeat(()), strict=False):
                chunks = np.concatenate([np.empty(0, np.int64), *wanted])
                indexes = _read_indexes(store, array, chunks, options)
                count.add(array, options, wanted, indexes)
                # In a sampled epoch, the other fetches need the other shards, too.
                if (size := array.placement.index_bytes) and count is not later:
                    needed = indexes if exact else range(array.n_shards)
                    n_indexes = sum(array.shard_key(shard) in store.objects for shard in needed)
                    count.index_gets += n_indexes
                    count.index_bytes += n_indexes * size
    if exact:
        return EpochCosts(unmirrored=every.cost(), first_mirrored=first.cost())
    scale = plan.n_rows / plan.world_size / sum(map(plan.n_positions, numbers))
    # The first fetch reads less around what it needs. Those after it read each block that is left once, at most.
    first.extend(later, min(scale, n_left / max(1, n_later)))
    return EpochCosts(unmirrored=every.cost(scale), first_mirrored=first.cost(1))


def _rows_by_store(plan: Plan, ends: Rows, numbers: Sequence[int]) -> list[list[Rows]]:
    """For each store, the rows that each fetch takes from it, counted from the store's first row."""
    taken: list[list[Rows]] = [[] for _ in ends]
    begins = np.append(0, ends[:-1])
    for number in numbers:
        rows = plan.fetch(number).rows
        for store, at in shares(ends, rows):
            taken[store].append(rows[at] - begins[store])
    return taken


def _chunks_by_array(matrix: MatrixLayout, indptr: RowOffsets | None, fetches: Sequence[Rows]) -> Iterator[list[Rows]]:
    """For each fetch, the chunks that it needs from each array."""
    for rows in fetches:
        starts, stops = matrix.elements_of(rows, indptr)
        yield [chunks_of(starts, stops, array) for array in matrix.arrays]


def _unseen(planner: FillPlanner, wanted: Sequence[Rows]) -> list[Rows]:
    """The blocks that each fetch reads when a mirror keeps those of the fetches before."""
    seen = np.zeros(planner.n_blocks, bool)
    unseen: list[Rows] = []
    for turn, blocks in enumerate(wanted):
        # As in MatrixReader.fill_mirror, a fetch that finds all its blocks reads nothing around them.
        planned = blocks if seen[blocks].all() else planner.to_fill(blocks, first_fetch=not turn)
        missing = planned[~seen[planned]]
        unseen.append(missing)
        seen[missing] = True
    return unseen


def _rows_of(form: RowForm, planner: FillPlanner, fetches: Sequence[Rows]) -> list[Rows]:
    """The rows that are read together for the blocks of some fetches."""
    return [form.rows_of(batch) for blocks in fetches for batch in planner.batches(blocks)]


@dataclass(kw_only=True)
class _Count:
    gets: int = 0
    n_bytes: int = 0
    index_gets: int = 0
    index_bytes: int = 0

    def add(self, array: ArrayLayout, options: FetchOptions, wanted: Sequence[Rows], indexes: Indexes) -> None:
        """Counts the reads for chunks that are read together."""
        gap_bytes, max_read_bytes = options.gap_bytes, options.max_read_bytes
        for chunks in wanted:
            reads = reads_of(array, chunks, indexes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
            self.gets += len(reads.spans)
            self.n_bytes += reads.n_bytes

    def extend(self, other: _Count, scale: float) -> None:
        """Adds what another count has found, several times."""
        self.gets += round(other.gets * scale)
        self.n_bytes += round(other.n_bytes * scale)

    def cost(self, scale: float | None = None) -> EpochCost:
        """The epoch's cost; `scale` extrapolates from a sample to the epoch."""
        return EpochCost(
            gets=round(self.gets * (scale or 1)) + self.index_gets,
            bytes_read=round(self.n_bytes * (scale or 1)) + self.index_bytes,
            exact=scale is None,
        )


def _read_indexes(
    store: OpenedStore, array: ArrayLayout, chunks: Rows, options: FetchOptions = _DEFAULTS
) -> dict[int, ObjectIndex]:
    """The index of each shard of some chunks: the offset and size of its chunks. Raises the errors of ShardIndexes."""
    source, indexes = store.source(options), ShardIndexes(array, store.object_sizes(), store.location.url)

    async def produce(put: Channel[dict[int, ObjectIndex]]) -> None:
        await put([await indexes.of(chunks, source.read)], 0)

    (found,) = Bridge(produce, ready_bytes=1, name="zloader-indexes")
    return found
