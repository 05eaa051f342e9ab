"""Inputs of conversion: every kind reads as the original AnnData, errors name bad sources, and secrets stay hidden."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import fsspec
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from helpers import web_server
from hypothesis import given
from hypothesis import strategies as st
from sources import (
    SMALL,
    assert_same,
    counts,
    frame,
    full_anndata,
    layers_of,
    write_h5ad,
)

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.sources.anndata_input import open_matrix
from zloader.conversion.sources.inputs import Input, open_inputs
from zloader.conversion.sources.locations import BlockCache, RemoteFile, source_locations

MATRICES = ("X", "layers/csr", "layers/csc", "layers/dense", "raw/X")


def write_zarr(path: Path, adata: ad.AnnData, version: int = 3, *, consolidated: bool = True) -> Path:
    with (
        warnings.catch_warnings(),
        ad.settings.override(zarr_write_format=version, allow_write_nullable_strings=True, auto_shard_zarr_v3=False),
    ):
        warnings.simplefilter("ignore")  # of anndata and zarr, about their formats
        adata.write_zarr(path, convert_strings_to_categoricals=False)
        if not consolidated:
            if version == 2:
                (path / ".zmetadata").unlink()
            else:
                root = json.loads((path / "zarr.json").read_text())
                root.pop("consolidated_metadata")
                (path / "zarr.json").write_text(json.dumps(root))
    return path


def write_full(path: Path, **how: Any) -> Path:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(path, convert_strings_to_categoricals=False, **how)
    return path


def read(path: Path) -> ad.AnnData:
    """The AnnData that anndata reads."""
    return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def values(one: Input, name: str) -> np.ndarray:
    """A matrix assembled from its windows, dense."""
    node = one.node(name)
    shape = (one.n_rows, len(one.var(name.startswith("raw/"))))
    assert node.shape == shape
    out, row = np.zeros(shape), 0
    with open_matrix(node, name, shape=shape, window_bytes=4096) as matrix:
        for window in matrix.windows():
            n_rows = len(window.lengths)
            if matrix.encoding == "dense":
                out[row : row + n_rows] = window.values.reshape(n_rows, -1)
            else:
                out[row + np.repeat(np.arange(n_rows), window.lengths), window.genes] = window.values
            row += n_rows
    assert row == one.n_rows
    return out


def assert_is(one: Input, wanted: ad.AnnData) -> None:
    """Compares every element of an Input with the AnnData."""
    assert (one.n_rows, one.n_genes) == wanted.shape
    pd.testing.assert_index_equal(one.obs_names(), wanted.obs_names)
    assert one.obs_columns == list(wanted.obs.columns)
    for column in one.obs_columns:
        pd.testing.assert_series_equal(one.obs_column(column), wanted.obs[column].reset_index(drop=True))
    pd.testing.assert_frame_equal(one.var(), wanted.var, check_column_type=False)  # an empty one becomes str
    for part in ("layers", "obsm", "varm", "obsp", "varp", "uns"):
        assert one.keys(part) == sorted(layers_of(wanted) if part == "layers" else getattr(wanted, part))
        for key in one.keys(part):
            assert f"{part}/{key}" in one
            assert_same(one.element(f"{part}/{key}"), getattr(wanted, part)[key])
    assert_same(one.element("uns"), dict(wanted.uns))
    names = ["X", *(f"layers/{layer}" for layer in layers_of(wanted))]
    assert one.has_raw == (wanted.raw is not None)
    if one.has_raw:
        pd.testing.assert_frame_equal(one.var(raw=True), wanted.raw.var, check_column_type=False)
        assert one.keys("raw/varm") == sorted(wanted.raw.varm)
        for key in one.keys("raw/varm"):
            assert_same(one.element(f"raw/varm/{key}"), wanted.raw.varm[key])
        names.append("raw/X")
    for name in names:
        assert name in one
        x = wanted.raw.X if name == "raw/X" else wanted.X if name == "X" else wanted.layers[name[7:]]
        assert one.node(name).encoding == ("dense" if isinstance(x, np.ndarray) else x.format)
        np.testing.assert_array_equal(values(one, name), x.toarray() if sp.issparse(x) else x)
    for absent in ("layers/none", "raw/none", "obsm/none", "none"):
        assert absent not in one
        with pytest.raises(errors.SourceError, match=absent) as caught:
            one.node(absent)
        assert one.name in str(caught.value)


def only(inputs: list[Input]) -> Input:
    (one,) = inputs
    return one


# ---- local


H5AD = {"plain": {}, "gzip": {"compression": "gzip"}, "lzf": {"compression": "lzf"}}


@pytest.mark.every(2)
@pytest.mark.parametrize("how", H5AD)
def test_h5ad(tmp_path: Path, how: str) -> None:
    path = write_full(tmp_path / "plate1.h5ad", **H5AD[how])
    with only(open_inputs(path)) as one:
        assert_is(one, read(path))
        assert (one.name, one.label, one.bytes_in) == (str(path), "plate1", path.stat().st_size)


def test_h5ad_with_blosc(tmp_path: Path) -> None:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    path = write_full(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        stored = file["X/data"][:]
        del file["X/data"]
        file["X"].create_dataset("data", data=stored, **hdf5plugin.Blosc(cname="zstd"))
    with only(open_inputs(f"file://{path}")) as one:
        assert_is(one, read(path))


@pytest.mark.slow
@pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "not"])
@pytest.mark.parametrize("version", [2, 3])
def test_zarr(tmp_path: Path, version: int, consolidated: bool) -> None:
    path = write_zarr(tmp_path / "plate1.zarr", full_anndata(), version, consolidated=consolidated)
    with only(open_inputs(path)) as one:
        assert_is(one, read(path))
        assert one.label == "plate1"
        assert one.bytes_in == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def converted(tmp_path: Path) -> Path:
    zl.convert(write_full(tmp_path / "source.h5ad"), tmp_path / "ours.zarr", options=SMALL, progress=False)
    return tmp_path / "ours.zarr"


@pytest.mark.slow
def test_a_store_of_our_own(tmp_path: Path) -> None:
    path = converted(tmp_path)
    with only(open_inputs(path)) as one:
        assert_is(one, read(path))


@pytest.mark.slow
def test_a_store_of_our_own_without_one_of_its_objects(tmp_path: Path) -> None:
    path = converted(tmp_path)
    (path / "X/data/c/1").unlink()
    with pytest.raises(errors.MissingObjectError, match=r"X/data/c/1 is missing"):
        open_inputs(path)


@pytest.mark.slow
def test_annbatch_collection(tmp_path: Path) -> None:
    full = full_anndata()
    adata = ad.AnnData(full.X, obs=full.obs[["kind"]], var=full.var, layers={"dense": full.layers["dense"]})
    for number, rows in enumerate(np.array_split(np.arange(60), 11)):
        write_zarr(tmp_path / "a.zarr" / f"dataset_{number}", adata[rows].copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(tmp_path / "a.zarr", mode="a", zarr_format=3)
        root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    inputs = open_inputs(tmp_path / "a.zarr")
    assert [one.label for one in inputs] == [f"a/dataset_{number}" for number in range(11)]
    assert len({one.identity()["digest"] for one in inputs}) == 11
    for one, rows in zip(inputs, np.array_split(np.arange(60), 11), strict=True):
        path = tmp_path / "a.zarr" / one.label.partition("/")[2]
        assert_is(one, read(path))
        np.testing.assert_array_equal(values(one, "X"), adata.X[rows].toarray())
        assert one.bytes_in == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_annbatch_collection_of_nothing(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "a.zarr", attributes={"encoding-type": "annbatch-preshuffled"})
    with pytest.raises(errors.SourceError, match="has no dataset_0"):
        open_inputs(tmp_path / "a.zarr")


# ---- in memory


def test_anndata_in_memory() -> None:
    adata = full_anndata()
    one = only(open_inputs(adata))
    assert_is(one, adata)
    assert (one.name, one.label, one.bytes_in, one.identity()) == ("the AnnData in memory", "adata", 0, {})
    assert one.node("layers/csc").native is adata.layers["csc"]


def test_a_view() -> None:
    rows, genes = np.arange(50, 3, -3), np.arange(0, 300, 7)
    adata = full_anndata()
    assert_is(only(open_inputs(adata[rows, genes])), adata[rows, genes].copy())


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
def test_backed(tmp_path: Path, layout: str) -> None:
    parts = full_anndata()
    x = {"csr": parts.X, "csc": parts.X.tocsc(), "dense": parts.X.toarray()}[layout]
    write_full(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        del file["X"]
        ad.io.write_elem(file, "X", x)
    adata = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    try:
        one = only(open_inputs(adata))
        assert isinstance(one.node("X").native, h5py.Group | h5py.Dataset)
        assert isinstance(one.node("raw/X").native, h5py.Group)
        parts = ad.read_h5ad(tmp_path / "a.h5ad")
        assert_is(one, parts)
        assert_same(one.element("X"), x)
        assert_is(only(open_inputs(adata[10:40])), parts[10:40].copy())
    finally:
        adata.file.close()


def test_forms_that_no_file_has_are_given_as_they_are() -> None:
    coo, table = sp.coo_array(np.eye(60)), pd.DataFrame({"a": np.arange(60.0)}, index=frame(60, "cell").index)
    adata = ad.AnnData(obs=frame(60, "cell"), var=frame(60, "gene"), obsm={"table": table})
    adata.uns["coo"] = coo
    one = only(open_inputs(adata))
    assert one.element("uns/coo") is coo
    pd.testing.assert_frame_equal(one.node("obsm/table").native, table)


def test_two_obs_columns_of_one_name() -> None:
    adata = ad.AnnData(obs=frame(3, "c"), var=frame(2, "g"))
    adata.obs = pd.DataFrame(np.ones((3, 2)), columns=["a", "a"], index=adata.obs_names)
    with pytest.raises(errors.SourceError, match="several obs columns named 'a'"):
        only(open_inputs(adata)).obs_column("a")


# ---- old and odd frames


def old_frame(file: h5py.File) -> None:
    """Rewrites obs in the format of anndata 0.7."""
    del file["obs"]
    obs = file.create_group("obs")
    names = np.array([f"cell{i}" for i in range(60)], object)
    obs.create_dataset("barcode", data=names, dtype=h5py.string_dtype())
    obs.create_dataset("kind", data=np.arange(60) % 2)
    obs.create_dataset("n", data=np.arange(60))
    categories = obs.create_dataset("__categories/kind", data=np.array(["a", "b"], object), dtype=h5py.string_dtype())
    categories.attrs["ordered"] = False
    obs["kind"].attrs["categories"] = categories.ref
    obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "barcode"})
    obs.attrs["column-order"] = np.array(["kind", "n"], object)


def test_obs_of_anndata_0_7(tmp_path: Path) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", counts())
    with h5py.File(path, "r+") as file:
        old_frame(file)
    with only(open_inputs(path)) as one:
        assert one.obs_columns == ["kind", "n"]
        assert (one.obs_names().name, one.obs_names()[3]) == ("barcode", "cell3")
        pd.testing.assert_series_equal(one.obs_column("kind"), pd.Series(pd.Categorical(["a", "b"] * 30), name="kind"))
        pd.testing.assert_series_equal(one.obs_column("n"), pd.Series(np.arange(60), name="n"))


@pytest.mark.parametrize(
    "index",
    [pd.Index(["a", None, "c"], dtype="string"), pd.CategoricalIndex(["x", "y", "x"]), pd.Index([5, 6, 7])],
    ids=["nullable", "categorical", "numbers"],
)
def test_an_index_of_another_kind(tmp_path: Path, index: pd.Index) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", sp.csr_matrix((3, 2), dtype=np.float32))
    with h5py.File(path, "r+") as file, ad.settings.override(allow_write_nullable_strings=True):
        del file["obs"]
        ad.io.write_elem(file, "obs", pd.DataFrame({"a": [1, 2, 3]}, index=index))
    with only(open_inputs(path)) as one:
        assert one.n_rows == 3
        pd.testing.assert_index_equal(one.obs_names(), index)


def test_a_file_without_x_opens(tmp_path: Path) -> None:
    """A source without X opens, because a layer can be chosen as X."""
    path = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"counts": counts()})
    with h5py.File(path, "r+") as file:
        del file["X"]
    with only(open_inputs(path)) as one:
        np.testing.assert_array_equal(values(one, "layers/counts"), counts().toarray())
        with pytest.raises(errors.SourceError, match=r"has no X: .*It holds: layers, obs"):
            one.node("X")


# ---- remote


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/zloader-test", recursive=True)


@pytest.mark.slow
def test_any_scheme_of_fsspec(tmp_path: Path, memory: Any) -> None:
    memory.put_file(str(write_full(tmp_path / "a.h5ad")), "/zloader-test/plates/a.h5ad")
    memory.put(str(write_zarr(tmp_path / "b.zarr", full_anndata())), "/zloader-test/plates/b.zarr", recursive=True)
    inputs = open_inputs("memory://zloader-test/plates/*")
    assert [one.label for one in inputs] == ["a", "b"]
    for one, path in zip(inputs, ("a.h5ad", "b.zarr"), strict=True):
        with one:
            assert_is(one, read(tmp_path / path))
            assert one.bytes_in > 0
    with pytest.raises(errors.StoreNotFoundError, match=r"nothing matches memory://zloader-test/\*.zarr"):
        open_inputs("memory://zloader-test/*.zarr")
    with pytest.raises(errors.StoreNotFoundError, match=r"no object at memory://zloader-test/c\.h5ad"):
        open_inputs("memory://zloader-test/c.h5ad")
    with pytest.raises(errors.SourceError, match="memory://zloader-test/plates is a directory"):
        open_inputs("memory://zloader-test/plates")
    with pytest.raises(errors.OptionError, match="cannot open nonsense://a"):
        open_inputs("nonsense://a/b.h5ad")


@pytest.mark.slow
def test_s3(tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = Location(url=s3.url(), storage_options=s3.storage_options).filesystem()
    below = f"{s3.bucket}/{s3.prefix}"
    filesystem.put_file(str(write_full(tmp_path / "a.h5ad", compression="gzip")), f"{below}/a.h5ad")
    for version in (2, 3):
        local = write_zarr(tmp_path / f"v{version}.zarr", full_anndata(), version, consolidated=version == 2)
        filesystem.put(str(local), f"{below}/v{version}.zarr", recursive=True)
    inputs = open_inputs([s3.url("*.h5ad"), s3.url("v[23].zarr")], storage_options=s3.read_only_storage_options)
    assert [one.name for one in inputs] == [s3.url("a.h5ad"), s3.url("v2.zarr"), s3.url("v3.zarr")]
    assert inputs[0].bytes_in == (tmp_path / "a.h5ad").stat().st_size
    for one, path in zip(inputs, ("a.h5ad", "v2.zarr", "v3.zarr"), strict=True):
        with one:
            assert_is(one, read(tmp_path / path))
    before = inputs[0].identity()
    assert json.loads(json.dumps(before)) == before
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with only(open_inputs(s3.url("a.h5ad"))) as one:
        assert one.identity() == before
    filesystem.put_file(str(write_full(tmp_path / "b.h5ad")), f"{below}/a.h5ad")
    with only(open_inputs(s3.url("a.h5ad"))) as one:
        assert one.identity() != before


def test_s3_says_no(s3: Any) -> None:
    wrong = s3.storage_options | {"secret": "not-the-secret"}
    for name in ("a.h5ad", "a.zarr", "*.h5ad"):
        with pytest.raises(errors.AccessDeniedError, match="storage_options") as caught:
            open_inputs(s3.url(name), storage_options=wrong)
        assert "not-the-secret" not in str(caught.value)
        assert s3.url(name) in str(caught.value)
    with pytest.raises(errors.StoreNotFoundError, match="no object"):
        open_inputs(s3.url("a.h5ad"), storage_options=s3.storage_options)
    with pytest.raises(errors.StoreNotFoundError, match="nothing matches"):
        open_inputs(s3.url("*.h5ad"), storage_options=s3.storage_options)


@pytest.mark.slow
def test_http(tmp_path: Path, sim: Callable[..., Any]) -> None:
    served = tmp_path / "bucket"
    served.mkdir()
    write_full(served / "a.h5ad")
    write_zarr(served / "v2.zarr", full_anndata(), 2)
    write_zarr(served / "v3.zarr", full_anndata(), 3)
    write_zarr(served / "bare.zarr", full_anndata(), 3, consolidated=False)
    server = sim()
    secret = server.url.replace("http://", "http://user:password@")
    for name in ("a.h5ad", "v2.zarr", "v3.zarr"):
        signed = f"{server.url}/bucket/{name}" + ("?signature=secret" if name == "a.h5ad" else "")
        with only(open_inputs(signed)) as one:
            assert_is(one, read(served / name))
            assert (one.name, one.label) == (f"{server.url}/bucket/{name}", name.partition(".")[0])
            assert one.identity()["bytes"] > 0
            assert "secret" not in json.dumps(one.identity())
    with pytest.raises(errors.SourceError, match="no consolidated metadata"):
        open_inputs(f"{server.url}/bucket/bare.zarr")
    with pytest.raises(errors.StoreNotFoundError) as caught:
        open_inputs(f"{secret}/bucket/none.h5ad?signature=secret")
    assert f"{server.url}/bucket/none.h5ad" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "password" not in str(caught.value)


def test_a_web_server_without_ranges(tmp_path: Path) -> None:
    write_full(tmp_path / "a.h5ad")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with (
        web_server(functools.partial(Quiet, directory=tmp_path)) as url,
        pytest.raises(errors.ReadError, match="range requests"),
    ):
        open_inputs(f"{url}/a.h5ad")


@pytest.mark.slow
def test_what_fails_while_a_remote_source_is_read(tmp_path: Path, sim: Callable[..., Any]) -> None:
    served = tmp_path / "bucket"
    served.mkdir()
    big = sp.random(3000, 2000, 0.3, "csr", random_state=0)
    write_h5ad(served / "a.h5ad", big)
    write_zarr(served / "a.zarr", full_anndata())
    server = sim()
    inputs = open_inputs([f"{server.url}/bucket/a.h5ad", f"{server.url}/bucket/a.zarr"])
    server.faults = [{"kind": "status", "value": 500, "count": 1 << 30}]
    for one in inputs:
        with one, pytest.raises(errors.ReadError, match=f"cannot read {one.name}"):
            one.element("X")


class Recorded:
    """A file system with one file; it records the requested ranges."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[list[int]] = []

    def cat_ranges(self, paths: list[str], starts: list[int], stops: list[int], on_error: str) -> list[bytes]:
        assert on_error == "raise"
        self.asked.append(starts)
        return [self.content[start:stop] for start, stop in zip(starts, stops, strict=True)]


