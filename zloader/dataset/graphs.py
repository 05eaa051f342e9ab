"""Graphs of the rows, in obsp: read in windows of rows, over several stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import zarr

from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.dataset.store import OpenedStore
from zloader.order.neighbors import GraphWindow

_WINDOW = 1 << 21  # entries, 24 MB with indices of 8 bytes


def graph_windows(stores: Sequence[OpenedStore], name: str) -> Iterator[GraphWindow]:
    """The graph `obsp/NAME` of some stores, whose rows follow one another, in windows of rows.

    Raises OptionError if a store lacks it, and FormatError if it is not a CSR matrix of rows x rows, or is damaged.
    """
    path, begin = f"obsp/{name.removeprefix('obsp/')}", 0
    for store in stores:
        for window in _windows_of(store, path):
            yield window._replace(first=window.first + begin, others=window.others + begin)
        begin += store.n_obs


def _windows_of(store: OpenedStore, path: str) -> Iterator[GraphWindow]:
    where, known = f"{path} of {store.location.url}", store.keys("obsp")
    if path.removeprefix("obsp/") not in known:
        raise OptionError(
            f"there is no {where}; in obsp there are: {', '.join(map(repr, known)) or 'none'}"
            f"{suggestion(path.removeprefix('obsp/'), known)}"
        )
    node = store.node(path)
    encoding = "dense" if isinstance(node, zarr.Array) else node.attrs.get("encoding-type")
    if encoding != "csr_matrix":
        raise OptionError(f"{where} is {encoding}, but a graph has to be a csr_matrix: write it again with .tocsr()")
    n_rows = store.n_obs
    if store.shape(path) != (n_rows, n_rows):
        raise store.damaged(path, f"it has the shape {store.shape(path)}, and the store has {n_rows} rows")
    indptr = np.asarray(store.window(f"{path}/indptr", 0, n_rows + 1)).astype(np.int64)
    n_entries = min(store.node(f"{path}/{part}").shape[0] for part in ("indices", "data"))
    if len(indptr) != n_rows + 1 or indptr[0] or indptr[-1] > n_entries or (np.diff(indptr) < 0).any():
        raise store.damaged(f"{path}/indptr", "it does not fit the entries of the graph")
    first = 0
    while first < n_rows:
        stop = max(first + 1, int(np.searchsorted(indptr, indptr[first] + _WINDOW, side="right")) - 1)
        begin, end = int(indptr[first]), int(indptr[stop])
        others = store.window(f"{path}/indices", begin, end).astype(np.int64)
        wrong = np.flatnonzero((others < 0) | (others >= n_rows))
        if len(wrong):
            row = first + int(np.searchsorted(indptr[first:] - begin, wrong[0], side="right")) - 1
            raise store.damaged(path, f"row {row} has the neighbour {others[wrong[0]]} of {n_rows} rows")
        weights = store.window(f"{path}/data", begin, end)
        yield GraphWindow(first, indptr[first : stop + 1] - begin, others, weights, where)
        first = stop
