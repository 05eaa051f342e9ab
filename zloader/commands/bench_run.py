"""The epochs of `zloader bench`: measured and sampled over time, their medians, and what they cost and show."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands.bench_advice import Advice, Pace, advise, compare
from zloader.common.errors import ZloaderError

if TYPE_CHECKING:
    from zloader.caching.rows_file import RowsFile
    from zloader.dataset.dataset import Dataset
    from zloader.insight.quality import Quality
    from zloader.training.epoch import Statistics
    from zloader.training.loader import Loader

KINDS = ("cold", "mixed", "warm")
_LITTLE_FROM_MEMORY = 0.05
_LEAST_DOLLARS = 0.0001
_HOURS_PER_MONTH = 730
_price_option = functools.partial(typer.Option, rich_help_panel="Prices in dollars")
_MOST_SAMPLES = 256  # of an epoch
_FIRST_INTERVAL_S = 0.01
_PAUSES = 50  # pauses are this many times as long as a sample takes, so that sampling takes 2 % of the time


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in dollars. The defaults are for reading S3 within its region, a local disk, and a rented H100."""

    gpu_hour: Annotated[float, _price_option(help="A GPU for an hour.")] = 3.0
    thousand_gets: Annotated[float, _price_option(help="1000 GETs.")] = 0.0004
    gigabyte_egress: Annotated[float, _price_option(help="A GB read; 0 within a region.")] = 0.0
    nvme_gigabyte_month: Annotated[float, _price_option(help="A GB of local disk for a month.")] = 0.08


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An epoch at one moment, in totals since its beginning. `mirrored` is the share of chunks in the mirror."""

    at_s: float
    rows: int
    bytes_read: int
    wait_s: float
    mirrored: float


@dataclass(frozen=True, kw_only=True)
class BenchEpoch:
    """One epoch. `figures` are by name, from `figures_of`. `complete` is False if the epoch was interrupted.

    `began_s` is in seconds since the first epoch began.
    """

    epoch: int
    kind: str
    complete: bool
    figures: Mapping[str, float]
    began_s: float = 0.0
    samples: Sequence[Sample] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class BenchQuality:
    """How well the order of epoch 0 mixes the obs column `label`."""

    label: str
    measured: Quality


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """The results of `zloader bench`.

    `settings` are the options by name, as in the JSON. Epochs are appended as they end. `link_bytes_per_s` is the speed
    of the link, or of the disk of a local store; None if it was neither stated nor measured. Reads of a local store
    cost nothing. `load` is the load average of the machine before the first epoch.
    """

    urls: Sequence[str]
    rows: int
    genes: int
    local: bool
    cache: Path | None
    batch_size: int
    step_s: float
    cores: int
    load: float
    settings: Mapping[str, Any]
    prices: Prices
    epochs: list[BenchEpoch]
    link_bytes_per_s: float | None = None
    link_stated: bool = False
    quality: BenchQuality | None = None
    interrupted: bool = False

    def of_kind(self, kind: str) -> Mapping[str, float] | None:
        """The figures of one epoch of a kind: the complete one with the median time, or an interrupted one.

        None without any. Medians of each figure would belong to different epochs, and their ratios to none.
        """
        of_kind = [epoch for epoch in self.epochs if epoch.kind == kind]
        complete = sorted((e for e in of_kind if e.complete), key=lambda epoch: epoch.figures["elapsed_s"])
        if complete:
            return complete[(len(complete) - 1) // 2].figures
        return of_kind[0].figures if of_kind else None

    def pace(self, kind: str) -> Pace | None:
        """What is known of the speed of the epochs of a kind."""
        figures = self.of_kind(kind)
        if figures is None:
            return None
        names = [field.name for field in dataclasses.fields(Pace)]
        measured: dict[str, Any] = {name: figures[name] for name in names if name in figures}
        return Pace(
            **measured,
            kind=kind,
            step_s=self.step_s,
            cores=self.cores,
            local=self.local,
            cached=self.cache is not None,
            link_bytes_per_s=self.link_bytes_per_s,
            link_stated=self.link_stated,
        )

    @property
    def paces(self) -> Mapping[str, Pace]:
        """The pace of each kind of epoch that there was."""
        found = {kind: self.pace(kind) for kind in KINDS}
        return {kind: pace for kind, pace in found.items() if pace is not None}

    @property
    def advice(self) -> Mapping[str, Advice]:
        """What bounds each kind of epoch."""
        return {kind: advise(pace) for kind, pace in self.paces.items()}

    @property
    def sentences(self) -> Sequence[str]:
        """All advice in plain words."""
        of_kinds = [f"{kind.capitalize()} epochs: {advice.text}" for kind, advice in self.advice.items()]
        return [*of_kinds, *compare(self.paces)]

    @property
    def caveats(self) -> Sequence[str]:
        """What makes the figures doubtful."""
        found = []
        last = self.epochs[-1]
        if self.interrupted or not last.complete:
            found.append(f"The run was interrupted {'after' if last.complete else 'in'} epoch {last.epoch}.")
        if self.load > self.cores / 2:
            found.append(
                f"The machine was busy in the minute before the first epoch: its load was {self.load:.1f} with "
                f"{self.cores} cores. If another program went on running, every figure is worse than it could be."
            )
        reading = [pace for pace in self.paces.values() if pace.bytes_read]
        if self.local and reading:
            found += _from_memory(reading[0])
        return found

    def dollars(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Dollars of an epoch by item. A GPU is counted if there was a training step."""
        prices, hours = self.prices, figures["elapsed_s"] / 3600
        return {
            "GPUs": prices.gpu_hour * hours if self.step_s else 0.0,
            "GETs": 0.0 if self.local else figures["gets"] / 1000 * prices.thousand_gets,
            "egress": 0.0 if self.local else figures["bytes_read"] / 1e9 * prices.gigabyte_egress,
            "NVMe": figures["mirror_bytes"] / 1e9 * prices.nvme_gigabyte_month * hours / _HOURS_PER_MONTH,
        }


