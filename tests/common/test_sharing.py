"""Spawned workers share one copy of each large array, see the same values, and leave no file behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import pickle
import re
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse
from helpers import PATIENCE_S
from torch.utils.data import DataLoader, IterableDataset

import zloader as zl
from zloader.common import sharing

ROWS = 4_000_000


class Sent(sharing.SharesArrays):
    """An object that holds arrays."""

    def __init__(self, **arrays) -> None:
        self.__dict__.update(arrays)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def files() -> int:
    """Number of arrays in files that spawned processes may still open."""
    found = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself, or one just closed
            found += "zloader-array" in str(link.readlink())
    return found


def mapped_kib() -> tuple[int, int]:
    """KiB of these files mapped by this process, and KiB copied by its writes."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = "".join(mapping for mapping in mappings if "zloader-array" in mapping)
    size, own = (
        sum(map(int, re.findall(rf"^{name}: +(\d+) kB", ours, re.MULTILINE))) for name in ("Size", "Anonymous")
    )
    return size, own


def look(twice: list[Sent], again: bytes, pipe) -> None:
    sent, same = twice
    nested = pickle.loads(again)
    sums = {name: array.sum() for name, array in sent.arrays.items() if name != "dates"}
    mapped = mapped_kib()
    for array in sent.arrays.values():
        array[:1] = 0  # must not change the array of other processes
    kinds = {name: (array.dtype.str, array.shape, type(array).__name__) for name, array in sent.arrays.items()}
    pipe.send((sums, kinds, mapped, sent is same, nested.arrays["weights"][:3].tolist()))


class Nested:
    """Pickles a copy inside its own pickle."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent

    def __reduce__(self):
        return bytes, (pickle.dumps(copy.copy(copy.deepcopy(self.sent))),)


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_come_whole_and_once(method):
    context = multiprocessing.get_context(method)
    arrays = {
        "weights": np.arange(ROWS, dtype=np.float64),
        "every other": np.arange(ROWS, dtype=np.int32)[::2],
        "a table": np.arange(ROWS, dtype=np.uint16).reshape(-1, 4),
        "dates": np.arange(200_000).astype("datetime64[D]"),
        "masked": np.ma.masked_less(np.arange(200_000), 7),
        "small": np.arange(5),
    }
    sums = {name: array.sum() for name, array in arrays.items() if name != "dates"}
    shared = [array for name, array in arrays.items() if name not in ("masked", "small")]
    sent = Sent(**arrays)
    mine, theirs = context.Pipe()
    process = context.Process(target=look, args=([sent, sent], Nested(sent), theirs))
    process.start()
    seen_sums, kinds, (mapped, copied), same, nested = mine.recv()
    process.join(PATIENCE_S)
    assert files() >= len(shared)
    assert seen_sums == sums
    assert kinds == {name: (each.dtype.str, each.shape, type(each).__name__) for name, each in arrays.items()}
    assert mapped >= sum(array.nbytes for array in shared) / 1024
    assert (copied, same, nested) == (0, True, [0, 1, 2])
    del arrays, process, sent, shared
    gc.collect()
    assert files() == 0


def test_an_ordinary_pickle_holds_the_arrays():
    sent = Sent(weights=np.arange(ROWS))
    again = pickle.loads(pickle.dumps(sent))
    np.testing.assert_array_equal(again.arrays["weights"], sent.arrays["weights"])
    assert files() == 0


class Both(IterableDataset):
    """Several loaders in one pickle, iterated one after the other."""

    def __init__(self, *loaders) -> None:
        self.loaders = loaders

    def __iter__(self):
        for loader in self.loaders:
            yield from loader


@pytest.mark.any_version
@pytest.mark.slow
def test_the_weights_of_spawned_workers_are_sent_once(tmp_path):
    rows = 150_000
    adata = ad.AnnData(X=scipy.sparse.csr_matrix((rows, 2), dtype=np.float32))
    zl.convert(adata, tmp_path / "cells.zarr", progress=False)
    weights = np.random.default_rng(0).random(rows)
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    loaders = []
    for replace in (True, False):
        sampling = zl.BlockWeightedSampling(weights, block_size=1, total_size=3000, replace=replace)
        loaders.append(zl.Loader(dataset, sampling=sampling, x=None, batch_size=100, fetch_factor=3))
    here = [minibatch.index.tolist() for loader in loaders for minibatch in loader]
    for loader in loaders:
        loader.set_epoch(0)
    both = Both(*loaders, copy.copy(loaders[0]))
    through = DataLoader(both, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    seen = [minibatch.index.tolist() for minibatch in through]
    assert sorted(rows for rows in seen if rows in here) == sorted(here)
    assert len(seen) == 90  # the copy shares the epoch count of its original
    n_files = files()
    assert sum(1 for _ in through) == 90
    assert files() == n_files == 2  # the weights, and the running weight for drawing with replacement
