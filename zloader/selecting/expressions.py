"""Selects rows by an expression over obs columns, such as "cell_type == 'T' and n_counts > 500". Pure.

The grammar is a small part of Python's, and nothing is evaluated as Python. It has column names (also dotted names such
as percent.mt, and any other name in back-quotes, such as `cell type`), constants, the operators == != < <= > >= in,
not in, and, or, not, and boolean columns on their own. `a.notna()` and `a.isna()` ask whether a row has a value; so do
`a is not None`, `a != None` and their opposites.

Labels are compared as codes, and each label is looked up once. Dates are compared with text such as '2024-03-31', and
durations with whole numbers of their unit. The logic has three values: a comparison with a missing value (code -1, NaN,
NaT) neither holds nor fails. So each part of an expression has two masks, where it holds and where it fails, and `not`
swaps them.

The cost is some vectorised passes per comparison over windows of about a million rows.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import suggestion
from zloader.selecting.columns import Column, ObsColumn, as_time, is_time

Mask = NDArray[np.bool_]
Masks = tuple[Mask, Mask]  # of the rows for which a part of an expression holds, and for which it fails
_SHOWN = 20
_TEXT_OR_QUOTED = re.compile(r"""('''|\"\"\"|'|")(?:\\.|(?!\1).)*\1|`[^`\r\n]+`""", re.DOTALL)
# Without a time zone, because columns have none.
_DATE = re.compile(r"\d{4}(-\d\d){0,2}([T ]\d\d(:\d\d){0,2}(\.\d+)?)?")
_ADVICE = "put labels in quotes, write == to compare, and write and, or, not in place of signs such as &, | and ~"

_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is}
_SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {  # the operator after swapping the two sides
    ast.Eq: ast.Eq,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], Mask]] = {
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HAS_NO_VALUE = {"isna": True, "isnull": True, "notna": False, "notnull": False}  # as pandas names them


class RowTest:
    """Tells which rows of a window satisfy an expression. `column` looks up a column by name.

    Raises OptionError for an invalid expression or an unknown label, and any error raised by `column`.
    """

    def __init__(self, expression: str, column: Column) -> None:
        self._expression = expression.strip()
        self._looked_up: dict[str, ObsColumn] = {}  # because a view computes a column on each call
        self._column_of = column
        self._wanted: dict[tuple[str, tuple[Any, ...]], Mask] = {}
        try:
            # Text in back-quotes is replaced by a name of the same length, so that offsets in the tree stay valid.
            plain = _TEXT_OR_QUOTED.sub(
                lambda found: found[0] if found[1] else "_" * len(found[0].encode()), self._expression
            )
            self._tree = ast.parse(plain, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            example = "\"cell_type == 'T'\" or \"`cell type` == 'T'\""
            raise OptionError(f"{expression!r} is not an expression such as {example}: {error}; {_ADVICE}") from error
        self(slice(0, 0))  # raises what any window would

    def __call__(self, window: slice) -> Mask:
        try:
            return self._masks(self._tree, window)[0]
        except RecursionError as error:
            raise OptionError(
                f"{self._expression[:_SHOWN]!r}... is nested too deeply: split it into several conditions"
            ) from error
        finally:
            for each in self._looked_up.values():
                page_cache.release(each.values)

    def _refuse(self, node: ast.AST, why: str) -> NoReturn:
        part = ast.get_source_segment(self._expression, node)
        raise OptionError(f"{part!r} in the expression {self._expression!r}: {why}")

    def _column(self, name: str) -> ObsColumn:
        if name not in self._looked_up:
            self._looked_up[name] = self._column_of(name)
        return self._looked_up[name]

    def _name(self, node: ast.expr) -> str | None:
        """The column named by a node, as it is written, or None. The tree holds another form of some names."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return None
        written = ast.get_source_segment(self._expression, node) or ""
        return written[1:-1] if written[0] == written[-1] == "`" else written

    def _masks(self, node: ast.expr, window: slice) -> Masks:
        """Where `node` holds among some rows, and where it fails."""
        if isinstance(node, ast.BoolOp):
            parts = [self._masks(value, window) for value in node.values]
            return _both(parts) if isinstance(node.op, ast.And) else _both([part[::-1] for part in parts])[::-1]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._masks(node.operand, window)[::-1]
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            links = zip(node.ops, sides, sides[1:], strict=False)
            return _both([self._compared(node, type(link), left, right, window) for link, left, right in links])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
            missing = _HAS_NO_VALUE.get(node.func.attr)
            if missing is not None:
                masks = self._missing(node, node.func.value, window)
                return masks if missing else masks[::-1]
        name = self._name(node)
        if name is None:
            self._refuse(node, f"only comparisons of obs columns, and, or, not and in can be used: {_ADVICE}")
        column = self._column(name)
        if column.categories is not None or column.values.dtype != bool:
            # Nullable booleans are stored as floats.
            self._refuse(node, "the column does not hold booleans, or some are missing: write == True, or == a value")
        return column.values[window], ~column.values[window]

    def _missing(self, node: ast.expr, named: ast.expr, window: slice) -> Masks:
        """Where a column has no value, and where it has one."""
        name = self._name(named)
        if name is None:
            self._refuse(node, "only an obs column can be asked whether it has values")
        present = _is_present(self._column(name), window)
        return ~present, present

    def _compared(
        self, node: ast.Compare, operation: type[ast.cmpop], left: ast.expr, right: ast.expr, window: slice
    ) -> Masks:
        """One link of a comparison: a column with a constant, a list of constants, or another column."""
        if operation in _NEGATED:
            return self._compared(node, _NEGATED[operation], left, right, window)[::-1]
        if self._name(left) is None and operation in _SWAPPED:
            left, right, operation = right, left, _SWAPPED[operation]
        if operation in (ast.Is, ast.Eq) and isinstance(right, ast.Constant) and right.value is None:
            return self._missing(node, left, window)
        name = self._name(left)
        if name is None or operation is ast.Is:
            self._refuse(node, "only obs columns can be compared, with ==, !=, <, <=, >, >=, in and not in")
        column, other = self._column(name), self._name(right)
        if operation is ast.In and not isinstance(right, ast.List | ast.Tuple | ast.Set):
            self._refuse(node, "in takes a list of constants")
        values, present = column.values[window], _is_present(column, window)
        if other is not None:
            holds = self._of_two(node, operation, column, other, window)
            present = present & _is_present(self._column(other), window)
        elif column.categories is not None:
            if operation not in (ast.Eq, ast.In):
                self._refuse(node, f"{name} holds labels, which have no order: use ==, != or in")
            holds = self._labels(node, name, column, self._constants(right))[values]  # code -1 selects the last entry
        else:
            constants = [self._comparable(node, name, column, constant) for constant in self._constants(right)]
            order = _ORDERS[ast.Eq if operation is ast.In else operation]
            holds = _any([order(values, each) for each in constants], len(values))
        return holds & present, ~holds & present

    def _constants(self, node: ast.expr) -> list[Any]:
        elements = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]
        return [self._constant(each) for each in elements]

    def _constant(self, node: ast.expr) -> Any:
        try:
            constant = ast.literal_eval(node)  # constants, and numbers with a sign
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            constant = None
        if not isinstance(constant, str | int | float):
            self._refuse(node, f"a string in quotes or a number is needed here: {_ADVICE}")
        if isinstance(constant, int) and not -(1 << 63) <= constant < 1 << 64:
            self._refuse(node, "the number is larger than any that a column can hold")
        return constant

    def _comparable(self, node: ast.AST, name: str, column: ObsColumn, constant: Any) -> Any:
        """A constant as it is compared with the numbers or dates of a column."""
        dtype = column.values.dtype
        if is_time(dtype):
            moment = _moment(dtype, constant)
            if moment is None:
                example = "text such as '2024-03-31'" if dtype.kind == "M" else "a whole number"
                self._refuse(node, f"{name} holds {dtype}: compare it with {example}, no more precise than that")
            return moment
        if isinstance(constant, str):
            self._refuse(node, f"{name} holds numbers, and {constant!r} is a string")
        if dtype.kind == "f" and abs(constant) > float(np.finfo(dtype).max):
            return np.float64(constant)  # in the dtype of the column it would overflow to infinity
        return constant

    def _labels(self, node: ast.AST, name: str, column: ObsColumn, constants: list[Any]) -> Mask:
        """Which of the codes of a column, and of -1, stand for one of some labels."""
        key, labels = (name, tuple(constants)), column.categories
        assert labels is not None
        for constant in constants:
            if constant not in labels:
                known = ", ".join(map(repr, labels[:_SHOWN].tolist())) or "none"
                near = suggestion(constant, (label for label in labels if isinstance(label, str)))
                more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
                self._refuse(node, f"obs column {name!r} has no label {constant!r}; it has: {known}{more}{near}")
        if key not in self._wanted:
            wanted = self._wanted[key] = np.zeros(len(labels) + 1, bool)
            wanted[[labels.get_loc(constant) for constant in constants]] = True
        return self._wanted[key]

    def _of_two(self, node: ast.AST, operation: type[ast.cmpop], column: ObsColumn, name: str, window: slice) -> Mask:
        try:
            other = self._column(name)
        except MissingColumnError as error:
            raise MissingColumnError(f"{error}. If it is a label, put it in quotes: {name!r}") from error
        if column.categories is not None or other.categories is not None:
            self._refuse(node, "two columns can be compared only if both hold numbers")
        left, right = column.values, other.values
        if left.dtype != right.dtype and (is_time(left.dtype) or is_time(right.dtype)):
            self._refuse(node, f"{left.dtype} and {right.dtype} cannot be compared")
        return _ORDERS[operation](left[window], right[window])


def _both(parts: list[Masks]) -> Masks:
    """Where all parts hold, and where one of them fails."""
    holds, fails = zip(*parts, strict=True)
    return ~_any([~part for part in holds], len(holds[0])), _any(fails, len(fails[0]))


def _any(masks: Sequence[Mask], n_rows: int) -> Mask:
    found = np.zeros(n_rows, bool)
    for mask in masks:
        found |= mask
    return found


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


def _is_present(column: ObsColumn, window: slice) -> Mask:
    """Which rows have a value."""
    values = column.values[window]
    if column.categories is not None:
        return np.asarray(values >= 0)
    return ~np.isnan(values) if values.dtype.kind in "fmM" else np.ones(len(values), bool)
