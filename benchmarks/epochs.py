"""Cold and warm epochs from a local store, compared with the limit that decoding sets.

    python benchmarks/epochs.py STORE [--epochs 5] [--cloud] [--batch-size 64 --block-size 64 --fetch-factor 256]

STORE is an AnnData Zarr store on a local disk, for example from

    python benchmarks/synthetic.py /tmp/tahoe.h5ad --rows 100000 && zloader convert /tmp/tahoe.h5ad /tmp/tahoe.zarr

The four measurements take turns, so that changes in the machine's speed affect all of them alike:

- decode: numcodecs alone over the chunks of one epoch, from memory, with as many threads as the loader. This is an
  upper limit for every reader of this store without a mirror.
- cold: an epoch without a mirror. Blocks of different fetches share edge chunks, which are decoded once per fetch. With
  blocks of 64 rows and chunks of 32, that is 1.5 times the store.
- filling: an epoch into an empty mirror. Every chunk is read and decoded once, and also checksummed and written.
- warm: an epoch from the full mirror. Nothing is decoded. The limit is memory bandwidth: 3 bytes per value are read and
  12 are written.

With --cloud, the store is served over loopback by a simulated S3 server in its own process: 30 ms to the first byte
(log-normal with sigma 0.3), 80 MB/s per connection, 400 MB/s in total. "link" is then the rate that 400 MB/s allow for
the bytes of a cold epoch. The name of the store's folder serves as the bucket, so it must be a valid bucket name.

The consumer takes every minibatch (torch CSR, one obs column, the index) and does nothing with it. One epoch is
discarded first, so that the files are in the page cache. The last line is one JSON document with all figures and their
medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rivals import touch

import zloader as zl
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, ShardIndex, chunk_spans, chunks_of

_TOUCHED = 4 << 30  # bytes, before cold and filling epochs, which need the most memory; see rivals.touch


def chunk_bytes(store: Path, layout: ArrayLayout) -> list[np.ndarray]:
    """The stored bytes of every chunk of an array, in memory."""
    chunks = []
    for shard in range(layout.n_shards):
        content = (store / layout.shard_key(shard)).read_bytes()
        span = layout.index_span(shard, len(content))
        table = layout.parse_index(content[span.start : span.stop], shard=shard, object_size=len(content))
        view = np.frombuffer(content, np.uint8)
        here = np.arange(shard * layout.chunks_per_shard, min((shard + 1) * layout.chunks_per_shard, layout.n_chunks))
        spans, _ = chunk_spans(layout, here, {shard: ShardIndex(table)}, gap_bytes=0, max_read_bytes=1 << 40)
        for piece in spans:
            starts = piece.span.start + piece.offsets
            chunks += [view[a:b] for a, b in zip(starts.tolist(), (starts + piece.sizes).tolist(), strict=True)]
    return chunks


def decode_seconds(loader: zl.Loader, stored: dict[str, list[np.ndarray]]) -> float:
    """Seconds for decoding alone, of the chunks that one epoch of `loader` decodes without a mirror."""
    dataset, plan = loader.dataset, loader.plan(0)
    matrix = dataset.matrix()
    indptr = dataset.indptr(matrix)
    jobs = []
    for number in range(plan.n_fetches):
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        for layout in matrix.arrays:
            chunks = chunks_of(starts, stops, layout.chunk_elements)
            jobs += [(layout, part) for part in np.array_split(chunks, max(1, len(chunks) // 16))]
    decoders = {layout.path: Decoder(layout) for layout in matrix.arrays}

    def decode(job: tuple[ArrayLayout, np.ndarray]) -> None:
        layout, chunks = job
        out = scratch[layout.path]
        for chunk in chunks.tolist():
            n = min(layout.chunk_elements, layout.n_elements - chunk * layout.chunk_elements)
            decoders[layout.path].decode(stored[layout.path][chunk], out.get()[:n])

    scratch = {layout.path: _PerThread(layout) for layout in matrix.arrays}
    with ThreadPoolExecutor(loader.options.threads) as threads:
        before = time.perf_counter()
        for _ in threads.map(decode, jobs):
            pass
        return time.perf_counter() - before


CLOUD = {"--ttfb-ms": "30", "--ttfb-sigma": "0.3", "--conn-mbps": "80", "--total-mbps": "400"}


@contextlib.contextmanager
def served(store: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Serves the store through a simulated S3 server. Yields its URL and storage options."""
    root, bucket = store.absolute().parent.parent, store.absolute().parent.name
    arguments = [part for option in CLOUD.items() for part in option]
    command = [sys.executable, "-m", "zloader.testing.s3sim", "--root", str(root), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            endpoint = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            yield f"s3://{bucket}/{store.name}", {"key": "any", "secret": "any", "endpoint_url": endpoint}
        finally:
            server.terminate()


class _PerThread:
    """A buffer of one chunk per thread."""

    def __init__(self, layout: ArrayLayout) -> None:
        self._layout, self._own = layout, {}

    def get(self) -> np.ndarray:
        own = threading.get_ident()
        if own not in self._own:
            self._own[own] = np.empty(self._layout.chunk_elements, self._layout.dtype)
        return self._own[own]


def epoch_seconds(loader: zl.Loader) -> float:
    """Seconds of one epoch. Checks the number of rows."""
    before = time.perf_counter()
    rows = sum(len(minibatch) for minibatch in loader)
    seconds = time.perf_counter() - before
    assert rows == loader.dataset.n_obs, f"{rows} rows of {loader.dataset.n_obs}"
    return seconds


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--fetch-factor", type=int, default=256)
    parser.add_argument("--cloud", action="store_true", help="read through a simulated S3 server")
    parser.add_argument("--cache", type=Path, help="directory for the mirrors (default: a temporary directory)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the consumer does not compute; a real trainer would use a GPU
    with contextlib.ExitStack() as stack:
        url, storage_options = str(options.store), None
        if options.cloud:
            url, storage_options = stack.enter_context(served(options.store))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.cache)))
        measure(options, url, storage_options, directory)


