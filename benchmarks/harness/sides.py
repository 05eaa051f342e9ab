"""The processes that read a store in the benchmarks, the store's location, and the turns that they take."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.harness import measuring
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.measuring import Figures, program

_ENDING_S = 20.0  # a reader that has not ended so long after its standard input is killed
RIVALS = ("annbatch", "annbatch, memory kept")
# glibc then keeps freed memory, as zloader's own setting does (zloader.common.machine). That one would not be enough
# for annbatch, whose arrays of 100 MB are above the highest threshold that it can set.
KEPT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}


@dataclass(frozen=True, kw_only=True)
class StoreLocation:
    """Where a store is read from: a path, or a simulated S3 of its own."""

    store: Path
    url: str
    cloud: Cloud | None = None

    def options(self) -> Figures:
        """The options of a reader for this location."""
        return {"store": self.url} | ({"storage_options": self.cloud.storage_options()} if self.cloud else {})

    def files(self) -> list[Path]:
        """The files of the store, or the file that it is."""
        return [path for path in (self.store, *self.store.rglob("*")) if path.is_file()]

    def counted(self, epoch: Callable[[], Figures]) -> Figures:
        """Runs an epoch with the store in the page cache. Adds the server's counts and CPU seconds to its figures."""
        for path in self.files():
            measuring.read_through(path)
        return self.served(epoch)

    def uncached(self, epoch: Callable[[], Figures]) -> Figures:
        """Runs an epoch with the store dropped from the page cache, but for the pages that a process has mapped."""
        for path in self.files():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self.served(epoch)

    def served(self, epoch: Callable[[], Figures]) -> Figures:
        """Runs an epoch. Adds the counts and CPU seconds of the server, if there is one, to its figures."""
        if not self.cloud:
            return epoch()
        before = self.cloud.reset()
        figures = epoch()
        after = self.cloud.stats()
        return {
            **figures,
            "requests": after["requests"],
            "served_bytes": after["bytes_out"],
            "most_at_once": after["peak_active"],
            "server_s": sum(after[key] - before[key] for key in ("user_s", "system_s")),
        }


@dataclass(frozen=True, kw_only=True)
class StoreElsewhere(StoreLocation):
    """A store that is only read, where it lies: in a bucket, or at a path of this machine, which is then `store`.

    Nothing reads it beforehand. In a bucket, the bytes of an epoch are all that this machine received meanwhile.
    """

    store: Path | None = None
    storage_options: Mapping[str, Any] | None = None

    def options(self) -> Figures:
        """The options of a reader for this location."""
        return {"store": self.url} | ({} if self.store else {"storage_options": dict(self.storage_options or {})})

    def files(self) -> list[Path]:
        """The files of a local store."""
        return super().files() if self.store else []

    def counted(self, epoch: Callable[[], Figures]) -> Figures:
        """Runs an epoch with the page cache as it is."""
        return self.served(epoch)

    def served(self, epoch: Callable[[], Figures]) -> Figures:
        """Runs an epoch. Adds the bytes that were received, and the GETs if the side counts its own."""
        before = received_bytes()
        figures = epoch()
        counts = {"requests": figures.get("gets"), "served_bytes": received_bytes() - before}
        return figures if self.store else {**figures, **counts}


