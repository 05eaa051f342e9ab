"""The entry point of the `zloader` program, with the commands `info` and `demo`.

The other commands register themselves on import: convert, append and verify in convert.py, bench in bench.py, bill in
bill.py, quality in quality.py, warm and cache in cache.py.

Results go to stdout, progress and errors to stderr. With --json, stdout is one JSON document. Each command imports the
modules that take seconds to import, so that `zloader --help` stays fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import bench as cli_bench
from zloader.commands import bill as cli_bill
from zloader.commands import cache as cli_cache
from zloader.commands import convert as cli_convert
from zloader.commands import quality as cli_quality
from zloader.commands import terminal
from zloader.commands.command import KEYS, EndedError, app, print_json, takes_flags
from zloader.commands.flags import Access, Json, LoaderSizes, Matrices, Url, x_of
from zloader.common.errors import FormatError, OptionError, ZloaderError

if TYPE_CHECKING:
    from zloader.commands.demo_results import DemoRun
    from zloader.commands.demo_server import DemoServer
    from zloader.dataset.dataset import Dataset
    from zloader.insight.cost import EpochCosts

# Importing these modules registers their commands.
__all__ = ["app", "cli_bench", "cli_bill", "cli_cache", "cli_convert", "cli_quality"]

# ---- info


@dataclass(frozen=True, kw_only=True)
class InfoFlags:
    """The flags of `info`."""

    url: Url
    x: Matrices = None
    loader_sizes: LoaderSizes = field(default_factory=LoaderSizes)
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Sets of rows that agree in this obs column; give it again for several."),
    ] = None
    set_size: Annotated[int, typer.Option(help="Rows per set, with --group.")] = 64
    controls: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="A control for each row, such as \"drug == 'DMSO'\".")
    ] = None
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The obs column in which controls agree with their rows."),
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the loader, by name. A minibatch of sets has one set, unless --batch-size says otherwise."""
        sizes = self.loader_sizes
        if self.group and sizes.batch_size is None:
            sizes = dataclasses.replace(sizes, batch_size=self.set_size)
        return sizes.by_name

    def order(self, block_size: int) -> dict[str, Any]:
        """The sampling and the controls of a Loader."""
        from zloader.order.cell_sets import CellSets
        from zloader.order.controls import MatchedControls
        from zloader.order.shuffling import stratified

        if self.match and self.controls is None:
            raise OptionError("--match goes with --controls")
        return {
            "sampling": CellSets(self.group, self.set_size) if self.group else stratified(block_size),
            "controls": None if self.controls is None else MatchedControls(self.controls, match=self.match or []),
        }


@app.command(epilog=KEYS)
@takes_flags
def info(flags: InfoFlags) -> None:
    """Show what a store contains, and how many GETs and bytes a training epoch takes."""
    from zloader.dataset.open_dataset import open_dataset
    from zloader.insight.summary import summarize

    sizes, wanted = flags.sizes, x_of(flags.x)
    order = flags.order(sizes["block_size"])
    dataset = open_dataset(flags.url, storage_options=flags.access.storage_options)
    summary = summarize(dataset)
    try:
        costs, problem = _costs(dataset, wanted, sizes, order), None
    except FormatError as error:
        costs, problem = None, str(error)
    if flags.as_json:
        named = {"group": flags.group, "set_size": flags.set_size} if flags.group else {}
        named |= {"controls": flags.controls, "match": flags.match} if flags.controls else {}
        epoch = {"x": wanted, **sizes, **named, "problem": problem} | (
            {} if costs is None else dataclasses.asdict(costs)
        )
        print_json(dataclasses.asdict(summary) | {"epoch": epoch})
    else:
        console = terminal.console()
        terminal.show_store(console, summary)
        if costs is None:
            console.print(f"cannot estimate an epoch: {problem}", soft_wrap=True, markup=False)
        else:
            blocks = f"sets of {flags.set_size:,}" if flags.group else f"blocks of {sizes['block_size']:,}"
            order_of_rows = f"{blocks}, a control for each row" if flags.controls else blocks
            terminal.show_costs(console, costs, ", ".join(flags.x or ["X"]), sizes, order_of_rows)
    if costs is None and wanted != "X":  # the user named this matrix
        raise typer.Exit(1)


