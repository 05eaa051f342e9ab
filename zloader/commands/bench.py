"""`zloader bench`: measures epochs over a store as a training loop reads it, cold and warm, and says what bounds them.

The figures are those of the loader's statistics(), with times of the loop and of the process. Before the first epoch,
one row is read without the mirror, so that imports and compilation are not measured. Epochs that are short are
repeated, because start-up and noise are much of each. A cold one then begins with a new mirror, which lies in the cache
directory until the epoch ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import output
from zloader.commands.bench_advice import Advice, Pace, advise, compare
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
    x_of,
)
from zloader.commands.output import Page, Table, Timeline
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.machine import available_cores
from zloader.common.messages import size

if TYPE_CHECKING:
    from rich.console import Console

    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader

_KINDS = ("cold", "mixed", "warm")
_ENOUGH_S = 2.0  # that the epochs of a kind should take together
_MOST_REPEATS = 8  # of the epochs of a kind
_MOMENTS = 128  # of an epoch, in the figure
_MOST_SHOWN = 20  # epochs on the page


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The flags, and the loader that they make."""

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
    link_speed: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second of the link to a bucket.", show_default="measured, 2 s"),
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
    access: Access = field(default_factory=Access)
    as_json: Json = False

    @property
    def link_bytes_per_s(self) -> int | None:
        """The stated speed of the link; None if it has to be measured. Raises OptionError for what is no speed."""
        from zloader.common.checks import parse_size, require_count

        if self.link_speed is None:
            return None
        n_bytes = parse_size(self.link_speed.removesuffix("/s"))
        require_count(link_speed=n_bytes)
        return n_bytes

    @property
    def shown_urls(self) -> list[str]:
        """The stores as they are shown, without the query of a signed address."""
        from zloader.access.location import location_of

        return [location_of(url, None).url for url in self.urls]

    @property
    def settings(self) -> dict[str, Any]:
        """What was measured, by name."""
        sources = {"urls": self.shown_urls, "cache": self.cache, "join": self.join, "genes_by": self.genes_by}
        return {**sources, **self.loader_sizes.by_name, **self._form, "step_ms": self.step_ms}

    @property
    def _form(self) -> dict[str, Any]:
        obs = [column.strip() for column in self.obs.split(",") if column.strip()]
        return {"x": x_of(self.x), "obs": obs, "layout": self.layout, "dtype": self.dtype}

    def opened(self, cache: Path | None) -> Dataset:
        """The stores as one dataset, with or without a cache."""
        from zloader.dataset.dataset import open_dataset

        source: Any = self.urls[0] if len(self.urls) == 1 else self.urls
        named: Any = {"storage_options": self.access.storage_options, "join": self.join}
        return open_dataset(source, cache=cache, genes_by=genes_by_of(self.genes_by), **named)

    def loader(self, cache: Path | None, indices: Sequence[int] | None = None) -> Loader:
        """The loader to measure, with or without a mirror; or one of some rows."""
        from zloader.common.options import FetchOptions
        from zloader.order.shuffling import Streaming, stratified
        from zloader.training.loader import Loader

        sizes = self.loader_sizes.by_name
        block_size = sizes.pop("block_size")
        sampling = stratified(block_size) if indices is None else Streaming(indices=indices)
        options = FetchOptions(memory=self.memory)
        given: Any = {**sizes, **self._form}
        return Loader(self.opened(cache), sampling=sampling, options=options, rank=0, world_size=1, **given)


@dataclass(frozen=True, kw_only=True)
class BenchEpoch:
    """One epoch. `figures` are by name; `complete` is False if the epoch was interrupted."""

    epoch: int
    kind: str
    complete: bool
    figures: dict[str, float]
    timeline: Timeline = field(repr=False)


