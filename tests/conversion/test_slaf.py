"""SLAF directories, written as slafdb 0.5.2 writes them.

Its own converter is not used, because slafdb needs versions of boto3 and scipy that the other tests cannot have.
"""

from __future__ import annotations

import dataclasses
import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sources import SMALL, FailingDestination, assert_not_a_store, counts, disk_full, files

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import SourceError, StoreError
from zloader.conversion.convert import convert_to
from zloader.conversion.sources import slaf

lance = pytest.importorskip("lance")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 300, 80
VERSION = "2.2"  # of the storage of Lance, as slafdb sets it


def cells() -> ad.AnnData:
    obs = pd.DataFrame(
        {"donor": [f"d{i % 5}" for i in range(N_ROWS)], "dose": np.arange(N_ROWS) / 4, "n": np.arange(N_ROWS)},
        index=[f"c{i}" for i in range(N_ROWS)],
    )
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(N_GENES)]}, index=[f"g{i}" for i in range(N_GENES)])
    x = counts(N_ROWS, N_GENES)
    x.data[x.indptr[0] : x.indptr[1]] = 0
    x.data[x.indptr[-2] :] = 0
    x.eliminate_zeros()  # the first and the last cell are empty
    return ad.AnnData(x, obs=obs, var=var)


def write(folder, adata=None, *, value=np.uint16, **changed):
    """The tables and config.json of slafdb's `_convert_anndata`."""
    adata = cells() if adata is None else adata
    coo = adata.X.tocoo()
    expression = {
        "cell_integer_id": coo.row.astype(np.uint32),
        "gene_integer_id": coo.col.astype(np.uint16),
        "value": coo.data.astype(value),
    }
    obs = adata.obs.assign(cell_start_index=adata.X.indptr[:-1], cell_id=adata.obs_names, cell_integer_id=range(N_ROWS))
    var = adata.var.assign(gene_id=adata.var_names, gene_integer_id=range(N_GENES))
    tables = {"expression": expression, "cells": obs.reset_index(drop=True), "genes": var.reset_index(drop=True)}
    if adata.layers:
        tables["layers"] = wide(adata)
    for name, table in (tables | changed).items():
        made = pa.Table.from_pandas(table) if isinstance(table, pd.DataFrame) else pa.table(table)
        lance.write_dataset(
            made, f"{folder}/{name}.lance", mode="overwrite", max_rows_per_file=1500, data_storage_version=VERSION
        )
    config = {
        "format_version": "0.5",
        "array_shape": list(adata.shape),
        "tables": {name: f"{name}.lance" for name in tables | changed},
        "metadata": {"expression_count": int(coo.nnz)},
    }
    if adata.layers:
        config["layers"] = {"available": list(adata.layers), "immutable": list(adata.layers)}
    (folder / "config.json").write_text(json.dumps(config))
    return tables


def wide(adata):
    """The table of layers of slafdb's `_read_chunk_layers_wide`: all pairs of a cell and a gene."""
    made = {
        "cell_integer_id": np.repeat(np.arange(adata.n_obs, dtype=np.uint32), adata.n_vars),
        "gene_integer_id": np.tile(np.arange(adata.n_vars, dtype=np.uint16), adata.n_obs),
    }
    for name, layer in adata.layers.items():
        values = layer.toarray().reshape(-1).astype(np.float32)
        made[name] = pa.array(values, mask=values == 0)
    return made


@pytest.fixture
def atlas(tmp_path):
    folder = tmp_path / "atlas.slaf"
    folder.mkdir()
    write(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16 * 700, 16 << 20])
