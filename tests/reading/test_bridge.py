"""Items from a coroutine on its own thread arrive in order and within bounds, and no thread is left running."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import PATIENCE_S, assert_threads_end
from hypothesis import given
from hypothesis import strategies as st

import zloader.reading.bridge
from zloader.common.errors import CorruptChunkError, ReadError
from zloader.reading.bridge import Bridge

pytestmark = pytest.mark.any_version


@pytest.fixture
def name(request):
    """A thread name that no other test uses. After the test, no thread of this name may be running."""
    yield request.node.name
    assert_threads_end(request.node.name)


def _groups(groups, *, n_bytes=1, then=None):
    async def produce(put):
        for group in groups:
            await put(group, n_bytes)
        if then is not None:
            raise then

    return produce


async def _endless(put):
    for number in itertools.count():
        await put([number], 1)


async def _silent(put):
    await asyncio.Event().wait()


async def _interrupting():
    """Interrupts the main thread, repeatedly, because an interrupt in a garbage collector callback is lost."""
    while True:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.sleep(5)


# ---- items and errors


@given(groups=st.lists(st.lists(st.integers(), max_size=4), max_size=12), ready_bytes=st.integers(1, 5))
def test_items_arrive_in_order(groups, ready_bytes):
    bridge = Bridge(_groups(groups), ready_bytes=ready_bytes, name="in order")
    assert list(bridge) == list(itertools.chain(*groups))
    assert list(bridge) == []  # it stays exhausted
    assert_threads_end("in order")


@pytest.mark.parametrize("groups", [[[i] for i in range(5000)], [[], *[[]] * 3000, [1], *[[]] * 3000]])
def test_many_groups_in_a_row_do_no_harm(groups):
    assert list(Bridge(_groups(groups), ready_bytes=10, name="many")) == list(itertools.chain(*groups))
    assert_threads_end("many")


ERRORS = {
    "plain": (ReadError("s3://bucket/key"), ReadError),
    "in a group": (ExceptionGroup("tasks", [CorruptChunkError("chunk 3")]), CorruptChunkError),
    "in groups of groups": (
        ExceptionGroup("tasks", [ExceptionGroup("tasks", [ExceptionGroup("tasks", [ReadError("key")])])]),
        ReadError,
    ),
    "the first of several": (ExceptionGroup("tasks", [CorruptChunkError("a"), OSError("b")]), CorruptChunkError),
    "no zloader error": (ZeroDivisionError("x"), ZeroDivisionError),
}


@pytest.mark.parametrize(("error", "kind"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_comes_after_the_items_before_it(error, kind):
    bridge = Bridge(_groups([[1, 2], [3]], then=error), ready_bytes=100, name="error")
    assert [next(bridge), next(bridge), next(bridge)] == [1, 2, 3]
    with pytest.raises(kind) as caught:
        next(bridge)
    assert caught.type is kind
    with pytest.raises(StopIteration):
        next(bridge)
    assert_threads_end("error")


def test_an_error_in_one_of_several_tasks_keeps_its_type(name):
    cancelled = []

    async def fail():
        raise CorruptChunkError("chunk 3")

    async def produce(put):
        await put(["before"], 1)
        async with asyncio.TaskGroup() as outer:
            try:
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(fail())
                    inner.create_task(_silent(put))
            finally:
                cancelled.append(True)
            outer.create_task(_silent(put))

    bridge = Bridge(produce, ready_bytes=1, name=name)
    assert next(bridge) == "before"
    with pytest.raises(CorruptChunkError, match="chunk 3") as caught:
        next(bridge)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.tb)]  # the traceback shows the origin
    assert cancelled


def test_a_coroutine_cancelled_by_nobody_here_is_no_end_of_items(name):
    """Otherwise a short epoch would look like a complete one."""

    async def produce(put):
        await put([1], 1)
        lost = asyncio.ensure_future(_silent(put))
        asyncio.get_running_loop().call_soon(lost.cancel)
        await lost

    bridge = Bridge(produce, ready_bytes=1, name=name)
    assert next(bridge) == 1
    with pytest.raises((asyncio.CancelledError, RuntimeError, ReadError)):
        next(bridge)


def test_the_time_spent_waiting_is_counted(name, monkeypatch):
    """The clock advances only while the consumer waits for the first items."""
    now, looked_at = [5.0], threading.Event()

    def clock():
        seen = now[0]
        looked_at.set()
        return seen

    async def produce(put):
        await asyncio.to_thread(looked_at.wait)
        now[0] += 7.0
        await put([1, 2], 1)

    monkeypatch.setattr(zloader.reading.bridge, "time", types.SimpleNamespace(perf_counter=clock))
    bridge = Bridge(produce, ready_bytes=1, name=name)
    assert list(bridge) == [1, 2]
    assert bridge.wait_s == 7.0


# ---- nothing is left running


def test_a_break_and_an_exception_in_the_loop_end_the_thread(name):
    def loop(least):
        for item in Bridge(_endless, ready_bytes=3, name=name):
            if item > least:
                break
            assert item / 0

    loop(-1)
    assert_threads_end(name)
    with pytest.raises(ZeroDivisionError):
        loop(5)
    assert_threads_end(name)


@pytest.mark.parametrize("produce", [_endless, _silent])
def test_a_bridge_that_was_never_iterated_ends_with_its_last_reference(name, produce):
    bridge = Bridge(produce, ready_bytes=3, name=name)
    del bridge
    assert_threads_end(name)


def test_a_bridge_that_ends_before_its_thread_has_begun(name):
    for _ in range(50):
        Bridge(_endless, ready_bytes=3, name=name).close()
    assert_threads_end(name)


@pytest.mark.slow
def test_an_interrupt_while_it_begins_ends_the_thread(name):
    """Signals are handled while Thread.start waits. The exception is kept, as in a notebook."""
    caught = []

    async def produce(put):
        await _interrupting()  # the first thing that the thread does

    for _ in range(50):
        # RuntimeError if the interrupt finds threading's own lock half released
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as error:
            next(Bridge(produce, ready_bytes=3, name=name))
        caught.append(error)
    assert_threads_end(name)


def test_an_interrupt_in_next_ends_the_thread_and_the_iteration(name):
    async def produce(put):
        await put([0, 1], 1)
        await put([2], 1)  # granted once the loop has taken the first group
        await _interrupting()

    bridge = Bridge(produce, ready_bytes=1, name=name)

    def train():
        for _ in bridge:
            pass

    with pytest.raises(KeyboardInterrupt):
        train()
    assert_threads_end(name)
    assert list(bridge) == []


def _in_a_cycle(name):
    bridge = Bridge(_endless, ready_bytes=3, name=name)
    assert next(bridge) == 0
    bridge.itself = bridge
    return weakref.ref(bridge)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another thread"])
def test_garbage_collection_ends_the_thread(elsewhere):
    gc.disable()
    try:
        bridge = _in_a_cycle("garbage")
        if elsewhere:
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join(timeout=PATIENCE_S)
        else:
            gc.collect()
    finally:
        gc.enable()
    assert bridge() is None
    assert_threads_end("garbage")


def test_garbage_collection_on_its_own_thread_ends_the_thread(name):
    collect = threading.Event()
    collected = threading.Event()

    async def produce(put):
        await put([0], 1)
        await asyncio.to_thread(collect.wait)
        gc.collect()
        collected.set()
        await _endless(put)

    def in_a_cycle():
        bridge = Bridge(produce, ready_bytes=3, name=name)
        next(bridge)
        bridge.itself = bridge
        return weakref.ref(bridge)

    gc.disable()
    try:
        bridge = in_a_cycle()
        collect.set()
        assert collected.wait(timeout=PATIENCE_S)
    finally:
        gc.enable()
    assert bridge() is None
    assert_threads_end(name)


def test_close_waits_for_the_coroutine_to_clean_up(name):
    cleaned_up = []

    async def produce(put):
        try:
            await _endless(put)
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(True)

    bridge = Bridge(produce, ready_bytes=3, name=name)
    assert next(bridge) == 0
    bridge.close()
    assert cleaned_up == [True]
    assert name not in [thread.name for thread in threading.enumerate()]
    bridge.close()
    with pytest.raises(StopIteration):
        next(bridge)


def test_a_thread_that_waits_is_woken_by_close(name):
    bridge = Bridge(_silent, ready_bytes=3, name=name)
    with ThreadPoolExecutor(1) as consumer:
        found = consumer.submit(list, bridge)
        bridge.close()
        assert found.result(timeout=PATIENCE_S) == []  # the iteration ends, as after close(), without an error


@pytest.mark.slow
def test_close_does_not_wait_for_ever(name):
    """The coroutine may need a lock that the closing thread holds, such as logging's during garbage collection."""
    proceed = threading.Event()

    async def produce(put):
        await put([1], 1)
        try:
            await _silent(put)
        finally:
            proceed.wait()

    def use():
        bridge = Bridge(produce, ready_bytes=1, name=name)
        next(bridge)
        bridge.close()

    owner = threading.Thread(target=use)
    owner.start()
    owner.join(timeout=PATIENCE_S)
    hangs = owner.is_alive()
    proceed.set()
    owner.join(timeout=PATIENCE_S)
    assert not hangs


