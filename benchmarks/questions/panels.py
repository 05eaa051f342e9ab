"""Epochs of all genes and of panels of highly variable ones, from raw and from compact mirrors, in turns.

    python -m benchmarks.questions.panels STORE.zarr DIRECTORY [--genes 2000 8000] [--turns 5]

The panels are the most variable genes (seurat_v3). For each panel, and for all genes, the first epoch fills a mirror in
DIRECTORY (which is deleted before and afterwards), and later ones take turns: both forms of the mirror, minibatches of
1 024 and of 64 rows, CSR and dense, blocks of 64 rows and single rows. Epochs run in one process, with the mirrors in
the page cache. The ratios are of compact to raw, the median of the turns; `all genes` is the ratio to whole rows
from a raw mirror. CPU seconds are user and system, of all threads. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.harness.measuring import table

FORMS = ("raw", "compact")
WAYS = [("csr", 1024, 64), ("csr", 64, 64), ("csr", 1024, 1), ("dense", 1024, 64), ("dense", 64, 64)]


def epoch(dataset: zl.Dataset, layout: str, batch_size: int, block: int) -> tuple[float, float]:
    """Rows per second and CPU seconds of an epoch."""
    loader = zl.Loader(dataset, layout=layout, batch_size=batch_size, sampling=zl.BlockShuffling(block))
    cpu, began = time.process_time(), time.perf_counter()
    rows = sum(len(minibatch) for minibatch in loader)
    return rows / (time.perf_counter() - began), time.process_time() - cpu


def filled(folder: Path, store: Path, genes: Any, form: str) -> tuple[zl.Dataset, dict[str, float]]:
    """A dataset whose mirror an epoch has filled. Returns the CPU seconds of that, and the bytes of a row, too."""
    whole = zl.open_dataset(store, cache=zl.Cache(folder, form=form))
    dataset = whole if genes is None else whole[:, genes]
    _, cpu_s = epoch(dataset, *WAYS[0])
    n_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("X*.rows"))
    return dataset, {"cpu_s": cpu_s, "bytes_per_row": n_bytes / whole.n_obs}


def measured(folder: Path, store: Path, genes: Any, turns: int) -> list[dict[str, Any]]:
    """The figures of a panel, way by way."""
    datasets, filling = {}, {}
    for form in FORMS:
        datasets[form], filling[form] = filled(folder / form, store, genes, form)
    figures = []
    for way in WAYS if genes is not None else [way for way in WAYS if way[0] == "csr"]:
        taken = [{form: epoch(dataset, *way) for form, dataset in datasets.items()} for _ in range(turns)]
        figure: dict[str, Any] = {"layout": way[0], "batch_size": way[1], "block": way[2]}
        for form in FORMS:
            figure[f"{form} rows/s"] = round(statistics.median(turn[form][0] for turn in taken))
            figure[f"{form} bytes"] = round(filling[form]["bytes_per_row"])
            figure[f"{form} filling s"] = round(filling[form]["cpu_s"], 2)
        for number, name in enumerate(("speed", "CPU")):
            ratios = [turn["compact"][number] / turn["raw"][number] for turn in taken]
            figure[name] = round(statistics.median(ratios), 2)
        figures.append(figure)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--genes", type=int, nargs="*", default=[2000, 8000])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    dataset = zl.open_dataset(options.store)
    panels: dict[str, Any] = {"all": None}
    for n_genes in options.genes:
        panels[str(n_genes)] = dataset.highly_variable_genes(n_genes, progress=False)["highly_variable"]
    nonzero = dataset.gene_statistics(progress=False).nonzero
    lines, whole = [], {}
    for name, genes in panels.items():
        folder = options.directory / name
        shutil.rmtree(folder, ignore_errors=True)
        for figure in measured(folder, options.store, genes, options.turns):
            way = figure["layout"], figure["batch_size"], figure["block"]
            whole.setdefault(way, figure["raw rows/s"] if genes is None else 0)
            share = 1.0 if genes is None else float(nonzero[genes.to_numpy()].sum() / nonzero.sum())
            of_all = round(figure["compact rows/s"] / whole[way], 2) if whole[way] else ""
            lines.append({"genes": name, "values": round(share, 3), **figure, "all genes": of_all})
        shutil.rmtree(folder, ignore_errors=True)
    table([list(lines[0]), *(list(map(str, each.values())) for each in lines)])
    print(json.dumps({"rows": dataset.n_obs, "figures": lines}))


if __name__ == "__main__":
    main()
