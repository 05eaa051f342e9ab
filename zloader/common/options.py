"""The options of reading and of the cache: what each means, its unit, its default and the reason for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from zloader.common.checks import MOST, parse_size, require_at_least, require_count, require_flag, require_whole
from zloader.common.errors import OptionError

MiB = 1 << 20
LEAST_MEMORY = 16 * MiB  # that a loader can be told to do with


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How reads are made and how much memory they may take.

    `memory` (bytes, or a string such as "2GiB") is the one dial: whatever of `in_flight_bytes`, `buffer_bytes` and
    `ready_bytes` is left at 0 is derived from it. Together they are the most that a loader holds, beside the libraries'
    own 400 MB; one fetch that is larger than `buffer_bytes` is still loaded, alone.
    """

    # By default an eighth of the machine's memory, but no more than 1 GiB and 32 MiB for each thread.
    memory: int | str = 0
    # Stored bytes being read or decoded; by default a sixteenth of the memory. 64 MiB keeps 400 MB/s busy at 160 ms
    # from request to last byte.
    in_flight_bytes: int = 0
    # Fetches loaded but not gathered yet, decoded or from a mirror; by default what the other two leave of the memory.
    buffer_bytes: int = 0
    # Minibatches being gathered or waiting for the consumer; by default a sixteenth of the memory.
    ready_bytes: int = 0
    # Reading 64 KiB that nobody asked for costs less than the 30 ms that one more GET takes on S3.
    gap_bytes: int = 64 * 1024
    # An epoch that fills a mirror wants every byte sooner or later: its reads take what lies beside a block along, up
    # to this much. Half a second later to the first minibatch, for a quarter of the GETs.
    least_read_bytes: int = 512 * 1024
    # TensorStore reaches a link's speed with reads of 1 to 8 MiB; longer ones only make retries dearer.
    max_read_bytes: int = 8 * MiB
    # Fetches loaded while the one before them is gathered, as far as buffer_bytes allow: one is decoded while the link
    # reads the next.
    prefetch: int = 2
    # A read that has not ended by then, with all its attempts, has failed, whatever the server says.
    deadline_s: float = 60.0
    # How often a read is asked for again where that may help. So many, 0.1 to 4 s apart, take 46 s: half a minute
    # of SlowDown or a server that starts anew passes, and what stays shows within the deadline.
    retries: int = 16
    # Threads that decode and gather; by default one a core that this process may use.
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    # Keeps freed memory in the process (glibc's mallopt, once, when a loader first starts): without it every minibatch
    # pays for fresh pages, about half the speed of a warm epoch.
    tune_malloc: bool = True

    def __post_init__(self) -> None:
        require_count(max_read_bytes=self.max_read_bytes, prefetch=self.prefetch, threads=self.threads)
        require_whole(0, gap_bytes=self.gap_bytes, least_read_bytes=self.least_read_bytes, retries=self.retries)
        require_at_least(0.001, deadline_s=self.deadline_s)
        require_flag(tune_malloc=self.tune_malloc)
        memory = parse_size(self.memory)
        if memory:
            require_at_least(LEAST_MEMORY, memory=memory)
        memory = memory or max(LEAST_MEMORY, min(_machine_bytes() // 8, (1 << 30) + 32 * MiB * self.threads))
        object.__setattr__(self, "memory", memory)
        self._derive(in_flight_bytes=memory // 16, ready_bytes=memory // 16)
        self._derive(buffer_bytes=max(memory - self.in_flight_bytes - self.ready_bytes, memory // 8))

    def _derive(self, **values: int) -> None:
        """Sets what was left at 0."""
        for name, value in values.items():
            require_whole(0, **{name: getattr(self, name)})
            object.__setattr__(self, name, getattr(self, name) or value)


def _machine_bytes() -> int:
    """Memory of the machine, or of the container that this process is in, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # there are none, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(limits)


@dataclass(frozen=True)
class Cache:
    """Where mirrors are kept: a directory on a fast local disk, and how much of that they may take.

    `max_bytes` bounds all mirrors in the directory together, as the file system counts them; `min_free_bytes` is what
    they leave free on the disk. Both are bytes, or strings such as "500GB". A mirror grows until it is full; what is
    not in it is read from the store. Mirrors that nobody uses make room, stale ones first.
    """

    directory: Path
    _: KW_ONLY
    max_bytes: int | str | None = None
    min_free_bytes: int | str = 0

    def __post_init__(self) -> None:
        named = os.fspath(self.directory) if isinstance(self.directory, str | os.PathLike) else None
        if not named or not isinstance(named, str) or "\0" in named:
            raise OptionError(f"a cache is a directory, given by its path (or a zl.Cache), not {self.directory!r:.100}")
        object.__setattr__(self, "directory", Path(named).expanduser().absolute())
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_size(self.max_bytes))
            require_count(max_bytes=self.most)
        object.__setattr__(self, "min_free_bytes", parse_size(self.min_free_bytes))

    @property
    def most(self) -> int:
        """`max_bytes` as a number; more than any disk has where there is no limit."""
        return MOST if self.max_bytes is None else int(self.max_bytes)

    @property
    def least_free(self) -> int:
        """`min_free_bytes` as a number."""
        return int(self.min_free_bytes)
