"""Samplings: the order of the rows in an epoch. Pure.

A sampling maps positions in the order of an epoch to rows. The order depends on the seed and the epoch alone: a
sampling has no state and no random generator (see `permutation.py`). Finding n rows costs time and memory in proportion
to n, however many rows the dataset has. The samplings themselves are in `shuffling.py`,
`weighted.py`, `mixture.py`, `cell_sets.py` and `controls.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.selecting.columns import ObsColumn


class ChosenRows(Protocol):
    """Some rows of a dataset, in ascending order."""

    def __len__(self) -> int: ...

    def numbers(self, positions: Rows) -> Rows:
        """The rows at some positions in the set."""

    def all_numbers(self) -> Rows:
        """The rows."""

    def mask(self) -> NDArray[np.bool_]:
        """A mask over all rows of the dataset."""


class Table(Protocol):
    """What a sampling or controls may look up in a dataset or view."""

    @property
    def n_obs(self) -> int:
        """The number of rows."""

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers."""

    def rows_of(self, group: Any) -> ChosenRows:
        """The rows in a group: a dataset, a view, or a condition."""

    @property
    def whole(self) -> Table:
        """The dataset that this is a view of."""

    def in_whole(self, group: Any) -> ChosenRows:
        """Which rows of `whole` are in a group: a condition on these rows, or a dataset or view."""


class Sampling(ABC):
    """Base class of samplings: the order of the rows in an epoch, as a pure function of positions.

    For an order of your own, subclass it and write these two methods:

    >>> import numpy as np, zloader.order.plan
    >>> class EverySecondRow(zl.Sampling):
    ...     def n_rows(self, dataset_rows):
    ...         return dataset_rows // 2
    ...     def rows(self, start, stop, *, dataset_rows, seed, epoch):
    ...         return 2 * np.arange(start, stop) + epoch % 2
    >>> plan = zloader.order.plan.Plan(
    ...     dataset_rows=12, sampling=EverySecondRow(), batch_size=2, fetch_factor=2, epoch=1
    ... )
    >>> [plan.fetch(number).rows.tolist() for number in range(plan.n_fetches)]
    [[1, 3], [5, 7, 9, 11]]

    All else has a default. `bound`, `sized` and `batched` may be called again on their own result and must then return
    it, or an equal one. These attributes may be set in the class or in `__init__`, or be properties:

    - `shuffles_fetch`: whether the rows of each fetch are permuted in memory. Default: False.
    - `block_size`: rows per contiguous block. A loader with smaller fetches raises OptionError. Default: 1.
    - `repeats`: whether a row may occur more than once per epoch. Default: False.
    - `indices`: the rows that it is restricted to, or None. Default: None.

    A loader refuses the saved state of another loader if the samplings differ in class or in a public attribute. So
    begin the names of attributes that change, such as a cache, with an underscore.
    """

    shuffles_fetch: bool = False
    block_size: int = 1
    repeats: bool = False
    indices: Sequence[int] | NDArray[np.integer] | None = None
    set_size: int | None = None  # rows per set, if the sampling has sets
    unit: int = 1  # the rows that no minibatch divides: a set, or all sets of a minibatch
    has_gaps: bool = False  # whether row -1 stands for no row

    def __repr__(self) -> str:  # for errors; a dataclass has its own
        return f"{type(self).__name__}(...)"

    @abstractmethod
    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch."""

    @abstractmethod
    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the order of the epoch."""

    def bound(self, dataset: Table) -> Sampling:
        """The sampling to use for a dataset or view, with its obs columns or rows looked up. Default: itself."""
        return self

    def sized(self, fetch_rows: int) -> Sampling:
        """The sampling to use for fetches of `fetch_rows` rows. Default: itself."""
        return self

    def batched(self, batch_size: int) -> Sampling:
        """The sampling to use for minibatches of `batch_size` rows. Default: itself."""
        return self


