"""The asyncio scheduler: loads fetches ahead, gathers their minibatches in threads, and puts them in order.

While one fetch is gathered the next one is loaded, and up to `prefetch` of them if the epoch waits for reads rather
than for the processor, all within `buffer_bytes`. The reads of earlier fetches always go first. Any exit cancels all
loads.
This module does not import torch: any process can go from plan to minibatch with plain options.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching import page_cache
from zloader.common.compiled import load_compiler
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, MinibatchArrays, Rows
from zloader.order.plan import Fetch
from zloader.reading import gather, half_floats
from zloader.reading.bridge import Bridge, ByteBudget, Put, aside
from zloader.reading.matrix_parts import MatrixPart, opened_readers
from zloader.reading.reader import ArrayReader
from zloader.reading.resources import BufferPool, Counters, timed
from zloader.reading.slots import Elements, Needed
from zloader.selecting.columns import ObsColumn
from zloader.selecting.genes import ChosenGenes

# One job gathers a group of minibatches as one, and then cuts it apart. A group is large enough to make the hand-over
# between threads and the calls per store cheap, and small enough to keep all threads busy.
_GROUP = 8
_GROUP_BYTES = 16 << 20  # malloc takes larger blocks fresh from the system each time; one minibatch may exceed this


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make minibatches from rows.

    `parts` are in the order of their rows, and empty if no x is wanted. `columns` and `obsm` return the obs columns and
    obsm arrays of all rows of the dataset; they are called while the first rows are read. `dtype` and `genes` are those
    of x; None means all genes. `names` looks up the obs names of rows, for minibatches that carry them. `sweeping` says
    that the fetches make up a whole epoch.
    """

    parts: Sequence[MatrixPart]
    columns: Callable[[], Mapping[str, ObsColumn]]
    dense: bool
    dtype: str
    obsm: Callable[[], Mapping[str, NDArray[Any]]] = dict
    genes: ChosenGenes | None = None
    names: Callable[[Rows], NDArray[np.object_]] | None = None
    sweeping: bool = False

    @property
    def value_bytes(self) -> int:
        """Bytes per value of x while it is gathered."""
        return half_floats.value_bytes(self.dtype, [part.matrix.values.dtype for part in self.parts])

    @property
    def n_genes(self) -> int:
        """Columns of x."""
        return self.parts[0].matrix.n_genes if self.genes is None else len(self.genes)