# ---- bounds


def test_nothing_is_made_beyond_the_bound_while_nobody_takes(name):
    put_so_far = []
    blocked = threading.Event()

    async def produce(put):
        for number in range(20):
            waiting = asyncio.ensure_future(put([number], 3))
            for _ in range(20):  # enough turns of the loop for a put that may proceed
                await asyncio.sleep(0)
            if not waiting.done():
                blocked.set()
            await waiting
            put_so_far.append(number)

    bridge = Bridge(produce, ready_bytes=10, name=name)
    assert blocked.wait(timeout=PATIENCE_S)
    assert put_so_far == [0, 1, 2]
    blocked.clear()
    assert next(bridge) == 0  # frees the bytes for one more
    assert blocked.wait(timeout=PATIENCE_S)
    assert put_so_far == [0, 1, 2, 3]
    assert list(bridge) == list(range(1, 20))


@given(sizes=st.lists(st.integers(0, 12), max_size=40), ready_bytes=st.integers(1, 10))
def test_the_bound_holds_at_every_moment(sizes, ready_bytes):
    n_taken = 0
    broken = []

    async def produce(put):
        for number, size in enumerate(sizes):
            await put([number], size)
            waiting = [each for each in sizes[n_taken : number + 1] if each]
            if len(waiting) > 1 and sum(waiting) > ready_bytes:
                broken.append((number, waiting))

    bridge = Bridge(produce, ready_bytes=ready_bytes, name="bound")
    found = []
    for _ in sizes:
        n_taken += 1  # before next(), because the freed bytes may be used at once
        found.append(next(bridge))
    assert list(bridge) == []
    assert found == list(range(len(sizes)))
    assert broken == []
    assert_threads_end("bound")


