"""The row offsets (indptr) of a large matrix, read page by page when one of their rows is first needed.

A billion rows have 8 GB of offsets, and a fetch needs those of a few hundred blocks. A page has about 65 536 entries,
in whole stored chunks. With a cache, pages are kept in a file of the mirror, so that processes share them and a process
holds none. Without a cache, up to 512 MiB of pages are kept in memory, at 4 bytes per row, which is all of them for 134
million rows. Of more rows, a fetch reads most of its pages again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.caching.mirror import MirrorArray
from zloader.common import page_cache
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError
from zloader.common.records import Rows
from zloader.storage.layout import ArrayLayout, distinct
from zloader.storage.metadata import IndptrCheck

log = logging.getLogger("zloader")
_PAGE = 1 << 16  # entries
_READ_PAGES = 8  # consecutive pages read at once
_STEP_PAGES = 128  # decoded together: 64 MiB
_MOST_PAGES = 2048  # kept in memory: 512 MiB if a page spans less than 2**32 values

Read = Callable[[int, int], NDArray[np.integer]]
_Compact: TypeAlias = tuple[int, NDArray[np.integer]]  # the first entry of a page, and the differences from it


def pages_of(path: str, n_entries: int, chunk_entries: int) -> ArrayLayout:
    """The pages of an array of offsets as chunks of an array in a mirror. A page is one or more stored chunks."""
    chunk_entries = max(1, chunk_entries)
    return ArrayLayout(
        path=path,
        dtype=np.dtype(np.int64),
        n_elements=n_entries,
        chunk_elements=chunk_entries * max(1, _PAGE // chunk_entries),
        chunks_per_shard=1,
        codecs=(),
        sharded=False,
        index_checksum=False,
        index_at_end=False,
        key_prefix="",
        separator="/",
        n_dims=1,
        fill_value=0,
        absent_is_fill=False,
    )


class PagedOffsets:
    """The offsets of the rows of a CSR matrix with `n_values` stored values.

    `read(start, stop)` reads entries from the store, and `where` names them in messages.
    """

    def __init__(
        self, pages: ArrayLayout, read: Read, *, n_values: int, where: str, mirror: MirrorArray | None
    ) -> None:
        self._pages, self._read, self._mirror = pages, read, mirror
        self._n_values, self._where = n_values, where
        self._kept: dict[int, _Compact] = {}  # pages in memory, without a mirror
        self._lock, self._dropped = threading.Lock(), False

    def bounds(self, rows: Rows) -> tuple[Rows, Rows]:
        """The first value of each row and the value after its last. Reads the pages that are missing.

        Raises FormatError for offsets that do not ascend, and any ReadError.
        """
        if not len(rows):
            return rows, rows
        entries = np.concatenate([rows, rows + 1])
        pages = distinct(entries // self._pages.chunk_elements)
        find = self._from_memory if self._mirror is None else self._from_mirror
        found = find(entries, pages)
        starts, stops = found[: len(rows)], found[len(rows) :]
        wrong = np.flatnonzero(stops < starts)  # between two pages; within a page it was checked
        if len(wrong):
            raise self._damaged(int(rows[wrong[0]]))
        return starts, stops

    def load_all(self) -> None:
        """Writes all pages to the mirror, if there is one."""
        if self._mirror is not None:
            self._fill(self._mirror, np.arange(self._pages.n_chunks))

    def whole(self) -> NDArray[np.integer]:
        """All entries as one array: memory-mapped with a mirror, otherwise a new array of 8 bytes per row."""
        self.load_all()
        if self._mirror is not None and self._mirror.contains(np.arange(self._pages.n_chunks)):
            return self._mirror.elements
        return self._read_entries(0, self._pages.n_elements)

    def _from_mirror(self, entries: Rows, pages: Rows) -> Rows:
        mirror = self._mirror
        assert mirror is not None
        if not mirror.contains(pages):
            self._fill(mirror, pages)
        if not mirror.contains(pages):
            return self._from_memory(entries, pages)  # the disk is full
        values, at = mirror.rows(entries, entries + 1)
        found = np.asarray(values[at])
        page_cache.release(mirror.content)
        return found

    def _fill(self, mirror: MirrorArray, pages: Rows) -> None:
        missing = mirror.missing(pages)
        for first, values in self._read_pages(missing):
            if mirror.writable:
                mirror.put(first, values)
        if len(missing) and mirror.n_present == self._pages.n_chunks:
            mirror.record_verified()

    def _from_memory(self, entries: Rows, pages: Rows) -> Rows:
        of_page, within = np.divmod(entries, self._pages.chunk_elements)
        order = np.argsort(of_page, kind="stable")
        at = dict(zip(pages.tolist(), np.split(order, np.searchsorted(of_page[order], pages)[1:]), strict=True))
        found = np.empty(len(entries), np.int64)

        def fill(page: int, first: int, differences: NDArray[np.integer]) -> None:
            found[at[page]] = first + differences[within[at[page]]].astype(np.int64)

        with self._lock:  # several epochs may run at once
            kept = {page: self._kept[page] for page in at if page in self._kept}
        for page, compact in kept.items():
            fill(page, *compact)
        missing = [page for page in at if page not in kept]
        for first_page, values in self._read_pages(np.array(missing, np.int64)):
            for page, begin in enumerate(range(0, len(values), self._pages.chunk_elements), first_page):
                compact = _compact(values[begin : begin + self._pages.chunk_elements])
                fill(page, *compact)
                self._keep(page, compact)
        return found

    def _keep(self, page: int, compact: _Compact) -> None:
        """Keeps a page in memory, in place of the one that has been there longest if there are many."""
        with self._lock:
            self._kept[page] = compact
            if len(self._kept) > _MOST_PAGES:
                del self._kept[next(iter(self._kept))]
                if not self._dropped:
                    log.warning(
                        "%s is too large to stay in memory and is read repeatedly: open it with cache=", self._where
                    )
                self._dropped = True

    def _read_pages(self, pages: Rows) -> Iterator[tuple[int, Rows]]:
        """The entries of some pages (ascending), in runs of consecutive pages, each with its first page."""
        for first in range(0, len(pages), _STEP_PAGES):
            yield from self._read_step(pages[first : first + _STEP_PAGES])

    def _read_step(self, pages: Rows) -> list[tuple[int, Rows]]:
        width = self._pages.chunk_elements
        runs = [
            run[first : first + _READ_PAGES]
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
            for first in range(0, len(run), _READ_PAGES)
        ]

        def read(run: Rows) -> tuple[int, Rows]:
            start, stop = int(run[0]) * width, min((int(run[-1]) + 1) * width, self._pages.n_elements)
            return int(run[0]), self._read_entries(start, stop)

        return concurrently(read, runs)

    def _read_entries(self, start: int, stop: int) -> Rows:
        values = self._read(start, stop).astype(np.int64, copy=False)
        IndptrCheck(self._where, self._n_values)(start, values)
        return values

    def _damaged(self, row: int) -> FormatError:
        return FormatError(
            f"{self._where} is wrong at row {row} ({self._n_values} values are stored): the store is damaged"
        )


def _compact(values: Rows) -> _Compact:
    """The first entry, and the differences of all entries from it in the narrower dtype that holds them."""
    first = int(values[0])
    differences = values - first
    return first, differences.astype(np.uint32) if differences[-1] < 1 << 32 else differences
