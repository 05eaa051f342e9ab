"""Expressions select the same rows as pandas, with three-valued logic for missing values."""

from __future__ import annotations

import operator

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.records import windows_of
from zloader.selecting.columns import ObsColumn, as_numbers
from zloader.selecting.expressions import RowTest

LABELS = ["a", "b", "it's", "never"]
ORDERS = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def matching(text, column, n_rows):
    test, mask = RowTest(text, column), np.empty(n_rows, bool)
    for window in windows_of(n_rows):
        mask[window] = test(window)
    return mask


def columns(n: int, seed: int) -> dict[str, pd.Series]:
    """Columns of every kind as nullable pandas arrays, with missing values where the kind allows them."""
    rng = np.random.default_rng(seed)
    missing = rng.random(n) < 0.2
    return {
        "cell_type": pd.Series(pd.Categorical.from_codes(rng.integers(-1, 3, n), LABELS)).astype("string"),
        "percent.mt": pd.Series(rng.integers(0, 4, n) / 2, dtype="Float64").mask(missing),
        "lane": pd.Series(rng.integers(-3, 4, n), dtype="Int8"),
        "n_counts": pd.Series(rng.integers(0, 4, n), dtype="UInt16"),
        "passed": pd.Series(rng.random(n) < 0.5, dtype="boolean"),
    }


def stored(frame: dict[str, pd.Series]) -> dict[str, ObsColumn]:
    """The same columns in the form of a dataset."""
    kept = {name: as_numbers(name, column.array) for name, column in frame.items()}
    kept["cell_type"] = as_numbers("cell_type", pd.Categorical(frame["cell_type"], categories=LABELS))
    return kept


NUMBERS = st.sampled_from([-1, 0, 1, 2, 0.5, 1.5, -1000, 70000])
NUMERIC = st.sampled_from(["percent.mt", "lane", "n_counts"])


def _compare(left: pd.Series, order: str, right: object) -> pd.Series:
    return getattr(left, ORDERS[order])(right).astype("boolean")


@st.composite
def terms(draw) -> tuple[str, object]:
    """A comparison as text, and the equivalent function of a frame."""
    kind = draw(
        st.sampled_from(["label", "labels", "number", "turned", "numbers", "columns", "chain", "flag", "presence"])
    )
    name, order = draw(NUMERIC), draw(st.sampled_from(sorted(ORDERS)))
    if kind == "presence":
        name = draw(st.sampled_from(["cell_type", "percent.mt", "lane", "passed"]))
        absent = draw(st.sampled_from([".isna()", ".isnull()", " is None", " == None"]))
        present = draw(st.sampled_from([".notna()", ".notnull()", " is not None", " != None"]))
        if draw(st.booleans()):
            return f"{name}{present}", lambda frame: frame[name].notna().astype("boolean")
        return f"{name}{absent}", lambda frame: frame[name].isna().astype("boolean")
    if kind == "flag":
        return "passed", lambda frame: frame["passed"]
    if kind == "label":
        label, order = draw(st.sampled_from(LABELS)), draw(st.sampled_from(["==", "!="]))
        return f"cell_type {order} {label!r}", lambda frame: _compare(frame["cell_type"], order, label)
    if kind in ("labels", "numbers"):
        name = "cell_type" if kind == "labels" else name
        values = draw(st.lists(st.sampled_from(LABELS) if kind == "labels" else NUMBERS, max_size=3))
        inside = draw(st.booleans())
        text = f"{name} {'in' if inside else 'not in'} {draw(st.sampled_from([list, tuple]))(values)!r}"
        return text, lambda frame: (frame[name].isin(values) == inside).astype("boolean").mask(frame[name].isna())
    number = draw(NUMBERS)
    if kind == "number":
        return f"{name} {order} {number}", lambda frame: _compare(frame[name], order, number)
    if kind == "turned":
        turned = getattr(operator, ORDERS[order])
        return f"{number} {order} {name}", lambda frame: turned(number, frame[name]).astype("boolean")
    other = draw(NUMERIC)
    if kind == "columns":
        return f"{name} {order} {other}", lambda frame: _compare(frame[name], order, frame[other])
    return (
        f"{number} <= {name} {order} {other}",
        lambda frame: _compare(frame[name], ">=", number) & _compare(frame[name], order, frame[other]),
    )


