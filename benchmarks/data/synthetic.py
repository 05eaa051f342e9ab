"""Synthetic single-cell counts that resemble Tahoe-100M, streamed to an .h5ad file with any number of rows.

    python -m benchmarks.data.synthetic OUT.h5ad --rows 100000 --genes 62710 --seed 0
    python -m benchmarks.data.synthetic OUT.h5ad --rows 100000 --store STORE.zarr --copies 10

X is CSR with float32 values and int32 gene indices, uncompressed: 8 bytes per value, about 14.7 KB per row, so 1.5 GB
for 100 000 rows. Peak memory is 0.4 GB plus 0.4 KB per row. The same arguments give the same file contents for any
number of threads.

The model, and why it matters to a loader:

- Values per row: log-normal (sigma 0.45) with a mean of 1 840, 2.9 % of the genes, so fetches differ in size.
- Counts: molecules are drawn one by one until a row has its number of distinct genes. Gene popularity follows a
  Zipf-Mandelbrot law, fitted so that ones are as frequent as in Tahoe (79 % of the values here, 78 % there) and chunks
  compress equally well (lz4 with shuffle: 1.95 bytes per uint16 index and narrow value). 50 values per million exceed
  255. Popular genes are spread over the gene axis.
- Cell lines: 50 programmes, each the base popularity times log-normal factors, with a few hundred strong marker genes.
  A linear classifier separates them after one epoch.
- Drugs: each drug belongs to one plate and draws 0.4 % of its molecules from its own 64 genes. This is a faint signal:
  after three epochs over 5 000 rows, a classifier is right for 41 % among the 28 drugs of a plate.
- Order: by plate, and by cell line within a plate. Unshuffled minibatches contain a single label, which makes this a
  real test of block sampling.

--store also converts the file: `--copies` copies of it, one after the other, into one store. That makes a store of a
million rows (3.7 GB) in half a minute from a file of 1.5 GB, where a file of as many rows would take 15 GB. The rows
repeat, and so do their names, which does not change the speed of reading: every copy is stored and read by itself.

The last line is one JSON document. With --check, it includes the stored bytes per value for chunks of 32 rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import anndata
import h5py
import numba
import numcodecs
import numpy as np
import pandas as pd
from numpy.typing import NDArray

import zloader as zl

PLATES = 14
CELL_LINES = 50
DRUGS = 379  # plus a control on every plate
VALUES_PER_ROW = 1840
SIGMA_VALUES = 0.45

ZIPF_EXPONENT = 1.08
ZIPF_OFFSET = 8.0
SIGMA_CELL_LINE = 0.5  # sigma of a cell line's log-normal factor for each gene
MARKERS = 300  # genes per cell line that are FOLD times as popular
FOLD = 6.0
DRUG_GENES = 64
DRUG_SHARE = 0.004  # share of a treated row's molecules from the drug's genes

WINDOW_ROWS = 4096
CONTROL = "DMSO"

_STRIDES = 64  # parallel jobs per window
_CHUNK_ROWS = 32


def generate(path: Path | str, *, rows: int = 100_000, genes: int = 62_710, seed: int = 0) -> dict[str, Any]:
    """Writes an .h5ad file of `rows` x `genes` to `path`, replacing it, and returns its figures."""
    began = time.monotonic()
    rng = np.random.default_rng(seed)
    obs = _obs(rows, rng)
    lengths = _lengths(rows, genes, rng)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    programmes = _programmes(genes, rng)
    drug_genes = rng.integers(0, genes, (DRUGS + 1, DRUG_GENES), dtype=np.int32)
    n_counts = np.empty(rows, np.float32)
    ones = large = 0
    with h5py.File(path, "w") as file:
        values, indices = _create_matrix(file, indptr, genes)
        for start in range(0, rows, WINDOW_ROWS):
            stop = min(rows, start + WINDOW_ROWS)
            first, last = int(indptr[start]), int(indptr[stop])
            counts, columns = np.empty(last - first, np.float32), np.empty(last - first, np.int32)
            _draw_rows(
                (seed, start),
                indptr[start : stop + 1] - first,
                (obs["cell_line"].cat.codes.to_numpy()[start:stop], obs["drug"].cat.codes.to_numpy()[start:stop]),
                programmes,
                drug_genes,
                (columns, counts),
            )
            values[first:last], indices[first:last] = counts, columns
            n_counts[start:stop] = np.add.reduceat(counts, indptr[start:stop] - first)
            ones, large = ones + int((counts == 1).sum()), large + int((counts > 255).sum())
        obs["n_counts"] = n_counts
        _write_the_rest(file, obs, pd.DataFrame(index=[f"GENE{i:05d}" for i in range(genes)]))
    n_values = int(indptr[-1])
    return {
        "rows": rows,
        "genes": genes,
        "values": n_values,
        "values_per_row": round(n_values / rows, 1),
        "ones": round(ones / n_values, 4),
        "above_255_per_million": round(1e6 * large / n_values, 1),
        "counts_per_row": round(float(n_counts.mean()), 1),
        "bytes": Path(path).stat().st_size,
        "seconds": round(time.monotonic() - began, 2),
    }


def convert(path: Path, store: Path, *, copies: int) -> dict[str, Any]:
    """Converts copies of an .h5ad file into one store, and returns its figures."""
    report = zl.convert([path] * copies, store)
    return {
        "rows": report.rows,
        "values": report.values,
        "bytes": report.bytes_out,
        "seconds": round(report.seconds, 2),
    }


def stored_bytes_per_value(path: Path | str, *, chunks: int = 64) -> dict[str, float]:
    """Bytes per index and value together, from evenly spaced chunks of 32 rows, by codec and dtypes."""
    codecs = {
        "lz4": numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
        "zstd": numcodecs.Blosc("zstd", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
    }
    sizes: dict[str, int] = {}
    n_values = 0
    with h5py.File(path) as file:
        indptr = file["X/indptr"][:]
        for row in np.linspace(0, max(0, len(indptr) - 1 - _CHUNK_ROWS), chunks).astype(int):
            here = slice(int(indptr[row]), int(indptr[min(len(indptr) - 1, row + _CHUNK_ROWS)]))
            indices, counts = file["X/indices"][here].astype(np.uint16), file["X/data"][here]
            n_values += len(counts)
            narrow = counts.astype(np.uint8 if counts.max() < 256 else np.uint16)
            for name, codec in codecs.items():
                for dtype, encoded in (("float32", counts), ("narrow", narrow)):
                    key = f"{name} uint16 + {dtype}"
                    sizes[key] = sizes.get(key, 0) + len(codec.encode(indices)) + len(codec.encode(encoded))
    return {key: round(size / n_values, 3) for key, size in sizes.items()}


# ---- labels, lengths and gene popularity of the rows


def _obs(rows: int, rng: np.random.Generator) -> pd.DataFrame:
    plate = np.arange(rows) * PLATES // rows
    sizes = np.bincount(plate, minlength=PLATES)
    starts = np.concatenate([[0], np.cumsum(sizes)])[plate]
    cell_line = (np.arange(rows) - starts) * CELL_LINES // sizes[plate]
    first = plate * DRUGS // PLATES  # the plate has drugs [first, last); DRUGS is the code of the control
    last = (plate + 1) * DRUGS // PLATES
    drug = first + rng.integers(0, last - first + 1)
    drug[drug == last] = DRUGS
    names = {
        "plate": [f"plate{i + 1}" for i in range(PLATES)],
        "cell_line": [f"cell_line_{i:02d}" for i in range(CELL_LINES)],
        "drug": [*(f"drug_{i:03d}" for i in range(DRUGS)), CONTROL],
    }
    codes = {"plate": plate, "cell_line": cell_line, "drug": drug}
    columns = {name: pd.Categorical.from_codes(codes[name], names[name]) for name in names}
    return pd.DataFrame(columns, index=[f"cell_{i:08d}" for i in range(rows)])


def _lengths(rows: int, genes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Values per row, fewer if there are too few genes for a mean of 1 840."""
    mean = min(VALUES_PER_ROW, genes / 6)
    drawn = mean * np.exp(SIGMA_VALUES * rng.standard_normal(rows) - SIGMA_VALUES**2 / 2)
    return np.maximum(1, np.clip(drawn, min(100, genes / 12), genes / 3).astype(np.int64))


