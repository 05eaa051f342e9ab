"""Partition items into buckets in temporary files, for data that does not fit in memory.

A spill has one file per column. Items are written sequentially in sections: a section holds the items that were in
memory together, sorted by bucket. To read a bucket, its part of every section is read. The boundaries of the buckets
are kept in another file, because there are sections times buckets of them. The files are unlinked, so the kernel
removes them when the process ends.
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

_CUTS_IN_MEMORY = 1 << 20  # 8 MiB

Item = TypeVar("Item")


class Spill:
    """`n_buckets` buckets of items that have one column per dtype in `dtypes`.

    If the disk is full, StoreError reports the `purpose` and the `takes_bytes` needed in all.
    """

    def __init__(self, dtypes: Sequence[Any], *, n_buckets: int, purpose: str, takes_bytes: int) -> None:
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self._n_buckets, self._purpose, self._takes_bytes = n_buckets, purpose, takes_bytes
        self._columns = [_file() for _ in dtypes]
        self._cuts = _file()
        self._n_sections = self._n_items = 0

    def write(self, column: int, items: NDArray[Any]) -> None:
        """Appends items, which have the dtype of the column, to a column of the current section."""
        assert items.dtype == self._dtypes[column]
        self._append(self._columns[column], items)

    def end_section(self, cuts: Rows) -> None:
        """Ends the current section. Bucket b is its items `[cuts[b], cuts[b + 1])`."""
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
                f"cannot {self._purpose}: {tempfile.gettempdir()} is too small ({error.strerror}). It takes "
                f"{self._takes_bytes} bytes: set TMPDIR to a directory on a larger disk"
            ) from error

    def buckets(self, first: int = 0) -> Iterator[Rows]:
        """Yields, for each bucket from `first` on, its items `[start, stop)` in each section, of shape sections x 2."""
        at_once = max(1, _CUTS_IN_MEMORY // max(1, self._n_sections))
        for begin in range(first, self._n_buckets, at_once):
            end = min(begin + at_once, self._n_buckets)
            cuts = np.empty((self._n_sections, end - begin + 1), np.int64)
            for section in range(self._n_sections):
                _read(self._cuts, section * (self._n_buckets + 1) + begin, cuts[section])
            for bucket in range(end - begin):
                yield cuts[:, bucket : bucket + 2]

    def read(self, column: int, cuts: Rows) -> NDArray[Any]:
        """The items of a column between the two `cuts` of each section, concatenated."""
        items = np.empty(int((cuts[:, 1] - cuts[:, 0]).sum()), self._dtypes[column])
        at = 0
        for start, stop in cuts.tolist():
            _read(self._columns[column], start, items[at : at + stop - start])
            at += stop - start
        return items

    def close(self) -> None:
        """Frees the disk space."""
        for file in (*self._columns, self._cuts):
            file.close()


def _file() -> Any:
    return tempfile.TemporaryFile(prefix="zloader-", buffering=0)


def _read(file: Any, start: int, items: NDArray[Any]) -> None:
    left, offset = memoryview(items.view(np.uint8)), start * items.itemsize  # type: ignore[arg-type]
    while left:
        n_read = os.preadv(file.fileno(), [left], offset)
        if n_read == 0:
            raise StoreError(f"a temporary file in {tempfile.gettempdir()} was truncated: run convert again")
        left, offset = left[n_read:], offset + n_read


def rows_per_bucket(*, n_rows: int, total_bytes: int, bucket_bytes: int) -> int:
    """The number of rows in a bucket of `bucket_bytes` if all rows take `total_bytes`; at least one."""
    return max(1, -(-n_rows // max(1, -(-total_bytes // bucket_bytes))))


def smallest_index(n: int) -> np.dtype[Any]:
    """The smallest unsigned dtype that holds every number below `n`."""
    return np.min_scalar_type(max(0, n - 1))


def applied_in_background(items: Iterator[Item], do: Callable[[Item], None]) -> Iterator[Item]:
    """Yields `items` while a thread applies `do` to each of them. Passes on the exceptions of `do`."""
    with ThreadPoolExecutor(1, thread_name_prefix="zloader-spill") as thread:
        job = None
        for item in items:
            if job is not None:
                job.result()
            job = thread.submit(do, item)
            yield item
        if job is not None:
            job.result()
