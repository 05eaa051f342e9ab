"""The lower layer of the S3 simulator: sockets, HTTP heads, bandwidth, and one request with its response."""

from __future__ import annotations

import contextlib
import http
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypedDict
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.tally import LogEntry, Tally

_SO_MAX_PACING_RATE = 47  # Linux; the socket module has no name for it
_UNPACED = 2**64 - 1
_RECEIVE_BYTES = 1 << 16
_CUTS = ("reset", "truncate", "noclen", "stall")
_SECONDS_BEFORE_RESET = 0.05  # RST discards bytes that the client has not read yet, so give it time to read
_DRIP_S = 0.05  # between the pieces of a slow body
_BURST_S = 0.02  # how far the shared link may run ahead of its rate


class DisconnectError(Exception):
    """Raised to close the connection to the client."""


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Latency and bandwidth of the simulated link. Rates are in MB/s (10^6 bytes); 0 means no limit and no delay."""

    ttfb_ms: float = 0.0  # delay before the head of every response...
    ttfb_sigma: float = 0.0  # ...log-normal around that median if above 0
    connect_ms: float = 0.0  # extra delay before a connection's first response, for the TCP and TLS handshakes
    conn_mbps: float = 0.0  # per connection; paced by the kernel after the first 10 segments (0.6 MB on loopback)
    total_mbps: float = 0.0  # all connections together
    congestion: str = "cubic"  # TCP congestion control algorithm of new connections


class ShapingOptions(TypedDict, total=False):
    """The fields of Shaping as keyword arguments."""

    ttfb_ms: float
    ttfb_sigma: float
    connect_ms: float
    conn_mbps: float
    total_mbps: float
    congestion: str


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head of an HTTP message: its first line, its headers by lower-case name, and its raw bytes."""

    first_line: str
    fields: Mapping[str, str]
    raw: bytes

    @property
    def length(self) -> int:
        """Content-Length in bytes, or 0 if it is missing."""
        return int(self.fields.get("content-length") or 0)

    def says(self, name: str, value: str) -> bool:
        """Whether the header `name` has this value, compared in lower case."""
        return self.fields.get(name, "").lower() == value

    @cached_property
    def method(self) -> str:
        """The method of a request: GET, HEAD, ..."""
        return self.first_line.partition(" ")[0]

    @cached_property
    def target(self) -> str:
        """The path and query of a request, as sent."""
        return self.first_line.split(" ")[1]

    @cached_property
    def path(self) -> str:
        """The decoded path of a request."""
        return unquote(self.target.partition("?")[0])

    @cached_property
    def query(self) -> dict[str, str]:
        """The first value of each query parameter of a request."""
        return {k: v[0] for k, v in parse_qs(self.target.partition("?")[2], keep_blank_values=True).items()}


def parse_head(raw: bytes) -> Head:
    """Parses the head of an HTTP message, including the empty line that ends it."""
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(first_line=first, fields={k.strip().lower(): v.strip() for k, _, v in pairs}, raw=raw)


def response_head(status: int, fields: Iterable[str]) -> bytes:
    """The head of a response."""
    return "\r\n".join([f"HTTP/1.1 {status} {_reason(status)}", *fields, "", ""]).encode("latin-1")


