"""What scvi-tools needs of a Loader: the registry from which it builds a model, and the minibatches that train it.

The registry is what `setup_anndata` would record of the same data.

Lightning iterates once in vain before training, stops after `len` minibatches without asking for the end of the epoch,
and restores states only of unfinished epochs. So the state that is saved here is the one before the next minibatch was
taken ahead: after the last minibatch it is that of the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.messages import warn_user
from zloader.dataset.dataset import Dataset
from zloader.integrations.scvi_encoding import Encoding, Tensors
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch

_SAMPLED = 1024  # values that are looked at to see whether they are counts


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The data of a model, as scvi's fields name them."""

    n_obs: int
    var_names: pd.Index
    x: str
    batch: Encoding
    labels: Encoding
    unlabeled_category: str
    categorical: Mapping[str, Encoding]
    continuous: Sequence[str]

    @property
    def n_labels(self) -> int:
        """The number of labels without the unlabelled category."""
        return len(self.labels.labels) if self.labels.missing is None else self.labels.missing

    def registry(self, model_name: str, scvi_version: str) -> dict[str, Any]:
        """The registry, for `SCVI(registry=...)`."""
        return {
            "scvi_version": scvi_version,
            "model_name": model_name,
            "setup_method_name": "setup_datamodule",
            "setup_args": {
                "layer": self._layer,
                "batch_key": self.batch.name,
                "labels_key": self.labels.name,
                "sample_key": None,
                "size_factor_key": None,
                "categorical_covariate_keys": list(self.categorical) or None,
                "continuous_covariate_keys": list(self.continuous) or None,
            },
            "field_registries": {
                "X": self._x(),
                "batch": _labelled("batch", self.batch),
                "labels": _labelled("labels", self.labels, unlabeled_category=self.unlabeled_category),
                "ind_x": _field("obs", "_indices", {}),
                "sample": _EMPTY,
                "size_factor": _EMPTY,
                "extra_categorical_covs": self._categorical(),
                "extra_continuous_covs": self._continuous(),
            },
        }

    @property
    def _layer(self) -> str | None:
        return self.x.removeprefix("layers/") if self.x.startswith("layers/") else None

    def _x(self) -> dict[str, Any]:
        n_vars = len(self.var_names)
        state = {"n_obs": self.n_obs, "n_vars": n_vars, "column_names": np.asarray(self.var_names, object)}
        attribute = "X" if self._layer is None else "layers"
        return _field(attribute, self._layer, state, n_vars=n_vars, n_cells=self.n_obs)

    def _categorical(self) -> dict[str, Any]:
        key = "extra_categorical_covs"
        if not self.categorical:
            return _EMPTY | {"summary_stats": {f"n_{key}": 0}}
        mappings = {name: encoding.labels for name, encoding in self.categorical.items()}
        state = {
            "mappings": mappings,
            "mapping": mappings,  # the name that scvi's readers of data modules look for
            "field_keys": list(mappings),
            "n_cats_per_key": [len(labels) for labels in mappings.values()],
        }
        return _field("obsm", f"_scvi_{key}", state, **{f"n_{key}": len(mappings)})

    def _continuous(self) -> dict[str, Any]:
        key = "extra_continuous_covs"
        if not self.continuous:
            return _EMPTY | {"summary_stats": {f"n_{key}": 0}}
        state = {"columns": np.array(self.continuous, object)}
        return _field("obsm", f"_scvi_{key}", state, **{f"n_{key}": len(self.continuous)})


_EMPTY: dict[str, Any] = {"data_registry": {}, "state_registry": {}, "summary_stats": {}}


def _field(attribute: str, key: str | None, state: Mapping[str, Any], **summary: int) -> dict[str, Any]:
    return {
        "data_registry": {"attr_name": attribute, "attr_key": key},
        "state_registry": dict(state),
        "summary_stats": summary,
    }


