"""Several stores as one dataset, from lists of URLs and annbatch collections, compared with anndata.concat."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from helpers import check_minibatch, counts, dense, digest, fetch_options, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import (
    CorruptChunkError,
    FormatError,
    MissingColumnError,
    MissingObjectError,
    OptionError,
    StoreChangedError,
    StoreNotFoundError,
)
from zloader.dataset.store import OpenedStore
from zloader.insight.cost import EpochCost, epoch_costs
from zloader.insight.summary import summarize

N_GENES = 23
OBS = ["cell_type", "donor", "n_counts", "passed", "lane"]


def write_plain(adata: ad.AnnData, dest: Path, *, zarr_format: int = 3, key: str = "/") -> None:
    """Writes a store, or a group of a hierarchy, with anndata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about future defaults
        ad.io.write_elem(zarr.open_group(dest, mode="a", zarr_format=zarr_format), key, adata.copy())


def write_collection(adatas: Sequence[ad.AnnData], dest: Path) -> Path:
    """Writes a collection like annbatch 0.3: root attributes last, no consolidated metadata."""
    for number, adata in enumerate(adatas):
        write_plain(adata, dest, key=f"dataset_{number}")
    root = zarr.open_group(dest, mode="a", zarr_format=3)
    root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    return dest


def named(adata: ad.AnnData, name: str) -> ad.AnnData:
    """The AnnData with obs names that no other store has."""
    adata.obs_names = [f"{name} {row}" for row in range(adata.n_obs)]
    return adata


def concat(adatas: Sequence[ad.AnnData]) -> ad.AnnData:
    """The oracle: all rows in memory, x as float64 CSR, and the obs columns that all stores have."""
    x = scipy.sparse.vstack([scipy.sparse.csr_matrix(adata.X, dtype=np.float64) for adata in adatas], "csr")
    bare = [ad.AnnData(obs=adata.obs, var=pd.DataFrame(index=adata.var_names)) for adata in adatas if adata.n_obs]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Observation names are not unique")  # a store may occur twice
        both = ad.concat(bare)
        both.X = x
    return both


def check_epoch(loader: zl.Loader, wanted: ad.AnnData) -> list[int]:
    """Checks every minibatch by value and returns the row numbers in order."""
    seen = [check_minibatch(minibatch, wanted) for minibatch in loader]
    rows = np.concatenate(seen).tolist()
    assert sorted(rows) == list(range(wanted.n_obs))
    return rows


# ------------------------------------------------------------------------------------------- by value


def _densely(adata: ad.AnnData, dtype: str) -> ad.AnnData:
    adata.X = adata.X.toarray().astype(dtype)
    return adata


def _without_values(adata: ad.AnnData) -> ad.AnnData:
    adata.X = scipy.sparse.csr_matrix(adata.shape, dtype=np.float32)
    return adata


def _of_ints(adata: ad.AnnData, dtype: str) -> ad.AnnData:
    adata.X = adata.X.astype(dtype)
    return adata


# Stores that differ in form, dtypes, chunk grids and codecs. Each has elements that another lacks.
POOL = {
    "converted": counts(61, N_GENES, seed=1),
    "converted, dense": _densely(counts(37, N_GENES, seed=2), "float32"),
    "plain": counts(50, N_GENES, seed=3),
    "plain, dense": _densely(counts(19, N_GENES, seed=4), "float64"),
    "plain, v2": _of_ints(counts(23, N_GENES, seed=5), "int64"),
    "one row": counts(1, N_GENES, density=1.0, seed=6),
    "one empty row": _without_values(counts(1, N_GENES, seed=7)),
    "no values": _without_values(counts(9, N_GENES, seed=8)),
    "no rows": counts(0, N_GENES, seed=9),
    "no rows, dense": _densely(counts(0, N_GENES, seed=10), "int16"),
}
for _name, _adata in POOL.items():
    named(_adata, _name)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pool")
    for name, adata in POOL.items():
        if name.startswith("converted"):
            write_store(adata, folder / f"{name}.zarr", folder)
        else:
            write_plain(adata, folder / f"{name}.zarr", zarr_format=2 if "v2" in name else 3)
    return {name: folder / f"{name}.zarr" for name in POOL}


