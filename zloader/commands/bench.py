"""The command that measures: epochs over a store as a training loop goes through it, cold against warm.

Everything is read through a Loader, so the figures are its statistics(), beside the time to the first minibatch. What
is loaded and compiled once a process is out of the way before the first epoch: one row is read without the mirror.
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
    Profile,
    Region,
    app,
    loader_sizes,
    print_json,
    storage_options,
)
from zloader.common.errors import ZloaderError

if TYPE_CHECKING:
    from zloader.common.records import Statistics
    from zloader.training.loader import Loader

KINDS = ("cold", "mixed", "warm")
_LOADER = "What the training loop asks for"


@dataclass(frozen=True, kw_only=True)
class BenchEpoch:
    """One epoch: `figures` by name, as `figures_of` gives them; not `complete` if it was ended before its time."""

    epoch: int
    kind: str
    complete: bool
    figures: Mapping[str, float]


@app.command(epilog=KEYS)
def bench(  # noqa: PLR0913 - one parameter a flag
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL", help="Stores, read as one: local paths or s3://BUCKET/KEY.", show_default=False),
    ],
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep a mirror here, for later runs too.", show_default="no mirror"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through the rows.")] = 3,
    step_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of training on each minibatch.")] = 0.0,
    x: Annotated[
        str, typer.Option("--x", metavar="NAME", help="The matrix: X, layers/NAME, raw/X.", rich_help_panel=_LOADER)
    ] = "X",
    obs: Annotated[
        str, typer.Option(metavar="A,B", help="obs columns.", show_default="none", rich_help_panel=_LOADER)
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option(help="Rows in a minibatch.", show_default="64", rich_help_panel=_LOADER)
    ] = None,
    fetch_factor: Annotated[
        int | None, typer.Option(help="Minibatches in a fetch.", show_default="256", rich_help_panel=_LOADER)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Rows in a shuffled block, at most a fetch.", show_default="64", rich_help_panel=_LOADER),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Most memory for reads, fetches and minibatches.",
            show_default="by the machine's",
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
    """Go through a store as a training loop would, and see what epochs cost, cold and warm.

    A cold epoch took all its chunks from the store, a warm one all from the mirror, a mixed one from both.
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
        "x": x,
        "layout": layout,
        "dtype": dtype,
        "rank": 0,
        "world_size": 1,
    }
    source: Any = urls[0] if len(urls) == 1 else urls
    access = storage_options(endpoint_url, region, profile, anon)
    loader = Loader(
        open_dataset(source, cache=cache, storage_options=access),
        sampling=stratified(block_size),
        obs=columns,
        **options,
    )
    console = terminal.console(stderr=as_json)
    rows, genes = loader.dataset.n_obs, loader.dataset.n_vars
    console.print(f"{', '.join(urls)}: {rows:,} rows x {genes:,} genes", soft_wrap=True)
    for _ in Loader(open_dataset(source, storage_options=access), sampling=Streaming(indices=[0]), **options):
        pass

    asked = {"urls": urls, "rows": rows, "genes": genes, "cache": cache, "step_ms": step_ms}
    asked |= {name: getattr(fetching, name) for name in ("in_flight_bytes", "buffer_bytes", "ready_bytes")}
    asked |= {**sizes, "block_size": block_size, "x": x, "obs": columns, "layout": layout, "dtype": dtype}
    seen: list[BenchEpoch] = []
    try:
        with terminal.bench_view(console, rows, lambda: figures_of(loader.statistics())):
            for _ in range(epochs):
                run_epoch(loader, seen, step_s=step_ms / 1000)
                console.print(_line(seen[-1]), soft_wrap=True)
    except (KeyboardInterrupt, EndedError):
        _show(console, asked, seen, as_json=as_json)
        raise
    _show(console, asked, seen, as_json=as_json)


def run_epoch(loader: Loader, seen: list[BenchEpoch], *, step_s: float = 0.0) -> None:
    """Goes through the next epoch and adds what was measured to `seen`, also when it is ended early.

    Raises ZloaderError where the epoch is not every row once.
    """
    rows = minibatches = numbers = 0
    first_minibatch_s = 0.0
    complete = False
    began = time.perf_counter()
    try:
        for minibatch in loader:
            if not minibatches:
                first_minibatch_s = time.perf_counter() - began
            minibatches += 1
            rows += minibatch.x.shape[0]
            numbers += int(minibatch.index.sum())
            if step_s:
                time.sleep(step_s)
        n = loader.dataset.n_obs
        _require_whole(minibatches=(minibatches, len(loader)), rows=(rows, n), row_numbers=(numbers, n * (n - 1) // 2))
        complete = True
    finally:
        if minibatches:
            figures = figures_of(loader.statistics()) | {"first_minibatch_s": first_minibatch_s}
            epoch = int(figures.pop("epoch"))
            seen.append(BenchEpoch(epoch=epoch, kind=_kind(figures), complete=complete, figures=figures))


def _require_whole(**counted: tuple[int, int]) -> None:
    for what, (got, wanted) in counted.items():
        if got != wanted:
            raise ZloaderError(
                f"an epoch did not add up: its {what.replace('_', ' ')} came to {got:,}, not {wanted:,}. "
                "This must never happen: please report it, with the output of 'zloader verify'"
            )


def figures_of(seen: Statistics) -> dict[str, float]:
    """Every figure of an epoch by name: the fields of Statistics, and what follows from them."""
    figures = dataclasses.asdict(seen)
    chunks = seen.chunks_decoded + seen.chunks_from_mirror
    return figures | {
        "rows_per_s": seen.rows_per_s,
        "wait_share": seen.wait_share,
        "bytes_read_per_s": seen.bytes_read / seen.elapsed_s if seen.elapsed_s else 0.0,
        "mirror_share": seen.chunks_from_mirror / chunks if chunks else 0.0,
    }


def _kind(figures: Mapping[str, float]) -> str:
    # An epoch that fills a mirror is mixed, too: a fetch finds chunks there that an earlier one has read.
    if figures["chunks_from_mirror"] == 0:
        return "cold"
    return "mixed" if figures["chunks_decoded"] else "warm"


def _line(seen: BenchEpoch) -> str:
    return f"epoch {seen.epoch}, {seen.kind}{'' if seen.complete else ', ended early'}: " + terminal.in_a_line(
        seen.figures
    )


def medians(epochs: Sequence[BenchEpoch]) -> dict[str, dict[str, float]]:
    """By kind, the median of each figure over the complete epochs, and how many these were."""
    from statistics import median

    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        alike = [seen.figures for seen in epochs if seen.complete and seen.kind == kind]
        if alike:
            found[kind] = {"epochs": float(len(alike))} | {
                name: median(figures[name] for figures in alike) for name in alike[0]
            }
    return found


def _show(console: Any, asked: Mapping[str, Any], seen: Sequence[BenchEpoch], *, as_json: bool) -> None:
    """What has been measured, all of it or in a table."""
    if as_json:
        print_json({**asked, "epochs": [dataclasses.asdict(epoch) for epoch in seen], "medians": medians(seen)})
        return
    columns: dict[str, Mapping[str, float]] = {}
    for kind, figures in medians(seen).items():
        n = int(figures["epochs"])
        columns[f"{kind}, median of {n}" if n > 1 else kind] = figures
    columns |= {f"epoch {epoch.epoch}, ended early": epoch.figures for epoch in seen if not epoch.complete}
    if columns:
        terminal.show_figures(console, columns)
