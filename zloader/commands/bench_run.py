"""Measures epochs for `zloader bench`: the figures of each, and samples of it over time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zloader.commands.bench_advice import Advice, Pace, advise, compare
from zloader.commands.bill_run import Prices
from zloader.common.errors import ZloaderError

if TYPE_CHECKING:
    from zloader.caching.chunk_file import ChunkFile
    from zloader.common.records import Statistics
    from zloader.dataset.dataset import Dataset
    from zloader.dataset.quality import Quality
    from zloader.training.loader import Loader

KINDS = ("cold", "mixed", "warm")
_MOST_SAMPLES = 256  # of an epoch
_FIRST_INTERVAL_S = 0.01
_PAUSES = 50  # pauses are this many times as long as a sample takes, so that sampling takes 2 % of the time


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

    @property
    def percent(self) -> float:
        """The entropy in percent of that of random minibatches; 100 if all labels are alike."""
        random = self.measured.random_entropy_bits
        return 100 * self.measured.entropy_bits / random if random > 0 else 100.0


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """The results of `zloader bench`.

    `settings` are the options by name, as in the JSON. `link_bytes_per_s` is None if it was neither stated nor
    measured. Reads of a local store cost nothing. Epochs are appended as they end. `load` is the load average of the machine before the first epoch.
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

    def of_kind(self, kind: str) -> Mapping[str, float] | None:
        """The medians of the complete epochs of a kind, or the figures of an interrupted one; None without any."""
        complete = medians(self.epochs).get(kind)
        if complete is not None:
            return complete
        return next((epoch.figures for epoch in self.epochs if epoch.kind == kind), None)

    def pace(self, kind: str) -> Pace | None:
        """What is known of the speed of the epochs of a kind."""
        figures = self.of_kind(kind)
        if figures is None:
            return None
        names = [field.name for field in dataclasses.fields(Pace)]
        return Pace(
            **{name: figures[name] for name in names if name in figures},
            kind=kind,
            step_s=self.step_s,
            cores=self.cores,
            local=self.local,
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
        if {advice.bound for advice in self.advice.values()} == {"short"}:
            of_kinds = [
                f"This store is too small to measure: {self.rows:,} rows are loaded in less than a second or two, and "
                "most of that is start-up. The figures below are no speeds that a larger store would have."
            ]
        return [*of_kinds, *compare(self.paces)]

    def dollars(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Dollars of an epoch by item. A GPU is counted if there was a training step."""
        return self.prices.dollars(
            gets=0 if self.local else figures["gets"],
            gigabytes=0 if self.local else figures["bytes_read"] / 1e9,
            mirrored_gigabytes=figures["mirror_bytes"] / 1e9,
            hours=figures["elapsed_s"] / 3600,
            gpus=1 if self.step_s else 0,
        )


# ---- measuring


class _Mirrored:
    """How much of a loader's matrices is in the mirrors of its dataset."""

    def __init__(self, loader: Loader) -> None:
        self._arrays = list(_mirror_arrays(loader.dataset, [loader.x] if isinstance(loader.x, str) else loader.x or []))

    @property
    def share(self) -> float:
        """The share of the chunks, from 0 to 1; 0 without a mirror."""
        chunks = sum(array.layout.n_chunks for array in self._arrays)
        return sum(array.n_present for array in self._arrays) / chunks if chunks else 0.0

    @property
    def n_bytes(self) -> int:
        """The decoded bytes of these chunks."""
        return sum(array.present_bytes for array in self._arrays)


def _mirror_arrays(dataset: Dataset, names: Sequence[str]) -> Sequence[ChunkFile]:
    arrays: list[ChunkFile] = []
    for store in dataset.stores if dataset.cache is not None else ():
        for name in names:
            mirror = store.mirror(store.matrix(name))
            arrays += [] if mirror is None else mirror.arrays.values()
    return arrays


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
    rows = minibatches = row_sum = 0
    first_minibatch_s = first_wait_s = 0.0
    complete = False
    mirrored = _Mirrored(loader)
    mirrored_before = mirrored.share
    clocks = time.perf_counter(), time.process_time(), time.thread_time()
    samples = _Samples(lambda at_s: _sample(loader.statistics(), at_s, mirrored.share))
    try:
        for minibatch in loader:
            if not minibatches:
                first_minibatch_s = time.perf_counter() - clocks[0]
                first_wait_s = loader.statistics().wait_s
            minibatches += 1
            rows += len(minibatch)
            row_sum += int(minibatch.index.sum())
            samples.offer()
            if step_s:
                time.sleep(step_s)
        n = loader.dataset.n_obs
        _require_complete(
            minibatches=(minibatches, len(loader)), rows=(rows, n), sum_of_row_numbers=(row_sum, n * (n - 1) // 2)
        )
        complete = True
    finally:
        if minibatches:
            samples.take()
            figures = figures_of(loader.statistics()) | {
                "first_minibatch_s": first_minibatch_s,
                "first_wait_s": first_wait_s,
                "cpu_s": time.process_time() - clocks[1],
                "loop_cpu_s": time.thread_time() - clocks[2],
                "mirrored_before": mirrored_before,
                "mirrored_after": mirrored.share,
                "mirror_bytes": mirrored.n_bytes,
            }
            measured.append(
                BenchEpoch(
                    epoch=int(figures.pop("epoch")),
                    kind=kind_of(figures),
                    complete=complete,
                    figures=figures,
                    began_s=clocks[0] - began if began else 0.0,
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
