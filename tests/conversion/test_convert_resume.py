"""An interrupted conversion can be resumed from any point after any kind of interruption, on disk and on S3."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import pytest
from forked import Interpreter
from sources import (
    LAYOUTS,
    SMALL,
    FailingDestination,
    assert_not_a_store,
    convert,
    counts,
    disk_full,
    files,
    frame,
    full_anndata,
    write_csr,
    write_h5ad,
)

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion import rows
from zloader.conversion.convert import convert_to
from zloader.conversion.destination import MARKER

pytestmark = pytest.mark.any_version

SHUFFLED = dataclasses.replace(SMALL, shuffle_seed=3)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_BYTES", 4096)


def interrupted(dest: Path, source: Any, survives: int, options: zl.ConvertOptions = SMALL) -> list[str]:
    """Runs a conversion until the disk is full after some objects; returns the objects."""
    destination = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(destination, source, options=options)
    return destination.stored[:survives]


def resumed(dest: Path, source: Any, options: zl.ConvertOptions = SMALL) -> list[str]:
    """Resumes a conversion; returns the objects that it stores."""
    destination = FailingDestination(Location(url=str(dest)))
    convert_to(destination, source, options=options, resume=True)
    return destination.stored


def shards(keys: list[str]) -> set[str]:
    return {key for key in keys if key.startswith(("X/", "layers/")) and not key.endswith("zarr.json")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, SHUFFLED], ids=["in order", "shuffled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_goes_on_after_the_last_whole_shard(tmp_path: Path, layout: str, options: zl.ConvertOptions) -> None:
    x = counts()
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](x), layers={"two": LAYOUTS[layout](counts(seed=1))})
    convert(source, tmp_path / "whole.zarr", options)
    whole = files(tmp_path / "whole.zarr")
    n_objects, kept = len(whole), 0
    for survives in range(6, n_objects, 3):
        dest = tmp_path / f"{survives}.zarr"
        before = shards(interrupted(dest, source, survives, options))
        assert_not_a_store(dest)
        again = shards(resumed(dest, source, options))
        kept += len(before - again)
        # Indices and data are kept up to the same checkpoint, which comes with the window after a shard: at most two
        # shards of a pair are written again, and indptr is.
        twice = {key for key in before & again if "/indptr/" not in key}
        assert len(twice) <= 4, (before, again)
        assert files(dest) == whole
    assert kept > 10


def test_mended_rows_are_counted_once_although_some_are_read_again(tmp_path: Path) -> None:
    x = counts()
    for row in range(0, 60, 4):  # whose genes descend
        part = slice(*x.indptr[row : row + 2])
        x.indices[part], x.data[part] = x.indices[part][::-1].copy(), x.data[part][::-1].copy()
    source = write_csr(tmp_path / "a.h5ad", x)
    report = convert(source, tmp_path / "whole.zarr")
    assert 0 < report.rows_made_canonical["X"] <= 15
    for survives in (10, 14, 20):
        dest = tmp_path / f"{survives}.zarr"
        interrupted(dest, source, survives)
        again = zl.convert(source, dest, options=SMALL, resume=True, progress=False)
        assert again.rows_made_canonical == report.rows_made_canonical
        assert files(dest) == files(tmp_path / "whole.zarr")


@pytest.mark.slow
def test_everything_is_there_after_resuming(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    convert(tmp_path / "a.h5ad", tmp_path / "whole.zarr")
    whole = files(tmp_path / "whole.zarr")
    for survives in (3, 80, len(whole) - 3):
        interrupted(tmp_path / f"{survives}.zarr", tmp_path / "a.h5ad", survives)
        resumed(tmp_path / f"{survives}.zarr", tmp_path / "a.h5ad")
        assert files(tmp_path / f"{survives}.zarr") == whole


def test_a_store_cut_off_after_its_root_is_finished(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    interrupted(dest, source, 20)
    marker = (dest / MARKER).read_bytes()
    resumed(dest, source)
    whole = files(dest)
    (dest / MARKER).write_bytes(marker)
    assert shards(resumed(dest, source)) == set()
    assert files(dest) == whole


def test_nothing_to_resume(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    convert(source, dest, resume=True)  # the same command can be repeated until it succeeds
    whole = files(dest)
    interrupted(tmp_path / "b.zarr", source, 0)  # before the journal
    convert(source, tmp_path / "b.zarr", resume=True)
    assert files(tmp_path / "b.zarr") == whole


@pytest.mark.slow
def test_a_conversion_that_has_finished_is_complete(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"two": counts()})
    other, dest = write_h5ad(tmp_path / "b.h5ad", counts(), layers={"two": counts()}), tmp_path / "a.zarr"
    select = zl.Selection(layers=["two"])
    done = convert(source, dest, select=select)
    whole = {path: path.stat().st_mtime_ns for path in dest.rglob("*")}
    again = convert(source, dest, select=select, resume=True)
    assert again == dataclasses.replace(done, already_complete=True, seconds=again.seconds)
    for what, sources, changed in [
        ("select", source, {}),
        ("options", source, {"select": select, "options": SHUFFLED}),
        ("sources", other, {"select": select}),
    ]:
        with pytest.raises(
            errors.StoreExistsError, match=rf"already a store .* another conversion: {what} differ\. Pass"
        ):
            convert(sources, dest, resume=True, **changed)
    with pytest.raises(errors.StoreExistsError, match="already a store"):
        convert(source, dest, select=select)
    assert {path: path.stat().st_mtime_ns for path in dest.rglob("*")} == whole
    assert not convert(source, dest, select=select, resume=True, overwrite=True).already_complete


def change_values(source: Path) -> None:
    with h5py.File(source, "r+") as file:
        file["X/data"][:2] = [77, 78]


def add_row(source: Path) -> None:
    write_h5ad(source, counts(61))


def add_column(source: Path) -> None:
    write_h5ad(source, counts(), obs=frame(60, "cell").assign(added=1))


@pytest.mark.every(2)
@pytest.mark.parametrize("finished", [False, True], ids=["interrupted", "finished"])
@pytest.mark.parametrize("change", [change_values, add_row, add_column])
def test_a_source_that_changed_is_noticed_even_if_its_mtime_was_put_back(
    tmp_path: Path, change: Callable[[Path], None], finished: bool
) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    before = source.stat()
    if finished:
        convert(source, dest)
    else:
        interrupted(dest, source, 20)
    stored = files(dest)
    change(source)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(errors.StoreError, match="sources differ"):
        convert(source, dest, resume=True)
    assert files(dest) == stored


def test_a_changed_file_of_a_zarr_source_is_noticed(tmp_path: Path) -> None:
    source, dest = tmp_path / "source.zarr", tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", counts()), source)
    interrupted(dest, source, 20)
    file = source / "X" / "data" / "c" / "0"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(errors.StoreError, match="sources differ"):
        convert(source, dest, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True], ids=["interrupted", "finished"])
def test_sources_in_another_order_are_another_conversion(tmp_path: Path, finished: bool) -> None:
    sources = [write_h5ad(tmp_path / f"{name}.h5ad", counts(seed=seed)) for seed, name in enumerate("ab")]
    dest = tmp_path / "a.zarr"
    if finished:
        convert(sources, dest)
    else:
        interrupted(dest, sources, 20)
    for others in (sources[::-1], sources[:1], [*sources, sources[0]]):
        with pytest.raises(errors.StoreError, match="sources differ"):
            convert(others, dest, resume=True)
    assert convert(sources, dest, resume=True).already_complete == finished


def test_without_resume_it_starts_anew(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    before = shards(interrupted(dest, source, 20))
    destination = FailingDestination(Location(url=str(dest)))
    convert_to(destination, source, options=SMALL)
    assert before <= shards(destination.stored)


def test_another_conversion_is_not_resumed(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"two": counts()}), tmp_path / "a.zarr"
    interrupted(dest, source, 20)
    before = files(dest)
    with pytest.raises(errors.StoreError, match=r"options differ \(codec: was 'lz4', now 'zstd'\)"):
        convert(source, dest, dataclasses.replace(SMALL, codec="zstd"), resume=True)
    with pytest.raises(errors.StoreError, match=r"select differ \(x: was 'X', now 'layers/two'\)"):
        convert(source, dest, select=zl.Selection(x="layers/two"), resume=True)
    with pytest.raises(errors.OptionError, match="in memory cannot be resumed"):
        convert(ad.AnnData(counts()), dest, resume=True)
    os.utime(source, ns=(1, 1))
    with pytest.raises(errors.StoreError, match="sources differ"):
        convert(source, dest, resume=True)
    assert files(dest) == before
    assert before.keys() > {MARKER}


def test_chunks_of_another_form_are_not_taken_over(tmp_path: Path) -> None:
    """Their checksums are right, but they would decode to other values."""
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    interrupted(dest, source, 20)
    marker = json.loads((dest / MARKER).read_text())
    del marker["journal"]["identity"]["chunk_form"]  # as in conversions that stored no differences
    (dest / MARKER).write_text(json.dumps(marker))
    with pytest.raises(errors.StoreError, match="chunk_form differ"):
        convert(source, dest, resume=True)


# The moments are measured in CPU time, which other processes do not change. SIGPROF kills like SIGKILL.
_KILLS = """
import json, os, random, signal, sys
import zloader as zl

