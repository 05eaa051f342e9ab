"""What a second modality, and rows that a modality lacks, cost per epoch, beside the same matrix as an AnnData.

    python benchmarks/questions/modalities.py [--rows 60000]

The MuData has rna (CSR) with all rows in the order of the whole, prot (dense, 100 proteins) with three quarters of the
rows, and shuffled, the matrix of rna in another order. All epochs but the first of each loader read the mirror.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse

import zloader as zl

_TURNS = 7


def parts(n_rows: int) -> dict[str, ad.AnnData]:
    rng = np.random.default_rng(0)
    per_row, n_genes = 150, 2000
    genes = np.sort(rng.integers(0, n_genes, (n_rows, per_row)), axis=1).ravel()
    values = (rng.poisson(2, len(genes)) + 1).astype(np.float32)
    x = scipy.sparse.csr_matrix((values, genes, np.arange(n_rows + 1) * per_row), (n_rows, n_genes))
    x.sum_duplicates()
    names, order = np.array([f"c{row}" for row in range(n_rows)]), rng.permutation(n_rows)
    held = np.sort(order[: n_rows * 3 // 4])
    prot = rng.poisson(20, (len(held), 100)).astype(np.float32)
    made = {
        "rna": ad.AnnData(x, obs=pd.DataFrame(index=names)),
        "prot": ad.AnnData(prot, obs=pd.DataFrame(index=names[held])),
        "shuffled": ad.AnnData(x[order], obs=pd.DataFrame(index=names[order])),
    }
    for modality, adata in made.items():
        adata.var_names = [f"{modality}{gene}" for gene in range(adata.n_vars)]
    return made


def main() -> None:
    import mudata

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = parts(given.rows)
        made["rna"].write_h5ad(Path(folder) / "rna.h5ad")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mudata.MuData(made).write_h5mu(Path(folder) / "a.h5mu")
        cases: dict[str, tuple[str, Any]] = {
            "rna as an AnnData": ("rna.h5ad", "X"),
            "rna": ("a.h5mu", ["rna:X"]),
            "rna, shuffled": ("a.h5mu", ["shuffled:X"]),
            "prot": ("a.h5mu", ["prot:X"]),
            "rna and prot": ("a.h5mu", ["rna:X", "prot:X"]),
        }
        loaders = {
            name: zl.Loader(
                zl.open_dataset(Path(folder) / file, cache=Path(folder) / "cache"), x=x, layout="dense", batch_size=256
            )
            for name, (file, x) in cases.items()
        }
        took: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(_TURNS + 1):  # side by side, so that a busy machine slows all of them
            for name, loader in loaders.items():
                began = time.perf_counter()
                for _ in loader:
                    pass
                if turn:
                    took[name].append(time.perf_counter() - began)
        base = np.median(took["rna as an AnnData"])
        print("| matrices | rows/s | time, in that of rna as an AnnData |\n|---|---|---|")
        for name, seconds in took.items():
            print(f"| {name} | {given.rows / np.median(seconds):,.0f} | {np.median(seconds) / base:.2f} |")


if __name__ == "__main__":
    main()
