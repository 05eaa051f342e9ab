"""Public functions and classes answer a keyword that they do not have with the one that was probably meant.

Python looks for the nearest name from 3.13 on only, and does not know those that belong in an object such as
zl.FetchOptions.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType
from typing import Any, TypeVar, cast

from zloader.common.errors import KeywordError
from zloader.common.messages import listed, nearest

T = TypeVar("T")


def answers(found: T) -> T:
    """A function that raises KeywordError for an unknown keyword; or a class whose constructor does.

    So do the methods of a class that have keyword-only options. The names, docstrings and signatures stay, and a class
    is changed in place. A function is replaced in its module too, so that it can be pickled.
    """
    if isinstance(found, FunctionType):
        answering = _answering(found)
        setattr(sys.modules[found.__module__], found.__name__, answering)
        return cast("T", answering)
    for owner in getattr(found, "__mro__", ()):
        if owner.__module__.partition(".")[0] == "zloader" and not getattr(owner, "_is_protocol", False):
            for name, method in list(vars(owner).items()):
                if isinstance(method, FunctionType) and (
                    name == "__init__" or (method.__code__.co_kwonlyargcount and not name.startswith("_"))
                ):
                    setattr(owner, name, _answering(method))
    return found


def _answering(function: FunctionType) -> Callable[..., Any]:
    if hasattr(function, "_answers"):
        return function

    @functools.wraps(function)
    def answering(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:
            answer = _answer(function, keywords)
            if answer is None:
                raise
        raise KeywordError(answer)

    vars(answering)["_answers"] = True
    return answering


def _answer(function: FunctionType, given: dict[str, Any]) -> str | None:
    """The message for the first keyword that a function does not have; None if it has all of them."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    unknown = next((name for name in given if name not in known), None)
    if unknown is None or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    called = function.__qualname__.removesuffix(".__init__")
    answer = f"{called} has no option {unknown!r}"
    for name in known:
        for word in re.findall(r"\w+", str(parameters[name].annotation)):
            options = function.__globals__.get(word)
            if unknown in getattr(options, "__dataclass_fields__", ()):
                return f"{answer}: write {name}=zl.{word}({unknown}=...)"
    if near := nearest(unknown, known) or get_close_matches(unknown, known, 1):
        return f"{answer}. Did you mean {' or '.join(map(repr, near))}?"
    return f"{answer}; it has: {listed(known, len(known))}"
