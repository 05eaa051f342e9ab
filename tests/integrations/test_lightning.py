"""Lightning's Trainer with a DataModule: every minibatch that a step gets is compared with a plain iteration."""

from __future__ import annotations

import importlib
import itertools
import json
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_minibatches, counts, write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.training.recipes import LAYOUTS

N_ROWS = 53
N_BATCHES = 7
SIZES = {"batch_size": 8, "fetch_factor": 3, "sampling": zl.BlockShuffling(4)}


@pytest.fixture(scope="module", autouse=True)
def _import_lightning() -> None:
    """Imports Lightning. That takes 8 s, which every worker of xdist would need if it were imported above."""
    global DataModule, Kept, LogStatistics, Model, OnExceptionCheckpoint, QUIET, fitted, lightning, trainer_of
    import lightning
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from lightning_runs import QUIET, Kept, Model, fitted, trainer_of

    from zloader.integrations.lightning import DataModule, LogStatistics


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("lightning")
    write_store(counts(N_ROWS, 11), folder / "s.zarr", folder)
    return zl.open_dataset(folder / "s.zarr")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Ignores Lightning's own hints, such as those about where it saves checkpoints. Ours are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        yield


@pytest.fixture(scope="module")
def options(dataset) -> dict[str, Any]:
    return {"dataset": dataset, "obs": ["cell_type"], "layout": "dense", **SIZES}


@pytest.fixture(scope="module")
def epochs(options) -> list[list[zl.Minibatch]]:
    """The first epochs, iterated over plainly."""
    loader = zl.Loader(**options)
    return [list(loader) for _ in range(4)]


def joined(epochs) -> list[zl.Minibatch]:
    return list(itertools.chain(*epochs))


# ---- epochs


def test_epochs_come_in_turn_and_validation_in_order(options, epochs):
    evaluation = options | {"sampling": None}
    del evaluation["sampling"]
    model = fitted(DataModule(train=options, val=evaluation))
    assert_same_minibatches(model.seen["train"], joined(epochs[:3]))
    in_order = list(zl.Loader(**evaluation, shuffle=False))
    assert_same_minibatches(model.seen["val"], in_order[:2] + in_order * 3)  # two of the sanity check
    assert torch.cat([minibatch.row for minibatch in in_order]).tolist() == list(range(N_ROWS))


def test_plain_loaders_see_epochs_in_turn(options, epochs):
    """Lightning calls iter() to try a loader, runs a sanity check, and validates between epochs."""
    validation = zl.Loader(**options | {"sampling": None}, shuffle=False)
    next(iter(validation))
    model, trainer = Model(), trainer_of()
    trainer.fit(model, zl.Loader(**options), validation)
    assert_same_minibatches(model.seen["train"], joined(epochs[:3]))
    in_order = list(validation)
    assert_same_minibatches(model.seen["val"], in_order[:2] + in_order * 3)
    assert torch.cat(trainer.predict(model, validation)).tolist() == list(range(N_ROWS))


TRAINERS = {
    "one minibatch": ({"limit_train_batches": 1}, 1),
    "some minibatches": ({"limit_train_batches": 5}, 5),
    "a share of minibatches": ({"limit_train_batches": 0.3}, 2),
    "validation within epochs": ({"val_check_interval": 0.5}, N_BATCHES),
    "validation every 5 steps": ({"val_check_interval": 5}, N_BATCHES),
    "new loaders every epoch": ({"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": -1}, N_BATCHES),
    "accumulated gradients": ({"accumulate_grad_batches": 4, "num_sanity_val_steps": 0}, N_BATCHES),
}


@pytest.mark.every(4)
@pytest.mark.parametrize(("trained", "taken"), TRAINERS.values(), ids=TRAINERS)
def test_epochs_come_in_turn_in_any_trainer(options, epochs, trained, taken):
    ready = zl.Loader(**options)
    list(ready)  # epochs that it has had do not count
    data = DataModule(train=ready, val=options)
    model = fitted(data, limit_val_batches=2, **trained)
    assert_same_minibatches(model.seen["train"], joined(epoch[:taken] for epoch in epochs[:3]))
    assert_same_minibatches(model.seen["val"][:2], epochs[0][:2])


