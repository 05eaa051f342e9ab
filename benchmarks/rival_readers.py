"""Epochs of cell-load and SLAF for readers.py. Each function runs in the environment of its tool (see rivals.py).

"cell-load" reads the .h5ad file `path`, all of it for training. Its samples are sets of `set_size` cells of one cell
line and drug, `batch_size` cells per minibatch, each with one random control of its cell line, as dense float32.
`embed_key` is None for X (CSR) or the name of an obsm array. `consecutive` is its option for files in which the cells
of a set are neighbours. `workers_bytes` is the private memory of its `workers` at the end of the epoch.

"slafdb" reads a SLAF store with its default order, a mixture of scanners, and makes the tokens named by `tokens`. A new
loader is made for each epoch, as its `n_epochs=1` requires, and stopped afterwards.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Epoch = Callable[[Request], tuple[Iterator[int], Callable[[], Request]]]
_TOKENS = {"Geneformer": "geneformer", "scGPT": "scgpt"}


def cell_load(options: Request) -> Epoch:
    """Epochs of the training loader of cell-load's PerturbationDataModule."""
    from cell_load.data_modules import PerturbationDataModule

    config = Path("cell_load.toml")  # in the working directory, which is temporary
    config.write_text(f'[datasets]\nscreen = "{options["path"]}"\n\n[training]\nscreen = "train"\n')
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

    def statistics() -> Request:
        return {"workers_bytes": sum(_private_bytes(child.pid) for child in multiprocessing.active_children())}

    def sizes() -> Iterator[int]:
        for minibatch in loader:
            assert minibatch["pert_cell_emb"].shape == minibatch["ctrl_cell_emb"].shape
            yield len(minibatch["pert_cell_emb"])

    return lambda _: (sizes(), statistics)


def slaf(options: Request) -> Epoch:
    """Epochs of SLAFDataLoader with one of its tokenizers."""
    from slaf import SLAFArray
    from slaf.ml import SLAFDataLoader

    array = SLAFArray(options["store"])

    def epoch(_: Request) -> tuple[Iterator[int], Callable[[], Request]]:
        loader = SLAFDataLoader(
            array,
            tokenizer_type=_TOKENS[options["tokens"]],
            batch_size=options["batch_size"],
            max_genes=2048,
            vocab_size=array.shape[1] + 1,
            n_expression_bins=51,
            verbose=False,
        )

        def stop() -> Request:
            prefetcher = loader._dataset.prefetcher
            prefetcher.stop()  # waits for a second only
            prefetcher.worker_thread.join()
            return {}

        return (len(minibatch["input_ids"]) for minibatch in loader), stop

    return epoch


def _private_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
