"""BioNeMo-SCDL: memory-mapped arrays of a CSR matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, workers_bytes

PEER = Peer(
    requirements=("bionemo-scdl",),
    packages=("bionemo-scdl", "torch", "anndata", "numpy"),
    least_python=(3, 10),
    below_python=(3, 13),
    sides={
        "BioNeMo-SCDL": Side(
            how="SingleCellMemMapDataset in a DataLoader with shuffle=True and collate_sparse_matrix_batch, as its "
            "example notebook has it, and one worker per core. Minibatches are torch CSR, without labels.",
            format="SCDL: NumPy files that are memory-mapped",
            store="bionemo-scdl",
            scenarios=(*EPOCHS, "conversion"),
            order="single random cells",
        )
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """SingleCellMemMapDataset of one file, saved."""
    from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset

    (source,) = sources
    return lambda: SingleCellMemMapDataset(store, source, use_X_not_raw=True).save()


def epochs(options: Request) -> Epochs:
    """Epochs of a DataLoader."""
    from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
    from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        SingleCellMemMapDataset(options["store"]),
        batch_size=options["batch_size"],
        shuffle=True,
        num_workers=options["workers"],
        collate_fn=collate_sparse_matrix_batch,
    )
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: minibatch.shape[0],
        values=lambda minibatch: minibatch.values(),
        workers_bytes=workers_bytes,
    )