def test_an_item_larger_than_the_bound_goes_ahead_alone(name):
    async def produce(put):
        for number, size in enumerate([1000, 1, 1000, 1000, 1]):
            await put([number], size)

    assert list(Bridge(produce, ready_bytes=10, name=name)) == [0, 1, 2, 3, 4]


# ---- processes

# Installs the package without running its __init__, which would take seconds to import torch.
_PRELUDE = """
import asyncio, gc, itertools, os, signal, sys, types
package = types.ModuleType("zloader")
package.__path__ = [sys.argv[1]]
sys.modules["zloader"] = package
from zloader.reading.bridge import Bridge

async def endless(put):
    for number in itertools.count():
        await put([number], 1)

async def silent(put):
    await asyncio.Event().wait()

async def hundred(put):
    for number in range(100):
        await put([number], 1)
"""
PACKAGE = Path(zloader.__file__).parent


def _run(script, *arguments):
    """Runs a script, which must exit with status 0 and an empty stderr."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PRELUDE + script, str(PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.every(2)
@pytest.mark.parametrize("produce", ["endless", "silent"])
@pytest.mark.parametrize("keep", ["pass", "bridge.itself = bridge"])
def test_the_interpreter_ends_with_a_live_bridge(produce, keep):
    script = f"""
bridge = Bridge({produce}, ready_bytes=3, name="x")
{keep}
if {produce} is endless:
    next(bridge)
