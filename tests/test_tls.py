"""The simulated cloud over TLS: its certificate authority, its sockets, and clients that trust it or do not."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers import PATIENCE_S, counts, fill_bucket, write_store

from benchmarks.harness import measuring
from benchmarks.harness.cloud import Cloud, LinkSpeed, cloud
from benchmarks.harness.s3 import tls
from zloader.reading.tensorstore_reader import trust_bundle

pytestmark = [
    pytest.mark.any_version,
    pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed"),
]

OBJECT = bytes(range(256)) * 20_000
READ = """
import sys, zloader as zl
keys = {"key": "any", "secret": "any", "endpoint_url": sys.argv[1]}
print(sum(len(minibatch) for minibatch in zl.Loader(zl.open_dataset("s3://bucket/cells.zarr", storage_options=keys))))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    fill_bucket(made, OBJECT)
    write_store(counts(500, 40), made / "bucket" / "cells.zarr", made / "tmp")
    return made


@pytest.fixture(scope="module")
def secure(root: Path) -> Iterator[Cloud]:
    with cloud(root, LinkSpeed(ttfb_ms=1, conn_mbps=200, tls=True)) as running:
        yield running


def connect(server: Cloud, *, trusting: bool = True) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=server.authority if trusting else None)
    return http.client.HTTPSConnection(urlsplit(server.endpoint).netloc, timeout=PATIENCE_S, context=context)


def ask(connection: http.client.HTTPConnection, **fields: str) -> bytes:
    connection.request("GET", "/bucket/object", headers=fields)
    return connection.getresponse().read()


def test_ranges_and_whole_objects_on_connections_at_once(secure):
    def reads(_: int) -> bool:
        connection = connect(secure)
        for start, stop in ((0, 1), (7, (1 << 16) + 8), (5, 3 << 20)):
            assert ask(connection, Range=f"bytes={start}-{stop - 1}") == OBJECT[start:stop]
        whole = ask(connection)
        connection.close()
        return whole == OBJECT

    secure.reset()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(reads, range(4)))
    counted = secure.stats()
    assert (counted["requests"], counted["active"]) == (16, 0)
    assert secure.endpoint.startswith("https://127.0.0.1:")


def test_clients_that_do_not_trust_or_speak_tls_leave_the_server_running(secure):
    with pytest.raises(ssl.SSLCertVerificationError), contextlib.closing(connect(secure, trusting=False)) as refused:
        ask(refused)
    address = urlsplit(secure.endpoint)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /bucket/object HTTP/1.1\r\nHost: here\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(1 << 16).startswith(b"HTTP")  # but an alert, or the end
    with socket.create_connection((address.hostname, address.port)):
        pass  # gone before its handshake
    with contextlib.closing(connect(secure)) as trusted:
        assert ask(trusted) == OBJECT


@pytest.mark.slow
def test_a_slow_reader_gets_all_bytes(root):
    """The kernel's buffers are full most of the time, so records are sent in several attempts."""
    unlimited = LinkSpeed(ttfb_ms=0, conn_mbps=0, total_mbps=0, tls=True)
    with cloud(root, unlimited) as fast, contextlib.closing(connect(fast)) as connection:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.request("GET", "/bucket/object")
        answer = connection.getresponse()
        assert b"".join(iter(lambda: answer.read(1000), b"")) == OBJECT


def test_a_cloud_without_tls_needs_no_trust(root):
    with cloud(root) as plain:
        assert (plain.authority, plain.trust()) == (None, {})
    assert "--tls" not in " ".join(LinkSpeed(tls=True).arguments())


def test_a_missing_openssl_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tls.NoOpenSSL, match="needs the command openssl"):
        tls.certificates(tmp_path)


def test_tensorstore_trusts_what_botocore_trusts(monkeypatch):
    for name in ("AWS_CA_BUNDLE", "TENSORSTORE_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    trust_bundle()
    assert "TENSORSTORE_CA_BUNDLE" not in os.environ
    monkeypatch.setenv("AWS_CA_BUNDLE", "own.pem")
    monkeypatch.setenv("TENSORSTORE_CA_BUNDLE", "other.pem")
    trust_bundle()
    assert os.environ["TENSORSTORE_CA_BUNDLE"] == "other.pem"
    monkeypatch.delenv("TENSORSTORE_CA_BUNDLE")
    trust_bundle()
    assert os.environ["TENSORSTORE_CA_BUNDLE"] == "own.pem"


@pytest.mark.slow  # imports torch in new processes
def test_a_store_is_read_over_tls_with_one_variable_and_refused_without(secure):
    def read(**variables: str) -> subprocess.CompletedProcess[str]:
        command, env = [sys.executable, "-c", READ, secure.endpoint], measuring.importing(**variables)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)

    trusted = read(AWS_CA_BUNDLE=str(secure.authority))
    assert (trusted.returncode, trusted.stdout) == (0, "500\n"), trusted.stderr
    refused = read()
    assert refused.returncode == 1
    assert "certificate verify failed" in refused.stderr
