"""The producer as an actor of Ray."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from zloader.common.machine import keep_freed_memory
from zloader.order.plan import Remaining
from zloader.producing.producer import Producer, carrying
from zloader.reading.resources import Counters
from zloader.training.recipes import LoaderRecipes


def pickled(value: Any) -> NDArray[np.uint8]:
    """A value as bytes that Ray does not copy, and whose arrays will be writable, as compiled loops need them."""
    return np.frombuffer(ray.cloudpickle.dumps(value), np.uint8)


def unpickled(value: NDArray[np.uint8]) -> Any:
    """The value of which `pickled` has made these bytes."""
    return ray.cloudpickle.loads(value)


class Actor:
    """A producer. `open` comes first."""

    def open(self, recipes: NDArray[np.uint8]) -> tuple[str, int]:
        """Opens the stores of the pickled recipes of a loader. Returns the ids of this machine and of this process."""
        with carrying():
            opened: LoaderRecipes = unpickled(recipes)
        self._producer = Producer(opened, unpickled)
        if opened.options.tune_malloc:
            keep_freed_memory()
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def answer(self) -> None:
        """Does nothing. An error says that this process is dead."""

    def make(
        self, number: int, plan: NDArray[np.uint8], remaining: Remaining, ready_bytes: int
    ) -> Iterator[tuple[Sequence[Any], Counters]]:
        """Yields the groups of minibatches of what remains of a fetch, each with what was counted so far."""
        with contextlib.closing(self._producer.groups(number, plan, remaining, ready_bytes)) as groups:
            for group in groups:  # noqa: UP028 -- not `yield from`, which would hand on what Ray sends into this generator
                yield group

    def held(self, number: int, plan: NDArray[np.uint8], coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of this machine hold."""
        return self._producer.held(number, plan, coming)
