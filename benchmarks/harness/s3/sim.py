"""The S3 simulator: the settings of its link and of its faults, and its control over HTTP."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import urlsplit

from benchmarks.harness.s3.faults import FaultScript, HttpFault, parse_fault
from benchmarks.harness.s3.files import Files
from benchmarks.harness.s3.messages import Head, InMemory, Reply, document, error_document, response_head
from benchmarks.harness.s3.server import Connection, Server, Shaping, ShapingOptions
from benchmarks.harness.s3.tally import LogEntry
from benchmarks.harness.s3.tls import server_context
from benchmarks.harness.s3.upstream import forwarded
from zloader.common.errors import OptionError

CONTROL = "/__sim/"

_FORWARDED_AT_ONCE = 32


class Sim(Server):
    """A loopback S3 endpoint with configurable latency, bandwidth and faults, from `start` to `stop` (or `with`).

    `root` serves ROOT/BUCKET/KEY read-only and ignores signatures. `upstream` ("HOST:PORT" or "http://HOST:PORT")
    forwards all methods to a real S3 server instead. Port 0 chooses a free port. `mapped` is for files that do not
    change. With a `certificate`, a PEM that has the key, too, the endpoint is https.

    Raises OptionError unless exactly one of `root` and `upstream` is given, and for invalid faults or shaping.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        upstream: str | None = None,
        port: int = 0,
        faults: Iterable[HttpFault | Mapping[str, Any]] = (),
        mapped: bool = False,
        certificate: str | os.PathLike[str] | None = None,
        **shaping: Unpack[ShapingOptions],
    ) -> None:
        if (root is None) == (upstream is None):
            raise OptionError(f"give either root or upstream, not root={root!r} and upstream={upstream!r}")
        self.port = port
        self.root = None if root is None else Path(root)
        self.upstream = None if upstream is None else _address(upstream)
        self._rng = random.Random(0)
        self.faults = faults
        super().__init__(server_context(Path(certificate)) if certificate else None)
        self.shaping = Shaping(**shaping)
        self._files = None if root is None else Files(root, mapped=mapped)
        self._bodies: dict[Connection, tuple[bytes, HttpFault | None]] = {}
        self._thread: threading.Thread | None = None
        self._forwarding = ThreadPoolExecutor(_FORWARDED_AT_ONCE, thread_name_prefix="s3sim-upstream")

    def __repr__(self) -> str:
        state = "stopped" if self._ending else self.url if self._thread else "not started"
        return f"Sim({self.root or self.upstream}, {state})"

    @property
    def url(self) -> str:
        """The endpoint: `http://HOST:PORT`, or https."""
        return f"http{'s' if self._tls else ''}://{self.host}:{self.port}"

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
        known = [field.name for field in fields(Shaping)]
        if unknown := changes.keys() - set(known):
            names = ", ".join(sorted(unknown))
            raise OptionError(f"cannot set {names}: the settings are faults, {', '.join(known)}")
        if faults is not None:
            self.faults = faults
        self.shaping = replace(self.shaping, **changes)

    def stats(self) -> dict[str, int]:
        """Counters: requests, one per method, status_N, fault_KIND, bytes_out, connections, active, peak_active."""
        return {**self.tally.stats(), "open_connections": len(self._connections)}

    @property
    def log(self) -> list[LogEntry]:
        """The last 10,000 requests, oldest first."""
        return self.tally.log()

    def start(self) -> Self:
        """Starts listening, in a thread of its own."""
        listener = socket.create_server((self.host, self.port), backlog=1024)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True, name="s3sim")
        self._thread.start()
        return self

    def _run(self, listener: socket.socket) -> None:
        with listener:
            self._serve(listener)

    def stop(self) -> None:
        """Closes all connections and ends all threads. A stopped simulator cannot be started again."""
        if self._thread is None or self._ending:
            return
        self._ending = True
        self._wake_up()
        self._thread.join()
        self._forwarding.shutdown()
        os.close(self._woken)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- requests

    def _begin(self, connection: Connection, request: Head, body: bytes) -> float:
        if request.path.startswith(CONTROL):
            self._bodies[connection] = body, None
            return 0.0
        fault = self._script.pick(request.method, request.path, request.fields.get("range", ""))
        self._bodies[connection] = body, fault
        connection.entry = {
            "t": time.time(), "method": request.method, "path": request.target,
            "range": request.fields.get("range"), "status": None, "bytes": 0, "fault": fault.kind if fault else None,
            "seconds": None,
        }  # fmt: skip
        self.tally.begin(connection.entry)
        return self._latency_s(fault, first=connection.first)

    def _latency_s(self, fault: HttpFault | None, *, first: bool) -> float:
        shaping = self.shaping
        spread = self._rng.lognormvariate(0, shaping.ttfb_sigma) if shaping.ttfb_sigma else 1.0
        extra_s = 0.0
        if fault and fault.kind == "delay":
            extra_s = 1.0 if fault.seconds is None else fault.seconds
        return (shaping.ttfb_ms * spread + shaping.connect_ms * first) / 1e3 + extra_s

    def _answer(self, connection: Connection) -> None:
        request, (body, fault) = connection.request, self._bodies.pop(connection)
        assert request is not None
        if connection.entry is None:
            self._reply(connection, self._control(request, body))
        elif fault and fault.kind == "reset" and fault.after < 0:
            self._close(connection, reset=True)
        elif fault and fault.kind == "status":
            text = error_document(fault.code, fault.message, request.path) if fault.body is None else fault.body
            self._reply(connection, document(request.method, fault.status, text))
        elif self._files:
            self._reply(connection, _befallen(self._files.reply(request, fault), fault))
        else:
            self._forward(connection, request, body, fault)

    def _forward(self, connection: Connection, request: Head, body: bytes, fault: HttpFault | None) -> None:
        def found(future: Future[Reply]) -> None:
            if not self._ending:
                self._reply_later(connection, None if future.exception() else _befallen(future.result(), fault))

        assert self.upstream is not None
        self._forwarding.submit(forwarded, self.upstream, request, body, fault).add_done_callback(found)

    def _close(self, connection: Connection, *, reset: bool = False) -> None:
        self._bodies.pop(connection, None)
        super()._close(connection, reset=reset)

    # ---- control over HTTP

    def _control(self, request: Head, body: bytes) -> Reply:
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
                answer = self._with_cpu_seconds()
            case "log", _:
                answer = self.log
            case "reset", _:
                self.tally.clear()
                answer = self._with_cpu_seconds()
            case _:
                status, answer = 404, {"error": f"unknown path {request.path}: use config, stats, log or reset"}
        text = json.dumps(answer).encode()
        head = response_head(status, ["Content-Type: application/json", f"Content-Length: {len(text)}"])
        return Reply(status=status, head=head, body=InMemory(text), stop=len(text))

    def _with_cpu_seconds(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {**self.stats(), "user_s": usage.ru_utime, "system_s": usage.ru_stime}


def _befallen(reply: Reply, fault: HttpFault | None) -> Reply:
    if fault:
        reply.change(fault)
    return reply


def _address(upstream: str) -> tuple[str, int]:
    parts = urlsplit(upstream if "//" in upstream else f"//{upstream}")
    if parts.scheme not in ("", "http") or not parts.hostname or not parts.port:
        raise OptionError(f"upstream={upstream!r} is not an address: give HOST:PORT or http://HOST:PORT")
    return parts.hostname, parts.port
