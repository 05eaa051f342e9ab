"""Mixing and loading speed by block_size and fetch_factor, and the sizes to take.

Mixing is computed from the plan alone (insight/quality.py). The loading speed is computed from the link's speed and the
bytes that an epoch reads (insight/cost.py), or measured by reading the store. Both are for epochs without a mirror: the
speed of warm epochs depends little on these sizes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zloader.common.errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zloader.insight.quality import Quality
    from zloader.training.loader import Loader

# Count the reads of at most this many rows per pair of sizes, which takes a few seconds for short fetches.
_COUNTED_ROWS = 1_000_000
_MEASURED_S = 10.0  # per epoch, at most
# Percent of the entropy of random minibatches. With a learning rate that falls to 0, the model of docs/shuffling.md
# loses nothing at 99 %, and 3 % of its score at 83 %.
GOOD_PERCENT = 98
FAIR_PERCENT = 90
_CHANCE_PERCENT = 2  # smaller differences may be chance


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Mixing and cost of one pair of sizes. GETs and bytes are per epoch without a mirror.

    `quality` is for blocks in random order, as in scDataset; `stratified` is for the Loader's default sampling.
    """

    block_size: int
    fetch_factor: int
    rows_per_s: float
    gets: int
    bytes_read: int
    quality: Quality
    stratified: Quality

    @property
    def sizes(self) -> tuple[int, int]:
        """The block_size and the fetch_factor."""
        return self.block_size, self.fetch_factor

    @property
    def percent(self) -> int:
        """The entropy of stratified blocks in percent of that of random minibatches. 100 if all labels are the same."""
        return round(self.stratified.percent)


@dataclass(frozen=True, kw_only=True)
class QualityGrid:
    """One cell per valid pair of sizes, and the `default` cell, with the sizes of a Loader, which may be among them.

    `link_bytes_per_s` is None if the speed was measured.
    """

    url: str
    label: str
    x: str
    rows: int
    batch_size: int
    link_bytes_per_s: int | None
    cells: Sequence[Cell]
    default: Cell

    @property
    def speed(self) -> str:
        """How the cells' `rows_per_s` were obtained."""
        if self.link_bytes_per_s is None:
            return "measured without a mirror"
        return f"at {self.link_bytes_per_s / 1e6:,g} MB/s without a mirror"

    @property
    def random_bits(self) -> float:
        """The entropy of random minibatches."""
        return self.default.stratified.random_entropy_bits

    @property
    def random(self) -> str:
        """The entropy of random minibatches, in words."""
        return f"random minibatches of {self.batch_size} have {self.random_bits:.2f} bits"

    @property
    def recommended(self) -> Cell:
        """The default if it mixes well. Otherwise the fastest cell that does, or else one that mixes clearly better."""
        if self.default.percent >= GOOD_PERCENT:
            return self.default
        good = [cell for cell in self.cells if cell.percent >= GOOD_PERCENT]
        if good:
            return max(good, key=lambda cell: (cell.rows_per_s, -cell.fetch_factor))
        best = max(self.cells, key=lambda cell: (cell.percent, cell.rows_per_s))
        return best if best.percent > self.default.percent + _CHANCE_PERCENT else self.default

    @property
    def verdict(self) -> str:
        """How well the default order mixes, and the sizes to take instead if it does not mix well."""
        from zloader.insight.quality import LEAST_BITS

        if self.random_bits <= LEAST_BITS:
            return f"Nearly all rows have the same {self.label}, so there is nothing to mix: choose another column."
        percent = self.default.percent
        share = f"minibatches have {percent}% of the entropy of random ones"
        if percent >= GOOD_PERCENT:
            return f"The default order mixes {self.label} as well as random: its {share}. Keep the default sizes."
        best = self.recommended
        sizes = f"block_size={best.block_size} and fetch_factor={best.fetch_factor}"
        if percent >= FAIR_PERCENT:
            found = f"The default order mixes {self.label} nearly as well as random: its {share}."
        else:
            found = f"Rows of one {self.label} stay together: in the default order, {share}."
        if best.percent >= GOOD_PERCENT:
            speeds = f"at {best.rows_per_s:,.0f} rows/s instead of {self.default.rows_per_s:,.0f}"
            return f"{found} Try {sizes}: {best.percent}%, {speeds} ({self.speed})."
        shuffle = "Shuffle the rows once with zloader convert --shuffle, or try smaller blocks and larger fetches."
        if best.sizes == self.default.sizes:
            return f"{found} No other pair of sizes here mixes clearly better. {shuffle}"
        return f"{found} The best pair of sizes here is {sizes}, with {best.percent}%. {shuffle}"

    @property
    def loader(self) -> str:
        """The Loader with the recommended sizes, as a line of Python for an open `dataset`."""
        from zloader.order.shuffling import stratified

        best = self.recommended
        x = "" if self.x == "X" else f", x={self.x!r}"
        return (
            f"zl.Loader(dataset, batch_size={self.batch_size}, fetch_factor={best.fetch_factor}, "
            f"sampling=zl.{stratified(best.block_size)!r}{x})"
        )


