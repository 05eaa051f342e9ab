"""obs columns as scvi-tools encodes them: int64 codes of a list of labels, and float32 covariates.

A Loader delivers codes of the dataset's own categories, or plain numbers. Each becomes a code of scvi's by a look-up in
a small tensor, on the device of the minibatch. Another dataset, for inference, gets the codes of the labels that it
shares with the one of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.messages import listed, suggestion
from zloader.dataset.dataset import Dataset
from zloader.selecting.columns import ObsColumn

Labels = NDArray[Any]
Tensors = dict[str, torch.Tensor]
UNLABELED = "Unknown"  # scvi's default, which the column need not have


@dataclass(frozen=True, eq=False)
class LookUp:
    """The codes of one column of minibatches. `table` has the code of each class, and at its end that of no class.

    `numbers` are the ascending values that are the classes, or None if the column holds codes of classes itself.
    """

    table: torch.Tensor
    numbers: torch.Tensor | None = None
    _copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict, repr=False)

    def codes(self, column: torch.Tensor) -> torch.Tensor:
        """The codes of a column, rows x 1, int64."""
        if column.device not in self._copies:
            numbers = None if self.numbers is None else self.numbers.to(column.device)
            self._copies[column.device] = self.table.to(column.device), numbers
        table, numbers = self._copies[column.device]
        if numbers is not None:
            column = column.to(numbers.dtype)
            at = torch.searchsorted(numbers, column)
            found = numbers[at.clamp(max=len(numbers) - 1)] == column
            column = torch.where(found, at, len(numbers))
        return table[column][:, None]  # the code -1 of rows without a label selects the end of the table


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoding:
    """The labels of an obs column in the order of scvi's codes.

    name: the obs column; None stands for one label, 0, that all rows have.
    labels: scvi's `categorical_mapping`.
    missing: the code of rows without a label, or with one that is not in `labels`; None if every row must have one.
    """

    name: str | None
    labels: Labels
    missing: int | None = None

    def codes_of_rows(self, dataset: Dataset) -> NDArray[np.integer]:
        """The code of each row of a dataset; `missing` for rows without a label, and if the column is missing."""
        if self.name is None or (self.missing is not None and self.name not in dataset.obs_columns):
            return np.full(dataset.n_obs, self.missing or 0)
        column = dataset.obs_column(self.name)
        none = len(self.labels) if self.missing is None else self.missing
        codes = [none if code < 0 else code for code in [*self._codes(classes_of(self.name, column)), -1]]
        table = np.array(codes, np.min_scalar_type(len(self.labels)))
        return np.asarray(table[column.classes(f"obs column {self.name!r}")[0]])

    def _codes(self, classes: Labels) -> list[int]:
        """The code of each class of a column, -1 for a label that is not among these."""
        code_of = {label: code for code, label in enumerate(self.labels.tolist())}
        return [code_of.get(label, -1) for label in classes.tolist()]

    def look_up(self, dataset: Dataset) -> LookUp | None:
        """How minibatches of a dataset are encoded; None for a column that it need not have.

        Raises OptionError for rows that have no code, and MissingColumnError.
        """
        if self.name is None or (self.missing is not None and self.name not in dataset.obs_columns):
            return None
        column = dataset.obs_column(self.name)
        classes = classes_of(self.name, column)
        codes = self._codes(classes)
        if self.missing is None:
            self._require_codes(column, classes, codes)
        none = -1 if self.missing is None else self.missing
        table = torch.tensor([none if code < 0 else code for code in [*codes, -1]])
        return LookUp(table, None if column.categories is not None else torch.from_numpy(_comparable(classes)))

    def _require_codes(self, column: ObsColumn, classes: Labels, codes: Sequence[int]) -> None:
        used = np.unique(column.classes(f"obs column {self.name!r}")[0])
        if len(used) and used[0] < 0:
            raise OptionError(
                f"obs column {self.name!r} has no value in some rows, such as row {_first_missing(column)}: scvi needs "
                "one in every row. Take the other rows with dataset.where(...), or fill in a label"
            )
        unknown = [classes[code] for code in used.tolist() if codes[code] < 0]
        if unknown:
            raise OptionError(
                f"obs column {self.name!r} has the label {unknown[0]!r}, which was not in the training data; that had "
                f"{listed(map(repr, self.labels.tolist()))}{suggestion(unknown[0], map(str, self.labels)) or '.'} Take "
                "the other rows with dataset.where(...), or train with DataModule(..., categories=both), where both = "
                "zl.open_dataset(['training.zarr', 'new.zarr'], join='inner') also has the new labels"
            )


def encoding_of(dataset: Dataset, name: str | None) -> Encoding:
    """The encoding of an obs column as `setup_anndata` makes it: categories in their order, other values sorted.

    Categories that no row has are left out, as AnnData does when it is subset. Raises OptionError for rows without a
    value and for fractions, and MissingColumnError.
    """
    if name is None:
        return Encoding(name=None, labels=np.zeros(1, np.int64))
    found = Encoding(name=name, labels=_used(name, dataset.obs_column(name))[0])
    found.look_up(dataset)
    return found


def labels_of(dataset: Dataset, name: str | None, unlabeled: str, known: Dataset) -> Encoding:
    """The encoding of the column of labels. Rows without a value are unlabelled, and so are those of `unlabeled`.

    The labels are those of the rows of `known`. Rows of `dataset` with another one are unlabelled.

    The unlabelled category comes last, as for SCANVI, and is among the labels only if a row has it: SCANVI would count
    it as one more class otherwise. Raises OptionError if an unlabelled category other than the default is no label of
    the column.
    """
    if name is None:
        return Encoding(name=None, labels=np.zeros(1, np.int64))
    column = known.obs_column(name)
    every = classes_of(name, column).tolist()
    if unlabeled != UNLABELED and unlabeled not in every:
        raise OptionError(
            f"unlabeled_category={unlabeled!r} is no label of obs column {name!r}, which has "
            f"{listed(map(repr, every))}{suggestion(unlabeled, map(str, every)) or '.'} Rows without a value are "
            "unlabelled in any case"
        )
    classes, unlabelled_rows = _used(name, column)
    if unlabeled in classes.tolist():
        at, classes, unlabelled_rows = classes.tolist().index(unlabeled), classes.copy(), True
        classes[at] = classes[-1]  # as scvi's LabelsWithUnlabeledObsField, which exchanges the two
        classes = classes[:-1]
    encoding = Encoding(name=name, labels=classes, missing=len(classes))
    if unlabelled_rows or (encoding.codes_of_rows(dataset) == len(classes)).any():
        return replace(encoding, labels=np.array([*classes.tolist(), unlabeled], object))
    return encoding


def _used(name: str, column: ObsColumn) -> tuple[Labels, bool]:
    """The classes of a column that rows have, in the order of their codes, and whether rows have none."""
    used = np.unique(column.classes(f"obs column {name!r}")[0])
    return classes_of(name, column)[used[used >= 0]], bool(len(used) and used[0] < 0)


def classes_of(name: str, column: ObsColumn) -> Labels:
    """The labels of a column in the order of their codes, or its distinct values in ascending order."""
    if column.categories is not None:
        return np.asarray(column.categories)
    column.classes(f"obs column {name!r}")  # refuses fractions
    distinct = np.unique(column.values)
    missing = np.isnat(distinct) if distinct.dtype.kind in "mM" else distinct != distinct
    return np.asarray(distinct[~missing])


def _comparable(numbers: Labels) -> Labels:
    """Values in a dtype in which torch can search."""
    if numbers.dtype.kind in "mM":
        return numbers.view(np.int64)
    return numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)


def _first_missing(column: ObsColumn) -> int:
    return int(np.flatnonzero(column.classes("")[0] < 0)[0])


def require_finite(dataset: Dataset, names: Sequence[str]) -> None:
    """Raises OptionError unless the columns hold numbers, and none of them is missing or infinite."""
    for name in names:
        column = dataset.obs_column(name)
        if column.categories is not None or column.values.dtype.kind in "mM":
            raise OptionError(
                f"obs column {name!r} holds no numbers: give it in categorical_covariate_keys, or leave it out"
            )
        wrong = np.flatnonzero(~np.isfinite(column.values))
        if len(wrong):
            raise OptionError(
                f"obs column {name!r} is {column.values[wrong[0]]} in {len(wrong)} rows, such as row {wrong[0]}: one "
                "such value makes every weight of the model NaN. Fill it in, or take the other rows with "
                "dataset.where(...)"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MinibatchEncoder:
    """Makes the dict of tensors that scvi's modules take of a minibatch, where the minibatch is."""

    batch: LookUp | None
    labels: LookUp | None
    no_label: int
    batch_key: str | None
    label_key: str | None
    categorical: dict[str, LookUp | None]
    continuous: Sequence[str]

    @property
    def columns(self) -> list[str]:
        """The obs columns that minibatches need."""
        keys = [(self.batch_key, self.batch), (self.label_key, self.labels), *self.categorical.items()]
        found = [name for name, look_up in keys if name is not None and look_up is not None]
        return list(dict.fromkeys([*found, *self.continuous]))

    def __call__(self, minibatch: Any) -> Tensors:
        """X as dense float32, `batch` and `labels` as int64 codes (rows x 1), and the covariates."""
        x = minibatch.x if isinstance(minibatch.x, torch.Tensor) else minibatch.x.dense(torch.float32)
        x = x.to(torch.float32)
        tensors = {
            "X": x,
            "batch": self._codes(self.batch, self.batch_key, minibatch, 0, x),
            "labels": self._codes(self.labels, self.label_key, minibatch, self.no_label, x),
        }
        if self.categorical:
            codes = [self._codes(look_up, name, minibatch, 0, x) for name, look_up in self.categorical.items()]
            tensors["extra_categorical_covs"] = torch.cat(codes, dim=1)
        if self.continuous:
            values = [minibatch.obs[name].to(torch.float32) for name in self.continuous]
            tensors["extra_continuous_covs"] = torch.stack(values, dim=1)
        return tensors

    @staticmethod
    def _codes(look_up: LookUp | None, name: str | None, minibatch: Any, default: int, x: torch.Tensor) -> torch.Tensor:
        if look_up is None or name is None:
            return torch.full((len(x), 1), default, dtype=torch.int64, device=x.device)
        return look_up.codes(minibatch.obs[name])
