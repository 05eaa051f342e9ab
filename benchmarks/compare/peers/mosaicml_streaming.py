"""MosaicML Streaming, for comparison with a format of other fields: the same cells as MDS shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, aws_variables, workers_bytes

_FORMAT = "MDS shards of 64 MiB, without compression: genes (int32), values (float32), label"
_HOW = (
    "in a DataLoader with one worker per core, with batch_size given to both, as its page on main concepts says, and "
    "the default shuffling. Minibatches are arrays."
)

PEER = Peer(
    requirements=("mosaicml-streaming", "anndata"),
    packages=("mosaicml-streaming", "torch", "numpy"),
    least_python=(3, 10),
    below_python=(3, 13),
    sides={
        "MosaicML Streaming": Side(
            how=f"StreamingDataset(local=..., shuffle=True) {_HOW}",
            format=_FORMAT,
            store="mosaicml-streaming",
            scenarios=(*EPOCHS, "conversion"),
            order="its default, py1e",
        ),
        "MosaicML Streaming, S3": Side(
            how=f"StreamingDataset(remote='s3://...', local=..., shuffle=True) {_HOW} It keeps the shards that it has "
            "downloaded in the local directory, and reads them from there in later epochs. Its workers are spawned: "
            "forked ones share a connection, and over plain HTTP they mix up their responses.",
            format=_FORMAT,
            store="mosaicml-streaming",
            mirrored=True,
            scenarios=("cold_warm_cloud",),
            order="its default, py1e",
        ),
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """MDSWriter with its defaults, row by row from the backed file."""
    import anndata.io  # noqa: F401 - csr_rows needs it
    from streaming import MDSWriter

    from benchmarks.compare.peers.datasets import csr_rows

    (source,) = sources
    columns = {"genes": "ndarray:int32", "values": "ndarray:float32", "label": "int"}

    def convert() -> None:
        with MDSWriter(out=store, columns=columns) as out:
            for row in csr_rows(source):
                out.write(row)

    return convert


def epochs(options: Request) -> Epochs:
    """Epochs of one dataset."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    from benchmarks.compare.peers.datasets import collated

    size, variables = options["batch_size"], aws_variables(options)
    where = {"remote": options["store"], "local": options["mirror"]} if variables else {"local": options["store"]}
    os.environ |= variables | ({"S3_ENDPOINT_URL": variables["AWS_ENDPOINT_URL"]} if variables else {})
    dataset = StreamingDataset(**where, shuffle=True, batch_size=size)
    # Forked workers would share the connection over which the dataset has read its index, and mix up their responses.
    start = "spawn" if variables else None
    loader = DataLoader(
        dataset, batch_size=size, num_workers=options["workers"], collate_fn=collated, multiprocessing_context=start
    )
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: len(minibatch["label"]),
        values=lambda minibatch: minibatch["values"],
        labels=lambda minibatch: minibatch["label"],
        workers_bytes=workers_bytes,
    )
