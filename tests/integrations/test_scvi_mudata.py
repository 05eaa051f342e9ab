"""TOTALVI and MULTIVI train from a dataset with modalities as from the MuData that it holds."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError

scvi = pytest.importorskip(
    "scvi", reason='scvi-tools is not installed: pip install "zloader[scvi]"', exc_type=ImportError
)
md = pytest.importorskip("mudata")

from scvi.model import MULTIVI, TOTALVI  # noqa: E402

from zloader.integrations.scvi import MuDataModule  # noqa: E402

# scvi-tools, mudata, Lightning and their dependencies warn about workers, small categories and deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

N_ROWS = 400
PAGE = Path(__file__).parents[2] / "docs" / "scvi.md"
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
SMALL = {"n_hidden": 16, "n_latent": 4, "empirical_protein_background_prior": False}
BY_MODALITY = {"rna_layer": "rna", "protein_layer": "prot"}
SETUPS = {
    "plain": ({}, {"modalities": BY_MODALITY}),
    "a batch of the whole": ({"batch_key": "donor"}, {"batch_key": "donor", "modalities": BY_MODALITY}),
    "columns of a modality and a layer": (
        {
            "rna": "rna:layers/counts",
            "batch_key": "rna:lane",
            "size_factor_key": "rna:size",
            "categorical_covariate_keys": ["rna:kind", "rna:lane"],
            "continuous_covariate_keys": ["level"],
        },
        {
            "rna_layer": "counts",
            "batch_key": "lane",
            "size_factor_key": "size",
            "categorical_covariate_keys": ["kind", "lane"],
            "continuous_covariate_keys": ["level"],
            "modalities": BY_MODALITY
            | {"batch_key": "rna", "size_factor_key": "rna", "categorical_covariate_keys": "rna"},
        },
    ),
    "panels": (
        {"batch_key": "donor", "panel_key": "panel"},
        {"batch_key": "donor", "panel_key": "panel", "modalities": BY_MODALITY},
    ),
}


def modality(names, n_columns, prefix, seed, *, sparse):
    rng = np.random.default_rng(seed)
    x = rng.poisson(rng.gamma(1, 3, n_columns), (len(names), n_columns)).astype("float32")
    return ad.AnnData(
        sp.csr_matrix(x) if sparse else x,
        obs=pd.DataFrame(index=names),
        var=pd.DataFrame(index=[f"{prefix}{i}" for i in range(n_columns)]),
    )


def cite(n_rows=N_ROWS):
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
    mdata.obs["level_2"] = 1.5
    mdata.obs["level"] = np.linspace(-1, 1, n_rows)
    return mdata


@pytest.fixture
def mdata():
    """The cells in memory. Each test has its own, because `setup_mudata` adds to it."""
    return cite()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("cite") / "cite.h5mu"
    cite().write_h5mu(path)
    return zl.open_dataset(path)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of small models slow each other down where several tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of_proteins(dataset, **options):
    return MuDataModule(dataset, **{"proteins": "prot:X", "sample_rows": 60} | options)


def in_memory(model_class, mdata, setup, **options):
    model_class.setup_mudata(mdata, **setup)
    return model_class(mdata, **options)


def assert_equal(found, expected, where=""):
    """Registries are equal, except for the identity of the MuData."""
    if isinstance(expected, dict):
        ignored = {"_scvi_uuid"}
        assert found.keys() - ignored == expected.keys() - ignored, where
        for key in expected.keys() - ignored:
            assert_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, np.ndarray):
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
            assert own[key].dtype == tensor.dtype, key
            assert torch.equal(own[key], tensor), key


@pytest.mark.parametrize(("options", "setup"), SETUPS.values(), ids=SETUPS)
def test_the_registry_and_the_minibatches_are_those_of_setup_mudata(dataset, mdata, options, setup):
    expected = in_memory(TOTALVI, mdata, setup, **SMALL)
    dm = of_proteins(dataset, **options)
    model = dm.model(TOTALVI, **SMALL)
    assert_equal(model.registry, expected.registry)
    assert_equal(dict(model.summary_stats), dict(expected.summary_stats))
    assert_same_tensors(dm.inference_dataloader(model, batch_size=64), expected._make_data_loader(mdata, batch_size=64))


def test_it_trains_from_a_bucket_and_its_methods_see_all_rows(mdata, sim, tmp_path):
    (tmp_path / "atlas").mkdir()
    mdata.write_h5mu(tmp_path / "atlas" / "cite.h5mu")
    options = {"key": "any", "secret": "any", "endpoint_url": sim(root=tmp_path).url}
    dataset = zl.open_dataset("s3://atlas/cite.h5mu", storage_options=options)
    dm = of_proteins(dataset, batch_key="donor")
    model = dm.model(TOTALVI, **SMALL)
    seen = []
    model.module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.train(max_epochs=2, batch_size=64, **QUIET)
    losses = model.history["elbo_train"].to_numpy(float)
    assert losses.shape == (2, 1)
    assert np.isfinite(losses).all()
    assert np.isfinite(model.history["elbo_validation"].to_numpy(float)).all()
    expected = in_memory(TOTALVI, mdata, {"batch_key": "donor", "modalities": BY_MODALITY}, **SMALL)
    everything = next(iter(expected._make_data_loader(mdata, batch_size=N_ROWS)))
    row_of = {x.tobytes(): row for row, x in enumerate(everything["X"].numpy())}
    rows = [np.array([row_of[x.tobytes()] for x in tensors["X"].numpy()]) for tensors in seen]
    assert_same_tensors(seen, [{key: tensor[row] for key, tensor in everything.items()} for row in rows])
    times = np.bincount(np.concatenate(rows), minlength=N_ROWS)
    assert (times[dm.training_rows.row_numbers] == 2).all()
    assert {len(row) for row in rows if set(row) <= set(dm.training_rows.row_numbers)} == {64, 360 % 64}

    expected.module.load_state_dict(model.module.state_dict())
    expected.module.eval()
    expected.is_trained_ = True
    latent = expected.get_latent_representation()
    np.testing.assert_array_equal(model.get_latent_representation(), latent)
    np.testing.assert_array_equal(
        model.get_latent_representation(dataloader=dm.inference_dataloader(model, dataset[100:], batch_size=37)),
        expected.get_latent_representation(indices=np.arange(100, N_ROWS), batch_size=37),
    )
    assert float(model.get_elbo()) == pytest.approx(float(expected.get_elbo()), rel=0.02)  # of random draws

    some = dm.mudata(dataset.where("panel == 'two'"))
    torch.manual_seed(0)
    rna, proteins = model.get_normalized_expression(some)
    assert rna.index.tolist() == proteins.index.tolist() == dataset.where("panel == 'two'").obs_names.tolist()
    torch.manual_seed(0)
    own, _ = expected.get_normalized_expression(mdata[mdata.obs["panel"] == "two"].copy())
    pd.testing.assert_frame_equal(rna, own)
    with pytest.raises(OptionError, match="is a sample: give it the rows that you mean in memory, as adata"):
        model.get_normalized_expression()

    model.save(tmp_path / "totalvi")
    loaded = of_proteins(dataset, batch_key="donor").load(TOTALVI, tmp_path / "totalvi", accelerator="cpu")
    np.testing.assert_array_equal(loaded.get_latent_representation(), latent)
    of_d2 = of_proteins(dataset.where("donor == 'd2'"), batch_key="donor")
    one = of_d2.load(TOTALVI, tmp_path / "totalvi", accelerator="cpu")  # with the codes of the training
    np.testing.assert_allclose(one.get_latent_representation(), latent[2::3], rtol=1e-5, atol=1e-5)
    one.train(max_epochs=1, **QUIET)
    with pytest.raises(OptionError, match="the model was set up with"):
        of_proteins(dataset, batch_key="panel").load(TOTALVI, tmp_path / "totalvi")
    with pytest.raises(OptionError, match="the model has 40 columns of rna:X, and this module others"):
        of_proteins(dataset[:, {"rna:X": slice(5)}], batch_key="donor").load(TOTALVI, tmp_path / "totalvi")


def multiome(n_rows=N_ROWS):
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
    made = md.MuData(parts)
    made.obs = mdata.obs.copy()
    return made


def test_the_priors_of_the_sample_are_near_those_of_all_rows(dataset, mdata):
    options = {"n_hidden": 16, "n_latent": 4, "empirical_protein_background_prior": True}
    options["use_observed_lib_size"] = False
    np.random.seed(0)  # noqa: NPY002 - scvi-tools draws the rows of the prior with it
    found = of_proteins(dataset).model(TOTALVI, **options)
    assert found.adata.mod["rna"].n_obs == 100 < found.adata.n_obs == N_ROWS
    expected = in_memory(TOTALVI, mdata, {"modalities": BY_MODALITY}, **options)
    of_all, of_sample = (model.module.state_dict() for model in (expected, found))
    for name, most in {"library_log_means": 0.02, "library_log_vars": 0.01, "background_pro_alpha": 0.1}.items():
        np.testing.assert_allclose(of_sample[name], of_all[name], atol=most)


def test_chosen_genes_in_their_order(dataset, mdata):
    genes = {"rna:X": ["g7", "g3", "g30"], "prot:X": np.arange(13) != 4}
    dm = of_proteins(dataset[:, genes])
    model = dm.model(TOTALVI, **SMALL)
    some = md.MuData({"rna": mdata["rna"][:, genes["rna:X"]].copy(), "prot": mdata["prot"][:, genes["prot:X"]].copy()})
    expected = in_memory(TOTALVI, some, {"modalities": BY_MODALITY}, **SMALL)
    assert_equal(model.registry, expected.registry)
    batches = list(expected._make_data_loader(some, batch_size=N_ROWS))
    assert_same_tensors(dm.inference_dataloader(model, batch_size=N_ROWS), batches)
    again = zl.open_dataset(dataset.url)  # whose genes are found by name
    assert_same_tensors(dm.inference_dataloader(model, again, batch_size=N_ROWS), batches)


def test_rows_become_dense_where_they_are_copied_to(dataset):
    encode = of_proteins(dataset, batch_key="donor")._encoder
    for layout in ("dense", "packed"):
        loader = zl.Loader(
            dataset, x=["rna:X", "prot:X"], obs=encode.columns, layout=layout, batch_size=64, shuffle=False
        )
        tensors = [encode(minibatch) for minibatch in loader]
        if layout == "dense":
            dense = tensors
    assert_same_tensors(tensors, dense)


def test_multivi_trains_from_rows_that_lack_a_modality(tmp_path):
    stored = multiome()
    stored.write_zarr(tmp_path / "m.zarr")
    dataset = zl.open_dataset(tmp_path / "m.zarr")
    setup = {"batch_key": "kind", "categorical_covariate_keys": ["lane"], "size_factor_key": ["size_rna", "size_atac"]}
    dm = MuDataModule(dataset, atac="atac:X", sample_rows=50, **setup)
    model = dm.model(MULTIVI, n_latent=4, n_hidden=16)
    setup["modalities"] = {"rna_layer": "rna", "atac_layer": "atac"}
    mdata = padded(stored)
    expected = in_memory(MULTIVI, mdata, setup, n_latent=4, n_hidden=16)
    assert_equal(model.registry, expected.registry)
    assert_same_tensors(dm.inference_dataloader(model, batch_size=64), expected._make_data_loader(mdata, batch_size=64))
    model.train(max_epochs=2, **QUIET)
    assert np.isfinite(model.history["elbo_train"].to_numpy(float)).all()
    expected.module.load_state_dict(model.module.state_dict())
    expected.module.eval()
    expected.is_trained_ = True
    for of in ("joint", "expression", "accessibility"):
        latent = model.get_latent_representation(modality=of)
        np.testing.assert_array_equal(latent, expected.get_latent_representation(modality=of))
    model.save(tmp_path / "multivi")
    loaded = dm.load(MULTIVI, tmp_path / "multivi", accelerator="cpu")
    np.testing.assert_array_equal(loaded.get_latent_representation(modality=of), latent)
    with pytest.raises(OptionError, match="modality_weights='cell' has a weight for each row"):
        dm.model(MULTIVI, modality_weights="cell", n_latent=4, n_hidden=16)
    with pytest.raises(OptionError, match="TOTALVI needs rna and proteins"):
        dm.model(TOTALVI)


def test_totalvi_refuses_rows_without_a_modality(tmp_path):
    mdata = cite(60)
    mdata["prot"].obs["lot"] = "lot 1"
    atac = modality(mdata.obs_names, 5, "peak", 2, sparse=True)
    unpaired = md.MuData({"rna": mdata["rna"], "prot": mdata["prot"][10:].copy(), "atac": atac})
    unpaired.write_h5mu(tmp_path / "u.h5mu")
    dataset = zl.open_dataset(tmp_path / "u.h5mu")
    with pytest.raises(
        OptionError, match=r"but 10 of 60 rows have no prot, such as row 0: .*where\(dataset.present\('rna'\) & "
    ):
        of_proteins(dataset).model(TOTALVI)
    with pytest.raises(OptionError, match="but 5 of 55 rows have no prot, such as row 0"):
        of_proteins(dataset[5:]).model(TOTALVI)
    paired = of_proteins(dataset.where(dataset.present("rna") & dataset.present("prot"))).model(TOTALVI, **SMALL)
    assert paired.summary_stats["n_cells"] == 50
    with pytest.raises(OptionError, match="'prot:lot' has no value in some rows, such as row 0"):
        of_proteins(dataset, batch_key="prot:lot")
    with pytest.raises(OptionError, match="TOTALVI takes no atac: leave it out"):
        of_proteins(dataset, atac="atac:X").model(TOTALVI)


def test_matrices_of_other_kinds(tmp_path):
    """RNA that is dense, proteins that are sparse whole numbers."""
    mdata = cite(60)
    mdata["rna"].X, mdata["prot"].X = mdata["rna"].X.toarray(), sp.csr_matrix(mdata["prot"].X.astype("int64"))
    mdata.write_h5mu(tmp_path / "m.h5mu")
    dm = of_proteins(zl.open_dataset(tmp_path / "m.h5mu"), batch_key="donor", sample_rows=8)
    model = dm.model(TOTALVI, **SMALL)
    expected = in_memory(TOTALVI, mdata, {"batch_key": "donor", "modalities": BY_MODALITY}, **SMALL)
    assert_equal(model.registry, expected.registry)
    assert_same_tensors(dm.inference_dataloader(model, batch_size=7), expected._make_data_loader(mdata, batch_size=7))


def test_a_module_in_place_of_a_mudata(dataset):
    for take in (partial(TOTALVI.setup_mudata, modalities=BY_MODALITY), TOTALVI):
        with pytest.raises(OptionError, match=r"is not a MuData: write dm.model\(TOTALVI, n_latent=10\), not TOTALVI"):
            take(of_proteins(dataset))


ERRORS = {
    "takes no panel_key": ({"panel_key": "panel"}, MULTIVI, {}, OptionError),
    "must be TOTALVI or MULTIVI, not": ({}, "TOTALVI", {}, OptionError),
    "size_factor_key is one obs column for TOTALVI": (
        {"size_factor_key": ["level", "level_2"]},
        TOTALVI,
        {},
        OptionError,
    ),
    "categorical_covariate_keys of scvi-tools takes columns of one modality": (
        {"categorical_covariate_keys": ["donor", "rna:lane"]},
        TOTALVI,
        {},
        OptionError,
    ),
    "matrices of different modalities, such as 'rna:X'": ({"rna": "X"}, TOTALVI, {}, OptionError),
    "must be names of matrices": ({"rna": ["rna:X"]}, TOTALVI, {}, OptionError),
    "holds no numbers": ({"continuous_covariate_keys": ["donor"]}, TOTALVI, {}, OptionError),
    "batch_key must be the name of one": ({"batch_key": ["donor"]}, TOTALVI, {}, OptionError),
    "'Donor'": ({"batch_key": "Donor"}, TOTALVI, {}, MissingColumnError),
    "shuffle_set_split=...": ({}, TOTALVI, {"shuffle_set_split": False}, OptionError),
    "external_indexing=...": ({}, TOTALVI, {"external_indexing": [np.arange(3)]}, OptionError),
    "give the sizes to MuDataModule": ({}, TOTALVI, {"train_size": 0.5}, OptionError),
}


@pytest.mark.parametrize(("message", "case"), ERRORS.items(), ids=ERRORS)
def test_what_cannot_be_trained_is_refused(dataset, message, case):
    options, model_class, training, error = case
    with pytest.raises(error, match=re.escape(message)):
        of_proteins(dataset, **options).model(model_class, **SMALL).train(1, **training, **QUIET)


def test_a_query_brings_a_new_batch(dataset, tmp_path):
    reference = of_proteins(dataset.where("donor != 'd0'"), batch_key="donor").model(TOTALVI, **SMALL)
    reference.train(max_epochs=1, **QUIET)
    reference.save(tmp_path / "reference")
    dm = of_proteins(dataset.where("donor == 'd0'"), batch_key="donor")
    query = dm.load(TOTALVI, tmp_path / "reference", query=True, accelerator="cpu")
    assert {int(code) for batch in dm.inference_dataloader(query) for code in batch["batch"]} == {2}
    query.train(max_epochs=1, plan_kwargs={"weight_decay": 0.0}, **QUIET)
    assert query.get_latent_representation().shape == (len(dm.dataset), 4)


def test_the_sample_has_every_protein_that_a_batch_has(dataset, mdata):
    mask = of_proteins(dataset, batch_key="donor").model(TOTALVI, **SMALL).protein_state_registry["protein_batch_mask"]
    assert [mask[str(batch)][:2].tolist() for batch in range(3)] == [[True, True], [False, True], [True, True]]


@pytest.mark.slow  # trains models
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, n_donors in {"cite": 4, "query": 5}.items():
        mdata = cite(200)
        mdata.obs["donor"] = [f"donor {row % n_donors}" for row in range(200)]
        mdata[
            mdata.obs["donor"].isin(["donor 4"] if n_donors == 5 else ["donor 0", "donor 1", "donor 3"])
        ].copy().write(f"{name}.h5mu")
    text = PAGE.read_text().split("## TOTALVI and MULTIVI")[1]
    names = {"__name__": "__main__"}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE), 1):
        exec(compile(block, f"scvi.md, block {number} of several modalities", "exec"), names)
    assert names["joint"].shape == (150, 10)
    assert len(names["paired"]) == 150
    assert names["expression"].shape == (50, 40)
    assert names["mapped_totalvi"].summary_stats["n_batch"] == 4
