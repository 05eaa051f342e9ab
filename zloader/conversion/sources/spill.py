"""What does not fit in memory, dealt to buckets in temporary files. They have no names, so they go with the process.

A spill has columns, a file each, and its items are written front to back in sections: what was in memory at once, in
the order of buckets. A bucket is read back from every section. Where the buckets end in each section is in a file,
too: there are as many such ends as sections times buckets.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import StoreError
from zloader.common.records import Rows

_CUTS_HELD = 1 << 20  # 8 MiB of them at once

Item = TypeVar("Item")


class Spill:
    """`n_buckets` buckets of items with a column of each of `dtypes`.

    Where there is no room for it, StoreError says for what `purpose` it would have been and how much `takes_bytes`.
    """

    def __init__(self, dtypes: Sequence[Any], *, n_buckets: int, purpose: str, takes_bytes: int) -> None:
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self._n_buckets, self._purpose, self._takes_bytes = n_buckets, purpose, takes_bytes
        self._columns = [_file() for _ in dtypes]
        self._cuts = _file()
        self._n_sections = self._n_items = 0

    def write(self, column: int, items: NDArray[Any]) -> None:
        """Appends items, of the column's dtype, to a column of the section being written."""
        assert items.dtype == self._dtypes[column]
        self._append(self._columns[column], items)

    def end_section(self, cuts: Rows) -> None:
        """Ends a section whose bucket b is its items `[cuts[b], cuts[b + 1])`."""
        self._append(self._cuts, cuts + self._n_items)
        self._n_sections += 1
        self._n_items += int(cuts[-1])

    def _append(self, file: Any, items: NDArray[Any]) -> None:
        left = memoryview(np.ascontiguousarray(items).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            raise StoreError(
                f"no room to {self._purpose} in {tempfile.gettempdir()} ({error.strerror}): it takes "
                f"{self._takes_bytes} bytes. Set TMPDIR to a larger disk"
            ) from error

    def buckets(self, first: int = 0) -> Iterator[Rows]:
        """For each bucket from `first` on: the items `[start, stop)` that it has in each section (sections x 2)."""
        at_once = max(1, _CUTS_HELD // max(1, self._n_sections))
        for begin in range(first, self._n_buckets, at_once):
            end = min(begin + at_once, self._n_buckets)
            cuts = np.empty((self._n_sections, end - begin + 1), np.int64)
            for section in range(self._n_sections):
                _read(self._cuts, section * (self._n_buckets + 1) + begin, cuts[section])
            for bucket in range(end - begin):
                yield cuts[:, bucket : bucket + 2]

    def read(self, column: int, cuts: Rows) -> NDArray[Any]:
        """The items of a column between the two `cuts` of each section, end to end."""
        items = np.empty(int((cuts[:, 1] - cuts[:, 0]).sum()), self._dtypes[column])
        at = 0
        for start, stop in cuts.tolist():
            _read(self._columns[column], start, items[at : at + stop - start])
            at += stop - start
        return items

    def close(self) -> None:
        """Frees the disk."""
        for file in (*self._columns, self._cuts):
            file.close()


def _file() -> Any:
    return tempfile.TemporaryFile(prefix="zloader-", buffering=0)


def _read(file: Any, start: int, items: NDArray[Any]) -> None:
    left, offset = memoryview(items.view(np.uint8)), start * items.itemsize  # type: ignore[arg-type]
    while left:
        n_read = os.preadv(file.fileno(), [left], offset)
        if n_read == 0:
            raise StoreError(f"a temporary file in {tempfile.gettempdir()} has lost its end: run convert again")
        left, offset = left[n_read:], offset + n_read


def rows_a_bucket(*, n_rows: int, held_bytes: int, bucket_bytes: int) -> int:
    """How many rows make a bucket of `bucket_bytes`, where all rows take `held_bytes`; at least one."""
    return max(1, -(-n_rows // max(1, -(-held_bytes // bucket_bytes))))


def smallest_index(n: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every number below `n`."""
    return np.min_scalar_type(max(0, n - 1))


def behind(items: Iterator[Item], do: Callable[[Item], None]) -> Iterator[Item]:
    """Passes `items` on, each while a thread does what is to be done with it. Raises what that raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="zloader-spill") as thread:
        doing = None
        for item in items:
            if doing is not None:
                doing.result()
            doing = thread.submit(do, item)
            yield item
        if doing is not None:
            doing.result()
