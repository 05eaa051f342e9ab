"""What TLS costs a client: processor seconds per GB of TensorStore's and obstore's reads, and of a cold epoch.

    python -m benchmarks.questions.tls [--turns 7] [--sizes 262144,2097152] [--mb 400] [--store atlas/tahoe.zarr]

Two simulated clouds serve the same file of 64 MiB, one of them over TLS with a certificate authority of its own. Each
side reads `--mb` megabytes in ranges of one size, 32 at once, in a process of its own, whose user and system seconds
are counted once its connections are open. "ms/connection" is the processor time of opening them with reads of 1 KiB.
The sides take turns: each client without and with TLS, one after the other, every other turn in reverse. "x" is the
median of the ratios of the turns, with their range. With `--store`, cold epochs of zloader follow, which open the store
and fill an empty mirror from either cloud. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.harness import measuring
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.measuring import Figures
from benchmarks.harness.sides import filling_epoch, in_turns, reader, rows_and_column, store_location

_OBJECT_BYTES = 64 << 20
_AT_ONCE = 32
_LEAST_BYTES = 1024
_LINKS = {"http": LinkSpeed(), "https": LinkSpeed(tls=True)}
Read = Callable[[int, int], Awaitable[int]]


def tensorstore_side(endpoint: str) -> Read:
    import tensorstore as ts

    access = {"endpoint": endpoint, "aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
    spec = {"driver": "s3", "bucket": "bucket", "path": "", **access}
    spec["context"] = {"s3_request_concurrency": {"limit": _AT_ONCE}}
    store = ts.KvStore.open(spec).result()

    async def read(start: int, stop: int) -> int:
        return len((await store.read("object", byte_range=slice(start, stop))).value)

    return read


def obstore_side(endpoint: str) -> Read:
    from obstore.store import S3Store

    access = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "skip_signature": True,
        "client_options": {"allow_http": True},
    }
    store = S3Store("bucket", virtual_hosted_style_request=False, **access)

    async def read(start: int, stop: int) -> int:
        return len((await store.get_range_async("object", start=start, end=stop)).to_bytes())

    return read


CLIENTS = {"TensorStore": tensorstore_side, "obstore": obstore_side}


async def client(name: str, endpoint: str, size: int, n_bytes: int) -> Figures:
    """The figures of one client in this process."""
    read, drawn = CLIENTS[name](endpoint), random.Random(0)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(start: int, n_bytes: int) -> int:
        async with turns:
            return await read(start, start + n_bytes)

    async def ranges(count: int, of: int) -> int:
        return sum(await asyncio.gather(*(one(drawn.randrange(_OBJECT_BYTES - of), of) for _ in range(count))))

    await ranges(1, _LEAST_BYTES)  # imports and starts threads
    before = _cpu_s()
    await ranges(_AT_ONCE, _LEAST_BYTES)  # opens the connections
    opening_s = _cpu_s() - before
    await ranges(2 * _AT_ONCE, size)
    before, began = _cpu_s(), time.perf_counter()
    got = await ranges(n_bytes // size, size)
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - before
    assert got == n_bytes // size * size
    opening_ms = 1000 * opening_s / _AT_ONCE
    return {"cpu_s_per_gb": cpu_s / got * 1e9, "gb_per_s": got / seconds / 1e9, "connection_ms": opening_ms}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(name: str, served: Cloud, size: int, n_bytes: int) -> Figures:
    """The figures of one client in a process of its own."""
    command = measuring.program("questions.tls", "--client", name, served.endpoint, size, n_bytes)
    environment = measuring.importing(**served.trust())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(measuring.last_lines(done.stderr))
    return dict(json.loads(done.stdout))


def reads(work: Path, sizes: list[int], turns: int, n_bytes: int) -> dict[str, dict[str, list[Figures]]]:
    """The turns of every client and size, by scheme."""
    path = work / "bucket" / "object"
    path.parent.mkdir()
    path.write_bytes(random.Random(1).randbytes(_OBJECT_BYTES))
    found: dict[str, dict[str, list[Figures]]] = {}
    with cloud(work, _LINKS["http"]) as plain, cloud(work, _LINKS["https"]) as secure:
        sides = [(name, size, at) for size in sizes for name in CLIENTS for at in (plain, secure)]
        for turn in range(turns):
            for name, size, at in sides[:: -1 if turn % 2 else 1]:
                scheme = at.endpoint.partition(":")[0]
                of_side = found.setdefault(f"{name}, {size >> 10} KiB", {}).setdefault(scheme, [])
                of_side.append(measured(name, at, size, n_bytes))
            print(f"turn {turn + 1} done", file=sys.stderr)
    return found


def epochs(store: Path, work: Path, turns: int) -> dict[str, list[Figures]]:
    """Cold epochs of zloader that fill a mirror, by scheme."""
    rows, column = rows_and_column(store)
    options = {"chunk_size": 64, "preload_nchunks": 256, "obs": column}
    plain, secure = (store_location(store, link) for link in _LINKS.values())
    with plain as one, secure as other:
        first, second = (reader("zloader", sys.executable, at, options, work) for at in (one, other))
        with first as without, second as under:
            sides = {"http": lambda: filling_epoch(without, work), "https": lambda: filling_epoch(under, work)}
            runs = in_turns(sides, turns, rows=rows, label="cold epochs")
    for figures in (each for of_side in runs.values() for each in of_side):
        figures["cpu_s_per_gb"] = (figures["user_s"] + figures["system_s"]) / figures["served_bytes"] * 1e9
        figures["gb_per_s"] = figures["served_bytes"] / figures["seconds"] / 1e9
    return runs


def summary(runs: dict[str, list[Figures]]) -> Figures:
    """Medians, and the ratios of the turns."""
    ratios = [b["cpu_s_per_gb"] / a["cpu_s_per_gb"] for a, b in zip(runs["http"], runs["https"], strict=True)]
    medians = {
        f"{scheme} {figure}": measuring.median(of_side, figure)
        for scheme, of_side in runs.items()
        for figure in ("cpu_s_per_gb", "gb_per_s", "connection_ms")
        if figure in of_side[0]
    }
    return {**medians, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main() -> None:
    """Measures, and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--sizes", default="262144,2097152")
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--store", type=Path, help="a store of zloader, for the cold epochs")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.client:
        name, endpoint, size, n_bytes = flags.client
        print(json.dumps(asyncio.run(client(name, endpoint, int(size), int(n_bytes)))), flush=True)
        os._exit(0)  # obstore sometimes aborts while the interpreter ends
    with tempfile.TemporaryDirectory() as folder:
        runs = reads(Path(folder), list(map(int, flags.sizes.split(","))), flags.turns, flags.mb * 1_000_000)
        if flags.store:
            runs["zloader, cold epoch"] = epochs(flags.store, Path(folder), flags.turns)
    found = {name: summary(of_side) for name, of_side in runs.items()}
    columns = ("cpu_s_per_gb", "gb_per_s", "connection_ms")
    lines = [["", *(f"{unit}, {scheme}" for unit in ("s/GB", "GB/s", "ms/connection") for scheme in _LINKS), "x"]]
    for name, each in found.items():
        ratio = f"{each['ratio']:.2f} ({each['least']:.2f} to {each['most']:.2f})"
        names = [f"{scheme} {figure}" for figure in columns for scheme in _LINKS]
        shown = [f"{each[figure]:.2f}" if figure in each else "" for figure in names]
        lines.append([name, *shown, ratio])
    measuring.table(lines)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
