"""Wrong uses of torch's DataLoader with a loader or a dataset raise an error that shows the right one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import counts, write_store
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data._utils.collate import default_collate_fn_map

import zloader as zl
from zloader.common.errors import OptionError

SIZES = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataloader")
    write_store(counts(60, 20), folder / "counts.zarr", folder)
    return zl.open_dataset(folder / "counts.zarr")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4},
        {"batch_size": 100},
        {"pin_memory": True},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=["by default", "of 4", "of more than there are", "pinned", "in a worker"],
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # there is no GPU
def test_batches_of_minibatches_are_refused(dataset, options):
    loader = zl.Loader(dataset, **SIZES)
    with pytest.raises(OptionError, match=r"DataLoader\(loader, batch_size=None\)"):
        next(iter(DataLoader(loader, **options)))
    assert sum(len(minibatch) for minibatch in DataLoader(loader, batch_size=None)) == 60


@pytest.mark.parametrize("layout", ["dense", "scipy"])
def test_minibatches_of_every_layout_are(dataset, layout):
    with pytest.raises(OptionError, match="batch_size=None"):
        next(iter(DataLoader(zl.Loader(dataset, layout=layout, **SIZES))))


def test_a_collate_function_of_ones_own_gets_the_minibatches(dataset):
    lists = DataLoader(zl.Loader(dataset, **SIZES), batch_size=2, collate_fn=list)
    assert [len(minibatches) for minibatches in lists] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": None}, {"shuffle": True}],
    ids=["by default", "row by row", "shuffled"],
)
def test_a_dataset_is_no_loader(dataset, options):
    for rows in (dataset, dataset.where("n_counts > 0")):
        with pytest.raises(OptionError, match=r"zl\.Loader\(dataset, \.\.\.\), or over DataLoader\(loader, batch_size"):
            next(iter(DataLoader(rows, **options)))


@pytest.mark.parametrize("take", [lambda d: d[0], list, lambda d: next(iter(d))])
def test_rows_of_a_dataset_are_not_taken_one_by_one(dataset, take):
    with pytest.raises(OptionError, match=r"dataset\.take\(rows\) returns some rows as an AnnData"):
        take(dataset)
    assert len(dataset) == len(RandomSampler(dataset)) == 60


_WITHOUT_THE_TABLE = """
import torch.utils.data._utils.collate
del torch.utils.data._utils.collate.default_collate_fn_map
import zloader as zl
from torch.utils.data import DataLoader
import sys
loader = zl.Loader(zl.open_dataset(sys.argv[1]), batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(4))
assert sum(len(minibatch) for minibatch in DataLoader(loader, batch_size=None)) == 60
"""


@pytest.mark.slow
def test_loaders_work_where_torch_has_no_such_table(dataset):
    assert zl.Minibatch in default_collate_fn_map
    command = [sys.executable, "-c", _WITHOUT_THE_TABLE, dataset.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