@dataclass(frozen=True, eq=False)
class WrappedSampling(Sampling):
    """Base class: an order made from that of `sampling`, which is bound already, with all of its attributes."""

    sampling: Sampling

    def sized(self, fetch_rows: int) -> Sampling:
        """The same around `sampling.sized(fetch_rows)`."""
        return self._around(self.sampling.sized(fetch_rows))

    def batched(self, batch_size: int) -> Sampling:
        """The same around `sampling.batched(batch_size)`."""
        return self._around(self.sampling.batched(batch_size))

    def _around(self, sampling: Sampling) -> Sampling:
        return self if sampling is self.sampling else replace(self, sampling=sampling)

    def _renumbered(self, rows_of: Callable[[Rows], Rows], start: int, stop: int, **of: int) -> Rows:
        """The rows that `rows_of` gives for rows of `sampling`. Gaps remain. Raises OptionError for invalid rows."""
        rows = require_rows(self.sampling.rows(start, stop, **of), self.sampling, start, stop, of["dataset_rows"])
        if not self.has_gaps:
            return rows_of(rows)
        return np.where(rows < 0, -1, rows_of(np.maximum(rows, 0)))


for _name in Sampling.__annotations__:
    setattr(WrappedSampling, _name, property(attrgetter(f"sampling.{_name}")))


def require_sampling(sampling: Any) -> None:
    """Raises OptionError unless `sampling` is a Sampling. A class is refused too."""
    if not isinstance(sampling, Sampling):
        why = "which is a class" if isinstance(sampling, type) else "whose class has to be a subclass of zl.Sampling"
        raise OptionError(f"sampling must be a sampling such as zl.BlockShuffling(64), not {sampling!r:.100}, {why}")


def fitted(sampling: Sampling, *, dataset: Table | None = None, fetch_rows: int, batch_size: int) -> Sampling:
    """The sampling for a dataset, if one is given, and these sizes. Raises OptionError unless it is a sampling."""
    require_sampling(sampling)
    for name, fit in (("bound", dataset), ("sized", fetch_rows), ("batched", batch_size)):
        if fit is not None:
            made = getattr(sampling, name)(fit)
            if not isinstance(made, Sampling):
                raise OptionError(f"{name} of {sampling} must return a sampling, such as itself, not {made!r:.100}")
            sampling = made
    return sampling


def require_rows(rows: Any, sampling: Sampling, start: int, stop: int, n_rows: int) -> Rows:
    """`rows`, the result of `sampling.rows(start, stop)`, as int64. OptionError unless they are rows below `n_rows`."""
    expected = f"{type(sampling).__name__}.rows({start}, {stop}) must give {stop - start} row numbers"
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise OptionError(f"{expected} as a 1-d array of integers, not {rows!r:.100}")
    if len(rows) != stop - start:
        raise OptionError(f"{expected}, not {len(rows)}")
    least = -1 if sampling.has_gaps else 0
    if len(rows) and not least <= rows.min() <= rows.max() < n_rows:
        bad = rows.min() if rows.min() < least else rows.max()
        raise OptionError(f"{expected} from 0 to {n_rows - 1}, but gave {bad}")
    return rows.astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Unseen(WrappedSampling):
    """The rest of an epoch as a sampling: the rows `first`, and then those of `sampling` at positions `[begin, end)`.

    It is valid only for the seed and the epoch from which the rows were computed.
    """

    first: Rows
    begin: int
    end: int

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows left in the epoch."""
        return len(self.first) + self.end - self.begin

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the rest of the epoch."""
        found, later = self.first[start:stop], self.begin - len(self.first)  # how much later `sampling` has a position
        if stop + later <= self.begin:
            return found
        of = {"dataset_rows": dataset_rows, "seed": seed, "epoch": epoch}
        return np.concatenate([found, self.sampling.rows(max(self.begin, start + later), stop + later, **of)])
