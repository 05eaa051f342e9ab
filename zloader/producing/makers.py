"""The producers as an epoch sees them: who makes fetches, and how making them can fail. Without Ray.

`zloader.ray.crew` has the producers of a cluster. Tests and benchmarks/scale/ have others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zloader.order.plan import Remaining
from zloader.reading.resources import Counters

LANES = 2  # fetches that a producer makes at a time: it reads one while it gathers another


class LostError(Exception):
    """A producer, its machine, or its results are gone. Reading the data has not failed."""


class FailedError(Exception):
    """A fetch cannot be made. The cause is the error for the consumer."""


class Making(Protocol):
    """A fetch that a producer makes, group by group. It waits when a few groups have not been asked for."""

    async def next(self) -> tuple[Sequence[Any], Counters] | None:
        """The next group, with all that was counted so far; None at the end. Raises LostError or FailedError."""
        ...

    def cancel(self) -> None:
        """Ends the making, if it has not ended."""
        ...


class Maker(Protocol):
    """A producer that is ready to work."""

    machine: str
    lost: bool

    def make(self, plan: Any, remaining: Remaining, ready_bytes: int) -> Making:
        """Begins what remains of a fetch. `ready_bytes` bounds the minibatches that are made ahead."""
        ...

    async def held(self, plan: Any, coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of its machine hold. Raises LostError or FailedError."""
        ...

    async def ended(self) -> None:
        """Returns when the producer is dead."""
        ...


class Makers(Protocol):
    """Starts producers, and keeps up to `size` of them. Ends those that are dropped."""

    size: int

    async def join(self, others_work: Callable[[], bool]) -> Maker:
        """A producer that is ready to work. Raises ProducerError if there is none, and no other works."""
        ...

    def leave(self, maker: Any) -> None:
        """Keeps a producer for the next epoch."""
        ...

    def drop(self, maker: Any) -> None:
        """Ends a producer."""
        ...

    async def watch(self) -> None:
        """Raises ProducerError when no producer can be reached any more."""
        ...
