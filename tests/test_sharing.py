"""Arrays that go to spawned workers: one copy for all, the same values, and nothing left when they go."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import re
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse
from torch.utils.data import DataLoader

import zloader as zl
from zloader import sharing

ROWS = 4_000_000


class Sent:
    """Something that holds arrays and sends itself as a Loader does."""

    def __init__(self, **arrays) -> None:
        self.arrays = arrays

    def __getstate__(self):
        return sharing.packed(self.__dict__)

    def __setstate__(self, state):
        self.__dict__.update(sharing.unpacked(state))


def files() -> int:
    """How many arrays wait in files for processes that may yet be spawned."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("zloader-array" in str(link.readlink()) for link in links)


def mapped_kib() -> tuple[int, int]:
    """What of such files this process has mapped, and how much of that it has copies of."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = "".join(mapping for mapping in mappings if "zloader-array" in mapping)
    size, own = (
        sum(map(int, re.findall(rf"^{name}: +(\d+) kB", ours, re.MULTILINE))) for name in ("Size", "Anonymous")
    )
    return size, own


def look(sent: Sent, pipe) -> None:
    sums = {name: array.sum() for name, array in sent.arrays.items()}
    mapped = mapped_kib()
    for array in sent.arrays.values():
        array[:1] = 0  # changes nothing for others
    pipe.send((sums, {name: (array.dtype.str, array.shape) for name, array in sent.arrays.items()}, mapped))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_come_whole_and_once(method):
    context = multiprocessing.get_context(method)
    arrays = {
        "weights": np.arange(ROWS, dtype=np.float64),
        "every other": np.arange(ROWS, dtype=np.int32)[::2],
        "a table": np.arange(ROWS, dtype=np.uint16).reshape(-1, 4),
        "small": np.arange(5),
    }
    mine, theirs = context.Pipe()
    process = context.Process(target=look, args=(Sent(**arrays), theirs))
    process.start()
    sums, shapes, (mapped, copied) = mine.recv()
    process.join(30)
    assert files() == 3
    assert sums == {name: array.sum() for name, array in arrays.items()}
    assert shapes == {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    assert mapped == pytest.approx(sum(array.nbytes for array in arrays.values()) / 1024, abs=12)
    assert copied == 0
    del arrays, process
    gc.collect()
    assert files() == 0


def test_an_ordinary_pickle_holds_the_arrays():
    sent = Sent(weights=np.arange(ROWS))
    again = pickle.loads(pickle.dumps(sent))
    np.testing.assert_array_equal(again.arrays["weights"], sent.arrays["weights"])
    assert files() == 0


def test_the_weights_of_spawned_workers_are_sent_once(tmp_path):
    rows = 150_000
    adata = ad.AnnData(X=scipy.sparse.csr_matrix((rows, 2), dtype=np.float32))
    zl.convert(adata, tmp_path / "cells.zarr", progress=False)
    weights = np.random.default_rng(0).random(rows)
    sampling = zl.BlockWeightedSampling(weights, block_size=1, total_size=3000)
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    loader = zl.Loader(dataset, sampling=sampling, x=None, batch_size=100, fetch_factor=3)
    here = [minibatch.index.tolist() for minibatch in loader]
    loader.set_epoch(0)
    through = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(minibatch.index.tolist() for minibatch in through) == sorted(here)
    assert files() == 2  # the weights, and their running sums