@dataclass(kw_only=True)
class BenchRun:
    """The epochs that were measured, and what is known of the machine and the link."""

    shape: tuple[int, int]
    settings: Mapping[str, Any]
    load: float
    epochs: list[BenchEpoch] = field(default_factory=list)
    link_bytes_per_s: float | None = None
    interrupted: bool = False

    @property
    def medians(self) -> dict[str, dict[str, float]]:
        """The median of each figure over the complete epochs of each kind, and the number of these epochs."""
        found = {}
        for kind in _KINDS:
            complete = [each.figures for each in self.epochs if each.complete and each.kind == kind]
            if complete:
                of_figures = {name: median(figures[name] for figures in complete) for name in complete[0]}
                found[kind] = {"epochs": float(len(complete)), **of_figures}
        return found

    @property
    def paces(self) -> dict[str, Pace]:
        """The speed of each kind of epoch: of the complete epoch of median time, or of an interrupted one.

        Medians of each figure would belong to different epochs, and their ratios to none.
        """
        found = {}
        names = [each.name for each in dataclasses.fields(Pace)]
        for kind in _KINDS:
            of_kind = [each for each in self.epochs if each.kind == kind]
            complete = sorted((e for e in of_kind if e.complete), key=lambda each: each.figures["elapsed_s"])
            if of_kind:
                chosen = complete[(len(complete) - 1) // 2] if complete else of_kind[0]
                measured: Any = {name: chosen.figures[name] for name in names if name in chosen.figures}
                known: Any = {"cores": available_cores(), "link_bytes_per_s": self.link_bytes_per_s}
                found[kind] = Pace(kind=kind, **known, **measured)
        return found

    @property
    def advice(self) -> dict[str, Advice]:
        """What bounds each kind of epoch."""
        return {kind: advise(pace) for kind, pace in self.paces.items()}

    @property
    def sentences(self) -> list[str]:
        """What bounds each kind of epoch, cold against warm ones, and what makes the figures doubtful."""
        said = [f"{kind.capitalize()} epochs: {advice.text}" for kind, advice in self.advice.items()]
        said += compare(self.paces)
        if self.interrupted:
            said.append(f"The run was interrupted after {len(self.epochs)} epochs.")
        if self.load > available_cores() / 2:
            said.append(f"The machine was busy before the first epoch, its load was {self.load:.1f}: measure again.")
        return said

    @property
    def table(self) -> Table:
        """The medians of each kind of epoch; of an interrupted one, its figures."""
        medians = self.medians
        columns = {f"{kind}, median of {each['epochs']:.0f}": each for kind, each in medians.items()}
        columns |= {f"{each.kind}, interrupted": each.figures for each in self.epochs if not each.complete}
        rows = [
            [label, *(shown(figures[name]) if name in figures else "" for figures in columns.values())]
            for name, (label, shown) in _FIGURES.items()
        ]
        return Table(["", *columns], rows)

    def document(self) -> dict[str, Any]:
        """All figures, for JSON."""
        epochs = [{name: value for name, value in vars(each).items() if name != "timeline"} for each in self.epochs]
        return {
            **self.settings,
            "rows": self.shape[0],
            "genes": self.shape[1],
            "epochs": epochs,
            "medians": self.medians,
            "link_bytes_per_s": self.link_bytes_per_s,
            "load": self.load,
            "interrupted": self.interrupted,
            "advice": {kind: dataclasses.asdict(advice) for kind, advice in self.advice.items()},
            "sentences": self.sentences,
        }

    def page(self) -> Page:
        """The same on a page."""
        shown = self.epochs[:_MOST_SHOWN]
        header = ["epoch", *(label for label, _ in map(_FIGURES.__getitem__, _IN_A_LINE))]
        rows = [[f"{e.epoch}, {e.kind}", *(_FIGURES[name][1](e.figures[name]) for name in _IN_A_LINE)] for e in shown]
        settings = {name: str(value) for name, value in self.settings.items() if value not in (None, [])}
        link = {} if self.link_bytes_per_s is None else {"link": f"{size(self.link_bytes_per_s)}/s"}
        return Page(
            title=f"zloader bench: {', '.join(self.settings['urls'])}",
            sentences=self.sentences,
            tables={"Kinds of epochs": self.table, "Epochs": Table(header, rows)},
            timelines=[each.timeline for each in shown],
            unit="rows",
            facts={"rows × genes": "{:,} × {:,}".format(*self.shape), **settings, **link, **output.machine()},
        )


_count, _share, _seconds = "{:,.0f}".format, "{:.0%}".format, "{:,.2f} s".format
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "rows_per_s": ("rows/s", _count),
    "elapsed_s": ("elapsed", _seconds),
    "first_minibatch_s": ("first minibatch after", _seconds),
    "wait_share": ("waiting", _share),
    "gets": ("GETs", _count),
    "bytes_read": ("read from the store", size),
    "most_in_flight_bytes": ("peak in flight", size),
    "mirror_share": ("chunks from the mirror", _share),
    "bytes_from_mirror": ("read from the mirror", size),
    "decode_s": ("decoding, all threads", _seconds),
    "gather_s": ("gathering, all threads", _seconds),
    "cpu_s": ("processor, all threads", _seconds),
    "retries": ("retries", _count),
}
_IN_A_LINE = ("rows_per_s", "elapsed_s", "first_minibatch_s", "wait_share", "gets", "bytes_read", "mirror_share")


