"""Tokens of one cell at a time, as the reference implementations make them, in plain Python and NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.records import CsrArrays
from zloader.order.permutation import key_of, words_at

SPECIAL = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3}


def csr(rows: Any) -> CsrArrays:
    """Rows of counts as the loader gathers them."""
    x = scipy.sparse.csr_matrix(np.asarray(rows))
    x.sort_indices()
    return CsrArrays(
        indptr=x.indptr.astype(np.int32), indices=x.indices.astype(np.int32), values=x.data, n_genes=x.shape[1]
    )


def words(seed: int, epoch: int, stream: int, row: int, n: int) -> NDArray[np.uint64]:
    """The random words of a row of the dataset in one stream of an epoch."""
    of_row = words_at(key_of(seed, epoch, stream), np.array([row], np.uint64))[0]
    return words_at(int(of_row), np.arange(n, dtype=np.uint64))


def below(word: np.uint64, n: int) -> int:
    """A whole number below n from a random word."""
    return (int(word) >> 32) * n >> 32


def geneformer_cell(
    counts: NDArray[Any],
    names: Sequence[str | None],
    tokens: Mapping[str, int],
    medians: Mapping[str, float],
    *,
    max_length: int,
    special: bool = True,
    n_counts: float | None = None,
) -> tuple[list[int], list[float]]:
    """Token ids and values: x / n_counts * 10 000 / median, descending, with ties in the order of the genes."""
    total = float(np.sum(counts, dtype=np.float64)) if n_counts is None else n_counts
    summed: dict[str, float] = {}
    for name in names:
        if name in tokens:
            summed.setdefault(name, 0.0)
    for name, count in zip(names, counts, strict=True):
        if name in tokens:
            summed[name] += float(count)
    values = {name: count / total * 10_000 / medians[name] for name, count in summed.items() if count > 0}
    ranked = sorted(values, key=lambda name: -values[name])  # stable
    ranked = ranked[: max_length - 2 * special]
    ids, scaled = [tokens[name] for name in ranked], [values[name] for name in ranked]
    if not special:
        return ids, scaled
    return [tokens["<cls>"], *ids, tokens["<eos>"]], [0.0, *scaled, 0.0]


def scgpt_values(
    counts: NDArray[np.float64], n_bins: int | None, normalize: float | None, log1p: bool
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The normalised values of nonzero counts, and their bins by np.digitize from either side."""
    total = np.cumsum(counts)[-1] if len(counts) else 0.0  # added up in order, to the last bit
    values = counts if normalize is None else counts / (total / normalize)
    values = np.log1p(values) if log1p else values
    if n_bins is None or not len(values):
        return values, np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    edges = np.quantile(values, np.linspace(0, 1, n_bins - 1))
    return values, np.digitize(values, edges), np.digitize(values, edges, right=True)


def scgpt_cell(
    counts: NDArray[Any],
    names: Sequence[str],
    vocabulary: Mapping[str, int],
    *,
    max_length: int,
    n_bins: int | None = 51,
    normalize: float | None = 1e4,
    log1p: bool = False,
    sample: bool = True,
    side: str = "both",
    seed: int = 0,
    epoch: int = 0,
    row: int = 0,
) -> tuple[list[int], list[float]]:
    """Token ids and values: bins over all nonzero genes of the vocabulary, then a sample of max_length - 1 genes."""
    known = [column for column, name in enumerate(names) if name in vocabulary and counts[column] > 0]
    ids = [vocabulary[names[column]] for column in known]
    scaled, left, right = scgpt_values(np.asarray(counts)[known].astype(np.float64), n_bins, normalize, log1p)
    drawn = words(seed, epoch, 2, row, len(known))
    back = [below(word, int(span)) if side == "both" else 0 for word, span in zip(drawn, left - right, strict=True)]
    values = scaled if n_bins is None else left - np.array(back, np.int64)
    most = max_length - 1
    if len(known) <= most:
        chosen = list(range(len(known)))
    elif not sample:
        chosen = list(range(most))
    else:
        chosen = []
        for place, word in enumerate(words(seed, epoch, 1, row, len(known))):
            if below(word, len(known) - place) < most - len(chosen):
                chosen.append(place)
    return [vocabulary["<cls>"], *(ids[k] for k in chosen)], [0.0, *(float(values[k]) for k in chosen)]