def test_the_same_minibatches_again_to_overfit(options, epochs):
    model = fitted(DataModule(train=options, val=options), overfit_batches=3)
    assert_same_minibatches(model.seen["train"], epochs[0][:3] * 3)


def test_a_trainer_that_fits_again_goes_on_and_a_new_one_starts_over(options, epochs):
    data, trainer, model = DataModule(train=options), trainer_of(max_epochs=1), Model()
    trainer.fit(model, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data)
    assert_same_minibatches(model.seen["train"], joined(epochs[:3]))
    assert_same_minibatches(fitted(data, max_epochs=1).seen["train"], epochs[0])


def test_every_stage_after_another(options, epochs):
    plain = {name: value for name, value in options.items() if name != "sampling"}
    view = options["dataset"].where(range(20, 50))
    data = DataModule(train=options, val=plain, test=zl.Loader(view, shuffle=False), predict=plain | {"dataset": view})
    trainer, model = trainer_of(max_epochs=1, num_sanity_val_steps=0), Model()
    for _ in range(2):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, data)
        trainer.validate(model, data, verbose=False)
        trainer.test(model, data, verbose=False)
        assert torch.cat(trainer.predict(model, data)).tolist() == list(range(30))
    assert_same_minibatches(model.seen["train"], joined(epochs[:3]))
    assert_same_minibatches(model.seen["val"], list(zl.Loader(**plain, shuffle=False)) * 5)
    assert_same_minibatches(model.seen["test"], list(zl.Loader(view, shuffle=False)) * 2)


def test_a_module_prints_in_a_line(options):
    data = DataModule(train=options, val=[zl.Loader(**options), options | {"dataset": options["dataset"][:7]}])
    assert str(data) == repr(data)


