"""Masks tokens for training: which ones is a function of seed, epoch, row of the dataset, and place in the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.tokenizers.counts import part_of, word_at
from zloader.tokenizers.tokenizer import NO_LABEL, Masked, RaggedTokens

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
