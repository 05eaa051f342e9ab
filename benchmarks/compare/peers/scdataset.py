"""scDataset: blocks of rows from a backed .h5ad file, or from an AnnData Zarr store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, workers_bytes

_HOW = (
    "scDataset with BlockShuffling(block_size) and fetch_factor in a DataLoader with batch_size=None, one worker per "
    "core and prefetch_factor=fetch_factor + 1, as its quick start has it. A fetch is read at once (fetch_callback); "
    "minibatches are scipy matrices and codes, cut from it in memory (batch_callback)."
)

PEER = Peer(
    requirements=("scdataset", "anndata", "torch", "s3fs"),
    packages=("scdataset", "torch", "anndata", "zarr", "h5py", "s3fs", "numpy"),
    sides={
        "scDataset, h5ad": Side(
            how=f"{_HOW} The genes of a panel are cut out of each fetch (fetch_transform), as its page on transforms "
            "advises for heavy operations.",
            format=".h5ad, uncompressed",
            store=None,
            scenarios=(*EPOCHS, "in_place", "order", "panel", "processes"),
        ),
        "scDataset, Zarr": Side(
            how=_HOW,
            format="AnnData Zarr v3, with anndata's defaults",
            store="anndata",
            scenarios=("cold_warm_local",),
            reads=("zarr",),
        ),
        "scDataset, Zarr in S3": Side(
            how=f"{_HOW} zarr opens the store with s3fs (user guide, remote storage), anew in each worker.",
            format="AnnData Zarr v3, with anndata's defaults",
            store="anndata",
            scenarios=("cold_warm_cloud",),
            reads=("remote zarr",),
        ),
    },
)


def epochs(options: Request) -> Epochs:
    """Epochs of one DataLoader."""
    import anndata
    import numpy as np
    import zarr
    from scdataset import BlockShuffling, scDataset
    from torch.utils.data import DataLoader

    def group() -> zarr.Group:
        if "file_cache" in options:
            return _through_file_cache(options)
        return zarr.open_group(options["store"], mode="r", storage_options=options.get("storage_options"))

    if options["store"].endswith(".h5ad"):
        obs = anndata.read_h5ad(options["store"], backed="r").obs
        opened = lambda: anndata.read_h5ad(options["store"], backed="r").X  # noqa: E731
    else:
        obs = anndata.io.read_elem(group()["obs"])
        opened = lambda: anndata.io.sparse_dataset(group()["X"])  # noqa: E731
    rows = _Rows(opened, obs[options["obs"]].cat.codes.to_numpy())
    genes = np.array(options.get("genes", ()))
    factor = max(1, options["chunk_size"] * options["preload_nchunks"] // options["batch_size"])
    dataset = scDataset(
        rows,
        BlockShuffling(block_size=options["chunk_size"]),
        batch_size=options["batch_size"],
        fetch_factor=factor,
        fetch_callback=lambda rows, numbers: (rows.x[np.asarray(numbers)], rows.codes[np.asarray(numbers)]),
        fetch_transform=(lambda fetched: (fetched[0][:, genes], fetched[1])) if "genes" in options else None,
        batch_callback=lambda fetched, numbers: (fetched[0][numbers], fetched[1][numbers]),
        seed=0,
    )
    ahead = factor + 1 if options["workers"] else None
    loader = DataLoader(dataset, batch_size=None, num_workers=options["workers"], prefetch_factor=ahead)
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: minibatch[0].shape[0],
        values=lambda minibatch: minibatch[0].data,
        labels=lambda minibatch: minibatch[1],
        workers_bytes=workers_bytes,
    )


def _through_file_cache(options: Request) -> Any:
    """The group at a URL of S3, whose objects fsspec keeps as files of a directory from their first read on."""
    import fsspec
    import zarr
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    protocol, _, path = options["store"].partition("://")
    target = {"target_protocol": protocol, "target_options": options["storage_options"]}
    files = fsspec.filesystem("simplecache", cache_storage=options["file_cache"], **target)
    store = zarr.storage.FsspecStore(AsyncFileSystemWrapper(files, asynchronous=True), read_only=True, path=path)
    return zarr.open_group(store, mode="r")


class _Rows:
    """A matrix, which every process opens for itself, and the codes of the labels, as one collection."""

    def __init__(self, opened: Callable[[], Any], codes: Any) -> None:
        self._opened, self.codes = opened, codes
        self._x: Any = None

    @property
    def x(self) -> Any:
        """The matrix."""
        if self._x is None:
            self._x = self._opened()
        return self._x

    def __len__(self) -> int:
        return len(self.codes)
