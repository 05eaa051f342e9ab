"""Masks tokens for training: which ones is a function of seed, epoch, row of the dataset, and place in the row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_whole
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of
from zloader.tokenizers.counts import part_of, word_at
from zloader.tokenizers.rows import NO_LABEL, RaggedTokens

_U64 = np.uint64
Ids: TypeAlias = tuple[int, NDArray[np.int32]]
_WHICH, _HOW, _GENE = 11, 12, 13  # streams of random words


@dataclass(frozen=True)
class Masked:
    """Masks a share of the tokens of each row and gives `labels`, for masked training. `masked=` of a tokenizer.

    >>> zl.tokenizers.Masked(0.15, seed=1)
    Masked(share=0.15, seed=1)

    Every gene of a row is chosen with the probability `share`; special tokens and padding are not. `labels` are -100
    where nothing was chosen, which torch's cross_entropy ignores.

    - Geneformer masks genes, as transformers' collator for masked language models does: of the chosen tokens, 80 %
      become `mask`, 10 % another gene of the dictionary, each with the same probability, and 10 % stay. `labels` are
      the token ids that were there. `values` stay.
    - ScGPT masks values, as its DataCollator does: all chosen ones become `mask_value`. `labels` are the values that
      were there (float32). `input_ids` stay.

    The choice is a function of `seed`, the epoch, the row of the dataset and the place in the row, so that it is the
    same for any batch size, order, number of workers or ranks, and after a resume.

    Args:
        share: the probability, above 0 and below 1.
        seed: a whole number of at least 0.
    """

    share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.share, int | float | np.floating | np.integer) and not isinstance(self.share, bool)
        if not number or not 0 < self.share < 1:
            raise OptionError(f"share must be a number above 0 and below 1, not {self.share!r:.100}")
        require_whole(0, seed=self.seed)

    def keys(self, epoch: int) -> NDArray[np.uint64]:
        """The keys of an epoch's streams of random words."""
        return np.array([key_of(self.seed, epoch, stream) for stream in (_WHICH, _HOW, _GENE)], np.uint64)

    @property
    def limit(self) -> np.uint64:
        """Random words below it choose a token."""
        return _U64(math.floor(float(self.share) * 2.0**64))


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
