"""Other tools read the original values from a store: anndata (eager and lazy) and zarr."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr
from sources import LAYOUTS, SMALL, assert_same, convert, counts, dense, full_anndata, write_h5ad

import zloader as zl


@pytest.mark.every(5)
@pytest.mark.parametrize("codec", ["lz4", "zstd", "pcodec", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zarr_reads_the_arrays(tmp_path: Path, layout: str, codec: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](counts()))
    convert(source, tmp_path / "a.zarr", zl.ConvertOptions(codec=codec, chunk_rows=1, shard_size="4KiB"))
    x: Any = zarr.open_group(tmp_path / "a.zarr", mode="r")["X"]
    if layout == "dense":
        np.testing.assert_array_equal(x[:], counts().toarray())
        return
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(x[name][:], getattr(counts(), name))
        np.testing.assert_array_equal(x[name][3:50], getattr(counts(), name)[3:50])


@pytest.mark.every(2)
@pytest.mark.parametrize("codec", ["lz4", "zstd", "pcodec"])
def test_zarr_warns_of_no_codec(tmp_path: Path, codec: str) -> None:
    """zarr 3.1 warns of the codecs of numcodecs. Users of zloader can do nothing about that."""
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Numcodecs codecs are not")
        zl.convert(source, tmp_path / "a.zarr", options=zl.ConvertOptions(codec=codec), progress=False)
        zl.convert(tmp_path / "a.zarr", tmp_path / "b.zarr", progress=False)
        assert zl.verify(tmp_path / "b.zarr", progress=False).ok
        dataset = zl.open_dataset(tmp_path / "b.zarr", cache=tmp_path / "cache")
        assert sum(len(minibatch.row) for minibatch in zl.Loader(dataset, batch_size=32)) == 60
        assert dataset.take([3, 50]).n_obs == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("codec", ["lz4", "zstd", "pcodec"])
def test_anndata_reads_every_codec(tmp_path: Path, codec: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"dense": counts().toarray()})
    convert(source, tmp_path / "a.zarr", zl.ConvertOptions(codec=codec, chunk_rows=2, shard_size="4KiB"))
    out = ad.read_zarr(tmp_path / "a.zarr")
    np.testing.assert_array_equal(dense(out.X), counts().toarray())
    np.testing.assert_array_equal(dense(out.layers["dense"]), counts().toarray())


@pytest.mark.slow
@pytest.mark.parametrize("consolidated", [True, False])
def test_anndata_reads_it_with_and_without_consolidated_metadata(tmp_path: Path, consolidated: bool) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad", convert_strings_to_categoricals=False)
    convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="r", use_consolidated=consolidated)
    out, wanted = ad.read_zarr(group), ad.read_h5ad(tmp_path / "a.h5ad")
    for part in ("obs", "var", "obsm", "varm", "obsp", "varp", "uns"):
        assert_same(getattr(out, part), getattr(wanted, part))
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))


@pytest.mark.every(5)
# xarray and dask raise warnings of their own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preserve_dtype", [True, False])
def test_anndata_reads_it_lazily(tmp_path: Path, layout: str, preserve_dtype: bool) -> None:
    obs = full_anndata().obs[["kind", "flag", "float", "string", "zero"]]
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](counts()), obs=obs)
    options = zl.ConvertOptions(chunk_rows=SMALL.chunk_rows, shard_size="4KiB", preserve_dtype=preserve_dtype)
    convert(source, tmp_path / "a.zarr", options)
    lazy = ad.experimental.read_lazy(str(tmp_path / "a.zarr"))
    some = lazy[[5, 3, 40]].to_memory()
    np.testing.assert_array_equal(dense(some.X), counts().toarray()[[5, 3, 40]])
    assert list(some.obs["kind"].astype(str)) == list(obs["kind"].iloc[[5, 3, 40]].astype(str))
    np.testing.assert_array_equal(dense(lazy.to_memory().X), counts().toarray())


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_anndata_reads_rows_of_the_matrix_on_disk(tmp_path: Path, layout: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](counts()))
    convert(source, tmp_path / "a.zarr")
    node = zarr.open_group(tmp_path / "a.zarr", mode="r")["X"]
    x = ad.io.sparse_dataset(node) if layout == "csr" else node
    np.testing.assert_array_equal(dense(x[10:30]), counts().toarray()[10:30])