NAMES = st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=5).filter(
    lambda names: any(POOL[name].n_obs for name in names)
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=NAMES,
    batch_size=st.integers(1, 30),
    fetch_factor=st.integers(1, 9),
    block_size=st.integers(1, 20),
    layout=st.sampled_from(["csr", "dense", "scipy"]),
    cached=st.booleans(),
    in_flight_bytes=st.sampled_from([1, 5_000, 1 << 26]),
)
def test_every_row_of_every_store_once(
    pool, tmp_path, names, batch_size, fetch_factor, block_size, layout, cached, in_flight_bytes
):
    """Stores of any kind in any order, some of them twice. With a cache the second epoch is warm."""
    wanted = concat([POOL[name] for name in names])
    dataset = zl.open_dataset([pool[name] for name in names], cache=tmp_path / "cache" if cached else None)
    loader = zl.Loader(
        dataset,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        sampling=zl.BlockShuffling(min(block_size, batch_size * fetch_factor)),
        obs=OBS,
        layout=layout,
        options=zl.FetchOptions(in_flight_bytes=in_flight_bytes),
    )
    for _ in range(2):
        check_epoch(loader, wanted)
    assert loader.statistics().gets == 0 or not cached


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, draw=st.data())
def test_take_gives_any_rows_in_any_order(pool, names, draw):
    wanted = concat([POOL[name] for name in names])
    rows = draw.draw(st.lists(st.integers(0, wanted.n_obs - 1), max_size=20))
    taken = zl.open_dataset([str(pool[name]) for name in names]).take(rows)
    np.testing.assert_array_equal(dense(taken), wanted.X[rows].toarray())
    assert taken.X.dtype == np.result_type(*(POOL[name].X.dtype for name in names))
    assert scipy.sparse.issparse(taken.X) != all("dense" in name for name in names)
    assert taken.obs_names.tolist() == wanted.obs_names[rows].tolist()
    assert taken.var_names.equals(wanted.var_names)


def test_a_dataset_of_several_stores_describes_itself(pool):
    names = ["plain", "no rows", "converted", "one row"]
    wanted = concat([POOL[name] for name in names])
    dataset = zl.open_dataset([pool[name] for name in names])
    assert (len(dataset), dataset.n_obs, dataset.n_vars) == (112, 112, N_GENES)
    head = f"Dataset with n_obs x n_vars = 112 x 23 of {pool['plain']} and 3 more (4 stores)"
    assert repr(dataset).splitlines()[0] == head
    assert dataset.obs_columns == OBS
    assert dataset.matrix_names == ["X"]
    assert dataset.obs().index.tolist() == wanted.obs_names.tolist()
    pd.testing.assert_frame_equal(dataset.obs(["cell_type"]), wanted.obs[["cell_type"]])
    pd.testing.assert_frame_equal(dataset.obs(), wanted.obs, check_dtype=False)
    for row in (0, 49, 50, 110, 111):
        np.testing.assert_array_equal(dense(dataset.take([row])), wanted.X[[row]].toarray())
    for column in ("cell_type", "donor"):
        labels = dataset.categories(column)[dataset.obs_column(column).values].to_numpy(object)
        there = dataset.obs_column(column).values >= 0
        assert labels[there].tolist() == wanted.obs[column].astype(object)[there].tolist()


def test_the_same_minibatches_as_of_one_store_with_all_rows(pool, tmp_path):
    names = ["converted", "plain", "one row", "plain, v2"]
    write_store(concat([POOL[name] for name in names]), tmp_path / "one.zarr", tmp_path)
    one, several = zl.open_dataset(tmp_path / "one.zarr"), zl.open_dataset([pool[name] for name in names])
    sizes = {"batch_size": 8, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "obs": OBS, "seed": 5}
    assert digest(zl.Loader(one, **sizes)) == digest(zl.Loader(several, **sizes))


