"""Ranks: equal numbers of minibatches, dropped rows, and real gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.order.ranks import own_rank
from zloader.testing import assert_resumes_anywhere

N_ROWS = 101
ADATA = counts(N_ROWS, 20)
SIZES = {"batch_size": 4, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def ranks(dataset, world_size, **options) -> list[zl.Loader]:
    made = SIZES | {"x": None, "world_size": world_size} | options
    return [zl.Loader(dataset, rank=rank, **made) for rank in range(world_size)]


def listed(loader) -> list[list[int]]:
    return [minibatch.index.tolist() for minibatch in loader]


# ---- the remainder


@pytest.mark.every(3)
@pytest.mark.parametrize("world_size", [2, 3])
def test_values_of_every_rank(store, world_size):
    dataset = zl.open_dataset(store)
    seen = []
    for loader in ranks(dataset, world_size, x="X"):
        minibatches = list(loader)
        assert len(minibatches) == len(loader)
        for minibatch in minibatches:
            rows = minibatch.index.numpy()
            seen += rows.tolist()
            np.testing.assert_array_equal(minibatch.x.to_dense().numpy(), ADATA.X[rows].toarray())
    assert sorted(seen) == list(range(N_ROWS))


def test_what_is_dropped_changes_with_the_epoch(store):
    loaders = ranks(zl.open_dataset(store), 3, drop_last=True)
    dropped = []
    for _ in range(6):
        rows = [row for loader in loaders for rows in listed(loader) for row in rows]
        assert len(set(rows)) == len(rows)
        dropped.append(tuple(set(range(N_ROWS)) - set(rows)))
    assert {len(rows) for rows in dropped} == {5}
    assert len(set(dropped)) > 3


def test_a_rank_resumes_anywhere(store):
    dataset = zl.open_dataset(store)
    assert_resumes_anywhere(lambda: ranks(dataset, 3)[2])


# ---- places


def test_ranks_come_from_arguments_or_the_environment(monkeypatch):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "6")):
        monkeypatch.setenv(name, value)
    assert own_rank(None, None) == (5, 6)
    assert own_rank(3, 4) == (3, 4)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK: set RANK and WORLD_SIZE"),
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE: set RANK and WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "has RANK='x', which is not a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "has RANK='', which is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "has RANK='-1', which is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "has WORLD_SIZE='2.0', which is not a whole number"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, variables, says):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=says):
        own_rank(None, None)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_world_of_one_needs_no_rank(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_rank(None, None) == (0, 1)


REFUSED = {
    "text world": ({"world_size": "4"}, "world_size must be .* not '4'"),
    "text rank": ({"rank": "1"}, "rank must be .* not '1'"),
    "beyond": ({"rank": 4}, "rank 4 does not exist"),
    "alone": ({"rank": None}, "give rank and world_size together"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_options_that_make_no_sense_are_refused(store, options, says):
    with pytest.raises(OptionError, match=says):
        zl.Loader(zl.open_dataset(store), **(SIZES | {"rank": 1, "world_size": 4} | options))


# ---- real processes

# Each rank is a process and reports the epochs that it received in lock step: all ranks synchronise after each
# minibatch, so a rank with one minibatch more would wait until the deadline and fail. Then each rank resumes in the
# middle of an epoch from the state of rank 0.
_RANKS = """
import datetime, json, multiprocessing, os, sys, traceback
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
import zloader as zl
from zloader.training.loader import Loader

def rank(number, world_size, meeting, n_workers, options):
    deadline = datetime.timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=world_size, timeout=deadline)
    dataset = zl.open_dataset(json.loads(sys.argv[1]))

    def loader():
        return Loader(dataset, batch_size=4, fetch_factor=2, sampling=zl.BlockShuffling(3), **options)

    def epoch(minibatches):
        seen = []
        for minibatch in minibatches:
            seen.append([minibatch.index.tolist(), minibatch.x.to_dense().sum(1).tolist()])
            met = torch.ones(1)
            dist.all_reduce(met)
            assert met == world_size
        return seen

    context = {"multiprocessing_context": "forkserver", "persistent_workers": True} if n_workers else {}
    through = DataLoader(loader(), batch_size=None, num_workers=n_workers, **context)
    told = {"len": len(loader()), "epochs": [epoch(through) for _ in range(2)]}
    del through
    left = loader()
    minibatches = iter(left)
    for _ in range(5):
        next(minibatches)
    state = [left.state_dict() if number == 0 else None]
    dist.broadcast_object_list(state)
    resumed = loader()
    resumed.load_state_dict(state[0])
    told |= {"rest": epoch(resumed), "next": epoch(resumed)}
    whole = loader()
    told["whole"] = [epoch(whole) for _ in range(2)]
    dist.destroy_process_group()
    return told

multiprocessing.set_forkserver_preload(["zloader.training.loader"])  # imported once instead of in every worker
for name, (world_size, n_workers, options) in json.loads(sys.argv[2]).items():
    folder, children = json.loads(sys.argv[3]) + "/" + name, []
    os.mkdir(folder)
    for number in range(world_size):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                told = rank(number, world_size, f"file://{folder}/meeting", n_workers, options)
            except BaseException:
                told = traceback.format_exc()
            with open(f"{folder}/{number}", "w") as file:
                json.dump(told, file)
            sys.exit(0)
    for child in children:
        os.waitpid(child, 0)
"""
_RUNS = {
    "2": (2, 0, {}),
    "3": (3, 0, {}),
    "2 with workers": (2, 2, {"drop_last": True}),
}


@pytest.fixture(scope="module")
def processes(interpreter, store, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """The report of each rank of each run."""
    folder = tmp_path_factory.mktemp("runs")
    done = interpreter.run(_RANKS, *map(json.dumps, (str(store), _RUNS, str(folder))), GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    return {
        name: [json.loads((folder / name / f"{rank}").read_text()) for rank in range(world_size)]
        for name, (world_size, _, _) in _RUNS.items()
    }


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("name", _RUNS)
def test_gloo_processes_in_lock_step(processes, name):
    _, n_workers, options = _RUNS[name]
    told = processes[name]
    assert not [rank for rank in told if isinstance(rank, str)]  # a traceback
    sums = np.asarray(ADATA.X.sum(axis=1)).ravel()
    for number in range(2):
        epochs = [rank["epochs"][number] for rank in told]
        assert {len(minibatches) for minibatches in epochs} == {told[0]["len"]}
        seen = [minibatch for minibatches in epochs for minibatch in minibatches]
        for rows, values in seen:
            np.testing.assert_array_equal(values, sums[rows])
        rows = [row for of_minibatch, _ in seen for row in of_minibatch]
        assert len(rows) == {"3 padded": 108, "2 with workers": 96}.get(name, N_ROWS)
        assert len(set(rows)) == (96 if options == {"drop_last": True} else N_ROWS)
    for rank in told:
        assert rank["epochs"][0] != rank["epochs"][1]
        assert rank["rest"] == rank["whole"][0][5:]
        assert rank["next"] == rank["whole"][1]
        assert n_workers or rank["epochs"] == rank["whole"]
