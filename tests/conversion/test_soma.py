"""TileDB-SOMA experiments, such as the CELLxGENE Census. The oracle is tiledbsoma itself, and pandas for filters.

tiledbsoma sometimes crashes the process where it filters. zloader survives that, but these tests would not.
"""

from __future__ import annotations

import json
import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sources import SMALL, FailingDestination, assert_not_a_store, counts, disk_full, files

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import SourceError, StoreError, StoreNotFoundError
from zloader.conversion.convert import convert_to
from zloader.conversion.sources import soma, soma_rows

tiledbsoma = pytest.importorskip("tiledbsoma")
soma_io = pytest.importorskip("tiledbsoma.io")
pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 500, 60


def cells() -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "tissue": pd.Categorical(np.random.default_rng(2).choice(["lung", "blood", "liver"], N_ROWS)),
            "note": [f"note {i} ä" for i in range(N_ROWS)],
            "donor": [f"d{i % 9}" for i in range(N_ROWS)],
            "dose": np.arange(N_ROWS) / 4,
            "primary": [i % 3 != 0 for i in range(N_ROWS)],
        },
        index=[f"c{i}" for i in range(N_ROWS)],
    )
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(N_GENES)]}, index=[f"g{i}" for i in range(N_GENES)])
    return ad.AnnData(counts(N_ROWS, N_GENES), obs=obs, var=var, layers={"two": counts(N_ROWS, N_GENES, seed=1)})


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """An experiment with one measurement and two arrays in X, small tiles."""
    path = str(tmp_path_factory.mktemp("soma") / "atlas.soma")
    small = tiledbsoma.TileDBCreateOptions(dims={"soma_dim_0": {"tile": 64}, "soma_dim_1": {"tile": 32}})
    soma_io.from_anndata(path, cells(), measurement_name="RNA", X_layer_name="raw", platform_config=small)
    return path


def wanted_of(experiment: str, layer: str = "raw", where: str | None = None) -> ad.AnnData:
    """What tiledbsoma makes of these cells."""
    with tiledbsoma.Experiment.open(experiment) as opened, opened.axis_query("RNA") as of_cells:
        found = of_cells.to_anndata(X_name=layer)
    return found if where is None else found[found.obs.eval(where)].copy()


def assert_is(store, wanted: ad.AnnData) -> None:
    found = ad.read_zarr(store)
    np.testing.assert_array_equal(found.X.toarray(), wanted.X.toarray())
    wanted.strings_to_categoricals()
    assert list(found.obs.columns) == list(wanted.obs.columns)
    for name in wanted.obs:
        assert found.obs[name].astype(object).tolist() == wanted.obs[name].astype(object).tolist()
    assert found.obs_names.tolist() == wanted.obs_names.tolist()
    assert found.var_names.tolist() == wanted.var_names.tolist()
    assert found.var["symbol"].tolist() == wanted.var["symbol"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [40 * 3000, 1 << 28])
@pytest.mark.parametrize("layer", ["raw", "two"])
@pytest.mark.parametrize("where", [None, "tissue == 'lung' and dose > 20", "dose < 5 or dose >= 124.5"])
def test_the_cells_are_those_of_the_library(tmp_path, experiment, monkeypatch, layer, where, block_bytes):
    monkeypatch.setattr(soma_rows, "_BLOCK_BYTES", block_bytes)
    source = zl.Soma(experiment, layer=layer, where=where)
    report = zl.convert(source, tmp_path / "a.zarr", options=SMALL, progress=False)
    wanted = wanted_of(experiment, layer, where)
    assert_is(tmp_path / "a.zarr", wanted)
    assert report.rows == wanted.n_obs
    assert report.rows_made_canonical == {}
    assert zl.verify(tmp_path / "a.zarr", against=source, progress=False).ok
    if where is None:
        assert zl.verify(tmp_path / "a.zarr", against=zl.Soma(experiment, layer="raw"), progress=False).ok == (
            layer == "raw"
        )


