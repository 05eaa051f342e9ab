"""What is stored of any source equals what anndata reads of it, and what `anndata.concat` makes of several."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import LAYOUTS, SMALL, assert_same, counts, dense, frame, full_anndata, layers_of, write_h5ad

import zloader as zl
from zloader.common.errors import FormatError, OptionError, SourceError, StoreNotFoundError
from zloader.conversion.opening import open_parts
from zloader.conversion.port import Content, Matrix, Opened

GENES = [f"g{i}" for i in (3, 1, 4, 15, 9, 2, 6, 5, 35, 8)]
OTHERS = [f"g{i}" for i in (9, 7, 1, 3, 23, 8, 4, 62)]


def whole(matrix: Matrix) -> Any:
    """The matrix that will be stored."""
    with matrix:
        windows = list(matrix.windows())
    values = np.concatenate([np.zeros(0, matrix.dtype), *(window.values for window in windows)])
    if matrix.dense:
        return values.reshape(matrix.n_rows, matrix.n_genes)
    genes = np.concatenate([np.zeros(0, np.int32), *(window.genes for window in windows)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(window.lengths for window in windows)])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return sp.csr_matrix((values, genes, indptr), shape=(matrix.n_rows, matrix.n_genes))


def built(content: Content) -> ad.AnnData:
    """The whole content as an AnnData."""
    parts: dict[str, Any] = {
        "layers": {}, "obsm": {}, "varm": {}, "obsp": {}, "varp": {}, "raw": {"varm": {}}, "X": None, "uns": {},
    }  # fmt: skip
    for path, element in [*((matrix.name, whole(matrix)) for matrix in content.matrices()), *content.elements()]:
        *within, name = path.split("/")
        target = parts
        for part in within:
            target = target[part]
        assert name not in target or path in ("X", "uns"), f"{path} comes twice"
        target[name] = element
    raw = parts.pop("raw")
    obs = pd.DataFrame({name: content.obs_column(name).array for name in content.obs_columns}, content.obs_names())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Observation|Variable) names are not unique", UserWarning)
        adata = ad.AnnData(**parts, obs=obs, var=content.var)
    if content.raw_var is not None:
        adata.raw = ad.AnnData(X=raw["X"], obs=obs[[]], var=content.raw_var, varm=raw["varm"])
    return adata


@contextlib.contextmanager
def opened(sources: Any, **select: Any) -> Iterator[Opened]:
    with open_parts(sources, zl.Selection(**select)) as found:
        yield found


def made_of(sources: Any, **select: Any) -> ad.AnnData:
    with opened(sources, **select) as found:
        return built(found.parts[0].content)


def refused(sources: Any, error: type[Exception] = SourceError, **select: Any) -> str:
    with pytest.raises(error) as caught:
        made_of(sources, **select)
    return str(caught.value)


def in_memory(x: Any) -> Any:
    """CSC becomes CSR, and nothing else changes."""
    return x.tocsr() if sp.issparse(x) else x


def assert_is(out: ad.AnnData, wanted: ad.AnnData) -> None:
    pd.testing.assert_frame_equal(out.obs, wanted.obs)
    pd.testing.assert_frame_equal(out.var, wanted.var, check_column_type=False)
    assert_same(
        {"X": out.X, **layers_of(out)},
        {"X": in_memory(wanted.X), **{k: in_memory(v) for k, v in layers_of(wanted).items()}},
    )
    for name in ("obsm", "varm", "obsp", "varp"):
        assert_same(dict(getattr(out, name)), dict(getattr(wanted, name)))
    assert_same(dict(out.uns), dict(wanted.uns))
    assert (out.raw is None) == (wanted.raw is None)
    if wanted.raw is not None:
        np.testing.assert_array_equal(dense(out.raw.X), dense(wanted.raw.X))
        pd.testing.assert_frame_equal(out.raw.var, wanted.raw.var, check_column_type=False)
        assert_same(dict(out.raw.varm), dict(wanted.raw.varm))


# ---- one source


def written(path: Path, adata: ad.AnnData, how: str) -> Path:
    """Writes an AnnData as a file with a filter, or as a Zarr of a version, with consolidated metadata or without."""
    version = int(how[5]) if how.startswith("zarr") else 3
    with (
        warnings.catch_warnings(),
        ad.settings.override(zarr_write_format=version, allow_write_nullable_strings=True, auto_shard_zarr_v3=False),
    ):
        warnings.simplefilter("ignore")  # of anndata and zarr, about their formats
        if not how.startswith("zarr"):
            compression = None if how == "plain" else how
            adata.write_h5ad(path, convert_strings_to_categoricals=False, compression=compression)
            return path
        adata.write_zarr(path, convert_strings_to_categoricals=False)
    if how.endswith("alone") and version == 2:
        (path / ".zmetadata").unlink()
    elif how.endswith("alone"):
        root = json.loads((path / "zarr.json").read_text())
        root.pop("consolidated_metadata")
        (path / "zarr.json").write_text(json.dumps(root))
    return path


def read(path: Path) -> ad.AnnData:
    return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["plain", "gzip", "lzf", "zarr 2", "zarr 3", "zarr 2 alone", "zarr 3 alone"])
def test_a_file_or_store_is_what_anndata_reads(tmp_path: Path, how: str) -> None:
    path = written(tmp_path / f"plate1.{'zarr' if how.startswith('zarr') else 'h5ad'}", full_anndata(), how)
    assert_is(made_of(path), read(path))
    with opened(str(path)) as found:
        assert (found.names, found.labels, found.n_rows) == ([str(path)], ["plate1"], [60])
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        assert found.bytes_in == sum(file.stat().st_size for file in files)
        assert found.parts[0].content.dropped == []


def test_a_store_of_our_own_is_what_it_was_made_of(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5ad", full_anndata(), "plain")
    zl.convert(path, tmp_path / "a.zarr", options=SMALL, progress=False)
    assert_is(made_of(tmp_path / "a.zarr"), ad.read_zarr(tmp_path / "a.zarr"))


def test_an_anndata_in_memory_and_a_view_of_it() -> None:
    adata, rows, genes = full_anndata(), np.arange(50, 3, -3), np.arange(0, 300, 7)
    assert_is(made_of(adata), adata)
    assert_is(made_of(adata[rows, genes]), adata[rows, genes].copy())
    with opened(adata) as found:
        assert (found.names, found.labels, found.identity) == (["the AnnData in memory"], ["adata"], None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backed(tmp_path: Path, layout: str) -> None:
    path = written(tmp_path / "a.h5ad", full_anndata(), "plain")
    with h5py.File(path, "r+") as file:
        del file["X"]
        ad.io.write_elem(file, "X", LAYOUTS[layout](counts()))
    adata = ad.read_h5ad(path, backed="r")
    try:
        assert_is(made_of(adata), ad.read_h5ad(path))
    finally:
        adata.file.close()


def test_what_cannot_be_read_in_place_is_read_by_anndata(tmp_path: Path) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", counts())
    write_h5ad(tmp_path / "other.h5ad", counts(seed=1))
    with h5py.File(path, "r+") as file:
        del file["X"]
        file["X"] = h5py.ExternalLink("other.h5ad", "X")
    np.testing.assert_array_equal(dense(made_of(path).X), counts(seed=1).toarray())


@pytest.mark.parametrize(
    "index",
    [pd.Index(["a", None, "c"], dtype="string"), pd.CategoricalIndex(["x", "y", "x"]), pd.Index([5, 6, 7])],
    ids=["nullable", "categorical", "numbers"],
)
def test_an_index_of_another_kind(tmp_path: Path, index: pd.Index) -> None:
    path = write_h5ad(tmp_path / "a.h5ad", sp.csr_matrix((3, 2), dtype=np.float32))
    with h5py.File(path, "r+") as file, ad.settings.override(allow_write_nullable_strings=True):
        del file["obs"]
        ad.io.write_elem(file, "obs", pd.DataFrame({"a": [1, 2, 3]}, index=index))
    with opened(path) as found:
        pd.testing.assert_index_equal(found.parts[0].content.obs_names(), index)


def test_two_obs_columns_of_one_name() -> None:
    adata = ad.AnnData(counts(3, 2), obs=frame(3, "c"), var=frame(2, "g"))
    adata.obs = pd.DataFrame(np.ones((3, 2)), columns=["a", "a"], index=adata.obs_names)
    assert "several obs columns named 'a'" in refused(adata)


# ---- the parts that are chosen


@pytest.fixture(params=["memory", "file"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An AnnData with everything, in memory or as a file."""
    return full_anndata() if request.param == "memory" else written(tmp_path / "a.h5ad", full_anndata(), "plain")


