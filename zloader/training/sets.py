"""What sets and controls add to minibatches: the control rows, and the set of each row with its labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from zloader.common.errors import OptionError
from zloader.common.records import MinibatchArrays
from zloader.dataset.dataset import Dataset
from zloader.order.cell_sets import BoundCellSets
from zloader.order.controls import BoundControls, MatchedControls
from zloader.order.sampling import Sampling
from zloader.reading import gather
from zloader.selecting.columns import ObsColumn
from zloader.training.minibatch import Minibatch
from zloader.training.own_transforms import OwnTransforms


def bound_controls(
    controls: MatchedControls | None, dataset: Dataset, sampling: Sampling, own: OwnTransforms
) -> BoundControls | None:
    """The controls of a Loader. Raises OptionError if it cannot have them."""
    if own.fetch is not None and (controls is not None or isinstance(sampling, BoundCellSets)):
        raise OptionError(
            "fetch_transform gets the rows of several minibatches without their sets and controls: use batch_transform"
        )
    if controls is None:
        return None
    if not isinstance(controls, MatchedControls):
        raise OptionError(f"controls must be a zl.MatchedControls, not {controls!r:.100}")
    return controls.bound(dataset, sampling)


def group_columns(sampling: Sampling) -> list[str]:
    """The columns that the sets of a sampling agree in."""
    return list(sampling.options.group) if isinstance(sampling, BoundCellSets) else []


@dataclass(frozen=True, kw_only=True)
class WithSets:
    """Makes minibatches of arrays, whose rows are followed by `n_controls` controls each.

    `convert` makes a minibatch without controls and sets. Sets agree in the obs columns `group` of `dataset`.
    """

    convert: Callable[[MinibatchArrays], Minibatch]
    dataset: Dataset
    n_controls: int
    group: Sequence[str]

    @cached_property
    def _columns(self) -> dict[str, ObsColumn]:
        return {name: self.dataset.whole.obs_column(name) for name in self.group}

    def __call__(self, arrays: MinibatchArrays) -> Minibatch:
        n_rows, control = len(arrays.index) // (1 + self.n_controls), None
        if self.n_controls:
            control = self.convert(gather.cut(arrays, n_rows, len(arrays.index)))
            arrays = gather.cut(arrays, 0, n_rows)
        minibatch = replace(self.convert(arrays), control=control)
        if not self.group:
            return minibatch
        assert arrays.sets is not None
        sets = arrays.sets - arrays.sets[0]
        first = arrays.index[np.flatnonzero(np.diff(sets, prepend=-1))]
        group = {name: column.labels_of(first) for name, column in self._columns.items()}
        return replace(minibatch, set_of_row=torch.from_numpy(sets), group=group)