@pytest.mark.slow
def test_layers_and_raw_of_several_stores(tmp_path):
    adatas = [counts(30, N_GENES, seed=1), counts(20, N_GENES, seed=2)]
    for number, adata in enumerate(adatas):
        adata.layers["doubled"] = adata.X * 2 if number else (adata.X * 2).toarray()
        adata.layers[f"only {number}"] = adata.X
        adata.raw = ad.AnnData(X=adata.X[:, :7], var=adata.var.iloc[:7])
        write_plain(adata, tmp_path / f"{number}.zarr")
    dataset = zl.open_dataset([tmp_path / "0.zarr", tmp_path / "1.zarr"])
    assert dataset.matrix_names == ["X", "raw/X", "layers/doubled"]
    x = scipy.sparse.vstack([adata.X for adata in adatas]).toarray()
    for name, wanted in (("X", x), ("layers/doubled", x * 2), ("raw/X", x[:, :7])):
        for minibatch in zl.Loader(dataset, x=name, batch_size=16, fetch_factor=2, sampling=zl.BlockShuffling(4)):
            np.testing.assert_array_equal(dense(minibatch.x), wanted[minibatch.index.numpy()])
    with pytest.raises(FormatError, match=r"no matrix 'layers/only 0' in .*1\.zarr; there are: X, raw/X, layers/doub"):
        zl.Loader(dataset, x="layers/only 0")


def test_each_store_says_once_how_it_lays_out_a_matrix(pool, monkeypatch):
    asked = []
    matrix = OpenedStore.matrix
    monkeypatch.setattr(OpenedStore, "matrix", lambda store, name: asked.append((store, name)) or matrix(store, name))
    dataset = zl.open_dataset([pool[name] for name in sorted(pool) if name.startswith("converted")])
    for view in (dataset, dataset[10:], dataset[:, [3, 1]]):
        for _ in range(2):
            list(zl.Loader(view, obs=["donor"], batch_size=50))
    assert sorted(store.location.url for store, _ in asked) == sorted(store.location.url for store in dataset.stores)


def test_bytes_in_flight_are_bounded_over_all_stores(pool):
    names = ["converted", "plain", "plain, v2", "converted, dense"] * 2
    dataset = zl.open_dataset([pool[name] for name in names])
    sizes = {"batch_size": 50, "fetch_factor": 5, "sampling": zl.BlockShuffling(1)}
    free = zl.Loader(dataset, **sizes)
    assert sum(map(len, free)) == dataset.n_obs
    limit = free.statistics().most_in_flight_bytes // 4
    bound = zl.Loader(dataset, **sizes, options=fetch_options(in_flight_bytes=limit, max_read_bytes=1, gap_bytes=0))
    assert sum(map(len, bound)) == dataset.n_obs
    # A single task may exceed the bound by itself.
    assert bound.statistics().most_in_flight_bytes < free.statistics().most_in_flight_bytes / 2


# ------------------------------------------------------------------------------------------- collections


@pytest.mark.slow
def test_a_collection_opens_from_its_url_in_the_order_of_its_numbers(tmp_path):
    adatas = [named(counts(n + 1, N_GENES, seed=n), f"{n}:") for n in range(12)]
    dataset = zl.open_dataset(write_collection(adatas, tmp_path / "c.zarr"), cache=tmp_path / "cache")
    assert [store.location.url for store in dataset.stores][-2:] == [
        f"{tmp_path}/c.zarr/dataset_10",
        f"{tmp_path}/c.zarr/dataset_11",
    ]
    assert repr(dataset).startswith(f"Dataset with n_obs x n_vars = 78 x 23 of {tmp_path}/c.zarr (12 stores)")
    wanted = concat(adatas)
    assert dataset.obs([]).index.tolist() == wanted.obs_names.tolist()
    loader = zl.Loader(dataset, batch_size=5, fetch_factor=4, sampling=zl.BlockShuffling(4), obs=OBS)
    for _ in range(2):
        check_epoch(loader, wanted)
    assert loader.statistics().gets == 0


@pytest.mark.slow
def test_a_collection_takes_one_listing(tmp_path, sim):
    adatas = [counts(9, N_GENES, seed=n) for n in range(3)]
    write_collection(adatas, tmp_path / "bucket" / "c.zarr")
    server = sim(root=tmp_path)
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://bucket/c.zarr/", storage_options=options)
    assert sum("list-type" in entry["path"] for entry in server.log) == 1
    check_epoch(zl.Loader(dataset, batch_size=4, fetch_factor=2, sampling=zl.BlockShuffling(2)), concat(adatas))
    assert dataset.stores[2].location.url == "s3://bucket/c.zarr/dataset_2"


