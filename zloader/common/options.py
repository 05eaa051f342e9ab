"""Options for reading and for the cache. Each default is set here alone, with its unit and its reason."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from zloader.common.checks import (
    MAX_COUNT,
    absolute_path,
    parse_size,
    require_at_least,
    require_count,
    require_one_of,
    require_whole,
)
from zloader.common.errors import OptionError
from zloader.common.machine import available_bytes, available_cores

MiB = 1 << 20
MIN_MEMORY = 16 * MiB  # smallest value of FetchOptions.memory


class _Bytes:
    """A field that holds a number of bytes, and may be set to a string such as "64MiB"."""

    def __init__(self, default: int) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, options: object | None, owner: type) -> int:
        return self._default if options is None else vars(options)[self._name]

    def __set__(self, options: object, size: int | str) -> None:
        vars(options)[self._name] = parse_size(size, self._name) if isinstance(size, str) else size


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How a loader reads, and how much memory it may use. Pass it as `zl.Loader(dataset, options=...)`.

    Sizes are in bytes, or strings such as "2GiB" (2 * 1024**3) or "2G" (2 * 1000**3).

    Args:
        memory: the most that a loader takes, apart from about 400 MB for the libraries. At least 16 MiB. A single fetch
            that is larger than its share is still loaded, one at a time. Default: an eighth of the machine's (or
            container's) memory, up to 1 GiB plus 32 MiB per thread.
        in_flight_bytes: stored bytes being read or decoded. Default: a sixteenth of `memory`. 64 MiB sustains 400 MB/s
            when a read takes 160 ms from request to last byte.
        deadline_s: seconds for one read, including all its retries; then it raises an error. Default: 60.
        retries: further attempts after a failure that may be temporary. Default: 16, which take 46 s at 0.1 to 4 s
            apart. Half a minute of SlowDown or a server restart passes unnoticed, and errors that persist are raised
            in your training loop before the deadline.
        threads: threads that decode and gather. Default: one per core available to this process.

    Raises OptionError for an invalid value.

    >>> options = zl.FetchOptions(memory="2GiB", deadline_s=30)
    >>> options.in_flight_bytes >> 20  # MiB
    128
    >>> loader = zl.Loader(dataset, options=options)
    """

    memory: _Bytes = _Bytes(0)
    in_flight_bytes: _Bytes = _Bytes(0)
    deadline_s: float = 60.0
    retries: int = 16
    threads: int = field(default_factory=available_cores)

    # Two ranges with at most this many bytes between them are read together: it costs less than the 30 ms of a GET.
    gap_bytes: ClassVar[int] = 64 * 1024
    # While an epoch fills a mirror, each read is extended to about this size with the data beside a block, which the
    # mirror needs anyway. It cuts the number of GETs to a quarter, and delays the first minibatch by half a second.
    least_read_bytes: ClassVar[int] = 512 * 1024
    # Ranges are read together up to about this size. TensorStore reaches the speed of a link with reads of 1 to 8 MiB;
    # longer ones only make retries more expensive.
    max_read_bytes: ClassVar[int] = 8 * MiB
    # Most fetches loaded ahead while the current one is gathered: one is decoded while the next is read.
    prefetch: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_count(threads=self.threads)
        require_whole(0, memory=self.memory, in_flight_bytes=self.in_flight_bytes, retries=self.retries)
        require_at_least(0.001, deadline_s=self.deadline_s)
        if self.memory:
            require_at_least(MIN_MEMORY, memory=self.memory)
        memory = self.memory or max(MIN_MEMORY, min(available_bytes() // 8, (1 << 30) + 32 * MiB * self.threads))
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "in_flight_bytes", self.in_flight_bytes or memory // 16)

    @cached_property
    def ready_bytes(self) -> int:
        """Bytes of minibatches that are being gathered, or wait for the consumer."""
        return 3 * self.memory // 16

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of fetches that are loaded but not yet gathered.

        Three sixteenths remain for a minibatch that the consumer still holds, and for what malloc keeps.
        """
        return max(self.memory - self.in_flight_bytes - self.ready_bytes - 3 * self.memory // 16, self.memory // 8)


@dataclass(frozen=True)
class Cache:
    """A directory on a fast local disk for mirrors, and how much of the disk they may use.

    Pass it, or just the path of the directory, as `zl.open_dataset(url, cache=...)`. Each store gets a mirror of its
    own, which grows until the cache is full; rows that are not in the mirror are read from the store. When space is
    needed, mirrors that no process uses are evicted, stale ones first.

    `directory` is created if needed; `~` is expanded.

    `max_bytes` limits all mirrors of the cache together, counted as the file system allocates them; None means no
    limit. `min_free_bytes` is the space that mirrors leave free on the disk. Both are numbers of bytes, or strings such
    as "500GB" or "500G" (the same), or "500GiB". Raises OptionError for an invalid value.

    `form` says how the rows of sparse matrices are kept: "raw", in their stored dtypes, or "compact", coded in about
    40 % of the space, which takes longer to fill.

    >>> cache = zl.Cache("/nvme/zloader", max_bytes="500GB", min_free_bytes="20 GiB")
    >>> cache.max_bytes, cache.min_free_bytes
    (500000000000, 21474836480)
    """

    directory: Path
    _: KW_ONLY
    max_bytes: int | str | None = None
    min_free_bytes: int | str = 0
    form: str = "raw"

    forms: ClassVar[tuple[str, ...]] = ("raw", "compact")

    def __post_init__(self) -> None:
        named = os.fspath(self.directory) if isinstance(self.directory, str | os.PathLike) else None
        if not named or not isinstance(named, str) or "\0" in named:
            raise OptionError(f"a cache is a directory: give its path (or a zl.Cache), not {self.directory!r:.100}")
        object.__setattr__(self, "directory", absolute_path(named))
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_size(self.max_bytes, "max_bytes"))
            require_count(max_bytes=self.most)
        object.__setattr__(self, "min_free_bytes", parse_size(self.min_free_bytes, "min_free_bytes"))
        require_one_of(self.forms, form=self.form)

    @property
    def most(self) -> int:
        """`max_bytes` as a number; without a limit, a number larger than any disk."""
        return MAX_COUNT if self.max_bytes is None else int(self.max_bytes)
