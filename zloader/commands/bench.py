"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm.

Rows are read through a Loader. The figures are its statistics() and the time to the first minibatch. Before the first
epoch, one row is read without the mirror, so that imports and compilation are not measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import terminal
from zloader.commands.command import (
    KEYS,
    Anonymous,
    Debug,
    EndedError,
    Endpoint,
    Json,
    Matrices,
    Profile,
    Region,
    app,
    loader_sizes,
    print_json,
    storage_options,
    x_of,
)
from zloader.common.errors import ZloaderError

if TYPE_CHECKING:
    from zloader.common.records import Statistics
    from zloader.training.loader import Loader

KINDS = ("cold", "mixed", "warm")
_LOADER = "Loader options"


@dataclass(frozen=True, kw_only=True)
class BenchEpoch:
    """One epoch. `figures` are by name, from `figures_of`. `complete` is False if the epoch was interrupted."""

    epoch: int
    kind: str
    complete: bool
    figures: Mapping[str, float]


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
    join: Annotated[
        str | None, typer.Option(help="Genes of stores that differ: inner or outer.", show_default="must be equal")
    ] = None,
    genes_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="var column that names the genes.", show_default="var_names")
    ] = None,
    x: Matrices = None,
    obs: Annotated[
        str, typer.Option(metavar="A,B", help="obs columns to read.", show_default="none", rich_help_panel=_LOADER)
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per minibatch.", show_default="64", rich_help_panel=_LOADER)
    ] = None,
    fetch_factor: Annotated[
        int | None, typer.Option(help="Minibatches per fetch.", show_default="256", rich_help_panel=_LOADER)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Rows per shuffled block, at most one fetch.", show_default="64", rich_help_panel=_LOADER),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory limit for reads, fetches and minibatches.",
            show_default="set by the machine's memory",
            rich_help_panel=_LOADER,
        ),
    ] = "0",
    layout: Annotated[str, typer.Option(help="csr, dense, scipy or anndata.", rich_help_panel=_LOADER)] = "csr",
    dtype: Annotated[str, typer.Option(help="float32, float64, int32 or int64.", rich_help_panel=_LOADER)] = "float32",
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure epochs over a store, read as a training loop would read it.

    A cold epoch reads all its chunks from the store, a warm epoch all from the mirror, and a mixed epoch from both.
    """
    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import open_dataset
    from zloader.order.sampling import Streaming, stratified
    from zloader.training.loader import Loader

    sizes = loader_sizes(batch_size, fetch_factor, block_size)
    block_size = sizes.pop("block_size")
    columns = [column.strip() for column in obs.split(",") if column.strip()]
    fetching = FetchOptions(memory=memory)
    options: dict[str, Any] = {
        **sizes,
        "options": fetching,
        "x": x_of(x),
        "layout": layout,
        "dtype": dtype,
        "rank": 0,
        "world_size": 1,
    }
    source: Any = urls[0] if len(urls) == 1 else urls
    access = storage_options(endpoint_url, region, profile, anon)
    opening: Any = {"storage_options": access, "join": join, "genes_by": genes_by}
    loader = Loader(
        open_dataset(source, cache=cache, **opening),
        sampling=stratified(block_size),
        obs=columns,
        **options,
    )
    console = terminal.console(stderr=as_json)
    rows, genes = loader.dataset.n_obs, loader.dataset.n_vars
    console.print(f"{', '.join(urls)}: {rows:,} rows x {genes:,} genes", soft_wrap=True)
    for _ in Loader(open_dataset(source, **opening), sampling=Streaming(indices=[0]), **options):
        pass

    settings = {"urls": urls, "rows": rows, "genes": genes, "cache": cache, "step_ms": step_ms}
    settings |= {"join": join, "genes_by": genes_by}
    settings |= {name: getattr(fetching, name) for name in ("in_flight_bytes", "buffer_bytes", "ready_bytes")}
    settings |= {**sizes, "block_size": block_size, "x": x_of(x), "obs": columns, "layout": layout, "dtype": dtype}
    measured: list[BenchEpoch] = []
    try:
        with terminal.bench_view(console, rows, lambda: figures_of(loader.statistics())):
            for _ in range(epochs):
                run_epoch(loader, measured, step_s=step_ms / 1000)
                console.print(_line(measured[-1]), soft_wrap=True)
    except (KeyboardInterrupt, EndedError):
        _show(console, settings, measured, as_json=as_json)
        raise
    _show(console, settings, measured, as_json=as_json)


def run_epoch(loader: Loader, measured: list[BenchEpoch], *, step_s: float = 0.0) -> None:
    """Reads the next epoch and appends its figures to `measured`, even if the epoch is interrupted.

    Raises ZloaderError if the epoch does not have every row exactly once.
    """
    rows = minibatches = row_sum = 0
    first_minibatch_s = 0.0
    complete = False
    began = time.perf_counter()
    try:
        for minibatch in loader:
            if not minibatches:
                first_minibatch_s = time.perf_counter() - began
            minibatches += 1
            rows += len(minibatch)
            row_sum += int(minibatch.index.sum())
            if step_s:
                time.sleep(step_s)
        n = loader.dataset.n_obs
        _require_complete(
            minibatches=(minibatches, len(loader)), rows=(rows, n), sum_of_row_numbers=(row_sum, n * (n - 1) // 2)
        )
        complete = True
    finally:
        if minibatches:
            figures = figures_of(loader.statistics()) | {"first_minibatch_s": first_minibatch_s}
            epoch = int(figures.pop("epoch"))
            measured.append(BenchEpoch(epoch=epoch, kind=_kind(figures), complete=complete, figures=figures))


def _require_complete(**counts: tuple[int, int]) -> None:
    for name, (found, expected) in counts.items():
        if found != expected:
            raise ZloaderError(
                f"an epoch did not have every row exactly once: its {name.replace('_', ' ')} should be {expected:,}, "
                f"but came to {found:,}. This is a bug: please report it with the output of 'zloader verify'"
            )


def figures_of(statistics: Statistics) -> dict[str, float]:
    """The figures of an epoch by name: the fields of Statistics, and rates and shares computed from them."""
    figures = dataclasses.asdict(statistics)
    chunks = statistics.chunks_decoded + statistics.chunks_from_mirror
    return figures | {
        "rows_per_s": statistics.rows_per_s,
        "wait_share": statistics.wait_share,
        "bytes_read_per_s": statistics.bytes_read / statistics.elapsed_s if statistics.elapsed_s else 0.0,
        "mirror_share": statistics.chunks_from_mirror / chunks if chunks else 0.0,
    }


def _kind(figures: Mapping[str, float]) -> str:
    # The epoch that fills a mirror is mixed too, because later fetches find chunks that earlier fetches have read.
    if figures["chunks_from_mirror"] == 0:
        return "cold"
    return "mixed" if figures["chunks_decoded"] else "warm"


def _line(epoch: BenchEpoch) -> str:
    interrupted = "" if epoch.complete else ", interrupted"
    return f"epoch {epoch.epoch}, {epoch.kind}{interrupted}: {terminal.one_line(epoch.figures)}"


def medians(epochs: Sequence[BenchEpoch]) -> dict[str, dict[str, float]]:
    """The median of each figure over the complete epochs of each kind, and the number of these epochs."""
    from statistics import median

    by_kind: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        complete = [epoch.figures for epoch in epochs if epoch.complete and epoch.kind == kind]
        if complete:
            by_kind[kind] = {"epochs": float(len(complete))} | {
                name: median(figures[name] for figures in complete) for name in complete[0]
            }
    return by_kind


def _show(console: Any, settings: Mapping[str, Any], measured: Sequence[BenchEpoch], *, as_json: bool) -> None:
    """Prints all figures as JSON, or the medians as a table."""
    if as_json:
        epochs = [dataclasses.asdict(epoch) for epoch in measured]
        print_json({**settings, "epochs": epochs, "medians": medians(measured)})
        return
    columns: dict[str, Mapping[str, float]] = {}
    for kind, figures in medians(measured).items():
        n = int(figures["epochs"])
        columns[f"{kind}, median of {n}" if n > 1 else kind] = figures
    columns |= {f"epoch {epoch.epoch}, interrupted": epoch.figures for epoch in measured if not epoch.complete}
    if columns:
        terminal.show_figures(console, columns)
