"""Times `zloader convert` against other converters, measures its peak memory at two sizes, and times it into S3.

    python -m benchmarks.questions.convert FILE.h5ad [--turns 3] [--memory 1GiB] [--only NAME...] [--python python3.12]
    python -m benchmarks.questions.convert FILE.h5ad --s3
    python -m benchmarks.questions.convert --scale 30000 --memory 1GiB

FILE is a CSR .h5ad file, for example of benchmarks.data.synthetic. The converters take turns. FILE is read once before
the first turn, so that every converter finds it in the page cache. Each output is synced to disk or deleted before the
next run begins, so no run waits for the writes of another. Memory is touched before each run (see rivals.touch).

Each conversion runs in its own process. wall, CPU and peak memory (resident set) are the operating system's figures for
the whole process, including starting Python and importing. `call` is the time of the conversion alone, by the
converter's own clock. If a converter starts processes, its peak is that of the largest process. The last two columns
are the speedups of zloader, shuffled against shuffled and plain against plain: the median of the ratios per turn. Each
store is checked: the number of rows and values, that every row name occurs once (in the source's order unless
shuffled), and the values of some rows.

--scale writes a file with the given number of rows and one with ten times as many, and measures the peak memory for
both: CSR, CSR shuffled, and CSC (which the script makes). The exit status is 1 if a peak exceeds --memory. --s3 takes
turns at converting to disk, converting into a real S3 server (SeaweedFS on loopback, on the same cores), and uploading
the finished store with s3fs. If uploading overlaps with encoding, converting into S3 takes less time than the other two
together.

Needs about five times the size of FILE on the disk of --work. That directory must not be a tmpfs, because files there
count as memory. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Few imports here: a child process starts with the peak memory of its parent.
from benchmarks.compare import rivals
from benchmarks.harness.measuring import (
    COLUMNS,
    Figures,
    columns,
    in_new_process,
    measured,
    median,
    program,
    ratio,
    read_through,
    spent,
    stored_bytes,
    table,
    touch,
)

ZLOADER = Path(sys.executable).with_name("zloader")
GROWTH = 10
_CHECKED_ROWS = 16
_TOUCHED = 4  # times the size of FILE: the memory of the largest rival


# ---- one conversion


def zloader(source: Path, dest: Path | str, *, memory: str | None, shuffle: bool = False) -> list[str]:
    """The command line. Without `memory`, zloader's default limit applies."""
    command = [str(ZLOADER), "convert", str(source), str(dest), "--json"]
    return command + ["--shuffle", "0"] * shuffle + (["--memory", memory] if memory else [])


def size_of(source: Path) -> tuple[int, int]:
    """The number of rows and of values in X."""
    import h5py

    with h5py.File(source) as file:
        return int(file["X"].attrs["shape"][0]), int(file["X/data"].shape[0])


def check(source: Path, store: Path, in_order: bool) -> None:
    """Raises AssertionError if the store, or annbatch's collection of stores, differs from the CSR file."""
    import anndata
    import h5py
    import numpy as np
    import scipy.sparse
    import zarr

    with h5py.File(source) as file:
        matrix, expected = anndata.io.sparse_dataset(file["X"]), anndata.io.read_elem(file["obs"])
        root = zarr.open_group(store, mode="r")
        parts = [root[name] for name in sorted(root.group_keys()) if name.startswith("dataset_")] or [root]
        names = [anndata.io.read_elem(part["obs"]).index.to_numpy(str) for part in parts]
        found = np.concatenate(names)
        assert len(found) == len(expected), f"{len(found)} rows instead of {len(expected)}"
        order = expected.index.get_indexer(found)
        assert np.array_equal(np.sort(order), np.arange(len(order))), "rows are missing or duplicated"
        assert np.array_equal(order, np.arange(len(order))) == in_order, "the rows are in the wrong order"
        n_values = sum(int(part["X/indptr"][-1]) for part in parts)
        assert n_values == file["X/data"].shape[0], f"{n_values} values instead of {file['X/data'].shape[0]}"
        for part, here in zip(parts, names, strict=True):
            stored = anndata.io.sparse_dataset(part["X"])
            for row in np.linspace(0, len(here) - 1, _CHECKED_ROWS).astype(int).tolist():
                at = int(expected.index.get_loc(here[row]))
                one, other = (scipy.sparse.csr_matrix(x[i : i + 1]) for x, i in ((stored, row), (matrix, at)))
                assert (one != other).nnz == 0, f"the values of row {here[row]} differ"


# ---- comparison of converters


def contenders(source: Path, options: argparse.Namespace) -> dict[str, Callable[[Path], list[str]]]:
    """The command of each converter, by name, as a function of the destination."""
    source = source.absolute()
    annbatch = rivals.environment("annbatch", python=options.python, directory=options.environments)

    def rival(python: str | Path, what: str) -> Callable[[Path], list[str]]:
        return lambda dest: program("compare.rivals", "write", what, source, dest, python=python)

    found: dict[str, Callable[[Path], list[str]]] = {
        "zloader": lambda dest: [*zloader(source, dest, memory=options.memory)],
        "zloader-shuffled": lambda dest: [*zloader(source, dest, memory=options.memory, shuffle=True)],
        "anndata": rival(sys.executable, "anndata"),
        **{
            name: rival(annbatch, name)
            for name in ("annbatch", "annbatch-zarrs", "annbatch-shuffled", "annbatch-shuffled-zarrs")
        },
    }
    return {name: command for name, command in found.items() if name in (options.only or found)}


