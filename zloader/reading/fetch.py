"""The asyncio scheduler: loads fetches ahead, gathers their minibatches in threads, and puts them in order.

These are three coroutines with a queue between each two: `_load_ahead`, `_gather_in_order` and `_put_in_order`. How far
the first two may be ahead is decided by the gates of zloader.reading.gates. Any exit cancels all loads.
This module does not import torch: any process can go from plan to minibatch with plain options.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
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
from zloader.reading.forms import Form, Transforming
from zloader.reading.gates import Ahead, ByteBudget, GroupSizes
from zloader.reading.gather import SourceRows, indptr_of
from zloader.reading.matrix_reader import MatrixReader, Needed, opened_readers
from zloader.reading.matrix_rows import LoadedRows, needed_rows
from zloader.reading.recipe import PagedColumn, Recipe
from zloader.reading.resources import BufferPool, Counters, begun
from zloader.selecting.columns import ObsColumn
from zloader.selecting.groups import shares

log = logging.getLogger("zloader")


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A fetch whose elements are in memory: its rows in each matrix of x, and those in each paged column.

    `buffer`, and `ahead_bytes` of the memory of fetches, are given back when all its minibatches are made.
    """

    fetch: Fetch
    x: Sequence[LoadedRows]
    columns: Mapping[PagedColumn, LoadedRows]
    buffer: NDArray[np.uint8]
    ahead_bytes: int


# Minibatches that a thread makes, and the bytes of their x. After the last ones of a fetch comes the fetch itself.
_Jobs: TypeAlias = "asyncio.Queue[tuple[asyncio.Future[tuple[Sequence[Any], float]], int, int] | _Loaded | None]"


