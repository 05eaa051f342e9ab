"""scvi-tools trains from a dataset as from the AnnData that the dataset was made of."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError

scvi = pytest.importorskip(
    "scvi", reason='scvi-tools is not installed: pip install "zloader[scvi]"', exc_type=ImportError
)
lightning = pytest.importorskip("lightning.pytorch")

from scvi.dataloaders import AnnDataLoader  # noqa: E402
from scvi.model import SCANVI, SCVI  # noqa: E402

from zloader.integrations.scvi import DataModule  # noqa: E402

# scvi-tools, Lightning and their dependencies warn about workers, small categories and deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

N_ROWS = 120
PAGE = Path(__file__).parents[2] / "docs" / "scvi.md"
SMALL = {"batch_size": 256}
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
COVARIATES = {"categorical_covariate_keys": ["lane", "donor"], "continuous_covariate_keys": ["n_counts", "level"]}
SETUPS = {
    "plain": {},
    "batch and labels": {"batch_key": "donor", "labels_key": "kind"},
    "covariates": {"batch_key": "passed", **COVARIATES},
    "a layer": {"layer": "raw", "batch_key": "lane"},
}


def table(n_rows=N_ROWS, seed=0):
    adata = counts(n_rows, 30, seed=seed)
    adata.obs["type"] = pd.Categorical(
        np.resize(["T", "Unknown", "B", "NK"], n_rows), ["never", "T", "Unknown", "B", "NK"]
    )
    adata.obs["kind"] = np.resize(["T", "B", "NK"], n_rows)
    adata.obs["level"] = np.linspace(-1, 1, n_rows)
    adata.layers["raw"] = adata.X * 2
    adata.layers["logged"] = adata.X.log1p()
    return adata


@pytest.fixture(scope="module")
def adata():
    return table()


@pytest.fixture(scope="module")
def dataset(adata, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("scvi")
    write_store(adata, tmp / "a.zarr", tmp)
    return zl.open_dataset(tmp / "a.zarr")


@pytest.fixture(scope="module")
def pancreas(tmp_path_factory):
    """The bundled cells with 200 genes, of which every third cell has no label."""
    tmp = tmp_path_factory.mktemp("pancreas")
    adata = ad.read_h5ad(zl.example_h5ad(tmp / "p.h5ad"))
    adata.X = adata.X.tocsr().astype("float32")
    adata = adata[:, np.sort(np.asarray(adata.X.mean(0)).ravel().argsort()[-200:])].copy()
    adata.obs["known"] = adata.obs["cell_type1"].astype(str)
    adata.obs.loc[adata.obs_names[::3], "known"] = "Unknown"
    zl.convert(adata, tmp / "p.zarr", progress=False)
    return zl.open_dataset(tmp / "p.zarr")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of small models slow each other down where several tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def as_module(setup):
    """The options of a DataModule for those of `setup_anndata`."""
    options = dict(setup)
    if "labels_key" in options:
        options["label_key"] = options.pop("labels_key")
    if "layer" in options:
        options["x"] = f"layers/{options.pop('layer')}"
    return options


def tensors_of(dm, batch):
    return dm.on_after_batch_transfer(dm.transfer_batch_to_device(batch, torch.device("cpu"), 0), 0)


def assert_includes(found, expected, where=""):
    """All of `expected` is in `found`, which may have more."""
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_includes(found[key], value, f"{where}/{key}")
        elif isinstance(value, np.ndarray):
            assert list(found[key]) == list(value), f"{where}/{key}"
            assert isinstance(found[key], np.ndarray)
        else:
            assert found[key] == value, f"{where}/{key}"


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_the_registry_is_that_of_setup_anndata(dataset, adata, setup):
    adata = adata[:].copy()  # without unused categories
    SCVI.setup_anndata(adata, **setup)
    expected = SCVI(adata).adata_manager.registry
    registry = DataModule(dataset, **as_module(setup)).registry
    assert registry["setup_method_name"] == "setup_datamodule"
    assert registry["model_name"] == "SCVI"
    assert registry["scvi_version"] == scvi.__version__
    assert_includes(registry["setup_args"], expected["setup_args"])
    assert_includes(registry["field_registries"], dict(expected["field_registries"]))


@pytest.mark.parametrize("rows", ["all", "lane != 2 and type != 'B'"])
@pytest.mark.parametrize("model_name", ["SCVI", "SCANVI"])
def test_the_registry_of_scanvi(dataset, adata, model_name, rows):
    dataset = dataset.where(rows) if rows != "all" else dataset
    adata = adata[dataset.obs_names].copy()
    SCANVI.setup_anndata(adata, "type", "Unknown", batch_key="donor")
    expected = SCANVI(adata).adata_manager.registry
    dm = DataModule(dataset, label_key="type", batch_key="donor", model_name=model_name)
    assert_includes(dm.registry["field_registries"], dict(expected["field_registries"]))
    assert dm.labels_.tolist() == adata.obs["type"].tolist()
    n_labels = 3 if rows == "all" else 2  # without those of no row, and without the unlabelled category
    assert SCANVI(registry=dm.registry, datamodule=dm).n_labels == SCANVI(adata).n_labels == dm.n_labels == n_labels


def test_without_an_unlabelled_row_scanvi_has_no_class_for_it(dataset):
    dm = DataModule(dataset, label_key="kind", model_name="SCANVI")
    assert SCANVI(registry=dm.registry, datamodule=dm).n_labels == dm.n_labels == 3
    first, second = tensors_of(dm, next(iter(dm.train_dataloader())))
    assert first is second


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_minibatches_are_those_of_scvis_own_loader(dataset, adata, setup):
    adata = adata.copy()
    SCVI.setup_anndata(adata, **setup)
    dm = DataModule(dataset, batch_size=32, **as_module(setup))
    for minibatch in itertools.islice(dm.train_dataloader(), 2):
        own = AnnDataLoader(SCVI(adata).adata_manager, indices=minibatch.index.numpy(), batch_size=32)
        (expected,), found = own, tensors_of(dm, minibatch)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert (found[key].dtype, found[key].layout) == (tensor.dtype, torch.strided)
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)


def test_genes_are_chosen_and_kept_in_another_dataset(dataset, adata, tmp_path):
    genes = ["gene 7", "gene 3", "gene 29"]
    dm = DataModule(dataset[:, genes], batch_key="donor", label_key="type", batch_size=50)
    assert (dm.n_vars, dm.registry["field_registries"]["X"]["state_registry"]["column_names"].tolist()) == (3, genes)
    other = adata[40:80, ::-1].copy()
    other.obs["donor"] = "d2"
    del other.obs["type"]
    write_store(other, tmp_path / "b.zarr", tmp_path)
    batches = dm.inference_dataloader(zl.open_dataset(tmp_path / "b.zarr"), batch_size=16)
    assert len(batches) == 3
    x, batch, labels = (torch.cat([tensors[key] for tensors in batches]) for key in ("X", "batch", "labels"))
    np.testing.assert_array_equal(x, adata[40:80, genes].X.toarray())
    assert set(batch[:, 0].tolist()) == {adata.obs["donor"].astype("category").cat.categories.get_loc("d2")}
    assert set(labels[:, 0].tolist()) == {3}  # Unknown
    missing = adata[:20, :5].copy()
    write_store(missing, tmp_path / "c.zarr", tmp_path / "c")
    with pytest.raises(OptionError, match="2 of 3 genes are not in var"):
        dm.inference_dataloader(zl.open_dataset(tmp_path / "c.zarr"))


def test_a_panel_has_the_genes_of_the_model(dataset, adata):
    genes, options = ["gene 7", "gene 3", "gene 29"], {"batch_key": "donor", "label_key": "type", "batch_size": 50}
    panel = dataset[:, genes]
    dm = DataModule(panel, **options)
    assert (dm.n_vars, dm.training_rows.n_vars) == (3, 3)
    model = SCANVI(registry=dm.registry, datamodule=dm, n_hidden=4)
    model.train(1, datamodule=dm, **QUIET)
    assert len(model.predict(dataloader=dm.inference_dataloader())) == N_ROWS
    found = model.get_normalized_expression(dataloader=dm.inference_dataloader())
    assert np.shape(found) == (N_ROWS, 3)
    for rows in (dataset, panel[10:40], dataset[:, ["gene 29", "gene 1", "gene 3", "gene 7"]]):
        x = torch.cat([tensors["X"] for tensors in dm.inference_dataloader(rows)])
        at = rows.row_numbers if isinstance(rows, zl.View) else np.arange(N_ROWS)
        np.testing.assert_array_equal(x, adata[at, genes].X.toarray())
    for rows, known in ((panel.where("donor != 'd1'"), dataset), (dataset[:60], panel), (panel[:60], panel)):
        query = DataModule(rows, categories=known, **options)
        assert (query.n_vars, query.n_batch) == (3, dm.n_batch)
        next(iter(query.train_dataloader()))
    assert DataModule(panel[:, [2, 0]], **options)._fields.var_names.tolist() == ["gene 29", "gene 7"]
    with pytest.raises(OptionError, match="1 of 3 genes are not in the panel of 2 genes"):
        dm.inference_dataloader(panel[:, :2])


def test_inference_has_all_rows_of_a_view_in_order(dataset, adata):
    view = dataset.where("lane != 2")
    dm = DataModule(view, batch_size=7)
    assert dm.n_obs == view.n_obs
    found = torch.cat([tensors["X"] for tensors in dm.inference_dataloader()])
    np.testing.assert_array_equal(found, adata[view.row_numbers].X.toarray())


def rows(loader):
    return sorted(itertools.chain(*(minibatch.index.tolist() for minibatch in loader)))


@pytest.mark.parametrize(
    ("options", "n_train"),
    [
        ({"train_size": 0.75}, 90),
        ({"train_size": 100}, 100),
        ({"train_size": 0.5, "validation_size": 0.25}, 60),
        ({"train_size": 0.75, "stratify": "type"}, 90),
        ({"train_size": 0.6, "split_by": "donor"}, None),
        ({"validation": "lane == 1"}, None),
        ({"train_size": 1.0}, N_ROWS),
    ],
    ids=["rows", "a number of rows", "less than all", "stratified", "by donor", "given", "all"],
)
def test_splits(dataset, adata, options, n_train):
    dm = DataModule(dataset, **options)
    training, validation = rows(dm.train_dataloader()), rows(dm.val_dataloader())
    assert (len(training), len(validation)) == (dm.n_train, dm.n_val)
    assert n_train in (None, len(training))
    assert len({*training, *validation}) == len(training) + len(validation)
    assert len(training) + len(validation) == (90 if "validation_size" in options else N_ROWS)
    in_training, in_validation = adata.obs.iloc[training], adata.obs.iloc[validation]
    if "stratify" in options:
        assert in_training["type"].value_counts().tolist()[:4] == [23, 23, 22, 22]
    if "split_by" in options:
        assert not {*in_training["donor"]} & {*in_validation["donor"]}
    if "validation" in options:
        assert set(in_validation["lane"]) == {1} != set(in_training["lane"])


@pytest.mark.slow  # trains models
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata = table(150)
    adata.obs["donor"] = [f"donor {row % 10}" for row in range(150)]
    adata.obs["plate"] = [f"plate {row // 30}" for row in range(150)]
    adata.obs["cell_type"] = ["T", "B", "NK"] * 50
    zl.convert(adata, "pbmc.zarr", progress=False)
    text = PAGE.read_text().split("## TOTALVI and MULTIVI")[0]  # test_scvi_mudata.py runs the rest
    code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names = {"__name__": "__main__"}
    for number, block in enumerate(code, 1):
        exec(compile(block, f"scvi.md, block {number}", "exec"), names)
    assert names["latent"].shape == (150, 10)
    assert names["other_latent"].shape == (15, 10)
    assert names["adata"].obsm["X_umap"].shape == (150, 2)
    in_memory = names["in_memory"].get_latent_representation()
    np.testing.assert_allclose(in_memory, names["latent"][np.arange(150) % 3 < 2], atol=1e-4)
    assert set(names["genes"].comparison) == {"T vs B"}
    assert set(names["predicted"]) <= {"T", "B"}
    probabilities = names["probabilities"]
    assert probabilities.idxmax(axis=1).tolist() == names["predicted"].tolist()
    assert probabilities.index.tolist() == adata.obs_names.tolist()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


def test_no_minibatch_has_a_single_row(dataset):
    dm = DataModule(dataset[:33], train_size=1.0, batch_size=16)
    epochs = [[len(minibatch) for minibatch in dm.train_dataloader()] for _ in range(2)]
    assert epochs == [[16, 16]] * 2
    assert len(dm.val_dataloader()) == 0
    assert [len(minibatch) for minibatch in DataModule(dataset[:32], batch_size=64).train_dataloader()] == [29]
    with pytest.raises(OptionError, match="batch normalisation trains on 2 rows or more, and there are 1"):
        DataModule(dataset[:1], train_size=1.0)


def trainer_on(device, **place):
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=place, num_devices=1)


def test_ranks_are_those_of_the_trainer(dataset, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # without a RANK, as in a process that Lightning launches
    seen = []
    for rank in range(2):
        dm = DataModule(dataset, batch_size=16, validation="lane == 1")
        dm.trainer = trainer_on("cpu", rank=rank, num_replicas=2)
        seen.append([rows(loader) for loader in (dm.train_dataloader(), dm.val_dataloader())])
        assert sum(len(tensors["X"]) for tensors in dm.inference_dataloader()) == N_ROWS
    training, validation = (sorted(seen[0][part] + seen[1][part]) for part in range(2))
    assert (training, validation) == (rows_in(dm.training_rows), rows_in(dm.validation_rows))


def rows_in(view):
    return view.row_numbers.tolist()


def test_x_becomes_dense_after_the_copy(dataset):
    dm = DataModule(dataset)
    dm.trainer = trainer_on("hpu")  # no Loader delivers there
    (minibatch,) = dm.train_dataloader()
    assert isinstance(minibatch.x, zl.PackedRows)
    on_host = DataModule(dataset)
    (expected,) = on_host.train_dataloader()
    found = dm.on_after_batch_transfer(minibatch, 0)
    assert found["X"].dtype == torch.float32
    torch.testing.assert_close(found["X"], expected.x, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model_name": "SCANVI"}, OptionError, "SCANVI needs labels: give label_key"),
        ({"batch_key": "cell_type"}, OptionError, "'cell_type' has no value in some rows"),
        ({"batch_key": "doner"}, MissingColumnError, "Did you mean 'donor'"),
        ({"continuous_covariate_keys": ["donor"]}, OptionError, "holds no numbers"),
        ({"categorical_covariate_keys": "lane"}, OptionError, "must be a list of names"),
        ({"label_key": "type", "unlabeled_category": "unknown"}, OptionError, "Did you mean 'Unknown'"),
        ({"validation": "lane == 1", "split_by": "donor"}, OptionError, "leave out split_by"),
        ({"train_size": 1.5}, OptionError, "more than 1"),
        ({"train_size": "all"}, OptionError, "a fraction or a number of rows"),
        ({"loader_options": {"layout": "csr"}}, OptionError, "must be one of"),
        ({"x": ["X"]}, OptionError, "name of one matrix"),
        ({"batch_size": 0}, OptionError, "batch_size must be a whole number"),
        ({"batch_key": ["donor", "lane"]}, OptionError, "batch_key must be the name of one obs column"),
        ({"label_key": 3}, OptionError, "label_key must be the name of one obs column, not 3"),
        ({"model_name": "SCANV"}, OptionError, "'SCANVI', not 'SCANV'"),
        ({"categories": "donor"}, OptionError, "Dataset"),
    ],
)
def test_options_that_cannot_be_used(dataset, options, error, match):
    with pytest.raises(error, match=match):
        DataModule(dataset, **options)


def test_a_split_without_labelled_rows_for_training(dataset):
    with pytest.raises(OptionError, match="none of the 30 rows for training has a label"):
        DataModule(dataset, label_key="type", model_name="SCANVI", validation="type != 'Unknown'")


def test_values_that_are_no_counts(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataModule(dataset, x="layers/raw")
    with pytest.warns(UserWarning, match=r"layers/logged of .* holds values that are no counts, such as \d+\.\d+"):
        DataModule(dataset, x="layers/logged")


def test_sizes_given_to_train(dataset):
    """scvi-tools 1.5 passes them on."""
    dm = DataModule(dataset, train_size=0.5)
    dm.set_batch_size(None)
    dm.set_split(train_size=0.9, validation_size=None, shuffle_set_split=True, batch_size=None)
    assert [len(minibatch) for minibatch in dm.train_dataloader()] == [60]
    dm.set_batch_size(20)
    assert [len(minibatch) for minibatch in dm.train_dataloader()] == [20] * 3
    with pytest.raises(OptionError, match=r"train_size=0.7.* cannot split"):
        dm.set_split(train_size=0.7)


class Recording(lightning.LightningModule):
    """Records the minibatches that a Trainer hands to a model."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(30)), []

    def training_step(self, batch, batch_idx):
        pair = batch if isinstance(batch, list) else [batch]
        self.seen.append([each["X"].sum(1).tolist() for each in pair])
        return (pair[0]["X"] @ self.weight).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("labelled", [False, True], ids=["SCVI", "SCANVI"])