@pytest.mark.parametrize("value", [np.uint16, np.float32])
def test_the_same_cells_written_both_ways_are_equal(tmp_path, monkeypatch, atlas, batch, value):
    monkeypatch.setattr(slaf, "MOST_BYTES", batch)
    write(atlas, value=value)
    report = zl.convert(atlas, tmp_path / "a.zarr", options=SMALL, progress=False)
    adata = cells()
    adata.strings_to_categoricals()
    adata.X = adata.X.astype(value)
    zl.convert(adata, tmp_path / "b.zarr", options=SMALL, progress=False)
    one, other = (ad.read_zarr(tmp_path / f"{name}.zarr") for name in "ab")
    pd.testing.assert_frame_equal(one.obs, other.obs, check_names=False)
    pd.testing.assert_frame_equal(one.var, other.var, check_names=False)
    assert report.rows_made_canonical == {}
    for name in ("data", "indices", "indptr"):
        assert files(tmp_path / f"a.zarr/X/{name}/c") == files(tmp_path / f"b.zarr/X/{name}/c")
    assert zl.verify(tmp_path / "a.zarr", against=atlas, progress=False).ok


def with_layers():
    adata = cells()
    adata.layers["spliced"] = counts(N_ROWS, N_GENES, seed=1)
    adata.layers["un spliced"] = counts(N_ROWS, N_GENES, seed=2)
    adata.layers["none"] = adata.layers["spliced"] * 0
    adata.layers["none"].eliminate_zeros()
    return adata


@pytest.mark.slow
@pytest.mark.parametrize("batch", [16 * 700, 16 << 20])
def test_layers(tmp_path, monkeypatch, atlas, batch):
    monkeypatch.setattr(slaf, "MOST_BYTES", batch)
    adata = with_layers()
    write(atlas, adata)
    zl.convert(atlas, tmp_path / "a.zarr", options=SMALL, progress=False)
    found = ad.read_zarr(tmp_path / "a.zarr")
    assert sorted(found.layers) == ["none", "spliced", "un spliced"]
    for name, layer in adata.layers.items():
        np.testing.assert_array_equal(found.layers[name].toarray(), layer.toarray())
        assert found.layers[name].nnz == layer.nnz  # nulls are no zeros
    np.testing.assert_array_equal(found.X.toarray(), adata.X.toarray())
    assert zl.verify(tmp_path / "a.zarr", against=atlas, progress=False).ok
    select = zl.Selection(layers=["spliced"])
    shuffled = dataclasses.replace(SMALL, shuffle_seed=1)
    zl.convert(atlas, tmp_path / "b.zarr", select=select, options=shuffled, progress=False)
    found = ad.read_zarr(tmp_path / "b.zarr")
    wanted = adata.layers["spliced"].toarray()[found.obs["source_row"]]
    np.testing.assert_array_equal(found.layers["spliced"].toarray(), wanted)
    zl.convert(atlas, tmp_path / "c.zarr", select=zl.Selection(x="layers/spliced"), progress=False)
    np.testing.assert_array_equal(ad.read_zarr(tmp_path / "c.zarr").X.toarray(), adata.layers["spliced"].toarray())


@pytest.mark.slow
def test_wrong_layers(tmp_path, atlas):
    tables = write(atlas, with_layers())
    config = json.loads((atlas / "config.json").read_text())
    (atlas / "config.json").write_text(json.dumps(config | {"layers": {"available": ["other"]}}))
    with pytest.raises(SourceError, match=r"layers/other cannot be read \(KeyError"):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    (atlas / "config.json").write_text(json.dumps({key: each for key, each in config.items() if key != "layers"}))
    zl.convert(atlas, tmp_path / "a.zarr", progress=False)  # all columns are layers
    assert sorted(ad.read_zarr(tmp_path / "a.zarr").layers) == ["none", "spliced", "un spliced"]
    for at, words in [(0, "the values after cell 0 are not in the order of cells"), (-1, f"a value for cell {N_ROWS}")]:
        wrong = dict(tables["layers"], spliced=np.ones(N_ROWS * N_GENES, np.float32))
        wrong["cell_integer_id"] = wrong["cell_integer_id"].copy()
        wrong["cell_integer_id"][at] = N_ROWS if at else 7
        write(atlas, with_layers(), layers=wrong)
        with pytest.raises(SourceError, match=f"layers/spliced: .*{words}"):
            zl.convert(atlas, tmp_path / "b.zarr", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("survives", [5, 25])
def test_resumes(tmp_path, atlas, survives):
    zl.convert(atlas, tmp_path / "whole.zarr", options=SMALL, progress=False)
    dest = tmp_path / "a.zarr"
    failing = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, atlas, options=SMALL)
    assert_not_a_store(dest)
    zl.convert(atlas, dest, options=SMALL, resume=True, progress=False)
    assert files(dest) == files(tmp_path / "whole.zarr")
    write(atlas)
    with pytest.raises(StoreError, match="sources differ"):
        zl.convert(atlas, dest, options=SMALL, resume=True, progress=False)


