"""Matrices of more than 2^31 values, joined and with chosen genes. Their shards are links to a few files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from helpers import dense, write_store

import zloader as zl

pytestmark = pytest.mark.slow

N_GENES, ROWS_PER_SHARD, N_FILES = 20_000, 256, 4
N_SHARDS = 2**31 // (N_GENES * ROWS_PER_SHARD) + 8
N_ROWS = N_SHARDS * ROWS_PER_SHARD
BOUNDARY = 2**31 // N_GENES  # the row that contains value number 2^31
NAMES = [f"gene {gene}" for gene in range(N_GENES)]
FILE_OF_SHARD = np.random.default_rng(0).integers(N_FILES, size=N_SHARDS)
ROWS = [0, BOUNDARY - ROWS_PER_SHARD, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, N_ROWS - ROWS_PER_SHARD, N_ROWS - 1]


def values_of(row: int) -> np.ndarray:
    """The values of a row: they differ between the files and between the rows of a file."""
    number = FILE_OF_SHARD[row // ROWS_PER_SHARD] * ROWS_PER_SHARD + row % ROWS_PER_SHARD
    return ((np.arange(N_GENES) + 7 * number) % 251 + 1).astype(np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all values of all genes in every row."""
    path = tmp_path_factory.mktemp("large") / "large.zarr"
    obs = pd.DataFrame({"lane": np.arange(N_ROWS) % 5}, index=np.arange(N_ROWS).astype(str))
    empty = scipy.sparse.csr_matrix((N_ROWS, N_GENES), dtype=np.uint8)
    write_store(ad.AnnData(empty, obs=obs, var=pd.DataFrame(index=NAMES)), path, path.parent)
    group = zarr.open_group(path / "X", mode="a")
    group.create_array("indptr", data=np.arange(N_ROWS + 1, dtype=np.int64) * N_GENES, overwrite=True)
    per_shard = ROWS_PER_SHARD * N_GENES
    for name, dtype in (("data", np.uint8), ("indices", np.int32)):
        layout = {"chunks": (16 * N_GENES,), "shards": (per_shard,), "dtype": dtype, "overwrite": True}
        array = group.create_array(name, shape=(N_SHARDS * per_shard,), **layout)
        first = {number: int(np.flatnonzero(number == FILE_OF_SHARD)[0]) for number in range(N_FILES)}
        for shard in first.values():
            rows = range(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD)
            written = [values_of(row) if name == "data" else np.arange(N_GENES) for row in rows]
            array[shard * per_shard : (shard + 1) * per_shard] = np.concatenate(written).astype(dtype)
        folder = path / "X" / name / "c"
        for shard, number in enumerate(FILE_OF_SHARD.tolist()):
            if shard != first[number]:
                os.link(folder / str(first[number]), folder / str(shard))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # consolidated metadata is not part of Zarr v3
        zarr.consolidate_metadata(path)
    return path


@pytest.mark.parametrize("cached", [None, "raw"])
def test_rows_beyond_two_to_the_31_values(large: Path, tmp_path: Path, cached: str | None) -> None:
    other = ad.AnnData(
        scipy.sparse.csr_matrix(np.arange(1, 7, dtype=np.float32).reshape(2, 3)),
        obs=pd.DataFrame({"lane": [9, 9]}, index=["x", "y"]),
        var=pd.DataFrame(index=["other", NAMES[-1], NAMES[3]]),
    )
    write_store(other, tmp_path / "other.zarr", tmp_path)
    cache = None if cached is None else zl.Cache(tmp_path / "cache", form=cached)
    whole = zl.open_dataset(large, cache=cache)
    assert whole.n_obs * N_GENES > 2**31
    taken = whole.take(ROWS)
    for place, row in enumerate(ROWS):
        np.testing.assert_array_equal(dense(taken.X[[place]])[0], values_of(row))

    joined = zl.open_dataset([tmp_path / "other.zarr", large], join="outer", cache=cache)
    panel = [NAMES[-1], "other", NAMES[3], NAMES[0]]
    columns = [N_GENES - 1, None, 3, 0]
    wanted = [[0 if column is None else values_of(row)[column] for column in columns] for row in ROWS]
    for layout in ("csr", "dense"):
        loader = zl.Loader(
            joined[:, panel],
            layout=layout,
            sampling=zl.Streaming(indices=[0, 1, *(2 + row for row in ROWS)]),
            batch_size=len(ROWS) + 2,
            obs=["lane"],
        )
        for _ in range(2):
            (minibatch,) = loader
            x = minibatch.x if layout == "dense" else minibatch.x.to_dense()
            assert x.tolist() == [[2, 1, 3, 0], [5, 4, 6, 0], *wanted]
            assert minibatch.obs["lane"].tolist() == [9, 9, *(row % 5 for row in ROWS)]
