"""The `zloader` command: convert, info, demo.

Figures and tables go to stdout, progress and errors to stderr; with --json, stdout is one JSON document. What takes
seconds to import is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from zloader import terminal
from zloader.errors import FormatError, OptionError, ZloaderError

if TYPE_CHECKING:
    from zloader.cost import EpochCosts
    from zloader.dataset import Dataset
    from zloader.report import DemoRun
    from zloader.workplace import Workplace

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _EndedError(BaseException):
    """A signal that asks to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else _EndedError(number)


class _Commands(typer.core.TyperGroup):
    """Shows errors as one line and ends on signals as a shell expects, after everything has been cleared up."""

    def invoke(self, ctx: Any) -> Any:
        before = {number: signal.signal(number, _end) for number in _ENDING_SIGNALS}
        try:
            return super().invoke(ctx)
        except ZloaderError as error:
            if _debugging():
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            _leave(128 + signal.SIGINT)
        except _EndedError as error:
            _leave(128 + error.number)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(status: int) -> NoReturn:
    """Ends the process now: all is cleared up, and what libraries were doing in threads would end with noise."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # rich tracebacks show local variables, credentials among them
    help="Trains PyTorch models straight from single-cell AnnData kept as sharded Zarr in object storage.",
)


def _debugging() -> bool:
    return os.environ.get("ZLOADER_DEBUG", "") not in ("", "0")


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ["ZLOADER_DEBUG"] = "1"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zloader {importlib.metadata.version('zloader')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Only holds what stands before a command's name."""


_S3 = "Access to S3"
_Url = Annotated[str, typer.Argument(metavar="URL", help="A store: local path or s3://BUCKET/KEY.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
_Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error (or set ZLOADER_DEBUG=1).", callback=_debug),
]
_Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="S3 server, where it is not AWS.", rich_help_panel=_S3),
]
_Region = Annotated[str | None, typer.Option("--region", help="Region of the bucket.", rich_help_panel=_S3)]
_Profile = Annotated[
    str | None, typer.Option("--profile", help="Profile of the AWS configuration.", rich_help_panel=_S3)
]
_Anonymous = Annotated[
    bool, typer.Option("--anon", help="Without credentials, for public buckets.", rich_help_panel=_S3)
]
_KEYS = "Keys are taken from the AWS_* variables or the AWS configuration, never from the command line."


def _storage_options(
    endpoint_url: str | None, region: str | None, profile: str | None, anonymous: bool
) -> dict[str, Any]:
    """The options of s3fs that the flags stand for."""
    client = {"endpoint_url": endpoint_url, "region_name": region}
    client = {name: value for name, value in client.items() if value}
    given: dict[str, Any] = {"profile": profile, "anon": anonymous, "client_kwargs": client}
    return {name: value for name, value in given.items() if value}


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


# ---- convert

_CHOICE = "What goes in"
_LAYOUT = "How it is stored"
_Names = "Names with commas between, or none"


