"""The producer: an actor that makes the minibatches of any fetch of a plan.

It has no state but its copy of the loader. Which rows a fetch has, and in which order, is arithmetic. So any producer
can go on where another one died, and the minibatches are the same, bit for bit.

Many exceptions do not survive pickling: those with arguments of their own, or with a lock. So an error travels to the
stream as bytes that may fail to be unpickled, and as text. Neither its traceback nor its cause is part of a pickle: the
text has both.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from zloader.common.errors import ProducerError
from zloader.common.machine import keep_freed_memory
from zloader.order.plan import Fetch, Plan, Remaining
from zloader.producing.window import LANES
from zloader.reading.bridge import Bridge, Put
from zloader.reading.fetch import FetchScheduler
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.matrix_rows import held_share
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool, Counters
from zloader.training.loader import Loader
from zloader.training.own_transforms import Made
from zloader.training.tensors import silence_sparse_warnings

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
                error = ray.cloudpickle.loads(stored)
            except (Exception, SystemExit) as met:  # noqa: BLE001 -- it runs code of the error's class
                why = repr(met)
        if not isinstance(error, BaseException):
            error = ProducerError(f"{said}\n(This is the text of an error that does not survive pickling: {why:.1000})")
        error.add_note(f"raised by a producer{producer}:\n{trace}")
        return error


def carried(error: BaseException) -> CarriedError:
    """An error in a form that Ray can send."""
    stored, why = b"", ""
    try:
        stored = ray.cloudpickle.dumps(error)
        if len(stored) > _MOST_BYTES:
            stored, why = b"", f"its pickle takes {len(stored)} bytes, and at most {_MOST_BYTES} are sent"
    except Exception as met:  # noqa: BLE001 -- it runs code of the error's class
        why = repr(met)
    said = _shortened(traceback.format_exception_only(error))
    return CarriedError(stored, said, _shortened(traceback.format_exception(error)), why)


def _shortened(lines: list[str]) -> str:
    text = "".join(lines).strip()
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT // 2]} ... {text[-_MOST_TEXT // 2 :]}"


def pickled(value: Any) -> NDArray[np.uint8]:
    """A value as bytes that Ray does not copy, and whose arrays will be writable, as compiled loops need them."""
    return np.frombuffer(ray.cloudpickle.dumps(value), np.uint8)


def unpickled(value: NDArray[np.uint8]) -> Any:
    """The value of which `pickled` has made these bytes."""
    return ray.cloudpickle.loads(value)


class Producer:
    """The actor. `open` comes first."""

    def __init__(self) -> None:
        self._buffers = BufferPool()
        self._epoch: tuple[int, Plan, Recipe] | None = None
        self._one_at_a_time = threading.Lock()

    def open(self, loader: NDArray[np.uint8]) -> tuple[str, int]:
        """Opens the stores of a pickled loader. Returns the ids of this machine and of this process."""
        with _carried():
            self._loader: Loader = unpickled(loader)
        silence_sparse_warnings()
        if self._loader.options.tune_malloc:
            keep_freed_memory()
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def answer(self) -> None:
        """Does nothing. An error says that this process is dead."""

    def make(
        self, number: int, plan: NDArray[np.uint8], remaining: Remaining, ready_bytes: int
    ) -> Iterator[tuple[Sequence[Any], Counters]]:
        """Yields groups of minibatches, as the loader's recipe makes them, each with what was counted so far.

        `plan` is the pickled plan of epoch `number` of the stream. Minibatches that are made, and not yet yielded, have
        up to a quarter of `ready_bytes`, and a group a sixteenth of it, or one minibatch each. With a fetch_transform,
        which gets the same minibatches at once as in a loader, the loader's own budget holds instead.
        """
        epoch_plan, recipe = self._opened(number, plan)
        options = self._loader.options
        # All that a producer makes at a time shares the memory of one loader.
        options = replace(options, in_flight_bytes=options.in_flight_bytes // LANES)
        if recipe.cutting.regroups:  # otherwise groups must be those of the loader, and so must the budget
            options = replace(options, ready_bytes=max(1, min(options.ready_bytes // LANES, ready_bytes)))
        scheduler = FetchScheduler(recipe.with_parts(self._own), options, self._buffers)
        most_bytes = options.ready_bytes // 4
        with contextlib.closing(_groups(scheduler, epoch_plan.rest_of(remaining), most_bytes)) as groups:
            while True:
                with _carried():
                    group = next(groups, None)
                if group is None:
                    return
                yield [_sendable(item) for item in group], scheduler.counters

    def held(self, number: int, plan: NDArray[np.uint8], coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of this machine hold."""
        epoch_plan, recipe = self._opened(number, plan)
        with _carried():
            return [
                held_share(recipe.x.values(), recipe.ends, epoch_plan.rest_of(remaining).rows) for remaining in coming
            ]

    def _own(self, parts: Sequence[MatrixPart]) -> list[MatrixPart]:
        """The parts of an array in all stores, with sources of their own: a source belongs to one event loop."""
        pairs = zip(parts, self._loader.dataset.whole.stores, strict=True)
        return [replace(part, source=store.source(self._loader.options)) for part, store in pairs]

    def _opened(self, number: int, plan: NDArray[np.uint8]) -> tuple[Plan, Recipe]:
        """The plan and the recipe of an epoch, which all its fetches share: it has the shard indexes that were read."""
        with self._one_at_a_time:
            if self._epoch is None or self._epoch[0] != number:
                with _carried():
                    epoch_plan = unpickled(plan)
                    self._epoch = number, epoch_plan, self._loader.recipe(epoch_plan.epoch)
            return self._epoch[1:]


@contextlib.contextmanager
def _carried() -> Iterator[None]:
    """Raises an error in the form in which Ray can send it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- raised again
        raise carried(error) from None


def _sendable(item: Any) -> Any:
    """A minibatch as Ray can send it: an error instead of a minibatch is carried, too."""
    if isinstance(item, Made) and item.error is not None:
        return replace(item, error=carried(item.error))
    return item


def _groups(scheduler: FetchScheduler, fetch: Fetch, ready_bytes: int) -> Bridge[Sequence[Any]]:
    """The minibatches of a fetch in the groups in which they are gathered."""

    async def produce(put: Put[Sequence[Any]]) -> None:
        await scheduler.run([fetch], lambda items, n_bytes: put([items], n_bytes))

    return Bridge(produce, ready_bytes=ready_bytes, name="zloader-fetch")
