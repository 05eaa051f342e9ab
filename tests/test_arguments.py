"""Invalid arguments raise an error that names the argument, before anything else happens."""

from __future__ import annotations

import dataclasses
import pickle
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


def odd_except(*allowed: str) -> list[Any]:
    return [pytest.param(value, id=name) for name, value in ODD.items() if name not in allowed]


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
@pytest.mark.parametrize("names", [5, True, [1], [None], [pd.NA], [["e"]], "e", b"e", None, pd.NA, np.array([1])])
def test_names_must_be_lists_of_strings(dataset: zl.Dataset, option: str, names: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} must be a list of names"):
        load(dataset, **{option: names})


@pytest.mark.every(4)
@pytest.mark.parametrize("names", [["cell_type"], ("cell_type",), np.array(["cell_type"]), pd.Index(["cell_type"])])
def test_names_may_be_any_iterable_of_strings(dataset: zl.Dataset, names: Any) -> None:
    for given in (names, iter(names)):
        loader = zl.Loader(dataset, obs=given, **SIZES)
        assert [list(minibatch.obs) for _ in range(2) for minibatch in loader] == [["cell_type"]] * 2 * len(loader)


@pytest.mark.parametrize("option", ["layout", "dtype", "remainder", "locality"])
@pytest.mark.parametrize("value", odd_except())
def test_options_with_a_fixed_set_of_words(dataset: zl.Dataset, option: str, value: Any) -> None:
    if option == "dtype" and value is None:
        assert load(dataset, dtype=None).x.dtype == torch.float32
        return
    with pytest.raises(OptionError, match=f"{option} must be one of"):
        load(dataset, **{option: value})


@pytest.mark.parametrize("value", odd_except("list", "dict"))
def test_transforms(dataset: zl.Dataset, value: Any) -> None:
    for transforms in (value, [value], {"X": value}):
        with pytest.raises(OptionError, match="transforms must"):
            load(dataset, transforms=transforms)


@pytest.mark.parametrize("option", ["fetch_transform", "batch_transform"])
@pytest.mark.parametrize("value", odd_except("none"))
def test_functions(dataset: zl.Dataset, option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} must be a function of a Minibatch"):
        load(dataset, **{option: value})


@pytest.mark.parametrize("value", odd_except("flag"))
def test_flags(dataset: zl.Dataset, value: Any) -> None:
    for make in (
        lambda: load(dataset, drop_last=value),
        lambda: load(dataset, obs_names=value),
        lambda: zl.FetchOptions(tune_malloc=value),
        lambda: zl.ConvertOptions(preserve_dtype=value),
    ):
        with pytest.raises(OptionError, match="must be True or False"):
            make()


@pytest.mark.parametrize("option", ["batch_size", "fetch_factor", "world_size"])
@pytest.mark.parametrize("value", odd_except("none", "huge"))
def test_counts(dataset: zl.Dataset, option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} must be a whole number"):
        load(dataset, **{"rank": 0, "world_size": 1, option: value})


FETCH_COUNTS = [
    "in_flight_bytes",
    "buffer_bytes",
    "ready_bytes",
    "gap_bytes",
    "least_read_bytes",
    "max_read_bytes",
    "prefetch",
    "retries",
    "threads",
]


SIZES_OF_FETCH_OPTIONS = ["memory", *(option for option in FETCH_COUNTS if option.endswith("bytes"))]


@pytest.mark.parametrize("option", ["memory", *FETCH_COUNTS])
@pytest.mark.parametrize("value", odd_except())
def test_counts_of_fetch_options(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option} must be a whole number|{option}: 'nonsense' is not a size"):
        zl.FetchOptions(**{option: value})


@pytest.mark.parametrize("option", SIZES_OF_FETCH_OPTIONS)
def test_sizes_in_bytes_may_be_strings(option: str) -> None:
    options = zl.FetchOptions(**{option: "32M"})
    assert getattr(options, option) == 32_000_000
    assert options == zl.FetchOptions(**{option: 32_000_000}) == pickle.loads(pickle.dumps(options))
    assert dataclasses.replace(options, prefetch=3).memory == options.memory


@pytest.mark.parametrize("value", odd_except())
def test_convert_options(value: Any) -> None:
    for option in ("chunk_rows", "window_bytes", "shuffle_seed"):
        if value is not None or option == "chunk_rows":
            with pytest.raises(OptionError, match=f"{option} must be a whole number"):
                zl.ConvertOptions(**{option: value})
    with pytest.raises(OptionError, match="codec must be one of 'lz4'"):
        zl.ConvertOptions(codec=value)


def test_a_codec_whose_package_is_missing(monkeypatch):
    monkeypatch.delitem(numcodecs.registry.codec_registry, "pcodec")
    with pytest.raises(OptionError, match=r'needs the package pcodec.*pip install "zloader\[pcodec\]"'):
        zl.ConvertOptions(codec="pcodec")


@pytest.mark.parametrize("value", [1.5, "1.5", "1.5 B", float("inf"), True, -1, "x", "", [], pd.NA, 0])
def test_cache_sizes(tmp_path: Path, value: Any) -> None:
    with pytest.raises(OptionError):
        zl.Cache(tmp_path, max_bytes=value)


