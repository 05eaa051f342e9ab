"""An AnnData in memory, indexed with random rows: the ceiling, as long as the data fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side

PEER = Peer(
    requirements=("anndata",),
    packages=("anndata", "scipy", "h5py", "numpy"),
    light=True,
    sides={
        "AnnData in memory": Side(
            how="anndata.read_h5ad, then scipy's rows of the CSR matrix by a random permutation of all rows, and the "
            "codes of one obs column. The first epoch includes reading the file. Minibatches are scipy matrices. A "
            "panel of genes is copied once, as adata[:, genes].copy().",
            format=".h5ad, held in memory",
            store=None,
            scenarios=(*EPOCHS, "panel"),
            order="single random cells",
        ),
        "anndata.write_zarr": Side(
            how="anndata.read_h5ad and write_zarr with zarr_write_format 3. It is not a loader.",
            format="AnnData Zarr v3, with anndata's defaults",
            store="anndata",
            scenarios=("conversion",),
        ),
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """anndata alone: reads the file into memory and writes it as Zarr v3."""
    import anndata

    anndata.settings.zarr_write_format = 3
    (source,) = sources
    return lambda: anndata.read_h5ad(source).write_zarr(store)


def epochs(options: Request) -> Epochs:
    """Epochs of random minibatches, from a file that is read in the first one."""
    import anndata
    import numpy as np

    rng, size = np.random.default_rng(0), options["batch_size"]
    held: list[Any] = []

    def minibatches() -> Iterator[Any]:
        if not held:
            adata = anndata.read_h5ad(options["store"])
            if "genes" in options:
                adata = adata[:, options["genes"]].copy()
            held[:] = [adata.X, adata.obs[options["obs"]].cat.codes.to_numpy()]
        x, codes = held
        order = rng.permutation(x.shape[0])
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield x[rows], codes[rows]

    return lambda _: Epoch(
        minibatches=minibatches(),
        size=lambda minibatch: minibatch[0].shape[0],
        values=lambda minibatch: minibatch[0].data,
        labels=lambda minibatch: minibatch[1],
    )
