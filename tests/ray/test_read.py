"""A ray.data.Dataset has every row of the dataset once, in blocks of the sizes that it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
pa = pytest.importorskip("pyarrow")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

pytestmark = pytest.mark.slow  # Ray takes ten seconds to start

ADATA = counts(503, 97)
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((503, 5), np.float32)
FIELDS = ["X", "obs/cell_type", "obs/n_counts", "obs/passed", "obsm/X_pca", "obs_names"]
SIZES = {"batch_size": 32, "fetch_factor": 2, "sampling": zl.BlockShuffling(8)}  # 8 fetches


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return zl.open_dataset(str(folder / "counts.zarr"))


def check_table(table: Any) -> list[int]:
    """Compares the values of a table with the AnnData. Returns its row numbers."""
    rows = table.column("index").to_numpy()
    genes, values = table.column("X/genes").to_pylist(), table.column("X/values").to_pylist()
    for row, of_row, with_values in zip(rows, genes, values, strict=True):
        wanted = ADATA.X[row]
        assert of_row == wanted.indices.tolist()
        assert with_values == wanted.data.tolist()
    codes = ADATA.obs["cell_type"].cat.codes.to_numpy()
    assert table.column("obs/cell_type").to_pylist() == codes[rows].tolist()
    assert table.column("obs/n_counts").to_pylist() == ADATA.obs["n_counts"].to_numpy()[rows].tolist()
    assert table.column("obs/passed").to_pylist() == ADATA.obs["passed"].to_numpy()[rows].tolist()
    assert table.column("obs_names").to_pylist() == ADATA.obs_names[rows].tolist()
    return rows.tolist()


def test_counts_sizes_and_schema_are_exact_before_and_after_reading(cluster, dataset):
    ds = zr.read(dataset, fields=FIELDS, **SIZES)
    assert ds.count() == 503
    promised = ds.schema().base_schema
    blocks = [ray.get(block) for block in ds.iter_internal_ref_bundles() for block in block.block_refs]
    rows = [row for block in blocks for row in check_table(block)]
    assert sorted(rows) == list(range(503))
    assert all(block.schema.equals(promised) for block in blocks)


@ray.remote(num_cpus=0)
def blocks_of(tasks: list[Any]) -> list[list[Any]]:
    return [list(task()) for task in tasks]


@pytest.mark.any_version
def test_read_tasks_are_stretches_of_the_plan(cluster, dataset):
    """Their blocks have the bytes and the order that the plan says."""
    from zloader.ray.datasource import PlanDatasource, _loader_of

    source = PlanDatasource(_loader_of(dataset, FIELDS, SIZES), 3)
    tasks = source.get_read_tasks(5)
    assert len(tasks) == 5
    tables = ray.get(blocks_of.remote(tasks))
    for task, made in zip(tasks, tables, strict=True):
        assert task.metadata.num_rows == sum(len(table) for table in made)
        assert task.metadata.size_bytes == sum(table.nbytes for table in made)
        assert all(table.schema.equals(task.schema) for table in made)
    assert source.estimate_inmemory_data_size() == sum(table.nbytes for made in tables for table in made)
    loader = zl.Loader(dataset, x=None, **SIZES)
    loader.set_epoch(3)
    found = [row for made in tables for table in made for row in table.column("index").to_pylist()]
    assert found == [int(row) for minibatch in loader for row in minibatch.index]
    limited = source.get_read_tasks(5, per_task_row_limit=40)
    assert [sum(map(len, made)) for made in ray.get(blocks_of.remote(limited))] == [40] * 5


@pytest.mark.any_version
@pytest.mark.parametrize("panel", [True, False])
def test_dense_blocks_of_a_view_with_chosen_genes(cluster, dataset, panel):
    view = dataset.where("lane < 3")
    genes = ["gene 5", "gene 90"]
    rows, more = (view[:, genes], {}) if panel else (view, {"genes": genes})
    ds = zr.read(rows, fields=["X", "obsm/X_pca"], layout="dense", shuffle=False, batch_size=32, **more)
    assert ds.count() == view.n_obs
    logs = zr.read(rows, layout="dense", transforms=[zl.transforms.LogNormalize(1e4)], **more)
    assert logs.schema().base_schema.field("X").type.shape == [2]  # though all genes are read
    found = ds.take_all()
    rows = [each["index"] for each in found]
    assert sorted(rows) == view.row_numbers.tolist()
    for each in found[:20]:
        np.testing.assert_array_equal(each["X"], ADATA[each["index"], genes].X.toarray()[0])
        np.testing.assert_array_equal(each["obsm/X_pca"], ADATA.obsm["X_pca"][each["index"]])


@pytest.mark.any_version
def test_batches_for_torch(cluster, dataset):
    ds = zr.read(dataset, fields=["X", "obs/cell_type", "obsm/X_pca"], **SIZES)
    ds = ds.map_batches(lambda table: table.slice(1), batch_format="pyarrow", batch_size=None)  # without a row
    seen = []
    for batch in ds.iter_torch_batches(batch_size=50, collate_fn=zr.Collate({"X": 97})):
        rows = batch["index"].numpy()
        assert batch["X"].layout == torch.sparse_csr
        np.testing.assert_array_equal(batch["X"].to_dense().numpy(), ADATA.X[rows].toarray())
        np.testing.assert_array_equal(batch["obs/cell_type"], ADATA.obs["cell_type"].cat.codes.to_numpy()[rows])
        np.testing.assert_array_equal(batch["obsm/X_pca"].numpy(), ADATA.obsm["X_pca"][rows])
        seen += rows.tolist()
    assert len(seen) == len(set(seen))
    assert 503 - 16 <= len(seen) < 503
    dense = zr.read(dataset, fields=["X", "obs/lane"], layout="dense", **SIZES)
    for batch in dense.iter_torch_batches(batch_size=100):  # needs no collate_fn
        np.testing.assert_array_equal(batch["X"].numpy(), ADATA.X[batch["index"].numpy()].toarray())


@ray.remote(num_cpus=0)  # the reads need the cores
def rows_of(split: Any) -> list[int]:
    return [row for batch in split.iter_batches(batch_format="pyarrow") for row in batch.column("index").to_pylist()]


@pytest.mark.any_version
def test_splits_for_trainers_have_every_row_once(cluster, dataset):
    splits = zr.read(dataset, fields=["X"], **SIZES).streaming_split(2)
    found = ray.get([rows_of.remote(split) for split in splits])
    assert sorted(found[0] + found[1]) == list(range(503))


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fields": ["Y"]}, Exception, "Y"),
        ({"fields": ["obs/nothing"]}, MissingColumnError, "nothing"),
        ({"layout": "anndata"}, OptionError, "layout 'csr' or 'dense'"),
        ({"dtype": "bfloat16"}, OptionError, "no bfloat16"),
        ({"sampling": zl.CellSets("donor", set_size=4)}, OptionError, "no sets, controls or neighbours"),
        ({"obs": ["lane"]}, OptionError, "does not take obs="),
        ({"epoch": -1}, OptionError, "epoch"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_read(cluster, dataset, options, kind, message):
    with pytest.raises(kind, match=message):
        zr.read(dataset, **options)


@pytest.mark.filterwarnings("ignore:From 0.4 .update:FutureWarning", "ignore:Writing zarr v2")
@pytest.mark.any_version
def test_columns_say_which_rows_a_modality_has(cluster, tmp_path):
    from zloader.ray.datasource import PlanDatasource, _loader_of

    mudata = pytest.importorskip("mudata")
    rna, prot = counts(60, 20, seed=1), counts(30, 4, seed=2)
    rna.obs_names, prot.obs_names = [f"c{i}" for i in range(60)], [f"c{i}" for i in range(20, 80, 2)]
    prot.var_names = [f"p{i}" for i in range(4)]
    prot.obsm["X_pca"] = np.random.default_rng(0).random((30, 3), np.float32)
    for adata in (rna, prot):
        adata.obs = adata.obs[[]].copy()
    made = mudata.MuData({"rna": rna, "prot": prot})
    made.write_h5mu(tmp_path / "a.h5mu")
    dataset = zl.open_dataset(tmp_path / "a.h5mu")
    fields = ["rna:X", "obsm/prot:X_pca"]
    source = PlanDatasource(_loader_of(dataset, fields, {"batch_size": 16, "fetch_factor": 2}), 0)
    tasks = source.get_read_tasks(2)
    for task, tables in zip(tasks, ray.get(blocks_of.remote(tasks)), strict=True):
        assert task.metadata.size_bytes == sum(table.nbytes for table in tables)
        for table in tables:
            assert table.schema.equals(task.schema)
            names = made.obs_names[table.column("index").to_numpy()]
            for modality, adata in made.mod.items():
                assert table.column(f"present/{modality}").to_pylist() == names.isin(adata.obs_names).tolist()
            collated = zr.Collate({"rna:X": 20})(table)
            has = collated["present/prot"].numpy()
            wanted = prot.obsm["X_pca"][prot.obs_names.get_indexer(names[has])]
            np.testing.assert_array_equal(collated["obsm/prot:X_pca"].numpy()[has], wanted)
            assert not collated["obsm/prot:X_pca"].numpy()[~has].any()
