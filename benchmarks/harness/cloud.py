"""A simulated S3 in a process of its own that takes little of the machine from the client it serves.

    python -m benchmarks.harness.cloud --root DIR [--ttfb-ms 30 --ttfb-sigma 0.3 --conn-mbps 80 --total-mbps 400]

It serves DIR/BUCKET/KEY read-only, like `benchmarks.harness.s3 --root`, with which it shares the code that decides
about a response. The files must not change while they are served. It injects no faults. Linux only.

The client and the server share the machine's cores, so a costly server slows the client that is to be measured. This
server is one thread. It sends a body in pieces of up to 1 MiB, each with one `send` from the memory-mapped file, and
sleeps until the next piece of any connection is due. So a GB takes a thousand pieces, a client is rarely woken, and the
cost is mostly the kernel's copying. (`sendfile` saves the copy, but costs more: it fills packets with pages of 4 KiB.
Pacing by the kernel costs more too, and in interrupts that count for no process.) `link.py` measures all this.

The link:

- The head of a response comes `--ttfb-ms` after its request (log-normal around that median with `--ttfb-sigma`),
  together with the first 64 KiB of the body.
- A later piece comes when its connection has had the time for it at `--conn-mbps`, so a connection never exceeds that
  rate by more than the first 64 KiB of each response.
- All pieces together stay within `--total-mbps`, apart from bursts of up to 50 ms. Pieces that are due wait in a queue.
  First pieces do not wait, but count.

Control over HTTP: POST /__sim/reset sets the counters to zero. GET /__sim/stats returns them: requests, bytes_out (of
bodies), active and peak_active, and the CPU seconds of the process, user_s and system_s.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import mmap
import os
import random
import resource
import select
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import die_with_parent, importing, program
from benchmarks.harness.s3.files import Files, StoredFile, file_answer, stored_file
from benchmarks.harness.s3.wire import Head, parse_head, response_head

_CONTROL = "/__sim/"
_FIRST_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
_BURST_S = 0.05  # how far a connection or the link may catch up after the server was late
_NICENESS = -15  # as far as the user may: the server stands for another machine, which does not wait for this one
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NOTHING = memoryview(b"")


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Latency and bandwidth of the simulated link. Rates are in MB/s (10^6 bytes)."""

    ttfb_ms: float = 30.0
    ttfb_sigma: float = 0.3
    conn_mbps: float = 80.0
    total_mbps: float = 400.0

    def arguments(self) -> list[str]:
        """The options of the command line for this link."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items()]


@dataclass(eq=False, kw_only=True)
class Connection:
    """A connection, and the part of the response in progress that is left to send."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    readable: bool = False  # the kernel may have bytes that were not received yet
    busy: bool = False  # a response is in progress
    counted: bool = False  # ... to a request that is not for control
    blocked: bool = False  # the kernel's send buffer is full
    last: bool = False  # the connection ends with this response
    closed: bool = False
    due: float = 0.0  # when the next piece may be sent
    head: bytes = b""
    body: memoryview = field(default_factory=lambda: memoryview(b""))


