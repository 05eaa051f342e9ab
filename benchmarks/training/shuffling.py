"""The benefit of shuffling for a model: a linear drug classifier, trained on rows that are sorted by plate.

    python -m benchmarks.training.shuffling [--rows 200000] [--seeds 3] [--by-drug] [--machines 8]

Rows are counts of 300 genes, sorted by plate. Each of 14 plates has its own four drugs in random order, and shifts the
genes a little. In storage order the model sees four drugs at a time, and after the last plate it has forgotten the
first. With --by-drug, rows are sorted by drug, so every block has a single label, which is the hardest case. Each drug
changes 12 genes, by half on average. The test set has 20 000 other rows of all drugs.

Every sampling reads the same local store through a Loader and starts from the same zero weights; only the seed of the
sampling differs between runs. Minibatches have 64 rows, with counts scaled to a mean of 1 per gene and log1p. There are
two recipes, both with Adam at 0.002: one epoch at a constant rate, where the model remembers the last rows best, and
three epochs while the rate falls to 0, as in real training. macro-F1 is the mean of F1 over the 56 drugs; a drug that
is never predicted has 0. The scDataset paper reports 0.0023 for streaming, 0.0304 for blocks of 16 x 256 and 0.0299 for
random rows, on the 380 drugs of Tahoe-100M. Only the ratio to random rows is comparable. The last line is one JSON
document.

With --machines, that many ranks of one machine each train together: a step takes a minibatch of every rank. The default
order is then divided in three ways: globally, in equal parts as `dataset.split(n)` deals them, and in stretches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
import torch
from numpy.typing import NDArray

import zloader as zl
from benchmarks.harness.measuring import table
from zloader.order.sampling import Sampling

PLATES, DRUGS_PER_PLATE, GENES = 14, 4, 300
DRUGS = PLATES * DRUGS_PER_PLATE
TEST_ROWS = 20_000
SAMPLINGS: dict[str, tuple[Sampling | None, int]] = {  # sampling and fetch_factor
    "random rows": (zl.BlockShuffling(1), 256),
    "the defaults": (None, zl.Loader.fetch_factor),
    "blocks of 64 x 256": (zl.BlockShuffling(64), 256),
    "blocks of 16 x 256": (zl.BlockShuffling(16), 256),
    "blocks of 64 x 4": (zl.BlockShuffling(64), 4),
    "streaming": (zl.Streaming(), 256),
}
RECIPES: dict[str, dict[str, Any]] = {
    "1 epoch": {"epochs": 1, "falling": False},
    "3 epochs, rate falling": {"epochs": 3, "falling": True},
}


def programmes(rng: np.random.Generator) -> NDArray[np.float64]:
    """The mean count of each gene for each drug: base times plate factor times drug factor."""
    base = rng.lognormal(-1.2, 0.8, GENES)
    plate = rng.lognormal(0, 0.1, (PLATES, GENES)).repeat(DRUGS_PER_PLATE, axis=0)
    drug = np.ones((DRUGS, GENES))
    for of_drug in drug:
        of_drug[rng.choice(GENES, 12, replace=False)] = rng.lognormal(0, 0.5, 12)
    return base * plate * drug


def rows_of(drugs: NDArray[np.int64], means: NDArray[np.float64], rng: np.random.Generator) -> ad.AnnData:
    """An AnnData with one row of counts per entry of `drugs`."""
    parts = [scipy.sparse.csr_matrix(rng.poisson(means[part]), dtype=np.float32) for part in np.array_split(drugs, 20)]
    obs = {
        "plate": pd.Categorical.from_codes(drugs // DRUGS_PER_PLATE, [f"plate {k}" for k in range(PLATES)]),
        "drug": pd.Categorical.from_codes(drugs, [f"drug {k:02d}" for k in range(DRUGS)]),
    }
    x = scipy.sparse.vstack(parts, format="csr")
    names = [f"cell {row}" for row in range(len(drugs))]
    return ad.AnnData(X=x, obs=pd.DataFrame(obs, index=names), var=pd.DataFrame(index=[f"g{k}" for k in range(GENES)]))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(x * (GENES / x.sum(dim=1, keepdim=True).clamp(min=1)))


def loaders_of(dataset: zl.Dataset, way: str, machines: int, **options: Any) -> list[zl.Loader]:
    """The loaders of all ranks, which together have the rows of the dataset."""
    if way == "global":
        return [zl.Loader(dataset, rank=rank, world_size=machines, **options) for rank in range(machines)]
    if way != "stretches":
        return [zl.Loader(part, **options) for part in dataset.split(machines)]
    cuts = np.linspace(0, dataset.n_obs, machines + 1).astype(int).tolist()
    return [zl.Loader(dataset[first:last], **options) for first, last in itertools.pairwise(cuts)]


def trained(loaders: list[zl.Loader], *, epochs: int, falling: bool) -> torch.nn.Linear:
    """Trains a linear layer. With `falling`, the learning rate falls linearly to 0 at the last step."""
    model = torch.nn.Linear(GENES, DRUGS)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0 if falling else 1, epochs * len(loaders[0]))
    for _ in range(epochs):
        for minibatches in zip(*loaders, strict=False):  # stretches may differ by a minibatch
            x = scaled(torch.cat([minibatch.x for minibatch in minibatches]))
            drugs = torch.cat([minibatch.obs["drug"] for minibatch in minibatches])
            loss = torch.nn.functional.cross_entropy(model(x), drugs)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model


def macro_f1(predicted: NDArray[np.int64], drugs: NDArray[np.int64]) -> float:
    """Mean over the drugs of `2 * correct / (predicted + actual)`."""
    correct = np.bincount(drugs[predicted == drugs], minlength=DRUGS)
    either = np.bincount(predicted, minlength=DRUGS) + np.bincount(drugs, minlength=DRUGS)
    return float((2 * correct / np.maximum(1, either)).mean())


def _summary(scores: dict[str, list[float]]) -> dict[str, float]:
    """Mean and standard deviation of the scores of each recipe."""
    found = {}
    for recipe, values in scores.items():
        found |= {recipe: round(statistics.mean(values), 4), f"sd, {recipe}": round(statistics.stdev(values), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--by-drug", action="store_true")
    parser.add_argument("--machines", type=int, default=1)
    options = parser.parse_args()
    ways: dict[str, tuple[str, Any]] = {name: ("global", sampling) for name, sampling in SAMPLINGS.items()}
    if options.machines > 1:
        ways = {way: (way, SAMPLINGS["the defaults"]) for way in ("global", "parts", "stretches")}
    torch.set_num_threads(1)  # the steps are too small for more threads

    rng = np.random.default_rng(0)
    means = programmes(rng)
    test_drugs = rng.integers(0, DRUGS, TEST_ROWS)
    test = scaled(torch.from_numpy(rows_of(test_drugs, means, rng).X.toarray()))
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "screen.zarr"
        drugs = np.arange(options.rows) * DRUGS // options.rows
        if not options.by_drug:
            drugs = drugs // DRUGS_PER_PLATE * DRUGS_PER_PLATE + rng.integers(0, DRUGS_PER_PLATE, options.rows)
        zl.convert(rows_of(drugs, means, rng), store, progress=False)
        dataset = zl.open_dataset(store, cache=Path(folder) / "cache")  # random rows are slow without a mirror
        for name, (way, (sampling, fetch_factor)) in ways.items():
            scores: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
            for seed in range(options.seeds):
                for recipe, schedule in RECIPES.items():
                    wanted = {"sampling": sampling, "fetch_factor": fetch_factor, "obs": ["drug"], "layout": "dense"}
                    loaders = loaders_of(dataset, way, options.machines, seed=seed, **wanted)
                    predicted = trained(loaders, **schedule)(test).argmax(dim=1).numpy()
                    scores[recipe].append(macro_f1(predicted, test_drugs))
            entropy = zl.quality(dataset.obs_column("plate").values, loaders[0].plan(0)).entropy_bits
            figures.append({"sampling": name, "plate entropy": round(entropy, 2)} | _summary(scores))
    table([list(figures[0]), *(list(map(str, each.values())) for each in figures)])
    print(json.dumps({"rows": options.rows, "seeds": options.seeds, "by_drug": options.by_drug, "figures": figures}))


if __name__ == "__main__":
    main()
