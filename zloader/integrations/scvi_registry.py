"""The registry from which scvi-tools builds a model: what `setup_anndata` would record of the same data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from zloader.integrations.scvi_encoding import Encoding


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
