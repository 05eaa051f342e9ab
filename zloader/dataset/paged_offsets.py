"""The row offsets (indptr) of a large matrix, read page by page when one of their rows is first needed.

A billion rows have 8 GB of offsets, and a fetch needs those of a few hundred blocks. A page has about 65 536 entries,
in whole stored chunks. Up to 512 MiB of pages are kept in memory, at 4 bytes per row, which is all of them for 134
million rows. Of more rows, a fetch reads most of its pages again. With a cache, all entries are read at once and kept
there instead (store.py).

zarr reads a chunk that is missing as zeros, which writers use to leave out the chunks of leading empty rows. So entries
that begin with 0 are accepted only if all entries before them are 0 too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError
from zloader.common.locks import forkable_lock
from zloader.common.records import Rows
from zloader.storage.layout import distinct

log = logging.getLogger("zloader")
# In entries. A page has at least one stored chunk, and each of the others at least one page.
_PAGE = 1 << 16
_READ_ENTRIES = 1 << 19  # of consecutive pages, read at once
_STEP_ENTRIES = 1 << 23  # decoded together: 64 MiB
_MOST_KEPT = 1 << 27  # in memory: 512 MiB if a page spans less than 2**32 values

Read = Callable[[int, int], NDArray[np.integer]]
_Compact: TypeAlias = tuple[int, NDArray[np.integer]]  # the first entry of a page, and the differences from it


def page_of(chunk_entries: int) -> int:
    """The entries of a page of an array of offsets: those of one or more stored chunks."""
    chunk_entries = max(1, chunk_entries)
    return chunk_entries * max(1, _PAGE // chunk_entries)


class PagedOffsets:
    """The offsets of the rows of a CSR matrix with `n_values` stored values, in pages of so many entries.

    `read(start, stop)` reads entries from the store, and `where` names them in messages. Entries of a chunk that the
    store lacks have to be read as 0, if they are read at all.
    """

    def __init__(self, n_entries: int, page_entries: int, read: Read, *, n_values: int, where: str) -> None:
        self.n_entries, self._width, self._read = n_entries, page_entries, read
        self._n_pages = -(-n_entries // page_entries)
        self._n_values, self._where = n_values, where
        self._kept: dict[int, _Compact] = {}
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

    def windows(self) -> Iterator[NDArray[np.integer]]:
        """All entries, in windows."""
        for _, values in self._read_pages(np.arange(self._n_pages)):
            yield values

    def _found(self, entries: Rows) -> Rows:
        """The values of some entries: of each page from memory, else from the store."""
        of_page, found = entries // self._width, np.empty(len(entries), np.int64)
        pages, order = distinct(of_page), np.argsort(of_page, kind="stable")
        at = dict(zip(pages.tolist(), np.split(order, np.searchsorted(of_page[order], pages)[1:]), strict=True))
        for page, (first, differences) in self._kept_or_read(pages):
            found[at[page]] = first + differences[entries[at[page]] - page * self._width].astype(np.int64)
        return found

    def _kept_or_read(self, pages: Rows) -> Iterator[tuple[int, _Compact]]:
        with self._lock:  # several epochs may run at once
            kept = {page: self._kept[page] for page in pages.tolist() if page in self._kept}
        yield from kept.items()
        missing = [page for page in pages.tolist() if page not in kept]
        for first_page, values in self._read_pages(np.array(missing, np.int64)):
            for page, begin in enumerate(range(0, len(values), self._width), first_page):
                compact = _compact(values[begin : begin + self._width])
                self._keep(page, compact)
                yield page, compact

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
        last, after_last = 0, 0
        step = max(1, _STEP_ENTRIES // self._width)
        for begin in range(0, len(pages), step):
            for first, values in self._read_step(pages[begin : begin + step]):
                start = first * self._width
                self._require_ascending(start, values, last if start == after_last else 0)
                self._require_fit(start, values)
                last, after_last = int(values[-1]), start + len(values)
                yield first, values

    def _read_step(self, pages: Rows) -> list[tuple[int, Rows]]:
        most = max(1, _READ_ENTRIES // self._width)
        runs = [
            run[first : first + most]
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
            for first in range(0, len(run), most)
        ]

        def read(run: Rows) -> tuple[int, Rows]:
            start, stop = int(run[0]) * self._width, min((int(run[-1]) + 1) * self._width, self.n_entries)
            return int(run[0]), self._read(start, stop).astype(np.int64, copy=False)

        return concurrently(read, runs)

    def _require_ascending(self, start: int, values: Rows, before: int) -> None:
        """Raises FormatError unless entries ascend, from the one before them and to the number of values."""
        wrong = (values < np.append(before, values[:-1])) | (values > self._n_values)
        wrong[0] |= start == 0 and values[0] != 0
        if wrong.any():
            raise self._damaged(max(0, start + int(np.argmax(wrong)) - 1))

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
        """The value of an entry if its page is in memory, otherwise None."""
        page, within = divmod(entry, self._width)
        if not 0 <= entry < self.n_entries:
            return None
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
