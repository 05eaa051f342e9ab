"""Predicted costs of an epoch, compared with the statistics of a real one."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr.errors
from helpers import counts, fetch_options, write_store

import zloader as zl
from zloader.common.errors import FormatError, MissingObjectError
from zloader.insight.cost import EpochCost, epoch_costs
from zloader.insight.summary import summarize

pytestmark = pytest.mark.any_version

NARROW = fetch_options(gap_bytes=100, max_read_bytes=4096)  # so that few chunks share a read
LOADERS = {
    "blocks": {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(block_size=8), "options": NARROW},
    "rows": {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(block_size=1), "options": NARROW},
    "subset": {"batch_size": 7, "fetch_factor": 3, "sampling": zl.Streaming(indices=np.arange(5, 700, 3))},
    "mixture": {
        "batch_size": 16,
        "fetch_factor": 4,
        "sampling": zl.Mixture({"a": (range(600), 0.6), "b": (range(600, 650), 0.4)}, block_size=8),
        "options": NARROW,
    },
    "one fetch": {"sampling": zl.BlockShuffling(block_size=64)},
    "rank 1 of 3": {"batch_size": 8, "fetch_factor": 4, "rank": 1, "world_size": 3, "sampling": zl.Streaming()},
    "nothing": {"batch_size": 1024, "drop_last": True},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with 62 shards per array."""
    tmp = tmp_path_factory.mktemp("cost")
    write_store(counts(700, 300), tmp / "cells.zarr", tmp)
    return tmp / "cells.zarr"


def write_plainly(adata: ad.AnnData, dest: Path, **options: Any) -> None:
    """Writes a store with anndata, without shards."""
    adata.obs["donor"] = adata.obs["donor"].astype("category")
    with ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        adata.write_zarr(dest, **options)


def spent(loader: zl.Loader) -> EpochCost:
    for _ in loader:
        pass
    done = loader.statistics()
    return EpochCost(gets=done.gets, bytes_read=done.bytes_read, exact=True)


@pytest.mark.every(7)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_without_a_mirror_the_cost_is_what_is_spent(store, options):
    dataset = zl.open_dataset(store)
    loader = zl.Loader(dataset, **options)
    for epoch in range(2):
        predicted = epoch_costs(dataset, loader.plan(epoch), options=loader.options)
        assert predicted.unmirrored == spent(loader)


@pytest.mark.every(4)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_with_a_mirror_the_cost_is_what_the_first_epoch_spends(store, tmp_path, options):
    dataset = zl.open_dataset(store, cache=tmp_path)
    loader = zl.Loader(dataset, **options)
    predicted = epoch_costs(dataset, loader.plan(0), options=loader.options)
    first = spent(loader)
    # If two concurrent fetches need a chunk, either may read it, which changes how spans coalesce.
    assert first.gets == pytest.approx(predicted.first_mirrored.gets, rel=0.02)
    assert first.bytes_read == pytest.approx(predicted.first_mirrored.bytes_read, rel=0.02)
    loader.set_epoch(0)
    assert spent(loader) == EpochCost(gets=0, bytes_read=0, exact=True)


@pytest.mark.slow
def test_a_dense_matrix_and_one_without_shards(tmp_path):
    adata = counts(200, 50)
    adata.layers["dense"] = adata.X.toarray()
    write_plainly(adata.copy(), tmp_path / "plain.zarr", chunks=(16, 50))
    write_store(adata, tmp_path / "sharded.zarr", tmp_path)
    for name in ("plain", "sharded"):
        dataset = zl.open_dataset(tmp_path / f"{name}.zarr")
        for x in ("X", "layers/dense"):
            loader = zl.Loader(dataset, x=x, batch_size=8, fetch_factor=2, sampling=zl.BlockShuffling(block_size=4))
            assert epoch_costs(dataset, loader.plan(0), x=x).unmirrored == spent(loader)


