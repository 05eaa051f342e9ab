"""Minibatches for scVI: zloader's loader, annbatch's data module, and scvi-tools' own loader of an AnnData in memory.

    python -m benchmarks.questions.scvi_tools [--rows 50000] [--genes 2000] [--turns 3] [--work DIRECTORY]

Needs scvi-tools 1.5 and annbatch[zarrs], so Python 3.12 or newer. The counts are random: 10 % of the genes of a row
have one, as in a table of chosen genes. zloader reads the converted store through a mirror that is full, annbatch its
own collection with the zarrs pipeline and the sizes of `setup_annbatch`, scvi-tools the AnnData. All shuffle,
and yield minibatches of 128 rows as the dict of tensors that the module takes, on the CPU.

"nothing" drops the minibatches. "SCVI" runs the forward pass, the backward pass and Adam, without the Trainer. The
sides take turns. Rows/s are medians, with their range; CPU seconds are of all threads, per 100 000 rows. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
import torch

import zloader as zl
from benchmarks.harness.measuring import table

Side = Callable[[], Iterator[dict[str, torch.Tensor]]]
BATCH_SIZE = 128
COLUMNS = ("rows/s", "(range)", "CPU s per 100 000")


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--genes", type=int, default=2_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, help="directory for the stores (default: a temporary directory)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        adata = made_up(options.rows, options.genes)
        sides, model = prepared(adata, Path(work))
        runs = measured(sides, model, options.turns)
    lines = [["", *COLUMNS]]
    for name, figures in runs.items():
        speeds = [run["rows"] / run["seconds"] for run in figures]
        cpu = statistics.median(run["cpu_s"] / run["rows"] * 100_000 for run in figures)
        lines.append(
            [name, f"{statistics.median(speeds):,.0f}", f"({min(speeds):,.0f} to {max(speeds):,.0f})", f"{cpu:.2f}"]
        )
    table(lines)
    print(
        json.dumps({"cores": len(os.sched_getaffinity(0)), "rows": options.rows, "genes": options.genes, "runs": runs})
    )


def made_up(rows: int, genes: int) -> ad.AnnData:
    """Random counts with a batch and a label per row."""
    rng = np.random.default_rng(0)
    x = scipy.sparse.random(rows, genes, 0.1, "csr", np.float32, random_state=rng)
    x.data[:] = rng.geometric(0.5, x.nnz)
    obs = pd.DataFrame({name: rng.integers(0, n, rows).astype(str) for name, n in {"batch": 8, "type": 20}.items()})
    obs.index = [f"cell {row}" for row in range(rows)]
    return ad.AnnData(x, obs.astype("category"), pd.DataFrame(index=[f"gene {gene}" for gene in range(genes)]))


def prepared(adata: ad.AnnData, work: Path) -> tuple[dict[str, Side], Any]:
    """The sides, and a model that takes their minibatches."""
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import SCVI

    from zloader.integrations.scvi import _loader, as_anndata

    adata.write_h5ad(work / "cells.h5ad")
    zl.convert(adata, work / "cells.zarr", progress=False)
    dataset = zl.open_dataset(work / "cells.zarr", cache=work / "mirror")
    stored = as_anndata(dataset)
    SCVI.setup_anndata(stored, batch_key="batch", labels_key="type")
    manager, device = SCVI(stored).adata_manager, torch.device("cpu")
    ours = _loader(manager, np.arange(len(dataset)), batch_size=BATCH_SIZE, device=device)
    theirs = annbatch_module(work)
    SCVI.setup_anndata(adata, batch_key="batch", labels_key="type")
    model = SCVI(adata)
    loader = AnnDataLoader(model.adata_manager, batch_size=BATCH_SIZE, shuffle=True)
    sides: dict[str, Side] = {
        "zloader": lambda: iter(ours),
        "annbatch": lambda: hooked(theirs, theirs.train_dataloader()),
        "AnnData in memory": lambda: iter(loader),
    }
    return sides, model


def annbatch_module(work: Path) -> Any:
    """annbatch's module over a shuffled collection. `SCVI.setup_annbatch` of 1.5.1 does not fit annbatch 0.3.1."""
    import annbatch
    import zarr
    import zarrs  # noqa: F401
    from scvi.dataloaders import AnnbatchDataModule

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    sizes = {"chunk_size": 256, "preload_nchunks": 32}
    store = str(work / "annbatch.zarr")
    annbatch.DatasetCollection(store).add_adatas([str(work / "cells.h5ad")], shuffle=True, rng=np.random.default_rng(0))

    def load(group: Any) -> ad.AnnData:
        return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])[["batch", "type"]])

    loader = annbatch.Loader(batch_size=BATCH_SIZE, shuffle=True, preload_to_gpu=False, to="torch", **sizes)
    loader.use_collection(annbatch.DatasetCollection(store), load_adata=load)
    module = AnnbatchDataModule(
        loader, batch_key="batch", label_key="type", shuffle=True, batch_size=BATCH_SIZE, preload_to_gpu=False, **sizes
    )
    module.set_split(train_size=1.0, batch_size=BATCH_SIZE)
    return module


def hooked(module: Any, minibatches: Iterable[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors that a model gets from a data module, by the hooks in Lightning's order."""
    for minibatch in minibatches:
        before = module.on_before_batch_transfer(minibatch, 0)
        yield module.on_after_batch_transfer(module.transfer_batch_to_device(before, torch.device("cpu"), 0), 0)


def measured(sides: dict[str, Side], model: Any, turns: int) -> dict[str, list[dict[str, float]]]:
    """The figures of each side in each turn. The first epoch of each, which fills caches, does not count."""
    optimizer = torch.optim.Adam(model.module.parameters())
    model.module.train()

    def train(tensors: dict[str, torch.Tensor]) -> None:
        loss = model.module(tensors)[2].loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for epoch in sides.values():
        for _ in epoch():
            pass
    runs: dict[str, list[dict[str, float]]] = {}
    consumers = {"nothing": lambda tensors: None, "SCVI": train}
    for _, (name, epoch), (fed, consume) in itertools.product(range(turns), sides.items(), consumers.items()):
        started, cpu, rows = time.perf_counter(), time.process_time(), 0
        for tensors in epoch():
            rows += len(tensors["X"])
            consume(tensors)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        runs.setdefault(f"{name}, feeding {fed}", []).append({"rows": rows, "seconds": seconds, "cpu_s": cpu_s})
        print(f"{name}, feeding {fed}: {rows / seconds:,.0f} rows/s", flush=True)
    return runs


if __name__ == "__main__":
    main()
