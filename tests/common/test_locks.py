"""What several loaders share does not stop a process that is forked while a thread of its parent uses it."""

from __future__ import annotations

import functools
import multiprocessing
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

import zloader
from zloader.common.compiled import compiled, load_compiler
from zloader.common.locks import cached_property, forkable_lock

pytestmark = [
    pytest.mark.any_version,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def exit_codes(*functions: Callable[[], Any], within_s: float = PATIENCE_S) -> list[int | None]:
    """Those of processes that are forked now, each to call one function; None for one that does not end."""
    context = multiprocessing.get_context("fork")
    forked = [context.Process(target=function) for function in functions]
    for each in forked:
        each.start()
    for each in forked:
        each.join(within_s)
    codes = [each.exitcode for each in forked]
    for each in forked:
        each.kill()
        each.join()
    return codes


def test_a_forked_process_takes_a_lock_that_a_thread_of_its_parent_holds() -> None:
    plain, forkable, held, over = threading.Lock(), forkable_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with plain, forkable:
            held.set()
            over.wait()

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(PATIENCE_S)
    codes = exit_codes(*(lambda lock=lock: sys.exit(not lock.acquire(timeout=1)) for lock in (forkable, plain)))
    assert not forkable.acquire(blocking=False)  # the parent's is held as before
    over.set()
    assert codes == [0, 1]


class Slow:
    def __init__(self, wait: Callable[[], Any] | None = None) -> None:
        self._wait = wait

    @cached_property
    def value(self) -> int:
        """Seven."""
        if self._wait:
            self._wait()
        return 7


def test_a_forked_process_computes_a_cached_property_that_a_thread_of_its_parent_computes() -> None:
    """Python 3.11 has a lock for it, which is shared by all objects of a class."""
    begun, over = threading.Event(), threading.Event()
    waiting = Slow(lambda: (begun.set(), over.wait()))
    thread = threading.Thread(target=lambda: waiting.value)
    thread.start()
    assert begun.wait(PATIENCE_S)
    codes = exit_codes(lambda: sys.exit(Slow().value))
    over.set()
    thread.join()
    assert codes == [7]


def test_a_cached_property_is_computed_once() -> None:
    calls: list[int] = []
    one = Slow(lambda: calls.append(1))
    assert (one.value, one.value, calls) == (7, 7, [1])
    assert Slow.value.__doc__ == "Seven."
    assert isinstance(Slow.value, functools.cached_property)


def test_a_forked_process_compiles_although_a_thread_of_its_parent_did() -> None:
    from numba.core.compiler_lock import global_compiler_lock

    @compiled
    def seven() -> int:
        return 7

    load_compiler()
    held = threading.Event()

    def hold() -> None:
        with global_compiler_lock:
            held.set()
            time.sleep(0.5)  # in which the process is forked, if forking does not wait

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE_S)
    assert exit_codes(lambda: sys.exit(seven())) == [7]
    thread.join()


def test_locks_are_forgotten_with_their_owners() -> None:
    from zloader.common import locks

    lock = forkable_lock()
    before = len(locks._locks)
    del lock
    assert len(locks._locks) == before - 1


def test_what_loaders_share_has_locks_that_survive_a_fork() -> None:
    """The leases of a mirror are those of one epoch, and its process."""
    package = Path(zloader.__file__).parent
    files = [
        file
        for room in ("caching", "dataset", "reading", "selecting", "storage")
        for file in package.glob(f"{room}/*.py")
    ]
    plain = {file.name for file in files if re.search(r"threading\.Lock\(\)", file.read_text())}
    assert plain == {"leases.py"}
    assert len(files) > 40


def test_no_cached_property_has_a_lock() -> None:
    package = Path(zloader.__file__).parent
    using = {file.name for file in package.rglob("*.py") if "functools.cached_property" in file.read_text()}
    assert using == {"locks.py", "resume.py"}  # the latter recognizes those of users
    imported = {file.name for file in package.rglob("*.py") if "import cached_property" in file.read_text()}
    assert len(imported) > 10
