"""The row offsets (indptr) of a CSR matrix, an array that is read by chunk when one of its rows is first needed.

Up to 4 million entries are one page; more are read in pages of about 65 536 entries, in whole stored chunks. Up to
512 MiB of pages stay in memory, at 4 bytes per row, which is all of them for 134 million rows.

A chunk that is missing reads as zeros, which writers use to leave out the chunks of leading empty rows. So a page that
begins with 0 is accepted only if all pages before it are 0 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError
from zloader.common.locks import forkable_lock
from zloader.common.records import Rows

# In entries.
MOST_WHOLE = 1 << 22
_PAGE = 1 << 16
_STEP = 1 << 23  # decoded together: 64 MiB
_MOST_KEPT = 1 << 27

Read = Callable[[int, int], NDArray[np.integer]]
Page: TypeAlias = tuple[int, NDArray[np.integer]]  # its first entry, and the differences from it


class RowOffsets:
    """The `n_entries` offsets of the rows of a matrix with `n_values` stored values, in chunks of so many entries.

    `read(start, stop)` reads entries from the store, and `where` names them in messages. Entries of a chunk that the
    store lacks have to be read as 0, or else all entries given as one chunk. Pages stay in `kept`.
    """

    def __init__(
        self, read: Read, n_entries: int, chunk: int, *, n_values: int, where: str, kept: dict[int, Page] | None = None
    ) -> None:
        self._read, self.n_entries, self._n_values, self._where = read, n_entries, n_values, where
        self._width = n_entries if n_entries <= MOST_WHOLE else max(1, chunk) * max(1, _PAGE // max(1, chunk))
        self._n_zeros = 0  # so many pages, from the first on, are known to be 0
        self._kept: dict[int, Page] = {} if kept is None else kept
        self._lock = forkable_lock()

    @property
    def is_whole(self) -> bool:
        """Whether all entries are one page, which `load` reads."""
        return self._width >= self.n_entries

    def load(self) -> None:
        """Reads the first page. Raises FormatError for offsets that do not ascend, and any ReadError."""
        self._page(0)

    def bounds(self, rows: Rows) -> tuple[Rows, Rows]:
        """The first value of each row and the value after its last. Raises the errors of `load`."""
        if self.is_whole or not len(rows):
            return self._values(0, rows), self._values(0, rows + 1)
        entries = np.concatenate([rows, rows + 1])
        of_page, found = entries // self._width, np.empty(len(entries), np.int64)
        order = np.argsort(of_page, kind="stable")
        pages, firsts = np.unique(of_page[order], return_index=True)
        places = dict(zip(pages.tolist(), np.split(order, firsts[1:]), strict=True))
        step = max(1, _STEP // self._width)
        for begin in range(0, len(pages), step):
            some = pages[begin : begin + step].tolist()
            values = concurrently(lambda page: self._values(page, entries[places[page]] - page * self._width), some)
            for page, of_rows in zip(some, values, strict=True):
                found[places[page]] = of_rows
        starts, stops = found[: len(rows)], found[len(rows) :]
        wrong = np.flatnonzero(stops < starts)  # between two pages; within a page it was checked
        if len(wrong):
            raise self._damaged(int(rows[wrong[0]]))
        return starts, stops

    def _values(self, number: int, within: Rows) -> Rows:
        """The values of some entries of a page."""
        if not len(within):
            return within
        first, differences = self._page(number)
        return first + differences[within].astype(np.int64)

    def _page(self, number: int) -> Page:
        page = self._kept.get(number)
        if page is None and self.is_whole:  # which several reads wait for
            with self._lock:
                page = self._kept.get(number)
                return self._read_page(number) if page is None else page
        return self._read_page(number) if page is None else page

    def _read_page(self, number: int) -> Page:
        start = number * self._width
        values = self._read(start, min(start + self._width, self.n_entries)).astype(np.int64, copy=False)
        self._require_ascending(number, start, values)
        differences = values - values[0]
        page = int(values[0]), differences.astype(np.uint32) if differences[-1] < 1 << 32 else differences
        self._kept[number] = page
        if len(self._kept) > max(1, _MOST_KEPT // self._width):  # the one that has been there longest goes
            oldest, *_ = list(self._kept)  # at once, because other epochs may change it
            self._kept.pop(oldest, None)
        return page

    def _require_ascending(self, number: int, start: int, values: Rows) -> None:
        """Raises FormatError unless a page ascends to the number of values, and follows those before it."""
        wrong = (values > self._n_values) | (np.diff(values, prepend=0) < 0)
        wrong[0] |= not start and values[0] != 0
        if wrong.any():
            raise self._damaged(max(0, start + int(np.argmax(wrong)) - 1))
        if start and not values[0]:
            for page in range(self._n_zeros, number):
                if _last(self._page(page)):
                    raise self._damaged(start - 1)
                self._n_zeros = page + 1
        before, after = self._kept.get(number - 1), self._kept.get(number + 1)
        if before is not None and _last(before) > values[0]:
            raise self._damaged(start - 1)
        if after is not None and after[0] < values[-1]:
            raise self._damaged(start + len(values) - 1)

    def _damaged(self, row: int) -> FormatError:
        return FormatError(
            f"{self._where} is wrong at row {row} ({self._n_values} values are stored): the store is damaged"
        )


def _last(page: Page) -> int:
    return page[0] + int(page[1][-1])
