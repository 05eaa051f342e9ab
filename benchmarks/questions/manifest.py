"""How a manifest of thousands of stores opens and mixes, beside one store with as many rows per fetch.

    python -m benchmarks.questions.manifest --stores 30000 --turns 3

All stores of the manifest are links to one of 3 000 rows, so that the disk holds them. Each turn is a process of its
own, and the ways alternate. An epoch ends after `--rows` rows: a manifest of 30 000 stores has 90 million.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STORE_ROWS, GENES, PER_ROW = 3_000, 20_000, 1_000


def make(directory: Path, n_stores: int, one_rows: int) -> None:
    """Writes the store, its links, the manifest, and one store of `one_rows` rows."""
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp

    import zloader as zl

    rng = np.random.default_rng(0)
    indices = np.sort(np.argsort(rng.random((STORE_ROWS, GENES)), axis=1)[:, :PER_ROW], axis=1).reshape(-1)
    data = rng.poisson(1.0, len(indices)).astype(np.float32) + 1
    x = sp.csr_matrix((data, indices, np.arange(STORE_ROWS + 1) * PER_ROW), (STORE_ROWS, GENES))
    obs = pd.DataFrame({"plate": pd.Categorical(["p0"] * STORE_ROWS)}, index=[f"c{i}" for i in range(STORE_ROWS)])
    adata = ad.AnnData(x, obs=obs)
    adata.var_names = [f"g{i}" for i in range(GENES)]
    adata.write_h5ad(directory / "one.h5ad")
    zl.convert(directory / "one.h5ad", directory / "one.zarr", progress=False)
    zl.convert([directory / "one.h5ad"] * (one_rows // STORE_ROWS), directory / "large.zarr", progress=False)
    (directory / "links").mkdir()
    for number in range(n_stores):
        (directory / "links" / f"{number}.zarr").symlink_to("../one.zarr")
    zl.index(directory / "one.zarr", directory / "single.parquet", progress=False)
    single = pd.read_parquet(directory / "single.parquet")
    table = single.loc[np.zeros(n_stores, int)].reset_index(drop=True)
    table["url"] = [f"links/{number}.zarr" for number in range(n_stores)]
    table["plate"] = [f"p{number % 100}" for number in range(n_stores)]
    table.loc[1:, "gene_names"] = ""
    table.to_parquet(directory / "many.parquet", index=False)


def measure(url: str, cache: str, n_rows: int) -> dict[str, float]:
    """Opens a dataset and reads rows of it, in this process."""
    import zloader as zl

    began = time.perf_counter()
    dataset = zl.open_dataset(url, cache=cache or None)
    opened = time.perf_counter()
    n_chosen = len(dataset.where("plate == 'p7'")) if url.endswith(".parquet") else 0
    chosen = time.perf_counter()
    seen, first = 0, 0.0
    loader = zl.Loader(dataset, batch_size=64)
    for minibatch in loader:
        seen += len(minibatch)
        first = first or time.perf_counter()
        if seen >= n_rows:
            break
    ended, usage = time.perf_counter(), os.times()
    import resource

    return {
        "open_s": opened - began,
        "where_s": chosen - opened,
        "chosen": n_chosen,
        "first_s": first - chosen,
        "rows_per_s": seen / (ended - first),
        "cpu_s": usage.user + usage.system,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def main() -> None:
    """Prints the medians over the turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=int, default=30_000)
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("URL", "CACHE"))
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.rows)))
        return
    with tempfile.TemporaryDirectory(prefix="zloader-manifest-") as name:
        directory = Path(name)
        make(directory, args.stores, args.rows)
        found: dict[str, list[dict[str, float]]] = {}
        for turn in range(args.turns):
            for url in ("large.zarr", "many.parquet"):
                for way in ("no cache", "filling", "warm"):
                    cache = "" if way == "no cache" else str(directory / f"cache-{url}-{turn}")
                    command = ["--measure", str(directory / url), cache, "--rows", str(args.rows)]
                    done = subprocess.run(
                        [sys.executable, "-m", "benchmarks.questions.manifest", *command],
                        check=True,
                        capture_output=True,
                    )
                    found.setdefault(f"{url} {way}", []).append(json.loads(done.stdout))
        for name, turns in found.items():
            medians = {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}
            print(name, json.dumps(medians))


if __name__ == "__main__":
    main()
