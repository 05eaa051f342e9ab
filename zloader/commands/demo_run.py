"""The demo: trains a small classifier on real cells from an S3 server, and measures cold and warm epochs.

It converts an .h5ad into SeaweedFS on loopback, and trains from s3:// through a mirror: the first epoch reads from S3,
later epochs from the mirror. The classifier is one linear layer over log1p(counts per 10 000); 80 steps train it well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.nn import functional

from zloader.commands import output
from zloader.commands.output import Page, Table, Timeline
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import size
from zloader.common.progress import progress_bars
from zloader.common.records import Rows
from zloader.conversion.convert import ConversionReport, convert
from zloader.conversion.example import NAME as EXAMPLE
from zloader.conversion.example import example_h5ad
from zloader.dataset.dataset import Dataset, open_dataset
from zloader.order.permutation import key_of, shuffled
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, BlockShuffling, Streaming
from zloader.testing.seaweed import SeaweedFS
from zloader.training.loader import Loader, Minibatch
from zloader.transforms.normalizing import LogNormalize
from zloader.transforms.of_values import Clip

BATCH_SIZE = 64
_HELD_OUT_SHARE = 0.2
_LEARNING_RATE = 2e-3
BUNDLED_LABEL = "cell_type1"
_FEWEST_CATEGORIES, _MOST_CATEGORIES = 2, 200
_LOADED_ROWS = 16_384  # at most, in each pass that only loads; takes a second or two
_WAITING = 0.5  # share of the time from which the loader, and not the model, sets the pace
ATTRIBUTION = (
    "2,142 human pancreatic islet cells from Baron et al. 2016, Cell Systems 3, 346-360 (GEO GSE84133), as shipped in "
    "the PyPI package came 0.1.13 (MIT licence)"
)


@dataclass(frozen=True, kw_only=True)
class DemoPass:
    """A pass over the training cells: an epoch of training with its `loss` and `accuracy`, or loading alone.

    `loss` is the mean over the cells, in nats; `accuracy` that of the held-out cells afterwards. Both are None for
    loading alone. `wait_share` is the share of the time that the loop waited for minibatches.
    """

    name: str
    rows: int
    seconds: float
    gets: int
    bytes_read: int
    wait_share: float
    loss: float | None = None
    accuracy: float | None = None

    @property
    def kind(self) -> str:
        """`cold` if anything was read from S3, else `warm`."""
        return "cold" if self.gets else "warm"

    @property
    def rows_per_s(self) -> float:
        """Cells per second."""
        return self.rows / self.seconds

    @property
    def cells(self) -> list[str]:
        """The line of the table."""
        return [
            self.name,
            f"{self.kind}, {'S3' if self.gets else 'mirror'}",
            f"{self.rows_per_s:,.0f}",
            f"{self.gets:,}",
            size(self.bytes_read),
            f"{self.wait_share:.0%}",
            "" if self.loss is None else f"{self.loss:.3f}",
            "" if self.accuracy is None else f"{self.accuracy:.1%}",
        ]


HEADER = ("pass", "source", "cells/s", "GETs", "read from S3", "waiting", "loss", "held-out accuracy")


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The results of a demo run.

    `source` is the file's name without its directory. `unlabelled` rows were left out. `guess_accuracy` is the held-out
    accuracy of always predicting the majority class. `loading` are a cold and a warm pass without training, through
    another mirror. In a large file they load the first cells only.
    """

    source: str
    bundled: bool
    label: str
    categories: int
    seed: int
    conversion: ConversionReport
    train_rows: int
    held_out_rows: int
    unlabelled: int
    guess_accuracy: float
    epochs: list[DemoPass]
    loading: list[DemoPass]
    timelines: list[Timeline] = field(repr=False)

    @property
    def sentence(self) -> str:
        """How well the model does, how fast the cells come, and which of the two sets the pace."""
        last, (cold, warm) = self.epochs[-1], self.loading
        mirror = f" and {warm.rows_per_s:,.0f} from the mirror" if warm.kind == "warm" else ""
        pace = "the model sets the pace" if last.wait_share < _WAITING else "loading sets the pace"
        return (
            f"The model predicts {self.label} correctly for {last.accuracy:.1%} of the held-out cells (always guessing "
            f"the commonest: {self.guess_accuracy:.1%}). Cells load at {cold.rows_per_s:,.0f}/s from S3{mirror}; in "
            f"{last.name}, training waited for them {last.wait_share:.0%} of the time, so {pace}."
        )

    @property
    def table(self) -> Table:
        """The passes."""
        return Table(HEADER, [each.cells for each in (*self.epochs, *self.loading)])

    def page(self) -> Page:
        """The same on a page, which names no directory and no secret."""
        done = self.conversion
        facts = {
            "cells": ATTRIBUTION if self.bundled else self.source,
            "store": f"{done.rows:,} × {done.genes:,}; {size(done.bytes_in)} of h5ad, {size(done.bytes_out)} of Zarr",
            "label": f"{self.label}, {self.categories} categories"
            + (f"; {self.unlabelled:,} cells without one were left out" if self.unlabelled else ""),
            "cells to train on": f"{self.train_rows:,}, and {self.held_out_rows:,} held out; seed {self.seed}",
            "model": "one linear layer over log1p(counts per 10,000), Adam",
            "server": "SeaweedFS on the same machine, reached over loopback",
            **output.machine(),
        }
        return Page(
            title=f"zloader demo: {self.source}",
            sentences=[self.sentence],
            tables={"Passes over the cells": self.table},
            timelines=self.timelines,
            unit="cells",
            facts=facts,
        )