@app.command(epilog=KEYS)
@takes_flags
def bench(flags: BenchFlags) -> None:
    """Measure epochs over a store, read as a training loop would read it, and say what bounds their speed.

    A cold epoch begins without a mirror or with an empty one, a warm epoch reads the mirror only, and a mixed epoch
    begins with a part of the mirror.
    """
    output.require_writable(flags.report)
    stated = flags.link_bytes_per_s
    console = output.console(stderr=flags.as_json)
    loader = flags.loader(flags.cache)
    shape = loader.dataset.shape
    console.print(f"{', '.join(flags.shown_urls)}: {shape[0]:,} rows x {shape[1]:,} genes")
    # Opened by itself, so that the first epoch finds nothing that was read or mirrored before it.
    for _ in flags.loader(None, [0]):
        pass
    run = BenchRun(shape=shape, settings=flags.settings, load=_load(), link_bytes_per_s=stated)
    try:
        _measure(flags, loader, run, console)
        if stated is None and any(pace.bytes_read for pace in run.paces.values()):
            run.link_bytes_per_s = _link(loader, console)
    except (KeyboardInterrupt, EndedError):
        run.interrupted = True
        if run.epochs:
            _show(console, run, flags)
        raise
    _show(console, run, flags)


def _show(console: Console, run: BenchRun, flags: BenchFlags) -> None:
    if flags.as_json:
        output.print_json(run.document())
    else:
        console.print(run.table)
        for sentence in run.sentences:
            console.print(sentence)
    if flags.report is not None:
        run.page().write(flags.report)
        console.print(f"report: {flags.report.absolute()}")
    if not run.interrupted and len(flags.urls) == 1:
        words = shlex.join(["--store", *flags.shown_urls, *flags.access.words])
        console.print(f"To compare other loaders, in a clone of the repository: python -m benchmarks.real {words}")


