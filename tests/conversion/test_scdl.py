"""Memory maps of BioNeMo's SCDL. The oracle is bionemo-scdl itself."""

from __future__ import annotations

import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sources import SMALL, FailingDestination, assert_not_a_store, counts, disk_full, files

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import SourceError, StoreError
from zloader.conversion.convert import convert_to
from zloader.conversion.sources import scdl

datasets = pytest.importorskip("bionemo.scdl.io.single_cell_memmap_dataset")
pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 300, 80


def cells() -> ad.AnnData:
    """Cells without names, because SCDL keeps only the columns."""
    obs = pd.DataFrame({"donor": pd.Categorical([f"d{i % 5}" for i in range(N_ROWS)]), "dose": np.arange(N_ROWS) / 4})
    obs.index = obs.index.astype(str)
    var = pd.DataFrame({"twice": ["x"] * N_GENES}, index=[f"E{i}" for i in range(N_GENES)])
    return ad.AnnData(counts(N_ROWS, N_GENES), obs=obs, var=var)


def write(folder, adata=None, dtype="float32"):
    made = cells() if adata is None else adata.copy()
    if "twice" in made.var:
        made.var.insert(0, "feature_id", made.var_names)
    made.write_h5ad(folder.with_suffix(".h5ad"))
    arguments = {"use_X_not_raw": True, "data_dtype": dtype}
    datasets.SingleCellMemMapDataset(str(folder), h5ad_path=str(folder.with_suffix(".h5ad")), **arguments).save()
    return folder


@pytest.mark.every(6)
@pytest.mark.parametrize("most", [8 * 700, 16 << 20])
@pytest.mark.parametrize("dtype", ["float32", "uint16", "float16"])
def test_the_same_cells_written_both_ways_are_equal(tmp_path, monkeypatch, most, dtype):
    monkeypatch.setattr(scdl, "MOST_BYTES", most)
    atlas = write(tmp_path / "atlas", dtype=dtype)
    report = zl.convert(atlas, tmp_path / "a.zarr", options=SMALL, progress=False)
    adata = cells()
    adata.X = adata.X.astype("float32" if dtype == "float16" else dtype)
    adata.var["twice"] = adata.var["twice"].astype("category")
    zl.convert(adata, tmp_path / "b.zarr", options=SMALL, progress=False)
    one, other = (ad.read_zarr(tmp_path / f"{name}.zarr") for name in "ab")
    pd.testing.assert_frame_equal(one.obs, other.obs)
    pd.testing.assert_frame_equal(one.var, other.var, check_dtype=False, check_categorical=False, check_names=False)
    np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())
    assert report.rows_made_canonical == {}
    assert zl.verify(tmp_path / "a.zarr", against=atlas, progress=False).ok
    library = datasets.SingleCellMemMapDataset(str(atlas))
    for row in (0, 7, N_ROWS - 1):
        values, genes = library.get_row(row)[0]
        np.testing.assert_array_equal(one.X[row].toarray()[0, genes], values)


def test_the_library_can_read_it_afterwards_and_a_reader_needs_no_right_to_write(tmp_path):
    atlas = write(tmp_path / "atlas")
    before = files(atlas)
    for path in atlas.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    assert files(atlas) == before


@pytest.mark.slow
@pytest.mark.parametrize("survives", [5, 25])
def test_resumes(tmp_path, survives):
    atlas = write(tmp_path / "atlas")
    zl.convert(atlas, tmp_path / "whole.zarr", options=SMALL, progress=False)
    dest = tmp_path / "a.zarr"
    failing = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, atlas, options=SMALL)
    assert_not_a_store(dest)
    zl.convert(atlas, dest, options=SMALL, resume=True, progress=False)
    assert files(dest) == files(tmp_path / "whole.zarr")
    data = np.memmap(atlas / "data.npy", np.float32, mode="r+")
    data[5] += 1
    data.flush()
    del data
    with pytest.raises(StoreError, match="sources differ"):
        zl.convert(atlas, dest, options=SMALL, resume=True, progress=False)


def test_damaged_maps(tmp_path):
    atlas = write(tmp_path / "atlas")

    def refused(words):
        with pytest.raises(SourceError, match=words):
            zl.convert(tmp_path / "b", tmp_path / "a.zarr", progress=False)
        assert not (tmp_path / "a.zarr" / "zarr.json").exists()

    def change(name, content):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(atlas, tmp_path / "b")
        (tmp_path / "b" / name).write_bytes(content((atlas / name).read_bytes()))

    change("data.npy", lambda content: content[:-400])
    refused(r"values end at \d+, but 301 entries in row_ptr, \d+ in col_ptr and \d+ in data: it is damaged")
    change("header.sch", lambda content: content[:20])
    refused(r"header\.sch cannot be read")
    change("metadata.json", lambda content: b'{"num_rows": 299}')
    refused("has 299 cells, whose values end")
    change("col_ptr.npy", lambda content: content[:100] + b"\xff" + content[101:])
    refused("has a value for gene 255, but there are 80 genes")
    change("row_ptr.npy", lambda content: content[:20] + b"\xff\xff" + content[22:])
    refused("row_ptr goes from .* at row 9")
    change("row_ptr.npy", lambda content: b"")
    refused("cannot be read")
    change("var_features/cumulative_sum_index.npy", lambda content: b"")
    refused("var_features cannot be read")


def test_datasets_with_different_genes_are_refused(tmp_path):
    genes = write(tmp_path / "atlas") / "var_features"
    shutil.copy(genes / "dataframe_0.parquet", genes / "dataframe_1.parquet")  # as after concat
    with pytest.raises(SourceError, match="has cells with different genes"):
        zl.convert(tmp_path / "atlas", tmp_path / "a.zarr", progress=False)


def test_names_of_cells_and_a_missing_library(tmp_path, monkeypatch):
    names = [f"c{i}" for i in range(N_ROWS)]
    adata = ad.AnnData(counts(N_ROWS, N_GENES), obs=pd.DataFrame(index=names))
    adata.var_names = [f"g{i}" for i in range(N_GENES)]
    atlas = write(tmp_path / "atlas", adata)
    zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    found = ad.read_zarr(tmp_path / "a.zarr")
    assert (list(found.obs_names), list(found.var_names)) == (names, list(adata.var_names))
    monkeypatch.setitem(__import__("sys").modules, "bionemo.scdl.schema.header", None)
    with pytest.raises(SourceError, match=r'read by bionemo: pip install "zloader\[scdl\]"'):
        zl.convert(atlas, tmp_path / "b.zarr", progress=False)
