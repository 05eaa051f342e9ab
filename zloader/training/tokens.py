"""Tokens as arrays of a framework, and the tokenizer of a Loader bound to the genes of its dataset."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import listed, suggestion
from zloader.common.records import TokenArrays
from zloader.dataset.dataset import Dataset
from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.scgpt import ScGPT
from zloader.tokenizers.tokenizer import BoundTokenizer
from zloader.tokenizers.vocabulary import GeneNames

if TYPE_CHECKING:
    import torch

Tokenizer: TypeAlias = Geneformer | ScGPT

log = logging.getLogger("zloader")

_OF_MODELS = ("input_ids", "attention_mask")


@dataclass(kw_only=True)
class Tokens:
    """The tokens of a minibatch, as `minibatch.tokens`. All tensors but `lengths` are rows x places.

    `model(**tokens)` and `dict(tokens)` have the tensors that a model of transformers takes: `input_ids` and
    `attention_mask`.

    input_ids: token ids, int64 or int32, padded with the tokenizer's pad id.
    values: the values of the tokens, float32.
    attention_mask: True where there is a token, False at padding.
    lengths: the number of tokens of each row, int64.
    """

    input_ids: torch.Tensor
    values: torch.Tensor
    attention_mask: torch.Tensor
    lengths: torch.Tensor

    # Not a collections.abc.Mapping: it would have to have a method `values`, and libraries would rebuild it from the
    # tensors for a model alone.
    def keys(self) -> tuple[str, ...]:
        """The names of the tensors that a model of transformers takes."""
        return _OF_MODELS

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.keys():
            hint = f": write tokens.{name}" if name in ("values", "lengths") else ""
            raise MissingColumnError(f"the tokens for a model have no {name!r}, only {listed(self.keys())}{hint}")
        tensor: torch.Tensor = getattr(self, name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @classmethod
    def of(cls, arrays: TokenArrays, array: Callable[[NDArray[Any]], Any]) -> Tokens:
        """The results of `array` for these arrays."""
        return cls(**{each.name: array(getattr(arrays, each.name)) for each in fields(cls)})

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """The results of a function for all tensors."""
        return Tokens(**{each.name: function(getattr(self, each.name)) for each in fields(self)})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Tokens:
        """A copy on the device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Tokens:
        """A copy in page-locked memory, as DataLoader needs it."""
        return self.each(lambda tensor: tensor.pin_memory())


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
