"""The results of a demo run, as figures and as sentences, and its report, which names no directory and no secret."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from zloader.commands.charts import (
    COLD,
    LIGHT,
    OVER,
    WARM,
    Chart,
    Curve,
    Dots,
    draw_curves,
    draw_speeds,
    name_colours,
    rate_curve,
)
from zloader.commands.report import Report, Section, Table, try_next
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.conversion.convert import ConversionReport

_WAITING = 0.5  # share of the time from which the loader, and not the model, sets the pace
_MOST_BINS = 80  # per epoch, of the throughput
_MOST_POINTS = 500  # per epoch, of the loss
_MOST_LABELLED = 6  # epochs whose accuracy is written in the chart
ATTRIBUTION = (
    "Data: 2,142 human pancreatic islet cells from Baron et al. 2016, Cell Systems 3, 346-360 (GEO GSE84133), as "
    "shipped in the PyPI package came 0.1.13 (MIT licence)."
)
_TERMS = {
    "Cold and warm": "A cold epoch reads the cells from S3 and keeps them in a mirror on the local disk. "
    "A warm epoch reads the mirror only. GETs are reads from S3.",
    "Loading alone": "Making minibatches of cells without training on them. Training adds the work of the model.",
    "Held-out accuracy": "The share of the cells set aside from training whose label the model predicts correctly.",
    "Majority-class accuracy": "The held-out accuracy of always predicting the commonest label of the training cells. "
    "A model is useful only above it.",
    "Loss": "The cross-entropy of the model's predictions, in nats. Lower is better. It is 0 for predictions that are "
    "certain and correct.",
}
_EPOCHS = "Training passes only. “waiting” is the share of time that the training loop spent waiting for minibatches."
_LOADER = "The first command of the next section makes the store that these lines open."
_SERVER = "The S3 server was SeaweedFS on the same machine, reached over loopback."


@dataclass(frozen=True, kw_only=True)
class LoadingFigures:
    """A pass over training cells: `rows` in `seconds`, and the reads from S3."""

    rows: int
    seconds: float
    rows_per_s: float
    gets: int
    bytes_read: int

    @property
    def cold(self) -> bool:
        """Whether anything was read from S3."""
        return self.gets > 0

    @property
    def source(self) -> str:
        """`cold, S3` or `warm, mirror`."""
        return "cold, S3" if self.cold else "warm, mirror"

    @property
    def name(self) -> str:
        """What a chart calls the pass."""
        return self.source

    @property
    def colour(self) -> str:
        """Its colour in the charts."""
        return COLD if self.cold else WARM


@dataclass(frozen=True, kw_only=True)
class EpochFigures(LoadingFigures):
    """One epoch of training, and the held-out pass after it. Figures of the pass include the training steps.

    Times are in seconds; `started_s` is since the start of training. `loss` is the mean over the epoch's rows.
    """

    epoch: int
    started_s: float
    minibatches: int
    wait_share: float
    loss: float
    held_out_rows: int
    held_out_gets: int
    held_out_bytes_read: int
    held_out_accuracy: float

    @property
    def name(self) -> str:
        return f"epoch {self.epoch}, {self.source}"

    @property
    def standard_error(self) -> float:
        """The standard error of the accuracy."""
        return float((self.held_out_accuracy * (1 - self.held_out_accuracy) / self.held_out_rows) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step. `done_s` is in seconds since the start of training."""

    epoch: int
    done_s: float
    rows: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The results of a demo run.

    `source` is the file's name without its directory. `unlabelled` rows were left out. `opening_bytes` of metadata,
    indptr and labels were read once, before the first epoch. `guess_accuracy` is the held-out accuracy of always
    predicting the majority class. `loading` are a cold and a warm pass without training, after the last epoch and
    through another mirror. In a large file they load the first cells only.
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
    block_size: int
    batch_size: int
    fetch_rows: int
    opening_bytes: int
    machine: Mapping[str, str]
    epochs: Sequence[EpochFigures]
    loading: Sequence[LoadingFigures]
    steps: Sequence[Step] = field(repr=False)

    @property
    def summary(self) -> str:
        """A summary of the epochs in one to three sentences."""
        cold = [figures for figures in self.epochs if figures.cold]
        warm = [figures for figures in self.epochs if not figures.cold]
        sentences = []
        if cold:
            first = cold[0]
            sentences.append(f"Epoch {first.epoch} read {size(first.bytes_read)} from S3 in {first.gets:,} GETs.")
        if warm:
            which = f"Epoch {warm[0].epoch}" if len(warm) == 1 else f"Epochs {warm[0].epoch} to {warm[-1].epoch}"
            sentences.append(f"{which} made 0 GETs: all {warm[0].rows:,} training cells came from the mirror.")
        if len(cold) > 1:
            sentences.append("Later epochs read from S3 too, because the mirror was incomplete. Was its disk full?")
        return " ".join(sentences)

    @property
    def verdict(self) -> str:
        """How well the model does, how fast the cells come, and which of the two sets the pace."""
        last = self.epochs[-1]
        cold, warm = self.loading
        beaten = last.held_out_accuracy > self.guess_accuracy
        sentences = [
            f"The model predicts {self.label} correctly for {last.held_out_accuracy:.1%} of the held-out cells; the "
            f"majority-class accuracy is {self.guess_accuracy:.1%}" + ("." if beaten else ", which is no worse.")
        ]
        if not warm.cold:
            sentences.append(
                f"Loading alone runs at {cold.rows_per_s:,.0f} cells/s from S3 and {warm.rows_per_s:,.0f} "
                f"cells/s from the mirror, {warm.rows_per_s / cold.rows_per_s:,.1f} times as many."
            )
        pace = "the model sets the pace" if last.wait_share < _WAITING else "loading sets the pace"
        sentences.append(f"In epoch {last.epoch} training waited for cells {last.wait_share:.0%} of the time: {pace}.")
        return " ".join(sentences)


