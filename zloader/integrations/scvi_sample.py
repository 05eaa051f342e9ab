"""Rows of a dataset as a MuData in memory, and the rows from which scvi-tools can build a model.

A model is built from a sample of the rows. It has rows of every batch, because TOTALVI fits a prior to 100 of each, and
every protein that a batch has, because proteins without a count in a batch are taken for missing there. Only if rows of
the sample lack a protein in a batch, a pass over the proteins looks for a row that has it, and ends when all are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mudata  # with scvi-tools
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.machine import require_memory
from zloader.common.records import CsrArrays
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import load_anndata
from zloader.dataset.matrices import as_scipy
from zloader.integrations.scvi_encoding import Encoding
from zloader.integrations.scvi_registry import ALONE
from zloader.integrations.scvi_rows import with_genes
from zloader.training.loader import Loader

_OF_EACH_BATCH = 100  # rows, to which TOTALVI fits its prior of the protein background


class Sample(mudata.MuData):  # type: ignore[misc]
    """Rows that stand for all rows of a dataset: TOTALVI derives epochs and steps from their number."""

    stands_for: int | None = None

    @property
    def n_obs(self) -> int:
        """The number of rows that it stands for, once that is known."""
        return int(super().n_obs) if self.stands_for is None else self.stands_for


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """The matrices of a model and their genes, and the obs columns, each by its modality and its name there."""

    genes: Mapping[str, pd.Index]
    columns: Mapping[str, tuple[str | None, str]]

    def of(self, rows: Dataset, encodings: Mapping[str | None, Encoding]) -> Sample:
        """Rows as a MuData. Columns that have an encoding become categorical, with its labels as categories.

        Raises OptionError for a gene that is not there, and for rows that do not fit in memory.
        """
        read = with_genes(rows, self.genes)
        per_row = 2 * sum(map(read.matrices.row_bytes, self.genes))
        require_memory(int(per_row * rows.n_obs), f"{rows.n_obs} rows as a MuData ({rows.url})", "take fewer")
        adata = load_anndata()
        names = pd.Index(adata.utils.make_index_unique(pd.Index(rows.obs_names)))
        parts: dict[str, Any] = {}
        for matrix, genes in self.genes.items():
            modality, path = matrix.split(":", 1)
            x = read.read_rows(np.arange(rows.n_obs), x=matrix)
            x = as_scipy(x) if isinstance(x, CsrArrays) else x
            layers = {} if path == "X" else {path.removeprefix("layers/"): x}
            parts[modality] = adata.AnnData(
                x if path == "X" else None,
                obs=pd.DataFrame(index=names),
                var=pd.DataFrame(index=genes),
                layers=layers,
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mudata announces what its next versions do with shared columns
            made = Sample(parts)
        obs = rows.obs(list(self.columns))
        for column, (owner, name) in self.columns.items():
            values = obs[column].array if column not in encodings else _categorical(obs[column], encodings[column])
            (made if owner is None else made.mod[owner]).obs[name] = values
        return made


def _categorical(column: pd.Series, encoding: Encoding) -> pd.Categorical:
    return pd.Categorical(column, categories=encoding.labels)


def sampled_rows(dataset: Dataset, n_rows: int, batches: Iterable[Encoding], seed: int) -> NDArray[np.intp]:
    """The first rows of a random order, and of each batch the first hundred, in ascending order."""
    order = np.random.default_rng(seed).permutation(dataset.n_obs)
    chosen = [order[:n_rows]]
    for encoding in batches:
        codes = encoding.codes_of_rows(dataset)[order]
        by_batch = np.argsort(codes, kind="stable")
        first = np.searchsorted(codes[by_batch], codes[by_batch])
        chosen.append(order[by_batch[np.arange(len(order)) - first < _OF_EACH_BATCH]])
    return np.unique(np.concatenate(chosen))


def rows_with_proteins(
    dataset: Dataset, proteins: str, batches: Encoding, sample: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Further rows, so that each protein that a batch has is in a row of the sample of that batch."""
    options: dict[str, Any] = {"x": [proteins], **ALONE, "shuffle": False, "layout": "dense", "batch_size": 4096}
    found: NDArray[np.bool_] | None = None
    further: list[int] = []
    codes = batches.codes_of_rows(dataset)
    for rows in (dataset.where(sample), dataset):
        of_rows = codes[sample] if rows is not dataset else codes
        for minibatch in Loader(rows, **options):
            (x,) = (values.numpy() > 0 for values in minibatch.x.values())
            row = minibatch.row.numpy()
            batch = of_rows[row]
            if found is None:
                found = np.zeros((len(batches.labels), x.shape[1]), bool)
            while (new := (x & ~found[batch]).any(axis=1)).any():
                first = int(np.argmax(new))
                found[batch[first]] |= x[first]
                if rows is dataset:
                    further.append(int(row[first]))
            if found.all():
                return np.array(further, np.intp)
    return np.array(further, np.intp)
