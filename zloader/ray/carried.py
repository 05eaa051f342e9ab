"""Errors on their way from a producer to its stream.

Many exceptions do not survive pickling: those with arguments of their own, or with a lock. So an error travels as bytes
that may fail to be unpickled, and as text. Neither its traceback nor its cause is part of a pickle: the text has both.
"""

from __future__ import annotations

import traceback

import ray

from zloader.common.errors import ProducerError

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