@pytest.mark.slow
def test_lists_hold_collections_and_stores_from_disk_and_s3(pool, s3, tmp_path):
    adatas = [counts(11, N_GENES, seed=n) for n in range(2)]
    write_store(POOL["one row"], s3.url("one.zarr"), tmp_path, storage_options=s3.storage_options)
    urls = (write_collection(adatas, tmp_path / "c.zarr"), s3.url("one.zarr"), pool["plain"].as_uri())
    dataset = zl.open_dataset(urls, storage_options=s3.storage_options, cache=tmp_path / "cache")
    wanted = concat([*adatas, POOL["one row"], POOL["plain"]])
    check_epoch(zl.Loader(dataset, batch_size=8, fetch_factor=2, sampling=zl.BlockShuffling(4), obs=OBS), wanted)
    with pytest.raises(StoreNotFoundError, match=r"no such directory: .*nothing\.zarr"):
        zl.open_dataset([*urls, tmp_path / "nothing.zarr"], storage_options=s3.storage_options)


@pytest.mark.slow
def test_a_collection_that_lacks_a_dataset_is_refused(tmp_path):
    write_collection([counts(5, N_GENES), counts(5, N_GENES), counts(5, N_GENES)], tmp_path / "c.zarr")
    shutil.rmtree(tmp_path / "c.zarr" / "dataset_1")
    with pytest.raises(FormatError, match=r"c\.zarr is an annbatch collection without dataset_1: it is incomplete"):
        zl.open_dataset(tmp_path / "c.zarr")
    write_collection([], tmp_path / "empty.zarr")
    with pytest.raises(FormatError, match="without dataset_0"):
        zl.open_dataset(tmp_path / "empty.zarr")


# ------------------------------------------------------------------------------------------- genes


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("genes", "says"),
    [
        (["a", "b", "x", "d"], r"gene 2 of var is 'x' in \S+1\.zarr, but 'c' in \S+0\.zarr: .*join='inner'"),
        (["b", "a", "c", "d"], r"gene 0 of var is 'b' in \S+1\.zarr, but 'a' in \S+0\.zarr"),
        (["a", "b", "c"], r"gene 3 of var is missing in \S+1\.zarr, but 'd' in"),
        (["a", "b", "c", "d", "e"], r"gene 4 of var is 'e' in \S+1\.zarr, but missing in"),
    ],
    ids=["renamed", "reordered", "fewer", "more"],
)
def test_other_genes_are_refused_with_the_first_difference(tmp_path, genes, says):
    for number, names in enumerate((["a", "b", "c", "d"], genes)):
        write_plain(ad.AnnData(X=np.ones((2, len(names))), var=pd.DataFrame(index=names)), tmp_path / f"{number}.zarr")
    with pytest.raises(FormatError, match=says):
        zl.open_dataset([tmp_path / "0.zarr", tmp_path / "0.zarr", tmp_path / "1.zarr"])


def test_other_genes_in_raw_are_refused_when_raw_is_asked_for(tmp_path):
    for number, name in enumerate("ab"):
        adata = counts(3, N_GENES)
        adata.raw = ad.AnnData(X=np.ones((3, 1)), var=pd.DataFrame(index=[name]))
        write_plain(adata, tmp_path / f"{number}.zarr")
    dataset = zl.open_dataset([tmp_path / "0.zarr", tmp_path / "1.zarr"])
    zl.Loader(dataset)
    with pytest.raises(FormatError, match=r"gene 0 of raw/var is 'b' in .*1\.zarr, but 'a' in"):
        zl.Loader(dataset, x="raw/X")


# ------------------------------------------------------------------------------------------- obs


def with_obs(folder: Path, *frames: dict[str, object]) -> zl.Dataset:
    """A dataset of several stores with these obs columns."""
    for number, columns in enumerate(frames):
        n_rows = len(next(iter(columns.values())))
        obs = pd.DataFrame(columns, index=[f"{number} {row}" for row in range(n_rows)])
        adata = ad.AnnData(X=np.ones((n_rows, 2), np.float32), obs=obs, var=pd.DataFrame(index=["a", "b"]))
        with ad.settings.override(allow_write_nullable_strings=True):
            write_plain(adata, folder / f"{number}.zarr")
    return zl.open_dataset([folder / f"{number}.zarr" for number in range(len(frames))])


