"""`zloader bill`: the hours and dollars of a training run, and what bounds its speed, before it is started.

Everything is arithmetic on the given figures. Defaults are Tahoe-100M, a model like scGPT, and rates that were measured
with zloader (docs/performance.md). `--measured` takes the rates of the user's own store from `zloader bench --json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zloader.commands import terminal
from zloader.commands.bill_run import Prices, Run
from zloader.commands.command import app, print_json, takes_flags
from zloader.commands.flags import PRICES, GigabyteEgress, GpuHour, Json, NvmeGigabyteMonth, ThousandGets
from zloader.common.errors import OptionError

_MAY_BE_ZERO = {
    "gpu_hour", "producer_hour", "thousand_gets", "gigabyte_egress", "nvme_gigabyte_month",
    "producers", "gets_per_row", "mirror_bytes_per_row", "mirror",
}  # fmt: skip
_MOST = 1e15  # larger figures are mistakes, and their products overflow
_MODEL, _LOADING = "Model and GPUs", "Loading"


@dataclass(frozen=True, kw_only=True)
class BillFlags:
    """The flags. Those that are figures of a run have the names that they have in Run."""

    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output of 'zloader bench --json'. It sets the rows, rates, bytes, GETs and the speed of the link "
            "that are not given.",
            show_default=False,
        ),
    ] = None
    rows: Annotated[float | None, typer.Option(help="Rows per epoch.", show_default="Tahoe-100M: 100_600_000")] = None
    epochs: Annotated[int, typer.Option(min=1, help="Epochs.")] = 3
    parameters: Annotated[float, typer.Option(help="Parameters of the model.", rich_help_panel=_MODEL)] = 51e6
    tokens_per_row: Annotated[float, typer.Option(help="Tokens per row.", rich_help_panel=_MODEL)] = 1024
    gpus: Annotated[int, typer.Option(min=1, help="GPUs.", rich_help_panel=_MODEL)] = 8
    machines: Annotated[int, typer.Option(min=1, help="Machines with GPUs.", rich_help_panel=_MODEL)] = 1
    mfu: Annotated[float, typer.Option(help="Share of a GPU's peak that is used.", rich_help_panel=_MODEL)] = 0.35
    peak_tflops: Annotated[
        float,
        typer.Option(help="Peak of a GPU: an H100 in bfloat16.", rich_help_panel=_MODEL),
    ] = 989
    gpu_rows_per_s: Annotated[
        float | None,
        typer.Option(
            help="Rows/s that one GPU trains, if measured.", show_default="from the FLOPs", rich_help_panel=_MODEL
        ),
    ] = None
    cold_rows_per_s: Annotated[
        float | None,
        typer.Option(help="Rows/s a process loads from the store.", show_default="120_000", rich_help_panel=_LOADING),
    ] = None
    warm_rows_per_s: Annotated[
        float | None,
        typer.Option(help="Rows/s a process loads from the mirror.", show_default="400_000", rich_help_panel=_LOADING),
    ] = None
    link_megabytes_per_s: Annotated[
        float | None,
        typer.Option(help="Speed of a machine's link to the store.", show_default="1_200", rich_help_panel=_LOADING),
    ] = None
    mirror: Annotated[
        bool,
        typer.Option(help="Whether later epochs read from a mirror.", rich_help_panel=_LOADING),
    ] = True
    bytes_per_row: Annotated[
        float | None, typer.Option(help="Bytes read per row.", show_default="2_600", rich_help_panel=_LOADING)
    ] = None
    gets_per_row: Annotated[
        float | None,
        typer.Option(help="GETs per row.", show_default="0.0052, without mirror 0.031", rich_help_panel=_LOADING),
    ] = None
    mirror_bytes_per_row: Annotated[
        float, typer.Option(help="Bytes of the mirror per row.", rich_help_panel=_LOADING)
    ] = 7_400
    producers: Annotated[
        int, typer.Option(min=0, help="Machines without GPUs that load all rows.", rich_help_panel=_LOADING)
    ] = 0
    gpu_hour: GpuHour = Prices.gpu_hour
    producer_hour: Annotated[
        float,
        typer.Option(help="A producer for an hour.", rich_help_panel=PRICES),
    ] = Prices.producer_hour
    thousand_gets: ThousandGets = Prices.thousand_gets
    gigabyte_egress: GigabyteEgress = Prices.gigabyte_egress
    nvme_gigabyte_month: NvmeGigabyteMonth = Prices.nvme_gigabyte_month
    as_json: Json = False

    def run(self) -> tuple[Run, dict[str, str]]:
        """The run, and where each rate comes from: "given", "measured", or else a "default".

        Raises OptionError for figures that no run can have, or if `measured` cannot be read.
        """
        figures: dict[str, Any] = {
            "rows": 100.6e6,
            "cold_rows_per_s": 120e3,
            "warm_rows_per_s": 400e3,
            "bytes_per_row": 2_600,
            "gets_per_row": 0.0052 if self.mirror else 0.031,
            "link_megabytes_per_s": 1200,
        }
        sources = dict.fromkeys(figures, "default")
        known = {} if self.measured is None else _from_bench(self.measured)
        sources |= dict.fromkeys(known, "measured")
        values = {figure.name: getattr(self, figure.name) for figure in dataclasses.fields(Run)}
        given = {name: value for name, value in values.items() if value is not None}
        sources |= dict.fromkeys(figures.keys() & given.keys(), "given")
        run = Run(**(figures | {"gpu_rows_per_s": None} | known | given))
        _require_usable(run)
        return run, sources


def _require_usable(run: Run) -> None:
    """Raises OptionError for figures that no run can have."""
    for name, value in dataclasses.asdict(run).items():
        free = name in _MAY_BE_ZERO
        if value is None or 1 / _MOST <= value <= _MOST or (free and value == 0):
            continue
        wanted = "of at least 0" if free else "greater than 0"
        wanted += f", from {1 / _MOST:g} to {_MOST:g}" if 0 < value < math.inf else ""
        shown = f"{value:g}" if isinstance(value, float) else f"{value!s:.20}"
        raise OptionError(f"--{name.replace('_', '-')} must be a number {wanted}, not {shown}")
    if run.mfu > 1:
        raise OptionError(f"--mfu is a share of the peak, at most 1, not {run.mfu:g}")


def _from_bench(path: Path) -> dict[str, float]:
    """The rows, the figures of the first cold epoch and of the first warm one, and the speed of the link.

    Epochs that `bench` called too short to tell have no rates, only bytes and GETs. Raises OptionError if the file has
    no others, or if its epochs had steps, whose time is part of their rates.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = {"rows": float(document["rows"])}
        step_ms = float(document["step_ms"])
        of_kinds = {epoch["kind"]: epoch["figures"] for epoch in reversed(document["epochs"]) if epoch["complete"]}
        rates = {kind for kind in of_kinds if document["advice"][kind]["bound"] != "short"}
        for kind in rates & {"cold", "warm"}:
            known[f"{kind}_rows_per_s"] = float(of_kinds[kind]["rows_per_s"])
        if "cold" in of_kinds:
            known |= {
                "bytes_per_row": of_kinds["cold"]["bytes_read"] / known["rows"],
                "gets_per_row": of_kinds["cold"]["gets"] / known["rows"],
            }
        if document["link_bytes_per_s"] is not None:
            known["link_megabytes_per_s"] = document["link_bytes_per_s"] / 1e6
    except OSError as error:
        raise OptionError(f"cannot read --measured {path}: {error}") from error
    except (ValueError, LookupError, TypeError, ZeroDivisionError, RecursionError) as error:
        problem = f"{path} is not the output of 'zloader bench --json': {error!r}"
        raise OptionError(problem) from error
    if not of_kinds.keys() & {"cold", "warm"}:
        raise OptionError(f"{path} has no complete epoch that was cold or warm: run 'zloader bench' to its end")
    if not rates & {"cold", "warm"}:
        raise OptionError(
            f"the epochs in {path} were too short to tell how fast loading is, as 'zloader bench' said: measure a "
            "larger store, or more of it"
        )
    if step_ms:
        raise OptionError(
            f"{path} was measured with --step-ms {step_ms:g}, so its rates are those of the steps, not of loading: "
            "measure again without it"
        )
    return known


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
