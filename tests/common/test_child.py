"""An object in a child process: its answers, its exceptions, its crashes, and the end of the process."""

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

import numpy as np
import pytest
from helpers import PATIENCE_S

from zloader.common.child import Child, ChildCrashedError, ChildError, children_kept


def clumsy(folder: Path, crashes: int = 0, **options: Any) -> Child:
    return Child("children:Clumsy", folder, crashes, **options)


def answer(arrays: list[np.ndarray]) -> Any:
    (content,) = arrays
    return json.loads(content.tobytes())


def pid_of(folder: Path, **options: Any) -> int:
    """The process of a shared child, which has answered by an object of its own."""
    folder.mkdir(exist_ok=True)
    with clumsy(folder, shared=True, **options) as child:
        assert answer(child.call("count"))[1] == 1
        return child.pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls_are_answered_by_one_object_in_another_process(tmp_path: Path) -> None:
    with clumsy(tmp_path) as child:
        assert child.pid is None
        assert [answer(child.call("count", n)) for n in range(3)] == [[1, n + 1, n] for n in range(3)]
        assert child.pid != os.getpid()
        given = [np.arange(3 << 20), np.empty(0, np.float16), np.array([True, False]), np.arange(20)[::-2]]
        for found, sent in zip(child.call("same", *given), given, strict=True):
            np.testing.assert_array_equal(found, sent)
            assert found.dtype == sent.dtype
        child.call("print")
        assert answer(child.call("count")) == [1, 4]
        pid = child.pid
    assert not is_running(pid)
    assert answer(child.call("count")) == [2, 1]  # another process
    child.close()
    child.close()


def test_calls_of_several_threads(tmp_path: Path) -> None:
    with clumsy(tmp_path) as child, ThreadPoolExecutor(8) as threads:
        found = [answer(each) for each in threads.map(lambda n: child.call("count", n), range(100))]
    assert [given for _, _, given in found] == list(range(100))
    assert sorted(calls for _, calls, _ in found) == list(range(1, 101))


def test_exceptions_are_raised_here(tmp_path: Path) -> None:
    with clumsy(tmp_path) as child:
        for _ in range(2):
            with pytest.raises(ChildError, match="nothing is there") as caught:
                child.call("fail")
            assert type(caught.value).__name__ == "LookupError"
        assert answer(child.call("count")) == [1, 1]  # in the same process
    for target, kind in [("children:Nothing", "AttributeError"), ("children_:Clumsy", "ModuleNotFoundError")]:
        with Child(target) as child, pytest.raises(ChildError) as caught:
            child.call("count")
        assert type(caught.value).__name__ == kind


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [1, 2])
def test_a_crash_repeats_the_call_in_a_new_process(tmp_path: Path, crashes: int) -> None:
    with clumsy(tmp_path, crashes, attempts=3) as child:
        child.call("count")
        assert answer(child.call("crash", "at 7")) == [crashes + 1, 1, "at 7"]
        assert answer(child.call("count")) == [crashes + 1, 2]


@pytest.mark.slow
def test_crashes_in_a_row_are_an_error(tmp_path: Path) -> None:
    with clumsy(tmp_path, 99, attempts=3) as child:
        words = r"ended with SIGSEGV \(this is the last line\), 3 times in a row"
        with pytest.raises(ChildCrashedError, match=words):
            child.call("crash")
        assert child.pid is None
        assert answer(child.call("count")) == [4, 1]
    with clumsy(tmp_path) as child, pytest.raises(ChildCrashedError, match=r"ended with exit status 3$"):
        child.call("leave", 3)
    with Child("children:Crashing") as child, pytest.raises(ChildCrashedError, match="SIGSEGV"):
        child.call("count")


def test_a_process_that_was_killed_between_calls(tmp_path: Path) -> None:
    with clumsy(tmp_path, attempts=2) as child:
        child.call("count")
        os.kill(child.pid, signal.SIGKILL)
        assert answer(child.call("count")) == [2, 1]


def test_a_call_that_hangs(tmp_path: Path) -> None:
    with clumsy(tmp_path, deadline_s=0.5) as child:
        with pytest.raises(TimeoutError, match="timed out"):
            child.call("hang")
        assert child.pid is None


def test_an_interrupt_ends_the_process(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with clumsy(tmp_path) as child:
            child.call("count")
            pid = child.pid
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                child.call("hang")
            assert not is_running(pid)
            assert answer(child.call("count")) == [2, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_processes_are_kept_for_the_next_child(tmp_path: Path) -> None:
    with children_kept():
        with children_kept():
            first = pid_of(tmp_path / "a")
        assert [pid_of(tmp_path / name) for name in "bca"] == [first] * 3
        assert pid_of(tmp_path / "a", environment={"OTHER": "1"}) != first
        with clumsy(tmp_path, attempts=2) as child:
            child.call("count")
            assert child.pid != first
        assert is_running(first)
    assert not is_running(first)
    assert not is_running(pid_of(tmp_path / "a"))


@pytest.mark.slow
def test_a_process_that_failed_is_not_used_again(tmp_path: Path) -> None:
    with children_kept():
        first = pid_of(tmp_path)
        with clumsy(tmp_path, shared=True) as child, pytest.raises(ChildError):
            child.call("fail")
        assert not is_running(first)
        second = pid_of(tmp_path)
        with clumsy(tmp_path, shared=True, deadline_s=0.5) as child, pytest.raises(TimeoutError):
            child.call("hang")
        assert pid_of(tmp_path) not in (first, second)


@pytest.mark.slow
def test_a_crash_counts_only_in_a_process_of_its_own(tmp_path: Path) -> None:
    with children_kept():
        first = pid_of(tmp_path)
        with clumsy(tmp_path, 2, shared=True) as child:
            assert answer(child.call("crash")) == [3, 1]
            assert child.pid != first
        with Child("children:Crashing", shared=True) as child, pytest.raises(ChildCrashedError, match="SIGSEGV"):
            child.call("count")
        os.kill(pid := pid_of(tmp_path), signal.SIGKILL)
        assert pid_of(tmp_path) != pid


def test_kept_processes_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zloader.common.child._most_shared", lambda: 3)
    for number in range(60):
        (tmp_path / str(number)).mkdir()
    with children_kept(), ThreadPoolExecutor(16) as threads:
        pids = list(threads.map(lambda number: pid_of(tmp_path / str(number)), range(60)))
    assert 1 <= len(set(pids)) <= 3
    assert not any(map(is_running, pids))


def test_a_forked_process_keeps_its_own(tmp_path: Path) -> None:
    with children_kept():
        first = pid_of(tmp_path)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        forked = context.Process(target=lambda: theirs.send(pid_of(tmp_path)))
        forked.start()
        forked.join()
        assert ours.recv() != first
        assert pid_of(tmp_path) == first


OWNER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from zloader.common.child import Child
child = Child("children:Clumsy", Path(sys.argv[2]))
child.call("count")
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_the_process_ends_with_its_owner(interpreter: Any, tmp_path: Path) -> None:
    done = interpreter.run(OWNER, Path(__file__).parents[1], tmp_path)
    pid = int(done.stdout)
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as end:
        assert select.select([end], [], [], PATIENCE_S)[0], "the process outlives its owner"
