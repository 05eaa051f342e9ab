"""Datasets of MuData: matrices and obs columns of modalities, and the rows that each of them has. mudata is the oracle.

The modalities share some rows: rna has the first ones, prot (dense) the last ones, in another order, and atac few.
"""

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
import zarr
from helpers import counts, dense, of_genes
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import FormatError, OptionError
from zloader.dataset.elements import frame_of, obs_of, path_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mudata = pytest.importorskip("mudata", reason="mudata is not installed: pip install mudata")

N_ROWS, MATRICES = 90, ["rna:X", "prot:X", "atac:X"]


def modalities() -> dict[str, ad.AnnData]:
    rna, prot, atac = counts(70, 30, seed=1), counts(60, 6, seed=2), counts(9, 50, seed=3)
    prot.X = prot.X.toarray()
    rna.layers["counts"] = rna.X.copy()
    order = np.random.default_rng(0).permutation(60)
    for adata, prefix, rows in ((rna, "gene", range(70)), (prot, "prot", 30 + order), (atac, "peak", range(5, 86, 9))):
        adata.obs_names = [f"cell {row}" for row in list(rows)[: adata.n_obs]]
        adata.var_names = [f"{prefix} {each}" for each in range(adata.n_vars)]
        adata.obs = adata.obs[["cell_type", "donor", "n_counts", "passed", "lane"]].copy()
    return {"rna": rna, "prot": prot, "atac": atac}


def quiet_mudata(parts: dict[str, ad.AnnData]) -> Any:
    """A MuData. Versions before 0.4 warn that they copy columns, and copy them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = mudata.MuData(parts)
        made.obs = pd.DataFrame({"batch": pd.Categorical(["x", "y", "z"] * (made.n_obs // 3))}, index=made.obs_names)
        return made


@pytest.fixture(scope="module")
def mdata() -> Any:
    return quiet_mudata(modalities())


@pytest.fixture(scope="module")
def folder(mdata: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mudata")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mdata.write_h5mu(folder / "a.h5mu")
        mdata.write_zarr(folder / "a.zarr")
    return folder


def rows_of(mdata: Any, matrix: str, names: pd.Index) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a matrix with these obs names, and which of them it has."""
    modality, _, kind = matrix.partition(":")
    adata = mdata.mod[modality]
    has = names.isin(adata.obs_names)
    stored = adata.X if kind == "X" else adata.layers[kind.removeprefix("layers/")]
    values = np.zeros((len(names), adata.n_vars), np.float32)
    positions = adata.obs_names.get_indexer(names[has])
    values[has] = stored[positions] if isinstance(stored, np.ndarray) else stored[positions].toarray()
    return values, has


def check(minibatch: zl.Minibatch, mdata: Any, genes: dict[str, list[int]] | None = None) -> list[int]:
    names = mdata.obs_names[minibatch.index.numpy()]
    for matrix, x in minibatch.x.items():
        values, has = rows_of(mdata, matrix, names)
        np.testing.assert_array_equal(
            dense(x), values[:, (genes or {}).get(f"{matrix.partition(':')[0]}:X", slice(None))]
        )
        np.testing.assert_array_equal(minibatch.present[matrix.partition(":")[0]].numpy(), has)
    return minibatch.index.tolist()


def test_names() -> None:
    assert path_of("rna:layers/a:b") == "mod/rna/layers/a:b"
    assert (path_of("layers/a:b"), frame_of("layers/a:b"), obs_of("layers/a:b")) == ("layers/a:b", "var", "obs")
    assert (frame_of("a:b:raw/X"), obs_of("a:b:raw/X")) == ("mod/a:b/raw/var", "mod/a:b/obs")