def _programmes(genes: int, rng: np.random.Generator) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Alias tables of the gene popularity: thresholds and aliases, both of shape (cell lines, genes)."""
    base = (rng.permutation(genes) + 1 + ZIPF_OFFSET) ** -ZIPF_EXPONENT
    thresholds = np.empty((CELL_LINES, genes), np.uint32)
    aliases = np.empty((CELL_LINES, genes), np.int32)
    for line in range(CELL_LINES):
        weights = base * np.exp(SIGMA_CELL_LINE * rng.standard_normal(genes))
        weights[rng.integers(0, genes, min(MARKERS, genes // 20))] *= FOLD
        _alias_table(weights * (genes / weights.sum()), thresholds[line], aliases[line])
    return thresholds, aliases


@numba.njit(cache=True)
def _alias_table(scaled: NDArray[np.float64], thresholds: NDArray[np.uint32], aliases: NDArray[np.int32]) -> None:
    """Vose's alias method for weights with mean 1: a draw above a gene's threshold goes to the gene's alias."""
    genes = len(scaled)
    small, large = np.empty(genes, np.int32), np.empty(genes, np.int32)
    n_small = n_large = 0
    for gene in range(genes):
        thresholds[gene], aliases[gene] = 0xFFFFFFFF, gene
        if scaled[gene] < 1:
            small[n_small] = gene
            n_small += 1
        else:
            large[n_large] = gene
            n_large += 1
    while n_small and n_large:
        n_small -= 1
        poor, rich = small[n_small], large[n_large - 1]
        thresholds[poor], aliases[poor] = np.uint32(scaled[poor] * 0xFFFFFFFF), rich
        scaled[rich] -= 1 - scaled[poor]
        if scaled[rich] < 1:
            n_large -= 1
            small[n_small] = rich
            n_small += 1


