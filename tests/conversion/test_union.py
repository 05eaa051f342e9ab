"""Concatenated obs columns of several sources, compared with anndata.concat, and the kinds that can be stored."""

from __future__ import annotations

import datetime
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.errors import SourceError
from zloader.conversion.columns import is_storable, kind_of, storable, unite
from zloader.conversion.convert import convert
from zloader.conversion.verify import verify


def concatenated(columns, lengths):
    """The result of anndata for these columns (None: absent), with objects in a dtype that can be stored."""
    names = iter(range(sum(lengths)))
    adatas = []
    for column, length in zip(columns, lengths, strict=True):
        index = [str(next(names)) for _ in range(length)]
        obs = pd.DataFrame(index=index) if column is None else pd.DataFrame({"c": column.array}, index=index)
        adatas.append(ad.AnnData(obs=obs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return storable(ad.concat(adatas, join="outer").obs["c"].reset_index(drop=True))


def assert_united(columns, lengths):
    out = unite(columns, lengths)
    wanted = concatenated(columns, lengths)
    assert list(out.isna()) == list(wanted.isna())
    if wanted.notna().any():  # without any value the dtype is arbitrary
        if out.dtype != wanted.dtype:  # a column without any value does not affect ours
            present = [None if column is None or column.isna().all() else column for column in columns]
            without = concatenated(present, lengths)
            wanted = without if out.dtype == without.dtype else wanted
        is_text = all(isinstance(each.dtype, pd.StringDtype) for each in (out, wanted))  # pandas has two string dtypes
        pd.testing.assert_series_equal(out, wanted.astype(out.dtype) if is_text else wanted, check_names=False)
    assert out.index.equals(pd.RangeIndex(sum(lengths)))


WORDS = st.sampled_from(["a", "b10", "b9", "B", "ä", ""])
WORD_LISTS = st.lists(WORDS, unique=True, min_size=1, max_size=5)


@st.composite
def text(draw, length):
    words = draw(st.lists(WORDS, min_size=length, max_size=length))
    kind = draw(st.sampled_from(["object", "missing", "string", "category", "unused"]))
    if kind == "missing":
        return pd.Series([draw(st.sampled_from([word, None, np.nan])) for word in words], dtype=object)
    if kind == "unused":
        categories = draw(WORD_LISTS)
        return pd.Series(pd.Categorical([word if word in categories else None for word in words], categories))
    return pd.Series(words, dtype=kind)


@st.composite
def numbers(draw, length):
    values = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
    dtype = draw(st.sampled_from(["int8", "uint16", "int64", "float32", "float64", "Int32", "category"]))
    column = pd.Series(values, dtype=dtype)
    if length and dtype in ("float32", "float64", "Int32") and draw(st.booleans()):
        column.iloc[0] = None
    return column


@st.composite
def truths(draw, length):
    values = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    dtype = draw(st.sampled_from(["bool", "boolean", "category"]))
    return pd.Series(values, dtype=dtype)


@st.composite
def ordered(draw, length):
    categories = draw(st.sampled_from([["lo", "hi"], ["hi", "lo"], ["lo", "mid", "hi"], []]))
    codes = draw(st.lists(st.integers(-1, len(categories) - 1), min_size=length, max_size=length))
    return pd.Series(pd.Categorical.from_codes(codes, categories, ordered=draw(st.booleans())))


@st.composite
def dates(draw, length):
    days = draw(st.lists(st.integers(0, 9999), min_size=length, max_size=length))
    return pd.Series(pd.to_datetime(days, unit="D"))


@st.composite
def columns_of_a_kind(draw):
    kind = draw(st.sampled_from([text, numbers, truths, ordered, dates]))
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    present = [True, *(draw(st.integers(0, 4)) > 0 for _ in lengths[1:])]
    columns = [draw(kind(length)) if there else None for there, length in zip(present, lengths, strict=True)]
    return columns, lengths


@given(columns_of_a_kind())
def test_columns_of_a_kind_become_what_anndata_makes_of_them(case):
    assert_united(*case)


def series(values, dtype=None):
    return pd.Series(values, dtype=dtype)


TEXT = series(["a"]).dtype  # object, or from pandas 3 on `str`, which may have missing values
HAS_TEXT = isinstance(TEXT, pd.StringDtype)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        ([series(["b", "a10"], "category"), series(["a9"], "category")], pd.CategoricalDtype(["a9", "a10", "b"])),
        ([series(["a"], "category"), None], pd.CategoricalDtype(["a"])),
        ([series(["a"], "category"), series(["b"])], TEXT),
        ([series(["a"]), None], TEXT if HAS_TEXT else "string"),
        ([series([True]), None], "boolean"),
        ([series([True]), series([False])], "bool"),
        ([series([1], "int8"), None], "float64"),
        ([series([1], "Int8"), None], "Int8"),
        ([series([1], "Int8"), series([1.5])], "float64"),
        ([series([1], "float32"), series([2], "int8")], "float32"),
        ([series(pd.to_datetime(["2020-01-01"])), None], pd.to_datetime(["2020-01-01"]).dtype),
        ([series(pd.Categorical(["a"], ordered=True))] * 2, pd.CategoricalDtype(["a"], ordered=True)),
        ([series(pd.Categorical(["a"], ordered=True)), series(["a"], "category")], TEXT),
        ([series([1.5, None], "Float32")], "float32"),
    ],
)
def test_the_dtype_of_columns_of_a_kind(columns, dtype):
    lengths = [1 if column is None else len(column) for column in columns]
    assert_united(columns, lengths)
    assert unite(columns, lengths).dtype == dtype


