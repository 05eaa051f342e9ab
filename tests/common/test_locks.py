"""Locks of what several loaders share do not stop a process that is forked while a thread holds them."""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
from pathlib import Path

import pytest
from helpers import PATIENCE_S

import zloader
from zloader.caching.chunk_file import ChunkSet
from zloader.common.locks import forkable_lock


def take(lock: threading.Lock) -> None:
    sys.exit(0 if lock.acquire(timeout=1) else 1)


@pytest.mark.any_version
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_takes_a_lock_that_a_thread_of_its_parent_holds() -> None:
    plain, forkable, held, over = threading.Lock(), forkable_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with plain, forkable:
            held.set()
            over.wait()

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(PATIENCE_S)
    context = multiprocessing.get_context("fork")
    forked = [context.Process(target=take, args=(lock,)) for lock in (forkable, plain)]
    for each in forked:
        each.start()
    for each in forked:
        each.join(PATIENCE_S)
    assert not forkable.acquire(blocking=False)  # the parent's is held as before
    over.set()
    assert [each.exitcode for each in forked] == [0, 1]


@pytest.mark.any_version
def test_locks_are_forgotten_with_their_owners() -> None:
    from zloader.common import locks

    chunks = ChunkSet(9)
    before = len(locks._locks)
    del chunks
    assert len(locks._locks) == before - 1


@pytest.mark.any_version
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
    assert len(files) > 80
