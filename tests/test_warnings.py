"""Any warning fails a test, except for deprecation warnings in the code of other packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

FUTURE = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]
OURS = ["zloader", "zloader.reading.retry", "__main__", *(path.stem for path in Path(__file__).parent.rglob("*.py"))]


def caller_in(module: str) -> Callable[..., None]:
    """A function that seems to be defined in `module`, and calls the function it is given."""
    names: dict[str, Callable[..., None]] = {"__name__": module}
    exec("def call(function, *arguments): function(*arguments)", names)
    return names["call"]


def warn(category: type[Warning], stacklevel: int = 2) -> None:
    warnings.warn("This will change.", category, stacklevel=stacklevel)


@pytest.mark.parametrize("category", FUTURE)
def test_deprecations_in_other_packages_are_allowed(category):
    with warnings.catch_warnings(record=True) as seen:
        caller_in("pandas.core.frame")(warn, category)
        caller_in("zloader_of_others")(warn, category)
    assert len(seen) == 2


@pytest.mark.parametrize("category", FUTURE)
def test_deprecations_in_our_code_fail(category):
    for module in OURS:
        with pytest.raises(category, match="will change"):
            caller_in(module)(warn, category)
        with pytest.raises(category, match="will change"):  # also if a package attributes the warning to its caller
            caller_in(module)(caller_in("pandas.core.frame"), warn, category, 3)


@pytest.mark.parametrize(
    "category", [UserWarning, RuntimeWarning, ResourceWarning, pytest.PytestUnraisableExceptionWarning]
)
@pytest.mark.parametrize("module", ["zloader", "pandas.core.frame"])
def test_all_other_warnings_fail_in_any_package(module, category):
    with pytest.raises(category, match="will change"):
        caller_in(module)(warn, category)
