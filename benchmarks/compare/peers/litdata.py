"""LitData, for comparison with a format of other fields: the same cells in its chunks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, workers_bytes

PEER = Peer(
    requirements=("litdata", "anndata", "torch"),
    packages=("litdata", "torch", "anndata", "numpy"),
    least_python=(3, 10),
    sides={
        "LitData": Side(
            how="StreamingDataset(shuffle=True) of a local directory in a StreamingDataLoader with one worker per core "
            "and a collate_fn, as its README has it. Minibatches are arrays.",
            format="LitData's chunks of 64 MB, without compression: genes (int32), values (float32), label",
            store="litdata",
            scenarios=EPOCHS,
            order="its default: chunks, and the rows within each",
        )
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """`optimize` with its default number of workers, one range of rows for each."""
    import anndata.io
    import h5py
    from litdata import optimize

    (source,) = sources
    with h5py.File(source) as file:
        n_rows = len(anndata.io.read_elem(file["obs"]))
    workers = os.cpu_count() or 1
    bounds = [n_rows * number // workers for number in range(workers + 1)]
    inputs = [(source, *pair) for pair in itertools.pairwise(bounds)]
    return lambda: optimize(fn=_rows, inputs=inputs, output_dir=store, chunk_bytes="64MB", num_workers=workers)


def _rows(part: tuple[str, int, int]) -> Iterator[Request]:
    """The rows of a range, as csr_rows gives them."""
    from benchmarks.compare.peers.datasets import csr_rows

    source, first, last = part
    yield from itertools.islice(csr_rows(source), first, last)


def epochs(options: Request) -> Epochs:
    """Epochs of one dataset."""
    from litdata import StreamingDataLoader, StreamingDataset

    from benchmarks.compare.peers.datasets import collated

    dataset = StreamingDataset(options["store"], shuffle=True, seed=0)
    loader = StreamingDataLoader(
        dataset, batch_size=options["batch_size"], num_workers=options["workers"], collate_fn=collated
    )
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: len(minibatch["label"]),
        values=lambda minibatch: minibatch["values"],
        labels=lambda minibatch: minibatch["label"],
        workers_bytes=workers_bytes,
    )
