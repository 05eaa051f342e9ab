"""Trains the models of scvi-tools from a dataset: a Lightning data module with the registry that they need.

The Loader gathers packed rows and copies them to the device; X becomes dense there, after the copy. obs columns travel
as codes and are looked up on the device, so no label is encoded per minibatch. On a CPU, X is gathered as dense rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

try:
    import scvi
    from scvi.train import SemiSupervisedTrainingPlan, TrainingPlan
except ImportError as error:
    raise ImportError(f'zloader.integrations.scvi needs scvi-tools ({error}): pip install "zloader[scvi]"') from error

from zloader.common.checks import names_of, require_count, require_one_of
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.messages import warn_user
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.dataset.views import Condition
from zloader.integrations.scvi_encoding import (
    UNLABELED,
    MinibatchEncoder,
    encoding_of,
    labels_of,
    require_finite,
)
from zloader.integrations.scvi_mudata import MuDataModule
from zloader.integrations.scvi_registry import (
    ALONE,
    Described,
    Fields,
    InferenceBatches,
    TrainingBatches,
    paired,
    require_own,
    warn_unless_counts,
)
from zloader.integrations.scvi_rows import TrainingRows, with_genes
from zloader.training.minibatch import Minibatch

__all__ = ["DataModule", "MuDataModule"]


def _refuse_anndata(*_: Any, **__: Any) -> NoReturn:
    raise OptionError(
        "a model that a DataModule trained reads no AnnData: give the method dataloader=dm.inference_dataloader(rows). "
        "For a method that takes none, as differential_expression before scvi-tools 1.5, load the saved model with "
        "cells in memory: cells = rows.take(slice(None)), cells.obs[batch_key] = pd.Categorical(cells.obs[batch_key], "
        "categories=dm.batch_labels), SCVI.setup_anndata(cells, batch_key=batch_key), SCVI.load(directory, adata=cells)"
    )


@answers
@dataclass(eq=False, repr=False)
class DataModule(Described, TrainingRows):
    """A dataset for scvi-tools: `registry` builds the model, and `train(datamodule=...)` takes the module itself.

    >>> import zloader as zl
    >>> from scvi.model import SCVI
    >>> from zloader.integrations.scvi import DataModule
    >>> dm = DataModule(zl.open_dataset("cells.zarr"), label_key="cell_type", train_size=0.9, split_by="donor")
    >>> model = SCVI(registry=dm.registry)
    >>> model.train(datamodule=dm, max_epochs=2)
    >>> latent = model.get_latent_representation(dataloader=dm.inference_dataloader())
    >>> model.save("model")
    >>> model = SCVI.load("model", adata=False)

    SCANVI needs the module twice, and a number of epochs: `SCANVI(registry=dm.registry, datamodule=dm)` or
    `SCANVI.from_scvi_model(model, "Unknown", datamodule=dm)`, then `model.train(datamodule=dm, max_epochs=20)`. Load it
    with `SCANVI.load("model", adata=False, datamodule=dm)`. While SCANVI trains, minibatches are pairs: any rows, and
    labelled rows for the classifier.

    Args:
        dataset: a Dataset of counts, or a View of one. Rows for training and validation are chosen among its rows. A
            panel, `dataset[:, genes]`, has the genes of the model.
        batch_key: the obs column of batches. Every row needs a value. Default: one batch.
        label_key: the obs column of labels. SCANVI needs it.
        unlabeled_category: the label of rows without one. Rows with a missing value are unlabelled too.
        categorical_covariate_keys, continuous_covariate_keys: obs columns that the model gets as covariates.
        categories: the rows whose batches, labels, covariates and genes the model knows: the dataset of the training
            for a query, or `dataset.whole` for those of all rows of which `dataset` is a view, with the genes of
            `dataset`. Default: `dataset`.
        model_name: `"SCANVI"` raises an error at once if scANVI could not be trained. Default: `"SCVI"`.
        x: the matrix of counts, `"X"`, `"layers/NAME"` or `"raw/X"`.
        train_size: the share or the number of rows to train on.
        validation_size: the share or the number of rows for validation. Default: all that are left.
        split_by: an obs column, such as the donor, whose labels go to training or validation as a whole.
        stratify: an obs column of which both get the same shares.
        validation: the rows for validation, instead of a split: a view of the dataset, or a condition as in
            `dataset.where`, such as `"donor == 'd1'"`. The other rows are for training.
        batch_size: rows per minibatch.
        seed: decides the split and every order.
        loader_options: further options of zl.Loader, such as `{"fetch_factor": 64}`.

    `training_rows` and `validation_rows` are views of the dataset. A minibatch of a single row, with which batch
    normalisation cannot train, does not occur: if there would be one, other rows are left out in each epoch.

    Raises OptionError, MissingColumnError or FormatError when it is constructed, and OptionError when a training begins
    with a model of other genes, batches or labels. Warns, as scvi-tools does, if x holds no counts. The registry is
    read-only: make another module for other columns.
    """

    dataset: Dataset
    _: KW_ONLY
    batch_key: str | None = None
    label_key: str | None = None
    unlabeled_category: str = UNLABELED
    categorical_covariate_keys: Sequence[str] | None = None
    continuous_covariate_keys: Sequence[str] | None = None
    categories: Dataset | None = None
    model_name: str = "SCVI"
    x: str = "X"
    train_size: float = 0.9
    validation_size: float | None = None
    split_by: str | None = None
    stratify: str | None = None
    validation: Dataset | Condition | None = None
    batch_size: int = 128
    seed: int = 0
    loader_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin()
        self._known = self.dataset if self.categories is None else self.categories
        require_dataset(self._known)
        require_count(batch_size=self.batch_size)
        require_one_of(("SCVI", "SCANVI"), model_name=self.model_name)
        if not isinstance(self.x, str):
            raise OptionError(f"x must be the name of one matrix, such as 'X' or 'layers/counts', not {self.x!r:.100}")
        for option in ("batch_key", "label_key"):
            if not isinstance(column := getattr(self, option), str | None):
                raise OptionError(
                    f"{option} must be the name of one obs column, not {column!r:.100}: further columns of labels are "
                    "categorical_covariate_keys=[...]"
                )
        self._scvi_version = scvi.__version__
        self._fields = self._read_fields()
        self._encoder = self._encoder_of(self.dataset)
        self.training_rows, self.validation_rows = self._split()
        if self._semisupervised:
            self._labelled_rows()  # raises if there are none
        self._shuffled(self.training_rows, None, **ALONE)  # raises for options that cannot be used
        warn_unless_counts(self.dataset, self.x)

    def __repr__(self) -> str:
        return (
            f"DataModule({self.n_train} rows for training, {self.n_val} for validation, {self.n_vars} genes, "
            f"{self.n_batch} batches, {self.n_labels} labels)"
        )

    __str__ = __repr__  # Lightning's takes minibatches for DataLoaders

    @property
    def uns(self) -> NoReturn:
        """Not there: scvi-tools asks for it of an AnnData, when a model is given a DataModule in the place of one."""
        raise OptionError("a DataModule is not an AnnData: write SCVI(registry=dm.registry), not SCVI(dm)")

    # ---- the model

    def _read_fields(self) -> Fields:
        known = self._known
        matrices = self.dataset.matrices if known is self.dataset.whole else known.matrices  # with the genes
        matrices.layouts(self.x)
        categorical = names_of(categorical_covariate_keys=self.categorical_covariate_keys or [])
        continuous = names_of(continuous_covariate_keys=self.continuous_covariate_keys or [])
        if len(categorical) > 1:
            warn_user(
                "a saved model with several categorical covariates ignores all but one of them once it is loaded: "
                "`load` of scvi-tools 1.4.2, and of SCANVI in 1.5, has no place for them. Join them in one column "
                f"instead of {', '.join(categorical)}, or load no such model",
            )
        require_finite(self.dataset, continuous)
        return Fields(
            n_obs=self.dataset.n_obs,
            var_names=matrices.var_of(self.x).index,
            x=self.x,
            batch=encoding_of(known, self.batch_key),
            labels=labels_of(self.dataset, self.label_key, self.unlabeled_category, known),
            unlabeled_category=self.unlabeled_category,
            categorical={name: encoding_of(known, name) for name in categorical},
            continuous=continuous,
        )

    def _encoder_of(self, dataset: Dataset) -> MinibatchEncoder:
        fields = self._fields
        return MinibatchEncoder(
            batch=fields.batch.look_up(dataset),
            labels=fields.labels.look_up(dataset),
            no_label=fields.labels.missing or 0,
            batch_key=fields.batch.name,
            label_key=fields.labels.name,
            categorical={name: encoding.look_up(dataset) for name, encoding in fields.categorical.items()},
            continuous=fields.continuous,
        )

    @property
    def _semisupervised(self) -> bool:
        """Whether scANVI is trained, or, before any training, is meant to be."""
        plan = getattr(self.trainer, "lightning_module", None)
        if isinstance(plan, TrainingPlan):
            return isinstance(plan, SemiSupervisedTrainingPlan)
        return self.model_name == "SCANVI"

    # ---- rows

    def _labelled_rows(self) -> Dataset | None:
        """The labelled rows for training, if these are others than all and than none."""
        if self.label_key is None:
            raise OptionError("SCANVI needs labels: give label_key, the obs column that holds them")
        known = self._fields.labels.codes_of_rows(self.training_rows) < self._fields.n_labels
        if not known.any() and self.categories is None:  # a query needs none: its classifier is trained
            raise OptionError(
                f"none of the {len(known)} rows for training has a label in obs column {self.label_key!r}, but SCANVI "
                "learns from labelled rows: split in another way, such as by stratify, or train SCVI, which needs none"
            )
        return self.training_rows.where(known) if known.any() and not known.all() else None

    # ---- Lightning

    def train_dataloader(self) -> TrainingBatches:
        """The rows for training, in a new order each epoch. A second training goes on with new orders."""
        model: Any = getattr(self.trainer, "_model", None)
        labelled = self._labelled_rows() if self._semisupervised else None
        require_own(model, self, semisupervised=self._semisupervised, some_unlabelled=self._some_unlabelled)
        if hasattr(model, "registry_"):  # SCANVI.from_scvi_model takes SCVI's, and `load` refuses another class
            model.registry_ = model.registry_ | {"model_name": type(model).__name__}
            model.save = partial(type(model).save, model, datamodule=self)  # scvi's own fails without a module
            model._validate_anndata = _refuse_anndata  # so does scvi's own, without saying what to do
        return self._epochs(labelled)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The tensors of a minibatch, made where it is. For SCANVI a pair: any rows, and labelled rows."""
        if isinstance(batch, list):
            return [self._encoder(each) for each in batch]
        if not isinstance(batch, Minibatch):
            return batch
        tensors = self._encoder(batch)
        if not self._semisupervised:
            return tensors
        return paired(tensors, self.n_labels) if self._some_unlabelled else [tensors, tensors]

    @property
    def _some_unlabelled(self) -> bool:
        labels = self._fields.labels
        return labels.missing is not None and len(labels.labels) > labels.missing

    # ---- scvi

    def inference_dataloader(
        self,
        dataset: Dataset | None = None,
        *,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> InferenceBatches:
        """All rows of a dataset in order, for `model.get_latent_representation(dataloader=...)` and the like.

        - `dataset`: the module's own, or another one with the genes of the model and the columns of batches and
          covariates. Labels that the model does not know, and a missing column of labels, make rows unlabelled.
        - `batch_size`: rows per minibatch. Default: that of the module.
        - `device`: where x becomes dense. Default: the device of the last training, else the host.

        Raises OptionError for genes, batches and covariates that the model does not know, and MissingColumnError.
        """
        rows = self.dataset if dataset is None else dataset
        require_dataset(rows)
        require_finite(rows, self._fields.continuous)
        where = self._device if device is None else torch.device(device)
        size = self.batch_size if batch_size is None else batch_size
        return self._inference(rows, self._encoder_of(rows), where, size)

    def _read(self, rows: Dataset) -> tuple[Dataset, str]:
        return with_genes(rows, {self.x: self._fields.var_names}), self.x

    def set_batch_size(self, batch_size: int | None = None) -> None:
        """Takes the `batch_size` of `model.train`; scvi-tools 1.5 calls it, with None for its default."""
        if batch_size is not None:
            require_count(batch_size=batch_size)
            self.batch_size = batch_size
