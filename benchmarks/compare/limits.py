"""The limits of the machine, measured in the same run as the loaders: memory, decoding, disk and link."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import zloader as zl
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.decoding import chunk_bytes, decode_seconds
from benchmarks.harness.measuring import Figures, program, stored_bytes
from benchmarks.questions import link

_PIECE = 1 << 22
_MEMORY_BYTES = 256 << 20
_DISK_BYTES = 1 << 30
_LINK_BYTES = 256 << 20
_TURNS = 3
_CSR_BYTES = 8  # of a value in a minibatch: an int32 index and a float32


def limits(store: Path, speed: LinkSpeed, *, work: Path, link_bytes: int = _LINK_BYTES) -> list[Figures]:
    """The records of all limits, in rows of `store`, a store of zloader."""
    dataset = zl.open_dataset(store)
    values = sum(int(array.n_elements) for array in dataset.store.matrix("X").arrays) / 2
    on_disk = stored_bytes(store)
    rows = dataset.n_obs
    found = [_limit("memcpy", memory_bytes_per_s(), rows, _CSR_BYTES * values)]
    seconds = _typical(lambda: decoding_s(dataset, store))
    found.append(_limit("decoding", on_disk / seconds, rows, on_disk))
    found.append(_limit("disk", disk_bytes_per_s(store), rows, on_disk))
    found.append(_limit("link", link_bytes_per_s(speed, work, link_bytes), rows, on_disk))
    return found


def _limit(name: str, bytes_per_s: float, rows: int, n_bytes: float) -> Figures:
    return {"record": "limit", "name": name, "bytes_per_s": bytes_per_s, "rows_per_s": bytes_per_s * rows / n_bytes}


def _typical(measured: Callable[[], float]) -> float:
    return median(measured() for _ in range(_TURNS))


def memory_bytes_per_s() -> float:
    """Bytes copied per second by as many threads as there are cores, in memory that has been touched."""
    cores = len(os.sched_getaffinity(0))
    n_bytes = _MEMORY_BYTES // cores
    pairs = [(np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as threads:

        def copy() -> float:
            began = time.perf_counter()
            list(threads.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            return time.perf_counter() - began

        copy()
        return cores * n_bytes / _typical(copy)


def decoding_s(dataset: zl.Dataset, store: Path) -> float:
    """Seconds for decoding every chunk of the store once, from memory, with the threads of a loader."""
    loader = zl.Loader(dataset, shuffle=False)
    stored = {layout.path: chunk_bytes(store, layout) for layout in dataset.store.matrix("X").arrays}
    return decode_seconds(loader, stored)


def disk_bytes_per_s(store: Path) -> float:
    """Bytes per second of the store's files, dropped from the page cache and read by four threads, 4 MiB at a time.

    Files of 1 GiB in all are enough.
    """
    files, n_bytes = [], 0
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.stat().st_size and n_bytes < _DISK_BYTES:
            files.append(path)
            n_bytes += path.stat().st_size

    def read(path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            return sum(iter(lambda: len(file.read(_PIECE)), 0))

    def read_all() -> float:
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(read, files)) == n_bytes
        return time.perf_counter() - began

    return n_bytes / _typical(read_all)


def link_bytes_per_s(speed: LinkSpeed, work: Path, n_bytes: int) -> float:
    """Bytes per second through the simulated cloud: ranges of 8 MiB over 16 connections, whose bodies are discarded."""
    with tempfile.TemporaryDirectory(dir=work) as directory:
        path = Path(directory, "bucket", "object")
        path.parent.mkdir()
        link.write_object(path)
        command = program("harness.s3", "--root", directory, "--mapped", *speed.arguments())
        with link.running(command) as (pid, address):
            return 1e6 * float(link.measure(pid, address, (16, 8 << 20), n_bytes)["mb_per_s"])
