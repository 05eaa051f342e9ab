"""The cost of each chunk_rows and codec: stored bytes, speed of encoding and decoding, and the reads of an epoch.

    python -m benchmarks.questions.sweep FILE.h5ad [--turns 5] [--threads 2] [--block-size 64] [--fetch-factor 256]

FILE is a CSR .h5ad file, for example of benchmarks.data.synthetic with 20 000 rows. It is converted once per
combination. A value is one of X together with its gene index, so it is two stored elements.

- bytes/value: the bytes of X's data and indices, including shard indexes.
- encode, decode: values/s of numcodecs and the checksum alone, from memory to memory, in --threads threads, with the
  codecs that the store names. Decoding uses zloader.storage.decode, many chunks at a time, like the loader. All
  combinations take turns.
- near: the reads of a cold epoch without a mirror for a small dataset, where some blocks of a fetch are neighbours that
  share chunks and reads. These are the figures of `zloader info`.
- far: the same for a dataset so large that no two blocks of a fetch are near each other, such as an atlas of 100
  million rows. Every block is then read by itself: one GET for the indices and one for the data. Use this to choose
  chunk_rows.

KB/row are the bytes read per row and chunks/row the chunks decoded per row, indices and data together. The last column
is the rate in rows/s that decoding alone allows in the "far" case. A block of 64 rows shares its edge chunks with rows
that are not needed, and larger chunks contain more of them. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.harness.decoding import chunk_bytes
from benchmarks.harness.measuring import table
from zloader.conversion.encode import CODECS, ChunkEncoder
from zloader.insight.cost import epoch_costs
from zloader.insight.summary import stored_bytes
from zloader.storage.decode import CHUNK, Decoder
from zloader.storage.layout import ArrayLayout, chunks_of

CHUNK_ROWS = (8, 16, 32, 64, 128, 256)
_JOB_ELEMENTS = 1 << 20  # elements per job of a thread
_BATCH_SIZE = 64
Figures = dict[str, Any]
Array = np.ndarray[Any, Any]


# ---- encoding and decoding


class Codings:
    """All chunks of a store's X in memory, stored and decoded, to time encoding and decoding."""

    def __init__(self, store: Path, layouts: Sequence[ArrayLayout]) -> None:
        self._layouts = layouts
        self._stored = [chunk_bytes(store, layout) for layout in layouts]
        # Filled with ones, so that page faults are not timed.
        self._decoded = [np.ones(layout.n_chunks * layout.chunk_elements, layout.dtype) for layout in layouts]

    def decode_seconds(self, threads: int) -> float:
        """Seconds to decode every chunk."""
        decoders = [Decoder(layout) for layout in self._layouts]

        def decode(number: int, chunks: range) -> None:
            n, jobs = self._layouts[number].chunk_elements, np.zeros(len(chunks), CHUNK)
            jobs["read"], jobs["begin"] = np.arange(len(chunks)), np.arange(len(chunks)) * n
            jobs["stop"] = jobs["elements"] = n
            stored = [self._stored[number][chunk] for chunk in chunks]
            jobs["size"] = [len(content) for content in stored]
            out = self._decoded[number][chunks.start * n : chunks.stop * n]
            assert not decoders[number].decode_all(stored, jobs, out)

        return self._seconds(decode, threads)

    def encode_seconds(self, threads: int) -> float:
        """Seconds to encode every decoded chunk. Checks that the first chunk of each array equals the stored one."""
        encoders = [
            partial(ChunkEncoder(layout).encode, chunk_elements=layout.chunk_elements) for layout in self._layouts
        ]
        for number, encode in enumerate(encoders):
            assert encode(self._elements(number, 0)) == self._stored[number][0].tobytes(), (
                "the encoded bytes differ from the stored ones"
            )

        def encode_all(number: int, chunks: range) -> None:
            for chunk in chunks:
                encoders[number](self._elements(number, chunk))

        return self._seconds(encode_all, threads)

    def _elements(self, number: int, chunk: int) -> Array:
        n = self._layouts[number].chunk_elements
        return self._decoded[number][chunk * n : (chunk + 1) * n]

    def _jobs(self) -> Iterator[tuple[int, range]]:
        for number, layout in enumerate(self._layouts):
            step = max(1, _JOB_ELEMENTS // layout.chunk_elements)
            for start in range(0, layout.n_chunks, step):
                yield number, range(start, min(start + step, layout.n_chunks))

    def _seconds(self, step: Callable[[int, range], Any], threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            before = time.perf_counter()
            for _ in pool.map(step, *zip(*self._jobs(), strict=True)):
                pass
            return time.perf_counter() - before


# ---- reads


def reads(dataset: zl.Dataset, *, block_size: int, batch_size: int, fetch_factor: int) -> Figures:
    """The reads of a cold epoch without a mirror: GETs, bytes, decoded chunks, and decoded over stored values."""
    sampling = zl.BlockShuffling(block_size)
    plan = zl.Loader(dataset, sampling=sampling, batch_size=batch_size, fetch_factor=fetch_factor).plan(0)
    matrix = dataset.store.matrix("X")
    indptr = dataset.store.offsets(matrix)
    cost = epoch_costs(dataset, plan, most_fetches=plan.n_fetches).unmirrored
    chunks = values = 0
    for number in range(plan.n_fetches):
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        for array in matrix.arrays:
            wanted = chunks_of(starts, stops, array)
            chunks += len(wanted)
            values += len(wanted) * array.chunk_elements
    whole = len(matrix.arrays) * matrix.values.n_elements
    return {"gets": cost.gets, "bytes": cost.bytes_read, "chunks": chunks, "decoded_over_stored": values / whole}


# ---- the sweep


def convert(source: Path, store: Path, chunk_rows: int, codec: str, options: argparse.Namespace) -> Figures:
    """Converts, and returns the figures that need no timing."""
    converting = zl.ConvertOptions(chunk_rows=chunk_rows, codec=codec)
    zl.convert(source, store, options=converting, progress=False)
    dataset = zl.open_dataset(str(store))
    matrix = dataset.store.matrix("X")
    stored = sum(stored_bytes(dataset.store, array) for array in matrix.arrays)
    near = {"block_size": options.block_size, "batch_size": _BATCH_SIZE, "fetch_factor": options.fetch_factor}
    far = {"block_size": options.block_size, "batch_size": options.block_size, "fetch_factor": 1}
    return {
        "chunk_rows": chunk_rows,
        "codec": codec,
        "rows": dataset.n_obs,
        "values": matrix.values.n_elements,
        "chunk_bytes": stored / sum(array.n_chunks for array in matrix.arrays),
        "stored_bytes": stored,
        "near": reads(dataset, **near),
        "far": reads(dataset, **far),
    }


def timed(store: Path, threads: int) -> Mapping[str, float]:
    """Values/s of decoding and encoding, from one run of each."""
    matrix = zl.open_dataset(str(store)).store.matrix("X")
    codings = Codings(store, matrix.arrays)
    n = matrix.values.n_elements
    return {"decode": n / codings.decode_seconds(threads), "encode": n / codings.encode_seconds(threads)}


def decoded_per_row(result: Figures) -> float:
    """Values decoded per row in the "far" case."""
    return float(result["far"]["decoded_over_stored"] * result["values"] / result["rows"])


def show(results: Sequence[Figures]) -> None:
    """Prints the table."""
    reading = ["GETs/1000 rows", "KB/row", "chunks/row"]
    header = ["codec, chunk_rows", "KB/chunk", "bytes/value", "encode M/s", "decode M/s"]
    reads_of = [f"{where}: {what}" for where in ("near", "far") for what in reading]
    lines = [[*header, *reads_of, "far: k rows/s"]]
    for result in results:
        rows, stored = result["rows"], result["stored_bytes"]
        lines.append(
            [
                f"{result['codec']}, {result['chunk_rows']}",
                f"{result['chunk_bytes'] / 1e3:,.0f}",
                f"{stored / result['values']:.3f}",
                *(f"{statistics.median(result[way]) / 1e6:,.0f}" for way in ("encode", "decode")),
                *(
                    cell
                    for cost in (result["near"], result["far"])
                    for cell in (
                        f"{1000 * cost['gets'] / rows:.1f}",
                        f"{cost['bytes'] / rows / 1e3:.2f}",
                        f"{cost['chunks'] / rows:.3f}",
                    )
                ),
                f"{statistics.median(result['decode']) / decoded_per_row(result) / 1e3:,.0f}",
            ]
        )
    table(lines)


def main() -> None:
    """Converts, counts and times; prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--fetch-factor", type=int, default=256)
    parser.add_argument("--work", type=Path, help="directory to write to (default: a temporary directory)")
    options = parser.parse_args()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        results = []
        for codec, chunk_rows in itertools.product(CODECS, CHUNK_ROWS):
            store = Path(directory) / f"{codec}{chunk_rows}.zarr"
            results.append(convert(options.file, store, chunk_rows, codec, options))
        for _ in range(options.turns):
            for result in results:
                speeds = timed(Path(directory) / f"{result['codec']}{result['chunk_rows']}.zarr", options.threads)
                for way, speed in speeds.items():
                    result.setdefault(way, []).append(speed)
    show(results)
    sizes = {name: getattr(options, name) for name in ("turns", "threads", "block_size", "fetch_factor")}
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), **sizes, "results": results}))


if __name__ == "__main__":
    main()