def _from_memory(pace: Pace) -> list[str]:
    kept = "The store is local, and the system keeps files that were used lately in memory."
    if pace.disk_bytes is None:
        return [f"{kept} So {pace.kind} epochs may be faster than the disk."]
    if pace.from_memory < _LITTLE_FROM_MEMORY:
        return []
    share = f"{pace.from_memory:.0%} of what the {pace.kind} epoch read was there."
    if pace.link_bytes_per_s is None:
        return [f"{kept} {share}"]
    most = pace.rows * pace.link_bytes_per_s / pace.bytes_read
    return [f"{kept} {share} If all of it came from the disk, {most:,.0f} rows/s would be the most."]


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


def dollars(amount: float) -> str:
    """Formats dollars.

    >>> dollars(0), dollars(0.000003), dollars(0.0123), dollars(1234.5)
    ('$0', 'under $0.0001', '$0.0123', '$1,234.50')
    """
    if not amount:
        return "$0"
    if amount < _LEAST_DOLLARS:
        return f"under ${_LEAST_DOLLARS}"
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.4f}"


def python_of(run: BenchRun, storage_options: Mapping[str, Any]) -> str:
    """How to make the loader that was measured, in Python."""
    from zloader.order.shuffling import stratified
    from zloader.training.loader import Loader

    given = run.settings
    url = run.urls[0] if len(run.urls) == 1 else list(run.urls)
    opening = {"cache": None if run.cache is None else str(run.cache), "join": given["join"]}
    words = [repr(url), *(f"{name}={value!r}" for name, value in opening.items() if value is not None)]
    named = [_names_of_genes(each) for each in given["genes_by"] or ()]
    if named:
        words.append(f"genes_by={named[0]}" if len(named) == 1 else f"genes_by=[{', '.join(named)}]")
    words += [f"storage_options={dict(storage_options)!r}"] if storage_options else []
    loading = {"batch_size": run.batch_size, "fetch_factor": given["fetch_factor"]}
    options = [f"{name}={value!r}" for name, value in loading.items()]
    options.append(f"sampling=zl.{stratified(given['block_size'])!r}")
    for name, default in (("x", Loader.x), ("obs", []), ("layout", Loader.layout), ("dtype", "float32")):
        if given[name] not in (default, None):
            options.append(f"{name}={given[name]!r}")
    imports = "import pandas as pd\n" if any("pd." in each for each in named) else ""
    return (
        f"{imports}import zloader as zl\n\n"
        f"dataset = zl.open_dataset({', '.join(words)})\n"
        f"loader = zl.Loader(dataset, {', '.join(options)})"
    )


def _names_of_genes(given: str) -> str:
    """The genes_by in Python for a --genes-by."""
    separator = {".csv": ",", ".tsv": "\t"}.get(Path(given).suffix.lower())
    if separator is None:
        return repr(None if given == "none" else given)
    return f"pd.read_csv({given!r}, sep={separator!r}, header=None, index_col=0)[1]"


def commands_of(run: BenchRun, flags: Sequence[str]) -> Mapping[str, str]:
    """Commands that work where this one did."""
    bench = ["zloader", "bench", *run.urls, *flags]
    written = ["--report", "zloader-bench.html"]
    with_cache = bench if run.cache is None else [*bench, "--cache", str(run.cache)]
    mirrored = shlex.join([*bench, "--cache", "zloader-cache", *written])
    first = {"Measure epochs that read from a mirror on this machine.": mirrored} if run.cache is None else {}
    return first | {
        "Measure with the time that your own training step takes, here 20 ms.": shlex.join(
            [*with_cache, "--step-ms", "20", *written]
        ),
    }


# ---- one epoch


class _Mirrored:
    """How much of a loader's matrices is in the mirrors of its dataset."""

    def __init__(self, loader: Loader) -> None:
        self._arrays = list(_mirror_arrays(loader.dataset, [loader.x] if isinstance(loader.x, str) else loader.x or []))

    @property
    def share(self) -> float:
        """The share of the blocks, from 0 to 1; 0 without a mirror."""
        held = [array.held for array in self._arrays]
        chunks = sum(each.chunks for each in held)
        return sum(each.chunks_held for each in held) / chunks if chunks else 0.0

    @property
    def n_bytes(self) -> int:
        """The bytes of these blocks."""
        return sum(array.held.bytes_held for array in self._arrays)


