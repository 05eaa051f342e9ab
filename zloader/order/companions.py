"""Rows that come with each row of a minibatch: its controls, and its neighbours. Pure.

They are part of the fetch, so that its reads are coalesced and its memory is bounded. Each minibatch is followed by the
companions of its rows: all controls, row after row, and then all neighbours.

Controls, such as untreated cells of the same cell line, are drawn among the rows that meet a condition and agree with
the row in some obs columns. The draws for a row depend on the seed, the epoch and the row alone. The table takes 1 byte
per row of the dataset, or 2 or 4 if there are many groups, and 8 per control.

Neighbours, such as cells that touch each other, are read from a graph of the rows once, in windows of rows. Its table
takes 8 bytes per row and neighbour. Nothing is drawn, so every epoch has the same neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import one_or_more, require_count, require_flag
from zloader.common.compiled import compiled
from zloader.common.errors import FormatError, OptionError
from zloader.common.machine import require_memory
from zloader.common.records import Rows, windows_of
from zloader.order.permutation import key_of, words_at
from zloader.order.plan import Fetch
from zloader.order.sampling import Order, Table
from zloader.selecting.groups import Groups, groups_of

log = logging.getLogger("zloader")
_CONTROL_BYTES = 25  # per control while the table is made
_DRAWS = 0xC0  # tells the keys of these draws from those of samplings


@dataclass(frozen=True, eq=False)
class MatchedControls:
    """Control rows for every minibatch of a Loader, as `minibatch.control`.

    `minibatch.control` is a Minibatch of its own with the same fields. It has `n` rows for each row, one after another:
    the controls of row i are its rows from `i * n` to `(i + 1) * n - 1`.

    Args:
        where: The rows that are controls, among those of the Loader's dataset: a condition as `dataset.where` takes it,
            such as `"drug == 'DMSO'"`. To take controls from elsewhere, give a view that has them.
        match: The obs columns, one or a list, in which a control agrees with its row: labels, whole numbers, booleans
            or dates. An empty list matches every control.
        n: Controls per row. Those of one row differ if there are enough.
        fallback: Some of the columns in `match`, for rows that no control matches in all of them; or several such
            lists, which are tried in turn. `statistics().fallback_controls` counts the controls found in this way.

    Every control of a row is equally likely, and a row that is a control itself may draw itself.

    Raises OptionError for unusable options. When a Loader is made, it also raises OptionError if no row meets the
    condition or if rows have no control; and MissingColumnError for unknown columns.

    >>> controls = zl.MatchedControls("cell_type == 'T'", match="donor")
    >>> loader = zl.Loader(dataset, controls=controls, obs=["donor"], batch_size=16)
    >>> minibatch = next(iter(loader))
    >>> minibatch.control.x.shape == minibatch.x.shape
    True
    >>> bool((minibatch.control.obs["donor"] == minibatch.obs["donor"]).all())
    True
    """

    where: Any
    match: str | Sequence[str]
    n: int = 1
    fallback: Sequence[str] | Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        require_count(n=self.n)
        match = list(self.match) if not isinstance(self.match, str) and not len(self.match) else None
        object.__setattr__(self, "match", one_or_more(match=self.match) if match is None else match)
        for columns in self.levels[1:]:
            if not {*columns} < {*self.match}:
                raise OptionError(
                    f"fallback {columns} must be fewer columns than match {self.match}, and some of them: controls are "
                    "looked for in match first"
                )

    @property
    def levels(self) -> list[list[str]]:
        """The columns that are tried in turn."""
        if self.fallback is None:
            return [list(self.match)]
        if isinstance(self.fallback, str) or all(isinstance(each, str) for each in self.fallback):
            given = [self.fallback] if isinstance(self.fallback, str) else list(self.fallback)
            return [list(self.match), [str(each) for each in given]]
        lists = [[each] if isinstance(each, str) else list(each) for each in self.fallback]
        return [list(self.match), *lists]


class BoundControls:
    """The controls of the rows of a dataset in an order, numbered as rows of the whole dataset."""

    def __init__(self, options: MatchedControls, dataset: Table, order: Order) -> None:
        self.n = int(options.n)
        whole, chosen = dataset.whole, dataset.in_whole(options.where)
        if not len(chosen):
            raise OptionError(
                f"no row can be a control: none meets the condition {options.where!r:.100}. To take controls from "
                f"other rows than those of a view, give them as MatchedControls(dataset.where({options.where!r:.100}), "
                "...)"
            )
        require_memory(
            _CONTROL_BYTES * len(chosen),
            f"the table of {len(chosen)} controls",
            "give a condition that fewer rows meet",
        )
        pool: Rows = chosen.all_numbers()
        pools: list[Rows] = []
        groups = groups_of(options.levels[0], whole.obs_column, whole.n_obs)
        self._groups = groups.codes
        self._begins, self._sizes, self._levels = np.zeros((3, len(groups)), np.int64)
        for level, columns in enumerate(options.levels):
            of_level = groups if not level else groups_of(columns, whole.obs_column, whole.n_obs)
            # Gives groups without controls those that agree with them in the columns of this level.
            codes = of_level.codes[pool]
            counts = np.bincount(codes, minlength=len(of_level))
            own = of_level.codes[groups.first]  # a group agrees in all columns of its fallback
            found = np.flatnonzero((self._sizes == 0) & of_level.complete[own] & (counts[own] > 0))
            self._begins[found] = (np.cumsum(counts) - counts)[own[found]] + level * len(pool)
            self._sizes[found], self._levels[found] = counts[own[found]], level
            pools.append(pool[np.argsort(codes, kind="stable")])
            if self._sizes.all():
                break
        self._pool: Rows = np.concatenate(pools)
        came = _came(groups, order)
        without = np.flatnonzero((self._sizes == 0) & (came > 0))
        if len(without):
            least = ", ".join(options.levels[-1]) or "nothing"
            raise OptionError(
                f"{int(came[without].sum())} rows of {len(without)} groups have no control, because no row that meets "
                f"{options.where!r:.100} agrees with them in {least}: "
                f"{groups.listed(without, whole.obs_column, came)}. Leave these rows out, or give a fallback of fewer "
                "columns"
            )
        fell_back = np.flatnonzero((self._levels > 0) & (came > 0))
        if len(fell_back):
            log.warning(
                "controls: %d rows of %d groups agree with no control in %s and take those of a fallback: %s",
                int(came[fell_back].sum()),
                len(fell_back),
                ", ".join(options.levels[0]),
                groups.listed(fell_back, whole.obs_column, came),
            )

    def drawn(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """The controls of some rows, `n` for each, one row after another."""
        groups = self._groups[rows]
        sizes = self._sizes[groups]
        if not sizes.all():
            raise OptionError(
                f"row {rows[np.argmin(sizes)]} has no control, and the order of its sampling has not chosen it"
            )
        words = words_at(key_of(seed, epoch, _DRAWS), rows.astype(np.uint64))
        starts = (words % sizes.astype(np.uint64)).astype(np.int64)
        steps = np.arange(self.n) * np.maximum(1, sizes // self.n)[:, None]
        places = (starts[:, None] + steps) % sizes[:, None]
        drawn: Rows = self._pool[self._begins[groups][:, None] + places].reshape(-1)
        return drawn

    def n_from_fallback(self, rows: Rows) -> int:
        """How many controls of some rows agree with them in the columns of a fallback only."""
        return int(np.count_nonzero(self._levels[self._groups[rows]])) * self.n


def _came(groups: Groups, order: Order) -> Rows:
    """The number of rows of each group that may come."""
    if order.chosen is None:
        return groups.sizes
    counts, mask = np.zeros(len(groups), np.int64), order.chosen()
    for window in windows_of(len(mask)):
        counts += np.bincount(groups.codes[window][mask[window]], minlength=len(groups))
    return counts


class GraphWindow(NamedTuple):
    """Consecutive rows of a graph in CSR form, from row `first` of the dataset on. `where` names it in messages."""

    first: int
    indptr: Rows
    others: Rows
    weights: NDArray[Any]
    where: str


class HasGraph(Table, Protocol):
    """A dataset whose rows have graphs."""

    def graph(self, name: str) -> Iterator[GraphWindow]:
        """The graph `obsp/NAME` of the whole dataset, in windows of rows. Raises OptionError and FormatError."""


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The nearest rows of each row in a graph, for every minibatch of a Loader, as `minibatch.neighbors`.

    `minibatch.neighbors` is a Minibatch of its own with the same fields. It has `k` rows for each row, one after
    another: the neighbours of row i are its rows from `i * k` to `(i + 1) * k - 1`, the nearest first.
    `minibatch.neighbor_weights` has their weights in the graph, rows x k (float32). A row with fewer neighbours is its
    own neighbour in the places that are left, with the weight 0.

    Args:
        graph: An entry of obsp, such as `"obsp/spatial_connectivities"`: a CSR matrix of rows x rows.
        k: Neighbours per row.
        smallest: False takes the entries with the largest weights as nearest, and no zeros, as connectivities need it;
            True those with the smallest, as distances need it. Of equal weights, those that the row has first.
        among: The rows that may be neighbours, among those of the Loader's dataset: a condition as `dataset.where`
            takes it. Default: all of these. So the rows of a view for training have no neighbours for validation. To
            take neighbours from elsewhere, give a view that has them, such as the whole dataset.

    The graph is read when a Loader is made. This raises OptionError if there is no such graph, or if its table would
    take more than half of the memory; and FormatError if it is not a CSR matrix of rows x rows, or has a row with a
    neighbour that does not exist, that occurs twice, or whose weight is NaN.

    >>> neighbors = zl.Neighbors("obsp/connectivities", k=3)
    >>> loader = zl.Loader(zl.open_dataset("spatial.zarr"), neighbors=neighbors, batch_size=16)
    >>> minibatch = next(iter(loader))
    >>> minibatch.neighbors.x.shape[0], minibatch.neighbor_weights.shape
    (48, torch.Size([16, 3]))
    """

    graph: str
    k: int = 6
    smallest: bool = False
    among: Any = None

    def __post_init__(self) -> None:
        require_count(k=self.k)
        require_flag(smallest=self.smallest)
        if not isinstance(self.graph, str) or not self.graph.removeprefix("obsp/"):
            raise OptionError(f"graph must be the name of an entry of obsp, not {self.graph!r:.100}")


