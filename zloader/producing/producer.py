"""What a producer does, whoever runs it: it makes the minibatches of any fetch of a plan.

It has no state but how minibatches are made. Which rows a fetch has, and in which order, is arithmetic. So any producer
can go on where another one died, and the minibatches are the same, bit for bit.

Many exceptions do not survive pickling: those with arguments of their own, or with a lock. So an error travels as bytes
that may fail to be unpickled, and as text. Neither its traceback nor its cause is part of a pickle: the text has both.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import cloudpickle

from zloader.common.errors import ProducerError
from zloader.common.messages import printable_lines
from zloader.common.options import FetchOptions
from zloader.order.plan import Fetch, Plan, Remaining
from zloader.producing.window import LANES
from zloader.reading.fetch import FetchScheduler
from zloader.reading.matrix_rows import held_share
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool, Counters

_MOST_BYTES = 1 << 20  # of a pickled error
_MOST_TEXT = 10_000  # characters


class CarriedError(Exception):
    """An error as a pickle, or b"" if it has none, its last line, its traceback, and why it has no pickle."""

    def __init__(self, stored: bytes, said: str, trace: str, why: str) -> None:
        super().__init__(stored, said, trace, why)

    def __str__(self) -> str:
        return str(self.args[1])

    def opened(self, producer: str) -> BaseException:
        """The error, or else a ProducerError that says the same. Its notes name the producer and have the traceback."""
        stored, said, trace, why = self.args
        error: BaseException | None = None
        if stored:
            try:
                error = cloudpickle.loads(stored)
            except (Exception, SystemExit) as met:  # noqa: BLE001 -- it runs code of the error's class
                why = repr(met)
        if not isinstance(error, BaseException):
            error = ProducerError(
                *said.split("\n"), f"(This is the text of an error that does not survive pickling: {why:.1000})"
            )
        error.add_note(f"raised by a producer{producer}:\n{trace}")
        return error


def carried(error: BaseException) -> CarriedError:
    """An error in a form that other processes can read."""
    stored, why = b"", ""
    try:
        stored = cloudpickle.dumps(error)
        if len(stored) > _MOST_BYTES:
            stored, why = b"", f"its pickle takes {len(stored)} bytes, and at most {_MOST_BYTES} are sent"
    except Exception as met:  # noqa: BLE001 -- it runs code of the error's class
        why = repr(met)
    said = _shortened(traceback.format_exception_only(error))
    return CarriedError(stored, said, _shortened(traceback.format_exception(error)), why)


def _shortened(lines: list[str]) -> str:
    text = printable_lines("".join(lines).strip())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT // 2]} ... {text[-_MOST_TEXT // 2 :]}"


class Recipes(Protocol):
    """How the minibatches of a loader are made in all its epochs."""

    @property
    def options(self) -> FetchOptions:
        """Memory and threads of this producer."""

    def recipe(self, epoch: int) -> Recipe:
        """How those of an epoch are made."""


class Groups(Iterator[tuple[Sequence[Any], Counters]]):
    """The minibatches of a fetch in the groups in which they are gathered, each with what was counted so far.

    Any thread may close it, which ends a waiting `next`. Raises CarriedError.
    """

    def __init__(self, scheduler: FetchScheduler, fetch: Fetch) -> None:
        self._counters = scheduler.counters
        self._bridge = scheduler.start([fetch], name="zloader-fetch")
        self.close = self._bridge.close

    def __next__(self) -> tuple[Sequence[Any], Counters]:
        with carrying():
            group = self._bridge.next_group()
        if not group:
            raise StopIteration
        return [_sendable(item) for item in group], self._counters


class Producer:
    """Makes fetches. `plan_of` returns the plan of an epoch from the form in which it came."""

    def __init__(self, recipes: Recipes, plan_of: Callable[[Any], Plan]) -> None:
        self._recipes, self._plan_of = recipes, plan_of
        self._buffers = BufferPool()
        self._epoch: tuple[int, Plan, Recipe] | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def ready_bytes(self) -> int:
        """The most bytes of its minibatches that wait."""
        return self._recipes.options.ready_bytes

    def groups(self, number: int, plan: Any, remaining: Remaining, ready_bytes: int) -> Groups:
        """Begins to make what remains of a fetch, as the recipe has it.

        `plan` is the plan of epoch `number` of those that are produced. Minibatches that are made, and not yet taken,
        have up to `ready_bytes`, and a group a sixteenth of it, or one minibatch each.
        """
        epoch_plan, recipe = self._opened(number, plan)
        options = self._recipes.options
        # All that a producer makes at a time shares the memory of one loader.
        options = replace(
            options,
            in_flight_bytes=options.in_flight_bytes // LANES,
            ready_bytes=max(1, min(options.ready_bytes // LANES, ready_bytes)),
        )
        with carrying():
            scheduler = FetchScheduler(recipe, options, self._buffers)
            return Groups(scheduler, epoch_plan.rest_of(remaining))

    def held(self, number: int, plan: Any, coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of this machine hold."""
        epoch_plan, recipe = self._opened(number, plan)
        with carrying():
            return [
                held_share(recipe.x.values(), recipe.ends, epoch_plan.rest_of(remaining).rows) for remaining in coming
            ]

    def _opened(self, number: int, plan: Any) -> tuple[Plan, Recipe]:
        """The plan and the recipe of an epoch, which all its fetches share: it has the shard indexes that were read."""
        with self._one_at_a_time:
            if self._epoch is None or self._epoch[0] != number:
                with carrying():
                    epoch_plan = self._plan_of(plan)
                    self._epoch = number, epoch_plan, self._recipes.recipe(epoch_plan.epoch)
            return self._epoch[1:]


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """Raises an error in the form in which it can be sent."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- raised again
        raise carried(error) from None


def _sendable(item: Any) -> Any:
    """A minibatch as it can be sent: an error instead of a minibatch is carried, too."""
    error = getattr(item, "error", None)
    return item if error is None else replace(item, error=carried(error))


def received(item: Any, where: str) -> Any:
    """What `_sendable` was given, from a producer `where`."""
    error = getattr(item, "error", None)
    return replace(item, error=error.opened(where)) if isinstance(error, CarriedError) else item
