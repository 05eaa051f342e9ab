"""The window decides which fetch a producer makes, and whose minibatches have room."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zloader.order.plan import Remaining
from zloader.producing.window import MeanBytes, Window

pytestmark = pytest.mark.any_version
NEVER = 1e9


@dataclass(frozen=True)
class Item:
    """A minibatch, known by its fetch and its number there."""

    fetch: int
    number: int
    nbytes: int = 10
    error: BaseException | None = None


def test_a_fetch_without_progress_is_overtaken_once():
    window = Window([Remaining(0, 0, 4)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    fetch = window.next("slow", 0.0)
    assert fetch is not None
    assert window.next_change_s("slow") is None  # it cannot overtake itself
    assert window.next_change_s("other") == 5.0
    assert window.next("other", 4.9) is None
    fetch.add(0, [Item(0, 0)], 4.9)  # progress
    assert window.next("other", 9.8) is None
    assert window.next("other", 9.9) is fetch
    assert window.next("third", NEVER) is None
    fetch.add(1, [Item(0, 1), Item(0, 2)], NEVER)
    fetch.add(1, [Item(0, 1)], NEVER)  # the slow one has made what another one has made already
    fetch.add(2, [Item(0, 2), Item(0, 3)], NEVER)
    assert fetch.complete
    assert [item.number for items, _ in fetch.groups for item in items] == [0, 1, 2, 3]


def test_fetches_go_home_first_and_still_come_in_order():
    window = Window([Remaining(k, 0, 1) for k in range(6)], MeanBytes(n_bytes=10), ahead_bytes=30, overtake_s=NEVER)
    for number, shares in enumerate([(0.9, 0.2), (0.2, 0.9), (0.5, 0.5), (0.2, 0.9), (0.85, 0.8), (0.9, 0)]):
        window.set_home(number, dict(zip("ab", shares, strict=True)))
    assert window.homes == {0: "a", 1: "b", 3: "b", 5: "a"}
    assert window.next(0, 0.0, "b").number == 1
    assert window.head is None  # fetch 0 comes first
    assert window.next(1, 0.0, "b").number == 3
    assert window.next(2, 0.0, "c").number == 2  # which has no home
    assert [fetch.number for fetch in window.open] == [1, 2, 3]
    assert list(window.with_room()) == list(window.open)  # otherwise nobody might become free for fetch 0
    fetch = window.next(3, 0.0, "b")  # nothing more fits, but the consumer needs this one
    assert (fetch.number, window.head) == (0, fetch)
    assert window.next(4, 0.0, "a").number == 4  # which now comes next, and is begun wherever it is
    assert window.next(5, 0.0, "b").number == 5


def test_minibatches_have_room_in_the_order_of_their_fetches():
    window = Window([Remaining(k, 0, 4) for k in range(9)], MeanBytes(n_bytes=10), ahead_bytes=70, overtake_s=NEVER)
    first, second, third = (window.next(maker, 0.0) for maker in "abc")
    assert list(window.with_room()) == [first, second]  # 40 bytes each, of which the third has none
    second.add(0, [Item(1, 0), Item(1, 1), Item(1, 2)], 0.0)
    assert list(window.with_room()) == [first]  # whose 40 bytes, with these 30, take all
    first.add(0, [Item(0, 0), Item(0, 1), Item(0, 2), Item(0, 3)], 0.0)
    assert list(window.with_room()) == []
    _, n_bytes = first.groups.popleft()
    first.taken_bytes += n_bytes
    window.open.popleft()
    assert list(window.with_room()) == [second, third]
    third.add(0, [Item(2, number) for number in range(4)], 0.0)  # were more bytes than expected
    assert list(window.with_room()) == []
    second.groups.clear()
    assert list(window.with_room()) == [second]  # because the consumer's next minibatch always has room


def test_a_producer_that_waits_for_room_makes_way():
    window = Window([Remaining(k, 0, 4) for k in range(9)], MeanBytes(n_bytes=10), ahead_bytes=1, overtake_s=5)
    first, second, third = (window.next(maker, 0.0) for maker in "abc")
    second.jobs["b"].waits = third.jobs["c"].waits = True
    assert window.to_leave(4.9) is None
    assert window.to_leave(5.0) is third.jobs["c"]  # the first one is overdue, and the third is needed last
    first.jobs.clear()
    assert window.to_leave(0.0) is third.jobs["c"]
    assert window.next("c", 0.0) is first
    assert window.to_leave(5.0) is second.jobs["b"]  # because "c" makes the first one already
    first.fail(OSError())
    assert window.to_leave(NEVER) is None


def test_a_fetch_waits_as_long_as_any_of_its_producers_does():
    window = Window([Remaining(0, 0, 4)], MeanBytes(n_bytes=10), ahead_bytes=1, overtake_s=5)
    fetch = window.next("slow", 0.0)
    assert window.next("other", 5.0) is fetch
    fetch.jobs["slow"].waits = fetch.jobs["other"].waits = True
    del fetch.jobs["slow"]
    assert fetch.waits
    assert window.next_change_s("third") is None  # it needs room, and no producer
    assert window.next("third", NEVER) is None


def test_an_error_stops_later_fetches():
    window = Window([Remaining(k, 0, 1) for k in range(3)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    first, second = window.next("a", 0.0), window.next("b", 0.0)
    assert (first.number, second.number) == (0, 1)
    second.fail(OSError())
    assert window.next("b", 0.0) is None
    first.jobs.clear()
    assert window.next("b", 0.0) is first  # but earlier ones are still made


def test_an_error_stops_no_earlier_fetch():
    """One that was begun early, because a mirror holds it, does not keep those before it from being begun."""
    window = Window([Remaining(k, 0, 1) for k in range(4)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    window.set_home(2, {"m": 1.0})
    window.set_home(3, {"m": 1.0})
    failed = window.next("a", 0.0, "m")
    assert failed.number == 2
    failed.fail(OSError())
    assert [window.next(maker, 0.0, "m").number for maker in "bc"] == [0, 1]
    assert window.next("d", 0.0, "m") is None  # nothing after it is begun, although its home is here
    for _ in range(2):
        window.open.popleft()
    assert window.head is failed


def test_an_error_of_one_producer_leaves_what_another_has_completed():
    window = Window([Remaining(0, 0, 1)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    fetch = window.next("slow", 0.0)
    fetch.add(0, [Item(0, 0)], 0.0)
    fetch.fail(OSError())
    assert fetch.error is None


def test_nothing_comes_after_an_error_of_the_users_own_function():
    window = Window([Remaining(0, 0, 4)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    fetch = window.next("a", 0.0)
    fetch.add(0, [Item(0, 0), Item(0, 1, error=ValueError())], 0.0)
    fetch.add(2, [Item(0, 2)], 0.0)
    assert fetch.complete
    assert sum(len(items) for items, _ in fetch.groups) == 2


def test_estimates_are_corrected_by_real_sizes():
    mean = MeanBytes(n_bytes=1000)
    window = Window([Remaining(k, 0, 10) for k in range(9)], mean, ahead_bytes=2000, overtake_s=NEVER)
    fetch = window.next("a", 0.0)
    assert fetch.held_bytes == 10_000
    mean.add(990, 99)  # they take 10 bytes a minibatch, and the estimate counts for one
    assert mean.of(10) == pytest.approx(200, abs=1)
    assert window.next("b", 0.0).held_bytes == pytest.approx(200, abs=1)
    fetch.add(0, [Item(0, number) for number in range(10)], 0.0)
    assert fetch.held_bytes == fetch.ready_bytes == window.ready_bytes == 100
