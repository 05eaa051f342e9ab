"""Models, Trainers and loggers of test_lightning.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from zloader.integrations.lightning import DataModule

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Model(lightning.LightningModule):
    """Keeps the minibatches of its steps. Its weight depends on all of them and on their order."""

    def __init__(self, at: int | None = None, act: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(11))
        self.register_buffer("steps", torch.tensor(0))  # that have ended
        self.at, self.act = at, act  # the step in which to act
        self.seen: dict[str, list[Any]] = {"train": [], "val": [], "test": []}

    def training_step(self, minibatch, batch_idx):
        if len(self.seen["train"]) == self.at:
            self.at = None
            self.act(self.trainer)
        self.seen["train"].append(minibatch)
        self.steps += 1
        return ((minibatch.x @ self.weight - 1) ** 2).mean()

    def validation_step(self, minibatch, batch_idx, dataloader_idx=0):
        self.seen["val"].append(minibatch)

    def test_step(self, minibatch, batch_idx):
        self.seen["test"].append(minibatch)

    def predict_step(self, minibatch, batch_idx, dataloader_idx=0):
        return minibatch.row

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def trainer_of(folder: Path | None = None, saves: dict[str, Any] | None = None, **options: Any) -> lightning.Trainer:
    """A Trainer for the CPU. With `saves`, it saves every checkpoint that these options of ModelCheckpoint ask for."""
    callbacks = list(options.pop("callbacks", []))
    if saves is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **saves))
    return lightning.Trainer(
        **{"max_epochs": 3, "enable_checkpointing": saves is not None, "callbacks": callbacks, **QUIET} | options
    )


def fitted(data: DataModule, ckpt_path: Path | None = None, model: Model | None = None, **options: Any) -> Model:
    model = model or Model()
    trainer_of(**options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((metrics, step))

    def log_hyperparams(self, *_):
        pass
