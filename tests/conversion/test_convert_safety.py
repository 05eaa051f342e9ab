"""Conversion: an unfinished store never opens, no data are lost, and errors name bad input; on disk and on S3."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
import zarr.buffer
from forked import Interpreter
from helpers import TESTS
from sources import (
    LAYOUTS,
    SMALL,
    FailingDestination,
    assert_not_a_store,
    convert,
    counts,
    dense,
    disk_full,
    files,
    frame,
    full_anndata,
    write_csr,
    write_h5ad,
)

from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.convert import convert_to
from zloader.conversion.destination import MARKER, PendingStore

# ---- interruption


def test_a_marker_beside_a_whole_store_does_not_give_it_up(tmp_path: Path) -> None:
    """A conversion killed during validation has replaced nothing, so the old store still needs overwrite."""
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    convert(source, tmp_path / "a.zarr")
    whole = files(tmp_path / "a.zarr")
    (tmp_path / "a.zarr" / MARKER).touch()
    with pytest.raises(errors.StoreExistsError, match="overwrite"):
        convert(source, tmp_path / "a.zarr")
    convert(source, tmp_path / "a.zarr", overwrite=True)
    assert files(tmp_path / "a.zarr") == whole


@pytest.mark.slow
def test_whatever_write_fails_nothing_opens_and_running_again_works(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"dense": counts().toarray()})
    convert(source, tmp_path / "whole.zarr")
    whole = files(tmp_path / "whole.zarr")
    dest = tmp_path / "a.zarr"
    for survives in range(10_000):
        destination = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
        with contextlib.suppress(errors.StoreError):
            convert_to(destination, source, options=SMALL)
            break
        assert MARKER in files(dest)
        assert_not_a_store(dest)
    assert survives >= len(whole)
    assert files(dest) == whole
    (dest / MARKER).touch()  # as if interrupted at the end
    (dest / "zarr.json").unlink()
    convert(source, dest)
    assert files(dest) == whole


def test_ctrl_c_leaves_nothing_that_opens(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    once = iter([None])

    def interrupt() -> None:
        for _ in once:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert_to(FailingDestination(Location(url=str(dest)), survives=6, fail=interrupt), source, options=SMALL)
    assert_not_a_store(dest)
    convert(source, dest)
    np.testing.assert_array_equal(dense(ad.read_zarr(dest).X), counts().toarray())


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("survives", [8, 20], ids=["among shards", "among metadata"])
def test_kill_leaves_nothing_that_opens(interpreter: Interpreter, tmp_path: Path, survives: int) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[4])\n"
        "from sources import *\n"
        "from zloader.conversion.convert import convert_to\n"
        "def kill(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "destination = FailingDestination(Location(url=sys.argv[2]), survives=int(sys.argv[3]), fail=kill)\n"
        "convert_to(destination, sys.argv[1], options=SMALL)\n"
    )
    killed = interpreter.run(script, source, dest, survives, TESTS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(key.startswith("X/data/c/") for key in files(dest))
    assert_not_a_store(dest)
    convert(source, dest)
    np.testing.assert_array_equal(dense(ad.read_zarr(dest).X), counts().toarray())


def test_root_metadata_comes_last(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    destination = FailingDestination(Location(url=str(tmp_path / "a.zarr")))
    convert_to(destination, source, options=SMALL)
    order = destination.stored
    assert order[-1] == "zarr.json"
    assert order.count("zarr.json") == 1
    shards = [key for key in order if key.startswith("X/data/c/")]
    assert len(shards) == len(set(shards)) == 3  # each shard is stored once


def test_pending_store_holds_back_metadata_and_what_is_being_written() -> None:
    stored: dict[str, bytes] = {}
    store = PendingStore(stored.__setitem__, "here")
    group = zarr.create_group(store).create_group("a/b")
    group.create_array("c", data=np.arange(3))
    assert stored == {}
    store.flush()
    assert list(stored) == ["a/b/c/c/0"]
    group["c"][:] = 7
    store.commit()
    depths = [key.count("/") for key in stored if key.endswith("zarr.json")]
    assert depths == sorted(depths, reverse=True) == [3, 2, 1, 0]
    kept = zarr.storage.MemoryStore({key: zarr.buffer.cpu.Buffer.from_bytes(value) for key, value in stored.items()})
    assert zarr.open_group(kept, mode="r")["a/b/c"][:].tolist() == [7, 7, 7]


# ---- existing stores


def test_a_store_is_replaced_only_when_asked(tmp_path: Path) -> None:
    dest = tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", counts(), layers={"old": counts()}), dest)
    before = files(dest)
    source = write_h5ad(tmp_path / "b.h5ad", counts(seed=5))
    with pytest.raises(errors.StoreExistsError, match="overwrite=True"):
        convert(source, dest)
    assert files(dest) == before
    convert(source, dest, overwrite=True)
    out = ad.read_zarr(dest)
    np.testing.assert_array_equal(dense(out.X), counts(seed=5).toarray())
    assert "old" not in out.layers
    assert not (dest / "layers" / "old").exists()


def test_what_an_interruption_left_can_be_replaced_after_a_source_that_fails(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    with pytest.raises(errors.StoreError):
        convert_to(FailingDestination(Location(url=str(dest)), survives=6, fail=disk_full), source, options=SMALL)
    x = counts()
    x.indices[0] = 300
    with pytest.raises(errors.SourceError):
        convert(write_csr(tmp_path / "b.h5ad", x), dest)
    convert(source, dest)
    assert ad.read_zarr(dest).shape == (60, 300)


def test_a_store_survives_a_source_that_cannot_be_converted(tmp_path: Path) -> None:
    dest = tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", counts()), dest)
    before = files(dest)
    x = counts()
    x.indices[x.indptr[40]] = 300
    with pytest.raises(errors.SourceError, match="it holds gene 300, but there are 300 genes"):
        convert(write_csr(tmp_path / "b.h5ad", x), dest, overwrite=True)
    assert files(dest) == before


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_store_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    thesis = tmp_path / "work" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    for dest in (thesis, thesis.parent):
        with pytest.raises(errors.StoreExistsError, match="is not an AnnData store"):
            convert(source, dest, overwrite=overwrite)
    assert files(tmp_path / "work") == {"thesis.txt": b"years"}
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert ad.read_zarr(tmp_path / "empty").shape == (60, 300)


@pytest.mark.parametrize("dest", ["a.h5ad", "a.h5ad/x.zarr", ".", "link.h5ad"])
def test_source_and_destination_must_lie_apart(tmp_path: Path, dest: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    (tmp_path / "link.h5ad").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(errors.OptionError, match="within the other"):
        convert(source, tmp_path / dest, overwrite=True)
    assert source.read_bytes() == before


# ---- bad input


def broken(change: Callable[[sp.csr_matrix], None]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        x = counts()
        change(x)
        return write_csr(path, x)

    return write


def edited(change: Callable[[h5py.File], None], layout: str = "csr") -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        write_h5ad(path, LAYOUTS[layout](counts()))
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return write


def set_item(name: str, at: Any, value: Any) -> Callable[[Any], None]:
    def change(holder: Any) -> None:
        (holder[name] if isinstance(holder, h5py.File) else getattr(holder, name))[at] = value

    return change


def replace(name: str, value: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return change


def truncated(path: Path) -> Path:
    write_h5ad(path, counts())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def damaged_gzip(path: Path) -> Path:
    ad.AnnData(X=counts(), obs=frame(60, "c"), var=frame(300, "g")).write_h5ad(path, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["X/data"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"x" * chunk.size
    path.write_bytes(content)
    return path


def text(path: Path) -> Path:
    path.write_text("gene,count\n")
    return path


def plain_hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["matrix"] = np.ones(3)
    return path


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def old_anndata(file: h5py.File) -> None:
    del file["obs"]
    file["obs"] = np.zeros(59, dtype=[("index", "S8"), ("n", "i4")])


INDPTR = counts().indptr
BAD = {
    "missing file": (lambda path: path, errors.StoreNotFoundError, "no such directory: .*a.h5ad"),
    "directory": (directory, errors.StoreNotFoundError, "the directory is empty"),
    "text": (text, errors.SourceError, "cannot be read as HDF5"),
    "plain hdf5": (plain_hdf5, errors.SourceError, "not an .h5ad file"),
    "truncated": (truncated, errors.SourceError, "truncated"),
    "damaged chunk": (damaged_gzip, errors.SourceError, "X/data"),
    "no X": (edited(replace("X", None)), errors.SourceError, "has no X, .*It holds: no layers"),
    "no obs": (edited(replace("obs", None)), errors.SourceError, "has no obs"),
    "old anndata": (edited(old_anndata), errors.SourceError, "59 and 300 are expected"),
    "no indices": (edited(replace("X/indices", None)), errors.SourceError, "X/indices of .* missing"),
    "no shape": (edited(lambda f: f["X"].attrs.__delitem__("shape")), errors.SourceError, "X of .* shape"),
    "X of text": (edited(replace("X", np.array([b"a"]))), errors.SourceError, r"give \(1,\) as its shape"),
    "X 1-d": (edited(replace("X", np.ones(60))), errors.SourceError, r"give \(60,\) as its shape"),
    "data of text": (
        edited(replace("X/data", np.array([b"a"] * counts().nnz))),
        errors.SourceError,
        "not real numbers",
    ),
    "float indices": (edited(replace("X/indices", np.ones(counts().nnz))), errors.SourceError, "not integers"),
    "other shape": (
        edited(lambda f: f["X"].attrs.__setitem__("shape", [59, 300])),
        errors.SourceError,
        "59 rows and 300 genes",
    ),
    "unknown X": (edited(lambda f: f["X"].attrs.__setitem__("encoding-type", "awk")), errors.SourceError, "is a awk"),
    "data too short": (edited(replace("X/data", np.ones(3))), errors.SourceError, "3 values are stored"),
    "indptr too short": (
        broken(lambda x: setattr(x, "indptr", x.indptr[:-1])),
        errors.SourceError,
        "60 entries for 60 rows",
    ),
    "indptr starts at 1": (broken(set_item("indptr", 0, 1)), errors.SourceError, "indptr of .* wrong at row 0"),
    "indptr ends early": (broken(set_item("indptr", 60, INDPTR[-1] - 1)), errors.SourceError, "indptr"),
    "indptr falls": (broken(set_item("indptr", 30, INDPTR[28])), errors.SourceError, "indptr of .* wrong at row 29"),
    "indptr too high": (broken(set_item("indptr", 30, 10**6)), errors.SourceError, "indptr of .* wrong at row 29"),
    "index too high": (broken(set_item("indices", INDPTR[40], 300)), errors.SourceError, "it holds gene 300, but"),
    "index negative": (broken(set_item("indices", INDPTR[40] - 1, -1)), errors.SourceError, "holds gene -1"),
    "csc index": (
        edited(set_item("X/indices", int(counts().tocsc().indptr[7]), 60), "csc"),
        errors.SourceError,
        "gene 7 .*row 60.*0 to 59",
    ),
    "csc indptr": (edited(set_item("X/indptr", 7, 10**6), "csc"), errors.SourceError, "wrong at gene 7"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    make, kind, message = BAD[case]
    source, dest = make(tmp_path / "a.h5ad"), tmp_path / "a.zarr"
    with pytest.raises(kind, match=message) as caught:
        convert(source, dest)
    assert str(source) in str(caught.value)
    assert files(dest) == {}


def test_uns_that_zarr_cannot_hold_is_named(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    with h5py.File(source, "r+") as file:
        file["uns"].create_dataset("when", data=np.zeros(3, np.int64)).attrs["encoding-type"] = "martian"
    with pytest.raises(errors.SourceError, match="cannot read uns of"):
        convert(source, tmp_path / "a.zarr")
    assert_not_a_store(tmp_path / "a.zarr")


def test_source_that_may_not_be_read(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    source.chmod(0)
    if os.access(source, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(errors.AccessDeniedError, match="not allowed to read"):
        convert(source, tmp_path / "a.zarr")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a directory in which not even root may write")
def test_directory_that_may_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(errors.AccessDeniedError, match=r"not allowed to write zloader\.partial to /sys"):
        convert(write_h5ad(tmp_path / "a.h5ad", counts()), "/sys/zloader")


def test_no_file_is_left_of_a_transposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    source = write_h5ad(tmp_path / "a.h5ad", counts().tocsc())
    convert(source, tmp_path / "a.zarr")
    destination = FailingDestination(Location(url=str(tmp_path / "b.zarr")), survives=12, fail=disk_full)
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(destination, source, options=SMALL)
    assert list(scratch.iterdir()) == []


def test_no_room_to_transpose(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts().tocsc())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(errors.StoreError, match=r"cannot transpose X: .*TMPDIR"):
            convert(source, tmp_path / "a.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_not_a_store(tmp_path / "a.zarr")


# ---- S3


@pytest.mark.slow
def test_straight_to_s3(tmp_path: Path, s3: Any) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    url, options = s3.url("a.zarr"), {"storage_options": s3.storage_options}
    report = convert(tmp_path / "a.h5ad", url, **options)
    convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    location = Location(url=url, storage_options=s3.storage_options)
    filesystem = location.filesystem()
    there = {key: filesystem.cat_file(f"{location.path}/{key}") for key in location.listing()}
    assert there == files(tmp_path / "a.zarr")
    assert report.bytes_out == sum(map(len, there.values()))
    with pytest.raises(errors.StoreExistsError, match="overwrite=True"):
        convert(tmp_path / "a.h5ad", url, **options)
    convert(write_h5ad(tmp_path / "b.h5ad", counts(seed=5)), url, overwrite=True, **options)
    out = ad.read_zarr(zarr.open_group(location.url, storage_options=s3.storage_options, mode="r"))
    np.testing.assert_array_equal(dense(out.X), counts(seed=5).toarray())


@pytest.mark.slow
def test_interrupted_on_s3(tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    location = Location(url=s3.url("a.zarr"), storage_options=s3.storage_options)
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(FailingDestination(location, survives=12, fail=disk_full), source, options=SMALL)
    assert MARKER in location.listing()
    with pytest.raises(FileNotFoundError):
        zarr.open_group(location.url, storage_options=s3.storage_options, mode="r")
    convert(source, s3.url("a.zarr"), storage_options=s3.storage_options)
    assert MARKER not in location.listing()


def test_s3_says_no(tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    wrong = s3.storage_options | {"secret": "not-the-secret"}
    nobody = {key: value for key, value in s3.storage_options.items() if key not in ("key", "secret")}
    for options in (s3.read_only_storage_options, wrong, nobody):
        with pytest.raises(errors.AccessDeniedError, match="storage_options") as caught:
            convert(source, s3.url("a.zarr"), storage_options=options)
        for secret in (s3.storage_options["secret"], s3.read_only_storage_options["secret"], "not-the-secret"):
            assert secret not in str(caught.value)
    with pytest.raises(errors.StoreNotFoundError, match="does the bucket exist"):
        convert(source, "s3://no-such-bucket/a.zarr", storage_options=s3.storage_options)
