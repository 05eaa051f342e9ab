"""Minibatches as the dicts of cell-load, for models that train on them, such as STATE. Needs no package but torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.dataset.dataset import Dataset
from zloader.training.minibatch import Minibatch


@answers
@dataclass(frozen=True)
class CellLoadBatch:
    """Makes a dict with the names of cell-load of each minibatch, as the `batch_transform` of a Loader.

    The loader has zl.CellSets, zl.MatchedControls with one control per row, `obs=[perturbation, cell_type, batch]`
    (columns of labels) and layout dense. Rows are flat, set after set: `view(-1, set_size, n)` has a set per entry.

    Args:
        dataset: The dataset or view of the loader.
        perturbation, cell_type, batch: Their obs columns.
        embedding: An obsm array of the loader to take in place of x.
        features: A vector for each perturbation, in place of one-hot vectors. One that is not listed has zeros.

    >>> loader = zl.Loader(  # doctest: +SKIP
    ...     dataset,
    ...     sampling=zl.CellSets(["cell_line", "drug"], set_size=64),
    ...     controls=zl.MatchedControls("drug == 'DMSO'", match="cell_line"),
    ...     obs=["drug", "cell_line", "plate"],
    ...     layout="dense",
    ...     batch_transform=CellLoadBatch(dataset, perturbation="drug", cell_type="cell_line", batch="plate"),
    ... )
    """

    dataset: Dataset
    _: KW_ONLY
    perturbation: str
    cell_type: str
    batch: str
    embedding: str | None = None
    features: Mapping[str, torch.Tensor] | None = field(default=None, repr=False)
    _labels: dict[str, list[str]] = field(init=False, repr=False)
    _vectors: dict[str, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        columns = (self.perturbation, self.cell_type, self.batch)
        labels = {column: [str(label) for label in self.dataset.categories(column)] for column in columns}
        vectors = {column: torch.eye(len(of_column)) for column, of_column in labels.items()}
        if self.features is not None:
            none = torch.zeros_like(next(iter(self.features.values())))
            features = [self.features.get(label, none).float() for label in labels[self.perturbation]]
            vectors[self.perturbation] = torch.stack(features)
        object.__setattr__(self, "_labels", labels)
        object.__setattr__(self, "_vectors", vectors)

    def __call__(self, minibatch: Minibatch) -> dict[str, Any]:
        """The dict of a minibatch: float32 tensors of rows x columns, and lists with a label per row."""
        if minibatch.control is None or len(minibatch.control) != len(minibatch):
            raise OptionError("cell-load pairs each row with a control: give the Loader controls= with n=1")
        codes = {column: minibatch.obs[column] for column in self._labels}
        names = {column: [self._labels[column][code] for code in each.tolist()] for column, each in codes.items()}
        vectors = {column: self._vectors[column][each] for column, each in codes.items()}
        cells, controls = (
            each.x if self.embedding is None else each.obsm[self.embedding].float()
            for each in (minibatch, minibatch.control)
        )
        return {
            "pert_cell_emb": cells,
            "ctrl_cell_emb": controls,
            "pert_emb": vectors[self.perturbation],
            "cell_type_onehot": vectors[self.cell_type],
            "batch": vectors[self.batch],
            "pert_name": names[self.perturbation],
            "cell_type": names[self.cell_type],
            "batch_name": names[self.batch],
        }