def test_parts_are_chosen(source: Any) -> None:
    out = made_of(source, layers=["csc"], obsm=[], obs=["zero", "kind"], raw=False, source_column="from")
    assert list(layers_of(out)) == ["csc"]
    assert list(out.obs) == ["zero", "kind", "from"]
    assert set(out.obs["from"]) == {"a" if isinstance(source, Path) else "adata"}
    assert not out.obsm
    assert out.raw is None


def test_a_layer_becomes_x_and_is_no_layer_any_more(source: Any) -> None:
    out = made_of(source, x="layers/dense")
    assert sorted(layers_of(out)) == ["csc", "csr"]
    np.testing.assert_array_equal(out.X, full_anndata().layers["dense"])


def test_raw_becomes_x_with_its_var_and_varm(source: Any) -> None:
    assert "(--layers none)" in refused(source, OptionError, x="raw/X")
    out, raw = made_of(source, x="raw/X", layers=[]), full_anndata().raw
    np.testing.assert_array_equal(dense(out.X), dense(raw.X))
    pd.testing.assert_frame_equal(out.var, raw.var, check_column_type=False)
    assert_same(dict(out.varm), dict(raw.varm))
    assert not out.varp
    assert out.raw is None


@pytest.mark.parametrize("by", ["symbol", str.upper, {"g1": "one"}], ids=["column", "function", "mapping"])
def test_genes_get_other_names_and_keep_their_former_ones(source: Any, by: Any) -> None:
    genes = {"symbol": ["s7", "s3"], "one": ["g7", "one"]}.get(by if isinstance(by, str) else "", ["G7", "G3"])
    genes = ["g7", "one"] if isinstance(by, dict) else genes
    at = [7, 1] if isinstance(by, dict) else [7, 3]
    out, wanted = made_of(source, genes_by=by, genes=genes, raw=False), full_anndata()
    assert list(out.var_names) == genes
    assert list(out.var["var_names"]) == [f"g{i}" for i in at]
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X[:, at]))
    np.testing.assert_array_equal(out.varm["PCs"], wanted.varm["PCs"][at])
    np.testing.assert_array_equal(out.varp["pairs"], wanted.varp["pairs"][at][:, at])


