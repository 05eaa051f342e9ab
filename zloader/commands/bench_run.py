"""Measures epochs for `zloader bench`: the figures of each, samples of it over time, and the speed of link or disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from zloader.commands import terminal
from zloader.commands.bench_results import BenchEpoch, BenchRun, Sample
from zloader.common.errors import ZloaderError
from zloader.common.machine import cpu_s, disk_bytes, processor_s

if TYPE_CHECKING:
    from rich.console import Console

    from zloader.caching.chunk_file import ChunkFile
    from zloader.common.records import Statistics
    from zloader.dataset.dataset import Dataset
    from zloader.training.loader import Loader

_MOST_SAMPLES = 256  # of an epoch
_FIRST_INTERVAL_S = 0.01
_PAUSES = 50  # pauses are this many times as long as a sample takes, so that sampling takes 2 % of the time


def measure(loader: Loader, run: BenchRun, console: Console, epochs: int) -> None:
    """Appends the epochs to `run`, the last one even if it is interrupted."""
    measured, began = run.epochs, time.perf_counter()
    with terminal.bench_view(console, run.rows, lambda: figures_of(loader.statistics())):
        for _ in range(epochs):
            run_epoch(loader, measured, step_s=run.step_s, began=began)
            console.print(_line(measured[-1]))


def with_link(loader: Loader, run: BenchRun, console: Console) -> BenchRun:
    """Measures the link, or the disk of a local store, if an epoch that was long enough to be judged read from it."""
    from zloader.insight.link import disk_bytes_per_s, link_bytes_per_s

    read = any(pace.bytes_read and run.advice[kind].bound != "short" for kind, pace in run.paces.items())
    if run.link_stated or not read:
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
    return f"epoch {epoch.epoch}, {epoch.kind}{interrupted}: {terminal.one_line(epoch.figures)}"


# ---- one epoch


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
    if dataset.cache is None:
        return []
    mirrors = [mirror for name in names for mirror in dataset.matrices.mirrors(name)]
    return [file for mirror in mirrors if mirror is not None for file in mirror.files]


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
            figures = figures_of(loader.statistics()) | {
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
                    epoch=int(figures.pop("epoch")),
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
