"""The tokenizer of a Loader, bound to the genes of its dataset."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import listed, suggestion
from zloader.dataset.dataset import Dataset
from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.scgpt import ScGPT
from zloader.tokenizers.tokenizer import BoundTokenizer
from zloader.tokenizers.vocabulary import GeneNames

Tokenizer: TypeAlias = Geneformer | ScGPT

log = logging.getLogger("zloader")


def bound_tokenizer(tokens: Tokenizer | None, dataset: Dataset) -> BoundTokenizer | None:
    """The tokenizer `tokens`, if there is one, for the genes of a dataset.

    Raises OptionError or MissingColumnError if they do not fit together.
    """
    if tokens is None:
        return None
    by = tokens.genes_by
    if by is None:
        names = pd.Series(dataset.matrices.gene_names(tokens.x))
    else:
        var = dataset.matrices.var_of(tokens.x)
        if by not in var.columns:
            raise MissingColumnError(
                f"var of {dataset.url} has no column {by!r} to name genes by; it has: "
                f"{listed(var.columns)}{suggestion(by, map(str, var.columns))}"
            )
        names = pd.Series(var[by])
    bound: BoundTokenizer = tokens.bind(
        GeneNames(
            names=[None if missing else str(name) for name, missing in zip(names, names.isna(), strict=True)],
            where=f"{tokens.x} of {dataset.url}",
            named_by="var_names" if by is None else f"var[{by!r}]",
            other_names=lambda: _text_columns(dataset.matrices.var_of(tokens.x)),
        )
    )
    if isinstance(tokens, Geneformer) and tokens.n_counts is not None:
        dataset.observations.require_usable([tokens.n_counts])
        _totals(dataset, tokens.n_counts)
        bound = replace(bound, totals=functools.partial(_totals, dataset, tokens.n_counts))
    message = "tokens: %d of the %d genes of %s are in the vocabulary"
    log.info(message, bound.genes.n_known, len(names), bound.where)
    return bound


def require_tokenizer(tokens: Any) -> None:
    """Raises OptionError unless `tokens` is a tokenizer."""
    if not isinstance(tokens, Geneformer | ScGPT):
        raise OptionError(f"tokens must be a zl.tokenizers.Geneformer or zl.tokenizers.ScGPT, not {tokens!r:.100}")


def _totals(dataset: Dataset, column: str) -> NDArray[Any]:
    """The total counts of all rows of the whole dataset."""
    found = dataset.whole.obs_column(column)
    if found.categories is not None or found.values.dtype == bool:
        raise OptionError(f"n_counts={column!r} must be an obs column of numbers: this one holds labels")
    return np.asarray(found.values)


def _text_columns(var: pd.DataFrame) -> Mapping[str, Iterable[Any]]:
    """The var names, and the var columns that may hold names."""
    texts = {
        str(name): var[name]
        for name in var.columns
        if isinstance(var[name].dtype, pd.CategoricalDtype) or not pd.api.types.is_numeric_dtype(var[name])
    }
    return {"var_names": var.index, **texts}