def _labelled(key: str, encoding: Encoding, **more: str) -> dict[str, Any]:
    state = {"categorical_mapping": encoding.labels, "original_key": encoding.name or f"_scvi_{key}", **more}
    return _field("obs", f"_scvi_{key}", state, **{f"n_{key}": len(encoding.labels)})


def _codes_in(registry: Mapping[str, Any], n_labels: int) -> dict[str, Any]:
    """What the codes of a model stand for by its registry, in lists, and of the labels the first `n_labels`."""
    fields = {name: entry["state_registry"] for name, entry in registry["field_registries"].items()}
    covariates = fields["extra_categorical_covs"].get("mappings", {})
    return {
        "genes": list(fields["X"]["column_names"]),
        "batches": list(fields["batch"]["categorical_mapping"]),
        "labels": list(fields["labels"]["categorical_mapping"])[:n_labels],
        "categorical covariates": {name: list(labels) for name, labels in covariates.items()},
        "continuous covariates": list(fields["extra_continuous_covs"].get("columns", [])),
    }


class Described:
    """What scvi-tools asks of a data module beside its minibatches: the registry, sizes and labels."""

    dataset: Dataset
    model_name: str
    _fields: Fields
    _scvi_version: str

    @property
    def registry(self) -> dict[str, Any]:
        """The registry for `SCVI(registry=...)`: what `setup_anndata` records of an AnnData with the same rows."""
        return self._fields.registry(self.model_name, self._scvi_version)

    n_samples = 0  # of sample_key, which is not supported; scvi saves it

    @property
    def n_obs(self) -> int:
        """The number of rows of the dataset, for training, validation or neither."""
        return self._fields.n_obs

    @property
    def n_vars(self) -> int:
        """The number of genes of the model."""
        return len(self._fields.var_names)

    @property
    def n_batch(self) -> int:
        """The number of batches."""
        return len(self._fields.batch.labels)

    @property
    def n_labels(self) -> int:
        """The number of labels that SCANVI can predict. scvi saves it as the number of labels of the model."""
        return self._fields.n_labels

    @property
    def batch_labels(self) -> NDArray[Any]:
        """The batches in the order of their codes."""
        return self._fields.batch.labels

    @property
    def label_keys(self) -> NDArray[Any]:
        """The labels in the order of their codes. scvi-tools 1.4 saves them."""
        return self._fields.labels.labels

    @property
    def labels_(self) -> NDArray[np.object_]:
        """The label of every row, which SCANVI keeps. Made on each call."""
        labels = self._fields.labels
        named = np.array([*labels.labels.tolist()[: labels.missing], self._fields.unlabeled_category], object)
        return np.asarray(named[labels.codes_of_rows(self.dataset)])


def require_own(model: Any, module: Described, *, semisupervised: bool, some_unlabelled: bool) -> None:
    """Raises OptionError unless the codes of a data module mean to a model what they mean to the module."""
    registry = getattr(model, "registry_", {})
    if registry.get("setup_method_name") != "setup_datamodule":
        return
    by_label = getattr(model.module, "dispersion", None) == "gene-label"
    if by_label and some_unlabelled:
        raise OptionError(
            "dispersion='gene-label' needs a label in every row: take the labelled rows with dataset.where(...), "
            "or another dispersion"
        )
    n_labels = module.n_labels if by_label or semisupervised else 0  # 0: no label matters
    own, made_for = _codes_in(module.registry, n_labels), [_codes_in(registry, n_labels)]
    if hasattr(model, "batch_labels"):  # from load_query_data: the registry of the query, the weights of another
        made_for.append({"batches": list(model.batch_labels), "labels": list(model.label_keys)[:n_labels]})
    differs = [name for name, codes in own.items() if any(each.get(name, codes) != codes for each in made_for)]
    if semisupervised and model.module.n_labels != n_labels:
        differs = list(dict.fromkeys([*differs, "labels"]))
    if differs:
        raise OptionError(
            f"the {type(model).__name__} was made for other {' and '.join(differs)} than this module has, so codes "
            "would mean others: train with the module whose registry made the model, or, to go on with other rows, "
            "with DataModule(rows, categories=the dataset of the first training)"
        )


