"""cellstream: a file of separately compressed cells, which it reads by row number."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, fetch_rows

PEER = Peer(
    requirements=("cellstream",),
    packages=("cellstream", "anndata", "scipy", "numpy"),
    below_python=(3, 14),
    sides={
        "cellstream": Side(
            how="It has no loader. A loop of ours asks for the rows of a fetch (CellStore.gather_rows, one thread per "
            "core), in a thread that is one fetch ahead, permutes them and cuts them into minibatches, which are scipy "
            "matrices.",
            format='cellstream\'s archive, `write_sharded(layout="cell")` with its defaults: pfordelta',
            store="cellstream",
            scenarios=(*EPOCHS, "order", "conversion"),
        )
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """`write_sharded` of the file, which it reads in blocks of rows."""
    import cellstream

    (source,) = sources
    return lambda: cellstream.write_sharded(source, store, layout="cell", overwrite=True)


def epochs(options: Request) -> Epochs:
    """Epochs of one archive: blocks in a new order each time."""
    import cellstream
    import numpy as np

    store = cellstream.open(options["store"])
    codes = store.obs[options["obs"]].cat.codes.to_numpy()
    starts = np.arange(0, store.n_obs, options["chunk_size"])
    rng = np.random.default_rng(0)

    def orders() -> Iterator[Any]:
        """The row numbers of each fetch."""
        rows = (rng.permutation(starts)[:, None] + np.arange(options["chunk_size"])).ravel()
        rows, size = rows[rows < store.n_obs], fetch_rows(options)
        for first in range(0, len(rows), size):
            yield rng.permutation(rows[first : first + size])

    def read(rows: Any) -> tuple[Any, Any, Any]:
        """A matrix of the rows in ascending order, the rows, and their places in it."""
        order = np.argsort(rows)
        return store.gather_rows(rows[order], n_threads=os.cpu_count() or 1), rows, np.argsort(order)

    def minibatches() -> Iterator[tuple[Any, Any]]:
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(read, next(fetches := orders()))
            for following in itertools.chain(fetches, [None]):
                x, rows, places = coming.result()
                if following is not None:
                    coming = ahead.submit(read, following)
                for first in range(0, len(rows), options["batch_size"]):
                    part = slice(first, first + options["batch_size"])
                    yield x[places[part]], codes[rows[part]]

    return lambda _: Epoch(
        minibatches=minibatches(),
        size=lambda minibatch: minibatch[0].shape[0],
        values=lambda minibatch: minibatch[0].data,
        labels=lambda minibatch: minibatch[1],
    )
