"""Two short trainings, from tokens and from sets: each model has to fall below its baseline, in minutes on two cores.

    python -m benchmarks.training.models [--seed 0] [--work DIRECTORY]

"tokens": a transformer of two layers predicts masked values from ScGPT's tokens. The rows are the 2 142 cells of the
human pancreas that come with zloader, four fifths of them for training. The vocabulary has the 1 000 genes that most
training cells express; a row has 128 tokens at random, of which 40 % are masked, and values are bins, divided by their
number. The baseline predicts the mean value of the gene in the training cells.

"sets": a model predicts how a drug shifts the mean of a set of 64 cells, from control cells of the same cell line and
from the number of the drug. The rows are those of screens.py. Two drugs of each cell line are held out. Values are
log1p of counts scaled to 1 per gene. Baselines predict no shift, and the mean shift of all training sets. The mean
shift of the drug in the other cell lines is given for comparison, and need not be beaten.

Losses are mean squared errors on the held-out cells or sets, in the same minibatches for model and baselines. rows/s
and the share of the time that training waited for minibatches are those of the loader in all epochs of training;
controls are not counted as rows. Peak memory is that of the process. The exit status is 1 if a model does not fall
below each of its baselines.

Then cell-load reads the .h5ad file of the screen in turns with zloader on the store that was converted from it: sets of
64 treated cells, 8 per minibatch, each cell with a random control of its cell line, as dense float32. cell-load reads
X, or a dense obsm array of the same values, or that with its option for sets of neighbouring rows. Its epochs end after
--most-s seconds. Its memory is the peak of its process, and the private memory of its workers. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import zloader as zl
from benchmarks.compare import rivals
from benchmarks.data import screens
from benchmarks.data.screens import CONTROL, Screen
from benchmarks.harness import measuring
from benchmarks.harness.measuring import Figures, table
from benchmarks.harness.sides import Reader, StoreLocation, in_turns, median_and_range, reader, rows_per_s, speedups

N_BINS, TOKENS, SHARE = 51, 64, 0.4
SPECIAL = {"<pad>": 0, "<cls>": 1}
INFORMATIVE = "mean shift of the drug"  # a baseline that a model need not beat


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
    rows, epochs_of = 0, []
    for epoch in range(epochs):
        for minibatch in loader:
            rows += len(minibatch)
            loss = loss_of(minibatch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        epochs_of.append(loader.statistics())
        print(f"{type(model).__name__}, epoch {epoch}: loss {loss.item():.4f}, {epochs_of[-1]}", file=sys.stderr)
    seconds = sum(each.elapsed_s for each in epochs_of)
    waited = sum(each.wait_s for each in epochs_of)
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / seconds, "wait_share": waited / seconds}


# ---- tokens


class MaskedValues(torch.nn.Module):
    """A transformer that predicts the values at masked places."""

    def __init__(self, n_tokens: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.gene, self.scale = (torch.nn.Embedding(n_tokens, width) for _ in range(2))
        for embedding in (self.gene, self.scale):
            torch.nn.init.normal_(embedding.weight, std=0.02)  # small, so that it is soon what was learned
        self.value = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
        self.masked = torch.nn.Parameter(torch.zeros(width))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 1)
        self.of_gene = torch.nn.Embedding(n_tokens, 1)  # learns the mean of the gene, so that the rest need not
        torch.nn.init.constant_(self.of_gene.weight, 0.5)

    def forward(self, tokens: Any, masked: torch.Tensor) -> torch.Tensor:
        """The predictions at the masked places of a minibatch, one after the other."""
        value = torch.where(masked, 0, tokens["values"] / N_BINS)[..., None]
        places = self.gene(tokens["input_ids"]) + self.scale(tokens["input_ids"]) * value
        places = places + torch.where(masked[..., None], self.masked, self.value(value))
        read = self.encoder(places, src_key_padding_mask=~tokens["attention_mask"])
        return (self.head(read[masked]) + self.of_gene(tokens["input_ids"][masked])).squeeze(-1)


def masked_places(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Which places are masked, at random, and the values there, divided by the number of bins."""
    masked = (torch.rand(tokens["values"].shape) < SHARE) & tokens["attention_mask"]
    masked[:, 0] = False  # <cls>
    return masked, tokens["values"][masked] / N_BINS


