"""Odd elements of an AnnData in memory are stored so that they read back equal, or refused before any write."""

from __future__ import annotations

import datetime
import decimal
import re
import warnings
from collections import OrderedDict
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sources import files

import zloader as zl
from zloader.common.errors import SourceError

N_ROWS, N_GENES = 7, 5


def numbers(n: int, m: int) -> np.ndarray:
    return np.random.default_rng(0).random((n, m))


def as_dask(n: int, m: int, sparse: bool = False) -> Any:
    array = pytest.importorskip("dask.array").from_array(numbers(n, m), chunks=(2, m))
    return array.map_blocks(sp.csr_matrix) if sparse else array


def as_xarray(n: int, m: int) -> Any:
    return pytest.importorskip("xarray").DataArray(numbers(n, m))


# Elements with rows and columns, tested in every place that takes them.
ARRAYS = {
    "xarray": as_xarray,
    "dask": as_dask,
    "dask of sparse": lambda n, m: as_dask(n, m, sparse=True),
    **{
        kind: lambda n, m, kind=kind: sp.random(n, m, 0.5, kind, random_state=0)
        for kind in ("csr", "csc", "coo", "dia")
    },
    "bsr": lambda n, m: sp.bsr_matrix(numbers(n, m)),
    "csr array": lambda n, m: sp.csr_array(numbers(n, m)),
    "masked": lambda n, m: np.ma.array(numbers(n, m), mask=numbers(n, m) > 0.5),
    "masked nowhere": lambda n, m: np.ma.array(numbers(n, m)),
    "float16": lambda n, m: numbers(n, m).astype(np.float16),
    "long double": lambda n, m: numbers(n, m).astype(np.longdouble),
    "complex": lambda n, m: numbers(n, m) * 1j,
    "the other byte order": lambda n, m: numbers(n, m).astype(">f8"),
    "by columns": lambda n, m: np.asfortranarray(numbers(n, m)),
    "three dimensions": lambda n, m: np.ones((n, m, 2)),
    "text": lambda n, m: numbers(n, m).astype(str),
    "objects that are text": lambda n, m: numbers(n, m).astype(str).astype(object),
    "objects that are numbers": lambda n, m: numbers(n, m).astype(object),
    "objects of several kinds": lambda n, m: np.where(numbers(n, m) > 0.5, "a", None),
    "dates": lambda n, m: np.arange(n * m).reshape(n, m).astype("datetime64[s]"),
    "dates without unit": lambda n, m: np.full((n, m), "NaT", "datetime64"),
    "records": lambda n, m: np.array([(1, "a")] * n, dtype=[("number", "i4"), ("text", "U3")]),
    "records of objects": lambda n, m: np.array([(1, None)] * n, dtype=[("number", "i4"), ("any", "O")]),
}

# Columns of n entries, tested in obs, in var, and in data frames elsewhere.
COLUMNS = {
    "categories": lambda n: pd.Categorical.from_codes(np.arange(n) % 3 - 1, ["a", "b"]),
    "categories of objects that are numbers": lambda n: pd.Categorical.from_codes(
        np.arange(n) % 2, pd.Index([1, 2], dtype=object)
    ),
    "categories of intervals": lambda n: pd.cut(np.arange(n), 3),
    "categories of dates": lambda n: pd.Categorical(pd.date_range("2020", periods=n)),
    "categories of dates with a time zone": lambda n: pd.Categorical(pd.date_range("2020", periods=n, tz="UTC")),
    "categories of several kinds": lambda n: pd.Categorical.from_codes(np.arange(n) % 2, [1, "a"]),
    "intervals": lambda n: pd.arrays.IntervalArray.from_breaks(np.arange(n + 1)),
    "periods": lambda n: pd.period_range("2020", periods=n, freq="M"),
    "sparse": lambda n: pd.arrays.SparseArray(np.arange(n) % 2),
    "sparse floats": lambda n: pd.arrays.SparseArray([np.nan, *range(1, n)]),
    "dates": lambda n: pd.date_range("2020", periods=n),
    "dates with a time zone": lambda n: pd.date_range("2020", periods=n, tz="UTC"),
    "durations": lambda n: pd.to_timedelta(np.arange(n), unit="s"),
    "nullable integers": lambda n: pd.array([None, *range(1, n)], dtype="Int64"),
    "nullable floats": lambda n: pd.array([None, *range(1, n)], dtype="Float32"),
    "nullable booleans": lambda n: pd.array([None, *[True] * (n - 1)], dtype="boolean"),
    "nullable text": lambda n: pd.array([None, *["a"] * (n - 1)], dtype="string"),
    "text of which some is missing": lambda n: np.array([None, *["a"] * (n - 1)], object),
    "text and NaN": lambda n: np.array([np.nan, *["a"] * (n - 1)], object),
    "nothing": lambda n: np.full(n, None),
    "objects that are numbers": lambda n: np.arange(n).astype(object),
    "objects that are large numbers": lambda n: np.array([2**70] * n, object),
    "objects that are booleans": lambda n: np.array([None, *[True] * (n - 1)], object),
    "objects of several kinds": lambda n: np.array([1, *["a"] * (n - 1)], object),
    "lists": lambda n: [[1, 2]] * n,
    "sets": lambda n: [{1}] * n,
    "bytes": lambda n: [b"a"] * n,
    "days": lambda n: [datetime.date(2020, 1, 1)] * n,
    "decimal numbers": lambda n: [decimal.Decimal("1.5")] * n,
    "long doubles": lambda n: np.ones(n, np.longdouble),
    "the other byte order": lambda n: np.arange(n, dtype=">i4"),
    "text that is not Unicode": lambda n: ["\udc80"] * n,
}

