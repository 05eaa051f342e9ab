"""The asyncio scheduler: loads fetches ahead, gathers their minibatches and puts them in order, bounded throughout.

`prefetch` fetches are loaded while the one before them is gathered. Leaving, for whatever reason, cancels every load.
Nothing here knows of torch: this is the stretch from plan to minibatch that any process can run from plain options.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zloader import gather
from zloader.bridge import Put
from zloader.layout import MatrixLayout
from zloader.mirror import Mirror
from zloader.plan import Fetch
from zloader.reader import ArrayReader, BufferPool, Counters, Elements, Workshop
from zloader.terms import CsrArrays, FetchOptions, MinibatchArrays, Rows, Source

# Minibatches that one job gathers: enough to make the hand-over between threads cheap, few enough to keep all busy.
_GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What minibatches are made of, beside the rows.

    `url` names the store in messages; `matrix` is None when no x is wanted; `indptr` belongs to a CSR matrix; `obs`
    holds one value for every row of the dataset, given out as `obs_dtypes`; `object_sizes` gives the bytes of each
    stored object; `dtype` is that of x.
    """

    url: str
    matrix: MatrixLayout | None
    indptr: NDArray[np.integer] | None
    obs: Mapping[str, NDArray[np.generic]]
    obs_dtypes: Mapping[str, np.dtype[np.generic]]
    object_sizes: Mapping[str, int]
    dense: bool
    dtype: str


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A fetch whose elements are in memory: of the genes (CSR only) and of the values."""

    fetch: Fetch
    lengths: Rows
    elements: tuple[Elements, ...]


class FetchScheduler:
    """Makes the minibatches of some fetches, in order; `run` is what a Bridge runs."""

    def __init__(
        self, recipe: Recipe, source: Source, mirror: Mirror | None, options: FetchOptions, buffers: BufferPool
    ) -> None:
        self.counters = Counters()
        self._buffers = buffers
        self._recipe = recipe
        self._source = source
        self._mirror = mirror
        self._options = options

    async def run(self, fetches: Iterable[Fetch], put: Put[MinibatchArrays]) -> None:
        """Puts every minibatch of `fetches`; raises the first error of any read."""
        upcoming = iter(fetches)
        with ThreadPoolExecutor(self._options.threads, thread_name_prefix="zloader-worker") as threads:
            shop = Workshop(
                url=self._recipe.url,
                options=self._options,
                source=self._source,
                object_sizes=self._recipe.object_sizes,
                counters=self.counters,
                threads=threads,
                buffers=self._buffers,
            )
            readers = self._readers(shop)
            try:
                async with asyncio.TaskGroup() as group:
                    loads: deque[asyncio.Task[_Loaded]] = deque()
                    while len(loads) <= self._options.prefetch and (fetch := next(upcoming, None)) is not None:
                        loads.append(group.create_task(self._load(fetch, readers)))
                    while loads:
                        loaded = await loads.popleft()
                        await self._emit(loaded, shop, put)
                        if (fetch := next(upcoming, None)) is not None:
                            loads.append(group.create_task(self._load(fetch, readers)))
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _readers(self, shop: Workshop) -> list[ArrayReader]:
        arrays = () if self._recipe.matrix is None else self._recipe.matrix.arrays
        mirrored = {} if self._mirror is None else self._mirror.arrays
        return [ArrayReader(layout, mirrored.get(layout.path), shop) for layout in arrays]

    async def _load(self, fetch: Fetch, readers: list[ArrayReader]) -> _Loaded:
        if self._recipe.matrix is None:
            return _Loaded(fetch=fetch, lengths=np.zeros(len(fetch.rows), np.int64), elements=())
        starts, stops = self._recipe.matrix.elements_of(fetch.rows, self._recipe.indptr)
        elements = await asyncio.gather(*(reader.load(starts, stops) for reader in readers))
        return _Loaded(fetch=fetch, lengths=stops - starts, elements=tuple(elements))

    async def _emit(self, loaded: _Loaded, shop: Workshop, put: Put[MinibatchArrays]) -> None:
        """Gathers the minibatches of one fetch in threads and puts them in order."""
        jobs: deque[asyncio.Task[tuple[list[MinibatchArrays], float]]] = deque()
        async with asyncio.TaskGroup() as group:
            for numbers in _groups(len(loaded.fetch.cuts) - 1):
                jobs.append(group.create_task(shop.run(self._make, loaded, numbers)))
                if len(jobs) > self._options.threads:
                    await self._put(await jobs.popleft(), put)
            while jobs:
                await self._put(await jobs.popleft(), put)
        for elements in loaded.elements:
            if elements.buffer is not None:
                shop.buffers.give_back(elements.buffer)

    async def _put(self, made: tuple[list[MinibatchArrays], float], put: Put[MinibatchArrays]) -> None:
        minibatches, seconds = made
        self.counters.gather_s += seconds
        await put(minibatches, sum(minibatch.nbytes for minibatch in minibatches))

    def _make(self, loaded: _Loaded, numbers: range) -> list[MinibatchArrays]:
        cuts = loaded.fetch.cuts
        return [self._minibatch(loaded, loaded.fetch.order[cuts[k] : cuts[k + 1]]) for k in numbers]

    def _minibatch(self, loaded: _Loaded, taken: Rows) -> MinibatchArrays:
        """The minibatch of the rows at positions `taken` of a fetch."""
        rows = loaded.fetch.rows[taken]
        dtypes = self._recipe.obs_dtypes
        obs = {name: column[rows].astype(dtypes[name], copy=False) for name, column in self._recipe.obs.items()}
        return MinibatchArrays(x=self._x(loaded, taken), obs=obs, index=rows)

    def _x(self, loaded: _Loaded, taken: Rows) -> CsrArrays | NDArray[np.generic] | None:
        matrix, dtype = self._recipe.matrix, self._recipe.dtype
        if matrix is None:
            return None
        if matrix.genes is None:
            (values,) = loaded.elements
            from_dense = gather.dense_from_dense if self._recipe.dense else gather.csr_from_dense
            return from_dense(values.source, values.starts[taken], n_genes=matrix.n_genes, dtype=dtype)
        genes, values = loaded.elements
        starts = (genes.starts[taken], values.starts[taken])
        from_csr = gather.dense_from_csr if self._recipe.dense else gather.csr_from_csr
        return from_csr(genes.source, values.source, starts, loaded.lengths[taken], n_genes=matrix.n_genes, dtype=dtype)


def _groups(n: int) -> Iterator[range]:
    return (range(begin, min(begin + _GROUP, n)) for begin in range(0, n, _GROUP))
