"""Dense matrices in any grid of chunks, as anndata and others write them, are what anndata's reader reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from helpers import dense
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import CorruptChunkError, FormatError, ZloaderError
from zloader.dataset import obsm_arrays
from zloader.insight.cost import epoch_costs
from zloader.insight.summary import summarize
from zloader.reading import read_plan
from zloader.testing import assert_resumes_anywhere

pytestmark = [
    pytest.mark.filterwarnings("ignore:Consolidated metadata"),
    pytest.mark.filterwarnings("ignore:zarr v3 autosharding"),
    pytest.mark.filterwarnings("ignore:zarr v3 will become the only"),
]
LOADER: dict[str, Any] = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(5), "layout": "dense"}
DTYPES = ["i1", "u2", "i4", "f2", "f4", "f8"]


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.integers(-99, 99, shape) if dtype != "u2" else rng.integers(0, 9999, shape)
    values = values.astype(dtype) if np.dtype(dtype).kind in "iu" else (values / 7).astype(dtype)
    values[rng.random(shape) < 0.3] = 0
    return values


def random_adata(rng: np.random.Generator, n_rows: int, n_genes: int, *, genes: list[str] | None = None) -> ad.AnnData:
    """All matrices are dense, and obsm has arrays of two and three dimensions."""
    dtype = DTYPES[rng.integers(len(DTYPES))]
    adata = ad.AnnData(random_values(rng, (n_rows, n_genes), dtype))
    adata.obs_names = [f"cell {row}" for row in range(n_rows)]
    adata.var_names = genes or [f"gene {gene}" for gene in range(n_genes)]
    adata.obs["number"] = np.arange(n_rows)
    adata.layers["scaled"] = random_values(rng, (n_rows, n_genes), "f4")
    adata.obsm["X_pca"] = random_values(rng, (n_rows, int(rng.integers(1, 9))), "f4")
    adata.obsm["cube"] = random_values(rng, (n_rows, int(rng.integers(1, 5)), int(rng.integers(1, 6))), "i2")
    raw = ad.AnnData(random_values(rng, (n_rows, n_genes + 3), "f8"))
    raw.var_names = [*adata.var_names, "other 0", "other 1", "other 2"]
    adata.raw = raw
    return adata


FILTERS: list[Any] = [
    {},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf", "fletcher32": True},
    hdf5plugin.Zstd(),
]
MATRICES = ("X", "layers/scaled", "raw/X", "obsm/X_pca", "obsm/cube")


def rewrite(root: Any, path: str, rng: np.random.Generator, *, zarr_format: int | None) -> None:
    """Writes a matrix again, in chunks of a random shape, with or without shards, compression and absent chunks."""
    values, attributes = root[path][...], dict(root[path].attrs)
    above, _, name = path.rpartition("/")
    group, shape = root[above] if above else root, values.shape
    chunks = tuple(int(rng.integers(1, max(2, size + 2))) for size in shape)
    chunks = tuple(1 if rng.random() < 0.15 else size for size in chunks)
    del group[name]
    if zarr_format is None:
        options: Any = FILTERS[rng.integers(len(FILTERS))]
        chunks = tuple(min(size, whole) for size, whole in zip(chunks, shape, strict=True))
        big_endian = values.dtype.newbyteorder(">") if rng.random() < 0.2 else values.dtype
        array = group.create_dataset(name, shape=shape, dtype=big_endian, chunks=chunks, fillvalue=0, **options)
        for begin in range(0, shape[0], chunks[0]):  # chunks of zeros are not written
            rows = values[begin : begin + chunks[0]]
            if rows.any():
                array[begin : begin + chunks[0]] = rows
    else:
        shards = tuple(int(size * rng.integers(1, 4)) for size in chunks)
        array = group.create_array(
            name, shape=shape, dtype=values.dtype, chunks=chunks, fill_value=0,
            shards=shards if zarr_format == 3 and rng.random() < 0.5 else None,
            compressors="auto" if rng.random() < 0.6 else None,
        )  # fmt: skip
        array[...] = values
    array.attrs.update(attributes)


def written(adata: ad.AnnData, path: Path, kind: str, rng: np.random.Generator) -> Path:
    """Writes a store or a file whose dense matrices have random grids."""
    path = path.with_suffix(".h5ad" if kind == "h5ad" else ".zarr")
    if kind == "h5ad":
        adata.write_h5ad(path)
        with h5py.File(path, "r+") as file:
            for name in MATRICES:
                rewrite(file, name, rng, zarr_format=None)
        return path
    with ad.settings.override(zarr_write_format=int(kind[-1]), auto_shard_zarr_v3=False):
        adata.write_zarr(path)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    for name in MATRICES:
        rewrite(root, name, rng, zarr_format=int(kind[-1]))
    zarr.consolidate_metadata(path)
    return path


def read(path: Path) -> ad.AnnData:
    return ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


def whole(adata: ad.AnnData, name: str) -> np.ndarray:
    if name.startswith("layers/"):
        return np.asarray(adata.layers[name.removeprefix("layers/")])
    return np.asarray(adata.raw.X if name == "raw/X" else adata.X)


def assert_epochs(dataset: zl.Dataset, wanted: np.ndarray, x: str, **options: Any) -> None:
    """Two epochs bring these rows, each once."""
    loader = zl.Loader(dataset, x=x, dtype="float64", framework="numpy", **LOADER, **options)
    for _ in range(2):
        seen = []
        for minibatch in loader:
            rows = minibatch.index
            np.testing.assert_array_equal(minibatch.x, wanted[rows].astype("f8"))
            seen.append(rows)
        assert np.sort(np.concatenate(seen)).tolist() == list(range(len(wanted)))


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
@pytest.mark.every(6)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["zarr 2", "zarr 3", "h5ad"])
def test_random_grids_are_what_anndata_reads(tmp_path: Path, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows, n_genes = int(rng.choice([1, 2, 37, 90])), int(rng.choice([1, 2, 7, 40]))
    path = written(random_adata(rng, n_rows, n_genes), tmp_path / "a", kind, rng)
    adata = read(path)
    for cache in (None, zl.Cache(tmp_path / "cache", form=["raw", "compact"][seed % 2])):
        dataset = zl.open_dataset(path, cache=cache)
        for name in ("X", "layers/scaled", "raw/X"):
            wanted = whole(adata, name)
            assert_epochs(dataset, wanted, name)
        some = rng.integers(0, n_rows, 20)
        taken = dataset.take(some, layers=["scaled"])
        np.testing.assert_array_equal(dense(taken), adata.X[some])
        np.testing.assert_array_equal(taken.layers["scaled"], adata.layers["scaled"][some])
        for name in ("X_pca", "cube"):
            np.testing.assert_array_equal(dataset.obsm_array(name), adata.obsm[name])
    chosen = [dataset.var_names[gene] for gene in rng.permutation(n_genes)[: max(1, n_genes // 2)]]
    assert_epochs(dataset[:, chosen], np.asarray(adata[:, chosen].X), "X")


def grid_of(path: Path, values: np.ndarray, chunks: tuple[int, int], **options: Any) -> Path:
    """A store or a file whose X has these values and chunks, and nothing beside it."""
    n_rows, n_genes = values.shape
    adata = ad.AnnData(np.zeros((n_rows, n_genes), values.dtype))
    adata.obs_names, adata.var_names = [str(row) for row in range(n_rows)], [str(gene) for gene in range(n_genes)]
    attributes = {"encoding-type": "array", "encoding-version": "0.2.0"}
    if path.suffix == ".h5ad":
        adata.write_h5ad(path)
        with h5py.File(path, "r+") as file:
            del file["X"]
            file.create_dataset("X", data=values, chunks=chunks, **options).attrs.update(attributes)
        return path
    with ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False):
        adata.write_zarr(path)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    del root["X"]
    root.create_array("X", data=values, chunks=chunks, **options).attrs.update(attributes)
    zarr.consolidate_metadata(path)
    return path


FORMS: dict[str, Any] = {
    "zarr": ("a.zarr", {}),
    "zarr in shards": ("a.zarr", {"shards": (100, 14)}),
    "plain zarr": ("a.zarr", {"compressors": None}),
    "h5ad": ("a.h5ad", {"compression": "gzip"}),
    "plain h5ad": ("a.h5ad", {}),
}
VALUES = random_values(np.random.default_rng(0), (230, 40), "f4")


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), FORMS.values(), ids=FORMS.keys())
def test_each_chunk_is_decoded_once_into_the_mirror(tmp_path: Path, name: str, options: Any) -> None:
    dataset = zl.open_dataset(grid_of(tmp_path / name, VALUES, (50, 7), **options), cache=tmp_path / "cache")
    loader = zl.Loader(dataset, framework="numpy", **LOADER)
    decoded = []
    for _ in range(2):
        for minibatch in loader:
            np.testing.assert_array_equal(minibatch.x, VALUES[minibatch.index])
        decoded.append(loader.statistics().chunks_decoded)
    assert decoded == [5 * 6, 0]
    dataset = zl.open_dataset(tmp_path / name, cache=tmp_path / "other")
    zl.warm(dataset)
    loader = zl.Loader(dataset, framework="numpy", **LOADER)
    assert sum(map(len, loader)) == len(VALUES)
    assert loader.statistics().gets == 0


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("cached", [False, True])
def test_the_cost_is_what_an_epoch_spends(tmp_path: Path, name: str, options: Any, cached: bool) -> None:
    path = grid_of(tmp_path / name, VALUES, (50, 7), **options)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache" if cached else None)
    loader = zl.Loader(dataset, framework="numpy", **LOADER)
    costs = epoch_costs(dataset, loader.plan(0), options=loader.options)
    for _ in loader:
        pass
    cost, spent = costs.first_mirrored if cached else costs.unmirrored, loader.statistics()
    assert (cost.gets, cost.bytes_read) == (spent.gets, spent.bytes_read)


def test_bands_that_do_not_fit_into_memory_are_kept_in_parts(tmp_path: Path) -> None:
    values = random_values(np.random.default_rng(2), (3000, 400), "f8")  # 9.6 MB, more than an eighth of 16 MiB
    dataset = zl.open_dataset(grid_of(tmp_path / "a.zarr", values, (3000, 50)), cache=tmp_path / "cache")
    options = zl.FetchOptions(memory="16MiB")
    loader = zl.Loader(dataset, framework="numpy", dtype="float64", options=options, **LOADER | {"fetch_factor": 32})
    for _ in range(2):
        for minibatch in loader:
            np.testing.assert_array_equal(minibatch.x, values[minibatch.index])
    assert loader.statistics().gets == 0


@pytest.mark.parametrize("cached", [False, True])
def test_chunks_that_do_not_fit_into_memory_are_refused(tmp_path: Path, cached: bool) -> None:
    values = np.ones((3000, 800))
    path = grid_of(tmp_path / "a.zarr", values, (3000, 400))
    dataset = zl.open_dataset(path, cache=tmp_path / "cache" if cached else None)
    loader = zl.Loader(dataset, options=zl.FetchOptions(memory="16MiB"))
    match = r"each chunk of X takes 9600000 bytes .*memory=16777216.*zloader convert.* memory=19200000 or more"
    with pytest.raises(FormatError, match=match):
        next(iter(loader))
    if cached:  # what a mirror holds needs no memory for chunks
        zl.warm(dataset)
        assert dense(next(iter(loader)).x).sum() == 64 * 800
    zl.convert(path, tmp_path / "b.zarr", progress=False)
    loader = zl.Loader(zl.open_dataset(tmp_path / "b.zarr"), options=zl.FetchOptions(memory="16MiB"))
    assert dense(next(iter(loader)).x).sum() == 64 * 800


@pytest.mark.parametrize("cached", [False, True])
def test_small_bands_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """And bands of any size apart."""
    for most in (1, 5000, 1 << 24):
        monkeypatch.setattr(read_plan, "_DECODED_BYTES", most)
        path = grid_of(tmp_path / f"{most}.zarr", VALUES, (3, 7))
        assert_epochs(zl.open_dataset(path, cache=tmp_path / "cache" if cached else None), VALUES, "X")


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), FORMS.values(), ids=FORMS.keys())
def test_a_loader_resumes_anywhere(tmp_path: Path, name: str, options: Any) -> None:
    path = grid_of(tmp_path / name, VALUES, (50, 7), **options)
    for cache in (None, tmp_path / "cache"):
        assert_resumes_anywhere(
            lambda: zl.Loader(zl.open_dataset(path, cache=cache), framework="numpy", **LOADER),  # noqa: B023
            described=lambda minibatch: (minibatch.index.tolist(), np.asarray(minibatch.x).tobytes()),
            every=7,
        )


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), FORMS.values(), ids=FORMS.keys())
def test_conversion_and_verification(tmp_path: Path, name: str, options: Any) -> None:
    path = grid_of(tmp_path / name, VALUES, (50, 7), **options)
    assert zl.verify(path, progress=False).ok
    zl.convert(path, tmp_path / "converted.zarr", progress=False)
    assert zl.verify(tmp_path / "converted.zarr", against=path, progress=False).ok
    assert_epochs(zl.open_dataset(tmp_path / "converted.zarr"), VALUES, "X")


@pytest.mark.parametrize("cached", [False, True])
def test_stores_with_other_grids_and_genes_are_joined(tmp_path: Path, cached: bool) -> None:
    """Also with a CSR store among them, and for genes in another order."""
    rng = np.random.default_rng(4)
    genes = [f"gene {gene}" for gene in range(9)]
    parts = [random_adata(rng, 40, 9, genes=genes), random_adata(rng, 30, 9, genes=genes[::-1])]
    parts += [random_adata(rng, 20, 12, genes=[*genes[3:], *(f"new {gene}" for gene in range(6))])]
    for adata in parts:
        adata.X, adata.obs_names = adata.X.astype("f4"), [f"{adata.shape} {row}" for row in range(adata.n_obs)]
    paths = [written(parts[0], tmp_path / "a", "zarr 3", rng), written(parts[1], tmp_path / "b", "h5ad", rng)]
    parts[2].write_h5ad(tmp_path / "c.h5ad")
    paths.append(tmp_path / "c.h5ad")
    for join in ("inner", "outer"):
        dataset = zl.open_dataset(paths, join=join, cache=tmp_path / "cache" if cached else None)
        frames = [adata.to_df().reindex(columns=dataset.var_names, fill_value=0) for adata in parts]
        wanted = np.concatenate([frame.to_numpy() for frame in frames])
        assert_epochs(dataset, wanted, "X")
        assert_epochs(
            dataset[:, ["gene 5", "gene 3"]], wanted[:, dataset.var_names.get_indexer(["gene 5", "gene 3"])], "X"
        )


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["a.zarr", "a.h5ad"])
def test_a_damaged_chunk_is_named(tmp_path: Path, name: str, cached: bool) -> None:
    path = grid_of(tmp_path / name, VALUES, (50, 7), **({"compression": "gzip"} if name == "a.h5ad" else {}))
    if name == "a.zarr":
        chunk, says = path / "X/c/2/3", r"chunk 15 of X, bytes .* of X/c/2/3"
        chunk.write_bytes(chunk.read_bytes()[:-9])
    else:
        says = "chunk 15 of X, bytes .* of a.h5ad"
        with h5py.File(path, "r") as file:
            info = file["X"].id.get_chunk_info(15)
        content = bytearray(path.read_bytes())
        content[info.byte_offset + 9 : info.byte_offset + 40] = bytes(31)
        path.write_bytes(content)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache" if cached else None)
    with pytest.raises(CorruptChunkError, match=says):
        list(zl.Loader(dataset, **LOADER))


def test_a_chunk_that_was_not_written_is_fill_value(tmp_path: Path) -> None:
    path = grid_of(tmp_path / "a.zarr", VALUES, (50, 7), fill_value=3)
    (path / "X/c/1/2").unlink()
    wanted = VALUES.copy()
    wanted[50:100, 14:21] = 3
    for cache in (None, tmp_path / "cache"):
        assert_epochs(zl.open_dataset(path, cache=cache), wanted, "X")


def test_info_says_what_a_row_costs(tmp_path: Path) -> None:
    path = grid_of(tmp_path / "a.zarr", VALUES, (50, 7), compressors=None)
    (x,) = summarize(zl.open_dataset(path)).matrices[0].arrays
    assert (x.chunks_per_row, x.rows_per_chunk, x.chunk_elements) == (6, 50, 350)
    shown = " ".join(CliRunner().invoke(app, ["info", str(path)]).stdout.split())
    assert "A row needs 6 chunks, which hold parts of ~50 rows: 8.4 kB stored, 8.4 kB decoded." in shown
    path = grid_of(tmp_path / "b.zarr", VALUES, (50, 40))
    assert summarize(zl.open_dataset(path)).matrices[0].arrays[0].chunks_per_row == 1
    assert "A row needs" not in CliRunner().invoke(app, ["info", str(path)]).stdout


def test_rows_in_too_many_parts_for_a_fetch_need_a_cache(tmp_path: Path) -> None:
    values = random_values(np.random.default_rng(3), (300, 800), "u2")
    path, options = grid_of(tmp_path / "a.zarr", values, (300, 1), shards=(300, 800)), zl.FetchOptions(memory="16MiB")
    scattered: dict[str, Any] = {"batch_size": 64, "sampling": zl.BlockShuffling(1), "layout": "dense"}
    with pytest.raises(FormatError, match=r"chunks of \(300, 1\) cut each row of X into 800 parts.* of 300 rows"):
        next(iter(zl.Loader(zl.open_dataset(path), options=options, **scattered)))
    loader = zl.Loader(zl.open_dataset(path, cache=tmp_path / "cache"), framework="numpy", options=options, **scattered)
    for minibatch in loader:
        np.testing.assert_array_equal(minibatch.x, values[minibatch.index])
    assert_epochs(zl.open_dataset(path), values, "X")


@pytest.mark.parametrize("kind", ["zarr 3", "h5ad"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_large_obsm_arrays_are_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """Arrays of two and three dimensions, whose chunks hold parts of rows."""
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 0)
    rng = np.random.default_rng(seed)
    path = written(random_adata(rng, 90, 5), tmp_path / "a", kind, rng)
    adata, dataset = read(path), zl.open_dataset(path, cache=tmp_path / "cache")
    names = ["X_pca", "cube"]
    assert dataset.observations.arrays.all_paged(names, zl.FetchOptions()).keys() == set(names)
    loader = zl.Loader(dataset, obsm=names, framework="numpy", **LOADER)
    for _ in range(2):
        for minibatch in loader:
            for name in names:
                np.testing.assert_array_equal(minibatch.obsm[name], adata.obsm[name][minibatch.index])


@pytest.mark.parametrize("name", ["a.zarr", "a.h5ad"])
def test_grids_on_a_server(tmp_path: Path, sim: Any, name: str) -> None:
    (tmp_path / "bucket").mkdir()
    grid_of(tmp_path / "bucket" / name, VALUES, (50, 7), **({"shards": (100, 14)} if name == "a.zarr" else {}))
    server = sim()
    storage_options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    for cache in (None, tmp_path / "cache"):
        dataset = zl.open_dataset(f"s3://bucket/{name}", cache=cache, storage_options=storage_options)
        assert_epochs(dataset, VALUES, "X")


HOSTILE: dict[str, Any] = {
    "huge array": {"shape": [10**15, 10**9], "chunks": [10**6, 1000]},
    "huge chunk": {"chunks": [10**15, 10**9]},
    "huge chunk of part of a row": {"chunks": [10**15, 3]},
    "one column of many": {"shape": [230, 10**12], "chunks": [50, 1]},
    "more dimensions": {"chunks": [50, 7, 1]},
    "fewer dimensions": {"chunks": [50]},
    "negative": {"chunks": [50, -7]},
    "no columns": {"chunks": [50, 0]},
    "a fraction": {"chunks": [50, 7.5]},
    "more rows than stored": {"chunks": [60, 7]},
}


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:Writing zarr v2")
@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("cached", [False, True])
def test_metadata_that_lie_end_in_our_errors(tmp_path: Path, changes: Any, cached: bool) -> None:
    path = tmp_path / "a.zarr"
    with ad.settings.override(zarr_write_format=2):
        ad.AnnData(VALUES).write_zarr(path, chunks=(50, 7))
    (path / ".zmetadata").unlink(missing_ok=True)
    document = json.loads((path / "X/.zarray").read_text())
    assert document["chunks"] == [50, 7]
    (path / "X/.zarray").write_text(json.dumps(document | changes))

    def read_all() -> None:
        dataset = zl.open_dataset(path, cache=tmp_path / "cache" if cached else None)
        list(zl.Loader(dataset, **LOADER, options=zl.FetchOptions(memory="64MiB")))

    with pytest.raises(ZloaderError):
        read_all()
