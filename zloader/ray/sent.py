"""What travels between a stream and its tasks: pickles without copies, arrays that stay writable, and errors.

Many exceptions do not survive pickling: those with arguments of their own, or with a lock. So an error travels as bytes
that may fail to be unpickled, and as text. Neither its traceback nor its cause is part of a pickle: the text has both.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from zloader.common.errors import ProducerError
from zloader.common.messages import printable_lines

_MOST_BYTES = 1 << 20  # of a pickled error
_MOST_TEXT = 10_000  # characters


def pickled(value: Any) -> NDArray[np.uint8]:
    """A value as bytes that Ray does not copy, and whose arrays will be writable, as compiled loops need them."""
    return np.frombuffer(ray.cloudpickle.dumps(value), np.uint8)


def unpickled(value: NDArray[np.uint8]) -> Any:
    """The value of which `pickled` has made these bytes."""
    return ray.cloudpickle.loads(value)


class _Writable:
    """The memory of an array that is marked read-only, as the base of a writable one."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(value: Any) -> Any:
    """A minibatch whose arrays are writable, as a Loader's are.

    Ray marks the arrays of its objects as read-only, because processes may share them. Nobody else reads an object
    with minibatches. The memory is that of the object, and is freed with the last array or tensor in it.
    """
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else np.asarray(_Writable(value))
    if isinstance(value, dict):
        return type(value)((name, writable(each)) for name, each in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: writable(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


@dataclasses.dataclass(frozen=True)
class CarriedError:
    """An error as a pickle, or b"" and why there is none; its last line, its traceback, and where it was raised."""

    stored: bytes
    why: str
    said: str
    trace: str
    where: str

    def opened(self) -> BaseException:
        """The error, or else a ProducerError that says the same. Its note names the task and has the traceback."""
        error, why = None, self.why
        if self.stored:
            try:
                error = ray.cloudpickle.loads(self.stored)
            except (Exception, SystemExit) as met:  # noqa: BLE001 -- it runs code of the error's class
                why = repr(met)
        if not isinstance(error, BaseException):
            error = ProducerError(
                *self.said.split("\n"), f"(This is the text of an error that does not survive pickling: {why:.1000})"
            )
        error.add_note(f"raised by a task{self.where}:\n{self.trace}")
        return error


def carried(error: BaseException) -> CarriedError:
    """An error in a form that other processes can read."""
    stored, why = b"", ""
    try:
        stored = ray.cloudpickle.dumps(error)
        if len(stored) > _MOST_BYTES:
            stored, why = b"", f"its pickle takes {len(stored)} bytes, and at most {_MOST_BYTES} are sent"
    except Exception as met:  # noqa: BLE001 -- it runs code of the error's class
        why = repr(met)
    said, trace = traceback.format_exception_only(error), traceback.format_exception(error)
    return CarriedError(stored, why, _shortened(said), _shortened(trace), _where())


def _where() -> str:
    return f", on Ray node {ray.get_runtime_context().get_node_id()}, process {os.getpid()}"


def _shortened(lines: list[str]) -> str:
    text = printable_lines("".join(lines).strip())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT // 2]} ... {text[-_MOST_TEXT // 2 :]}"
