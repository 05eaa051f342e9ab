"""Mixtures of stores, views and conditions, through a Loader, with values compared with AnnData."""

from __future__ import annotations

import pickle
import shutil

import anndata as ad
import numpy as np
import pytest
from helpers import counts, dense, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError

pytestmark = pytest.mark.any_version

SIZES = {"batch_size": 20, "fetch_factor": 5}
STORES = {"a": counts(300, 30, seed=1), "b": counts(90, 25, seed=2)}
STORES["b"].var_names = [f"gene {number}" for number in range(29, 4, -1)]  # in another order
BOTH = ad.concat(STORES.values(), join="outer", index_unique="-")


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("stores")
    for name, adata in STORES.items():
        write_store(adata, folder / f"{name}.zarr", folder)
    return [str(folder / f"{name}.zarr") for name in STORES]


@pytest.fixture(params=[False, True], ids=["store", "mirror"])
def both(request, urls, tmp_path) -> zl.Dataset:
    return zl.open_dataset(urls, join="outer", cache=tmp_path / "cache" if request.param else None)


def rows_of(loader) -> np.ndarray:
    return np.concatenate([minibatch.index.numpy() for minibatch in loader])


def test_two_stores_in_shares_have_the_values_of_anndata(both, urls):
    a, b = map(zl.open_dataset, urls)
    sampling = zl.Mixture({"a": (a, 0.25), "b": (b, 0.75)}, block_size=5)
    loader = zl.Loader(both, sampling=sampling, obs=["donor"], **SIZES)
    values, donors = BOTH.X.toarray(), both.obs(["donor"])["donor"].astype(str).to_numpy()
    labels = both.categories("donor").to_numpy()
    for _ in range(2):
        seen = []
        for minibatch in loader:
            rows = minibatch.index.numpy()
            np.testing.assert_array_equal(dense(minibatch.x), values[rows])
            assert labels[minibatch.obs["donor"].numpy()].tolist() == donors[rows].tolist()
            seen += rows.tolist()
        assert len(seen) == 390
        assert abs(np.count_nonzero(np.array(seen) < 300) - 0.25 * 390) <= 5


def test_groups_are_stores_views_or_conditions(urls):
    both = zl.open_dataset(urls, join="outer")
    b = zl.open_dataset(urls[1])
    mask = np.arange(390) % 7 == 0
    by_hand = {
        "whole": (both, range(390)),
        "store": (b, range(300, 390)),
        "view of a store": (b[10:20], range(310, 320)),
        "view": (both.where("passed"), np.flatnonzero(both.obs()["passed"])),
        "view of a view": (both.where("passed")[:50], np.flatnonzero(both.obs()["passed"])[:50]),
        "expression": ("lane == 3", np.flatnonzero(both.obs()["lane"] == 3)),
        "mask": (mask, np.flatnonzero(mask)),
        "series": (both.obs()["lane"] == 3, np.flatnonzero(both.obs()["lane"] == 3)),
        "rows": ([5, 380, 3], [3, 5, 380]),
    }
    for group, rows in by_hand.values():
        found = both.rows_of(group)
        assert np.flatnonzero(found.mask()).tolist() == list(rows)
        assert found.numbers(np.arange(len(found))).tolist() == list(rows)
        loader = zl.Loader(both, sampling=zl.Mixture({"group": (group, 2)}, block_size=3), x=None, **SIZES)
        assert sorted(rows_of(loader)) == list(rows)


def test_a_store_that_was_opened_twice_keeps_its_places(urls):
    thrice = zl.open_dataset([urls[1], urls[0], urls[1]], join="outer")
    assert np.flatnonzero(thrice.rows_of(thrice[395:400]).mask()).tolist() == list(range(395, 400))
    assert np.flatnonzero(thrice.rows_of(zl.open_dataset(urls[1])[2:4]).mask()).tolist() == [2, 3]
    pair = zl.open_dataset([urls[1], urls[1]], join="outer")
    assert np.flatnonzero(thrice.rows_of(pair[88:92]).mask()).tolist() == [88, 89, 390, 391]


