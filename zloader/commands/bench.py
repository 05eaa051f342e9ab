"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm, and says what bounds them.

Rows are read through a Loader. The figures are its statistics() and those of bench_run.py. Before the first epoch, one
row is read without the mirror, so that imports and compilation are not measured. After the last one, the speed of the
link, or of the disk of a local store, is measured, unless it is stated or nothing depends on it.

Epochs that are short are repeated, because start-up and noise are much of each. A cold one begins with a new mirror
then, which lies in the cache directory until the epoch ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from zloader.commands import terminal
from zloader.commands.bench_run import BenchEpoch, BenchQuality, BenchRun, Prices, figures_of, medians, run_epoch
from zloader.commands.command import KEYS, EndedError, app, takes_flags
from zloader.commands.flags import (
    Access,
    Dtype,
    GenesBy,
    Json,
    Layout,
    LoaderSizes,
    Matrices,
    Memory,
    ObsColumns,
    genes_by_of,
    words_of,
    x_of,
)
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.machine import available_cores
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader

_ENOUGH_S = 2.0  # that the epochs of a kind should take together
_MOST_REPEATS = 8  # of the epochs of a kind


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The flags, and the values that they stand for. Raises OptionError for a price or a speed that cannot be."""

    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL", help="Stores, read as one dataset: local paths or s3://BUCKET/KEY.", show_default=False
        ),
    ]
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Cache directory. Its mirror stays for later runs.", show_default="no mirror"),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to measure. Short ones are repeated.")] = 3
    step_ms: Annotated[float, typer.Option(min=0, help="Simulated training time per minibatch, in ms.")] = 0.0
    report: Annotated[Path | None, typer.Option(metavar="PATH", help="Write an HTML report.", show_default=False)] = (
        None
    )
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="obs column: say how well its labels are mixed.", show_default=False),
    ] = None
    link_speed: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes per second of the link to the store, or of the disk of a local one.",
            show_default="measured, 2 s",
        ),
    ] = None
    join: Annotated[
        str | None, typer.Option(help="Genes of stores that differ: inner or outer.", show_default="must be equal")
    ] = None
    genes_by: GenesBy = None
    x: Matrices = None
    obs: ObsColumns = ""
    loader_sizes: LoaderSizes = field(default_factory=LoaderSizes)
    memory: Memory = "0"
    layout: Layout = "csr"
    dtype: Dtype = None
    prices: Prices = field(default_factory=Prices)
    access: Access = field(default_factory=Access)
    as_json: Json = False

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self.prices).items():
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"--{name.replace('_', '-')} must be a number of at least 0, not {value:g}")
        _ = self.link_bytes_per_s

    @property
    def step_s(self) -> float:
        """Simulated training time per minibatch."""
        return self.step_ms / 1000

    @property
    def link_bytes_per_s(self) -> int | None:
        """The stated speed of the link; None if it has to be measured."""
        from zloader.common.checks import parse_size, require_count

        if self.link_speed is None:
            return None
        n_bytes = parse_size(self.link_speed.removesuffix("/s"))
        require_count(link_speed=n_bytes)
        return n_bytes

    @property
    def matrices(self) -> str | list[str]:
        """The x of the loader."""
        return x_of(self.x)

    @property
    def obs_columns(self) -> list[str]:
        """The obs columns of the loader."""
        return [column.strip() for column in self.obs.split(",") if column.strip()]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the loader, by name."""
        return self.loader_sizes.by_name

    @property
    def shown_urls(self) -> list[str]:
        """The stores as they are shown, without the query of a signed address."""
        from zloader.access.location import location_of

        return [location_of(url, None).url for url in self.urls]

    def opened(self, cache: Path | None) -> Dataset:
        """The stores as one dataset, with or without a cache."""
        from zloader.dataset.open_dataset import open_dataset

        source: Any = self.urls[0] if len(self.urls) == 1 else self.urls
        named: Any = {"storage_options": self.access.storage_options, "join": self.join}
        return open_dataset(source, cache=cache, genes_by=genes_by_of(self.genes_by), **named)

    def loader(self, cache: Path | None) -> Loader:
        """The loader to measure, with or without a mirror."""
        from zloader.order.shuffling import stratified

        sampling = stratified(self.sizes["block_size"])
        return self.loader_of(self.opened(cache), sampling, self.obs_columns)

    def loader_of(self, dataset: Dataset, sampling: Any, obs: Sequence[str] = ()) -> Loader:
        """A loader of a dataset with these options."""
        from zloader.training.loader import Loader

        return Loader(
            dataset,
            batch_size=self.sizes["batch_size"],
            fetch_factor=self.sizes["fetch_factor"],
            sampling=sampling,
            options=self.fetching,
            x=self.matrices,
            obs=list(obs),
            layout=self.layout,  # type: ignore[arg-type]
            dtype=self.dtype,
            rank=0,
            world_size=1,
        )

    @property
    def fetching(self) -> FetchOptions:
        """The options of reading."""
        from zloader.common.options import FetchOptions

        return FetchOptions(memory=self.memory)

    @property
    def words(self) -> list[str]:
        """The flags that make the same loader, apart from those of the cache."""
        rows = {"join": self.join, "obs": ",".join(self.obs_columns), "genes_by": self.genes_by, "x": self.matrices}
        form = {"layout": self.layout, "dtype": self.dtype}
        return [*words_of({**self.sizes, **rows, **form}), *self.access.words]


