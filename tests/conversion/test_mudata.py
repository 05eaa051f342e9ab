"""A whole MuData as one store. The oracle is mudata itself."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import s3fs
import scipy.sparse as sp
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sources import (
    SMALL,
    FailingDestination,
    assert_not_a_store,
    assert_same,
    counts,
    dense,
    disk_full,
    files,
    frame,
    full_anndata,
    layers_of,
)
from typer.testing import CliRunner

import zloader as zl
from zloader.access.location import Location
from zloader.commands.cli import app
from zloader.common.errors import OptionError, SourceError, StoreError, StoreExistsError, ZloaderError
from zloader.conversion.convert import convert_to

mudata = pytest.importorskip("mudata")
pytestmark = [
    pytest.mark.any_version,
    pytest.mark.filterwarnings("ignore:From 0.4 .update:FutureWarning", "ignore:Writing zarr v2", "ignore:Cannot join"),
]
PARTS = ("obsm", "varm", "obsp", "varp", "uns")


def cite(n: int = 60, seed: int = 0, prefix: str = "cell") -> Any:
    """RNA of most cells with all that an AnnData may have, proteins (dense) of some in another order, and few peaks."""
    rng = np.random.default_rng(seed)
    names = np.array([f"{prefix}{i}" for i in range(n)])
    rna = full_anndata()[:, :200].copy()
    rna.obs_names = [f"{prefix}{i}" for i in range(60)]
    rna = rna[: n - 5].copy()
    rows = rng.permutation(n)[: n // 2]
    adt = ad.AnnData(counts(len(rows), 20, seed=seed + 2).toarray(), obs=pd.DataFrame(index=names[rows]))
    adt.var_names, adt.obs["m"], adt.obsm["X_umap"] = frame(20, "p").index, range(len(rows)), np.ones((len(rows), 2))
    few = np.concatenate([[n - 1], rng.permutation(n - 5)[:4]])
    atac = ad.AnnData(counts(5, 40, seed=seed + 3).tocsc(), obs=pd.DataFrame(index=names[few]), var=frame(40, "peak"))
    with_all = set(names) - set(rna.obs_names) - set(adt.obs_names) - set(atac.obs_names)
    more = ad.AnnData(counts(len(with_all), 3, seed=seed), obs=pd.DataFrame(index=sorted(with_all)), var=frame(3, "m"))
    made = mudata.MuData({"rna": rna, "adt": adt, "atac": atac, "more": more})
    made.obs["donor"] = pd.Categorical([f"d{i % 3}" for i in range(made.n_obs)], ["d2", "d1", "d0", "unused"])
    made.obs["age"] = pd.array([None if i % 7 == 0 else i for i in range(made.n_obs)], dtype="Int64")
    made.obsm["X_wnn"] = rng.random((made.n_obs, 4))
    made.obsm["spatial"] = rng.random((made.n_obs, 2))
    made.obsp["wnn"] = sp.random(made.n_obs, made.n_obs, 0.1, "csr", random_state=seed)
    made.uns["about"] = {"a": 1, "b": np.arange(3)}
    return made


@pytest.fixture(scope="module", autouse=True)
def _in_the_stored_order() -> Iterator[None]:
    """Versions before 0.4 would put the rows in the order of the modalities whenever they read."""
    has_option = hasattr(mudata, "set_options")
    with mudata.set_options(pull_on_update=False) if has_option else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cite")
    cite().write(folder / "cite.h5mu")
    cite().write_zarr(folder / "cite.zarr")
    return folder


def assert_equal(found: Any, wanted: Any) -> None:
    """Asserts that two MuData are equal, except for dtypes that convert narrows."""
    assert list(found.mod) == list(wanted.mod)
    _assert_frames(found, wanted)
    for part in ("obsmap", "varmap"):
        assert {name: list(each) for name, each in getattr(found, part).items()} == {
            name: list(each) for name, each in getattr(wanted, part).items()
        }
    for name, adata in wanted.mod.items():
        made = found.mod[name]
        _assert_frames(made, adata)
        np.testing.assert_array_equal(dense(made.X), dense(adata.X))
        assert set(layers_of(made)) == set(layers_of(adata))
        for layer, values in layers_of(adata).items():
            np.testing.assert_array_equal(dense(made.layers[layer]), dense(values))


def _assert_frames(found: Any, wanted: Any) -> None:
    pd.testing.assert_frame_equal(found.obs, wanted.obs)
    pd.testing.assert_frame_equal(found.var, wanted.var)
    for part in PARTS:
        one, other = dict(getattr(found, part)), dict(getattr(wanted, part))
        assert set(one) == set(other), part
        for key, value in other.items():
            if sp.issparse(value):
                np.testing.assert_array_equal(dense(one[key]), dense(value))
            else:
                assert_same(one[key], value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cite.h5mu", "cite.zarr"])
def test_the_store_is_what_mudata_has(written: Path, tmp_path: Path, name: str) -> None:
    source, store = written / name, tmp_path / "a.zarr"
    report = zl.convert(source, store, options=SMALL, progress=False)
    oracle = mudata.read(source) if name.endswith("h5mu") else mudata.read_zarr(source)
    assert_equal(mudata.read_zarr(store), oracle)
    raw = ad.read_zarr(store / "mod/rna").raw  # which mudata.read_zarr leaves out
    np.testing.assert_array_equal(dense(raw.X), dense(cite()["rna"].raw.X))
    assert (report.rows, report.genes, report.dropped) == (oracle.n_obs, oracle.n_vars, [])
    assert report.dtypes_changed["mod/adt/X"] == "float32 -> uint8"
    verified = zl.verify(store, against=source, progress=False)
    assert verified.ok, verified.problems
    assert (verified.rows, verified.genes) == (oracle.n_obs, oracle.n_vars)
    assert zl.convert(source, store, options=SMALL, resume=True, progress=False).already_complete


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shuffle_seed": 3}, {"order": "random"}, {"codec": "none"}])
def test_one_order_holds_for_all_modalities(written: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    source, store = written / "cite.h5mu", tmp_path / "a.zarr"
    wanted = mudata.read(source)
    if "order" in options:
        options = {"order": np.random.default_rng(0).permutation(wanted.n_obs)}
    zl.convert(source, store, options=zl.ConvertOptions(chunk_rows=1, **options), progress=False)
    found = mudata.read_zarr(store)
    if "codec" not in options:
        assert found.obs_names.tolist() != wanted.obs_names.tolist()
        for modality, rows in found.obsmap.items():
            held = np.asarray(rows)[np.asarray(rows) > 0]
            assert held.tolist() == list(range(1, found.mod[modality].n_obs + 1))
            source_rows = found.mod[modality].obs["source_row"].to_numpy()
            assert wanted.mod[modality].obs_names[source_rows].tolist() == found.mod[modality].obs_names.tolist()
        rows = found.obs["source_row"].to_numpy()
        np.testing.assert_array_equal(dense(found.obsp["wnn"]), dense(wanted.obsp["wnn"])[rows][:, rows])
        np.testing.assert_array_equal(found.obsm["X_wnn"], wanted.obsm["X_wnn"][rows])
    for modality, adata in wanted.mod.items():
        made = found.mod[modality][adata.obs_names]
        np.testing.assert_array_equal(dense(made.X), dense(adata.X))
        names = found.obs_names[np.ravel(found.obsm[modality])]
        assert names.tolist() == found.mod[modality].obs_names.tolist() or "codec" in options
    assert zl.verify(store, against=source, progress=False).ok
    zl.convert(store, tmp_path / "again.zarr", progress=False)  # whose modalities are no first rows of the whole
    again = mudata.read_zarr(tmp_path / "again.zarr")["rna"]
    np.testing.assert_array_equal(dense(again.obsp["graph"]), dense(wanted["rna"][again.obs_names].obsp["graph"]))
    dataset = zl.open_dataset(store)
    for minibatch in zl.Loader(dataset, x=["adt:X", "rna:X"], layout="dense", batch_size=16):
        names = found.obs_names[minibatch.index.numpy()]
        for modality, has in minibatch.present.items():
            adata = wanted.mod[modality]
            assert has.tolist() == names.isin(adata.obs_names).tolist()
            x = minibatch.x[f"{modality}:X"].numpy()[has.numpy()]
            np.testing.assert_array_equal(x, dense(adata[names[has.numpy()]].X))


@pytest.mark.slow
def test_a_selection_holds_for_every_modality(written: Path, tmp_path: Path) -> None:
    zl.convert(
        written / "cite.h5mu",
        tmp_path / "a.zarr",
        select=zl.Selection(layers=[], obsm=["X_umap"], obs=["donor", "m"], raw=False),
        progress=False,
    )
    found = mudata.read_zarr(tmp_path / "a.zarr")
    assert list(found.obs) == ["donor"]
    assert [list(found[each].obs) for each in found.mod] == [[], ["m"], [], []]
    assert all(not layers_of(adata) and adata.raw is None for adata in found.mod.values())
    assert set(found["adt"].obsm) == {"X_umap"}
    assert set(found.obsm) == set(found.mod)
    assert zl.verify(tmp_path / "a.zarr", against=written / "cite.h5mu", progress=False).ok


@pytest.mark.parametrize(
    ("select", "words"),
    [
        (
            {"x": "layers/two"},
            "x is for one AnnData, but .*cite.h5mu is a MuData with rna, adt, atac, more: .*cite.h5mu/rna",
        ),
        ({"genes": ["p1"]}, "genes is for one AnnData"),
        ({"genes_by": str.upper}, "genes_by is for one AnnData"),
        ({"obs": ["donor", "nothing"]}, "obs: no source has nothing. Available: .*donor"),
        ({"layers": ["nothing"]}, "layers: no source has nothing"),
    ],
)
def test_options_that_a_mudata_does_not_take(written: Path, tmp_path: Path, select: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        zl.convert(written / "cite.h5mu", tmp_path / "a.zarr", select=zl.Selection(**select), progress=False)
    assert not (tmp_path / "a.zarr").exists()


def test_a_modality_may_have_layers_only(tmp_path: Path) -> None:
    names = [f"cell{i}" for i in range(6)]
    first = ad.AnnData(obs=pd.DataFrame(index=names), var=frame(4, "p"))
    first.layers["counts"] = counts(6, 4)
    second = ad.AnnData(counts(6, 3), obs=pd.DataFrame(index=names), var=frame(3, "q"))
    mudata.MuData({"first": first, "second": second}).write(tmp_path / "a.h5mu")
    zl.convert(tmp_path / "a.h5mu", tmp_path / "a.zarr", progress=False)
    found = mudata.read_zarr(tmp_path / "a.zarr")
    assert found["first"].X is None
    np.testing.assert_array_equal(dense(found["first"].layers["counts"]), dense(first.layers["counts"]))
    np.testing.assert_array_equal(dense(found["second"].X), dense(second.X))


@pytest.mark.slow
def test_several_are_joined_by_modality(written: Path, tmp_path: Path) -> None:
    one, other = cite(), cite(50, seed=7, prefix="other")
    other.mod["rna"] = other["rna"][:, 5:].copy()
    other.update()
    other.write(tmp_path / "other.h5mu")
    store, sources = tmp_path / "a.zarr", [written / "cite.h5mu", tmp_path / "other.h5mu"]
    words = r"gene 0 of mod/rna/var is 'g5' in .*other.h5mu, but 'g0' in .*cite.h5mu: .*give join="
    with pytest.raises(SourceError, match=words):
        zl.convert(sources, store, progress=False)
    for join in ("inner", "outer"):
        report = zl.convert(sources, store, join=join, overwrite=True, progress=False)
        assert "obsp/wnn" in report.dropped
        found = mudata.read_zarr(store)
        assert found.n_obs == one.n_obs + other.n_obs
        assert found.obs["donor"].tolist() == [*one.obs["donor"], *other.obs["donor"]]
        for modality in one.mod:
            wanted = ad.concat([one[modality], other[modality]], join=join)
            wanted = wanted[found[modality].obs_names, found[modality].var_names]
            np.testing.assert_array_equal(dense(found[modality].X), dense(wanted.X))
            names = found.obs_names[np.asarray(found.obsmap[modality]) > 0]
            rows = np.asarray(found.obsmap[modality])[np.asarray(found.obsmap[modality]) > 0] - 1
            assert found[modality].obs_names[rows].tolist() == names.tolist()
            assert found.var_names[np.ravel(found.varm[modality])].tolist() == found[modality].var_names.tolist()
        assert zl.verify(store, against=sources, progress=False).ok
        assert zl.open_dataset(store).n_vars == found.n_vars


@pytest.mark.slow
def test_names_in_several_sources(written: Path, tmp_path: Path) -> None:
    twice = [written / "cite.h5mu", written / "cite.zarr"]
    with pytest.raises(SourceError, match=r"60 obs names occur in several sources, such as .*--unique-obs-names"):
        zl.convert(twice, tmp_path / "a.zarr", progress=False)
    zl.convert(twice, tmp_path / "a.zarr", select=zl.Selection(unique_obs_names=True), progress=False)
    found, one = mudata.read_zarr(tmp_path / "a.zarr"), mudata.read(written / "cite.h5mu")
    assert found.n_obs == 2 * one.n_obs
    assert found.obs_names.is_unique
    for modality, adata in one.mod.items():
        names = adata.obs_names
        for each in (names, [f"{name}-1" for name in names]):
            np.testing.assert_array_equal(dense(found[modality][each].X), dense(adata.X))
    assert zl.verify(tmp_path / "a.zarr", against=twice, progress=False).ok


def test_sources_that_do_not_fit_together(written: Path, tmp_path: Path) -> None:
    other = mudata.MuData({"rna": cite()["rna"].copy()})
    other.write(tmp_path / "rna.h5mu")
    with pytest.raises(SourceError, match=r"atac, more would be lacking. Convert modalities one by one, such as .*/"):
        zl.convert([written / "cite.h5mu", tmp_path / "rna.h5mu"], tmp_path / "a.zarr", progress=False)
    ad.AnnData(counts(), var=frame(300, "gene")).write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(SourceError, match=r"has the modalities none, and another source has rna, adt, atac, more"):
        zl.convert([tmp_path / "a.h5ad", written / "cite.h5mu"], tmp_path / "a.zarr", progress=False)
    zl.convert(tmp_path / "a.h5ad", tmp_path / "b.zarr", progress=False)
    problems = zl.verify(tmp_path / "b.zarr", against=written / "cite.h5mu", progress=False).problems
    assert any("is no MuData in the store" in problem.what for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("survives", [20, 0, 3, 40, 60])
def test_resumes(written: Path, tmp_path: Path, survives: int) -> None:
    source, dest = written / "cite.h5mu", tmp_path / "a.zarr"
    zl.convert(source, tmp_path / "whole.zarr", options=SMALL, progress=False)
    failing = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
    with pytest.raises(StoreError, match="No space left"):
        convert_to(failing, source, options=SMALL)
    assert_not_a_store(dest)
    assert not (dest / "mod/rna/zarr.json").exists()
    with pytest.raises(ZloaderError):
        zl.open_dataset(dest)
    zl.convert(source, dest, options=SMALL, resume=True, progress=False)
    assert files(dest) == files(tmp_path / "whole.zarr")


@pytest.mark.slow
def test_is_replaced_as_a_whole(written: Path, tmp_path: Path) -> None:
    dest = tmp_path / "a.zarr"
    shutil.copytree(written / "cite.zarr", dest)  # as mudata wrote it
    with pytest.raises(StoreExistsError, match="already a store"):
        zl.convert(written / "cite.h5mu", dest, progress=False)
    zl.convert(written / "cite.h5mu", dest, overwrite=True, progress=False)
    zl.convert(written / "cite.h5mu", tmp_path / "b.zarr", progress=False)
    assert files(dest) == files(tmp_path / "b.zarr")
    zl.convert(written / "cite.h5mu/adt", dest, overwrite=True, progress=False)
    assert zl.verify(dest, against=written / "cite.h5mu/adt", progress=False).ok
    (dest / "mod").mkdir()
    (dest / "mod/notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"mod/notes.txt"):
        zl.convert(written / "cite.h5mu", dest, overwrite=True, progress=False)


def _flip(store: Path) -> None:
    path = next(path for path in sorted((store / "mod/rna/X/data/c").rglob("*")) if path.is_file())
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def _lose(store: Path) -> None:
    next(path for path in sorted((store / "mod/adt/X/c").rglob("*")) if path.is_file()).unlink()


def _add(store: Path) -> None:
    (store / "mod/adt/X/c/99").mkdir(parents=True)
    (store / "mod/adt/X/c/99/0").write_bytes(b"")


def _remap(store: Path) -> None:
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    root["obsmap/adt"][...] = np.roll(root["obsmap/adt"][...], 1)


def _twice(store: Path) -> None:
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    held = np.flatnonzero(root["obsmap/adt"][...])
    root["obsmap/adt"][int(held[0])] = int(root["obsmap/adt"][int(held[1])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "where", "alone"),
    [
        (_flip, "mod/rna/X/data", True),
        (_lose, "mod/adt/X", True),
        (_add, "mod/adt/X/c/99/0", True),
        (_remap, "obsmap/adt", False),
        (_twice, "obsmap/adt", True),
    ],
)
def test_verify_finds_damage(written: Path, tmp_path: Path, damage: Any, where: str, alone: bool) -> None:
    zl.convert(written / "cite.h5mu", tmp_path / "a.zarr", options=SMALL, progress=False)
    damage(tmp_path / "a.zarr")
    problems = zl.verify(tmp_path / "a.zarr", progress=False).problems
    assert any(problem.where.startswith(where) for problem in problems) == alone, problems
    problems = zl.verify(tmp_path / "a.zarr", against=written / "cite.h5mu", progress=False).problems
    assert any(problem.where.startswith(where) for problem in problems), problems


@pytest.mark.slow
def test_verify_compares_every_part(written: Path, tmp_path: Path) -> None:
    zl.convert(written / "cite.h5mu", tmp_path / "a.zarr", progress=False)
    other = cite()
    other["adt"].X[3, 2] += 1
    other["adt"].obs["m"] = other["adt"].obs["m"].to_numpy() + 1
    other.obsm["X_wnn"][7] = 0
    other["rna"].var["new"] = 1
    other.write(tmp_path / "other.h5mu")
    found = {
        each.where for each in zl.verify(tmp_path / "a.zarr", against=tmp_path / "other.h5mu", progress=False).problems
    }
    assert {"mod/adt/X", "mod/adt/obs/m", "obsm/X_wnn", "mod/rna/var/new"} <= found
    assert not any(where.startswith(("mod/atac", "obsmap")) for where in found)


def test_verify_of_a_file_where_it_lies(tmp_path: Path) -> None:
    made = mudata.MuData({"adt": cite()["adt"].copy()})
    made.uns["number"] = 1
    made.write(tmp_path / "a.h5mu")
    verified = zl.verify(tmp_path / "a.h5mu", against=tmp_path / "a.h5mu", progress=False)
    assert verified.ok, verified.problems


@pytest.mark.slow
def test_a_modality_of_the_store_is_a_source_and_a_dataset(written: Path, tmp_path: Path) -> None:
    zl.convert(written / "cite.h5mu", tmp_path / "a.zarr", progress=False)
    wanted = mudata.read(written / "cite.h5mu")["adt"]
    alone = zl.open_dataset(tmp_path / "a.zarr/mod/adt")
    np.testing.assert_array_equal(alone.to_adata().X, wanted.X)
    zl.convert(tmp_path / "a.zarr/mod/adt", tmp_path / "b.zarr", progress=False)
    assert "donor" in zl.open_dataset(tmp_path / "b.zarr").obs_columns
    chunk = next(path for path in sorted((tmp_path / "a.zarr/mod/adt/X/c").rglob("*")) if path.is_file())
    chunk.unlink()
    with pytest.raises(ZloaderError):  # and not zeros
        zl.open_dataset(tmp_path / "a.zarr/mod/adt").to_adata()


def _no_map(root: Any) -> None:
    del root["obsmap/adt"]


def _wrong_map(root: Any) -> None:
    root["obsmap/adt"][0] = 1000


def _genes_shared(root: Any) -> None:
    root.attrs["axis"] = 1


def _nested(root: Any) -> None:
    root["mod/adt"].attrs["encoding-type"] = "MuData"


def _empty(root: Any) -> None:
    for name in list(root["mod"]):
        del root[f"mod/{name}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_map, r"does not say which rows its modality 'adt' has \(obsmap/adt\)"),
        (_wrong_map, r"obsmap/adt of .*cite.zarr cannot be used because row 0 is row 1000 of 30 rows"),
        (_genes_shared, r"share genes \(axis 1\), and not rows: open them one by one, such as .*/mod/rna"),
        (_nested, "the modality 'adt' of .*cite.zarr is a MuData itself: convert its modalities one by one"),
        (_empty, "is a MuData without modalities"),
    ],
)
def test_damaged_sources(written: Path, tmp_path: Path, damage: Any, words: str) -> None:
    shutil.copytree(written / "cite.zarr", tmp_path / "cite.zarr")
    (tmp_path / "cite.zarr/.zmetadata").unlink(missing_ok=True)
    damage(zarr.open_group(tmp_path / "cite.zarr", mode="r+", use_consolidated=False))
    with pytest.raises(SourceError, match=words):
        zl.convert(tmp_path / "cite.zarr", tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.slow
def test_commands(written: Path, tmp_path: Path) -> None:
    store, source = str(tmp_path / "a.zarr"), str(written / "cite.h5mu")
    for arguments in (
        ["convert", source, store],
        ["verify", store, "--against", source],
        ["info", store, "--x", "rna:X"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert "adt:X: dense" in done.output


@pytest.mark.slow
def test_remote(tmp_path: Path, s3: Any) -> None:
    """From a bucket to a bucket."""
    url, filesystem, written = s3.url("mudata"), s3fs.S3FileSystem(**s3.storage_options), tmp_path
    small = mudata.MuData({name: cite()[name].copy() for name in ("adt", "atac")})
    small.write(written / "cite.h5mu")
    small.write_zarr(written / "cite.zarr")
    for path in written.rglob("*"):
        if path.is_file():
            filesystem.put_file(str(path), f"{url.removeprefix('s3://')}/{path.relative_to(written)}")
    for name in ("cite.h5mu", "cite.zarr"):
        zl.convert(f"{url}/{name}", f"{url}/{name}.out", storage_options=s3.storage_options, progress=False)
        verified = zl.verify(
            f"{url}/{name}.out",
            against=f"{url}/{name}",
            storage_options=s3.storage_options,
            progress=False,
        )
        assert verified.ok, verified.problems


@st.composite
def random_mudata(draw: st.DrawFn) -> Any:
    n = draw(st.integers(1, 30))
    rng = np.random.Generator(np.random.PCG64(draw(st.integers(0, 1000))))
    parts, lacking = {}, set(range(n))
    for number in range(draw(st.integers(1, 3))):
        rows = rng.permutation(n)[: draw(st.integers(0, n))]
        lacking -= set(rows.tolist())
        parts[f"m{number}"] = rows
    parts["rest"] = np.array(sorted(lacking), int)
    made = {}
    for number, (name, rows) in enumerate(parts.items()):
        width = draw(st.integers(1, 5))
        x = sp.random(len(rows), width, 0.5, "csr", dtype=np.float32, random_state=rng)
        obs = pd.DataFrame({"v": rng.random(len(rows))}, index=[f"c{row}" for row in rows])
        adata = ad.AnnData(x if number % 2 else x.toarray(), obs=obs, var=frame(width, name))
        adata.obsm["e"] = rng.random((len(rows), 2))
        made[name] = adata
    return mudata.MuData(made)


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(random_mudata(), st.sampled_from([None, 0, 5]))
def test_any_mudata(tmp_path: Path, made: Any, seed: int | None) -> None:
    for path in ("r.h5mu", "r.zarr"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(tmp_path / path) if path.endswith("zarr") else (tmp_path / path).unlink()
    made.write(tmp_path / "r.h5mu")
    options = zl.ConvertOptions(chunk_rows=1, shuffle_seed=seed)
    zl.convert(tmp_path / "r.h5mu", tmp_path / "r.zarr", options=options, progress=False)
    found, wanted = mudata.read_zarr(tmp_path / "r.zarr"), mudata.read(tmp_path / "r.h5mu")
    if seed is None:
        assert_equal(found, wanted)
    for name, adata in wanted.mod.items():
        np.testing.assert_array_equal(dense(found[name][adata.obs_names].X), dense(adata.X))
    verified = zl.verify(tmp_path / "r.zarr", against=tmp_path / "r.h5mu", progress=False)
    assert verified.ok, verified.problems
    dataset = zl.open_dataset(tmp_path / "r.zarr")
    names = [name for name in dataset.matrix_names if name.endswith(":X")]
    seen = []
    for minibatch in zl.Loader(dataset, x=names, layout="dense", batch_size=7):
        rows = minibatch.index.tolist()
        seen += rows
        for name, has in minibatch.present.items():
            here = found.obs_names[rows]
            assert has.tolist() == here.isin(wanted[name].obs_names).tolist()
            x = minibatch.x[f"{name}:X"].numpy()
            np.testing.assert_array_equal(x[has.numpy()], dense(wanted[name][here[has.numpy()]].X))
            assert not x[~has.numpy()].any()
    assert sorted(seen) == list(range(wanted.n_obs))
