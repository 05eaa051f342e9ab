"""Forwards the S3 simulator's requests to a real S3 server.

Only faults change heads, so a signature that the client made for the simulator's address stays valid. Bodies are
spliced in the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket

from benchmarks.harness.s3.wire import DisconnectError, Exchange, Head, Link, Wire, send_body

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


class Proxy:
    """One connection to the upstream server, opened at the first request."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._upstream: Wire | None = None
        self._pipe: tuple[int, int] = (-1, -1)

    def close(self) -> None:
        """Closes the connection if it is open."""
        if self._upstream:
            self._upstream.sock.close()
            for end in self._pipe:
                os.close(end)

    def respond(self, exchange: Exchange) -> bool:
        """Forwards one request and its response. Returns whether the connection can be reused."""
        upstream = self._connected()
        self._forward_request(exchange, upstream)
        answer = upstream.head()
        if answer is None:
            raise DisconnectError
        status = int(answer.first_line.split(" ", 2)[1])
        exchange.tally.answered(exchange.entry, status)
        bodiless = exchange.request.method == "HEAD" or status in (204, 304)
        chunked = not bodiless and answer.says("transfer-encoding", "chunked")
        size = 0 if bodiless or chunked else answer.length
        raw, missing = _changed(exchange, answer, size)
        exchange.wire.sock.sendall(raw, socket.MSG_MORE if size and not exchange.fault else 0)
        if chunked:
            self._forward_chunks(exchange, upstream, exchange.wire, counted=True)
            good = True
        else:
            body = _UpstreamBody(self, exchange, upstream)
            good = bodiless or send_body(exchange, body, size - missing)
        return good and not missing and not answer.says("connection", "close")

    def _connected(self) -> Wire:
        if self._upstream is None:
            self._upstream = Wire(socket.create_connection(self._address))
            self._pipe = os.pipe()
            with contextlib.suppress(OSError):  # above the user's limit; the default size is only slower
                fcntl.fcntl(self._pipe[1], _F_SETPIPE_SZ, _PIPE_BYTES)
        return self._upstream

    def _forward_request(self, exchange: Exchange, upstream: Wire) -> None:
        request, wire = exchange.request, exchange.wire
        upstream.sock.sendall(request.raw)
        if request.says("expect", "100-continue"):
            interim = upstream.head()
            if interim is None:
                raise DisconnectError
            wire.sock.sendall(interim.raw)
            if " 100 " not in interim.first_line:  # refused: the client will not send the body
                exchange.tally.answered(exchange.entry, int(interim.first_line.split(" ", 2)[1]))
                wire.sock.sendall(upstream.exactly(interim.length))
                raise DisconnectError
        if request.says("transfer-encoding", "chunked"):
            self._forward_chunks(exchange, wire, upstream, counted=False)
        else:
            self.splice(exchange, wire, upstream, request.length, counted=False)

    def splice(self, exchange: Exchange, source: Wire, sink: Wire, count: int, *, counted: bool) -> None:
        """Moves `count` bytes from one connection to the other. `counted` says that they are the response body."""
        early = source.take(count)
        sink.sock.sendall(early)
        _count(exchange, len(early), counted)
        count -= len(early)
        to_pipe, from_pipe = self._pipe[1], self._pipe[0]
        while count:
            limit = Link.piece_bytes if exchange.link else _PIPE_BYTES
            moved = os.splice(source.sock.fileno(), to_pipe, min(count, limit))
            if not moved:
                raise DisconnectError
            if counted and exchange.link:
                exchange.link.take(moved)
            left = moved
            while left:
                left -= os.splice(from_pipe, sink.sock.fileno(), left)
            count -= moved
            _count(exchange, moved, counted)

    def _forward_chunks(self, exchange: Exchange, source: Wire, sink: Wire, *, counted: bool) -> None:
        """Moves a body in chunked transfer coding, including its trailer."""
        while True:
            line = source.line()
            sink.sock.sendall(line)
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            left = size + len(b"\r\n")
            while left:
                piece = source.some(min(left, _PIPE_BYTES))
                sink.sock.sendall(piece)
                left -= len(piece)
            _count(exchange, size, counted)
        while line != b"\r\n":
            line = source.line()
            sink.sock.sendall(line)


class _UpstreamBody:
    """The body of the upstream server's response, which can be read only once and in order."""

    def __init__(self, proxy: Proxy, exchange: Exchange, upstream: Wire) -> None:
        self._proxy, self._exchange, self._upstream = proxy, exchange, upstream

    def send(self, start: int, stop: int) -> None:
        self._proxy.splice(self._exchange, self._upstream, self._exchange.wire, stop - start, counted=True)

    def read(self, start: int, stop: int) -> bytes:
        return self._upstream.exactly(stop - start)


def _changed(exchange: Exchange, answer: Head, size: int) -> tuple[bytes, int]:
    """The head of the response after the fault, and the number of body bytes that the fault removes."""
    raw, fault = answer.raw, exchange.fault
    if fault and fault.kind == "etag":
        return re.sub(rb"(?i)\r\netag: [^\r]*", lambda _: b"\r\nETag: " + fault.value.encode(), raw), 0
    if fault and fault.kind == "noclen":
        return re.sub(rb"(?i)\r\ncontent-length: \d+", b"\r\nConnection: close", raw), 0
    if fault and fault.kind == "short" and size > 1:
        missing = min(size - 1, fault.by)
        return re.sub(rb"(?i)\r\ncontent-length: \d+", b"\r\nContent-Length: %d" % (size - missing), raw), missing
    return raw, 0


def _count(exchange: Exchange, sent: int, counted: bool) -> None:
    if counted:
        exchange.entry["bytes"] += sent
