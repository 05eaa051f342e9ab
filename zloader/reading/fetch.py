"""The asyncio scheduler: loads fetches ahead, gathers their minibatches in threads, and puts them in order.

These are three coroutines with a queue between each two: `_load_ahead`, `_gather_in_order` and `_put_in_order`. How far
the first two may be ahead is decided by the gates of zloader.reading.gates. Any exit cancels all loads.
This module does not import torch: any process can go from plan to minibatch with plain options.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.compiled import load_compiler
from zloader.common.concurrent_calls import aside
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, MinibatchArrays, Rows, TokenRows, X
from zloader.order.plan import Fetch
from zloader.reading.bridge import Bridge, Channel
from zloader.reading.forms import Form
from zloader.reading.gates import Ahead, ByteBudget, GroupSizes
from zloader.reading.gather import SourceRows, indptr_of
from zloader.reading.matrix_reader import MatrixReader, Needed, opened_readers
from zloader.reading.matrix_rows import LoadedRows
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool, Counters, begun
from zloader.selecting.columns import ObsColumn
from zloader.selecting.groups import shares

log = logging.getLogger("zloader")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A fetch whose elements are in memory: its rows in each of the `arrays` of the recipe.

    `buffer`, and `ahead_bytes` of the memory of fetches, are given back when all its minibatches are made.
    """

    fetch: Fetch
    arrays: Sequence[LoadedRows]
    buffer: NDArray[np.uint8]
    ahead_bytes: int


# Minibatches that a thread makes, and the bytes of their x. After the last ones of a fetch comes the fetch itself.
_Jobs: TypeAlias = "asyncio.Queue[tuple[asyncio.Future[tuple[Sequence[Any], float]], int, int] | Loaded | None]"
_Loads: TypeAlias = "asyncio.Queue[asyncio.Task[Loaded] | None]"


def bytes_between(recipe: Recipe, fetch: Fetch, arrays: Sequence[LoadedRows]) -> Callable[[Rows], int]:
    """Counts bytes of x and of the tokens in the minibatches between the first and the last of some cuts, at most.

    They are summed up over the rows of a fetch once, so that a group of minibatches costs two look-ups.
    """
    per_row, tokens = np.zeros(len(fetch.rows), np.int64), recipe.tokens
    for name, rows in zip(recipe.x, arrays, strict=False):
        if recipe.is_wanted(name):
            transforming = recipe.transforms.get(name)
            if transforming is None:
                per_row += rows.row_bytes(recipe.form)
            else:
                gathered = rows.row_bytes(transforming.gathering)
                per_row += gathered + transforming.more_bytes(1, gathered)
        if tokens is not None and tokens.options.x == name:
            per_row += rows.row_bytes(rows.exact)
            lengths = rows.lengths[fetch.order]
    before = indptr_of(per_row[fetch.order])

    def between(cuts: Rows) -> int:
        first, last = int(cuts[0]), int(cuts[-1])
        return int(before[last] - before[first]) + (0 if tokens is None else tokens.n_bytes(lengths[first:last]))

    return between


