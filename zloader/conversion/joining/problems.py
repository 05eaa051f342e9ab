"""Collect the problems of the sources of a conversion, so that one error reports them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed


class Problems:
    """Collects problems. A context manager: on exit it raises one SourceError with one line per problem."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        """Adds a problem."""
        self._found.append(problem)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds the SourceError that the block raises, if any, instead of passing it on."""
        try:
            yield
        except SourceError as error:
            self.add(str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._found:
            raise SourceError("\n".join(self._found))


def by_source(found: Mapping[str, str]) -> str:
    """Groups findings by source, for a message: `numbers in a.h5ad, b.h5ad, text in c.h5ad`."""
    sources: dict[str, list[str]] = {}
    for source, what in found.items():
        sources.setdefault(what, []).append(source)
    return ", ".join(f"{what} in {listed(names)}" for what, names in sources.items())


def refuse_unknown(option: str, names: Iterable[str], available: Iterable[str]) -> None:
    """Raises OptionError, which lists the `available` names, if any of `names` is not among them."""
    available = list(available)
    unknown = [name for name in names if name not in available]
    if unknown:
        raise OptionError(f"{option}: no source has {listed(unknown)}. Available: {listed(available, 100)}")
