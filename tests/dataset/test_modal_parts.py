"""obsm of modalities, and genes chosen from several. mudata is the oracle."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers import dense

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError
from zloader.dataset import paged_columns

mudata = pytest.importorskip("mudata", reason='mudata is not installed: pip install "zloader[mudata]"')
ROWS = {"rna": np.arange(70), "prot": 20 + np.random.default_rng(0).permutation(60), "atac": np.arange(3, 80, 11)}
GENES = {"rna": ["CD3E", "CD4", "CD8A", "MS4A1"], "prot": ["CD4", "CD19"], "atac": ["chr1:1-9", "chr2:5-7", "rna:CD8A"]}


@pytest.fixture(scope="module")
def made() -> Any:
    rng, parts = np.random.default_rng(1), {}
    for name, rows in ROWS.items():
        x = sp.csr_matrix(rng.poisson(1.0, (len(rows), len(GENES[name]))).astype("float32"))
        var = pd.DataFrame({"kind": [f"{name} {gene}" for gene in GENES[name]]}, index=GENES[name])
        adata = ad.AnnData(x, obs=pd.DataFrame(index=[f"c{row}" for row in rows]), var=var)
        adata.obsm["X_pca"] = rng.random((len(rows), 3)).astype("float32")
        adata.obsm["numbers"] = rng.integers(1, 9, (len(rows), 2, 2))
        parts[name] = adata
    parts["rna"].raw = parts["rna"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = mudata.MuData(parts)
        made.obs["batch"] = ["a", "b"] * 40
        made.obsm["X_wnn"] = rng.random((80, 2))
    return made


@pytest.fixture(scope="module")
def folder(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.write_h5mu(folder / "a.h5mu")
    zl.convert(folder / "a.h5mu", folder / "a.zarr", progress=False)
    return folder


def of_rows(made: Any, name: str, names: pd.Index) -> np.ndarray:
    """Some rows of an obsm array by mudata, with zeros where the modality lacks them."""
    modality, _, key = name.rpartition(":")
    adata = made[modality] if modality else made
    found = np.zeros((len(names), *adata.obsm[key].shape[1:]), adata.obsm[key].dtype)
    has = names.isin(adata.obs_names)
    found[has] = adata.obsm[key][adata.obs_names.get_indexer(names[has])]
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["a.h5mu", "a.zarr"])
@pytest.mark.parametrize("cached", [False, True, "paged"])
def test_obsm_of_modalities(
    folder: Path, made: Any, tmp_path: Path, name: str, cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached == "paged":
        monkeypatch.setattr(paged_columns, "_MOST_WHOLE", 0)
        monkeypatch.setattr(paged_columns, "_LEAST_OF_STORE", 0)
    obsm = ["rna:X_pca", "prot:numbers", "atac:X_pca", "X_wnn"]
    for turn in range(2):  # the second reads what the first has kept
        dataset = zl.open_dataset(folder / name, cache=tmp_path / "cache" if cached else None)
        assert set(obsm) <= set(dataset.obsm_names)
        paged = dataset.observations.arrays.all_paged(obsm, zl.FetchOptions())
        if turn == 0:
            assert set(paged) == (set(obsm) if cached == "paged" else set())
        seen = []
        for minibatch in zl.Loader(dataset, x=["prot:X"], obsm=obsm, batch_size=16):
            names = made.obs_names[minibatch.index.numpy()]
            for each in obsm:
                wanted = of_rows(made, each, names)
                assert minibatch.obsm[each].numpy().dtype == wanted.dtype
                np.testing.assert_array_equal(minibatch.obsm[each].numpy(), wanted)
            assert set(minibatch.present) == {"prot", "rna", "atac"}
            for modality, has in minibatch.present.items():
                assert has.tolist() == names.isin(made[modality].obs_names).tolist()
            seen += minibatch.index.tolist()
        assert sorted(seen) == list(range(80))
        for each in obsm:
            np.testing.assert_array_equal(dataset.obsm_array(each), of_rows(made, each, made.obs_names))
    view = dataset.where(dataset.present("prot"))
    rows = made.obs_names[view.row_numbers]
    np.testing.assert_array_equal(view.obsm_array("rna:X_pca"), of_rows(made, "rna:X_pca", rows))


def test_obsm_alone_and_of_several_stores(folder: Path, made: Any) -> None:
    both = zl.open_dataset([folder / "a.h5mu", folder / "a.zarr"])
    for minibatch in zl.Loader(both, x=None, obsm=["atac:X_pca"], batch_size=32):
        names = made.obs_names[minibatch.index.numpy() % 80]
        np.testing.assert_array_equal(minibatch.obsm["atac:X_pca"].numpy(), of_rows(made, "atac:X_pca", names))
        assert list(minibatch.present) == ["atac"]
    minibatch = next(iter(zl.Loader(both, x=None, obsm=["X_wnn"])))
    assert minibatch.present is None
    with pytest.raises(MissingColumnError, match=r"no obsm 'rna:X_pcb' in .*'rna:X_pca'"):
        zl.Loader(both, x=None, obsm=["rna:X_pcb"])


def test_obsm_in_memory(folder: Path, made: Any) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    for taken in (dataset.take([70, 5, 33, 21]), dataset.to_adata()):
        np.testing.assert_array_equal(taken.obsm["X_wnn"], of_rows(made, "X_wnn", taken.obs_names))
        for modality, adata in taken.mod.items():
            wanted = made[modality][adata.obs_names]
            np.testing.assert_array_equal(adata.obsm["X_pca"], wanted.obsm["X_pca"])
            np.testing.assert_array_equal(adata.obsm["numbers"], wanted.obsm["numbers"])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("genes", "chosen"),
    [
        (["rna:MS4A1", "CD3E", "CD19"], {"rna": [3, 0], "prot": [1]}),
        (["prot:CD4"], {"prot": [0]}),
        ("CD19", {"prot": [1]}),
        (["chr2:5-7", "atac:chr1:1-9", "rna:CD4"], {"rna": [1], "atac": [1, 0]}),
        ({"rna": ["CD8A", "CD4"]}, {"rna": [2, 1], "prot": [0, 1], "atac": [0, 1, 2]}),
        ({"rna": slice(1, 3), "prot": np.array([False, True])}, {"rna": [1, 2], "prot": [1], "atac": [0, 1, 2]}),
    ],
)
def test_genes_of_modalities(folder: Path, made: Any, genes: Any, chosen: dict[str, list[int]]) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    panel = pickle.loads(pickle.dumps(dataset[:, genes]))
    names = [GENES[modality][position] for modality, positions in chosen.items() for position in positions]
    assert panel.modalities == [each for each in ROWS if each in chosen]
    assert (panel.shape, panel.var_names.tolist()) == ((80, len(names)), names)
    assert repr(panel).startswith(f"View with n_obs x n_vars = 80 x {len(names)} of ")
    kinds = [f"{modality} {GENES[modality][at]}" for modality, positions in chosen.items() for at in positions]
    parts = [f"{each}:X" for each in chosen]
    assert [name for name in panel.matrix_names if name.endswith(":X")] == parts
    assert panel.var.index.tolist() == names
    assert [panel.matrices.var_of(part)["kind"].tolist() for part in parts] == [
        [kind for kind in kinds if kind.startswith(part.removesuffix("X").replace(":", " "))] for part in parts
    ]
    for view in (panel, panel.where("batch == 'a'"), panel.split([0.5, 0.5])[1]):
        seen = []
        for minibatch in zl.Loader(view, x=parts, layout="dense", batch_size=16):
            rows = made.obs_names[minibatch.index.numpy()]
            for modality, positions in chosen.items():
                has = minibatch.present[modality].numpy()
                x = minibatch.x[f"{modality}:X"].numpy()
                np.testing.assert_array_equal(x[has], dense(made[modality][rows[has]].X)[:, positions])
                assert not x[~has].any()
            seen += minibatch.index.tolist()
        assert sorted(seen) == view.row_numbers.tolist()
    present = np.any([dataset.present(each) for each in chosen], axis=0)
    for modality, adata in panel.where(present).to_adata().mod.items():
        wanted = made[modality][adata.obs_names, chosen[modality]]
        assert adata.var_names.tolist() == wanted.var_names.tolist()
        np.testing.assert_array_equal(dense(adata.X), dense(wanted.X))


def test_a_panel_of_a_panel_and_the_order_of_rows(folder: Path, made: Any) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    panel = dataset[:, ["rna:CD4", "CD3E", "CD19"]]
    narrower = panel[:, {"rna": ["CD3E"]}]
    assert (narrower.modalities, narrower.var_names.tolist()) == (["rna", "prot"], ["CD3E", "CD19"])
    with pytest.raises(OptionError, match="no modality has the gene 'CD8A'"):
        panel[:, ["CD8A"]]
    orders = [
        [row for minibatch in zl.Loader(each, x=["rna:X"], seed=3, batch_size=8) for row in minibatch.index.tolist()]
        for each in (dataset, panel, narrower)
    ]
    assert orders[0] == orders[1] == orders[2]
    loader, other = (zl.Loader(each, x=["rna:X"], seed=3, batch_size=8) for each in (dataset, narrower))
    minibatches = iter(loader)
    first = next(minibatches).index.tolist()
    other.load_state_dict(loader.state_dict())
    assert first + [row for minibatch in other for row in minibatch.index.tolist()] == orders[0]
    raw = next(iter(zl.Loader(narrower, x=["rna:raw/X"], layout="dense", batch_size=80, shuffle=False)))
    np.testing.assert_array_equal(raw.x["rna:raw/X"].numpy()[:70], dense(made["rna"].raw.X)[:, [0]])
    several = zl.open_dataset([folder / "a.zarr", folder / "a.h5mu"])[:, ["rna:CD4", "CD19"]]
    assert (several.shape, several.var_names.tolist()) == ((160, 2), ["CD4", "CD19"])


@pytest.mark.parametrize(
    ("genes", "says"),
    [
        (
            ["CD4"],
            r"the gene 'CD4' is in rna, prot: write 'rna:CD4' or 'prot:CD4', or choose by modality, as in .*'rna'",
        ),
        (
            ["rna:CD8A"],
            "the gene 'rna:CD8A' is in atac, rna: write 'atac:rna:CD8A' or 'rna:CD8A', or choose by modality",
        ),
        (["rna:CD3F"], "no modality has the gene 'rna:CD3F'.*'rna:CD3E'"),
        ([0, 1], r"are chosen by name: dataset\[:, \['rna:GENE', ...\]\], or by modality"),
        (np.ones(9, bool), "are chosen by name"),
        (slice(0, 3), "are chosen by name"),
        ([], "are chosen by name"),
        ({"rma": ["CD4"]}, "a choice for 'rma', but the modalities are: rna, prot, atac"),
        ({"rna": ["CD19"]}, "mod/rna/var"),
        (["rna:CD4", "rna:CD4"], "more than once"),
    ],
)
def test_genes_that_cannot_be_chosen(folder: Path, genes: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        zl.open_dataset(folder / "a.zarr")[:, genes]


def test_a_modality_without_genes(folder: Path) -> None:
    panel = zl.open_dataset(folder / "a.zarr")[:, ["CD19"]]
    with pytest.raises(OptionError, match="the view has no genes of mod/rna/var: choose some in dataset"):
        zl.Loader(panel, x=["rna:X"])
