"""Makes dataclasses from JSON objects, and checks every value against the type of its field.

A value is a string, true or false, a number from 0, a list, an object, or an object with the keys of a dataclass. Null
stands for a value that is left out. Keys that the dataclass lacks are kept in its field `extra`. This file imports only
the standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_SHOWN = 60  # characters of a wrong value in an error
_MOST, _LEAST = 10**18, 1e-18  # beyond these, figures overflow where they are divided
_T = TypeVar("_T")
Value = str | int | float | bool


class RecordsError(Exception):
    """A file or a record that is not what run.py writes. The message names the file, the line and the value."""


def checked(cls: type[_T], record: Any, where: str) -> _T:
    """The object as an instance of the dataclass. `where` begins the messages. Raises RecordsError."""
    if not isinstance(record, dict):
        raise RecordsError(f"{where}: {shortened(repr(record))} is not an object with the keys of {cls.__name__}")
    hints = _hints(cls)
    found: dict[str, Any] = {"extra": {name: value for name, value in record.items() if name not in hints}}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        if record.get(each.name) is not None and each.name != "extra":
            found[each.name] = _value(hints[each.name], record[each.name], f"{where}: {each.name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise RecordsError(f"{where}: {each.name} is missing from the {cls.__name__.lower()}")
    return cls(**found)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _value(hint: Any, value: Any, where: str) -> Any:
    """The value, if it is what the type of the field says. Numbers are finite and at least 0."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    kind = kinds[0]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return checked(kind, value, where)
    if get_origin(kind) is list:
        if isinstance(value, list):
            return [_value(get_args(kind)[0], each, where) for each in value]
    elif get_origin(kind) is Mapping:
        if isinstance(value, dict):
            of = get_args(kind)[1]
            return value if of is Any else {name: _value(of, each, f"{where}, {name}") for name, each in value.items()}
    elif kind in (str, bool):
        if isinstance(value, kind):
            return value
    elif kind == Value and isinstance(value, str | bool):
        return value
    elif _is_amount(value) and (kind is not int or value == int(value)):
        return int(value) if kind is int else value
    raise RecordsError(f"{where} is {shortened(repr(value))}, but it must be {_WORDS.get(kind, 'a list or an object')}")


_WORDS: dict[Any, str] = {
    str: "a string", bool: "true or false", int: "a whole number from 0", float: "a number from 0",
    Value: "a string or a number from 0",
}  # fmt: skip


def _is_amount(value: Any) -> bool:
    """Whether this is a number from 0. Python reads Infinity, NaN and integers of any size in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or _LEAST <= value <= _MOST)


def shortened(text: str) -> str:
    """The text, shortened for an error."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
