"""The rows of a dataset that train a model of scvi-tools, as a Lightning data module.

It splits the rows, makes the Loaders, and keeps the position in the training. A subclass says which matrices and obs
columns a minibatch has, and makes tensors of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import pandas as pd
import torch
from lightning.pytorch import LightningDataModule

from zloader.common.checks import require_one_of
from zloader.common.errors import OptionError
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.dataset.views import Condition
from zloader.integrations.lightning import rank_of
from zloader.integrations.scvi_registry import ALONE, Encoder, InferenceBatches, TrainingBatches
from zloader.training.devices import copied
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch

_TRAINING_ONLY = ("sampling", "drop_last")  # options of the Loader of shuffled rows
_OPTIONS = (*_TRAINING_ONLY, "fetch_factor", "transforms", "options")
_DEVICES = ("cuda", "xpu", "mps")  # to which a Loader delivers


class TrainingRows(LightningDataModule):
    """The rows for training and for validation, and the Loaders of both. Options are those of DataModule."""

    dataset: Dataset
    train_size: float
    validation_size: float | None
    split_by: str | None
    stratify: str | None
    validation: Dataset | Condition | None
    batch_size: int
    seed: int
    loader_options: Mapping[str, Any]

    _encoder: Encoder
    training_rows: Dataset
    validation_rows: Dataset

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a DataModule is no dataloader: give its rows in order, as in "
            "model.get_latent_representation(dataloader=dm.inference_dataloader())"
        )

    def _begin(self) -> None:
        """Checks the options, before the rows are split."""
        super().__init__()
        require_dataset(self.dataset)
        for name in self.loader_options:
            require_one_of(_OPTIONS, **{"an option in loader_options": name})
        self._batches: TrainingBatches | None = None
        self._made_for: tuple[Any, ...] = ()
        self._restored: Mapping[str, Any] | None = None
        self.data_loader_kwargs: dict[str, Any] = {}  # scvi's logger for MLflow reads it

    def _read(self, rows: Dataset) -> tuple[Dataset, str | list[str]]:
        """What a Loader of some rows reads: these rows with the genes of the model, and the option x."""
        raise NotImplementedError

    @property
    def n_train(self) -> int:
        """The number of rows for training."""
        return self.training_rows.n_obs

    @property
    def n_val(self) -> int:
        """The number of rows for validation."""
        return self.validation_rows.n_obs

    def _split(self) -> tuple[Dataset, Dataset]:
        dataset = self.dataset
        if self.validation is not None:
            if (self.split_by, self.stratify, self.validation_size) != (None, None, None):
                raise OptionError("the rows for validation are given: leave out split_by, stratify, validation_size")
            held_out = dataset.rows_of(self.validation).mask()
            return dataset.where(~held_out), dataset.where(held_out)
        sizes: list[Any] = [self.train_size, self.validation_size]
        if isinstance(self.train_size, float):
            sizes[1] = max(1.0 - self.train_size, 0.0) if self.validation_size is None else self.validation_size
        elif self.validation_size is None and isinstance(self.train_size, int):
            sizes[1] = max(dataset.n_obs - self.train_size, 0)
        parts = dataset.split(sizes, by=self.split_by, stratify=self.stratify, seed=self.seed)
        return parts[0], parts[1]

    def _loader(self, rows: Dataset, device: torch.device | None, encoder: Encoder, **options: Any) -> Loader:
        made = {
            "batch_size": self.batch_size,
            "layout": "dense" if device is None else "packed",
            "device": device if device is not None and device.type in _DEVICES else None,
        }
        options = made | rank_of(self.trainer) | options
        read, x = self._read(rows)
        return Loader(read, x=x, obs=encoder.columns, seed=self.seed, **options)

    def _in_order(self, rows: Dataset, device: torch.device | None, encoder: Encoder, **more: Any) -> Loader:
        options = {name: value for name, value in self.loader_options.items() if name not in _TRAINING_ONLY}
        return self._loader(rows, device, encoder, shuffle=False, **options | more)

    def _shuffled(self, rows: Dataset, device: torch.device | None, **place: int) -> Loader:
        """The rows in a new order each epoch, in minibatches of more than one row."""
        options = {**self.loader_options, **place}
        loader = self._loader(rows, device, self._encoder, **options)
        ranks = loader.plan(0).world_size
        if loader.drop_last or not 0 < len(rows) % (self.batch_size * ranks) < 2 * ranks:
            return loader
        if len(rows) < self.batch_size * ranks:
            raise OptionError(
                f"batch normalisation trains on 2 rows or more, and there are {len(rows)} for {ranks} ranks: choose "
                "more rows for training"
            )
        return self._loader(rows, device, self._encoder, **options | {"drop_last": True})

    def _epochs(self, labelled: Dataset | None = None) -> TrainingBatches:
        """The rows for training, in a new order each epoch. A second training goes on with new orders."""
        device = self._device
        if self._batches is None or self._made_for != (device, self.batch_size, labelled is None):
            before, self._made_for = self._batches, (device, self.batch_size, labelled is None)
            self._batches = TrainingBatches(
                self._shuffled(self.training_rows, device),
                None if labelled is None else self._shuffled(labelled, device),
            )
            if before is not None:
                self._batches.loader.set_epoch(before.next_epoch)
        if self._restored is not None:
            self._batches.load_state_dict(self._restored)
            self._restored = None
        return self._batches

    def val_dataloader(self) -> Any:
        """The rows for validation, in order; an empty list if there are none."""
        return self._in_order(self.validation_rows, self._device, self._encoder) if self.n_val else []

    @property
    def _device(self) -> torch.device | None:
        """The device of the training under way, or of the last one; None for the host."""
        device = None if self.trainer is None else self.trainer.strategy.root_device
        return None if device is None or device.type == "cpu" else device

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copies what the Loader has not copied already."""
        if isinstance(batch, Minibatch):
            return copied(batch, device)
        if isinstance(batch, list):
            return [self.transfer_batch_to_device(each, device, dataloader_idx) for each in batch]
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """The position of the training, for Lightning's checkpoints. Those at the end of an epoch have no other."""
        return {} if self._batches is None else {"training": self._batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next training continue there. It raises OptionError for the state of other data or options."""
        self._restored = state.get("training")

    def _inference(
        self, rows: Dataset, encoder: Encoder, device: torch.device | None, batch_size: int
    ) -> InferenceBatches:
        """All rows of a dataset in order, made on a device."""
        where = None if device is None or device.type == "cpu" else device
        loader = self._in_order(rows, where, encoder, batch_size=batch_size, **ALONE)
        return InferenceBatches(loader=loader, encoder=encoder, device=where)

    def set_split(
        self,
        train_size: float | None = None,
        validation_size: float | None = None,
        shuffle_set_split: bool = True,
        batch_size: int | None = None,
    ) -> None:
        """Raises OptionError if `model.train` is asked for another split than the module's; scvi-tools 1.5 calls it."""
        if train_size not in (None, 0.9, self.train_size) or validation_size not in (None, self.validation_size):
            raise OptionError(
                f"model.train(train_size={train_size!r}, validation_size={validation_size!r}) cannot split the rows of "
                f"a data module: give the sizes to {type(self).__name__}(...)"
            )


def with_genes(rows: Dataset, genes: Mapping[str, pd.Index]) -> Dataset:
    """The rows with the genes of these names in each matrix."""
    others = {x: list(names) for x, names in genes.items() if list(rows.matrices.gene_names(x)) != list(names)}
    return rows[:, others] if others else rows
