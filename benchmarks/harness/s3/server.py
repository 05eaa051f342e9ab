"""The loop of the S3 simulator: one thread that sends every response piece by piece, when each piece is due.

The client and the server share the machine's cores, so a costly server slows the client that is to be measured. So a
body goes in pieces of up to 1 MiB, each with one `send`, and the thread sleeps until the next piece of any connection
is due: a GB takes a thousand pieces, a client is rarely woken, and the cost is mostly the kernel's copying. (`sendfile`
saves the copy, but costs more: it fills packets with pages of 4 KiB. Pacing by the kernel costs more too, and in
interrupts that count for no process.) questions/link.py measures all this.

The link:

- The head of a response comes `ttfb_ms` after its request (log-normal around that median with `ttfb_sigma`), together
  with the first 64 KiB of the body.
- A later piece comes when its connection has had the time for it at `conn_mbps`, so a connection never exceeds that
  rate by more than the first piece of each response.
- All pieces together stay within `total_mbps`, apart from bursts of up to 50 ms. Pieces that are due wait in a queue.
  First pieces do not wait, but count.
- On slow links, pieces are smaller: 20 ms of the link.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypedDict

from benchmarks.harness.s3.messages import Head, Reply, parse_head
from benchmarks.harness.s3.tally import LogEntry, Tally
from benchmarks.harness.s3.tls import TlsSocket

_FIRST_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
_PIECE_S = 0.02  # of a slow link
_DRIP_S = 0.05  # between the pieces of a slow body
_BURST_S = 0.05  # how far a connection or the link may catch up after the server was late
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NOTHING = memoryview(b"")


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Latency and bandwidth of the simulated link. Rates are in MB/s (10^6 bytes); 0 means no limit and no delay."""

    ttfb_ms: float = 0.0  # delay before the head of every response...
    ttfb_sigma: float = 0.0  # ...log-normal around that median if above 0
    connect_ms: float = 0.0  # extra delay before a connection's first response, for the TCP and TLS handshakes
    conn_mbps: float = 0.0  # per connection
    total_mbps: float = 0.0  # all connections together

    @cached_property
    def piece_bytes(self) -> int:
        """The most bytes of a piece."""
        rates = [mbps for mbps in (self.conn_mbps, self.total_mbps) if mbps]
        return max(1, min(_PIECE_BYTES, int(min(rates) * 1e6 * _PIECE_S))) if rates else _PIECE_BYTES


class ShapingOptions(TypedDict, total=False):
    """The fields of Shaping as keyword arguments."""

    ttfb_ms: float
    ttfb_sigma: float
    connect_ms: float
    conn_mbps: float
    total_mbps: float


@dataclass(eq=False, kw_only=True)
class Connection:
    """A connection, and the request and response in progress."""

    sock: socket.socket | TlsSocket
    received: bytearray = field(default_factory=bytearray)
    readable: bool = True  # the kernel may have bytes that were not received yet
    request: Head | None = None  # whose body is being received, or whose response is in progress
    busy: bool = False  # a response is in progress
    first: bool = True  # nothing was answered yet
    blocked: bool = False  # the kernel's send buffer is full
    closed: bool = False
    began: float = 0.0
    due: float = 0.0  # when the next piece may be sent
    entry: LogEntry | None = None  # of the request, unless it is for control
    reply: Reply | None = None
    head: bytes = b""  # of the response, what is left to send
    piece: memoryview = _NOTHING  # of the body, what is left to send


