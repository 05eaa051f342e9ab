"""Checks the simulated cloud: whether it keeps to its rates, and the CPU time that a GB costs it.

    python -m benchmarks.questions.link [--gigabytes 1] [--total-mbps 400,1200]

The server, harness/s3, sends a mapped file, as for benchmarks, or reads the file, as for tests: 256 MiB over loopback
at 80 MB/s per connection and 30 ms to the first byte. The client asks for ranges on raw sockets and lets the kernel
discard the bodies without copying them: one connection asks for 64 MiB at a time, and 64 connections for 8 MiB, 2 MiB
or 256 KiB.

"limit" is the rate that the settings allow for these requests. "first ms" is the time from a request to the first byte
of its response: the median and the range. The CPU time is that of the server's process per GB of bodies. "interrupts"
is the time that all processors spent in software interrupts. It counts for no process, and other processes add to it.
The line "plain sends" is the cost that no server can avoid: a process that sends the mapped file to one connection,
without a limit, 1 MiB at a time. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.measuring import Figures, importing, program, table

SERVERS = {"mapped file": ("--mapped",), "file": ()}  # flags of the server
_SHAPES = ((1, 64 << 20), (64, 8 << 20), (64, 2 << 20), (64, 256 << 10))  # connections, bytes of a request
_FILE_BYTES = 256 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
COLUMNS = ("MB/s", "limit", "first ms", "(range)", "user s/GB", "system s/GB", "interrupts s/GB")


class Client:
    """One connection that asks for ranges of a file."""

    def __init__(self, address: tuple[str, int], path: str) -> None:
        self._sock, self._path = socket.create_connection(address), path
        self._buffer = bytearray(1 << 20)

    def get(self, start: int, stop: int) -> float:
        """Asks for bytes [start, stop) and discards them. Returns the seconds to the first byte of the response."""
        request = f"GET {self._path} HTTP/1.1\r\nHost: here\r\nRange: bytes={start}-{stop - 1}\r\n\r\n"
        began = time.perf_counter()
        self._sock.sendall(request.encode())
        received = self._sock.recv_into(self._buffer)
        first_s = time.perf_counter() - began
        head_bytes = self._buffer.index(b"\r\n\r\n") + 4
        assert self._buffer.startswith(b"HTTP/1.1 206 "), bytes(self._buffer[:head_bytes])
        left = stop - start - (received - head_bytes)
        while left:
            received = self._sock.recv_into(self._buffer, min(left, len(self._buffer)), socket.MSG_TRUNC)
            assert received, f"the server disconnected with {left} bytes missing"
            left -= received
        return first_s


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Runs a server. Yields its process number and address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing()) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the server did not start"
            url = urlsplit(found.group())
            yield process.pid, (str(url.hostname), int(url.port or 0))
        finally:
            process.terminate()


def spent(pid: int) -> list[float]:
    """User and system seconds of a process so far, and seconds of all processors in software interrupts."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    machine = Path("/proc/stat").read_text().split()
    return [int(ticks) / _TICKS_PER_S for ticks in (fields[11], fields[12], machine[7])]


def per_gigabyte(pid: int, before: list[float], n_bytes: int) -> Figures:
    """What `spent` counts since `before`, per GB."""
    names = ("user_s", "system_s", "interrupts_s")
    return {name: 1e9 * (b - a) / n_bytes for name, a, b in zip(names, before, spent(pid), strict=True)}


def measure(pid: int, address: tuple[str, int], shape: tuple[int, int], n_bytes: int) -> Figures:
    """The figures of one shape of requests."""
    connections, size = shape
    starts = iter([number * size % (_FILE_BYTES - size + 1) for number in range(max(connections, n_bytes // size))])
    lock = threading.Lock()

    def ask(client: Client) -> list[float]:
        firsts: list[float] = []
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return firsts
            firsts.append(client.get(start, start + size))

    clients = [Client(address, "/bucket/object") for _ in range(connections)]
    before, began = spent(pid), time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        firsts = [first for found in threads.map(ask, clients) for first in found]
    seconds, sent = time.perf_counter() - began, len(firsts) * size
    return {"mb_per_s": sent / seconds / 1e6, "first_s": firsts, **per_gigabyte(pid, before, sent)}


def limit(speed: LinkSpeed, connections: int, size: int) -> float:
    """The MB/s that the settings allow."""
    latency_s = speed.ttfb_ms / 1e3 * math.exp(speed.ttfb_sigma**2 / 2)  # the mean of a log-normal distribution
    return min(speed.total_mbps, connections * size / 1e6 / (latency_s + size / 1e6 / speed.conn_mbps))


def plain_sends(path: Path, n_bytes: int) -> Figures:
    """The figures of a process that only sends a file."""
    command = [sys.executable, "-c", _PLAIN, str(path), str(n_bytes)]
    with running(command) as (pid, address), socket.create_connection(address) as sock:
        buffer, left = bytearray(1 << 20), n_bytes
        before, began = spent(pid), time.perf_counter()
        sock.sendall(b"x")
        while left:
            left -= sock.recv_into(buffer, min(left, len(buffer)), socket.MSG_TRUNC)
        seconds = time.perf_counter() - began
        return {"mb_per_s": n_bytes / seconds / 1e6, **per_gigabyte(pid, before, n_bytes)}


_PLAIN = """
import mmap, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
with open(sys.argv[1], "rb") as file:
    content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
piece = 1 << 20
sock.recv(1)
for start in range(0, int(sys.argv[2]), piece):
    start %= len(content)
    sock.sendall(content[start : start + piece])
sock.recv(1)
"""


def write_object(path: Path) -> None:
    """Writes the file that is served."""
    path.write_bytes(os.urandom(1 << 20) * (_FILE_BYTES >> 20))


def line(name: str, allowed: str, figures: Figures) -> list[str]:
    """The cells of one measurement."""
    firsts = sorted(1e3 * first for first in figures.get("first_s", ()))
    return [
        name,
        f"{figures['mb_per_s']:,.0f}",
        allowed,
        f"{statistics.median(firsts):.1f}" if firsts else "",
        f"({firsts[0]:.0f} to {firsts[-1]:.0f})" if firsts else "",
        *(f"{figures[key]:.3f}" for key in ("user_s", "system_s", "interrupts_s")),
    ]


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="GB to read in each measurement")
    parser.add_argument("--total-mbps", default="400,1200", help="rates of the link (default: %(default)s)")
    options = parser.parse_args()
    n_bytes = int(options.gigabytes * 1e9) // (1 << 20) * (1 << 20)
    lines, runs = [["", *COLUMNS]], {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "bucket", "object")
        path.parent.mkdir()
        write_object(path)
        runs["plain sends"] = plain_sends(path, n_bytes)
        lines.append(line("plain sends", "", runs["plain sends"]))
        for total, server in itertools.product(options.total_mbps.split(","), SERVERS):
            speed = LinkSpeed(total_mbps=float(total))
            command = program("harness.s3", "--root", directory, *SERVERS[server], *speed.arguments())
            with running(command) as (pid, address):
                for connections, size in _SHAPES:
                    name = f"{server}, {total} MB/s, {connections} x {size / (1 << 20):g} MiB"
                    runs[name] = measure(pid, address, (connections, size), n_bytes if connections > 1 else 2 * size)
                    lines.append(line(name, f"{limit(speed, connections, size):,.0f}", runs[name]))
    table(lines)
    for figures in runs.values():
        figures.pop("first_s", None)
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": [load, os.getloadavg()[0]], "runs": runs}))


if __name__ == "__main__":
    main()
