"""DataLoader workers: the rows, the order and the errors of a Loader, and no short epoch if one of them dies."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_minibatches, check_minibatch, counts, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import StoreError

ADATA = counts(203, 31)
SIZES: dict[str, Any] = {
    "batch_size": 8,
    "fetch_factor": 2,
    "sampling": zl.BlockShuffling(4),
    "obs": ["cell_type", "donor", "lane"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def loader_of(url: Path, **options: Any) -> zl.Loader:
    return zl.Loader(zl.open_dataset(url), **SIZES | options)


def through(loader: zl.Loader, n_workers: int, **options: Any) -> DataLoader:
    return DataLoader(loader, batch_size=None, num_workers=n_workers, **options)


def epochs(minibatches: Any, n_epochs: int = 3) -> list[list[zl.Minibatch]]:
    return [list(minibatches) for _ in range(n_epochs)]


WAYS = {
    "forked": {"multiprocessing_context": "fork"},
    "forked, persistent": {"multiprocessing_context": "fork", "persistent_workers": True},
    "forked, pinned": {"multiprocessing_context": "fork", "pin_memory": True},
    "spawned": {"multiprocessing_context": "spawn"},
    "spawned, persistent": {"multiprocessing_context": "spawn", "persistent_workers": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # there is no GPU
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_one_worker_yields_the_epochs_of_the_loader(url, way):
    found, wanted = epochs(through(loader_of(url), 1, **WAYS[way])), epochs(loader_of(url))
    for one, other in zip(found, wanted, strict=True):
        assert_same_minibatches(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("way", ["forked", "spawned, persistent"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_several_workers_share_out_the_fetches_in_turn(url, way, n_workers):
    """Each has every n-th fetch, and the DataLoader takes one minibatch of each in turn."""
    found = epochs(through(loader_of(url), n_workers, **WAYS[way]))
    loader = loader_of(url)
    for epoch, minibatches in enumerate(found):
        assert sorted(row for each in minibatches for row in check_minibatch(each, ADATA)) == list(range(203))
        plan = loader.plan(epoch)
        of_worker = [
            [row.tolist() for fetch in plan.fetches(worker=k, n_workers=n_workers) for row in cut(fetch)]
            for k in range(n_workers)
        ]
        wanted = []
        while any(of_worker):
            wanted += [rows.pop(0) for rows in of_worker if rows]
        assert [each.index.tolist() for each in minibatches] == wanted


def cut(fetch: Any) -> list[Any]:
    """The rows of each minibatch of a fetch."""
    ends = fetch.cuts.tolist()
    return [fetch.rows[fetch.order[first:last]] for first, last in pairwise(ends)]


@pytest.mark.slow
def test_a_read_that_fails_names_the_store_and_the_object(url, tmp_path):
    write_store(ADATA, tmp_path / "damaged.zarr", tmp_path)
    loader = loader_of(tmp_path / "damaged.zarr")
    for shard in (tmp_path / "damaged.zarr/X/data/c").iterdir():
        shard.unlink()
    with pytest.raises(StoreError, match=r"damaged.zarr.*X/data/c/"):
        list(through(loader, 1, multiprocessing_context="fork"))


def fails(minibatch: zl.Minibatch) -> zl.Minibatch:
    if len(minibatch) < 8:
        raise ValueError("the last minibatch is short")
    return minibatch


@pytest.mark.slow
def test_an_error_of_ones_own_function_has_its_message_and_its_line(url):
    minibatches = iter(through(loader_of(url, batch_transform=fails), 1, multiprocessing_context="fork"))
    assert [len(next(minibatches)) for _ in range(25)] == [8] * 25
    with pytest.raises(ValueError, match=r"(?s)test_workers.py.*the last minibatch is short"):
        next(minibatches)


def slowed(minibatch: zl.Minibatch) -> zl.Minibatch:
    time.sleep(0.05)
    return minibatch


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_worker_is_an_error_and_no_short_epoch(url, persistent):
    loader = loader_of(url, batch_transform=slowed)
    minibatches = iter(through(loader, 2, multiprocessing_context="fork", persistent_workers=persistent))
    assert isinstance(next(minibatches).x, torch.Tensor)
    os.kill(minibatches._workers[0].pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, EOFError, ConnectionError)):  # whatever torch is doing when it finds out
        list(minibatches)
    loader.set_epoch(0)
    rows = [row for each in through(loader, 2, multiprocessing_context="fork") for row in each.index.tolist()]
    assert sorted(rows) == list(range(203))
