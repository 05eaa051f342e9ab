"""A simulated cloud: harness/s3 in a process of its own, with the link that the benchmarks are measured through."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import importing, program
from benchmarks.harness.s3.tls import certificates

# Of botocore and s3fs, of TensorStore, and of OpenSSL and libraries that follow it.
_BUNDLES = ("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Latency and bandwidth of the simulated link, and whether it is https. Rates are in MB/s (10^6 bytes)."""

    ttfb_ms: float = 30.0
    ttfb_sigma: float = 0.3
    conn_mbps: float = 80.0
    total_mbps: float = 400.0
    tls: bool = False

    def arguments(self) -> list[str]:
        """The options of the command line for this link."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items() if name != "tls"]


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A server in its own process. `authority` is the PEM of its certificate authority, None without TLS."""

    endpoint: str
    authority: Path | None = None

    def storage_options(self) -> dict[str, str]:
        """The storage options of zloader and s3fs."""
        return {"key": "any", "secret": "any", "endpoint_url": self.endpoint}

    def trust(self) -> dict[str, str]:
        """The environment variables by which clients trust the certificate authority; {} without TLS."""
        return dict.fromkeys(_BUNDLES, str(self.authority)) if self.authority else {}

    def reset(self) -> dict[str, Any]:
        """Resets the server's counters and returns them. Its CPU seconds go on."""
        return self._ask("reset", "POST")

    def stats(self) -> dict[str, Any]:
        """The server's counters."""
        return self._ask("stats", "GET")

    def _ask(self, command: str, method: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.endpoint}/__sim/{command}", method=method)
        trusted = ssl.create_default_context(cafile=self.authority) if self.authority else None
        with urllib.request.urlopen(request, context=trusted) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def cloud(root: Path, speed: LinkSpeed | None = None) -> Iterator[Cloud]:
    """Runs a server for the buckets in `root`."""
    speed = speed or LinkSpeed()
    command = program("harness.s3", "--root", root, "--mapped", *speed.arguments())
    with contextlib.ExitStack() as stack:
        authority = None
        if speed.tls:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            authority, certificate = certificates(Path(folder))
            command += ["--certificate", str(certificate)]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=importing()))
        stack.callback(server.terminate)
        assert server.stdout is not None
        yield Cloud(endpoint=server.stdout.readline().strip(), authority=authority)
