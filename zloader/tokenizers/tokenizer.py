"""What all tokenizers share: options, the tokens of many rows, and a tokenizer bound to the genes of x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import name_of_dtype, require_count
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.messages import listed
from zloader.common.records import CsrArrays, Rows, TokenArrays
from zloader.tokenizers.vocabulary import special_id


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOptions(ABC):
    """Options of every tokenizer, which describes them."""

    x: str = "X"
    genes_by: str | None = None
    dtype: Any = "int64"
    pad_to: int | None = None

    summed: ClassVar[bool] = False  # whether genes of the same token are summed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_length={vars(self)['max_length']}, {len(self.tokens)} tokens)"

    @property
    @abstractmethod
    def tokens(self) -> dict[str, int]:
        """The token ids by name."""

    @abstractmethod
    def write(self, bound: BoundTokenizer, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: Any) -> int:
        """Writes the tokens of some rows. Returns the first row with a value that is no count, or -1."""

    def spelled(self, name: str) -> str:
        """The name in the vocabulary of a name in the dataset."""
        return name

    def special(self, name: str) -> int:
        """The id of the token `pad`, `cls` or `eos`; -1 for none."""
        return special_id(name, getattr(self, name), self.tokens)

    def bind(self, names: Sequence[str | None], where: str) -> BoundTokenizer:
        """The tokenizer for the genes of a matrix, which messages call `where`; a name may be missing.

        Raises OptionError if no gene has a token, or if one has that of a special token.
        """
        found = [-1 if name is None else self.tokens.get(self.spelled(name), -1) for name in names]
        token_of = np.array(found, np.int32).reshape(len(names))
        known = np.flatnonzero(token_of >= 0)
        if not len(known):
            genes = [repr(name) for name in self.tokens if name[:1] not in "<["]
            raise OptionError(
                f"none of the {len(names)} genes of {where} is in the vocabulary: the dataset has names such as "
                f"{listed(map(repr, names), 3)}, and the vocabulary such as {listed(genes, 3)}. Name "
                "genes by a var column with genes_by=..., or open the dataset with others, such as genes_by=str.upper"
            )
        special: dict[str, Any] = {name: self.special(name) for name in ("pad", "cls", "eos")}
        for name, token in special.items():
            if token >= 0 and (token_of == token).any():
                gene = names[int(np.argmax(token_of == token))]
                raise OptionError(f"{name} has the id {token}, and so has the gene {gene!r}: give it another")
        slot_of = np.where(token_of >= 0, np.arange(len(token_of)), -1).astype(np.int32)
        if self.summed:
            _, first, which = np.unique(token_of[known], return_index=True, return_inverse=True)
            slot_of[known] = known[first][which]
        return BoundTokenizer(options=self, where=where, slot_of=slot_of, token_of=token_of, **special)

    def _put(self, **values: Any) -> None:
        """Replaces fields, which only `__post_init__` may do."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, max_length: int) -> None:
        """Raises OptionError for unusable options. Rows have at most `max_length` tokens."""
        if self.special("pad") < 0:
            raise OptionError("pad must be the name or the id of a token, not None")
        require_count(max_length=max_length)
        if max_length <= (self.special("cls") >= 0) + (self.special("eos") >= 0):
            raise OptionError(f"max_length={max_length} leaves no room for a gene beside the special tokens")
        self._put(dtype=name_of_dtype(("int64", "int32"), dtype=self.dtype))
        if self.pad_to is not None:
            require_count(pad_to=self.pad_to)
            if self.pad_to < max_length:
                raise OptionError(f"pad_to={self.pad_to} is shorter than rows of max_length={max_length} tokens")


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
class RaggedTokens:
    """The tokens of rows, unpadded: row i is `lengths[i]` elements of each flat array from `starts[i]` on."""

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    starts: Rows
    lengths: Rows
    tokenizer: BoundTokenizer

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.ids, self.values, self.starts, self.lengths))

    def cut(self, first: int, last: int) -> TokenArrays:
        """The rows `[first, last)`, padded to the longest of them or to `pad_to`."""
        options, lengths = self.tokenizer.options, self.lengths[first:last]
        width = int(lengths.max(initial=0)) if options.pad_to is None else options.pad_to

        def filled(flat: NDArray[Any], dtype: str, pad: float) -> NDArray[Any]:
            out = np.empty((len(lengths), width), dtype)
            _copy_padded(flat, self.starts[first:last], lengths, out, flat.dtype.type(pad))
            return out

        return TokenArrays(
            input_ids=filled(self.ids, options.dtype, self.tokenizer.pad),
            values=filled(self.values, "float32", options.pad_value),
            attention_mask=np.arange(width) < lengths[:, None],
            lengths=lengths.copy(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundTokenizer:
    """A tokenizer for the genes of one matrix, and for one epoch. Any thread may call it.

    A column of the matrix has the slot `slot_of[column]`, or -1 if it has no token. Slots are columns: a column's own,
    or the first one with the same token if such genes are summed. `token_of` and `median_of` are looked up by slot.
    `totals` returns the counts of each row of the dataset, if they come from an obs column.
    """

    options: Any  # Geneformer or ScGPT
    where: str
    slot_of: NDArray[np.int32]
    token_of: NDArray[np.int32]
    pad: int
    cls: int
    eos: int
    median_of: Any = None
    seed: int = 0
    epoch: int = 0
    totals: Callable[[], NDArray[Any]] | None = None

    def at(self, seed: int, epoch: int) -> Self:
        """The tokenizer for an epoch of a loader with this seed."""
        return replace(self, seed=seed, epoch=epoch)

    @property
    def n_known(self) -> int:
        """The columns with a token."""
        return int(np.count_nonzero(self.slot_of >= 0))

    def n_bytes(self, lengths: Rows) -> int:
        """An upper bound for the bytes of the tokens of rows with so many values, before and after padding."""
        most = self._most(lengths)
        width = self.options.pad_to or int(most.max(initial=0))
        place_bytes = np.dtype(self.options.dtype).itemsize + 5  # with a float32 and a bool
        return int(len(lengths) * (width * place_bytes + 8) + most.sum() * 8)

    def _most(self, lengths: Rows) -> Rows:
        most: int = self.options.max_length
        return np.minimum(lengths + (self.cls >= 0) + (self.eos >= 0), most)

    def rows(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None) -> RaggedTokens:
        """The tokens of some rows of the dataset. `totals` has the counts of these rows. Raises OptionError."""
        starts = np.append(0, np.cumsum(self._most(np.diff(x.indptr).astype(np.int64))))
        out = RaggedTokens(
            ids=np.empty(starts[-1], np.int32),
            values=np.empty(starts[-1], np.float32),
            starts=starts[:-1],
            lengths=np.zeros(len(starts) - 1, np.int64),
            tokenizer=self,
        )
        bad = self.options.write(self, x, index, totals, out)
        if bad >= 0:
            values = x.values[x.indptr[bad] : x.indptr[bad + 1]].astype(np.float64)
            wrong = values[~((values >= 0) & np.isfinite(values))][0]
            raise OptionError(
                f"{self.where} holds {wrong} in row {index[bad]} of the dataset, but tokens are made of counts, which "
                "are finite and never negative: name the matrix of counts, as in "
                f"{type(self.options).__name__}(..., x='raw/X')"
            )
        return out
