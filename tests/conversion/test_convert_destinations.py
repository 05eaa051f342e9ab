"""Where a conversion may write: never inside a store, and never over objects that do not belong to a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr
from sources import SMALL, FailingDestination, convert, counts, dense, disk_full, files, full_anndata, write_h5ad

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.convert import convert_to
from zloader.conversion.destination import MARKER


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_h5ad(tmp_path / "a.h5ad", counts())


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(write_h5ad(folder / "a.h5ad", counts()), folder / "a.zarr")
    return folder / "a.zarr"


@pytest.fixture
def store(tmp_path: Path, converted: Path) -> Path:
    """A copy of `converted` that tests may change."""
    return Path(shutil.copytree(converted, tmp_path / "a.zarr"))


def unfinished(source: Path, dest: Path) -> None:
    """A conversion that was interrupted before its last object, the metadata of the root."""
    convert(source, dest)
    survives = len(files(dest)) - 1
    shutil.rmtree(dest)
    destination = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(destination, source, options=SMALL)


def add(root: Path, *keys: str) -> None:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_text("years of work")


# ---- inside a store


@pytest.mark.every(5)
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("within", ["obs", "obs/", "new.zarr", "layers/new", "X/data/c", "uns/deep/below"])
def test_never_inside_a_store(source: Path, store: Path, within: str, overwrite: bool) -> None:
    before = files(store)
    with pytest.raises(errors.OptionError, match=r"is inside another store .*a\.zarr"):
        convert(source, f"{store}/{within}", overwrite=overwrite)
    assert files(store) == before


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["v2", "array", "unfinished", "plain group"])
def test_never_inside_another_zarr_either(tmp_path: Path, source: Path, kind: str) -> None:
    outer = tmp_path / "outer.zarr"
    if kind == "unfinished":
        unfinished(source, outer)
    elif kind == "array":
        zarr.create_array(outer, data=np.arange(6))
    else:
        zarr.create_group(outer, zarr_format=2 if kind == "v2" else 3)
    before = files(outer)
    with pytest.raises(errors.OptionError, match="is inside another store"):
        convert(source, outer / "a" / "b.zarr", overwrite=True)
    assert files(outer) == before


def test_never_inside_a_store_by_way_of_a_link(tmp_path: Path, source: Path, store: Path) -> None:
    (tmp_path / "obs").symlink_to(store / "obs")
    (tmp_path / "link.zarr").symlink_to(store)
    before = files(store)
    for dest in (tmp_path / "obs", tmp_path / "link.zarr" / "obs"):
        with pytest.raises(errors.OptionError, match="is inside another store"):
            convert(source, dest, overwrite=True)
    assert files(store) == before


# ---- objects instead of a store


def plain_group(path: Path) -> None:
    zarr.create_group(path, attributes={"mine": 1})


def version_2_group(path: Path) -> None:
    zarr.create_group(path, zarr_format=2)


def array(path: Path) -> None:
    zarr.create_array(path, data=np.arange(6))


def damaged(path: Path) -> None:
    add(path, "zarr.json", "X/c/0/0")


def collection(path: Path) -> None:
    zarr.create_group(path, attributes={"encoding-type": "annbatch-preshuffled"})


def attributes_alone(path: Path) -> None:
    add(path, ".zattrs")


@pytest.mark.every(2)
@pytest.mark.parametrize("make", [plain_group, version_2_group, array, damaged, collection, attributes_alone])
def test_other_zarr_is_never_overwritten(tmp_path: Path, source: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "b.zarr")
    before = files(tmp_path / "b.zarr")
    with pytest.raises(errors.StoreExistsError, match=r"not an AnnData store.*move its files away"):
        convert(source, tmp_path / "b.zarr", overwrite=True)
    assert files(tmp_path / "b.zarr") == before


@pytest.mark.parametrize("dest", ["/", "~"])
def test_the_root_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dest: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    add(tmp_path, "thesis.txt")
    with pytest.raises(errors.StoreExistsError, match="not an AnnData store"):
        zl.convert(ad.AnnData(counts()), dest, overwrite=True, progress=False)
    assert files(tmp_path) == {"thesis.txt": b"years of work"}


def test_an_anndata_in_memory_into_the_empty_directory_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zl.convert(ad.AnnData(counts()), ".", progress=False)
    assert ad.read_zarr(tmp_path).shape == (60, 300)


# ---- objects beside a store

STRANGERS = {
    "a note": "notes.txt",
    "a note of an array": "X/data/c/notes.txt",
    "a note of a group": "obs/notes.txt",
    "a directory": "figures/one.png",
    "another store": "b.zarr/zarr.json",
    "another store below an element": "uns/b.zarr/zarr.json",
    "a download": "movie.mkv.partial",
    "a number": "5",
    "a number in a group": "layers/5",
}


@pytest.mark.every(5)
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("state", ["whole", "whole with a marker"])
def test_others_keep_their_files(source: Path, store: Path, stranger: str, state: str) -> None:
    add(store, stranger, *([MARKER] if state == "whole with a marker" else []))
    before = files(store)
    with pytest.raises(errors.StoreExistsError, match=f"1 of the objects .*: {stranger}. Move them away"):
        convert(source, store, overwrite=True)
    assert files(store) == before


@pytest.mark.every(9)
@pytest.mark.parametrize("stranger", ["notes.txt", "X/data/c/notes.txt", "b.zarr/zarr.json", "movie.mkv.partial"])
@pytest.mark.parametrize("resume", [True, False])
def test_others_keep_their_files_in_an_unfinished_store(
    tmp_path: Path, source: Path, stranger: str, resume: bool
) -> None:
    dest = tmp_path / "b.zarr"
    unfinished(source, dest)
    add(dest, stranger)
    before = files(dest)
    with pytest.raises(errors.StoreExistsError, match=f"1 of the objects .*: {stranger}"):
        convert(source, dest, resume=resume)
    assert files(dest) == before
    (dest / stranger).unlink()
    convert(source, dest, resume=resume)
    assert ad.read_zarr(dest).shape == (60, 300)


def test_others_files_that_come_while_the_source_is_read_are_kept(tmp_path: Path, store: Path) -> None:
    source = write_h5ad(tmp_path / "b.h5ad", counts(seed=5))
    before = files(store)

    class Meanwhile(FailingDestination):
        def _mark(self, journal: Any) -> None:
            add(store, "notes.txt")
            super()._mark(journal)

    with pytest.raises(errors.StoreExistsError, match=r"notes\.txt"):
        convert_to(Meanwhile(Location(url=str(store))), source, options=SMALL, overwrite=True)
    after = files(store)
    assert after.pop("notes.txt")
    after.pop(MARKER)
    assert after == before


def test_all_that_a_store_and_writers_leave_is_replaced(source: Path, store: Path) -> None:
    convert(source, store, overwrite=True)
    whole = files(store)
    not_listed = ["X/data/c/9", "obs/_index/c/1"]
    under_way = ["X/data/c/0.partial", "obs/zarr.json.partial", "zarr.json.partial"]
    add(store, *not_listed, *under_way, f"{MARKER}.partial", ".DS_Store", "obs/._index", "obs/.DS_Store")
    convert(source, store, overwrite=True)
    left = files(store)
    litter = {key for key in left if key not in whole}
    assert litter == {".DS_Store", "obs/._index", "obs/.DS_Store"}
    assert {key: left[key] for key in whole} == whole


def test_an_empty_directory_with_litter_is_empty(tmp_path: Path, source: Path) -> None:
    add(tmp_path / "b.zarr", ".DS_Store")
    convert(source, tmp_path / "b.zarr")
    assert ad.read_zarr(tmp_path / "b.zarr").shape == (60, 300)


@pytest.mark.slow
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.filterwarnings("ignore")  # of anndata and zarr, about unspecified parts of Zarr v3
def test_stores_of_other_writers_are_replaced(
    tmp_path: Path, source: Path, zarr_format: Any, consolidated: bool
) -> None:
    dest = tmp_path / "b.zarr"
    with ad.settings.override(zarr_write_format=zarr_format, allow_write_nullable_strings=True):
        full_anndata().write_zarr(dest)
    if not consolidated and zarr_format == 2:
        (dest / ".zmetadata").unlink()
    elif not consolidated:
        metadata = json.loads((dest / "zarr.json").read_text())
        (dest / "zarr.json").write_text(json.dumps(metadata | {"consolidated_metadata": None}))
    convert(source, dest, overwrite=True)
    convert(source, tmp_path / "a.zarr")
    assert files(dest) == files(tmp_path / "a.zarr")


def test_a_link_to_a_store_is_followed(tmp_path: Path, store: Path) -> None:
    (tmp_path / "link.zarr").symlink_to(store)
    convert(write_h5ad(tmp_path / "b.h5ad", counts(seed=5)), tmp_path / "link.zarr", overwrite=True)
    assert (tmp_path / "link.zarr").is_symlink()
    np.testing.assert_array_equal(dense(ad.read_zarr(store).X), counts(seed=5).toarray())


# ---- S3


def stored(location: Location) -> dict[str, bytes]:
    filesystem = location.filesystem()
    return {key: filesystem.cat_file(f"{location.path}/{key}") for key in location.listing()}


@pytest.mark.slow
def test_on_s3_the_same_holds(source: Path, s3: Any) -> None:
    options = {"storage_options": s3.storage_options}
    location = Location(url=s3.url("a.zarr"), **options)
    convert(source, location.url, **options)
    whole = stored(location)
    for within in ("obs", "new.zarr", "uns/deep/below"):
        with pytest.raises(errors.OptionError, match=r"is inside another store .*a\.zarr/zarr\.json"):
            convert(source, s3.url(f"a.zarr/{within}"), overwrite=True, **options)
    for bucket_or_prefix in (f"s3://{s3.bucket}", s3.url()):
        with pytest.raises(errors.StoreExistsError, match="not an AnnData store"):
            convert(source, bucket_or_prefix, overwrite=True, **options)
    location.filesystem().pipe_file(f"{location.path}/obs/notes.txt", b"years of work")
    with pytest.raises(errors.StoreExistsError, match=r"obs/notes\.txt"):
        convert(source, location.url, overwrite=True, **options)
    assert stored(location) == whole | {"obs/notes.txt": b"years of work"}


@pytest.mark.slow
def test_signs_of_patterns_in_a_key_mean_themselves(tmp_path: Path, s3: Any) -> None:
    old, new = write_h5ad(tmp_path / "old.h5ad", counts()), write_h5ad(tmp_path / "new.h5ad", counts(seed=5))
    options = {"storage_options": s3.storage_options}
    for name in ("run1.zarr", "run[1].zarr"):
        convert(old, s3.url(name), **options)
    convert(new, s3.url("run[1].zarr"), overwrite=True, **options)
    for name, wanted in {"run1.zarr": old, "run[1].zarr": new}.items():
        assert zl.verify(s3.url(name), against=wanted, progress=False, **options).ok


@pytest.mark.slow
def test_an_object_that_shows_a_folder_is_nothing(source: Path, s3: Any) -> None:
    options = {"storage_options": s3.storage_options}
    location = Location(url=s3.url("a.zarr"), **options)
    filesystem = location.filesystem()
    bucket, key, _ = filesystem.split_path(location.path)
    filesystem.call_s3("put_object", Bucket=bucket, Key=f"{key}/", Body=b"")
    convert(source, location.url, **options)
    convert(source, location.url, overwrite=True, **options)
    assert zl.verify(location.url, against=source, progress=False, **options).ok


@pytest.mark.slow
def test_a_source_on_s3_lies_apart(tmp_path: Path, source: Path, s3: Any) -> None:
    """Also if the source lies in the store to be replaced: it would be deleted before its second pass."""
    options = {"storage_options": s3.storage_options}
    convert(source, tmp_path / "whole.zarr")
    nested = tmp_path / "whole.zarr" / "uns" / "nested"
    shutil.copytree(tmp_path / "whole.zarr", tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", nested)
    location = Location(url=s3.url("a.zarr"), **options)
    location.filesystem().put(str(tmp_path / "whole.zarr"), location.path, recursive=True)
    before = stored(location)
    for one, other in (("a.zarr/uns/nested", "a.zarr"), ("a.zarr", "a.zarr/new"), ("a.zarr", "a.zarr/")):
        with pytest.raises(errors.OptionError, match="one lies within the other"):
            convert(s3.url(one), s3.url(other), overwrite=True, **options)
    assert stored(location) == before