@given(
    size=st.integers(0, 200),
    reads=st.lists(st.tuples(st.integers(0, 210), st.integers(0, 210)), max_size=10),
)
def test_a_remote_file_reads_as_a_file(size: int, reads: list[tuple[int, int]]) -> None:
    filesystem = Recorded(bytes(range(256))[:size])
    (location,) = source_locations("memory://a", {})
    location = type(location)(url="memory://a", name="a", path="/a", filesystem=filesystem)
    cache = BlockCache(block_bytes=8, max_blocks=3)
    file = RemoteFile(location, size, cache)
    for at, length in reads:
        file.seek(at)
        assert file.read(length) == filesystem.content[at : at + length]
        assert file.tell() == min(at + length, max(at, size))
        assert len(cache) <= 3
    assert file.seek(-size, os.SEEK_END) == 0
    assert all(len(starts) <= 3 for starts in filesystem.asked)


def test_remote_blocks_come_together_and_are_kept() -> None:
    filesystem = Recorded(bytes(100))
    (location,) = source_locations("memory://a", {})
    location = type(location)(url="memory://a", name="a", path="/a", filesystem=filesystem)
    file = RemoteFile(location, 100, BlockCache(block_bytes=10, max_blocks=6))
    for at, length in ((0, 25), (5, 20), (30, 1), (35, 20), (80, 3), (90, 10)):
        file.seek(at)
        file.read(length)
    assert filesystem.asked == [[0, 10, 20], [30, 40, 50], [80], [90]]  # 40 and 50 are read ahead