def _costs(dataset: Dataset, x: str | list[str], sizes: dict[str, int], order: dict[str, Any]) -> EpochCosts:
    from zloader.insight.cost import epoch_costs
    from zloader.training.loader import Loader

    if not dataset.n_obs:
        raise FormatError(f"{dataset.url} has no rows to load")
    loader = Loader(
        dataset,
        batch_size=sizes["batch_size"],
        fetch_factor=sizes["fetch_factor"],
        x=x,
        rank=0,
        world_size=1,
        **order,
    )
    return epoch_costs(dataset, loader.plan(0), x=x, options=loader.options)


# ---- demo


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """The flags of `demo`."""

    file: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Your own .h5ad, instead of the bundled pancreas cells."),
    ] = None
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="obs column to predict.", show_default="cell_type1, or the first suitable column"
        ),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the train/held-out split and the shuffling.")] = 0
    report: Annotated[Path, typer.Option(metavar="PATH", help="Where to write the HTML report.")] = Path(
        "zloader-demo.html"
    )
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server running until Ctrl-C, and keep its files after that.")
    ] = False
    as_json: Json = False


@app.command()
@takes_flags
def demo(flags: DemoFlags) -> None:
    """Train on real cells from an S3 server on this machine, and compare cold and warm epochs.

    The server is SeaweedFS in a temporary directory. Both are removed at the end, unless --keep is given.
    """
    report = flags.report
    _require_demo_extra()
    if not os.access(report.parent, os.W_OK) or report.is_dir():
        raise OptionError(f"cannot write {report}: give --report the path of a file in an existing directory")
    output = terminal.TerminalOutput(terminal.console(stderr=flags.as_json))
    output.step("loading torch and starting SeaweedFS")
    from zloader.commands.demo import DemoOptions, run_demo
    from zloader.commands.demo_page import render
    from zloader.commands.demo_server import running_demo_server
    from zloader.commands.page import write

    with running_demo_server(keep=flags.keep) as demo_server:
        with output:
            options = DemoOptions(file=flags.file, label=flags.label, epochs=flags.epochs, seed=flags.seed)
            run = run_demo(options, demo_server, output)
        write(render(run), report)
        output.step(run.summary)
        output.step(run.verdict)
        output.step(f"report: {report.absolute()}")
        if flags.as_json:
            print_json(_demo_document(run, report))
        if flags.keep:
            _serve(output, demo_server, run)


def _require_demo_extra() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('the demo needs matplotlib for its report: pip install "zloader[demo]"')


def _demo_document(run: DemoRun, report: Path) -> dict[str, Any]:
    document = dataclasses.asdict(run)
    del document["steps"]
    for name, passes in (("epochs", run.epochs), ("loading", run.loading)):
        for figures, each in zip(document[name], passes, strict=True):
            figures["cold"] = each.cold
    return document | {"seen": run.summary, "verdict": run.verdict, "report": str(report.absolute())}


def _serve(output: terminal.TerminalOutput, demo_server: DemoServer, run: DemoRun) -> None:
    """Prints how to reach the server and its files, then waits for a signal."""
    from zloader.commands.demo_server import write_access

    access = write_access(demo_server)
    with contextlib.suppress(KeyboardInterrupt, EndedError):
        output.step(f"store: {run.conversion.destination}, server: {demo_server.s3.endpoint_url}")
        output.step(f"files: {demo_server.directory} (server in seaweedfs/, mirror in cache/)")
        output.step(f"try, in another terminal: . {access} && zloader info {run.conversion.destination}")
        output.step(f"Ctrl-C, or kill {os.getpid()}, stops the server; the files stay until you remove them")
        signal.pause()
    output.step("stopping the server once it has flushed its files")