def test_categories_are_the_union_in_order_of_first_appearance(tmp_path):
    kinds = [
        pd.Categorical(["T", None, "B"], ["unused", "T", "B"]),
        pd.Categorical(["A", "B"], ["B", "A"]),
        pd.Categorical(["T", None], ["T", "unused too"]),
    ]
    dataset = with_obs(tmp_path, *({"kind": kind} for kind in kinds))
    assert dataset.categories("kind").tolist() == ["unused", "T", "B", "A", "unused too"]
    assert dataset.obs_column("kind").values.tolist() == [1, -1, 2, 3, 2, 1, -1]
    minibatch = next(iter(zl.Loader(dataset, obs=["kind"], sampling=zl.Streaming())))
    assert minibatch.obs["kind"].tolist() == [1, -1, 2, 3, 2, 1, -1]
    frame = dataset.obs()
    assert frame["kind"].cat.categories.tolist() == dataset.categories("kind").tolist()
    assert frame["kind"].astype(object).fillna("").tolist() == ["T", "", "B", "A", "B", "T", ""]


def test_more_categories_than_a_store_of_its_own_had_room_for(tmp_path):
    columns = [pd.Categorical([f"{store}.{label}" for label in range(100)]) for store in range(3)]
    dataset = with_obs(tmp_path, *({"kind": column} for column in columns))
    assert dataset.categories("kind").tolist() == [label for column in columns for label in column.categories]
    codes = dataset.obs_column("kind").values
    assert dataset.categories("kind")[codes].tolist() == [label for column in columns for label in column]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_order_of_categories_is_kept_where_all_stores_have_it(tmp_path, ordered):
    same = pd.Categorical(["lo"], ["lo", "hi"], ordered=True)
    other = pd.Categorical(["hi"], ["lo", "hi"] if ordered else ["hi", "lo"], ordered=True)
    frame = with_obs(tmp_path, {"level": same}, {"level": other}).obs()
    assert frame["level"].cat.ordered == ordered
    assert frame["level"].tolist() == ["lo", "hi"]


def test_strings_become_codes_of_sorted_labels_of_all_stores(tmp_path):
    dataset = with_obs(tmp_path, {"donor": ["d2", "d9"]}, {"donor": ["d10", "d2"]})
    assert dataset.categories("donor").tolist() == ["d10", "d2", "d9"]
    assert dataset.obs_column("donor").values.tolist() == [1, 2, 0, 1]
    assert dataset.obs()["donor"].tolist() == ["d2", "d9", "d10", "d2"]


def test_strings_in_one_store_and_categories_in_another_are_labels_alike(tmp_path):
    dataset = with_obs(tmp_path, {"donor": ["d2", "d9"]}, {"donor": pd.Categorical(["d1", "d2"])})
    assert dataset.categories("donor").tolist() == ["d2", "d9", "d1"]
    assert dataset.obs_column("donor").values.tolist() == [0, 1, 2, 0]
    assert dataset.obs()["donor"].tolist() == ["d2", "d9", "d1", "d2"]


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [[1, 2], [True, False], pd.array([1, None], "Int64")], ids=["int", "bool", "nullable"]
)
@pytest.mark.parametrize(
    ("second", "kind"), [(pd.Categorical(["x", "y"]), "categories"), (["x", "y"], "strings")], ids=str
)
@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_in_one_store_and_labels_in_another_are_an_error(tmp_path, first, second, kind, swapped):
    frames = [{"odd": second}, {"odd": first}] if swapped else [{"odd": first}, {"odd": second}]
    dataset = with_obs(tmp_path, *frames)
    kinds = (kind, "numbers") if swapped else ("numbers", kind)
    says = rf"'odd' holds {kinds[0]} in \S+0\.zarr and {kinds[1]} in \S+1\.zarr"
    for use in (dataset.obs, lambda: dataset.obs_column("odd"), lambda: list(zl.Loader(dataset, obs=["odd"]))):
        with pytest.raises(FormatError, match=says):
            use()


def test_numbers_promote(tmp_path):
    dataset = with_obs(
        tmp_path,
        {"a": np.array([1, 2], "int8"), "b": np.array([1, 2], "int32"), "c": pd.array([1, 2], "Int32")},
        {"a": np.array([300], "int16"), "b": np.array([0.5], "float32"), "c": pd.array([None], "Int32")},
        {"a": np.array([True]), "b": np.array([3], "uint8"), "c": pd.array([7], "Int32")},
    )
    assert {name: dataset.obs_column(name).values.dtype.name for name in "abc"} == {
        "a": "int16",
        "b": "float64",
        "c": "float64",
    }
    assert dataset.obs_column("a").values.tolist() == [1, 2, 300, 1]
    assert dataset.obs_column("b").values.tolist() == [1, 2, 0.5, 3]
    np.testing.assert_array_equal(dataset.obs_column("c").values, [1, 2, np.nan, 7])
    assert dataset.obs()["c"].dtype == "Int32"
    assert dataset.obs()["c"].isna().tolist() == [False, False, True, False]