def test_starts_at_any_row(atlas, monkeypatch):
    monkeypatch.setattr(slaf, "MOST_BYTES", 16 * 700)
    rows = slaf._SlafRows(
        "atlas", *(lance.dataset(f"{atlas}/{name}.lance") for name in ("cells", "genes", "expression"))
    )
    wanted = cells().X
    for first in (0, 1, 2, 150, N_ROWS - 2, N_ROWS - 1):
        found = list(rows.blocks(first))
        assert sum(block.shape[0] for block in found) == N_ROWS - first
        x = np.concatenate([block.toarray() for block in found])
        np.testing.assert_array_equal(x, wanted[first:].toarray())


@pytest.mark.slow
def test_in_a_bucket(tmp_path, atlas, s3):
    import s3fs

    bucket = s3fs.S3FileSystem(**s3.storage_options, skip_instance_cache=True)
    bucket.put(str(atlas), f"{s3.bucket}/{s3.prefix}/atlas.slaf", recursive=True)
    url = f"s3://{s3.bucket}/{s3.prefix}/atlas.slaf"
    zl.convert(url, tmp_path / "a.zarr", source_options=s3.storage_options, progress=False)
    assert zl.verify(tmp_path / "a.zarr", against=atlas, progress=False).ok


def damaged(tables, name, column, at, value):
    made = {key: np.array(each) for key, each in tables[name].items()}
    made[column][at] = value
    return {name: made}


@pytest.mark.parametrize(
    ("name", "column", "at", "value", "words"),
    [
        ("expression", "cell_integer_id", 3000, 5, "are not in the order of cells"),
        ("expression", "cell_integer_id", -1, N_ROWS, f"a value for cell {N_ROWS}, but there are {N_ROWS} cells"),
        ("expression", "gene_integer_id", 3000, N_GENES, f"a value for gene {N_GENES}, but there are {N_GENES} genes"),
        ("cells", "cell_integer_id", 7, 9, "cell_integer_id is 9 in row 7: the tables are not in order"),
        ("genes", "gene_integer_id", 7, 9, "gene_integer_id is 9 in row 7"),
    ],
)
def test_wrong_tables(tmp_path, atlas, name, column, at, value, words):
    tables = {key: dict(table) for key, table in write(atlas).items()}
    write(atlas, **damaged(tables, name, column, at, value))
    with pytest.raises(SourceError, match=words):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr" / "zarr.json").exists()


def test_wrong_directories(tmp_path, atlas, monkeypatch):
    config = json.loads((atlas / "config.json").read_text())
    (atlas / "config.json").write_text(json.dumps(config | {"checkpoint": {"chunk": 3}}))
    with pytest.raises(SourceError, match="its conversion to SLAF did not finish"):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    for text in ("{", "{}", json.dumps(config | {"tables": {**config["tables"], "genes": "none.lance"}})):
        (atlas / "config.json").write_text(text)
        with pytest.raises(SourceError, match=r"atlas\.slaf cannot be opened as SLAF"):
            zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    (atlas / "config.json").write_text(json.dumps(config | {"tables": {**config["tables"], "cells": "../cells.lance"}}))
    with pytest.raises(SourceError, match="names tables in other places"):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    write(atlas)
    for data in (atlas / "expression.lance" / "data").iterdir():
        data.write_bytes(data.read_bytes()[:-50])
    with pytest.raises(SourceError, match=r"atlas\.slaf"):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
    monkeypatch.setitem(__import__("sys").modules, "lance", None)
    with pytest.raises(SourceError, match=r'read by lance: pip install "zloader\[lance\]"'):
        zl.convert(atlas, tmp_path / "a.zarr", progress=False)