# ---- drawing counts


@numba.njit
def _mixed(state: np.uint64) -> np.uint64:
    """The output of SplitMix64 (Steele, Lea and Flood 2014) for a state."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@numba.njit(parallel=True, cache=True)
def _draw_rows(
    start: tuple[int, int],
    indptr: NDArray[np.int64],
    labels: tuple[NDArray[np.int8], NDArray[np.int16]],
    programmes: tuple[NDArray[np.uint32], NDArray[np.int32]],
    drug_genes: NDArray[np.int32],
    out: tuple[NDArray[np.int32], NDArray[np.float32]],
) -> None:
    """Fills the rows of a window. `start` is (seed, first row); the seed and the row number determine a row's draws.

    The rows of a job share one set of counters, so that clearing costs time per value and not per gene.
    """
    seed, first_row = start
    cell_lines, drugs = labels
    columns, counts = out
    rows, genes = len(indptr) - 1, programmes[0].shape[1]
    for stride in numba.prange(_STRIDES):
        counters = np.zeros(genes, np.int32)
        seen = np.zeros((genes + 63) // 64, np.uint64)
        for row in range(stride * rows // _STRIDES, (stride + 1) * rows // _STRIDES):
            here = slice(indptr[row], indptr[row + 1])
            state = _mixed(_mixed(np.uint64(seed)) + np.uint64(first_row + row + 1))
            thresholds, aliases = programmes[0][cell_lines[row]], programmes[1][cell_lines[row]]
            share = np.uint64(0 if drugs[row] == DRUGS else int(DRUG_SHARE * 65536))
            _draw(state, len(columns[here]), thresholds, aliases, drug_genes[drugs[row]], share, counters, seen)
            _emit(counters, seen, columns[here], counts[here])


@numba.njit
def _draw(state, wanted, thresholds, aliases, drug_genes, share, counters, seen):  # noqa: ANN001, ANN202, PLR0913
    """Draws molecules until `wanted` distinct genes have been counted."""
    genes = np.uint64(len(thresholds))
    low = np.uint64(0xFFFFFFFF)
    while wanted > 0:
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = _mixed(state)
        if (bits & np.uint64(0xFFFF)) < share:
            gene = np.int64(drug_genes[(bits >> np.uint64(32)) % np.uint64(len(drug_genes))])
        else:
            gene = np.int64(((bits >> np.uint64(32)) * genes) >> np.uint64(32))
            # mixes the low half again, because its bits have already decided about the drug
            if (_mixed(bits) & low) >= np.uint64(thresholds[gene]):
                gene = np.int64(aliases[gene])
        if counters[gene] == 0:
            wanted -= 1
            seen[gene >> 6] |= np.uint64(1) << np.uint64(gene & 63)
        counters[gene] += 1


@numba.njit
def _emit(counters, seen, columns, counts):  # noqa: ANN001, ANN202
    """Writes the counted genes in ascending order and clears the counters."""
    at = 0
    for word in range(len(seen)):
        bits = seen[word]
        seen[word] = 0
        gene = word * 64
        while bits:
            if bits & np.uint64(1):
                columns[at], counts[at] = gene, counters[gene]
                counters[gene] = 0
                at += 1
            bits >>= np.uint64(1)
            gene += 1


# ---- the file


def _create_matrix(file: h5py.File, indptr: NDArray[np.int64], genes: int) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Creates an uninitialised csr_matrix X, contiguous on disk. Returns its data and indices.

    indptr has the dtype of the indices, as in every matrix that SciPy makes, if that can hold it. With two dtypes SciPy
    would convert all indices whenever it takes some rows.
    """
    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
    group.attrs["shape"] = np.array([len(indptr) - 1, genes], np.int64)
    fits = indptr[-1] <= np.iinfo(np.int32).max
    group.create_dataset("indptr", data=indptr.astype(np.int32) if fits else indptr)
    indices = group.create_dataset("indices", shape=int(indptr[-1]), dtype=np.int32)
    values = group.create_dataset("data", shape=int(indptr[-1]), dtype=np.float32)
    return values, indices


def _write_the_rest(file: h5py.File, obs: pd.DataFrame, var: pd.DataFrame) -> None:
    anndata.io.write_elem(file, "obs", obs)
    anndata.io.write_elem(file, "var", var)
    for name in ("layers", "obsm", "obsp", "uns", "varm", "varp"):
        anndata.io.write_elem(file, name, {})


def main() -> None:
    """Writes one file and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--genes", type=int, default=62_710)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help="also convert the file into this store")
    parser.add_argument("--copies", type=int, default=1, help="copies of the file in --store (default: %(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="also compress some chunks and report their bytes per value"
    )
    options = parser.parse_args()
    figures = generate(options.path, rows=options.rows, genes=options.genes, seed=options.seed)
    if options.check:
        figures["stored_bytes_per_value"] = stored_bytes_per_value(options.path)
    if options.store:
        figures["store"] = convert(options.path, options.store, copies=options.copies)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
