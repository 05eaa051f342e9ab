"""Checks that annbatch's Loader returns the rows that zloader wrote. annbatch runs in its own environment.

    python -m benchmarks.questions.interoperability FILE.h5ad [--python python3.12]

Converts FILE (CSR) with each codec, shuffled, and with its dtypes preserved. Then annbatch reads each store once
(shuffled, minibatches of 512 rows, with plain zarr and with the zarrs pipeline), and the values, indices and obs name
of every row are compared with FILE. If any differ, the script prints where, and its exit status is 1. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare.rivals import environment
from benchmarks.harness.measuring import program

VARIANTS = {
    "lz4": {},
    "zstd": {"codec": "zstd"},
    "pcodec": {"codec": "pcodec"},
    "none": {"codec": "none"},
    "shuffled": {"shuffle_seed": 1},
    "dtypes kept": {"preserve_dtype": True},
}


def read_with_annbatch(file: str, store: str, pipeline: str) -> dict[str, int]:
    """The number of rows and values that annbatch returned. Raises AssertionError if they differ from the file."""
    import annbatch
    import anndata as ad
    import numpy as np
    import zarr

    if pipeline == "zarrs":
        import zarrs  # noqa: F401

        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    wanted = ad.read_h5ad(file)
    group = zarr.open_group(store, mode="r")
    obs = ad.io.read_elem(group["obs"])
    backed = ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=obs[[]].assign(name=obs.index))
    loader = annbatch.Loader(chunk_size=64, preload_nchunks=64, batch_size=512, shuffle=True, return_index=True)
    loader.add_adata(backed)
    seen, values = [], 0
    for minibatch in loader:
        names = minibatch["obs"]["name"].astype(str)
        rows = wanted.obs_names.get_indexer(names)
        x, theirs = wanted.X[rows], minibatch["X"]
        for part in ("indptr", "indices", "data"):
            same = np.array_equal(getattr(x, part), getattr(theirs, part))
            assert same, f"{part} of a minibatch with the rows {rows[:5]}... differ"
        seen.append(rows)
        values += theirs.nnz
    rows = np.concatenate(seen)
    assert np.array_equal(np.sort(rows), np.arange(wanted.n_obs)), "rows are missing or duplicated"
    return {"rows": len(rows), "values": values}


def main() -> None:
    """Converts, reads, and prints one line per store and pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", help="Python interpreter (3.12 or newer) for annbatch's environment")
    parser.add_argument("--read", nargs=2, metavar=("STORE", "PIPELINE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_with_annbatch(str(options.file), *options.read)))
        return
    import zloader as zl

    executable = environment("annbatch", python=options.python)
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, given in VARIANTS.items():
            store = Path(directory) / f"{name}.zarr"
            zl.convert(options.file, store, options=zl.ConvertOptions(**given), progress=False)
            for pipeline in ("zarr", "zarrs"):
                arguments = (options.file, "--read", store, pipeline)
                command = program("questions.interoperability", *arguments, python=executable)
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                verdict = "the same" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
                results[f"{name}, {pipeline}"] = verdict
                print(f"{name:12} {pipeline:6} {verdict}")
    print(json.dumps(results))
    sys.exit(any(verdict != "the same" for verdict in results.values()))


if __name__ == "__main__":
    main()
