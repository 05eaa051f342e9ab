"""scGPT's tokens: the nonzero genes of a cell with their counts, in bins of equal size per cell.

The compiled loops put the counts of a row into bins as np.quantile and np.digitize do. Bins are found for the distinct
counts of a row. Whole numbers, of which there are few, are counted in a table; others are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, require_flag, require_one_of, require_whole
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, Rows
from zloader.order.permutation import GOLDEN, key_of, mix_word
from zloader.tokenizers.counts import known_genes, sort_down
from zloader.tokenizers.tokenizer import BoundTokenizer, TokenOptions
from zloader.tokenizers.vocabulary import A_TOKEN, Given, dictionary, is_token

_U64 = np.uint64
_TABLE = 4096  # smaller whole numbers are counted; the table fits into the L1 cache


@compiled
def _word_at(key: Any, counter: Any) -> Any:
    """`words_at` of zloader.order.permutation for a single counter."""
    return mix_word(_U64(key) + GOLDEN * _U64(counter))  # type: ignore[arg-type]


@compiled
def _part_of(word: Any, n: Any) -> Any:
    """A whole number below `n` (at most 2**32) from a random word, each with the same probability."""
    return np.int64(((word >> _U64(32)) * _U64(n)) >> _U64(32))


@compiled
def bin_rows(
    x: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    random: tuple[Rows, NDArray[np.uint64]],
    axis: tuple[NDArray[np.int32], NDArray[np.int32]],
    how: tuple[NDArray[np.float64], float, bool, bool, bool],
    special: tuple[int, int, int],
    out: tuple[NDArray[np.int32], NDArray[np.float32], Rows, Rows],
) -> int:
    """Writes the tokens of rows. Returns the first row with a value that is no count, or -1.

    `random` has the rows' numbers and the keys of two streams of words: which genes are sampled, and their bins. `how`
    is the quantiles at the edges of the bins (none for values as they are), the total to scale to (0 for none), and
    whether to take log1p, to sample, and to draw bins at random.
    """
    indptr, indices, counts = x
    numbers, keys = random
    slot_of, token_of = axis
    quantiles, target, log1p, sample, both = how
    cls, eos, max_length = special
    ids, values, starts, lengths = out
    longest = 1
    for row in range(len(lengths)):
        longest = max(longest, indptr[row + 1] - indptr[row])
    slots, amounts = np.empty(longest, np.int32), np.empty(longest, np.float64)
    which, distinct, upto = np.empty(longest, np.int32), np.empty(longest, np.float64), np.empty(longest, np.int64)
    first_bin, last_bin = np.empty(longest, np.int64), np.empty(longest, np.int64)
    words, order, table = np.empty((2, longest), np.uint64), np.empty(longest, np.int64), np.zeros(_TABLE, np.int32)
    edges = np.empty(len(quantiles), np.float64)
    most = max_length - (cls >= 0) - (eos >= 0)
    for row in range(len(lengths)):
        first, last = indptr[row], indptr[row + 1]
        kept, _ = known_genes(indices[first:last], counts[first:last], slot_of, slots, amounts)
        if kept < 0:
            return row
        total = 0.0
        for k in range(kept):
            total += amounts[k]
        scale = total / target if target > 0 else 1.0
        if len(quantiles):
            n_distinct = _distinct(amounts[:kept], which, (distinct, upto), (words, order), table)
            for j in range(n_distinct):
                distinct[j] = _scaled(distinct[j], scale, log1p)
            _edges(distinct[:n_distinct], upto[:n_distinct], quantiles, edges)
            _digits(distinct[:n_distinct], edges, first_bin, last_bin)
        to = starts[row]
        if cls >= 0:
            ids[to], values[to] = cls, 0
            to += 1
        left = min(kept, most)
        choosing, binning = _word_at(keys[0], numbers[row]), _word_at(keys[1], numbers[row])
        for k in range(kept):
            if left == 0:
                break
            # Each of the genes that are left is chosen with the same probability (Knuth's algorithm S).
            if sample and left < kept - k and _part_of(_word_at(choosing, k), kept - k) >= left:
                continue
            left -= 1
            ids[to] = token_of[slots[k]]
            if len(quantiles):
                bins = last_bin[which[k]] - first_bin[which[k]]
                back = _part_of(_word_at(binning, k), bins) if both and bins > 1 else 0
                values[to] = last_bin[which[k]] - back
            else:
                values[to] = _scaled(amounts[k], scale, log1p)
            to += 1
        if eos >= 0:
            ids[to], values[to] = eos, 0
            to += 1
        lengths[row] = to - starts[row]
    return -1


@compiled
def _scaled(amount: Any, scale: Any, log1p: Any) -> Any:
    scaled = amount / scale
    return np.log1p(scaled) if log1p else scaled


@compiled
def _distinct(
    amounts: NDArray[np.float64],
    which: NDArray[np.int32],
    out: tuple[NDArray[np.float64], Rows],
    scratch: tuple[NDArray[np.uint64], Rows],
    table: NDArray[np.int32],
) -> int:
    """Writes the distinct amounts, ascending, and how many amounts are not greater. Returns how many there are.

    `which` gets the number of each amount among them. `table` is zeros, before and after.
    """
    distinct, upto = out
    words, order = scratch
    n, most = 0, 0
    for i in range(len(amounts)):
        whole = amounts[i] < _TABLE and amounts[i] == np.floor(amounts[i])
        most = max(most, int(amounts[i])) if whole and most >= 0 else -1
    if most >= 0:
        for i in range(len(amounts)):
            table[np.int64(amounts[i])] += 1
        seen = 0
        for count in range(1, most + 1):
            if table[count]:
                seen += table[count]
                distinct[n], upto[n], table[count] = count, seen, n
                n += 1
        for i in range(len(amounts)):
            which[i] = table[np.int64(amounts[i])]
        table[: most + 1] = 0
        return n
    sort_down(amounts, words, order[: len(amounts)])
    for i in range(len(amounts)):
        at = order[len(amounts) - 1 - i]
        if i == 0 or amounts[at] != distinct[n - 1]:
            distinct[n] = amounts[at]
            n += 1
        which[at], upto[n - 1] = n - 1, i + 1
    return n


@compiled
def _edges(
    distinct: NDArray[np.float64], upto: Rows, quantiles: NDArray[np.float64], edges: NDArray[np.float64]
) -> None:
    """np.quantile of the amounts, with its interpolation to the last bit."""
    if len(distinct) == 0:
        return
    last, j = upto[-1] - 1, 0
    for q in range(len(quantiles)):
        place = last * quantiles[q]
        below = min(np.int64(np.floor(place)), last)
        while upto[j] <= below:
            j += 1
        share = place - below
        low, high = distinct[j], distinct[j]
        if below < last and upto[j] <= below + 1:
            high = distinct[j + 1]
        step = high - low
        edges[q] = low + step * share if share < 0.5 else high - step * (1 - share)


@compiled
def _digits(distinct: NDArray[np.float64], edges: NDArray[np.float64], first_bin: Rows, last_bin: Rows) -> None:
    """The number of edges below each amount, and of those that are not above it: its bins are between the two."""
    below, upto = 0, 0
    for j in range(len(distinct)):
        while below < len(edges) and edges[below] < distinct[j]:
            below += 1
        while upto < len(edges) and edges[upto] <= distinct[j]:
            upto += 1
        first_bin[j], last_bin[j] = below, upto


_CHOICE, _BINS = 1, 2  # streams of random words


@dataclass(frozen=True, eq=False, repr=False)
class ScGPT(TokenOptions):
    """Tokens as scGPT's Preprocessor, tokenizer and DataCollator make them, for `zl.Loader(dataset, tokens=...)`.

    >>> zl.tokenizers.ScGPT({"<pad>": 0, "<cls>": 1, "ACTB": 2, "CD3E": 3}, max_length=600)
    ScGPT(max_length=600, 4 tokens)

    `minibatch.tokens.input_ids` has `cls` and then the row's nonzero genes that are in the vocabulary, in the order of
    the matrix. `values` (float32) has 0 for `cls`, and then the bin of each gene, from 1 to `n_bins` - 1. The edges of
    the bins are `np.quantile(values, np.linspace(0, 1, n_bins - 1))` of all these genes of the row, in float64.

    A row of more genes than `max_length` has places for is sampled after its bins were computed. Samples and random
    bins are a function of the loader's seed, the epoch, the row of the dataset and the place in the row.

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
        x: the matrix of counts, as in zl.Loader.
        genes_by: the var column with the names of genes that the vocabulary has. Default: the gene names of the
            dataset.
        dtype: that of `input_ids`, `"int64"` or `"int32"`, or such a dtype of torch or NumPy.
        pad_to: pads all rows to this length. Default: to the longest row of the minibatch.

    Raises OptionError for unusable options, and when a Loader is made for a dataset without any gene of the vocabulary.
    """

    vocabulary: Given
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

    def __post_init__(self) -> None:
        self._put(vocabulary=dictionary("vocabulary", self.vocabulary, is_token, A_TOKEN))
        if self.n_bins is not None:
            require_whole(2, n_bins=self.n_bins)
        require_flag(log1p=self.log1p, sample=self.sample)
        require_one_of(("both", "one"), side=self.side)
        for name in ("normalize", "pad_value"):
            value = getattr(self, name)
            if not (value is None and name == "normalize") and not (is_number(value) and np.isfinite(value)):
                raise OptionError(f"{name} must be a finite number, not {value!r:.100}")
        if self.normalize is not None and self.normalize <= 0:
            raise OptionError(f"normalize must be a number above 0 or None, not {self.normalize!r}")
        self._check(self.max_length)

    @property
    def tokens(self) -> dict[str, int]:
        """The token ids by name."""
        return self.vocabulary  # type: ignore[return-value]

    def write(self, bound: BoundTokenizer, x: CsrArrays, index: Rows, totals: NDArray[Any] | None, out: Any) -> int:
        """Writes the tokens of some rows."""
        keys = np.array([key_of(bound.seed, bound.epoch, stream) for stream in (_CHOICE, _BINS)], np.uint64)
        quantiles = np.empty(0) if self.n_bins is None else np.linspace(0, 1, self.n_bins - 1)
        how = (quantiles, float(self.normalize or 0), self.log1p, self.sample, self.side == "both")
        special = (bound.cls, bound.eos, self.max_length)
        into = (out.ids, out.values, out.starts, out.lengths)
        rows = (x.indptr, x.indices, x.values)
        return int(bin_rows(rows, (index, keys), (bound.slot_of, bound.token_of), how, special, into))
