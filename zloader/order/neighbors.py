"""The neighbours of each row of a minibatch in a graph of the rows, such as cells that touch each other. Pure.

The graph is read once, in windows of rows, and becomes a table of the nearest neighbours of each row: 8 bytes per row
and neighbour. Nothing is drawn, so every epoch has the same neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_flag
from zloader.common.compiled import compiled
from zloader.common.errors import FormatError, OptionError
from zloader.common.machine import require_memory
from zloader.common.records import Rows
from zloader.order.sampling import Sampling, Table

log = logging.getLogger("zloader")


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

    def bound(self, dataset: HasGraph, sampling: Sampling) -> BoundNeighbors:
        """The neighbours of the rows of `dataset` that `sampling` yields."""
        return BoundNeighbors(self, dataset, sampling)


class BoundNeighbors:
    """The neighbours of the rows of a dataset, numbered as rows of the whole dataset."""

    def __init__(self, options: Neighbors, dataset: HasGraph, sampling: Sampling) -> None:
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
