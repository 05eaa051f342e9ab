"""What all tokenizers share: options, the tokens of many rows, and a tokenizer bound to the genes of x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import name_of_dtype, require_count
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, Rows, TokenArrays
from zloader.tokenizers.vocabulary import GeneNames, GeneTokens, gene_tokens, special_id


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOptions:
    """Options of every tokenizer, which describes them."""

    x: str = "X"
    genes_by: str | None = None
    dtype: Any = "int64"
    pad_to: int | None = None

    _dictionary: ClassVar[str]  # the option with the token ids
    _shown: ClassVar[tuple[str, ...]]  # the options in the repr

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self._shown]
        return f"{type(self).__name__}({', '.join([*shown, f'{len(self._tokens)} tokens'])})"

    @property
    def _tokens(self) -> dict[str, int]:
        return cast("dict[str, int]", getattr(self, self._dictionary))

    @property
    def _special(self) -> dict[str, int | None]:
        """The ids of the padding, first and last token, or None."""
        return {
            name: special_id(name, getattr(self, name), self._tokens, self._dictionary)
            for name in ("pad", "cls", "eos")
        }

    def _bound(self, genes: GeneNames, *, spelled: Callable[[str], str] = str, summed: bool = False) -> dict[str, Any]:
        """The fields of a BoundTokenizer, as `gene_tokens` finds them."""
        special = self._special
        found = gene_tokens(genes, self._tokens, special, option=self._dictionary, spelled=spelled, summed=summed)
        ids = {name: -1 if token is None else token for name, token in special.items()}
        return {"options": self, "where": genes.where, "genes": found, **ids}

    def _put(self, **values: Any) -> None:
        """Replaces fields, which only `__post_init__` may do."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, max_length: int) -> None:
        """Raises OptionError for unusable options. Rows have at most `max_length` tokens."""
        special = self._special
        if special["pad"] is None:
            raise OptionError("pad must be the name or the id of a token, not None")
        require_count(max_length=max_length)
        n_special = sum(special[name] is not None for name in ("cls", "eos"))
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
class BoundTokenizer(ABC):
    """A tokenizer for the genes of one matrix, and for one epoch. Any thread may call it.

    `genes` has the tokens of the columns of the matrix, which messages call `where`. `pad`, `cls` and `eos` are the
    padding, first and last token; -1 for no first or last token. `totals` returns the counts of each row of the
    dataset, if they come from an obs column.
    """

    options: Any  # Geneformer or ScGPT
    where: str
    genes: GeneTokens
    pad: int
    cls: int
    eos: int
    seed: int = 0
    epoch: int = 0
    totals: Callable[[], NDArray[Any]] | None = None

    def at(self, seed: int, epoch: int) -> Self:
        """The tokenizer for an epoch of a loader with this seed."""
        return replace(self, seed=seed, epoch=epoch)

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
        bad = self._write(x, index, totals, out)
        if bad >= 0:
            values = x.values[x.indptr[bad] : x.indptr[bad + 1]].astype(np.float64)
            wrong = values[~((values >= 0) & np.isfinite(values))][0]
            raise OptionError(
                f"{self.where} holds {wrong} in row {index[bad]} of the dataset, but tokens are made of counts, which "
                "are finite and never negative: name the matrix of counts, as in "
                f"{type(self.options).__name__}(..., x='raw/X')"
            )
        return out

    @abstractmethod
    def _write(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: RaggedTokens) -> int:
        """Writes the tokens of some rows. Returns the first row with a value that is no count, or -1."""