@pytest.mark.parametrize("at", ["end of an epoch", "inside an epoch"])
def test_a_checkpoint_resumes_with_the_same_minibatches(dataset, tmp_path, labelled, at):
    def fit(epochs, ckpt_path=None, **options):
        dm = DataModule(dataset, batch_size=32, **({"label_key": "type", "model_name": "SCANVI"} if labelled else {}))
        options = QUIET | {"enable_checkpointing": "callbacks" in options, "enable_model_summary": False} | options
        trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **options)
        model = Recording()
        trainer.fit(model, datamodule=dm, ckpt_path=ckpt_path)
        return model.seen

    whole = fit(3)
    assert len(whole) == 12
    assert len({str(item) for item in whole}) == 12
    every = {"every_n_epochs": 1} if at == "end of an epoch" else {"every_n_train_steps": 2}
    saving = lightning.callbacks.ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=at == "end of an epoch" or None, **every
    )
    fit(2, callbacks=[saving])
    step = 4 if at == "end of an epoch" else 6
    assert fit(3, tmp_path / f"step={step}.ckpt") == whole[step:]


@pytest.mark.slow  # trains models
def test_scvi_trains_from_a_bucket_as_from_memory(pancreas, tmp_path):
    dm = DataModule(pancreas, batch_key="donor", label_key="cell_type1", train_size=0.9, split_by="library", **SMALL)
    model = SCVI(registry=dm.registry, n_hidden=32)
    before = dm.train_dataloader().next_epoch
    model.train(datamodule=dm, max_epochs=2, check_val_every_n_epoch=1, **QUIET)
    assert before == 0
    assert dm.train_dataloader().next_epoch == 2
    with pytest.raises(TypeError, match=r"dataloader=dm\.inference_dataloader"):
        model.get_latent_representation(dataloader=dm)
    latent = model.get_latent_representation(dataloader=dm.inference_dataloader())
    assert latent.shape == (2142, 10)
    model.save(tmp_path / "model", datamodule=dm)
    loaded = SCVI.load(tmp_path / "model", adata=False, accelerator="cpu")
    np.testing.assert_allclose(
        loaded.get_latent_representation(dataloader=dm.inference_dataloader()), latent, atol=1e-5
    )
    model.train(datamodule=dm, max_epochs=1, **QUIET)  # again: with a new order
    assert dm.train_dataloader().next_epoch == 3


