"""Rows that come with each row of a minibatch: its controls, and its neighbours. Pure.

They are part of the fetch, so that its reads are coalesced and its memory is bounded. Each minibatch is followed by the
companions of its rows: all controls, row after row, and then all neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zloader.common.records import Rows
from zloader.order.controls import BoundControls
from zloader.order.neighbors import BoundNeighbors
from zloader.order.plan import Fetch


class _Companion(Protocol):
    n: int

    def drawn(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """`n` rows for each of some rows, one row after another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Companions:
    """The controls and neighbours of the rows of a dataset; None for what a Loader has not."""

    controls: BoundControls | None
    neighbors: BoundNeighbors | None

    @property
    def _each(self) -> list[_Companion]:
        return [each for each in (self.controls, self.neighbors) if each is not None]

    @property
    def per_row(self) -> int:
        """Companions per row."""
        return sum(each.n for each in self._each)

    def added(self, fetch: Fetch, *, seed: int, epoch: int) -> Fetch:
        """The fetch with the companions of each minibatch after its rows."""
        main, sizes, per_row = fetch.order, np.diff(fetch.cuts), 1 + self.per_row
        size, first = np.repeat(sizes, sizes), np.repeat(fetch.cuts[:-1], sizes)  # of the minibatch of each row
        within = np.arange(len(main)) - first
        order = np.empty(len(main) * per_row, np.int64)
        order[first * per_row + within] = main
        rows, before = [fetch.rows], 1
        n_rows = len(fetch.rows)
        for each in self._each:
            drawn = each.drawn(fetch.rows[main], seed=seed, epoch=epoch)
            places = (first * per_row + size * before + within * each.n)[:, None] + np.arange(each.n)
            order[places.reshape(-1)] = np.arange(n_rows, n_rows + len(drawn))
            rows.append(drawn)
            n_rows, before = n_rows + len(drawn), before + each.n
        sets = None
        if fetch.sets is not None:
            sets = np.concatenate([fetch.sets, *(np.repeat(fetch.sets[main], each.n) for each in self._each)])
        return Fetch(number=fetch.number, rows=np.concatenate(rows), order=order, cuts=fetch.cuts * per_row, sets=sets)

    def n_from_fallback(self, index: Rows) -> int:
        """How many controls of a minibatch agree with their rows in the columns of a fallback only."""
        if self.controls is None:
            return 0
        return self.controls.n_from_fallback(index[: len(index) // (1 + self.per_row)])