@pytest.mark.parametrize("select", [{"layers": ["q"]}, {"obsm": ["q"]}, {"obs": ["q"]}, {"x": "layers/q"}])
def test_unknown_names_are_answered_with_those_there_are(source: Any, select: dict[str, Any]) -> None:
    message = refused(source, OptionError, **select)
    assert "q" in message
    assert {"layers": "csr", "obsm": "X_pca", "obs": "kind", "x": "layers/csr"}[next(iter(select))] in message


def test_the_source_column_must_be_new(source: Any) -> None:
    assert "obs already has a column 'kind'" in refused(source, OptionError, source_column="kind")
    assert made_of(source, source_column="barcode").obs_names.name is None
    assert made_of(source, source_column="file").obs_names.name == "barcode"


# ---- views of a dataset


@pytest.mark.parametrize("genes", [False, True])
def test_a_view_is_stored_as_anndata_indexes_it(tmp_path: Path, genes: bool) -> None:
    adata = full_anndata()
    del adata.raw
    path = written(tmp_path / "a.h5ad", adata, "plain")
    mask, panel = adata.obs["zero"].to_numpy() == 0, list(adata.var_names[[9, 3, 200]])
    mask[::3] = False
    dataset = zl.open_dataset(path)[np.flatnonzero(mask)]
    wanted = adata[mask]
    if genes:
        dataset, wanted = dataset[:, panel], wanted[:, panel]
    report = zl.convert(dataset, tmp_path / "view.zarr", options=SMALL, progress=False)
    assert report.dropped == []
    out, wanted = ad.read_zarr(tmp_path / "view.zarr"), wanted.copy()
    for name in ("kind", "numbered", "ordered"):  # a store keeps categories that no row has
        out.obs[name] = out.obs[name].cat.remove_unused_categories()
    out.X = out.X.astype(np.float32)
    for name in ("csr", "csc"):
        out.layers[name] = out.layers[name].astype(np.float32)
    pd.testing.assert_frame_equal(out.obs, wanted.obs)
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))
    for name in ("csr", "csc", "dense"):
        np.testing.assert_array_equal(dense(out.layers[name]), dense(wanted.layers[name]))
    for name in ("obsm", "varm", "obsp", "varp"):
        found, right = getattr(out, name), getattr(wanted, name)
        assert set(found) == set(right)
        for key in found:
            np.testing.assert_array_equal(dense(found[key]), dense(right[key]))
    assert zl.verify(tmp_path / "view.zarr", against=dataset, progress=False).ok


