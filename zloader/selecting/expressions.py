"""Which rows an expression over obs columns holds for, such as "cell_type == 'T' and n_counts > 500". Pure.

Python's own grammar, but only a little of it, and never evaluated as Python: names of columns (also dotted ones, such
as percent.mt; in back-quotes any other, such as `cell type`), constants, == != < <= > >= in, not in, and, or, not, and
columns of booleans by themselves.
Labels are compared as codes: each label is looked up once. A row without a value (code -1, NaN) is in no comparison,
neither `a == 'T'` nor `a != 'T'`, and `not` before a comparison asks for the opposite one, so that it is in neither
there.
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

from zloader.common.errors import OptionError
from zloader.selecting.columns import Column, ObsColumn

Mask = NDArray[np.bool_]
Test = Callable[[slice], Mask]
_WINDOW = 1 << 20  # rows looked at together, so that what a term needs meanwhile stays small
_SHOWN = 20
_TEXT_OR_QUOTED = re.compile(r"""('''|\"\"\"|'|")(?:\\.|(?!\1).)*\1|`[^`\r\n]+`""", re.DOTALL)
# What pandas and other languages write for and, or and not: those that Python parses, and all of them in text.
_SIGNS = (ast.BitAnd, ast.BitOr, ast.Invert)
_SIGN = re.compile(r"[&|~]|!(?!=)")
_USE_WORDS = "write and, or, not: signs such as &, ||, ~ and ! are not understood"

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
}
_OPPOSITE |= {opposite: operation for operation, opposite in _OPPOSITE.items()}
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {  # what `a < b` is when written from b to a
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def matching(expression: str, column: Column, n_rows: int, names: Sequence[str] = ()) -> Mask:
    """Which of `n_rows` rows the expression holds for; `column` is `Dataset.obs_column`, `names` are those it knows.

    Raises OptionError for what is no such expression or names a label that is not there, and what `column` raises.
    """
    expression = expression.strip()
    try:
        # What is in back-quotes becomes a name as long as it is: places in the tree are places in the expression.
        plain = _TEXT_OR_QUOTED.sub(lambda found: found[0] if found[1] else "_" * len(found[0].encode()), expression)
        tree = ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        such = "\"cell_type == 'T'\" or \"`cell type` == 'T'\""
        advice = f"; {_USE_WORDS}" if _SIGN.search(_TEXT_OR_QUOTED.sub("", expression)) else ""
        raise OptionError(f"{expression!r} is not an expression such as {such}: {error}{advice}") from error
    mask = np.empty(n_rows, bool)
    try:
        reader = _Reader(expression, cache(column), names)  # a view makes a column anew each time
        test = reader.test(tree, opposite=False)
        for start in range(0, n_rows, _WINDOW):
            window = slice(start, min(start + _WINDOW, n_rows))
            mask[window] = test(window)
    except RecursionError as error:
        raise OptionError(f"{expression[:_SHOWN]!r}... is nested too deeply: write it flatter") from error
    return mask


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
        """Which rows of a window `node` holds for; or with `opposite`, `not node`."""
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
        name = self._name(node)
        if name is None:
            self._refuse(node, "only comparisons of obs columns, and, or, not and in can be used")
        column = self._column(name)
        if column.categories is not None or column.values.dtype != bool:
            why = "the column holds no booleans: compare it with something"
            if column.categories is None and column.values.dtype.kind == "f":  # as nullable booleans are held
                why = (
                    f"the column holds no booleans, or some are missing: write {self._part(node)} == True, or == False"
                )
            self._refuse(node, why)
        return lambda window: column.values[window] != opposite

    def _name(self, node: ast.expr) -> str | None:
        """The column that a node names, if it names one.

        Python takes names for the same that have one NFKC form, such as with the micro sign and the letter mu.
        """
        name = self._written(node)
        if name is None or name[0] == name[-1] == "`":
            return name and name[1:-1]
        if name in self._names:
            return name
        alike = [known for known in self._names if normalize("NFKC", known) == normalize("NFKC", name)]
        return alike[0] if len(alike) == 1 else name

    def _written(self, node: ast.expr) -> str | None:
        """A name as the expression has it: in the tree it is normalised, and without what is in back-quotes."""
        if isinstance(node, ast.Name):
            return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        if isinstance(node, ast.Attribute):
            before = self._written(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None

    def _compared(
        self, node: ast.Compare, operation: type[ast.cmpop], left: ast.expr, right: ast.expr, *, opposite: bool
    ) -> Test:
        """One link of a comparison: a column with a constant, with several, or with another column."""
        if self._name(left) is None and operation in _TURNED:
            left, right, operation = right, left, _TURNED[operation]
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
            return self._of_two(node, operation, column, self._column(other))
        constant = self._constant(right)
        if column.categories is not None:
            if operation not in (ast.Eq, ast.NotEq):
                self._refuse(node, f"{name} holds labels, which have no order: use ==, != or in")
            return self._one_of(node, name, column, [constant], outside=operation is ast.NotEq)
        self._require_number(node, name, constant)
        return _with_constant(operation, column.values, constant)

    def _constant(self, node: ast.expr) -> Any:
        try:
            constant = ast.literal_eval(node)  # constants, and numbers with a sign
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            constant = None
        if not isinstance(constant, str | int | float):
            self._refuse(node, "a string or a number is needed here")
        if isinstance(constant, int) and not -(1 << 63) <= constant < 1 << 64:
            self._refuse(node, "the number is larger than any that a column can hold")
        return constant

    def _require_number(self, node: ast.AST, name: str, constant: Any) -> None:
        if isinstance(constant, str):
            self._refuse(node, f"{name} holds numbers, and {constant!r} is a string")

    def _one_of(self, node: ast.AST, name: str, column: ObsColumn, constants: list[Any], *, outside: bool) -> Test:
        """Whether a value is among constants, or with `outside` is there but not among them."""
        values = column.values
        if column.categories is None:
            for constant in constants:
                self._require_number(node, name, constant)
            operation = ast.NotEq if outside else ast.Eq
            tests = [_with_constant(operation, values, constant) for constant in constants]
            if not tests:
                return lambda window: _there(values[window]) & outside
            return _joined(np.logical_and if outside else np.logical_or, tests)
        labels = column.categories
        for constant in constants:
            if constant not in labels:
                known = ", ".join(map(repr, labels[:_SHOWN].tolist())) or "none"
                more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
                self._refuse(node, f"obs column {name!r} has no label {constant!r}; it has: {known}{more}")
        wanted = np.append(np.isin(np.arange(len(labels)), [labels.get_loc(c) for c in constants]) != outside, False)
        return lambda window: wanted[values[window]]  # code -1 takes the last

    def _of_two(self, node: ast.AST, operation: type[ast.cmpop], column: ObsColumn, other: ObsColumn) -> Test:
        if column.categories is not None or other.categories is not None:
            self._refuse(node, "two columns can be compared only where both hold numbers")
        left, right, compare = column.values, other.values, _ORDERS[operation]
        return lambda window: compare(left[window], right[window]) & _there(left[window]) & _there(right[window])


def _with_constant(operation: type[ast.cmpop], values: NDArray[Any], constant: float) -> Test:
    compare = _ORDERS[operation]
    if values.dtype.kind == "f" and abs(constant) > float(np.finfo(values.dtype).max):
        constant = np.float64(constant)  # or it would become an infinity of the column's dtype
    if operation is ast.NotEq and values.dtype.kind == "f":  # the only one that NaN would be in
        return lambda window: compare(values[window], constant) & _there(values[window])
    return lambda window: compare(values[window], constant)


def _there(values: NDArray[Any]) -> Mask:
    """Which numbers are not missing."""
    return ~np.isnan(values) if values.dtype.kind == "f" else np.ones(len(values), bool)


def _joined(join: np.ufunc, tests: list[Test]) -> Test:
    def joined(window: slice) -> Mask:
        mask = tests[0](window)
        for test in tests[1:]:
            mask = join(mask, test(window))
        return mask

    return joined
