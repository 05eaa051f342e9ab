"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm, and says what bounds them.

Rows are read through a Loader. The figures are its statistics() and those of bench_run.py. Before the first epoch, one
row is read without the mirror, so that imports and compilation are not measured. After the last one, the speed of the
link, or of the disk of a local store, is measured, unless it is stated or nothing depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from zloader.commands import terminal
from zloader.commands.bench_flags import BenchFlags
from zloader.commands.bench_results import BenchRun, medians
from zloader.commands.bench_run import measure, prepared, with_link
from zloader.commands.command import KEYS, EndedError, app, print_json, takes_flags


@app.command(epilog=KEYS)
@takes_flags
def bench(flags: BenchFlags) -> None:
    """Measure epochs over a store, read as a training loop would read it, and say what bounds their speed.

    A cold epoch begins without a mirror or with an empty one, a warm epoch reads the mirror only, and a mixed epoch
    begins with a part of the mirror.
    """
    from zloader.commands.page import require_drawable

    require_drawable(flags.report)
    console = terminal.console(stderr=flags.as_json)
    loader, run = prepared(flags, console)

    def finish(run: BenchRun) -> None:
        _show(console, run, as_json=flags.as_json)
        if flags.report is not None and run.epochs:
            _write(run, flags.report, flags.access.storage_options, flags.words)
            console.print(f"report: {flags.report.absolute()}", soft_wrap=True)

    try:
        measure(loader, run, console, flags.epochs)
        run = with_link(loader, run, console)
    except (KeyboardInterrupt, EndedError):
        finish(dataclasses.replace(run, interrupted=True))
        raise
    finish(run)


# ---- results


def _show(console: Console, run: BenchRun, *, as_json: bool) -> None:
    """Prints all figures as JSON, or the medians as a table and the advice."""
    if as_json:
        print_json(_document(run))
        return
    columns: dict[str, Mapping[str, float]] = {}
    for kind, figures in medians(run.epochs).items():
        n = int(figures["epochs"])
        columns[f"{kind}, median of {n}" if n > 1 else kind] = figures
    columns |= {f"epoch {epoch.epoch}, interrupted": epoch.figures for epoch in run.epochs if not epoch.complete}
    if columns:
        terminal.show_figures(console, columns)
    for sentence in run.sentences:
        console.print(sentence, soft_wrap=True)


def _document(run: BenchRun) -> dict[str, Any]:
    """The samples over time are left out."""
    epochs = [{name: value for name, value in vars(epoch).items() if name != "samples"} for epoch in run.epochs]
    quality = None if run.quality is None else dataclasses.asdict(run.quality) | {"percent": run.quality.percent}
    prices = dataclasses.asdict(run.prices)
    del prices["producer_hour"]
    return {
        **run.settings,
        "epochs": epochs,
        "medians": medians(run.epochs),
        "link_bytes_per_s": run.link_bytes_per_s,
        "link_stated": run.link_stated,
        "load": run.load,
        "interrupted": run.interrupted,
        "prices": prices,
        "dollars": {kind: run.dollars(figures) for kind, figures in medians(run.epochs).items()},
        "quality": quality,
        "advice": {kind: dataclasses.asdict(advice) for kind, advice in run.advice.items()},
        "sentences": run.sentences,
    }


def _write(run: BenchRun, report: Path, access: Mapping[str, Any], flags: Sequence[str]) -> None:
    from zloader.commands import page
    from zloader.commands.bench_page import render

    page.write(render(run, access, flags), report)