@pytest.mark.parametrize("other", [series(["a", "b"], "category"), series([True, False]), series(["a", "b"])])
@pytest.mark.parametrize("empty", [series([np.nan] * 3), series([], float)])
def test_a_column_without_values_has_no_say(empty, other):
    for columns in ([empty, other], [other, empty]):
        lengths = [len(column) for column in columns]
        absent = [None if column is empty else column for column in columns]
        pd.testing.assert_series_equal(unite(columns, lengths), unite(absent, lengths))


def test_columns_without_any_value_are_missing_text():
    nothing = [series([np.nan]), series([None], object), series([None], "boolean"), None]
    out = unite(nothing, [1, 1, 1, 2])
    assert out.dtype == "string"
    assert list(out.isna()) == [True] * 5


@pytest.mark.parametrize(
    ("values", "dtype", "kind"),
    [
        (["a", "b"], TEXT, "text"),
        (["a", None], TEXT if HAS_TEXT else "string", "text"),
        (["a", np.nan, pd.NA], TEXT if HAS_TEXT else "string", "text"),
        ([True, None], "boolean", "true or false"),
        ([True, np.nan, False], "boolean", "true or false"),
        ([True, False], "bool", "true or false"),
        ([1, 2], "int64", "numbers"),
        ([1, None, pd.NA], "Int64", "numbers"),
        ([1, 2.5, None], "float64", "numbers"),
        ([None, None], "string", "no values"),
        ([pd.Timestamp(0), None], "datetime64[ns]", "dates"),
        ([], "object", "no values"),
    ],
)
def test_objects_get_a_dtype_that_can_be_stored(values, dtype, kind):
    column = pd.Series(values, dtype=object)
    assert kind_of(column) == kind
    out = storable(column)
    assert out.dtype == dtype
    assert list(out.isna()) == list(column.isna())
    assert list(out.dropna()) == list(column.dropna())


@pytest.mark.parametrize(
    "values",
    [["a", 1], ["a", True], [True, 1], [b"a"], [datetime.date(2020, 1, 1)], [[1], [2]], [{"a": 1}], [1, "a", None]],
)
def test_other_objects_are_refused(values):
    with pytest.raises(SourceError, match=r"it holds objects \("):
        storable(pd.Series(values, dtype=object))


def test_numbers_too_large_are_refused():
    with pytest.raises(SourceError, match="numbers"):
        storable(pd.Series([2**70, None], dtype=object))


