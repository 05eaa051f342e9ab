"""A real server of Azure Blob Storage for tests and benchmarks: Azurite on loopback, which ends with its owner.

Azurite is a package of npm. It checks signatures, and keeps its blobs in a directory or in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

from zloader.testing.server import Server, ServerStartError

# The account that every Azurite has, whose key is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_INSTALL = "install it with 'npm install -g azurite', or set AZURITE to the path of azurite-blob"
_START_DEADLINE_S = 60.0


def find_azurite() -> str | None:
    """The path of the program: $AZURITE, or azurite-blob on PATH. None if there is none."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


class Azurite(Server):
    """A blob server on loopback, from `start` to `stop` (or `with`). It writes only to `directory`.

    Raises ServerStartError if Azurite is not installed or does not answer.

        with Azurite("/tmp/azure") as azure:
            zl.open_dataset("az://container/cells.zarr", storage_options=azure.storage_options)
    """

    program = "Azurite"
    log = "azurite.log"

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory, start_deadline_s=_START_DEADLINE_S)

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

    def _command(self) -> tuple[list[str], signal.Signals, list[str]]:
        azurite = find_azurite()
        if azurite is None:
            raise ServerStartError(f"azurite-blob was not found: {_INSTALL}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", str(self.directory)]
        return (
            [str(Path(azurite).absolute()), *options, "--silent", "--disableTelemetry", "--skipApiVersionCheck"],
            signal.SIGTERM,
            [],
        )
