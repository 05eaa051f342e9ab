"""crc32c of chunks by the packages that have it, in turns: google-crc32c, crc32c if it is installed, and numcodecs.

    python -m benchmarks.questions.checksums

Prints GB per second of processor time, and the speed in that of google-crc32c, as medians of the turns.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
from numcodecs.checksum32 import CRC32C

TURNS, TURN_BYTES = 15, 16 << 20


def packages() -> dict[str, Callable[[Any], int]]:
    found = {"google-crc32c": google_crc32c.value, "numcodecs": CRC32C().checksum}
    with contextlib.suppress(ImportError):
        found["crc32c"] = importlib.import_module("crc32c").crc32c
    return found


def bytes_per_s(checksum: Callable[[Any], int], chunk: Any) -> float:
    times = max(1, TURN_BYTES // len(chunk))
    began = time.thread_time()
    for _ in range(times):
        checksum(chunk)
    return times * len(chunk) / (time.thread_time() - began)


def main() -> None:
    found = packages()
    for n_bytes in (4 << 10, 64 << 10, 8 << 20):
        chunk = np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8)
        assert len({checksum(chunk) for checksum in found.values()}) == 1
        turns = [{name: bytes_per_s(checksum, chunk) for name, checksum in found.items()} for _ in range(TURNS)]
        for name in found:
            speed = statistics.median(turn[name] for turn in turns)
            ratio = statistics.median(turn[name] / turn["google-crc32c"] for turn in turns)
            print(f"{n_bytes:>8} bytes, {name}: {speed / 1e9:.2f} GB/s, {ratio:.2f}")


if __name__ == "__main__":
    main()
