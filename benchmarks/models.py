"""Two short trainings, from tokens and from sets: each model has to fall below its baseline, in minutes on two cores.

    python benchmarks/models.py [--seed 0] [--work DIRECTORY]

"tokens": a transformer of two layers predicts masked values from ScGPT's tokens. The rows are the 2 142 cells of the
human pancreas that come with zloader, four fifths of them for training. The vocabulary has the 1 000 genes that most
training cells express; a row has 128 tokens at random, of which 40 % are masked, and values are bins, divided by their
number. The baseline predicts the mean value of the gene in the training cells.

"sets": a model predicts how a drug shifts the mean of a set of 64 cells, from control cells of the same cell line and
from the number of the drug. The rows are those of screens.py. Two drugs of each cell line are held out. Values are
log1p of counts scaled to 1 per gene. Baselines predict no shift, and the mean shift of all training sets. The mean shift of
the drug in the other cell lines is given for comparison.

Losses are mean squared errors on the held-out cells or sets, in the same minibatches for model and baselines. rows/s and
the share of the time that training waited for minibatches are those of the loader in all epochs of training; controls
are not counted as rows. Peak memory is that of the process. The exit status is 1 if a model does not fall below each of
its baselines. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rivals import Figures, table
from torch.nn import functional

import zloader as zl

N_BINS, TOKENS, SHARE = 51, 64, 0.4
SPECIAL = {"<pad>": 0, "<cls>": 1}


def trained(
    model: torch.nn.Module,
    loader: zl.Loader,
    loss_of: Callable[[zl.Minibatch], torch.Tensor],
    *,
    epochs: int,
    rate: float,
) -> Figures:
    """Trains with Adam while the rate falls to 0. Returns the speed and the waits of all epochs."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, epochs * len(loader))
    epochs_of = []
    for epoch in range(epochs):
        for minibatch in loader:
            loss = loss_of(minibatch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        epochs_of.append(loader.statistics())
        print(f"{type(model).__name__}, epoch {epoch}: loss {loss.item():.4f}, {epochs_of[-1]}", file=sys.stderr)
    seconds = sum(each.elapsed_s for each in epochs_of)
    return {
        "rows": sum(each.rows for each in epochs_of),
        "seconds": seconds,
        "rows_per_s": sum(each.rows for each in epochs_of) / seconds,
        "wait_share": sum(each.wait_s for each in epochs_of) / seconds,
    }


# ---- tokens


class MaskedValues(torch.nn.Module):
    """A transformer that predicts the values at masked places."""

    def __init__(self, n_tokens: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.gene = torch.nn.Embedding(n_tokens, width)
        self.value = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
        self.masked = torch.nn.Parameter(torch.zeros(width))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 1)
        self.of_gene = torch.nn.Embedding(n_tokens, 1)  # learns the mean of the gene, so that the rest need not
        torch.nn.init.constant_(self.of_gene.weight, 0.5)

    def forward(self, tokens: Any, masked: torch.Tensor) -> torch.Tensor:
        """The predictions at the masked places of a minibatch, one after the other."""
        values = self.value(tokens.values[..., None] / N_BINS)
        places = self.gene(tokens.input_ids) + torch.where(masked[..., None], self.masked, values)
        read = self.encoder(places, src_key_padding_mask=~tokens.attention_mask)
        return (self.head(read[masked]) + self.of_gene(tokens.input_ids[masked])).squeeze(-1)


def masked_places(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Which places are masked, and the values there, divided by the number of bins."""
    masked = tokens.labels != -100
    return masked, tokens.labels[masked] / N_BINS


def vocabulary_of(view: zl.Dataset, n_genes: int) -> dict[str, int]:
    """Ids of the special tokens, and of the genes that most rows express."""
    cells = sum((part.x > 0).sum(axis=0) for part in zl.Loader(view, layout="scipy", shuffle=False))
    chosen = np.argsort(-np.asarray(cells).ravel(), kind="stable")[:n_genes]
    return SPECIAL | {view.var_names[gene]: len(SPECIAL) + number for number, gene in enumerate(chosen)}


def gene_means(loader: zl.Loader, n_tokens: int) -> torch.Tensor:
    """The mean value of each token in one epoch, and the mean of all for a gene that does not occur."""
    sums, counts = torch.zeros(n_tokens), torch.zeros(n_tokens)
    for minibatch in loader:
        ids = minibatch.tokens.input_ids[minibatch.tokens.attention_mask]
        sums += torch.bincount(ids, minibatch.tokens.values[minibatch.tokens.attention_mask] / N_BINS, n_tokens)
        counts += torch.bincount(ids, minlength=n_tokens)
    of_genes = slice(len(SPECIAL), None)
    overall = sums[of_genes].sum() / counts[of_genes].sum()
    return torch.where(counts > 0, sums / counts.clamp(min=1), overall)


def tokens_run(dataset: zl.Dataset, *, epochs: int = 30, n_genes: int = 500, seed: int = 0) -> Figures:
    """Trains the transformer, and compares it with the mean of each gene on held-out cells."""
    torch.manual_seed(seed)
    train, test = dataset.split([0.8, 0.2], seed=seed)
    vocabulary = vocabulary_of(train, n_genes)

    def loader(view: zl.Dataset, masked: zl.tokenizers.Masked | None, **options: Any) -> zl.Loader:
        tokenizer = zl.tokenizers.ScGPT(vocabulary, n_bins=N_BINS, max_length=TOKENS, side="one", masked=masked)
        return zl.Loader(view, batch_size=32, x=None, tokens=tokenizer, seed=seed, **options)

    model = MaskedValues(len(vocabulary))
    masked = zl.tokenizers.Masked(SHARE, seed=seed)

    def loss_of(minibatch: zl.Minibatch) -> torch.Tensor:
        where, values = masked_places(minibatch.tokens)
        return functional.mse_loss(model(minibatch.tokens, where), values)

    figures = trained(model, loader(train, masked), loss_of, epochs=epochs, rate=3e-3)
    means = gene_means(loader(train, None), len(vocabulary))
    losses: dict[str, list[torch.Tensor]] = {"model": [], "mean of the gene": []}
    with torch.no_grad():
        for minibatch in loader(test, masked, shuffle=False):
            where, values = masked_places(minibatch.tokens)
            losses["model"].append((model(minibatch.tokens, where) - values) ** 2)
            losses["mean of the gene"].append((means[minibatch.tokens.input_ids[where]] - values) ** 2)
    return figures | {"losses": {name: torch.cat(each).mean().item() for name, each in losses.items()}}
