"""Lightning: a DataModule with the Trainer's epochs, ranks and checkpoints, and a callback that logs figures.

The Trainer begins iterations that it drops, restores loaders in the middle of an epoch only, and launches processes
whose rank is not known at first. So a Loader gets its epoch from the Trainer at the first minibatch, and is made when
the Trainer asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.training.device import copied
from zloader.training.epoch import Statistics
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise ImportError(
        'zloader.integrations.lightning needs the package lightning: pip install "zloader[lightning]"'
    ) from error

__all__ = ["DataModule", "LogStatistics"]


class EvaluationEpochs:
    """The passes of a Trainer over a Loader for validation, testing or prediction. Each of them is epoch 0."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._loader.set_epoch(0)  # at the first minibatch, because this is a generator
        yield from iter(self._loader)

    def statistics(self) -> Statistics:
        """The figures of the Loader."""
        return self._loader.statistics()


class TrainingEpochs(EvaluationEpochs):
    """The epochs of a Loader in `trainer.fit`. Each has the number that it has in the Trainer.

    With `overfit_batches` all of them are epoch 0.
    """

    def __init__(self, loader: Loader, trainer: pl.Trainer) -> None:
        super().__init__(loader)
        self._trainer: Any = trainer
        self._restored = False  # whether the next iteration is the rest of an epoch
        self._begun_in: int | None = None  # the epoch in which the last iteration began, as the fit loop counts them
        self._steps_before = 0  # steps of that epoch that had ended before

    def __iter__(self) -> Iterator[Any]:
        fit = self._trainer.fit_loop
        if not self._restored:
            # After a checkpoint from the end of an epoch, the Trainer asks that epoch for one minibatch more if
            # max_steps is set and nothing validates.
            if fit.restarting and fit.epoch_loop.batch_progress.is_last_batch:
                return
            self._loader.set_epoch(0 if self._trainer.overfit_batches else self._trainer.current_epoch)
        self._restored = False
        self._begun_in = fit.epoch_progress.current.ready
        self._steps_before = fit.epoch_loop.batch_progress.current.processed
        yield from iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The rest of the epoch under way, as `Loader.state_dict`. It is None at the end of an epoch.

        `limit_train_batches` ends an epoch early. A minibatch whose step failed, or is under way, belongs to the rest,
        because Lightning repeats the step.
        """
        return {"world_size": self._world_size, "rest": self._rest()}

    def _rest(self) -> dict[str, Any] | None:
        if self._restored:
            return self._loader.state_dict()
        fit = self._trainer.fit_loop
        progress = fit.epoch_loop.batch_progress
        if self._begun_in != fit.epoch_progress.current.ready:
            return None
        unused = self._loader.statistics().minibatches - (progress.current.processed - self._steps_before)
        return None if progress.is_last_batch and not unused else self._loader.state_dict(unused=unused)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch in which `state` was saved.

        Raises OptionError if it was saved with other options, of other data, or by another number of ranks.
        """
        if "rest" not in state:  # of a Loader that the Trainer got without a DataModule
            ended = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            world_size = (state.get("stretches") or [[self._world_size]])[-1][0]
            state = {"world_size": world_size, "rest": None if ended else state}
        if state["rest"] is None:
            return
        advice = "resume with the same, or from a checkpoint that was saved at the end of an epoch"
        if state["world_size"] != self._world_size:
            raise OptionError(
                f"the checkpoint was saved in the middle of an epoch by {state['world_size']} ranks, and these are "
                f"{self._world_size}: {advice}"
            )
        try:
            self._loader.load_state_dict(state["rest"])
        except OptionError as error:
            raise OptionError(f"the checkpoint was saved in the middle of an epoch; {advice}. {error}") from error
        self._restored = True

    @property
    def _world_size(self) -> int:
        return self._loader.plan(0).world_size


