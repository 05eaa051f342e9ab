"""A real server of Azure Blob Storage for tests and benchmarks: Azurite on loopback, which ends with its owner.

Azurite is a package of npm. It checks signatures, and keeps its blobs in a directory or in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from zloader.testing import _guard

# The account that every Azurite has, whose key is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_INSTALL = "install it with 'npm install -g azurite', or set AZURITE to the path of azurite-blob"
_START_DEADLINE_S = 60.0


def find_azurite() -> str | None:
    """The path of the program: $AZURITE, or azurite-blob on PATH. None if there is none."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


class Azurite:
    """A blob server on loopback, in a with statement. It writes only to `directory`.

    Raises RuntimeError if Azurite is not installed or does not answer.

        with Azurite("/tmp/azure") as azure:
            zl.open_dataset("az://container/cells.zarr", storage_options=azure.storage_options)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._port = 0

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

    def __enter__(self) -> Self:
        azurite = find_azurite()
        if azurite is None:
            raise RuntimeError(f"azurite-blob was not found: {_INSTALL}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", str(self.directory)]
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        command = [str(Path(azurite).absolute()), *options, *quiet]
        spec: _guard.Spec = {"owner": os.getpid(), "command": command, "end_signal": signal.SIGTERM, "leftovers": []}
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "azurite.log").open("wb") as log:
            guarded = [sys.executable, "-I", "-S", _guard.__file__, json.dumps(spec)]
            self.process = subprocess.Popen(guarded, stdout=log, stderr=log, cwd=self.directory, start_new_session=True)
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"Azurite did not start: {(self.directory / 'azurite.log').read_text()}")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