def vocabulary_of(view: zl.Dataset, n_genes: int) -> dict[str, int]:
    """Ids of the special tokens, and of the genes with the greatest dispersion among those in 5 % of the rows."""
    genes = view.gene_statistics()
    expressed = genes.nonzero > 0.05 * view.n_obs
    dispersion = np.where(expressed, genes.variance / np.maximum(genes.mean, 1e-9), 0)
    chosen = np.argsort(-dispersion, kind="stable")[:n_genes]
    return SPECIAL | {view.var_names[gene]: len(SPECIAL) + number for number, gene in enumerate(chosen)}


def gene_means(loader: zl.Loader, n_tokens: int) -> torch.Tensor:
    """The mean value of each token in one epoch, and the mean of all for a gene that does not occur."""
    sums, counts = torch.zeros(n_tokens), torch.zeros(n_tokens)
    for minibatch in loader:
        ids = minibatch.tokens["input_ids"][minibatch.tokens["attention_mask"]]
        sums += torch.bincount(ids, minibatch.tokens["values"][minibatch.tokens["attention_mask"]] / N_BINS, n_tokens)
        counts += torch.bincount(ids, minlength=n_tokens)
    of_genes = slice(len(SPECIAL), None)
    overall = sums[of_genes].sum() / counts[of_genes].sum()
    return torch.where(counts > 0, sums / counts.clamp(min=1), overall)


def tokens_run(dataset: zl.Dataset, *, epochs: int = 12, n_genes: int = 500, seed: int = 0) -> Figures:
    """Trains the transformer, and compares it with the mean of each gene on held-out cells."""
    torch.manual_seed(seed)
    train, test = dataset.split([0.8, 0.2], seed=seed)
    vocabulary = vocabulary_of(train, n_genes)

    tokenizer = zl.tokenizers.ScGPT(vocabulary, n_bins=N_BINS, max_length=TOKENS, side="one")

    def loader(view: zl.Dataset, **options: Any) -> zl.Loader:
        return zl.Loader(view, batch_size=32, x=None, tokens=tokenizer, seed=seed, **options)

    model = MaskedValues(len(vocabulary))

    def loss_of(minibatch: zl.Minibatch) -> torch.Tensor:
        where, values = masked_places(minibatch.tokens)
        return functional.mse_loss(model(minibatch.tokens, where), values)

    figures = trained(model, loader(train), loss_of, epochs=epochs, rate=3e-3)
    means = gene_means(loader(train), len(vocabulary))
    losses: dict[str, list[torch.Tensor]] = {"model": [], "mean of the gene": []}
    with torch.no_grad():
        for minibatch in loader(test, shuffle=False):
            where, values = masked_places(minibatch.tokens)
            losses["model"].append((model(minibatch.tokens, where) - values) ** 2)
            losses["mean of the gene"].append((means[minibatch.tokens["input_ids"][where]] - values) ** 2)
    return figures | {"losses": {name: torch.cat(each).mean().item() for name, each in losses.items()}}


# ---- sets


class MeanShift(torch.nn.Module):
    """Predicts the mean shift of a set from its control cells and its drug."""

    def __init__(self, n_genes: int, n_drugs: int, width: int = 128) -> None:
        super().__init__()
        self.cell = torch.nn.Sequential(torch.nn.Linear(n_genes, width), torch.nn.ReLU())
        self.drug = torch.nn.Embedding(n_drugs, width)
        self.shift = torch.nn.Sequential(
            torch.nn.Linear(2 * width, width), torch.nn.ReLU(), torch.nn.Linear(width, n_genes)
        )

    def forward(self, controls: torch.Tensor, drug: torch.Tensor) -> torch.Tensor:
        """`controls` is sets x cells x genes, `drug` has one number per set."""
        return self.shift(torch.cat([self.cell(controls).mean(dim=1), self.drug(drug)], dim=1))


