"""Records that the stages of the pipeline pass to one another: byte ranges, arrays, statistics. Plain and frozen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Result = TypeVar("Result")
# Rows handled at a time, so that no array over all rows is made. A multiple of the rows per count of a RowSet.
WINDOW_ROWS = 1 << 20


def windows_of(n_rows: int) -> list[slice]:
    """Some rows, in windows of WINDOW_ROWS."""
    return [slice(first, min(first + WINDOW_ROWS, n_rows)) for first in range(0, n_rows, WINDOW_ROWS)]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of the object `key`, read by one ranged GET."""

    key: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def read_from(self, url: str) -> str:
        """How messages name this read of the store at `url`."""
        return f"{url}: reading {self.key} bytes {self.start}-{self.stop - 1}"


class ByteSource(Protocol):
    """Reads spans of a store. It has one method, which counters, injected faults and deadlines wrap."""

    @property
    def retries(self) -> int:
        """Retries made so far."""

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order, each exactly `span.size` long.

        Raises ReadError or a subclass, which names the key and the byte range, rather than return fewer bytes.
        """


@dataclass
class ReadClock:
    """When a read in another thread `began`, in seconds of time.monotonic, and whether it has `ended`."""

    began: float | None = None
    ended: bool = False

    def left_s(self, deadline_s: float) -> float:
        """The seconds until the read has taken too long, if it is under way; all of them, if it is not."""
        if self.began is None or self.ended:
            return deadline_s
        return self.began + deadline_s - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Held:
    """How much of some matrices or arrays is in a mirror, in blocks of rows and in bytes."""

    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int

    @property
    def share(self) -> float:
        """The share of the bytes that the mirror holds, from 0 to 1."""
        return self.bytes_held / self.bytes_in_all if self.bytes_in_all else 1.0


@dataclass(frozen=True, kw_only=True)
class CacheStatistics(Held):
    """How much of a matrix is in the cache; returned by `Dataset.cache_statistics`.

    Attributes:
        directory: Directory of the mirror.
        chunks, chunks_held: Blocks of rows of the matrix, and how many of them are cached.
        bytes_in_all, bytes_held: Bytes of all blocks, estimated from those that are cached, and bytes of these.
        allocated_bytes: Disk space of all mirrors in the cache, in bytes.
        max_bytes: Limit for `allocated_bytes`; None means no limit.
        full: Whether the cache has stopped accepting blocks.

    >>> for minibatch in zl.Loader(dataset):  # one epoch fills the mirror
    ...     pass
    >>> statistics = dataset.cache_statistics()
    >>> statistics.share, statistics.full
    (1.0, False)
    """

    directory: Path
    allocated_bytes: int
    max_bytes: int | None
    full: bool


@dataclass(frozen=True, kw_only=True)
class CsrArrays:
    """Rows in CSR form, as NumPy arrays: `indptr` (rows + 1), `indices` (genes, ascending in each row) and `values`."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    values: NDArray[np.generic]
    n_genes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.values.nbytes


X: TypeAlias = CsrArrays | NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class TokenArrays:
    """The tokens of a minibatch, rows x places: `input_ids`, `values` and `attention_mask`.

    Row i has `lengths[i]` tokens; its other places are padding.
    """

    input_ids: NDArray[np.integer]
    values: NDArray[np.float32]
    attention_mask: NDArray[np.bool_]
    lengths: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.input_ids, self.values, self.attention_mask, self.lengths))

    def cut(self, first: int, last: int) -> TokenArrays:
        """The tokens of the rows `[first, last)`, with the same padding."""
        return TokenArrays(
            input_ids=self.input_ids[first:last],
            values=self.values[first:last],
            attention_mask=self.attention_mask[first:last],
            lengths=self.lengths[first:last],
        )


class TokenRows(Protocol):
    """The tokens of some rows: TokenArrays, or those of several minibatches before they are padded."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    def cut(self, first: int, last: int) -> TokenArrays:
        """The tokens of the rows `[first, last)`, a minibatch."""


@dataclass(frozen=True, kw_only=True)
class MinibatchArrays:
    """One minibatch as NumPy arrays, before it becomes tensors. All arrays have the same row order.

    `x` maps each matrix to CsrArrays or to a dense array of rows x genes. `obs` maps each
    column to one value per row. `obsm` maps each name to an array of rows x dims. `index` holds the row numbers in the
    dataset (int64). `tokens` is None if they are not wanted. `sets` has the number of the set of each row, ascending by
    one, if the sampling has sets. `present` says for each modality which rows it has.
    """

    x: Mapping[str, X]
    obs: Mapping[str, NDArray[np.generic]]
    obsm: Mapping[str, NDArray[np.generic]]
    index: Rows
    tokens: TokenRows | None = None
    sets: Rows | None = None
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        annotations = sum(rows.nbytes for group in (self.obs, self.obsm, self.present) for rows in group.values())
        x = sum(matrix.nbytes for matrix in self.x.values())
        tokens = 0 if self.tokens is None else self.tokens.nbytes
        return self.index.nbytes + annotations + x + tokens


@dataclass(frozen=True, kw_only=True, repr=False)
class Statistics:
    """Counters of the current epoch of a loader, or of its last one; returned by `Loader.statistics`.

    Attributes:
        epoch: The epoch counted.
        rows, minibatches: Rows, with their controls, and minibatches received by the consumer.
        fallback_controls: Control rows received that agree with their rows in the columns of a fallback only.
        gets: Ranged reads, including reads of shard indexes and retries.
        spans: Coalesced byte ranges of chunks.
        retries: Reads that were repeated after a failure.
        bytes_read: Stored bytes that the reads returned.
        chunks_decoded: Chunks read from the store and decoded.
        chunks_from_mirror, bytes_from_mirror: Blocks of rows, and their bytes, read from the mirror.
        in_flight_bytes, most_in_flight_bytes: Bytes being read now, and the highest value in the epoch.
        decode_s, gather_s: Seconds spent decoding and gathering, summed over threads.
        wait_s: Seconds that the consumer waited for minibatches.
        elapsed_s: Seconds from the first request for a minibatch to the last minibatch received.

    >>> loader = zl.Loader(dataset, batch_size=64)
    >>> for minibatch in loader:
    ...     pass
    >>> statistics = loader.statistics()
    >>> statistics  # doctest: +ELLIPSIS
    <Statistics of epoch 0: 300 rows in 5 minibatches, ... rows/s, waited ...%; ... GETs, ... MB read, ...>
    >>> statistics.bytes_read + statistics.bytes_from_mirror > 0, statistics.retries
    (True, 0)
    >>> statistics.flat("loader/")["loader/minibatches"]
    5
    """

    epoch: int
    rows: int
    minibatches: int
    fallback_controls: int
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
        """Share of `elapsed_s` that the consumer spent waiting, from 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    def flat(self, prefix: str = "") -> dict[str, int | float]:
        """All figures by name, for loggers: the attributes, `rows_per_s` and `wait_share`."""
        figures = dataclasses.asdict(self) | {"rows_per_s": self.rows_per_s, "wait_share": self.wait_share}
        return {prefix + name: figure for name, figure in figures.items()}