class FetchScheduler:
    """Makes the minibatches of some fetches, in order. `start` runs it on its own thread."""

    def __init__(self, recipe: Recipe, options: FetchOptions, buffers: BufferPool) -> None:
        if recipe.compiled:
            load_compiler()
        self.counters = Counters()
        self._buffers = buffers
        self._recipe = recipe
        self._options = options
        self._ahead, self._room = Ahead(options), ByteBudget(options.buffer_bytes)
        self._sizes = GroupSizes(options, grows=recipe.grows)
        self._columns: Mapping[str, ObsColumn] = {}
        self._obsm: Mapping[str, NDArray[Any]] = {}
        self._totals: NDArray[Any] | None = None  # counts per row of the dataset, for tokens
        self._ends = recipe.ends

    def start(self, fetches: Iterable[Fetch], *, name: str) -> Bridge[MinibatchArrays]:
        """Iterates over the minibatches of `fetches`, which a thread called `name` prepares ahead."""
        return Bridge(partial(self._run, fetches), ready_bytes=self._options.ready_bytes, name=name)

    async def _run(self, fetches: Iterable[Fetch], put: Channel[MinibatchArrays]) -> None:
        """Puts every minibatch of `fetches`. Raises the first error of any read."""
        loads: _Loads = asyncio.Queue()
        jobs: _Jobs = asyncio.Queue()
        recipe, counters = self._recipe, self.counters
        parts = [part for of_array in recipe.arrays for part in of_array]
        # Gathering has its own threads, so that minibatches do not queue behind the decoding of later fetches.
        with (
            opened_readers(parts, self._options, counters, sweeps=recipe.sweeps) as readers,
            ThreadPoolExecutor(self._options.threads, thread_name_prefix="zloader-gather") as gathering,
        ):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._load_ahead(fetches, readers, loads, group))
                    group.create_task(self._put_in_order(jobs, put))
                    await self._gather_in_order(loads, gathering, jobs, put)
            finally:
                gathering.shutdown(wait=False, cancel_futures=True)

    async def _load_ahead(
        self,
        fetches: Iterable[Fetch],
        readers: list[MatrixReader],
        loads: _Loads,
        group: asyncio.TaskGroup,
    ) -> None:
        """Begins each load when there is room for it, and puts the loads into `loads` in order."""
        for turn, fetch in enumerate(fetches):
            await self._ahead.acquire()
            looks_up = any(reader.looks_up for reader in readers)  # which may read from a store
            needed = await aside(self._plan, fetch, readers) if looks_up else self._plan(fetch, readers)
            ahead_bytes = sum(rows.ahead_bytes for of_array in needed for rows in of_array)
            await self._room.acquire(ahead_bytes)
            loads.put_nowait(group.create_task(self._load(fetch, needed, ahead_bytes, turn)))
        loads.put_nowait(None)

    def _plan(self, fetch: Fetch, readers: Sequence[MatrixReader]) -> list[list[Needed]]:
        """What the fetch needs of each array, store by store."""
        n_stores, arrays = len(self._ends), []
        of_stores = list(shares(self._ends, fetch.rows)) if n_stores else []
        for first in range(0, len(readers), n_stores or 1):
            arrays.append(list[Needed]())
            for number, at in of_stores:
                reader = readers[first + number]
                rows, at = reader.part.held(fetch.rows[at] - (self._ends[number] - reader.part.n_rows), at)
                if len(rows):
                    arrays[-1].append(reader.needed(at, rows))
        return arrays

    async def _load(self, fetch: Fetch, needed: list[list[Needed]], ahead_bytes: int, turn: int) -> Loaded:
        buffer = self._buffers.take(sum(rows.buffer_bytes for of_array in needed for rows in of_array))
        loads: list[list[asyncio.Task[list[SourceRows]]]] = [[] for _ in needed]
        used = 0
        async with asyncio.TaskGroup() as group:
            for of_array, tasks in zip(needed, loads, strict=True):
                for rows in of_array:
                    slot = buffer[used : used + rows.buffer_bytes]
                    used += rows.buffer_bytes
                    tasks.append(group.create_task(rows.reader.load(rows, slot, turn=turn)))
        loaded = [
            LoadedRows.of(parts, of_array, [rows for task in tasks for rows in task.result()], len(fetch.rows))
            for parts, of_array, tasks in zip(self._recipe.arrays, needed, loads, strict=True)
        ]
        return Loaded(fetch=fetch, arrays=loaded, buffer=buffer, ahead_bytes=ahead_bytes)

    def _without_x(self, loaded: Loaded) -> MinibatchArrays:
        """All rows of a fetch without x. Their obs and obsm are taken for all at once, block by block."""
        rows, recipe, obsm = loaded.fetch.rows, self._recipe, {}
        for (name, paged), of_array in zip(recipe.paged.items(), loaded.arrays[len(recipe.x) :], strict=True):
            array: Any = of_array.x(np.arange(len(rows)), Form(dense=True, dtype=None))  # zeros in rows that it lacks
            dtype = paged.parts[0].matrix.values.dtype
            obsm[name] = array.astype(dtype, copy=False).reshape(len(rows), *paged.row_shape)
        without_x = MinibatchArrays(
            x={},
            obs={name: column.taken(rows) for name, column in self._columns.items()},
            obsm=obsm | {name: array[rows] for name, array in self._obsm.items()},
            index=rows,
            sets=loaded.fetch.sets,
            present={name: has[rows] for name, has in recipe.present.items()},
        )
        self._tell_of_missing_labels(without_x.obs)
        for values in [*(column.values for column in self._columns.values()), *self._obsm.values()]:
            page_cache.release(values)
        return without_x

    def _tell_of_missing_labels(self, obs: Mapping[str, NDArray[Any]]) -> None:
        told = self._recipe.told
        for name in obs.keys() - told:
            if self._columns[name].coded is not None and len(obs[name]) and obs[name].min() < 0:
                told.add(name)
                log.warning(
                    "some rows have no label in %r, and the code -1: give torch's cross_entropy ignore_index=-1, or "
                    "leave these rows out with dataset.where(%r)",
                    name,
                    f"{name if name.isidentifier() else f'`{name}`'}.notna()",
                )

    async def _gather_in_order(
        self,
        loads: _Loads,
        threads: ThreadPoolExecutor,
        jobs: _Jobs,
        put: Channel[MinibatchArrays],
    ) -> None:
        """Begins to gather the minibatches of each load in threads, as fast as they fit into memory."""
        recipe = self._recipe
        self._columns, self._obsm = await aside(recipe.obs), await aside(recipe.obsm)
        if recipe.tokens is not None and recipe.tokens.totals is not None:
            self._totals = await aside(recipe.tokens.totals)
        while (load := await loads.get()) is not None:
            began_s = time.perf_counter()
            loaded = await load
            busy_s = self.counters.decode_s + self.counters.gather_s
            self._ahead.loaded(began_s=began_s, now_s=time.perf_counter(), busy_s=busy_s)
            without_x, _ = await begun(threads, self._without_x, loaded)
            n_bytes = bytes_between(recipe, loaded.fetch, loaded.arrays)
            for cuts in self._sizes.groups(loaded.fetch.cuts, n_bytes):
                x_bytes = n_bytes(cuts)
                claim = self._sizes.claim(x_bytes)
                await put.claim(claim)
                jobs.put_nowait((begun(threads, self._make, loaded, without_x, cuts), x_bytes, claim))
            jobs.put_nowait(loaded)
        jobs.put_nowait(None)

    async def _put_in_order(self, jobs: _Jobs, put: Channel[MinibatchArrays]) -> None:
        """Puts minibatches as they are made, and frees each fetch after its last one."""
        while (job := await jobs.get()) is not None:
            if isinstance(job, Loaded):
                self._buffers.give_back(job.buffer)
                self._room.release(job.ahead_bytes)
                self._ahead.release()
                continue
            making, x_bytes, claim = job
            minibatches, seconds = await making
            self.counters.gather_s += seconds
            held_bytes = self._sizes.made(x_bytes, sum(minibatch.nbytes for minibatch in minibatches))
            put.claimed(minibatches, held_bytes, claim)

    def _make(self, loaded: Loaded, without_x: MinibatchArrays, cuts: Rows) -> Sequence[Any]:
        """Gathers the minibatches between cuts."""
        taken = loaded.fetch.order[cuts[0] : cuts[-1]]
        rows = without_x.index[taken]
        together = MinibatchArrays(
            x=self._x(loaded, taken, rows),
            obs={name: values[taken] for name, values in without_x.obs.items()},
            obsm={name: array[taken] for name, array in without_x.obsm.items()},
            index=rows,
            tokens=self._tokens(loaded, taken, rows),
            sets=None if without_x.sets is None else without_x.sets[taken],
            present={name: has[taken] for name, has in without_x.present.items()},
        )
        return self._recipe.cut(together, (cuts - cuts[0]).tolist())

    def _tokens(self, loaded: Loaded, taken: Rows, rows: Rows) -> TokenRows | None:
        """The tokens of some rows. They are made of the counts as stored, in whatever form minibatches have x."""
        tokens = self._recipe.tokens
        if tokens is None:
            return None
        of_matrix = dict(zip(self._recipe.x, loaded.arrays, strict=False))[tokens.options.x]
        x = of_matrix.x(taken, of_matrix.exact)
        assert isinstance(x, CsrArrays)
        return tokens.rows(x, rows, None if self._totals is None else self._totals[rows])

    def _x(self, loaded: Loaded, taken: Rows, rows: Rows) -> dict[str, X]:
        x: dict[str, X] = {}
        for name, of_matrix in zip(self._recipe.x, loaded.arrays, strict=False):
            transforming = self._recipe.transforms.get(name)
            if not self._recipe.is_wanted(name):
                continue
            if transforming is None:
                x[name] = of_matrix.x(taken, self._recipe.form)
            else:
                x[name] = of_matrix.transformed(taken, rows, transforming)
        return x


def read_at_once(recipe: Recipe, rows: Rows, options: FetchOptions) -> MinibatchArrays:
    """The minibatch of some rows, in the order given."""
    fetch = Fetch(number=0, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))
    (minibatch,) = FetchScheduler(recipe, options, BufferPool()).start([fetch], name="zloader-take")
    return minibatch
