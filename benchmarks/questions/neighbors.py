"""How many GETs and bytes an epoch with neighbours takes, by the order in which convert stores the rows.

    python benchmarks/questions/neighbors.py [--rows 100000] [--k 6]

Cells at random places of a slide are stored in the order of a file, which is random in space, and along the Hilbert
curve of docs/howto/neighbors.md through their places. The counts are exact: the chunks that each fetch of a plan needs,
without a cache.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from scipy.spatial import cKDTree

import zloader as zl
from zloader.insight.cost import epoch_costs

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "neighbors.md"


def hilbert(places: np.ndarray) -> np.ndarray:
    """The places of points on the curve of the page."""
    names: dict[str, Any] = {}
    exec(re.search(r"<!-- hilbert -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], names)
    return names["hilbert"](places)


def slide(n_rows: int, k: int, *, n_genes: int = 300, per_row: int = 60) -> ad.AnnData:
    rng = np.random.default_rng(0)
    genes = np.sort(rng.integers(0, n_genes, (n_rows, per_row)), axis=1).ravel()
    indptr = np.arange(n_rows + 1) * per_row
    x = scipy.sparse.csr_matrix((rng.poisson(2, len(genes)).astype(np.float32) + 1, genes, indptr), (n_rows, n_genes))
    x.sum_duplicates()
    places = rng.random((n_rows, 2))
    distances, others = cKDTree(places).query(places, k=k + 1)
    graph = scipy.sparse.csr_matrix(
        (distances[:, 1:].ravel(), (np.repeat(np.arange(n_rows), k), others[:, 1:].ravel())), (n_rows, n_rows)
    )
    names = [str(row) for row in range(n_rows)]
    return ad.AnnData(x, obs=pd.DataFrame(index=names), obsm={"spatial": places}, obsp={"distances": graph})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--k", type=int, default=6)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.h5ad"
        adata = slide(given.rows, given.k)
        adata.write_h5ad(source)
        print("| rows stored | blocks of rows | neighbours | GETs | MB read | seconds per epoch from disk |")
        print("|---|---|---|---|---|---|")
        curve = np.argsort(hilbert(adata.obsm["spatial"]))
        for stored, order in (("as in the file", None), ("along the curve", curve)):
            store = Path(folder) / f"{stored}.zarr"
            zl.convert(source, store, options=zl.ConvertOptions(order=order), progress=False)
            dataset = zl.open_dataset(store)
            for block_size in (64, 512):
                for k in (0, given.k):
                    report(dataset, stored, block_size, k)


def report(dataset: zl.Dataset, stored: str, block_size: int, k: int) -> None:
    loader = zl.Loader(
        dataset,
        neighbors=zl.Neighbors("distances", k=k, smallest=True) if k else None,
        sampling=zl.BlockShuffling(block_size),
        batch_size=64,
        fetch_factor=64,
        layout="dense",
    )
    costs = epoch_costs(dataset, loader.plan(0)).unmirrored
    took = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in loader:
            pass
        took.append(time.perf_counter() - began)
    print(f"| {stored} | {block_size} | {k} | {costs.gets:,} | {costs.bytes_read / 1e6:,.0f} | {np.median(took):.2f} |")


if __name__ == "__main__":
    main()
