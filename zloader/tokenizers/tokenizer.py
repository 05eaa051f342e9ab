"""What all tokenizers share: options, the tokens of many rows, their masking, and a tokenizer bound to the genes of x.

Which tokens are masked is a function of seed, epoch, row of the dataset, and place in the row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, name_of_dtype, require_count, require_whole
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, Rows, TokenArrays
from zloader.order.permutation import key_of
from zloader.tokenizers.counts import part_of, word_at
from zloader.tokenizers.vocabulary import GeneTokens, special_id

NO_LABEL = -100  # torch's cross_entropy ignores it
_WHICH, _HOW, _GENE = 11, 12, 13  # streams of random words


@dataclass(frozen=True)
class Masked:
    """Masks a share of the tokens of each row and gives `labels`, for masked training. `masked=` of a tokenizer.

    >>> zl.tokenizers.Masked(0.15, seed=1)
    Masked(share=0.15, seed=1)

    Every gene of a row is chosen with the probability `share`; special tokens and padding are not. `labels` are -100
    where nothing was chosen, which torch's cross_entropy ignores.

    - Geneformer masks genes, as transformers' collator for masked language models does. `labels` are token ids.
    - ScGPT masks values, as its DataCollator does. `labels` are values (float32).

    The choice is a function of `seed`, the epoch, the row of the dataset and the place in the row.

    Args:
        share: the probability, above 0 and below 1.
        seed: a whole number of at least 0.
    """

    share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share < 1:
            raise OptionError(f"share must be a number above 0 and below 1, not {self.share!r:.100}")
        require_whole(0, seed=self.seed)

    def keys(self, epoch: int) -> NDArray[np.uint64]:
        """The keys of an epoch's streams of random words."""
        return np.array([key_of(self.seed, epoch, stream) for stream in (_WHICH, _HOW, _GENE)], np.uint64)

    @property
    def limit(self) -> np.uint64:
        """Random words below it choose a token."""
        return np.uint64(math.floor(float(self.share) * 2.0**64))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOptions:
    """Options of every tokenizer, which describes them."""

    x: str = "X"
    genes_by: str | None = None
    dtype: Any = "int64"
    pad_to: int | None = None
    masked: Masked | None = None

    _dictionary: ClassVar[str]  # the option with the token ids
    _shown: ClassVar[tuple[str, ...]]  # the options in the repr

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self._shown]
        masked = [] if self.masked is None else [f"masked={self.masked!r}"]
        return f"{type(self).__name__}({', '.join([*shown, f'{len(self._tokens)} tokens', *masked])})"

    @property
    def _tokens(self) -> dict[str, int]:
        return cast("dict[str, int]", getattr(self, self._dictionary))

    def _special(self, name: str) -> int | None:
        return special_id(name, getattr(self, name), self._tokens, self._dictionary)

    def _bound_parts(self, where: str, *, max_length: int, pad_value: float, labels: str) -> dict[str, Any]:
        """The fields of a BoundTokenizer that do not depend on the genes. Masking gives labels of this dtype."""
        pad, cls, eos = (self._special(name) for name in ("pad", "cls", "eos"))
        padding = Padding(
            ids=self.dtype,
            pad_id=cast("int", pad),
            pad_value=pad_value,
            pad_to=self.pad_to,
            labels=None if self.masked is None else labels,
        )
        ends = {"cls": -1 if cls is None else cls, "eos": -1 if eos is None else eos}
        named = {"name": type(self).__name__, "x": self.x, "where": where}
        return {**named, **ends, "padding": padding, "max_length": max_length, "masked": self.masked}

    def _put(self, **values: Any) -> None:
        """Replaces fields, which only `__post_init__` may do."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, max_length: int, n_special: int) -> None:
        """Raises OptionError for unusable options. Rows have at most `max_length` tokens, `n_special` at least."""
        require_count(max_length=max_length)
        if max_length <= n_special:
            raise OptionError(f"max_length={max_length} leaves no room for a gene beside {n_special} special tokens")
        for name, value in (("x", self.x), ("genes_by", self.genes_by)):
            if not isinstance(value, str) and not (value is None and name == "genes_by"):
                raise OptionError(f"{name} must be a name (a string), not {value!r:.100}")
        self._put(dtype=name_of_dtype(("int64", "int32"), dtype=self.dtype))
        if self.pad_to is not None:
            require_count(pad_to=self.pad_to)
            if self.pad_to < max_length:
                raise OptionError(
                    f"pad_to={self.pad_to} is shorter than rows of max_length={max_length} tokens: give a larger "
                    "pad_to, or a smaller max_length"
                )
        if self.masked is not None and not isinstance(self.masked, Masked):
            raise OptionError(f"masked must be a zl.tokenizers.Masked, not {self.masked!r:.100}")


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


Ids: TypeAlias = tuple[int, NDArray[np.int32]]


def mask_genes(
    masked: Masked, tokens: RaggedTokens, special: tuple[int, int], index: Rows, epoch: int, ids: Ids
) -> RaggedTokens:
    """Masks genes of the rows `index` in place, and gives their labels.

    `special` is how many special tokens are at the start and at the end of a row. `ids` are the id of the mask, and
    those of all genes.
    """
    labels = np.full(len(tokens.ids), NO_LABEL, np.int32)
    flat = (tokens.ids, tokens.starts, tokens.lengths)
    _mask_genes(flat, special, index, masked.keys(epoch), masked.limit, ids, labels)
    return replace(tokens, labels=labels)


def mask_values(
    masked: Masked, tokens: RaggedTokens, special: tuple[int, int], index: Rows, epoch: int, mask_value: float
) -> RaggedTokens:
    """Masks values of the rows `index` in place, and gives their labels."""
    labels = np.full(len(tokens.values), NO_LABEL, np.float32)
    flat = (tokens.values, tokens.starts, tokens.lengths)
    _mask_values(flat, special, index, masked.keys(epoch), masked.limit, np.float32(mask_value), labels)
    return replace(tokens, labels=labels)


@compiled
def _mask_genes(
    tokens: tuple[NDArray[np.int32], Rows, Rows],
    n_special: tuple[int, int],
    rows: Rows,
    keys: NDArray[np.uint64],
    limit: np.uint64,
    ids: Ids,
    labels: NDArray[np.int32],
) -> None:
    flat, starts, lengths = tokens
    mask_id, genes = ids
    for row in range(len(rows)):
        which, how, gene = word_at(keys[0], rows[row]), word_at(keys[1], rows[row]), word_at(keys[2], rows[row])
        first = starts[row] + n_special[0]
        for place in range(lengths[row] - n_special[0] - n_special[1]):
            if word_at(which, place) >= limit:
                continue
            at = first + place
            labels[at] = flat[at]
            tenth = part_of(word_at(how, place), 10)
            if tenth < 8:
                flat[at] = mask_id
            elif tenth == 8:
                flat[at] = genes[part_of(word_at(gene, place), len(genes))]


@compiled
def _mask_values(
    tokens: tuple[NDArray[np.float32], Rows, Rows],
    n_special: tuple[int, int],
    rows: Rows,
    keys: NDArray[np.uint64],
    limit: np.uint64,
    mask_value: Any,
    labels: NDArray[np.float32],
) -> None:
    flat, starts, lengths = tokens
    for row in range(len(rows)):
        which = word_at(keys[0], rows[row])
        first = starts[row] + n_special[0]
        for place in range(lengths[row] - n_special[0] - n_special[1]):
            if word_at(which, place) < limit:
                labels[first + place] = flat[first + place]
                flat[first + place] = mask_value


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundTokenizer(ABC):
    """A tokenizer for the genes of one matrix, and for one epoch. Any thread may call it.

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
    masked: Masked | None
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
        return out if self.masked is None else self._mask(self.masked, out, index)

    @abstractmethod
    def _write(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: RaggedTokens) -> int:
        """Writes the tokens of some rows. Returns the first row with a value that is no count, or -1."""

    @abstractmethod
    def _mask(self, masked: Masked, tokens: RaggedTokens, index: Rows) -> RaggedTokens:
        """Masks the tokens of some rows, and gives their labels."""