def measured(loader: Loader, label: str, sizes: Sequence[tuple[int, int]], link_bytes_per_s: int | None) -> QualityGrid:
    """One cell per (block_size, fetch_factor) in `sizes`, except where a block is larger than a fetch.

    The speed is the link's limit, or is measured if `link_bytes_per_s` is None. Raises OptionError for a column without
    labels, or if no pair of sizes is valid.
    """
    from zloader.order.shuffling import Streaming, default_block_size
    from zloader.training.loader import Loader

    labels = loader.dataset.obs_column(label).values
    if labels.dtype.kind == "f":
        raise OptionError(f"obs column {label!r} holds {labels.dtype}: name a column of labels or whole numbers")
    if link_bytes_per_s is None:  # finishes imports and compilation before measuring
        _rows_per_s(dataclasses.replace(loader, sampling=Streaming(indices=[0])))
    cells = {}
    default = (default_block_size(loader.batch_size * Loader.fetch_factor), Loader.fetch_factor)
    for block_size, fetch_factor in sizes:
        if block_size <= loader.batch_size * fetch_factor:
            cells[block_size, fetch_factor] = _cell(loader, labels, (block_size, fetch_factor), link_bytes_per_s)
    if not cells:
        raise OptionError("every block is larger than every fetch: raise fetch_factors or lower block_sizes")
    return QualityGrid(
        url=loader.dataset.url,
        label=label,
        x=str(loader.x),
        rows=loader.dataset.n_obs,
        batch_size=loader.batch_size,
        link_bytes_per_s=link_bytes_per_s,
        cells=list(cells.values()),
        default=cells.get(default) or _cell(loader, labels, default, link_bytes_per_s),
    )


def _cell(loader: Loader, labels: NDArray[np.generic], sizes: tuple[int, int], link_bytes_per_s: int | None) -> Cell:
    from zloader.insight.cost import epoch_costs
    from zloader.insight.quality import quality
    from zloader.order.shuffling import BlockShuffling, stratified

    block_size, fetch_factor = sizes
    each = dataclasses.replace(loader, fetch_factor=fetch_factor, sampling=BlockShuffling(block_size))
    plan = each.plan(0)
    most = max(1, _COUNTED_ROWS // plan.fetch_rows)
    cost = epoch_costs(loader.dataset, plan, x=str(loader.x), options=loader.options, most_fetches=most).unmirrored
    return Cell(
        block_size=block_size,
        fetch_factor=fetch_factor,
        rows_per_s=plan.n_rows * link_bytes_per_s / max(1, cost.bytes_read) if link_bytes_per_s else _rows_per_s(each),
        gets=cost.gets,
        bytes_read=cost.bytes_read,
        quality=quality(labels, plan),
        stratified=quality(labels, dataclasses.replace(each, sampling=stratified(block_size)).plan(0)),
    )


def _rows_per_s(loader: Loader) -> float:
    """Rows per second of an epoch, or of its first 10 seconds."""
    began = time.perf_counter()
    for _ in loader:
        if time.perf_counter() - began > _MEASURED_S:
            break
    return loader.statistics().rows_per_s
