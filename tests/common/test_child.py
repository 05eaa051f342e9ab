"""Calls in a child process: answers, exceptions, crashes, and the end of the process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from zloader.common.child import ChildCrashedError, ChildError, call_in_child, children_kept


def call(function: str, *arguments: Any, deadline_s: float = PATIENCE_S) -> bytes:
    return call_in_child(f"children:{function}", *arguments, deadline_s=deadline_s)


def pid() -> int:
    """The process that answers."""
    return json.loads(call("count"))[0]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls_are_answered_in_another_process_that_ends() -> None:
    process, n_calls, *given = json.loads(call("count", 1, "two"))
    assert (n_calls, given) == (1, [1, "two"])
    assert process != os.getpid()
    assert not is_running(process)
    for content in (b"", b"null", bytes(range(256)) * (3 << 12)):
        assert call("same", content) == content


def test_exceptions_are_raised_here() -> None:
    with children_kept():
        for name, words in [("fail", "nothing is there"), ("nothing", "no attribute 'nothing'")]:
            with pytest.raises(ChildError, match=words) as caught:
                call(name)
            assert type(caught.value).__name__ == {"fail": "LookupError"}.get(name, "AttributeError")
    with pytest.raises(ChildError, match="no_module"):
        call_in_child("no_module:f", deadline_s=PATIENCE_S)


def test_crashes(tmp_path: Path) -> None:
    with pytest.raises(ChildCrashedError, match=r"ended with SIGSEGV \(this is the last line\)$"):
        call("crash", tmp_path, 1)
    with pytest.raises(ChildCrashedError, match=r"ended with exit status 3$"):
        call("leave", 3)


def test_a_call_that_hangs() -> None:
    with children_kept():
        before = pid()
        with pytest.raises(TimeoutError, match="timed out"):
            call("hang", deadline_s=0.5)
        assert not is_running(before)
        assert pid() != before


def test_an_interrupt_ends_the_process() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with children_kept():
            process = pid()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                call("hang")
            assert not is_running(process)
            assert json.loads(call("count"))[1] == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_processes_are_kept_for_the_next_call() -> None:
    with children_kept():
        with children_kept():
            first = pid()
        assert [json.loads(call("count", n)) for n in range(3)] == [[first, n + 2, n] for n in range(3)]
        assert is_running(first)
    assert not is_running(first)


def test_a_process_that_failed_is_not_used_again() -> None:
    with children_kept():
        first = pid()
        with pytest.raises(ChildError):
            call("fail")
        assert not is_running(first)
        assert pid() != first


@pytest.mark.slow
def test_a_crash_counts_only_in_a_process_of_its_own(tmp_path: Path) -> None:
    with children_kept():
        first = pid()
        assert json.loads(call("crash", tmp_path, 1)) != [first, 2]
        with pytest.raises(ChildCrashedError, match="SIGSEGV"):
            call("crash", tmp_path, 3)
        os.kill(process := pid(), signal.SIGKILL)
        assert pid() != process


def test_kept_processes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zloader.common.child._most_kept", lambda: 3)
    with children_kept(), ThreadPoolExecutor(16) as threads:
        answers = [json.loads(answer) for answer in threads.map(lambda number: call("count", number), range(60))]
    assert [answer[2] for answer in answers] == list(range(60))
    assert 1 <= len({answer[0] for answer in answers}) <= 3
    assert not any(is_running(answer[0]) for answer in answers)


def test_a_forked_process_keeps_its_own() -> None:
    with children_kept():
        first = pid()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        forked = context.Process(target=lambda: theirs.send(pid()))
        forked.start()
        forked.join()
        assert ours.recv() != first
        assert pid() == first


OWNER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from zloader.common.child import call_in_child, children_kept
with children_kept():
    print(json.loads(call_in_child("children:count", deadline_s=60))[0], flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_the_process_ends_with_its_owner(interpreter: Any) -> None:
    done = interpreter.run(OWNER, Path(__file__).parents[1])
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(done.stdout))) as end:
        assert select.select([end], [], [], PATIENCE_S)[0], "the process outlives its owner"