def test_a_column_that_one_store_lacks_is_not_offered(tmp_path):
    dataset = with_obs(tmp_path, {"a": [1], "both": [2]}, {"both": [3], "c": [4]})
    assert dataset.obs_columns == ["both"]
    assert dataset.obs()["both"].tolist() == [2, 3]
    for column, store in (("a", 1), ("c", 0)):
        with pytest.raises(
            MissingColumnError, match=rf"no obs column '{column}' in \S+{store}\.zarr; there are: 'both'"
        ):
            zl.Loader(dataset, obs=[column])


# ------------------------------------------------------------------------------------------- mirrors and identity


def test_a_mirror_of_a_store_serves_every_dataset_it_is_in(pool, tmp_path):
    cache = tmp_path / "cache"
    one, other = pool["converted"], pool["plain, v2"]
    check_epoch(
        zl.Loader(zl.open_dataset([one, other], cache=cache), batch_size=8),
        concat([POOL["converted"], POOL["plain, v2"]]),
    )
    assert len(list(cache.glob("*-v*/X.rows"))) == 2
    for urls in (one, other, [other, one], [one, one]):
        loader = zl.Loader(zl.open_dataset(urls, cache=cache), batch_size=8)
        assert sum(map(len, loader)) == loader.dataset.n_obs
        assert loader.statistics().gets == 0
    assert len(list(cache.glob("*-v*/X.rows"))) == 2


def test_a_fingerprint_is_of_all_stores_in_their_order(pool):
    one, two = zl.open_dataset(pool["plain"]), zl.open_dataset(pool["plain, v2"])
    assert zl.open_dataset([pool["plain"]]).fingerprint == one.fingerprint
    both = zl.open_dataset([pool["plain"], pool["plain, v2"]])
    assert [store.fingerprint for store in both.stores] == [one.fingerprint, two.fingerprint]
    assert zl.open_dataset([pool["plain"], pool["plain, v2"]]).fingerprint == both.fingerprint
    swapped = zl.open_dataset([pool["plain, v2"], pool["plain"]])
    assert len({one.fingerprint, two.fingerprint, both.fingerprint, swapped.fingerprint}) == 4


@pytest.mark.slow
def test_datasets_of_several_stores_pickle(tmp_path):
    adatas = [counts(11, N_GENES, seed=n) for n in range(2)]
    write_collection(adatas, tmp_path / "c.zarr")
    dataset = zl.open_dataset([tmp_path / "c.zarr", tmp_path / "c.zarr"])
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fingerprint == dataset.fingerprint
    check_epoch(zl.Loader(again, batch_size=4, fetch_factor=2, sampling=zl.BlockShuffling(2)), concat(adatas * 2))
    pickled = pickle.dumps(dataset)
    write_plain(counts(11, N_GENES, seed=5), tmp_path / "c.zarr", key="dataset_1")
    with pytest.raises(StoreChangedError, match=r"c\.zarr/dataset_1 has changed"):
        pickle.loads(pickled)
    pickled = pickle.dumps(zl.open_dataset(tmp_path / "c.zarr"))
    write_plain(counts(3, N_GENES), tmp_path / "c.zarr", key="dataset_2")
    with pytest.raises(StoreChangedError, match=r"c\.zarr/dataset_2 has changed"):
        pickle.loads(pickled)


# ------------------------------------------------------------------------------------------- errors


@pytest.fixture
def two(pool, tmp_path) -> list[Path]:
    """Two stores that a test may damage."""
    return [Path(shutil.copytree(pool["converted"], tmp_path / f"{name}.zarr")) for name in ("good", "bad")]


def test_damage_is_named_with_its_store(two):
    victim = two[1] / "X" / "data" / "c" / "0"
    content = bytearray(victim.read_bytes())
    content[5] ^= 0xFF
    victim.write_bytes(content)
    with pytest.raises(CorruptChunkError, match=r"bad\.zarr: chunk 0 of X/data, bytes 0-\d+ of X/data/c/0: its crc32c"):
        list(zl.Loader(zl.open_dataset(two), batch_size=8))