def warn_unless_counts(dataset: Dataset, x: str) -> None:
    """Warns if values at the beginning of a store are no counts, as scvi does of an AnnData."""
    for store, matrix in zip(dataset.stores, dataset.matrices.layouts(x), strict=True):
        if matrix.values.dtype.kind in "bu":
            continue
        rows = _SAMPLED if matrix.genes is not None else 1 + _SAMPLED // max(1, matrix.n_genes)
        values = store.window(matrix.values.path, 0, rows)
        wrong = (values < 0) | (values % 1 != 0)
        if wrong.any():
            warn_user(
                f"{x} of {store.location.url} holds values that are no counts, such as "
                f"{values[wrong][0]}: the models of scvi-tools expect counts that are "
                "not normalised. Give the matrix that holds them, such as x='layers/counts'",
            )
            return


ALONE = {"rank": 0, "world_size": 1}  # options of a Loader for all rows in one process


class TrainingBatches:
    """The epochs of a Loader, one per iteration. An epoch begins with the first `next`.

    With a second Loader, items are pairs of a minibatch of each. The second Loader goes on over the epochs of the first
    and begins again when it ends.
    """

    def __init__(self, loader: Loader, labelled: Loader | None = None) -> None:
        if labelled is not None and not len(labelled):
            raise OptionError("no minibatch of labelled rows: label more rows, or take a smaller batch_size")
        self.loader, self.labelled = loader, labelled
        self._position: dict[str, Any] | None = None  # of the iteration under way
        self._labelled_iterator: Iterator[Minibatch] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Minibatch | list[Minibatch]]:
        self._position = None
        minibatches = iter(self.loader)
        following = next(minibatches, None)
        while following is not None:
            minibatch, self._position = following, self.loader.state_dict()
            following = next(minibatches, None)
            if following is None:
                self._position = None  # the epoch has ended, and the Loader's own state says so
            yield minibatch if self.labelled is None else [minibatch, self._next_labelled(self.labelled)]

    def _next_labelled(self, loader: Loader) -> Minibatch:
        while True:
            if self._labelled_iterator is None:
                self._labelled_iterator = iter(loader)
            minibatch = next(self._labelled_iterator, None)
            if minibatch is not None:
                return minibatch
            self._labelled_iterator = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last minibatch that was handed out."""
        state = {"loader": self._position or self.loader.state_dict()}
        return state if self.labelled is None else state | {"labelled": self.labelled.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch. Raises OptionError for a state of other data or options."""
        self.loader.load_state_dict(state["loader"])
        if self.labelled is not None:
            self.labelled.load_state_dict(state["labelled"])
        self._position = self._labelled_iterator = None

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that has not begun yet."""
        state = self.state_dict()["loader"]
        return int(state["epoch"]) + bool(state["stretches"])


class Encoder(Protocol):
    """Makes the tensors of a minibatch."""

    @property
    def columns(self) -> list[str]:
        """The obs columns that minibatches need."""

    def __call__(self, minibatch: Any) -> Tensors:
        """The tensors by the names that scvi's modules know."""


@dataclass(frozen=True, kw_only=True)
class InferenceBatches:
    """The rows of a dataset in order, as dicts of tensors: scvi applies no hook of a data module to them."""

    loader: Loader
    encoder: Encoder
    device: torch.device | None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Tensors]:
        for minibatch in self.loader:
            yield self.encoder(minibatch if self.device is None else minibatch.to(self.device))


def paired(tensors: Tensors, n_labels: int) -> list[Tensors | None]:
    """A minibatch and those of its rows that have a label, for the classifier of SCANVI; None if there are none."""
    known = tensors["labels"][:, 0] < n_labels
    return [tensors, {name: tensor[known] for name, tensor in tensors.items()} if known.any() else None]