ANYTHING = {
    **{f"an array: {name}": lambda make=make: make(4, 3) for name, make in ARRAYS.items()},
    **{f"a column: {name}": lambda make=make: pd.Series(make(4)).array for name, make in COLUMNS.items()},
    **{f"a frame: {name}": lambda make=make: pd.DataFrame({"a": make(4)}) for name, make in COLUMNS.items()},
    **{
        f"a value: {value!r}": lambda value=value: value
        for value in (
            None,
            True,
            3,
            2**63,
            2**70,
            1.5,
            float("nan"),
            1j,
            "a",
            "",
            b"a",
            "\udc80",
            np.int8(3),
            np.str_("a"),
        )
    },
    **{
        f"a list: {values!r}": lambda values=values: values
        for values in (
            [],
            [1, 2],
            [1, 2.5],
            ["a", "b"],
            [b"a"],
            [1, "a"],
            ["a", None],
            [None],
            [[1], [2, 3]],
            [{"a": 1}],
        )
    },
    **{
        f"of Python: {value!r}": lambda value=value: value
        for value in ({1}, (1, "a"), range(3), datetime.date(2020, 1, 1), pd.Timestamp("2020"), decimal.Decimal(1), int)
    },
    "an ordered dict": lambda: OrderedDict(b=1, a={"c": np.arange(3)}),
    "an index": lambda: pd.Index(["a"]),
    "a matrix": lambda: np.matrix([[1, 2]]),
    "an empty array": lambda: np.empty((0, 3)),
    "a frame with a number for a name": lambda: pd.DataFrame({0: [1]}),
    "a frame with a name twice": lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]),
    "a frame with a reserved name": lambda: pd.DataFrame({"_index": [1]}),
    "a frame with several indexes": lambda: pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
    "a frame whose index is named as a column": lambda: pd.DataFrame({"a": [1]}, index=pd.Index([2], name="a")),
    **{
        f"a dict with the name {name!r}": lambda name=name: {"inner": {name: 1}}
        for name in (1, None, ("a", "b"), "", ".", "..", "a/b", "/a", "a\0b", "zarr.json", "ä", "__a", "c")
    },
    "a dict of sets": lambda: {"a": {"b": {1}}},
    "a dataset of xarray": lambda: pytest.importorskip("xarray").Dataset({"a": ("x", [1.0])}),
    "an empty dataset of xarray": lambda: pytest.importorskip("xarray").Dataset(),
}
LENGTHS = {"obs": N_ROWS, "var": N_GENES}
SHAPES = {
    "X": (N_ROWS, N_GENES),
    "raw/X": (N_ROWS, N_GENES),
    "layers": (N_ROWS, N_GENES),
    "obsm": (N_ROWS, 3),
    "varm": (N_GENES, 3),
    "raw/varm": (N_GENES, 3),
    "obsp": (N_ROWS, N_ROWS),
}


def plain() -> ad.AnnData:
    obs, var = (pd.DataFrame(index=[f"{axis} {i}" for i in range(n)]) for axis, n in LENGTHS.items())
    return ad.AnnData(sp.csr_matrix(np.eye(N_ROWS, N_GENES, dtype=np.float32)), obs=obs, var=var)


def with_element(place: str, element: Any) -> ad.AnnData:
    """An AnnData with the element at this path."""
    adata = plain()
    holder = plain() if place.startswith("raw/") else adata
    part = place.removeprefix("raw/")
    if isinstance(element, pd.DataFrame) and part != "uns":
        element = element.set_axis(adata.obs_names if part.startswith("obs") else adata.var_names)
    if part == "X":
        holder.X = element
    else:
        getattr(holder, part)["odd"] = element
    if holder is not adata:
        adata.raw = holder
    return adata


