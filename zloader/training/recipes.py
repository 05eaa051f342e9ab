"""How a loader makes minibatches in all its epochs, in this process or in another that has a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zloader.common.checks import name_of_dtype, names_of, one_or_more, require_one_of
from zloader.common.compiled import load_compiler
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import modality_of
from zloader.order.cell_sets import SetOrder
from zloader.order.companions import BoundControls, BoundNeighbors, Companions, MatchedControls, Neighbors
from zloader.order.sampling import Order, Sampling
from zloader.reading import gather
from zloader.reading.forms import Form
from zloader.reading.recipe import Cutting, Recipe, RowColumns
from zloader.reading.rehearsal import EPOCHS_IN_NUMPY, IN_NUMPY
from zloader.training.arrays import NumPy
from zloader.training.batch_transform import BatchTransform, Made, made, require_function
from zloader.training.minibatch import Minibatch, minibatches_of
from zloader.training.tokens import Tokenizer, bound_tokenizer, require_tokenizer
from zloader.transforms.transform import Transforms, transforms_of

if TYPE_CHECKING:
    from zloader.training.delivery import LentMemory

LAYOUTS = ("csr", "dense", "packed", "scipy")
DTYPES = ("float32", "float64", "int32", "int64")


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
        self._require_form()
        require_function(self.batch_transform)
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
        self._load_loops()
        self._told: set[str] = set()  # obs columns with missing labels

    def _require_form(self) -> None:
        """Finds the arrays of minibatches, and their device: a thread sends them there ahead, where x takes its layout.

        Raises OptionError. torch is imported if minibatches have tensors, before workers are forked.
        """
        if self.framework == "numpy":
            if self.device is not None:
                raise OptionError(
                    f"NumPy has no devices: leave device={self.device!r:.100} out, or take framework='torch'"
                )
            self._arrays = NumPy()
            return
        from zloader.training.devices import usable_device
        from zloader.training.tensors import Torch

        self.device = usable_device(self.device, self.layout)
        self._arrays = Torch()

    def _require_parts(self) -> None:
        """Brings the names of parts into lists. Raises an error for one that the dataset lacks or that is no tensor."""
        self.obs, self.obsm = names_of(obs=self.obs), names_of(obsm=self.obsm)
        self.names = [] if self.x is None else one_or_more(x=self.x)  # the matrices that minibatches have
        self.x = self.x if self.x is None or isinstance(self.x, str) else self.names  # an iterator is used up
        self.loaded = list(self.names)  # and that of the tokens
        if self.tokens is not None:
            require_tokenizer(self.tokens)
            self.loaded += [self.tokens.x] if self.tokens.x not in self.loaded else []
        self.dataset.observations.require_usable(self.obs)
        self.dataset.observations.arrays.require(self.obsm)
        for name in self.loaded:
            self.dataset.matrices.layouts(name)  # raises for a matrix that cannot be read
            self.dataset.matrices.chosen(name)
        for name in self.names:
            self.dataset.matrices.require_dtype(name, self.dtype)

    def _load_loops(self) -> None:
        """Loads the compiled loops of an epoch, before there are threads, or a process is forked that shares them.

        A small dataset does without, as long as nothing is asked for but its rows in an order that needs no loops.
        """
        matrices = self.dataset.matrices
        usual = {name for name in self.names if name not in self._transforming and matrices.chosen(name) is None}
        self._few = (
            self.companions is None
            and isinstance(self.sampling, IN_NUMPY)
            and 0 < len(usual) == len(self.loaded)
            and matrices.are_few(usual)
        )
        if not self._few:
            load_compiler()
        for name in usual:
            matrices.rehearse(name, self._form(None))

    # ---- what an epoch reads

    def lent(self) -> LentMemory | None:
        """The memory of the device in which an epoch is gathered, if there is a device."""
        if self.device is None:
            return None
        from zloader.training.delivery import LentMemory
        from zloader.training.devices import opened

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
            columns=self._columns(),
            cutting=self.cutting(ready=ready),
            sweeps=sweeps,
            compiled=not self._few or epoch >= EPOCHS_IN_NUMPY,
        )

    def _columns(self) -> RowColumns:
        """The parts beside x, for all rows of the whole dataset."""
        whole = self.dataset.whole
        arrays = whole.observations.arrays
        obsm = arrays.all_paged(self.obsm, self.options)
        modalities = [*map(modality_of, self.loaded), *map(arrays.modality_of, self.obsm)]
        return RowColumns(
            obs=lambda: {name: whole.obs_column(name) for name in self.obs},
            obsm=lambda: {name: obsm[name] if name in obsm else whole.obsm_array(name) for name in self.obsm},
            paged=list(obsm.values()),
            present=self.dataset.matrices.present(modalities),
            told=self._told,
        )

    def expected_bytes(self, n_rows: int) -> float:
        """About the bytes of x in a minibatch of so many rows, from the sizes of the stored arrays."""
        per_row, dense = 0.0, self.layout == "dense"
        for name in self.names:
            for matrix in self.dataset.matrices.layouts(name):
                values = matrix.n_genes if dense else matrix.values.n_elements / max(1, matrix.n_rows)
                per_row = max(per_row, values * (4 if dense else 8))
        return per_row * n_rows

    # ---- minibatches of what was gathered

    def cutting(self, *, ready: bool) -> Cutting:
        """How minibatches are made of those that were gathered as one: by threads that gather, if they are `ready`.

        Arrays for a device are made into tensors by the thread that sends them.
        """
        if self.batch_transform is None and (not ready or self.device is not None):
            return Cutting()
        cut = partial(made, self.minibatches, self.batch_transform)
        return Cutting(cut=cut, grows=self.batch_transform is not None)

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
        return list(map(self._with_sets, gather.cut_apart(arrays, cuts)))

    def _plain(self, arrays: MinibatchArrays, cuts: Sequence[int]) -> list[Minibatch]:
        layout = self.layout if self.device is None else "packed"  # x takes its layout on the device
        return minibatches_of(self._arrays, layout, self.x, arrays, self.dataset.positions(arrays.index), cuts)

    def _with_sets(self, arrays: MinibatchArrays) -> Minibatch:
        """The minibatch of arrays whose rows are followed by their companions."""
        more: dict[str, Any] = {}
        if self.companions is not None:
            arrays, more = self._with_companions(self.companions, arrays)
        if isinstance(self.order, SetOrder):
            assert arrays.sets is not None
            sets = arrays.sets - arrays.sets[0]
            first = arrays.index[np.flatnonzero(np.diff(sets, prepend=-1))]
            group = {name: self.dataset.whole.obs_column(name) for name in self.order.group}
            more["set_of_row"] = self._arrays.array(sets)
            more["group"] = {name: column.labels_of(first) for name, column in group.items()}
        return Minibatch(self._only(arrays), **more)

    def _with_companions(
        self, companions: Companions, arrays: MinibatchArrays
    ) -> tuple[MinibatchArrays, dict[str, Any]]:
        """The rows without their companions, and the fields that these become."""
        n_rows = len(arrays.index) // (1 + companions.per_row)
        more: dict[str, Any] = {}
        first = n_rows
        if companions.controls is not None:
            first += n_rows * companions.controls.n
            more["control"] = self._only(gather.cut(arrays, n_rows, first))
        if companions.neighbors is not None:
            more["neighbors"] = self._only(gather.cut(arrays, first, len(arrays.index)))
            weights = companions.neighbors.weights_of(arrays.index[:n_rows])
            more["neighbor_weights"] = self._arrays.array(weights)
        return gather.cut(arrays, 0, n_rows), more

    def _only(self, arrays: MinibatchArrays) -> Minibatch:
        (minibatch,) = self._plain(arrays, (0, len(arrays.index)))
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


def usable_dtype(dtype: Any, layout: str) -> str | None:
    """The name of a dtype; None for the stored dtypes of "packed". Raises OptionError if x cannot have it."""
    if layout == "packed":
        if dtype is not None:
            raise OptionError(
                f"layout='packed' has the stored dtypes: leave dtype={dtype!r:.100} out, and give it to "
                "minibatch.x.csr, dense or padded"
            )
        return None
    if "float16" in str(dtype):
        raise OptionError(
            f"half floats are made on the device: leave dtype={dtype!r:.100} out, and convert x there, as "
            "minibatch.x.to(torch.bfloat16) does (docs/howto/mixed_precision.md)"
        )
    return "float32" if dtype is None else name_of_dtype(DTYPES, dtype=dtype)