def side_by_side(options: argparse.Namespace, work: Path) -> Figures:
    """Runs the turns and prints the table."""
    commands = contenders(options.file, options)
    rows, values = in_new_process(size_of, options.file)
    read_through(options.file)
    runs: dict[str, list[Figures]] = {name: [] for name in commands}
    for turn in range(options.turns):
        for name, command in commands.items():
            store = work / f"{name}.zarr"
            in_new_process(touch, _TOUCHED * options.file.stat().st_size)
            figures = measured(command(store), work=work)
            in_new_process(check, options.file, store, "shuffled" not in name)
            figures["stored_bytes"] = stored_bytes(store)
            shutil.rmtree(store)
            runs[name].append(figures)
            print(f"turn {turn + 1}: {name}: {figures['wall_s']:.2f} s", file=sys.stderr)
    print(f"{rows:,} rows, {values:,} values, {options.file.stat().st_size / 1e6:,.0f} MB; {options.turns} turns\n")
    header = ["", *COLUMNS, "stored MB", "zloader speedup", "call speedup"]
    lines = []
    for name, turns in runs.items():
        ours = runs.get("zloader-shuffled" if "shuffled" in name else "zloader", [])
        ratios = [f"{ratio(turns, ours, key):.2f} x" if ours else "" for key in ("wall_s", "call_s")]
        lines.append([name, *columns(turns, rows), f"{turns[0]['stored_bytes'] / 1e6:,.0f}", *ratios])
    table([header, *lines])
    return {"rows": rows, "values": values, "turns": options.turns, "memory": options.memory, "runs": runs}


# ---- memory at two sizes


def scale(options: argparse.Namespace, work: Path) -> Figures:
    """Peak memory for a file and one ten times larger, by kind of input."""
    limit = in_new_process(parse_size, options.memory)
    sizes = [options.scale, GROWTH * options.scale]
    runs: dict[str, list[Figures]] = {"CSR": [], "CSR, shuffled": [], "CSC": []}
    for rows in sizes:
        csr, csc = work / "csr.h5ad", work / "csc.h5ad"
        subprocess.run(program("data.synthetic", csr, "--rows", rows), check=True, stdout=subprocess.DEVNULL)
        runs["CSR"].append(scaled(csr, csr, options, work))
        runs["CSR, shuffled"].append(scaled(csr, csr, options, work, shuffle=True))
        in_new_process(write_csc, csr, csc)
        runs["CSC"].append(scaled(csc, csr, options, work))
        csr.unlink()
        csc.unlink()
    peaks = {kind: [run["peak_bytes"] for run in figures] for kind, figures in runs.items()}
    print(f"{sizes[0]:,} and {sizes[1]:,} rows, --memory {options.memory} ({limit / 1e6:,.0f} MB)\n")
    header = ["", *(f"{what} at {rows:,}" for rows in sizes for what in ("MB in", "cells/s", "peak MB")), "peak ratio"]
    lines = []
    for kind, figures in runs.items():
        cells = [
            f"{number / 1e6:,.0f}" if key != "rate" else f"{number:,.0f}"
            for run in figures
            for key, number in (("in", run["bytes_in"]), ("rate", run["rows"] / run["wall_s"]), ("", run["peak_bytes"]))
        ]
        lines.append([kind, *cells, f"{peaks[kind][1] / peaks[kind][0]:.2f} x"])
    table([header, *lines])
    broken = [kind for kind, both in peaks.items() if max(both) > limit]
    return {"rows": sizes, "memory": options.memory, "runs": runs, "beyond_the_bound": broken}


def scaled(source: Path, csr: Path, options: argparse.Namespace, work: Path, *, shuffle: bool = False) -> Figures:
    """Runs one conversion and checks it against the CSR file with the same values."""
    store = work / "scaled.zarr"
    figures = measured(zloader(source, store, memory=options.memory, shuffle=shuffle), work=work)
    in_new_process(check, csr, store, not shuffle)
    shutil.rmtree(store)
    rows, _ = in_new_process(size_of, csr)
    print(f"{source.name}, {rows} rows: {figures['peak_bytes'] / 1e6:.0f} MB peak", file=sys.stderr)
    return {**figures, "rows": rows, "bytes_in": source.stat().st_size}


