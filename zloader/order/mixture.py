"""A sampling that mixes groups of rows in given shares. Pure.

The order is one endless sequence of slots of `block_size` positions, and each epoch is the next window of it. Every
slot belongs to a group. Two groups alternate as evenly as rounding allows: after s slots, the first group has had its
share of s, rounded to the nearest whole number. More groups are the leaves of a Huffman tree, in which every inner node
divides its slots between two parts in this way. So the groups have their shares in every stretch of the order, and the
group of a slot, and how many slots the group had before, follow from the number of the slot alone.

The slots of a group take its rows in an endless sequence of passes. A pass holds every row of the group once, in the
order of a Loader's default sampling (stratified blocks), and the next pass has another order.

Shares are whole numbers of 2**-30, so the same slots result on every machine. Planning a fetch costs time in proportion
to its rows plus the number of passes that it begins.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from zloader.common.checks import is_number, require_count
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of
from zloader.order.sampling import ChosenRows, Sampling, Table
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, stratified

_UNIT_BITS = 30
_UNIT = 1 << _UNIT_BITS
_MOST_POSITIONS = 1 << 62  # the endless order begins anew there, before an int64 overflows


class _Fork(NamedTuple):
    """Divides slots between two parts of the tree. `first` gets `share` / 2**30 of them."""

    first: _Node
    second: _Node
    share: int


_Node: TypeAlias = _Fork | int  # a leaf is the number of a group


def _tree(weights: Mapping[int, float]) -> _Node:
    """The Huffman tree of groups, by number: heavy groups near the root, where rounding is least."""
    largest, numbers = max(weights.values()), count(len(weights))
    # In this order, equal weights never lead to a comparison of nodes.
    heap: list[tuple[float, int, _Node]] = [
        (max(weight / largest, 1 / _UNIT), order, number) for order, (number, weight) in enumerate(weights.items())
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (light, _, second), (heavy, _, first) = heapq.heappop(heap), heapq.heappop(heap)
        share = min(max(1, round(heavy / (light + heavy) * _UNIT)), _UNIT - 1)
        heapq.heappush(heap, (light + heavy, next(numbers), _Fork(first, second, share)))
    return heap[0][2]


def _quota(slots: Rows, share: int) -> Rows:
    """`slots * share / 2**30`, rounded to the nearest whole number, without overflow."""
    return (slots >> _UNIT_BITS) * share + (((slots & (_UNIT - 1)) * share + _UNIT // 2) >> _UNIT_BITS)


def _dealt(tree: _Node, slots: Rows) -> Iterator[tuple[int, Rows, int]]:
    """For each group that has some of the consecutive `slots`: their indices, and the group's slots before them."""
    left = [(tree, np.arange(len(slots)), slots)]
    while left:
        node, at, turns = left.pop()
        if not len(at):
            continue
        if isinstance(node, int):
            yield node, at, int(turns[0])
            continue
        before = _quota(turns, node.share)
        first = _quota(turns + 1, node.share) > before
        left.append((node.first, at[first], before[first]))
        left.append((node.second, at[~first], (turns - before)[~first]))