# ---- several sources


def an_adata(seed: int, genes: list[str] = GENES, layout: str = "csr", n_rows: int = 7) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice([f"k{seed}", "k10", "k9"], n_rows)),
            "text": [f"t{i}" for i in range(n_rows)],
            "number": rng.integers(0, 9, n_rows).astype(np.int16),
            f"only {seed}": rng.random(n_rows) > 0.5,
        },
        index=[f"cell{seed}-{i}" for i in range(n_rows)],
    )
    var = pd.DataFrame({"symbol": [f"s{gene}" for gene in genes], "own": seed}, index=genes)
    return ad.AnnData(
        LAYOUTS[layout](counts(n_rows, len(genes), seed)),
        obs=obs,
        var=var,
        layers={"a": counts(n_rows, len(genes), seed + 10), "b": rng.random((n_rows, len(genes)))},
        obsm={"X_pca": rng.random((n_rows, 3), np.float32)},
        uns={"same": "text", "nested": {"array": np.arange(4), "own": seed}, f"u{seed}": 1},
    )


def files_of(tmp_path: Path, adatas: list[ad.AnnData]) -> list[Path]:
    return [written(tmp_path / f"{i}.h5ad", adata, "plain") for i, adata in enumerate(adatas)]


def concatenated(adatas: list[ad.AnnData], join: str) -> ad.AnnData:
    """The result of anndata.concat, with all columns of obs."""
    wanted = ad.concat(adatas, join=join, merge="same", uns_merge="same", fill_value=0)
    wanted.obs = ad.concat(adatas, join="outer").obs
    return wanted


def assert_joined(out: ad.AnnData, wanted: ad.AnnData) -> None:
    for name, x in {"X": wanted.X, **layers_of(wanted)}.items():
        found = out.X if name == "X" else out.layers[name]
        assert sp.issparse(found) == sp.issparse(x)
        np.testing.assert_array_equal(dense(found), dense(x))
    assert list(out.var_names) == list(wanted.var_names)
    for column in wanted.obs:
        if out.obs[column].dtype == "string" and wanted.obs[column].dtype != "string":
            wanted.obs[column] = wanted.obs[column].astype("string")
    pd.testing.assert_frame_equal(out.obs, wanted.obs)
    assert_same(dict(out.obsm), dict(wanted.obsm))
    assert_same(dict(out.uns), dict(wanted.uns))


