"""Loaders with tokenizers: the tokens of every row, wherever its counts come from, in any order and after a resume."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from helpers import check_minibatch, counts, of_genes, write_store
from tokenizing import SPECIAL, geneformer_cell, scgpt_cell
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError
from zloader.testing import assert_resumes_anywhere

pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 150, 60
IDS = [f"ENSG{number:05}" for number in range(N_GENES)]
TOKENS = SPECIAL | {name: 4 + number for number, name in enumerate(IDS[5:])}
MEDIANS = {name: 0.5 + number % 7 for number, name in enumerate(IDS)}
NAMES = ("input_ids", "attention_mask")
SIZES: dict[str, Any] = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(4)}


def source() -> Any:
    adata = counts(N_ROWS, N_GENES)
    adata.var["ensembl_id"] = IDS
    adata.layers["halves"] = adata.X / 2
    adata.obs["total"] = np.asarray(adata.X.sum(axis=1)).ravel() * 2
    return adata


ADATA = source()
X = ADATA.X.toarray()


def geneformer(**options: Any) -> zl.tokenizers.Geneformer:
    return zl.tokenizers.Geneformer(TOKENS, MEDIANS, **({"max_length": 18, "genes_by": "ensembl_id"} | options))


def scgpt(**options: Any) -> zl.tokenizers.ScGPT:
    return zl.tokenizers.ScGPT(TOKENS, **({"max_length": 12, "genes_by": "ensembl_id"} | options))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return str(folder / "counts.zarr")


@pytest.fixture
def dataset(store) -> zl.Dataset:
    return zl.open_dataset(store)


def check_geneformer(minibatch: zl.Minibatch, x: np.ndarray = X, names: Any = IDS) -> None:
    tokens = minibatch.tokens
    for at, row in enumerate(minibatch.index.tolist()):
        ids, values = geneformer_cell(x[row], names, TOKENS, MEDIANS, max_length=18)
        n = tokens["lengths"][at]
        assert tokens["input_ids"][at, :n].tolist() == ids
        assert tokens["values"][at, :n].tolist() == np.float32(values).tolist()
        assert not tokens["attention_mask"][at, n:].any()
    assert tokens["input_ids"].shape[1] == tokens["lengths"].max()


def check_scgpt(minibatch: zl.Minibatch, epoch: int, seed: int = 0) -> None:
    tokens = minibatch.tokens
    for at, row in enumerate(minibatch.index.tolist()):
        ids, values = scgpt_cell(X[row], IDS, TOKENS, max_length=12, seed=seed, epoch=epoch, row=row)
        n = tokens["lengths"][at]
        assert (tokens["input_ids"][at, :n].tolist(), tokens["values"][at, :n].tolist()) == (ids, values)


def by_row(minibatches: Any) -> dict[int, list[Any]]:
    """The tokens of each row, without padding."""
    found: dict[int, list[Any]] = {}
    for minibatch in minibatches:
        for row, tokens in by_row_of(minibatch):
            assert row not in found
            found[row] = tokens
    return found


def by_row_of(minibatch: zl.Minibatch) -> Iterator[tuple[int, list[Any]]]:
    tokens = minibatch.tokens
    arrays = (tokens["input_ids"], tokens["values"])
    for at, (row, n) in enumerate(zip(minibatch.index.tolist(), tokens["lengths"].tolist(), strict=True)):
        yield row, [array[at, :n].tolist() for array in arrays]


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["local, mirror", "s3, mirror", "local", "s3"])
def test_every_row_has_its_tokens_wherever_it_comes_from(place, store, request, tmp_path):
    url, storage_options = store, None
    if "s3" in place:
        s3 = request.getfixturevalue("s3")
        url, storage_options = s3.url("counts.zarr"), s3.storage_options
        write_store(ADATA, url, tmp_path, storage_options=storage_options)
    cache = tmp_path / "cache" if "mirror" in place else None
    dataset = zl.open_dataset(url, cache=cache, storage_options=storage_options)
    ranked, binned = (zl.Loader(dataset, tokens=tokens, obs=["lane"], **SIZES) for tokens in (geneformer(), scgpt()))
    for epoch in range(2):
        rows = []
        for minibatch in ranked:
            rows.append(check_minibatch(minibatch, ADATA))
            check_geneformer(minibatch)
        assert sorted(np.concatenate(rows)) == list(range(N_ROWS))
        for minibatch in binned:
            check_scgpt(minibatch, epoch)


def test_tokens_alone(dataset):
    for minibatch in zl.Loader(dataset, x=None, tokens=geneformer(), **SIZES):
        assert minibatch.x is None
        check_geneformer(minibatch)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dense"},
        {"layout": "packed"},
        {"dtype": "int32"},
        {"x": "layers/halves", "dtype": "float64"},
        {"x": ["X"]},
        {
            "transforms": [zl.transforms.Clip(0, 1), zl.transforms.LogNormalize(1e4)],
            "batch_transform": lambda each: each,
        },
    ],
    ids=["dense", "packed", "int32", "another matrix", "several matrices", "transforms"],
)
def test_tokens_are_made_of_counts_as_stored_whatever_x_is(dataset, options):
    for minibatch in zl.Loader(dataset, tokens=geneformer(), **SIZES, **options):
        check_geneformer(minibatch)
        assert minibatch.x is not None


def test_tokens_of_another_matrix_and_of_chosen_genes(dataset):
    for minibatch in zl.Loader(dataset, x=None, tokens=geneformer(x="layers/halves"), **SIZES):
        check_geneformer(minibatch, X / 2)
    chosen = [50, 7, 30, *range(10, 25)]
    for x in (None, "X"):
        for minibatch in zl.Loader(dataset[:, chosen], x=x, tokens=geneformer(), **SIZES):
            check_geneformer(minibatch, X[:, chosen], [IDS[gene] for gene in chosen])


def test_tokens_are_a_dict_of_tensors(dataset):
    tokens = next(iter(zl.Loader(dataset, tokens=geneformer(), x=None, **SIZES))).tokens
    assert [*tokens] == ["input_ids", "values", "attention_mask", "lengths"]
    with pytest.raises(MissingColumnError, match="the minibatch has no 'labls' here, only: input_ids, values"):
        tokens["labls"]
    again = pickle.loads(pickle.dumps(tokens))
    assert all(torch.equal(again[name], tensor) for name, tensor in tokens.items())


@pytest.mark.parametrize("dtype", [torch.int32, "torch.int32", np.int32])
def test_ids_have_any_spelling_of_their_dtype(dataset, dtype):
    loader = zl.Loader(dataset, tokens=scgpt(dtype=dtype), x=None, **SIZES)
    assert next(iter(loader)).tokens["input_ids"].dtype == torch.int32


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_counts_that_float32_cannot_hold(tmp_path, dtype):
    """And matrices stored as float64 and as dense."""
    adata = source()
    adata.X = np.where(X > 0, X + 2.0**27, 0).astype(dtype)
    zl.convert(adata, tmp_path / "a.zarr", options=zl.ConvertOptions(preserve_dtype=True), progress=False)
    for minibatch in zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), x=None, tokens=geneformer(), **SIZES):
        check_geneformer(minibatch, adata.X)


def test_stores_with_different_genes(tmp_path):
    other = source()[:40, ::-2].copy()
    other.obs_names = [f"other {name}" for name in other.obs_names]
    for name, adata in (("one", ADATA), ("other", other)):
        zl.convert(adata, tmp_path / f"{name}.zarr", progress=False)
    urls = [tmp_path / "one.zarr", tmp_path / "other.zarr"]
    dataset = zl.open_dataset(urls, join="outer", genes_by="ensembl_id")
    position = dataset.var_names.get_indexer(other.var["ensembl_id"])
    joined = np.zeros((40, N_GENES))
    joined[:, position] = other.X.toarray()
    assert dataset.var_names.tolist() == IDS
    seen = 0
    for minibatch in zl.Loader(dataset, tokens=geneformer(genes_by=None), **SIZES):
        check_geneformer(minibatch, np.concatenate([X, joined]))
        seen += len(minibatch)
    assert seen == N_ROWS + 40


def test_totals_of_an_obs_column(dataset):
    plain, scaled = (
        by_row(zl.Loader(dataset.where("lane != 1"), tokens=geneformer(n_counts=column), **SIZES))
        for column in (None, "total")
    )
    assert plain.keys() == scaled.keys()
    for row, (ids, values) in plain.items():
        assert scaled[row][0] == ids
        np.testing.assert_allclose(np.multiply(scaled[row][1], 2), values, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [geneformer, scgpt])
def test_tokens_do_not_depend_on_order_batch_size_workers_ranks_and_memory(dataset, make):
    wanted = by_row(zl.Loader(dataset, tokens=make(), **SIZES))
    assert len(wanted) == N_ROWS
    small = zl.FetchOptions(memory="16MiB", threads=1)
    others = [
        [zl.Loader(dataset, x=None, tokens=make(), batch_size=31, shuffle=False, options=small)],
        [zl.Loader(dataset, tokens=make(), **SIZES, rank=rank, world_size=2) for rank in range(2)],
    ]
    for loaders in others:
        assert by_row(minibatch for loader in loaders for minibatch in loader) == wanted
    loader = pickle.loads(pickle.dumps(zl.Loader(dataset, tokens=make(), **SIZES)))
    in_workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert by_row(in_workers) == wanted
    loader.set_epoch(1)
    assert (by_row(loader) != wanted) == (make is scgpt)  # which samples genes anew


def test_a_row_that_comes_twice_has_the_same_tokens_both_times(dataset):
    weights = np.where(np.arange(N_ROWS) < 40, 1.0, 0.0)
    sampling = zl.BlockWeightedSampling(weights=weights, block_size=4, total_size=200)
    loader = zl.Loader(dataset, x=None, tokens=scgpt(), **SIZES | {"sampling": sampling})
    seen: dict[int, list[Any]] = {}
    for minibatch in loader:
        for row, tokens in by_row_of(minibatch):
            assert seen.setdefault(row, tokens) == tokens
    assert len(seen) <= 40


def test_genes_without_an_id_have_no_token(tmp_path):
    adata = source()
    ids = pd.Series(IDS, index=adata.var_names, dtype=object)
    ids.iloc[[10, 20]] = None
    adata.var["id"] = ids.astype("category")
    zl.convert(adata, tmp_path / "a.zarr", progress=False)
    names = [None if gene in (10, 20) else name for gene, name in enumerate(IDS)]
    for minibatch in zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), tokens=geneformer(genes_by="id"), **SIZES):
        check_geneformer(minibatch, names=names)


def test_it_resumes_anywhere(dataset):
    def described(minibatch: zl.Minibatch) -> list[Any]:
        tokens = minibatch.tokens
        return [tensor.tolist() for tensor in (tokens["input_ids"], tokens["values"], minibatch.index)]

    assert_resumes_anywhere(
        lambda: zl.Loader(dataset, x=None, tokens=scgpt(), seed=3, **SIZES), described=described, every=4
    )


def test_a_state_is_that_of_a_loader_without_tokens(dataset):
    loader = zl.Loader(dataset, tokens=scgpt(), **SIZES)
    plain = zl.Loader(dataset, **SIZES)
    for minibatch, without in zip(loader, plain, strict=True):
        assert minibatch.index.tolist() == without.index.tolist()
        assert loader.state_dict() == plain.state_dict()


def test_tensors_have_the_dtypes_asked_for_and_move_with_the_minibatch(dataset):
    loader = zl.Loader(dataset, tokens=scgpt(dtype="int32", pad_to=12), **SIZES)
    minibatch = next(iter(loader))
    moved = minibatch.to("meta").tokens
    for name, dtype in {
        "input_ids": torch.int32,
        "values": torch.float32,
        "attention_mask": torch.bool,
    }.items():
        assert minibatch.tokens[name].dtype == dtype
        assert minibatch.tokens[name].shape == moved[name].shape == (16, 12)
        assert moved[name].device.type == "meta"
    assert minibatch.tokens["lengths"].dtype == torch.int64
    assert next(iter(zl.Loader(dataset, **SIZES))).tokens is None


@pytest.mark.parametrize("make", [geneformer, scgpt])
def test_the_bound_for_memory_holds(dataset, make):
    loader = zl.Loader(dataset, tokens=make(), **SIZES)
    for minibatch in loader:
        tokens = minibatch.tokens
        arrays = (tokens["input_ids"], tokens["values"], tokens["attention_mask"], tokens["lengths"])
        n_bytes = sum(array.numel() * array.element_size() for array in arrays)
        assert n_bytes <= loader.recipes.tokenizer.n_bytes((X[minibatch.index] > 0).sum(axis=1)) <= 3 * n_bytes


REFUSED = {
    "no tokenizer": ({"tokens": "geneformer"}, "tokens must be a zl.tokenizers.Geneformer or zl.tokenizers.ScGPT"),
    "no gene": (
        {"tokens": scgpt(genes_by=None)},
        r"none of the 60 genes of X of \S+ is in the vocabulary: the dataset has names such as 'gene 0'.*genes_by",
    ),
    "no chosen gene": ({"tokens": scgpt(), "genes": [0, 1]}, "none of the 2 genes of X of"),
    "chosen genes, and transforms that need all": (
        {"tokens": scgpt(), "genes": [6, 7], "transforms": [zl.transforms.Normalize(1e4)]},
        "transforms of 'X' need all genes, and tokens of it only those of the panel",
    ),
    "totals": ({"tokens": geneformer(n_counts="donor")}, "n_counts='donor' must be an obs column of numbers"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_when_the_loader_is_made(dataset, options, message):
    dataset = of_genes(dataset, options.pop("genes", None))
    with pytest.raises(OptionError, match=message):
        zl.Loader(dataset, **options)


@pytest.mark.parametrize("options", [{"genes_by": "ensembl"}, {"n_counts": "totals"}])
def test_unknown_columns_are_refused(dataset, options):
    with pytest.raises(MissingColumnError, match=r"Did you mean 'ensembl_id'|Did you mean 'total'"):
        zl.Loader(dataset, tokens=geneformer(**options))
    for each in options:
        with pytest.raises(MissingColumnError, match="column 5"):
            zl.Loader(dataset, tokens=geneformer(**{each: 5}))


def test_negative_values_name_the_store_and_the_row(tmp_path):
    adata = source()
    scaled = X.copy()
    scaled[77, 3] = -2.5
    adata.X = scipy.sparse.csr_matrix(scaled)
    zl.convert(adata, tmp_path / "a.zarr", progress=False)
    loader = zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), tokens=scgpt(), **SIZES)
    with pytest.raises(OptionError, match=r"X of \S+a.zarr holds -2.5 in row 77 of the dataset.*ScGPT\(.*raw/X"):
        list(loader)
