"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm, and says what bounds them.

Rows are read through a Loader. The figures are its statistics() and those of bench_run.py. Before the first epoch, one
row is read without the mirror, so that imports and compilation are not measured. After the last one, the speed of the
link is measured, unless it is stated or nothing depends on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import terminal
from zloader.commands.bench_run import BenchEpoch, BenchQuality, BenchRun, figures_of, medians, run_epoch
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
from zloader.common.errors import OptionError, ZloaderError

if TYPE_CHECKING:
    from rich.console import Console

    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and how it is reported. Sizes that are None are those of a Loader."""

    urls: list[str]
    cache: Path | None
    epochs: int
    step_s: float
    join: str | None
    genes_by: str | None
    x: str | list[str]
    obs: list[str]
    sizes: dict[str, int]
    memory: str
    layout: str
    dtype: str
    label: str | None
    link_bytes_per_s: int | None
    prices: Prices
    access: dict[str, Any]

    def opened(self, cache: Path | None) -> Dataset:
        """The stores as one dataset, with or without a cache."""
        from zloader.dataset.dataset import open_dataset

        source: Any = self.urls[0] if len(self.urls) == 1 else self.urls
        named: Any = {"storage_options": self.access, "join": self.join, "genes_by": self.genes_by}
        return open_dataset(source, cache=cache, **named)

    def loader(self, dataset: Dataset, sampling: Any, obs: Sequence[str] = ()) -> Loader:
        """A loader of a dataset with these options."""
        from zloader.training.loader import Loader

        return Loader(
            dataset,
            batch_size=self.sizes["batch_size"],
            fetch_factor=self.sizes["fetch_factor"],
            sampling=sampling,
            options=self.fetching,
            x=self.x,
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
        """The flags that make the same loader, apart from those of access and of the cache."""
        listed = {f"--{name.replace('_', '-')}": size for name, size in self.sizes.items()}
        listed |= {"--join": self.join, "--genes-by": self.genes_by, "--obs": ",".join(self.obs)}
        listed |= {"--layout": self.layout, "--dtype": self.dtype}
        x = [self.x] if isinstance(self.x, str) else self.x
        words = [word for name, value in listed.items() if value for word in (name, str(value))]
        return words + [word for name in x for word in ("--x", name)]


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
            help="Bytes per second of the link to the store.",
            show_default="measured, 2 s, unless the store is local",
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
    loader, run = _prepared(options, console)

    def finish(run: BenchRun) -> None:
        _show(console, run, as_json=as_json)
        if report is not None and run.epochs:
            flags = [*options.words, *access_flags(endpoint_url, region, profile, anon)]
            _write(run, report, options.access, flags)
            console.print(f"report: {report.absolute()}", soft_wrap=True)

    try:
        _measure(loader, run, console, epochs)
        run = _with_link(loader, run, console)
    except (KeyboardInterrupt, EndedError):
        finish(run)
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


# ---- measuring


def _prepared(options: BenchOptions, console: Console) -> tuple[Loader, BenchRun]:
    """The loader to measure, once everything is imported and compiled, and the results, still without epochs."""
    from zloader.order.sampling import Streaming, stratified

    sampling = stratified(options.sizes["block_size"])
    loader = options.loader(options.opened(options.cache), sampling, options.obs)
    rows, genes = loader.dataset.n_obs, loader.dataset.n_vars
    console.print(f"{', '.join(options.urls)}: {rows:,} rows x {genes:,} genes", soft_wrap=True)
    unmirrored = options.opened(None)
    for _ in options.loader(unmirrored, Streaming(indices=[0])):
        pass
    return loader, BenchRun(
        urls=options.urls,
        rows=rows,
        genes=genes,
        local=all(store.location.scheme == "file" for store in loader.dataset.stores),
        cache=options.cache,
        batch_size=options.sizes["batch_size"],
        step_s=options.step_s,
        cores=loader.options.threads,
        load=_load(),
        settings=_settings(options, rows, genes),
        prices=options.prices,
        epochs=[],
        link_bytes_per_s=options.link_bytes_per_s,
        link_stated=options.link_bytes_per_s is not None,
        quality=None if options.label is None else _quality(options.label, unmirrored, loader),
    )


def _load() -> float:
    """The load average of the last minute; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return 0.0


def _quality(label: str, unmirrored: Dataset, loader: Loader) -> BenchQuality:
    """Reads the column without the mirror, so that the first epoch finds it empty."""
    from zloader.dataset.quality import quality

    return BenchQuality(label=label, measured=quality(unmirrored.obs_column(label).values, loader.plan(0)))


def _settings(options: BenchOptions, rows: int, genes: int) -> dict[str, Any]:
    fetching = options.fetching
    budgets = {name: getattr(fetching, name) for name in ("in_flight_bytes", "buffer_bytes", "ready_bytes")}
    opening = {"join": options.join, "genes_by": options.genes_by}
    stores = {"urls": options.urls, "rows": rows, "genes": genes, "cache": options.cache}
    form = {"x": options.x, "obs": options.obs, "layout": options.layout, "dtype": options.dtype}
    return {**stores, "step_ms": 1000 * options.step_s, **opening, **budgets, **options.sizes, **form}


def _measure(loader: Loader, run: BenchRun, console: Console, epochs: int) -> None:
    """Appends the epochs to `run`, the last one even if it is interrupted."""
    measured, began = run.epochs, time.perf_counter()
    with terminal.bench_view(console, run.rows, lambda: figures_of(loader.statistics())):
        for _ in range(epochs):
            run_epoch(loader, measured, step_s=run.step_s, began=began)
            console.print(_line(measured[-1]), soft_wrap=True)


def _with_link(loader: Loader, run: BenchRun, console: Console) -> BenchRun:
    """Measures the link if an epoch that was long enough to be judged read from a store that is not local."""
    from zloader.dataset.link import link_bytes_per_s

    read = any(pace.bytes_read and run.advice[kind].bound != "short" for kind, pace in run.paces.items())
    if run.local or run.link_stated or not read:
        return run
    try:
        with console.status("measuring the link"):
            speed = link_bytes_per_s(loader.dataset, x=loader.x or "X", options=loader.options)
    except ZloaderError as error:
        console.print(f"the link was not measured: {error}", soft_wrap=True)
        return run
    return dataclasses.replace(run, link_bytes_per_s=speed)


# ---- results


def _line(epoch: BenchEpoch) -> str:
    interrupted = "" if epoch.complete else ", interrupted"
    return f"epoch {epoch.epoch}, {epoch.kind}{interrupted}: {terminal.one_line(epoch.figures)}"


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
