"""The HTML page of a demo run. It contains no directory names and no credentials."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from zloader.commands import page
from zloader.commands.demo_charts import accuracy_chart, loss_chart, speed_chart, throughput_chart
from zloader.commands.demo_results import EPOCH_HEADER, DemoRun, epoch_rows
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.conversion.convert import ConversionReport

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


def render(run: DemoRun) -> str:
    """The page as HTML."""
    parts = [
        page.verdict(run.verdict),
        page.note(run.summary),
        page.tiles(_tiles(run)),
        page.section("Speed", page.charts(speed_chart(run), throughput_chart(run))),
        page.section("Learning", page.charts(accuracy_chart(run), loss_chart(run))),
        page.section("Epochs", page.table(_EPOCHS, EPOCH_HEADER, epoch_rows(run.epochs))),
        page.section("What the words mean", page.terms(_TERMS)),
        page.section("The loader of this demo", page.note(_LOADER), page.code(_python(run))),
        page.try_next(_commands(run)),
        page.section("Conversion", page.facts(_conversion_facts(run.conversion))),
        page.section("Training", page.facts(_training_facts(run))),
        page.section("Machine", page.note(_SERVER), page.facts(run.machine)),
    ]
    if run.bundled:
        parts.append(page.note(ATTRIBUTION))
    return page.page(f"zloader demo: {run.source}", *parts)


def _tiles(run: DemoRun) -> list[tuple[str, str]]:
    last = run.epochs[-1]
    return [
        *((f"{each.rows_per_s:,.0f}", f"cells/s, loading alone ({each.source})") for each in run.loading),
        (f"{last.rows_per_s:,.0f}", f"cells/s, training, epoch {last.epoch} ({last.source})"),
        (
            f"{last.held_out_accuracy:.1%}",
            f"held-out accuracy of {run.label}; majority-class accuracy {run.guess_accuracy:.1%}",
        ),
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
    compare = ["zloader", "quality", store, "--label", run.label, "--html", "zloader-quality.html"]
    return {
        "Convert the cells to a store of your own; the store of the demo is gone.": convert,
        "See whether minibatches mix the labels as well as random ones, and which sizes to take.": shlex.join(compare),
        "Measure loading alone with the default sizes, cold and warm.": shlex.join(
            ["zloader", "bench", store, "--cache", "zloader-cache"]
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
