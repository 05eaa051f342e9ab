"""Stores with different genes as one dataset, compared with anndata.concat by value, with the order of its genes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from helpers import dense, digest, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import FormatError, MissingColumnError, OptionError
from zloader.testing import assert_resumes_anywhere

pytestmark = pytest.mark.any_version

SIZES = {"batch_size": 7, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
ALL = [f"g{number}" for number in range(12)]


def source(genes: Sequence[str], *, n_rows: int = 9, dtype: str = "float32", dense: bool = False) -> ad.AnnData:
    """Random counts of some genes, with empty rows, a layer, raw, and var columns that differ between sources."""
    name = "".join(genes) + dtype
    rng = np.random.default_rng(len(name) + n_rows)
    x = scipy.sparse.random(n_rows, len(genes), 0.5, "csr", random_state=rng)
    x.data = rng.integers(1, 100, x.nnz).astype(dtype)
    x.sort_indices()
    x = x.toarray() if dense else x
    obs = pd.DataFrame(
        {"label": pd.Categorical(rng.choice(["a", "b"], n_rows))}, index=[f"{name} {i}" for i in range(n_rows)]
    )
    var = pd.DataFrame({"id": [f"ENS{gene[1:]}" for gene in genes], "n": np.arange(len(genes))}, index=list(genes))
    var["kind"] = "protein"
    raw = ad.AnnData(np.asarray(x[:, :2].todense() if scipy.sparse.issparse(x) else x[:, :2]), obs, var.iloc[:2])
    adata = ad.AnnData(x, obs, var, layers={"twice": x * 2})
    adata.raw = raw
    return adata


POOL = {
    "sorted": source(sorted(ALL[:6])),
    "same genes": source(sorted(ALL[:6]), n_rows=4, dtype="int64"),
    "reversed": source(ALL[::-1][:8], dtype="uint8"),
    "shuffled": source(["g3", "g11", "g0", "g7", "g5"], dtype="float64"),
    "dense": source(["g1", "g0", "g9"], dense=True),
    "dense, ints": source(["g9", "g2", "g1", "g4"], dtype="int32", dense=True),
    "one gene": source(["g0"], n_rows=3),
    "no shared gene": source(["h0", "h1"], n_rows=2),
}


def write_plain(adata: ad.AnnData, dest: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about future defaults
        ad.io.write_elem(zarr.open_group(dest, mode="a", zarr_format=3), "/", adata.copy())


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pool")
    for name, adata in POOL.items():
        if name in ("sorted", "shuffled"):
            write_store(adata, folder / f"{name}.zarr", folder)
        else:
            write_plain(adata, folder / f"{name}.zarr")
    return {name: str(folder / f"{name}.zarr") for name in POOL}


def concat(names: Sequence[str], join: Any, *, of: str = "X", genes_by: str | None = None) -> ad.AnnData:
    """The oracle: `anndata.concat` of one matrix, with zeros for genes that a store lacks."""
    sources = []
    for name in names:
        adata = POOL[name].raw.to_adata() if of == "raw/X" else POOL[name]
        x = adata.layers["twice"] if of == "layers/twice" else adata.X
        var = adata.var if genes_by is None else adata.var.set_index(adata.var[genes_by].to_numpy())
        sources.append(ad.AnnData(scipy.sparse.csr_matrix(x), adata.obs, var))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Observation names are not unique")  # a store may occur twice
        if isinstance(join, str):
            return ad.concat(sources, join=join, merge="same")
        # A listed gene that no source has comes from one more source without rows.
        listed = ad.AnnData(scipy.sparse.csr_matrix((0, len(join))), var=pd.DataFrame(index=list(join)))
        return ad.concat([*sources, listed], join="outer")[:, list(join)].copy()


def epoch(loader: zl.Loader) -> tuple[np.ndarray, np.ndarray]:
    """The rows of an epoch, and their values as a dense array, both by row number."""
    minibatches = list(loader)
    rows = np.concatenate([minibatch.index.numpy() for minibatch in minibatches])
    x = np.concatenate([dense(minibatch.x) for minibatch in minibatches])
    return np.sort(rows), x[np.argsort(rows)]


# A list has a gene of every store, and of its raw.
LISTS = st.lists(st.sampled_from([*ALL, "nowhere"]), unique=True).map(
    lambda genes: list(dict.fromkeys([*genes, "g11", "g0", "h0", "g9"]))
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:join='inner' drops most genes")
@settings(max_examples=10)
@given(
    names=st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=5),
    join=st.sampled_from(["inner", "outer"]) | LISTS,
    layout=st.sampled_from(["csr", "dense", "scipy"]),
    x=st.sampled_from(["X", "layers/twice", "raw/X"]),
    data=st.data(),
)
def test_every_value_is_that_of_anndata_concat(pool, names, join, layout, x, data):
    wanted = concat(names, join, of=x)
    urls = [pool[name] for name in names]
    if not wanted.n_vars or not concat(names, join).n_vars:
        with pytest.raises(FormatError, match=r"no gene is in (raw/)?var of all stores"):
            zl.Loader(zl.open_dataset(urls, join=join), x=x)
        return
    dataset = zl.open_dataset(urls, join=join)
    if x != "raw/X":
        assert dataset.var_names.tolist() == wanted.var_names.tolist()
        assert dataset.shape == wanted.shape
    genes = data.draw(st.none() | st.lists(st.integers(0, wanted.n_vars - 1), min_size=1, unique=True))
    loader = zl.Loader(
        dataset if genes is None else dataset[:, {x: genes}], x=x, layout=layout, dtype="float64", **SIZES
    )
    rows, found = epoch(loader)
    assert rows.tolist() == list(range(wanted.n_obs))
    expected = wanted.X.toarray()
    np.testing.assert_array_equal(found, expected if genes is None else expected[:, genes])


OUTER = ["sorted", "reversed", "dense, ints", "shuffled", "sorted"]


@pytest.fixture(params=["outer", ["g5", "g11", "nowhere", "g4", "g0"]], ids=["outer", "list"])
def join(request) -> Any:
    return request.param


@pytest.fixture
def dataset(pool, join) -> zl.Dataset:
    return zl.open_dataset([pool[name] for name in OUTER], join=join)


@pytest.mark.slow
def test_the_public_face_of_a_joined_dataset(dataset, join):
    wanted = concat(OUTER, join)
    names = wanted.var_names.tolist()
    assert dataset.var_names.tolist() == dataset.var.index.tolist() == names
    assert (dataset.n_vars, dataset.shape) == (len(names), wanted.shape)
    assert f"n_obs x n_vars = {wanted.n_obs} x {len(names)} of " in repr(dataset)
    taken = dataset.take([30, 2, 2, 20, 11], layers=["twice"])
    for found in (taken.X, taken.layers["twice"] / 2):
        np.testing.assert_array_equal(dense(found), wanted.X[[30, 2, 2, 20, 11]].toarray())
    assert taken.var_names.tolist() == names
    view = dataset.where("label == 'a'")
    assert view.shape == (int((wanted.obs["label"] == "a").sum()), len(names))
    np.testing.assert_array_equal(
        np.concatenate([dense(minibatch.x) for minibatch in zl.Loader(view, shuffle=False, **{"batch_size": 7})]),
        wanted[wanted.obs["label"] == "a"].X.toarray(),
    )


def test_rows_stay_sorted_by_column(dataset):
    for minibatch in zl.Loader(dataset, layout="scipy", **SIZES):
        assert minibatch.x.has_canonical_format


@pytest.mark.filterwarnings("ignore:join='inner' drops most genes")
@pytest.mark.parametrize("join", ["inner", "outer"])
def test_var_is_that_of_anndata_concat(pool, join):
    for names in (["sorted", "same genes"], ["sorted", "reversed"], ["sorted", "same genes", "dense"], ["shuffled"]):
        found = zl.open_dataset([pool[name] for name in names], join=join).var
        wanted = concat(names, join).var
        assert {"id", "kind"} <= set(wanted.columns) or join == "outer"
        pd.testing.assert_frame_equal(found, wanted)


@pytest.mark.filterwarnings("ignore:join='inner' drops most genes")
@pytest.mark.parametrize("join", ["inner", "outer", ["ENS5", "ENS0", "nowhere"]])
def test_genes_named_by_a_column(pool, join):
    names = ["sorted", "shuffled", "reversed"]
    wanted = concat(names, join, genes_by="id")
    dataset = zl.open_dataset([pool[name] for name in names], join=join, genes_by="id")
    assert dataset.var_names.tolist() == wanted.var_names.tolist()
    np.testing.assert_array_equal(epoch(zl.Loader(dataset, **SIZES))[1], wanted.X.toarray())
    chosen = zl.Loader(dataset[:, ["ENS5"]], **SIZES)
    np.testing.assert_array_equal(epoch(chosen)[1], wanted[:, ["ENS5"]].X.toarray())
    if join == "inner":
        assert dataset.var["var_names"].tolist() == [name.replace("ENS", "g") for name in dataset.var_names]


def test_genes_named_by_a_column_of_one_store(pool):
    dataset = zl.open_dataset(pool["shuffled"], genes_by="id")
    assert dataset.var_names.tolist() == ["ENS3", "ENS11", "ENS0", "ENS7", "ENS5"]
    assert dataset.var["var_names"].tolist() == ["g3", "g11", "g0", "g7", "g5"]
    np.testing.assert_array_equal(epoch(zl.Loader(dataset, **SIZES))[1], POOL["shuffled"].X.toarray())


def test_a_column_may_be_the_index_of_another_store(tmp_path, pool):
    adata = POOL["reversed"].copy()
    adata.var = adata.var.set_index("id")
    write_plain(adata, tmp_path / "by_id.zarr")
    dataset = zl.open_dataset([tmp_path / "by_id.zarr", pool["sorted"]], join="outer", genes_by="id")
    wanted = concat(["reversed", "sorted"], "outer", genes_by="id")
    assert dataset.var_names.tolist() == wanted.var_names.tolist()
    np.testing.assert_array_equal(epoch(zl.Loader(dataset, **SIZES))[1], wanted.X.toarray())


# ------------------------------------------------------------------------------------------- state, processes, places


@pytest.mark.slow
def test_it_resumes_anywhere_and_with_another_join(pool, dataset):
    assert_resumes_anywhere(lambda: zl.Loader(dataset, seed=3, **SIZES), every=2)
    other = zl.open_dataset([pool[name] for name in OUTER], join=["g5", "g9"])
    assert other.fingerprint == dataset.fingerprint
    loader, rest = zl.Loader(dataset, **SIZES), zl.Loader(other, **SIZES)
    minibatches = iter(loader)
    next(minibatches), next(minibatches)
    rest.load_state_dict(loader.state_dict())
    assert [minibatch.index.tolist() for minibatch in minibatches] == [minibatch.index.tolist() for minibatch in rest]


def test_a_pickled_dataset_keeps_its_join(pool):
    for genes_by in (None, "id"):
        dataset = zl.open_dataset([pool["sorted"], pool["reversed"]], join="outer", genes_by=genes_by)
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.var_names.tolist() == dataset.var_names.tolist()
        assert digest(zl.Loader(copy, **SIZES)) == digest(zl.Loader(dataset, **SIZES))
        assert pickle.loads(pickle.dumps(dataset[2:5])).shape == (3, dataset.n_vars)


@pytest.mark.slow
def test_the_same_from_s3_and_from_the_mirror(s3, tmp_path):
    for name in ("sorted", "shuffled"):
        for url, options in ((tmp_path / name, None), (s3.url(name), s3.storage_options)):
            write_store(POOL[name], url, tmp_path, storage_options=options)
    wanted = digest(zl.Loader(zl.open_dataset([tmp_path / "sorted", tmp_path / "shuffled"], join="outer"), **SIZES))
    urls, options = [s3.url("sorted"), s3.url("shuffled")], {"storage_options": s3.storage_options}
    cache = tmp_path / "cache"
    assert digest(zl.Loader(zl.open_dataset(urls, join="outer", **options), **SIZES)) == wanted
    dataset = zl.open_dataset(urls, join="outer", cache=cache, **options)
    zl.warm(dataset)
    for opened in (dataset, zl.open_dataset(urls, join="outer", cache=cache, offline=True, **options)):
        loader = zl.Loader(opened, **SIZES)
        assert digest(loader) == wanted
        assert loader.statistics().gets == 0
    # Each join has rows of its own. Rows with all genes, if there are any, serve every join.
    for url in urls:
        zl.warm(zl.open_dataset(url, cache=cache, **options))
    inner = zl.Loader(zl.open_dataset(urls, join="inner", cache=cache, offline=True, **options), **SIZES)
    np.testing.assert_array_equal(epoch(inner)[1], concat(["sorted", "shuffled"], "inner").X.toarray())


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("join", "says"),
    [
        ("left", "join must be 'inner', 'outer', None or a list of genes, not 'left'"),
        (5, "join must be 'inner', 'outer', None or a list of genes, not 5"),
        ([], "join lists no gene"),
        (["g1", "g0", "g1"], r"join has 1 repeated gene name \(g1\): list each gene once"),
        (["g1", 2], "join must be a list of names"),
    ],
)
def test_unusable_joins(pool, join, says):
    with pytest.raises(OptionError, match=says):
        zl.open_dataset(pool["sorted"], join=join)


@pytest.mark.every(3)
@pytest.mark.parametrize("join", ["inner", "outer", ["g1"]])
def test_repeated_names_are_refused(tmp_path, pool, join):
    adata = POOL["sorted"].copy()
    adata.var_names = ["g0", "g1", "g0", "g2", "g2", "g3"]
    adata.var["id"] = pd.Categorical(["e0", "e1", None, "e3", "e4", "e5"])
    adata.var["twice"] = "same"
    write_plain(adata, tmp_path / "a.zarr")
    urls = [pool["sorted"], tmp_path / "a.zarr"]
    with pytest.raises(FormatError, match=r"var of \S+a\.zarr has 2 repeated gene names \(g0, g2\).*genes_by"):
        zl.open_dataset(urls, join=join)
    with pytest.raises(FormatError, match=r"var of \S+a\.zarr has 1 repeated gene name \(same\) in the column 'twice'"):
        zl.open_dataset(tmp_path / "a.zarr", genes_by="twice", join=join)
    with pytest.raises(FormatError, match=r"var of \S+a\.zarr has 1 genes without a value in 'id'"):
        zl.open_dataset(urls, join=join, genes_by="id")
    with pytest.raises(MissingColumnError, match=r"var of \S+sorted\.zarr has no column 'twice' .*: id, n, kind"):
        zl.open_dataset(urls, join=join, genes_by="twice")
    zl.open_dataset(tmp_path / "a.zarr")  # as stored, names may repeat


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (["sorted", "reversed"], {}, r"gene 0 of var is 'g11' in \S+reversed\.zarr.*join='inner'"),
        (["sorted", "reversed"], {"genes_by": "id"}, r"gene 0 of var is 'ENS11' in \S+reversed\.zarr"),
        (["sorted", "no shared gene"], {"join": "inner"}, r"no gene is in var of all stores.*genes_by"),
        (["sorted", "no shared gene"], {"join": ["g1"]}, r"var of \S+no shared gene\.zarr has none of the 1 genes"),
    ],
)
def test_genes_that_cannot_be_joined(pool, names, options, says):
    with pytest.raises(FormatError, match=says):
        zl.open_dataset([pool[name] for name in names], **options)


def test_a_store_without_an_element_is_named(tmp_path, pool):
    adata = POOL["reversed"].copy()
    del adata.layers["twice"], adata.obs["label"]
    write_plain(adata, tmp_path / "b.zarr")
    dataset = zl.open_dataset([pool["sorted"], tmp_path / "b.zarr"], join="outer")
    with pytest.raises(FormatError, match=r"no matrix 'layers/twice' in \S+b\.zarr"):
        zl.Loader(dataset, x="layers/twice")
    with pytest.raises(MissingColumnError, match=r"no obs column 'label' in \S+b\.zarr"):
        zl.Loader(dataset, obs=["label"])
    with pytest.raises(OptionError, match=r"1 of 1 genes are not in var of \S+ and 1 more"):
        dataset[:, ["nowhere"]]