@pytest.mark.every(16)
@pytest.mark.parametrize("name", ["a.h5mu", "a.zarr"])
@pytest.mark.parametrize("form", [None, "raw", "compact"])
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_minibatches_are_those_of_mudata(
    folder: Path, mdata: Any, tmp_path: Path, name: str, form: Any, layout: Any
) -> None:
    cache = None if form is None else zl.Cache(tmp_path / "cache", form=form)
    dataset = zl.open_dataset(folder / name, cache=cache)
    assert (dataset.n_obs, dataset.n_vars, dataset.modalities) == (N_ROWS, 86, ["rna", "prot", "atac"])
    for genes in (None, {"prot:X": [4, 1], "rna:X": [29, 3, 7]}):
        loader = zl.Loader(of_genes(dataset, genes), x=MATRICES, batch_size=16, fetch_factor=2, layout=layout)
        for _ in range(2):
            seen = [row for minibatch in loader for row in check(minibatch, mdata, genes)]
            assert sorted(seen) == list(range(N_ROWS))


def test_the_rows_of_a_fetch_may_all_be_absent(folder: Path, mdata: Any, tmp_path: Path) -> None:
    for cache in (None, zl.Cache(tmp_path / "cache", form="compact")):
        dataset = zl.open_dataset(folder / "a.zarr", cache=cache)
        absent = dataset.where(~dataset.present("atac"))
        for layout in ("dense", "csr", "packed"):
            options: dict[str, Any] = {"batch_size": 8, "fetch_factor": 1, "shuffle": False, "layout": layout}
            for minibatch in zl.Loader(absent, x=["atac:X", "rna:layers/counts"], **options):
                assert not minibatch.present["atac"].any()
                assert not dense(minibatch.x["atac:X"]).any()
                if layout != "packed":
                    check(minibatch, mdata)


def test_transforms_are_those_of_a_modality(folder: Path, mdata: Any) -> None:
    dataset = zl.open_dataset(folder / "a.h5mu")
    transforms = {"rna:X": [zl.transforms.LogNormalize(1e4)]}
    for minibatch in zl.Loader(dataset, x=["prot:X", "rna:X"], transforms=transforms, batch_size=20, layout="dense"):
        names = mdata.obs_names[minibatch.index.numpy()]
        raw, _ = rows_of(mdata, "rna:X", names)
        total = raw.sum(axis=1, keepdims=True)
        wanted = np.log1p(raw / np.where(total, total, 1) * 1e4)
        np.testing.assert_allclose(minibatch.x["rna:X"].numpy(), wanted, rtol=1e-5)
        np.testing.assert_array_equal(minibatch.x["prot:X"].numpy(), rows_of(mdata, "prot:X", names)[0])


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["a.h5mu", "a.zarr"])
@pytest.mark.parametrize("cached", [False, True])
def test_obs_of_the_whole_and_of_modalities(folder: Path, mdata: Any, tmp_path: Path, name: str, cached: bool) -> None:
    for _ in range(2):  # the second reads what the first has kept
        dataset = zl.open_dataset(folder / name, cache=tmp_path / "cache" if cached else None)
        assert set(dataset.obs_columns) == {
            "batch",
            *(f"{each}:{column}" for each in mdata.mod for column in mdata.mod[each].obs),
        }
        obs = dataset.obs()
        assert obs["batch"].astype(str).tolist() == mdata.obs["batch"].astype(str).tolist()
        for modality, adata in mdata.mod.items():
            for column, values in adata.obs.items():
                wanted = values.astype(object).reindex(mdata.obs_names)
                found = obs[f"{modality}:{column}"].astype(object)
                assert found[~found.isna()].to_dict() == wanted[~wanted.isna()].to_dict(), (modality, column)
        columns = ["rna:cell_type", "prot:n_counts", "rna:lane", "rna:donor", "batch"]
        for minibatch in zl.Loader(dataset, x=None, obs=columns, batch_size=32):
            names = mdata.obs_names[minibatch.index.numpy()]
            for column in columns:
                modality, _, plain = column.rpartition(":")
                frame = mdata.mod[modality].obs if modality else mdata.obs
                wanted, found = frame[plain].astype(object).reindex(names), minibatch.obs[column].numpy()
                labels = dataset.labels(column)
                if isinstance(labels, pd.Index):
                    assert [None if code < 0 else labels[code] for code in found] == [
                        None if pd.isna(each) else each for each in wanted
                    ]
                else:
                    np.testing.assert_array_equal(found.astype(float), wanted.astype(float))