def _load() -> float:
    """The load average of the last minute; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return 0.0


def _measure(flags: BenchFlags, loader: Loader, run: BenchRun, console: Console) -> None:
    """Appends the epochs to `run`, the last one even if it is interrupted, and repeats cold and warm ones."""
    began = time.perf_counter()
    for _ in range(flags.epochs):
        run_epoch(loader, run.epochs, step_s=flags.step_ms / 1000, began=began)
        last = run.epochs[-1]
        figures = ", ".join(f"{_FIGURES[name][0]} {_FIGURES[name][1](last.figures[name])}" for name in _IN_A_LINE)
        console.print(f"epoch {last.epoch}, {last.kind}: {figures}")
    for kind in ("cold", "warm"):
        before = len(run.epochs)
        for _ in range(_MOST_REPEATS):
            took = [each.figures["elapsed_s"] for each in run.epochs if each.kind == kind]
            if not took or sum(took) >= _ENOUGH_S:
                break
            with _again(flags, loader, kind) as one:
                run_epoch(one, run.epochs, step_s=flags.step_ms / 1000, began=began)
        if len(run.epochs) > before:
            console.print(f"{kind} epochs are short, so {len(run.epochs) - before} more were measured")


@contextlib.contextmanager
def _again(flags: BenchFlags, loader: Loader, kind: str) -> Iterator[Loader]:
    """The loader, or for a cold epoch, one with a mirror that is empty and removed afterwards."""
    if kind == "warm" or flags.cache is None:
        yield loader
        return
    with tempfile.TemporaryDirectory(dir=flags.cache, prefix="bench-", ignore_cleanup_errors=True) as cache:
        yield flags.loader(Path(cache))


def _link(loader: Loader, console: Console) -> float | None:
    """The speed of the link; None for a local store, and if it cannot be measured."""
    from zloader.insight.link import link_bytes_per_s

    if all(store.read_from.scheme == "file" for store in loader.dataset.stores):
        return None
    try:
        with console.status("measuring the link"):
            return link_bytes_per_s(loader.dataset, x=loader.x or "X", options=loader.options)
    except (ZloaderError, OSError) as error:
        console.print(f"the link was not measured: {error}")
        return None


# ---- one epoch


def run_epoch(loader: Loader, measured: list[BenchEpoch], *, step_s: float = 0.0, began: float | None = None) -> None:
    """Reads the next epoch and appends it to `measured`, even if it is interrupted.

    `began` is when the first epoch began, on the clock of `time.perf_counter`. Raises ZloaderError if the epoch does
    not have every row exactly once.
    """
    from zloader.common.progress import progress_bars

    rows = row_sum = counted = 0
    first_minibatch_s = first_wait_s = stepped_s = 0.0
    complete = False
    mirrored_before, disk_before = _mirrored(loader), _disk_bytes()
    cpu_before, epoch_s = time.process_time(), time.perf_counter()
    moments = Timeline(epoch=len(measured), kind="")
    every = max(1, len(loader) // _MOMENTS)
    shift_s = epoch_s - (epoch_s if began is None else began)
    moments.add(shift_s, 0, 0.0)
    try:
        with progress_bars(shown=True, unit="rows") as bars:
            advance = bars.add(f"epoch {len(measured)}", loader.dataset.n_obs)
            for number, minibatch in enumerate(loader):
                if not number:
                    first_minibatch_s = time.perf_counter() - epoch_s
                    first_wait_s = loader.statistics().wait_s
                rows += len(minibatch)
                row_sum += int(minibatch.index.sum())
                if number % every == 0:
                    moments.add(shift_s + time.perf_counter() - epoch_s, rows, loader.statistics().wait_s)
                    advance(rows - counted)
                    counted = rows
                if step_s:
                    before = time.perf_counter()
                    time.sleep(step_s)
                    stepped_s += time.perf_counter() - before
        n = loader.dataset.n_obs
        _require_complete(rows=(rows, n), sum_of_row_numbers=(row_sum, n * (n - 1) // 2))
        complete = True
    finally:
        if rows:
            statistics = loader.statistics()
            moments.add(shift_s + time.perf_counter() - epoch_s, rows, statistics.wait_s)
            blocks = statistics.chunks_decoded + statistics.chunks_from_mirror
            figures = statistics.flat() | {
                "mirror_share": statistics.chunks_from_mirror / blocks if blocks else 0.0,
                "first_minibatch_s": first_minibatch_s,
                "first_wait_s": first_wait_s,
                "stepped_s": stepped_s,
                "cpu_s": time.process_time() - cpu_before,
                "mirrored_before": mirrored_before,
                "mirrored_after": _mirrored(loader),
            }
            if disk_before is not None:
                figures["disk_bytes"] = (_disk_bytes() or 0) - disk_before
            moments.kind = kind_of(figures)
            epoch = BenchEpoch(
                epoch=len(measured), kind=moments.kind, complete=complete, figures=figures, timeline=moments
            )
            measured.append(epoch)


def _mirrored(loader: Loader) -> float:
    """The share of the loader's matrices that is in the mirror, from 0 to 1."""
    names = [loader.x] if isinstance(loader.x, str) else loader.x or []
    with contextlib.suppress(OptionError):  # there is no cache
        return sum(loader.dataset.matrices.cache_statistics(name).share for name in names) / max(1, len(names))
    return 0.0


def _disk_bytes() -> int | None:
    """The bytes that this process has made the kernel read from disks so far; None if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counted["read_bytes"])
    return None


def _require_complete(**counts: tuple[int, int]) -> None:
    for name, (found, expected) in counts.items():
        if found != expected:
            raise ZloaderError(
                f"an epoch did not have every row exactly once: its {name.replace('_', ' ')} should be {expected:,}, "
                f"but came to {found:,}. This is a bug: please report it with the output of 'zloader verify'"
            )


def kind_of(figures: Mapping[str, float]) -> str:
    """`cold`, `mixed` or `warm`.

    An epoch that begins with an empty mirror is cold, although later fetches find chunks that earlier ones mirrored.
    """
    if not figures["chunks_from_mirror"]:
        return "cold"
    if not figures["chunks_decoded"]:
        return "warm"
    return "mixed" if figures["mirrored_before"] else "cold"
