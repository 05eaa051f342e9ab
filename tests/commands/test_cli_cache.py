"""`zloader warm` and `zloader cache`: their output, the files they leave in place, and how they end on signals."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import CLI
from helpers import PATIENCE_S, counts, fetch_options, write_store
from test_cli import params, zloader

import zloader as zl
from zloader.caching.directory import cache_bytes, drop, mirrors
from zloader.caching.inspection import inspect_mirror

pytestmark = pytest.mark.any_version

ROWS = 300
OTHERS = "zloader did not make this"


def _store(dest: Path, seed: int) -> Path:
    adata = counts(ROWS, 120, seed=seed)
    adata.layers["twice"] = adata.X * 2
    write_store(adata, dest, dest.parent)
    return dest


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "atlas").mkdir()
    _store(folder / "atlas" / "counts.zarr", 0)
    return folder


@pytest.fixture(scope="module")
def store(bucket) -> Path:
    return bucket / "atlas" / "counts.zarr"


@pytest.fixture(scope="module")
def filled(store, tmp_path_factory) -> Path:
    """A cache with mirrors of three stores, and a stale mirror of one of these stores."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    more = _store(tmp_path_factory.mktemp("more") / "more.zarr", 1)
    changed = _store(tmp_path_factory.mktemp("changed") / "changed.zarr", 2)
    for url in (store, more, changed):
        epoch(url, cache)
    shutil.rmtree(changed)
    epoch(_store(changed, 3), cache)
    return cache


