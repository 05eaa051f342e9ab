"""scGPT's tokens: the nonzero genes of a cell with their counts, in bins of equal size per cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_flag, require_one_of, require_whole
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, Rows
from zloader.order.permutation import key_of
from zloader.tokenizers.binning import bin_rows
from zloader.tokenizers.masking import mask_values
from zloader.tokenizers.options import TokenOptions
from zloader.tokenizers.rows import BoundTokenizer, Padding, RaggedTokens
from zloader.tokenizers.vocabulary import GeneNames, Given, dictionary, gene_tokens, special_id, token_id

_CHOICE, _BINS = 1, 2  # streams of random words


@dataclass(frozen=True, eq=False)
class ScGPT(TokenOptions):
    """Tokens as scGPT's Preprocessor, tokenizer and DataCollator make them, for `zl.Loader(dataset, tokens=...)`.

    >>> zl.tokenizers.ScGPT({"<pad>": 0, "<cls>": 1, "ACTB": 2, "CD3E": 3}, max_length=600)
    ScGPT(n_bins=51, max_length=600, 4 tokens)

    `minibatch.tokens.input_ids` has `cls` and then the row's nonzero genes that are in the vocabulary, in the order of
    the matrix. `values` (float32) has 0 for `cls`, and then the bin of each gene, from 1 to `n_bins` - 1. The edges of
    the bins are `np.quantile(values, np.linspace(0, 1, n_bins - 1))` of all these genes of the row, in float64.

    A row of more genes than `max_length` has places for is sampled, each gene with the same probability, after its bins
    were computed. Samples and random bins are a function of the loader's seed, the epoch, the row of the dataset and
    the place in the row.

    Args:
        vocabulary: token ids by gene name (symbol), as a dict or the path of a JSON file such as scGPT's vocab.json.
        n_bins: bins, that of zero included. With None, `values` are the normalised counts.
        max_length: the most tokens per row, special tokens included.
        normalize: the total of a row's genes in the vocabulary, to which its counts are scaled; None leaves them as
            they are.
        log1p: whether to take log(1 + x) then. Neither this nor `normalize` changes bins, except by rounding.
        sample: False cuts longer rows to their first genes.
        side: `"both"` draws the bin of a count that lies on several edges at random among theirs, as scGPT does;
            `"one"` takes the last one.
        pad, cls, eos: the padding, first and last token, by name or id; None for no first or last token.
        pad_value: the value at padding.
        mask_value: the value at masked places.
        x: the matrix of counts, as in zl.Loader.
        genes_by: the var column with the names of genes that the vocabulary has. Default: the gene names of the
            dataset.
        dtype: that of `input_ids`, `"int64"` or `"int32"`.
        pad_to: pads all rows to this length. Default: to the longest row of the minibatch.
        masked: a zl.tokenizers.Masked, to mask values.

    Raises OptionError for unusable options, and when a Loader is made for a dataset without any gene of the vocabulary.
    """

    vocabulary: Given = field(repr=False)
    n_bins: int | None = 51
    max_length: int = 1200
    normalize: float | None = 1e4
    log1p: bool = False
    sample: bool = True
    side: Literal["both", "one"] = field(default="both", kw_only=True)
    pad: str | int = field(default="<pad>", kw_only=True)
    cls: str | int | None = field(default="<cls>", kw_only=True)
    eos: str | int | None = field(default=None, kw_only=True)
    pad_value: float = field(default=-2, kw_only=True)
    mask_value: float = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        self._put(vocabulary=dictionary("vocabulary", self.vocabulary, token_id))
        if self.n_bins is not None:
            require_whole(2, n_bins=self.n_bins)
        require_flag(log1p=self.log1p, sample=self.sample)
        require_one_of(("both", "one"), side=self.side)
        for name in ("normalize", "pad_value", "mask_value"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not (value is None and name == "normalize") and not (number and np.isfinite(value)):
                raise OptionError(f"{name} must be a finite number, not {value!r:.100}")
        if self.normalize is not None and self.normalize <= 0:
            raise OptionError(f"normalize must be a number above 0 or None, not {self.normalize!r}")
        if self._special("pad") is None:
            raise OptionError("pad must be the name or the id of a token, not None")
        self._check(self.max_length, sum(self._special(name) is not None for name in ("cls", "eos")))

    def __repr__(self) -> str:
        masked = "" if self.masked is None else f", masked={self.masked!r}"
        return f"ScGPT(n_bins={self.n_bins}, max_length={self.max_length}, {len(self._tokens)} tokens{masked})"

    @property
    def _tokens(self) -> dict[str, int]:
        return cast("dict[str, int]", self.vocabulary)

    def _special(self, name: str) -> int | None:
        return special_id(name, getattr(self, name), self._tokens, "vocabulary")

    def bind(self, genes: GeneNames) -> BoundTokenizer:
        """The tokenizer for the genes of a matrix. Raises OptionError if it knows none of them."""
        special = {name: self._special(name) for name in ("pad", "cls", "eos")}
        pad, cls, eos = special.values()
        return _Binning(
            name="ScGPT",
            x=self.x,
            where=genes.where,
            genes=gene_tokens(genes, self._tokens, special, option="vocabulary"),
            padding=Padding(
                ids=self.dtype,
                pad_id=cast("int", pad),
                pad_value=self.pad_value,
                pad_to=self.pad_to,
                labels=None if self.masked is None else "float32",
            ),
            max_length=self.max_length,
            cls=-1 if cls is None else cls,
            eos=-1 if eos is None else eos,
            options=self,
            quantiles=np.empty(0) if self.n_bins is None else np.linspace(0, 1, self.n_bins - 1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Binning(BoundTokenizer):
    """ScGPT for the genes of a matrix."""

    options: ScGPT
    quantiles: NDArray[np.float64]

    def rows(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None) -> RaggedTokens:
        made = super().rows(x, index, totals)
        masked = self.options.masked
        if masked is None:
            return made
        return mask_values(masked, made, self.n_special, index, self.epoch, self.options.mask_value)

    def _write(self, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: RaggedTokens) -> int:
        options = self.options
        keys = np.array([key_of(self.seed, self.epoch, stream) for stream in (_CHOICE, _BINS)], np.uint64)
        how = (
            self.quantiles,
            float(options.normalize or 0),
            options.log1p,
            options.sample,
            options.side == "both",
        )
        axis = (self.genes.slot_of, self.genes.token_of)
        special = (self.cls, self.eos, self.max_length)
        into = (out.ids, out.values, out.starts, out.lengths)
        return int(bin_rows((x.indptr, x.indices, x.values), (index, keys), axis, how, special, into))