class Server(ABC):
    """Accepts connections on loopback and sends responses. A subclass says what is answered, and when."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.shaping = Shaping()
        self.tally = Tally()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._firsts: list[tuple[float, int, Connection]] = []  # heaps, by the time at which something is due
        self._laters: list[tuple[float, int, Connection]] = []
        self._numbers = itertools.count()  # breaks ties in the heaps
        self._link_free_at = 0.0
        self._found: deque[tuple[Connection, Reply | None]] = deque()  # by other threads
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._ending = False

    @abstractmethod
    def _begin(self, connection: Connection, request: Head, body: bytes) -> float:
        """Called when a request has come. Returns the seconds after which it is to be answered."""

    @abstractmethod
    def _answer(self, connection: Connection) -> None:
        """Has the request of the connection answered: calls `_reply`, now or later."""

    def _serve(self, listener: socket.socket) -> None:
        """Runs the loop until `_ending` is set. `_woken` stays open, because other threads may still write to it."""
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)
        self._epoll.register(self._woken, select.EPOLLIN)
        while not self._ending:
            self._send_due()
            for number, events in self._epoll.poll(self._wait_s()):
                if number == listener.fileno():
                    self._accept(listener)
                elif number == self._woken:
                    self._take_found()
                elif connection := self._connections.get(number):
                    self._wake(connection, events)
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()

    # ---- other threads

    def _reply_later(self, connection: Connection, reply: Reply | None) -> None:
        """Gives a response from another thread, None to close the connection."""
        self._found.append((connection, reply))
        self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _take_found(self) -> None:
        os.eventfd_read(self._woken)
        while self._found:
            connection, reply = self._found.popleft()
            if connection.closed:
                continue
            if reply is None:
                self._close(connection)
            else:
                self._reply(connection, reply)

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        sock: socket.socket | TlsSocket
        sock, _ = listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            try:
                sock = TlsSocket(sock, self._tls)
            except OSError:  # the client disconnected, and the socket is closed
                return
        self._connections[sock.fileno()] = Connection(sock=sock)
        self.tally.count("connections")
        # edge-triggered, so that one registration lasts as long as the connection
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT | _GONE | select.EPOLLET)

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
        while (size := self._complete(connection)) is None:
            if not connection.readable:
                return
            try:
                piece = connection.sock.recv(1 << 18)
            except BlockingIOError:
                connection.readable = False
                return
            except OSError:  # the client disconnected
                piece = b""
            if not piece:
                self._close(connection)
                return
            connection.received += piece
        body = bytes(connection.received[:size])
        del connection.received[:size]
        request = connection.request
        assert request is not None
        connection.busy, connection.began = True, time.monotonic()
        connection.due = connection.began + self._begin(connection, request, body)
        if not connection.closed:
            self._schedule(self._firsts, connection)

    def _complete(self, connection: Connection) -> int | None:
        """The bytes of the body of the next request, None as long as head or body have not come whole."""
        received = connection.received
        if connection.request is None:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return None
            connection.request = request = parse_head(bytes(received[: end + 4]))
            del received[: end + 4]
            if request.says("expect", "100-continue"):
                connection.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if connection.request.says("transfer-encoding", "chunked"):
            return _chunked_bytes(received)
        return connection.request.length if len(received) >= connection.request.length else None

    def _close(self, connection: Connection, *, reset: bool = False) -> None:
        if reset:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        del self._connections[connection.sock.fileno()]
        connection.closed = True
        self._done(connection)
        connection.sock.close()

    # ---- responses

    def _reply(self, connection: Connection, reply: Reply) -> None:
        """Begins to send a response."""
        connection.reply, connection.head = reply, reply.head
        if connection.entry:
            self.tally.answered(connection.entry, reply.status)
        self._send(
            connection, 0 if reply.bytes_per_s else min(_FIRST_BYTES, self.shaping.piece_bytes), time.monotonic()
        )

    def _schedule(self, heap: list[tuple[float, int, Connection]], connection: Connection) -> None:
        heapq.heappush(heap, (connection.due, next(self._numbers), connection))

    def _wait_s(self) -> float:
        """Seconds until something is due, negative for no limit."""
        times = [self._firsts[0][0]] if self._firsts else []
        if self._laters:
            times.append(max(self._laters[0][0], self._link_free_at))
        return max(0.0, min(times) - time.monotonic()) if times else -1.0

    def _send_due(self) -> None:
        """Answers and ends what is due, and sends one later piece if the link is free.

        Only one, so that requests and first pieces that arrive meanwhile do not wait for a burst.
        """
        now = time.monotonic()
        while self._firsts and self._firsts[0][0] <= now:
            connection = heapq.heappop(self._firsts)[2]
            if connection.closed:
                continue
            if connection.reply is None:
                self._answer(connection)
            else:
                self._end(connection, connection.reply)
        if self._laters and max(self._laters[0][0], self._link_free_at) <= now:
            connection = heapq.heappop(self._laters)[2]
            reply = connection.reply
            drip = int(reply.bytes_per_s * _DRIP_S) if reply and reply.bytes_per_s else _PIECE_BYTES
            self._send(connection, max(1, min(drip, self.shaping.piece_bytes)), now)

    def _send(self, connection: Connection, most: int, now: float) -> None:
        """Sends up to `most` bytes of a body, with the head before it, and schedules the next piece."""
        reply = connection.reply
        if connection.closed or reply is None:
            return
        if not connection.piece:
            connection.piece = reply.take(most)
        head, piece = connection.head, connection.piece
        try:
            sent = connection.sock.sendmsg([head, piece])
        except BlockingIOError:
            sent = 0
        except OSError:  # the client disconnected
            self._close(connection)
            return
        of_body = max(0, sent - len(head))
        connection.head, connection.piece = head[sent:], piece[of_body:]
        if connection.entry:
            connection.entry["bytes"] += of_body
            if self.shaping.total_mbps:
                seconds = of_body / (self.shaping.total_mbps * 1e6)
                self._link_free_at = max(self._link_free_at, now - _BURST_S) + seconds
        left = len(connection.piece) or min(self.shaping.piece_bytes, reply.stop - reply.start)
        connection.due = self._next_due(connection.due, now, left, reply)
        connection.blocked = bool(connection.head or connection.piece)
        if connection.blocked:
            return
        if left:
            self._schedule(self._laters, connection)
        elif reply.linger_s:
            connection.due = now + reply.linger_s
            self._schedule(self._firsts, connection)
        else:
            self._end(connection, reply)

    def _next_due(self, due: float, now: float, n_bytes: int, reply: Reply) -> float:
        rate = reply.bytes_per_s or self.shaping.conn_mbps * 1e6
        if reply.bytes_per_s:
            n_bytes = min(n_bytes, max(1, int(rate * _DRIP_S)))
        return max(due, now - _BURST_S) + n_bytes / rate if rate else now

    def _end(self, connection: Connection, reply: Reply) -> None:
        request = connection.request
        assert request is not None
        self._done(connection)
        connection.request, connection.busy, connection.first = None, False, False
        if reply.ends != "reuse" or request.says("connection", "close"):
            self._close(connection, reset=reply.ends == "reset")
        else:
            self._receive(connection)

    def _done(self, connection: Connection) -> None:
        """Counts a request that has ended, and releases its body."""
        reply, entry = connection.reply, connection.entry
        connection.reply = connection.entry = None
        connection.head, connection.piece = b"", _NOTHING
        if reply:
            reply.body.close()
        if entry:
            self.tally.end(entry, time.monotonic() - connection.began)


def _chunked_bytes(received: bytearray) -> int | None:
    """The bytes of a body in chunked transfer coding with its trailer, None if it has not come whole."""
    at = 0
    while (end := received.find(b"\r\n", at)) >= 0:
        size = int(received[at:end].split(b";")[0], 16)
        if not size:
            stop = received.find(b"\r\n\r\n", end)
            return stop + 4 if stop >= 0 else None
        at = end + 2 + size + 2
    return None
