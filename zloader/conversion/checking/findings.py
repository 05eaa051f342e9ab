"""Collects the problems of a store from several threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. `where` is a key or path in the store; `what` describes the problem and its remedy."""

    where: str
    what: str


class Findings:
    """The problems found so far. Keeps the first 100, and the paths of the others."""

    def __init__(self, url: str) -> None:
        self._prefix = f"{url}: "
        self._lock = threading.Lock()
        self._named: list[Problem] = []
        self._n = 0
        self._paths: set[str] = set()

    def add(self, where: str, what: object) -> None:
        """Adds a problem, given as text or as an error."""
        problem = Problem(where=where, what=str(what).removeprefix(self._prefix))
        with self._lock:
            self._n += 1
            self._paths.add(where)
            if len(self._named) < MAX_NAMED:
                self._named.append(problem)

    def any_in(self, path: str) -> bool:
        """Whether there is a problem at a path or below it."""
        with self._lock:
            return any(known == path or known.startswith(f"{path}/") for known in self._paths)

    def problems(self) -> tuple[Problem, ...]:
        """The first 100 problems. If there are more, a last entry gives their number."""
        with self._lock:
            more = self._n - len(self._named)
            rest = [Problem(where=self._prefix[:-2], what=f"{more} more problems")] if more else []
            return (*self._named, *rest)