@answers
class DataModule(pl.LightningDataModule):
    """The Loaders of a Trainer.

    >>> options = {"dataset": dataset, "batch_size": 64, "layout": "dense"}
    >>> trainer.fit(model, datamodule=DataModule(train=options, val=options))

    Each argument is a dict with the options of a `zl.Loader`, including `dataset`, or a Loader. The Loader of a dict is
    made when the Trainer asks for it, with the Trainer's rank unless the dict has one. A ready Loader gets its rank as
    usual, from its own arguments or from torch.distributed.

    Epoch n of the Trainer is epoch n of the Loader. A checkpoint from the middle of an epoch resumes with the rest of
    that epoch, bit for bit. A checkpoint from the end of an epoch resumes with the next epoch.

    Args:
        train: for `trainer.fit`.
        val, test, predict: for validation, `trainer.test` and `trainer.predict`: one, or a list or dict of several.
            Rows come in order, unless a dict has `sampling` or `shuffle`. Every pass is epoch 0.
    """

    def __init__(self, *, train: Any = None, val: Any = None, test: Any = None, predict: Any = None) -> None:
        super().__init__()
        self._given = {"train": train, "val": val, "test": test, "predict": predict}
        flat: dict[str, list[Any]] = {}
        for name, given in self._given.items():
            flat[name] = []
            if given is not None:
                _each(given, flat[name].append, name)
        if train is not None and not _is_one(train):
            raise OptionError(
                "train must be one Loader, or the options of one: to train on several datasets, open them as one or "
                "mix them with zl.Mixture"
            )
        if isinstance(train, Loader) and train in [*flat["val"], *flat["test"], *flat["predict"]]:
            raise OptionError("the Loader of train is also given for evaluation: make another Loader for that")

    __str__ = object.__repr__  # Lightning's takes minibatches for DataLoaders

    def train_dataloader(self) -> Any:
        """The training Loader, with the Trainer's epochs."""
        trainer = self.trainer
        return self._made("train", lambda loader: loader if trainer is None else TrainingEpochs(loader, trainer))

    def val_dataloader(self) -> Any:
        """The Loaders for validation. `trainer.fit` also runs without."""
        if self._given["val"] is None and self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._made("val", EvaluationEpochs, shuffle=False)

    def test_dataloader(self) -> Any:
        """The Loaders for `trainer.test`."""
        return self._made("test", EvaluationEpochs, shuffle=False)

    def predict_dataloader(self) -> Any:
        """The Loaders for `trainer.predict`."""
        return self._made("predict", EvaluationEpochs, shuffle=False)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copies a Minibatch through page-locked memory, beside the computation. A CPU gets it as it is."""
        if not isinstance(batch, Minibatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        if device.type == "cpu":
            return batch  # x may be a SciPy matrix or an AnnData
        return copied(batch, device)

    def _made(self, name: str, wrap: Callable[[Loader], Any], **defaults: Any) -> Any:
        given = self._given[name]
        if given is None:
            raise OptionError(f"this DataModule has no Loader for this: write DataModule({name}=...)")
        return _each(given, lambda each: wrap(self._loader(each, defaults)), name)

    def _loader(self, given: Loader | Mapping[str, Any], defaults: Mapping[str, Any]) -> Loader:
        if isinstance(given, Loader):
            return given
        options = dict(given)
        if not {"sampling", "shuffle"} & options.keys():
            options |= defaults
        if not {"rank", "world_size"} & options.keys():
            options = rank_of(self.trainer) | options
        return Loader(**options)


def _is_one(given: Any) -> bool:
    return isinstance(given, Loader) or (isinstance(given, Mapping) and "dataset" in given)


def _each(given: Any, function: Callable[[Any], Any], name: str) -> Any:
    """The results of a function for one Loader or its options, or for each in a list or dict of them."""
    if _is_one(given):
        return function(given)
    if isinstance(given, Mapping):
        return {key: _each(each, function, name) for key, each in given.items()}
    if isinstance(given, list | tuple):
        return [_each(each, function, name) for each in given]
    raise OptionError(
        f"{name} must be a zl.Loader, or a dict of its options with a dataset, such as "
        f'{name}={{"dataset": dataset, "batch_size": 64}}, not {given!r:.100}'
    )


@answers
class LogStatistics(pl.Callback):
    """Logs the figures of the training Loader to the Trainer's loggers, during each epoch and at its end.

    >>> trainer = lightning.Trainer(callbacks=[LogStatistics()])

    Args:
        every_n_steps: how often during an epoch. Default: the Trainer's `log_every_n_steps`.
        prefix: of the names, as in `loader/rows_per_s`. `zl.Statistics` lists the names.
    """

    def __init__(self, every_n_steps: int | None = None, *, prefix: str = "loader/") -> None:
        self.every_n_steps = every_n_steps
        self.prefix = prefix

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Logs the figures so far."""
        every = self.every_n_steps or trainer.log_every_n_steps
        if every and trainer.global_step % every == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Logs the figures of the epoch."""
        self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        for logger in trainer.loggers:
            logger.log_metrics(loader.statistics().flat(self.prefix), step=trainer.global_step)


def rank_of(trainer: Any) -> dict[str, int]:
    """The rank of this process as options of a Loader, or none without a Trainer.

    The Trainer is asked, because a process that it launches has WORLD_SIZE in its environment, but no RANK.
    """
    if trainer is None:
        return {}
    place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return {"rank": place["rank"], "world_size": place["num_replicas"]}
