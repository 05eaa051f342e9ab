"""How a loader makes minibatches in all its epochs, in this process or in another that has a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.order.cell_sets import BoundCellSets
from zloader.order.companions import Companions
from zloader.order.controls import MatchedControls
from zloader.order.neighbors import Neighbors
from zloader.order.sampling import Sampling
from zloader.reading import gather
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.recipe import Cutting, Recipe
from zloader.selecting.columns import ObsColumn
from zloader.training.contents import Contents
from zloader.training.frameworks import NumPy
from zloader.training.minibatch import Minibatch
from zloader.training.own_transforms import Convert, OwnTransforms, one_of

if TYPE_CHECKING:
    from zloader.training.delivery import LentMemory


@dataclass(frozen=True, kw_only=True)
class LoaderRecipes:
    """Makes the recipe of each epoch: what minibatches hold, with the sets and companions that the sampling gives."""

    contents: Contents
    options: FetchOptions
    seed: int
    sampling: Sampling
    companions: Companions | None

    def recipe(self, epoch: int, lent: LentMemory | None = None, *, sweeping: int = 0, ready: bool = False) -> Recipe:
        """How minibatches of an epoch are made, in the memory that a device has lent.

        With `ready` they are made of arrays of the framework, if threads that gather can make these.
        """
        return self.contents.recipe(
            epoch, self.options, self.converter, seed=self.seed, lent=lent, sweeping=sweeping, ready=ready
        )

    def cutting(self) -> Cutting:
        """How minibatches of the framework are made of arrays, as far as threads that gather may make them."""
        return self.contents.cutting(self.converter, ready=True)

    def converter(self) -> Convert:
        """Makes arrays of the framework, with the companions, and with the sets of the sampling, if there are any."""
        framework = self.contents.form.framework
        framework.prepare()
        group = list(self.sampling.options.group) if isinstance(self.sampling, BoundCellSets) else []
        convert = self.contents.converter()
        if not group and self.companions is None:
            return convert
        return WithSets(
            convert=convert,
            array=framework.array,
            dataset=self.contents.dataset,
            companions=self.companions,
            group=group,
        )

    def expected_bytes(self, n_rows: int) -> float:
        """About the bytes of x in a minibatch of so many rows, from the sizes of the stored arrays."""
        per_row, dense = 0.0, self.contents.form.layout == "dense"
        for name in self.contents.x.names:
            for matrix in self.contents.dataset.matrices.layouts(name):
                values = matrix.n_genes if dense else matrix.values.n_elements / max(1, matrix.n_rows)
                per_row = max(per_row, values * (4 if dense else 8))
        return per_row * n_rows

    def own_parts(self, parts: Sequence[MatrixPart]) -> list[MatrixPart]:
        """The parts of an array in all stores, with sources of their own: a source belongs to one event loop."""
        pairs = zip(parts, self.contents.dataset.whole.stores, strict=True)
        return [replace(part, source=store.source(self.options)) for part, store in pairs]

    def of_arrays(self, options: FetchOptions) -> LoaderRecipes:
        """The same for a process that gathers arrays. It does not import torch, unless the user's functions need it."""
        contents = copy.copy(self.contents)
        if not contents.own:
            contents.form = replace(contents.form, framework=NumPy())
        return replace(self, contents=contents, options=options)


def bound_companions(
    controls: MatchedControls | None,
    neighbors: Neighbors | None,
    dataset: Dataset,
    sampling: Sampling,
    own: OwnTransforms,
) -> Companions | None:
    """The controls and neighbours of a Loader. Raises OptionError if it cannot have them."""
    given = controls is not None or neighbors is not None
    if own.fetch is not None and (given or isinstance(sampling, BoundCellSets)):
        raise OptionError(
            "fetch_transform gets the rows of several minibatches without their sets, controls and neighbours: use "
            "batch_transform"
        )
    if not isinstance(controls, MatchedControls | None):
        raise OptionError(f"controls must be a zl.MatchedControls, not {controls!r:.100}")
    if not isinstance(neighbors, Neighbors | None):
        raise OptionError(f"neighbors must be a zl.Neighbors, not {neighbors!r:.100}")
    if not given:
        return None
    return Companions(
        controls=None if controls is None else controls.bound(dataset, sampling),
        neighbors=None if neighbors is None else neighbors.bound(dataset, sampling),
    )


@dataclass(frozen=True, kw_only=True)
class WithSets:
    """Makes minibatches of arrays, whose rows are followed by their companions.

    `convert` makes minibatches without companions and sets, and `array` an array of its framework. Sets agree in the
    obs columns `group` of `dataset`.
    """

    convert: Convert
    array: Callable[[NDArray[Any]], Any]
    dataset: Dataset
    companions: Companions | None
    group: Sequence[str]

    @cached_property
    def _columns(self) -> dict[str, ObsColumn]:
        return {name: self.dataset.whole.obs_column(name) for name in self.group}

    def __call__(self, arrays: MinibatchArrays, cuts: Sequence[int]) -> list[Minibatch]:
        return list(map(self._minibatch, gather.cut_apart(arrays, cuts)))

    def _minibatch(self, arrays: MinibatchArrays) -> Minibatch:
        more: dict[str, Any] = {}
        if self.companions is not None:
            arrays, more = self._with(self.companions, arrays)
        minibatch = replace(one_of(self.convert, arrays), **more)
        if not self.group:
            return minibatch
        assert arrays.sets is not None
        sets = arrays.sets - arrays.sets[0]
        first = arrays.index[np.flatnonzero(np.diff(sets, prepend=-1))]
        group = {name: column.labels_of(first) for name, column in self._columns.items()}
        return replace(minibatch, set_of_row=self.array(sets), group=group)

    def _with(self, companions: Companions, arrays: MinibatchArrays) -> tuple[MinibatchArrays, dict[str, Any]]:
        """The rows without their companions, and the fields that these become."""
        n_rows = len(arrays.index) // (1 + companions.per_row)
        more: dict[str, Any] = {}
        first = n_rows
        if companions.controls is not None:
            first += n_rows * companions.controls.n
            more["control"] = one_of(self.convert, gather.cut(arrays, n_rows, first))
        if companions.neighbors is not None:
            more["neighbors"] = one_of(self.convert, gather.cut(arrays, first, len(arrays.index)))
            weights = companions.neighbors.weights_of(arrays.index[:n_rows])
            more["neighbor_weights"] = self.array(weights)
        return gather.cut(arrays, 0, n_rows), more
