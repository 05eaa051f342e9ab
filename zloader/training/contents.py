"""What minibatches hold: the options of a Loader that say so, checked, and the recipe that they make.

The options come in three parts, each of which checks itself: the form of x, the matrices, and the columns of rows.
`Contents` checks them against a dataset and against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from zloader.common.checks import names_of, one_or_more, require_flag, require_one_of
from zloader.common.compiled import load_compiler
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import load_anndata
from zloader.dataset.modalities import modality_of
from zloader.order.companions import Companions
from zloader.order.sampling import Sampling
from zloader.reading.forms import Form
from zloader.reading.recipe import Cutting, Recipe, RowColumns
from zloader.reading.rehearsal import EPOCHS_IN_NUMPY, IN_NUMPY
from zloader.training.chosen_framework import framework_of
from zloader.training.frameworks import Framework
from zloader.training.minibatch import Making, Minibatch, usable_dtype
from zloader.training.own_transforms import Convert, Made, OwnTransforms
from zloader.training.tokens import Tokenizer, bound_tokenizer, require_tokenizer
from zloader.transforms.transform import Transforms, transforms_of

if TYPE_CHECKING:
    from zloader.training.delivery import LentMemory

LAYOUTS = ("csr", "dense", "packed", "scipy", "anndata")


@dataclass(frozen=True, kw_only=True)
class XForm:
    """The form in which minibatches have x, and where they arrive. `dtype` is None for the stored ones."""

    framework: Framework
    layout: str
    dtype: str | None
    device: Any
    delivered: bool = False  # whether a thread sends minibatches to the device ahead, where x takes its layout

    @classmethod
    def of(cls, framework: str, layout: str, dtype: Any, device: Any) -> XForm:
        """The form of these options of a Loader. Raises OptionError."""
        require_one_of(LAYOUTS, layout=layout)
        made = framework_of(framework)
        name = usable_dtype(dtype, layout)
        made.require_dtype(name)
        usable = made.usable_device(device, layout)
        delivered = usable is not None and made.name == "torch"
        return cls(framework=made, layout=layout, dtype=name, device=usable, delivered=delivered)

    def lent(self) -> LentMemory | None:
        """The memory of the device in which an epoch is gathered, if minibatches are sent ahead."""
        if not self.delivered:
            return None
        from zloader.training.delivery import LentMemory
        from zloader.training.devices import opened

        return LentMemory(opened(self.device))

    def finishing(self, convert: Callable[[MinibatchArrays], Minibatch]) -> Callable[[Made | MinibatchArrays], Any]:
        """What the consumer gets for an item of the bridge. A batch_transform may have returned anything."""

        def finished(item: Made | MinibatchArrays) -> Any:
            made = item.yielded() if isinstance(item, Made) else convert(item)
            return self.framework.finished(made, self.device) if isinstance(made, Minibatch) else made

        return finished

    @property
    def made_ahead(self) -> bool:
        """Whether threads that gather may make minibatches: not those of arrays for a device, nor those of AnnData.

        An AnnData changes the warning filters of the process while it is made, which several threads must not do.
        """
        return self.layout != "anndata" and not self.delivered

    def gathered(self, lent: LentMemory | None) -> Form:
        """How x is gathered, for a device in its `lent` memory."""
        return Form(
            dense=self.layout == "dense",
            dtype=self.dtype,
            narrow=self.layout == "packed" or self.delivered,
            empty=np.empty if lent is None else lent.empty,
        )

    @property
    def gathered_layout(self) -> str:
        """The layout in which minibatches leave the host. A device gives x its layout later."""
        return "packed" if self.delivered else self.layout


@dataclass(kw_only=True, eq=False)
class RowParts:
    """The parts of a minibatch beside x, as a Loader takes them. Raises OptionError."""

    obs: Sequence[str]
    obsm: Sequence[str]
    obs_names: bool

    def __post_init__(self) -> None:
        require_flag(obs_names=self.obs_names)
        self.obs, self.obsm = names_of(obs=self.obs), names_of(obsm=self.obsm)

    def require_in(self, dataset: Dataset) -> None:
        """Raises the error for the first column or array that the dataset lacks or that is no tensor."""
        dataset.observations.require_usable(self.obs)
        dataset.observations.arrays.require(self.obsm)

    def modalities(self, dataset: Dataset) -> list[str | None]:
        """The modality of each obsm array; None for one of the whole."""
        return list(map(dataset.observations.arrays.modality_of, self.obsm))

    def columns(self, whole: Dataset, options: FetchOptions, *, named: bool) -> RowColumns:
        """These parts of a recipe, for all rows of a dataset. With `named`, minibatches carry the obs names."""
        obs = whole.observations.paged_columns(self.obs, options)
        obsm = whole.observations.arrays.all_paged(self.obsm, options)
        return RowColumns(
            obs=lambda: {name: obs[name].prepared() if name in obs else whole.obs_column(name) for name in self.obs},
            obsm=lambda: {name: obsm[name] if name in obsm else whole.obsm_array(name) for name in self.obsm},
            paged=[*obs.values(), *obsm.values()],
            names=whole.names_of if self.obs_names or named else None,
        )


@dataclass(kw_only=True, eq=False)
class XParts:
    """The matrices of a minibatch and what is made of them, as a Loader takes them. Raises OptionError.

    `names` has the matrices that minibatches have, and `loaded` also that of the tokens.
    """

    x: str | Sequence[str] | None
    tokens: Tokenizer | None
    transforms: Transforms

    def __post_init__(self) -> None:
        self.names = [] if self.x is None else one_or_more(x=self.x)
        self.x = self.x if self.x is None or isinstance(self.x, str) else self.names  # an iterator is used up
        self.loaded = list(self.names)
        if self.tokens is not None:
            require_tokenizer(self.tokens)
            self.loaded += [self.tokens.x] if self.tokens.x not in self.loaded else []

    def require_x(self, layout: str) -> None:
        """Raises OptionError if there is no matrix that other options need."""
        if self.x is None and layout == "anndata":
            raise OptionError("layout='anndata' needs an x, but x is None: name a matrix, such as x='X'")


@dataclass(kw_only=True, eq=False)
class Contents:
    """The parts of a dataset that minibatches hold, and in which form.

    Raises OptionError, MissingColumnError or FormatError if the dataset lacks a part, or the parts do not fit together.
    """

    dataset: Dataset
    form: XForm
    rows: RowParts
    x: XParts
    own: OwnTransforms

    def __post_init__(self) -> None:
        self.x.require_x(self.form.layout)
        _import_before_fork(self.form.layout)
        self.form.framework.prepare()
        self.rows.require_in(self.dataset)
        matrices = self.dataset.matrices
        for name in self.x.loaded:
            matrices.layouts(name)  # raises for a matrix that cannot be read
            matrices.chosen(name)
        for name in self.x.names:
            matrices.require_dtype(name, self.form.dtype)
        self.tokenizer = bound_tokenizer(self.x.tokens, self.dataset, self.form.layout)
        dense, dtype = self.form.layout == "dense", self.form.dtype or "float32"
        self._transforming = {
            name: matrices.transforming(name, each, dense=dense, dtype=dtype)
            for name, each in transforms_of(self.x.transforms, self.x.names).items()
        }
        if self.form.device is not None and self.own:
            raise OptionError(
                "fetch_transform and batch_transform run on the host: leave device out, or change minibatches on the "
                "device in the training loop"
            )
        self._require_tokens_apart()

    def load_loops(self, sampling: Sampling, companions: Companions | None) -> None:
        """Loads the compiled loops of an epoch, before there are threads, or a process is forked that shares them.

        A small dataset does without, as long as nothing is asked for but its rows in an order that needs no loops.
        """
        matrices = self.dataset.matrices
        usual = {name for name in self.x.names if name not in self._transforming and matrices.chosen(name) is None}
        self._few = (
            companions is None
            and isinstance(sampling, IN_NUMPY)
            and 0 < len(usual) == len(self.x.loaded)
            and matrices.are_few(usual)
        )
        if not self._few:
            load_compiler()
        for name in usual:
            matrices.rehearse(name, self.form.gathered(None))

    def _require_tokens_apart(self) -> None:
        """Raises OptionError if tokens would be lost, or made of genes that were not chosen."""
        tokens = self.x.tokens
        if tokens is None:
            return
        if self.own.fetch is not None:
            raise OptionError("fetch_transform gets no tokens: use batch_transform with tokens=")
        transforming = self._transforming.get(tokens.x)
        if transforming is not None and transforming.genes is not None:
            raise OptionError(
                f"transforms of {tokens.x!r} need all genes, and tokens of it only those of the panel: take all genes, "
                "or make the tokens in a loader with x=None"
            )

    def converter(self) -> Convert:
        """Makes arrays of the framework of the arrays of a minibatch, without sets and companions."""
        framed = self.x.names if self.form.layout == "anndata" else []
        var = {name: self.dataset.matrices.var_of(name) for name in framed}
        return Making(
            dataset=self.dataset,
            x=self.x.x,
            framework=self.form.framework,
            layout=self.form.gathered_layout,
            var=var,
        )

    def recipe(
        self,
        epoch: int,
        options: FetchOptions,
        converter: Callable[[], Convert],
        *,
        seed: int,
        lent: LentMemory | None = None,
        sweeping: int = 0,
        ready: bool = False,
    ) -> Recipe:
        """How to make the minibatches of an epoch. `converter` makes the minibatches that the user's functions get.

        With `ready`, threads that gather also make the minibatches, if they can.
        """
        form = self.form.gathered(lent)
        transforms = {
            name: replace(each, seed=int(seed), epoch=epoch, empty=form.empty)
            for name, each in self._transforming.items()
        }
        x, matrices = {}, self.dataset.matrices
        for name in self.x.loaded:
            transforming = transforms.get(name)
            if transforming is None or transforming.genes is None:
                x[name] = matrices.parts(name, options)
            else:
                x[name], transforms[name] = matrices.parts_for(name, options, transforming)
        return Recipe(
            x=x,
            form=form,
            transforms=transforms,
            wanted=self.x.names,
            tokens=None if self.tokenizer is None else self.tokenizer.at(seed, epoch),
            columns=replace(
                self.rows.columns(self.dataset.whole, options, named=self.form.layout == "anndata"),
                present=matrices.present([*map(modality_of, self.x.loaded), *self.rows.modalities(self.dataset)]),
            ),
            cutting=self.cutting(converter, ready=ready),
            sweeping=sweeping,
            compiled=not self._few or epoch >= EPOCHS_IN_NUMPY,
        )

    def cutting(self, converter: Callable[[], Convert], *, ready: bool) -> Cutting:
        """How minibatches are made of those that were gathered as one."""
        return self.own.cutting(converter) if self.own or (ready and self.form.made_ahead) else Cutting()


def _import_before_fork(layout: str) -> None:
    """Imports the libraries that minibatches need, so that forked DataLoader workers share them."""
    if layout == "anndata":
        load_anndata()