class GroupBytes:
    """Bytes of x and of the tokens in the minibatches between cuts of a fetch, or an upper bound.

    They are summed up over the rows of a fetch once, so that a group of minibatches costs two look-ups.
    """

    def __init__(self, recipe: Recipe, fetch: Fetch, x: Sequence[LoadedRows]) -> None:
        self._tokens = recipe.tokens
        # The bytes before each row in the order of the minibatches, and the transforms that will take more.
        self._gathered: list[tuple[Rows, Transforming | None]] = []
        for name, rows in zip(recipe.x, x, strict=True):
            if recipe.is_wanted(name):
                transforming = recipe.transforms.get(name)
                form = recipe.form if transforming is None else transforming.gathering
                self._gathered.append((indptr_of(rows.row_bytes(form)[fetch.order]), transforming))
            if recipe.tokens is not None and recipe.tokens.options.x == name:
                self._gathered.append((indptr_of(rows.row_bytes(rows.exact)[fetch.order]), None))
                self._lengths = rows.lengths[fetch.order]

    def __call__(self, cuts: Rows) -> int:
        """Those of the minibatches between the first and the last cut."""
        first, last = int(cuts[0]), int(cuts[-1])
        n_bytes = 0
        for before, transforming in self._gathered:
            gathered = int(before[last] - before[first])
            n_bytes += gathered + (0 if transforming is None else transforming.more_bytes(last - first, gathered))
        return n_bytes + (0 if self._tokens is None else self._tokens.n_bytes(self._lengths[first:last]))


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
        self._sizes = GroupSizes(options, grows=recipe.cutting.grows)
        self._columns: Mapping[str, ObsColumn] = {}
        self._obsm: Mapping[str, NDArray[Any] | PagedColumn] = {}
        self._totals: NDArray[Any] | None = None  # counts per row of the dataset, for tokens
        self._ends = recipe.ends

    def start(self, fetches: Iterable[Fetch], *, name: str) -> Bridge[MinibatchArrays]:
        """Iterates over the minibatches of `fetches`, which a thread called `name` prepares ahead."""
        return Bridge(partial(self._run, fetches), ready_bytes=self._options.ready_bytes, name=name)

    async def _run(self, fetches: Iterable[Fetch], put: Channel[MinibatchArrays]) -> None:
        """Puts every minibatch of `fetches`. Raises the first error of any read."""
        loads: asyncio.Queue[asyncio.Task[_Loaded] | None] = asyncio.Queue()
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
        loads: asyncio.Queue[asyncio.Task[_Loaded] | None],
        group: asyncio.TaskGroup,
    ) -> None:
        """Begins each load when there is room for it, and puts the loads into `loads` in order."""
        for turn, fetch in enumerate(fetches):
            await self._ahead.acquire()
            # Aside if it may read row offsets from a store.
            looks_up = any(reader.looks_up for reader in readers)
            needed = await aside(self._plan, fetch, readers) if looks_up else self._plan(fetch, readers)
            ahead_bytes = sum(rows.ahead_bytes for of_array in needed for rows in of_array.values())
            await self._room.acquire(ahead_bytes)
            loads.put_nowait(group.create_task(self._load(fetch, needed, ahead_bytes, turn)))
        loads.put_nowait(None)

    def _plan(self, fetch: Fetch, readers: list[MatrixReader]) -> list[dict[int, Needed]]:
        """What the fetch needs of each array, store by store."""
        n_stores = len(self._ends)
        at = dict(shares(self._ends, fetch.rows)) if n_stores else {}
        return [
            needed_rows(parts, readers[number * n_stores :], fetch.rows, at, self._ends)
            for number, parts in enumerate(self._recipe.arrays)
        ]

    async def _load(self, fetch: Fetch, needed: list[dict[int, Needed]], ahead_bytes: int, turn: int) -> _Loaded:
        buffer = self._buffers.take(sum(rows.buffer_bytes for of_array in needed for rows in of_array.values()))
        loads: list[list[asyncio.Task[list[SourceRows]]]] = [[] for _ in needed]
        used = 0
        async with asyncio.TaskGroup() as group:
            for of_array, tasks in zip(needed, loads, strict=True):
                for rows in of_array.values():
                    slot = buffer[used : used + rows.buffer_bytes]
                    used += rows.buffer_bytes
                    tasks.append(group.create_task(rows.reader.load(rows, slot, turn=turn)))
        loaded = [
            LoadedRows.of(parts, of_array, [rows for task in tasks for rows in task.result()], len(fetch.rows))
            for parts, of_array, tasks in zip(self._recipe.arrays, needed, loads, strict=True)
        ]
        n_matrices = len(self._recipe.x)
        return _Loaded(
            fetch=fetch,
            x=loaded[:n_matrices],
            columns=dict(zip(self._recipe.columns.paged, loaded[n_matrices:], strict=True)),
            buffer=buffer,
            ahead_bytes=ahead_bytes,
        )

    def _without_x(self, loaded: _Loaded) -> MinibatchArrays:
        """All rows of a fetch without x. Their obs and obsm are taken for all at once, block by block."""
        rows = loaded.fetch.rows
        without_x = MinibatchArrays(
            x={},
            obs={name: column.taken(rows) for name, column in self._columns.items()},
            obsm={name: _taken(array, loaded) for name, array in self._obsm.items()},
            index=rows,
            sets=loaded.fetch.sets,
            present={name: has[rows] for name, has in self._recipe.columns.present.items()},
        )
        self._tell_of_missing_labels(without_x.obs)
        for values in [*(column.values for column in self._columns.values()), *self._obsm.values()]:
            if not isinstance(values, PagedColumn):
                page_cache.release(values)
        return without_x

    def _tell_of_missing_labels(self, obs: Mapping[str, NDArray[Any]]) -> None:
        told = self._recipe.columns.told
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
        loads: asyncio.Queue[asyncio.Task[_Loaded] | None],
        threads: ThreadPoolExecutor,
        jobs: _Jobs,
        put: Channel[MinibatchArrays],
    ) -> None:
        """Begins to gather the minibatches of each load in threads, as fast as they fit into memory."""
        recipe, columns = self._recipe, self._recipe.columns
        self._columns = await aside(columns.obs)
        self._obsm = await aside(columns.obsm)
        if self._recipe.tokens is not None and self._recipe.tokens.totals is not None:
            self._totals = await aside(self._recipe.tokens.totals)
        while (load := await loads.get()) is not None:
            began_s = time.perf_counter()
            loaded = await load
            busy_s = self.counters.decode_s + self.counters.gather_s
            self._ahead.loaded(began_s=began_s, now_s=time.perf_counter(), busy_s=busy_s)
            without_x, _ = await begun(threads, self._without_x, loaded)
            n_bytes = GroupBytes(recipe, loaded.fetch, loaded.x)
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
            if isinstance(job, _Loaded):
                self._buffers.give_back(job.buffer)
                self._room.release(job.ahead_bytes)
                self._ahead.release()
                continue
            making, x_bytes, claim = job
            minibatches, seconds = await making
            self.counters.gather_s += seconds
            held_bytes = self._sizes.made(x_bytes, sum(minibatch.nbytes for minibatch in minibatches))
            put.claimed(minibatches, held_bytes, claim)

    def _make(self, loaded: _Loaded, without_x: MinibatchArrays, cuts: Rows) -> Sequence[Any]:
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
        return self._recipe.cutting.cut(together, (cuts - cuts[0]).tolist())

    def _tokens(self, loaded: _Loaded, taken: Rows, rows: Rows) -> TokenRows | None:
        """The tokens of some rows. They are made of the counts as stored, in whatever form minibatches have x."""
        tokens = self._recipe.tokens
        if tokens is None:
            return None
        of_matrix = dict(zip(self._recipe.x, loaded.x, strict=True))[tokens.options.x]
        x = of_matrix.x(taken, of_matrix.exact)
        assert isinstance(x, CsrArrays)
        return tokens.rows(x, rows, None if self._totals is None else self._totals[rows])

    def _x(self, loaded: _Loaded, taken: Rows, rows: Rows) -> dict[str, X]:
        x: dict[str, X] = {}
        for name, of_matrix in zip(self._recipe.x, loaded.x, strict=True):
            transforming = self._recipe.transforms.get(name)
            if not self._recipe.is_wanted(name):
                continue
            if transforming is None:
                x[name] = of_matrix.x(taken, self._recipe.form)
            else:
                x[name] = of_matrix.transformed(taken, rows, transforming)
        return x


def _taken(array: NDArray[Any] | PagedColumn, loaded: _Loaded) -> NDArray[Any]:
    """The rows of a fetch from an obsm array. Rows that it lacks are zeros."""
    rows = loaded.fetch.rows
    if not isinstance(array, PagedColumn):
        return array[rows]
    x = loaded.columns[array].x(np.arange(len(rows)), Form(dense=True, dtype=None))
    assert isinstance(x, np.ndarray)
    return x.astype(array.parts[0].matrix.values.dtype, copy=False).reshape(len(rows), *array.row_shape)


def read_at_once(recipe: Recipe, rows: Rows, options: FetchOptions) -> MinibatchArrays:
    """The minibatch of some rows, in the order given."""
    fetch = Fetch(number=0, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))
    (minibatch,) = FetchScheduler(recipe, options, BufferPool()).start([fetch], name="zloader-take")
    return minibatch