@app.command(epilog=KEYS)
@takes_flags
def bench(flags: BenchFlags) -> None:
    """Measure epochs over a store, read as a training loop would read it, and say what bounds their speed.

    A cold epoch begins without a mirror or with an empty one, a warm epoch reads the mirror only, and a mixed epoch
    begins with a part of the mirror.
    """
    from zloader.commands.bench_report import report
    from zloader.commands.report import require_drawable

    require_drawable(flags.report)
    console = terminal.console(stderr=flags.as_json)
    loader, run = prepared(flags, console)

    def finish(run: BenchRun) -> None:
        _show(console, run, as_json=flags.as_json)
        if flags.report is not None and run.epochs:
            report(run, flags.access.storage_options, flags.words).write(flags.report)
            console.print(f"report: {flags.report.absolute()}")
        if not run.interrupted and len(flags.urls) == 1:
            words = shlex.join(["--store", *flags.shown_urls, *flags.access.words])
            console.print(f"To compare other loaders, in a clone of the repository: python -m benchmarks.real {words}")

    try:
        _measure(flags, loader, run, console)
        run = _with_link(loader, run, console)
    except (KeyboardInterrupt, EndedError):
        finish(dataclasses.replace(run, interrupted=True))
        raise
    finish(run)


def prepared(flags: BenchFlags, console: Console) -> tuple[Loader, BenchRun]:
    """The loader to measure, once everything is imported and compiled, and the results, still without epochs."""
    from zloader.order.shuffling import Streaming

    loader = flags.loader(flags.cache)
    rows, genes = loader.dataset.n_obs, loader.dataset.n_vars
    console.print(f"{', '.join(flags.shown_urls)}: {rows:,} rows x {genes:,} genes")
    # Opened by itself, so that the first epoch finds nothing that was read or mirrored before it.
    unmirrored = flags.opened(None)
    for _ in flags.loader_of(unmirrored, Streaming(indices=[0])):
        pass
    return loader, BenchRun(
        urls=flags.shown_urls,
        rows=rows,
        genes=genes,
        local=all(store.read_from.scheme == "file" for store in loader.dataset.stores),
        cache=flags.cache,
        batch_size=flags.sizes["batch_size"],
        step_s=flags.step_s,
        cores=available_cores(),
        load=_load(),
        settings=_settings(flags, loader),
        prices=flags.prices,
        epochs=[],
        link_bytes_per_s=flags.link_bytes_per_s,
        link_stated=flags.link_bytes_per_s is not None,
        quality=None if flags.label is None else _quality(flags.label, unmirrored, loader),
    )


