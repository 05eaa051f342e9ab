"""Dense matrices in any grid of chunks, as anndata and others write them, are what anndata's reader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import hdf5plugin
import numpy as np
import pytest
import zarr
from helpers import dense

import zloader as zl

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
MATRICES = ("X", "layers/scaled", "raw/X", "obsm/X_pca")


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


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
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
        np.testing.assert_array_equal(dataset.obsm_array("X_pca"), adata.obsm["X_pca"])
    chosen = [dataset.var_names[gene] for gene in rng.permutation(n_genes)[: max(1, n_genes // 2)]]
    assert_epochs(dataset[:, chosen], np.asarray(adata[:, chosen].X), "X")