@pytest.mark.parametrize("value", [5, "", b"cache", [], {}, True, 1.5, np.array([1]), "a\0b", pd.NA])
def test_a_cache_must_be_a_directory(dataset: zl.Dataset, value: Any) -> None:
    with pytest.raises(OptionError, match="a cache is a directory"):
        zl.open_dataset(dataset.url, cache=value)


# ---- States

NUMBERS = ["epoch", "worker", "of_workers", "of_ranks", "worker_minibatches"]


@pytest.mark.parametrize("part", NUMBERS)
@pytest.mark.parametrize("value", [*odd_except(), pytest.param("1", id="digits")])
def test_numbers_in_states(dataset: zl.Dataset, part: str, value: Any) -> None:
    loader = zl.Loader(dataset, **SIZES)
    with pytest.raises(OptionError, match="the state is damaged"):
        loader.load_state_dict(loader.state_dict() | {part: value})


@pytest.mark.parametrize("stretches", [[[1, 1.5]], [[True, 1]], [[1]], [[1, 2, 3]], [[10**30, 1]], [1], 5, None, "12"])
def test_stretches_in_states(dataset: zl.Dataset, stretches: Any) -> None:
    loader = zl.Loader(dataset, **SIZES)
    with pytest.raises(OptionError, match="the state is damaged"):
        loader.load_state_dict(loader.state_dict() | {"stretches": stretches})


@pytest.mark.parametrize("value", [np.array([1, 2]), pd.NA, [], None])
def test_states_of_other_runs(dataset: zl.Dataset, value: Any) -> None:
    loader = zl.Loader(dataset, **SIZES)
    for part in loader.state_dict().keys() - {*NUMBERS, "stretches"}:
        with pytest.raises(OptionError, match="the state is of"):
            loader.load_state_dict(loader.state_dict() | {part: value})


# ---- Locations


@pytest.mark.parametrize("url", ["s3://b/a/../c", "s3://b/./c", "s3://b/a//c", "gs://b/../c", "http://h/a/../c"])
def test_urls_with_relative_parts(url: str) -> None:
    """Some clients resolve `..` and others do not, so one client might not find the objects that another wrote."""
    for act in (lambda: zl.open_dataset(url), lambda: zl.verify(url), lambda: zl.convert(counts(4, 3), url)):
        with pytest.raises(OptionError, match=r"no part of an object.s key can be"):
            act()


@pytest.mark.parametrize("url", ["http://h:abc/x", "http://h:99999/x", "https://[::1/x"])
def test_ports(url: str) -> None:
    with pytest.raises(OptionError, match="cannot open"):
        zl.open_dataset(url)


@pytest.mark.parametrize("url", [5, None, b"a.zarr", "", "a\0b", np.array([1]), object()])
def test_urls(url: Any) -> None:
    for act in (zl.open_dataset, zl.verify, lambda url: zl.convert(counts(4, 3), url, progress=False)):
        with pytest.raises(OptionError):
            act(url)


@pytest.mark.parametrize("options", [[1], 5, "x", [("key", "x")], True])
def test_storage_options(options: Any) -> None:
    with pytest.raises(OptionError, match="storage_options must be a dict"):
        zl.open_dataset("s3://bucket/a.zarr", storage_options=options)


# ---- Sources and datasets

INVALID_SOURCES = {
    "array": np.zeros((3, 3)),
    "frame": pd.DataFrame({"a": [1]}),
    "number": 5,
    "none": None,
    "sparse": sp.csr_matrix((3, 3)),
    "coordinates": sp.coo_matrix((3, 3)),
    "bytes": b"a.h5ad",
    "mapping to a number": {"a": 5},
    "class": ad.AnnData,
    "list of none": [None],
    "list of lists": [[]],
    "list with a number": [counts(4, 3), 5],
}


@pytest.mark.parametrize("source", INVALID_SOURCES.values(), ids=INVALID_SOURCES)
def test_sources(dataset: zl.Dataset, tmp_path: Path, source: Any) -> None:
    with pytest.raises(OptionError, match="sources must be paths, URLs or AnnData"):
        zl.convert(source, tmp_path / "a.zarr", progress=False)
    with pytest.raises(OptionError, match="sources must be paths, URLs or AnnData"):
        zl.append(dataset.url, source, progress=False)
    assert not (tmp_path / "a.zarr").exists()


def test_a_path_with_a_null_byte(tmp_path: Path) -> None:
    with pytest.raises((OptionError, StoreNotFoundError)):
        zl.convert(f"{tmp_path}/a\0.h5ad", tmp_path / "a.zarr", progress=False)


@pytest.mark.parametrize("value", [5, None, [], "a.zarr", b"x"])
def test_datasets(value: Any) -> None:
    for act in (zl.Loader, zl.warm, zl.suggest):
        with pytest.raises(OptionError, match="dataset must be a Dataset from"):
            act(value)


@pytest.mark.parametrize("value", [5, [], {}, None, pd.NA, np.array(["cell_type"])])
def test_column_names(dataset: zl.Dataset, value: Any) -> None:
    with pytest.raises(ZloaderError, match="there is no obs column"):
        dataset.categories(value)