def received_bytes() -> int:
    """The bytes that all network interfaces of this machine have received so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


@contextlib.contextmanager
def store_location(store: Path, speed: LinkSpeed | None) -> Iterator[StoreLocation]:
    """Yields the location of a store, and serves it at `speed` if that is given. Its folder is the bucket."""
    store = store.absolute()
    if speed is None:
        yield StoreLocation(store=store, url=str(store))
        return
    with cloud(store.parent.parent, speed) as running:
        yield StoreLocation(store=store, url=f"s3://{store.parent.name}/{store.name}", cloud=running)


class ReaderFailed(SystemExit):
    """A reader ended or took too long. A script that does not catch it ends with the message."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A process of readers.py that reads one store. One that has not answered after `deadline_s` is killed."""

    location: StoreLocation
    process: subprocess.Popen[str]
    errors: Path
    deadline_s: float | None = None

    def epoch(self, **request: Any) -> Figures:
        """Runs one epoch with the store in the page cache."""
        return self.location.counted(lambda: self.ask(**request))

    def ask(self, **request: Any) -> Figures:
        """Runs one epoch with the page cache as it is. Raises ReaderFailed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        # the last answer was read in full, so nothing can be in the buffer of the text file
        if self.deadline_s and not select.select([self.process.stdout], [], [], self.deadline_s)[0]:
            self.kill()
            raise ReaderFailed(f"the reader of {self.location.url} did not answer for {self.deadline_s:g} s")
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()  # the last lines of stderr give the reason
            reason = measuring.last_lines(self.errors.read_text(), 4000)
            raise ReaderFailed(f"the reader of {self.location.url} failed:\n{reason}")
        return dict(json.loads(answer))

    def kill(self) -> None:
        """Kills the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def reader(
    name: str,
    python: str | Path,
    source: StoreLocation,
    options: Figures,
    work: Path,
    *,
    deadline_s: float | None = None,
) -> Iterator[Reader]:
    """Starts a reader, and ends it and its worker processes with the context.

    The first part of `name` is the tool. glibc keeps freed memory if "kept" is in the name.
    """
    kind = name.split(",")[0]
    trust = source.cloud.trust() if source.cloud else {}
    env = measuring.importing(**(KEPT if "kept" in name else {}), **trust)
    command = program("harness.readers", kind, json.dumps({**source.options(), **options}), python=python)
    with tempfile.NamedTemporaryFile("a", prefix=kind, suffix=".txt", dir=work, delete=False) as stderr:
        errors = Path(stderr.name)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=work,
            env=env,
            start_new_session=True,
        )
    with process:
        one = Reader(location=source, process=process, errors=errors, deadline_s=deadline_s)
        try:
            yield one
        finally:
            try:
                with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                    process.stdin.close()  # it ends by itself, and removes what it shares with its workers
                    process.wait(_ENDING_S)
            finally:  # also if Ctrl-C ends the waiting
                one.kill()
                errors.unlink()


def filling_epoch(reader: Reader, work: Path, **request: Any) -> Figures:
    """Runs an epoch into an empty mirror, and deletes the mirror afterwards."""
    mirror = work / "mirror"
    try:
        return reader.epoch(mirror=str(mirror), **request)
    finally:
        shutil.rmtree(mirror, ignore_errors=True)


def in_turns(
    sides: Mapping[str, Callable[[], Figures]], epochs: int, *, rows: int | None, label: str
) -> dict[str, list[Figures]]:
    """Runs the epochs of all sides in turns, every other turn in reverse order. The first epoch is discarded.

    `rows` is the required number of rows per epoch, None if it differs between sides.
    """
    for side in sides.values():
        side()
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(epochs):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            figures = sides[name]()
            assert rows in (None, figures.get("rows", rows)), f"{name} returned {figures['rows']} of {rows} rows"
            runs[name].append(figures)
        seconds = ", ".join(f"{name} {runs[name][-1]['seconds']:.2f} s" for name in sides)
        print(f"{label}, turn {turn + 1}: {seconds}", file=sys.stderr)
    return runs


def rows_per_s(run: Figures) -> float:
    """Rows/s."""
    return float(run["rows"] / run["seconds"])


def speedups(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[float]:
    """The ratio of the speeds in each turn."""
    return [rows_per_s(a) / rows_per_s(b) for a, b in zip(ours, theirs, strict=True)]


def median_and_range(values: Sequence[float], form: str) -> list[str]:
    """Two cells: the median and the range."""
    return [form.format(statistics.median(values)), f"({form.format(min(values))} to {form.format(max(values))})"]


def rows_and_column(store: Path) -> tuple[int, str]:
    """The number of rows, and the first obs column, which all sides load."""
    dataset = zl.open_dataset(store)
    return dataset.n_obs, dataset.obs_columns[0]
