"""How well the masked values of programmes.py can be predicted at all: two oracles that know the atlas.

- "true rates" knows the mean count of every gene in every cell. What is left is the noise of the counts, so that no
  predictor does better.
- "true programmes" knows the levels and loadings of the genes, and sees what a model sees: the genes of a row's tokens,
  and the counts of those that are not masked. It infers depth and activities (the maximum of their posterior, by
  Newton's method), and predicts with them. A model that has learned the programmes can do about as well.

Both predict the mean value of a count that is not 0, because genes without counts have no tokens. The value of a count
is the bin that it has, or would have, among the counts of its row. Losses are mean squared errors of values from 0
to 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

import zloader as zl
from benchmarks.data.programmes import DEPTH_SD, OF_CELL_SD, OF_TYPE_SD, Truth
from benchmarks.training.pretraining.model import Tokens, masked_places

_STEPS = 12  # of Newton's method; the last ones change nothing
_LARGEST_STEP = 1.0
Floats = NDArray[np.float64]


def oracle_losses(
    dataset: zl.Dataset, tokenizer: zl.tokenizers.ScGPT, truth: Truth, *, share: float
) -> dict[str, float]:
    """The losses of both oracles at a share of the places of the rows of `dataset`.

    The vocabulary of `tokenizer` has all genes, in their order, after its special tokens.
    """
    n_special = len(tokenizer.vocabulary) - len(truth.level)
    whole = replace(tokenizer, max_length=len(tokenizer.vocabulary), pad_to=None)
    loaders = [zl.Loader(dataset, x=None, tokens=each, shuffle=False) for each in (tokenizer, whole)]
    counted = zl.Loader(dataset, layout="dense", shuffle=False)
    errors: dict[str, list[Floats]] = {"true rates": [], "true programmes": []}
    for minibatch, (some, full, counts) in enumerate(zip(*loaders, counted, strict=True)):
        assert np.array_equal(some.index, counts.index)
        masked = masked_places(some.tokens, share, minibatch).numpy()
        for number, row in enumerate(counts.index.tolist()):
            genes, values = some.tokens["input_ids"][number].numpy() - n_special, some.tokens["values"][number].numpy()
            of_row = counts.x[number].numpy()
            bins = _bins_of_counts(full.tokens, number, of_row, n_special) / tokenizer.n_bins
            hidden = masked[number]
            if not hidden.any():
                continue
            seen = genes[(genes >= 0) & ~hidden]
            inferred = _inferred(of_row[seen], truth.level[seen], truth.loadings[:, seen])
            rates = {
                "true rates": truth.rates(np.array([row]))[0, genes[hidden]],
                "true programmes": np.exp(
                    inferred[0] + truth.level[genes[hidden]] + inferred[1:] @ truth.loadings[:, genes[hidden]]
                ),
            }
            for name, each in rates.items():
                errors[name].append((_mean_values(each, bins) - values[hidden] / tokenizer.n_bins) ** 2)
    return {name: float(np.concatenate(each).mean()) for name, each in errors.items()}


def _bins_of_counts(full: Tokens, number: int, counts: NDArray[np.float32], n_special: int) -> Floats:
    """The bin of each count from 0 to the largest of a row; that of a count between two others is interpolated."""
    genes = full["input_ids"][number].numpy() - n_special
    known, first = np.unique(counts[genes[genes >= 0]], return_index=True)
    return np.interp(np.arange(int(counts.max()) + 1), known, full["values"][number].numpy()[genes >= 0][first])


def _mean_values(rates: Floats, values: Floats) -> Floats:
    """The mean value of a Poisson count above 0, for each rate. Counts above all others have the last value."""
    counts = np.arange(1, int(rates.max() + 10 * np.sqrt(rates.max())) + 20)
    log_shares = counts * np.log(rates)[:, None] - rates[:, None] - gammaln(counts + 1)
    shares = np.exp(log_shares)
    return shares @ values[np.minimum(counts, len(values) - 1)] / shares.sum(axis=1)


def _inferred(counts: NDArray[np.float32], level: Floats, loadings: Floats) -> Floats:
    """The log depth and the activities of a cell, from counts that are not 0."""
    variances = np.full(1 + len(loadings), OF_TYPE_SD**2 + OF_CELL_SD**2)
    variances[0] = DEPTH_SD**2
    design = np.vstack([np.ones(len(counts)), loadings])
    found = np.zeros(len(design))
    for _ in range(_STEPS):
        rates = np.exp(np.clip(level + found @ design, -20, 20))
        means = rates / -np.expm1(-rates)  # of counts above 0
        slopes = np.maximum(means * (1 + rates - means), 1e-9)
        curvature = (design * slopes) @ design.T + np.diag(1 / variances)
        step = np.linalg.solve(curvature, design @ (counts - means) - found / variances)
        found = found + step * min(1.0, _LARGEST_STEP / max(1e-9, float(np.abs(step).max())))
    return found
