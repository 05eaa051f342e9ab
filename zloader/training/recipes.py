"""How a loader makes minibatches in all its epochs, in this process or in another that has a copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import name_of_dtype, names_of, one_or_more, require_one_of
from zloader.common.compiled import load_compiler
from zloader.common.deferred import pd
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import listed, suggestion
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import modality_of
from zloader.order.cell_sets import SetOrder
from zloader.order.companions import BoundControls, BoundNeighbors, Companions, MatchedControls, Neighbors
from zloader.order.sampling import Order, Sampling
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming
from zloader.reading import gather
from zloader.reading.forms import Form
from zloader.reading.recipe import Recipe
from zloader.tokenizers.geneformer import Geneformer
from zloader.tokenizers.scgpt import ScGPT
from zloader.tokenizers.tokenizer import BoundTokenizer
from zloader.training.arrays import NumPy
from zloader.training.minibatch import BatchTransform, Made, Minibatch, made, minibatches_of
from zloader.transforms.transform import Transforms, transforms_of

if TYPE_CHECKING:
    from zloader.training.device import LentMemory

Tokenizer: TypeAlias = Geneformer | ScGPT

log = logging.getLogger("zloader")

LAYOUTS = ("csr", "dense", "packed", "scipy")
DTYPES = ("float32", "float64", "int32", "int64")
# Loading numba takes half a second to a second, which is as long as many epochs of few values in NumPy take more than
# compiled ones. So for those, it is loaded only if the loader goes on to this epoch.
EPOCHS_IN_NUMPY = 16
_IN_NUMPY = BlockShuffling, MixtureOfScanners, Streaming  # the samplings that permute at most


@dataclass(kw_only=True, eq=False)
class LoaderRecipes:
    """What minibatches hold, and in which form: the options of a Loader that say so, checked, and its order.

    Raises OptionError, MissingColumnError or FormatError if the dataset lacks a part, or the parts do not fit together.
    """

    dataset: Dataset
    sampling: Sampling
    order: Order
    companions: Companions | None
    x: str | Sequence[str] | None
    obs: Sequence[str]
    obsm: Sequence[str]
    tokens: Tokenizer | None
    transforms: Transforms
    batch_transform: BatchTransform | None
    framework: str
    layout: str
    dtype: Any
    device: Any
    seed: int
    options: FetchOptions

    def __post_init__(self) -> None:
        require_one_of(LAYOUTS, layout=self.layout)
        require_one_of(["torch", "numpy"], framework=self.framework)
        self.dtype = usable_dtype(self.dtype, self.layout)
        self._arrays = NumPy()
        if self.framework == "torch":  # imported before workers are forked, if minibatches have tensors
            from zloader.training.device import usable_device
            from zloader.training.tensors import Torch

            self._arrays, self.device = Torch(), usable_device(self.device, self.layout)
        elif self.device is not None:
            raise OptionError(f"NumPy has no devices: leave device={self.device!r:.100} out, or take framework='torch'")
        function = self.batch_transform
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise OptionError(
                f"batch_transform must be a function of a Minibatch, not {function!r:.100}: objects of zl.transforms "
                "go into the list transforms=[...]"
            )
        self._require_parts()
        self.tokenizer = bound_tokenizer(self.tokens, self.dataset)
        dense, dtype = self.layout == "dense", self.dtype or "float32"
        self._transforming = {
            name: self.dataset.matrices.transforming(name, each, dense=dense, dtype=dtype)
            for name, each in transforms_of(self.transforms, self.names).items()
        }
        if self.device is not None and self.batch_transform is not None:
            raise OptionError(
                "batch_transform runs on the host: leave device out, or change minibatches on the device in the "
                "training loop"
            )
        transforming = None if self.tokens is None else self._transforming.get(self.tokens.x)
        if self.tokens is not None and transforming is not None and transforming.genes is not None:
            raise OptionError(
                f"transforms of {self.tokens.x!r} need all genes, and tokens of it only those of the panel: take all "
                "genes, or make the tokens in a loader with x=None"
            )
        self._load_numba()
        self._told: set[str] = set()  # obs columns with missing labels

    def _require_parts(self) -> None:
        """Brings the names of parts into lists. Raises an error for one that the dataset lacks or that is no tensor."""
        self.obs, self.obsm = names_of(obs=self.obs), names_of(obsm=self.obsm)
        self.names = [] if self.x is None else one_or_more(x=self.x)  # the matrices that minibatches have
        self.x = self.x if self.x is None or isinstance(self.x, str) else self.names  # an iterator is used up
        self.loaded = list(self.names)  # and that of the tokens
        if self.tokens is not None:
            if not isinstance(self.tokens, Geneformer | ScGPT):
                raise OptionError(
                    f"tokens must be a zl.tokenizers.Geneformer or zl.tokenizers.ScGPT, not {self.tokens!r:.100}"
                )
            self.loaded += [self.tokens.x] if self.tokens.x not in self.loaded else []
        self.dataset.observations.require_usable(self.obs)
        self.dataset.observations.arrays.require(self.obsm)
        for name in self.loaded:
            self.dataset.matrices.layouts(name)  # raises for a matrix that cannot be read
            self.dataset.matrices.chosen(name)
        for name in self.names:
            self.dataset.matrices.require_dtype(name, self.dtype)

    def _load_numba(self) -> None:
        """Loads numba, before there are threads, or a process is forked that shares it.

        A small dataset does without, as long as nothing is asked for but its rows in an order that needs no loops.
        """
        matrices = self.dataset.matrices
        usual = {name for name in self.names if name not in self._transforming and matrices.chosen(name) is None}
        self._few = (
            self.companions is None
            and isinstance(self.sampling, _IN_NUMPY)
            and 0 < len(usual) == len(self.loaded)
            and matrices.are_few(usual)
        )
        if not self._few:
            load_compiler()

    # ---- what an epoch reads

    def lent(self) -> LentMemory | None:
        """The memory of the device in which an epoch is gathered, if there is a device."""
        if self.device is None:
            return None
        from zloader.training.device import LentMemory, opened

        return LentMemory(opened(self.device))

    def _form(self, lent: LentMemory | None) -> Form:
        """How x is gathered, for a device in its `lent` memory."""
        return Form(
            dense=self.layout == "dense",
            dtype=self.dtype,
            narrow=self.layout == "packed" or self.device is not None,
            empty=np.empty if lent is None else lent.empty,
        )

    def recipe(
        self, epoch: int, lent: LentMemory | None = None, *, sweeps: bool = False, ready: bool = False
    ) -> Recipe:
        """How minibatches of an epoch are made, in the memory that a device has lent.

        With `ready`, threads that gather also make the minibatches, if they can.
        """
        form = self._form(lent)
        transforms = {
            name: replace(each, seed=int(self.seed), epoch=epoch, empty=form.empty)
            for name, each in self._transforming.items()
        }
        x, matrices = {}, self.dataset.matrices
        for name in self.loaded:
            transforming = transforms.get(name)
            if transforming is None or transforming.genes is None:
                x[name] = matrices.parts(name, self.options)
            else:
                x[name], transforms[name] = matrices.parts_for(name, self.options, transforming)
        return Recipe(
            x=x,
            form=form,
            transforms=transforms,
            wanted=self.names,
            tokens=None if self.tokenizer is None else self.tokenizer.at(self.seed, epoch),
            sweeps=sweeps,
            compiled=not self._few or epoch >= EPOCHS_IN_NUMPY,
            **self._beside_x(),
            **self._cut(ready=ready),
        )

    def _beside_x(self) -> dict[str, Any]:
        """The parts of a Recipe beside x, for all rows of the whole dataset."""
        whole = self.dataset.whole
        arrays = whole.observations.arrays
        paged = arrays.all_paged(self.obsm, self.options)
        modalities = [*map(modality_of, self.loaded), *map(arrays.modality_of, self.obsm)]
        return {
            "obs": lambda: {name: whole.obs_column(name) for name in self.obs},
            "obsm": lambda: {name: whole.obsm_array(name) for name in self.obsm if name not in paged},
            "paged": paged,
            "present": self.dataset.matrices.present(modalities),
            "told": self._told,
        }

    def expected_bytes(self, n_rows: int) -> float:
        """About the bytes of x in a minibatch of so many rows, from the sizes of the stored arrays."""
        per_row, dense = 0.0, self.layout == "dense"
        for name in self.names:
            for matrix in self.dataset.matrices.layouts(name):
                values = matrix.n_genes if dense else matrix.values.n_elements / max(1, matrix.n_rows)
                per_row = max(per_row, values * (4 if dense else 8))
        return per_row * n_rows

    # ---- minibatches of what was gathered

    def _cut(self, *, ready: bool) -> dict[str, Any]:
        """How a Recipe makes minibatches of those that were gathered as one: by threads that gather, if `ready`.

        Arrays for a device are made into tensors by the thread that sends them.
        """
        if self.batch_transform is None and (not ready or self.device is not None):
            return {}
        cut = partial(made, self.minibatches, self.batch_transform)
        return {"cut": cut, "grows": self.batch_transform is not None}

    def minibatch(self, item: Made | MinibatchArrays) -> Any:
        """What the consumer gets for an item of an epoch. A batch_transform may have returned anything."""
        if isinstance(item, Made):
            return item.yielded()
        (minibatch,) = self.minibatches(item, (0, len(item.index)))
        return minibatch

    def minibatches(self, arrays: MinibatchArrays, cuts: Sequence[int]) -> list[Minibatch]:
        """The minibatches between cuts of arrays, with the companions and the sets that the sampling gives."""
        if self.companions is None and not isinstance(self.order, SetOrder):
            return self._plain(arrays, cuts)
        return list(map(self._with_more, gather.cut_apart(arrays, cuts)))

    def _plain(self, arrays: MinibatchArrays, cuts: Sequence[int]) -> list[Minibatch]:
        layout = self.layout if self.device is None else "packed"  # x takes its layout on the device
        return minibatches_of(self._arrays, layout, self.x, arrays, self.dataset.positions(arrays.index), cuts)

    def _with_more(self, arrays: MinibatchArrays) -> Minibatch:
        """The minibatch of arrays whose rows are followed by their controls, and then by their neighbours."""
        more = self.companions
        controls, neighbors = (None, None) if more is None else (more.controls, more.neighbors)
        n_rows = len(arrays.index) // (1 if more is None else 1 + more.per_row)
        first = n_rows * (1 if controls is None else 1 + controls.n)
        minibatch = self._between(arrays, 0, n_rows)
        if controls is not None:
            minibatch.control = self._between(arrays, n_rows, first)
        if neighbors is not None:
            minibatch.neighbors = self._between(arrays, first, len(arrays.index))
            minibatch.neighbor_weights = self._arrays.array(neighbors.weights_of(arrays.index[:n_rows]))
        if isinstance(self.order, SetOrder):
            assert arrays.sets is not None
            sets = arrays.sets[:n_rows] - arrays.sets[0]
            leading = arrays.index[np.flatnonzero(np.diff(sets, prepend=-1))]
            group = {name: self.dataset.whole.obs_column(name) for name in self.order.group}
            minibatch.set_of_row = self._arrays.array(sets)
            minibatch.group = {name: column.labels_of(leading) for name, column in group.items()}
        return minibatch

    def _between(self, arrays: MinibatchArrays, first: int, last: int) -> Minibatch:
        part = arrays if last - first == len(arrays.index) else gather.cut(arrays, first, last)
        (minibatch,) = self._plain(part, (0, len(part.index)))
        return minibatch


def bound_companions(
    controls: MatchedControls | None, neighbors: Neighbors | None, dataset: Dataset, order: Order
) -> Companions | None:
    """The controls and neighbours of a Loader. Raises OptionError if it cannot have them."""
    if not isinstance(controls, MatchedControls | None):
        raise OptionError(f"controls must be a zl.MatchedControls, not {controls!r:.100}")
    if not isinstance(neighbors, Neighbors | None):
        raise OptionError(f"neighbors must be a zl.Neighbors, not {neighbors!r:.100}")
    if controls is None and neighbors is None:
        return None
    return Companions(
        controls=None if controls is None else BoundControls(controls, dataset, order),
        neighbors=None if neighbors is None else BoundNeighbors(neighbors, dataset),
    )


def bound_tokenizer(tokens: Tokenizer | None, dataset: Dataset) -> BoundTokenizer | None:
    """The tokenizer `tokens`, if there is one, for the genes of a dataset.

    Raises OptionError or MissingColumnError if they do not fit together.
    """
    if tokens is None:
        return None
    if (by := tokens.genes_by) is None:
        names = pd.Series(dataset.matrices.gene_names(tokens.x))
    else:
        var = dataset.matrices.var_of(tokens.x)
        if by not in var.columns:
            has = f"{listed(var.columns)}{suggestion(by, map(str, var.columns))}"
            raise MissingColumnError(f"var of {dataset.url} has no column {by!r} to name genes by; it has: {has}")
        names = pd.Series(var[by])
    known = [None if missing else str(name) for name, missing in zip(names, names.isna(), strict=True)]
    bound = tokens.bind(known, f"{tokens.x} of {dataset.url}")
    if isinstance(tokens, Geneformer) and tokens.n_counts is not None:
        dataset.observations.require_usable([tokens.n_counts])
        _totals(dataset, tokens.n_counts)
        bound = replace(bound, totals=partial(_totals, dataset, tokens.n_counts))
    message = "tokens: %d of the %d genes of %s are in the vocabulary"
    log.info(message, bound.n_known, len(known), bound.where)
    return bound


def _totals(dataset: Dataset, column: str) -> NDArray[Any]:
    """The total counts of all rows of the whole dataset."""
    found = dataset.whole.obs_column(column)
    if found.categories is not None or found.values.dtype == bool:
        raise OptionError(f"n_counts={column!r} must be an obs column of numbers: this one holds labels")
    return np.asarray(found.values)


def usable_dtype(dtype: Any, layout: str) -> str | None:
    """The name of a dtype; None for the stored dtypes of "packed". Raises OptionError if x cannot have it."""
    if layout == "packed":
        if dtype is not None:
            raise OptionError("layout='packed' has the stored dtypes: give minibatch.x.csr, dense or padded the dtype")
        return None
    if "float16" in str(dtype):
        raise OptionError(
            f"half floats are made on the device: leave dtype={dtype!r:.100} out, and convert x there, as "
            "minibatch.x.to(torch.bfloat16) does (docs/howto/mixed_precision.md)"
        )
    return "float32" if dtype is None else name_of_dtype(DTYPES, dtype=dtype)
