"""Several matrices in one minibatch: each equals what a loader of that matrix alone yields."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch
from helpers import counts, dense, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import FormatError, OptionError
from zloader.insight.cost import epoch_costs
from zloader.testing import assert_resumes_anywhere

SIZES = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "seed": 2}
NAMES = ["layers/dense", "X", "raw/X"]


def source(n_rows: int, seed: int) -> ad.AnnData:
    """X, a layer with other values at other genes, a dense layer, and raw with more genes."""
    raw = counts(n_rows, 40, seed=seed)
    adata = counts(n_rows, 30, seed=seed + 1)
    adata.obs = raw.obs
    adata.layers["other"] = counts(n_rows, 30, density=0.1, seed=seed + 2).X
    adata.layers["dense"] = counts(n_rows, 30, seed=seed + 3).X.toarray()
    adata.raw = raw
    return adata


ADATA = source(203, 0)


def matrix(name: str) -> np.ndarray:
    found = {"X": ADATA.X, "raw/X": ADATA.raw.X, "layers/other": ADATA.layers["other"]}
    return dense(found.get(name, ADATA.layers["dense"]))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("matrices")
    write_store(ADATA, folder / "store.zarr", folder)
    return str(folder / "store.zarr")


@pytest.fixture(params=["local", "mirror", "s3"])
def dataset(request, store, tmp_path) -> zl.Dataset:
    if request.param != "s3":
        return zl.open_dataset(store, cache=tmp_path / "cache" if request.param == "mirror" else None)
    s3 = request.getfixturevalue("s3")
    write_store(ADATA, s3.url("store.zarr"), tmp_path, storage_options=s3.storage_options)
    return zl.open_dataset(s3.url("store.zarr"), storage_options=s3.storage_options)


def check(loader: zl.Loader, names=NAMES, genes=slice(None)) -> None:
    rows = []
    for minibatch in loader:
        assert list(minibatch.x) == names
        rows.append(minibatch.index.numpy())
        for name, x in minibatch.x.items():
            np.testing.assert_array_equal(dense(x), matrix(name)[rows[-1]][:, genes])
        np.testing.assert_array_equal(minibatch.obs["lane"], ADATA.obs["lane"].iloc[rows[-1]])
    assert sorted(np.concatenate(rows)) == list(range(ADATA.n_obs))


@pytest.mark.every(15)
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
def test_rows_are_aligned_and_in_the_order_of_a_single_matrix(dataset, layout):
    loader = zl.Loader(dataset, x=NAMES, obs=["lane"], layout=layout, **SIZES)
    for _ in range(2):
        check(loader)
    single = zl.Loader(dataset, x="X", layout=layout, **SIZES)
    for one, several in zip(single, zl.Loader(dataset, x=NAMES, layout=layout, **SIZES), strict=True):
        assert one.index.tolist() == several.index.tolist()
        assert type(one.x) is type(several.x["X"])
        np.testing.assert_array_equal(dense(one.x), dense(several.x["X"]))


def test_a_list_of_one_is_a_mapping(store):
    minibatch = next(iter(zl.Loader(zl.open_dataset(store), x=("X",), **SIZES)))
    assert list(minibatch.x) == ["X"]
    assert isinstance(next(iter(zl.Loader(zl.open_dataset(store), x=iter(["X"]), **SIZES))).x["X"], torch.Tensor)


@pytest.mark.parametrize(
    "genes", [["gene 7", "gene 2", "gene 29"], [7, 2, 29], [index in (2, 9) for index in range(30)]]
)
def test_genes_are_the_same_in_every_matrix(store, genes):
    chosen = [2, 9] if len(genes) == 30 else [7, 2, 29]
    loader = zl.Loader(zl.open_dataset(store)[:, genes], x=["X", "raw/X", "layers/other"], obs=["lane"], **SIZES)
    check(loader, ["X", "raw/X", "layers/other"], chosen)


def test_genes_that_raw_does_not_have_are_refused(tmp_path):
    adata = source(20, 0)
    adata.raw = adata.raw[:, 5:].to_adata()
    write_store(adata, tmp_path / "a.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    for genes in (["gene 4", "gene 6"], [4, 6]):
        with pytest.raises(OptionError, match=r"1 of 2 genes are not in raw/var of \S+a\.zarr: 'gene 4'"):
            zl.Loader(dataset[:, genes], x=["raw/X", "X"])
    minibatch = next(iter(zl.Loader(dataset[:, ["gene 6"]], x=["raw/X", "X"], shuffle=False, **{"batch_size": 20})))
    for x in minibatch.x.values():
        assert x.shape == (20, 1)
    np.testing.assert_array_equal(dense(minibatch.x["raw/X"]), adata.raw[:, ["gene 6"]].X.toarray())


@pytest.mark.slow
def test_it_resumes_anywhere_in_workers_and_on_ranks(store):
    dataset = zl.open_dataset(store)

    def make(**options):
        return zl.Loader(dataset, x=NAMES, obs=["lane"], **SIZES, **options)

    assert_resumes_anywhere(make, every=3)
    check([minibatch for rank in range(3) for minibatch in make(rank=rank, world_size=3)])
    check(DataLoader(make(), batch_size=None, num_workers=2, multiprocessing_context="fork"))


@pytest.mark.every(3)
def test_statistics_and_costs_count_every_matrix(dataset):
    figures = {}
    for x in (*NAMES, NAMES):
        loader = zl.Loader(dataset, x=x, **SIZES)
        rows = sum(len(minibatch) for minibatch in loader)
        assert rows == ADATA.n_obs
        statistics = loader.statistics()
        costs = epoch_costs(dataset, loader.plan(0), x=x, options=loader.options)
        figures[str(x)] = (
            statistics.chunks_decoded,
            *(
                getattr(cost, name)
                for cost in (costs.unmirrored, costs.first_mirrored)
                for name in ("gets", "bytes_read")
            ),
        )
        if dataset.cache is None:
            assert (statistics.gets, statistics.bytes_read) == (costs.unmirrored.gets, costs.unmirrored.bytes_read)
    *single, together = figures.values()
    for position in (1, 2, 3, 4) if dataset.cache else (0, 1, 2, 3, 4):
        assert together[position] == sum(each[position] for each in single)


def test_pinning_and_moving_reach_every_matrix(store):
    minibatch = next(iter(zl.Loader(zl.open_dataset(store), x=["X", "raw/X"], **SIZES)))
    moved = minibatch.to("meta")
    assert {name: x.device.type for name, x in moved.x.items()} == {"X": "meta", "raw/X": "meta"}


@pytest.mark.slow
def test_several_stores(tmp_path):
    adatas = [source(21, 3), source(33, 9)]
    adatas[1] = adatas[1][:, ::-1].copy()
    for number, adata in enumerate(adatas):
        write_store(adata, tmp_path / f"{number}.zarr", tmp_path)
    dataset = zl.open_dataset([tmp_path / "0.zarr", tmp_path / "1.zarr"], join="inner")
    loader = zl.Loader(dataset, x=["X", "layers/other", "raw/X"], **SIZES)
    names = dataset.var_names
    wanted = {
        "X": np.concatenate([adata[:, names].X.toarray() for adata in adatas]),
        "layers/other": np.concatenate([adata[:, names].layers["other"].toarray() for adata in adatas]),
        "raw/X": np.concatenate([adata.raw.X.toarray() for adata in adatas]),
    }
    for minibatch in loader:
        for name, x in minibatch.x.items():
            np.testing.assert_array_equal(dense(x), wanted[name][minibatch.index])


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ([], "x is an empty list"),
        (["X", "raw/X", "X"], "x lists 'X' more than once"),
        (["X", 5], "x must be a list of names"),
    ],
)
def test_unusable_lists(store, x, says):
    with pytest.raises(OptionError, match=says):
        zl.Loader(zl.open_dataset(store), x=x)


def test_an_unknown_matrix_in_a_list(store):
    with pytest.raises(FormatError, match="no matrix 'layers/no'"):
        zl.Loader(zl.open_dataset(store), x=["X", "layers/no"])