def test_several_loaders_for_evaluation(options):
    plain = {"dataset": options["dataset"], "batch_size": 50}
    other = zl.Loader(**plain | {"dataset": options["dataset"].where(range(10))}, shuffle=False)
    in_order = [list(range(N_ROWS)), list(range(10))]
    for both in ([plain, other], {"whole": plain, "part": other}):
        data, model = DataModule(train=options, val=both, predict=both), Model()
        trainer = trainer_of(max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(model, data)
        assert torch.cat([minibatch.row for minibatch in model.seen["val"]]).tolist() == joined(in_order)
        assert [torch.cat(rows).tolist() for rows in trainer.predict(model, data)] == in_order


# ---- checkpoints


def assert_resumed(path: Path, options: dict[str, Any], whole: Model, **trained: Any) -> None:
    """Resumes from a checkpoint, and compares the minibatches and the model with those of a run without a break."""
    done = torch.load(path, weights_only=False)["state_dict"]["steps"]
    resumed = fitted(DataModule(train=options, val=options), path, **trained)
    assert_same_minibatches(resumed.seen["train"], whole.seen["train"][done:])
    assert torch.equal(resumed.weight, whole.weight)


COUNTED = {"max_epochs": None, "max_steps": 17}
SAVES = {
    "after steps": ({"every_n_train_steps": 5}, {}),
    "after every fifth of 5": ({"every_n_train_steps": 5}, {"limit_train_batches": 5}),
    "after 4 of 5": ({"every_n_train_steps": 4}, {"limit_train_batches": 5}),
    "after the last step": ({"every_n_train_steps": N_BATCHES}, {}),
    "after epochs": ({"save_on_train_epoch_end": True}, {}),
    "after short epochs": ({"save_on_train_epoch_end": True}, {"limit_train_batches": 5}),
    "after validation": ({"save_on_train_epoch_end": False}, {}),
    "after validation within epochs": ({"save_on_train_epoch_end": False}, {"val_check_interval": 3}),
    "between accumulated gradients": ({"every_n_train_steps": 2}, {"accumulate_grad_batches": 2}),
    "without validation": ({"every_n_train_steps": 4}, {"limit_val_batches": 0}),
    "steps counted": ({"every_n_train_steps": 5}, COUNTED),
    "steps counted, after epochs": ({"save_on_train_epoch_end": True}, COUNTED),
    "steps counted, without validation": ({"save_on_train_epoch_end": True}, COUNTED | {"limit_val_batches": 0}),
    "steps counted, after validation": ({"save_on_train_epoch_end": False}, COUNTED),
    "new loaders": ({"every_n_train_steps": 4}, {"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.every(15)
@pytest.mark.parametrize(("saves", "trained"), SAVES.values(), ids=SAVES)
def test_every_checkpoint_resumes_bit_for_bit(options, tmp_path, saves, trained):
    trained = {"num_sanity_val_steps": 1, "limit_val_batches": 2} | trained
    whole = fitted(DataModule(train=options, val=options), folder=tmp_path, saves=saves, **trained)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) > 1
    for path in paths:
        assert_resumed(path, options, whole, **trained)


def test_a_run_cut_short_by_max_steps_goes_on_with_the_rest(options, tmp_path):
    trained = COUNTED | {"limit_val_batches": 0}
    data = DataModule(train=options)
    whole = fitted(data, **trained)
    fitted(data, folder=tmp_path, saves={"save_on_train_epoch_end": True}, **trained | {"max_steps": 10})
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert [path.name for path in paths] == ["epoch=0-step=7.ckpt", "epoch=1-step=10.ckpt"]
    for path in paths:
        assert_resumed(path, options, whole, **trained)


@pytest.fixture(scope="module")
def whole(options) -> Model:
    """The model of a run without a break."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fitted(DataModule(train=options, val=options))


class Stop(Exception):
    """Ends training within a step."""


def stop(trainer):
    raise Stop


def save_here(folder):
    return lambda trainer: trainer.save_checkpoint(folder / "step.ckpt")


LAST = N_BATCHES - 1


@pytest.mark.every(5)
@pytest.mark.parametrize(("way", "at"), [("failed", 0), ("failed", LAST), ("saved", 4), ("saved", LAST), ("saved", 7)])
def test_a_step_that_did_not_end_comes_again(options, whole, tmp_path, way, at):
    if way == "failed":
        saving = OnExceptionCheckpoint(tmp_path, filename="step")
        with pytest.raises(Stop):
            fitted(
                DataModule(train=options, val=options),
                model=Model(at, stop),
                callbacks=[saving],
                enable_checkpointing=True,
            )
    else:  # as a signal handler does
        fitted(DataModule(train=options, val=options), model=Model(at, save_here(tmp_path)))
    assert_resumed(tmp_path / "step.ckpt", options, whole)


@pytest.mark.slow
def test_checkpoints_before_and_after_training(options, whole, tmp_path):
    data, trainer, model = DataModule(train=options), trainer_of(max_epochs=2), Model()
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    resumed = fitted(data, tmp_path / "2.ckpt")
    assert_same_minibatches(resumed.seen["train"], whole.seen["train"][2 * N_BATCHES :])

    class Resaving(lightning.Callback):
        """Saves again before the first step."""

        def on_train_start(self, trainer, model):
            trainer.save_checkpoint(tmp_path / "again.ckpt")

    fitted(data, folder=tmp_path, saves={"every_n_train_steps": 5}, max_epochs=1)
    fitted(data, tmp_path / "epoch=0-step=5.ckpt", callbacks=[Resaving()])
    assert_resumed(tmp_path / "again.ckpt", options, whole)


CHANGES = {
    "batch size": ({"batch_size": 16}, "in the middle of an epoch; resume with the same.*batch_size was 8, is 16"),
    "ranks": (
        {"rank": 0, "world_size": 2},
        "in the middle of an epoch by 1 ranks, and these are 2: resume with the same",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_other_options_resume_at_the_ends_of_epochs_only(options, tmp_path, change, says):
    for saves in ({"every_n_train_steps": 5}, {"save_on_train_epoch_end": True}):
        fitted(DataModule(train=options), folder=tmp_path, saves=saves, max_epochs=1)
    changed = options | change
    with pytest.raises(OptionError, match=says):
        fitted(DataModule(train=changed), tmp_path / "epoch=0-step=5.ckpt")
    resumed = fitted(DataModule(train=changed), tmp_path / "epoch=0-step=7.ckpt", max_epochs=2)
    loader = zl.Loader(**changed)
    loader.set_epoch(1)
    assert_same_minibatches(resumed.seen["train"], loader)


@pytest.mark.every(15)
@pytest.mark.parametrize(("saves", "trained"), SAVES.values(), ids=SAVES)
def test_a_loader_alone_does_not_resume_but_a_module_takes_its_checkpoints(options, tmp_path, saves, trained):
    """The Trainer would skip epochs, or repeat minibatches, of a Loader that does not know its epochs."""
    trained = {"num_sanity_val_steps": 1, "limit_val_batches": 2} | trained
    whole = fitted(DataModule(train=options, val=options), **trained)
    trainer_of(tmp_path, saves, **trained).fit(Model(), zl.Loader(**options), zl.Loader(**options))
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) > 1
    for path in paths:
        assert_resumed(path, options, whole, **trained)
        if "every_n_train_steps" in saves:  # the Trainer restores no loader at the end of an epoch
            with pytest.raises(OptionError, match=r"cannot resume.*\(model, datamodule=DataModule\(train=loader\)"):
                trainer_of(**trained).fit(Model(), zl.Loader(**options), ckpt_path=path)


OTHERS = {
    "seed": ({"seed": 1}, "seed was 1, is 0"),
    "ranks": ({"rank": 0, "world_size": 2}, "in the middle of an epoch by 2 ranks, and these are 1"),
}


@pytest.mark.parametrize(("change", "says"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_loader_is_refused(options, tmp_path, change, says):
    trainer = trainer_of(tmp_path, {"every_n_train_steps": 3}, max_epochs=1)
    trainer.fit(Model(), zl.Loader(**options | change))
    with pytest.raises(OptionError, match=says):
        fitted(DataModule(train=options), tmp_path / "epoch=0-step=3.ckpt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # raised by torchdata
@pytest.mark.parametrize("loaded", ["a loader", "numbers"])
def test_stateful_data_loaders_skip_the_epoch_after_a_last_step(options, tmp_path, loaded):
    """docs/lightning.md says so, whatever the data are."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    class Counter(Model):
        def training_step(self, minibatch, batch_idx):
            self.seen["train"].append(minibatch)
            return self.weight.sum()

    def trained(path=None, **options_of_trainer):
        data = stateful(zl.Loader(**options) if loaded == "a loader" else range(N_BATCHES), batch_size=None)
        model = Counter()
        trainer_of(**options_of_trainer).fit(model, data, ckpt_path=path)
        return len(model.seen["train"])

    for saves, left in (({"every_n_train_steps": N_BATCHES}, 1), ({"save_on_train_epoch_end": True}, 2)):
        folder = tmp_path / str(left)
        trained(folder=folder, saves=saves, max_epochs=1)
        assert trained(folder / f"epoch=0-step={N_BATCHES}.ckpt") == left * N_BATCHES


# ---- minibatches on their way


@pytest.mark.parametrize("layout", LAYOUTS)
def test_minibatches_stay_on_the_cpu_as_they_are(options, layout):
    data = DataModule(predict=options | {"layout": layout})
    minibatch = next(iter(data.predict_dataloader()))
    assert data.transfer_batch_to_device(minibatch, torch.device("cpu"), 0) is minibatch


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_minibatches_are_moved_to_other_devices(options, layout):
    data = DataModule(train=options | {"layout": layout})
    moved = data.transfer_batch_to_device(next(iter(data.train_dataloader())), torch.device("meta"), 0)
    assert {moved.x.device.type, moved.index.device.type, moved.obs["cell_type"].device.type} == {"meta"}
    own = data.transfer_batch_to_device([torch.ones(2)], torch.device("meta"), 0)  # made by a batch_transform
    assert own[0].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sent", [{}, {"device": "cuda"}], ids=["by the Trainer", "by the Loader"])
@pytest.mark.parametrize("layout", ["csr", "dense", "packed"])
def test_minibatches_arrive_on_a_gpu(options, epochs, layout, sent):
    made = options | {"layout": layout}

    class OnGpu(Model):
        def training_step(self, minibatch, batch_idx):
            self.seen["train"].append(minibatch)
            return self.weight.sum()

    model = fitted(DataModule(train=made | sent), model=OnGpu(), accelerator="gpu", devices=1)
    assert {minibatch.index.device.type for minibatch in model.seen["train"]} == {"cuda"}
    loader = zl.Loader(**made)
    assert_same_minibatches(model.seen["train"], joined(loader for _ in range(3)))


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_means_over_an_epoch_weigh_minibatches_by_their_rows(options, layout):
    class Mean(Model):
        def validation_step(self, minibatch, batch_idx):
            self.log("row", minibatch.row.to(torch.float64).mean())

    trainer = trainer_of()
    trainer.validate(Mean(), DataModule(val=options | {"layout": layout}), verbose=False)
    assert trainer.callback_metrics["row"] == pytest.approx((N_ROWS - 1) / 2)


@pytest.mark.parametrize("kind", [{}, {"layout": "csr"}, {"x": None}], ids=str)
def test_lightning_finds_the_number_of_rows(options, kind):
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning.pytorch.utilities.data import extract_batch_size

    minibatch = move_data_to_device(next(iter(zl.Loader(**options | kind))), torch.device("cpu"))
    assert extract_batch_size(minibatch) == 8
    assert type(minibatch) is zl.Minibatch


# ---- figures


def test_figures_reach_every_logger(options):
    loggers = [Kept(), Kept()]
    fitted(
        DataModule(train=options), logger=loggers, callbacks=[LogStatistics(5)], max_epochs=2, log_every_n_steps=1000
    )
    assert loggers[0].logged == loggers[1].logged
    figures = [(figures["loader/epoch"], figures["loader/minibatches"], step) for figures, step in loggers[0].logged]
    assert figures == [
        (0, 5, 5), (0, 7, 7), (1, 3, 10), (1, 7, 14),
    ]  # fmt: skip


# ---- arguments


def test_a_stage_without_loaders_says_so(options):
    trainer, data = trainer_of(), DataModule(train=options)
    for name, run in {"val": trainer.validate, "test": trainer.test, "predict": trainer.predict}.items():
        with pytest.raises(OptionError, match=rf"write DataModule\({name}=...\)"):
            run(Model(), data)
    with pytest.raises(OptionError, match=r"write DataModule\(train=...\)"):
        trainer.fit(Model(), DataModule(val=options))


def test_arguments_that_make_no_sense_are_refused(options):
    loader = zl.Loader(**options)
    for given, says in {
        "no dataset": ({"train": {"batch_size": 8}}, "train must be a zl.Loader, or a dict of its options"),
        "a dataset": ({"train": options["dataset"]}, r'such as train={"dataset": dataset, "batch_size": 64}'),
        "a DataLoader": ({"val": torch.utils.data.DataLoader([1])}, "val must be a zl.Loader, or a dict"),
        "several": ({"train": [options, options]}, "train must be one Loader.* zl.Mixture"),
        "the same": ({"train": loader, "predict": [options, loader]}, "also given for evaluation: make another"),
    }.values():
        with pytest.raises(OptionError, match=says):
            DataModule(**given)
    with pytest.raises(OptionError, match="no option 'batch_size'; it has: train"):
        DataModule(train=options, batch_size=4)


def test_without_a_trainer_there_are_plain_loaders(options, epochs):
    data = DataModule(train=options, val=options)
    assert_same_minibatches(data.train_dataloader(), epochs[0])
    assert len(data.val_dataloader()) == N_BATCHES
    assert_same_minibatches(data.val_dataloader(), epochs[0])


def test_the_extra_is_named_where_lightning_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.delitem(sys.modules, "zloader.integrations.lightning")
    with pytest.raises(ImportError, match=r'pip install "zloader\[lightning\]"'):
        importlib.import_module("zloader.integrations.lightning")


# ---- ranks

# Two processes with the environment that Lightning gives those that it launches: WORLD_SIZE, but no RANK.
_RANKS = """
import json, os, sys, traceback, warnings
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
import zloader as zl
from zloader.integrations.lightning import DataModule

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight, self.seen, self.val = torch.nn.Parameter(torch.zeros(11)), [], []

    def training_step(self, minibatch, batch_idx):
        self.seen.append([self.current_epoch, minibatch.index.tolist()])
        return ((minibatch.x @ self.weight - 1) ** 2).mean()

    def validation_step(self, minibatch, batch_idx):
        self.val.append(minibatch.row.tolist())

    def predict_step(self, minibatch, batch_idx):
        return minibatch.row

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

def rank(number, store, folder, port):
    os.environ |= {"LOCAL_RANK": f"{number}", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    options = {"dataset": zl.open_dataset(store), "batch_size": 8, "fetch_factor": 3}
    data = DataModule(train=options | {"sampling": zl.BlockShuffling(4)}, val=options, predict=options)
    saving = ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, every_n_train_steps=2)

    def trainer(epochs, *callbacks):
        return lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_epochs=epochs, callbacks=list(callbacks), logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(callbacks),
        )

    model = Model()
    fitting = trainer(2, saving)
    fitting.fit(model, data)
    told = {"seen": model.seen, "val": model.val}
    told["predicted"] = torch.cat(fitting.predict(model, data)).tolist()
    resumed = Model()
    trainer(2).fit(resumed, data, ckpt_path=f"{folder}/epoch=0-step=2.ckpt")
    assert torch.equal(resumed.weight, model.weight)
    return told | {"rest": resumed.seen}

warnings.simplefilter("ignore")
store, folder, port = map(json.loads, sys.argv[1:])
children = []
for number in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        try:
            told = rank(number, store, folder, port)
        except BaseException:
            told = traceback.format_exc()
        with open(f"{folder}/{number}", "w") as file:
            json.dump(told, file)
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_two_processes_share_out_the_rows_once(interpreter, dataset, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = (str(dataset.store.location.url), str(tmp_path), port)
    done = interpreter.run(_RANKS, *map(json.dumps, arguments), GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{number}").read_text()) for number in range(2)]
    assert not [rank for rank in told if isinstance(rank, str)], told  # a traceback
    for number, rank in enumerate(told):
        loader = zl.Loader(dataset, rank=number, world_size=2, **SIZES)
        plain = [[epoch, minibatch.index.tolist()] for epoch in range(2) for minibatch in loader]
        assert rank["seen"] == plain
        assert rank["rest"] == plain[2:]
    for of_both in (
        [rank["predicted"] for rank in told],
        [joined(rank["val"][2:][: len(plain) // 2]) for rank in told],
    ):
        assert sorted(joined(of_both)) == list(range(N_ROWS))
        assert all(rows == sorted(rows) for rows in of_both)


@pytest.mark.parametrize("layout", ["dense", "csr", "packed"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_models_of_another_precision_get_minibatches_in_it(options, epochs, layout, precision, dtype):
    """Lightning converts the float tensors of a minibatch, which stays a Minibatch of the same rows."""
    seen = []

    class Any(Model):
        def training_step(self, minibatch, batch_idx):
            x = minibatch.x.dense(dtype) if layout == "packed" else minibatch.x.to_dense()
            seen.append((minibatch.row.tolist(), minibatch.obs["cell_type"].dtype, x))
            return (x @ self.weight - 1).square().mean()

    trainer = lightning.Trainer(**QUIET, max_epochs=1, precision=precision, enable_checkpointing=False)
    trainer.fit(Any(), datamodule=DataModule(train=zl.Loader(**options | {"layout": layout})))
    assert [rows for rows, _, _ in seen] == [minibatch.row.tolist() for minibatch in epochs[0]]
    for (_, codes, x), minibatch in zip(seen, epochs[0], strict=True):
        assert (codes, x.dtype) == (torch.int64, dtype)
        assert torch.equal(x, minibatch.x.to(dtype))
