"""The window hands out every fetch, within its bytes, whichever producers are lost or slow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloader.order.plan import Remaining

pytest.importorskip("zloader.ray", exc_type=ImportError, reason="Ray is not installed: pip install zloader[ray]")
window_module = pytest.importorskip("zloader.ray.window")
MeanBytes, Window = window_module.MeanBytes, window_module.Window

NEVER = 1e9


@dataclass(frozen=True)
class Item:
    """A minibatch, known by its fetch and its number there."""

    fetch: int
    number: int
    nbytes: int = 10
    error: BaseException | None = None


@dataclass
class Maker:
    """A producer that makes `fetch` from minibatch `at` on."""

    fetch: Any = None
    at: int = 0


@dataclass
class Run:
    """An epoch of producers that do one random thing after another, and what its consumer has got."""

    window: Any
    makers: list[Maker]
    now_s: float = 0.0
    got: list[Item] = field(default_factory=list)

    def work(self, number: int, groups: int) -> None:
        """A producer takes a fetch if it has none, or makes some more of it."""
        maker = self.makers[number % len(self.makers)]
        if maker.fetch is None:
            maker.fetch = self.window.next(number % len(self.makers), self.now_s, f"m{number % len(self.makers)}")
            maker.at = 0 if maker.fetch is None else maker.fetch.n_made
            return
        fetch = maker.fetch
        first = fetch.begin + maker.at
        made = [Item(fetch.number, first + k) for k in range(min(groups, fetch.size - maker.at))]
        fetch.add(maker.at, made, self.now_s)
        maker.at += len(made)
        if maker.at >= fetch.size:
            self.lose(number)

    def lose(self, number: int) -> None:
        """A producer is lost, and another one takes its place."""
        maker = self.makers[number % len(self.makers)]
        if maker.fetch is not None:
            maker.fetch.makers.discard(number % len(self.makers))
        maker.fetch = None

    def take(self) -> None:
        """The consumer takes what is ready."""
        while (fetch := self.window.head) is not None and (fetch.groups or fetch.complete):
            if not fetch.groups:
                self.window.open.popleft()
                continue
            items, n_bytes = fetch.groups.popleft()
            self.got += items
            fetch.taken_bytes += n_bytes


ACTIONS = st.lists(st.tuples(st.sampled_from(["work", "work", "lose", "take", "wait"]), st.integers(0, 9)), max_size=99)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    begin=st.integers(0, 4),
    makers=st.integers(1, 4),
    ahead_bytes=st.integers(0, 200),
    actions=ACTIONS,
    homes=st.dictionaries(st.integers(0, 5), st.sampled_from(["m0", "m1", "m2"])),
)
def test_every_minibatch_comes_once_and_in_order(sizes, begin, makers, ahead_bytes, actions, homes):
    remaining = [Remaining(k, begin if not k else 0, size) for k, size in enumerate(sizes)]
    mean = MeanBytes(n_bytes=10)
    run = Run(Window(remaining, mean, ahead_bytes=ahead_bytes, overtake_s=5), [Maker() for _ in range(makers)])
    run.window.homes |= {number: home for number, home in homes.items() if number < len(sizes)}
    for action, number in actions:
        run.now_s += action == "wait" and number
        if action == "work":
            run.work(number, 1 + number % 3)
        elif action == "lose":
            run.lose(number)
        elif action == "take":
            run.take()
        assert run.window.held_bytes <= max(ahead_bytes, 10 * max(sizes)) + 10 * max(sizes) * bool(homes)
    for turn in range(100 * makers):  # everything is made in the end, even if all but one are stuck
        run.now_s += 1
        run.work(makers * turn, 2)
        run.take()
    assert run.window.done
    wanted = [(k, rest.begin + number) for k, rest in enumerate(remaining) for number in range(rest.size)]
    assert [(item.fetch, item.number) for item in run.got] == wanted


def test_a_fetch_without_progress_is_overtaken_once():
    window = Window([Remaining(0, 0, 4)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    fetch = window.next("slow", 0.0)
    assert fetch is not None
    assert window.next_change_s("slow", 1.0) is None  # it cannot overtake itself
    assert window.next_change_s("other", 1.0) == 4.0
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
    fetch = window.next(3, 0.0, "b")  # nothing more fits, but the consumer needs this one
    assert (fetch.number, window.head) == (0, fetch)
    assert window.next(4, 0.0, "a") is None


def test_an_error_stops_later_fetches():
    window = Window([Remaining(k, 0, 1) for k in range(3)], MeanBytes(n_bytes=1), ahead_bytes=100, overtake_s=5)
    first, second = window.next("a", 0.0), window.next("b", 0.0)
    assert (first.number, second.number) == (0, 1)
    second.error = OSError()
    assert window.next("b", 0.0) is None
    first.makers.clear()
    assert window.next("b", 0.0) is first  # but earlier ones are still made


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
    assert window.next("a", 0.0) is not None
    assert window.next("b", 0.0) is None  # each is expected to take 10 000 bytes
    mean.add(990, 99)  # they take 10 bytes a minibatch, and the estimate counts for one
    assert mean.of(10) == pytest.approx(200, abs=1)
    fetch = window.open[0]
    fetch.add(0, [Item(0, number) for number in range(10)], 0.0)
    assert window.held_bytes == 100
    for maker in range(8):
        assert window.next(maker, 0.0) is not None
    assert window.held_bytes == pytest.approx(1700, abs=10)