@pytest.mark.slow
def test_the_same_cells_from_h5ad_are_equal(tmp_path, experiment):
    zl.convert(zl.Soma(f"soma://{experiment}", layer="raw", measurement="RNA"), tmp_path / "a.zarr", progress=False)
    cells().write_h5ad(tmp_path / "a.h5ad")
    select = zl.Selection(layers=[])
    zl.convert(tmp_path / "a.h5ad", tmp_path / "b.zarr", select=select, progress=False)
    for name in ("data", "indices", "indptr"):
        assert files(tmp_path / f"a.zarr/X/{name}/c") == files(tmp_path / f"b.zarr/X/{name}/c")
    one, other = (ad.read_zarr(tmp_path / f"{name}.zarr") for name in "ab")
    pd.testing.assert_frame_equal(one.obs.drop(columns="soma_joinid"), other.obs, check_names=False)
    assert one.obs["note"].dtype == other.obs["note"].dtype


@pytest.mark.slow
def test_a_directory_with_one_matrix_needs_no_options(tmp_path):
    adata = cells()
    del adata.layers["two"]
    soma_io.from_anndata(str(tmp_path / "a"), adata, measurement_name="RNA")
    zl.convert(tmp_path / "a", tmp_path / "a.zarr", progress=False)
    assert_is(tmp_path / "a.zarr", wanted_of(str(tmp_path / "a"), "data"))


@pytest.mark.slow
def test_shuffled_and_appended(tmp_path, experiment):
    lung, others = (zl.Soma(experiment, layer="raw", where=f"tissue {op} 'lung'") for op in ("==", "!="))
    zl.convert(lung, tmp_path / "a.zarr", progress=False)
    zl.append(tmp_path / "a.zarr", others, progress=False)
    wanted = ad.concat([wanted_of(experiment, where=f"tissue {op} 'lung'") for op in ("==", "!=")])
    np.testing.assert_array_equal(ad.read_zarr(tmp_path / "a.zarr").X.toarray(), wanted.X.toarray())
    shuffled = zl.ConvertOptions(shuffle_seed=1)
    zl.convert(lung, tmp_path / "b.zarr", options=shuffled, progress=False)  # its number of values is not known
    found = ad.read_zarr(tmp_path / "b.zarr")
    wanted = wanted_of(experiment, where="tissue == 'lung'")[found.obs["source_row"].to_numpy()]
    np.testing.assert_array_equal(found.X.toarray(), wanted.X.toarray())


@pytest.mark.slow
@pytest.mark.parametrize("survives", [5, 30])
def test_resumes(tmp_path, experiment, survives):
    source = zl.Soma(experiment, layer="raw", where="tissue != 'lung'")
    zl.convert(source, tmp_path / "whole.zarr", options=SMALL, progress=False)
    whole, dest = files(tmp_path / "whole.zarr"), tmp_path / "a.zarr"
    failing = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, source, options=SMALL)
    assert_not_a_store(dest)
    other = zl.Soma(experiment, layer="raw", where="tissue != 'blood'")
    with pytest.raises(StoreError, match="a different conversion was interrupted"):
        zl.convert(other, dest, options=SMALL, resume=True, progress=False)
    zl.convert(source, dest, options=SMALL, resume=True, progress=False)
    assert files(dest) == whole


@pytest.mark.slow
def test_a_changed_experiment_is_noticed(tmp_path, experiment):
    shutil.copytree(experiment, tmp_path / "a")
    source = zl.Soma(tmp_path / "a", layer="raw")
    zl.convert(source, tmp_path / "a.zarr", progress=False)
    assert zl.convert(source, tmp_path / "a.zarr", resume=True, progress=False).already_complete
    with tiledbsoma.Experiment.open(str(tmp_path / "a")) as opened:
        uri, schema = opened.ms["RNA"].X["raw"].uri, opened.ms["RNA"].X["raw"].schema
    import pyarrow as pa

    row = pa.table({"soma_dim_0": [0], "soma_dim_1": [1], "soma_data": pa.array([77.0], pa.float32())}, schema=schema)
    with tiledbsoma.SparseNDArray.open(uri, "w") as array:
        array.write(row)
    with pytest.raises(StoreError, match="sources differ"):
        zl.convert(source, tmp_path / "a.zarr", resume=True, progress=False)
    assert not zl.verify(tmp_path / "a.zarr", against=source, progress=False).ok