@app.command(epilog=_KEYS)
def convert(  # noqa: PLR0913 - one parameter a flag
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help=".h5ad, AnnData Zarr, annbatch collection, 10x .h5 or .mtx directory: paths, URLs, globs.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Where to: local path or s3://BUCKET/KEY.", show_default=False)
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the store that is there.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted conversion after its last whole shard.")
    ] = False,
    x: Annotated[
        str, typer.Option("--x", metavar="NAME", help="What becomes X: X, layers/NAME, raw/X.", rich_help_panel=_CHOICE)
    ] = "X",
    layers: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"Layers. {_Names}.", show_default="all", rich_help_panel=_CHOICE)
    ] = None,
    obsm: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Parts of obsm. {_Names}.", show_default="all", rich_help_panel=_CHOICE),
    ] = None,
    obs: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"obs columns. {_Names}.", show_default="all", rich_help_panel=_CHOICE),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw/--no-raw", help="Keep raw.", rich_help_panel=_CHOICE)] = True,
    join: Annotated[
        str | None,
        typer.Option(help="Genes of several sources: inner (shared ones) or outer (all).", rich_help_panel=_CHOICE),
    ] = None,
    genes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Exactly the genes in this file, one a line.", rich_help_panel=_CHOICE),
    ] = None,
    gene_column: Annotated[
        str | None, typer.Option(help="var column that names the genes, e.g. Ensembl ids.", rich_help_panel=_CHOICE)
    ] = None,
    source_column: Annotated[
        str | None, typer.Option(help="obs column to add: which source a row came from.", rich_help_panel=_CHOICE)
    ] = None,
    unique_obs_names: Annotated[
        bool, typer.Option("--unique-obs-names", help="Number obs names that come twice.", rich_help_panel=_CHOICE)
    ] = False,
    chunk_rows: Annotated[
        int | None,
        typer.Option(help="Rows' worth of values in a chunk, about.", show_default="32", rich_help_panel=_LAYOUT),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most in one object, uncompressed.", show_default="256MiB", rich_help_panel=_LAYOUT
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="lz4, zstd (smaller, slower) or none.", show_default="lz4", rich_help_panel=_LAYOUT),
    ] = None,
    preserve_dtype: Annotated[
        bool,
        typer.Option(
            "--preserve-dtype", help="Keep dtypes, also where smaller ones would do.", rich_help_panel=_LAYOUT
        ),
    ] = False,
    shuffle_seed: Annotated[
        int | None, typer.Option("--shuffle", metavar="SEED", help="Shuffle the rows, by this seed.", rich_help_panel=_LAYOUT)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory to use.", show_default="1GiB", rich_help_panel=_LAYOUT),
    ] = None,
    endpoint_url: _Endpoint = None,
    region: _Region = None,
    profile: _Profile = None,
    anon: _Anonymous = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Write one or many AnnData as one sharded AnnData Zarr store."""
    from zloader.content import Selection
    from zloader.convert import convert as convert_sources
    from zloader.encode import ConvertOptions

    given = {
        "chunk_rows": chunk_rows,
        "shard_size": shard_size,
        "codec": codec,
        "preserve_dtype": preserve_dtype,
        "memory": memory,
        "shuffle_seed": shuffle_seed,
    }
    select = Selection(
        x=x,
        layers=_listed(layers),
        obsm=_listed(obsm),
        obs=_listed(obs),
        raw=raw,
        join=join,
        genes=None if genes is None else _lines(genes),
        gene_column=gene_column,
        source_column=source_column,
        unique_obs_names=unique_obs_names,
    )
    done = convert_sources(
        sources,
        dest,
        select=select,
        storage_options=_storage_options(endpoint_url, region, profile, anon),
        overwrite=overwrite,
        resume=resume,
        options=ConvertOptions(**{name: value for name, value in given.items() if value is not None}),  # type: ignore[arg-type]
    )
    if as_json:
        _print_json(dataclasses.asdict(done))
    else:
        terminal.show_conversion(terminal.console(), done)


def _listed(names: str | None) -> list[str] | None:
    """The names of an option such as `a,b`; none of them for `none`."""
    if names is None:
        return None
    return [] if names == "none" else [name.strip() for name in names.split(",") if name.strip()]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read genes from {path}: {error}") from error


# ---- info


@app.command(epilog=_KEYS)
def info(  # noqa: PLR0913 - one parameter a flag
    url: _Url,
    x: Annotated[
        str, typer.Option("--x", metavar="NAME", help="The matrix of the epoch: X, layers/NAME, raw/X.")
    ] = "X",
    batch_size: Annotated[int | None, typer.Option(help="Rows in a minibatch.", show_default="64")] = None,
    fetch_factor: Annotated[int | None, typer.Option(help="Minibatches in a fetch.", show_default="256")] = None,
    block_size: Annotated[int | None, typer.Option(help="Rows in a shuffled block.", show_default="64")] = None,
    endpoint_url: _Endpoint = None,
    region: _Region = None,
    profile: _Profile = None,
    anon: _Anonymous = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Show what a store holds, and how many GETs and bytes a training epoch of it costs."""
    from zloader.dataset import open_dataset
    from zloader.loader import DEFAULT_BLOCK_SIZE, Loader
    from zloader.summary import summarize

    sizes = {
        "batch_size": Loader.batch_size if batch_size is None else batch_size,
        "fetch_factor": Loader.fetch_factor if fetch_factor is None else fetch_factor,
        "block_size": DEFAULT_BLOCK_SIZE if block_size is None else block_size,
    }
    dataset = open_dataset(url, storage_options=_storage_options(endpoint_url, region, profile, anon))
    summary = summarize(dataset)
    try:
        costs, problem = _costs(dataset, x, **sizes), None
    except FormatError as error:
        costs, problem = None, str(error)
    if as_json:
        epoch = {"x": x, **sizes, "problem": problem} | ({} if costs is None else dataclasses.asdict(costs))
        _print_json(dataclasses.asdict(summary) | {"epoch": epoch})
        return
    console = terminal.console()
    terminal.show_store(console, summary)
    if costs is None:
        console.print(f"no epoch can be read: {problem}", soft_wrap=True, markup=False)
    else:
        terminal.show_costs(console, costs, x, sizes)


def _costs(dataset: Dataset, x: str, *, batch_size: int, fetch_factor: int, block_size: int) -> EpochCosts:
    from zloader.cost import epoch_costs
    from zloader.loader import Loader
    from zloader.sampling import BlockShuffling

    loader = Loader(
        dataset,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        sampling=BlockShuffling(block_size=block_size),
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
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Train on real cells from a real S3 server on this machine, and see what cold and warm epochs cost.

    SeaweedFS runs in a temporary directory; both are gone at the end.
    """
    _require_demo_extra()
    if not os.access(report.parent, os.W_OK) or report.is_dir():
        raise OptionError(f"cannot write {report}: give the path of a file in a directory that exists with --report")
    view = terminal.DemoView(terminal.console(stderr=as_json))
    view.step("loading torch and starting SeaweedFS")
    from zloader.demo import DemoOptions, run_demo
    from zloader.report import render
    from zloader.workplace import workplace

    with workplace(keep=keep) as place:
        with view:
            run = run_demo(DemoOptions(file=file, label=label, epochs=epochs, seed=seed), place, view)
        report.write_text(render(run), encoding="utf-8")
        view.step(run.seen)
        view.step(f"report: {report.absolute()}")
        if as_json:
            _print_json(_demo_document(run, report))
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


def _serve(view: terminal.DemoView, place: Workplace, run: DemoRun) -> None:
    """Says where everything is, and waits for a signal."""
    from zloader.workplace import write_access

    access = write_access(place)
    with contextlib.suppress(KeyboardInterrupt, _EndedError):
        view.step(f"store: {run.conversion.destination}, server: {place.server.endpoint_url}")
        view.step(f"files: {place.directory} (server: seaweedfs, mirror: cache)")
        view.step(f"try, in another terminal: . {access} && zloader info {run.conversion.destination}")
        view.step(f"Ctrl-C, or kill {os.getpid()}, stops the server; the files stay until you remove them")
        signal.pause()
    view.step("stopping the server, which puts its files in order first")
