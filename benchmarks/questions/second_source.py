"""Which client reads ranges from Azure with the least CPU time: obstore, or adlfs through fsspec?

    python -m benchmarks.questions.second_source [--turns 5] [--sizes 131072,1048576,4194304] [--mb 256]

Azurite on loopback holds one blob of 64 MiB. Each side reads `--mb` megabytes in ranges of one size, 64 at once. The
sides take turns in processes of their own, so user and system seconds are those of the client alone. Azurite (Node.js)
takes most of the time and the other core, so GB/s says little and CPU seconds per GB say much. The side "obstore +
ETag" asks for each answer's ETag too, which a ByteSource needs; adlfs does not return it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import measuring
from benchmarks.harness.azurite import ACCOUNT, KEY, Azurite

_BLOB_BYTES = 64 << 20
_AT_ONCE = 64
_CLIENT = {"allow_http": True, "timeout": "300s"}
Read = Callable[[int, int], Awaitable[int]]


def obstore_side(url: str, *, tag: bool) -> Read:
    from obstore.store import AzureStore

    store = AzureStore("container", account_name=ACCOUNT, account_key=KEY, endpoint=url, client_options=_CLIENT)

    async def plain(start: int, stop: int) -> int:
        return len((await store.get_range_async("blob", start=start, end=stop)).to_bytes())

    async def tagged(start: int, stop: int) -> int:
        answer = await store.get_async("blob", options={"range": (start, stop)})
        assert answer.meta["e_tag"]
        return len((await answer.bytes_async()).to_bytes())

    return tagged if tag else plain


async def adlfs_side(connection_string: str) -> Read:
    from adlfs import AzureBlobFileSystem

    files = AzureBlobFileSystem(connection_string=connection_string, asynchronous=True, loop=asyncio.get_running_loop())

    async def read(start: int, stop: int) -> int:
        return len(await files._cat_file("container/blob", start, stop))

    return read


async def client(side: str, url: str, connection_string: str, size: int, n_bytes: int) -> dict[str, float]:
    read = await adlfs_side(connection_string) if side == "adlfs" else obstore_side(url, tag="ETag" in side)
    drawn = random.Random(0)
    starts = [drawn.randrange(_BLOB_BYTES - size) for _ in range(n_bytes // size)]
    await read(0, size)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(start: int) -> int:
        async with turns:
            return await read(start, start + size)

    before, began = os.times(), time.perf_counter()
    got = sum(await asyncio.gather(*map(one, starts)))
    wall, after = time.perf_counter() - began, os.times()
    assert got == len(starts) * size
    cpu = after.user + after.system - before.user - before.system
    return {"cpu_s_per_gb": cpu / got * 1e9, "gb_per_s": got / wall / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes", default="131072,1048576,4194304")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.client:
        side, url, connection, size, n_bytes = flags.client
        print(json.dumps(asyncio.run(client(side, url, connection, int(size), int(n_bytes)))), flush=True)
        os._exit(0)  # adlfs leaves sessions open that asyncio would complain about
    with tempfile.TemporaryDirectory() as folder, Azurite(folder) as azure:
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(azure.connection_string) as service:
            service.create_container("container").upload_blob("blob", random.Random(1).randbytes(_BLOB_BYTES))
        found: dict[str, list[dict[str, float]]] = {}
        for turn in range(flags.turns):
            for size in map(int, flags.sizes.split(",")):
                for side in ("obstore", "obstore + ETag", "adlfs"):
                    given = [side, azure.endpoint_url, azure.connection_string, size, flags.mb * 1_000_000]
                    command = measuring.program("questions.second_source", "--client", *given)
                    done = subprocess.run(
                        command, env=measuring.importing(), capture_output=True, text=True, check=False
                    )
                    if done.returncode:
                        sys.exit(measuring.last_lines(done.stderr))
                    found.setdefault(f"{side}, {size >> 10} KiB", []).append(json.loads(done.stdout))
            print(f"turn {turn + 1} done", file=sys.stderr)
    medians: dict[str, Any] = {
        name: {figure: round(statistics.median(each[figure] for each in turns), 3) for figure in turns[0]}
        for name, turns in found.items()
    }
    for name, figures in sorted(medians.items()):
        print(f"{name:28} {figures['cpu_s_per_gb']:7.2f} CPU s per GB {figures['gb_per_s']:7.3f} GB/s")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
