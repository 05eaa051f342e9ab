"""What `setup_mudata` of scvi-tools is told: the matrices and obs columns of a MuDataModule, checked."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scvi import REGISTRY_KEYS
from scvi.model import MULTIVI, TOTALVI

from zloader.common.checks import names_of
from zloader.common.errors import OptionError
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import modality_of

KEYS = {  # of scvi's tensors, by the option of `setup_mudata` that names the layer
    "rna_layer": REGISTRY_KEYS.X_KEY,
    "atac_layer": REGISTRY_KEYS.ATAC_X_KEY,
    "protein_layer": REGISTRY_KEYS.PROTEIN_EXP_KEY,
}
_COLUMNS = (
    "batch_key",
    "panel_key",
    "size_factor_key",
    "categorical_covariate_keys",
    "continuous_covariate_keys",
)


def _listed(option: str, given: str | Sequence[str] | None) -> list[str]:
    """The obs columns of an option, which is a name or a list of names."""
    if option in ("batch_key", "panel_key") and not isinstance(given, str | None):
        raise OptionError(f"{option} must be the name of one obs column, not {given!r:.100}")
    return names_of(**{option: [given] if isinstance(given, str) and not option.endswith("s") else given or []})


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """The matrices and obs columns of a dataset, by the options of `setup_mudata` that name them. Made by `of`."""

    dataset: Dataset
    layers: Mapping[str, str]
    columns: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, dataset: Dataset, layers: Mapping[str, str | None], columns: Mapping[str, Any]) -> Setup:
        """Those that are not None. Raises OptionError or FormatError."""
        made = cls(
            dataset=dataset,
            layers={option: name for option, name in layers.items() if name is not None},
            columns={option: names for option in _COLUMNS if (names := _listed(option, columns[option]))},
        )
        made._require_matrices()
        return made

    @property
    def matrices(self) -> list[str]:
        """The names of the matrices."""
        return list(self.layers.values())

    @property
    def size_factors(self) -> Sequence[str]:
        """The columns of size factors."""
        return self.columns.get("size_factor_key", [])

    @property
    def categorical(self) -> Sequence[str]:
        """The columns of categorical covariates."""
        return self.columns.get("categorical_covariate_keys", [])

    @property
    def continuous(self) -> Sequence[str]:
        """The columns of continuous covariates."""
        return self.columns.get("continuous_covariate_keys", [])

    def _require_matrices(self) -> None:
        """Raises OptionError unless there is a matrix of counts of each of several modalities."""
        names = self.matrices
        if not all(isinstance(name, str) for name in names):
            raise OptionError(f"rna, proteins and atac must be names of matrices, such as 'rna:X', not {names!r:.100}")
        modalities = {modality_of(name) for name in names}
        if not names or None in modalities or len(modalities) < len(names):
            raise OptionError(
                f"rna, proteins and atac must be matrices of different modalities, such as 'rna:X', not {names!r}: "
                f"{self.dataset.url} has {', '.join(self.dataset.matrix_names)}. DataModule takes one matrix"
            )
        for name in names:
            if name.endswith(":raw/X"):
                raise OptionError(f"scvi-tools has no option for {name}: copy it to a layer, and give its name")
            self.dataset.matrices.layouts(name)

    @property
    def places(self) -> dict[str, tuple[str | None, str]]:
        """The modality of each obs column, and its name there."""
        store, names = self.dataset.stores[0], dict.fromkeys(itertools.chain(*self.columns.values()))
        found = {name: store.modality_at(store.obs_paths.get(name, name)) for name in names}
        return {name: (modality, name.removeprefix(f"{modality}:")) for name, modality in found.items()}

    def options(self, model_class: Any) -> dict[str, Any]:
        """The options of `setup_mudata` of a class. Raises OptionError for what the class does not take."""
        known = isinstance(model_class, type) and issubclass(model_class, TOTALVI | MULTIVI)
        if not known:
            raise OptionError(f"the model must be TOTALVI or MULTIVI, not {model_class!r:.100}")
        if issubclass(model_class, TOTALVI) and not {"rna_layer", "protein_layer"} <= self.layers.keys():
            raise OptionError("TOTALVI needs rna and proteins, such as rna='rna:X', proteins='prot:X'")
        setup: dict[str, Any] = {}
        places = self.places
        modalities = {option: modality_of(name) for option, name in self.layers.items()}
        for option, name in self.layers.items():
            path = name.partition(":")[2]
            setup[option] = None if path == "X" else path.removeprefix("layers/")
        for option, columns in self.columns.items():
            owners, names = zip(*map(places.__getitem__, columns), strict=True)
            single = option in ("batch_key", "panel_key") or (option == "size_factor_key" and len(names) == 1)
            if len(set(owners)) > 1:
                raise OptionError(f"{option} of scvi-tools takes columns of one modality, not {', '.join(columns)}")
            setup[option] = names[0] if single else list(names)
            if owners[0] is not None:
                modalities[option] = owners[0]
        taken = inspect.signature(model_class.setup_mudata).parameters
        if wrong := [option for option in setup if option not in taken]:
            raise OptionError(f"{model_class.__name__} takes no {wrong[0].removesuffix('_layer')}: leave it out")
        if issubclass(model_class, TOTALVI) != (len(self.size_factors) == 1) and self.size_factors:
            raise OptionError("size_factor_key is one obs column for TOTALVI, and a list of two for MULTIVI")
        return setup | {"modalities": modalities}

    def require_same(
        self, registry: Mapping[str, Any], setup: Mapping[str, Any], genes: Mapping[str, pd.Index]
    ) -> None:
        """Raises OptionError if a saved model was set up with other matrices, columns or genes."""
        made_for = {option: value for option, value in registry["setup_args"].items() if value is not None}
        wanted = {option: value for option, value in setup.items() if value is not None}
        if made_for != wanted:
            raise OptionError(f"the model was set up with {made_for}, but this module has {wanted}: give it the same")
        for option, name in self.layers.items():
            known = registry["field_registries"][KEYS[option]]["state_registry"]["column_names"]
            if list(known) != list(genes[name]):
                raise OptionError(
                    f"the model has {len(known)} columns of {name}, and this module others, or in another order: give "
                    "it those of the training, as in dataset[:, {...}]"
                )

    def require_all_modalities(self) -> None:
        """Raises OptionError if a row lacks a modality."""
        modalities = list(dict.fromkeys(filter(None, map(modality_of, self.matrices))))
        every = " & ".join(f"dataset.present({each!r})" for each in modalities)
        for modality in modalities:
            lacking = np.flatnonzero(~self.dataset.present(modality))
            if len(lacking):
                raise OptionError(
                    f"TOTALVI learns from rows that have every modality, but {len(lacking)} of {self.dataset.n_obs} "
                    f"rows have no {modality}, such as row {lacking[0]}: take the others with dataset.where({every})"
                )
