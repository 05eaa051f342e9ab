"""What a loader costs the training loop beside it: steps with warm minibatches, against the same steps alone.

    python -m benchmarks.questions.lock STORE [--cores 1,2] [--turns 5] [--seconds 1.5] [--cases "50 operations, 64"]

Python runs one thread at a time. While threads of the loader hold its lock, the training loop waits, and a step of many
small operations asks for the lock after each of them. Steps are "N operations", which multiply small matrices and take
no minibatch, and three models that train: an MLP and a VAE as scVI has it on 500 genes, and a transformer on 16 genes
of each row. torch has one thread. The number after the comma is the rows per minibatch.

Three sides take turns in one process per number of cores, to which it is pinned with all that it starts:

- alone: the steps with one minibatch, again and again.
- loader: the steps, each with the next minibatch of a zl.Loader.
- worker: the same in one persistent worker of a torch DataLoader. It is started by a fork server, so that "CPU s" does
  not count it.

"x alone" is the time per step, with the wait for its minibatch, divided by that of the steps alone in the same turn.
"CPU s" is user and system time of all processes per 100 000 rows, without that of as many steps alone. "us" is the
processor time of the training thread per minibatch, also without the step. Beside steps of many milliseconds both are
lost in the noise. The case "nothing" has no steps: its rows/s are those of the loader. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import zloader as zl
from benchmarks.harness.measuring import Figures, die_with_parent, in_new_process, table
from benchmarks.harness.sides import median_and_range, rows_and_column

N_GENES = 500
N_TOKENS = 16
SIDES = ("alone", "loader", "worker")
SKIPPED = 8  # minibatches at the start of an epoch, which are not measured
COLUMNS = ("cores", "step ms", "loader, x alone", "(range)", "rows/s", "CPU s", "us", "worker, x alone", "(range)")
COLUMNS += ("rows/s", "CPU s", "us")
Step = Callable[[Any, Any], object]  # of x and labels


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps, the rows of their minibatches, and the options of the loader that makes these."""

    step: Callable[[int], Step]  # for a number of labels
    batch_size: int
    options: dict[str, Any]


# ---- steps


def nothing(_: int) -> Step:
    """No step."""
    return lambda x, labels: None


def operations(count: int) -> Callable[[int], Step]:
    """A step of small operations, which ask for Python's lock after each."""

    def made(_: int) -> Step:
        weight = torch.eye(64)

        def step(x: Any, labels: Any) -> object:
            hidden = torch.ones(64, 64)
            for _ in range(count):
                hidden = hidden @ weight
            return hidden

        return step

    return made


