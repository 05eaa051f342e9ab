"""The vocabulary: what the stages of the pipeline hand to one another, and the options they take.

Words are those of the README: row, gene, chunk, shard, block, fetch, read, minibatch. Everything here is plain and
frozen; nothing opens a file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError

MiB = 1 << 20
LEAST_MEMORY = 16 * MiB  # that a loader can be told to do with
Rows = NDArray[np.int64]
_MOST = 1 << 62  # more than any count of bytes, rows or threads
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 1000, "256MiB" or "64 MB". Raises OptionError."""
    parts = re.fullmatch(r"\s*(\d+|\d+\.\d+(?=\s*[kmgt]))\s*(?:([kmgt]i?)?b)?\s*", str(size), re.IGNORECASE)
    if isinstance(size, bool) or parts is None:
        raise OptionError(f"{size!r} is not a size: give bytes, or a string such as '256MiB' or '64 MB'")
    return int(float(parts[1]) * _UNITS[(parts[2] or "").lower()])


def require_at_least(least: float, **values: float) -> None:
    """Raises OptionError for the first of `values` below `least` or not a number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer)) or not value >= least:
            raise OptionError(f"{name} must be a number of at least {least}, not {value!r}")


def require_count(**values: int) -> None:
    """Raises OptionError for the first of `values` that is not a whole number of at least 1."""
    require_whole(1, **values)


def require_whole(least: int, **values: int) -> None:
    """Raises OptionError for the first of `values` that is not a whole number of at least `least`, below 2**62."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if value >= _MOST:
            raise OptionError(f"{name} must be a whole number below 2**62, not {value!r}")


def require_flag(**values: bool) -> None:
    """Raises OptionError for the first of `values` that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, (bool, np.bool_)):
            raise OptionError(f"{name} must be True or False, not {value!r}")


def require_one_of(known: Sequence[str], **values: str) -> None:
    """Raises OptionError for the first of `values` that is not one of the `known` words."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in known:
            raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def names_of(**values: Iterable[str]) -> list[str]:
    """The names that an option lists. Raises OptionError where it is no list of strings."""
    ((option, names),) = values.items()
    if isinstance(names, str) or names is None:
        raise OptionError(f"{option} must be a list of names: write {option}={[names] if names else []!r}")
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, bytes) else [names]
    for name in found:
        if not isinstance(name, str):
            raise OptionError(f"{option} must be a list of names, which are strings, not {name!r:.100}")
    return found


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of the object `key`: one ranged GET."""

    key: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes asked for."""
        return self.stop - self.start

    def read_from(self, url: str) -> str:
        """The read, of a store at `url`, as messages name it."""
        return f"{url}: reading {self.key} bytes {self.start}-{self.stop - 1}"


class Source(Protocol):
    """Where spans are read from. The one verb is plural; counters, faults and deadlines wrap it."""

    @property
    def retries(self) -> int:
        """Reads that were asked for again so far."""
        ...

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order, each exactly `span.size` long.

        Raises ReadError (or a child of it) with key and byte range; never returns less.
        """
        ...


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
        return _MOST if self.max_bytes is None else int(self.max_bytes)

    @property
    def least_free(self) -> int:
        """`min_free_bytes` as a number."""
        return int(self.min_free_bytes)


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """What a cache holds of a matrix: chunks and decoded bytes, of those there are in all.

    `allocated_bytes` is what all mirrors in the directory take on disk, `max_bytes` what they may (None: no limit);
    `full` says that no more is taken.
    """

    directory: Path
    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int
    allocated_bytes: int
    max_bytes: int | None
    full: bool

    @property
    def share(self) -> float:
        """Of the matrix' bytes those that are held."""
        return self.bytes_held / self.bytes_in_all if self.bytes_in_all else 1.0


@dataclass(frozen=True, kw_only=True)
class CsrArrays:
    """Rows in CSR form: `indptr` (rows + 1), `indices` (genes, ascending within a row) and `values`, NumPy arrays."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    values: NDArray[np.generic]
    n_genes: int


@dataclass(frozen=True, kw_only=True)
class MinibatchArrays:
    """One minibatch before it becomes tensors: NumPy arrays, all in the same row order.

    `x` is CsrArrays, a dense array of rows x genes, or None; `obs` maps a column to one value a row, `obsm` a name to
    rows x dims; `index` holds the dataset's row numbers.
    """

    x: CsrArrays | NDArray[np.generic] | None
    obs: Mapping[str, NDArray[np.generic]]
    obsm: Mapping[str, NDArray[np.generic]]
    index: Rows

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        held = self.index.nbytes + sum(rows.nbytes for of in (self.obs, self.obsm) for rows in of.values())
        if isinstance(self.x, CsrArrays):
            return held + self.x.indptr.nbytes + self.x.indices.nbytes + self.x.values.nbytes
        return held if self.x is None else held + self.x.nbytes


@dataclass(frozen=True, kw_only=True, repr=False)
class Statistics:
    """What the last epoch of a loader, or the one under way, has done so far.

    `spans` are the coalesced byte ranges of chunks, `gets` the ranged reads that were made, those of shard indexes and
    the `retries` among them; `bytes_read` is what they gave, `in_flight_bytes` what is being read now and
    `most_in_flight_bytes` the most that ever was. `bytes_from_mirror` are decoded. Times are seconds: `decode_s` and
    `gather_s` are summed over threads, `wait_s` is what the consumer waited for its next minibatch, `elapsed_s` runs
    from `iter()` to the last minibatch taken.
    """

    epoch: int
    rows: int
    minibatches: int
    gets: int
    spans: int
    retries: int
    bytes_read: int
    chunks_decoded: int
    chunks_from_mirror: int
    bytes_from_mirror: int
    in_flight_bytes: int
    most_in_flight_bytes: int
    decode_s: float
    gather_s: float
    wait_s: float
    elapsed_s: float

    def __repr__(self) -> str:
        return (
            f"<Statistics of epoch {self.epoch}: {self.rows:,} rows in {self.minibatches:,} minibatches, "
            f"{self.rows_per_s:,.0f} rows/s, waited {self.wait_share:.0%}; {self.gets:,} GETs, "
            f"{self.bytes_read / 1e6:,.1f} MB read, at most {self.most_in_flight_bytes / 1e6:,.1f} MB at once, "
            f"{self.retries:,} retries; {self.chunks_decoded:,} chunks decoded, "
            f"{self.chunks_from_mirror:,} from the mirror ({self.bytes_from_mirror / 1e6:,.1f} MB)>"
        )

    @property
    def rows_per_s(self) -> float:
        """Rows received per second of `elapsed_s`."""
        return self.rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of `elapsed_s` in which the consumer waited."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0
