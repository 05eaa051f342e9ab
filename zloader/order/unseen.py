"""The rest of an epoch whose number of ranks has changed, as an order of its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zloader.common.records import Rows
from zloader.order.sampling import WrappedSampling


@dataclass(frozen=True, kw_only=True, eq=False)
class Unseen(WrappedSampling):
    """The rest of an epoch as a sampling: the rows `first`, then the order of `sampling` from position `begin` on.

    It is valid only for the seed and the epoch from which `first` was computed.
    """

    first: Rows
    begin: int

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows left in the epoch."""
        return len(self.first) + self.sampling.n_rows(dataset_rows) - self.begin

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the rest of the epoch."""
        shift = self.begin - len(self.first)
        begin, end = max(start + shift, self.begin), stop + shift
        if begin >= end:
            return self.first[start:stop]
        rest = self.sampling.rows(begin, end, dataset_rows=dataset_rows, seed=seed, epoch=epoch)
        return np.concatenate([self.first[start:stop], rest])