def measure(options: argparse.Namespace, url: str, storage_options: dict[str, Any] | None, directory: Path) -> None:
    """Runs the turns and prints the figures."""

    def loader_of(cache: Path | None) -> zl.Loader:
        dataset = zl.open_dataset(url, cache=cache, storage_options=storage_options)
        sampling = zl.BlockShuffling(options.block_size)
        sizes: dict[str, Any] = {"batch_size": options.batch_size, "fetch_factor": options.fetch_factor}
        return zl.Loader(dataset, sampling=sampling, obs=dataset.obs_columns[:1], **sizes)

    plain, mirrored = loader_of(None), loader_of(directory / "warm")
    stored = {layout.path: chunk_bytes(options.store, layout) for layout in plain.dataset.matrix().arrays}
    for loader in (plain, mirrored):
        epoch_seconds(loader)  # compiles, reads the store into the page cache and fills the mirror
    seconds: dict[str, list[float]] = {"decode": [], "cold": [], "filling": [], "warm": []}
    for turn in range(options.epochs):
        seconds["decode"].append(decode_seconds(plain, stored))
        touch(_TOUCHED)
        seconds["cold"].append(epoch_seconds(plain))
        touch(_TOUCHED)
        seconds["filling"].append(epoch_seconds(loader_of(directory / f"fill {turn}")))
        shutil.rmtree(directory / f"fill {turn}")
        seconds["warm"].append(epoch_seconds(mirrored))
        assert mirrored.statistics().gets == 0
    if options.cloud:
        seconds["link"] = [plain.statistics().bytes_read / (float(CLOUD["--total-mbps"]) * 1e6)]
    n_rows = plain.dataset.n_obs
    medians = {name: n_rows / statistics.median(times) for name, times in seconds.items()}
    for name, rate in medians.items():
        low, high = n_rows / max(seconds[name]), n_rows / min(seconds[name])
        print(f"{name:8} {rate:12,.0f} rows/s   ({low:,.0f} to {high:,.0f})   {rate / medians['decode']:.2f} of decode")
    sizes = {name: getattr(options, name) for name in ("batch_size", "block_size", "fetch_factor", "cloud")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"rows": n_rows, "cores": cores, **sizes, "rows_per_s": medians, "seconds": seconds}))


if __name__ == "__main__":
    main()
