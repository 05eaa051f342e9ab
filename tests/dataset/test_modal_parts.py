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
from zloader.dataset import obsm_arrays

mudata = pytest.importorskip("mudata", reason="mudata is not installed: pip install mudata")
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
        monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 0)
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


@pytest.mark.parametrize(
    ("genes", "chosen"),
    [
        ({"rna:X": ["CD8A", "CD4"]}, {"rna": [2, 1], "prot": [0, 1], "atac": [0, 1, 2]}),
        ({"rna:X": slice(1, 3), "prot:X": np.array([False, True])}, {"rna": [1, 2], "prot": [1], "atac": [0, 1, 2]}),
    ],
    ids=["names", "a slice and a mask"],
)
def test_genes_of_modalities(folder: Path, made: Any, genes: Any, chosen: dict[str, list[int]]) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    panel = pickle.loads(pickle.dumps(dataset[:, genes]))
    assert (panel.modalities, panel.shape, panel.var_names.tolist()) == (
        dataset.modalities,
        dataset.shape,
        dataset.var_names.tolist(),
    )
    parts = [f"{each}:X" for each in chosen]
    for part, (modality, positions) in zip(parts, chosen.items(), strict=True):
        kinds = [f"{modality} {GENES[modality][at]}" for at in positions]
        assert panel.matrices.var_of(part)["kind"].tolist() == kinds
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


def test_a_panel_of_a_panel_and_the_order_of_rows(folder: Path, made: Any) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    panel = dataset[:, {"rna:X": ["CD4", "CD3E"], "prot:X": ["CD19"]}]
    narrower = panel[:, {"rna:X": ["CD3E"]}]
    assert [narrower.matrices.gene_names(f"{each}:X").tolist() for each in ("rna", "prot")] == [["CD3E"], ["CD19"]]
    with pytest.raises(OptionError, match="1 of 1 genes are not in the panel of 2 genes of mod/rna/var"):
        panel[:, {"rna:X": ["CD8A"]}]
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
    several = zl.open_dataset([folder / "a.zarr", folder / "a.h5mu"])[:, {"rna:X": ["CD4"], "prot:X": ["CD19"]}]
    minibatch = next(iter(zl.Loader(several, x=["rna:X", "prot:X"], batch_size=16)))
    assert [x.shape for x in minibatch.x.values()] == [(16, 1), (16, 1)]
