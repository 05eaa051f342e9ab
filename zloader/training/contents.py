"""What minibatches hold: the options of a Loader that say so, checked together, and the recipe that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from zloader.common.checks import names_of, one_or_more, require_flag, require_one_of
from zloader.common.compiled import load_compiler
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import load_anndata
from zloader.reading.fetch import Recipe
from zloader.reading.gather import cut_apart
from zloader.selecting.genes import ChosenGenes, Genes
from zloader.training.delivery import LentMemory
from zloader.training.devices import Device, usable_device
from zloader.training.minibatch import as_minibatch, silence_sparse_warnings, usable_dtype
from zloader.training.own_transforms import Convert, OwnTransforms
from zloader.training.tokens import Tokenizer, bound_tokenizer, require_tokenizer
from zloader.transforms.transform import Transforms, transforms_of

LAYOUTS = ("csr", "dense", "packed", "scipy", "anndata")


@dataclass(kw_only=True, eq=False)
class Contents:
    """The parts of a dataset that minibatches hold, and in which form. All options are those of a Loader.

    Raises OptionError, MissingColumnError or FormatError if the dataset lacks a part, or the options do not fit
    together. Afterwards `x`, `obs`, `obsm`, `dtype` and `device` are in the form in which a Loader has them.
    """

    dataset: Dataset
    x: str | Sequence[str] | None
    obs: Sequence[str]
    obsm: Sequence[str]
    obs_names: bool
    genes: Genes | None
    tokens: Tokenizer | None
    layout: Literal["csr", "dense", "packed", "scipy", "anndata"]
    dtype: str | torch.dtype | np.dtype[Any] | type | None
    transforms: Transforms
    own_transforms: OwnTransforms
    device: str | torch.device | Device | None

    def __post_init__(self) -> None:
        require_one_of(LAYOUTS, layout=self.layout)
        require_flag(obs_names=self.obs_names)
        self.dtype = self.x_dtype = usable_dtype(self.dtype, self.layout)
        self.device = usable_device(self.device, self.layout)
        self.obs, self.obsm = names_of(obs=self.obs), names_of(obsm=self.obsm)
        self._matrices = [] if self.x is None else one_or_more(x=self.x)
        self.x = self.x if self.x is None or isinstance(self.x, str) else self._matrices  # an iterator is used up
        self._loaded = list(self._matrices)  # and that of the tokens
        if self.tokens is not None:
            require_tokenizer(self.tokens)
            self._loaded += [self.tokens.x] if self.tokens.x not in self._loaded else []
        if (self.x is None and self.layout == "anndata") or (self.genes is not None and not self._loaded):
            option = "genes" if self.genes is not None else "layout='anndata'"
            raise OptionError(f"{option} needs an x, but x is None: name a matrix, such as x='X'")
        _import_before_fork(self.layout)
        silence_sparse_warnings()
        self.dataset.require_obs(self.obs)
        self.dataset.require_obsm(self.obsm)
        for name in self._loaded:
            self.dataset.matrices(name)
        self._genes: dict[str, ChosenGenes] = {}
        if self.genes is not None:
            self._genes = self.dataset.choose_genes(self.genes, self._loaded)
        self.tokenizer = bound_tokenizer(self.tokens, self.dataset, self._genes, self.layout)
        dense, dtype = self.layout == "dense", self.x_dtype or "float32"
        self._transforming = {
            name: self.dataset.transforming(name, each, self._genes.get(name), dense=dense, dtype=dtype)
            for name, each in transforms_of(self.transforms, self._matrices).items()
        }
        if self.device is not None and self.own_transforms:
            raise OptionError(
                "fetch_transform and batch_transform run on the host: leave device out, or change minibatches on the "
                "device in the training loop"
            )
        self._require_tokens_apart()

    def _require_tokens_apart(self) -> None:
        """Raises OptionError if tokens would be lost, or made of genes that were not chosen."""
        if self.tokens is None:
            return
        if self.own_transforms.fetch is not None:
            raise OptionError("fetch_transform gets no tokens: use batch_transform with tokens=")
        transforming = self._transforming.get(self.tokens.x)
        if transforming is not None and transforming.genes is not None:
            raise OptionError(
                f"transforms of {self.tokens.x!r} need all genes, and tokens of it only those of genes=: leave out "
                "genes, or make the tokens in a loader with x=None"
            )

    def converter(self) -> Convert:
        """Makes tensors of the arrays of a minibatch, without sets and controls. A device gives x its layout later."""
        framed = self._matrices if self.layout == "anndata" else []
        var = {name: self.dataset.var_of(name, self._genes.get(name)) for name in framed}
        layout = self.layout if self.device is None else "packed"
        return functools.partial(as_minibatch, self.dataset, self.x, layout, var)

    def recipe(
        self,
        epoch: int,
        options: FetchOptions,
        converter: Callable[[], Convert],
        *,
        seed: int,
        lent: LentMemory | None = None,
        sweeping: bool = False,
    ) -> Recipe:
        """How to make the minibatches of an epoch. `converter` makes the minibatches that the user's functions get."""
        whole, own = self.dataset.whole, self.own_transforms
        transforms = {name: replace(each, seed=int(seed), epoch=epoch) for name, each in self._transforming.items()}
        # Transforms that look at whole rows get all genes, and those of x are chosen afterwards.
        later = {name for name, each in transforms.items() if each.genes is not None}
        genes = {name: genes for name, genes in self._genes.items() if name not in later}
        obs, obsm = whole.paged_obs(self.obs, options), whole.paged_obsm(self.obsm, options)
        return Recipe(
            x={name: self.dataset.parts(name, options, genes.get(name)) for name in self._loaded},
            columns=lambda: {
                name: obs[name].prepared() if name in obs else whole.obs_column(name) for name in self.obs
            },
            obsm=lambda: {name: obsm[name] if name in obsm else whole.obsm_array(name) for name in self.obsm},
            paged=[*obs.values(), *obsm.values()],
            dense=self.layout == "dense",
            dtype=self.x_dtype,
            narrow=self.layout == "packed" or self.device is not None,
            empty=np.empty if lent is None else lent.empty,
            names=whole.names_of if self.obs_names or self.layout == "anndata" else None,
            tokens=None if self.tokenizer is None else self.tokenizer.at(seed, epoch),
            wanted=self._matrices,
            sweeping=sweeping,
            transforms=transforms,
            cut=functools.partial(own.cut, converter()) if own else cut_apart,
            grows=bool(own),
            regroups=own.fetch is None,  # a fetch_transform gets the same minibatches at once in every run
        )


def _import_before_fork(layout: str) -> None:
    """Imports the libraries that minibatches need, so that forked DataLoader workers share them."""
    load_compiler()
    if layout == "anndata":
        load_anndata()
