"""What is wrong with a store, gathered while several threads look at it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: `where` is a key or path in the store, `what` says what, and what to do."""

    where: str
    what: str


class Findings:
    """The problems found so far. The first 100 are kept, and where the others are."""

    def __init__(self, url: str) -> None:
        self._prefix = f"{url}: "
        self._lock = threading.Lock()
        self._named: list[Problem] = []
        self._n = 0
        self._places: set[str] = set()

    def add(self, where: str, what: object) -> None:
        """One more problem, as text or as the error that says it."""
        problem = Problem(where=where, what=str(what).removeprefix(self._prefix))
        with self._lock:
            self._n += 1
            self._places.add(where)
            if len(self._named) < MAX_NAMED:
                self._named.append(problem)

    def any_in(self, path: str) -> bool:
        """Whether something is wrong with what is at a path or below it."""
        with self._lock:
            return any(place == path or place.startswith(f"{path}/") for place in self._places)

    def problems(self) -> tuple[Problem, ...]:
        """Those kept, the last saying how many more there are."""
        with self._lock:
            more = self._n - len(self._named)
            rest = [Problem(where=self._prefix[:-2], what=f"{more} more problems")] if more else []
            return (*self._named, *rest)
