"""AnnData Zarr of other writers: v2 with every compressor, v3 with and without shards, chunks never written."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import google_crc32c
import numcodecs
import numcodecs.registry
import numpy as np
import pytest
import zarr
import zarr.codecs
from helpers import check_minibatch, counts, dense

import zloader as zl
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.common.errors import CorruptChunkError, FormatError, TruncatedObjectError, ZloaderError

ADATA = counts(300, 120, seed=3)
LOADER: dict[str, Any] = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(7), "obs": ["cell_type"]}
V2 = {
    "blosc": numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.BITSHUFFLE),
    "blosc zstd": numcodecs.Blosc("zstd"),
    "zstd": numcodecs.Zstd(),
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(),
    "none": None,
}


def write(dest: Path, matrix: Callable[[zarr.Group], None], zarr_format: int) -> Path:
    """A store of ADATA without consolidated metadata, whose X is written by `matrix`."""
    root = zarr.create_group(dest, zarr_format=zarr_format)
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    with ad.settings.override(auto_shard_zarr_v3=False):
        ad.io.write_elem(root, "obs", ADATA.obs)
        ad.io.write_elem(root, "var", ADATA.var)
    matrix(root)
    return dest


def csr(grids: tuple[int, int], **options: Any) -> Callable[[zarr.Group], None]:
    """Writes X as CSR, with these chunk sizes for indices and values."""

    def write_csr(root: zarr.Group) -> None:
        group = root.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(ADATA.shape)})
        group.create_array("indptr", data=ADATA.X.indptr)
        for name, chunk in zip(("indices", "data"), grids, strict=True):
            group.create_array(name, data=getattr(ADATA.X, name), chunks=(chunk,), **options)

    return write_csr


def rows_are_right(store: Path, cache: Path | zl.Cache | None = None) -> None:
    dataset = zl.open_dataset(store, cache=cache)
    loader = zl.Loader(dataset, **LOADER)
    for _ in range(2):
        seen = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
        np.testing.assert_array_equal(np.sort(seen), np.arange(ADATA.n_obs))


@pytest.mark.slow
@pytest.mark.parametrize("compressor", V2.values(), ids=V2.keys())
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_zarr_v2(tmp_path: Path, compressor: Any, separator: str, mirrored: bool) -> None:
    keys = {"name": "v2", "separator": separator}
    matrix = csr((500, 700), compressors=compressor, chunk_key_encoding=keys)
    store = write(tmp_path / "a.zarr", matrix, 2)
    rows_are_right(store, tmp_path / "cache" if mirrored else None)


@pytest.mark.every(4)
@pytest.mark.parametrize("filters", [[numcodecs.Delta("<f4")], [numcodecs.Delta("<f4"), numcodecs.Shuffle(4)]])
@pytest.mark.parametrize("compressor", [None, numcodecs.Zstd()], ids=["plain", "zstd"])
def test_zarr_v2_with_filters(tmp_path: Path, filters: list[Any], compressor: Any) -> None:
    def matrix(root: zarr.Group) -> None:
        csr((500, 700))(root)
        del root["X/data"]
        group: Any = root["X"]
        group.create_array("data", data=ADATA.X.data, chunks=(300,), filters=filters, compressors=compressor)

    rows_are_right(write(tmp_path / "a.zarr", matrix, 2))


def _delta(dtype: str) -> dict[str, Any]:
    return {"name": "numcodecs.delta", "configuration": {"dtype": dtype}}


V3 = {
    "differences": {"filters": [_delta("<f4")]},
    "differences in shards": {"filters": [_delta("<f4")], "shards": (3000,)},
    "pcodec": {"serializer": {"name": "numcodecs.pcodec", "configuration": {"level": 3}}},
    "pcodec in shards": {
        "serializer": {"name": "numcodecs.pcodec", "configuration": {}},
        "compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()],
        "shards": (3000,),
    },
    "bz2": {"compressors": [{"name": "numcodecs.bz2", "configuration": {"level": 1}}]},
}


@pytest.mark.every(5)
@pytest.mark.parametrize("options", V3.values(), ids=V3.keys())
def test_zarr_v3_with_codecs_of_numcodecs(tmp_path: Path, options: dict[str, Any]) -> None:
    """Counts have exact differences, also as float32. Other writers use chunks of another size than convert."""

    def matrix(root: zarr.Group) -> None:
        csr((500, 500))(root)
        group: Any = root["X"]
        for name, dtype in (("data", "<f4"), ("indices", "<i4")):
            given = options | ({"filters": [_delta(dtype)]} if "filters" in options else {})
            group.create_array(name, data=getattr(ADATA.X, name).astype(dtype), chunks=(300,), overwrite=True, **given)

    rows_are_right(write(tmp_path / "a.zarr", matrix, 3))


@pytest.mark.parametrize("consolidated", [True, False])
def test_a_codec_whose_package_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consolidated: bool
) -> None:
    """Also for arrays that zarr reads, such as indptr."""
    store = tmp_path / "a.zarr"
    zl.convert(ADATA, store, options=zl.ConvertOptions(codec="pcodec"), progress=False)
    if not consolidated:
        root = json.loads((store / "zarr.json").read_text())
        del root["consolidated_metadata"]
        (store / "zarr.json").write_text(json.dumps(root))
    monkeypatch.delitem(numcodecs.registry.codec_registry, "pcodec")
    dataset = zl.open_dataset(store)
    match = r'X/\w+ .*is encoded with pcodec, which is not installed: pip install "zloader\[pcodec\]"'
    for use in (
        lambda: dataset.take([1]),
        lambda: next(iter(zl.Loader(dataset, batch_size=4))),
        lambda: zl.convert(store, tmp_path / "b.zarr", progress=False),
    ):
        with pytest.raises(ZloaderError, match=match):
            use()
    assert all(re.match(match, problem.what) for problem in zl.verify(store, progress=False).problems)


@pytest.mark.slow
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_dense_by_rows(tmp_path: Path, zarr_format: int) -> None:
    def matrix(root: zarr.Group) -> None:
        attributes = {"encoding-type": "array", "encoding-version": "0.2.0"}
        root.create_array("X", data=ADATA.X.toarray(), chunks=(11, 120), attributes=attributes)

    store = write(tmp_path / "a.zarr", matrix, zarr_format)
    rows_are_right(store)
    taken = zl.open_dataset(store).take([5, 299, 0])
    np.testing.assert_array_equal(dense(taken), ADATA.X[[5, 299, 0]].toarray())


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "keys", [{"name": "v2", "separator": "."}, {"name": "default", "separator": "."}], ids=["keys of v2", "dots"]
)
@pytest.mark.parametrize("shards", [None, (2000,)])
def test_zarr_v3_with_other_keys(tmp_path: Path, keys: Any, shards: tuple[int] | None) -> None:
    rows_are_right(write(tmp_path / "a.zarr", csr((500, 500), shards=shards, chunk_key_encoding=keys), 3))


@pytest.mark.every(12)
@pytest.mark.parametrize("form", [None, "raw"])
@pytest.mark.parametrize("order", ["reversed", "mixed", "apart"])
def test_a_shard_may_hold_its_chunks_in_any_order(tmp_path: Path, order: str, form: Any) -> None:
    """Its index says where each lies. Some writers leave room between them, too."""
    store = write(tmp_path / "a.zarr", csr((100, 100), shards=(2000,)), 3)
    for shard in [*(store / "X" / "indices" / "c").iterdir(), *(store / "X" / "data" / "c").iterdir()]:
        body, n_chunks = shard.read_bytes(), 20
        index = np.frombuffer(body[-16 * n_chunks - 4 : -4], "<u8").reshape(n_chunks, 2).copy()
        there = np.flatnonzero(index[:, 1] != 2**64 - 1)
        places = there[::-1] if order == "reversed" else np.random.default_rng(3).permutation(there)
        moved = b""
        for chunk in places:
            begin, size = (int(number) for number in index[chunk])
            moved += b"\xff" * (7 if order == "apart" else 0)
            index[chunk, 0] = len(moved)
            moved += body[begin : begin + size]
        table = index.tobytes()
        shard.write_bytes(moved + table + struct.pack("<I", google_crc32c.value(table)))
    rows_are_right(store, None if form is None else zl.Cache(tmp_path / "cache", form=form))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_chunk_that_was_never_written_is_fill_value(tmp_path: Path, zarr_format: int) -> None:
    """Other writers omit chunks whose values are all zero."""
    zeroed = ADATA.copy()
    zeroed.X.data[1000:2500] = 0

    def matrix(root: zarr.Group) -> None:
        csr((500, 500), config={"write_empty_chunks": False}, fill_value=0)(root)
        data: Any = root["X/data"]
        data[1000:2500] = 0

    store = write(tmp_path / "a.zarr", matrix, zarr_format)
    prefix = "c/" if zarr_format == 3 else ""
    (store / "X" / "data" / f"{prefix}3").unlink(missing_ok=True)
    out = zl.open_dataset(store).take(range(ADATA.n_obs))
    np.testing.assert_array_equal(dense(out), zeroed.X.toarray())


@pytest.mark.every(2)
@pytest.mark.parametrize("compressor", ["zstd", "lz4", "bz2", "zlib"])
def test_bytes_that_do_not_decode_are_an_error(tmp_path: Path, compressor: str) -> None:
    store = write(tmp_path / "a.zarr", csr((500, 700), compressors=V2[compressor]), 2)
    stored = store / "X" / "data" / "1"
    stored.write_bytes(stored.read_bytes()[:-20])
    with pytest.raises(CorruptChunkError, match="X/data/1"):
        zl.open_dataset(store).take(range(ADATA.n_obs))


def test_verify_says_that_it_does_not_check_zarr_v2(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", csr((500, 700)), 2)
    found = zl.verify(store, progress=False)
    (problem,) = found.problems
    assert "is Zarr v2" in problem.what
    assert (found.rows, found.genes) == ADATA.shape


class CutsShort(ListedStore):
    """Leaves out the last byte of the first `left` chunks that are read."""

    left = 0

    async def read(self, key: str, within: slice) -> bytes | None:
        content = await super().read(key, within)
        if content is None or key.endswith(".json") or not self.left:
            return content
        self.left -= 1
        return content[:-1]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_answer_that_was_cut_short_is_asked_for_again(tmp_path: Path, left: int) -> None:
    zarr.create_array(tmp_path / "a", data=np.arange(16), chunks=(16,), compressors=None)
    sizes = {key: (tmp_path / key).stat().st_size for key in ("a/zarr.json", "a/c/0")}
    store = CutsShort(Location(url=str(tmp_path)), sizes, all_listed=True)
    store.left = left
    array = zarr.open_array(store, path="a", mode="r")
    if left < 2:
        assert array[:].tolist() == list(range(16))
    else:
        with pytest.raises(TruncatedObjectError, match="a/c/0 returned 127 bytes instead of 128"):
            array[:]


def test_pickle_is_not_read(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", csr((500, 700)), 2)
    file = store / "obs/cell_type/categories/.zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"filters": [{"id": "vlen-utf8"}, {"id": "pickle"}]}))
    with pytest.raises(ZloaderError, match="pickle, which is not read"):
        zl.open_dataset(store).obs()


@pytest.mark.any_version  # zarr 3.4 warns and reads 0 as 1, so that the metadata look sound
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_of_no_rows_are_damaged_metadata(tmp_path: Path, zarr_format: int) -> None:
    store = write(tmp_path / "a.zarr", csr((500, 700)), zarr_format)
    file = store / "X/data" / ("zarr.json" if zarr_format == 3 else ".zarray")
    grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | (grid if zarr_format == 3 else {"chunks": [0]})))
    with pytest.raises(FormatError, match=r"X/data has chunks of \(0,\)"):
        next(iter(zl.Loader(zl.open_dataset(store), **LOADER)))
    assert not zl.verify(store, progress=False).ok