def epoch_rows(epochs: Iterable[EpochFigures]) -> list[list[str]]:
    """The table of epochs as text. EPOCH_HEADER is its header."""
    return [
        [
            str(figures.epoch),
            figures.source,
            f"{figures.rows_per_s:,.0f}",
            f"{figures.gets:,}",
            size(figures.bytes_read),
            f"{figures.wait_share:.1%}",
            f"{figures.loss:.3f}",
            f"{figures.held_out_accuracy:.1%}",
        ]
        for figures in epochs
    ]


EPOCH_HEADER = ("epoch", "source", "cells/s", "GETs", "read from S3", "waiting", "loss", "held-out accuracy")


# ---- the page


def report(run: DemoRun) -> Report:
    """The report of a run."""
    charts = [speed_chart(run), throughput_chart(run), accuracy_chart(run), loss_chart(run)]
    return Report(
        title=f"zloader demo: {run.source}",
        verdict=[run.verdict],
        text=[run.summary],
        tiles=_tiles(run),
        sections=[
            Section(title="Speed", charts=charts[:2]),
            Section(title="Learning", charts=charts[2:]),
            Section(title="Epochs", tables=[Table(_EPOCHS, EPOCH_HEADER, epoch_rows(run.epochs))]),
            Section(title="What the words mean", terms=_TERMS),
            Section(title="The loader of this demo", text=[_LOADER], code=_python(run)),
            try_next(_commands(run)),
            Section(title="Conversion", text=[ATTRIBUTION] * run.bundled, facts=_conversion_facts(run.conversion)),
            Section(title="Training", facts=_training_facts(run)),
            Section(title="Machine", text=[_SERVER], facts=run.machine),
        ],
    )


def _tiles(run: DemoRun) -> list[tuple[str, str]]:
    last = run.epochs[-1]
    of_others = f"majority-class accuracy {run.guess_accuracy:.1%}"
    return [
        *((f"{each.rows_per_s:,.0f}", f"cells/s, loading alone ({each.source})") for each in run.loading),
        (f"{last.rows_per_s:,.0f}", f"cells/s, training, epoch {last.epoch} ({last.source})"),
        (f"{last.held_out_accuracy:.1%}", f"held-out accuracy of {run.label}; {of_others}"),
    ]


def _store(run: DemoRun) -> str:
    return f"{PurePath(run.source).stem}.zarr"


def _python(run: DemoRun) -> str:
    """How to open the store and load minibatches as the demo did, once the commands below have made the store."""
    return (
        "import zloader as zl\n\n"
        f"dataset = zl.open_dataset({_store(run)!r}, cache='zloader-cache')\n"
        f"loader = zl.Loader(dataset, batch_size={run.batch_size}, fetch_factor={run.fetch_rows // run.batch_size}, "
        f"sampling=zl.BlockShuffling({run.block_size}), obs=[{run.label!r}])\n"
        "for minibatch in loader:\n"
        f"    minibatch.x, minibatch.obs[{run.label!r}]  # counts as a sparse tensor, and label codes"
    )


