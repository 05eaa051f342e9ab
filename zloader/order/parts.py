"""Parts of the rows for machines, which stay the same from epoch to epoch and mix rows from all over the dataset. Pure.

The rows are cut into strata, and each stratum into as many equal regions as there are parts. Every stratum deals its
regions to the parts at random. So a part has a region of every stratum, and all parts have the same number of rows.
Fewer rows than parts are left over at the end, and go to single machines, so that the numbers of rows of machines
differ by one at most. A machine has some consecutive parts, and an order of its own over their rows, those of the
sampling. The number of parts does not depend on that of machines: with half as many machines, each has twice the parts.

Regions are as small as mixing needs and as large as reads want: see `_region_rows`.

Dealing anew (`redeal`): a stratum has a number of deals so far, and `redeal` of all strata deal again in each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of, words_at
from zloader.order.sampling import Sampling, Unseen, WrappedSampling

# Minibatches of rows sorted by 14 labels have 0.005 bits less than in a global order with 64 regions of a part, and
# 0.03 less with 32. The chunks at the ends of a region are read by two machines, a few percent of 500 rows.
_REGIONS, _LEAST_ROWS, _MOST_ROWS = 64, 64, 8192


def stretch_of(n_rows: int, machine: int, machines: int) -> slice:
    """The positions of a machine in the order of an epoch: equal stretches, of which the first may have a row more."""
    size, longer = divmod(n_rows, machines)
    begin = machine * size + min(machine, longer)
    return slice(begin, begin + size + (machine < longer))


def _region_rows(part_rows: int) -> int:
    """About how many rows a region has."""
    return min(max(part_rows // _REGIONS, _LEAST_ROWS), _MOST_ROWS)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Deal:
    """Part `p` has region `regions[s, p]` of stratum s, which begins at row `bounds[s]` of each part."""

    bounds: NDArray[np.int64]
    regions: NDArray[np.int64]

    def rows(self, first: int, stop: int, positions: Rows) -> Rows:
        """The rows at some positions among those of parts `[first, stop)`, in the order of the dataset."""
        n_parts, of = self.regions.shape[1], stop - first
        stratum = np.searchsorted(of * self.bounds, positions, side="right") - 1
        begin = self.bounds[stratum]
        length = self.bounds[stratum + 1] - begin
        which, within = np.divmod(positions - of * begin, length)
        regions = np.sort(self.regions[:, first:stop], axis=1)
        return np.asarray(n_parts * begin + regions[stratum, which] * length + within)


@lru_cache(maxsize=4)
def _dealt(part_rows: int, parts: int, redeal: float, seed: int, epoch: int) -> _Deal:
    n_strata = max(1, part_rows // _region_rows(part_rows))
    bounds = np.array([part_rows * number // n_strata for number in range(n_strata + 1)], np.int64)
    key = key_of(seed, parts, n_strata)
    turns = np.argsort(words_at(key, np.arange(n_strata, dtype=np.uint64)), kind="stable").argsort() / n_strata
    deals = np.floor(epoch * redeal + turns).astype(np.uint64)  # so far, for each stratum
    numbers = deals * np.uint64(n_strata) + np.arange(n_strata, dtype=np.uint64)
    counters = numbers[:, None] * np.uint64(parts) + np.arange(parts, dtype=np.uint64)
    words = words_at(key_of(key, 1), counters.astype(np.uint64))
    return _Deal(bounds=bounds, regions=np.argsort(words, axis=1, kind="stable"))


@dataclass(frozen=True, kw_only=True, eq=False)
class DealtParts(WrappedSampling):
    """The orders of all machines, one after another: each takes the rows of its parts in the order of `sampling`.

    `n_obs` are the rows that are dealt. `indices` remains None, so `zl.quality` compares the minibatches with random
    rows of the whole dataset, which shows what it costs to mix within parts only.
    """

    n_obs: int
    machines: int
    parts: int
    redeal: float

    @property
    def region_rows(self) -> int:
        """The rows of a region, about."""
        return _region_rows(self.n_obs // self.parts)

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch on all machines."""
        return self.sampling.n_rows(self.n_obs)

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the orders of the machines."""
        found = []
        for machine in range(self.machines):
            here = stretch_of(self.n_obs, machine, self.machines)
            first, last = max(start, here.start), min(stop, here.stop)
            if first < last:
                renumbered = partial(self._of_machine, machine, seed, epoch)
                of = {"dataset_rows": here.stop - here.start, "seed": key_of(seed, machine), "epoch": epoch}
                found.append(self._renumbered(renumbered, first - here.start, last - here.start, **of))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _of_machine(self, machine: int, seed: int, epoch: int, positions: Rows) -> Rows:
        """The rows at some positions among those of a machine."""
        part_rows, each = self.n_obs // self.parts, self.parts // self.machines
        dealt = each * part_rows  # rows of its parts; then come those that are left over
        begin: int = stretch_of(self.n_obs, machine, self.machines).start
        single = self.parts * part_rows + begin - machine * dealt  # after those of the machines before
        rows = single + positions - dealt
        if part_rows:
            deal = _dealt(part_rows, self.parts, self.redeal, seed, epoch if self.redeal else 0)
            in_parts = positions < dealt
            rows[in_parts] = deal.rows(machine * each, (machine + 1) * each, positions[in_parts])
        return rows


def for_machines(sampling: Sampling, machines: int) -> Sampling:
    """The order of a whole epoch for another number of machines. Raises OptionError if they cannot share the parts.

    The rest of an epoch stays what it is.
    """
    if isinstance(sampling, DealtParts):
        if sampling.parts % machines:
            raise OptionError(f"the state is damaged: {machines} machines cannot share {sampling.parts} parts")
        return replace(sampling, machines=machines)
    if isinstance(sampling, WrappedSampling) and not isinstance(sampling, Unseen):
        return replace(sampling, sampling=for_machines(sampling.sampling, machines))
    return sampling
