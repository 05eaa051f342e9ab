"""The S3 simulator: accepts connections, shapes traffic and injects faults. Files or an upstream server respond.

There is one thread per connection. `stop` ends all threads, including those that wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, Unpack
from urllib.parse import urlsplit

from benchmarks.harness.s3.faults import FaultScript, HttpFault, parse_fault
from benchmarks.harness.s3.files import Files
from benchmarks.harness.s3.proxy import Proxy
from benchmarks.harness.s3.tally import LogEntry, Tally
from benchmarks.harness.s3.wire import DisconnectError, Exchange, Head, Link, Shaping, ShapingOptions, Wire
from zloader.common.errors import OptionError

CONTROL = "/__sim/"

_STOP_DEADLINE_S = 10.0


class Responder(Protocol):
    """Answers requests."""

    def respond(self, exchange: Exchange) -> bool:
        """Answers one request. Returns whether the connection can be reused."""

    def close(self) -> None:
        """Releases all resources."""


class Sim:
    """A loopback S3 endpoint with configurable latency, bandwidth and faults, from `start` to `stop` (or `with`).

    `root` serves ROOT/BUCKET/KEY read-only and ignores signatures. `upstream` ("HOST:PORT" or "http://HOST:PORT")
    forwards all methods to a real S3 server instead. Port 0 chooses a free port.

    Raises OptionError unless exactly one of `root` and `upstream` is given, and for invalid faults or shaping.

    >>> with Sim(root="/tmp", ttfb_ms=30, faults=[{"kind": "status", "count": 2}]) as sim:
    ...     sim.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        upstream: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Iterable[HttpFault | Mapping[str, Any]] = (),
        seed: int = 0,
        **shaping: Unpack[ShapingOptions],
    ) -> None:
        if (root is None) == (upstream is None):
            raise OptionError(f"give either root or upstream, not root={root!r} and upstream={upstream!r}")
        self.host, self.port = host, port
        self.root = None if root is None else Path(root)
        self.upstream = None if upstream is None else _address(upstream)
        self.tally = Tally()
        self._rng = random.Random(seed)
        self._listener: socket.socket | None = None
        self._stopped = threading.Event()
        self._connections: dict[threading.Thread, Wire] = {}
        self._lock = threading.Lock()  # guards _connections
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="s3sim-accept")
        self.faults = faults
        self.shaping = Shaping(**shaping)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else self.url if self._listener else "not started"
        return f"Sim({self.root or self.upstream}, {state})"

    @property
    def url(self) -> str:
        """The endpoint: `http://HOST:PORT`."""
        return f"http://{self.host}:{self.port}"

    @property
    def shaping(self) -> Shaping:
        """Latency and bandwidth. Can be set while requests are running."""
        return self._shaping

    @shaping.setter
    def shaping(self, shaping: Shaping) -> None:
        self._shaping = shaping
        self._link = Link(shaping.total_mbps * 1e6, self._pause) if shaping.total_mbps else None

    @property
    def faults(self) -> tuple[HttpFault, ...]:
        """The faults. Can be set while requests are running, to HttpFault objects or mappings of their fields."""
        return self._script.faults

    @faults.setter
    def faults(self, faults: Iterable[HttpFault | Mapping[str, Any]]) -> None:
        parsed = [parse_fault(fault) for fault in faults]
        if self.upstream and any(fault.kind == "ignore_range" for fault in parsed):
            raise OptionError("ignore_range works only with root: an upstream server checks the signature of the Range")
        self._script = FaultScript(parsed, self._rng)

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Changes the given settings: `faults`, and fields of `shaping`. Other settings stay as they are."""
        changes = dict(settings)
        faults = changes.pop("faults", None)
        unknown = changes.keys() - {field.name for field in fields(Shaping)}
        if unknown:
            known = ", ".join(field.name for field in fields(Shaping))
            raise OptionError(f"cannot set {', '.join(sorted(unknown))}: the settings are faults, {known}")
        if faults is not None:
            self.faults = faults
        if changes:
            self.shaping = replace(self.shaping, **changes)

    def stats(self) -> dict[str, int]:
        """Counters: requests, one per method, status_N, fault_KIND, bytes_out, connections, active, peak_active."""
        with self._lock:
            return {**self.tally.stats(), "open_connections": len(self._connections)}

    @property
    def log(self) -> list[LogEntry]:
        """The last 10,000 requests, oldest first."""
        return self.tally.log()

    def start(self) -> Self:
        """Starts listening."""
        self._listener = socket.create_server((self.host, self.port), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """Closes all connections and ends all threads. A stopped simulator cannot be started again."""
        if self._listener is None or self._stopped.is_set():
            return
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, unlike close
        self._acceptor.join(_STOP_DEADLINE_S)
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for wire in connections.values():
            wire.hang_up()
        for thread in connections:
            thread.join(_STOP_DEADLINE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopped.is_set():
                    return
                raise
            wire = Wire(sock)
            thread = threading.Thread(target=self._serve, args=(wire,), daemon=True, name="s3sim-connection")
            with self._lock:
                self._connections[thread] = wire
            thread.start()

    def _serve(self, wire: Wire) -> None:
        self.tally.count("connections")
        responder: Responder = Files(self.root) if self.root else Proxy(self.upstream or ("", 0))
        if self.shaping.congestion:
            with contextlib.suppress(OSError):  # the kernel lacks this algorithm
                wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.shaping.congestion.encode())
        try:
            extra_ms = self.shaping.connect_ms
            while request := wire.head():
                if request.path.startswith(CONTROL):
                    self._control(wire, request)
                    continue
                good = self._answer(wire, request, responder, extra_ms)
                if not good or request.says("connection", "close"):
                    break
                extra_ms = 0.0
        except (DisconnectError, OSError):  # the client disconnected
            pass
        finally:
            wire.sock.close()
            responder.close()
            with self._lock:
                del self._connections[threading.current_thread()]

    def _answer(self, wire: Wire, request: Head, responder: Responder, extra_ms: float) -> bool:
        began = time.monotonic()
        fault = self._script.pick(request.method, request.path, request.fields.get("range", ""))
        entry: LogEntry = {
            "t": time.time(),
            "method": request.method,
            "path": request.target,
            "range": request.fields.get("range"),
            "status": None,
            "bytes": 0,
            "fault": fault.kind if fault else None,
            "seconds": None,
        }
        self.tally.begin(entry)
        exchange = Exchange(
            wire=wire,
            request=request,
            fault=fault,
            entry=entry,
            tally=self.tally,
            link=self._link,
            pause=self._pause,
        )
        try:
            self._shape(exchange, extra_ms)
            if fault and fault.kind == "reset" and fault.after < 0:
                wire.reset()
                return False
            if fault and fault.kind == "status":
                _send_status(exchange, fault)
                return True
            return responder.respond(exchange)
        finally:
            self.tally.end(entry, time.monotonic() - began)

    def _shape(self, exchange: Exchange, extra_ms: float) -> None:
        shaping, fault = self.shaping, exchange.fault
        wait_ms = shaping.ttfb_ms + extra_ms
        if shaping.ttfb_ms and shaping.ttfb_sigma:
            wait_ms += shaping.ttfb_ms * (self._rng.lognormvariate(0, shaping.ttfb_sigma) - 1)
        if fault and fault.kind == "delay":
            wait_ms += 1e3 * (1 if fault.seconds is None else fault.seconds)
        if wait_ms > 0:
            self._pause(wait_ms / 1e3)
        exchange.wire.pace(shaping.conn_mbps * 1e6)

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise DisconnectError

    # ---- control over HTTP

    def _control(self, wire: Wire, request: Head) -> None:
        body = wire.exactly(request.length)
        status: int = 200
        answer: Any = {"ok": True}
        match request.path.removeprefix(CONTROL), request.method:
            case "config", "POST":
                try:
                    self.configure(json.loads(body or b"{}"))
                except (OptionError, json.JSONDecodeError) as error:
                    status, answer = 400, {"error": str(error)}
            case "config", _:
                answer = {**asdict(self.shaping), "faults": [asdict(fault) for fault in self.faults]}
            case "stats", _:
                answer = self.stats()
            case "log", _:
                answer = self.log
            case "reset", _:
                self.tally.clear()
            case _:
                status, answer = 404, {"error": f"unknown path {request.path}: use config, stats, log or reset"}
        text = json.dumps(answer).encode()
        reason = b"OK" if status == 200 else b"Error"
        head = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        wire.sock.sendall(head % (status, reason, len(text)) + text)


def _send_status(exchange: Exchange, fault: HttpFault) -> None:
    exchange.skip_request_body()
    if fault.body is None:
        exchange.send_error(fault.status, fault.code, fault.message)
    else:
        exchange.send_document(fault.status, fault.body)


def _address(upstream: str) -> tuple[str, int]:
    parts = urlsplit(upstream if "//" in upstream else f"//{upstream}")
    if parts.scheme not in ("", "http") or not parts.hostname or not parts.port:
        raise OptionError(f"upstream={upstream!r} is not an address: give HOST:PORT or http://HOST:PORT")
    return parts.hostname, parts.port