def test_groups_of_a_view(urls):
    both = zl.open_dataset(urls, join="outer")
    train, held_out = both.split([0.8, 0.2], seed=3)
    groups = {"passed": (train.where("passed"), 1), "lane": ("lane == 3", 1), "store": (train[5:200], 1)}
    loader = zl.Loader(train, sampling=zl.Mixture(groups, block_size=2, epoch_rows=900), **SIZES)
    obs, values, seen = both.obs(), BOTH.X.toarray(), []
    for minibatch in loader:
        rows = minibatch.index.numpy()
        seen += rows.tolist()
        np.testing.assert_array_equal(dense(minibatch.x), values[rows])
    chosen = {*train.row_numbers[5:200]} | {*np.flatnonzero((obs["lane"] == 3) | obs["passed"])}
    wanted = chosen - {*held_out.row_numbers}
    assert {*seen} <= wanted
    assert len({*seen}) > 0.98 * len(wanted)  # a row may come less than two times fewer than it should
    assert zl.quality(both.obs_column("donor").values, loader.plan(0)).minibatches == 45
    with pytest.raises(OptionError, match=r"has \d+ rows that are not among the 312 rows of the view, such as row"):
        zl.Loader(train, sampling=zl.Mixture({"all": (both, 1)}), **SIZES)


REFUSED = {
    "a store of another dataset": (lambda a, b: (a, b), OptionError, r"b.zarr, which is not a store of the dataset"),
    "an unknown column": (lambda a, b: (a, "pased"), MissingColumnError, "Did you mean 'passed'"),
    "an unknown label": (lambda a, b: (a, "cell_type == 'never usd'"), OptionError, "Did you mean 'never used'"),
    "no rows": (lambda a, b: (a, "cell_type == 'never used'"), OptionError, "the group 'empty' has no row"),
    "a short mask": (lambda a, b: (a, [True, False]), OptionError, "a mask over all 300 rows"),
    "rows that do not exist": (lambda a, b: (a, [300]), OptionError, "row 300 does not exist"),
    "no rows at all": (lambda a, b: (a, None), OptionError, "1-d sequence of row numbers"),
}


@pytest.mark.parametrize(("make", "kind", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_mixed_is_refused_when_the_loader_is_made(urls, make, kind, says):
    dataset, group = make(*map(zl.open_dataset, urls))
    with pytest.raises(kind, match=says):
        zl.Loader(dataset, sampling=zl.Mixture({"all": (dataset, 1), "empty": (group, 1)}), **SIZES)


def test_a_store_that_has_changed_is_refused(tmp_path):
    write_store(STORES["b"], tmp_path / "b.zarr", tmp_path)
    before = zl.open_dataset(tmp_path / "b.zarr")
    shutil.rmtree(tmp_path / "b.zarr")
    write_store(STORES["a"], tmp_path / "b.zarr", tmp_path)
    with pytest.raises(OptionError, match="has changed since"):
        zl.Loader(zl.open_dataset(tmp_path / "b.zarr"), sampling=zl.Mixture({"b": (before, 1)}), **SIZES)


def test_a_block_larger_than_a_fetch_is_refused(urls):
    dataset = zl.open_dataset(urls[0])
    with pytest.raises(OptionError, match="block_size 64 is larger than a fetch"):
        zl.Loader(dataset, sampling=zl.Mixture({"a": (dataset, 1)}), batch_size=4, fetch_factor=4)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_and_workers_divide_the_same_order(urls, context):
    both = zl.open_dataset(urls, join="outer")
    sampling = zl.Mixture({"a": (both[:300], 1), "b": (zl.open_dataset(urls[1]), 1)}, block_size=4)
    options = {"x": None, "sampling": sampling, **SIZES}
    whole = rows_of(zl.Loader(both, rank=0, world_size=1, **options))
    seen = []
    for rank in range(2):
        loader = zl.Loader(both, rank=rank, world_size=2, **options)
        seen += rows_of(DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=context)).tolist()
    assert sorted(seen) == sorted(whole)


def test_a_pickled_loader_has_the_same_order(urls):
    both = zl.open_dataset(urls, join="outer")
    sampling = zl.Mixture({"a": (both.where("passed"), 0.6), "b": (zl.open_dataset(urls[1]), 0.4)}, block_size=4)
    loader = zl.Loader(both, x=None, sampling=sampling, **SIZES)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict() == loader.state_dict()
    np.testing.assert_array_equal(rows_of(copied), rows_of(loader))