@pytest.mark.every(3)
@pytest.mark.parametrize("layouts", [("csr", "csr"), ("csc", "dense"), ("dense", "dense"), ("csr", "csc", "dense")])
@pytest.mark.parametrize("join", ["inner", "outer"])
def test_a_join_is_what_anndata_concat_makes(tmp_path: Path, join: str, layouts: tuple[str, ...]) -> None:
    genes = [GENES, OTHERS, GENES[::-1]]
    adatas = [an_adata(i, genes[i], layout, n_rows=5 + i) for i, layout in enumerate(layouts)]
    paths = files_of(tmp_path, adatas)
    with opened(paths, join=join) as found:
        content = found.parts[0].content
        assert_joined(built(content), concatenated(list(map(ad.read_h5ad, paths)), join))
        assert set(content.dropped) >= {"var/own", "uns/u0", "uns/u1"}


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.permutations(GENES).flatmap(lambda p: st.integers(1, 10).map(lambda n: p[:n])), min_size=2, max_size=3)
)
def test_any_genes_are_joined_as_anndata_joins_them(tmp_path_factory: pytest.TempPathFactory, gene_lists: Any) -> None:
    adatas = [an_adata(seed, genes, n_rows=3) for seed, genes in enumerate(gene_lists)]
    paths = files_of(tmp_path_factory.mktemp("joined"), adatas)
    for join in ("inner", "outer"):
        if join == "inner" and not set.intersection(*map(set, gene_lists)):
            assert "no gene is in var of all stores" in refused(paths, join=join)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # few genes in common
                out = made_of(paths, join=join)
            assert_joined(out, concatenated(list(map(ad.read_h5ad, paths)), join))


def test_genes_named_come_in_that_order_and_are_zero_where_they_are_not(tmp_path: Path) -> None:
    adatas, genes = [an_adata(0, layout="dense"), an_adata(1, OTHERS)], ["g62", "g1", "g3", "g35", "g9"]
    out = made_of(files_of(tmp_path, adatas), genes=genes)
    wanted = ad.concat(adatas, join="outer", fill_value=0)[:, genes]
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))
    np.testing.assert_array_equal(dense(out.layers["a"]), dense(wanted.layers["a"]))


def test_sources_are_told_apart_and_names_made_unique(tmp_path: Path) -> None:
    for plate in ("p1", "p2"):
        (tmp_path / plate).mkdir()
        an_adata(0).write_h5ad(tmp_path / plate / "x.h5ad")
    for sources, labels in (
        ([tmp_path / "p1" / "x.h5ad", tmp_path / "p2" / "x.h5ad"], ["x", "x-1"]),
        ({"one": tmp_path / "p1" / "x.h5ad", "two": tmp_path / "p2" / "x.h5ad"}, ["one", "two"]),
        (f"{tmp_path}/*/x.h5ad", ["x", "x-1"]),
        ({"both": f"{tmp_path}/*/x.h5ad"}, ["both/x", "both/x-1"]),
    ):
        out = made_of(sources, source_column="plate", unique_obs_names=True)
        assert list(out.obs["plate"]) == [labels[0]] * 7 + [labels[1]] * 7
        names = [f"cell0-{i}" for i in range(7)]
        assert list(out.obs_names) == names + [f"{name}-1" for name in names]


