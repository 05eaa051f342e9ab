"""A warning fails a test, but for what another package says of its own future."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

FUTURE = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]
OURS = ["zloader", "zloader.access.retry", "__main__", *(path.stem for path in Path(__file__).parent.rglob("*.py"))]


def caller_in(module: str) -> Callable[..., None]:
    """A function of a module of that name, which calls what it is given."""
    names: dict[str, Callable[..., None]] = {"__name__": module}
    exec("def call(function, *arguments): function(*arguments)", names)
    return names["call"]


def warn(category: type[Warning], stacklevel: int = 2) -> None:
    warnings.warn("It will be otherwise.", category, stacklevel=stacklevel)


@pytest.mark.parametrize("category", FUTURE)
def test_a_package_that_speaks_of_its_future_fails_no_test(category):
    with warnings.catch_warnings(record=True) as seen:
        caller_in("pandas.core.frame")(warn, category)
        caller_in("zloader_of_others")(warn, category)
    assert len(seen) == 2


@pytest.mark.parametrize("category", FUTURE)
def test_code_of_ours_that_has_no_future_fails(category):
    for module in OURS:
        with pytest.raises(category, match="otherwise"):
            caller_in(module)(warn, category)
        with pytest.raises(category, match="otherwise"):  # also where a package blames its caller
            caller_in(module)(caller_in("pandas.core.frame"), warn, category, 3)


@pytest.mark.parametrize(
    "category", [UserWarning, RuntimeWarning, ResourceWarning, pytest.PytestUnraisableExceptionWarning]
)
@pytest.mark.parametrize("module", ["zloader", "pandas.core.frame"])
def test_all_else_fails_whoever_says_it(module, category):
    with pytest.raises(category, match="otherwise"):
        caller_in(module)(warn, category)
