"""Warm epochs of two stores with different genes, opened with `join="outer"`, in turns with one store of the same rows.

    python -m benchmarks.questions.joined DIRECTORY [--rows 20000] [--turns 7] [--layout csr] [--form compact]

Each of the two stores has half of the rows and 30 000 genes, 20 000 of which the other store has too, with about 1 800
values per row. They are written to DIRECTORY, together with one store of all rows and the 40 000 genes of both
(`zl.Selection(join="outer")`), and deleted afterwards.

- one store: the limit. Its genes are the columns of x.
- sorted: the genes of both stores are sorted by name, as the 40 000 genes are. Genes are looked up in a table, unless
  the form of the cache keeps them as columns of x.
- not sorted: the genes of both stores are in random order. Each row is also sorted by its new columns.

A turn is several warm epochs of the default order, in one process. CPU seconds (user and system, of all threads) shake
less than wall time on a machine with other work. Each ratio is that of the one store to the others, in the same turn.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse

import zloader as zl
from benchmarks.harness.measuring import table

N_GENES, N_SHARED = 30_000, 20_000
VALUES_PER_ROW = 1800
EPOCHS = 4  # per turn


def counts(n_rows: int, names: np.ndarray, *, seed: int) -> ad.AnnData:
    """Counts of genes with these names."""
    rng = np.random.default_rng(seed)
    genes = np.cumsum(rng.geometric(VALUES_PER_ROW / N_GENES, (n_rows, VALUES_PER_ROW)), axis=1) - 1
    kept = genes < N_GENES
    indptr = np.append(0, np.cumsum(kept.sum(axis=1)))
    values = rng.geometric(0.7, indptr[-1]).astype(np.float32)
    x = scipy.sparse.csr_matrix((values, genes[kept].astype(np.int32), indptr), (n_rows, N_GENES))
    obs = pd.DataFrame(index=[f"{seed} {row}" for row in range(n_rows)])
    return ad.AnnData(x, obs, pd.DataFrame(index=names))


def loaders(folder: Path, rows: int, layout: str, form: str) -> dict[str, zl.Loader]:
    """Writes the stores. Returns a loader of each kind."""
    made, cache = {}, zl.Cache(folder / "cache", form=form)
    names = np.array([f"gene{number:05}" for number in range(2 * N_GENES - N_SHARED)])
    shuffled = np.random.default_rng(0).permutation(names)
    chosen = [shuffled[:N_GENES], shuffled[-N_GENES:]]
    for name, arranged in (("sorted", np.sort), ("not sorted", np.random.default_rng(1).permutation)):
        halves = [counts(rows // 2, arranged(genes), seed=seed) for seed, genes in enumerate(chosen)]
        paths = [folder / f"{name} {number}.zarr" for number in range(2)]
        for half, path in zip(halves, paths, strict=True):
            zl.convert(half, path, progress=False)
        if not made:
            zl.convert(halves, folder / "one.zarr", select=zl.Selection(join="outer"), progress=False)
            made["one store"] = zl.Loader(zl.open_dataset(folder / "one.zarr", cache=cache), layout=layout)
        made[name] = zl.Loader(zl.open_dataset(paths, join="outer", cache=cache), layout=layout)
    return made


def cpu_s(loader: zl.Loader, n_epochs: int) -> float:
    """The CPU seconds of some epochs."""
    began = time.process_time()
    for _ in range(n_epochs):
        for _ in loader:
            pass
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--layout", default="csr")
    parser.add_argument("--form", default="raw")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        made = loaders(Path(folder), options.rows, options.layout, options.form)
        for loader in made.values():
            cpu_s(loader, 2)  # fills the mirror, and reads it once
        turns = [{name: cpu_s(loader, EPOCHS) for name, loader in made.items()} for _ in range(options.turns)]
    figures = [
        {
            "store": name,
            "CPU us a row": round(1e6 * statistics.median(turn[name] for turn in turns) / EPOCHS / options.rows, 2),
            "speed": round(statistics.median(turn["one store"] / turn[name] for turn in turns), 3),
        }
        for name in made
    ]
    table([list(figures[0]), *(list(map(str, each.values())) for each in figures)])
    print(json.dumps({"rows": options.rows, "layout": options.layout, "form": options.form, "figures": figures}))


if __name__ == "__main__":
    main()