print("end")
"""
    assert _run(script) == ["end"]


def test_an_interrupt_reaches_the_loop_and_ends_it():
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    for item in Bridge(silent, ready_bytes=3, name="x"):
        print("item")
    print("end of items")
except KeyboardInterrupt:
    print("interrupted")
"""
    # The bridge's thread prints this, so the main thread is in next() or about to enter it.
    produce = "async def silent(put):\n    print('ready', flush=True)\n    await asyncio.Event().wait()\n"
    command = [sys.executable, "-c", _PRELUDE + produce + script, str(PACKAGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            found, complaints = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, found, complaints) == (0, "interrupted\n", "")


_FORKED = """
bridge = Bridge(hundred, ready_bytes=5, name="x")
found = [next(bridge) for _ in range(3)]
child = os.fork()
if child == 0:
    signal.alarm(100)  # ends a child that hangs
    {child}
status = os.waitpid(child, 0)[1]
found += bridge
print(found == list(range(100)), status if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status))
"""
CHILDREN = {
    "exits": "sys.exit(0)",
    "drops it": "del bridge; gc.collect(); os._exit(0)",
    "closes it": "bridge.close(); os._exit(0)",
    "leaves it": "os._exit(0)",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN.keys())
def test_a_forked_child_ends_and_leaves_its_parent_alone(child):
    assert _run(_FORKED.format(child=child)) == ["True", "0"]


def test_a_forked_child_that_goes_on_is_told_so():
    """The child's copy of the bridge has no thread, so next() would wait for ever."""
    child = """
    from zloader.common.errors import ForkError
    try:
        found += bridge
    except ForkError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)"""
    assert _run(_FORKED.format(child=child)) == ["True", "7"]


def test_a_source_is_closed_with_its_bridge(name):
    """Also while the producer waits for the source, which puts nothing."""
    for produce, taken in ((_endless, 2), (_silent, 0)):
        source = Bridge(produce, ready_bytes=1, name=name)

        async def doubled(put, source=source):
            for number in source:
                await put([2 * number], 1)

        bridge = Bridge(doubled, ready_bytes=1, name=name, source=source)
        assert list(itertools.islice(bridge, taken)) == [0, 2][:taken]
        bridge.close()
        assert list(bridge) == []
        assert not source.close.alive
        assert_threads_end(name)


def test_the_end_and_errors_of_a_source_reach_its_bridge(name):
    for error in (None, ReadError("broken")):
        source = Bridge(_groups([[1, 2], [3]], then=error), ready_bytes=1, name=name)

        async def doubled(put, source=source):
            for number in source:
                await put([2 * number], 1)

        found = []
        bridge = Bridge(doubled, ready_bytes=1, name=name, source=source)
        with contextlib.nullcontext() if error is None else pytest.raises(ReadError, match="broken"):
            found.extend(bridge)
        assert list(bridge) == []
        assert_threads_end(name)


def test_items_that_were_taken_are_not_kept(name):
    class Item:
        pass

    async def produce(put):
        await put([Item(), Item()], 1)

    bridge = Bridge(produce, ready_bytes=1, name=name)
    first = weakref.ref(next(bridge))
    gc.collect()
    assert first() is None
    bridge.close()
