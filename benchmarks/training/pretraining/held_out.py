"""Losses of held-out rows in pretrain.py: of the model, and of the baseline that predicts the mean of each gene."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import zloader as zl
from benchmarks.training.pretraining.model import Tokens, masked_places, predicted
from benchmarks.training.pretraining.ranks import Ranks
from benchmarks.training.pretraining.settings import N_BINS


class GeneMeans:
    """The mean value of each gene in the minibatches that were added on this rank. `totals` are sums and counts."""

    def __init__(self, n_tokens: int, device: torch.device) -> None:
        self.totals = torch.zeros(2, n_tokens, dtype=torch.float64, device=device)

    def add(self, tokens: Tokens) -> None:
        """Counts all values of a minibatch."""
        values = tokens["values"] / N_BINS
        of_genes = tokens["attention_mask"] & (values > 0)  # a special token has the value 0
        for number, weights in enumerate((torch.where(of_genes, values, 0), of_genes)):
            ids = tokens["input_ids"].flatten()
            self.totals[number] += torch.bincount(ids, weights.flatten().double(), self.totals.shape[1])

    def means(self, ranks: Ranks) -> torch.Tensor:
        """The means over all ranks, by token. A gene that was not seen has the mean of all values."""
        sums, counts = ranks.sums(self.totals.clone())
        return torch.where(counts > 0, sums / counts.clamp(min=1), sums.sum() / counts.sum().clamp(min=1))


@torch.no_grad()
def held_out_losses(
    model: Callable[..., torch.Tensor],
    minibatches: Iterable[zl.Minibatch],
    means: torch.Tensor,
    ranks: Ranks,
    share: float,
) -> dict[str, float]:
    """Mean squared errors of all ranks' minibatches, at masked places that are the same each time."""
    errors = torch.zeros(3, dtype=torch.float64, device=means.device)
    for number, minibatch in enumerate(minibatches):
        masked = masked_places(minibatch.tokens, share, number)
        predictions, truth = predicted(model, minibatch.tokens, masked, N_BINS)
        each = [predictions, means[minibatch.tokens["input_ids"]]]
        errors[:2] += torch.stack([torch.where(masked, one - truth, 0).double().square().sum() for one in each])
        errors[2] += masked.sum()
    of_model, of_means, places = ranks.sums(errors).tolist()
    if not places:
        raise SystemExit("no value of the held-out rows is masked: raise --held-out, --tokens or --masked")
    return {"model": of_model / places, "mean of each gene": of_means / places, "places": places}
