"""A store that others have written, before the tools of benchmarks/real.py run: its contents, its speed, its costs."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.compare.inputs import Data
from benchmarks.compare.limits import disk_bytes_per_s
from benchmarks.harness.measuring import in_new_process
from benchmarks.harness.sides import StoreElsewhere
from zloader.access.scheme import access_errors
from zloader.common.errors import FormatError
from zloader.common.options import FetchOptions
from zloader.insight.cost import EpochCosts, epoch_costs
from zloader.insight.link import link_bytes_per_s
from zloader.insight.summary import summarize

BLOCK = 64  # cells that are read together
FETCH_ROWS = 16_384
FREE_SHARE = 0.5  # of the disk, for a mirror
H5AD = (".h5ad", ".h5")
_TRIAL_S = 4.0
_READ_SHARE = 0.05  # of the time: zloader reads a store in less if another library is to sum its values
_WINDOW = 1 << 22  # values read at a time


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What is known of the store before the tools run. `rows_per_s` is that of zloader without a mirror."""

    dataset: zl.Dataset
    data: Data
    stored_bytes: int
    mirror_bytes: int
    bytes_per_s: float | None
    rows_per_s: float

    def costs(self, fetch_rows: int) -> EpochCosts:
        """The GETs and bytes of an epoch of all cells, in fetches of so many rows."""
        loader = loader_of(self.dataset, fetch_rows)
        return epoch_costs(self.dataset, loader.plan(0))

    def sample(self, seconds: float, free_bytes: int) -> int:
        """The cells that zloader reads in so many seconds, and whose mirror fits: whole blocks, or all cells."""
        fits = FREE_SHARE * free_bytes * self.data.rows / max(1, self.mirror_bytes)
        rows = int(min(seconds * self.rows_per_s, fits))
        return self.data.rows if rows >= self.data.rows else rows // BLOCK * BLOCK


def opened(where: StoreElsewhere, seconds: float) -> Opened:
    """Opens the store, and measures the link or the disk and a trial. Raises ZloaderError."""
    dataset = zl.open_dataset(where.url, storage_options=where.storage_options)
    contents = summarize(dataset)
    matrix = next((each for each in contents.matrices if each.name == "X"), None)
    labels = [column.name for column in contents.obs if column.kind == "categorical"]
    if matrix is None or matrix.problem:
        raise FormatError(f"{where.url}: {matrix.problem if matrix else 'it has no X'}")
    if not labels:
        raise FormatError(f"{where.url}: obs has no categorical column, which all tools load beside X")
    rows_per_s = trial(dataset)
    total = None
    if dataset.n_obs / rows_per_s < _READ_SHARE * seconds:
        total = in_new_process(total_of, where.url, where.storage_options or {})
    figures = {"rows": dataset.n_obs, "genes": dataset.n_vars, "values": matrix.values, "total": total}
    return Opened(
        dataset=dataset,
        data=Data(name=name_of(where.url), path=Path(where.url), label=labels[0], **figures),
        stored_bytes=sum(array.stored_bytes for array in matrix.arrays),
        mirror_bytes=matrix.decoded_bytes,
        bytes_per_s=disk_bytes_per_s(where.store) if where.store else link_bytes_per_s(dataset, options=FetchOptions()),
        rows_per_s=rows_per_s,
    )


def name_of(url: str) -> str:
    """The name of the store, which is also that of a folder."""
    return (
        re.sub(r"[^A-Za-z0-9]+", "-", url.rstrip("/").rpartition("/")[2].partition(".")[0]).strip("-")[:50] or "store"
    )


def loader_of(dataset: zl.Dataset, fetch_rows: int = FETCH_ROWS) -> zl.Loader:
    """A loader as the peer zloader has it."""
    sampling, factor = zl.BlockShuffling(BLOCK), fetch_rows // zl.Loader.batch_size
    return zl.Loader(dataset, sampling=sampling, fetch_factor=factor, rank=0, world_size=1)


def trial(dataset: zl.Dataset) -> float:
    """Cells per second of the first seconds of an epoch without a mirror."""
    for _ in zl.Loader(dataset, sampling=zl.Streaming(indices=[0]), rank=0, world_size=1):
        pass  # imports and compiles
    began, rows = time.perf_counter(), 0
    for minibatch in loader_of(dataset):
        rows += len(minibatch)
        if time.perf_counter() - began > _TRIAL_S:
            break
    return rows / (time.perf_counter() - began)


def total_of(url: str, storage_options: dict[str, Any]) -> float | None:
    """The sum of all values of X, read by h5py or zarr and not by zloader. None if they cannot."""
    import fsspec
    import h5py
    import zarr

    with contextlib.suppress(ImportError, KeyError, ValueError, *access_errors()), contextlib.ExitStack() as stack:
        if url.endswith(H5AD):
            file = stack.enter_context(fsspec.open(url, **storage_options))
            root = stack.enter_context(h5py.File(file))
        else:
            root = zarr.open_group(url, mode="r", storage_options=storage_options or None)
        x = root["X"]
        values = x["data"] if hasattr(x, "keys") else x
        step = max(1, _WINDOW // max(1, int(np.prod(values.shape[1:]))))
        starts = range(0, values.shape[0], step)
        return float(sum(np.asarray(values[at : at + step]).sum(dtype=np.float64) for at in starts))
    return None
