"""The fetches of a plan: their rows, how they are cut into minibatches, and what is left of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """The rows loaded into one buffer, and how they are cut into minibatches.

    `rows` are in read order, block by block. Minibatch k holds `rows[order[cuts[k] : cuts[k + 1]]]`. `sets` has the
    number of the set of each row, if the sampling has sets.
    """

    number: int
    rows: Rows
    order: Rows
    cuts: NDArray[np.int64]
    sets: Rows | None = None

    def after(self, n_minibatches: int) -> Fetch:
        """The fetch without its first `n_minibatches` minibatches, and without the rows that only they use."""
        if not n_minibatches:
            return self
        cuts = self.cuts[n_minibatches:]
        order = self.order[cuts[0] :]
        used = np.sort(order)
        return Fetch(
            number=self.number,
            rows=self.rows[used],
            order=np.searchsorted(used, order),
            cuts=cuts - cuts[0],
            sets=None if self.sets is None else self.sets[used],
        )

    def without(self, gaps: NDArray[np.bool_]) -> Fetch:
        """The fetch without some of its rows, whose minibatches become shorter."""
        held = ~gaps[self.order]
        order = (np.cumsum(~gaps) - 1)[self.order[held]]
        sets = None if self.sets is None else self.sets[~gaps]
        cuts = np.append(0, np.cumsum(held))[self.cuts]
        return replace(self, rows=self.rows[~gaps], order=order, cuts=cuts, sets=sets)


class AddsControls(Protocol):
    """Adds control rows to the minibatches of a fetch."""

    def added(self, fetch: Fetch, *, seed: int, epoch: int) -> Fetch:
        """The fetch with the controls of each minibatch after its rows."""
        ...


class Remaining(NamedTuple):
    """The minibatches of fetch `number` that remain: `size` of them, from the fetch's minibatch `begin` on."""

    number: int
    begin: int
    size: int
