"""Layout "packed": the stored values in narrow dtypes, and what PackedRows makes of them."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import anndata as ad
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import SMALL, assert_same, assert_same_minibatches, counts, of_genes, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.testing import assert_resumes_anywhere

pytestmark = pytest.mark.any_version

SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


def store_of(adata: ad.AnnData, path: Path, **options: Any) -> str:
    write_store(adata, path, path.with_suffix(".tmp"), **options)
    return str(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    adata = counts(203, 300)
    adata.layers["dense"] = counts(203, 300, density=0.9, seed=5).X.toarray()
    adata.layers["small"] = adata.X.copy()
    adata.layers["small"].data = adata.X.data % 7
    adata.layers["halves"] = (adata.X / 8).astype(np.float32)
    return store_of(adata, tmp_path_factory.mktemp("packed") / "s.zarr")


def packed(*parts: Any, n_genes: int = 5) -> zl.PackedRows:
    indptr, genes, values = parts
    return zl.PackedRows(torch.tensor(indptr, dtype=torch.int32), genes, values, n_genes)


ROWS = packed(
    [0, 2, 2, 5],
    torch.tensor([1, 4, 0, 2, 3]).to(torch.uint16),
    torch.tensor([3, 65_535, 1, 2, 9]).to(torch.uint16),
)
DENSE = torch.tensor([[0, 3, 0, 0, 65_535], [0, 0, 0, 0, 0], [1, 0, 2, 9, 0]])
EMPTY = packed([0, 0, 0], torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))
NO_ROWS = packed([0], torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.float32))


# ---- the values of a loader


@pytest.mark.every(8)
@pytest.mark.parametrize("x", ["X", "layers/small", "layers/halves", "layers/dense"])
@pytest.mark.parametrize("genes", [None, [7, 2, 250, 299]], ids=["all genes", "some genes"])
@pytest.mark.parametrize("mirrored", [False, True], ids=["", "mirror"])
def test_values_equal_those_of_other_layouts(store, tmp_path, x, genes, mirrored):
    dataset = zl.open_dataset(store, cache=tmp_path if mirrored else None)
    dataset, options = of_genes(dataset, genes), {**SIZES, "x": x, "obs": ["cell_type"]}
    epochs = [zl.Loader(dataset, layout=layout, **options) for layout in ("packed", "csr", "dense")]
    stored = {"X": torch.uint16, "layers/small": torch.uint8, "layers/halves": torch.float32}
    for narrow, csr, dense in zip(*epochs, strict=True):
        assert narrow.x.values.dtype == stored.get(x, torch.uint16)
        assert narrow.x.genes.dtype == (torch.uint8 if genes else torch.uint16)
        assert_same(narrow.x.csr(), csr.x)
        assert_same(narrow.x.dense(), dense.x)
        assert_same(narrow.obs["cell_type"], csr.obs["cell_type"])
        assert narrow.x.shape == csr.x.shape == (len(narrow.x), narrow.x.n_genes)


def test_it_is_a_third_of_the_bytes(store):
    narrow, csr = (
        next(iter(zl.Loader(zl.open_dataset(store), layout=layout, **SIZES))).x for layout in ("packed", "csr")
    )
    assert narrow.nbytes < 0.55 * (csr.values().nbytes + csr.col_indices().nbytes)
    assert narrow.nbytes == 9 * 4 + 4 * len(narrow.values)  # uint16 genes and counts


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("first", "second", "united"),
    [
        ("uint8", "uint16", torch.uint16),
        ("uint8", "uint8", torch.uint8),
        ("uint16", "float32", torch.float32),
        ("float16", "float16", torch.float32),
        ("uint8", "float16", torch.float32),
        ("uint16", "float16", torch.float32),
        ("int64", "uint8", torch.int64),
        ("bool", "uint8", torch.uint8),
        ("bool", "bool", torch.bool),
        ("uint32", "uint8", torch.uint32),
        ("float64", "int8", torch.float64),
    ],
)
def test_stores_of_several_dtypes_have_their_common_one(tmp_path, first, second, united):
    stores, wanted = [], []
    for number, dtype in enumerate((first, second)):
        adata = counts(40, 30, seed=number)
        values = (adata.X.data % 100 + 1).astype(dtype)
        adata.X.data = values.astype(np.float64)
        wanted.append(adata.X.toarray())
        adata.X.data = values
        stores.append(tmp_path / f"{number}.zarr")
        keep = zl.ConvertOptions(chunk_rows=1, shard_size=2048, preserve_dtype=True)
        zl.convert(adata, stores[-1], options=keep, progress=False)
    loader = zl.Loader(zl.open_dataset(stores), layout="packed", **SIZES)
    for minibatch in loader:
        assert minibatch.x.values.dtype == united  # in every minibatch, whatever stores its rows come from
        found = minibatch.x.dense(torch.float64).numpy()
        np.testing.assert_array_equal(found, np.concatenate(wanted)[minibatch.index.numpy()])


def test_joined_stores_have_united_genes(tmp_path):
    sources = [counts(40, 30, seed=seed) for seed in range(2)]
    sources[1].var_names = [f"gene {gene}" for gene in range(40, 10, -1)]
    stores = [store_of(each, tmp_path / f"{number}.zarr") for number, each in enumerate(sources)]
    for join in ("inner", "outer"):
        dataset = zl.open_dataset(stores, join=join)
        for narrow, csr in zip(*(zl.Loader(dataset, layout=each, **SIZES) for each in ("packed", "csr")), strict=True):
            assert_same(narrow.x.csr(), csr.x)


@pytest.mark.every(2)
@pytest.mark.parametrize(("n_genes", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (70_000, "uint32")])
def test_genes_have_the_smallest_dtype(tmp_path, n_genes, dtype):
    adata = counts(6, n_genes, density=0.9 if n_genes < 1000 else 0.01)
    zl.convert(adata, tmp_path / "s.zarr", options=SMALL, progress=False)
    x = next(iter(zl.Loader(zl.open_dataset(tmp_path / "s.zarr"), layout="packed", shuffle=False))).x
    assert x.genes.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(x.dense().numpy(), adata.X.toarray())
    np.testing.assert_array_equal(x.csr().to_dense().numpy(), adata.X.toarray())
    assert x.padded().genes[1, 0] == adata.X[1].indices[0]


@pytest.mark.slow
def test_several_matrices_views_workers_and_resuming(store):
    dataset = zl.open_dataset(store)

    def make(rows: Any = dataset, **options: Any) -> zl.Loader:
        return zl.Loader(rows, x=["X", "layers/dense"], layout="packed", **SIZES, **options)

    here = list(make())
    assert list(here[0].x) == ["X", "layers/dense"]
    workers = DataLoader(make(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    in_order = {minibatch.index.numpy().tobytes(): minibatch for minibatch in workers}
    assert_same_minibatches([in_order[minibatch.index.numpy().tobytes()] for minibatch in here], here)
    view = dataset.where("n_counts > 0")
    for minibatch in make(view):
        assert minibatch.x["X"].lengths.min() > 0
    assert_resumes_anywhere(lambda **options: zl.Loader(dataset, layout="packed", **SIZES, **options), every=5)


# ---- conversions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversions(dtype):
    if dtype == torch.float16:
        rows, dense = (
            packed([0, 1], torch.tensor([2]).to(torch.uint16), torch.tensor([7])),
            torch.tensor([[0, 0, 7, 0, 0]]),
        )
    else:
        rows, dense = ROWS, DENSE
    assert_same(rows.dense(dtype), dense.to(dtype))
    assert rows.csr(dtype).dtype == dtype
    assert_same(rows.csr(dtype).to_dense(), dense.to(dtype))
    assert rows.csr(dtype).col_indices().dtype == torch.int32


NAMED = [("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), (np.float32, torch.float32)]
NAMED += [(np.dtype("int64"), torch.int64), (float, torch.float64), (ml_dtypes.bfloat16, torch.bfloat16)]
NAMED += [("uint16", torch.uint16), (torch.int16, torch.int16)]


@pytest.mark.parametrize(("given", "dtype"), NAMED, ids=str)
def test_dtypes_have_every_spelling(given, dtype):
    assert_same(ROWS.dense(given), DENSE.to(dtype))
    assert (
        ROWS.csr(given).dtype
        == ROWS.padded(2, given).values.dtype
        == ROWS[:0].padded(dtype=given).values.dtype
        == dtype
    )


@pytest.mark.parametrize("given", ["half", "complex64", torch.complex64, bool, None, 3, "tensor", object])
def test_other_dtypes_are_refused(given):
    for convert in (ROWS.dense, ROWS.csr, lambda dtype: ROWS.padded(2, dtype)):
        with pytest.raises(OptionError, match="dtype must be one of 'float16', 'bfloat16', 'float32'"):
            convert(given)


def test_repeated_genes_are_summed_without_rounding_between():
    genes = torch.tensor([2, 2, 2]).to(torch.uint8)
    rows = packed([0, 3], genes, torch.tensor([256, 1, 1]).to(torch.uint16))
    assert rows.dense(torch.bfloat16)[0].tolist() == [0, 0, 258, 0, 0]  # 256 + 1 would be 256
    assert rows.dense(torch.int32)[0].tolist() == [0, 0, 258, 0, 0]


@pytest.mark.parametrize("length", [None, 0, 1, 2, 3, 7])
def test_padding(length):
    genes, values, mask = ROWS.padded(length, torch.int64)
    width = 3 if length is None else length
    rows = [([1, 4], [3, 65_535]), ([], []), ([0, 2, 3], [1, 2, 9])]
    fill = [max(0, width - len(of_row)) for of_row, _ in rows]
    assert genes.tolist() == [of_row[:width] + [5] * more for (of_row, _), more in zip(rows, fill, strict=True)]
    assert values.tolist() == [of_row[:width] + [0] * more for (_, of_row), more in zip(rows, fill, strict=True)]
    assert mask.tolist() == [[True] * (width - more) + [False] * more for more in fill]
    torch.nn.Embedding(6, 4, padding_idx=5)(genes)


@pytest.mark.parametrize("rows", [EMPTY, NO_ROWS], ids=["empty rows", "no rows"])
def test_nothing(rows):
    assert rows.dense().shape == rows.csr().shape == rows.shape == (len(rows), 5)
    assert rows.padded().genes.shape == (len(rows), 0)
    assert rows.padded(2).genes.tolist() == [[5, 5]] * len(rows)
    assert not rows.padded(2).mask.any()


def test_rows_are_chosen_by_slices_of_neighbours_only():
    for rows in (slice(1, 3), slice(-1, None), slice(2, 1), slice(5, 9), slice(None, None, 1)):
        assert_same(ROWS[rows].dense(torch.int64), DENSE[rows])
    refusals = [
        lambda: next(iter(ROWS)),
        lambda: np.array(ROWS),
        lambda: np.asarray(ROWS, np.float32),
        lambda: list(ROWS),
    ]
    unfit = [slice(None, None, 2), slice(None, None, -1), 0, -1, [1, 2], torch.tensor([True, False, True]), None]
    refusals += [functools.partial(ROWS.__getitem__, rows) for rows in unfit]
    for refusal in refusals:
        with pytest.raises(OptionError, match=r"only slices of rows that follow each other, such as x\[2:5\]"):
            refusal()


def test_it_is_copied_pickled_and_printed():
    for rows in (ROWS, EMPTY, NO_ROWS):
        for other in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows), rows.to("cpu")):
            assert_same(other, rows)
    assert repr(ROWS) == "PackedRows(3 x 5, 5 values, genes torch.uint16, values torch.uint16, cpu)"
    assert pickle.loads(pickle.dumps(ROWS)) != ROWS  # as tensors, which have no truth value
    assert (len(ROWS), ROWS.nbytes, ROWS.device, ROWS.lengths.tolist()) == (3, 36, torch.device("cpu"), [2, 0, 3])
    assert_same(zl.Minibatch(x=ROWS, obs={}, obsm={}, row=DENSE, index=DENSE).to("cpu").x, ROWS)