class Server:
    """Serves the files below `root` on loopback, in the calling thread."""

    def __init__(self, root: Path, speed: LinkSpeed) -> None:
        self._files, self._speed = Files(root), speed
        self._stored: dict[str, tuple[StoredFile, memoryview]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._firsts: list[tuple[float, int, Connection]] = []  # heaps, by the time at which a piece is due
        self._laters: list[tuple[float, int, Connection]] = []
        self._numbers = itertools.count()  # breaks ties in the heaps
        self._link_free_at = 0.0
        self._rng = random.Random(0)
        self._counts: Counter[str] = Counter()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        """Serves until the process is ended."""
        while True:
            self._send_due()
            for number, events in self._epoll.poll(self._wait_s()):
                if number == self._listener.fileno():
                    self._accept()
                elif connection := self._connections.get(number):
                    self._wake(connection, events)

    # ---- connections

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[sock.fileno()] = Connection(sock=sock)
        # edge-triggered, so that one registration lasts as long as the connection
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | _GONE | select.EPOLLET)

    def _wake(self, connection: Connection, events: int) -> None:
        connection.readable |= bool(events & (select.EPOLLIN | _GONE))
        if not connection.busy:
            self._receive(connection)
        elif events & _GONE:
            self._close(connection)
        elif connection.blocked and events & select.EPOLLOUT:
            connection.blocked = False
            self._schedule(self._laters, connection)

    def _receive(self, connection: Connection) -> None:
        """Receives until a request is complete, and begins its response."""
        while (end := connection.received.find(b"\r\n\r\n")) < 0:
            if not connection.readable:
                return
            try:
                piece = connection.sock.recv(1 << 16)
            except BlockingIOError:
                connection.readable = False
                return
            except OSError:  # the client disconnected
                piece = b""
            if not piece:
                self._close(connection)
                return
            connection.received += piece
        raw = bytes(connection.received[: end + 4])
        del connection.received[: end + 4]
        self._begin(connection, parse_head(raw))

    def _close(self, connection: Connection) -> None:
        del self._connections[connection.sock.fileno()]
        connection.closed = True
        self._counts["active"] -= connection.counted
        connection.sock.close()

    # ---- responses

    def _begin(self, connection: Connection, request: Head) -> None:
        delay_s = 0.0
        if request.path.startswith(_CONTROL):
            connection.head, connection.body = self._control(request.path.removeprefix(_CONTROL))
        else:
            connection.head, connection.body = self._response(request)
            connection.counted = True
            self._counts["requests"] += 1
            self._counts["active"] += 1
            self._counts["peak_active"] = max(self._counts["peak_active"], self._counts["active"])
            delay_s = self._speed.ttfb_ms / 1e3 * self._rng.lognormvariate(0, self._speed.ttfb_sigma)
        connection.busy = True
        connection.last = request.says("connection", "close") or request.length > 0  # a request's body is not read
        connection.due = time.monotonic() + delay_s
        self._schedule(self._firsts, connection)

    def _response(self, request: Head) -> tuple[bytes, memoryview]:
        reads = request.method in ("GET", "HEAD")
        file, content = (reads and self._stored.get(request.path)) or self._opened(request)
        answer = file_answer(request, file) if file else self._files.answer(request)
        head, body = response_head(answer.status, answer.fields), content[answer.start : answer.stop]
        if answer.document is not None:
            body = memoryview(answer.document.encode())
            lengths = ("Content-Type: application/xml", f"Content-Length: {len(body)}")
            head = response_head(answer.status, [*lengths, *answer.fields])
        return head, _NOTHING if request.method == "HEAD" else body

    def _opened(self, request: Head) -> tuple[StoredFile | None, memoryview]:
        descriptor = self._files.opened(request)
        if descriptor is None:
            return None, _NOTHING
        facts = stored_file(os.fstat(descriptor))
        content = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if facts.size else b""
        os.close(descriptor)
        self._stored[request.path] = facts, memoryview(content)
        return self._stored[request.path]

    def _control(self, command: str) -> tuple[bytes, memoryview]:
        if command == "reset":
            active = self._counts["active"]
            self._counts = Counter(active=active, peak_active=active)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counts = {name: self._counts[name] for name in ("requests", "bytes_out", "active", "peak_active")}
        body = json.dumps({**counts, "user_s": usage.ru_utime, "system_s": usage.ru_stime}).encode()
        return response_head(200, ["Content-Type: application/json", f"Content-Length: {len(body)}"]), memoryview(body)

    # ---- sending

    def _schedule(self, heap: list[tuple[float, int, Connection]], connection: Connection) -> None:
        heapq.heappush(heap, (connection.due, next(self._numbers), connection))

    def _wait_s(self) -> float:
        """Seconds until a piece may be sent, negative for no limit."""
        times = [self._firsts[0][0]] if self._firsts else []
        if self._laters:
            times.append(max(self._laters[0][0], self._link_free_at))
        return max(0.0, min(times) - time.monotonic()) if times else -1.0

    def _send_due(self) -> None:
        """Sends the first pieces that are due, and one later piece if the link is free.

        Only one, so that requests and first pieces that arrive meanwhile do not wait for a burst.
        """
        now = time.monotonic()
        while self._firsts and self._firsts[0][0] <= now:
            self._send(heapq.heappop(self._firsts)[2], _FIRST_BYTES, now)
        if self._laters and max(self._laters[0][0], self._link_free_at) <= now:
            self._send(heapq.heappop(self._laters)[2], _PIECE_BYTES, now)

    def _send(self, connection: Connection, most: int, now: float) -> None:
        """Sends up to `most` bytes of a body, with the head before it, and schedules the next piece."""
        if connection.closed:
            return
        head, piece = connection.head, connection.body[:most]
        try:
            sent = connection.sock.sendmsg([head, piece])
        except BlockingIOError:
            sent = 0
        except OSError:  # the client disconnected
            self._close(connection)
            return
        of_body = max(0, sent - len(head))
        connection.head, connection.body = head[sent:], connection.body[of_body:]
        if connection.counted:
            self._counts["bytes_out"] += of_body
            self._link_free_at = max(self._link_free_at, now - _BURST_S) + of_body / (self._speed.total_mbps * 1e6)
        connection.blocked = sent < len(head) + len(piece)
        left = min(_PIECE_BYTES, len(connection.body))
        connection.due = max(connection.due, now - _BURST_S) + left / (self._speed.conn_mbps * 1e6)
        if connection.blocked:
            return
        if left:
            self._schedule(self._laters, connection)
        else:
            self._finish(connection)

    def _finish(self, connection: Connection) -> None:
        self._counts["active"] -= connection.counted
        connection.busy = connection.counted = False
        if connection.last:
            self._close(connection)
        else:
            self._receive(connection)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A server in its own process."""

    endpoint: str

    def storage_options(self) -> dict[str, str]:
        """The storage options of zloader and s3fs."""
        return {"key": "any", "secret": "any", "endpoint_url": self.endpoint}

    def reset(self) -> dict[str, Any]:
        """Resets the server's counters and returns them. Its CPU seconds go on."""
        return self._ask("reset", "POST")

    def stats(self) -> dict[str, Any]:
        """The server's counters."""
        return self._ask("stats", "GET")

    def _ask(self, command: str, method: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.endpoint}{_CONTROL}{command}", method=method)
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def cloud(root: Path, speed: LinkSpeed | None = None) -> Iterator[Cloud]:
    """Runs a server for the buckets in `root`."""
    command = program("harness.cloud", "--root", root, *(speed or LinkSpeed()).arguments())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing()) as server:
        try:
            assert server.stdout is not None
            yield Cloud(endpoint=server.stdout.readline().strip())
        finally:
            server.terminate()


def main() -> None:
    """Serves, and prints the endpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    for name, default in vars(LinkSpeed()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    options = vars(parser.parse_args())
    die_with_parent()
    with contextlib.suppress(PermissionError):
        os.nice(_NICENESS)
    server = Server(options.pop("root"), LinkSpeed(**options))
    print(server.url, flush=True)
    server.run()


if __name__ == "__main__":
    main()