def _joined(parts):
    return st.one_of(
        parts.map(lambda part: (f"not ({part[0]})", lambda frame: ~part[1](frame))),
        st.tuples(parts, parts).map(
            lambda two: (f"({two[0][0]}) and ({two[1][0]})", lambda frame: two[0][1](frame) & two[1][1](frame))
        ),
        st.tuples(parts, parts).map(
            lambda two: (f"({two[0][0]}) or ({two[1][0]})", lambda frame: two[0][1](frame) | two[1][1](frame))
        ),
    )


@given(made=st.recursive(terms(), _joined, max_leaves=6), n=st.integers(0, 40), seed=st.integers(0, 100))
def test_expressions_hold_where_pandas_says(made, n, seed):
    text, oracle = made
    frame = columns(n, seed)
    mask = matching(text, stored(frame).__getitem__, n)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, oracle(frame).fillna(False).to_numpy(bool))


def test_windows_of_rows_are_put_together(monkeypatch):
    frame = columns(1000, 1)
    text = "cell_type in ('a', \"it's\") and not lane < 1"
    whole = matching(text, stored(frame).__getitem__, 1000)
    monkeypatch.setattr("zloader.common.records.WINDOW_ROWS", 7)
    np.testing.assert_array_equal(matching(text, stored(frame).__getitem__, 1000), whole)
    assert 0 < whole.sum() < 1000


def test_a_row_without_a_value_is_in_no_comparison_whichever_way_it_is_put():
    column = {"type": ObsColumn(values=np.array([0, -1, 1], np.int8), coded=pd.Index(["a", "b"]))}.__getitem__
    for text, rows in {
        "type == 'a'": [0],
        "type != 'a'": [2],
        "not type == 'a'": [2],
        "type not in ['a']": [2],
        "type in ['a', 'b']": [0, 2],
        "not (type != 'a' and type != 'b')": [0, 2],
        "type not in []": [0, 2],
        "type in []": [],
    }.items():
        assert np.flatnonzero(matching(text, column, 3)).tolist() == rows, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not an expression"),
        ("lane ==", "is not an expression"),
        ("class == 1", "is not an expression"),
        ("cell type == 1", "is not an expression such as .* or \"`cell type` == 'T'\""),
        ("lane = 1", "is not an expression"),
        ("(" * 300 + "lane" + ")" * 300, "is not an expression"),
        ("(" + "not " * 1200 + "passed)", "nested too deeply"),
        ("lane == 1 & passed", "'1 & passed' in the expression .* and, or, not in place of signs such as &"),
        ("(lane == 1) | (lane == 2)", r"'\(lane == 1\) \| \(lane == 2\)' in .* write and, or, not"),
        ("~passed", "'~passed' in .* write and, or, not"),
        ("lane == 1 && passed", "is not an expression .* write and, or, not"),
        ("!passed", "is not an expression .* write and, or, not"),
        ("cell_type == 'T'", "has no label 'T'; it has: 'a', 'b'"),
        ("cell_type < 'b'", "labels, which have no order"),
        ("cell_type == lane", "only if both hold numbers"),
        ("lane == 'a'", "holds numbers, and 'a' is a string"),
        ("lane", "does not hold booleans"),
        ("lane < None", "a string in quotes or a number is needed"),
        ("lane in [None]", "a string in quotes or a number is needed"),
        ("cell_type == CD4 T cell", "is not an expression .*; put labels in quotes, write == to compare"),
        ("cell_type != CD8+ T", "put labels in quotes"),
        ("cell_type == CD4-T", "'CD4-T' in .*: a string in quotes .* put labels in quotes"),
        ("lane is 3", "only obs columns can be compared"),
        ("lane.notna(1)", "only comparisons of obs columns"),
        ("lane.mean() == 3", "only obs columns can be compared"),
        ("(lane == 3).notna()", "only an obs column can be asked whether it has values"),
        ("None is None", "only an obs column can be asked whether it has values"),
        ("lane is 1", "can be compared, with"),
        ("1 < 2", "only obs columns can be compared"),
        ("lane in 'abc'", "a list of constants"),
        ("lane in [n_counts]", "a string in quotes or a number is needed"),
        ("lane > " + "9" * 400, "larger than any"),
        ("lane > len('abc')", "a string in quotes or a number is needed"),
        ("__import__('os').system('true')", "only comparisons"),
        ("lane if passed else n_counts", "only comparisons"),
        ("True", "only comparisons"),
    ],
)
def test_what_is_no_such_expression_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        matching(text, stored(columns(9, 0)).__getitem__, 9)