def write_csc(source: Path, dest: Path) -> None:
    """Writes the same file with X as CSC, which is held in memory (8 bytes per value)."""
    import h5py
    import numpy as np
    import scipy.sparse

    window = 8192
    with h5py.File(source) as file, h5py.File(dest, "w") as out:
        for name in set(file) - {"X"}:
            file.copy(name, out)
        out.attrs.update(file.attrs)
        group = out.create_group("X")
        group.attrs.update({**file["X"].attrs, "encoding-type": "csc_matrix"})
        shape, indptr = file["X"].attrs["shape"], file["X/indptr"][:]
        starts = range(0, shape[0], window)
        spans = [slice(indptr[start], indptr[min(start + window, shape[0])]) for start in starts]
        lengths = sum(np.bincount(file["X/indices"][span], minlength=shape[1]) for span in spans)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        group.create_dataset("indptr", data=ends)
        rows, values = np.empty(ends[-1], np.int32), np.empty(ends[-1], file["X/data"].dtype)
        position = ends[:-1].copy()  # of the next value of each gene
        for start, span in zip(starts, spans, strict=True):
            here = indptr[start : start + window + 1] - span.start
            part = scipy.sparse.csr_matrix((file["X/data"][span], file["X/indices"][span], here)).tocsc()
            counts = np.diff(part.indptr)
            at = np.repeat(position[: len(counts)] - part.indptr[:-1], counts) + np.arange(part.nnz)
            rows[at], values[at] = part.indices + start, part.data
            position[: len(counts)] += counts
        group.create_dataset("indices", data=rows)
        group.create_dataset("data", data=values)


def parse_size(size: str) -> int:
    """Bytes, parsed as zloader does."""
    from zloader.common.checks import parse_size as parsed

    return parsed(size)


# ---- into S3


def to_s3(options: argparse.Namespace, work: Path) -> Figures:
    """Conversions to disk, conversions into S3, and uploads of the store on disk, in turns."""
    rows, _ = in_new_process(size_of, options.file)
    read_through(options.file)
    runs: dict[str, list[Figures]] = {"to disk": [], "to S3": [], "upload alone": []}
    store = work / "local.zarr"
    for turn in range(options.turns):
        with server(work / "s3") as (url, keys, endpoint):
            runs["to disk"].append(measured(zloader(options.file, store, memory=options.memory), work=work))
            environment = {"AWS_ACCESS_KEY_ID": keys["key"], "AWS_SECRET_ACCESS_KEY": keys["secret"]}
            command = [*zloader(options.file, f"{url}bench.zarr", memory=options.memory), "--endpoint-url", endpoint]
            runs["to S3"].append(measured(command, work=work, env=environment))
            here, there = stored_bytes(store), in_new_process(s3_bytes, keys, f"{url}bench.zarr")
            assert here == there, f"{there} bytes on S3, {here} on disk"
            runs["upload alone"].append(in_new_process(upload, keys, store, f"{url}copy.zarr"))
            shutil.rmtree(store)
        print(f"turn {turn + 1}: {runs['to S3'][-1]['wall_s']:.2f} s", file=sys.stderr)
    print(f"{rows:,} rows, {here / 1e6:,.0f} MB stored; {options.turns} turns\n")
    header = ["", *COLUMNS, "MB/s stored"]
    lines = [
        [name, *columns(figures, rows), f"{here / 1e6 / median(figures, 'call_s'):,.0f}"]
        for name, figures in runs.items()
    ]
    table([header, *lines])
    return {"rows": rows, "stored_bytes": here, "turns": options.turns, "memory": options.memory, "runs": runs}


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[str, Figures, str]]:
    """Starts an S3 server in a new process. Yields the URL of a bucket, the s3fs options for it, and the endpoint."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(directory, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def serve(directory: Path, pipe: Any) -> None:
    """Serves until the other end of the pipe is closed."""
    from zloader.testing import SeaweedFS

    with SeaweedFS(directory) as running:
        pipe.send((running.url(), running.storage_options, running.endpoint_url))
        with contextlib.suppress(EOFError):
            pipe.recv()


def s3_bytes(storage_options: Figures, url: str) -> int:
    """Bytes of all objects below a URL."""
    import s3fs

    return int(s3fs.S3FileSystem(**storage_options).du(url))


def upload(storage_options: Figures, store: Path, url: str) -> Figures:
    """Uploads a store with s3fs. Returns figures of this process like those of `measured`."""
    import s3fs

    began = time.perf_counter()
    s3fs.S3FileSystem(**storage_options).put(f"{store}/", url, recursive=True)
    seconds = time.perf_counter() - began
    return {"wall_s": seconds, "call_s": seconds, **spent(resource.getrusage(resource.RUSAGE_SELF))}


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", help="memory limit of zloader, such as 1GiB (default: zloader's own)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run only these converters (names: first column of the table)",
    )
    parser.add_argument(
        "--scale", type=int, metavar="ROWS", help="peak memory for a file of ROWS rows and one ten times larger"
    )
    parser.add_argument("--s3", action="store_true", help="convert into a real S3 server")
    parser.add_argument("--work", type=Path, help="directory to write to (default: a temporary directory)")
    rivals.add_options(parser)
    options = parser.parse_args()
    if options.file is None and options.scale is None:
        parser.error("give FILE or --scale")
    if options.scale and not options.memory:
        parser.error("--scale checks the peak against a limit: give --memory")
    what = scale if options.scale else to_s3 if options.s3 else side_by_side
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        figures = what(options, Path(directory))
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), **figures}))
    if figures.get("beyond_the_bound"):
        sys.exit(1)


if __name__ == "__main__":
    main()
