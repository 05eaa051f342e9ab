"""An epoch made by simulated producers in virtual time: every minibatch once and in order, whatever is lost or slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.virtual_time import run_in_virtual_time
from zloader.common.errors import ProducerError
from zloader.order.plan import Remaining
from zloader.producing import production
from zloader.producing import window as window_module
from zloader.producing.window import LANES, FailedError, LostError
from zloader.reading.resources import Counters

pytestmark = pytest.mark.any_version
NEVER = 1e6


@dataclass(frozen=True)
class Item:
    """A minibatch, known by its fetch and its number there."""

    fetch: int
    number: int
    nbytes: int = 10
    error: BaseException | None = None


@dataclass(eq=False)
class Maker:
    """A producer that takes `group_s` for each group. It may die at any time."""

    crew: Crew
    machine: str
    group_s: float = 1.0
    group: int = 2
    lost: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    def make(self, plan, remaining, ready_bytes):
        self.crew.began.append((remaining.number, self.machine))
        return Making(self, remaining)

    async def held(self, plan, coming):
        await asyncio.sleep(0.1)
        return [self.crew.held(self.machine, remaining.number) for remaining in coming]

    async def ended(self):
        await self.dead.wait()


@dataclass(eq=False)
class Making:
    maker: Maker
    remaining: Remaining
    made: int = 0

    async def next(self):
        number, begin, size = self.remaining
        if self.made == size:
            return None
        if number in self.maker.crew.fails:
            raise FailedError from OSError(f"fetch {number}")
        try:
            await asyncio.wait_for(self.maker.dead.wait(), self.maker.group_s)
        except TimeoutError:
            n_items = min(self.maker.group, size - self.made)
            items = [Item(number, begin + self.made + k) for k in range(n_items)]
            self.made += n_items
            return items, Counters(gets=self.made)
        raise LostError("dead")

    def cancel(self):
        pass


@dataclass
class Crew:
    """Producers on `machines` in turn, each as fast as `speed` says when it begins."""

    size: int
    machines: int = 2
    group: int = 2
    speed: Callable[[], float] = lambda: 1.0
    held: Callable[[str, int], float] = lambda machine, number: 0.0
    fails: tuple[int, ...] = ()
    members: list[Maker] = field(default_factory=list)
    dropped: list[Maker] = field(default_factory=list)
    began: list[tuple[int, str]] = field(default_factory=list)
    started: int = 0
    most_started: float = NEVER
    ends_s: float = 10 * NEVER

    async def join(self, others_work):
        await asyncio.sleep(0.5)
        if self.started >= self.most_started:
            await asyncio.Event().wait()
        self.started += 1
        maker = Maker(self, f"m{self.started % self.machines}", group_s=self.speed(), group=self.group)
        self.members.append(maker)
        return maker

    def leave(self, maker):
        if maker in self.members:
            self.members.remove(maker)

    def drop(self, maker):
        self.leave(maker)
        self.dropped.append(maker)
        maker.lost = True
        maker.dead.set()

    async def watch(self):
        await asyncio.sleep(self.ends_s)
        raise ProducerError("Ray was shut down")


@dataclass
class Epoch:
    """Runs an epoch of fetches of some sizes, and keeps what the consumer has got."""

    crew: Crew
    sizes: list[int]
    begin: int = 0
    ahead_bytes: int = 100
    overtake_s: float = 30.0
    stall_s: float = 300.0
    pause_s: Callable[[], float] = lambda: 0.0
    by_mirror: bool = False
    got: list[Item] = field(default_factory=list)
    most_bytes: int = 0

    def run(self, meanwhile: Callable[[Crew], Any] | None = None) -> float:
        """Returns the virtual seconds that it took."""
        remaining = [Remaining(k, 0 if k else self.begin, size) for k, size in enumerate(self.sizes)]
        mean = window_module.MeanBytes(n_bytes=10)
        self.window = window_module.Window(remaining, mean, ahead_bytes=self.ahead_bytes, overtake_s=self.overtake_s)

        async def put(items, n_bytes):
            self.most_bytes = max(self.most_bytes, self.window.ready_bytes)
            await asyncio.sleep(self.pause_s())
            self.got += items

        async def run():
            epoch = production.Production(
                self.crew, "plan", self.window, mean, by_mirror=self.by_mirror, stall_s=self.stall_s
            )
            self.counters = epoch.counters
            other = asyncio.ensure_future(meanwhile(self.crew)) if meanwhile else None
            try:
                await epoch.run(put)
            finally:
                if other is not None:
                    other.cancel()

        return run_in_virtual_time(run())[1]

    def check(self) -> None:
        assert self.window.done
        wanted = [(k, number + (0 if k else self.begin)) for k, size in enumerate(self.sizes) for number in range(size)]
        assert [(item.fetch, item.number) for item in self.got] == wanted
        assert self.most_bytes <= self.ahead_bytes + 10 * self.crew.group * LANES * self.crew.size


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    begin=st.integers(0, 4),
    makers=st.integers(1, 4),
    ahead_bytes=st.integers(1, 200),
    seed=st.integers(0, 1 << 20),
    by_mirror=st.booleans(),
)
def test_every_minibatch_comes_once_and_in_order(sizes, begin, makers, ahead_bytes, seed, by_mirror):
    """Producers of all speeds are killed at random, and some stop for ever without dying."""
    rng = random.Random(seed)

    async def kill(crew):
        for _ in range(20):
            await asyncio.sleep(rng.expovariate(0.3))
            if crew.members:
                crew.drop(rng.choice(crew.members))

    crew = Crew(
        makers,
        group=rng.randint(1, 4),
        speed=lambda: rng.choice([0.0, 0.1, 1.0, 40.0, NEVER]) if crew.started > 1 else 1.0,
        held=lambda machine, number: float(rng.random() < 0.5),
    )
    epoch = Epoch(crew, sizes, begin, ahead_bytes, pause_s=lambda: rng.choice([0.0, 2.0]), by_mirror=by_mirror)
    try:
        epoch.run(kill)
    except BaseExceptionGroup as group:  # producers may all have stopped for ever
        failure = str(group.exceptions[0])
    else:
        failure = ""
        epoch.check()
    assert not failure or "have made no progress" in failure


def test_a_lost_producer_is_replaced_while_its_minibatches_wait():
    """A fetch whose producer dies before its minibatches have room is ready when they do."""

    async def kill(crew):
        await asyncio.sleep(30)
        crew.drop(crew.members[1])

    epoch = Epoch(Crew(2), [40] * 4, ahead_bytes=20, pause_s=lambda: 3.0)
    seconds = epoch.run(kill)
    epoch.check()
    assert seconds < 1.1 * (1.0 + 3.0) * 160 / 2
    assert epoch.crew.started == 3


def test_a_slow_consumer_gets_nobody_replaced():
    epoch = Epoch(Crew(3), [6] * 6, ahead_bytes=20, pause_s=lambda: 500.0)
    epoch.run()
    epoch.check()
    assert epoch.crew.dropped == []


def test_a_stopped_producer_is_overtaken_by_one_that_waits_for_room():
    crew = Crew(2, speed=lambda: NEVER if crew.started == 1 else 1.0)
    epoch = Epoch(crew, [4] * 8, ahead_bytes=10)
    seconds = epoch.run()
    epoch.check()
    assert seconds < 3 * 30  # each of its two fetches has been overdue once
    assert epoch.counters.gets == 4 * 8  # nothing was made twice


def test_producers_that_make_no_progress_are_an_error():
    epoch = Epoch(Crew(2, speed=lambda: NEVER), [4] * 8)
    with pytest.raises(BaseExceptionGroup) as caught:
        epoch.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, ProducerError)
    assert "2 of 2 producers make fetch 0, and have made no progress for 300 s" in str(error)


def test_producers_that_stop_while_nobody_makes_the_fetch_that_comes_next_are_an_error():
    """One stops for ever with later fetches. The other one dies, and the cluster has no room for a new one."""

    async def kill(crew):
        await asyncio.sleep(5)
        crew.drop(crew.members[0])

    crew = Crew(2, speed=lambda: 20.0 if crew.started == 1 else NEVER, most_started=2)
    epoch = Epoch(crew, [4] * 8, ahead_bytes=1000)
    with pytest.raises(BaseExceptionGroup) as caught:
        epoch.run(kill)
    (error,) = caught.value.exceptions
    assert isinstance(error, ProducerError)
    assert "1 of 1 producers make later fetches, and have made no progress for 300 s" in str(error)


def test_a_stopped_producer_is_overtaken_after_a_long_pause_of_the_consumer():
    """The pause is longer than producers may make no progress: nobody has made room for another one meanwhile."""

    async def stop(crew):
        await asyncio.sleep(1)
        crew.members[0].group_s = NEVER  # after the first group

    crew = Crew(2)
    epoch = Epoch(crew, [6] * 4, ahead_bytes=20, pause_s=lambda: 0.0 if epoch.got else 500.0)
    epoch.run(stop)
    epoch.check()


@pytest.mark.parametrize("other_s", [pytest.param(1.0, id="waits for room"), pytest.param(20.0, id="is at work")])
def test_a_producer_that_overtakes_goes_on_when_the_slow_one_was_first(other_s):
    """At 30 s it leaves fetch 3 for fetch 0. The slow one makes fetch 0 at 45 s."""
    then = []

    async def look(crew):
        await asyncio.sleep(0.6)
        slow, other = crew.members
        slow.group = 6  # a whole fetch
        await asyncio.sleep(48)
        then.extend(fetch.number for fetch in epoch.window.open if other in fetch.jobs and not fetch.complete)

    crew = Crew(2, speed=lambda: 45.0 if crew.started == 1 else other_s)
    epoch = Epoch(crew, [6] * 8, ahead_bytes=10, pause_s=lambda: 100.0)
    epoch.run(look)
    epoch.check()
    assert (0, "m0") in crew.began
    assert len(then) == LANES
    assert crew.dropped == []


def test_a_slow_producer_that_was_overtaken_is_replaced():
    crew = Crew(2, speed=lambda: 100.0 if crew.started == 1 else 1.0)
    epoch = Epoch(crew, [4] * 8)
    epoch.run()
    epoch.check()
    assert [maker.machine for maker in crew.dropped[:1]] == ["m1"]
    assert crew.started == 3


def test_an_error_in_watching_a_producer_ends_the_epoch(monkeypatch):
    async def ended(maker):
        await asyncio.sleep(5)
        raise OSError("no answer")

    monkeypatch.setattr(Maker, "ended", ended)
    with pytest.raises(BaseExceptionGroup) as caught:
        Epoch(Crew(1), [4] * 8).run()
    assert caught.group_contains(OSError, match="no answer")


def test_the_end_of_the_cluster_is_an_error():
    epoch = Epoch(Crew(2, speed=lambda: NEVER, ends_s=100), [4] * 8)
    with pytest.raises(BaseExceptionGroup) as caught:
        epoch.run()
    assert str(caught.value.exceptions) == "(ProducerError('Ray was shut down'),)"


def test_an_error_comes_after_all_minibatches_before_it():
    epoch = Epoch(Crew(3, fails=(2,)), [4] * 8)
    with pytest.raises(BaseExceptionGroup) as caught:
        epoch.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, OSError)
    assert [(item.fetch, item.number) for item in epoch.got] == [(k, number) for k in range(2) for number in range(4)]


def test_an_error_of_a_fetch_that_was_begun_early_comes_when_it_is_due():
    """The fast producer has fetches of its own machine, of which one fails, while the other one is far behind."""
    crew = Crew(2, speed=lambda: 0.1 if crew.started == 1 else 5.0, held=lambda machine, k: machine == f"m{k % 2}")
    crew.fails = (9,)
    epoch = Epoch(crew, [4] * 20, ahead_bytes=10_000, by_mirror=True)
    with pytest.raises(BaseExceptionGroup) as caught:
        epoch.run()
    assert str(caught.value.exceptions) == "(OSError('fetch 9'),)"
    assert [(item.fetch, item.number) for item in epoch.got] == [(k, number) for k in range(9) for number in range(4)]


def test_fetches_go_to_the_machine_whose_mirror_holds_them():
    """Except for those that are begun before the first answers, and at the end, where one machine helps the other."""
    rng = random.Random(0)
    homes = [f"m{rng.randrange(2)}" for _ in range(100)]
    crew = Crew(4, held=lambda machine, number: float(homes[number] == machine))
    epoch = Epoch(crew, [4] * 100, ahead_bytes=10_000, by_mirror=True)
    epoch.run()
    epoch.check()
    at_home = [homes[number] == machine for number, machine in crew.began if number >= 8]
    assert sum(at_home) >= 85
