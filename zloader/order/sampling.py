"""Samplings, and the orders of rows that they make. Pure.

A sampling is an option of a Loader: how the rows of any dataset are ordered. For one dataset and one size of
minibatches and fetches it makes an Order, which maps positions in an epoch to rows. An order depends on the seed and
the epoch alone: it has no state and no random generator (see `permutation.py`). Finding n rows costs time and memory in
proportion to n, however many rows the dataset has. A view and the rest of an epoch are orders, too.

The samplings themselves are in `shuffling.py`, `weighted.py` and `cell_sets.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_natural
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.selecting.columns import ObsColumn


class Table(Protocol):
    """What a sampling, controls or neighbours may look up in a dataset or view. Chosen rows are a RowSet."""

    @property
    def n_obs(self) -> int:
        """The number of rows."""

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers."""

    def rows_of(self, group: Any) -> Any:
        """The rows in a group: a dataset, a view, or a condition."""

    @property
    def whole(self) -> Any:
        """The dataset that this is a view of."""

    def in_whole(self, group: Any) -> Any:
        """Which rows of `whole` are in a group: a condition on these rows, or a dataset or view."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The rows of a dataset in the order of each epoch; returned by `order` of a sampling.

    Args:
        dataset_rows: The rows of the dataset, of which the order has some or all.
        n_rows: Rows per epoch.
        draw: A function of `start, stop, seed, epoch` that returns the rows at positions `[start, stop)` of an epoch as
            an array of whole numbers, from these arguments alone. It must survive pickling to be used in processes.
        block_size: Rows per contiguous block. A loader with smaller fetches raises OptionError.
        shuffles_fetch: Whether the rows of each fetch are permuted in memory.
        repeats: Whether a row may come more than once per epoch.
        unit: The rows that no minibatch divides: a set, or all sets of a minibatch.
        set_size: Rows per set, if there are sets.
        chosen: A function that returns a mask over all rows of those that may come; None for all.
        is_rest: Whether this is the rest of an epoch, which may have fewer rows than there are ranks.

    >>> order = zl.BlockShuffling(block_size=50).order(dataset, batch_size=10, fetch_rows=100)
    >>> order.n_rows, order.block_size, order.rows(100, 103, seed=0, epoch=0).tolist()
    (300, 50, [150, 151, 152])
    """

    dataset_rows: int
    n_rows: int
    draw: Callable[[int, int, int, int], Rows]
    block_size: int = 1
    shuffles_fetch: bool = False
    repeats: bool = False
    unit: int = 1
    set_size: int | None = None
    chosen: Callable[[], NDArray[np.bool_]] | None = None
    is_rest: bool = False

    def __post_init__(self) -> None:
        require_count(block_size=self.block_size, unit=self.unit)
        require_natural(dataset_rows=self.dataset_rows, n_rows=self.n_rows)
        for name in ("dataset_rows", "n_rows", "block_size", "unit"):
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy integers overflow

    def rows(self, start: int, stop: int, *, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the order of an epoch. OptionError unless they are rows."""
        rows = self.draw(start, stop, seed, epoch)
        expected = f"the order of a sampling must give {stop - start} row numbers for positions {start} to {stop}"
        if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            raise OptionError(f"{expected} as a 1-d array of integers, not {rows!r:.100}")
        if len(rows) != stop - start:
            raise OptionError(f"{expected}, not {len(rows)}")
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.dataset_rows:
            bad = rows.min() if rows.min() < 0 else rows.max()
            raise OptionError(f"{expected}, from 0 to {self.dataset_rows - 1}, but gave {bad}")
        return rows.astype(np.int64, copy=False)


class Sampling(ABC):
    """Base class of samplings: the order of the rows in an epoch.

    For an order of your own, subclass it:

    >>> import numpy as np
    >>> def second_rows(start, stop, seed, epoch):
    ...     return 2 * np.arange(start, stop) + epoch % 2
    >>> class EverySecondRow(zl.Sampling):
    ...     def order(self, dataset, batch_size, fetch_rows):
    ...         return zl.Order(dataset_rows=dataset.n_obs, n_rows=dataset.n_obs // 2, draw=second_rows)
    >>> loader = zl.Loader(dataset, sampling=EverySecondRow(), batch_size=4)
    >>> next(iter(loader)).index.tolist()
    [0, 2, 4, 6]

    A loader refuses the saved state of another loader if the samplings differ in class or in a public attribute. So
    begin the names of attributes that change, such as a cache, with an underscore.
    """

    def __repr__(self) -> str:  # for errors; a dataclass has its own
        return f"{type(self).__name__}(...)"

    @abstractmethod
    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        """The order of the rows of a dataset or view, for minibatches and fetches of these sizes."""


def require_sampling(sampling: Any) -> None:
    """Raises OptionError unless `sampling` is a Sampling. A class is refused too."""
    if not isinstance(sampling, Sampling):
        why = "which is a class" if isinstance(sampling, type) else "whose class has to be a subclass of zl.Sampling"
        raise OptionError(f"sampling must be a sampling such as zl.BlockShuffling(64), not {sampling!r:.100}, {why}")
