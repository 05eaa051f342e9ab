"""The tokens of many rows, and a tokenizer that is bound to the genes of a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, Rows, TokenArrays
from zloader.tokenizers.vocabulary import GeneTokens


@compiled
def _copy_padded(flat: NDArray[Any], starts: Rows, lengths: Rows, out: NDArray[Any], pad: Any) -> None:
    for row in range(len(starts)):
        n = lengths[row]
        taken, given = flat[starts[row] : starts[row] + n], out[row]
        for i in range(n):
            given[i] = taken[i]
        for i in range(n, len(given)):
            given[i] = pad


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The form of the arrays that minibatches get. `labels` is their dtype, None without labels."""

    ids: str
    pad_id: int
    pad_value: float
    pad_to: int | None
    labels: str | None = None

    @property
    def place_bytes(self) -> int:
        """Bytes of one token in all arrays."""
        labels = 0 if self.labels is None else np.dtype(self.labels).itemsize
        return np.dtype(self.ids).itemsize + np.dtype(np.float32).itemsize + 1 + labels


NO_LABEL = -100  # torch's cross_entropy ignores it


@dataclass(frozen=True, kw_only=True)
class RaggedTokens:
    """The tokens of rows, unpadded: row i is `lengths[i]` elements of each flat array from `starts[i]` on."""

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    starts: Rows
    lengths: Rows
    padding: Padding
    labels: NDArray[Any] | None = None

    @classmethod
    def empty(cls, most: Rows, padding: Padding) -> RaggedTokens:
        """Arrays for rows of up to `most[i]` tokens, to be written."""
        starts = np.zeros(len(most) + 1, np.int64)
        np.cumsum(most, out=starts[1:])
        ids, values = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.float32)
        return cls(ids=ids, values=values, starts=starts[:-1], lengths=np.zeros(len(most), np.int64), padding=padding)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.ids, self.values, self.starts, self.lengths, self.labels)
        return sum(array.nbytes for array in arrays if array is not None)

    def cut(self, first: int, last: int) -> TokenArrays:
        """The rows `[first, last)`, padded to the longest of them or to `pad_to`."""
        padding, lengths = self.padding, self.lengths[first:last]
        width = int(lengths.max(initial=0)) if padding.pad_to is None else padding.pad_to

        def filled(flat: NDArray[Any], dtype: str, pad: float) -> NDArray[Any]:
            out = np.empty((len(lengths), width), dtype)
            _copy_padded(flat, self.starts[first:last], lengths, out, flat.dtype.type(pad))
            return out

        labels = None
        if self.labels is not None and padding.labels is not None:
            labels = filled(self.labels, padding.labels, NO_LABEL)
        return TokenArrays(
            input_ids=filled(self.ids, padding.ids, padding.pad_id),
            values=filled(self.values, "float32", padding.pad_value),
            attention_mask=np.arange(width) < lengths[:, None],
            lengths=lengths.copy(),
            labels=labels,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundTokenizer(ABC):
    """A tokenizer for the genes of one matrix, and for one epoch. It implements RowTokenizer.

    `genes` has the tokens of the columns of the matrix `x`. Messages name the class `name`, and the matrix as `where`.
    `cls` and `eos` are the first and last token, or -1. `totals` returns the counts of each row of the dataset, if they
    come from an obs column.
    """

    name: str
    x: str
    where: str
    genes: GeneTokens
    padding: Padding
    max_length: int
    cls: int
    eos: int
    seed: int = 0
    epoch: int = 0
    totals: Callable[[], NDArray[Any]] | None = None

    def at(self, seed: int, epoch: int) -> Self:
        """The tokenizer for an epoch of a loader with this seed."""
        return replace(self, seed=seed, epoch=epoch)

    @property
    def n_special(self) -> tuple[int, int]:
        """The special tokens at the start and at the end of a row."""
        return int(self.cls >= 0), int(self.eos >= 0)

    def n_bytes(self, lengths: Rows) -> int:
        """An upper bound for the bytes of the tokens of rows with so many values, before and after padding."""
        most = self._most(lengths)
        width = self.padding.pad_to or int(most.max(initial=0))
        labels = 0 if self.padding.labels is None else 4
        return len(lengths) * (width * self.padding.place_bytes + 8) + int(most.sum()) * (8 + labels)

    def _most(self, lengths: Rows) -> Rows:
        return np.minimum(lengths + sum(self.n_special), self.max_length)

    def rows(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None) -> RaggedTokens:
        """The tokens of some rows of the dataset. `totals` has the counts of these rows. Raises OptionError."""
        lengths = np.diff(x.indptr).astype(np.int64)
        out = RaggedTokens.empty(self._most(lengths), self.padding)
        bad = self._write(x, index, totals, out)
        if bad >= 0:
            values = x.values[x.indptr[bad] : x.indptr[bad + 1]].astype(np.float64)
            wrong = values[~((values >= 0) & np.isfinite(values))][0]
            raise OptionError(
                f"{self.where} holds {wrong} in row {index[bad]} of the dataset, but tokens are made of counts, which "
                f"are finite and never negative: name the matrix of counts, as in {self.name}(..., x='raw/X')"
            )
        return out

    @abstractmethod
    def _write(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: RaggedTokens) -> int:
        """Writes the tokens of some rows. Returns the first row with a value that is no count, or -1."""