def test_rows_are_chosen_by_modalities(folder: Path, mdata: Any) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    both = dataset.where(dataset.present("rna") & dataset.present("prot"))
    assert both.n_obs == len(mdata.mod["rna"].obs_names.intersection(mdata.mod["prot"].obs_names)) == 40
    assert both.present("rna").all()
    labelled = dataset.where("`rna:cell_type` == 'a'")
    assert labelled.n_obs == (mdata.mod["rna"].obs["cell_type"] == "a").sum()
    assert {row for minibatch in zl.Loader(labelled, x=["rna:X"], batch_size=5) for row in check(minibatch, mdata)}
    statistics = dataset.where(dataset.present("rna")).gene_statistics("rna:X", progress=False)
    np.testing.assert_allclose(statistics.mean, np.asarray(mdata.mod["rna"].X.mean(axis=0)).ravel(), rtol=1e-5)


def test_a_modality_of_a_store_opens_by_itself(folder: Path, mdata: Any) -> None:
    taken = zl.open_dataset(folder / "a.zarr" / "mod" / "rna").take([5, 3])
    wanted = mdata.mod["rna"][[5, 3]]
    np.testing.assert_array_equal(np.asarray(taken.to_df()), np.asarray(wanted.to_df()))
    assert taken.obs_names.tolist() == wanted.obs_names.tolist()


@pytest.mark.slow
def test_several_stores_and_pickling(folder: Path, mdata: Any, tmp_path: Path) -> None:
    both = pickle.loads(pickle.dumps(zl.open_dataset([folder / "a.h5mu", folder / "a.zarr"], join="inner")))
    assert (both.n_obs, both.n_vars) == (2 * N_ROWS, 86)
    loader = zl.Loader(both, x=["rna:X", "prot:X"], batch_size=16, layout="dense", sampling=zl.BlockShuffling(5))
    seen = []
    for minibatch in loader:
        seen += minibatch.index.tolist()
        wanted, has = rows_of(mdata, "prot:X", mdata.obs_names[minibatch.index.numpy() % N_ROWS])
        np.testing.assert_array_equal(minibatch.x["prot:X"].numpy(), wanted)
        np.testing.assert_array_equal(minibatch.present["prot"].numpy(), has)
    assert sorted(seen) == list(range(2 * N_ROWS))
    counts(9, 5).write_h5ad(tmp_path / "plain.h5ad")
    with pytest.raises((OptionError, FormatError)):
        zl.Loader(zl.open_dataset([folder / "a.h5mu", tmp_path / "plain.h5ad"], join="outer"), x=["rna:X"])


def test_a_state_resumes_in_another_loader(folder: Path) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    loader = zl.Loader(dataset, x=["rna:X", "prot:X"], batch_size=16)
    minibatches = iter(loader)
    first = [next(minibatches) for _ in range(2)]
    other = zl.Loader(dataset, x=["prot:X"], batch_size=16)
    other.load_state_dict(loader.state_dict())
    rest = [row for minibatch in other for row in minibatch.index.tolist()]
    assert sorted(rest + [row for minibatch in first for row in minibatch.index.tolist()]) == list(range(N_ROWS))


def test_controls_and_devices_carry_presence(folder: Path, mdata: Any) -> None:
    dataset = zl.open_dataset(folder / "a.zarr")
    controls = zl.MatchedControls("batch == 'x'", match=[])
    minibatch = next(iter(zl.Loader(dataset, x=["prot:X"], controls=controls, batch_size=16)))
    check(minibatch.control, mdata)
    moved = minibatch.to("cpu")
    assert moved.present["prot"].equal(minibatch.present["prot"])
    assert zl.Loader(dataset, x=None, obs=["batch"]).batch_size  # without x there are no modalities
    assert next(iter(zl.Loader(dataset, x=None, obs=["batch"]))).present is None


