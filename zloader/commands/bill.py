"""`zloader bill`: the hours and dollars of a training run, and what bounds its speed, before it is started.

Everything is arithmetic on the given figures (bill_run.py). Defaults are Tahoe-100M, a model like scGPT, and rates that
were measured with zloader (docs/performance.md). `--measured` takes the rates of the user's own store from `zloader
bench --json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zloader.commands.bill_run import Run, Setup, loading_option
from zloader.commands.command import app, takes_flags
from zloader.commands.flags import Json
from zloader.commands.terminal import new_table, print_result
from zloader.common.errors import OptionError

_MAY_BE_ZERO = {
    "gpu_hour", "producer_hour", "thousand_gets", "gigabyte_egress", "nvme_gigabyte_month",
    "producers", "gets_per_row", "mirror_bytes_per_row", "mirror",
}  # fmt: skip
_MOST = 1e15  # larger figures are mistakes, and their products overflow


@dataclass(frozen=True, kw_only=True)
class BillFlags:
    """The flags. A figure that `zloader bench` measures is None if it is not given."""

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
    cold_rows_per_s: Annotated[
        float | None, loading_option(help="Rows/s a process loads from the store.", show_default="120_000")
    ] = None
    warm_rows_per_s: Annotated[
        float | None, loading_option(help="Rows/s a process loads from the mirror.", show_default="400_000")
    ] = None
    link_megabytes_per_s: Annotated[
        float | None, loading_option(help="Speed of a machine's link to the store.", show_default="1_200")
    ] = None
    bytes_per_row: Annotated[float | None, loading_option(help="Bytes read per row.", show_default="2_600")] = None
    gets_per_row: Annotated[
        float | None, loading_option(help="GETs per row.", show_default="0.0052, without mirror 0.031")
    ] = None
    setup: Setup = field(default_factory=Setup)
    as_json: Json = False

    def run(self) -> tuple[Run, dict[str, str]]:
        """The run, and where each rate comes from: "given", "measured", or else a "default".

        Raises OptionError for figures that no run can have, or if `measured` cannot be read.
        """
        gets_per_row = 0.0052 if self.setup.mirror else 0.031
        defaults = {"rows": 100.6e6, "cold_rows_per_s": 120e3, "warm_rows_per_s": 400e3}
        defaults |= {"link_megabytes_per_s": 1200, "bytes_per_row": 2_600, "gets_per_row": gets_per_row}
        known = {} if self.measured is None else _from_bench(self.measured)
        given = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        sources = dict.fromkeys(defaults, "default") | dict.fromkeys(known, "measured") | dict.fromkeys(given, "given")
        run = Run(**dataclasses.asdict(self.setup), **(defaults | known | given))
        _require_usable(run)
        return run, sources


def _require_usable(run: Run) -> None:
    """Raises OptionError for figures that no run can have."""
    if run.copies not in ("parts", "own", "one"):
        raise OptionError(f"--copies is parts, own or one, not {run.copies!r:.50}")
    for name, value in dataclasses.asdict(run).items():
        if name == "copies":
            continue
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
        raise OptionError(f"{path} is not the output of 'zloader bench --json': {error!r}") from error
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


# ---- the command


@dataclass(frozen=True, kw_only=True)
class Published:
    """A rate that others published, its MFU by their own count of FLOPs, and the rows over which it was measured."""

    rows_per_s: int
    mfu: float
    rows: int


# Runs of 50 steps of models like scGPT (github.com/slaf-project/fast-scgpt, README). They are quoted as they are: by
# the count of `bill`, the rate of eight GPUs would be above their peak.
PUBLISHED = {
    "fast-scgpt, eight H100": Published(rows_per_s=31_900, mfu=0.316, rows=50 * 1920),
    "fast-scgpt, one H100": Published(rows_per_s=842, mfu=0.372, rows=50 * 240),
}
_TOKENS_PARAMETERS = Setup.parameters * Setup.tokens_per_row


@app.command()
@takes_flags
def bill(flags: BillFlags) -> None:
    """Compute the hours and dollars of a training run, and what bounds its speed.

    The model is counted with 6 FLOPs per parameter and token. Numbers may be written as 100e6.
    """
    run, sources = flags.run()
    document = _document(run) | {"sources": sources}
    print_result(document, lambda console: _show(console, run, sources), as_json=flags.as_json)


def _document(run: Run) -> dict[str, Any]:
    cold, warm = run.epoch(0), run.epoch(1)
    document = {"run": dataclasses.asdict(run), "cold": dataclasses.asdict(cold)}
    document |= {"warm": dataclasses.asdict(warm)} if run.mirror else {}
    hours, dollars = run.totals()
    published = _published(run)
    return document | {
        "hours": hours,
        "dollars": dollars,
        "verdict": _verdict(run),
        "hours_per_epoch_as_published": {name: run.rows / each.rows_per_s / 3600 for name, each in published.items()},
        "published": {
            name: dataclasses.asdict(each) | {"epochs": each.rows / run.rows} for name, each in published.items()
        },
    }


def _published(run: Run) -> dict[str, Published]:
    """The rates of others for a model of about this size; none for any other."""
    alike = 0.5 <= run.parameters * run.tokens_per_row / _TOKENS_PARAMETERS <= 2
    return PUBLISHED if alike and run.gpu_rows_per_s is None else {}


def _figure(value: float) -> str:
    """Hours or dollars to the hundredth; smaller ones to two digits."""
    return f"{value:,.2f}" if value >= 0.01 or not value else f"{value:.2g}"


_ADVICE = {
    "gpu": "the GPUs set the pace: a faster loader would save nothing",
    "peers": "the links between machines set the pace: locality='machine' needs none",
    "link": "the link to the store sets the pace: more machines or a mirror would help, more cores would not",
    "loading": "loading sets the pace: more processes, or producers on other machines, would help",
}


def _verdict(run: Run) -> str:
    """What bounds the first epoch and the later ones, in plain words."""
    cold = run.epoch(0)
    sentence = f"In epochs that read from the store, {_ADVICE[cold.bound_by]} (they wait {cold.gpu_wait_share:.0%})."
    if not run.mirror or run.epochs == 1:
        return sentence
    warm = run.epoch(run.epochs - 1)
    later = "the last epoch" if run.copies == "own" else "later epochs"
    return f"{sentence} In {later}, {_ADVICE[warm.bound_by]} (they wait {warm.gpu_wait_share:.0%})."


_RATES = {
    "cold_rows_per_s": "rows/s a process from the store", "warm_rows_per_s": "rows/s a process from the mirror",
    "link_megabytes_per_s": "MB/s a link", "bytes_per_row": "bytes a row", "gets_per_row": "GETs a row",
}  # fmt: skip


def _rates(run: Run, sources: Mapping[str, str]) -> str:
    """What loading is computed from, and where each figure comes from."""
    used = [name for name in _RATES if name != "warm_rows_per_s" or (run.mirror and run.epochs > 1)]
    shown = (f"{getattr(run, name):,.6g} {_RATES[name]} ({sources.get(name, 'default')})" for name in used)
    return f"loading: {', '.join(shown)}"


def _show(console: Console, run: Run, sources: Mapping[str, str]) -> None:
    console.print(f"{run.rows:,.0f} rows, {run.epochs} epochs, {run.gpus} GPUs of {run.gpu_rate:,.0f} rows/s each")
    epochs = {"each epoch" if not run.mirror else "first epoch": run.epoch(0)}
    if run.mirror and run.epochs > 1:
        changes = run.copies == "own" and run.machines > 1 and run.epochs > 2
        epochs |= {"second epoch": run.epoch(1)} if changes else {}
        epochs["last epoch" if changes else "each later epoch"] = run.epoch(run.epochs - 1)
    table = new_table("", *(f">{name}" for name in epochs))
    table.add_row("rows/s", *(f"{each.rows_per_s:,.0f}" for each in epochs.values()))
    table.add_row("set by", *({"gpu": "GPUs"}.get(each.bound_by, each.bound_by) for each in epochs.values()))
    table.add_row("hours", *(_figure(each.hours) for each in epochs.values()))
    table.add_row("GETs", *(f"{each.gets:,.0f}" for each in epochs.values()))
    table.add_row("GB read", *(f"{each.gigabytes:,.0f}" for each in epochs.values()))
    if any(each.peer_gigabytes for each in epochs.values()):
        table.add_row("GB from other machines", *(f"{each.peer_gigabytes:,.0f}" for each in epochs.values()))
    for item in next(iter(epochs.values())).dollars:
        table.add_row(f"$ {item}", *(_figure(each.dollars[item]) for each in epochs.values()))
    table.add_row("$ in all", *(_figure(each.total_dollars) for each in epochs.values()))
    console.print(table)
    hours, dollars = run.totals()
    console.print(f"whole run: {_figure(hours)} hours, ${_figure(dollars)}", style="bold")
    console.print(_verdict(run))
    console.print(_rates(run, sources))
    console.print(f"prices: GPU hour ${run.gpu_hour:g}, producer hour ${run.producer_hour:g}, 1000 GETs "
                  f"${run.thousand_gets:g}, GB read ${run.gigabyte_egress:g}, GB of NVMe and month "
                  f"${run.nvme_gigabyte_month:g}")  # fmt: skip
    for name, each in _published(run).items():
        hours_each = _figure(run.rows / each.rows_per_s / 3600)
        console.print(f"as published, {name}: {each.rows_per_s:,} rows/s, {hours_each} hours per epoch; MFU "
                      f"{each.mfu:.1%} by its own count, measured over {each.rows:,} rows "
                      f"({_figure(each.rows / run.rows)} epochs)", style="dim")  # fmt: skip