def _mirror_arrays(dataset: Dataset, names: Sequence[str]) -> Sequence[RowsFile]:
    if dataset.cache is None:
        return []
    mirrors = [mirror for name in names for mirror in dataset.matrices.mirrors(name)]
    return [mirror.rows for mirror in mirrors if mirror is not None]


class _Samples:
    """Samples of an epoch, evenly over its time and few, however long it takes."""

    def __init__(self, sample: Callable[[float], Sample]) -> None:
        self.taken: list[Sample] = []
        self._sample = sample
        self._began = time.perf_counter()
        self._interval_s = _FIRST_INTERVAL_S
        self._next_s = 0.0

    def offer(self) -> None:
        """Takes a sample if the last one was long enough ago."""
        now_s = time.perf_counter() - self._began
        if now_s >= self._next_s:
            self.take()

    def take(self) -> None:
        """Takes a sample now."""
        now_s = time.perf_counter() - self._began
        self.taken.append(self._sample(now_s))
        if len(self.taken) >= _MOST_SAMPLES:
            self.taken = self.taken[1::2]
            self._interval_s *= 2
        after_s = time.perf_counter() - self._began
        self._next_s = after_s + max(self._interval_s, _PAUSES * (after_s - now_s))


def run_epoch(loader: Loader, measured: list[BenchEpoch], *, step_s: float = 0.0, began: float = 0.0) -> None:
    """Reads the next epoch and appends its figures to `measured`, even if the epoch is interrupted.

    `began` is when the first epoch began, on the clock of `time.perf_counter`; 0 for this one. Raises ZloaderError if
    the epoch does not have every row exactly once.
    """
    from zloader.insight.usage import cpu_s, disk_bytes, processor_s

    rows = minibatches = row_sum = 0
    first_minibatch_s = first_wait_s = stepped_s = 0.0
    complete = False
    mirrored = _Mirrored(loader)
    mirrored_before = mirrored.share
    disk_before, machine_before = disk_bytes(), processor_s()
    cpu_before, loop_before, epoch_s = cpu_s(), time.thread_time(), time.perf_counter()
    samples = _Samples(lambda at_s: _sample(loader.statistics(), at_s, mirrored.share))
    try:
        for minibatch in loader:
            if not minibatches:
                first_minibatch_s = time.perf_counter() - epoch_s
                first_wait_s = loader.statistics().wait_s
            minibatches += 1
            rows += len(minibatch)
            row_sum += int(minibatch.index.sum())
            samples.offer()
            if step_s:
                before = time.perf_counter()
                time.sleep(step_s)
                stepped_s += time.perf_counter() - before
        n = loader.dataset.n_obs
        _require_complete(
            minibatches=(minibatches, len(loader)), rows=(rows, n), sum_of_row_numbers=(row_sum, n * (n - 1) // 2)
        )
        complete = True
    finally:
        if minibatches:
            samples.take()
            figures = {name: value for name, value in figures_of(loader.statistics()).items() if name != "epoch"} | {
                "first_minibatch_s": first_minibatch_s,
                "first_wait_s": first_wait_s,
                "stepped_s": stepped_s,
                "cpu_s": cpu_s() - cpu_before,
                "loop_cpu_s": time.thread_time() - loop_before,
                "mirrored_before": mirrored_before,
                "mirrored_after": mirrored.share,
                "mirror_bytes": mirrored.n_bytes,
            }
            disk_after, machine_after = disk_bytes(), processor_s()
            if disk_before is not None and disk_after is not None:
                figures["disk_bytes"] = disk_after - disk_before
            if machine_before is not None and machine_after is not None:
                busy_s, all_s = (after - before for before, after in zip(machine_before, machine_after, strict=True))
                figures["machine_busy"] = busy_s / all_s if all_s else 0.0
            measured.append(
                BenchEpoch(
                    epoch=len(measured),
                    kind=kind_of(figures),
                    complete=complete,
                    figures=figures,
                    began_s=epoch_s - began if began else 0.0,
                    samples=samples.taken,
                )
            )


def _sample(statistics: Statistics, at_s: float, mirrored: float) -> Sample:
    return Sample(
        at_s=at_s,
        rows=statistics.rows,
        bytes_read=statistics.bytes_read,
        wait_s=statistics.wait_s,
        mirrored=mirrored,
    )


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


def kind_of(figures: Mapping[str, float]) -> str:
    """`cold`, `mixed` or `warm`.

    An epoch that begins with an empty mirror is cold, although later fetches find chunks that earlier ones mirrored.
    """
    if not figures["chunks_from_mirror"]:
        return "cold"
    if not figures["chunks_decoded"]:
        return "warm"
    return "mixed" if figures["mirrored_before"] else "cold"
