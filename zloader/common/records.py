"""What the stages of the pipeline hand to one another: byte ranges, arrays, statistics. Plain and frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


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


class ByteSource(Protocol):
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