def _commands(run: DemoRun) -> Mapping[str, str]:
    """Commands that work in the directory of the source file, in this order."""
    store = _store(run)
    convert = shlex.join(["zloader", "convert", run.source, store])
    if run.bundled:
        convert = f"python -c 'import zloader; zloader.example_h5ad()'\n{convert}"
    own = [] if run.bundled else ["--data", run.source, "--label", run.label]
    return {
        "Convert the cells to a store of your own; the store of the demo is gone.": convert,
        "Measure loading alone, cold and warm, and how well minibatches mix the labels.": shlex.join(
            ["zloader", "bench", store, "--cache", "zloader-cache", "--label", run.label]
        ),
        "Train for longer. For cells of your own, add --data FILE.h5ad and --label COLUMN.": shlex.join(
            ["zloader", "demo", *own, "--epochs", "10"]
        ),
        "Keep the S3 server running, to look at its bucket.": shlex.join(["zloader", "demo", *own, "--keep"]),
    }


def _conversion_facts(done: ConversionReport) -> dict[str, str]:
    changed = (f"{name} {change.replace('->', '→')}" for name, change in done.dtypes_changed.items())
    density = done.values / (done.rows * done.genes)
    return {
        "cells × genes": f"{done.rows:,} × {done.genes:,}",
        "values in X": f"{done.values:,} ({density:.1%})",
        "h5ad size": size(done.bytes_in),
        "Zarr store size": size(done.bytes_out),
        "dtypes narrowed without loss": ", ".join(changed) or "none",
        "time": f"{done.seconds:.1f} s",
    }


def _training_facts(run: DemoRun) -> dict[str, str]:
    held_out = sum(figures.held_out_gets for figures in run.epochs)
    held_out_bytes = sum(figures.held_out_bytes_read for figures in run.epochs)
    small = "; smaller than the default, because the file is small" if run.block_size < 64 else ""
    facts = {
        "label": f"{run.label}, {run.categories} categories",
        "majority-class accuracy": f"{run.guess_accuracy:.1%}",
        "training cells": f"{run.train_rows:,}, in minibatches of {run.batch_size}; seed {run.seed}",
        "held-out cells": f"{run.held_out_rows:,}",
        "shuffling": f"blocks of {run.block_size} cells in random order, {run.fetch_rows:,} cells mixed in memory at a "
        f"time{small}",
        "model": "one linear layer over log1p(counts per 10,000), Adam",
        "GETs of the held-out passes": f"{held_out:,} ({size(held_out_bytes)}), not in the table; held-out and "
        "training cells share chunks",
        "read once at the start": f"{size(run.opening_bytes)} of metadata, row offsets (indptr) and labels",
    }
    if run.unlabelled:
        facts["left out"] = f"{run.unlabelled:,} cells without a {run.label}"
    return facts


# ---- charts


def speed_chart(run: DemoRun) -> Chart:
    """The speed of loading alone and of training, cold and warm."""
    training = [("training", epoch) for epoch in ([*run.epochs[:1], *run.epochs[1:][-1:]])]
    speeds = [*(("loading alone", each) for each in run.loading), *training]
    speeds.sort(key=lambda speed: not speed[1].cold)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lines = [
            Dots(
                name=f"{kind}\n{each.name}",
                values=[each.rows_per_s],
                colour=each.colour,
                marker="s" if kind == "training" else "o",
            )
            for kind, each in speeds
        ]
        draw_speeds(axes, lines, "cells")
        axes.set_ylabel("pass over the cells")

    return Chart(
        name="speed",
        title="Loading alone, and training",
        description="; ".join(f"{kind}, {each.name}: {each.rows_per_s:,.0f} cells per second" for kind, each in speeds),
        caption=f"Loading alone is measured over {run.loading[0].rows:,} cells after the training. The file and the "
        "model are small, so start-up counts, and this is not zloader's top speed.",
        draw=draw,
    )


def throughput(run: DemoRun, epoch: EpochFigures) -> Curve:
    """Rows per second of one epoch in time bins of equal width."""
    steps = [step for step in run.steps if step.epoch == epoch.epoch]
    totals = [0]
    for step in steps:
        totals.append(totals[-1] + step.rows)
    times = [epoch.started_s, *(step.done_s for step in steps)]
    return rate_curve(epoch.epoch, epoch.colour, times, totals, _MOST_BINS)