def _load() -> float:
    """The load average of the last minute; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return 0.0


def _quality(label: str, unmirrored: Dataset, loader: Loader) -> BenchQuality:
    """Reads the column without the mirror, so that the first epoch finds it empty."""
    from zloader.insight.quality import quality

    return BenchQuality(label=label, measured=quality(unmirrored.obs_column(label).values, loader.plan(0)))


def _settings(flags: BenchFlags, loader: Loader) -> dict[str, Any]:
    fetching = flags.fetching
    budgets = {name: getattr(fetching, name) for name in ("in_flight_bytes", "buffer_bytes", "ready_bytes")}
    opening = {"join": flags.join, "genes_by": flags.genes_by}
    rows, genes = loader.dataset.shape
    stores = {"urls": flags.shown_urls, "rows": rows, "genes": genes, "cache": flags.cache}
    form = {"x": flags.matrices, "obs": flags.obs_columns, "layout": flags.layout, "dtype": loader.dtype}
    work = {"step_ms": 1000 * flags.step_s}
    return {**stores, **work, **opening, **budgets, **flags.sizes, **form}


def _measure(flags: BenchFlags, loader: Loader, run: BenchRun, console: Console) -> None:
    """Appends the epochs to `run`, the last one even if it is interrupted, and repeats cold and warm ones."""
    measured, began = run.epochs, time.perf_counter()

    def measure(loader: Loader) -> None:
        with _live(console, run.rows, lambda: figures_of(loader.statistics())):
            run_epoch(loader, measured, step_s=run.step_s, began=began)

    for _ in range(flags.epochs):
        measure(loader)
        console.print(_line(measured[-1]))
    for kind in ("cold", "warm"):
        before = len(measured)
        for _ in range(_MOST_REPEATS):
            took = [epoch.figures["elapsed_s"] for epoch in measured if epoch.kind == kind]
            if not took or sum(took) >= _ENOUGH_S:
                break
            with _again(flags, loader, kind) as one:
                measure(one)
        if len(measured) > before:
            console.print(f"{kind} epochs are short, so {len(measured) - before} more were measured")


@contextlib.contextmanager
def _again(flags: BenchFlags, loader: Loader, kind: str) -> Iterator[Loader]:
    """The loader, or for a cold epoch, one with a mirror that is empty and removed afterwards."""
    if kind == "warm" or flags.cache is None:
        yield loader
        return
    with tempfile.TemporaryDirectory(dir=flags.cache, prefix="bench-", ignore_cleanup_errors=True) as cache:
        yield flags.loader(Path(cache))


def _with_link(loader: Loader, run: BenchRun, console: Console) -> BenchRun:
    """Measures the link, or the disk of a local store, if an epoch read from it."""
    from zloader.insight.link import disk_bytes_per_s, link_bytes_per_s

    if run.link_stated or not any(pace.bytes_read for pace in run.paces.values()):
        return run
    name, x = "disk" if run.local else "link", loader.x or "X"
    try:
        with console.status(f"measuring the {name}"):
            speed = (
                disk_bytes_per_s(loader.dataset, x=x)
                if run.local
                else link_bytes_per_s(loader.dataset, x=x, options=loader.options)
            )
    except (ZloaderError, OSError) as error:
        console.print(f"the {name} was not measured: {error}")
        return run
    return dataclasses.replace(run, link_bytes_per_s=speed)


def _line(epoch: BenchEpoch) -> str:
    interrupted = "" if epoch.complete else ", interrupted"
    return f"epoch {epoch.epoch}, {epoch.kind}{interrupted}: {_one_line(epoch.figures)}"


# ---- results


def _show(console: Console, run: BenchRun, *, as_json: bool) -> None:
    """Prints all figures as JSON, or the medians as a table and the advice."""
    if as_json:
        terminal.print_json(_document(run))
        return
    columns: dict[str, Mapping[str, float]] = {}
    for kind, figures in medians(run.epochs).items():
        n = int(figures["epochs"])
        columns[f"{kind}, median of {n}" if n > 1 else kind] = figures
    columns |= {f"epoch {epoch.epoch}, interrupted": epoch.figures for epoch in run.epochs if not epoch.complete}
    if columns:
        _show_figures(console, columns)
    for sentence in run.sentences:
        console.print(sentence)


def _document(run: BenchRun) -> dict[str, Any]:
    """The samples over time are left out."""
    epochs = [{name: value for name, value in vars(epoch).items() if name != "samples"} for epoch in run.epochs]
    mixing = run.quality
    quality = None if mixing is None else dataclasses.asdict(mixing) | {"percent": mixing.measured.percent}
    return {
        **run.settings,
        "epochs": epochs,
        "medians": medians(run.epochs),
        "link_bytes_per_s": run.link_bytes_per_s,
        "link_stated": run.link_stated,
        "load": run.load,
        "interrupted": run.interrupted,
        "prices": dataclasses.asdict(run.prices),
        "dollars": {kind: run.dollars(figures) for kind, figures in medians(run.epochs).items()},
        "quality": quality,
        "advice": {kind: dataclasses.asdict(advice) for kind, advice in run.advice.items()},
        "sentences": run.sentences,
    }


_count, _share, _seconds = "{:,.0f}".format, "{:.0%}".format, "{:,.2f} s".format


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


# In the order of the table. Missing figures are left out.
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "rows_per_s": ("rows/s", _count),
    "elapsed_s": ("elapsed", _seconds),
    "first_minibatch_s": ("first minibatch after", _seconds),
    "wait_share": ("waiting", _share),
    "gets": ("GETs", _count),
    "spans": ("spans", _count),
    "bytes_read": ("read from the store", size),
    "bytes_read_per_s": ("read rate", _rate),
    "in_flight_bytes": ("in flight now", size),
    "most_in_flight_bytes": ("peak in flight", size),
    "mirror_share": ("chunks from the mirror", _share),
    "bytes_from_mirror": ("read from the mirror", size),
    "decode_s": ("decoding, all threads", _seconds),
    "gather_s": ("gathering, all threads", _seconds),
    "cpu_s": ("processor, all threads", _seconds),
    "retries": ("retries", _count),
}
_IN_A_LINE = ("elapsed_s", "first_minibatch_s", "wait_share", "gets", "bytes_read", "mirror_share")


def _shown(name: str, figures: Mapping[str, float]) -> str:
    return _FIGURES[name][1](figures[name]) if name in figures else ""


def _one_line(figures: Mapping[str, float]) -> str:
    """The main figures of an epoch."""
    return f"{_count(figures['rows_per_s'])} rows/s; " + ", ".join(
        f"{_FIGURES[name][0]} {_shown(name, figures)}" for name in _IN_A_LINE if name in figures
    )


def _figures_table(columns: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per figure that any column has."""
    table = terminal.new_table("", *(f">{name}" for name in columns))
    for name, (label, _) in _FIGURES.items():
        if any(name in figures for figures in columns.values()):
            table.add_row(label, *(_shown(name, figures) for figures in columns.values()))
    return table


def _show_figures(console: Console, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Prints figures side by side, without those that matter only while an epoch runs."""
    ended = {
        column: {k: v for k, v in figures.items() if k != "in_flight_bytes"} for column, figures in columns.items()
    }
    console.print(_figures_table(ended))


@contextlib.contextmanager
def _live(console: Console, rows: int, figures: Callable[[], Mapping[str, float]]) -> Iterator[None]:
    """While the context lasts, shows the live figures of the current epoch if the console is a terminal."""
    if not console.is_terminal:
        yield
        return

    def render() -> RenderableType:
        now = figures()
        return _figures_table({f"epoch {now['epoch']:.0f}: {now['rows']:,.0f} of {rows:,} rows": now})

    with Live(console=console, get_renderable=render, refresh_per_second=8, transient=True):
        yield
