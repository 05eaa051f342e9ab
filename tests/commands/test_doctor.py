"""`zloader doctor`: what it finds, on healthy, broken and hostile machines, and that it prints no secret."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S, counts, write_store
from typer.testing import CliRunner

from zloader.commands import doctor as examined
from zloader.commands.cli import app
from zloader.commands.doctor import Finding, gathered, without_secrets
from zloader.common import machine

PARTS = ("versions", "machine", "GPU")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("doctor")
    write_store(counts(300, 40), folder / "s.zarr", folder)
    return str(folder / "s.zarr")


def doctor(*arguments: Any, status: int = 0) -> dict[str, Any]:
    """The findings by part and name. `text` has all that was printed."""
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
    document = json.loads(done.stdout)
    assert document["ok"] == (status == 0)
    found: dict[str, Any] = {f"{each['part']}: {each['name']}": each for each in document["findings"]}
    return found | {"text": done.stdout + done.stderr}


@pytest.mark.slow
def test_a_healthy_machine(store: str, tmp_path: Path) -> None:
    found = doctor(store, "--cache", tmp_path / "cache")
    for name in ("versions: torch", "machine: memory", "cache: place", "cache: writing", "store: content"):
        assert found[name]["state"] in ("good", "advice"), found[name]
    assert found["store: content"]["value"].startswith("300 rows x 40 genes")
    assert not any(tmp_path.iterdir())  # it makes no cache and leaves nothing behind
    shown = CliRunner().invoke(app, ["doctor", store])
    assert shown.exit_code == 0
    assert all(part in shown.stdout for part in (*PARTS, "store", "tensorstore"))
    assert "to change" in shown.stdout


@pytest.mark.slow
def test_a_bucket_and_its_credentials(store: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    s3fs.S3FileSystem(**s3.storage_options).put(store, f"{s3.bucket}/{s3.prefix}/s.zarr", recursive=True)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    found = doctor(s3.url("s.zarr"), "--endpoint-url", s3.endpoint_url)
    assert found["store: credentials"]["value"] == f"env, endpoint {s3.endpoint_url}, region us-east-1"
    assert found["store: speed"]["value"].endswith("/s")
    assert s3.storage_options["secret"] not in found["text"]

    wrong = "wrong-secret-0123456789"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    found = doctor(s3.url("s.zarr"), "--endpoint-url", s3.endpoint_url, status=1)
    assert "not allowed to list" in found["store: reading"]["advice"]
    assert wrong not in found["text"]


def test_what_cannot_be_opened(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such directory" in doctor(tmp_path / "none.zarr", status=1)["store: reading"]["advice"]
    assert "user and password" in doctor("s3://me:secret@bucket/x", status=1)["store: URL"]["advice"]
    found = doctor("s3://bucket/x", status=1)
    assert "found no credentials" in found["store: credentials"]["advice"]
    assert "store: reading" not in found

    def hangs(*_: Any, **__: Any) -> None:
        threading_event.wait()

    import threading

    import zloader.dataset.dataset

    threading_event = threading.Event()
    monkeypatch.setattr(zloader.dataset.dataset, "open_dataset", hangs)
    monkeypatch.setattr(examined, "_OPEN_S", 0.2)
    assert "no answer within 0 s" in doctor(store, status=1)["store: reading"]["advice"]
    threading_event.set()


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://me:pass-word@127.0.0.1:{free.getsockname()[1]}"
    found = doctor("s3://bucket/x", "--endpoint-url", endpoint, "--anon", status=1)
    assert "Is the endpoint correct" in found["store: reading"]["advice"]
    assert "pass-word" not in found["text"]


@pytest.mark.slow
def test_caches_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in doctor("--cache", tmp_path / "file", status=1)["cache: place"]["advice"]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert "chmod go-w" in doctor("--cache", open_to_all, status=1)["cache: place"]["advice"]
    open_to_all.chmod(0o700)
    assert doctor("--cache", open_to_all)["cache: place"]["value"] == str(open_to_all)
    assert "writing" in str(doctor("--cache", "/proc/none", status=1))


def test_versions_and_libraries_that_do_not_fit(tmp_path: Path) -> None:
    """In a process of its own, in which the libraries are not imported yet."""
    (tmp_path / "isal.py").write_text("print('hello'); raise ImportError('libxyz.so is missing')")
    replaced = "{'numpy': '1.26.4', 'zarr': None}"
    program = f"""