def test_info_counts_the_reads_of_a_modality(folder: Path) -> None:
    for name in ("a.h5mu", "a.zarr"):
        done = CliRunner().invoke(app, ["info", str(folder / name), "--x", "rna:X"])
        assert done.exit_code == 0, done.output
        assert "rna:X: csr_matrix, 70 x 30" in done.output
        assert "atac:X: csr_matrix, 9 x 50" in done.output
        assert "Epoch over rna:X" in done.output
    assert "mod: 'atac', 'prot', 'rna'" in repr(zl.open_dataset(folder / "a.zarr"))


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda dataset: zl.Loader(dataset), "there is no matrix 'X' .* there are: rna:X, rna:layers/counts, prot:X"),
        (lambda dataset: zl.Loader(dataset, x="rma:X"), "there is no matrix 'rma:X'.*rna:X"),
        (lambda dataset: dataset[:, ["gene 1"]], r"choose those of each matrix, as in dataset\[:, {'rna:X': genes}\]"),
        (lambda dataset: dataset[:, {"rma:X": [1]}], "a choice for 'rma:X', but the matrices are: rna:X.*'rna:X'"),
        (lambda dataset: dataset[:, {"rna": [1]}], "a choice for 'rna', but the matrices are: rna:X"),
        (lambda dataset: dataset[:, {"rna:X": ["prot 1"]}], "mod/rna/var"),
        (lambda dataset: dataset[:, {"rna:X": [1], "rna:layers/counts": [2]}], "two choices for mod/rna/var"),
        (lambda dataset: dataset.take([3]), r"rna, prot, atac.*zl.open_dataset\('URL/mod/rna'\)"),
        (lambda dataset: dataset.to_adata(), "an AnnData has no modalities"),
        (lambda dataset: dataset.present("spatial"), "modality must be one of"),
        (lambda dataset: dataset.gene_statistics("rna:X"), r"lacks 20 of the 90 rows.*dataset.present\('rna'\)"),
        (lambda dataset: dataset.obs_column("rna:nothing"), "there is no obs column 'rna:nothing'"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, act: Any, says: str) -> None:
    with pytest.raises(zl.ZloaderError, match=says):
        act(zl.open_dataset(folder / "a.zarr"))


def _remove(root: Any) -> None:
    del root["obsmap/prot"]


def _beyond(root: Any) -> None:
    root["obsmap/prot"][3] = 61


def _twice(root: Any) -> None:
    root["obsmap/prot"][3] = root["obsmap/prot"][-1]


def _short(root: Any) -> None:
    del root["obsmap/prot"]
    root.create_array("obsmap/prot", data=np.ones(5, np.uint32))


def _other_axis(root: Any) -> None:
    root.attrs["axis"] = 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_remove, r"does not say which rows its modality 'prot' has .*mdata.update\(\)"),
        (_beyond, "row 3 is row 61 of 60 rows"),
        (_twice, "row [0-9]+ of the modality is [02] rows of the whole"),
        (_short, r"has uint32 \(5,\)"),
        (_other_axis, "share genes .*open them one by one"),
    ],
)
def test_a_damaged_map_of_rows_is_an_error(folder: Path, tmp_path: Path, damage: Any, says: str) -> None:
    shutil.copytree(folder / "a.zarr", tmp_path / "a.zarr")
    (tmp_path / "a.zarr/.zmetadata").unlink(missing_ok=True)
    damage(zarr.open_group(tmp_path / "a.zarr", mode="r+", use_consolidated=False))
    with pytest.raises(FormatError, match=says):
        list(zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), x=["prot:X"]))


def test_a_modality_with_all_rows_needs_no_map(tmp_path: Path) -> None:
    parts = {"rna": counts(30, 8, seed=4), "prot": counts(30, 3, seed=5)}
    parts["prot"].var_names = ["p1", "p2", "p3"]
    made = quiet_mudata(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.write_h5mu(tmp_path / "a.h5mu")
    dataset = zl.open_dataset(tmp_path / "a.h5mu")
    assert dataset.store.row_of("mod/rna/X") is None
    assert sorted(row for m in zl.Loader(dataset, x=["rna:X", "prot:X"], batch_size=7) for row in check(m, made)) == [
        *range(30)
    ]
    assert dataset.present("prot").all()