def trained(model: nn.Module, loss_of: Callable[[Any, Any], torch.Tensor]) -> Step:
    """A step of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(x: Any, labels: Any) -> object:
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def mlp(n_labels: int) -> Step:
    """Classifies rows."""
    model = nn.Sequential(nn.Linear(N_GENES, 128), nn.ReLU(), nn.Linear(128, n_labels))
    return trained(model, lambda x, labels: functional.cross_entropy(model(torch.log1p(x)), labels))


def vae(_: int) -> Step:
    """A variational autoencoder of counts, with the layers of scVI."""
    encoder = nn.Sequential(nn.Linear(N_GENES, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 20))
    decoder = nn.Sequential(nn.Linear(10, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, N_GENES), nn.Softmax(-1))
    dispersion = nn.Parameter(torch.zeros(N_GENES))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    model.register_parameter("dispersion", dispersion)

    def loss(x: torch.Tensor, _: Any) -> torch.Tensor:
        mean, log_scale = encoder(torch.log1p(x)).chunk(2, -1)
        latent = torch.distributions.Normal(mean, log_scale.exp(), validate_args=False)
        rate = decoder(latent.rsample()) * x.sum(-1, keepdim=True)
        logits = (rate + 1e-8).log() - dispersion
        counts = torch.distributions.NegativeBinomial(dispersion.exp(), logits=logits, validate_args=False)
        prior = torch.distributions.Normal(0.0, 1.0, validate_args=False)
        return (torch.distributions.kl_divergence(latent, prior).sum(-1) - counts.log_prob(x).sum(-1)).mean()

    return trained(model, loss)


def transformer(n_labels: int) -> Step:
    """Classifies rows by the counts of their first chosen genes."""
    genes, head = nn.Embedding(N_TOKENS, 32), nn.Linear(32, n_labels)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"genes": genes, "body": body, "head": head})

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embedded = genes.weight + torch.log1p(x[:, :N_TOKENS, None])
        return functional.cross_entropy(head(body(embedded).mean(1)), labels)

    return trained(model, loss)


def cases(n_genes: int) -> dict[str, Case]:
    """All of them by name."""
    panel = np.sort(np.random.default_rng(0).choice(n_genes, min(N_GENES, n_genes), replace=False))
    dense = {"layout": "dense", "genes": panel}
    steps: dict[str, tuple[Callable[[int], Step], dict[str, Any]]] = {"nothing": (nothing, {})}
    steps |= {f"{count} operations": (operations(count), {}) for count in (50, 200, 800)}
    steps |= {each.__name__: (each, dense) for each in (mlp, vae, transformer)}
    return {
        f"{name}, {batch_size}": Case(step=step, batch_size=batch_size, options=options)
        for batch_size in (64, 1_024)
        for name, (step, options) in steps.items()
    }


# ---- measuring


def steps_of(minibatches: Iterator[tuple[Any, Any]], step: Step, most: int) -> Figures:
    """The figures of up to `most` steps after the first ones."""
    for x, labels in itertools.islice(minibatches, SKIPPED):
        step(x, labels)
    count = rows = 0
    began, cpu, thread = time.perf_counter(), sum(os.times()[:4]), time.thread_time()
    for x, labels in itertools.islice(minibatches, most):
        step(x, labels)
        count, rows = count + 1, rows + len(labels)
    return {
        "steps": count,
        "rows": rows,
        "seconds": time.perf_counter() - began,
        "cpu_s": sum(os.times()[:4]) - cpu,
        "thread_s": time.thread_time() - thread,
    }


def total(parts: Sequence[Figures]) -> Figures:
    """The sums of figures."""
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def measured(store: str, mirror: str, cores: int, name: str, turns: int, seconds: float) -> list[dict[str, Figures]]:
    """The figures of all sides of a case, turn by turn, on so many cores."""
    die_with_parent()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = zl.open_dataset(store, cache=mirror)
    column, case = dataset.obs_columns[0], cases(dataset.n_vars)[name]
    options = {"batch_size": case.batch_size, "obs": [column], **case.options}
    if "genes" in options:
        dataset = dataset[:, options.pop("genes")]
    loaders: dict[str, Any] = {"loader": zl.Loader(dataset, **options)}
    how = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    loaders["worker"] = torch.utils.data.DataLoader(zl.Loader(dataset, **options), batch_size=None, **how)
    step = case.step(len(dataset.categories(column)))
    kept = next(iter(loaders["loader"]))
    pair = kept.x, kept.obs[column]

    def figures(side: str, most: int) -> Figures:
        if side == "alone":
            return steps_of(itertools.repeat(pair), step, most)
        return steps_of(((minibatch.x, minibatch.obs[column]) for minibatch in loaders[side]), step, most)

    step_s = figures("alone", 20)["seconds"] / 20
    in_epoch = len(loaders["loader"]) - SKIPPED
    most = min(in_epoch, max(20, int(seconds / step_s)))
    epochs = max(1, min(8, int(seconds / (most * max(step_s, 2e-6 * case.batch_size)))))
    runs = []
    for turn in range(turns + 1):
        order = SIDES[:: -1 if turn % 2 else 1]
        found = {side: total([figures(side, most) for _ in range(epochs)]) for side in order}
        runs += [found] if turn else []
    return runs


def compared(run: dict[str, Figures], side: str) -> Figures:
    """What a side of a turn costs beside the steps."""
    alone, own = ({key: figure / run[each]["steps"] for key, figure in run[each].items()} for each in ("alone", side))
    return {
        "x_alone": own["seconds"] / alone["seconds"],
        "rows_per_s": own["rows"] / own["seconds"],
        "cpu_s": 1e5 * (own["cpu_s"] - alone["cpu_s"]) / own["rows"],
        "us": 1e6 * (own["thread_s"] - alone["thread_s"]),
    }


def line(name: str, cores: int, runs: Sequence[dict[str, Figures]]) -> list[str]:
    """The line of the table of a case."""
    cells = [name, str(cores)]
    cells.append(f"{1e3 * statistics.median(run['alone']['seconds'] / run['alone']['steps'] for run in runs):.3f}")
    for side in SIDES[1:]:
        found = [compared(run, side) for run in runs]
        ratios = [each["x_alone"] for each in found]
        cells += ["", ""] if name.startswith("nothing") else median_and_range(ratios, "{:.2f}")
        cells.append(f"{statistics.median(each['rows_per_s'] for each in found):,.0f}")
        cells.append(f"{statistics.median(each['cpu_s'] for each in found):.2f}")
        cells.append(f"{statistics.median(each['us'] for each in found):,.0f}")
    return cells


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--cores", default="1,2", help="numbers of cores, comma-separated")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long each side of a turn steps")
    parser.add_argument("--cases", nargs="+", help="lines of the table (default: all)")
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    options = parser.parse_args()
    rows_and_column(options.store)
    store = str(options.store.absolute())
    with tempfile.TemporaryDirectory(dir=options.work) as mirror:
        dataset = zl.open_dataset(store, cache=mirror)
        zl.warm(dataset)
        names = options.cases or list(cases(dataset.n_vars))
        runs: dict[str, dict[int, list[dict[str, Figures]]]] = {name: {} for name in names}
        for name, cores in itertools.product(names, map(int, options.cores.split(","))):
            arguments = (store, mirror, cores, name, options.turns, options.seconds)
            runs[name][cores] = in_new_process(measured, *arguments)
            print(" ".join(line(name, cores, runs[name][cores])), file=sys.stderr)
    table([["", *COLUMNS], *(line(name, cores, of) for name, found in runs.items() for cores, of in found.items())])
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "turns": options.turns, "runs": runs}))


if __name__ == "__main__":
    main()
