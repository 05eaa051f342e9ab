"""cell-load: sets of treated cells, each with a control, from an .h5ad file of a drug screen (see screens.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.peers import Epoch, Epochs, Peer, Request, Side, workers_bytes

_HOW = (
    "PerturbationDataModule as its README sets it up, one worker per core, basal_mapping_strategy 'random': sets of "
    "cells of one cell line and drug, each cell with a random control of its cell line, as dense float32."
)

PEER = Peer(
    requirements=("cell-load",),
    packages=("cell-load", "h5py", "anndata", "torch", "numpy"),
    least_python=(3, 10),
    below_python=(3, 13),
    sides={
        "cell-load": Side(
            how=f"{_HOW} Values from a dense obsm array, with the option for files in which the cells of a set are "
            "neighbours (use_consecutive_loading): its fastest form.",
            format=".h5ad with a dense obsm array of the same values",
            store=None,
            scenarios=("sets",),
            order="sets of cells of one drug and cell line",
            options={"embed_key": "X_hvg", "consecutive": True},
        ),
        "cell-load, any order": Side(
            how=f"{_HOW} Values from a dense obsm array; the cells of a set may lie anywhere in the file.",
            format=".h5ad with a dense obsm array of the same values",
            store=None,
            scenarios=("sets",),
            order="sets of cells of one drug and cell line",
            options={"embed_key": "X_hvg", "consecutive": False},
        ),
    },
)


def epochs(options: Request) -> Epochs:
    """Epochs of the training loader of cell-load's PerturbationDataModule, with all of the file for training.

    `embed_key` is None for X (CSR) or the name of an obsm array. `workers_bytes` is the private memory of its `workers`
    at the end of the epoch.
    """
    from cell_load.data_modules import PerturbationDataModule

    config = Path("cell_load.toml")  # in the working directory, which is temporary
    config.write_text(f'[datasets]\nscreen = "{options["store"]}"\n\n[training]\nscreen = "train"\n')
    module = PerturbationDataModule(
        toml_config_path=str(config),
        batch_size=options["batch_size"] // options["set_size"],
        cell_sentence_len=options["set_size"],
        num_workers=options["workers"],
        use_consecutive_loading=options["consecutive"],
        embed_key=options["embed_key"],
        should_yield_control_cells=False,
        basal_mapping_strategy="random",
        pert_col="drug",
        cell_type_key="cell_line",
        batch_col="plate",
        control_pert="DMSO",
    )
    module.setup()
    loader = module.train_dataloader()

    def minibatches() -> Iterator[Any]:
        for minibatch in loader:
            assert minibatch["pert_cell_emb"].shape == minibatch["ctrl_cell_emb"].shape
            yield minibatch

    return lambda _: Epoch(
        minibatches=minibatches(),
        size=lambda minibatch: len(minibatch["pert_cell_emb"]),
        values=lambda minibatch: minibatch["pert_cell_emb"],
        workers_bytes=workers_bytes,
    )