def shares(ends: Rows, rows: Rows) -> list[tuple[int, Rows | slice]]:
    """The stores that contain `rows`, each with the positions of its rows; store k ends before row `ends[k]`."""
    if len(ends) == 1:
        return [(0, slice(None))]
    of = np.searchsorted(ends, rows, side="right")
    order = np.argsort(of, kind="stable")
    cuts = np.flatnonzero(np.diff(of[order], prepend=-1, append=len(ends))).tolist()
    return [(int(of[order[a]]), order[a:b]) for a, b in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The elements that a fetch needs from one array.

    They need a buffer of `n_bytes`. `ahead_bytes` is the memory that they take until they are gathered, in the buffer
    or in the page cache.
    """

    reader: ArrayReader
    needed: Needed
    n_bytes: int
    ahead_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A fetch before its reads. For each part that it touches, `at` has the positions of the part's rows.

    `wanted` has the elements needed from each of the part's arrays: genes (CSR only), then values. `lengths` are the
    elements per row.
    """

    fetch: Fetch
    at: dict[int, Rows | slice]
    wanted: dict[int, list[_Wanted]]
    lengths: Rows

    @property
    def n_bytes(self) -> int:
        """Buffer bytes for the decoded elements."""
        return sum(array.n_bytes for arrays in self.wanted.values() for array in arrays)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that it takes of `buffer_bytes`.

        Elements from a mirror count, too, because a small page cache would evict them.
        """
        return sum(array.ahead_bytes for arrays in self.wanted.values() for array in arrays)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A fetch whose elements are in memory. Row i is `lengths[i]` of its part's `elements`, from `starts` on.

    `starts` has the starts in the genes and in the values. `buffer` is given back when all minibatches are gathered.
    """

    planned: _Planned
    elements: dict[int, list[Elements]]
    starts: tuple[Rows, Rows]
    buffer: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class _RowArrays:
    """The obs columns, obsm arrays and obs names of a fetch's rows."""

    obs: dict[str, NDArray[Any]]
    obsm: dict[str, NDArray[Any]]
    names: NDArray[np.object_] | None


class FetchScheduler:
    """Makes the minibatches of some fetches, in order. `start` runs it on its own thread."""

    def __init__(self, recipe: Recipe, options: FetchOptions, buffers: BufferPool) -> None:
        self.counters = Counters()
        self._buffers = buffers
        self._recipe = recipe
        self._options = options
        self._room = ByteBudget(options.buffer_bytes)
        self._half_ready_bytes = (
            options.ready_bytes // 2
        )  # one half for minibatches being gathered, one for those that are ready
        # Memory that is used for the first time is slow, so an epoch starts with as little of it as it can.
        self._ahead = asyncio.Semaphore(2)
        self._most_ahead = options.prefetch - 1  # more fetches that may be loaded ahead, beyond the first one
        self._since, self._busy_s = 0.0, 0.0  # when the last load was complete, and the threads' seconds until then
        self._columns: Mapping[str, ObsColumn] = {}
        self._obsm: Mapping[str, NDArray[Any]] = {}
        self._ends = np.cumsum([part.matrix.n_rows for part in recipe.parts], dtype=np.int64)

    def start(self, fetches: Iterable[Fetch], *, name: str) -> Bridge[MinibatchArrays]:
        """Iterates over the minibatches of `fetches`, which a thread called `name` prepares ahead."""
        load_compiler()

        async def produce(put: Put[MinibatchArrays]) -> None:
            await self.run(fetches, put)

        return Bridge(produce, ready_bytes=self._half_ready_bytes, name=name)

    async def run(self, fetches: Iterable[Fetch], put: Put[MinibatchArrays]) -> None:
        """Puts every minibatch of `fetches`. Raises the first error of any read."""
        loads: asyncio.Queue[asyncio.Task[_Loaded] | None] = asyncio.Queue()
        counters, sweeping = self.counters, self._recipe.sweeping
        # Gathering has its own threads, so that minibatches do not queue behind the decoding of later fetches.
        with (
            opened_readers(self._recipe.parts, self._options, counters, sweeping=sweeping) as readers,
            ThreadPoolExecutor(self._options.threads, thread_name_prefix="zloader-gather") as gathering,
        ):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._load_ahead(fetches, readers, loads, group))
                    self._columns = await aside(self._recipe.columns)
                    self._obsm = await aside(self._recipe.obsm)
                    while (load := await loads.get()) is not None:
                        loaded = await self._loaded(load)
                        rows, names = loaded.planned.fetch.rows, None
                        if self._recipe.names is not None:  # aside, because it may read from the store
                            names = await aside(self._recipe.names, rows)
                        row_arrays, _ = await timed(gathering, self._take_row_arrays, rows, names)
                        await self._emit(loaded, row_arrays, gathering, put)
                        self._buffers.give_back(loaded.buffer)
                        self._room.release(loaded.planned.ahead_bytes)
                        self._ahead.release()
            finally:
                gathering.shutdown(wait=False, cancel_futures=True)

    async def _loaded(self, load: asyncio.Task[_Loaded]) -> _Loaded:
        """Waits for a load. If the epoch waits for reads, it loads one more fetch ahead from now on.

        It waits for reads if it waited most of the time since the last load, and most threads had nothing to do.
        """
        began = time.perf_counter()
        loaded = await load
        now, busy_s = time.perf_counter(), self.counters.decode_s + self.counters.gather_s
        since_s, idle_s = now - self._since, (now - self._since) * self._options.threads - (busy_s - self._busy_s)
        idle = 2 * (now - began) > since_s and 2 * idle_s > since_s * self._options.threads
        if idle and self._most_ahead and self._since:
            self._most_ahead -= 1
            self._ahead.release()
        self._since, self._busy_s = now, busy_s
        return loaded

    async def _load_ahead(
        self,
        fetches: Iterable[Fetch],
        readers: list[list[ArrayReader]],
        loads: asyncio.Queue[asyncio.Task[_Loaded] | None],
        group: asyncio.TaskGroup,
    ) -> None:
        """Begins each load when there is room for it, and puts the loads into `loads` in order."""
        for turn, fetch in enumerate(fetches):
            await self._ahead.acquire()
            planned = self._plan(fetch, readers)
            await self._room.acquire(planned.ahead_bytes)
            loads.put_nowait(group.create_task(self._load(planned, turn)))
        loads.put_nowait(None)

    def _plan(self, fetch: Fetch, readers: list[list[ArrayReader]]) -> _Planned:
        lengths = np.zeros(len(fetch.rows), np.int64)
        at = dict(shares(self._ends, fetch.rows)) if readers else {}
        wanted = {}
        for number, here in at.items():
            part = self._recipe.parts[number]
            rows = fetch.rows[here] - (self._ends[number] - part.matrix.n_rows)
            starts, stops = part.matrix.elements_of(rows, part.indptr)
            if part.indptr is not None:
                page_cache.release(part.indptr)
            lengths[here] = stops - starts
            wanted[number] = [_wanted_of(reader, starts, stops) for reader in readers[number]]
        return _Planned(fetch=fetch, at=at, wanted=wanted, lengths=lengths)

    async def _load(self, planned: _Planned, turn: int) -> _Loaded:
        n_rows, used = len(planned.lengths), 0
        starts = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64))
        buffer = self._buffers.take(planned.n_bytes)
        loads: dict[int, list[asyncio.Task[Elements]]] = {number: [] for number in planned.wanted}
        async with asyncio.TaskGroup() as group:
            for number, arrays in planned.wanted.items():
                for array in arrays:
                    slot = buffer[used : used + array.n_bytes]
                    used += array.n_bytes
                    load = array.reader.load(array.needed, slot, turn=turn)
                    loads[number].append(group.create_task(load))
        elements = {number: [load.result() for load in of_part] for number, of_part in loads.items()}
        for number, at in planned.at.items():
            for into, loaded in zip(starts[-len(elements[number]) :], elements[number], strict=True):
                into[at] = loaded.starts
        return _Loaded(planned=planned, elements=elements, starts=starts, buffer=buffer)

    def _take_row_arrays(self, rows: Rows, names: NDArray[np.object_] | None) -> _RowArrays:
        """The obs and obsm of a fetch, taken for all rows at once, block by block."""
        row_arrays = _RowArrays(
            obs={name: column.taken(rows) for name, column in self._columns.items()},
            obsm={name: array[rows] for name, array in self._obsm.items()},
            names=names,
        )
        for array in (*(column.values for column in self._columns.values()), *self._obsm.values()):
            page_cache.release(array)
        return row_arrays

    async def _emit(
        self, loaded: _Loaded, row_arrays: _RowArrays, threads: ThreadPoolExecutor, put: Put[MinibatchArrays]
    ) -> None:
        """Gathers the minibatches of one fetch in threads and puts them in order."""
        jobs: deque[tuple[int, asyncio.Task[tuple[list[MinibatchArrays], float]]]] = deque()
        making = 0  # bytes
        async with asyncio.TaskGroup() as group:
            for cuts in self._groups(loaded):
                n_bytes = self._x_bytes(loaded, cuts)
                while jobs and (len(jobs) > self._options.threads or making + n_bytes > self._half_ready_bytes):
                    made, job = jobs.popleft()
                    await self._put(await job, put)
                    making -= made
                jobs.append((n_bytes, group.create_task(timed(threads, self._make, loaded, row_arrays, cuts))))
                making += n_bytes
            for _, job in jobs:
                await self._put(await job, put)

    async def _put(self, made: tuple[list[MinibatchArrays], float], put: Put[MinibatchArrays]) -> None:
        minibatches, seconds = made
        self.counters.gather_s += seconds
        await put(minibatches, sum(minibatch.nbytes for minibatch in minibatches))

    def _groups(self, loaded: _Loaded) -> Iterator[Rows]:
        """For each group of minibatches that are gathered together, their cuts."""
        cuts = loaded.planned.fetch.cuts
        least = max(1, self._x_bytes(loaded, cuts) // max(1, len(cuts) - 1))  # bytes per minibatch, on average
        size = max(1, min(_GROUP, _GROUP_BYTES // least))
        return (cuts[begin : begin + size + 1] for begin in range(0, len(cuts) - 1, size))

    def _x_bytes(self, loaded: _Loaded, cuts: Rows) -> int:
        """Bytes of x in the minibatches between cuts; an upper bound for CSR from dense stores."""
        value_bytes = self._recipe.value_bytes
        if self._recipe.dense and self._recipe.parts:
            return int(cuts[-1] - cuts[0]) * self._recipe.n_genes * value_bytes
        lengths = loaded.planned.lengths[loaded.planned.fetch.order[cuts[0] : cuts[-1]]]
        if self._recipe.genes is not None:
            lengths = np.minimum(lengths, self._recipe.n_genes)
        return int(lengths.sum()) * (4 + value_bytes)

    def _make(self, loaded: _Loaded, row_arrays: _RowArrays, cuts: Rows) -> list[MinibatchArrays]:
        """Gathers the minibatches between cuts."""
        taken = loaded.planned.fetch.order[cuts[0] : cuts[-1]]
        rows = loaded.planned.fetch.rows[taken]
        obs = {name: values[taken] for name, values in row_arrays.obs.items()}
        obsm = {name: array[taken] for name, array in row_arrays.obsm.items()}
        names = None if row_arrays.names is None else row_arrays.names[taken]
        together = MinibatchArrays(x=self._x(loaded, taken, rows), obs=obs, obsm=obsm, index=rows, names=names)
        return [gather.cut(together, first, last) for first, last in pairwise((cuts - cuts[0]).tolist())]

    def _x(self, loaded: _Loaded, taken: Rows, rows: Rows) -> CsrArrays | NDArray[np.generic] | None:
        if not self._recipe.parts:
            return None
        parts = [_store_rows(loaded, number, taken[at], at) for number, at in shares(self._ends, rows)]
        if self._recipe.genes is not None:
            parts = [gather.choose(part, self._recipe.genes, ascending=not self._recipe.dense) for part in parts]
        gathered = gather.dense_rows if self._recipe.dense else gather.csr_rows
        try:
            return gathered(parts, len(rows), n_genes=self._recipe.n_genes, dtype=self._recipe.dtype)
        except gather.UnfitValue as unfit:
            raise self._explained(unfit, int(rows[unfit.row])) from None

    def _explained(self, unfit: gather.UnfitValue, row: int) -> OptionError:
        part = self._recipe.parts[int(np.searchsorted(self._ends, row, side="right"))]
        return OptionError(
            f"{part.matrix.path} of {part.url} holds {unfit.value!s} in row {row} of the dataset, which "
            f"{self._recipe.dtype} cannot hold: choose another dtype, such as 'float64'"
        )


def _wanted_of(reader: ArrayReader, starts: Rows, stops: Rows) -> _Wanted:
    needed = reader.needed(starts, stops)
    n_bytes = reader.buffer_bytes(needed)
    ahead_bytes = n_bytes or int((stops - starts).sum()) * reader.itemsize
    return _Wanted(reader=reader, needed=needed, n_bytes=n_bytes, ahead_bytes=ahead_bytes)


def _store_rows(loaded: _Loaded, number: int, taken: Rows, at: Rows | slice) -> gather.StoreRows:
    """The rows at positions `taken` of a fetch, all from one store, which go to `at` in the minibatch."""
    *genes, values = (elements.source for elements in loaded.elements[number])
    starts = (loaded.starts[0][taken], loaded.starts[1][taken])
    return gather.StoreRows(
        at=at, genes=genes[0] if genes else None, values=values, starts=starts, lengths=loaded.planned.lengths[taken]
    )
