"""Geneformer's tokens: the genes of a cell in the order of their normalised counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, require_one_of
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.messages import listed
from zloader.common.records import CsrArrays, Rows
from zloader.tokenizers.counts import known_genes, sort_down
from zloader.tokenizers.tokenizer import BoundTokenizer, TokenOptions
from zloader.tokenizers.vocabulary import A_TOKEN, Given, dictionary, is_token

_TARGET = 10_000.0
_LENGTHS = {"v1": 2048, "v2": 4096}
_OF_VERSION = "of the version"


def _is_median(stored: Any) -> bool:
    return is_number(stored) and 0 < stored < math.inf


def _is_name(stored: Any) -> bool:
    return isinstance(stored, str)


@dataclass(frozen=True, eq=False, repr=False)
class Geneformer(TokenOptions):
    """Tokens as Geneformer's TranscriptomeTokenizer makes them, for `zl.Loader(dataset, tokens=...)`.

    >>> tokens = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3, "ENSG1": 4, "ENSG2": 5}
    >>> zl.tokenizers.Geneformer(tokens, {"ENSG1": 1.5, "ENSG2": 0.5})
    Geneformer(max_length=4096, 6 tokens)

    The value of a gene is `count / n_counts * 10 000 / median`, in float64. Genes come by descending value, genes of
    equal values in the order of the matrix. Genes that are not in the token dictionary and zeros are left out. The
    counts of several genes with the same token are summed first. A row is cut to `max_length`, special tokens included.

    `minibatch.tokens.values` are these values (float32), 0 for special tokens and padding.

    Args:
        token_dictionary: token ids by gene name (Ensembl id), as a dict or the path of a JSON file.
        gene_medians: the median of each gene that is in both the dataset and the token dictionary, likewise.
        version: `"v1"`: 2 048 tokens and no special tokens. `"v2"`: 4 096 tokens, `<cls>` first and `<eos>` last.
        max_length: the most tokens per row. Default: that of the version.
        gene_mapping: token dictionary's names by gene name, to translate names, likewise. Default: names as they are.
            A name that is unknown is also looked up in capitals.
        n_counts: the obs column with the total counts of each row. Default: the sum of the row's values in `x`.
            It changes `values` only, not the order of the genes.
        pad: the padding token, by name or id.
        cls, eos: the first and last token, by name or id; None for none. Default: those of the version.
        x: the matrix of counts, as in zl.Loader.
        genes_by: the var column with the names of genes that the token dictionary has. Default: the gene names of the
            dataset.
        dtype: that of `input_ids`, `"int64"` or `"int32"`, or such a dtype of torch or NumPy.
        pad_to: pads all rows to this length. Default: to the longest row of the minibatch.

    Raises OptionError for unusable options, and when a Loader is made for a dataset without any gene of the token
    dictionary.
    """

    token_dictionary: Given
    gene_medians: Given
    version: Literal["v1", "v2"] = "v2"
    max_length: int | None = None
    gene_mapping: Given | None = field(default=None, kw_only=True)
    n_counts: str | None = field(default=None, kw_only=True)
    pad: str | int = field(default="<pad>", kw_only=True)
    cls: str | int | None = field(default=_OF_VERSION, kw_only=True)
    eos: str | int | None = field(default=_OF_VERSION, kw_only=True)

    pad_value: ClassVar[float] = 0
    summed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_one_of(tuple(_LENGTHS), version=self.version)
        self._put(token_dictionary=dictionary("token_dictionary", self.token_dictionary, is_token, A_TOKEN))
        self._put(gene_medians=dictionary("gene_medians", self.gene_medians, _is_median, "a number above 0"))
        if self.gene_mapping is not None:
            self._put(gene_mapping=dictionary("gene_mapping", self.gene_mapping, _is_name, "a name (a string)"))
        max_length = _LENGTHS[self.version] if self.max_length is None else self.max_length
        self._put(max_length=max_length)
        for name in ("cls", "eos"):
            if getattr(self, name) == _OF_VERSION:
                self._put(**{name: f"<{name}>" if self.version == "v2" else None})
        self._check(max_length)

    @property
    def tokens(self) -> dict[str, int]:
        """The token ids by name."""
        return self.token_dictionary  # type: ignore[return-value]

    def spelled(self, name: str) -> str:
        """The name in the token dictionary of a gene name. The reference looks up names in capitals."""
        mapping: Any = self.gene_mapping
        names = self.tokens if mapping is None else mapping
        found = name if name in names else name.upper()
        return found if mapping is None else mapping.get(found, "")

    def bind(self, names: Sequence[str | None], where: str) -> BoundTokenizer:
        """As every tokenizer. Raises OptionError if a median is missing, too."""
        bound, medians = super().bind(names, where), np.ones(len(names))
        known: Any = self.gene_medians
        found = {column: self.spelled(str(names[column])) for column in np.flatnonzero(bound.slot_of >= 0).tolist()}
        if missing := [name for name in found.values() if name not in known]:
            raise OptionError(
                f"gene_medians lacks {len(missing)} of the {len(found)} genes that {where} and the token dictionary "
                f"have: {listed(missing, 3)}. Take the medians that belong to the token dictionary"
            )
        medians[list(found)] = [known[name] for name in found.values()]
        return replace(bound, median_of=medians)

    def write(self, bound: BoundTokenizer, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: Any) -> int:
        """Writes the tokens of some rows."""
        totals = np.empty(0) if totals is None else totals
        bad = np.flatnonzero((np.diff(x.indptr)[: len(totals)] > 0) & ~((totals > 0) & np.isfinite(totals)))
        if len(bad):
            raise OptionError(
                f"obs column {self.n_counts!r} holds {totals[bad[0]]} in row {index[bad[0]]} of the dataset, which has "
                "counts: give another column of totals, or n_counts=None to add up the row"
            )
        axis = (bound.slot_of, bound.token_of, bound.median_of)
        special: Any = (bound.cls, bound.eos, self.max_length)
        into = (out.ids, out.values, out.starts, out.lengths)
        return int(_rank((x.indptr, x.indices, x.values), totals.astype(np.float64), axis, special, into))


@compiled
def _rank(
    x: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    totals: NDArray[np.float64],
    axis: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]],
    special: tuple[int, int, int],
    out: tuple[NDArray[np.int32], NDArray[np.float32], Rows, Rows],
) -> int:
    """Writes the tokens of rows. Returns the first row with a value that is no count, or -1."""
    indptr, indices, counts = x
    slot_of, token_of, median_of = axis
    cls, eos, max_length = special
    ids, values, starts, lengths = out
    longest = 1
    for row in range(len(lengths)):
        longest = max(longest, indptr[row + 1] - indptr[row])
    slots, amounts, order = np.empty(longest, np.int32), np.empty(longest, np.float64), np.empty(longest, np.int64)
    words = np.empty((2, longest), np.uint64)
    most = max_length - (cls >= 0) - (eos >= 0)
    for row in range(len(lengths)):
        first, last = indptr[row], indptr[row + 1]
        kept, total = known_genes(indices[first:last], counts[first:last], slot_of, slots, amounts)
        if kept < 0:
            return row
        if len(totals):
            total = totals[row]
        for k in range(kept):
            slot = slots[k]
            amounts[k] = amounts[k] / total * _TARGET / median_of[slot]
            slots[k] = token_of[slot]  # looked up here, because memory is read in order
        sort_down(amounts[:kept], words, order[:kept])
        to = starts[row]
        if cls >= 0:
            ids[to], values[to] = cls, 0
            to += 1
        n = min(kept, most)
        for k in range(n):
            position = order[k]
            ids[to + k] = slots[position]
            values[to + k] = amounts[position]
        to += n
        if eos >= 0:
            ids[to], values[to] = eos, 0
            to += 1
        lengths[row] = to - starts[row]
    return -1
