"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm, and says what bounds them.

Rows are read through a Loader. The figures are its statistics() and those of bench_run.py. Before the first epoch, one
row is read without the mirror, so that imports and compilation are not measured. After the last one, the speed of the
link, or of the disk of a local store, is measured, unless it is stated or nothing depends on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zloader.commands import terminal
from zloader.commands.bench_options import BenchOptions
from zloader.commands.bench_results import BenchRun, medians
from zloader.commands.bench_run import measure, prepared, with_link
from zloader.commands.bill_run import Prices
from zloader.commands.command import (
    KEYS,
    Anonymous,
    BatchSize,
    BlockSize,
    Debug,
    Dtype,
    EndedError,
    Endpoint,
    FetchFactor,
    GigabyteEgress,
    GpuHour,
    Json,
    Layout,
    Matrices,
    Memory,
    NvmeGigabyteMonth,
    ObsColumns,
    Profile,
    Region,
    ThousandGets,
    access_flags,
    app,
    loader_sizes,
    print_json,
    storage_options,
    x_of,
)
from zloader.common.errors import OptionError


@app.command(epilog=KEYS)
def bench(  # noqa: PLR0913 - one parameter a flag
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL", help="Stores, read as one dataset: local paths or s3://BUCKET/KEY.", show_default=False
        ),
    ],
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Cache directory. Its mirror stays for later runs.", show_default="no mirror"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to measure.")] = 3,
    step_ms: Annotated[float, typer.Option(min=0, help="Simulated training time per minibatch, in ms.")] = 0.0,
    report: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write an HTML report.", show_default=False)
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="obs column: say how well its labels are mixed.", show_default=False),
    ] = None,
    link_speed: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes per second of the link to the store, or of the disk of a local one.",
            show_default="measured, 2 s",
        ),
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="Genes of stores that differ: inner or outer.", show_default="must be equal")
    ] = None,
    genes_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="var column that names the genes.", show_default="var_names")
    ] = None,
    x: Matrices = None,
    obs: ObsColumns = "",
    batch_size: BatchSize = None,
    fetch_factor: FetchFactor = None,
    block_size: BlockSize = None,
    memory: Memory = "0",
    layout: Layout = "csr",
    dtype: Dtype = "float32",
    gpu_hour: GpuHour = Prices.gpu_hour,
    thousand_gets: ThousandGets = Prices.thousand_gets,
    gigabyte_egress: GigabyteEgress = Prices.gigabyte_egress,
    nvme_gigabyte_month: NvmeGigabyteMonth = Prices.nvme_gigabyte_month,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure epochs over a store, read as a training loop would read it, and say what bounds their speed.

    A cold epoch begins without a mirror or with an empty one, a warm epoch reads the mirror only, and a mixed epoch
    begins with a part of the mirror.
    """
    from zloader.commands.page import require_drawable

    require_drawable(report)
    prices = Prices(
        gpu_hour=gpu_hour,
        thousand_gets=thousand_gets,
        gigabyte_egress=gigabyte_egress,
        nvme_gigabyte_month=nvme_gigabyte_month,
    )
    _require_prices(prices)
    options = BenchOptions(
        urls=urls,
        cache=cache,
        epochs=epochs,
        step_s=step_ms / 1000,
        join=join,
        genes_by=genes_by,
        x=x_of(x),
        obs=[column.strip() for column in obs.split(",") if column.strip()],
        sizes=loader_sizes(batch_size, fetch_factor, block_size),
        memory=memory,
        layout=layout,
        dtype=dtype,
        label=label,
        link_bytes_per_s=_link_of(link_speed),
        prices=prices,
        access=storage_options(endpoint_url, region, profile, anon),
    )
    console = terminal.console(stderr=as_json)
    loader, run = prepared(options, console)

    def finish(run: BenchRun) -> None:
        _show(console, run, as_json=as_json)
        if report is not None and run.epochs:
            flags = [*options.words, *access_flags(endpoint_url, region, profile, anon)]
            _write(run, report, options.access, flags)
            console.print(f"report: {report.absolute()}", soft_wrap=True)

    try:
        measure(loader, run, console, epochs)
        run = with_link(loader, run, console)
    except (KeyboardInterrupt, EndedError):
        finish(dataclasses.replace(run, interrupted=True))
        raise
    finish(run)


def _link_of(link_speed: str | None) -> int | None:
    from zloader.common.checks import parse_size, require_at_least

    if link_speed is None:
        return None
    n_bytes = parse_size(link_speed.removesuffix("/s"))
    require_at_least(1, link_speed=n_bytes)
    return n_bytes


def _require_prices(prices: Prices) -> None:
    for name, value in dataclasses.asdict(prices).items():
        if not (math.isfinite(value) and value >= 0):
            raise OptionError(f"--{name.replace('_', '-')} must be a number of at least 0, not {value:g}")


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
