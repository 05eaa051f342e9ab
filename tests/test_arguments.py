"""Invalid arguments raise an error that names the argument, before anything else happens."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numcodecs.registry
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from helpers import counts

import zloader as zl
from zloader.common.errors import OptionError, StoreNotFoundError, ZloaderError
from zloader.order.plan import Plan

pytestmark = pytest.mark.any_version

SIZES = {"batch_size": 8, "fetch_factor": 2, "sampling": zl.BlockShuffling(4)}
# Values that a variable may contain by mistake.
ODD: dict[str, Any] = {
    "array": np.array([1, 2]),
    "missing": pd.NA,
    "none": None,
    "text": "nonsense",
    "bytes": b"X",
    "list": [],
    "dict": {},
    "infinite": float("inf"),
    "nan": float("nan"),
    "fraction": 1.5,
    "negative": -1,
    "huge": 10**30,
    "flag": True,
    "object": object(),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    adata = counts(40, 12)
    adata.layers["d"] = adata.X.copy()
    adata.obsm["e"] = np.zeros((40, 2), np.float32)
    store = tmp_path_factory.mktemp("arguments") / "a.zarr"
    zl.convert(adata, store, progress=False)
    return zl.open_dataset(store)


def refuses(match: str, call: Callable[[Any], Any], *allowed: str, values: Iterable[Any] | None = None) -> None:
    """Checks that a call refuses all values, the ODD ones but for those `allowed` by default."""
    odd = [value for name, value in ODD.items() if name not in allowed]
    for value in odd if values is None else values:
        said = None
        try:
            call(value)
        except OptionError as error:
            said = str(error)
        assert said is not None, f"{value!r} was taken"
        assert re.search(match, said, re.DOTALL), (value, said)


def load(dataset: zl.Dataset, **options: Any) -> zl.Minibatch:
    return next(iter(zl.Loader(dataset, **{**SIZES, **options})))


# ---- Loader


@pytest.mark.parametrize(
    "x", ["X/data", "../a/X", "/X", "X/", "", "layers", "layers/", "obsm/e", "raw/X", "x", b"X", 5, ["x"]]
)
def test_unknown_matrices_are_refused(dataset: zl.Dataset, x: Any) -> None:
    with pytest.raises(ZloaderError, match="there are: X, layers/d"):
        load(dataset, x=x)


@pytest.mark.parametrize("option", ["obs", "obsm"])
def test_names_must_be_lists_of_strings(dataset: zl.Dataset, option: str) -> None:
    values = [5, True, [1], [None], [pd.NA], [["e"]], "e", b"e", None, pd.NA, np.array([1])]
    refuses(f"{option} must be a list of names", lambda value: load(dataset, **{option: value}), values=values)


@pytest.mark.every(4)
@pytest.mark.parametrize("names", [["cell_type"], ("cell_type",), np.array(["cell_type"]), pd.Index(["cell_type"])])
def test_names_may_be_any_iterable_of_strings(dataset: zl.Dataset, names: Any) -> None:
    for given in (names, iter(names)):
        loader = zl.Loader(dataset, obs=given, **SIZES)
        assert [list(minibatch.obs) for _ in range(2) for minibatch in loader] == [["cell_type"]] * 2 * len(loader)


# The options, the ODD values that they may have, and the message for all others.
OF_THE_LOADER = {
    **{option: ([], f"{option} must be one of") for option in ["layout"]},
    "dtype": (["none"], "dtype must be one of"),
    "transforms": (["list", "dict"], "transforms must"),
    "batch_transform": (["none"], "batch_transform must be a function of a Minibatch"),
    "drop_last": (["flag"], "drop_last must be True or False"),
    **{
        option: (["none", "huge"], f"{option} must be a whole number")
        for option in ("batch_size", "fetch_factor", "world_size")
    },
}


@pytest.mark.parametrize("option", OF_THE_LOADER)
def test_options_of_the_loader(dataset: zl.Dataset, option: str) -> None:
    allowed, match = OF_THE_LOADER[option]
    refuses(match, lambda value: load(dataset, **{"rank": 0, "world_size": 1, option: value}), *allowed)


def test_lists_with_something_else_than_transforms(dataset: zl.Dataset) -> None:
    refuses("transforms must", lambda value: load(dataset, transforms=[value]), "list", "dict")
    refuses("transforms must", lambda value: load(dataset, transforms={"X": value}), "list", "dict")
    assert load(dataset, dtype=None).x.dtype == torch.float32


# ---- Whole numbers

ORDER = zl.Order(dataset_rows=9, n_rows=9, draw=lambda start, stop, seed, epoch: np.arange(start, stop))
PLAN = {"order": ORDER, "batch_size": 2, "fetch_factor": 2}
MIXED = partial(zl.Mixture, {"a": ([1], 1)})
DRAWN = partial(zl.BlockWeightedSampling, [1.0], block_size=1)
GENEFORMER = partial(zl.tokenizers.Geneformer, {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3}, {"a": 1})
SCGPT = partial(zl.tokenizers.ScGPT, {"<pad>": 0, "<cls>": 1})


@pytest.mark.parametrize(
    ("call", "options", "allowed"),
    [
        (partial(Plan, **PLAN), ["batch_size", "fetch_factor", "world_size", "seed", "epoch"], ["huge"]),
        (partial(Plan, **PLAN), ["rank"], []),
        (zl.BlockShuffling, ["block_size", "n_strata"], ["huge"]),
        (zl.MixtureOfScanners, ["n_scanners", "block_size"], ["huge"]),
        (partial(zl.MixtureOfScanners, 16), ["active"], ["none"]),
        (MIXED, ["block_size"], ["huge"]),
        (MIXED, ["epoch_rows"], ["none", "huge"]),
        (DRAWN, ["block_size"], ["huge"]),
        (DRAWN, ["total_size"], ["none", "huge"]),
        (partial(zl.CellSets, "group"), ["set_size"], ["huge"]),
        (zl.transforms.Downsample, ["counts"], ["huge"]),
        (GENEFORMER, ["max_length"], ["none", "huge"]),
        (SCGPT, ["n_bins"], ["none", "huge"]),
    ],
)
def test_whole_numbers(call: Callable[..., Any], options: list[str], allowed: list[str]) -> None:
    for option in options:
        refuses(rf"\b{option}\b", lambda value, option=option: call(**{option: value}), *allowed)


# ---- Options


@pytest.mark.parametrize("option", ["memory", "in_flight_bytes", "retries", "threads"])
def test_counts_of_fetch_options(option: str) -> None:
    match = f"{option} must be a whole number|{option}: 'nonsense' is not a size"
    refuses(match, lambda value: zl.FetchOptions(**{option: value}))


def test_flags_of_options() -> None:
    refuses("must be True or False", lambda value: zl.ConvertOptions(preserve_dtype=value), "flag")


@pytest.mark.parametrize("option", ["memory", "in_flight_bytes"])
def test_sizes_in_bytes_may_be_strings(option: str) -> None:
    options = zl.FetchOptions(**{option: "32M"})
    assert getattr(options, option) == 32_000_000
    assert options == zl.FetchOptions(**{option: 32_000_000}) == pickle.loads(pickle.dumps(options))
    assert dataclasses.replace(options, retries=3).memory == options.memory


@pytest.mark.parametrize("option", ["chunk_rows", "window_bytes", "shuffle_seed"])
def test_convert_options(option: str) -> None:
    allowed = [] if option == "chunk_rows" else ["none"]
    refuses(f"{option} must be a whole number", lambda value: zl.ConvertOptions(**{option: value}), *allowed)
    refuses("codec must be one of 'lz4'", lambda value: zl.ConvertOptions(codec=value))


def test_a_codec_whose_package_is_missing(monkeypatch):
    monkeypatch.delitem(numcodecs.registry.codec_registry, "pcodec")
    with pytest.raises(OptionError, match=r'needs the package pcodec.*pip install "zloader\[pcodec\]"'):
        zl.ConvertOptions(codec="pcodec")


def test_caches(dataset: zl.Dataset, tmp_path: Path) -> None:
    sizes = [1.5, "1.5", "1.5 B", float("inf"), True, -1, "x", "", [], pd.NA, 0]
    refuses("", lambda value: zl.Cache(tmp_path, max_bytes=value), values=sizes)
    paths = [5, "", b"cache", [], {}, True, 1.5, np.array([1]), "a\0b", pd.NA]
    refuses("a cache is a directory", lambda value: zl.open_dataset(dataset.url, cache=value), values=paths)


# ---- States

NUMBERS = ["epoch", "worker", "of_workers", "of_ranks", "worker_minibatches"]


STRETCHES = [[[1, 1.5]], [[True, 1]], [[1]], [[1, 2, 3]], [[10**30, 1]], [1], 5, None, "12"]


@pytest.mark.parametrize("part", [*NUMBERS, "stretches"])
def test_numbers_in_states(dataset: zl.Dataset, part: str) -> None:
    loader = zl.Loader(dataset, **SIZES)
    values = STRETCHES if part == "stretches" else [*ODD.values(), "1"]
    refuses(
        "the state is damaged", lambda value: loader.load_state_dict(loader.state_dict() | {part: value}), values=values
    )


def test_states_of_other_runs(dataset: zl.Dataset) -> None:
    loader = zl.Loader(dataset, **SIZES)
    for part in loader.state_dict().keys() - {*NUMBERS, "stretches"}:
        refuses(
            "the state is of",
            lambda value, part=part: loader.load_state_dict(loader.state_dict() | {part: value}),
            values=[np.array([1, 2]), pd.NA, [], None],
        )


# ---- Locations


@pytest.mark.parametrize("url", ["s3://b/a/../c", "s3://b/./c", "s3://b/a//c", "gs://b/../c", "http://h/a/../c"])
def test_urls_with_relative_parts(url: str) -> None:
    """Some clients resolve `..` and others do not, so one client might not find the objects that another wrote."""
    for act in (lambda: zl.open_dataset(url), lambda: zl.verify(url), lambda: zl.convert(counts(4, 3), url)):
        with pytest.raises(OptionError, match=r"no part of an object.s key can be"):
            act()


def test_urls() -> None:
    ports = ["http://h:abc/x", "http://h:99999/x", "https://[::1/x"]
    refuses("cannot open", zl.open_dataset, values=ports)
    for act in (zl.open_dataset, zl.verify, lambda url: zl.convert(counts(4, 3), url, progress=False)):
        refuses("", act, values=[5, None, b"a.zarr", "", "a\0b", np.array([1]), object()])
    refuses(
        "storage_options must be a dict",
        lambda options: zl.open_dataset("s3://bucket/a.zarr", storage_options=options),
        values=[[1], 5, "x", [("key", "x")], True],
    )


# ---- Sources and datasets

INVALID_SOURCES = [
    np.zeros((3, 3)),
    pd.DataFrame({"a": [1]}),
    5,
    None,
    sp.csr_matrix((3, 3)),
    sp.coo_matrix((3, 3)),
    b"a.h5ad",
    {"a": 5},
    ad.AnnData,
    [None],
    [[]],
    [counts(4, 3), 5],
]


def test_sources(tmp_path: Path) -> None:
    refuses(
        "sources must be paths, URLs, AnnData in memory, zl.Dataset, zl.Parquet or a zl.RowSource, not",
        lambda source: zl.convert(source, tmp_path / "a.zarr", progress=False),
        values=INVALID_SOURCES,
    )
    assert not (tmp_path / "a.zarr").exists()


def test_a_path_with_a_null_byte(tmp_path: Path) -> None:
    with pytest.raises((OptionError, StoreNotFoundError)):
        zl.convert(f"{tmp_path}/a\0.h5ad", tmp_path / "a.zarr", progress=False)


def test_datasets(dataset: zl.Dataset) -> None:
    for act in (zl.Loader, zl.warm):
        refuses("dataset must be a Dataset from", act, values=[5, None, [], "a.zarr", b"x"])
    for value in (5, [], {}, None, pd.NA, np.array(["cell_type"])):
        with pytest.raises(ZloaderError, match="there is no obs column"):
            dataset.categories(value)