source, dest, storage_options, options, rounds = json.loads(sys.argv[1])
options = zl.ConvertOptions(**options)

def attempt(dest, die_after_s=0.0, **how):
    child = os.fork()
    if child:
        _, status, usage = os.wait4(child, 0)
        return status, usage.ru_utime + usage.ru_stime
    signal.setitimer(signal.ITIMER_PROF, die_after_s)
    zl.convert(source, dest, options=options, storage_options=storage_options, progress=False, **how)
    os._exit(0)

assert attempt(dest)[0] == 0
status, seconds = attempt(dest, overwrite=True)
assert status == 0
moments, kills = random.Random(rounds), 0
for number in range(rounds):
    for _ in range(2):  # the second time the conversion is a resumed one
        status, _ = attempt(dest + str(number), moments.uniform(0.1, 0.7) * seconds, resume=True)
        assert status in (0, signal.SIGPROF)
        if status == 0:
            break
        kills += 1
    else:
        assert attempt(dest + str(number), resume=True)[0] == 0
print(kills)
"""


def killed_at_random(
    interpreter: Interpreter, source: Path, dest: str, storage_options: Any, options: zl.ConvertOptions, rounds: int
) -> int:
    """Converts to `dest`, `dest`0, `dest`1, ... with up to two kills each; returns the number of kills."""
    task = [str(source), dest, storage_options, dataclasses.asdict(options), rounds]
    done = interpreter.run(_KILLS, json.dumps(task))
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, SHUFFLED], ids=["in order", "shuffled"])
def test_kill_at_random_moments(interpreter: Interpreter, tmp_path: Path, options: zl.ConvertOptions) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(600, 1000), layers={"csc": counts(600, 1000, seed=1).tocsc()})
    options = dataclasses.replace(options, shard_size="8KiB", window_bytes=40_000)
    assert killed_at_random(interpreter, source, str(tmp_path / "a.zarr"), None, options, rounds=5) >= 3
    for number in range(5):
        assert files(tmp_path / f"a.zarr{number}") == files(tmp_path / "a.zarr")


@pytest.mark.slow
def test_kill_at_random_moments_on_s3(interpreter: Interpreter, tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(600, 1000), obs=frame(600, "c").assign(n=range(600)))
    options = dataclasses.replace(SMALL, shard_size="16KiB", window_bytes=40_000)
    assert killed_at_random(interpreter, source, s3.url("a.zarr"), s3.storage_options, options, rounds=3) >= 2

    def objects(name: str) -> dict[str, bytes]:
        location = Location(url=s3.url(name), storage_options=s3.storage_options)
        return {key: location.filesystem().cat_file(f"{location.path}/{key}") for key in location.listing()}

    for number in range(3):
        assert objects(f"a.zarr{number}") == objects("a.zarr")


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Limits every file to 40 000 bytes, as on a full disk or over a quota."""
    source = write_h5ad(tmp_path / "a.h5ad", counts(600, 1000))
    convert(source, tmp_path / "whole.zarr", zl.ConvertOptions())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(errors.StoreError, match=r"cannot write X/.* free some .*--resume"):
            convert(source, tmp_path / "a.zarr", zl.ConvertOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_not_a_store(tmp_path / "a.zarr")
    convert(source, tmp_path / "a.zarr", zl.ConvertOptions(), resume=True)
    assert files(tmp_path / "a.zarr") == files(tmp_path / "whole.zarr")


@pytest.mark.slow
def test_a_bucket_that_fails_half_way(tmp_path: Path, s3: Any, sim: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    server = sim(upstream=s3.endpoint_url)
    storage_options = {**s3.storage_options, "client_kwargs": {"endpoint_url": server.url, "region_name": "us-east-1"}}
    server.faults = [{"kind": "status", "status": 500, "code": "InternalError", "method": "PUT", "match": "X/data/c/1"}]
    url = s3.url("a.zarr")
    impatient = storage_options | {"config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(errors.StoreError, match=r"cannot write X/data/c/1 to s3://.*--resume"):
        convert(source, url, storage_options=impatient)
    server.faults = [{"kind": "status", "status": 503, "code": "SlowDown", "method": "PUT", "count": 2}]
    destination = FailingDestination(Location(url=url, storage_options=storage_options))
    convert_to(destination, source, options=SMALL, resume=True)  # a few refused requests are retried
    assert "X/data/c/0" not in destination.stored
    assert zl.verify(url, against=source, storage_options=s3.storage_options, progress=False).ok


@pytest.mark.slow
def test_uploads_that_were_under_way_are_ended(tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    location = Location(url=s3.url("a.zarr"), storage_options=s3.storage_options)
    with contextlib.suppress(errors.StoreError):
        convert_to(FailingDestination(location, survives=20, fail=disk_full), source, options=SMALL)
    filesystem = location.filesystem()
    bucket, prefix, _ = filesystem.split_path(location.path)
    filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/X/data/c/9")
    convert(source, s3.url("a.zarr"), storage_options=s3.storage_options, resume=True)
    assert not filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/").get("Uploads")