def error_document(code: str, message: str, path: str) -> str:
    """S3's error document."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(code)}</Code><Message>{escape(message)}'
        f"</Message><Resource>{escape(path)}</Resource><RequestId>SIM</RequestId></Error>"
    )


class Wire:
    """One TCP connection, with a buffer of received bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self._bytes_per_s = 0.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> Head | None:
        """The next head, or None at the end of the stream."""
        scanned = 0
        while (end := self.received.find(b"\r\n\r\n", max(0, scanned - 3))) < 0:
            scanned = len(self.received)
            piece = self.sock.recv(_RECEIVE_BYTES)
            if not piece:
                return None
            self.received += piece
        return parse_head(self.take(end + 4))

    def take(self, count: int) -> bytes:
        """Up to `count` of the bytes received."""
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes."""
        while len(self.received) < count:
            self._receive(count - len(self.received))
        return self.take(count)

    def line(self) -> bytes:
        """The next line with its CRLF."""
        while (end := self.received.find(b"\r\n")) < 0:
            self._receive(_RECEIVE_BYTES)
        return self.take(end + 2)

    def some(self, limit: int) -> bytes:
        """At least one byte and at most `limit`."""
        if not self.received:
            self._receive(limit)
        return self.take(limit)

    def skip(self, count: int) -> None:
        """Discards the next `count` bytes."""
        while count:
            count -= len(self.some(min(count, 1 << 20)))

    def _receive(self, limit: int) -> None:
        piece = self.sock.recv(limit)
        if not piece:
            raise DisconnectError
        self.received += piece

    def pace(self, bytes_per_s: float) -> None:
        """Limits the kernel's sending rate. 0 means no limit."""
        if bytes_per_s != self._bytes_per_s:
            rate = struct.pack("Q", int(bytes_per_s) if bytes_per_s else _UNPACED)
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
            self._bytes_per_s = bytes_per_s

    def reset(self) -> None:
        """Closes with RST instead of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def hang_up(self) -> None:
        """Shuts down both directions, which wakes threads that wait on the socket."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Link:
    """The bandwidth that all connections share: a token bucket."""

    piece_bytes = 1 << 18  # taken at once, so that connections take turns

    def __init__(self, bytes_per_s: float, pause: Callable[[float], None]) -> None:
        self._bytes_per_s, self._pause = bytes_per_s, pause
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Waits until `count` bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            self._pause(wait_s)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request, and everything needed to answer it."""

    wire: Wire
    request: Head
    fault: HttpFault | None
    entry: LogEntry
    tally: Tally
    link: Link | None
    pause: Callable[[float], None]  # sleeps; raises DisconnectError when the simulator stops

    @property
    def kind(self) -> str | None:
        """The kind of fault that applies to this request, or None."""
        return self.fault.kind if self.fault else None

    def skip_request_body(self) -> None:
        """Reads and discards the request body, if there is one."""
        if self.request.length and self.request.says("expect", "100-continue"):
            self.wire.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.wire.skip(self.request.length)

    def send_head(self, status: int, fields: Iterable[str], *, body_bytes: int = 0) -> None:
        """Sends the head of the response. `body_bytes` of body follow."""
        self.tally.answered(self.entry, status)
        more = socket.MSG_MORE if body_bytes and not self.fault else 0
        self.wire.sock.sendall(response_head(status, fields), more)

    def send_document(self, status: int, document: str, *fields: str) -> None:
        """Sends a complete response with an XML body, without the body for HEAD."""
        body = document.encode()
        self.send_head(status, ["Content-Type: application/xml", f"Content-Length: {len(body)}", *fields])
        if self.request.method != "HEAD":
            self.wire.sock.sendall(body)

    def send_error(self, status: int, code: str, message: str) -> None:
        """Sends S3's error document."""
        self.send_document(status, error_document(code, message, self.request.path))

    def allow(self, count: int) -> int:
        """Waits for the shared link. Returns how many of `count` bytes may be sent now."""
        if self.link:
            count = min(count, self.link.piece_bytes)
            self.link.take(count)
        return count


class Body(Protocol):
    """The body of a response, from a file or from an upstream server."""

    def send(self, start: int, stop: int) -> None:
        """Sends bytes [start, stop) of the body to the client."""

    def read(self, start: int, stop: int) -> bytes:
        """Returns bytes [start, stop) of the body."""


def send_body(exchange: Exchange, body: Body, size: int) -> bool:
    """Sends a body of `size` bytes, changed by the fault if any. Returns whether the connection can be reused."""
    fault = exchange.fault
    if fault and fault.kind == "slow":
        piece = max(1, int(fault.bps * _DRIP_S))
        for start in range(0, size, piece):  # pacing would send a small body at once
            exchange.pause(_DRIP_S)
            body.send(start, min(size, start + piece))
    elif fault and fault.kind in _CUTS:
        body.send(0, min(size, max(0, fault.after)))
        if fault.kind == "stall":
            exchange.pause(3600 if fault.seconds is None else fault.seconds)
        if fault.kind == "reset":
            exchange.pause(_SECONDS_BEFORE_RESET)
            exchange.wire.reset()
        return False
    elif fault and fault.kind == "flip" and size:
        start = (size // 2 if fault.at is None else fault.at) % size
        stop = min(size, start + fault.n)
        body.send(0, start)
        exchange.wire.sock.sendall(bytes(byte ^ 0xFF for byte in body.read(start, stop)))
        exchange.entry["bytes"] += stop - start
        body.send(stop, size)
    else:
        body.send(0, size)
    return True


def _reason(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Simulated"
