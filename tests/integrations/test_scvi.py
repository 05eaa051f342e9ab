"""scvi-tools trains and predicts from a dataset as from the AnnData or MuData that the dataset was made of."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError

scvi = pytest.importorskip(
    "scvi", reason='scvi-tools is not installed: pip install "zloader[scvi]"', exc_type=ImportError
)
md = pytest.importorskip("mudata")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from scvi.dataloaders import AnnDataLoader  # noqa: E402
from scvi.model import MULTIVI, SCANVI, SCVI, TOTALVI  # noqa: E402

from zloader.integrations.scvi import StoredRows, _loader, _moved, as_anndata, attach  # noqa: E402

# scvi-tools, mudata, Lightning and their dependencies warn about workers, small categories and deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

N_ROWS = 120
PAGE = Path(__file__).parents[2] / "docs" / "scvi.md"
QUIET = {"accelerator": "cpu", "enable_progress_bar": False}
SMALL = {"n_hidden": 8, "n_latent": 3}
COVARIATES = {"categorical_covariate_keys": ["lane", "donor"], "continuous_covariate_keys": ["n_counts", "row"]}
SETUPS = {
    "plain": {},
    "batch and labels": {"batch_key": "donor", "labels_key": "kind"},
    "covariates": {"batch_key": "passed", **COVARIATES},
    "a layer": {"layer": "raw", "batch_key": "lane", "size_factor_key": "n_counts"},
}


def cells(n_rows=N_ROWS, seed=0):
    adata = counts(n_rows, 30, seed=seed)
    adata.obs["type"] = pd.Categorical(
        np.resize(["T", "Unknown", "B", "NK"], n_rows), ["never", "T", "Unknown", "B", "NK"]
    )
    adata.obs["kind"] = np.resize(["T", "B", "NK"], n_rows)
    adata.obs["row"] = np.arange(n_rows, dtype=float)
    adata.obs["gap"] = np.resize([1.0, np.nan], n_rows)
    adata.layers["raw"] = adata.X * 2
    adata.layers["logged"] = adata.X.log1p()
    adata.obsm["proteins"] = np.random.default_rng(1).poisson(4, (n_rows, 6)).astype("float32")
    return adata


@pytest.fixture
def adata():
    """The cells in memory. Each test has its own, because `setup_anndata` adds to it."""
    return cells()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("scvi")
    write_store(cells(), tmp / "a.zarr", tmp)
    return zl.open_dataset(tmp / "a.zarr")


@pytest.fixture(scope="module")
def pancreas(tmp_path_factory):
    """The bundled cells with 200 genes, of which every third cell has no label; in a store, and in memory."""
    tmp = tmp_path_factory.mktemp("pancreas")
    adata = ad.read_h5ad(zl.example_h5ad(tmp / "p.h5ad"))
    adata.X = adata.X.tocsr().astype("float32")
    adata = adata[:, np.sort(np.asarray(adata.X.mean(0)).ravel().argsort()[-200:])].copy()
    adata.obs["known"] = adata.obs["cell_type1"].astype(str)
    adata.obs.loc[adata.obs_names[::3], "known"] = "Unknown"
    zl.convert(adata, tmp / "p.zarr", progress=False)
    return zl.open_dataset(tmp / "p.zarr"), adata


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of small models slow each other down where several tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_draws(monkeypatch, tmp_path):
    """scvi-tools draws values to see whether they are counts, of others and fewer if a matrix is in a store."""
    monkeypatch.chdir(tmp_path)  # where Lightning logs
    monkeypatch.setattr(scvi.settings, "logging_dir", tmp_path)
    for module in ("scvi.data.fields._layer_field", "scvi.model._totalvi"):
        monkeypatch.setattr(f"{module}._check_nonnegative_integers", lambda _: True)


def made(model_class, adata, setup, **options):
    """A model of an AnnData or MuData in memory, or attached to one in a store."""
    {ad.AnnData: model_class.setup_anndata, md.MuData: getattr(model_class, "setup_mudata", None)}[type(adata)](
        adata, **setup
    )
    model = model_class(adata, **SMALL | options)
    return attach(model) if isinstance(x_of(adata), StoredRows) else model


def x_of(adata):
    return (adata.mod["rna"] if isinstance(adata, md.MuData) else adata).X


def in_memory(model, adata, setup, **options):
    """A model of an AnnData in memory with the weights of another."""
    same = made(type(model), adata, setup, **options)
    same.module.load_state_dict(model.module.state_dict())
    same.module.eval()
    same.is_trained_ = True
    return same


def assert_equal(found, expected, where=""):
    """Registries are equal, except for the identity of the AnnData."""
    if isinstance(expected, dict):
        assert found.keys() - {"_scvi_uuid"} == expected.keys() - {"_scvi_uuid"}, where
        for key in expected.keys() - {"_scvi_uuid"}:
            assert_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, np.ndarray):
        assert type(found) is type(expected), where
        assert found.dtype == expected.dtype, where
        assert found.tolist() == expected.tolist(), where
    else:
        assert found == expected, where


def assert_same_tensors(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for own, theirs in zip(found, expected, strict=True):
        assert own.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert (own[key].dtype, own[key].layout) == (tensor.dtype, torch.strided), key
            assert torch.equal(own[key], tensor), key


def same(method, *models, **options):
    """The results of a method of several models are equal, also where it draws numbers."""
    results = []
    for model in models:
        scvi.settings.seed = 0
        results.append(getattr(model, method)(**options))
    scvi.settings.seed = None
    for result in results[1:]:
        pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (results[0], result)), strict=True)
        for own, theirs in pairs:
            if isinstance(theirs, pd.DataFrame):
                pd.testing.assert_frame_equal(own, theirs, check_names=False)
            else:
                np.testing.assert_array_equal(own, theirs)
    return results[0]


def recorded(model):
    """The rows of the minibatches that a model is given from now on, and of the labelled ones of pairs."""
    seen = []

    def record(_, given, options):
        pair = [given[0], *(options.get("loss_kwargs", {}).get(key) for key in ("labelled_tensors",))]
        seen.append([each["extra_continuous_covs"][:, -1].tolist() for each in pair if each is not None])

    model.module.register_forward_pre_hook(record, with_kwargs=True)
    return seen


# ---- the AnnData


def test_it_has_all_rows_and_reads_those_of_the_store(dataset, adata):
    found = as_anndata(dataset, ["donor", "type"], obsm=["proteins"])
    assert found.shape == adata.shape
    assert found.obs_names.equals(adata.obs_names)
    assert found.var_names.equals(adata.var_names)
    assert found.obs.columns.tolist() == ["donor", "type"]
    assert found.obs["type"].cat.categories.tolist() == ["T", "Unknown", "B", "NK"]  # without those of no row
    np.testing.assert_array_equal(found.obsm["proteins"], adata.obsm["proteins"])
    mask = np.arange(N_ROWS) % 7 == 3
    for rows in (slice(3, 9), [5, 2, 2], mask, np.array([-1]), 4, slice(None)):
        for own, theirs in ((found.X, adata.X), (found.layers["raw"], adata.layers["raw"])):
            assert (own[rows] != theirs[rows]).nnz == 0
    np.testing.assert_array_equal(
        found[mask, ["gene 7", "gene 3"]].X.toarray(), adata[mask, ["gene 7", "gene 3"]].X.toarray()
    )
    np.testing.assert_array_equal(found.X.sum(axis=1), adata.X.sum(axis=1))
    np.testing.assert_array_equal(found.X.toarray(), adata.X.toarray())
    assert found.copy().X is found.X
    assert repr(found.X) == f"X of {dataset.url}, {N_ROWS} x 30, in the store"
    view = as_anndata(dataset.where("donor == 'd1'")[:, ["gene 4", "gene 2"]])
    np.testing.assert_array_equal(
        view.X[1:3].toarray(), adata[adata.obs["donor"] == "d1", ["gene 4", "gene 2"]].X[1:3].toarray()
    )


def test_what_needs_all_values_is_refused(dataset, tmp_path):
    x = as_anndata(dataset).X
    for use in (lambda: x.tocsc(), lambda: x * 2, lambda: x != 0, lambda: x.sum(), lambda: x.T, lambda: abs(x)):
        with pytest.raises(AttributeError, match="X stays in the store, and has no"):
            use()
    with pytest.raises(Exception, match=r"No method registered for writing .*StoredRows"):
        as_anndata(dataset).write_h5ad(tmp_path / "a.h5ad")


def test_values_that_are_no_counts_warn(dataset, monkeypatch):
    monkeypatch.undo()
    SCVI.setup_anndata(as_anndata(dataset))
    with pytest.warns(UserWarning, match="does not contain unnormalized count data"):
        SCVI.setup_anndata(as_anndata(dataset), layer="logged")


# ---- SCVI


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_registry_and_minibatches_are_those_of_an_anndata(dataset, adata, setup):
    stored = as_anndata(dataset)
    model, expected = made(SCVI, stored, setup), made(SCVI, adata[:].copy(), setup)
    assert_equal(model.registry, expected.registry)
    assert_equal(dict(model.summary_stats), dict(expected.summary_stats))
    for indices in (None, np.arange(3, 90, 4), [7, 5, 5, 90], np.arange(N_ROWS) % 3 == 0):
        options = {"indices": indices, "batch_size": 32}
        assert_same_tensors(
            model._make_data_loader(stored, **options), AnnDataLoader(expected.adata_manager, **options)
        )


def test_rows_become_dense_where_they_are_copied_to(dataset):
    manager = made(SCVI, as_anndata(dataset), SETUPS["covariates"]).adata_manager
    rows = np.arange(0, N_ROWS, 2)
    options = {"batch_size": 16, "shuffle": False}
    dense, packed = (list(_loader(manager, rows, device=torch.device(name), **options)) for name in ("cpu", "hpu"))
    assert isinstance(packed[0]["X"], zl.PackedRows)
    assert_same_tensors([_moved(each, torch.device("cpu")) for each in packed], dense)


@pytest.mark.parametrize("setup", [SETUPS["batch and labels"], SETUPS["covariates"]], ids=["labels", "covariates"])
def test_it_trains_from_a_bucket_and_predicts_as_in_memory(adata, sim, tmp_path, setup):
    (tmp_path / "atlas").mkdir()
    write_store(adata, tmp_path / "atlas" / "a.zarr", tmp_path)
    options = {"key": "any", "secret": "any", "endpoint_url": sim(root=tmp_path).url}
    dataset = zl.open_dataset("s3://atlas/a.zarr", storage_options=options)
    model = made(SCVI, as_anndata(dataset), setup)
    model.train(2, batch_size=32, check_val_every_n_epoch=1, **QUIET)
    losses = model.history["elbo_validation"].to_numpy(float)
    assert losses.shape == (2, 1)
    assert np.isfinite(losses).all()
    expected = in_memory(model, adata.copy(), setup)
    latent = same("get_latent_representation", model, expected)
    for indices in (np.arange(5, 77, 3), [9, 3, 3], np.arange(N_ROWS) % 5 == 1):
        same("get_latent_representation", model, expected, indices=indices)
    same("get_elbo", model, expected)
    same("get_normalized_expression", model, expected, n_samples=2, return_mean=True)
    groups = {"groupby": "kind", "group1": "T", "group2": "B", "silent": True}
    table = same("differential_expression", model, expected, **groups)
    assert table["raw_mean1"].max() > 0
    model.save(tmp_path / "model")
    loaded = attach(SCVI.load(tmp_path / "model", as_anndata(dataset), accelerator="cpu"))
    np.testing.assert_array_equal(loaded.get_latent_representation(), latent)
    of_memory = SCVI.load(tmp_path / "model", adata.copy(), accelerator="cpu")
    np.testing.assert_array_equal(of_memory.get_latent_representation(), latent)
    others = as_anndata(dataset.where("lane != 2"))  # with the codes of the training
    at = np.flatnonzero(adata.obs["lane"] != 2)
    np.testing.assert_allclose(model.get_latent_representation(others), latent[at], atol=1e-6)


def test_rows_are_split_as_in_memory_and_come_once_per_epoch(dataset, adata):
    setup = {"continuous_covariate_keys": ["row"]}
    scvi.settings.seed = 3
    try:
        model, expected = made(SCVI, as_anndata(dataset), setup), made(SCVI, adata, setup)
        seen = recorded(model)
        for each in (model, expected):
            each.train(2, batch_size=16, train_size=0.7, validation_size=0.2, **QUIET)
    finally:
        scvi.settings.seed = None
    for part in ("train_indices", "validation_indices", "test_indices"):
        np.testing.assert_array_equal(getattr(model, part), getattr(expected, part))
    per_epoch = [np.concatenate([rows for (rows,) in seen[first : first + 6]]) for first in (0, 6)]
    assert len(seen) == 12
    for rows in per_epoch:
        assert sorted(rows) == sorted(model.train_indices)
    assert per_epoch[0].tolist() != per_epoch[1].tolist()
    model.train(1, batch_size=16, train_size=0.7, validation_size=0.2, **QUIET)
    again = np.concatenate([rows for (rows,) in seen[12:]])
    assert again.tolist() not in [rows.tolist() for rows in per_epoch]


def test_given_rows_for_validation_and_early_stopping(dataset, adata):
    setup = {"batch_key": "donor", "continuous_covariate_keys": ["row"]}
    stored = as_anndata(dataset)
    SCVI.setup_anndata(stored, **setup)
    for validation in ("donor == 'd1'", dataset.where("donor == 'd1'")):
        model = attach(SCVI(stored, **SMALL), validation=validation)
        model.train(
            30, batch_size=32, early_stopping=True, early_stopping_patience=1, early_stopping_min_delta=1e9, **QUIET
        )
        assert len(model.history["elbo_train"]) < 5
        assert set(adata.obs["donor"].iloc[model.validation_indices]) == {"d1"}
        assert set(adata.obs["donor"].iloc[model.train_indices]) == {"d2", "d10"}
    with pytest.raises(OptionError, match="gives the rows for validation: leave train_size out"):
        model.train(1, train_size=0.5, **QUIET)


def test_no_minibatch_has_a_single_row(dataset):
    setup = {"continuous_covariate_keys": ["row"]}
    model = made(SCVI, as_anndata(dataset[:33]), setup)
    seen = recorded(model)
    model.train(2, batch_size=16, train_size=1.0, **QUIET)
    assert [len(rows) for (rows,) in seen] == [16] * 4
    with pytest.raises(OptionError, match="batch normalisation trains on 2 rows or more, and there are 1"):
        made(SCVI, as_anndata(dataset[:1]), {}).train(1, train_size=1.0, **QUIET)


@pytest.mark.parametrize("model_class", [SCVI, SCANVI])
@pytest.mark.parametrize("at", ["end of an epoch", "inside an epoch"])
def test_a_checkpoint_resumes_with_the_same_minibatches(dataset, tmp_path, model_class, at):
    setup = {"continuous_covariate_keys": ["row"]}
    setup |= {} if model_class is SCVI else {"labels_key": "type", "unlabeled_category": "Unknown"}

    def train(epochs, **options):
        model = made(model_class, as_anndata(dataset), setup)
        seen = recorded(model)
        model.train(
            epochs, train_size=1.0, batch_size=32, enable_checkpointing="callbacks" in options, **QUIET | options
        )
        return seen

    whole = train(3)
    assert len(whole) == 12
    assert len({str(item) for item in whole}) == 12
    assert {len(item) for item in whole} == {1 + (model_class is SCANVI)}
    every = {"every_n_epochs": 1} if at == "end of an epoch" else {"every_n_train_steps": 2}
    saving = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=at == "end of an epoch" or None, **every
    )
    train(2, callbacks=[saving])
    step = 4 if at == "end of an epoch" else 6
    assert train(3, ckpt_path=tmp_path / f"step={step}.ckpt") == whole[step:]


RANKS = """
import sys, json, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, zloader as zl
from scvi.model import {model}
from zloader.integrations.scvi import as_anndata, attach