@pytest.mark.slow
def test_cells_and_genes_without_names_as_in_the_census(tmp_path):
    import pyarrow as pa

    path = str(tmp_path / "census")
    with tiledbsoma.Experiment.create(path) as made:
        schema = pa.schema([("soma_joinid", pa.int64()), ("tissue", pa.large_string())])
        obs = made.add_new_dataframe("obs", schema=schema, index_column_names=["soma_joinid"], domain=[[0, 99]])
        obs.write(pa.table({"soma_joinid": [3, 7, 50], "tissue": ["a", "b", "b"]}, schema=schema))
        rna = made.add_new_collection("ms").add_new_collection("RNA", tiledbsoma.Measurement)
        schema = pa.schema([("soma_joinid", pa.int64()), ("feature_id", pa.large_string())])
        var = rna.add_new_dataframe("var", schema=schema, index_column_names=["soma_joinid"], domain=[[0, 9]])
        var.write(pa.table({"soma_joinid": [5, 2], "feature_id": ["ENSG5", "ENSG2"]}, schema=schema))
        array = rna.add_new_collection("X").add_new_sparse_ndarray("raw", type=pa.float32(), shape=(100, 10))
        found = {"soma_dim_0": [3, 50, 50], "soma_dim_1": [5, 2, 5], "soma_data": pa.array([1, 2, 3], pa.float32())}
        array.write(pa.table(found))
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    found = ad.read_zarr(tmp_path / "a.zarr")
    assert found.obs_names.tolist() == ["3", "7", "50"]
    assert found.var_names.tolist() == ["ENSG2", "ENSG5"]
    assert found.X.toarray().tolist() == [[0, 1], [0, 0], [2, 3]]
    with tiledbsoma.SparseNDArray.open(f"{path}/ms/RNA/X/raw", "w") as array:
        array.write(pa.table(dict(zip(found_names, ([7], [4], pa.array([1], pa.float32())), strict=True))))
    with pytest.raises(SourceError, match="cell 7 has a value for gene 4, but var has no gene with this soma_joinid"):
        zl.convert(path, tmp_path / "b.zarr", progress=False)


