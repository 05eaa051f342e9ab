"""Errors of a task reach the training process with their type or, if that cannot be sent, as text."""

from __future__ import annotations

import os
import pickle
import sys
import threading

import pytest
from test_stream import SMALL, loader_of, store  # noqa: F401 -- the fixture

from zloader.common.errors import ProducerError

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
sent = pytest.importorskip("zloader.ray.sent")
pytestmark = [pytest.mark.any_version, pytest.mark.slow]  # Ray takes ten seconds to start


class Two(Exception):
    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} and {b}")


class Locked(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Reduced(Exception):
    """Its pickle calls a function."""

    def __init__(self, message: str, *reduced: object) -> None:
        super().__init__(message)
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        pytest.param(OSError(5, "my message"), OSError, "my message", id="kept"),
        pytest.param(ExceptionGroup("my message", [KeyError("a")]), ExceptionGroup, "my message", id="group"),
        pytest.param(Two("left", "right"), ProducerError, "Two: left and right", id="two arguments"),
        pytest.param(Locked("my message"), ProducerError, "Locked: my message", id="lock"),
        pytest.param(ExceptionGroup("all", [Two("a", "b")]), ProducerError, "ExceptionGroup: all", id="group of those"),
        pytest.param(Reduced("my message", sys.exit, (3,)), ProducerError, "my message", id="exits"),
        pytest.param(Reduced("my message", int, ()), ProducerError, "my message", id="becomes no error"),
    ],
)
def test_an_error_keeps_its_message_and_its_line(cluster, error, kind, says):
    try:
        try:
            int("the cause")
        except ValueError as cause:
            raise error from cause
    except Exception as met:  # noqa: BLE001
        found = pickle.loads(pickle.dumps(sent.sendable(met)))
    with pytest.raises(kind, match=says):
        raise found
    note = found.__notes__[-1]
    assert note.startswith("raised by a task, on Ray node ")
    assert "raise error from cause" in note
    assert "the cause" in note


def test_an_error_without_a_text_is_carried(cluster):
    found = pickle.loads(pickle.dumps(sent.sendable(Wordless())))
    assert isinstance(found, Wordless)
    assert "Wordless" in found.__notes__[-1]


def raises(minibatch):
    raise Two("left", "right")


def unpicklable(minibatch):
    return threading.Lock()


class NotThere:
    def __reduce__(self):
        return only_here, (os.getpid(),)


def only_here(pid):
    if pid != os.getpid():
        raise ImportError("no such module")


def not_there(minibatch):
    return NotThere()


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        (raises, ProducerError, "left and right\nraised by batch_transform raises for 16 rows"),
        (unpicklable, ProducerError, r"lock.*batch_transform returns must survive pickling"),
        (not_there, ProducerError, r"(?s)no such module.*must survive pickling"),
    ],
)
def test_what_a_function_of_the_users_own_does_in_a_task_is_named(cluster, store, function, kind, says):  # noqa: F811
    loader = loader_of(store, batch_transform=function)
    with pytest.raises(kind, match=says) as caught:
        next(iter(zr.stream(loader, tasks=1, resources=SMALL)))
    if function is raises:
        assert 'raise Two("left", "right")' in caught.value.__notes__[-1]
        assert "test_carried.py" in caught.value.__notes__[-1]