# ---- globs and lists


def test_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (10, 2, 1):
        write_h5ad(tmp_path / f"p{number}.h5ad", counts(seed=number))
    write_h5ad(tmp_path / "p[3].h5ad", counts(seed=3))
    (tmp_path / "below").mkdir()
    write_h5ad(tmp_path / "below" / "p1.h5ad", counts(seed=5))
    monkeypatch.chdir(tmp_path)
    with only(open_inputs("p[3].h5ad")) as one:  # an existing name takes precedence over the pattern
        np.testing.assert_array_equal(values(one, "X"), counts(seed=3).toarray())
    for pattern in ("p?*.h5ad", tmp_path / "p*.h5ad"):
        inputs = open_inputs(pattern)
        assert [one.label for one in inputs] == ["p1", "p10", "p2", "p[3]"]
    inputs = open_inputs(["p1.h5ad", "below/*", ad.AnnData(counts()), "p1.h5ad", full_anndata()])
    assert [one.label for one in inputs] == ["p1", "p1-1", "adata", "p1-2", "adata-1"]
    assert [one.name for one in inputs[2::2]] == [f"the AnnData in memory (source {n})" for n in (2, 4)]


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError, match=r"nothing matches .*none\*\.h5ad"):
        open_inputs([tmp_path / "none*.h5ad"])
    with pytest.raises(errors.OptionError, match="list of sources is empty"):
        open_inputs([])