def sets_of(minibatch: zl.Minibatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The control cells, the drug and the mean shift of each set of a minibatch. Its sets are equally large."""
    n_sets = int(minibatch.set_of_row[-1]) + 1
    cells, controls = (scaled(each.x).unflatten(0, (n_sets, -1)) for each in (minibatch, minibatch.control))
    drug = minibatch.obs["drug"].unflatten(0, (n_sets, -1))[:, 0]
    return controls, drug, cells.mean(dim=1) - controls.mean(dim=1)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(x * (x.shape[1] / x.sum(dim=1, keepdim=True).clamp(min=1)))


def held_out(dataset: zl.Dataset, *, per_line: int, seed: int) -> NDArray[np.bool_]:
    """The rows of `per_line` drugs of each cell line."""
    rng = np.random.default_rng(seed)
    obs = dataset.obs(["cell_line", "drug"])
    drugs = [drug for drug in obs["drug"].cat.categories if drug != CONTROL]
    chosen = {(line, drug) for line in obs["cell_line"].cat.categories for drug in rng.choice(drugs, per_line, False)}
    return np.array([pair in chosen for pair in zip(obs["cell_line"], obs["drug"], strict=True)])


def sets_run(dataset: zl.Dataset, *, epochs: int = 8, set_size: int = 64, per_line: int = 2, seed: int = 0) -> Figures:
    """Trains the set model, and compares it with mean shifts on sets of held-out pairs of cell line and drug."""
    torch.manual_seed(seed)
    is_control = (dataset.obs(["drug"])["drug"] == CONTROL).to_numpy()
    test = held_out(dataset, per_line=per_line, seed=seed)
    controls = zl.MatchedControls(dataset.where(is_control), match=["cell_line"])

    def loader(rows: NDArray[np.bool_]) -> zl.Loader:
        sampling = zl.CellSets(["cell_line", "drug"], set_size=set_size)
        return zl.Loader(
            dataset.where(rows), sampling=sampling, controls=controls, batch_size=8 * set_size, fetch_factor=16,
            obs=["drug"], layout="dense", seed=seed, drop_last=False,
        )  # fmt: skip

    n_drugs = len(dataset.categories("drug"))
    model = MeanShift(dataset.n_vars, n_drugs)

    def loss_of(minibatch: zl.Minibatch) -> torch.Tensor:
        given, drug, shift = sets_of(minibatch)
        return functional.mse_loss(model(given, drug), shift)

    train = loader(~is_control & ~test)
    figures = trained(model, train, loss_of, epochs=epochs, rate=2e-3)
    overall, of_drug = mean_shifts(train, n_drugs)
    losses: dict[str, list[torch.Tensor]] = {"model": [], "no shift": [], "mean shift": [], INFORMATIVE: []}
    with torch.no_grad():
        for minibatch in loader(test):
            given, drug, shift = sets_of(minibatch)
            guesses = (model(given, drug), torch.zeros(()), overall, of_drug[drug])
            for each, guess in zip(losses.values(), guesses, strict=True):
                each.append(((guess - shift) ** 2).mean(dim=1))
    return figures | {"losses": {name: torch.cat(each).mean().item() for name, each in losses.items()}}


def mean_shifts(loader: zl.Loader, n_drugs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean shift over the sets of one epoch, and that of each drug."""
    sums, counts = torch.zeros(n_drugs, loader.dataset.n_vars), torch.zeros(n_drugs, 1)
    for minibatch in loader:
        _, drug, shift = sets_of(minibatch)
        sums.index_add_(0, drug, shift)
        counts.index_add_(0, drug, torch.ones(len(drug), 1))
    return sums.sum(dim=0) / counts.sum(), sums / counts.clamp(min=1)


# ---- cell-load


def beside_cell_load(path: Path, store: Path, work: Path, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Epochs of the same sets with controls, in turns with cell-load."""
    sizes = {"set_size": 64, "batch_size": 512, "chunk_size": 64, "preload_nchunks": 128}
    python = rivals.environment("cell-load", python=options.python, directory=options.environments)
    theirs = {"workers": options.workers, "embed_key": None, "consecutive": False, **sizes}
    forms: dict[str, Figures] = {
        "cell-load, X": {},
        "cell-load, X_hvg": {"embed_key": "X_hvg"},
        "cell-load, X_hvg, neighbours": {"embed_key": "X_hvg", "consecutive": True},
    }
    ours = {"layout": "dense", **sizes}
    mirrored = {"zloader": {"mirror": str(work / "mirror")}, "zloader, no mirror": {}}
    with contextlib.ExitStack() as stack:
        location = StoreLocation(store=store, url=str(store))
        file = StoreLocation(store=path.parent, url=str(path))

        def started(name: str, python: str | Path, location: StoreLocation, options: Figures) -> Reader:
            return stack.enter_context(reader(name, python, location, options, work))

        sides = {name: started(name, sys.executable, location, ours | form).epoch for name, form in mirrored.items()}
        for name, form in forms.items():
            sides[name] = partial(started(name, python, file, theirs | form).epoch, most_s=options.most_s)
        return in_turns(sides, options.turns, rows=None, label="sets")


def print_beside(runs: dict[str, list[Figures]]) -> None:
    lines = [["", "rows/s", "(range)", "CPU s per 1 000 rows", "peak MB", "workers MB", "zloader is", "(range)"]]
    for name, figures in runs.items():
        cpu = [1000 * (run["user_s"] + run["system_s"]) / run["rows"] for run in figures]
        lines.append(
            [
                name,
                *median_and_range(list(map(rows_per_s, figures)), "{:,.0f}"),
                f"{statistics.median(cpu):.3f}",
                f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}",
                f"{max(run.get('workers_bytes', 0) for run in figures) / 1e6:,.0f}",
                *median_and_range(speedups(runs["zloader"], figures), "{:.1f} x"),
            ]
        )
    table(lines)


# ---- both


def print_trainings(runs: dict[str, Figures]) -> bool:
    """Prints the trainings. Returns whether each model fell below its baselines."""
    lines = [["", "rows/s", "waited", "baseline", "its loss", "the model's", "share"]]
    fell = True
    for name, figures in runs.items():
        baselines = dict(figures["losses"])
        model = baselines.pop("model")
        for baseline, loss in baselines.items():
            speed = [f"{figures['rows_per_s']:,.0f}", f"{figures['wait_share']:.1%}"]
            lines.append([name, *speed, baseline, f"{loss:.5f}", f"{model:.5f}", f"{model / loss:.2f}"])
            fell = fell and (model < loss or baseline == INFORMATIVE)
    table(lines)
    print("each model fell below its baselines" if fell else "a model did not fall below its baseline")
    return fell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of torch (default: one per core)")
    parser.add_argument("--work", type=Path, help="directory for the data (default: a temporary directory)")
    parser.add_argument("--alone", action="store_true", help="without cell-load")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of cell-load (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="epochs beside cell-load (default: %(default)s)")
    parser.add_argument(
        "--most-s", type=float, default=20, help="seconds per epoch of cell-load (default: %(default)s)"
    )
    rivals.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        work = Path(folder)
        path, cells, store = work / "screen" / "screen.h5ad", work / "cells.zarr", work / "screen.zarr"
        path.parent.mkdir()
        zl.convert(zl.example_h5ad(work / "cells.h5ad"), cells, progress=False)
        # in a process of its own, whose memory does not count
        measuring.in_new_process(partial(screens.write, obsm=not options.alone), path, Screen())
        zl.convert(path, store, progress=False)
        runs = {
            "tokens": tokens_run(zl.open_dataset(cells, cache=work / "cache"), seed=options.seed),
            "sets": sets_run(zl.open_dataset(store, cache=work / "cache"), seed=options.seed),
        }
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        beside = {} if options.alone else beside_cell_load(path, store, work, options)
    fell = print_trainings(runs)
    print(f"peak memory of both trainings: {peak_bytes / 1e6:,.0f} MB")
    if beside:
        print_beside(beside)
    print(
        json.dumps(
            {"cores": len(os.sched_getaffinity(0)), "trainings": runs, "peak_bytes": peak_bytes, "beside": beside}
        )
    )
    sys.exit(0 if fell else 1)


if __name__ == "__main__":
    main()
