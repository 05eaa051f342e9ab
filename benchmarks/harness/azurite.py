"""A real server of Azure Blob Storage for tests and benchmarks: Azurite on loopback, which ends with its owner.

Azurite is a package of npm. It checks signatures, and keeps its blobs in a directory or in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zloader.testing import _guard
from zloader.testing.seaweed import ServerStartError

# The account that every Azurite has, whose key is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_INSTALL = "install it with 'npm install -g azurite', or set AZURITE to the path of azurite-blob"
_START_DEADLINE_S = 60.0
_POLL_S = 0.02


def find_azurite() -> str | None:
    """The path of the program: $AZURITE, or azurite-blob on PATH. None if there is none."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


class Azurite:
    """A blob server on loopback, from `start` to `stop` (or `with`). It writes only to `directory`.

    Raises ServerStartError if Azurite is not installed or does not answer.

        with Azurite("/tmp/azure") as azure:
            zl.open_dataset("az://container/cells.zarr", storage_options=azure.storage_options)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """The address of the account, `http://127.0.0.1:PORT/ACCOUNT`. The port changes with each start."""
        return f"http://127.0.0.1:{self._port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        """Account, key and address, as Azure's tools write them."""
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint_url};"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The storage options of the account's owner."""
        return {"connection_string": self.connection_string}

    def start(self) -> Self:
        """Starts the server and returns once it answers."""
        azurite = find_azurite()
        if azurite is None:
            raise ServerStartError(f"azurite-blob was not found: {_INSTALL}")
        self.directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", str(self.directory)]
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        spec: _guard.Spec = {
            "owner": os.getpid(),
            "command": [azurite, *options, *flags],
            "end_signal": 15,
            "leftovers": [],
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _guard.__file__, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._await_ready()
        return self

    def stop(self) -> None:
        """Stops the server. Does nothing if it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log = self._log.read_text(errors="replace")[-2_000:]
                raise ServerStartError(f"Azurite in {self.directory} does not answer. Its log ends with:\n{log}")
            time.sleep(_POLL_S)

    @property
    def _log(self) -> Path:
        return self.directory / "azurite.log"