def share_right(model, dm):
    predicted = model.predict(dataloader=dm.inference_dataloader())
    return np.mean(predicted == dm.dataset.obs(["cell_type1"])["cell_type1"].to_numpy())


@pytest.mark.slow  # trains models
@pytest.mark.parametrize("label_key", ["known", "cell_type1"])
def test_scanvi_learns_however_it_was_made(pancreas, tmp_path, label_key):
    def module(rows):
        return DataModule(rows, categories=pancreas, batch_key="donor", label_key=label_key)

    def learn(model, dm, epochs, **options):
        model.train(datamodule=dm, max_epochs=epochs, **QUIET | options)
        assert share_right(model, dm) > 0.7  # 0.29 are right if all are called beta cells
        return model

    dm, query = module(pancreas.where("donor != 'human4'")), module(pancreas.where("donor == 'human4'"))
    model = SCANVI(registry=dm.registry, datamodule=dm, n_hidden=32)
    learn(model, dm, 6, check_val_every_n_epoch=1, logger=None)
    losses = model.history["train_classification_loss"].to_numpy(float).ravel()
    assert losses[-1] < losses[0] < np.log(20)
    assert len(model.history["validation_accuracy"]) == 6

    pretrained = SCVI(registry=dm.registry, n_hidden=32)
    pretrained.train(datamodule=dm, max_epochs=2, **QUIET)
    assert pretrained.module.n_labels == len(dm.label_keys)
    model = learn(SCANVI.from_scvi_model(pretrained, "Unknown", datamodule=dm), dm, 6)
    model.save(tmp_path / "model", datamodule=dm)

    same = module(dm.dataset)
    loaded = SCANVI.load(tmp_path / "model", adata=False, datamodule=same, accelerator="cpu")
    assert share_right(loaded, same) == share_right(model, dm)
    learn(loaded, same, 1)
    loaded.save(tmp_path / "again", datamodule=same)

    place = {"registry": query.registry, "datamodule": query, "accelerator": "cpu"}
    learn(SCANVI.load_query_data(reference_model=str(tmp_path / "again"), **place), query, 1)
    own = DataModule(query.dataset, batch_key="donor", label_key=label_key)
    place = {"registry": own.registry, "datamodule": own, "accelerator": "cpu"}
    model = SCANVI.load_query_data(reference_model=str(tmp_path / "again"), **place)
    with pytest.raises(OptionError, match="made for other batches"):
        model.train(1, datamodule=own, **QUIET)