class Mixture(Sampling):
    """Mixes groups of rows, such as several atlases, in given shares, in blocks of `block_size` rows.

    Args:
        groups: A mapping from names of your choice to a pair of the group's rows and its weight. The rows are a Dataset
            that was opened from stores of the Loader's dataset, a view, or a condition as `dataset.where` takes it: an
            expression, a mask, or row numbers. Weights need not add up to 1. A group of weight 0 never comes. Groups
            may overlap: a row of two groups comes for each of them. Rows of no group never come.
        epoch_rows: Rows per epoch. Default: as many as the groups with a weight have together.
        block_size: Rows per contiguous block. Larger blocks need fewer reads; smaller blocks mix better.

    Every fetch has the shares, not only the epoch. No row comes again before all rows of its group have come. Each
    epoch continues where the one before it ended, so a small group repeats within an epoch.

    Raises OptionError for unusable groups, weights or counts. When a Loader is made, it raises OptionError for an empty
    group with a weight, and for rows that the Loader's dataset does not have; and MissingColumnError.

    >>> both = zl.open_dataset(["atlas.zarr", "other.zarr"], join="outer")
    >>> atlas, other = zl.open_dataset("atlas.zarr"), zl.open_dataset("other.zarr")
    >>> shares = zl.Mixture({"atlas": (atlas, 0.7), "other": (other, 0.3)}, block_size=10)
    >>> loader = zl.Loader(both, sampling=shares, batch_size=100, fetch_factor=10)
    >>> rows = [row for minibatch in loader for row in minibatch.index.tolist()]
    >>> len(rows), sum(row < len(atlas) for row in rows) / len(rows)
    (400, 0.7)

    Groups by obs column, or of a view:

    >>> by_type = zl.Mixture({"T": ("cell_type == 'T'", 2), "B": ("cell_type == 'B'", 1)}, epoch_rows=600)
    >>> some = both.where("donor == 'd1'")
    >>> by_view = zl.Mixture({"some": (some, 0.1), "all": (both, 0.9)}, epoch_rows=1000)
    >>> [len(zl.Loader(both, sampling=sampling, batch_size=50)) for sampling in (by_type, by_view)]
    [12, 20]
    """

    shuffles_fetch = True
    repeats = True  # of a small group, within an epoch

    def __init__(
        self,
        groups: Mapping[str, tuple[Any, float]],
        *,
        epoch_rows: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        require_count(block_size=block_size)
        if epoch_rows is not None:
            require_count(epoch_rows=epoch_rows)
        self.weights = {name: _weight(name, pair) for name, pair in _pairs(groups)}
        if not any(self.weights.values()):
            raise OptionError(f"every group has the weight 0, so there would be no minibatch: {self.weights}")
        self.groups = {name: rows for name, (rows, _) in groups.items()}
        self.epoch_rows = None if epoch_rows is None else int(epoch_rows)
        self.block_size = int(block_size)  # NumPy integers overflow
        self._tree = _tree({number: weight for number, weight in enumerate(self.weights.values()) if weight})
        self._chosen: list[ChosenRows] | None = None  # the rows of each group, once the dataset is known
        self._dataset_rows = 0

    def __repr__(self) -> str:
        return f"Mixture({self.weights}, epoch_rows={self.epoch_rows}, block_size={self.block_size})"

    def bound(self, dataset: Table) -> Mixture:
        """The sampling with the rows of the groups looked up."""
        bound = copy.copy(self)
        bound._chosen = [dataset.rows_of(rows) for rows in self.groups.values()]
        bound._dataset_rows = dataset.n_obs
        for (name, weight), chosen in zip(self.weights.items(), bound._chosen, strict=True):
            if weight and not len(chosen):
                raise OptionError(f"the group {name!r} has no row: give it another group of rows, or the weight 0")
        return bound

    @property
    def indices(self) -> Rows | None:  # type: ignore[override]
        """The rows that are in a group with a weight, ascending; None for all rows of the dataset."""
        mask = np.zeros(self._dataset_rows, bool)
        for chosen in self._drawn().values():
            mask |= chosen.mask()
        return None if mask.all() else np.flatnonzero(mask)

    def _drawn(self) -> dict[int, ChosenRows]:
        """The rows of each group with a weight, by the number of the group."""
        if self._chosen is None:
            raise OptionError(f"{self} does not know its rows yet: call bound(dataset) first, as the Loader does")
        return {number: self._chosen[number] for number, weight in enumerate(self.weights.values()) if weight}

    def n_rows(self, dataset_rows: int) -> int:
        drawn = self._drawn()
        if dataset_rows != self._dataset_rows:
            raise OptionError(f"the groups are of {self._dataset_rows} rows, but the dataset has {dataset_rows}")
        return sum(map(len, drawn.values())) if self.epoch_rows is None else self.epoch_rows

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        size, drawn = self.block_size, self._drawn()
        first = epoch * self.n_rows(dataset_rows) % _MOST_POSITIONS
        start, stop = first + start, first + stop
        slots = np.arange(start // size, -(-stop // size), dtype=np.int64)
        skipped = start % size  # positions of the first slot
        out = np.empty((len(slots), size), np.int64)
        for number, at, turn in _dealt(self._tree, slots):
            begin = turn * size + (skipped if at[0] == 0 else 0)
            end = (turn + len(at)) * size
            positions = _passes(begin, end, len(drawn[number]), size, key_of(seed, number))
            of_group = np.empty(len(at) * size, np.int64)
            of_group[len(of_group) - len(positions) :] = drawn[number].numbers(positions)
            out[at] = of_group.reshape(-1, size)
        return out.reshape(-1)[skipped : skipped + stop - start]


def _passes(start: int, stop: int, n_rows: int, block_size: int, key: int) -> Rows:
    """The rows at positions `[start, stop)` in endless passes through a group of `n_rows` rows."""
    if n_rows <= block_size:  # a single block, so the order of every pass is the same
        return np.arange(start, stop, dtype=np.int64) % n_rows
    order, pieces = stratified(block_size), []
    while start < stop:
        number, first = divmod(start, n_rows)
        last = min(first + stop - start, n_rows)
        pieces.append(order.rows(first, last, dataset_rows=n_rows, seed=key, epoch=number))
        start += last - first
    return np.concatenate(pieces)


def _pairs(groups: Any) -> Iterator[tuple[str, Any]]:
    """The names and pairs of a mapping. Raises OptionError for anything else."""
    if not isinstance(groups, Mapping) or not groups:
        raise OptionError(
            f'groups must be a mapping such as {{"a": (dataset_a, 0.7), "b": (dataset_b, 0.3)}}, not {groups!r:.100}'
        )
    for name, pair in groups.items():
        if not isinstance(name, str):
            raise OptionError(f"the names of groups are strings, but groups has {name!r:.100}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise OptionError(f"the group {name!r} must be a pair of its rows and its weight, not {pair!r:.100}")
        yield name, pair


def _weight(name: str, pair: tuple[Any, Any]) -> float:
    weight = pair[1]
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise OptionError(f"the group {name!r} has the weight {weight!r}: give a number of at least 0")
    return float(weight)