@pytest.fixture
def cache(filled, tmp_path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def epoch(url: Path, cache: Path, x: str = "X") -> zl.Statistics:
    loader = zl.Loader(zl.open_dataset(url, cache=cache), batch_size=32, x=x)
    assert sum(map(len, loader)) == ROWS
    return loader.statistics()


def documented(*arguments, status=0):
    return json.loads(zloader(*arguments, "--json", status=status).stdout)


def entry_of(cache: Path, url: Path):
    (entry,) = (entry for entry in mirrors(cache) if entry.url == str(url) and not entry.stale)
    return entry


# ---- warm


def test_after_warm_the_first_epoch_is_warm(store, tmp_path):
    flags = (store, "--cache", tmp_path, "--x", "X", "--x", "layers/twice")
    first = documented("warm", *flags)
    assert (first["chunks_held"], first["whole"], first["full"]) == (first["chunks"], True, False)
    arrays = inspect_mirror(entry_of(tmp_path, store)).arrays
    held = arrays["X"].bytes_held + arrays["layers/twice"].bytes_held
    assert first["bytes_held"] == first["bytes_in_all"] == held
    assert first["gets"] > 0
    assert (first["url"], first["cache"]) == (str(store), str(tmp_path))
    assert epoch(store, tmp_path).gets == epoch(store, tmp_path, "layers/twice").gets == 0
    text = zloader("warm", *flags).stdout
    assert f"{first['chunks']} of {first['chunks']} chunks are in {tmp_path}" in text
    assert "(100%); 0 GETs read 0 B" in text


def test_warm_keeps_chunks_in_the_form_asked_for(store, tmp_path):
    for form in ("raw", "compact"):
        first = documented("warm", store, "--cache", tmp_path / form, "--cache-form", form)
        assert first["whole"]
        assert epoch(store, tmp_path / form).gets == 0
        (mirror,) = zl.open_dataset(store, cache=tmp_path / form).matrices.mirrors("X")
        assert mirror.rows.form.coded == (form == "compact")
    done = zloader("warm", store, "--cache", tmp_path, "--cache-form", "zipped", status=1)
    assert "form must be one of 'raw', 'compact', not 'zipped'" in done.stderr


@pytest.mark.parametrize("form", ["raw", "compact"])
def test_ls_lists_the_panels_of_a_mirror(store, tmp_path, form):
    flags = ("--cache", tmp_path / "cache", "--cache-form", form, "--genes", tmp_path / "genes.txt")
    names = zl.open_dataset(store).var_names
    for some in (names[:5], names[3:9]):
        (tmp_path / "genes.txt").write_text("\n".join(some))
        assert documented("warm", store, *flags)["gets"]
    assert documented("warm", store, *flags)["gets"] == 0
    lines = [line.split() for line in zloader("cache", "ls", tmp_path / "cache").stdout.splitlines()]
    panels = [line for line in lines if line and line[0] == "X/panel"]
    assert len(panels) == 2
    assert all("100%" in line for line in panels)


@pytest.mark.slow
def test_warm_keeps_to_limits(store, tmp_path):
    done = zloader("warm", store, "--cache", tmp_path, "--max-bytes", "340kB", "--json")
    seen = json.loads(done.stdout)
    assert (seen["whole"], seen["full"]) == (False, True)
    assert "the cache is full" in done.stderr
    assert cache_bytes(tmp_path) <= 340_000
    done = zloader("warm", store, "--cache", tmp_path / "other", "--min-free", "999TB", status=1)
    assert "cannot fill the mirror" in done.stderr


def test_an_error_of_warm_is_one_line(store, tmp_path):
    done = zloader("warm", store, "--cache", tmp_path / "cache", "--max-bytes", "much", status=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "'much' is not a size" in line
    assert done.stdout == ""


def test_warm_needs_a_cache(store):
    assert "--cache" in zloader("warm", store, status=2).stderr
    assert not {"key", "secret", "token", "password"} & params("warm").keys()


def test_warm_over_s3(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    write_store(counts(60, 20), s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    flags = ("--endpoint-url", s3.endpoint_url, "--region", "us-east-1", "--cache", tmp_path / "cache")
    assert documented("warm", s3.url("counts.zarr"), *flags)["whole"]
    listed = zloader("cache", "ls", tmp_path / "cache", "--json").stdout
    assert s3.url("counts.zarr") in listed
    assert s3.storage_options["secret"] not in listed


@pytest.mark.slow  # each starts several interpreters
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_warm_ends_on_a_signal_and_goes_on_when_run_again(interpreter, bucket, sim, tmp_path, monkeypatch, number):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    server = sim(root=bucket)
    server.faults = [{"match": "X/data/c/", "kind": "stall", "after": 10}]
    flags = ("s3://atlas/counts.zarr", "--x", "layers/twice", "--x", "X", "--cache", tmp_path / "cache", "--json")
    flags = (*flags, "--endpoint-url", server.url, "--region", "us-east-1")
    with interpreter.running(CLI, "warm", *flags) as process:
        while not any(each.chunks_held == each.chunks for each in arrays_in(tmp_path / "cache", "layers/twice")):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        found, said = process.communicate(zl.FetchOptions.deadline_s / 2)  # it does not wait for the deadline
    assert process.returncode == 128 + number
    assert "downloaded chunks stay in the cache: run the same command to continue" in said
    if found:  # else the first window was not reported before the signal
        assert json.loads(found)["whole"] is False
    server.faults = []
    again = documented("warm", *flags)
    assert again["whole"]
    chunks = (bucket / "atlas" / "counts.zarr" / "X").rglob("c/*")
    stored = sum(path.stat().st_size for path in chunks)
    assert 0 < again["bytes_read"] < stored * 1.1, "layers/twice was not read again"


def arrays_in(cache: Path, name: str):
    """An array in each mirror that has it."""
    found = [inspect_mirror(entry).arrays for entry in mirrors(cache)]
    return [arrays[name] for arrays in found if name in arrays]


# ---- ls


def test_ls_shows_what_there_is(cache, store):
    seen = documented("cache", "ls", cache)
    assert seen["cache"] == str(cache)
    assert len(seen["mirrors"]) == 4
    assert [mirror["stale"] for mirror in seen["mirrors"]] == [True, False, False, False]
    assert seen["allocated_bytes"] == sum(mirror["allocated_bytes"] for mirror in seen["mirrors"]) == cache_bytes(cache)
    (mirror,) = (mirror for mirror in seen["mirrors"] if mirror["url"] == str(store))
    assert mirror["bytes_held"] == mirror["bytes_in_all"] > 0
    assert mirror["chunks_held"] == mirror["chunks"] == sum(each["chunks"] for each in mirror["arrays"].values())
    assert mirror["arrays"].keys() == {"X"}
    assert mirror["objects"] > 0
    assert mirror["directory"] == str(cache / f"{mirror['fingerprint']}-v6")


def test_ls_as_text(cache, store):
    os.truncate(entry_of(cache, store).directory / "X.index", 0)  # the rows of one mirror are lost
    text = zloader("cache", "ls", cache).stdout
    lines = text.splitlines()
    assert "stale" in lines[1]
    assert sum("100%" in line for line in lines) == 4
    assert sum(line.strip() in {entry.directory.name for entry in mirrors(cache)} for line in lines) == 4
    first_column = [line.strip().partition("  ")[0] for line in lines]
    assert "".join(first_column).count(str(store)) == 1  # a long path is folded
    assert lines[-1].startswith("mirrors: 4 ")
    assert "…" not in text
    assert "\x1b" not in text


def test_ls_of_a_mirror_that_is_filled_in_part(store, tmp_path):
    options = fetch_options(ready_bytes=1, prefetch=1, gap_bytes=0, least_read_bytes=1)  # not far ahead
    iterator = iter(zl.Loader(zl.open_dataset(store, cache=tmp_path), batch_size=16, fetch_factor=2, options=options))
    next(iterator)
    iterator.close()
    (mirror,) = documented("cache", "ls", tmp_path)["mirrors"]
    assert mirror["bytes_held"] < mirror["bytes_in_all"]
    share = f"{mirror['bytes_held'] / mirror['bytes_in_all']:.0%}"
    assert share in zloader("cache", "ls", tmp_path).stdout


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_a_directory_that_is_no_cache_is_refused(tmp_path, command):
    (tmp_path / f"{'a' * 32}-v3").mkdir()
    (tmp_path / f"{'a' * 32}-v3" / "X.flat").write_text(OTHERS)
    for directory in (tmp_path, tmp_path / "nowhere"):
        done = zloader("cache", command, directory, status=1)
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {directory} is not a cache of zloader")
    assert (tmp_path / f"{'a' * 32}-v3" / "X.flat").read_text() == OTHERS


# ---- verify


def test_verify_finds_all_right(cache):
    seen = documented("cache", "verify", cache)
    assert seen["ok"]
    assert [mirror["problems"] for mirror in seen["mirrors"]] == [[]] * 4
    wholes = [inspect_mirror(entry) for entry in mirrors(cache)]
    assert seen["bytes_compared"] == sum(each.bytes_held + each.kept_bytes for each in wholes)
    text = zloader("cache", "verify", cache).stdout
    assert text.startswith("mirrors: 4, compared: ")
    assert text.endswith("problems: 0\n")


def test_verify_names_what_is_damaged_and_it_is_read_again(cache, store):
    entry = entry_of(cache, store)
    rows = entry.directory / "X.rows"
    rows.write_bytes(bytes([rows.read_bytes()[0] ^ 1]) + rows.read_bytes()[1:])
    (entry.directory / "%2Flisting.kept").write_bytes(b"")
    again = shutil.copytree(cache, cache.parent / "again")
    text = zloader("cache", "verify", cache, status=1).stdout
    (line,) = (line for line in text.splitlines() if ": X: " in line)
    assert line.startswith(f"{store}: X: 1 of ")
    assert line.endswith(" blocks differ from their checksums")
    assert f"{store}: /listing: %2Flisting.kept differed from its checksum and was deleted\n" in text
    assert text.endswith("problems: 2; damaged data will be read from the store again\n")
    seen = documented("cache", "verify", again, status=1)
    assert not seen["ok"]
    assert sorted(len(mirror["problems"]) for mirror in seen["mirrors"]) == [0, 0, 0, 2]
    assert epoch(store, cache).gets
    assert epoch(store, cache).gets == 0
    assert documented("cache", "verify", cache)["ok"]


# ---- clear


def test_clear_deletes_all(cache):
    on_disk = cache_bytes(cache)
    seen = documented("cache", "clear", cache, "--yes")
    assert len(seen["deleted"]) == 4
    assert (seen["in_use"], seen["stayed"], seen["freed_bytes"]) == ([], [], on_disk)
    assert mirrors(cache) == []


def test_a_mirror_of_an_older_version_is_listed_and_deleted(cache, store):
    """It kept decoded arrays, or chunks as they are in the store, in files that this version does not read."""
    (old,) = (entry.directory for entry in mirrors(cache) if entry.url == str(store) and not entry.stale)
    old = old.rename(old.with_name(old.name.replace("-v6", "-v5")))
    for name in ("X%2Fdata.stored", "X%2Fdata.places", "X%2Fdata.flat", "X%2Fdata.sums", "turn"):
        (old / name).write_bytes(b"zplaces3" * 100)
    listed = next(mirror for mirror in documented("cache", "ls", cache)["mirrors"] if mirror["directory"] == str(old))
    assert listed["stale"]
    assert documented("cache", "verify", cache)["ok"]
    assert epoch(store, cache).gets
    assert str(old) in zloader("cache", "clear", cache, "--stale", "--yes").stdout
    assert not old.exists()
    assert entry_of(cache, store).directory.exists()


def test_clear_deletes_what_is_stale_or_of_one_store(cache, store):
    stale = [entry for entry in mirrors(cache) if entry.stale]
    assert f"deleted: {stale[0].url}, " in zloader("cache", "clear", cache, "--stale", "--yes").stdout
    assert not stale[0].directory.exists()
    assert len(mirrors(cache)) == 3
    assert zloader("cache", "clear", cache, "--stale").stdout == "mirrors deleted: 0, 0 B\n"
    done = zloader("cache", "clear", cache, "--url", "s3://nothing/like-it", "--yes", status=1)
    assert "there is no mirror of s3://nothing/like-it" in done.stderr
    assert [one["url"] for one in documented("cache", "clear", cache, "--url", store, "--yes")["deleted"]] == [
        str(store)
    ]
    assert len(mirrors(cache)) == 2
    assert (cache / "zloader-cache").exists()


def test_clear_leaves_what_zloader_did_not_make(cache, store):
    precious = cache.parent / "precious"
    precious.write_text(OTHERS)
    (cache.parent / "elsewhere").mkdir()
    (cache.parent / "elsewhere" / "X.flat").write_text(OTHERS)
    directory = entry_of(cache, store).directory
    (directory / "thesis.txt").write_text(OTHERS)
    (directory / "more.npy").symlink_to(precious)
    (cache / "notes.txt").write_text(OTHERS)
    (cache / f"{'a' * 32}-v3").symlink_to(cache.parent / "elsewhere")
    (cache / "CACHEDIR.TAG").write_text(OTHERS)
    done = zloader("cache", "clear", cache, "--yes")
    for path in (directory / "more.npy", directory / "thesis.txt"):
        assert f"not made by zloader, not deleted: {path}\n" in done.stdout
    assert {path.name for path in directory.iterdir()} == {"thesis.txt", "more.npy"}
    left = {directory.name, "notes.txt", f"{'a' * 32}-v3", "CACHEDIR.TAG", "zloader-cache"}
    assert {path.name for path in cache.iterdir()} == left
    assert precious.read_text() == (cache.parent / "elsewhere" / "X.flat").read_text() == OTHERS
    assert (cache / "CACHEDIR.TAG").read_text() == (cache / "notes.txt").read_text() == OTHERS


_USES = """
import sys, types
from pathlib import Path
package = types.ModuleType("zloader")
package.__path__ = [sys.argv[1]]
sys.modules["zloader"] = package
from zloader.caching.directory import MirrorDirectory
from zloader.common.options import Cache
directory = MirrorDirectory(Cache(directory=Path(sys.argv[2])), sys.argv[3], sys.argv[4])
print("in use", flush=True)
sys.stdin.read()
"""


def test_clear_leaves_what_another_process_uses(cache, store):
    entry = entry_of(cache, store)
    package = str(Path(zl.__file__).parent)
    command = [sys.executable, "-c", _USES, package, str(cache), entry.fingerprint, entry.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout.readline() == b"in use\n"
        done = zloader("cache", "clear", cache, "--yes").stdout
        assert f"in use, not deleted: {store} in {entry.directory}\n" in done
        assert [left.url for left in mirrors(cache)] == [str(store)]
        assert (cache / "zloader-cache").exists()
        assert (cache / "CACHEDIR.TAG").exists()
        assert [one["url"] for one in documented("cache", "clear", cache, "--yes")["in_use"]] == [str(store)]
        user.stdin.close()
        assert user.wait(timeout=PATIENCE_S) == 0
    assert epoch(store, cache).gets == 0
    zloader("cache", "clear", cache, "--yes")
    assert mirrors(cache) == []


def test_clear_does_not_delete_unasked(cache):
    done = zloader("cache", "clear", cache, status=1)
    assert done.stderr == "error: mirrors to delete: 4. Add --yes, because there is no terminal to confirm on\n"
    assert len(mirrors(cache)) == 4


@pytest.mark.slow  # it starts interpreters
@pytest.mark.parametrize(("answer", "status", "left"), [("n", 1, 3), ("", 1, 3), ("y", 0, 0)])
def test_clear_asks_on_a_terminal(interpreter, cache, answer, status, left):
    """One of the mirrors is dropped by another process before the answer."""
    asked, terminal = pty.openpty()
    try:
        with interpreter.running(CLI, "cache", "clear", cache, stdin=terminal) as process:
            said = ""
            while not said.endswith("?"):
                assert process.poll() is None, said
                said += process.stderr.read(1)
            assert drop(mirrors(cache)[1].directory)
            os.write(asked, answer.encode() + b"\n")
            found, _ = process.communicate()
    finally:
        os.close(asked)
        os.close(terminal)
    assert process.returncode == status
    assert said.count(" in ") == 4
    assert len(mirrors(cache)) == left
    assert ("mirrors deleted: 4" in found) == (not left)


def test_help_names_the_commands():
    assert "cache" in zloader("--help").stdout
    for command in ("ls", "verify", "clear"):
        assert command in zloader("cache", "--help").stdout
        assert "--json" in zloader("cache", command, "--help").stdout
