"""How fast are Parquet files converted, beside the way people do it today?

    python -m benchmarks.questions.formats [--rows 30000] [--genes 20000] [--turns 3] [--memory 1GiB]

Synthetic cells (benchmarks.data.synthetic) are written as Parquet with lists of genes and values, each row with the
marker of Tahoe-100M. Then these take turns, each in a process of its own:

- `parquet`: `zloader convert` from Parquet.
- `datasets`: Hugging Face datasets reads the rows in batches, which become a CSR matrix and an AnnData, and
  `write_zarr` stores it.

Both read the same files and end with an AnnData Zarr store on the same disk. wall, CPU and peak memory are those of the
whole process. The stores are compared with the cells. Needs `pip install datasets`, which no extra has. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import (
    COLUMNS,
    Figures,
    columns,
    in_new_process,
    measured,
    program,
    ratio,
    read_through,
    table,
)

_FILE_ROWS, _GROUP_ROWS, _FIRST_ID = 10_000, 1000, 3
_BATCH = 1000


def write_sources(work: Path, rows: int, genes: int) -> None:
    """Writes the cells as .h5ad and Parquet."""
    import anndata as ad
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from benchmarks.data.synthetic import generate

    generate(work / "cells.h5ad", rows=rows, genes=genes)
    adata = ad.read_h5ad(work / "cells.h5ad")
    (work / "parquet").mkdir()
    for start in range(0, rows, _FILE_ROWS):
        x, obs = adata.X[start : start + _FILE_ROWS], adata.obs[start : start + _FILE_ROWS].reset_index()
        at = x.indptr[:-1]
        lists = {
            "genes": np.insert((x.indices + _FIRST_ID).astype(np.int64), at, 1),
            "expressions": np.insert(x.data.astype(np.float32), at, -2),
        }
        offsets = pa.array((x.indptr + np.arange(len(x.indptr))).astype(np.int32))
        made = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()}
        made |= {str(name): pa.array(obs[name].astype(str)) for name in obs}
        pq.write_table(pa.table(made), work / f"parquet/{start:08}.parquet", row_group_size=_GROUP_ROWS)
    ids = {"token_id": np.arange(genes) + _FIRST_ID, "gene_symbol": adata.var_names.to_numpy(str)}
    pq.write_table(pa.table(ids), work / "genes.parquet")


def run(work: Path, store: Path) -> float:
    """Converts in the way of today. Returns the seconds."""
    began = time.perf_counter()
    with_datasets(work).write_zarr(store)
    return time.perf_counter() - began


def with_datasets(work: Path) -> Any:
    """The Parquet files as an AnnData, batch by batch."""
    import anndata as ad
    import datasets
    import numpy as np
    import pandas as pd
    import pyarrow.parquet as pq
    import scipy.sparse

    genes = pq.read_table(work / "genes.parquet").to_pandas().set_index("gene_symbol")
    rows = datasets.load_dataset(
        "parquet", data_files=str(work / "parquet" / "*.parquet"), split="train", streaming=True, cache_dir=str(work)
    )
    lengths, indices, values, obs = [], [], [], []
    for batch in rows.with_format("numpy").iter(_BATCH):
        lengths += [len(each) - 1 for each in batch["genes"]]
        indices.append(np.concatenate([each[1:] for each in batch["genes"]]) - _FIRST_ID)
        values.append(np.concatenate([each[1:] for each in batch["expressions"]]))
        obs.append(pd.DataFrame({name: batch[name] for name in batch if name not in ("genes", "expressions")}))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    x = scipy.sparse.csr_matrix((np.concatenate(values), np.concatenate(indices), indptr), (len(lengths), len(genes)))
    frame = pd.concat(obs, ignore_index=True)
    return ad.AnnData(x, obs=frame.set_axis(frame.index.astype(str)), var=genes)


def check(file: Path, store: Path) -> None:
    """Raises AssertionError if the X of a store is not that of the .h5ad file."""
    import anndata as ad
    import zarr

    wanted = ad.read_h5ad(file).X
    found = ad.io.read_elem(zarr.open_group(store, mode="r")["X"])
    assert found.shape == wanted.shape
    assert (found != wanted).nnz == 0


def commands(work: Path, memory: str, store: Path) -> dict[str, Any]:
    """The command of each way."""
    ours = [str(Path(sys.executable).with_name("zloader")), "convert"]
    parquet = [str(work / "parquet"), "--gene-metadata", str(work / "genes.parquet")]
    return {
        "parquet": [*ours, *parquet, str(store), "--json", "--memory", memory],
        "datasets": program("questions.formats", "--run", work, store),
    }


def main() -> None:
    """Writes the sources, runs the turns and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", default="1GiB", help="limit of zloader (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="directory for the files (default: a temporary one)")
    parser.add_argument("--run", nargs=2, metavar=("WORK", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps({"seconds": run(*map(Path, options.run))}))
        return
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        work = Path(directory)
        in_new_process(write_sources, work, options.rows, options.genes)
        runs: dict[str, list[Figures]] = {}
        for _ in range(options.turns):
            for name, command in commands(work, options.memory, work / "store.zarr").items():
                for file in (work / "parquet").iterdir():
                    read_through(file)
                figures = measured(command, work=work, env={"HF_HOME": str(work / "hf")})
                in_new_process(check, work / "cells.h5ad", work / "store.zarr")
                shutil.rmtree(work / "store.zarr")
                runs.setdefault(name, []).append(figures)
    lines = [["", *COLUMNS, "speedup of zloader"]]
    lines += [["parquet", *columns(runs["parquet"], options.rows), ""]]
    speedup = ratio(runs["datasets"], runs["parquet"], "wall_s")
    lines += [["datasets", *columns(runs["datasets"], options.rows), f"{speedup:.2f} x"]]
    table(lines)
    print(json.dumps({"rows": options.rows, "genes": options.genes, "memory": options.memory, "runs": runs}))


if __name__ == "__main__":
    main()