import importlib.metadata, sys
version, replaced = importlib.metadata.version, {replaced}
def other(name):
    if name in replaced and replaced[name] is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return replaced.get(name) or version(name)
importlib.metadata.version = other
from zloader.commands.doctor import about_libraries, gathered
for each in gathered("versions", [about_libraries]):
    print(each.name, each.state, each.value, each.advice, sep="|")
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    found = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    assert found["isal"].startswith("broken|"), done.stderr
    assert "cannot be imported: ImportError: libxyz.so is missing" in found["isal"]
    assert "zloader needs 2.0 or newer" in found["numpy"]
    assert found["zarr"].startswith("broken|missing|pip install")
    assert found["tensorstore"].startswith("good|")


_HOSTILE = """
import builtins, os, pathlib, resource, shutil, subprocess, sys, tempfile
def refuse(*_, **__):
    raise PermissionError("hostile")
read_text = pathlib.Path.read_text
def read_outside(path, *given, **options):
    return refuse() if path.parts[1:2] in (("proc",), ("sys",)) else read_text(path, *given, **options)
pathlib.Path.read_text = read_outside
pathlib.Path.home = tempfile.gettempdir = shutil.disk_usage = refuse
for name in sys.argv.pop(1).split():
    setattr({"run": subprocess, "getrlimit": resource}[name], name, refuse)
from zloader.commands.cli import app
app(["doctor", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("refused", [pytest.param("", marks=pytest.mark.slow), "run getrlimit"])
def test_a_hostile_machine(refused: str, store: str, tmp_path: Path) -> None:
    environment = {"HOME": "/none", "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": "/none"}
    command = [sys.executable, "-c", _HOSTILE, refused, store, "--cache", str(tmp_path), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    found = json.loads(done.stdout)["findings"]
    assert {each["part"] for each in found} == {*PARTS, "cache", "store"}, done.stderr
    assert any(each["state"] == "unknown" for each in found)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "hunter2hunter2")

    def fails() -> Any:
        yield Finding("first", "hunter2hunter2")
        raise ValueError("http://me:word@host said hunter2hunter2")

    found = list(gathered("p", [fails, lambda: iter([Finding("b", "fine")])]))
    assert [each.value for each in found] == ["***", "not known: ValueError: http://host said ***", "fine"]
    assert without_secrets("abfs://box@account.dfs/x") == "abfs://box@account.dfs/x"


LIMITS: dict[str, tuple[dict[str, str], str, int | None, float | None]] = {
    "none": ({}, "", None, None),
    "version 2": ({"memory.max": "1000000", "cpu.max": "150000 100000"}, "0::/", 1000000, 1.5),
    "no limits": ({"memory.max": "max", "cpu.max": "max 100000"}, "0::/", None, None),
    "a batch job": (
        {"memory.max": "max", "job/memory.max": "5000", "job/step/memory.max": "max"},
        "0::/job/step",
        5000,
        None,
    ),
    "version 1": (
        {"memory/memory.limit_in_bytes": "7000", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        "4:memory:/x",
        7000,
        None,
    ),
    "a quota of version 1": (
        {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
        "3:cpu,cpuacct:/x\n4:memory:/",
        None,
        0.5,
    ),
    "damaged": ({"memory.max": "", "cpu.max": "a b c"}, "nonsense", None, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_containers_and_jobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, own, n_bytes, cores = LIMITS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN", tmp_path / "own")
    assert machine.available_bytes() == (machine.physical_bytes() if n_bytes is None else n_bytes)
    assert machine.core_quota() == cores
    if cores == 0.5:
        (found,) = examined.about_cores()
        assert "the time of 0.5 cores" in found.advice
    (memory, *_) = examined.about_memory()
    assert ("limited to" in memory.value) == (n_bytes is not None)
