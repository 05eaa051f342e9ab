"""Copy the store to the disk first, then train: the time and bytes of that, beside zloader, which reads the cloud.

    python -m benchmarks.questions.copied OURS.zarr ANNBATCH.zarr [ANNDATA.zarr] [--epochs 1,3,10] [--turns 3]

The stores have the same cells, and each lies in a directory that becomes a bucket of the simulated cloud. Sides:

- zloader: opens the store in the cloud with an empty mirror. The first epoch reads the cloud and fills the mirror;
  later ones read the mirror.
- annbatch, copied: the store is downloaded with s3fs (`get`, recursive, its defaults), and then read from the disk with
  chunks of 512 rows, 32 at a time, the fastest setting known.
- annbatch, cloud: every epoch reads the cloud, with obstore and the same chunks.
- scDataset, files kept: with ANNDATA.zarr, as anndata writes it. fsspec's `simplecache` in front of s3fs downloads each
  object when it is first read, and keeps it as a file. It has no workers: one of two read a file that the other was
  still writing, and failed.

Each turn measures the copy, the first epoch and one more of each side in a new process. A run of N epochs takes the
copy, the first epoch, and N - 1 times the second one. The first minibatch comes after the copy. Seconds are those of a
loop that does nothing but load: with training steps that take longer than loading, only the copy and the first
minibatch remain. zloader's mirror is decoded, and larger than a copy of the store, which "disk GB" shows. Minibatches
have 64 rows. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import s3fs

from benchmarks.compare import rivals
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.measuring import Figures, in_new_process, stored_bytes, table
from benchmarks.harness.sides import ReaderFailed, StoreLocation, reader, rows_and_column, store_location

_FETCH_ROWS = 16_384
_CHUNKS = {"chunk_size": 512, "preload_nchunks": _FETCH_ROWS // 512}
_BLOCKS = {"chunk_size": 64, "preload_nchunks": _FETCH_ROWS // 64}


def download(url: str, options: Mapping[str, str], target: str) -> float:
    """Copies a store from the cloud with s3fs. Returns the seconds, without the import."""
    files = s3fs.S3FileSystem(**options)
    began = time.perf_counter()
    files.get(url, target, recursive=True)
    return time.perf_counter() - began


def epochs(tool: str, python: Path | str, location: StoreLocation, options: Figures, work: Path) -> list[Figures]:
    """The first two epochs of a new process."""
    with reader(tool, python, location, options, work) as one:
        return [location.served(one.ask) for _ in range(2)]


def ours(location: StoreLocation, column: str, work: Path) -> Figures:
    """zloader with an empty mirror."""
    mirror = work / "mirror"
    found = epochs("zloader", sys.executable, location, {**_BLOCKS, "obs": column, "mirror": str(mirror)}, work)
    return summed({"seconds": 0.0}, found, mirror)


def copied(location: StoreLocation, column: str, work: Path, python: Path) -> Figures:
    """annbatch from a copy on the disk."""
    target = work / location.store.name
    assert location.cloud is not None
    given = location.cloud.storage_options()
    copy = location.served(
        lambda: {"seconds": in_new_process(download, location.url, {**given, "use_ssl": False}, str(target))}
    )
    found = epochs("annbatch", python, StoreLocation(store=target, url=str(target)), {**_CHUNKS, "obs": column}, work)
    return summed(copy, found, target)


def remote(location: StoreLocation, column: str, work: Path, python: Path) -> Figures:
    """annbatch from the cloud."""
    return summed({"seconds": 0.0}, epochs("annbatch", python, location, {**_CHUNKS, "obs": column}, work))


def kept(location: StoreLocation, column: str, work: Path, python: Path) -> Figures:
    """scDataset through fsspec's cache of files."""
    target = work / "files"
    options = {**_BLOCKS, "obs": column, "workers": 0, "file_cache": str(target)}
    return summed({"seconds": 0.0}, epochs("scdataset", python, location, options, work), target)


def summed(copy: Figures, found: Sequence[Figures], kept: Path | None = None) -> Figures:
    """The figures of one side in one turn. `kept` is what it has on the disk, which is deleted."""
    disk = stored_bytes(kept) if kept else 0
    if kept:
        shutil.rmtree(kept)
    first, later = found
    return {
        "copy_s": copy["seconds"],
        "first_minibatch_s": copy["seconds"] + first["first_minibatch_s"],
        "first_s": first["seconds"],
        "later_s": later["seconds"],
        "rows": first["rows"],
        "disk_bytes": disk,
        "first_bytes": sum(each.get("served_bytes", 0) for each in (copy, first)),
        "later_bytes": later.get("served_bytes", 0),
    }


def seconds(run: Figures, n_epochs: int) -> float:
    """The seconds of a run of so many epochs."""
    return float(run["copy_s"] + run["first_s"] + (n_epochs - 1) * run["later_s"])


def line(name: str, runs: Sequence[Figures], numbers: Sequence[int]) -> list[str]:
    """The line of the table for one side: medians over the turns."""
    figures = [statistics.median(run[key] for run in runs) for key in ("copy_s", "first_minibatch_s")]
    totals = [statistics.median(seconds(run, number) for run in runs) for number in numbers]
    gigabytes = [statistics.median(run[key] for run in runs) / 1e9 for key in ("first_bytes", "later_bytes")]
    disk = statistics.median(run["disk_bytes"] for run in runs) / 1e9
    return [name, *(f"{value:.1f}" for value in (*figures, *totals)), *(f"{gb:.2f}" for gb in (*gigabytes, disk))]


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="zloader's")
    parser.add_argument("theirs", type=Path, help="annbatch's, of the same cells")
    parser.add_argument("plain", type=Path, nargs="?", help="of the same cells, written by anndata")
    parser.add_argument("--epochs", type=lambda text: [int(n) for n in text.split(",")], default="1,3,10")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, help="directory for copies and mirrors")
    rivals.add_options(parser)
    options = parser.parse_args()
    given = {"directory": options.environments, "constrain": options.constrain}
    python = rivals.environment("annbatch", **given)
    rows, column = rows_and_column(options.store)
    runs: dict[str, list[Figures]] = {}
    speed = LinkSpeed()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        mine, other = (stack.enter_context(store_location(each, speed)) for each in (options.store, options.theirs))
        sides = {
            "zloader": lambda: ours(mine, column, work),
            "annbatch, copied": lambda: copied(other, column, work, python),
            "annbatch, cloud": lambda: remote(other, column, work, python),
        }
        if options.plain is not None:
            plain, reading = (
                stack.enter_context(store_location(options.plain, speed)),
                rivals.environment("scdataset", **given),
            )
            sides["scDataset, files kept"] = lambda: kept(plain, column, work, reading)
        for turn in range(options.turns):
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                try:
                    runs.setdefault(name, []).append(sides[name]())
                except ReaderFailed as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
                    runs.pop(name)
                    sides.pop(name)
                    continue
                assert runs[name][-1]["rows"] == rows, f"{name} gave {runs[name][-1]['rows']} of {rows} rows"
                print(f"turn {turn + 1}, {name}: {runs[name][-1]}", file=sys.stderr)
    columns = ["copy s", "first minibatch s", *(f"{number} epochs s" for number in options.epochs)]
    columns += ["GB, first epoch", "GB, later epochs", "disk GB"]
    table([["", *columns], *(line(name, of, options.epochs) for name, of in runs.items())])
    print(json.dumps({"rows": rows, "runs": runs}))


if __name__ == "__main__":
    main()
