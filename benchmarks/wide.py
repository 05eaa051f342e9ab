"""The cost of many rows per process: opening, the first minibatch and memory, for a store of 100 million rows.

    python benchmarks/wide.py DIRECTORY [--rows 100000000] [--processes 4] [--turns 3]

The script writes a store with that many rows to DIRECTORY (and deletes it with its mirror afterwards). It has 2 values
per row, so that the per-row costs dominate. Row offsets (8 bytes per row), the codes of one obs column (1 byte) and two
float32 of obsm/X_pca (8 bytes) take 1.7 GB for 100 million rows. obs names are declared and never written, which Zarr
allows: they would be read as empty strings, and training does not read them. Chunks of X hold 1 024 rows, so the
mirror's words for 100 000 chunks take 0.8 MB. An atlas with chunks of 32 rows has 25 MB of them per array.

One streaming epoch of zloader fills the mirror. Then processes start one after another, and all stay alive. Each one
imports zloader and torch, opens the store (open_dataset and Loader), takes the first minibatch of an epoch (64 rows,
blocks of 64 in fetches of 16 384, obs=["plate"], and obsm=["X_pca"] if Loader supports it), checks its values, and
idles in that epoch. Everything is in the page cache.

Memory figures are those of /proc. RSS counts every mapped page that a process has touched, including shared pages. PSS
divides shared pages by the number of processes that share them, including any other process on the machine that has
torch loaded; it is read once all processes are running. File pages (RssFile: the mirror and torch's libraries) belong
to the page cache and exist once for all processes. The rest is the memory that a process adds to the machine, "own":
RssAnon, RssShmem and its page tables (VmPTE), which grow with the mapped memory. "imports" is the own memory before the
store is opened: Python, torch, anndata and numba, which separately started processes do not share. MB are 10^6 bytes.
Linux only.

Targets for 100 million rows: opening takes 5 s, the first minibatch 3 s more, 600 MB RSS per process, and every process
after the first adds at most 100 MB to the machine beyond its imports. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from rivals import Figures, median, table

N_GENES = 62_710
PLATES = 14
HALF = N_GENES // 2
COLUMNS = ("open s", "first minibatch s", "RSS MB", "RssFile", "PSS", "own", "imports", "own above imports")
TARGETS = {"opened_s": 5.0, "first_s": 3.0, "rss": 600e6, "further": 100e6}
_WINDOW = 1 << 22  # rows written at a time
_CHUNK = 1 << 20  # elements per chunk of all arrays except X
_X_CHUNK_ROWS = 1024
_FILL_ROWS = 1 << 20  # rows per minibatch while filling the mirror


# ---- the store: row i has genes i % HALF and HALF + i % HALF, with values 1 + i % 7 and 2


def write(store: Path, rows: int) -> None:
    """Writes an AnnData store of `rows` rows, as another program might."""
    root = zarr.create_group(store, zarr_format=3, attributes=_encoding("anndata", "0.1.0"))
    x = root.create_group("X", attributes={**_encoding("csr_matrix", "0.1.0"), "shape": [rows, N_GENES]})
    sharded = {"chunks": (2 * _X_CHUNK_ROWS,), "shards": (2 * _WINDOW,)}
    indices = x.create_array("indices", shape=(2 * rows,), dtype="uint16", **sharded)
    values = x.create_array("data", shape=(2 * rows,), dtype="uint8", **sharded)
    indptr = x.create_array("indptr", shape=(rows + 1,), dtype="int64", chunks=(_CHUNK,))
    codes = _obs(root, rows)
    pca = root.create_group("obsm", attributes=_encoding("dict", "0.1.0")).create_array(
        "X_pca", shape=(rows, 2), dtype="float32", chunks=(_CHUNK, 2), attributes=_encoding("array", "0.2.0")
    )
    indptr[:1] = 0
    for first in range(0, rows, _WINDOW):
        row = np.arange(first, min(rows, first + _WINDOW))
        there, elements = slice(first, first + len(row)), slice(2 * first, 2 * (first + len(row)))
        indices[elements] = np.stack([row % HALF, HALF + row % HALF], axis=1).ravel().astype("uint16")
        values[elements] = np.stack([1 + row % 7, np.full_like(row, 2)], axis=1).ravel().astype("uint8")
        indptr[first + 1 : first + 1 + len(row)] = 2 * (row + 1)
        codes[there] = (row % PLATES).astype("int8")
        pca[there] = np.stack([row, -row], axis=1).astype("float32")


def _obs(root: zarr.Group, rows: int) -> Any:
    """Creates obs and var. Returns the still empty codes of the obs column."""
    text = _encoding("string-array", "0.2.0")
    for name, n, columns in (("obs", rows, ["plate"]), ("var", N_GENES, [])):
        frame = {**_encoding("dataframe", "0.2.0"), "_index": "_index", "column-order": columns}
        group = root.create_group(name, attributes=frame)
        names = group.create_array("_index", shape=(n,), dtype=str, chunks=(min(n, _CHUNK),), attributes=text)
        if name == "var":
            names[:] = np.array([f"gene {gene}" for gene in range(N_GENES)])
    plate = root["obs"].create_group("plate", attributes={**_encoding("categorical", "0.2.0"), "ordered": False})
    labels = plate.create_array("categories", shape=(PLATES,), dtype=str, chunks=(PLATES,), attributes=text)
    labels[:] = np.array([f"plate {number}" for number in range(PLATES)])
    array = _encoding("array", "0.2.0")
    return plate.create_array("codes", shape=(rows,), dtype="int8", chunks=(_CHUNK,), attributes=array)


def _encoding(kind: str, version: str) -> dict[str, Any]:
    return {"encoding-type": kind, "encoding-version": version}


# ---- one process


def process(store: str, cache: str, *, fill: bool) -> None:
    """Fills the mirror, or takes the first minibatch, prints the figures and idles until standard input ends."""
    import zloader as zl

    wanted: dict[str, Any] = {"obs": ["plate"]}
    if "obsm" in inspect.signature(zl.Loader).parameters:
        wanted["obsm"] = ["X_pca"]
    imported = memory(os.getpid())
    began = time.perf_counter()
    dataset = zl.open_dataset(store, cache=cache)
    if fill:
        loader = zl.Loader(dataset, batch_size=_FILL_ROWS, fetch_factor=1, sampling=zl.Streaming(), **wanted)
        rows = sum(map(len, loader))
        assert rows == dataset.n_obs, f"{rows} rows of {dataset.n_obs}"
        print(json.dumps({"filled_s": time.perf_counter() - began}))
        return
    loader = zl.Loader(dataset, batch_size=64, fetch_factor=256, sampling=zl.BlockShuffling(64), **wanted)
    opened = time.perf_counter()
    minibatches = iter(loader)
    minibatch = next(minibatches)
    first = time.perf_counter()
    assert loader.statistics().gets == 0, "the mirror is not full"
    figures = {"opened_s": opened - began, "first_s": first - opened, "imported": imported, **memory(os.getpid())}
    _check(minibatch)
    print(json.dumps(figures), flush=True)
    sys.stdin.read()


def _check(minibatch: Any) -> None:
    row = minibatch.index.numpy()
    np.testing.assert_array_equal(minibatch.obs["plate"].numpy(), row % PLATES)
    np.testing.assert_array_equal(
        minibatch.x.col_indices().numpy(), np.stack([row % HALF, HALF + row % HALF], 1).ravel()
    )
    np.testing.assert_array_equal(minibatch.x.values().numpy(), np.stack([1 + row % 7, 0 * row + 2], 1).ravel())
    if hasattr(minibatch, "obsm"):
        np.testing.assert_array_equal(minibatch.obsm["X_pca"].numpy(), np.stack([row, -row], 1).astype("float32"))


def memory(pid: int) -> Figures:
    """Resident bytes of a process, by kind."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmPTE"):
            found[name] = int(rest.split()[0]) * 1024
    return {**found, "own": found["RssAnon"] + found["RssShmem"] + found["VmPTE"]}


