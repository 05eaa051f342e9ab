"""Datasets of .h5ad files where they lie: every filter and layout, odd files, damage, and the same order as stores."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from helpers import assert_same_minibatches, check_minibatch, counts, dense, write_store
from typer.testing import CliRunner

import zloader as zl
from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.commands.cli import app
from zloader.common.errors import (
    CorruptChunkError,
    FormatError,
    OptionError,
    StoreChangedError,
    StoreNotFoundError,
    ZloaderError,
)
from zloader.dataset.h5ad import OpenedFile
from zloader.reading.block_file import BlockFile
from zloader.reading.hdf5 import open_hdf5
from zloader.storage.hdf5_filters import undo_filters
from zloader.storage.layout import ABSENT, ArrayLayout

hdf5plugin = pytest.importorskip("hdf5plugin")
ADATA = counts(300, 120, seed=3)
LOADER: dict[str, Any] = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(7), "obs": ["cell_type"]}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "shuffled gzip": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "shuffled lzf": {"compression": "lzf", "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "gzip and fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
}


def write(path: Path, x: Any = ADATA.X, *, adata: ad.AnnData = ADATA, **options: Any) -> Path:
    """An .h5ad file of `adata` whose X is `x`, with its arrays created with `options`."""
    with h5py.File(path, "w", userblock_size=options.pop("userblock_size", None)) as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for name in ("obs", "var", "obsm", "layers", "uns"):
            part = getattr(adata, name)
            if name not in ("obs", "var"):
                part = {key: value for key, value in part.items() if key}  # anndata 0.13 lists X as the layer None
            ad.io.write_elem(file, name, part)
        write_x(file, x, **options)
    return path


def write_x(file: h5py.File, x: Any, **options: Any) -> None:
    if not scipy.sparse.issparse(x):
        file.create_dataset("X", data=x, **options).attrs.update(
            {"encoding-type": "array", "encoding-version": "0.2.0"}
        )
        return
    group = file.create_group("X")
    encoding = {"encoding-type": f"{x.format}_matrix", "encoding-version": "0.1.0", "shape": np.array(x.shape)}
    group.attrs.update(encoding)
    for name in ("data", "indices", "indptr"):
        values, chunks = getattr(x, name), options.get("chunks")
        if isinstance(chunks, tuple):
            chunks = (min(chunks[0], len(values)),)
        group.create_dataset(name, data=values, **options | {"chunks": chunks})


def rows_are_right(path: Path, cache: Path | zl.Cache | None = None, adata: ad.AnnData = ADATA) -> zl.Dataset:
    """Two epochs hold every row once, with its values and its class."""
    dataset = zl.open_dataset(path, cache=cache)
    for layout in ("csr", "dense"):
        loader = zl.Loader(dataset, **LOADER, layout=layout)
        for _ in range(2):
            seen = [check_minibatch(minibatch, adata) for minibatch in loader]
            np.testing.assert_array_equal(np.sort(np.concatenate([*seen, np.empty(0, int)])), np.arange(adata.n_obs))
    return dataset


@pytest.mark.every(60)
@pytest.mark.parametrize("cached", [None, "raw"])
@pytest.mark.parametrize("chunks", [(999,), True])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS.keys())
def test_every_filter(tmp_path: Path, options: dict[str, Any], chunks: Any, cached: str | None) -> None:
    path = write(tmp_path / "a.h5ad", chunks=chunks, **options)
    rows_are_right(path, None if cached is None else zl.Cache(tmp_path / "cache", form=cached))


X = ADATA.X
ODD: dict[str, tuple[Any, dict[str, Any]]] = {
    "in one piece": (X, {}),
    "in one piece after a user block": (X, {"userblock_size": 512}),
    "chunks after a user block": (X, {"userblock_size": 4096, "chunks": (500,), "compression": "gzip"}),
    "int64 indices": (scipy.sparse.csr_matrix((X.data, X.indices.astype(np.int64), X.indptr.astype(np.int64))), {}),
    "float64": (X.astype(np.float64), {"chunks": (700,)}),
    "integers": (X.astype(np.int16), {"chunks": (700,), "shuffle": True, "compression": "gzip"}),
    "dense in one piece": (X.toarray(), {}),
    "dense in rows": (X.toarray(), {"chunks": (7, 120), "compression": "gzip"}),
    "dense and of half precision": (X.toarray().astype(np.float16), {"chunks": (7, 120)}),
    "dense and big-endian": (X.toarray().astype(">f4"), {"chunks": (11, 120), "shuffle": True, "compression": "gzip"}),
    "dense, big-endian, in one piece": (X.toarray().astype(">i8"), {}),
    "one chunk": (X, {"chunks": (X.nnz,), "compression": "lzf"}),
    "chunks of one value": (X[:20], {"chunks": (1,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("x", "options"), ODD.values(), ids=ODD.keys())
def test_odd_files(tmp_path: Path, x: Any, options: dict[str, Any]) -> None:
    if scipy.sparse.issparse(x) and x.indices.dtype == np.int64:
        x = scipy.sparse.csr_matrix(X)
        x.indices, x.indptr = x.indices.astype(np.int64), x.indptr.astype(np.int64)
    adata = ADATA[: x.shape[0]].copy()
    path = write(tmp_path / "a.h5ad", x, adata=adata, **options)
    rows_are_right(path, tmp_path / "cache", adata)
    rows_are_right(path, adata=adata)


@pytest.mark.every(18)
@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (3, 0), (4, 1)])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_small_files(tmp_path: Path, shape: tuple[int, int], sparse: bool, compression: str | None) -> None:
    adata = counts(*shape, density=0.6)
    if not sparse:
        adata.X = adata.X.toarray()
    adata.write_h5ad(tmp_path / "a.h5ad", compression=compression)
    dataset = zl.open_dataset(tmp_path / "a.h5ad")
    assert dataset.shape == shape
    np.testing.assert_array_equal(dense(dataset.take(slice(None)).X), dense(adata.X))


def test_a_file_without_values(tmp_path: Path) -> None:
    rows_are_right(
        write(tmp_path / "a.h5ad", X * 0, adata=ad.AnnData(X * 0, obs=ADATA.obs, var=ADATA.var)),
        adata=ad.AnnData(X * 0, obs=ADATA.obs, var=ADATA.var),
    )


def test_rows_over_many_chunks(tmp_path: Path) -> None:
    adata = counts(20, 5_000, density=0.9)
    rows_are_right(write(tmp_path / "a.h5ad", adata.X, adata=adata, chunks=(64,), compression="gzip"), adata=adata)


def test_chunks_that_were_never_written_are_fill_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", X.toarray() * 0, chunks=(10, 120))
    x = np.zeros(ADATA.shape, np.float32)
    x[20:30] = X.toarray()[20:30]
    with h5py.File(path, "r+") as file:
        del file["X"]
        array = file.create_dataset("X", shape=x.shape, dtype="f4", chunks=(10, 120), fillvalue=0)
        array[20:30] = x[20:30]
        array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    rows_are_right(path, adata=ad.AnnData(scipy.sparse.csr_matrix(x), obs=ADATA.obs, var=ADATA.var))


@pytest.mark.slow
def test_a_chunk_that_does_not_compress_is_stored_as_it_is(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 62, (300, 120))
    x[:100] = 7
    for compression in ("gzip", "lzf"):
        path = write(tmp_path / "a.h5ad", x, chunks=(50, 120), compression=compression)
        with h5py.File(path) as file:
            masks = [file["X"].id.get_chunk_info(number).filter_mask for number in range(6)]
        assert compression == "gzip" or set(masks) == {0, 1}
        np.testing.assert_array_equal(zl.open_dataset(path).take(slice(None)).X, x)


@pytest.mark.slow
def test_all_parts_are_as_anndata_reads_them(tmp_path: Path) -> None:
    adata = ADATA.copy()
    rng = np.random.default_rng(0)
    adata.layers["dense"] = adata.X.toarray()
    adata.layers["sparse"] = adata.X * 2
    adata.obsm["X_pca"] = rng.random((300, 40))
    adata.raw = adata
    adata.obs["nullable"] = pd.array([1, None, 3] * 100, dtype="Int64")
    adata.obs["maybe"] = pd.array([True, None, False] * 100, dtype="boolean")
    adata.obs["wide"] = rng.random(300)
    adata.var["symbol"] = [f"s{gene}" for gene in range(120)]
    for compression in (None, "gzip", "lzf"):
        if compression == "gzip":  # h5py then cuts dense matrices into chunks of some columns
            adata.layers["dense"] = scipy.sparse.csr_matrix(adata.layers["dense"])
        adata.write_h5ad(tmp_path / "a.h5ad", compression=compression)
        wanted = ad.read_h5ad(tmp_path / "a.h5ad")
        dataset = zl.open_dataset(tmp_path / "a.h5ad", cache=tmp_path / "cache")
        for _ in range(2):
            found = dataset.to_adata(layers=["dense", "sparse"])
            pd.testing.assert_frame_equal(found.obs, wanted.obs)
            pd.testing.assert_frame_equal(found.var, wanted.var)
            np.testing.assert_array_equal(found.obsm["X_pca"], wanted.obsm["X_pca"])
            for name in ("dense", "sparse"):
                np.testing.assert_array_equal(dense(found.layers[name]), dense(wanted.layers[name]))
        (minibatch, *_) = zl.Loader(dataset, batch_size=300, shuffle=False, x=["X", "raw/X"], obsm=["X_pca"])
        np.testing.assert_array_equal(dense(minibatch.x["raw/X"]), wanted.raw.X.toarray())


@pytest.mark.slow
def test_a_file_and_a_store_have_the_same_order_and_states(tmp_path: Path) -> None:
    write_store(ADATA, tmp_path / "a.zarr", tmp_path)
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    options = {**LOADER, "obs": ["cell_type", "donor", "passed"], "seed": 5}
    of_store, of_file = (zl.Loader(zl.open_dataset(url), **options) for url in (tmp_path / "a.zarr", path))
    assert_same_minibatches(of_file, of_store)
    iterating = iter(of_store)
    for _ in range(3):
        next(iterating)
    state = of_store.state_dict() | {"fingerprint": of_file.state_dict()["fingerprint"]}  # of the stored bytes
    of_file.load_state_dict(state)
    assert_same_minibatches(of_file, iterating)


def test_files_and_stores_as_one_dataset(tmp_path: Path) -> None:
    write_store(ADATA[:100].copy(), tmp_path / "a.zarr", tmp_path)
    write(tmp_path / "b.h5ad", X[100:200], adata=ADATA[100:200].copy(), compression="gzip", chunks=(300,))
    write(tmp_path / "c.h5ad", X[200:].toarray(), adata=ADATA[200:].copy())
    dataset = zl.open_dataset([tmp_path / name for name in ("a.zarr", "b.h5ad", "c.h5ad")], cache=tmp_path / "cache")
    for _ in range(2):
        seen = [check_minibatch(minibatch, ADATA) for minibatch in zl.Loader(dataset, **{**LOADER, "obs": []})]
        assert sorted(np.concatenate(seen)) == list(range(300))


REFUSED = {
    "external link": "a link to another file",
    "soft link to an external link": "X of .* cannot be read in place: it is a link to another file, '.*b.h5ad'",
    "virtual": "a virtual dataset",
    "external storage": "its values lie in other files",
    "text": "X",
    "filter": "scaleoffset",
}


@pytest.mark.every(5)
@pytest.mark.parametrize(("kind", "words"), REFUSED.items())
def test_what_is_refused_and_why(tmp_path: Path, kind: str, words: str) -> None:
    path = write(tmp_path / "a.h5ad", X)
    with h5py.File(path, "r+") as file:
        del file["X"]
        if kind == "external link":
            file["X"] = h5py.ExternalLink("other.h5ad", "/X")
        if kind == "soft link to an external link":
            file["far"] = h5py.ExternalLink(write(tmp_path / "b.h5ad"), "/")
            file["X"] = h5py.SoftLink("/far/X")
        if kind == "virtual":
            layout = h5py.VirtualLayout((300, 120), "f4")
            layout[:] = h5py.VirtualSource(tmp_path / "b.h5", "x", (300, 120))
            file.create_virtual_dataset("X", layout)
        if kind == "external storage":
            file.create_dataset("X", (300, 120), "f4", external=[(tmp_path / "values", 0, h5py.h5f.UNLIMITED)])
        if kind == "text":
            file["X"] = np.full((300, 120), "a", object)
        if kind == "filter":
            file.create_dataset("X", data=X.toarray().astype("i4"), chunks=(10, 120), scaleoffset=0)
        if "X" in file and isinstance(file.get("X", getlink=True), h5py.HardLink):
            file["X"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    with pytest.raises(FormatError, match=words) as error:
        list(zl.Loader(zl.open_dataset(path)))
    assert "convert" in str(error.value)


def test_a_group_that_contains_itself_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        file["uns/again"] = file["/"]
        file["uns/loop"] = file["uns"]
    rows_are_right(path)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    dataset = zl.open_dataset(path)
    shutil.copy(write(tmp_path / "b.h5ad", X * 2, chunks=(400,)), path)
    with pytest.raises(StoreChangedError, match=r"a\.h5ad"):
        list(zl.Loader(dataset))
    with pytest.raises(StoreChangedError, match=r"a\.h5ad"):
        dataset.obs()


def test_a_file_is_opened_again_from_the_cache_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    zl.warm(zl.open_dataset(path, cache=tmp_path / "cache"))
    path.rename(tmp_path / "gone.h5ad")
    dataset = zl.open_dataset(path, cache=tmp_path / "cache", offline=True)
    seen = [check_minibatch(minibatch, ADATA) for minibatch in zl.Loader(dataset, **LOADER)]
    assert sorted(np.concatenate(seen)) == list(range(300))


@pytest.mark.slow
def test_twenty_flipped_bytes_of_a_file_with_checksums_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(999,), fletcher32=True)
    original = path.read_bytes()
    table = np.concatenate([layout_of(path, f"X/{name}").placement.table for name in ("data", "indices")])
    chance = random.Random(0)
    for _ in range(20):
        offset, size = table[chance.randrange(len(table))].tolist()
        damaged = bytearray(original)
        damaged[offset + chance.randrange(size)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptChunkError, match="fletcher32"):
            list(zl.Loader(zl.open_dataset(path)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_end_in_our_errors_or_right_values(tmp_path: Path, seed: int) -> None:
    """Bytes of the headers, and of everything but the chunks of X, are changed; or the file is cut."""
    chance = random.Random(seed)
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip", fletcher32=True)
    content = bytearray(path.read_bytes())
    if seed % 4 == 0:
        content = content[: chance.randrange(len(content))]
    else:
        for _ in range(chance.choice([1, 3, 20])):
            content[chance.randrange(len(content) if seed % 2 else 4096)] = chance.randrange(256)
    path.write_bytes(content)
    try:
        dataset = zl.open_dataset(path)
        minibatches = list(zl.Loader(dataset, batch_size=50, shuffle=False))
    except ZloaderError:
        return
    for minibatch in minibatches:
        np.testing.assert_array_equal(dense(minibatch.x), X[minibatch.index.numpy()].toarray())


def layout_of(path: Path, name: str) -> ArrayLayout:
    """With the chunk table."""
    with path.open("rb", buffering=0) as file:
        array = open_hdf5(file, str(path), "")[name]
        return array.layout("", array.chunk_table())


def test_chunk_tables_that_lie_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    table = layout_of(path, "X/data").placement.table
    content = path.read_bytes()
    for wrong in (len(content), (1 << 60) + 1):
        place = content.index(int(table[3, 0]).to_bytes(8, "little"))  # in a node of the index
        path.write_bytes(content[:place] + wrong.to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(ZloaderError, match=r"a\.h5ad"):
            list(zl.Loader(zl.open_dataset(path)))


def test_filters_undo_those_of_libhdf5(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for dtype in ("<i4", ">f4", "<f2", ">i8", "|u1"):
        for values in (rng.poisson(1, 5001), rng.integers(0, 100, 5001), np.zeros(5001)):
            for options in list(FILTERS.values())[1:]:
                with h5py.File(tmp_path / "a.h5", "w") as file:
                    file.create_dataset("a", data=values.astype(dtype), chunks=(700,), **options)
                layout = layout_of(tmp_path / "a.h5", "a")
                stored, table, (codec,) = (
                    np.fromfile(tmp_path / "a.h5", np.uint8),
                    layout.placement.table,
                    layout.codecs,
                )
                found = np.empty((len(table), 700), np.dtype(dtype).newbyteorder("="))
                for (offset, size), out in zip(table.tolist(), found, strict=True):
                    assert offset != ABSENT
                    undo_filters(**codec["configuration"], stored=stored[offset : offset + size], out=out)
                np.testing.assert_array_equal(found.reshape(-1)[:5001], values.astype(dtype))


def urls_of(dataset: zl.Dataset) -> list[str]:
    return [store.location.url for store in dataset.stores]


@pytest.mark.slow
def test_files_in_a_bucket(tmp_path: Path, sim: Any) -> None:
    bucket = tmp_path / "bucket"
    (bucket / "plates").mkdir(parents=True)
    write(bucket / "plates/a.h5ad", X[:100], adata=ADATA[:100].copy(), chunks=(500,), compression="gzip")
    write(bucket / "plates/b.h5ad", X[100:], adata=ADATA[100:].copy(), chunks=(500,))
    server = sim(root=tmp_path)
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    urls = ["s3://bucket/plates/a.h5ad", "s3://bucket/plates/b.h5ad"]
    glob = "s3://bucket/plates/*.h5ad"
    assert urls_of(zl.open_dataset(glob, storage_options=options)) == urls
    with pytest.raises(StoreNotFoundError, match="nothing matches"):
        zl.open_dataset("s3://bucket/*.h5ad", storage_options=options)
    dataset = zl.open_dataset(urls, storage_options=options, cache=tmp_path / "cache")
    with pytest.raises(OptionError, match="a bucket cannot be listed offline"):
        zl.open_dataset(glob, storage_options=options, cache=tmp_path / "cache", offline=True)
    changed = Location(url=urls[0], storage_options=options)
    another = Listing([("", changed.listing()[""]._replace(tag="another"))])
    with pytest.raises(StoreChangedError, match="has changed since it was opened"):
        OpenedFile(changed, another, origin="", cache=zl.Cache(tmp_path / "another"))
    assert not [*(tmp_path / "another").rglob("*bytes*")]  # nothing of it is kept
    for _ in range(2):
        loader = zl.Loader(dataset, **{**LOADER, "obs": []})
        assert sorted(np.concatenate([check_minibatch(each, ADATA) for each in loader])) == list(range(300))


@pytest.mark.slow
def test_a_glob_is_the_sorted_files(tmp_path: Path) -> None:
    for name in ("b", "a", "a[1]"):
        write(tmp_path / f"{name}.h5ad")
    paths = [str(tmp_path / f"{name}.h5ad") for name in ("a", "a[1]", "b")]
    for url in (tmp_path / "*.h5ad", f"file://{tmp_path}/*.h5ad", [paths[0], str(tmp_path / "[ab]*.h5ad")]):
        expected = paths if not isinstance(url, list) else [paths[0], *paths]
        assert urls_of(zl.open_dataset(url)) == expected
    assert urls_of(zl.open_dataset(tmp_path / "a[1].h5ad")) == paths[1:2]  # a file of that name comes first
    with pytest.raises(OptionError, match="a web server cannot be listed"):
        zl.open_dataset("http://127.0.0.1:9/*.h5ad")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunks": (500,), "compression": "gzip"}], ids=["in one piece", "gzip"])
def test_verify_reads_every_chunk_and_compares_with_h5py(tmp_path: Path, options: dict[str, Any]) -> None:
    adata = ADATA.copy()
    adata.layers["dense"] = adata.X.toarray()
    adata.obsm["pca"] = adata.X[:, :7].toarray()
    path = write(tmp_path / "a.h5ad", adata=adata, **options)
    found = zl.verify(path, against=path, progress=False)
    assert found.problems == ()
    assert found.values > 2 * ADATA.X.nnz + ADATA.X.shape[0] * ADATA.X.shape[1]
    other = ADATA.X.copy()
    other.data[7] += 1
    (problem,) = zl.verify(path, against=write(tmp_path / "b.h5ad", other, adata=adata), progress=False).problems
    assert problem.where == "X"
    with h5py.File(path, "r+") as file:
        indices = file["X/indices"][:]
        indices[3] = 120
        file["X/indices"][:] = indices
        file["obs/cell_type/codes"][5] = 99
    problems = zl.verify(path, progress=False).problems
    assert {problem.where for problem in problems} == {"X", "obs/cell_type"}
    assert "gene 120" in str(problems)


def test_a_damaged_chunk_is_named_by_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), fletcher32=True)
    table = layout_of(path, "X/data").placement.table
    content = bytearray(path.read_bytes())
    content[int(table[2, 0]) + 11] ^= 1
    path.write_bytes(content)
    (problem,) = zl.verify(path, progress=False).problems
    assert problem.where == "X/data"
    assert "fletcher32" in problem.what


@pytest.mark.slow
def test_verify_reads_the_records_that_scanpy_puts_into_uns(tmp_path: Path) -> None:
    names = np.rec.array([("TP53", "MYC"), ("GAPDH", "ACTB")], dtype=[("alpha", object), ("beta", object)])
    adata = ADATA.copy()
    adata.uns["rank_genes_groups"] = {"names": names, "params": {"method": "wilcoxon"}}
    path = write(tmp_path / "a.h5ad", adata=adata)
    assert zl.verify(path, progress=False).problems == ()
    assert zl.verify(path, against=path, progress=False).problems == ()
    with h5py.File(path, "r+") as file:
        file["uns/rank_genes_groups/more"] = file["uns/rank_genes_groups/names"][()]  # with a heap of its own
        at = file["uns/rank_genes_groups/more"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[at + 4 : at + 12] = b"\x37" * 8  # the address of a heap
    path.write_bytes(content)
    (problem,) = zl.verify(path, progress=False).problems
    assert problem.where == "uns/rank_genes_groups/more"


@pytest.mark.slow
def test_records_of_any_kind_do_not_keep_a_file_from_being_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad")
    padded = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    nested = np.dtype([("a", [("p", "i4"), ("q", "f8")]), ("b", "i4")])
    with h5py.File(path, "r+") as file:
        uns = file.require_group("uns")
        uns["padded"] = np.array([(1, 2.5), (3, 4.5)], padded)
        uns["fixed"] = np.array([(b"ab", 1), (b"c", 2)], [("a", "S2"), ("b", ">i4")])
        uns["nested"] = np.zeros(3, nested)
        uns["scalar"] = np.array((1, 2.5), padded)
        uns["none"] = np.zeros(0, padded)
        uns["arrays"] = np.zeros(3, [("a", "S3"), ("b", "f8", (2,))])
    rows_are_right(path)
    assert zl.verify(path, progress=False).problems == ()
    store = zl.open_dataset(path).store
    assert store.element("uns/nested")["a"]["q"].tolist() == [0, 0, 0]
    assert store.element("uns/padded").tolist() == [(1, 2.5), (3, 4.5)]
    assert store.element("uns/fixed").tolist() == [(b"ab", 1), (b"c", 2)]


@pytest.mark.slow
def test_files_can_be_pickled_and_read_by_workers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    dataset = pickle.loads(pickle.dumps(zl.open_dataset(path, cache=tmp_path / "cache")))
    loader = zl.Loader(dataset, **LOADER)
    workers = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
    seen = [check_minibatch(minibatch, ADATA) for minibatch in workers]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(300))


@pytest.mark.slow
def test_files_are_warmed_described_and_mixed_as_stores_are(tmp_path: Path) -> None:
    write_store(ADATA, tmp_path / "a.zarr", tmp_path)
    write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip")
    of_store, of_file = (zl.open_dataset(tmp_path / name, cache=tmp_path / "cache") for name in ("a.zarr", "a.h5ad"))
    zl.warm(of_file)
    loader = zl.Loader(of_file, **LOADER)
    list(loader)
    assert loader.statistics().gets == 0
    expected, found = (each.gene_statistics(progress=False) for each in (of_store, of_file))
    np.testing.assert_array_equal(found.mean, expected.mean)
    view = of_file.where("cell_type == 'b'")
    assert view.obs_names.tolist() == of_store.where("cell_type == 'b'").obs_names.tolist()


def test_nodes_of_a_tree_are_read_at_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        array = file.create_dataset("x", (900_000,), "i1", chunks=(100,))
        array[::50] = 1
    content, waits = (tmp_path / "a.h5").read_bytes(), []

    def read(spans: list[tuple[int, int]]) -> list[bytes]:
        waits.append(len(spans))
        return [content[start:stop] for start, stop in spans]

    remote = BlockFile(read, len(content), where="a.h5")
    remote.block_bytes = 512
    with h5py.File(remote, "r") as file, h5py.File(tmp_path / "a.h5") as local:
        found, expected = [], []
        file["x"].id.chunk_iter(lambda chunk: found.append(chunk.byte_offset))
        local["x"].id.chunk_iter(lambda chunk: expected.append(chunk.byte_offset))
        assert found == expected
        assert len(found) == 9000
        np.testing.assert_array_equal(file["x"][::50], 1)
    assert max(waits) > 100  # 9 000 / 64 leaves
    assert sum(wait > 10 for wait in waits) < 5


def random_adata(seed: int) -> ad.AnnData:
    """Rows of any number and length, values and columns of any dtype, missing labels, layers, raw and obsm."""
    rng = np.random.default_rng(seed)
    n, genes = int(rng.choice([1, 2, 63, 64, 65, 300])), int(rng.choice([1, 7, 200]))
    density = rng.choice([0.0, 0.05, 0.9], n)[:, None]  # of each row
    values = rng.integers(1, 200, (n, genes)) * (rng.random((n, genes)) < density)
    dtypes = rng.permutation(["f4", "f8", "i4", "u2", "i8", "u1"])
    adata = ad.AnnData(scipy.sparse.csr_matrix(values.astype(dtypes[0])))
    labels = rng.choice(["a", "b", "c\u00e9", ""], n)
    missing = rng.random(n) < 0.2
    adata.obs["label"] = pd.Categorical(np.where(missing, None, labels))
    adata.obs["text"] = labels.astype(object)
    adata.obs["count"] = pd.array(np.where(missing, None, rng.integers(0, 9, n)), dtype="Int64")
    adata.obs["flag"], adata.obs["level"] = rng.random(n) < 0.5, rng.random(n).astype("f4")
    adata.raw = adata
    adata.layers["dense"] = values.astype(dtypes[1])
    adata.layers["sparse"] = scipy.sparse.csr_matrix(values.astype(dtypes[2]))
    adata.obsm["pca"] = rng.random((n, 3)).astype("f4")
    return adata


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_files_are_as_anndata_reads_them(tmp_path: Path, seed: int) -> None:
    adata, rng = random_adata(seed), np.random.default_rng(1000 + seed)
    compression = rng.choice(["none", "gzip", "lzf"])
    if compression != "none":  # h5py cuts compressed dense arrays in columns, too
        del adata.layers["dense"]
    adata.write_h5ad(tmp_path / "a.h5ad", compression=None if compression == "none" else str(compression))
    expected = ad.read_h5ad(tmp_path / "a.h5ad")
    dataset = zl.open_dataset(tmp_path / "a.h5ad", cache=tmp_path / "cache" if seed % 2 else None)
    assert zl.verify(tmp_path / "a.h5ad", against=tmp_path / "a.h5ad", progress=False).problems == ()
    names = [f"layers/{name}" for name in adata.layers if name]
    loader = zl.Loader(
        dataset, batch_size=16, x=["X", *names, "raw/X"], obs=["label", "flag", "level"], obsm=["pca"], layout="scipy"
    )
    for _ in range(2):
        seen = []
        for minibatch in loader:
            rows = np.asarray(minibatch.index)
            seen += rows.tolist()
            for name in ("X", *names):
                whole = expected.X if name == "X" else expected.layers[name.removeprefix("layers/")]
                np.testing.assert_array_equal(dense(minibatch.x[name]), dense(whole[rows]))
            np.testing.assert_array_equal(dense(minibatch.x["raw/X"]), dense(expected.raw.X[rows]))
            np.testing.assert_array_equal(minibatch.obs["label"], expected.obs["label"].cat.codes.iloc[rows])
            np.testing.assert_array_equal(minibatch.obs["level"], expected.obs["level"].iloc[rows])
            np.testing.assert_array_equal(minibatch.obsm["pca"], expected.obsm["pca"][rows])
        assert sorted(seen) == list(range(adata.n_obs))
    pd.testing.assert_frame_equal(dataset.obs(), expected.obs)
    assert dataset.var_names.equals(expected.var_names)


def test_info_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5ad", chunks=(500,), compression="gzip", shuffle=True)
    told = CliRunner().invoke(app, ["info", str(path)])
    assert told.exit_code == 0
    assert "shuffle, gzip" in told.output
    with h5py.File(path, "r+") as file:
        file["obs/linked"] = h5py.ExternalLink("other.h5ad", "/obs/donor")
        file["obs/CD4+/CD8-"] = np.arange(ADATA.n_obs)  # as anndata wrote it until 0.12
        file["obs"].attrs["column-order"] = [*file["obs"].attrs["column-order"], "linked", "CD4+/CD8-"]
    told = CliRunner().invoke(app, ["info", str(path)])
    assert told.exit_code == 0
    assert "CD4+/CD8-" in told.output