def test_a_module_of_other_codes_than_the_model_is_refused(dataset):
    options = {"batch_key": "donor", "label_key": "type"}
    model = SCVI(registry=DataModule(dataset, **options).registry, n_hidden=4)
    view = dataset.where("donor != 'd1'")
    others = {
        "made for other batches than": DataModule(view, **options),
        "made for other genes than": DataModule(dataset[:, ["gene 3"]], **options),
        "other categorical covariates than": DataModule(dataset, categorical_covariate_keys=["lane"], **options),
        "other continuous covariates than": DataModule(dataset, continuous_covariate_keys=["level"], **options),
    }
    for message, dm in others.items():
        with pytest.raises(OptionError, match=message):
            model.train(1, datamodule=dm, **QUIET)
    model.train(1, datamodule=DataModule(view, categories=dataset, **options), **QUIET)
    model.train(1, datamodule=DataModule(dataset, batch_key="donor"), **QUIET)  # SCVI uses no labels
    labels = {"labels_key": "type", "unlabeled_category": "Unknown"}
    for dm, message in [
        (DataModule(dataset, batch_key="donor"), "SCANVI needs labels: give label_key"),
        (DataModule(dataset, batch_key="donor", label_key="kind"), "made for other labels than"),
        (DataModule(dataset, batch_key="donor", label_key="type", validation="type != 'Unknown'"), "none of the 30"),
    ]:
        scanvi = SCANVI.from_scvi_model(model, **labels, datamodule=dm)
        with pytest.raises(OptionError, match=message):
            scanvi.train(1, datamodule=dm, **QUIET)
    dm = DataModule(dataset, **options)
    by_label = SCVI(registry=dm.registry, dispersion="gene-label")
    with pytest.raises(OptionError, match="dispersion='gene-label' needs a label in every row"):
        by_label.train(1, datamodule=dm, **QUIET)