class BoundNeighbors:
    """The neighbours of the rows of a dataset, numbered as rows of the whole dataset."""

    def __init__(self, options: Neighbors, dataset: HasGraph) -> None:
        self.n = int(options.k)
        n_rows = dataset.whole.n_obs
        row_dtype = np.dtype(np.int32 if n_rows < 1 << 31 else np.int64)
        require_memory(
            n_rows * (self.n * (row_dtype.itemsize + 4) + 1),
            f"the table of {self.n} neighbours of {n_rows} rows",
            "take a smaller k",
        )
        allowed = np.zeros(n_rows, bool)
        allowed[dataset.in_whole(dataset if options.among is None else options.among).all_numbers()] = True
        self._rows, self._weights = np.empty((n_rows, self.n), row_dtype), np.empty((n_rows, self.n), np.float32)
        alone = 0
        for window in dataset.graph(options.graph):
            _require_numbers(window)
            stop = window.first + len(window.indptr) - 1
            into = self._rows[window.first : stop], self._weights[window.first : stop]
            graph = window.indptr, window.others, _comparable(window.weights)
            twice = _take_nearest(graph, window.first, allowed, options.smallest, *into)
            if twice >= 0:
                raise FormatError(
                    f"{window.where} lists a neighbour of row {twice} twice: run sum_duplicates() on the graph, and "
                    "write it again"
                )
            alone += int((into[0] == np.arange(window.first, stop)[:, None]).all(axis=1).sum())
        if alone:
            log.warning("neighbors: %d of %d rows have no neighbour in %s", alone, n_rows, options.graph)

    def drawn(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """The neighbours of some rows, `n` for each, one row after another. They are the same in each epoch."""
        return self._rows[rows].astype(np.int64).reshape(-1)

    def weights_of(self, rows: Rows) -> NDArray[np.float32]:
        """The weights of the neighbours of some rows, rows x `n`."""
        return self._weights[rows]


def _comparable(weights: NDArray[Any]) -> NDArray[Any]:
    """Weights in a dtype that compiled loops compare, without rounding any."""
    if weights.dtype.kind in "iu":
        return weights.astype(np.uint64 if weights.dtype.kind == "u" else np.int64, copy=False)
    return weights.astype(np.float64, copy=False)


def _require_numbers(window: GraphWindow) -> None:
    """Raises FormatError for a weight that is NaN."""
    wrong = np.flatnonzero(window.weights != window.weights)
    if len(wrong):
        row = window.first + int(np.searchsorted(window.indptr, wrong[0], side="right")) - 1
        raise FormatError(f"{window.where}: row {row} has a neighbour whose weight is NaN. Make the graph again")


@compiled
def _take_nearest(
    graph: tuple[Rows, Rows, NDArray[Any]],
    first: int,
    allowed: NDArray[np.bool_],
    smallest: bool,
    rows: NDArray[Any],
    weights: NDArray[Any],
) -> int:
    """Fills the tables of rows and weights of a window. Returns a row with a repeated neighbour, or -1."""
    indptr, others, given = graph
    k = rows.shape[1]
    nearest = np.empty(k, given.dtype)  # the weights of a row, which `weights` may have to round
    for row in range(len(indptr) - 1):
        n, own = 0, first + row
        for i in range(indptr[row], indptr[row + 1]):
            other, weight = others[i], given[i]
            if other == own or not allowed[other] or (weight == 0 and not smallest):
                continue
            for j in range(n):
                if rows[row, j] == other:
                    return own
            place = n
            while place > 0 and (weight < nearest[place - 1] if smallest else weight > nearest[place - 1]):
                place -= 1
            if place == k:
                continue
            n = min(n + 1, k)
            for j in range(n - 1, place, -1):
                rows[row, j], nearest[j] = rows[row, j - 1], nearest[j - 1]
            rows[row, place], nearest[place] = other, weight
        for j in range(k):
            if j >= n:
                rows[row, j], nearest[j] = own, 0
            weights[row, j] = nearest[j]
    return -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Companions:
    """The controls and neighbours of the rows of a dataset; None for what a Loader has not."""

    controls: BoundControls | None
    neighbors: BoundNeighbors | None

    @property
    def _each(self) -> list[BoundControls | BoundNeighbors]:
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