def run_demo(
    directory: Path,
    s3: SeaweedFS,
    say: Callable[[str], None],
    *,
    file: Path | None = None,
    label: str | None = None,
    epochs: int = 3,
    seed: int = 0,
) -> DemoRun:
    """Converts, trains and evaluates. Raises MissingColumnError or OptionError for an unsuitable label.

    `directory` is for all files, and `say` prints a line. Without a `file`, the cells are the bundled ones; without a
    `label`, it is chosen.
    """
    source = file or example_h5ad(directory / EXAMPLE)
    require_label(source, label)
    url = s3.url(f"{source.stem}.zarr")
    say(f"converting {source.name} to {url}")
    access = s3.storage_options
    conversion = convert(source, url, storage_options=access, progress=True)
    dataset = open_dataset(url, cache=directory / "cache", storage_options=access)
    label = choose_label(dataset, label)
    task = _Task.of(dataset, label, seed)
    say(
        f"learning {label} ({task.n_categories} categories) from {len(task.train):,} cells, "
        f"{len(task.held_out):,} held out"
    )
    timelines: list[Timeline] = []
    with _one_torch_thread():
        _warm_up(open_dataset(url, storage_options=access), task)
        done = []
        for each in _epochs(dataset, task, epochs, seed, timelines):
            say(f"{each.name}, {each.kind}: {each.rows_per_s:,.0f} cells/s, {each.gets:,} GETs, loss {each.loss:.3f}")
            done.append(each)
        # After Ctrl-C a thread may still write to this mirror. The server's directory is removed at the end anyway.
        with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as cache:
            loading = _loading(open_dataset(url, cache=cache, storage_options=access), task, seed)
    return DemoRun(
        source=source.name,
        bundled=file is None,
        label=label,
        categories=task.n_categories,
        seed=seed,
        conversion=dataclasses.replace(conversion, sources=[source.name]),
        train_rows=len(task.train),
        held_out_rows=len(task.held_out),
        unlabelled=dataset.n_obs - len(task.train) - len(task.held_out),
        guess_accuracy=task.guess_accuracy,
        epochs=done,
        loading=loading,
        timelines=timelines,
    )