def element_of(adata: ad.AnnData, place: str) -> Any:
    holder, part = adata.raw if place.startswith("raw/") else adata, place.removeprefix("raw/")
    return holder.X if part == "X" else getattr(holder, part)["odd"]


def values_of(element: Any) -> Any:
    """The values of any element as Python objects, with None for missing values."""
    if hasattr(element, "compute"):
        element = element.compute()
    if isinstance(element, dict):
        return {name: values_of(value) for name, value in element.items()}
    if isinstance(element, pd.DataFrame):
        return {name: values_of(element[name]) for name in element} | {"": values_of(element.index)}
    if sp.issparse(element):
        return values_of(element.toarray())
    if element is None or np.ndim(element) == 0:
        element = [element]
    if getattr(getattr(element, "dtype", None), "names", None):
        return {name: values_of(element[name]) for name in element.dtype.names}
    objects = np.asarray(element, dtype=object)
    return objects.shape, [None if pd.isna(value) else value for value in objects.ravel()]


@pytest.fixture(scope="module")
def existing(tmp_path_factory):
    """An existing store that a refused conversion must not touch."""
    store = tmp_path_factory.mktemp("existing") / "there.zarr"
    zl.convert(plain(), store, progress=False)
    return store


@pytest.fixture(autouse=True)
def _no_warnings():
    """Silences warnings of pandas and anndata about the odd elements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(place, make, existing, dest):
    """Converts an AnnData with an odd element at this path. Returns whether it was stored."""
    element = make()
    try:
        adata = with_element(place, element)
    except (ValueError, TypeError, AttributeError):  # anndata itself refuses the element
        return None
    before = files(existing)
    try:
        zl.convert(adata, dest, progress=False)
    except SourceError:
        assert not dest.exists()
        with pytest.raises(SourceError, match=place.partition("/")[0]):
            zl.convert(adata, existing, overwrite=True, progress=False)
        assert files(existing) == before
        return False
    assert values_of(element_of(ad.read_zarr(dest), place)) == values_of(element_of(adata, place))
    assert zl.verify(dest, against=adata, progress=False).ok
    return True


# Each kind of array at one place for matrices and at one for other elements. The places take turns.
MATRICES, OTHERS = ("X", "layers", "raw/X"), ("obsm", "varm", "raw/varm", "obsp")
TURNS = [(places[turn % len(places)], name) for turn, name in enumerate(ARRAYS) for places in (MATRICES, OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), TURNS)
def test_arrays(place, name, existing, tmp_path):
    stored = check(place, lambda: ARRAYS[name](*SHAPES[place]), existing, tmp_path / "a.zarr")
    if name in ("csr", "csc", "masked nowhere", "float16", "the other byte order", "by columns"):
        assert stored
    if name in ("masked", "long double", "objects that are numbers", "objects of several kinds"):
        assert not stored


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("place", ["obs", "var"])
def test_columns(place, name, existing, tmp_path):
    stored = check(place, lambda: COLUMNS[name](LENGTHS[place]), existing, tmp_path / "a.zarr")
    assert stored == (name not in REFUSED_COLUMNS)


@pytest.mark.every(8)
@pytest.mark.parametrize("name", COLUMNS)
def test_frames(name, existing, tmp_path):
    stored = check("obsm", lambda: pd.DataFrame({"a": COLUMNS[name](N_ROWS)}), existing, tmp_path / "a.zarr")
    assert stored == (name not in REFUSED_COLUMNS)


REFUSED_COLUMNS = {
    "categories of intervals",
    "categories of dates with a time zone",
    "categories of several kinds",
    "intervals",
    "periods",
    "sparse",
    "sparse floats",
    "dates with a time zone",
    "objects that are large numbers",
    "objects of several kinds",
    "lists",
    "sets",
    "bytes",
    "days",
    "decimal numbers",
    "long doubles",
    "text that is not Unicode",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANYTHING)
def test_uns(name, existing, tmp_path):
    check("uns", ANYTHING[name], existing, tmp_path / "a.zarr")


def test_a_dataset_of_xarray_is_stored_as_the_data_frame_that_it_is(tmp_path):
    xarray = pytest.importorskip("xarray")
    adata = plain()
    rows = {"obs_names": list(adata.obs_names)}
    adata.obsm["odd"] = xarray.Dataset({"a": ("obs_names", np.arange(float(N_ROWS)))}, coords=rows)
    for name, sources, options in (
        ("one", adata, zl.ConvertOptions()),
        ("shuffled", adata, zl.ConvertOptions(shuffle_seed=1)),
    ):
        zl.convert(sources, tmp_path / name, options=options, progress=False)
        out = ad.read_zarr(tmp_path / name)
        rows = out.obs["source_row"] if name == "shuffled" else np.arange(out.n_obs) % N_ROWS
        assert out.obsm["odd"]["a"].tolist() == list(rows)


def test_an_anndata_that_is_read_lazily_is_refused(tmp_path):
    pytest.importorskip("xarray")
    plain().write_h5ad(tmp_path / "a.h5ad")
    lazy = ad.experimental.read_lazy(tmp_path / "a.h5ad")
    with pytest.raises(SourceError, match=r"opened lazily, pass its path or URL, or adata\.to_memory\(\)"):
        zl.convert(lazy, tmp_path / "a.zarr", progress=False)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["a/b", "a\\b", "", ".", "zarr.json", 0, None])
@pytest.mark.parametrize("place", ["layers", "obsm", "varm", "obsp", "uns", "obs", "var"])
def test_names_that_zarr_cannot_have(place, name, existing, tmp_path):
    adata = plain()
    part = getattr(adata, place)
    length = {"obs": N_ROWS, "var": N_GENES, "varm": N_GENES}.get(place, N_ROWS)
    shape = (length,) if place in ("obs", "var") else {"obsp": (length, length)}.get(place, (length, N_GENES))
    if name is None and place == "layers":
        pytest.skip("newer versions of anndata have X there")
    part[name] = np.ones(shape)
    before = files(existing)
    shown = re.escape(repr(name))
    with pytest.raises(SourceError, match=f"^{place} .*the name ({shown}|nan)"):  # pandas 3 turns None into NaN
        zl.convert(adata, existing, overwrite=True, progress=False)
    assert files(existing) == before


@pytest.mark.every(5)
@pytest.mark.parametrize("part", ["layers", "obsm", "varm", "obsp", "varp", "raw/varm", "uns", "obs", "var", "nested"])
def test_backslashes_in_the_names_of_a_file(part, existing, tmp_path):
    """zarr takes them for slashes, so `a\\b` would overwrite an element of the group `a`."""
    adata, ones = plain(), {"obs": np.ones(N_ROWS), "var": np.ones(N_GENES), "nested": np.ones(1)}
    holder = plain() if part == "raw/varm" else adata
    adata.uns["deep"] = {"deeper": {}}
    names = adata.uns["deep"]["deeper"] if part == "nested" else getattr(holder, part.removeprefix("raw/"))
    length = N_GENES if "var" in part else N_ROWS
    names["a\\b"] = ones.get(part, np.ones((length, length if part.endswith("p") else N_GENES)))
    if holder is not adata:
        adata.raw = holder
    adata.write_h5ad(tmp_path / "a.h5ad")
    before = files(existing)
    at = "uns/deep/deeper" if part == "nested" else part
    with pytest.raises(SourceError, match=rf"^{at} has the name 'a\\\\b', which Zarr cannot store"):
        zl.convert(tmp_path / "a.h5ad", existing, overwrite=True, progress=False)
    assert files(existing) == before


@pytest.mark.parametrize("axis", LENGTHS)
def test_an_index_named_as_a_column_keeps_its_values(axis, tmp_path):
    adata = plain()
    frame = getattr(adata, axis)
    frame["name"] = frame.index.to_numpy()
    frame.index.name = "name"
    zl.convert(adata, tmp_path / "same.zarr", progress=False)
    assert list(getattr(ad.read_zarr(tmp_path / "same.zarr"), axis).index) == list(frame.index)
    frame["name"] = "other"
    with pytest.raises(SourceError, match=f"{axis} has a column 'name' whose values differ from the index"):
        zl.convert(adata, tmp_path / "other.zarr", progress=False)
    assert not (tmp_path / "other.zarr").exists()


def test_a_matrix_that_is_refused_leaves_no_directory_either(tmp_path):
    adata = plain()
    adata.X.indices = np.full_like(adata.X.indices, N_GENES)
    for there in (False, True):
        with pytest.raises(SourceError, match="has a value for gene"):
            zl.convert(adata, tmp_path / "a.zarr", progress=False)
        assert (tmp_path / "a.zarr").exists() == there
        (tmp_path / "a.zarr").mkdir(exist_ok=True)  # exists the second time: it is not removed then


def test_what_sources_cannot_share_is_reported_once(tmp_path):
    """The elements are written twice when a store is replaced: first in a rehearsal."""
    for number in range(2):
        adata = plain()
        adata.uns["number"] = number
        adata.varm["own"] = np.full((N_GENES, 1), number)
        adata.write_h5ad(tmp_path / f"{number}.h5ad")
    for overwrite in (False, True):
        sources = [tmp_path / f"{number}.h5ad" for number in range(2)]
        done = zl.convert(sources, tmp_path / "a.zarr", overwrite=overwrite, progress=False)
    assert sorted(done.dropped) == ["uns/number", "varm/own"]
