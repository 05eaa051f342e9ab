"""accelerate: `prepare` gives each process its own rows once, and tells accelerate what its own DataLoaders would."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, find_batch_size, send_to_device
from helpers import counts, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.integrations.accelerate import prepare
from zloader.testing import assert_resumes_anywhere

N_ROWS = 70
SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "layout": "dense"}
N_MINIBATCHES = 9  # the last has 6 rows
ADATA = counts(N_ROWS, 20)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("accelerate")
    write_store(ADATA, folder / "counts.zarr", folder)
    return zl.open_dataset(folder / "counts.zarr")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Accelerators share their state, so each test begins without one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def rows_of(minibatches: Any) -> list[list[int]]:
    return [minibatch.index.tolist() for minibatch in minibatches]


# ---- one process


def test_minibatches_are_those_of_the_loader(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    loader = zl.Loader(dataset, **SIZES)
    prepared = prepare(accelerator, loader)
    assert len(prepared) == N_MINIBATCHES
    assert prepared.dataset is dataset
    epochs = [rows_of(prepared) for _ in range(2)]
    assert epochs == [rows_of(each) for each in [zl.Loader(dataset, **SIZES)] * 2]
    assert loader.statistics().epoch == 1


@pytest.mark.parametrize("of", [1, 2, 4, 9, 20])
def test_accumulate_makes_a_step_at_the_last_minibatch(dataset: zl.Dataset, of: int) -> None:
    """As with a DataLoader of accelerate's own."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=of)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(20, 1), torch.optim.SGD(model.parameters()))

    def steps(minibatches: Any) -> list[bool]:
        made = []
        for _ in minibatches:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 20)).sum())
                optimizer.step()
                optimizer.zero_grad()
            made.append(accelerator.sync_gradients)
        return made

    prepared = prepare(accelerator, zl.Loader(dataset, **SIZES))
    theirs = accelerator.prepare(DataLoader(torch.arange(N_ROWS), batch_size=8))
    assert steps(prepared) == steps(theirs) == steps(prepared)
    assert steps(prepared)[-1]


@pytest.mark.parametrize("batch_size", [8, 10, 64, 100])
@pytest.mark.parametrize("drop_last", [False, True])
def test_gathered_rows_are_those_of_the_loader(
    dataset: zl.Dataset, accelerator: Accelerator, batch_size: int, drop_last: bool
) -> None:
    options = SIZES | {"batch_size": batch_size, "drop_last": drop_last}
    gathered, remainders = [], []
    for minibatch in prepare(accelerator, zl.Loader(dataset, **options)):
        gathered.append(accelerator.gather_for_metrics(minibatch.index).tolist())
        remainders.append(accelerator.gradient_state.remainder)
    assert gathered == rows_of(zl.Loader(dataset, **options))
    # transformers weighs losses with it
    assert remainders[-1:] == ([0 if drop_last else N_ROWS % batch_size] if gathered else [])


