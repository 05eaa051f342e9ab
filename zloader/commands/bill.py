"""`zloader bill`: the hours and dollars of a training run, and what bounds its speed, before it is started.

Everything is arithmetic on the given figures. Defaults are Tahoe-100M, a model like scGPT, and rates that were measured
with zloader (docs/performance.md). `--measured` takes the rates of the user's own store from `zloader bench --json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from zloader.commands import terminal
from zloader.commands.bill_flags import BillFlags
from zloader.commands.bill_run import Run
from zloader.commands.command import app, print_json, takes_flags

# Rates that others published for whole runs of models like scGPT. They are quoted as they are, because their counts of
# FLOPs differ.
PUBLISHED = {"fast-scgpt, eight H100": 31_900, "fast-scgpt, one H100": 842}
_TOKENS_PARAMETERS = BillFlags.parameters * BillFlags.tokens_per_row


@app.command()
@takes_flags
def bill(flags: BillFlags) -> None:
    """Compute the hours and dollars of a training run, and what bounds its speed.

    The model is counted with 6 FLOPs per parameter and token. Numbers may be written as 100e6.
    """
    run, sources = flags.run()
    if flags.as_json:
        print_json(_document(run) | {"sources": sources})
    else:
        _show(run, sources)


def _document(run: Run) -> dict[str, Any]:
    cold, warm = run.epoch(cold=True), run.epoch(cold=False)
    document = {"run": dataclasses.asdict(run), "cold": dataclasses.asdict(cold)}
    document |= {"warm": dataclasses.asdict(warm)} if run.mirror else {}
    hours, dollars = run.totals()
    published = {name: run.rows / rate / 3600 for name, rate in _published(run).items()}
    return document | {
        "hours": hours,
        "dollars": dollars,
        "verdict": _verdict(run),
        "hours_per_epoch_as_published": published,
    }


def _published(run: Run) -> dict[str, int]:
    """The rates of others for a model of about this size; none for any other."""
    alike = 0.5 <= run.parameters * run.tokens_per_row / _TOKENS_PARAMETERS <= 2
    return PUBLISHED if alike and run.gpu_rows_per_s is None else {}


def _figure(value: float) -> str:
    """Hours or dollars to the hundredth; smaller ones to two digits."""
    return f"{value:,.2f}" if value >= 0.01 or not value else f"{value:.2g}"


_ADVICE = {
    "gpu": "the GPUs set the pace: a faster loader would save nothing",
    "link": "the link to the store sets the pace: more machines or a mirror would help, more cores would not",
    "loading": "loading sets the pace: more processes, or producers on other machines, would help",
}


def _verdict(run: Run) -> str:
    """What bounds the first epoch and the later ones, in plain words."""
    cold = run.epoch(cold=True)
    sentence = f"In epochs that read from the store, {_ADVICE[cold.bound_by]} (they wait {cold.gpu_wait_share:.0%})."
    if not run.mirror or run.epochs == 1:
        return sentence
    warm = run.epoch(cold=False)
    return f"{sentence} In later epochs, {_ADVICE[warm.bound_by]} (they wait {warm.gpu_wait_share:.0%})."


_RATES = {
    "cold_rows_per_s": "rows/s a process from the store", "warm_rows_per_s": "rows/s a process from the mirror",
    "link_megabytes_per_s": "MB/s a link", "bytes_per_row": "bytes a row", "gets_per_row": "GETs a row",
}  # fmt: skip


def _rates(run: Run, sources: Mapping[str, str]) -> str:
    """What loading is computed from, and where each figure comes from."""
    used = [name for name in _RATES if name != "warm_rows_per_s" or (run.mirror and run.epochs > 1)]
    shown = (f"{getattr(run, name):,.6g} {_RATES[name]} ({sources.get(name, 'default')})" for name in used)
    return f"loading: {', '.join(shown)}"


def _show(run: Run, sources: Mapping[str, str]) -> None:
    console = terminal.console()
    console.print(
        f"{run.rows:,.0f} rows, {run.epochs} epochs, {run.gpus} GPUs of {run.gpu_rate:,.0f} rows/s each", soft_wrap=True
    )
    epochs = {"each epoch" if not run.mirror else "first epoch": run.epoch(cold=True)}
    if run.mirror and run.epochs > 1:
        epochs["each later epoch"] = run.epoch(cold=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", *epochs):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("rows/s", *(f"{each.rows_per_s:,.0f}" for each in epochs.values()))
    table.add_row("set by", *({"gpu": "GPUs"}.get(each.bound_by, each.bound_by) for each in epochs.values()))
    table.add_row("hours", *(_figure(each.hours) for each in epochs.values()))
    table.add_row("GETs", *(f"{each.gets:,.0f}" for each in epochs.values()))
    table.add_row("GB read", *(f"{each.gigabytes:,.0f}" for each in epochs.values()))
    for item in next(iter(epochs.values())).dollars:
        table.add_row(f"$ {item}", *(_figure(each.dollars[item]) for each in epochs.values()))
    table.add_row("$ in all", *(_figure(each.total_dollars) for each in epochs.values()))
    console.print(table)
    hours, dollars = run.totals()
    console.print(f"whole run: {_figure(hours)} hours, ${_figure(dollars)}", style="bold")
    console.print(_verdict(run), soft_wrap=True)
    console.print(_rates(run, sources), soft_wrap=True)
    console.print(f"prices: GPU hour ${run.gpu_hour:g}, producer hour ${run.producer_hour:g}, 1000 GETs "
                  f"${run.thousand_gets:g}, GB read ${run.gigabyte_egress:g}, GB of NVMe and month "
                  f"${run.nvme_gigabyte_month:g}", soft_wrap=True)  # fmt: skip
    for name, rate in _published(run).items():
        console.print(f"as published, {name}: {rate:,} rows/s, {_figure(run.rows / rate / 3600)} hours per epoch",
                      soft_wrap=True, style="dim")  # fmt: skip