def pss_bytes(pid: int) -> int:
    """PSS of a process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


# ---- several processes


def turn(store: Path, cache: Path, processes: int) -> list[Figures]:
    """Starts the processes one after another and keeps them alive. Returns the figures of each."""
    found: list[Figures] = []
    with contextlib.ExitStack() as stack:
        running: list[subprocess.Popen[str]] = []
        for _ in range(processes):
            command = [sys.executable, __file__, str(store), "--process", str(cache)]
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running.append(stack.enter_context(one))
            assert one.stdout is not None
            line = one.stdout.readline()
            if not line:
                sys.exit("a zloader process failed")
            figures = json.loads(line)
            found.append({**figures, "above": figures["own"] - figures["imported"]["own"]})
        for figures, one in zip(found, running, strict=True):
            figures["pss"] = pss_bytes(one.pid)
    return found  # leaving the context closed their standard input and waited for them


def lines(turns: Sequence[Sequence[Figures]]) -> list[list[str]]:
    """The table: medians over the turns, one line per process in starting order."""
    found = [["process", *COLUMNS]]
    for number, runs in enumerate(zip(*turns, strict=True)):
        imports = statistics.median(run["imported"]["own"] for run in runs)
        sizes = [*(median(runs, name) for name in ("VmRSS", "RssFile", "pss", "own")), imports, median(runs, "above")]
        seconds = (f"{median(runs, name):.2f}" for name in ("opened_s", "first_s"))
        found.append([str(number + 1), *seconds, *(f"{size / 1e6:,.0f}" for size in sizes)])
    return found


def verdicts(turns: Sequence[Sequence[Figures]]) -> Figures:
    """The worst process of each turn, as the median over the turns. Prints each figure and its target."""
    worst = {
        "opened_s": [max(run["opened_s"] for run in runs) for runs in turns],
        "first_s": [max(run["first_s"] for run in runs) for runs in turns],
        "rss": [max(run["VmRSS"] for run in runs) for runs in turns],
        "further": [max((run["above"] for run in runs[1:]), default=0) for runs in turns],
    }
    measured = {name: float(statistics.median(values)) for name, values in worst.items()}
    for name, value in measured.items():
        scale, unit = (1, "s") if name.endswith("_s") else (1e6, "MB")
        verdict = "met" if value < TARGETS[name] else "missed"
        print(f"{name}: {value / scale:,.2f} {unit} (target {TARGETS[name] / scale:,.0f}): {verdict}")
    return measured


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory for the store and its mirror")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--process", help=argparse.SUPPRESS
    )  # run as one of the processes: the value is the mirror, DIRECTORY the store
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        process(str(options.directory), options.process, fill=options.fill)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store, cache = Path(directory) / "wide.zarr", Path(directory) / "mirror"
        began = time.perf_counter()
        write(store, options.rows)
        written_s = time.perf_counter() - began
        print(f"written in {written_s:.0f} s", file=sys.stderr)
        command = [sys.executable, __file__, str(store), "--process", str(cache), "--fill"]
        filled = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
        print(f"filled in {filled['filled_s']:.0f} s", file=sys.stderr)
        turns = [turn(store, cache, options.processes) for _ in range(options.turns)]
    table(lines(turns))
    figures = {"rows": options.rows, "written_s": written_s, **filled, "measured": verdicts(turns)}
    print(json.dumps({**figures, "targets": TARGETS, "turns": turns}))


if __name__ == "__main__":
    main()