def test_categories_have_a_kind():
    assert kind_of(series([1, 2], "category")) == "numbers"
    assert kind_of(series([True], "category")) == "true or false"
    assert kind_of(series(["a"], "category")) == "text"
    assert kind_of(series([None], "category")) == "no values"
    assert not is_storable(kind_of(series(["a", 1], "category")))
    assert not is_storable(kind_of(pd.cut(series([1, 2]), 2)))


LARGE = [2**60 + 1, 2**60 + 3]
NEXT_TO_LARGE = {
    "absent": (None, "Int64"),
    "no values": (series([None, None], "category"), "Int64"),
    "NaN": (series([np.nan, np.nan], "float64"), "Int64"),
    "missing": (series([None, 5], "Int64"), "Int64"),
    "int32": (series([1, 2], "int32"), "int64"),
    "uint64": (series([2**63 + 5, 1], "uint64"), "uint64"),
    "categories": (series([2**60 + 1, 7], "category"), "int64"),
}


@pytest.mark.parametrize(("other", "dtype"), NEXT_TO_LARGE.values(), ids=NEXT_TO_LARGE.keys())
def test_integers_that_a_float_would_round_stay_integers(other, dtype):
    for columns in ([series(LARGE, "int64"), other], [other, series(LARGE, "int64")]):
        values = [None if pd.isna(value) else int(value) for column in columns for value in with_two_rows(column)]
        united = unite(columns, [2, 2])
        assert united.dtype == dtype
        assert [None if pd.isna(value) else int(value) for value in united] == values


def with_two_rows(column):
    return [None, None] if column is None else list(column)


@pytest.mark.parametrize(
    "other", [series([0.5, 2], "float64"), series([1, None], "Float64"), series([1.5], "category")]
)
def test_integers_that_a_float_would_round_are_refused_next_to_floats(other):
    with pytest.raises(SourceError, match=f"no dtype holds {LARGE[1]} and the other values exactly"):
        unite([series(LARGE, "int64"), other], [2, len(other)])
    with pytest.raises(SourceError, match=f"no dtype holds {2**63} and the other values exactly"):
        unite([series([-1], "int64"), series([2**63], "uint64")], [1, 1])


def test_large_categories_stay_distinct():
    united = unite([series([*LARGE], "category"), series([2**63, None], pd.CategoricalDtype([2**63]))], [2, 2])
    assert united.tolist()[:3] == [*LARGE, 2**63]
    assert storable(pd.Series([LARGE[0], None], dtype=object))[0] == LARGE[0]


@pytest.mark.parametrize("other", ["absent", "no values", "NaN"])
def test_large_ids_of_several_files_are_stored_as_they_are(other, tmp_path):
    for name, column in {"a": series(LARGE, "int64"), "b": NEXT_TO_LARGE[other][0]}.items():
        obs = pd.DataFrame(index=[f"{name}0", f"{name}1"])
        if column is not None:
            obs["id"] = column.array
        ad.AnnData(np.ones((2, 1), np.float32), obs=obs, var=pd.DataFrame(index=["g"])).write_h5ad(tmp_path / name)
    sources = [tmp_path / "a", tmp_path / "b"]
    convert(sources, tmp_path / "ab.zarr", progress=False)
    assert ad.read_zarr(tmp_path / "ab.zarr").obs["id"].tolist() == [*LARGE, pd.NA, pd.NA]
    assert verify(tmp_path / "ab.zarr", against=sources, progress=False).problems == ()


def test_large_ids_next_to_floats_are_refused_with_their_files(tmp_path):
    for name, values in {"a": LARGE, "b": [0.5, 1]}.items():
        obs = pd.DataFrame({"id": values}, index=["0", "1"])
        ad.AnnData(np.ones((2, 1), np.float32), obs=obs, var=pd.DataFrame(index=["g"])).write_h5ad(tmp_path / name)
    with pytest.raises(SourceError, match=r"obs column 'id' \(int64 in .*a, float64 in .*b\): no dtype holds"):
        convert([tmp_path / "a", tmp_path / "b"], tmp_path / "ab.zarr", progress=False)
    assert not (tmp_path / "ab.zarr").exists()
