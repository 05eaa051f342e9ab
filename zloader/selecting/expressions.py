"""Selects rows by an expression over obs columns, such as "cell_type == 'T' and n_counts > 500". Pure.

The grammar is a small part of Python's, and nothing is evaluated as Python. It has column names (also dotted names such
as percent.mt, and any other name in back-quotes, such as `cell type`), constants, the operators == != < <= > >= in,
not in, and, or, not, and boolean columns on their own. `a.notna()` and `a.isna()` ask whether a row has a value; so do
`a is not None`, `a != None` and their opposites.

Labels are compared as codes, and each label is looked up once. Dates are compared with text such as '2024-03-31', and
durations with whole numbers of their unit. A row without a value (code -1, NaN, NaT) satisfies no comparison: neither
`a == 'T'` nor `a != 'T'`. `not` before a comparison negates the operator, so such a row satisfies neither form.

The cost is one vectorised pass per comparison over windows of about a million rows.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.selecting.columns import Column, ObsColumn, as_time, is_time

Mask = NDArray[np.bool_]
Test = Callable[[slice], Mask]
_SHOWN = 20
_TEXT_OR_QUOTED = re.compile(r"""('''|\"\"\"|'|")(?:\\.|(?!\1).)*\1|`[^`\r\n]+`""", re.DOTALL)
# Without a time zone, because columns have none.
_DATE = re.compile(r"\d{4}(-\d\d){0,2}([T ]\d\d(:\d\d){0,2}(\.\d+)?)?")
# Operators for and, or and not in pandas and other languages: as Python syntax nodes, and as text.
_SIGNS = (ast.BitAnd, ast.BitOr, ast.Invert)
_SIGN = re.compile(r"[&|~]|!(?!=)")
_WORD = r"[^\s'\"`=<>()\[\]]+"
_BARE_LABEL = re.compile(rf"(?<![=!<>])(==?|!=)\s*((?=[^\W\d]){_WORD}(?:\s+(?!and\b|or\b){_WORD})+)")
_ONE_EQUALS = "; write == to compare"
_USE_WORDS = "write and, or, not: signs such as &, ||, ~ and ! are not understood"

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
}
_OPPOSITE |= {opposite: operation for operation, opposite in _OPPOSITE.items()}
_SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {  # the operator after swapping the two sides
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_WITH_VALUE = {"notna": True, "notnull": True, "isna": False, "isnull": False}  # as pandas names them
_IS_NONE: dict[type[ast.cmpop], bool] = {ast.Is: True, ast.Eq: True, ast.IsNot: False, ast.NotEq: False}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _quoted(compared: re.Match[str]) -> str:
    return f"{'!=' if compared[1] == '!=' else '=='} {compared[2]!r}"


def row_test(expression: str, column: Column, names: Sequence[str] = ()) -> Test:
    """A test of which rows of a window satisfy the expression. `column` looks up one of the columns `names`.

    Raises OptionError for an invalid expression or an unknown label, and any error raised by `column`; the test raises
    OptionError for an expression that is nested too deeply.
    """
    expression = expression.strip()
    try:
        # Text in back-quotes is replaced by a name of the same length, so that offsets in the tree stay valid.
        plain = _TEXT_OR_QUOTED.sub(lambda found: found[0] if found[1] else "_" * len(found[0].encode()), expression)
        tree = ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        example = "\"cell_type == 'T'\" or \"`cell type` == 'T'\""
        bare = _TEXT_OR_QUOTED.sub("''", expression)
        advice = f"; {_USE_WORDS}" if _SIGN.search(bare) else _ONE_EQUALS if re.search("[^=!<>]=[^=]", bare) else ""
        if _BARE_LABEL.search(bare) and not _SIGN.search(bare):
            advice = "; put labels in quotes: " + _BARE_LABEL.sub(_quoted, expression)
        raise OptionError(f"{expression!r} is not an expression such as {example}: {error}{advice}") from error

    def too_deep() -> OptionError:
        return OptionError(f"{expression[:_SHOWN]!r}... is nested too deeply: split it into several conditions")

    looked_up: list[ObsColumn] = []

    @cache  # because a view computes a column on each call
    def look_up(name: str) -> ObsColumn:
        looked_up.append(column(name))
        return looked_up[-1]

    try:
        test = _Reader(expression, look_up, names).test(tree, opposite=False)
    except RecursionError as error:
        raise too_deep() from error

    def tested(window: slice) -> Mask:
        try:
            return test(window)
        except RecursionError as error:
            raise too_deep() from error
        finally:
            for each in looked_up:
                page_cache.release(each.values)

    return tested


class _Reader:
    """Turns the nodes of one expression into tests of windows of rows."""

    def __init__(self, expression: str, column: Column, names: Sequence[str]) -> None:
        self._expression = expression
        self._lines = expression.encode().splitlines()
        self._column = column
        self._names = names

    def _part(self, node: ast.AST) -> str | None:
        return ast.get_source_segment(self._expression, node)

    def _refuse(self, node: ast.AST, why: str) -> NoReturn:
        if any(isinstance(getattr(part, "op", None), _SIGNS) for part in ast.walk(node)):
            why = _USE_WORDS
        raise OptionError(f"{self._part(node)!r} in the expression {self._expression!r}: {why}")

    def test(self, node: ast.expr, *, opposite: bool) -> Test:
        """A test of which rows of a window satisfy `node`, or with `opposite` satisfy `not node`."""
        if isinstance(node, ast.BoolOp):
            tests = [self.test(value, opposite=opposite) for value in node.values]
            every = isinstance(node.op, ast.And) != opposite
            return _joined(np.logical_and if every else np.logical_or, tests)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.test(node.operand, opposite=not opposite)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            links = [
                self._compared(node, type(operation), left, right, opposite=opposite)
                for operation, left, right in zip(node.ops, sides, sides[1:], strict=False)
            ]
            return _joined(np.logical_or if opposite else np.logical_and, links)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
            present = _WITH_VALUE.get(node.func.attr)
            if present is not None:
                return self._whether_present(node, node.func.value, present != opposite)
        name = self._name(node)
        if name is None:
            self._refuse(node, "only comparisons of obs columns, and, or, not and in can be used")
        column = self._column(name)
        if column.categories is not None or column.values.dtype != bool:
            why = "the column does not hold booleans: compare it with a value"
            if column.categories is None and column.values.dtype.kind == "f":  # nullable booleans are stored as floats
                why = (
                    "the column does not hold booleans, or some are missing: write "
                    f"{self._part(node)} == True, or == False"
                )
            self._refuse(node, why)
        return lambda window: column.values[window] != opposite

    def _name(self, node: ast.expr) -> str | None:
        """The column named by a node, or None.

        Python treats names with the same NFKC form as equal, for example with the micro sign and the letter mu.
        """
        name = self._written(node)
        if name is None or name[0] == name[-1] == "`":
            return name and name[1:-1]
        if name in self._names:
            return name
        equal = [known for known in self._names if normalize("NFKC", known) == normalize("NFKC", name)]
        return equal[0] if len(equal) == 1 else name

    def _written(self, node: ast.expr) -> str | None:
        """A name as written. The tree holds its NFKC form, and placeholders for text in back-quotes."""
        if isinstance(node, ast.Name):
            return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        if isinstance(node, ast.Attribute):
            before = self._written(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None

    def _compared(
        self, node: ast.Compare, operation: type[ast.cmpop], left: ast.expr, right: ast.expr, *, opposite: bool
    ) -> Test:
        """One link of a comparison: a column with a constant, a list of constants, or another column."""
        if self._name(left) is None and operation in _SWAPPED:
            left, right, operation = right, left, _SWAPPED[operation]
        if operation in _IS_NONE and isinstance(right, ast.Constant) and right.value is None:
            return self._whether_present(node, left, _IS_NONE[operation] == opposite)
        name = self._name(left)
        if name is None or operation not in _OPPOSITE:
            self._refuse(node, "only obs columns can be compared, with ==, !=, <, <=, >, >=, in and not in")
        column, other = self._column(name), self._name(right)
        operation = _OPPOSITE[operation] if opposite else operation
        if operation in (ast.In, ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                self._refuse(node, "in takes a list of constants")
            constants = [self._constant(value) for value in right.elts]
            return self._one_of(node, name, column, constants, outside=operation is ast.NotIn)
        if other is not None:
            if self._names and other not in self._names:
                self._refuse(node, f"there is no obs column {other!r}. Put a label in quotes: {other!r}")
            return self._of_two(node, operation, column, self._column(other))
        constant = self._constant(right)
        if column.categories is not None:
            if operation not in (ast.Eq, ast.NotEq):
                self._refuse(node, f"{name} holds labels, which have no order: use ==, != or in")
            return self._one_of(node, name, column, [constant], outside=operation is ast.NotEq)
        return _with_constant(operation, column.values, self._comparable(node, name, column, constant))

    def _whether_present(self, node: ast.expr, named: ast.expr, present: bool) -> Test:
        """A test of which rows have a value in a column, or with `present` False, have none."""
        name = self._name(named)
        if name is None:
            self._refuse(node, "only an obs column can be asked whether it has values")
        column = self._column(name)
        values = column.values
        if column.categories is not None:
            return lambda window: (values[window] >= 0) == present
        return lambda window: _is_present(values[window]) == present

    def _constant(self, node: ast.expr) -> Any:
        try:
            constant = ast.literal_eval(node)  # constants, and numbers with a sign
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            constant = None
        if not isinstance(constant, str | int | float):
            name = isinstance(node, ast.BinOp) and self._part(node)
            self._refuse(
                node, f"put a label in quotes: {name!r}" if name else "a string in quotes or a number is needed here"
            )
        if isinstance(constant, int) and not -(1 << 63) <= constant < 1 << 64:
            self._refuse(node, "the number is larger than any that a column can hold")
        return constant

    def _comparable(self, node: ast.AST, name: str, column: ObsColumn, constant: Any) -> Any:
        """A constant as it is compared with the numbers or dates of a column."""
        dtype = column.values.dtype
        if not is_time(dtype):
            if isinstance(constant, str):
                self._refuse(node, f"{name} holds numbers, and {constant!r} is a string")
            return constant
        moment = _moment(dtype, constant)
        if moment is None:
            example = "text such as '2024-03-31'" if dtype.kind == "M" else "a whole number"
            self._refuse(node, f"{name} holds {dtype}: compare it with {example}, no more precise than that")
        return moment

    def _one_of(self, node: ast.AST, name: str, column: ObsColumn, constants: list[Any], *, outside: bool) -> Test:
        """A test whether a value is among the constants. With `outside`: is present but not among them."""
        values = column.values
        if column.categories is None:
            constants = [self._comparable(node, name, column, constant) for constant in constants]
            operation = ast.NotEq if outside else ast.Eq
            tests = [_with_constant(operation, values, constant) for constant in constants]
            if not tests:
                return lambda window: _is_present(values[window]) & outside
            return _joined(np.logical_and if outside else np.logical_or, tests)
        labels = column.categories
        for constant in constants:
            if constant not in labels:
                known = ", ".join(map(repr, labels[:_SHOWN].tolist())) or "none"
                near = suggestion(constant, (label for label in labels if isinstance(label, str)))
                more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
                self._refuse(node, f"obs column {name!r} has no label {constant!r}; it has: {known}{more}{near}")
        wanted = np.append(np.isin(np.arange(len(labels)), [labels.get_loc(c) for c in constants]) != outside, False)
        return lambda window: wanted[values[window]]  # code -1 selects the last entry

    def _of_two(self, node: ast.AST, operation: type[ast.cmpop], column: ObsColumn, other: ObsColumn) -> Test:
        if column.categories is not None or other.categories is not None:
            self._refuse(node, "two columns can be compared only if both hold numbers")
        left, right, compare = column.values, other.values, _ORDERS[operation]
        if left.dtype != right.dtype and (is_time(left.dtype) or is_time(right.dtype)):
            self._refuse(node, f"{left.dtype} and {right.dtype} cannot be compared")
        return lambda window: (
            compare(left[window], right[window]) & _is_present(left[window]) & _is_present(right[window])
        )


def _moment(dtype: np.dtype[Any], constant: Any) -> Any:
    """A constant as a date or duration of a column's dtype; None if it is none, out of range, or more precise."""
    try:
        if dtype.kind == "m":
            return np.array([constant], np.int64).view(dtype)[0] if type(constant) is int else None
        if not isinstance(constant, str) or not _DATE.fullmatch(constant):
            return None
        return as_time(np.datetime64(constant), dtype)
    except (ValueError, OverflowError):
        return None


def _with_constant(operation: type[ast.cmpop], values: NDArray[Any], constant: Any) -> Test:
    compare = _ORDERS[operation]
    if values.dtype.kind == "f" and abs(constant) > float(np.finfo(values.dtype).max):
        constant = np.float64(constant)  # in the dtype of the column it would overflow to infinity
    if operation is ast.NotEq and values.dtype.kind in "fmM":  # NaN != constant would be True
        return lambda window: compare(values[window], constant) & _is_present(values[window])
    return lambda window: compare(values[window], constant)


def _is_present(values: NDArray[Any]) -> Mask:
    """Which numbers and dates are not missing (NaN, NaT)."""
    return ~np.isnan(values) if values.dtype.kind in "fmM" else np.ones(len(values), bool)


def _joined(join: np.ufunc, tests: list[Test]) -> Test:
    def joined(window: slice) -> Mask:
        mask = tests[0](window)
        for test in tests[1:]:
            mask = join(mask, test(window))
        return mask

    return joined
