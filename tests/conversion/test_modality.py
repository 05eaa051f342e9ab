"""One modality of a MuData, in .h5mu and Zarr. The oracle is mudata itself."""

from __future__ import annotations

import shutil

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from sources import SMALL, FailingDestination, assert_not_a_store, assert_same, counts, disk_full, files, frame

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import SourceError, StoreError, StoreNotFoundError
from zloader.conversion.convert import convert_to

mudata = pytest.importorskip("mudata")
pytestmark = [
    pytest.mark.any_version,
    pytest.mark.filterwarnings("ignore:From 0.4 .update:FutureWarning", "ignore:Writing zarr v2"),
]


def cite() -> mudata.MuData:
    """RNA of 60 cells and proteins of 40 of them, in another order."""
    names = [f"cell{i}" for i in range(60)]
    rna = ad.AnnData(counts(60, 300), obs=pd.DataFrame({"n": range(60)}, index=names), var=frame(300, "g"))
    rna.layers["two"], rna.obsm["X_pca"] = counts(60, 300, seed=1), np.ones((60, 3))
    some = np.random.default_rng(0).permutation(60)[:40]
    obs = pd.DataFrame({"m": range(40)}, index=[names[i] for i in some])
    adt = ad.AnnData(counts(40, 20, seed=2).toarray(), obs=obs, var=frame(20, "p"))
    made = mudata.MuData({"rna": rna, "adt": adt})
    made.obs["donor"] = pd.Categorical([f"d{i % 3}" for i in range(60)], categories=["d2", "d1", "d0", "unused"])
    made.obs["age"] = pd.array([None if i % 7 == 0 else i for i in range(60)], dtype="Int64")
    made.obs["n"] = "a column that rna has, too"
    return made


@pytest.fixture
def written(tmp_path):
    cite().write(tmp_path / "cite.h5mu")
    cite().write_zarr(tmp_path / "cite.zarr")
    return tmp_path


def source_of(folder, form: str, modality: str):
    return folder / {"h5mu": f"cite.h5mu/{modality}", "mod": f"cite.h5mu/mod/{modality}"}.get(
        form, f"cite.zarr/mod/{modality}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["h5mu", "mod", "zarr"])
@pytest.mark.parametrize("modality", ["rna", "adt"])
def test_a_modality_is_what_mudata_has(written, form, modality):
    source, store = source_of(written, form, modality), written / "a.zarr"
    report = zl.convert(source, store, progress=False)
    wanted = cite()
    if modality == "rna":
        del wanted.obs["n"]
    wanted.push_obs(common=True, prefixed=False)
    wanted = wanted[modality]
    wanted.strings_to_categoricals()  # as when it is written
    found = ad.read_zarr(store)
    pd.testing.assert_frame_equal(found.obs, wanted.obs, check_like=True, check_names=False, check_dtype=False)
    assert found.obs["donor"].cat.categories.tolist() == ["d2", "d1", "d0", "unused"]
    pd.testing.assert_frame_equal(found.var, wanted.var)
    assert_same(found.X.astype(np.float32), wanted.X)
    assert set(found.obsm) == set(wanted.obsm)
    assert report.rows == wanted.n_obs
    assert zl.verify(store, against=source, progress=False).ok
    other = source_of(written, form, "adt" if modality == "rna" else "rna")
    assert not zl.verify(store, against=other, progress=False).ok


def test_several_files_by_a_glob(written):
    shutil.copy(written / "cite.h5mu", written / "again.h5mu")
    zl.convert(f"{written}/*.h5mu/rna", written / "a.zarr", select=zl.Selection(unique_obs_names=True), progress=False)
    assert zl.open_dataset(written / "a.zarr").n_obs == 120


@pytest.mark.slow
@pytest.mark.parametrize("form", ["h5mu", "zarr"])
def test_resumes(written, form):
    source = source_of(written, form, "rna")
    zl.convert(source, written / "whole.zarr", options=SMALL, progress=False)
    dest = written / "a.zarr"
    failing = FailingDestination(Location(url=str(dest)), survives=25, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, source, options=SMALL)
    assert_not_a_store(dest)
    with pytest.raises(StoreError, match="a different conversion was interrupted"):
        zl.convert(source_of(written, form, "adt"), dest, options=SMALL, resume=True, progress=False)
    zl.convert(source, dest, options=SMALL, resume=True, progress=False)
    assert files(dest) == files(written / "whole.zarr")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("cite.h5mu/atac", r"has no modality 'atac': name one of its modalities \(rna, adt\), such as .*cite.h5mu/rna"),
        ("plain.h5mu/rna", r"has no modality 'rna': .*\(none\)"),
    ],
)
def test_a_modality_has_to_be_named(written, path, words):
    ad.AnnData(counts()).write_h5ad(written / "plain.h5mu")
    with pytest.raises(SourceError, match=words):
        zl.convert(written / path, written / "a.zarr", progress=False)
    assert not (written / "a.zarr").exists()


def test_wrong_files(written):
    with pytest.raises(StoreNotFoundError):
        zl.convert(written / "none.h5mu" / "rna", written / "a.zarr", progress=False)
    with pytest.raises((SourceError, StoreNotFoundError)):
        zl.convert(written / "cite.zarr" / "mod" / "atac", written / "a.zarr", progress=False)
    with h5py.File(written / "cite.h5mu", "r+") as file:
        file["obsmap/adt"][:] = 0
    with pytest.raises(SourceError, match=r"obsmap/adt .*cite.h5mu .* row 0 of the modality is 0 rows of the whole"):
        zl.convert(written / "cite.h5mu" / "adt", written / "a.zarr", progress=False)
    content = (written / "cite.h5mu").read_bytes()
    (written / "cite.h5mu").write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match="truncated"):
        zl.convert(written / "cite.h5mu" / "rna", written / "a.zarr", progress=False)


def test_an_anndata_in_a_directory_that_is_called_mod(tmp_path):
    (tmp_path / "mod").mkdir()
    ad.AnnData(counts()).write_zarr(tmp_path / "mod" / "a.zarr")
    zl.convert(tmp_path / "mod" / "a.zarr", tmp_path / "b.zarr", progress=False)
    assert zl.open_dataset(tmp_path / "b.zarr").n_obs == 60


def test_the_tables_of_spatial_data(tmp_path):
    root = zarr.create_group(tmp_path / "s.zarr", zarr_format=2)
    root.create_group("images")
    root.create_group("tables")
    ad.AnnData(counts()).write_zarr(tmp_path / "s.zarr" / "tables" / "cells")
    with pytest.raises(SourceError, match=r"s\.zarr"):
        zl.convert(tmp_path / "s.zarr", tmp_path / "a.zarr", progress=False)
    zl.convert(tmp_path / "s.zarr" / "tables" / "cells", tmp_path / "a.zarr", progress=False)
    assert zl.open_dataset(tmp_path / "a.zarr").n_obs == 60
