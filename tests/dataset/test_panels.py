"""A panel `dataset[:, genes]` is what `adata[:, genes]` is of an AnnData."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import counts, dense, write_store
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError, StoreChangedError
from zloader.testing import assert_resumes_anywhere
from zloader.training.recipes import LAYOUTS

pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 60, 30
SIZES = {"batch_size": 7, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "seed": 3}
SOME = ["gene 20", "gene 3", "gene 29", "gene 4"]
LOG = zl.transforms.LogNormalize(50)


def source(seed: int = 0) -> ad.AnnData:
    """X, a dense layer, obsm, raw with more genes in another order, and var with labels and a mask."""
    raw = counts(N_ROWS, 40, seed=seed + 1)[:, ::-1].copy()
    adata = counts(N_ROWS, N_GENES, seed=seed)
    adata.layers["dense"] = adata.X.toarray() + 1
    adata.layers["spliced"] = adata.X * 2
    adata.obsm["X_pca"] = np.arange(2 * N_ROWS, dtype=np.float32).reshape(N_ROWS, 2)
    adata.var["kind"] = pd.Categorical(np.resize(["a", "b", "c"], N_GENES))
    adata.var["chosen"] = np.arange(N_GENES) % 7 == 2
    raw.obs = adata.obs
    adata.raw = raw
    return adata


ADATA = source()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("panels")
    write_store(ADATA, folder / "a.zarr", folder)
    return folder


@pytest.fixture(scope="module")
def dataset(folder: Path) -> zl.Dataset:
    return zl.open_dataset(folder / "a.zarr", cache=folder / "cache")


def check_adata(found: ad.AnnData, wanted: ad.AnnData) -> None:
    """Compares all parts of two AnnData that `to_adata` has."""
    wanted = wanted.copy()  # without categories that no row or gene has
    np.testing.assert_array_equal(dense(found.X), dense(wanted.X))
    assert found.layers.keys() == wanted.layers.keys()
    for name in wanted.layers:
        np.testing.assert_array_equal(dense(found.layers[name]), dense(wanted.layers[name]))
    pd.testing.assert_frame_equal(found.var, wanted.var, check_index_type=False)
    assert found.obs_names.tolist() == wanted.obs_names.tolist()
    assert found.obs["cell_type"].astype(object).equals(wanted.obs["cell_type"].astype(object))
    np.testing.assert_array_equal(found.obsm["X_pca"], wanted.obsm["X_pca"])


def written(positions: list[int], how: str) -> Any:
    """Genes as positions, names, a mask, a var column, or a slice."""
    mask = np.isin(np.arange(N_GENES), positions)
    return {
        "positions": positions,
        "names": ADATA.var_names[positions],
        "mask": mask,
        "column": pd.Series(mask, index=ADATA.var_names),
        "slice": slice(positions[0], None, -3),
    }[how]


@pytest.mark.slow
@settings(max_examples=10, phases=[Phase.generate])
@given(
    positions=st.lists(st.integers(0, N_GENES - 1), min_size=1, unique=True),
    how=st.sampled_from(["positions", "names", "mask", "column", "slice"]),
    rows=st.sampled_from([slice(None), slice(5, 40, 3), np.arange(N_ROWS) % 3 == 0, ["cell 4", "cell 9"], []]),
)
def test_a_panel_is_what_anndata_gives(dataset, positions, how, rows):
    genes = written(positions, how)
    of_anndata = np.arange(N_GENES)[genes] if how == "slice" else genes  # AnnData has bugs with slices from the end
    wanted, panel = ADATA[rows, of_anndata], dataset[rows, genes]
    assert (panel.shape, panel.n_vars, panel.var_names.tolist()) == (
        wanted.shape,
        wanted.n_vars,
        wanted.var_names.tolist(),
    )
    check_adata(panel.to_adata(), wanted)
    for same in (
        dataset[rows][:, genes],
        dataset[:, genes][rows],
        dataset[rows, genes][:, :],
        dataset[:, :][rows, genes],
    ):
        check_adata(same.to_adata(), wanted)
    fewer = list(wanted.var_names[::-2])
    check_adata(panel[:, fewer].to_adata(), wanted[:, fewer])
    pd.testing.assert_frame_equal(panel.var, wanted.copy().var, check_index_type=False)
    assert len(panel) == 0 or panel.take(0).X.shape == (1, len(wanted.var_names))


def test_one_gene_needs_no_list(dataset):
    for one in ("gene 7", 7, np.int64(7)):
        check_adata(dataset[:, one].to_adata(), ADATA[:, one])


def test_a_panel_is_a_view_and_knows_its_dataset(dataset):
    panel = dataset[:, SOME]
    assert isinstance(panel, zl.View)
    assert panel.whole is panel[:10].whole is panel[:, :2].where("lane == 1").whole is dataset
    assert panel.row_numbers.tolist() == list(range(N_ROWS))
    assert dataset.n_vars == N_GENES
    assert repr(panel).startswith(f"View with n_obs x n_vars = 60 x 4 of the 60 x 30 of {dataset.url}\n")
    assert repr(panel[:10]).startswith(f"View with n_obs x n_vars = 10 x 4 of the 60 x 30 of {dataset.url}\n")
    assert [part.shape for part in panel.split([0.5, 0.5])] == [(30, 4), (30, 4)]
    assert panel.rows_of("passed").mask().tolist() == ADATA.obs["passed"].tolist()
    assert panel.rows_of(dataset[3:5]).mask().sum() == 2
    np.testing.assert_array_equal(
        dense(panel.read_rows(np.array([5, 2]), x="layers/dense")), ADATA[[5, 2], SOME].layers["dense"]
    )


@pytest.mark.parametrize(
    ("genes", "message"),
    [
        (["gene 3", "gene 3"], "lists 'gene 3' more than once"),
        (["gene 3", "gone"], "1 of 2 genes are not in var of"),
        ([], "selects no gene"),
        (slice(7, 7), "selects no gene"),
        (slice("gene 1", None), "a slice of genes must hold whole numbers"),
        ([True, False], "a mask over all 30 genes of var of"),
        (pd.Series(ADATA.var["chosen"][::-1]), "a mask of other genes than var of .*value 0 is that of 'gene 29'"),
        (30, "gene 30 does not exist"),
        ({"gene 3"}, "genes must be a list, because it orders"),
        (None, "genes must be a slice, a mask, a list of positions or of names"),
    ],
)
def test_genes_that_cannot_be_a_panel(dataset, genes, message):
    with pytest.raises(OptionError, match=message):
        dataset[:, genes]


def test_what_a_panel_lacks_is_said(dataset):
    panel = dataset[:, SOME]
    for genes, message in {
        "gene 1": r"1 of 1 genes are not in the panel of 4 genes of var of .*names such as 'gene 20', 'gene 3'",
        4: r"the panel of 4 genes of var of .* has genes 0 to 3",
        tuple(ADATA.var["chosen"]): r"a mask over all 4 genes of the panel of 4 genes",
    }.items():
        with pytest.raises(OptionError, match=message):
            panel[:, genes]
    with pytest.raises(OptionError, match=r"rows and genes: write dataset\[rows, genes\]"):
        dataset[1:2, SOME, 3]
    with pytest.raises(OptionError, match="row by row"):
        dataset["cell 3", SOME]


# ------------------------------------------------------------------------------------------------ loaders


def same_epochs(found: zl.Loader, wanted: zl.Loader) -> None:
    """Compares two loaders minibatch by minibatch, with their states."""
    assert found.state_dict() == wanted.state_dict()
    for one, other in zip(found, wanted, strict=True):
        assert one.index.tolist() == other.index.tolist()
        assert found.state_dict() == wanted.state_dict()
        for name in one.x if isinstance(one.x, dict) else [None]:
            x, y = (each.x if name is None else each.x[name] for each in (one, other))
            assert type(x) is type(y)
            np.testing.assert_array_equal(dense(x), dense(y))
            if isinstance(x, ad.AnnData):
                pd.testing.assert_frame_equal(x.var, y.var)


@pytest.mark.every(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transforms", [[], [LOG]], ids=["counts", "logs"])
def test_a_loader_of_a_panel_has_its_columns(dataset, layout, transforms):
    options = {**SIZES, "layout": layout, "transforms": transforms}
    rows = dataset.where("lane != 2")
    for x in ("X", "raw/X", ["layers/dense", "X", "raw/X"]):
        panel, whole = (zl.Loader(each, x=x, **options) for each in (rows[:, SOME], rows))
        for one, other in zip(panel, whole, strict=True):
            for name in x if isinstance(x, list) else [x]:
                found, every = (each.x[name] if isinstance(x, list) else each.x for each in (one, other))
                names = ADATA.raw.var_names if name == "raw/X" else ADATA.var_names
                np.testing.assert_array_equal(dense(found), dense(every)[:, names.get_indexer(SOME)])
    fewer = zl.Loader(dataset[:, SOME][:, ::-1][:, [2, 0]], **options)
    same_epochs(fewer, zl.Loader(dataset[:, ["gene 3", "gene 4"]], **options))
    sliced = zl.Loader(dataset[:, slice(8, None, -2)], **options)
    same_epochs(sliced, zl.Loader(dataset[:, [8, 6, 4, 2, 0]], **options))
    if not transforms:
        for minibatch in zl.Loader(dataset[:, SOME], **options):
            np.testing.assert_array_equal(dense(minibatch.x), dense(ADATA[:, SOME].X)[minibatch.index.numpy()])


def test_tokens_sets_and_controls_of_a_panel(dataset):
    vocabulary = {"<pad>": 0, "<cls>": 1, **{name: 2 + number for number, name in enumerate(ADATA.var_names)}}
    options = {"batch_size": 8, "seed": 1, "sampling": zl.CellSets("donor", set_size=4)}
    options["controls"] = zl.MatchedControls("passed", match="donor")
    options["tokens"] = zl.tokenizers.ScGPT(vocabulary, max_length=6)
    found, wanted = zl.Loader(dataset[:, SOME], **options), zl.Loader(dataset, **options)
    chosen = ADATA.var_names.get_indexer(SOME)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens["lengths"].tolist() == (1 + np.count_nonzero(dense(one.x), axis=1)).tolist()
        assert set(one.tokens["input_ids"].unique().tolist()) <= {0, 1, *(2 + chosen).tolist()}
        assert repr(one.group) == repr(other.group)
        np.testing.assert_array_equal(dense(one.control.x), dense(other.control.x)[:, chosen])
    with pytest.raises(OptionError, match="of the panel"):
        zl.Loader(dataset[:, SOME], transforms=[LOG], tokens=options["tokens"])


def test_a_run_goes_on_with_other_genes(dataset):
    """The order and the states are those of the rows, whichever genes are chosen."""
    for rows in (dataset, dataset.where("passed")):
        panel = rows[:, SOME]
        assert panel.fingerprint == rows.fingerprint == panel[:, :2].fingerprint
        loader, other = zl.Loader(panel, **SIZES), zl.Loader(rows, **SIZES)
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        same_epochs(zl.Loader(panel, x=None, **SIZES), zl.Loader(rows, x=None, **SIZES))
        ranks = [zl.Loader(panel, rank=rank, world_size=2, **SIZES) for rank in range(2)]
        seen = np.concatenate([minibatch.row for rank in ranks for minibatch in rank])
        np.testing.assert_array_equal(np.sort(seen), np.arange(len(rows)))
    assert_resumes_anywhere(lambda: zl.Loader(dataset[:, SOME], **SIZES), every=4)


def test_a_panel_is_pickled(folder, tmp_path):
    shutil.copytree(folder / "a.zarr", tmp_path / "a.zarr")
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    for panel in (dataset[:, SOME], dataset.where("passed")[:, SOME], dataset[:, :]):
        again = pickle.loads(pickle.dumps(panel))
        assert (type(again), again.shape, again.fingerprint) == (zl.View, panel.shape, panel.fingerprint)
        assert again.var_names.equals(panel.var_names)
        same_epochs(zl.Loader(again, **SIZES), zl.Loader(panel, **SIZES))
    pickled = pickle.dumps(dataset[:, SOME])
    write_store(source(seed=5), tmp_path / "a.zarr", tmp_path, overwrite=True)
    with pytest.raises(StoreChangedError, match="has changed since it was opened"):
        pickle.loads(pickled)


def test_statistics_of_a_panel_are_those_of_its_genes(dataset):
    positions = ADATA.var_names.get_indexer(SOME)
    for x, transforms in (("X", []), ("X", [LOG]), ("layers/dense", []), ("raw/X", [])):
        whole = dataset[:40].gene_statistics(x, transforms=transforms, progress=False)
        at = ADATA.raw.var_names.get_indexer(SOME) if x == "raw/X" else positions
        found = dataset[:40, SOME].gene_statistics(x, transforms=transforms, progress=False)
        pd.testing.assert_frame_equal(found.to_frame(), whole.to_frame().iloc[at])
    scaled = [LOG, zl.transforms.Scale(dataset[:, SOME].gene_statistics(transforms=[LOG], progress=False))]
    next(iter(zl.Loader(dataset[:, SOME], transforms=scaled, layout="dense", **SIZES)))


def test_a_panel_is_warmed_like_its_dataset(folder, tmp_path):
    dataset = zl.open_dataset(folder / "a.zarr", cache=tmp_path / "cache")
    panel = dataset[:, SOME]
    zl.warm(panel)
    offline = zl.open_dataset(folder / "a.zarr", cache=tmp_path / "cache", offline=True)[:, SOME]
    same_epochs(zl.Loader(offline, **SIZES), zl.Loader(panel, **SIZES))


def test_a_file_and_raw_that_lacks_genes(tmp_path):
    adata = ADATA.copy()
    adata.raw = counts(N_ROWS, 4)
    adata.write_h5ad(tmp_path / "a.h5ad")
    panel = zl.open_dataset(tmp_path / "a.h5ad")[:, SOME]
    check_adata(panel.to_adata(), ADATA[:, SOME])
    next(iter(zl.Loader(panel, **SIZES)))
    with pytest.raises(OptionError, match="3 of 4 genes are not in raw/var"):
        zl.Loader(panel, x="raw/X", **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("join", ["inner", "outer", ["gene 3", "gone", "gene 29", "gene 12"]], ids=str)
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_a_panel_of_joined_stores(folder, tmp_path, join, layout):
    """Genes that a store lacks are zeros."""
    other = source(seed=7)[:, 9:][:, ::-1].copy()
    other.obs_names = [f"other {row}" for row in range(N_ROWS)]
    write_store(other, tmp_path / "b.zarr", tmp_path)
    dataset = zl.open_dataset([folder / "a.zarr", tmp_path / "b.zarr"], join=join)
    sources = [ad.AnnData(each.X, each.obs, each.var) for each in (ADATA, other)]
    if not isinstance(join, str):
        listed = ad.AnnData(scipy.sparse.csr_matrix((0, len(join))), var=pd.DataFrame(index=join))
        wanted = ad.concat([*sources, listed], join="outer")[:, join]
    else:
        wanted = ad.concat(sources, join=join)
    assert dataset.var_names.tolist() == wanted.var_names.tolist()
    for genes in ([3, 0], dataset.var_names[1:][::-1], slice(None, None, 2)):
        panel = dataset[:, genes]
        assert panel.var_names.tolist() == wanted[:, genes].var_names.tolist() == panel.var.index.tolist()
        assert f"{panel.n_vars} of the {2 * N_ROWS} x {dataset.n_vars} of" in repr(panel)
        expected = dense(wanted[:, genes].X)
        np.testing.assert_array_equal(dense(panel.take([70, 3, 119]).X), expected[[70, 3, 119]])
        for minibatch in zl.Loader(panel, layout=layout, **SIZES):
            np.testing.assert_array_equal(dense(minibatch.x), expected[minibatch.index.numpy()])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a join that loses genes has warned once
            assert pickle.loads(pickle.dumps(panel)).var_names.equals(panel.var_names)


@pytest.mark.parametrize("transforms", [(), (LOG,)], ids=["counts", "logarithms"])
def test_highly_variable_genes_of_a_panel_are_chosen_among_its_genes(dataset, transforms):
    flavor = "seurat" if transforms else "cell_ranger"
    options = {"flavor": flavor, "transforms": transforms, "progress": False, "n_bins": 3}
    names = dataset.var_names[5:28]
    found = dataset[:, names].highly_variable_genes(4, **options)
    assert found.index.tolist() == names.tolist()
    assert not found.equals(dataset.highly_variable_genes(4, **options).loc[names])
