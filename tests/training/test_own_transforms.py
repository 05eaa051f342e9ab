"""batch_transform: the user's own function, in the threads that gather minibatches."""

from __future__ import annotations

import functools
import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_threads_end, counts, dense, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.testing import assert_resumes_anywhere
from zloader.training.minibatch import _bytes_of

SIZES = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "seed": 2}
OPTIONS = {"obs": ["lane"], "obsm": ["place"], **SIZES}
ADATA = counts(120, 30)
ADATA.obsm["place"] = np.arange(240.0).reshape(120, 2)
ADATA.layers["dense"] = ADATA.X.toarray()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("own")
    write_store(ADATA, folder / "store.zarr", folder)
    return zl.open_dataset(folder / "store.zarr")


def unchanged(minibatch: zl.Minibatch) -> zl.Minibatch:
    return minibatch


def twice(x: Any) -> Any:
    return x * 2


def doubled(minibatch: zl.Minibatch) -> zl.Minibatch:
    x = minibatch.x
    return zl.Minibatch(minibatch, x={name: twice(x[name]) for name in x} if isinstance(x, dict) else twice(x))


def totals(minibatch: zl.Minibatch) -> tuple[torch.Tensor, list[int]]:
    return minibatch.x.to_dense().sum(dim=1), minibatch.index.tolist()


def check(minibatch: zl.Minibatch, factor: int) -> np.ndarray:
    rows = minibatch.index.numpy()
    x = minibatch.x if isinstance(minibatch.x, dict) else {"X": minibatch.x}
    for each in x.values():
        np.testing.assert_array_equal(dense(each), factor * dense(ADATA.X)[rows])
    np.testing.assert_array_equal(minibatch.obs["lane"], ADATA.obs["lane"].iloc[rows])
    np.testing.assert_array_equal(minibatch.obsm["place"], ADATA.obsm["place"][rows])
    np.testing.assert_array_equal(minibatch.row, rows)
    return rows


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
@pytest.mark.parametrize("x", ["X", ["X", "layers/dense"]], ids=["one", "several"])
def test_every_minibatch_is_transformed(dataset, layout, x):
    plain = zl.Loader(dataset, layout=layout, x=x, **OPTIONS)
    own = zl.Loader(dataset, layout=layout, x=x, batch_transform=doubled, **OPTIONS)
    for _ in range(2):
        for minibatch, twofold in zip(plain, own, strict=True):
            assert check(minibatch, 1).tolist() == check(twofold, 2).tolist()
            assert type(minibatch.x) is type(twofold.x)
    assert own.statistics().rows == 120


def test_a_batch_transform_may_return_anything(dataset):
    loader = zl.Loader(dataset, batch_transform=totals, transforms=[zl.transforms.Clip(0, 1)], **SIZES)
    rows = []
    for found, index in loader:
        np.testing.assert_array_equal(found, np.count_nonzero(dense(ADATA.X)[index], axis=1))
        rows += index
    assert sorted(rows) == list(range(120))
    assert (loader.statistics().rows, loader.statistics().minibatches) == (120, len(loader))
    assert [*zl.Loader(dataset, batch_transform=lambda minibatch: None, **SIZES)] == [None] * len(loader)


def test_it_runs_on_other_threads(dataset):
    seen = []

    def note(minibatch: zl.Minibatch) -> zl.Minibatch:
        seen.append((threading.current_thread().name, len(minibatch)))
        return minibatch

    assert len([*zl.Loader(dataset, batch_transform=note, **SIZES)]) == 8
    assert sum(n_rows for _, n_rows in seen) == 120
    assert all(name.startswith("zloader-gather") for name, _ in seen)


def test_without_x(dataset):
    loader = zl.Loader(dataset, x=None, batch_transform=unchanged, **OPTIONS)
    for minibatch in loader:
        assert minibatch.x is None
        np.testing.assert_array_equal(minibatch.obs["lane"], ADATA.obs["lane"].iloc[minibatch.index])