def test_one_module_trains_scvi_and_then_scanvi(dataset, tmp_path):
    dm = DataModule(dataset, label_key="type", batch_size=32, model_name="SCANVI")
    model = SCVI(registry=dm.registry, n_hidden=4)
    for made in (model, lambda: SCANVI.from_scvi_model(model, "Unknown", datamodule=dm)):
        made = made if made is model else made()
        made.train(1, datamodule=dm, **QUIET)
        made.save(tmp_path / type(made).__name__)  # with the module that trained it
        assert isinstance(dm.on_after_batch_transfer(next(iter(dm.val_dataloader())), 0), list) == (made is not model)
    assert SCVI.load(tmp_path / "SCVI", adata=False, accelerator="cpu").module.n_labels in (3, 4)
    loaded = SCANVI.load(tmp_path / "SCANVI", adata=False, datamodule=dm, accelerator="cpu")
    assert loaded.module.n_labels == dm.n_labels == 3
    loaded.save(tmp_path / "again", datamodule=dm)


def test_the_modules_print_in_a_line(dataset):
    expected = "DataModule(90 rows for training, 30 for validation, 30 genes, 3 batches, 3 labels)"
    dm = DataModule(dataset, batch_key="donor", label_key="type", train_size=90)
    assert str(dm) == repr(dm) == expected


