"""Conversion: the store has the documented layout, is reproducible, and is written in bounded memory."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from sources import (
    LAYOUTS,
    SMALL,
    convert,
    counts,
    files,
    frame,
    full_anndata,
    write_h5ad,
)

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.destination import MARKER
from zloader.conversion.encode import CODECS, ChunkEncoder, chunk_elements, grid, shard_index, zarr_codecs
from zloader.conversion.scan import StoredArray
from zloader.storage.metadata import layout_of


def codec_names(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names of the inner codecs and index codecs of a sharded array."""
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    inner, index = (sharding["configuration"][key] for key in ("codecs", "index_codecs"))
    return [codec["name"] for codec in inner], [codec["name"] for codec in index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")  # of the record array in uns
def test_layout_is_the_one_promised(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert root.metadata.zarr_format == 3
    assert {key: root.attrs[key] for key in ("encoding-type", "encoding-version")} == {
        "encoding-type": "anndata",
        "encoding-version": "0.1.0",
    }
    sources = [{"label": "a", "rows": 60}]
    provenance = {"version": zl.__version__, "sources": sources, "select": {}, "shuffle_seed": None}
    recorded = dict(root.attrs["zloader"])
    assert recorded.pop("conversion")["record"].keys() == {"sources", "select", "options"}  # hashes, for `resume`
    assert recorded == provenance
    x = root["X"]
    assert x.attrs["encoding-type"] == "csr_matrix"
    assert list(x.attrs["shape"]) == [60, 300]
    assert x["data"].chunks == x["indices"].chunks == (1024,)
    assert x["data"].shards == x["indices"].shards == (2048,)
    assert x["indptr"].dtype == x["indices"].dtype == np.int32
    for name, shuffle, itemsize in (
        ("data", "bitshuffle", 1),
        ("indices", "bitshuffle", 2),
        ("indptr", "bitshuffle", 4),
    ):
        filters = ["numcodecs.astype", "numcodecs.delta"] if name == "indices" else []
        assert codec_names(x[name].metadata.to_dict()) == ([*filters, "bytes", "blosc", "crc32c"], ["bytes", "crc32c"])
        blosc = x[name].metadata.to_dict()["codecs"][0]["configuration"]["codecs"][-2]["configuration"]
        assert (blosc["cname"], blosc["shuffle"]) == ("lz4", shuffle)
        assert blosc["typesize"] == itemsize
    assert root["layers/dense"].chunks == (1, 300)
    for path, node in root.members(max_depth=None):  # checksums everywhere, no object missing
        if isinstance(node, zarr.Array):
            assert node.nchunks_initialized >= node.nchunks, path
            checked = "crc32c" in json.dumps(node.metadata.to_dict()["codecs"])
            assert checked or path == "uns/none", path  # anndata decides how None is stored
    listed = {key.rsplit("/", 1)[0] for key in files(tmp_path / "a.zarr") if key.endswith("/zarr.json")}
    assert set(root.metadata.consolidated_metadata.flattened_metadata) == listed
    assert MARKER not in files(tmp_path / "a.zarr")


BLOSC = ["bytes", "blosc", "crc32c"]
DELTA = ["numcodecs.delta", *BLOSC]
PLAIN = ["bytes", "crc32c"]
PCODEC = ["numcodecs.pcodec", "crc32c"]
NARROWED = ["numcodecs.astype"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("codec", "indices", "data", "obsm"),
    [
        ("lz4", [*NARROWED, *DELTA], BLOSC, BLOSC),
        ("zstd", [*NARROWED, *DELTA], BLOSC, BLOSC),
        ("pcodec", [*NARROWED, *PCODEC], BLOSC, PCODEC),  # pcodec has no form for uint8
        ("none", [*NARROWED, *PLAIN], PLAIN, PLAIN),
    ],
)
def test_codecs(tmp_path: Path, codec: str, indices: list[str], data: list[str], obsm: list[str]) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), obsm={"X_pca": np.ones((60, 3))})
    convert(source, tmp_path / "a.zarr", zl.ConvertOptions(codec=codec))
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    found = {name: codec_names(root[name].metadata.to_dict())[0] for name in ("X/indices", "X/data", "obsm/X_pca")}
    assert found == {"X/indices": indices, "X/data": data, "obsm/X_pca": obsm}
    np.testing.assert_array_equal(root["X/data"][:], counts().data)
    np.testing.assert_array_equal(root["X/indices"][:], counts().indices)
    np.testing.assert_array_equal(root["obsm/X_pca"][:], np.ones((60, 3)))