@pytest.mark.parametrize("name", ["blocks", "rows"])
def test_a_long_epoch_is_estimated(tmp_path, name):
    write_store(counts(3000, 300), tmp_path / "cells.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    loader = zl.Loader(dataset, **LOADERS[name])
    plan = loader.plan(0)
    whole = epoch_costs(dataset, plan, options=NARROW)
    part = epoch_costs(dataset, plan, options=NARROW, most_fetches=plan.n_fetches - 1)
    assert whole.unmirrored.exact
    assert not part.unmirrored.exact
    assert not part.first_mirrored.exact
    for found, wanted in ((part.unmirrored, whole.unmirrored), (part.first_mirrored, whole.first_mirrored)):
        assert found.gets == pytest.approx(wanted.gets, rel=0.1)
        assert found.bytes_read == pytest.approx(wanted.bytes_read, rel=0.1)


def test_what_is_missing_is_an_error(store, tmp_path):
    shutil.copytree(store, tmp_path / "cells.zarr")
    (tmp_path / "cells.zarr" / "X" / "data" / "c" / "3").unlink()
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    plan = zl.Loader(dataset).plan(0)
    with pytest.raises(FormatError, match="there are: X"):
        epoch_costs(dataset, plan, x="layers/none")
    with pytest.raises(MissingObjectError, match="X/data/c/3"):
        epoch_costs(dataset, plan)


def test_summary(tmp_path):
    adata = counts(300, 60)
    adata.layers["doubled"] = adata.X * 2
    adata.layers["dense"] = adata.X.toarray()
    adata.raw = adata[:, :50].copy()
    adata.obsm["X_pca"] = np.zeros((300, 4), np.float32)
    write_store(adata, tmp_path / "cells.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "cells.zarr")
    summary = summarize(dataset)
    assert (summary.rows, summary.genes, summary.fingerprint) == (300, 60, dataset.fingerprint)
    files = [file for file in (tmp_path / "cells.zarr").rglob("*") if file.is_file()]
    assert (summary.objects, summary.stored_bytes) == (len(files), sum(file.stat().st_size for file in files))
    columns = {column.name: (column.kind, column.categories) for column in summary.obs}
    assert columns == {
        "cell_type": ("categorical", 4),
        "donor": ("string", None),
        "n_counts": ("float32", None),
        "passed": ("bool", None),
        "lane": ("int32", None),
    }
    matrices = {matrix.name: matrix for matrix in summary.matrices}
    assert list(matrices) == ["X", "raw/X", "layers/dense", "layers/doubled"]
    assert {name: matrix.genes for name, matrix in matrices.items()}["raw/X"] == 50
    x = matrices["X"]
    assert (x.encoding, x.values, x.density) == ("csr_matrix", adata.X.nnz, adata.X.nnz / 18_000)
    assert matrices["layers/dense"].encoding == "dense"
    indices, data = x.arrays
    assert (indices.dtype, indices.original_dtype) == ("uint8", "int32")
    assert (data.dtype, data.original_dtype) == ("uint16", "float32")
    assert data.decoded_bytes == 2 * adata.X.nnz
    stored = [file.stat().st_size for file in (tmp_path / "cells.zarr/X/data/c").iterdir()]
    assert (data.stored_bytes, data.shards) == (sum(stored), len(stored))
    assert data.chunk_elements * 300 / adata.X.nnz == data.rows_per_chunk
    assert indices.codecs == "delta, bytes, blosc(lz4, bitshuffle), crc32c"
    assert data.codecs == "bytes, blosc(lz4, bitshuffle), crc32c"
    assert x.bytes_per_value == (indices.stored_bytes + data.stored_bytes) / adata.X.nnz
    assert summary.others == ["obsm/X_pca"]
    assert x.decoded_bytes == indices.decoded_bytes + data.decoded_bytes
    assert matrices["layers/dense"].compact_bytes == matrices["layers/dense"].decoded_bytes


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.01, 0.05, 0.3])
def test_the_size_of_a_compact_mirror_is_foretold(tmp_path, density):
    adata = counts(500, 5_000, density=density)
    adata.X.data[:] = 1 + np.random.default_rng(0).geometric(0.5, adata.X.nnz)
    write_store(adata, tmp_path / "cells.zarr", tmp_path)
    (x,) = summarize(zl.open_dataset(tmp_path / "cells.zarr")).matrices
    compact = zl.Cache(tmp_path / "cache", form="compact")
    held = zl.warm(zl.open_dataset(tmp_path / "cells.zarr", cache=compact)).bytes_held
    assert x.compact_bytes == pytest.approx(held, rel=0.2)
    assert not x.at_most


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "counts as floats"])
def test_floats_may_be_counts_so_the_size_of_their_compact_mirror_is_a_bound(tmp_path, whole):
    adata = counts(300, 2_000, density=0.1)
    adata.X = adata.X.astype(np.float32) * (1 if whole else 0.3)
    write_plainly(adata, tmp_path / "cells.zarr")
    (x,) = summarize(zl.open_dataset(tmp_path / "cells.zarr")).matrices
    compact = zl.Cache(tmp_path / "cache", form="compact")
    held = zl.warm(zl.open_dataset(tmp_path / "cells.zarr", cache=compact)).bytes_held
    assert x.at_most
    assert (0.3 if whole else 0.9) * x.compact_bytes < held < 1.05 * x.compact_bytes


def test_a_matrix_that_is_transposed_is_shown_with_the_reason(tmp_path):
    adata = counts(30, 20)
    adata.X = adata.X.tocsc()
    write_plainly(adata, tmp_path / "csc.zarr")
    (x,) = summarize(zl.open_dataset(tmp_path / "csc.zarr")).matrices
    assert x.encoding == "csc_matrix"
    assert not x.arrays
    assert "zloader convert" in str(x.problem)