@pytest.mark.parametrize("constant", ["1e39", "-1e39", "3.40282351e38", "1e999", "-1e999", "70000", "-70000"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_that_the_columns_dtype_cannot_hold_are_compared_as_they_are(dtype, constant):
    values = np.array([0, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).min], dtype)
    column = {"score": ObsColumn(values=values)}.__getitem__
    for order in ORDERS:
        wanted = [eval(f"{float(value)} {order} {constant}", {"inf": np.inf, "nan": np.nan}) for value in values]
        wanted[3] = False  # a missing value satisfies no comparison
        assert matching(f"score {order} {constant}", column, 6).tolist() == wanted, order


def test_booleans_of_which_some_are_missing_are_compared():
    """They are stored as floats, so a bare column cannot be told from other numbers."""
    column = {"seen": as_numbers("seen", pd.array([True, None, False], dtype="boolean"))}.__getitem__
    for text in ("seen", "not seen", "not not seen"):
        with pytest.raises(OptionError, match=r"'seen' in .* write == True, or == a value"):
            matching(text, column, 3)
    for text, rows in {"seen == True": [0], "not seen == True": [2], "seen == False": [2], "seen != True": [2]}.items():
        assert np.flatnonzero(matching(text, column, 3)).tolist() == rows, text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("`cell type` == 1", "cell type"),
        ("not (`class`==1)", "class"),
        ("plain == 0 or 1 == `it's`", "it's"),
        ("`it's` == 1 or `it's` in (3, 4)  # \"", "it's"),
        ("µm == 1", "µm"),
        ("plain == 0 and\\\n µm == 1", "µm"),
        ("a.µm == 1", "a.µm"),
        ("`µm` == 1", "µm"),
        ("`²`==1", "²"),
        ("ﬁt == 1", "ﬁt"),  # the name as written, although Python treats both names as equal
        ("fit == 1", "fit"),
        ("n_µ == 1", "n_µ"),
        ("n_\N{GREEK SMALL LETTER MU} == 1", "n_\N{GREEK SMALL LETTER MU}"),
        ("(`plain` == 1)", "plain"),
    ],
)
def test_any_column_can_be_named(text, named):
    asked = []

    def column(name: str) -> ObsColumn:
        asked.append(name)
        return ObsColumn(values=np.arange(2))

    matching(text, column, 2)
    assert [name for name in asked if name != "plain"] == ([] if named == "plain" else [named])


def test_back_quotes_in_strings_are_back_quotes():
    column = {"a b": as_numbers("a b", np.array(["`x y`", "it's `", 'say "`"']))}.__getitem__
    for number, text in enumerate(["'`x y`'", '"it\'s `"', "'say \"`\"'"]):
        assert np.flatnonzero(matching(f"{text} == `a b`", column, 3)).tolist() == [number]
        assert np.flatnonzero(matching(f"`a b` in ({text}, )", column, 3)).tolist() == [number]


def test_messages_show_back_quotes_as_they_are_written():
    with pytest.raises(OptionError, match=r"'`a b` < 3' in the expression .* labels"):
        matching("'é' == `a b` or `a b` < 3", {"a b": as_numbers("", np.array(["é"]))}.__getitem__, 1)


def test_a_column_is_looked_up_once_however_often_it_is_named():
    asked, kept = [], stored(columns(9, 0))

    def column(name: str) -> ObsColumn:
        asked.append(name)
        return kept[name]

    matching("lane > 0 or lane > 1 and n_counts == lane or passed and not passed", column, 9)
    assert sorted(asked) == ["lane", "n_counts", "passed"]


def test_what_the_column_lookup_raises_comes_through():
    def column(name: str) -> ObsColumn:
        raise MissingColumnError(f"there is no obs column {name!r}")

    with pytest.raises(MissingColumnError, match="'tissue'"):
        matching("tissue == 'lung'", column, 3)


def test_of_many_labels_some_are_listed():
    many = {"type": as_numbers("type", pd.Categorical([f"t{number:03}" for number in range(500)]))}.__getitem__
    with pytest.raises(OptionError, match=r"'t019' and 480 more"):
        matching("type == 't'", many, 500)