def test_a_view_has_its_own_positions(dataset):
    view = dataset[60:]
    for minibatch in zl.Loader(view, batch_transform=unchanged, **SIZES):
        np.testing.assert_array_equal(minibatch.index, minibatch.row + 60)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_and_resuming(dataset):
    loader = zl.Loader(dataset, batch_transform=totals, **SIZES)
    rows = [row for _, index in DataLoader(loader, batch_size=None, num_workers=2) for row in index]
    assert sorted(rows) == list(range(120))
    assert_resumes_anywhere(
        lambda: zl.Loader(dataset, batch_transform=totals, **SIZES),
        described=lambda found: (found[0].tolist(), found[1]),
        every=3,
    )
    assert len([*pickle.loads(pickle.dumps(loader))]) == len(loader)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(zl.Loader(dataset, batch_transform=lambda minibatch: minibatch, **SIZES))


# ---- Errors


class OwnError(Exception):
    """An error that zloader does not know."""


def fails_on(row: int, error: BaseException, minibatch: zl.Minibatch) -> zl.Minibatch:
    if row in minibatch.index.tolist():
        raise error
    return minibatch


class Picky:
    def __call__(self, minibatch: zl.Minibatch) -> zl.Minibatch:
        return fails_on(77, OwnError("no"), minibatch)


def test_an_error_is_raised_in_the_loop_with_the_name_and_the_rows(dataset):
    def picky(minibatch: zl.Minibatch) -> zl.Minibatch:
        return fails_on(77, OwnError("no"), minibatch)

    for function, name in ((picky, r"test_.*picky"), (Picky(), "Picky"), (functools.partial(picky), "picky")):
        loader = zl.Loader(dataset, sampling="streaming", batch_size=4, fetch_factor=2, batch_transform=function)
        rows = []
        with pytest.raises(OwnError, match="no") as raised:
            rows.extend(row for minibatch in loader for row in minibatch.index.tolist())
        assert rows == list(range(76))
        (note,) = raised.value.__notes__
        assert note.startswith("raised by batch_transform ")
        assert note.endswith("rows of the dataset: 76, 77, 78, 79")
        assert re.search(name, note)
        assert raised.traceback[-1].name == "fails_on"
        assert loader.state_dict()["epoch"] == 0
    assert_threads_end()


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()], ids=repr)
def test_a_stop_does_not_end_the_epoch_early(dataset, error):
    loader = zl.Loader(dataset, batch_transform=functools.partial(fails_on, 77, error), **SIZES)
    with pytest.raises(RuntimeError, match=r"Stop\w+\(\) raised by batch_transform fails_on for 16 rows"):
        list(loader)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(dataset, error):
    loader = zl.Loader(dataset, batch_transform=functools.partial(fails_on, 77, error()), **SIZES)
    with pytest.raises(error):
        list(loader)
    assert_threads_end()


@pytest.mark.parametrize(
    ("function", "says"),
    [(zl.transforms.Clip(0, 1), r"go into the list transforms="), ("log1p", "'log1p'"), (dict, "class .dict")],
    ids=["transform", "name", "class"],
)
def test_only_functions_will_do(dataset, function, says):
    with pytest.raises(OptionError, match=rf"batch_transform must be a function of a Minibatch, not .*{says}"):
        zl.Loader(dataset, batch_transform=function)


def test_bytes_of_what_is_yielded():
    array = np.zeros(100)
    csr = torch.eye(10).to_sparse_csr()
    assert _bytes_of(array) == _bytes_of(torch.from_numpy(array)) == 800
    assert _bytes_of({"a": [array, (array, "text", None)]}) == 1600
    assert _bytes_of(csr) == 11 * 8 + 10 * 8 + 10 * 4
    assert _bytes_of(ADATA.X) == ADATA.X.data.nbytes + ADATA.X.indices.nbytes + ADATA.X.indptr.nbytes
    minibatch = zl.Minibatch(x=array, obs={"a": csr}, obsm={}, row=torch.arange(4), index=torch.arange(4))
    assert _bytes_of(minibatch) == 800 + _bytes_of(csr) + 2 * 4 * 8