def throughput_chart(run: DemoRun) -> Chart:
    """The speed of training over time."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        draw_curves(axes, [throughput(run, epoch) for epoch in run.epochs])
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("time since the start of training (seconds)")
        axes.set_ylabel("cells per second")
        _cold_and_warm(figure, run)

    return Chart(
        name="throughput",
        title="Speed of training over time",
        description="; ".join(f"epoch {e.epoch} ({e.source}) {e.rows_per_s:,.0f} cells per second" for e in run.epochs),
        caption="The gaps between epochs are the held-out passes. The speed includes the training steps.",
        draw=draw,
    )


def _cold_and_warm(figure: Any, run: DemoRun) -> None:
    """The legend of the colours in use."""
    used = {epoch.cold for epoch in run.epochs}
    known = {True: ("cold: from S3", COLD), False: ("warm: from the mirror", WARM)}
    name_colours(figure, dict(known[cold] for cold in known if cold in used))


def accuracy_chart(run: DemoRun) -> Chart:
    """The held-out accuracy after each epoch, with its standard error."""
    accuracies = [epoch.held_out_accuracy for epoch in run.epochs]
    errors = [epoch.standard_error for epoch in run.epochs]
    lowest = min(accuracy - error for accuracy, error in zip(accuracies, errors, strict=True))
    highest = max(accuracy + error for accuracy, error in zip(accuracies, errors, strict=True))
    room = max(0.2 * (highest - lowest), 0.005)
    below = run.guess_accuracy < lowest - 5 * room  # on the axis, it would hide the differences between epochs
    majority = f"majority-class accuracy {run.guess_accuracy:.1%}" + (" (below this axis)" if below else "")

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = figure.subplots()
        numbers = [epoch.epoch for epoch in run.epochs]
        labelled = len(numbers) <= _MOST_LABELLED
        axes.errorbar(numbers, accuracies, errors, fmt="o-" if labelled else "-", color=LIGHT["green"], capsize=3,
                      elinewidth=1, label="held-out accuracy", clip_on=False)  # fmt: skip
        for at in zip(numbers, accuracies, strict=True) if labelled else ():
            axes.annotate(f"{at[1]:.1%}", at, (5, 5), textcoords="offset points", bbox=OVER)
        axes.plot([], [], "--", color=LIGHT["quiet"], label=majority)
        if not below:
            axes.axhline(run.guess_accuracy, color=LIGHT["quiet"], linestyle="--")
        bounds = [lowest, highest] if below else [lowest, highest, run.guess_accuracy]
        axes.set_ylim(min(bounds) - room, max(bounds) + room)
        axes.set_xlim(numbers[0] - 0.25, numbers[-1] + 0.6 * max(1, len(numbers) / _MOST_LABELLED))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        axes.set_xlabel("epoch")
        axes.set_ylabel("correct predictions (% of cells)")
        figure.legend(handles=[*axes.get_legend_handles_labels()[0][::-1]], loc="outside lower left")

    return Chart(
        name="accuracy",
        title=f"Held-out accuracy of {run.label} by epoch",
        description="; ".join(f"accuracy after epoch {e.epoch} {e.held_out_accuracy:.1%}" for e in run.epochs),
        caption=f"Bars show the standard error with {run.held_out_rows:,} held-out cells. Differences within "
        "them may be chance. The axis does not begin at 0.",
        draw=draw,
    )


def loss_chart(run: DemoRun) -> Chart:
    """The training loss by step."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes = figure.subplots()
        curves = _losses(run)
        draw_curves(axes, curves, filled=False)
        for before, after in pairwise(curves):
            between = (before.x[-1] + after.x[0]) / 2
            axes.axvline(between, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (4, 4)))
        logarithmic = all(step.loss > 0 for step in run.steps)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5), numticks=9))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(0.5, len(run.steps) + 0.5)
        axes.set_xlabel("training step (one minibatch each)")
        axes.set_ylabel("loss (nats" + (", log scale)" if logarithmic else ")"))
        _cold_and_warm(figure, run)

    return Chart(
        name="loss",
        title="Training loss by step",
        description="; ".join(f"mean loss of epoch {e.epoch} {e.loss:.3g}" for e in run.epochs),
        caption="Dashed lines separate epochs. Lower is better.",
        draw=draw,
    )


def _losses(run: DemoRun) -> list[Curve]:
    """The losses of each epoch by step, of which several are averaged where there are many."""
    import numpy as np

    found, first = [], 0
    for epoch in run.epochs:
        losses = np.array([step.loss for step in run.steps if step.epoch == epoch.epoch])
        parts = np.array_split(losses, min(len(losses), _MOST_POINTS))
        ends = first + np.cumsum([len(part) for part in parts])
        y = [float(part.mean()) for part in parts]
        found.append(Curve(epoch=epoch.epoch, colour=epoch.colour, x=ends.tolist(), y=y))
        first += len(losses)
    return found