def test_a_dataset_in_place_of_an_anndata(dataset):
    model = SCVI(registry=DataModule(dataset).registry)
    for take in (SCVI.setup_anndata, SCVI, lambda view: SCVI.load_query_data(view, model)):
        with pytest.raises(AttributeError, match="of zloader is no AnnData, and has no uns: for scvi-tools, make"):
            take(dataset[:50])


@pytest.mark.parametrize("model", [SCVI, SCANVI])
def test_a_module_in_place_of_an_anndata(dataset, model):
    with pytest.raises(OptionError, match=r"not an AnnData: write SCVI\(registry=dm.registry\), not"):
        model(DataModule(dataset))


@pytest.mark.slow  # trains a model
def test_methods_without_a_dataloader_say_what_to_do(dataset):
    model = SCVI(registry=(dm := DataModule(dataset)).registry)
    model.train(datamodule=dm, max_epochs=1, **QUIET)
    said = r"reads no AnnData.*categories=dm.batch_labels.*adata=cells"
    with pytest.raises(OptionError, match=said):
        model.differential_expression(dataset.take(slice(None)), groupby="donor", group1="d0", group2="d1")
    if "dataloader" in inspect.signature(model.differential_expression).parameters:  # scvi-tools 1.5
        said, groups = "inference dataloader", {"idx1": np.arange(120) < 40, "idx2": np.arange(120) >= 80}
        found = model.differential_expression(dataloader=dm.inference_dataloader(), silent=True, **groups)
        assert sorted(found.index) == sorted(dataset.var_names)
    with pytest.raises(ValueError, match=said):
        model.differential_expression(groupby="donor", group1="d0", group2="d1")


def test_several_categorical_covariates_warn(dataset):
    with pytest.warns(UserWarning, match=r"ignores all but one .* instead of lane, donor"):
        DataModule(dataset, categorical_covariate_keys=["lane", "donor"])


def test_an_unforeseen_batch_names_what_reserves_a_place(dataset):
    known = dataset.where("donor != 'd1'")
    message = r"has the label 'd1', which was not in the training data; that had 'd10', 'd2'\. Take .*categories=both"
    for use in (
        lambda: DataModule(known, batch_key="donor").inference_dataloader(dataset),
        lambda: DataModule(dataset, batch_key="donor", categories=known),
    ):
        with pytest.raises(OptionError, match=message):
            use()
