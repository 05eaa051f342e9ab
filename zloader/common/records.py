"""Records that the stages of the pipeline pass to one another: byte ranges and arrays. Plain and frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Result = TypeVar("Result")
# Rows handled at a time, so that no array of wide numbers over all rows is made.
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
