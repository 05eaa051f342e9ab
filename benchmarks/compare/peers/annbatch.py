"""annbatch: a shuffled collection, read from disk with zarrs or from S3 with obstore."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side

_REQUESTS = 64
_OBSTORE = {"endpoint_url": "endpoint", "key": "access_key_id", "secret": "secret_access_key", "anon": "skip_signature"}
_BLOCKS, _CHUNKS = "blocks of 64 cells of a shuffled store", "blocks of 512 cells of a shuffled store"
_OF_512 = {"chunk_size": 512, "preload_nchunks": 32}
_FORMAT = "annbatch's collection: AnnData Zarr v3, rows shuffled when written"
_HOW = (
    "As its README recommends: a shuffled DatasetCollection, a load function that reads one obs column, and the zarrs "
    "pipeline with its default number of threads. chunk_size is the size of blocks, preload_nchunks chunks are a "
    "fetch. Minibatches are torch tensors if its environment has torch, and scipy matrices otherwise."
)
_PANEL = (
    "Genes can be chosen only when a store is written (var_subset): out of a store of all genes, those of a panel are "
    "cut from each minibatch, a scipy matrix."
)

PEER = Peer(
    requirements=("annbatch[zarrs]", "numcodecs[pcodec]", "obstore"),
    packages=("annbatch", "zarr", "zarrs", "obstore", "anndata", "torch", "numpy"),
    least_python=(3, 12),
    sides={
        "annbatch": Side(
            how=f"{_HOW} {_PANEL}",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=(*EPOCHS, "order", "panel", "scaling", "processes", "conversion"),
            order=_BLOCKS,
            reads=("zarr",),
        ),
        "annbatch, chunks of 512": Side(
            how=f"{_HOW} Chunks of 512 rows, 32 at a time: the store was shuffled when written, so that they mix well. "
            f"{_PANEL}",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=("cold_warm_local", "minibatch", "panel"),
            options=_OF_512,
            order=_CHUNKS,
            reads=("zarr",),
        ),
        "annbatch, not shuffled when written": Side(
            how=f"{_HOW} Here the store keeps the order of the file (shuffle=False).",
            format="annbatch's collection: AnnData Zarr v3, rows in the order of the file",
            store="annbatch-zarrs",
            scenarios=("cold_warm_local", "conversion"),
            order="blocks of 64 cells",
        ),
        "annbatch, chunks of 512, memory kept": Side(
            how=f"{_HOW} Chunks of 512 rows, 32 at a time, and glibc is told to keep freed memory, which its "
            "documentation does not ask for.",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=("cold_warm_local",),
            options=_OF_512,
            order=_CHUNKS,
        ),
        "annbatch, memory kept": Side(
            how=f"{_HOW} glibc is told to keep freed memory, which its documentation does not ask for.",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=("cold_warm_local",),
            order=_BLOCKS,
        ),
        "annbatch, obstore": Side(
            how=f"{_HOW} Over S3, obstore with zarr's own pipeline and 64 requests at a time, the fastest found.",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=("cold_warm_cloud",),
            order=_BLOCKS,
            reads=("remote zarr",),
        ),
        "annbatch, obstore, chunks of 512": Side(
            how=f"{_HOW} Over S3 as above, with chunks of 512 rows, 32 at a time.",
            format=_FORMAT,
            store="annbatch-shuffled-zarrs",
            scenarios=("cold_warm_cloud",),
            options=_OF_512,
            order=_CHUNKS,
            reads=("remote zarr",),
        ),
    },
)


def write(conversion: str, sources: list[str], store: str) -> Callable[[], Any]:
    """A collection: `annbatch` with the optional suffixes `-shuffled` and `-zarrs`."""
    import annbatch
    import numpy as np
    import zarr

    if "zarrs" in conversion:  # annbatch recommends this pipeline for local files
        importlib.import_module("zarrs")  # here, so that the import is not timed
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    rng = np.random.default_rng(0)
    shuffle = "shuffled" in conversion
    return lambda: annbatch.DatasetCollection(store).add_adatas(sources, shuffle=shuffle, rng=rng)


def epochs(options: Request) -> Epochs:
    """Epochs of annbatch's Loader over a collection."""
    import annbatch
    import anndata as ad
    import numpy as np
    import zarr

    if "storage_options" in options:
        group = _remote(options["store"], options["storage_options"])
    else:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        group = zarr.open_group(options["store"], mode="r")

    def load(group: zarr.Group) -> ad.AnnData:
        obs = ad.io.read_elem(group["obs"])
        return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=obs[[options["obs"]]])

    # the columns of torch's CSR tensors cannot be chosen
    torch = "genes" not in options and importlib.util.find_spec("torch") is not None
    loader = annbatch.Loader(
        chunk_size=options["chunk_size"],
        preload_nchunks=options["preload_nchunks"],
        batch_size=options["batch_size"],
        shuffle=True,
        preload_to_gpu=False,
        to="torch" if torch else None,
        rng=np.random.default_rng(0),
        return_index="recorded" in options,
    )
    if "X" in group:  # a store of other tools, and no collection
        loader.add_adata(load(group))
    else:
        loader.use_collection(annbatch.DatasetCollection(group), load_adata=load)
    if "recorded" in options:
        np.save(options["recorded"], np.concatenate([minibatch["index"] for minibatch in loader]))
    return lambda _: Epoch(
        minibatches=_of_genes(loader, np.array(options["genes"])) if "genes" in options else iter(loader),
        size=lambda minibatch: minibatch["X"].shape[0],
        values=lambda minibatch: minibatch["X"].values() if torch else minibatch["X"].data,
        labels=lambda minibatch: minibatch["obs"][options["obs"]],
    )


def _of_genes(minibatches: Any, genes: Any) -> Iterator[Any]:
    """The minibatches with the columns of some genes only."""
    for minibatch in minibatches:
        yield {**minibatch, "X": minibatch["X"][:, genes]}


def _remote(url: str, given: Request) -> Any:
    """The Zarr group at a URL, read by obstore. `given` are storage options as fsspec has them."""
    import zarr
    from obstore.store import from_url

    zarr.config.set({"async.concurrency": _REQUESTS})
    config = {_OBSTORE[name]: value for name, value in given.items() if name in _OBSTORE}
    if url.startswith("s3://"):
        region = given.get("client_kwargs", {}).get("region_name", "us-east-1")
        config |= {"region": region, "virtual_hosted_style_request": False}
    store = from_url(url, client_options={"allow_http": True}, **config)
    return zarr.open_group(zarr.storage.ObjectStore(store, read_only=True), mode="r")