def test_an_annbatch_collection_is_several_stores(tmp_path: Path) -> None:
    adata = full_anndata()
    adata = ad.AnnData(adata.X, obs=adata.obs[["kind"]], var=adata.var)
    for number, rows in enumerate(np.array_split(np.arange(60), 11)):
        written(tmp_path / "a.zarr" / f"dataset_{number}", adata[rows].copy(), "zarr 3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(tmp_path / "a.zarr", mode="a", zarr_format=3)
        root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    with opened(tmp_path / "a.zarr") as found:
        assert found.labels == [f"a/dataset_{number}" for number in range(11)]
        np.testing.assert_array_equal(dense(built(found.parts[0].content).X), adata.X.toarray())


def test_what_only_some_sources_have_is_dropped_by_name(tmp_path: Path) -> None:
    adatas = [an_adata(0), an_adata(1)]
    adatas[0].layers["spliced"], adatas[0].obsm["only"] = adatas[0].X, np.zeros((7, 2))
    adatas[0].obsm["wide"], adatas[1].obsm["wide"] = np.zeros((7, 2)), np.zeros((7, 5))
    adatas[0].obsp["graph"], adatas[1].varm["loadings"] = sp.eye(7, format="csr"), np.zeros((10, 2))
    report = zl.convert(files_of(tmp_path, adatas), tmp_path / "a.zarr", progress=False)
    dropped = ["layers/spliced", "obsm/only", "obsm/wide", "obsp/graph", "varm/loadings", "var/own", "uns/u0", "uns/u1"]
    assert sorted(report.dropped) == sorted(dropped)
    assert "no source has spliced" in refused(files_of(tmp_path, adatas), OptionError, layers=["spliced"])
    del adatas[1].X
    assert "X is missing in" in refused(files_of(tmp_path, adatas))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], ["a", "b", "c"]),
        ([True, False, True], [1, 2, 3]),
        (pd.Categorical(["a", "b", "c"]), [1.0, 2.0, 3.0]),
    ],
)
def test_columns_of_different_kinds_are_not_united(tmp_path: Path, one: Any, other: Any) -> None:
    adatas = [an_adata(seed, n_rows=3) for seed in range(2)]
    adatas[0].obs["n"], adatas[1].obs["n"] = one, other
    paths = files_of(tmp_path, adatas)
    assert "obs column 'n' (" in refused(paths)
    assert "n" not in made_of(paths, obs=["kind"]).obs


def test_large_integers_beside_missing_values_stay_integers(tmp_path: Path) -> None:
    adatas = [an_adata(seed) for seed in range(2)]
    adatas[0].obs["id"] = 2**53 + np.arange(7)
    column = made_of(files_of(tmp_path, adatas)).obs["id"]
    assert column.dtype == "Int64"
    assert column[:7].tolist() == [2**53 + i for i in range(7)]
    assert column[7:].isna().all()


def test_several_anndata_in_memory_are_refused_with_what_to_do() -> None:
    assert "anndata.concat" in refused([an_adata(0), an_adata(1)], OptionError)
    assert made_of([an_adata(0)]).shape == (7, 10)


def test_nothing_to_convert(tmp_path: Path) -> None:
    assert "is empty" in refused([], OptionError)
    assert "nothing matches" in refused(tmp_path / "*.h5ad", StoreNotFoundError)
    assert "must be text" in refused({1: tmp_path / "a.h5ad"}, OptionError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"x": "layers"}, "x must be"),
        ({"join": "left"}, "join must be"),
        ({"join": "inner", "genes": ["a"]}, "exclude each other"),
        ({"genes": []}, "genes is empty"),
        ({"genes": ["a", "b", "a"]}, "genes has repeated names: a"),
        ({"layers": "counts"}, r"layers must be a list of names, such as \['counts'\]"),
        ({"obs": ["a", "a"]}, "obs has repeated names: a"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        zl.Selection(**options)


@pytest.mark.parametrize("name", ["LZ4", "Bitshuffle", "Blosc2"])
def test_filters_that_are_not_read_in_place_are_read_by_anndata(tmp_path: Path, name: str) -> None:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    adata = counts()
    ad.AnnData(adata).write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "a") as file:
        for part in ("data", "indices"):
            stored = file[f"X/{part}"][:]
            del file[f"X/{part}"]
            file["X"].create_dataset(part, data=stored, chunks=(100,), **getattr(hdf5plugin, name)())
    with pytest.raises(FormatError, match="which is not read in place: run 'zloader convert'"):
        zl.open_dataset(tmp_path / "a.h5ad").take(3)
    zl.convert(tmp_path / "a.h5ad", tmp_path / "a.zarr", progress=False)
    assert (adata != ad.read_zarr(tmp_path / "a.zarr").X).nnz == 0
    (tmp_path / "a.h5ad").unlink()
    ad.AnnData(adata).write_h5ad(tmp_path / "a.h5ad")  # it is closed