def test_files_are_closed_when_a_later_one_is_bad(tmp_path: Path) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", counts())
    with pytest.raises(errors.StoreNotFoundError):
        open_inputs([path, tmp_path / "none.h5ad"])
    with h5py.File(path, "r+"):  # HDF5 refuses this while the file is open for reading
        pass


# ---- identity


@pytest.mark.parametrize("kind", ["h5ad", "zarr"])
def test_identity_changes_with_the_bytes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"

    def write(seed: int) -> dict[str, Any]:
        adata = ad.AnnData(counts(seed=seed), obs=frame(60, "c"), var=frame(300, "g"))
        if kind == "zarr":
            shutil.rmtree(path, ignore_errors=True)
            write_zarr(path, adata)
        else:
            adata.write_h5ad(path)
        with only(open_inputs(path)) as one:
            return one.identity()

    first = write(0)
    with only(open_inputs(path)) as one:
        assert one.identity() == first
    assert first["name"] == f"a.{kind}"
    assert write(1) != first


# ---- bad input


def make(change: Callable[[h5py.File], None]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        write_h5ad(path, counts())
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return write


def half(path: Path) -> Path:
    content = write_h5ad(path, counts()).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def old_obs(file: h5py.File) -> None:
    del file["obs"]
    file["obs"] = np.zeros(59, dtype=[("index", "S8"), ("n", "i4")])


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def zarr_array(path: Path) -> Path:
    zarr.create_array(path, shape=(3,), dtype="i4")
    return path


def no_json(path: Path) -> Path:
    path.mkdir()
    (path / "zarr.json").write_text("{")
    return path


def hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["matrix"] = np.ones(3)
    return path


def text(path: Path) -> Path:
    path.write_text("gene,count\n")
    return path


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "directory": (directory, "is a directory, but not a Zarr group .*own_format.md"),
    "text": (text, "is not an HDF5 file"),
    "truncated": (half, "truncated"),
    "hdf5": (hdf5, "no obs and no var and no X.*It holds: matrix"),
    "no obs": (make(lambda f: f.__delitem__("obs")), "has no obs, .*It holds: X"),
    "before 0.7": (make(old_obs), "cannot be read by anndata"),
    "obs is no frame": (make(lambda f: f["obs"].attrs.__delitem__("encoding-type")), "obs is not a data frame"),
    "obs of no order": (make(lambda f: f["obs"].attrs.__delitem__("column-order")), "obs is not a data frame"),
    "obs without index": (make(lambda f: f["obs"].__delitem__("_index")), "has no obs/_index"),
    "index is a group": (make(lambda f: f["obs"].move("_index", "a/b") or f["obs"].move("a", "_index")), "obs is not"),
    "var is an array": (make(lambda f: f.__delitem__("var") or f.__setitem__("var", [1])), "var is not a data frame"),
    "zarr array": (zarr_array, "is not a Zarr group"),
    "damaged zarr.json": (no_json, "is not the metadata of a group"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_sources_are_named(tmp_path: Path, case: str) -> None:
    write, message = BAD[case]
    path = write(tmp_path / "a.h5ad")
    with pytest.raises(errors.SourceError, match=message) as caught:
        open_inputs(path)
    assert str(path) in str(caught.value)


def test_a_damaged_element_is_named(tmp_path: Path) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", counts(), obs=pd.DataFrame({"n": range(60)}, index=frame(60, "c").index))
    with h5py.File(path, "r+") as file:
        file["uns"].create_dataset("when", data=np.zeros(3)).attrs["encoding-type"] = "martian"
        file["obs/n"].attrs["encoding-type"] = "martian"
        file["raw/var"] = np.ones(3)
    with only(open_inputs(path)) as one:
        for read, element in (
            (lambda: one.element("uns"), "uns"),
            (lambda: one.obs_column("n"), "obs/n"),
        ):
            with pytest.raises(errors.SourceError, match=f"{element} cannot be read by anndata"):
                read()
        with pytest.raises(errors.SourceError, match="raw/var is not a data frame"):
            one.var(raw=True)


def test_missing_and_forbidden_files(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError, match="there is no file"):
        open_inputs(tmp_path / "none.h5ad")
    path = write_h5ad(tmp_path / "a.h5ad", counts())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(errors.AccessDeniedError, match="not allowed to read"):
        open_inputs(path)
