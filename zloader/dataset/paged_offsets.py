"""The row offsets (indptr) of a large matrix, read page by page when one of their rows is first needed.

A billion rows have 8 GB of offsets, and a fetch needs those of a few hundred blocks. A page has about 65 536 entries,
in whole stored chunks. With a cache, pages are kept in a file of the mirror, so that processes share them and a process
holds none. Without a cache, or if it has no room, up to 512 MiB of pages are kept in memory, at 4 bytes per row, which
is all of them for 134 million rows. Of more rows, a fetch reads most of its pages again.

zarr reads a chunk that is missing as zeros, which writers use to leave out the chunks of leading empty rows. So entries
that begin with 0 are accepted only if all entries before them are 0 too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.caching.mirror import MirrorArray
from zloader.common import page_cache
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError
from zloader.common.locks import forkable_lock
from zloader.common.records import Rows
from zloader.storage.layout import ArrayLayout, distinct
from zloader.storage.metadata import IndptrCheck

log = logging.getLogger("zloader")
# In entries. A page has at least one stored chunk, and each of the others at least one page.
_PAGE = 1 << 16
_READ_ENTRIES = 1 << 19  # of consecutive pages, read at once
_STEP_ENTRIES = 1 << 23  # decoded together: 64 MiB
_MOST_KEPT = 1 << 27  # in memory: 512 MiB if a page spans less than 2**32 values

Read = Callable[[int, int], NDArray[np.integer]]
_Compact: TypeAlias = tuple[int, NDArray[np.integer]]  # the first entry of a page, and the differences from it


def pages_of(path: str, n_entries: int, chunk_entries: int) -> ArrayLayout:
    """The pages of an array of offsets as chunks of an array in a mirror. A page is one or more stored chunks."""
    chunk_entries = max(1, chunk_entries)
    chunk_elements = chunk_entries * max(1, _PAGE // chunk_entries)
    return ArrayLayout.plain(path, np.dtype(np.int64), n_elements=n_entries, chunk_elements=chunk_elements)


class PagedOffsets:
    """The offsets of the rows of a CSR matrix with `n_values` stored values.

    `read(start, stop)` reads entries from the store, and `where` names them in messages. Entries of a chunk that the
    store lacks have to be read as 0, if they are read at all.
    """

    def __init__(
        self, pages: ArrayLayout, read: Read, *, n_values: int, where: str, mirror: MirrorArray | None
    ) -> None:
        self._pages, self._read, self._mirror = pages, read, mirror
        self._n_values, self._where = n_values, where
        self._width = pages.chunk_elements
        self._kept: dict[int, _Compact] = {}  # pages in memory, which the mirror does not take
        self._most_kept = max(1, _MOST_KEPT // self._width)
        self._n_zeros = 0  # so many entries, from the first on, are known to be 0
        self._lock, self._dropped = forkable_lock(), False

    def bounds(self, rows: Rows) -> tuple[Rows, Rows]:
        """The first value of each row and the value after its last. Reads the pages that are missing.

        Raises FormatError for offsets that do not ascend, and any ReadError.
        """
        if not len(rows):
            return rows, rows
        found = self._found(np.concatenate([rows, rows + 1]))
        starts, stops = found[: len(rows)], found[len(rows) :]
        wrong = np.flatnonzero(stops < starts)  # between two pages; within a page it was checked
        if len(wrong):
            raise self._damaged(int(rows[wrong[0]]))
        return starts, stops

    def load_all(self) -> None:
        """Writes all pages to the mirror, if there is one and as long as it takes them."""
        mirror = self._mirror
        if mirror is None:
            return
        missing = mirror.missing(np.arange(self._pages.n_chunks))
        if mirror.writable:
            for first, values in self._read_pages(missing):
                mirror.put(first, values)
                if not mirror.writable:
                    return
        self._record_verified(mirror)

    def whole(self) -> NDArray[np.integer]:
        """All entries as one array: memory-mapped with a mirror, otherwise a new array of 8 bytes per row."""
        self.load_all()
        mapped = None if self._mirror is None else self._mirror.complete()
        if mapped is not None:
            return mapped
        whole = np.empty(self._pages.n_elements, np.int64)
        for first, values in self._read_pages(np.arange(self._pages.n_chunks)):
            whole[first * self._width : first * self._width + len(values)] = values
        return whole

    def _found(self, entries: Rows) -> Rows:
        """The values of some entries: of each page from the mirror, else from memory, else from the store."""
        of_page = entries // self._width
        pages = distinct(of_page)
        missing = self._not_mirrored(pages)
        if not len(missing):
            return self._mirrored(entries)
        found = np.empty(len(entries), np.int64)
        held = ~np.isin(of_page, missing)
        if held.any():
            found[held] = self._mirrored(entries[held])
        order = np.argsort(of_page, kind="stable")
        at = dict(zip(pages.tolist(), np.split(order, np.searchsorted(of_page[order], pages)[1:]), strict=True))
        for page, (first, differences) in self._kept_or_read(missing):
            found[at[page]] = first + differences[entries[at[page]] - page * self._width].astype(np.int64)
        return found

    def _not_mirrored(self, pages: Rows) -> Rows:
        mirror = self._mirror
        if mirror is None:
            return pages
        if mirror.contains(pages):
            return pages[:0]
        missing = mirror.missing(pages)
        if not len(missing):
            self._record_verified(mirror)  # other processes may have filled it
        return missing

    def _record_verified(self, mirror: MirrorArray) -> None:
        if mirror.n_present == self._pages.n_chunks:
            mirror.record_verified()

    def _mirrored(self, entries: Rows) -> Rows:
        mirror = self._mirror
        assert mirror is not None
        values, at = mirror.rows(entries, entries + 1)
        found = np.asarray(values[at])
        page_cache.release(mirror.content)
        return found

    def _kept_or_read(self, pages: Rows) -> Iterator[tuple[int, _Compact]]:
        """Pages that the mirror lacks. Those that are read are stored in it if it takes them, otherwise in memory."""
        with self._lock:  # several epochs may run at once
            kept = {page: self._kept[page] for page in pages.tolist() if page in self._kept}
        yield from kept.items()
        mirror, missing = self._mirror, [page for page in pages.tolist() if page not in kept]
        for first_page, values in self._read_pages(np.array(missing, np.int64)):
            if mirror is not None and mirror.writable:
                mirror.put(first_page, values)
            keeps = mirror is None or not mirror.writable
            for page, begin in enumerate(range(0, len(values), self._width), first_page):
                compact = _compact(values[begin : begin + self._width])
                if keeps:
                    self._keep(page, compact)
                yield page, compact
        if mirror is not None and missing:
            self._record_verified(mirror)

    def _keep(self, page: int, compact: _Compact) -> None:
        """Keeps a page in memory, in place of the one that has been there longest if there are many."""
        with self._lock:
            self._kept[page] = compact
            if len(self._kept) > self._most_kept:
                del self._kept[next(iter(self._kept))]
                if not self._dropped:
                    log.warning(
                        "%s is too large to stay in memory and is read repeatedly: open the store with a cache that "
                        "has room for it",
                        self._where,
                    )
                self._dropped = True

    def _read_pages(self, pages: Rows) -> Iterator[tuple[int, Rows]]:
        """The checked entries of some pages (ascending), in runs of consecutive pages, each with its first page."""
        check = IndptrCheck(self._where, self._n_values)  # also compares a run with the one before, if they adjoin
        step = max(1, _STEP_ENTRIES // self._width)
        for begin in range(0, len(pages), step):
            for first, values in self._read_step(pages[begin : begin + step]):
                check(first * self._width, values)
                self._require_fit(first * self._width, values)
                yield first, values

    def _read_step(self, pages: Rows) -> list[tuple[int, Rows]]:
        most = max(1, _READ_ENTRIES // self._width)
        runs = [
            run[first : first + most]
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
            for first in range(0, len(run), most)
        ]

        def read(run: Rows) -> tuple[int, Rows]:
            start, stop = int(run[0]) * self._width, min((int(run[-1]) + 1) * self._width, self._pages.n_elements)
            return int(run[0]), self._read(start, stop).astype(np.int64, copy=False)

        return concurrently(read, runs)

    def _require_fit(self, start: int, values: Rows) -> None:
        """Raises FormatError if entries read from the store do not follow those before, or precede those after."""
        stop = start + len(values)
        if start and values[0] == 0:
            self._require_zeros(start)
        if values[-1] == 0:
            self._n_zeros = max(self._n_zeros, stop)
        before, after = self._held(start - 1), self._held(stop)
        if before is not None and before > values[0]:
            raise self._damaged(start - 1)
        if after is not None and after < values[-1]:
            raise self._damaged(stop - 1)

    def _require_zeros(self, stop: int) -> None:
        """Raises FormatError unless all entries before `stop` are 0.

        Entry `stop` is, either because the rows before it are empty, or because its chunk is missing. Such a chunk must
        not pass for rows without values.
        """
        while (start := self._n_zeros) < stop:
            end = min(start + max(_READ_ENTRIES, self._width), stop)
            if self._read(start, end).any():
                raise self._damaged(stop - 1)
            self._n_zeros = max(self._n_zeros, end)

    def _held(self, entry: int) -> int | None:
        """The value of an entry if its page is in the mirror or in memory, otherwise None."""
        page, within = divmod(entry, self._width)
        if not 0 <= entry < self._pages.n_elements:
            return None
        if self._mirror is not None and self._mirror.contains(np.array([page])):
            return int(self._mirrored(np.array([entry]))[0])
        with self._lock:
            compact = self._kept.get(page)
        return None if compact is None else compact[0] + int(compact[1][within])

    def _damaged(self, row: int) -> FormatError:
        return FormatError(
            f"{self._where} is wrong at row {row} ({self._n_values} values are stored): the store is damaged"
        )


def _compact(values: Rows) -> _Compact:
    """The first entry, and the differences of all entries from it in the narrower dtype that holds them."""
    first = int(values[0])
    differences = values - first
    return first, differences.astype(np.uint32) if differences[-1] < 1 << 32 else differences
