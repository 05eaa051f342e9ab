"""What travels between a stream and its tasks: pickles without copies, arrays that stay writable, and errors."""

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


def sendable(error: Exception) -> Exception:
    """An error as a task sends it: itself, or its text as a ProducerError. Its note names the task and its lines.

    Many exceptions do not survive pickling, such as those with arguments of their own, or with a lock. Neither the
    traceback nor the cause of one is part of a pickle.
    """
    trace = printable_lines("".join(traceback.format_exception(error)))
    said = printable_lines("".join(traceback.format_exception_only(error)).strip())
    where = f"on Ray node {ray.get_runtime_context().get_node_id()}, process {os.getpid()}"
    try:
        survives = isinstance(ray.cloudpickle.loads(ray.cloudpickle.dumps(error)), type(error))
    except (Exception, SystemExit):  # noqa: BLE001 -- it runs code of the error's class
        survives = False
    sent = error if survives else ProducerError(said)
    sent.add_note(f"raised by a task, {where}:\n{trace}")
    return sent