def test_a_missing_object_is_named_with_its_store(two):
    (two[1] / "X" / "indices" / "c" / "0").unlink()
    with pytest.raises(MissingObjectError, match=r"bad\.zarr: X/indices/c/0 is not there"):
        list(zl.Loader(zl.open_dataset(two), batch_size=8))
    shutil.rmtree(two[1] / "obs" / "lane" / "c")
    with pytest.raises(MissingObjectError, match=r"bad\.zarr: obs/lane/c/0 is missing"):
        zl.open_dataset(two).obs(["lane"])


def test_a_matrix_that_cannot_be_read_is_named_with_its_store(pool, tmp_path):
    write_plain(POOL["plain"], tmp_path / "coo.zarr")
    zarr.open_group(tmp_path / "coo.zarr", mode="r+")["X"].attrs["encoding-type"] = "coo_matrix"
    with pytest.raises(FormatError, match=r"X of \S+coo\.zarr is a coo_matrix"):
        zl.Loader(zl.open_dataset([pool["plain"], tmp_path / "coo.zarr"]))
    write_plain(POOL["plain"], tmp_path / "short.zarr")
    zarr.open_group(tmp_path / "short.zarr", mode="r+")["X"].attrs["shape"] = [49, N_GENES]
    with pytest.raises(FormatError, match=r"X of \S+short\.zarr has 49 rows and 23 genes, but 50 and 23 are expected"):
        zl.Loader(zl.open_dataset([pool["plain"], tmp_path / "short.zarr"]))


def test_what_takes_one_store_says_so(pool, tmp_path):
    dataset = zl.open_dataset([pool["plain"], pool["converted"]])
    with pytest.raises(OptionError, match=r"this works on a single store. Open one of them, such as \S+plain\.zarr"):
        dataset.store.object_sizes()
    collection = write_collection([POOL["plain"], POOL["plain"]], tmp_path / "c.zarr")
    with pytest.raises(OptionError, match=r"c\.zarr \(2 stores\): this works on a single store.*c\.zarr/dataset_0"):
        zl.verify(collection)


# ------------------------------------------------------------------------------------------- cost and summary


@pytest.mark.parametrize("block_size", [1, 8])
def test_the_cost_of_several_stores_is_what_is_spent(pool, block_size):
    names = ["converted", "no rows", "converted, dense", "plain", "one row"]
    dataset = zl.open_dataset([pool[name] for name in names])
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=2, sampling=zl.BlockShuffling(block_size))
    foretold = epoch_costs(dataset, loader.plan(0)).unmirrored
    assert sum(map(len, loader)) == dataset.n_obs
    done = loader.statistics()
    assert foretold == EpochCost(gets=done.gets, bytes_read=done.bytes_read, exact=True)
    part = epoch_costs(dataset, loader.plan(0), most_fetches=loader.plan(0).n_fetches - 1)
    assert not part.unmirrored.exact
    assert 0 < part.first_mirrored.gets <= part.unmirrored.gets


def test_the_summary_of_several_stores_is_of_all(pool):
    names = ["converted", "plain", "plain, dense", "no rows"]
    dataset = zl.open_dataset([pool[name] for name in names])
    summary = summarize(dataset)
    sizes = [summarize(zl.open_dataset(pool[name])).stored_bytes for name in names]
    assert (summary.stores, summary.rows, summary.genes, summary.stored_bytes) == (4, 130, N_GENES, sum(sizes))
    assert [column.name for column in summary.obs] == OBS
    assert (summary.obs[0].kind, summary.obs[0].categories) == ("categorical", None)
    (x,) = summary.matrices
    assert (x.encoding, x.rows, x.problem) == ("csr_matrix / dense", 130, None)
    assert x.values == POOL["converted"].X.nnz + POOL["plain"].X.nnz + POOL["plain, dense"].X.size
    arrays = {array.path: array for array in x.arrays}
    assert arrays.keys() == {"X/indices", "X/data", "X"}
    assert arrays["X/data"].dtype == "uint16 / float32"
    assert arrays["X/data"].elements == POOL["converted"].X.nnz + POOL["plain"].X.nnz
