"""The `zloader` command: what is run as a program.

info and demo are here, the commands that write in cli_convert, those that measure in cli_bench and cli_quality, and
those about caches in cli_cache.

Figures and tables go to stdout, progress and errors to stderr; with --json, stdout is one JSON document. What takes
seconds to import is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import bench as cli_bench
from zloader.commands import cache as cli_cache
from zloader.commands import convert as cli_convert
from zloader.commands import quality as cli_quality
from zloader.commands import terminal
from zloader.commands.command import (
    KEYS,
    Anonymous,
    Debug,
    EndedError,
    Endpoint,
    Json,
    Profile,
    Region,
    Url,
    app,
    loader_sizes,
    print_json,
    storage_options,
)
from zloader.common.errors import FormatError, OptionError, ZloaderError

if TYPE_CHECKING:
    from zloader.commands.demo_server import DemoServer
    from zloader.commands.report import DemoRun
    from zloader.dataset.cost import EpochCosts
    from zloader.dataset.dataset import Dataset

# Rooms that register their commands when they are imported.
__all__ = ["app", "cli_bench", "cli_cache", "cli_convert", "cli_quality"]

# ---- info


@app.command(epilog=KEYS)
def info(  # noqa: PLR0913 - one parameter a flag
    url: Url,
    x: Annotated[
        str, typer.Option("--x", metavar="NAME", help="The matrix of the epoch: X, layers/NAME, raw/X.")
    ] = "X",
    batch_size: Annotated[int | None, typer.Option(help="Rows in a minibatch.", show_default="64")] = None,
    fetch_factor: Annotated[int | None, typer.Option(help="Minibatches in a fetch.", show_default="256")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Rows in a shuffled block, at most a fetch.", show_default="64")
    ] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a store holds, and how many GETs and bytes a training epoch of it costs."""
    from zloader.dataset.dataset import open_dataset
    from zloader.dataset.summary import summarize

    sizes = loader_sizes(batch_size, fetch_factor, block_size)
    dataset = open_dataset(url, storage_options=storage_options(endpoint_url, region, profile, anon))
    summary = summarize(dataset)
    try:
        costs, problem = _costs(dataset, x, **sizes), None
    except FormatError as error:
        costs, problem = None, str(error)
    if as_json:
        epoch = {"x": x, **sizes, "problem": problem} | ({} if costs is None else dataclasses.asdict(costs))
        print_json(dataclasses.asdict(summary) | {"epoch": epoch})
    else:
        console = terminal.console()
        terminal.show_store(console, summary)
        if costs is None:
            console.print(f"no epoch can be read: {problem}", soft_wrap=True, markup=False)
        else:
            terminal.show_costs(console, costs, x, sizes)
    if costs is None and x != "X":  # somebody asked for it
        raise typer.Exit(1)


def _costs(dataset: Dataset, x: str, *, batch_size: int, fetch_factor: int, block_size: int) -> EpochCosts:
    from zloader.dataset.cost import epoch_costs
    from zloader.order.sampling import stratified
    from zloader.training.loader import Loader

    loader = Loader(
        dataset,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        sampling=stratified(block_size),
        x=x,
        rank=0,
        world_size=1,
    )
    return epoch_costs(dataset, loader.plan(0), x=x, options=loader.options)


# ---- demo


@app.command()
def demo(  # noqa: PLR0913 - one parameter a flag
    file: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="An .h5ad of your own instead of the pancreas cells."),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The obs column to learn.", show_default="cell_type1 or the first fit"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through the cells.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Decides split and order.")] = 0,
    report: Annotated[Path, typer.Option(metavar="PATH", help="Where the HTML report goes.")] = Path(
        "zloader-demo.html"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server running afterwards, until Ctrl-C, and its files after that.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train on real cells from a real S3 server on this machine, and see what cold and warm epochs cost.

    SeaweedFS runs in a temporary directory; both are gone at the end.
    """
    _require_demo_extra()
    if not os.access(report.parent, os.W_OK) or report.is_dir():
        raise OptionError(f"cannot write {report}: give the path of a file in a directory that exists with --report")
    view = terminal.TerminalOutput(terminal.console(stderr=as_json))
    view.step("loading torch and starting SeaweedFS")
    from zloader.commands.demo import DemoOptions, run_demo
    from zloader.commands.demo_server import workplace
    from zloader.commands.report import render

    with workplace(keep=keep) as place:
        with view:
            run = run_demo(DemoOptions(file=file, label=label, epochs=epochs, seed=seed), place, view)
        report.write_text(render(run), encoding="utf-8")
        view.step(run.seen)
        view.step(f"report: {report.absolute()}")
        if as_json:
            print_json(_demo_document(run, report))
        if keep:
            _serve(view, place, run)


def _require_demo_extra() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('the demo needs matplotlib for its report; install it with: pip install "zloader[demo]"')


def _demo_document(run: DemoRun, report: Path) -> dict[str, Any]:
    document = dataclasses.asdict(run)
    del document["steps"]
    for figures, epoch in zip(document["epochs"], run.epochs, strict=True):
        figures["cold"] = epoch.cold
    return document | {"seen": run.seen, "report": str(report.absolute())}


def _serve(view: terminal.TerminalOutput, place: DemoServer, run: DemoRun) -> None:
    """Says where everything is, and waits for a signal."""
    from zloader.commands.demo_server import write_access

    access = write_access(place)
    with contextlib.suppress(KeyboardInterrupt, EndedError):
        view.step(f"store: {run.conversion.destination}, server: {place.server.endpoint_url}")
        view.step(f"files: {place.directory} (server: seaweedfs, mirror: cache)")
        view.step(f"try, in another terminal: . {access} && zloader info {run.conversion.destination}")
        view.step(f"Ctrl-C, or kill {os.getpid()}, stops the server; the files stay until you remove them")
        signal.pause()
    view.step("stopping the server, which puts its files in order first")
