"""Machines that share a store: each byte is read from it once, and peers that fail change nothing but the speed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

import zloader as zl
from benchmarks.harness.virtual_time import run_in_virtual_time
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.errors import CorruptChunkError, MissingObjectError, OptionError
from zloader.common.options import Cache
from zloader.common.records import Span
from zloader.reading.peers import PeerCache, SharedReads, SharedStore, owners_of
from zloader.reading.resources import Counters, timed
from zloader.reading.stretches import KeptStretches, Stretches
from zloader.storage.decode import checksum

SIZE = 64  # bytes in a stretch


def contents(sizes: Mapping[str, int], seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    return {key: rng.integers(0, 256, size, dtype=np.uint8).tobytes() for key, size in sizes.items()}


class Store:
    """A ByteSource in memory that counts how often each byte was read."""

    retries = 0

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects, self.sizes = objects, {key: len(content) for key, content in objects.items()}
        self.times = {key: np.zeros(len(content), int) for key, content in objects.items()}

    async def read(self, spans: list[Span]) -> list[bytes]:
        await asyncio.sleep(0.01)
        for span in spans:
            assert 0 <= span.start < span.stop <= self.sizes[span.key]
            self.times[span.key][span.start : span.stop] += 1
        return [self.objects[span.key][span.start : span.stop] for span in spans]

    @property
    def most(self) -> int:
        """How often the byte that was read most often was read."""
        return max((int(times.max(initial=0)) for times in self.times.values()), default=0)


class Machine:
    """A machine in this process: its mirror, its reads, and what others see of it. `fault` is how it answers."""

    def __init__(self, folder: Path, store: Store, number: int, others: dict[str, Machine], **cache: object) -> None:
        self.identity, self.store, self.others, self.fault = f"{number:016x}", store, others, ""
        self.asked, self.discarded, self.avoided, self.came_late = 0, [], set(), False
        directory = MirrorDirectory(Cache(folder / self.identity, **cache), "f" * 32, "memory")
        self.stretches = Stretches(store.sizes, SIZE)
        self.mirror = MirrorArray(directory, self.stretches.layout)
        self.leases = Leases(directory.path)
        self.kept = KeptStretches(
            self.stretches, self.mirror, self.leases, read_store=store.read, run=self._run, deadline_s=PATIENCE_S
        )
        self.counters = Counters()
        self.reads = SharedReads(
            self.stretches,
            self.kept,
            self,
            read_store=store.read,
            counters=self.counters,
            deadline_s=5.0,
            patience_s=60.0,
        )
        others[self.identity] = self

    async def _run(self, function, *args):
        return function(*args), 0.0

    def close(self) -> None:
        self.leases.close()

    # ---- Peers

    async def present(self):
        return {name: None if machine is self else machine for name, machine in self.others.items()}

    def avoid(self, identity: str) -> None:
        assert identity != self.identity
        self.avoided.add(identity)

    def avoids(self, identity: str) -> bool:
        return identity in self.avoided

    # ---- Peer

    async def ask(self, starts, stops, *, only_held=False):
        self.asked += 1
        if self.fault == "dies":
            raise ConnectionError("gone")
        if self.fault in ("hangs", "never sends"):
            await asyncio.Event().wait()
        if self.fault == "waits":
            await asyncio.sleep(50)
        held = await self.kept.held(starts) if only_held else np.ones(len(starts), bool)
        content, _ = await self.kept.read(starts[held], stops[held])
        stated = checksum(content)
        if self.fault in ("flips", "lies") and len(content):
            content[len(content) // 2] ^= 1
            stated = checksum(content) if self.fault == "lies" else stated
        if self.fault == "cuts":
            content = content[:-1]
            stated = checksum(content)
        if self.fault == "holds nothing":
            held, content = ~held, content[:0]
            stated = checksum(content)
        return (None, None, None) if self.fault == "says nothing" else (held, content, stated)

    async def answer(self) -> None:
        if self.fault == "hangs":
            await asyncio.Event().wait()

    def discard(self, starts) -> None:
        self.discarded += starts.tolist()
        self.kept.discard(starts)


@contextlib.contextmanager
def machines(folder: Path, store: Store, n: int) -> Iterator[list[Machine]]:
    others: dict[str, Machine] = {}
    made = [Machine(folder, store, number, others) for number in range(n)]
    try:
        yield made
    finally:
        for machine in others.values():
            machine.close()


def every_span(sizes: Mapping[str, int], step: int = 50) -> list[Span]:
    return [
        Span(key=key, start=start, stop=min(start + step, size))
        for key, size in sizes.items()
        for start in range(0, size, step)
    ]


def read(*readings):
    async def together():
        return await asyncio.gather(*readings)

    return run_in_virtual_time(together())[0]


# ---- positions


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(1, 70), st.randoms())
def test_positions_of_spans(sizes, size, random):
    objects = contents({f"o{number}": each for number, each in enumerate(sizes)})
    whole = b"".join(objects[key] for key in sorted(objects))
    stretches = Stretches({key: len(content) for key, content in objects.items()}, size)
    assert (stretches.n_bytes, stretches.layout.n_chunks) == (len(whole), -(-len(whole) // size))
    spans = []
    for key, content in objects.items():
        if content:
            start = random.randrange(len(content))
            spans.append(Span(key=key, start=start, stop=random.randint(start + 1, len(content))))
    of_span, starts, stops = stretches.pieces(spans)
    assert (starts // size == (stops - 1) // size).all()
    for number, span in enumerate(spans):
        mine = zip(starts[of_span == number].tolist(), stops[of_span == number].tolist(), strict=True)
        assert b"".join(whole[start:stop] for start, stop in mine) == objects[span.key][span.start : span.stop]
    start = random.randint(0, len(whole))
    stop = random.randint(start, len(whole))
    found = stretches.spans(start, stop)
    assert b"".join(objects[span.key][span.start : span.stop] for span in found) == whole[start:stop]
    assert all(span.start < span.stop for span in found)


def test_owners_are_the_same_everywhere_and_in_every_version():
    owners = owners_of(np.arange(12), ["a", "b", "c"])
    assert owners.tolist() == [1, 1, 2, 2, 1, 2, 2, 2, 0, 0, 2, 0]
    swapped = owners_of(np.arange(12), ["c", "a", "b"])
    assert ["cab"[number] for number in swapped] == ["abc"[number] for number in owners]


@pytest.mark.parametrize("n", [2, 7, 64])
def test_owners_have_equal_shares_and_keep_theirs(n):
    names, stretches = [f"{number:x}" for number in range(n)], np.arange(200_000)
    before = owners_of(stretches, names)
    shares = np.bincount(before, minlength=n) * n / len(stretches)
    assert 0.9 < shares.min() <= shares.max() < 1.1
    after = owners_of(stretches, names[:-1])
    stays = before != n - 1
    assert (after[stays] == before[stays]).all()
    assert len(np.unique(after[~stays])) == n - 1


# ---- reading


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_byte_is_read_from_the_store_once(tmp_path, n):
    store = Store(contents({"a": 1000, "b": 0, "c": 64, "d": 777}))
    spans = every_span(store.sizes)
    expected = [store.objects[span.key][span.start : span.stop] for span in spans]
    with machines(tmp_path, store, n) as made:
        for _ in range(2):
            found = read(*(machine.reads.read(spans) for machine in made), made[0].reads.read(spans[::3]))
            assert found == [expected] * n + [expected[::3]]
        assert store.most == 1
        assert sum(machine.mirror.present_bytes for machine in made) == 1841
        sent = [machine.counters.bytes_from_peers for machine in made]
        assert all(2 * (1841 - m.mirror.present_bytes) <= each for m, each in zip(made, sent, strict=True))


@pytest.mark.parametrize("fault", ["dies", "hangs", "never sends", "flips", "cuts", "holds nothing", "says nothing"])
def test_what_a_bad_peer_should_have_sent_is_read_from_the_store(tmp_path, fault):
    store = Store(contents({"a": 3000}))
    spans = every_span(store.sizes)
    with machines(tmp_path, store, 3) as (one, bad, three):
        bad.fault = fault
        found = read(one.reads.read(spans), three.reads.read(spans))
        expected = [store.objects["a"][span.start : span.stop] for span in spans]
        assert found == [expected, expected]
        assert one.avoided == three.avoided == {bad.identity}
        asked = bad.asked
        assert read(one.reads.read(spans)) == [expected]
        assert bad.asked == asked
        bad.fault = ""
        one.avoided.clear()
        assert read(one.reads.read(spans)) == [expected]
        assert bad.asked == asked + 1
        assert one.avoided == set()


def test_a_peer_that_waits_for_the_store_is_waited_for(tmp_path):
    store = Store(contents({"a": 3000}))
    spans = every_span(store.sizes)
    with machines(tmp_path, store, 2) as (one, slow):
        slow.fault = "waits"
        assert read(one.reads.read(spans)) == [[store.objects["a"][span.start : span.stop] for span in spans]]
        assert one.avoided == set()
        assert store.most == 1


def test_errors_of_the_store_are_raised(tmp_path):
    store = Store(contents({"a": 3000}))

    async def fails(spans):
        raise MissingObjectError("a is not there")

    store.read = fails
    with machines(tmp_path, store, 2) as (one, _), pytest.raises(ExceptionGroup) as found:
        read(one.reads.read(every_span(store.sizes)))
    assert found.group_contains(MissingObjectError)


def test_a_machine_that_comes_late_asks_those_that_were_there(tmp_path):
    store = Store(contents({"a": 6000}))
    spans = every_span(store.sizes)
    with machines(tmp_path, store, 2) as (one, two):
        expected, _ = read(one.reads.read(spans), two.reads.read(spans))
        late = Machine(tmp_path, store, 2, one.others)
        late.came_late = True
        assert read(late.reads.read(spans), one.reads.read(spans), two.reads.read(spans)) == [expected] * 3
        assert store.most == 1
        assert late.mirror.present_bytes > 0
        one.fault = "dies"
        later = Machine(tmp_path, store, 3, one.others)
        later.came_late = True
        assert read(later.reads.read(spans)) == [expected]
        assert store.most == 2


def test_a_full_mirror(tmp_path):
    store = Store(contents({"a": 6000}))
    spans = every_span(store.sizes)
    others: dict[str, Machine] = {}
    full = [Machine(tmp_path, store, number, others, max_bytes=300_000) for number in range(2)]
    for machine in full:
        machine.mirror.writable = False
    expected = [store.objects["a"][span.start : span.stop] for span in spans]
    assert read(*(machine.reads.read(spans) for machine in full)) == [expected] * 2
    assert [machine.mirror.present_bytes for machine in full] == [0, 0]
    for machine in full:
        machine.close()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_mixture_of_faults(tmp_path_factory, data):
    store = Store(contents({"a": data.draw(st.integers(1, 2000)), "b": data.draw(st.integers(0, 300))}))
    spans = every_span(store.sizes, data.draw(st.integers(1, 200)))
    expected = [store.objects[span.key][span.start : span.stop] for span in spans]
    faults = st.sampled_from(["", "", "dies", "hangs", "flips", "cuts", "holds nothing", "says nothing"])
    with machines(tmp_path_factory.mktemp("machines"), store, data.draw(st.integers(1, 4))) as made:
        for _ in range(3):
            for machine in made:
                machine.fault, machine.came_late = data.draw(faults), data.draw(st.booleans())
                machine.avoided.clear()
            assert read(*(machine.reads.read(spans) for machine in made)) == [expected] * len(made)


# ---- loaders


@dataclass(frozen=True)
class LocalPeers(PeerCache):
    """A cache whose peers are other machines of this process."""

    others: dict[str, dict[str, Sharing]] = field(default_factory=dict, hash=False, compare=False)

    def sharing(self, directory: MirrorDirectory, store: SharedStore) -> Sharing:
        return Sharing(self, directory, store)


class Sharing:
    """Connects a loader to the machines. Each has its own mirror, threads and leases."""

    def __init__(self, cache: LocalPeers, directory: MirrorDirectory, store: SharedStore) -> None:
        self.stretches = Stretches(store.object_sizes, 4096)
        self.mirror = MirrorArray(directory, self.stretches.layout)
        self.cache, self.directory, self.store, self.came_late = cache, directory, store, False
        self.identity, self.fault, self.discarded = directory.path.parent.name, "", []
        self.bytes_read = 0
        self.others = cache.others.setdefault(store.fingerprint, {})
        self.others[self.identity] = self

    @contextlib.contextmanager
    def opened(self, resources):
        with contextlib.closing(Leases(self.directory.path)) as leases:
            options = {"run": resources.run, "deadline_s": PATIENCE_S}
            kept = KeptStretches(self.stretches, self.mirror, leases, read_store=resources.read_store, **options)
            options = {"counters": resources.counters, "deadline_s": PATIENCE_S, "patience_s": PATIENCE_S}
            yield SharedReads(self.stretches, kept, self, read_store=resources.read_store, **options)

    async def present(self):
        return {name: None if each is self else each for name, each in self.others.items()}

    def avoid(self, identity: str) -> None:
        pass

    def avoids(self, identity: str) -> bool:
        return False

    async def _read_store(self, spans):
        self.bytes_read += sum(span.size for span in spans)
        return await self.store.source.read(spans)

    async def ask(self, starts, stops, *, only_held=False):
        if self.fault == "dies":
            raise ConnectionError("gone")
        with ThreadPoolExecutor(1) as threads, contextlib.closing(Leases(self.directory.path)) as leases:

            async def run(function, *args):
                return await timed(threads, function, *args)

            kept = KeptStretches(
                self.stretches, self.mirror, leases, read_store=self._read_store, run=run, deadline_s=PATIENCE_S
            )
            content, _ = await kept.read(starts, stops)
        if self.fault == "lies" and len(content):
            content[:: max(1, len(content) // 50)] ^= 255
        return np.ones(len(starts), bool), content, checksum(content)

    def discard(self, starts) -> None:
        self.discarded += starts.tolist()
        self.mirror.discard(self.stretches.of(starts))


def digest(loader: zl.Loader) -> list[tuple[bytes, bytes, bytes]]:
    return [
        (m.index.numpy().tobytes(), m.x.values().numpy().tobytes(), m.x.col_indices().numpy().tobytes()) for m in loader
    ]


def loaders(url, folder: Path, n: int, **options):
    others: dict[str, dict[str, Sharing]] = {}
    for rank in range(n):
        dataset = zl.open_dataset(url, cache=LocalPeers(folder / f"machine{rank}", others=others))
        yield zl.Loader(dataset, batch_size=16, seed=3, rank=rank, world_size=n, **options), others


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "dies", "lies"])
def test_loaders_yield_the_same_as_without_peers(tmp_path, fault):
    url = tmp_path / "cells.zarr"
    write_store(counts(600, 200, density=0.5), url, tmp_path / "source")
    made = list(loaders(url, tmp_path, 3))
    sharings = [loader.dataset.whole.stores[0].sharing(loader.options) for loader, _ in made]
    sharings[1].fault = fault
    read_bytes, sent = [0, 0], 0
    for epoch in range(2):
        for rank, (loader, _others) in enumerate(made):
            plain = zl.Loader(zl.open_dataset(url), batch_size=16, seed=3, rank=rank, world_size=3)
            plain.set_epoch(epoch)
            assert digest(loader) == digest(plain)
            statistics = loader.statistics()
            read_bytes[epoch] += statistics.bytes_read
            sent += statistics.bytes_from_peers
            assert ("from other machines" in repr(statistics)) == (statistics.bytes_from_peers > 0)
    assert sent > 0
    read_bytes[0] += sum(sharing.bytes_read for sharing in sharings)
    if not fault:
        assert read_bytes[1] == 0
        assert read_bytes[0] <= sum(sharing.stretches.n_bytes for sharing in sharings[:1])
    if fault == "lies":
        assert sharings[1].discarded
    assert not list(tmp_path.glob("machine*/*/X%2Fdata.*"))


@pytest.mark.slow
def test_several_stores_and_files_in_place(tmp_path):
    write_store(counts(300, 200, density=0.5), tmp_path / "cells.zarr", tmp_path / "source")
    counts(200, 200, density=0.5, seed=1).write_h5ad(tmp_path / "more.h5ad", compression="gzip")
    urls = [tmp_path / "cells.zarr", tmp_path / "more.h5ad"]
    made = list(loaders(urls, tmp_path, 2))
    for rank, (loader, _) in enumerate(made):
        plain = zl.Loader(zl.open_dataset(urls), batch_size=16, seed=3, rank=rank, world_size=2)
        assert digest(loader) == digest(plain)
    sharings = [sharing for of_store in made[0][1].values() for sharing in of_store.values()]
    assert sorted(sharing.store.url for sharing in sharings) == sorted(2 * list(map(str, urls)))
    assert not any(sharing.discarded for sharing in sharings)


def test_a_chunk_that_is_corrupt_in_the_store_is_an_error(tmp_path):
    url = tmp_path / "cells.zarr"
    write_store(counts(200, 100, density=0.5), url, tmp_path / "source")
    for path in (tmp_path / "cells.zarr" / "X" / "data").glob("c/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(bytes(content))
    (loader, _), _ = loaders(url, tmp_path, 2)
    with pytest.raises(CorruptChunkError, match="chunk"):
        digest(loader)


def test_there_is_no_mirror_to_warm(tmp_path):
    url = tmp_path / "cells.zarr"
    write_store(counts(50, 20), url, tmp_path / "source")
    ((loader, _),) = loaders(url, tmp_path, 1)
    with pytest.raises(OptionError, match="fills as machines read"):
        zl.warm(loader.dataset)
    with pytest.raises(OptionError, match=r"zr.keepers\(cache\) says what each of them holds"):
        loader.dataset.cache_statistics()