@pytest.mark.every(4)
@pytest.mark.parametrize("array", ["X/indices", "X/data", "obs/kind/codes", "obs/_index", "obsm/X_pca"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, array: str) -> None:
    parts = {
        "obs": frame(60, "cell").assign(kind=pd.Categorical(list("abc") * 20)),
        "obsm": {"X_pca": np.random.default_rng(0).random((60, 3))},
    }
    convert(write_h5ad(tmp_path / "a.h5ad", counts(), **parts), tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    root[array][...]
    (stored,) = [path for path in (tmp_path / "a.zarr" / array / "c").rglob("*") if path.is_file()][:1]
    content = bytearray(stored.read_bytes())
    content[20] ^= 1
    stored.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        root[array][...]


@given(
    length=st.integers(1, 5000),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "float32", "int64", "bool"]),
    codec=st.sampled_from(CODECS),
    ascending=st.booleans(),
)
def test_shards_have_the_bytes_that_zarr_would_write(length: int, dtype: str, codec: str, ascending: bool) -> None:
    """Of elements without differences, bools among them, and of differences of integers."""
    chunk, per_shard = 700, 3
    shards = -(-length // (chunk * per_shard))
    elements = np.random.default_rng(length).integers(0, 9, length).astype(dtype)
    codecs = zarr_codecs(codec, np.dtype(dtype), ascending=ascending and np.dtype(dtype).kind in "iu")
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(
        store,
        name="a",
        shape=(length,),
        dtype=dtype,
        chunks=(chunk,),
        shards=(chunk * per_shard,),
        config={"write_empty_chunks": True},
        **codecs,
    )
    array[:] = elements
    encoder = ChunkEncoder(layout_of(array, absent_is_fill=False))
    for shard in range(shards):
        here = elements[shard * chunk * per_shard : (shard + 1) * chunk * per_shard]
        chunks = [encoder.encode(here[at : at + chunk], chunk) for at in range(0, len(here), chunk)]
        stored = b"".join(chunks) + shard_index([len(chunk) for chunk in chunks], per_shard)
        wanted = store._store_dict[f"a/c/{shard}"].to_bytes()
        if len(chunks) == per_shard:
            assert stored == wanted
        else:  # zarr also writes chunks beyond the end
            assert wanted.startswith(b"".join(chunks))


@given(
    length=st.integers(0, 10**10),
    chunk=st.integers(1, 10**8),
    item_bytes=st.integers(0, 10**6),
    shard_bytes=st.integers(1, 10**10),
)
def test_grids_keep_their_bounds(length: int, chunk: int, item_bytes: int, shard_bytes: int) -> None:
    cut = grid(length, chunk=chunk, item_bytes=item_bytes, shard_bytes=shard_bytes)
    assert 1 <= cut.chunk <= max(1, min(chunk, length))
    assert cut.shard % cut.chunk == 0
    assert cut.chunk == 1 or cut.chunk * item_bytes <= 2**30
    assert cut.shard == cut.chunk or cut.shard * item_bytes <= shard_bytes
    assert cut.shard - cut.chunk < max(1, length)


def test_default_grid_of_an_atlas() -> None:
    options = zl.ConvertOptions()
    chunk = chunk_elements(options.chunk_rows, elements=147_000_000_000, rows=100_000_000)
    cut = grid(147_000_000_000, chunk=chunk, item_bytes=2, shard_bytes=options.shard_bytes)
    assert cut.chunk == 23_552  # 16 rows of 1 470 values, in whole multiples of 1 024
    assert 250 * 2**20 < cut.shard * 2 <= 256 * 2**20


@pytest.mark.slow
def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    for name in ("1", "2"):
        convert(tmp_path / "a.h5ad", tmp_path / name)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_and_another_one_another_order(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    stores, orders = {}, {}
    for name, seed, window_bytes in (
        ("1", 4, 4096),
        ("2", 4, 4096),
        ("other window", 4, 10**8),
        ("other seed", 5, 4096),
    ):
        options = dataclasses.replace(SMALL, shuffle_seed=seed, window_bytes=window_bytes)
        convert(tmp_path / "a.h5ad", tmp_path / name, options)
        stores[name] = files(tmp_path / name)
        out, wanted = ad.read_zarr(tmp_path / name), ad.read_h5ad(tmp_path / "a.h5ad")
        orders[name] = out.obs.pop("source_row").to_numpy()
        pd.testing.assert_frame_equal(out.obs, wanted.obs.iloc[orders[name]])
        wanted = wanted[orders[name]]
        for got, before in ((out.X, wanted.X), (out.raw.X, wanted.raw.X), (out.obsp["graph"], wanted.obsp["graph"])):
            np.testing.assert_array_equal(got.toarray(), before.toarray())
        np.testing.assert_array_equal(out.layers["dense"], wanted.layers["dense"])
        np.testing.assert_array_equal(out.obsm["X_pca"], wanted.obsm["X_pca"])
        assert sorted(orders[name]) == list(range(60))
    assert stores["1"] == stores["2"] == stores["other window"]
    assert list(orders["other seed"]) != list(orders["1"]) != list(range(60))


@pytest.mark.any_version
@pytest.mark.slow
def test_window_size_does_not_show_in_the_store(tmp_path: Path) -> None:
    for layout, form in LAYOUTS.items():
        source = write_h5ad(tmp_path / f"{layout}.h5ad", form(counts()))
        stores = []
        for window_bytes in (1, 5000, 10**9):
            dest = tmp_path / f"{layout}{window_bytes}"
            convert(source, dest, dataclasses.replace(SMALL, window_bytes=window_bytes))
            stores.append(files(dest))
        assert stores[0] == stores[1] == stores[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "n_tiles", "most_bytes"), [("csr", 24, 16 << 24), ("dense", 24, 16 << 24), ("csc", 1, 7e6)]
)
def test_memory_does_not_grow_with_the_matrix(tmp_path: Path, layout: str, n_tiles: int, most_bytes: float) -> None:
    """Rows are read in windows of 16 MiB, of which a few are in memory; a CSC matrix is sorted in small windows."""
    tile = sp.random(4000, 1000, 0.5, "csr", np.float32, random_state=0)  # 16 MB as CSR and as dense array
    assert tile.data.nbytes + tile.indices.nbytes == 16_000_000
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](sp.vstack([tile] * n_tiles, "csr")))
    options = zl.ConvertOptions(window_bytes=2**19, shard_size=2**19, memory="384MiB")
    tracemalloc.start()
    convert(source, tmp_path / "a.zarr", options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most_bytes < n_tiles * 16_000_000


def test_a_range_that_ends_early_is_truncated(tmp_path: Path) -> None:
    convert(write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr")
    array: Any = zarr.open_group(tmp_path / "a.zarr", mode="r")["X/data"]
    listed = {"X/data/c/0": (tmp_path / "a.zarr/X/data/c/0").stat().st_size + 9}
    layout = layout_of(array, absent_is_fill=False)
    stored = StoredArray(Location(url=str(tmp_path / "a.zarr")), layout, listed)
    with pytest.raises(errors.TruncatedObjectError, match=r"bytes \d+-\d+ returned \d+ bytes"):
        next(stored.chunks(0))