found_names = ("soma_dim_0", "soma_dim_1", "soma_data")


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"ms/RNA/X has 2 members: choose one of raw, two with .*layer=.* \(--soma-layer NAME\)"),
        ({"layer": "data"}, "has no 'data': choose one of raw, two"),
        ({"layer": "raw", "measurement": "ADT"}, r"ms has no 'ADT': choose one of RNA .*\(--measurement NAME\)"),
        ({"layer": "raw", "where": "nope == 3"}, r"where='nope == 3' is not a filter .*columns are .*tissue"),
        ({"layer": "raw", "where": "tissue =="}, "is not a filter of obs"),
        ({"layer": "raw", "where": "tissue == 'brain'"}, "no cell matches"),
    ],
)
def test_wrong_options(tmp_path, experiment, options, words):
    with pytest.raises(SourceError, match=words):
        zl.convert(zl.Soma(experiment, **options), tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.slow
def test_wrong_experiments(tmp_path, experiment, monkeypatch):
    with pytest.raises(StoreNotFoundError):
        zl.convert(zl.Soma(tmp_path / "none"), tmp_path / "a.zarr", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="cannot be opened as a SOMA experiment"):
        zl.convert(zl.Soma(tmp_path / "empty"), tmp_path / "a.zarr", progress=False)
    for part in ("ms", "ms/RNA/X", "ms/RNA/X/raw", "ms/RNA/var", "obs"):
        broken = tmp_path / part.replace("/", "-")
        shutil.copytree(experiment, broken)
        shutil.rmtree(broken / part)
        with pytest.raises(SourceError, match=f"{broken.name}.*cannot be (read|opened)"):
            zl.convert(zl.Soma(broken, layer="raw"), tmp_path / "a.zarr", progress=False)
    shutil.copytree(experiment, tmp_path / "damaged")
    for data in (tmp_path / "damaged" / "ms" / "RNA" / "X" / "raw").rglob("a0.tdb"):
        data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(SourceError, match="soma_joinid 0 to"):
        zl.convert(zl.Soma(tmp_path / "damaged", layer="raw"), tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr" / "zarr.json").exists()
    monkeypatch.setitem(__import__("sys").modules, "tiledbsoma", None)
    with pytest.raises(SourceError, match=r'read by tiledbsoma: pip install "zloader\[soma\]"'):
        zl.convert(experiment, tmp_path / "a.zarr", progress=False)


@pytest.fixture
def crashing(tmp_path, experiment, monkeypatch):
    """A function of how often which method crashes, which returns a source."""
    monkeypatch.setattr(soma, "_READER", "children:crashing_soma")
    monkeypatch.setattr(soma_rows, "_BLOCK_BYTES", 40 * 3000)  # several windows
    shutil.copytree(experiment, tmp_path / "atlas")

    def source(**left):
        (tmp_path / "atlas.crashes").write_text(json.dumps(left))
        return zl.Soma(tmp_path / "atlas", layer="raw", where="tissue == 'lung' and dose > 20")

    return source


@pytest.mark.slow
@pytest.mark.parametrize(
    "left", [{"table": 1, "counts": 1}, pytest.param({"names": 2, "table": 3, "counts": 4}, marks=pytest.mark.slow)]
)
def test_crashes_of_the_library_are_survived(tmp_path, experiment, crashing, left):
    zl.convert(crashing(**left), tmp_path / "a.zarr", progress=False)
    assert_is(tmp_path / "a.zarr", wanted_of(experiment, where="tissue == 'lung' and dose > 20"))
    assert set(json.loads((tmp_path / "atlas.crashes").read_text()).values()) == {0}


@pytest.mark.slow
def test_a_crash_at_every_attempt_is_an_error(tmp_path, experiment, crashing):
    with pytest.raises(SourceError, match=r"X at soma_joinid .*the process that reads it ended with SIGSEGV, 5 times"):
        zl.convert(crashing(counts=99), tmp_path / "a.zarr", progress=False)
    assert_not_a_store(tmp_path / "a.zarr")
    with pytest.raises(SourceError, match=r"obs/soma_joinid .*ended with SIGSEGV, 5 times in a row"):
        zl.convert(crashing(table=99), tmp_path / "a.zarr", progress=False)
    zl.convert(crashing(), tmp_path / "a.zarr", resume=True, progress=False)
    assert_is(tmp_path / "a.zarr", wanted_of(experiment, where="tissue == 'lung' and dose > 20"))


@pytest.mark.slow
def test_a_process_in_the_place_of_another_reads_the_same_cells(tmp_path, experiment, monkeypatch):
    """Cells that are added meanwhile are not mixed with those of the beginning."""
    shutil.copytree(experiment, tmp_path / "a")
    with zl.Soma(tmp_path / "a", layer="raw").open({}) as opened:
        before = opened.obs_column("dose")
        with tiledbsoma.Experiment.open(str(tmp_path / "a")) as found:
            obs = found.obs.read().concat()
        changed = obs.set_column(obs.schema.get_field_index("dose"), "dose", [np.full(N_ROWS, -1.0)])
        with tiledbsoma.DataFrame.open(str(tmp_path / "a" / "obs"), "w") as frame:
            frame.write(changed)
        opened._source._reader.close()
        pd.testing.assert_series_equal(opened.obs_column("dose"), before)
    with zl.Soma(tmp_path / "a", layer="raw").open({}) as opened:
        assert set(opened.obs_column("dose")) == {-1.0}


@pytest.mark.slow
def test_in_a_bucket(tmp_path, experiment, s3):
    import s3fs

    bucket = s3fs.S3FileSystem(**s3.storage_options, skip_instance_cache=True)
    bucket.put(experiment, f"{s3.bucket}/{s3.prefix}/atlas", recursive=True)
    source = zl.Soma(f"s3://{s3.bucket}/{s3.prefix}/atlas", layer="raw", where="tissue == 'lung'")
    zl.convert(source, tmp_path / "a.zarr", source_options=s3.storage_options, progress=False)
    assert_is(tmp_path / "a.zarr", wanted_of(experiment, where="tissue == 'lung'"))
