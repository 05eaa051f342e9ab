"""MappedCollection, of lamindb: a torch Dataset of single rows over .h5ad files."""

from __future__ import annotations

from benchmarks.compare.peers import Epoch, Epochs, Peer, Request, Side, workers_bytes

PEER = Peer(
    requirements=("lamindb", "torch"),
    packages=("lamindb", "anndata", "torch", "h5py", "numpy"),
    sides={
        "MappedCollection": Side(
            how="MappedCollection([path], obs_keys=[column]) in a DataLoader with shuffle=True and one worker per "
            "core, as its docstring and lamindb's guide have it. A row is read at a time, and is dense.",
            format=".h5ad, as anndata writes it",
            store=None,
            scenarios=("in_place",),
            order="single random cells",
        )
    },
)


def epochs(options: Request) -> Epochs:
    """Epochs of one DataLoader."""
    from lamindb.core import MappedCollection
    from torch.utils.data import DataLoader

    rows = MappedCollection([options["store"]], obs_keys=[options["obs"]], parallel=True)
    loader = DataLoader(rows, batch_size=options["batch_size"], shuffle=True, num_workers=options["workers"])
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: len(minibatch["X"]),
        values=lambda minibatch: minibatch["X"].numpy(),
        labels=lambda minibatch: minibatch[options["obs"]],
        workers_bytes=workers_bytes,
    )