@dataclass(frozen=True, kw_only=True)
class _Task:
    """The rows to train on and to hold out (row numbers), and the loader settings."""

    label: str
    n_categories: int
    n_codes: int
    n_genes: int
    train: Rows
    held_out: Rows
    guess_accuracy: float
    block_size: int
    fetch_factor: int

    @classmethod
    def of(cls, dataset: Dataset, label: str, seed: int) -> _Task:
        codes = dataset.obs_column(label).values
        rows = np.flatnonzero(codes >= 0)
        rows = rows[shuffled(len(rows), key_of(seed))]
        n_held_out = round(len(rows) * _HELD_OUT_SHARE)
        held_out, train = np.sort(rows[:n_held_out]), np.sort(rows[n_held_out:])
        if not (len(held_out) and len(train)):
            raise OptionError(
                f"{len(rows)} cells with a {label} are too few to train on and to hold some out: use more cells"
            )
        # A small file is split into at least three fetches of many blocks, so that cells mix well: a power of two of
        # minibatches. A large file gets the Loader's defaults.
        fetch_factor = min(1 << max(0, (len(train) // (3 * BATCH_SIZE)).bit_length() - 1), Loader.fetch_factor)
        majority = np.bincount(codes[train]).argmax()
        return cls(
            label=label,
            n_categories=len(np.unique(codes[rows])),
            n_codes=len(dataset.categories(label)),
            n_genes=dataset.n_vars,
            train=train,
            held_out=held_out,
            guess_accuracy=float((codes[held_out] == majority).mean()),
            block_size=min(DEFAULT_BLOCK_SIZE, BATCH_SIZE * fetch_factor // 32),
            fetch_factor=fetch_factor,
        )

    def loader(self, dataset: Dataset, sampling: Streaming | BlockShuffling, seed: int = 0) -> Loader:
        """Sparse minibatches with labels."""
        return Loader(
            dataset,
            batch_size=BATCH_SIZE,
            fetch_factor=self.fetch_factor,
            sampling=sampling,
            obs=[self.label],
            transforms=[Clip(0, None), LogNormalize(1e4)],  # the user's file may hold values below 0
            seed=seed,
            rank=0,
            world_size=1,
        )


def _warm_up(dataset: Dataset, task: _Task) -> None:
    """Trains one discarded step on one cell, read without a mirror, because numba and torch compile on first use."""
    for minibatch in task.loader(dataset, Streaming(indices=task.train[:1])):
        model, optimizer = _model(task)
        _train_step(model, optimizer, minibatch, task.label)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """A model this small gains nothing from more threads, and torch's idle threads spin on the cores that decode."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model(task: _Task) -> tuple[Classifier, torch.optim.Optimizer]:
    model = Classifier(task.n_genes, task.n_codes)
    return model, torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)


class Classifier(torch.nn.Module):
    """One linear layer over a sparse CSR minibatch.

    An embedding bag computes the product: for each cell, it sums the weights of its genes times their values.
    """

    def __init__(self, n_genes: int, n_categories: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n_genes, n_categories))
        self.bias = torch.nn.Parameter(torch.zeros(n_categories))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (rows x categories) of a float32 CSR tensor (rows x genes)."""
        summed = functional.embedding_bag(
            x.col_indices(), self.weight, x.crow_indices()[:-1], mode="sum", per_sample_weights=x.values()
        )
        return summed + self.bias


def _epochs(dataset: Dataset, task: _Task, epochs: int, seed: int, timelines: list[Timeline]) -> Iterator[DemoPass]:
    """Trains and evaluates each epoch, and appends its timeline."""
    train = task.loader(dataset, BlockShuffling(block_size=task.block_size, indices=task.train), seed)
    held_out = task.loader(dataset, Streaming(indices=task.held_out))
    model, optimizer = _model(task)
    began = time.perf_counter()
    for epoch in range(1, epochs + 1):
        rows, losses, epoch_s = 0, 0.0, time.perf_counter()
        timeline = Timeline(epoch=epoch, kind="")
        timeline.add(epoch_s - began, 0, 0.0)
        with progress_bars(shown=True, unit="cells") as bars:
            advance = bars.add(f"epoch {epoch}", len(task.train))
            for minibatch in train:
                losses += len(minibatch) * _train_step(model, optimizer, minibatch, task.label)
                rows += len(minibatch)
                timeline.add(time.perf_counter() - began, rows, train.statistics().wait_s)
                advance(len(minibatch))
        trained, seconds = train.statistics(), time.perf_counter() - epoch_s
        done = DemoPass(
            name=f"epoch {epoch}",
            rows=rows,
            seconds=seconds,
            gets=trained.gets,
            bytes_read=trained.bytes_read,
            wait_share=trained.wait_s / seconds,
            loss=losses / rows,
            accuracy=_accuracy(model, held_out, task.label),
        )
        timeline.kind = done.kind
        timelines.append(timeline)
        yield done


def _train_step(model: Classifier, optimizer: torch.optim.Optimizer, minibatch: Minibatch, label: str) -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(minibatch.x), minibatch.obs[label])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def _accuracy(model: Classifier, loader: Loader, label: str) -> float:
    right = rows = 0
    with torch.no_grad():
        for minibatch in loader:
            right += int((model(minibatch.x).argmax(dim=1) == minibatch.obs[label]).sum())
            rows += len(minibatch)
    return right / rows


def _loading(dataset: Dataset, task: _Task, seed: int) -> list[DemoPass]:
    """Loads the training cells, or the first of them, twice without training: into an empty mirror, then from it."""
    sampling = BlockShuffling(block_size=task.block_size, indices=task.train[:_LOADED_ROWS])
    loader = task.loader(dataset, sampling, seed)
    passes = []
    for _ in range(2):
        for _ in loader:
            pass
        loaded = loader.statistics()
        passes.append(
            DemoPass(
                name="loading alone",
                rows=loaded.rows,
                seconds=loaded.elapsed_s,
                gets=loaded.gets,
                bytes_read=loaded.bytes_read,
                wait_share=loaded.wait_share,
            )
        )
    return passes


# ---- the obs column to predict


def require_label(source: Path, label: str | None) -> None:
    """Raises before the conversion if the file has no such column. `convert` reports other faults of the file."""
    if label is None or not h5py.is_hdf5(source):
        return
    with h5py.File(source) as file:
        columns = file["obs"].attrs.get("column-order") if "obs" in file else None
    if columns is not None and label not in columns:
        known = ", ".join(map(repr, columns)) or "none"
        raise MissingColumnError(f"there is no obs column {label!r} in {source}; its columns are: {known}")


def choose_label(dataset: Dataset, wanted: str | None) -> str:
    """The obs column to predict: `wanted`, else cell_type1, else the first column with 2 to 200 categories."""
    if wanted is not None:
        dataset.observations.require_usable([wanted])
    candidates = [wanted] if wanted else sorted(dataset.obs_columns, key=lambda name: name != BUNDLED_LABEL)
    n_categories = {}
    for name in candidates:
        n_categories[name] = _n_categories(dataset, name)
        if _FEWEST_CATEGORIES <= n_categories[name] <= _MOST_CATEGORIES:
            return name
    if wanted is not None:
        n_categories = {name: _n_categories(dataset, name) for name in dataset.obs_columns}
        problem = f"obs column {wanted!r} cannot be a label"
    else:
        problem = "no obs column can be a label"
    columns = [f"{name} ({f'{n} categories' if n else 'numbers'})" for name, n in n_categories.items()]
    raise OptionError(
        f"{problem}: a label needs {_FEWEST_CATEGORIES} to {_MOST_CATEGORIES} categories. "
        f"Choose one with --label; the columns are: {', '.join(columns) or 'none'}"
    )


def _n_categories(dataset: Dataset, name: str) -> int:
    """The number of categories that occur in a column, or 0 for a column that is not categorical."""
    try:
        column = dataset.obs_column(name)
    except OptionError:
        return 0
    return 0 if column.categories is None else len(np.unique(column.values[column.values >= 0]))