if __name__ == "__main__":
    adata = as_anndata(zl.open_dataset(sys.argv[1]))
    {model}.setup_anndata(adata, {setup} continuous_covariate_keys=["row"])
    model = attach({model}(adata, n_hidden=8, n_latent=3))
    seen = []
    record = lambda _, given: seen.append(given[0]["extra_continuous_covs"][:, -1].tolist())
    model.module.register_forward_pre_hook(record)
    model.train(2, batch_size=8, train_size=0.75, accelerator="cpu", devices=2, enable_progress_bar=False,
                strategy="ddp_find_unused_parameters_true", check_val_every_n_epoch=1, num_sanity_val_steps=0)
    rank = model.trainer.global_rank
    weight = next(iter(model.module.parameters())).double().sum().item()
    result = {{"seen": seen, "train": model.train_indices.tolist(), "weight": weight}}
    open(f"{{sys.argv[2]}}/{{rank}}.json", "w").write(json.dumps(result))
"""


@pytest.mark.slow  # starts two processes
@pytest.mark.parametrize("model", ["SCVI", "SCANVI"])
def test_several_devices_share_the_rows(dataset, tmp_path, model):
    setup = "labels_key='type', unlabeled_category='Unknown'," if model == "SCANVI" else ""
    (tmp_path / "run.py").write_text(RANKS.format(model=model, setup=setup))
    command = [sys.executable, tmp_path / "run.py", dataset.url.removeprefix("file://"), tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=600, capture_output=True)
    ranks = [pd.read_json(tmp_path / f"{rank}.json", typ="series") for rank in range(2)]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    training = set(ranks[0]["train"])
    seen = [[rows for rows in each["seen"] if set(rows) <= training] for each in ranks]
    assert len(seen[0]) == len(seen[1])
    times = np.bincount(np.concatenate([np.array(rows, int) for rows in itertools.chain(*seen)]), minlength=N_ROWS)
    assert (times[list(training)] == 2).all()  # once per epoch


# ---- SCANVI


def test_scanvi_trains_with_pairs_of_any_and_of_labelled_rows(dataset, adata):
    setup = {"labels_key": "type", "unlabeled_category": "Unknown", "continuous_covariate_keys": ["row"]}
    model = made(SCANVI, as_anndata(dataset), setup)
    seen = recorded(model)
    model.train(2, batch_size=16, train_size=1.0, **QUIET)
    known = adata.obs["type"].to_numpy() != "Unknown"
    labelled = np.concatenate([pair[1] for pair in seen]).astype(int)
    assert len(seen) == 16
    assert known[labelled].all()
    per_epoch = np.array_split(labelled, 2)
    for rows in per_epoch:
        assert set(rows) == set(np.flatnonzero(known))  # 90 rows in 6 minibatches, and 2 more
    del seen[:]
    model.train(1, batch_size=16, train_size=1.0, n_samples_per_label=4, **QUIET)
    assert {len(pair[1]) for pair in seen} == {12}
    drawn = adata.obs["type"].iloc[np.array(seen[0][1], int)].value_counts()
    assert drawn[["T", "B", "NK"]].tolist() == [4, 4, 4]


def test_scanvi_without_unlabelled_or_labelled_rows(dataset, adata):
    setup = {"labels_key": "kind", "unlabeled_category": "Unknown", "batch_key": "donor"}
    model = made(SCANVI, as_anndata(dataset), setup)
    assert_equal(model.registry, made(SCANVI, adata.copy(), setup).registry)
    model.train(1, **QUIET)
    same("predict", model, in_memory(model, adata.copy(), setup))
    stored = as_anndata(dataset)
    SCANVI.setup_anndata(stored, "type", "Unknown")
    model = attach(SCANVI(stored, **SMALL), validation="type != 'Unknown'")
    with pytest.raises(OptionError, match="none of the 30 rows for training has a label, but SCANVI learns"):
        model.train(1, **QUIET)
    model = attach(SCANVI(stored, **SMALL), validation="type == 'Unknown'")
    model.train(1, check_val_every_n_epoch=1, **QUIET)


@pytest.mark.slow  # trains models
def test_scanvi_is_as_accurate_as_in_memory(pancreas, tmp_path):
    dataset, adata = pancreas
    setup = {"labels_key": "known", "unlabeled_category": "Unknown", "batch_key": "donor"}
    truth, hidden = adata.obs["cell_type1"].to_numpy(), (adata.obs["known"] == "Unknown").to_numpy()

    def accuracy(model):
        return np.mean(model.predict()[hidden] == truth[hidden])

    options = {"n_hidden": 32, "n_latent": 10}
    scores = {}
    for name, cells in (("stored", as_anndata(dataset)), ("in memory", adata.copy())):
        scvi.settings.seed = 0
        model = made(SCANVI, cells, setup, **options)
        model.train(8, check_val_every_n_epoch=1, **QUIET)
        scores[name] = accuracy(model)
        assert len(model.history["validation_accuracy"]) == 8
        if name == "stored":
            trained = model
    scvi.settings.seed = None
    assert scores["stored"] > scores["in memory"] - 0.04
    assert scores["stored"] > 0.75  # 0.29 are right if all are called beta cells
    expected = in_memory(trained, adata.copy(), setup, **options)
    same("predict", trained, expected)
    same("predict", trained, expected, soft=True, indices=np.arange(3, 2000, 7))
    same("get_latent_representation", trained, expected)
    trained.save(tmp_path / "model")
    loaded = attach(SCANVI.load(tmp_path / "model", as_anndata(dataset), accelerator="cpu"))
    np.testing.assert_array_equal(loaded.predict(), trained.predict())


@pytest.mark.slow  # trains models
def test_scanvi_from_a_trained_scvi(pancreas):
    dataset, adata = pancreas
    model = made(SCVI, as_anndata(dataset), {"labels_key": "known", "batch_key": "donor"}, n_hidden=32, n_latent=10)
    model.train(3, **QUIET)
    scanvi = attach(SCANVI.from_scvi_model(model, "Unknown"))
    scanvi.train(6, **QUIET)
    hidden = (adata.obs["known"] == "Unknown").to_numpy()
    assert np.mean(scanvi.predict()[hidden] == adata.obs["cell_type1"].to_numpy()[hidden]) > 0.7


# ---- other cells


@pytest.mark.parametrize("model_class", [SCVI, SCANVI])
def test_a_query_with_a_new_batch(dataset, adata, tmp_path, model_class):
    setup = {"batch_key": "donor"} | (
        {} if model_class is SCVI else {"labels_key": "type", "unlabeled_category": "Unknown"}
    )
    reference = made(model_class, as_anndata(dataset.where("donor != 'd1'")), setup)
    reference.train(1, **QUIET)
    reference.save(tmp_path / "reference")
    query = as_anndata(dataset.where("donor == 'd1'"))
    in_mem = adata[adata.obs["donor"] == "d1"].copy()
    for use in (
        lambda: model_class.load(tmp_path / "reference", query),
        lambda: reference.get_latent_representation(query),
    ):
        with pytest.raises(ValueError, match="Category d1 not found in source registry"):
            use()
    models = []
    for cells in (query, in_mem):
        scvi.settings.seed = 0
        models.append(model_class.load_query_data(cells, str(tmp_path / "reference"), accelerator="cpu"))
    scvi.settings.seed = None
    model, expected = attach(models[0]), models[1]
    assert model.summary_stats["n_batch"] == 3
    assert {int(code) for batch in model._make_data_loader(query) for code in batch["batch"]} == {2}
    model.train(1, plan_kwargs={"weight_decay": 0.0}, **QUIET)
    expected.module.load_state_dict(model.module.state_dict())
    expected.module.eval()
    expected.is_trained_ = True
    same("get_latent_representation", model, expected)


def test_a_model_is_minified(dataset):
    model = made(SCVI, as_anndata(dataset), {"batch_key": "donor"})
    model.train(1, **QUIET)
    latent = model.get_latent_representation()
    of_rows = model.get_latent_representation(return_dist=True)
    model.adata.obsm["mean"], model.adata.obsm["variance"] = of_rows
    model.minify_adata(use_latent_qzm_key="mean", use_latent_qzv_key="variance")
    np.testing.assert_array_equal(model.get_latent_representation(), latent)


def test_genes_must_be_those_of_the_model(dataset, tmp_path):
    genes = ["gene 7", "gene 3", "gene 29"]
    model = made(SCVI, as_anndata(dataset[:, genes]), {})
    model.train(1, **QUIET)
    model.save(tmp_path / "model")
    latent = model.get_latent_representation()
    loaded = attach(SCVI.load(tmp_path / "model", as_anndata(dataset[:, genes]), accelerator="cpu"))
    np.testing.assert_array_equal(loaded.get_latent_representation(), latent)
    with pytest.raises(ValueError, match="Number of vars"):
        model.get_latent_representation(as_anndata(dataset[:, genes[:2]]))


# ---- errors


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"layout": "csr"}, OptionError, "attach has no option 'layout'"),
        ({"validation": "doner == 'd1'"}, MissingColumnError, "Did you mean 'donor'"),
        ({"seed": -1}, OptionError, "seed"),
        ({"fetch_factor": 0}, OptionError, "fetch_factor"),
    ],
)
def test_options_that_cannot_be_used(dataset, options, error, match):
    stored = as_anndata(dataset)
    SCVI.setup_anndata(stored)
    with pytest.raises(error, match=match):
        attach(SCVI(stored, **SMALL), **options)


def test_what_cannot_be_trained_is_refused(dataset, adata):
    with pytest.raises(ValueError, match="cell_type"):  # without a value in some rows
        SCVI.setup_anndata(as_anndata(dataset), batch_key="cell_type")
    with pytest.raises(MissingColumnError, match="Did you mean 'donor'"):
        as_anndata(dataset, ["doner"])
    with pytest.raises(OptionError, match="must be a list of names"):
        as_anndata(dataset, "donor")
    for wrong in (made(SCVI, adata, {}), dataset):
        with pytest.raises(OptionError, match="attach takes a model of scvi-tools whose AnnData as_anndata made"):
            attach(wrong)


def test_a_dataset_in_place_of_an_anndata(dataset):
    model = made(SCVI, as_anndata(dataset), {})
    for take in (SCVI.setup_anndata, SCVI, lambda view: SCVI.load_query_data(view, model)):
        with pytest.raises(AttributeError, match="of zloader is no AnnData, and has no uns: for scvi-tools, make"):
            take(dataset[:50])


# ---- modalities

BY_MODALITY = {"rna_layer": "rna", "protein_layer": "prot"}
NO_PRIOR = {"empirical_protein_background_prior": False}
OF_MUDATA = {
    "plain": {"modalities": BY_MODALITY},
    "a batch of the whole": {"batch_key": "donor", "modalities": BY_MODALITY},
    "columns of a modality and a layer": {
        "rna_layer": "counts",
        "batch_key": "lane",
        "size_factor_key": "size",
        "categorical_covariate_keys": ["kind", "lane"],
        "continuous_covariate_keys": ["level"],
        "modalities": BY_MODALITY | {"batch_key": "rna", "size_factor_key": "rna", "categorical_covariate_keys": "rna"},
    },
    "panels": {"batch_key": "donor", "panel_key": "panel", "modalities": BY_MODALITY},
}


def modality(names, n_columns, prefix, seed, *, sparse):
    rng = np.random.default_rng(seed)
    x = rng.poisson(rng.gamma(1, 3, n_columns), (len(names), n_columns)).astype("float32")
    return ad.AnnData(
        sp.csr_matrix(x) if sparse else x,
        obs=pd.DataFrame(index=names),
        var=pd.DataFrame(index=[f"{prefix}{i}" for i in range(n_columns)]),
    )


def cite(n_rows=400):
    """Proteins 0 and 1 are missing in the donors d1 and d2, but for a single row that has protein 1 in d2."""
    names = [f"cell{i}" for i in range(n_rows)]
    donor = np.resize(["d0", "d1", "d2"], n_rows)
    rna, prot = modality(names, 40, "g", 0, sparse=True), modality(names, 13, "p", 1, sparse=False)
    prot.X[donor == "d1", 0] = prot.X[donor == "d2", 1] = 0
    prot.X[n_rows - 2 - (n_rows - 2) % 3 + 2 - 3, 1] = 7
    rna.layers["counts"] = rna.X * 2
    rna.obs["lane"] = np.resize([3, 1, 2, 1], n_rows)
    rna.obs["kind"] = pd.Categorical(np.resize(["T", "B"], n_rows), ["T", "B"])
    rna.obs["size"] = np.linspace(0.5, 1.5, n_rows)
    mdata = md.MuData({"rna": rna, "prot": prot})
    mdata.obs["donor"] = pd.Categorical(donor)
    mdata.obs["panel"] = np.where(donor == "d1", "one", "two")
    mdata.obs["level"] = np.linspace(-1, 1, n_rows)
    return mdata


@pytest.fixture(scope="module")
def of_cite(tmp_path_factory):
    path = tmp_path_factory.mktemp("cite") / "cite.h5mu"
    cite().write_h5mu(path)
    return zl.open_dataset(path)


@pytest.mark.parametrize("setup", OF_MUDATA.values(), ids=OF_MUDATA)
def test_registry_and_minibatches_are_those_of_a_mudata(of_cite, setup):
    stored, mdata = as_anndata(of_cite), cite()
    model, expected = (made(TOTALVI, each, setup, **NO_PRIOR) for each in (stored, mdata))
    assert_equal(model.registry, expected.registry)
    assert_equal(dict(model.summary_stats), dict(expected.summary_stats))
    assert_same_tensors(
        model._make_data_loader(stored, batch_size=64), expected._make_data_loader(mdata, batch_size=64)
    )


def test_totalvi_trains_and_predicts_as_in_memory(of_cite, tmp_path):
    setup = {"batch_key": "donor", "modalities": BY_MODALITY}
    priors = {"empirical_protein_background_prior": True, "use_observed_lib_size": False}
    models = []
    for cells in (as_anndata(of_cite), cite()):
        np.random.seed(0)  # noqa: NPY002 - scvi-tools draws the rows of the prior with it
        torch.manual_seed(0)
        models.append(made(TOTALVI, cells, setup, **priors))
    model, expected = models
    for name, tensor in expected.module.state_dict().items():
        if name.startswith("library_log"):  # the prior of the proteins also has random numbers of its own
            assert torch.equal(model.module.state_dict()[name], tensor), name
    model.train(max_epochs=2, batch_size=64, **QUIET)
    assert np.isfinite(model.history["elbo_validation"].to_numpy(float)).all()
    expected.module.load_state_dict(model.module.state_dict())
    expected.module.eval()
    expected.is_trained_ = True
    latent = same("get_latent_representation", model, expected)
    same("get_latent_representation", model, expected, indices=np.arange(100, 390, 3), batch_size=37)
    same("get_normalized_expression", model, expected)
    same("differential_expression", model, expected, groupby="donor", group1="d0", group2="d1", silent=True)
    model.save(tmp_path / "totalvi")
    loaded = attach(TOTALVI.load(tmp_path / "totalvi", as_anndata(of_cite), accelerator="cpu"))
    np.testing.assert_array_equal(loaded.get_latent_representation(), latent)
    of_d2 = as_anndata(of_cite.where("donor == 'd2'"))
    np.testing.assert_allclose(model.get_latent_representation(of_d2), latent[2::3], rtol=1e-5, atol=1e-5)


def test_totalvi_takes_chosen_genes_and_a_query_with_a_new_batch(of_cite, tmp_path):
    setup = {"batch_key": "donor", "modalities": BY_MODALITY}
    panel = of_cite[:, {"rna:X": ["g7", "g3", "g30"]}]
    reference = made(TOTALVI, as_anndata(panel.where("donor != 'd0'")), setup, **NO_PRIOR)
    reference.train(max_epochs=1, **QUIET)
    reference.save(tmp_path / "reference")
    cells = as_anndata(panel.where("donor == 'd0'"))
    query = attach(TOTALVI.load_query_data(cells, str(tmp_path / "reference"), accelerator="cpu"))
    assert {int(code) for batch in query._make_data_loader(cells) for code in batch["batch"]} == {2}
    query.train(max_epochs=1, plan_kwargs={"weight_decay": 0.0}, **QUIET)
    assert query.get_latent_representation().shape == (cells.n_obs, 3)


def test_totalvi_refuses_rows_without_a_modality(tmp_path):
    mdata = cite(60)
    unpaired = md.MuData({"rna": mdata["rna"], "prot": mdata["prot"][10:].copy()})
    unpaired.write_h5mu(tmp_path / "u.h5mu")
    dataset = zl.open_dataset(tmp_path / "u.h5mu")
    setup = {"modalities": BY_MODALITY}
    message = r"but {} of {} rows have no prot, such as row 0: .*where\(dataset.present\('rna'\) & "
    for rows, numbers in ((dataset, (10, 60)), (dataset[5:], (5, 55))):
        with pytest.raises(OptionError, match=message.format(*numbers)):
            made(TOTALVI, as_anndata(rows), setup, **NO_PRIOR)
    both = dataset.where(dataset.present("rna") & dataset.present("prot"))
    assert made(TOTALVI, as_anndata(both), setup, **NO_PRIOR).summary_stats["n_cells"] == 50


def test_matrices_of_other_kinds(tmp_path):
    """RNA that is dense, proteins that are sparse whole numbers."""
    mdata = cite(60)
    mdata["rna"].X, mdata["prot"].X = mdata["rna"].X.toarray(), sp.csr_matrix(mdata["prot"].X.astype("int64"))
    mdata.write_h5mu(tmp_path / "m.h5mu")
    setup = {"batch_key": "donor", "modalities": BY_MODALITY}
    stored = as_anndata(zl.open_dataset(tmp_path / "m.h5mu"))
    model, expected = (made(TOTALVI, each, setup, **NO_PRIOR) for each in (stored, mdata))
    model.train(max_epochs=1, **QUIET)
    assert_same_tensors(model._make_data_loader(stored, batch_size=7), expected._make_data_loader(mdata, batch_size=7))
    np.testing.assert_array_equal(stored["rna"].X[[3, 1]], mdata["rna"].X[[3, 1]])
    same("get_latent_representation", model, in_memory(model, mdata, setup, **NO_PRIOR), indices=[5, 3, 9])


def multiome(n_rows=400):
    """Cells of a paired lane, and of lanes that measured one modality."""
    names = [f"cell{i}" for i in range(n_rows)]
    kind = np.resize(["both", "only rna", "only atac"], n_rows)
    rna = modality(names, 40, "g", 0, sparse=True)[kind != "only atac"].copy()
    atac = modality(names, 50, "peak", 1, sparse=True)[kind != "only rna"].copy()
    mdata = md.MuData({"rna": rna, "atac": atac})
    mdata.obs["kind"] = pd.Categorical(mdata.obs_names.map(dict(zip(names, kind, strict=True))))
    mdata.obs["lane"] = np.resize(["x", "y"], n_rows)
    mdata.obs["size_rna"], mdata.obs["size_atac"] = np.linspace(50, 150, n_rows), np.linspace(0.2, 0.8, n_rows)
    return mdata


def padded(mdata):
    """The same rows with zeros where a modality lacks them, as users of MULTIVI make it."""
    parts = {}
    for name, part in mdata.mod.items():
        x = np.zeros((mdata.n_obs, part.n_vars), "float32")
        x[mdata.obs_names.get_indexer(part.obs_names)] = part.X.toarray()
        parts[name] = ad.AnnData(sp.csr_matrix(x), pd.DataFrame(index=mdata.obs_names), part.var)
    made_of = md.MuData(parts)
    made_of.obs = mdata.obs.copy()
    return made_of


@pytest.mark.parametrize("modality_weights", ["equal", "cell"])
def test_multivi_trains_from_rows_that_lack_a_modality(tmp_path, modality_weights):
    multiome().write_zarr(tmp_path / "m.zarr")
    stored, mdata = as_anndata(zl.open_dataset(tmp_path / "m.zarr")), padded(multiome())
    setup = {"batch_key": "kind", "categorical_covariate_keys": ["lane"], "size_factor_key": ["size_rna", "size_atac"]}
    setup["modalities"] = {"rna_layer": "rna", "atac_layer": "atac"}
    options = {"modality_weights": modality_weights}
    model = made(MULTIVI, stored, setup, **options)
    expected = made(MULTIVI, mdata, setup, **options)
    assert_equal(model.registry, expected.registry)
    assert_same_tensors(
        model._make_data_loader(stored, batch_size=64), expected._make_data_loader(mdata, batch_size=64)
    )
    model.train(max_epochs=2, **QUIET)
    expected.module.load_state_dict(model.module.state_dict())
    expected.module.eval()
    expected.is_trained_ = True
    for of in ("joint", "expression", "accessibility"):
        latent = same("get_latent_representation", model, expected, modality=of)
    if modality_weights == "equal":
        groups = {"groupby": "kind", "group1": "both", "group2": "only atac", "silent": True}
        same("differential_accessibility", model, expected, **groups)
        model.save(tmp_path / "multivi")
        loaded = attach(MULTIVI.load(tmp_path / "multivi", stored, accelerator="cpu"))
        np.testing.assert_array_equal(loaded.get_latent_representation(modality=of), latent)


@pytest.mark.slow  # trains models
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata = cells(150)
    adata.obs["donor"] = [f"donor {row % 10}" for row in range(150)]
    adata.obs["plate"] = [f"plate {row // 30}" for row in range(150)]
    adata.obs["cell_type"] = pd.Categorical(np.resize(["T", "B", "NK", None, "T"], 150))
    zl.convert(adata, "pbmc.zarr", progress=False)
    mdata = cite(200)
    mdata.obs["donor"] = [f"donor {row % 4}" for row in range(200)]
    mdata.write_h5mu("cite.h5mu")
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {"__name__": "__main__"}
    for number, block in enumerate(code, 1):
        exec(compile(block, f"scvi.md, block {number}", "exec"), names)
    assert names["latent"].shape == (150, 10)
    assert names["other_latent"].shape == (15, 10)
    assert names["with_umap"].obsm["X_umap"].shape == (150, 2)
    assert set(names["genes"].comparison) == {"T vs B"}
    assert set(names["predicted"]) <= {"T", "B", "NK"}
    np.testing.assert_allclose(names["probabilities"].sum(axis=1), 1, rtol=1e-5)
    assert names["probabilities"].index.tolist() == adata.obs_names.tolist()
    assert names["mapped"].summary_stats["n_batch"] == 5
    assert names["joint"].shape == (200, 20)
