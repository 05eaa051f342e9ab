"""A simulated cloud: harness/s3 in a process of its own, with the link that the benchmarks are measured through."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import importing, program


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Latency and bandwidth of the simulated link. Rates are in MB/s (10^6 bytes)."""

    ttfb_ms: float = 30.0
    ttfb_sigma: float = 0.3
    conn_mbps: float = 80.0
    total_mbps: float = 400.0

    def arguments(self) -> list[str]:
        """The options of the command line for this link."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items()]


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A server in its own process."""

    endpoint: str

    def storage_options(self) -> dict[str, str]:
        """The storage options of zloader and s3fs."""
        return {"key": "any", "secret": "any", "endpoint_url": self.endpoint}

    def reset(self) -> dict[str, Any]:
        """Resets the server's counters and returns them. Its CPU seconds go on."""
        return self._ask("reset", "POST")

    def stats(self) -> dict[str, Any]:
        """The server's counters."""
        return self._ask("stats", "GET")

    def _ask(self, command: str, method: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.endpoint}/__sim/{command}", method=method)
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def cloud(root: Path, speed: LinkSpeed | None = None) -> Iterator[Cloud]:
    """Runs a server for the buckets in `root`."""
    command = program("harness.s3", "--root", root, "--mapped", *(speed or LinkSpeed()).arguments())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing()) as server:
        try:
            assert server.stdout is not None
            yield Cloud(endpoint=server.stdout.readline().strip())
        finally:
            server.terminate()