def test_the_gradient_state_is_as_before_after_an_epoch(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    state = accelerator.gradient_state
    prepared, validation = (prepare(accelerator, zl.Loader(dataset, **SIZES)) for _ in range(2))
    for number, _ in enumerate(prepared, 1):
        for inner, _ in enumerate(validation, 1):
            assert state.end_of_dataloader == (inner == N_MINIBATCHES)
        for inner, _ in enumerate(prepared, 1):  # the same loader, in use twice
            assert state.end_of_dataloader == (inner == N_MINIBATCHES)
        assert state.end_of_dataloader == (number == N_MINIBATCHES)
    assert not state.in_dataloader


@pytest.mark.parametrize("taken", [1, 2, N_MINIBATCHES])
def test_a_loop_may_be_left_early(dataset: zl.Dataset, accelerator: Accelerator, taken: int) -> None:
    prepared, loader = prepare(accelerator, zl.Loader(dataset, **SIZES)), zl.Loader(dataset, **SIZES)
    for minibatches in (prepared, loader):
        for number, _ in enumerate(minibatches, 1):
            if number == taken:
                break
    assert not accelerator.gradient_state.in_dataloader
    assert prepared.state_dict() == loader.state_dict()
    assert rows_of(prepared) == rows_of(loader)


def test_an_error_leaves_the_gradient_state(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    prepared = prepare(accelerator, zl.Loader(dataset, batch_transform=lambda minibatch: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        next(iter(prepared))
    assert not accelerator.gradient_state.in_dataloader


# ---- the position


def test_it_resumes_anywhere(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    assert_resumes_anywhere(lambda: prepare(accelerator, zl.Loader(dataset, **SIZES)))


def test_the_end_of_a_resumed_epoch_is_told(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    """Also of one that was begun by three processes."""
    for world_size in (1, 3):
        loader = zl.Loader(dataset, rank=0, world_size=world_size, **SIZES)
        minibatches = iter(loader)
        for _ in range(2):
            next(minibatches)
        prepared = prepare(accelerator, zl.Loader(dataset, **SIZES))
        prepared.load_state_dict(loader.state_dict())
        ends, rows = [], []
        for minibatch in prepared:
            ends.append(accelerator.gradient_state.end_of_dataloader)
            rows += accelerator.gather_for_metrics(minibatch.index).tolist()
        assert ends == [False] * (len(ends) - 1) + [True]
        assert len(set(rows)) == len(rows) == N_ROWS - 16 * world_size


def trained(dataset: zl.Dataset, folder: Any, *, until: int | None, resumed: bool = False) -> torch.Tensor:
    """Trains two epochs, or until a step at which it saves its state. Returns the weights."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(20, 1), torch.optim.Adam(model.parameters()))
    loader = prepare(accelerator, zl.Loader(dataset, **SIZES))
    if resumed:
        accelerator.load_state(folder)
    step = 0
    for _ in range(loader.state_dict()["epoch"], 2):
        for minibatch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(minibatch.x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step == until:
                accelerator.save_state(folder)
                return model.weight
    return model.weight


@pytest.mark.every(2)
@pytest.mark.parametrize("until", [2, 4, N_MINIBATCHES, N_MINIBATCHES + 2])
def test_saved_runs_go_on_bit_for_bit(dataset: zl.Dataset, tmp_path: Any, until: int) -> None:
    whole = trained(dataset, tmp_path, until=None)
    trained(dataset, tmp_path, until=until)
    assert torch.equal(trained(dataset, tmp_path, until=None, resumed=True), whole)


def test_set_epoch_keeps_a_position_in_that_epoch(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    """transformers' Trainer calls it before every epoch, also before the one that was restored."""
    loader = zl.Loader(dataset, **SIZES)
    whole = [rows_of(loader) for _ in range(3)]
    loader.set_epoch(1)
    minibatches = iter(loader)
    for _ in range(3):
        next(minibatches)
    prepared = prepare(accelerator, zl.Loader(dataset, **SIZES))
    prepared.load_state_dict(loader.state_dict())
    prepared.set_epoch(1)
    assert rows_of(prepared) == whole[1][3:]
    prepared.set_epoch(1)
    assert rows_of(prepared) == whole[1]
    prepared.load_state_dict(loader.state_dict())
    prepared.set_epoch(2)
    assert rows_of(prepared) == whole[2]


# ---- preparing


def test_a_loader_is_prepared_once(dataset: zl.Dataset, accelerator: Accelerator, tmp_path: Any) -> None:
    loader = zl.Loader(dataset, **SIZES)
    prepared = prepare(accelerator, loader)
    assert prepare(accelerator, loader) is prepare(accelerator, prepared) is prepared
    assert prepare(accelerator, zl.Loader(dataset, **SIZES)) is not prepared
    accelerator.save_state(tmp_path)
    assert len([*tmp_path.glob("custom_checkpoint_*")]) == 2


def test_accelerate_leaves_loaders_as_they_are(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    loader = zl.Loader(dataset, **SIZES)
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare(prepare(accelerator, loader)) is prepare(accelerator, loader)


@pytest.mark.parametrize("option", ["dispatch_batches", "split_batches", "use_stateful_dataloader"])
def test_options_of_its_dataloaders_change_nothing(dataset: zl.Dataset, option: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{option: True}))
    assert rows_of(prepare(accelerator, zl.Loader(dataset, **SIZES))) == rows_of(zl.Loader(dataset, **SIZES))


def test_minibatches_are_moved(dataset: zl.Dataset, accelerator: Accelerator) -> None:
    def as_dict(minibatch: zl.Minibatch) -> dict[str, torch.Tensor]:
        return {"x": minibatch.x, "labels": minibatch.obs["cell_type"]}

    accelerator.state.device = torch.device("meta")  # stands for a GPU
    minibatch = next(iter(prepare(accelerator, zl.Loader(dataset, obs=["cell_type"], **SIZES))))
    assert type(minibatch) is zl.Minibatch
    assert {minibatch.x.device.type, minibatch.obs["cell_type"].device.type, minibatch.row.device.type} == {"meta"}
    changed = next(iter(prepare(accelerator, zl.Loader(dataset, obs=["cell_type"], batch_transform=as_dict, **SIZES))))
    assert {value.device.type for value in changed.values()} == {"meta"}
    accelerator.device_placement = False
    assert next(iter(prepare(accelerator, zl.Loader(dataset, **SIZES)))).x.device.type == "cpu"


def test_accelerate_takes_minibatches_for_batches(dataset: zl.Dataset) -> None:
    for layout in ("csr", "dense", "packed"):
        minibatch = next(iter(zl.Loader(dataset, **(SIZES | {"layout": layout}))))
        assert find_batch_size(minibatch) == 8
        assert type(send_to_device(minibatch, torch.device("cpu"), non_blocking=True)) is zl.Minibatch


WRONG = {
    "a DataLoader": (lambda d: DataLoader(zl.Loader(d), batch_size=None), {}, "a zl.Loader, not DataLoader"),
    "a dataset": (lambda d: d, {}, "a zl.Loader, not Dataset"),
    "another rank": (lambda d: zl.Loader(d, rank=1, world_size=2), {}, "rank 1 of 2, but this is process 0 of 1"),
    "not its rank": (zl.Loader, {"num_processes": 2}, r"rank 0 of 1, .* process 0 of 2 .*world_size=accelerator\."),
    "uneven": (lambda d: zl.Loader(d, rank=1, world_size=4), {"num_processes": 4, "process_index": 1}, "drop_last"),
    "tensor parallel": (zl.Loader, {"parallelism_config": SimpleNamespace(non_data_parallel_size=2)}, "same rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_are_refused(dataset: zl.Dataset, accelerator: Accelerator, name: str) -> None:
    make, state, message = WRONG[name]
    for attribute, value in state.items():
        setattr(accelerator.state, attribute, value)
    with pytest.raises(OptionError, match=message):
        prepare(accelerator, make(dataset))


@pytest.mark.parametrize("options", [{"drop_last": True}, {"batch_size": 1, "fetch_factor": 8}, {}], ids=str)
def test_uneven_rows_are_fine_otherwise(dataset: zl.Dataset, accelerator: Accelerator, options: Any) -> None:
    accelerator.state.num_processes = 4
    accelerator.even_batches = bool(options)
    prepared = prepare(accelerator, zl.Loader(dataset, rank=0, world_size=4, **(SIZES | options)))
    assert len(rows_of(prepared)) == len(prepared)


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "zloader.integrations.accelerate")
    with pytest.raises(ImportError, match=r'pip install "zloader\[huggingface\]"'):
        importlib.import_module("zloader.integrations.accelerate")


# ---- two processes

_PROCESSES = """
import json, os, sys, traceback
import torch, torch._dynamo, torch.distributed as dist  # dynamo is imported by optimizers, slowly
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
import zloader as zl
from zloader.integrations.accelerate import prepare

def refused(what, *arguments):
    try:
        what(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def process(number, folder, url):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dataset = zl.open_dataset(url)
    sizes = {"batch_size": 8, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "layout": "dense"}
    early = zl.Loader(dataset, **sizes)  # made before there is an Accelerator
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(number)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(20, 1), torch.optim.SGD(model.parameters(), 1e-6))
    told = {"rows": [], "steps": [], "gathered": []}
    prepared = prepare(accelerator, early)
    for minibatch in prepared:
        with accelerator.accumulate(model):
            accelerator.backward(model(minibatch.x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        told["rows"].append(minibatch.index.tolist())
        told["steps"].append(accelerator.sync_gradients)
        told["gathered"] += accelerator.gather_for_metrics(minibatch.index).tolist()
    told["weights"] = [value.tolist() for value in model.state_dict().values()]

    minibatches = iter(prepared)
    for _ in range(3):
        next(minibatches)
    accelerator.save_state(folder + "/state")
    told["rest"] = [minibatch.index.tolist() for minibatch in minibatches]
    again = Accelerator(cpu=True)
    resumed = prepare(again, zl.Loader(dataset, **sizes))
    again.wait_for_everyone()
    again.load_state(folder + "/state")
    told["resumed"] = [minibatch.index.tolist() for minibatch in resumed]

    uneven = dataset.where(range(67))
    told["uneven"] = refused(prepare, accelerator, zl.Loader(uneven, **sizes))
    accelerator.even_batches = False
    placed = torch.zeros(67)
    for minibatch in prepare(accelerator, zl.Loader(uneven, shuffle=False, batch_size=8)):
        placed[minibatch.row] = minibatch.x.to_dense().sum(1)
    told["placed"] = accelerator.reduce(placed).tolist()
    accelerator.even_batches = True
    told["wrapped"] = refused(prepare, accelerator, DataLoader(early, batch_size=None))
    dispatch = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    told["dispatch"] = [minibatch.index.tolist() for minibatch in prepare(dispatch, zl.Loader(dataset, **sizes))]
    plain = DataLoader(zl.Loader(dataset, **sizes), batch_size=None)
    told["lost"] = [minibatch.index.tolist() for minibatch in Accelerator(cpu=True).prepare(plain)]
    apart = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    told["sharded twice"] = refused(lambda: next(iter(apart.prepare(plain))))
    dist.barrier()
    # PyTorch 2.13 may deadlock if the model is freed last: its Reducer frees the process group while it holds Python's
    # lock, for which a thread of the group may be waiting. The process ends with os._exit.
    never_freed.append(model)
    return told

never_freed = []

url, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2])
children = []
for number in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        try:
            told = process(number, folder, url)
        except BaseException:
            told = traceback.format_exc()
        with open(f"{folder}/{number}", "w") as file:
            json.dump(told, file)
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_two_processes(dataset: zl.Dataset, interpreter: Any, tmp_path: Any) -> None:
    done = interpreter.run(_PROCESSES, *map(json.dumps, (dataset.url, str(tmp_path))), GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{number}").read_text()) for number in range(2)]
    assert not [each for each in told if isinstance(each, str)], "\n".join(map(str, told))
    loaders = [zl.Loader(dataset, rank=number, world_size=2, **SIZES) for number in range(2)]
    for each, loader in zip(told, loaders, strict=True):
        epochs = [rows_of(loader) for _ in range(2)]
        assert each["rows"] == each["dispatch"] == epochs[0]
        assert each["steps"] == [False, True, False, True, True]
        assert sorted(each["gathered"]) == list(range(N_ROWS))
        assert each["rest"] == each["resumed"] == epochs[1][3:]
        np.testing.assert_allclose(each["placed"], np.asarray(ADATA.X[:67].sum(axis=1)).ravel())
        assert "drop_last=True" in each["uneven"]
        assert "not DataLoader" in each["wrapped"]
        assert "TypeError" in each["sharded twice"]
    assert told[0]["weights"] == told[1]["weights"]
    lost = [row for each in told for minibatch in each["lost"] for row in minibatch]  # as the page says
    assert {*lost} == {row for minibatch in told[0]["rows"] for row in minibatch}
