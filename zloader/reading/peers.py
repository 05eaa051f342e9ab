"""Reads a store together with other machines, so that each of its bytes is read from the store by one of them.

Each stretch of the store (zloader.reading.stretches) has an owner among the machines that are there: the one with the
highest hash of its identity and the number of the stretch (rendezvous hashing). When a machine goes, only its stretches
get other owners, and when one comes, it takes over an equal share from all. An owner keeps its stretches in its mirror.
The others ask it for the bytes that they need, and keep no copy.

An answer has a checksum. A peer that is late or wrong is not asked again until it answers a call of another kind. What
it was asked for is read from the store, and kept by nobody, because the peer may come back in a moment. So peers can
make an epoch slower, but not wrong. A chunk is also compared with the checksum that is stored with it, and if it
differs, it is read from the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.caching.directory import MirrorDirectory
from zloader.common.options import Cache
from zloader.common.records import ByteSource, Rows, Span
from zloader.reading.resources import Counters, Resources
from zloader.reading.stretches import KeptStretches, ReadStore, Stretches
from zloader.storage.decode import checksum

log = logging.getLogger("zloader")

# Which of some ranges are answered, the bytes of these, one after another, and their crc32c.
Answer = tuple[NDArray[np.bool_], NDArray[np.uint8], int]


class Peer(Protocol):
    """The keeper of a machine's stretches of one store."""

    async def ask(self, starts: Rows, stops: Rows, *, only_held: bool = False) -> Answer:
        """The bytes `[start, stop)` of the store; with `only_held`, of those that the machine has read already."""

    async def answer(self) -> None:
        """Returns as soon as the machine answers."""

    def discard(self, starts: Rows) -> None:
        """Tells it that the stretches of these bytes are wrong. Does not wait."""


class Peers(Protocol):
    """The machines that share a store."""

    identity: str  # of this machine

    async def present(self) -> Mapping[str, Peer | None]:
        """The machines that can be asked, by identity, this one among them as None."""

    def avoid(self, identity: str) -> None:
        """Does not ask a machine until it answers again."""

    def avoids(self, identity: str) -> bool:
        """Whether a machine is not to be asked."""

    @property
    def came_late(self) -> bool | None:
        """Whether others had read parts of the store before this machine came, which it may own now.

        None until `present` has been called.
        """


class Sharing(Protocol):
    """How the machines that have opened a store share what they read of it."""

    def opened(self, resources: Resources) -> AbstractContextManager[SharedReads]:
        """What reads the store in an epoch."""


@dataclass(frozen=True, kw_only=True)
class SharedStore:
    """What another machine has to know to read a store. `fingerprint` and `address` are those of its mirrors."""

    fingerprint: str
    url: str
    address: str
    object_sizes: Mapping[str, int]
    source: ByteSource


@dataclass(frozen=True)
class PeerCache(Cache, ABC):
    """A cache in which several machines keep one copy of a store together, as it is stored."""

    form: str = "shared"
    forms = ("shared",)

    @abstractmethod
    def sharing(self, directory: MirrorDirectory, store: SharedStore) -> Sharing:
        """Shares the stretches of a store, of which this machine keeps some in `directory`."""


@lru_cache(1024)
def _seed(identity: str) -> int:
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little")


def owners_of(stretches: Rows, identities: Sequence[str]) -> NDArray[np.intp]:
    """The position of the owner of each stretch among `identities`, of which there is at least one."""
    seeds = np.array([_seed(identity) for identity in identities], np.uint64)
    mixed = (stretches.astype(np.uint64)[:, None] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ seeds
    # The last steps of splitmix64: https://prng.di.unimi.it/splitmix64.c
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(np.argmax(mixed ^ (mixed >> np.uint64(31)), axis=1))


class SharedReads:
    """Reads spans of a store from the machines that own them. Like a ByteSource, it has one verb.

    `kept` are the stretches of this machine, and `read_store` reads the store itself. A peer that does not answer a
    ping within `deadline_s`, or does not send what it was asked for within `patience_s`, is avoided.
    """

    def __init__(
        self,
        stretches: Stretches,
        kept: KeptStretches,
        peers: Peers,
        *,
        read_store: ReadStore,
        counters: Counters,
        deadline_s: float,
        patience_s: float,
    ) -> None:
        self._stretches, self._kept, self._peers = stretches, kept, peers
        self._read_store, self._counters = read_store, counters
        self._deadline_s, self._patience_s = deadline_s, patience_s
        kept.ask_elders = self._ask_elders

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order. Raises what reading the store raises."""
        of_span, starts, stops = self._stretches.pieces(spans)
        pieces: list[bytes] = [b""] * len(starts)

        async def read_of(owner: str, peer: Peer | None, where: Rows) -> None:
            found = await self._read_of(owner, peer, starts[where], stops[where])
            for position, piece in zip(where.tolist(), found, strict=True):
                pieces[position] = piece

        async with asyncio.TaskGroup() as group:
            for each in _by_owner(starts // self._stretches.size, await self._peers.present()):
                group.create_task(read_of(*each))
        joined: list[list[bytes]] = [[] for _ in spans]
        for number, piece in zip(of_span.tolist(), pieces, strict=True):
            joined[number].append(piece)
        return [parts[0] if len(parts) == 1 else b"".join(parts) for parts in joined]

    async def _read_of(self, owner: str, peer: Peer | None, starts: Rows, stops: Rows) -> Sequence[bytes]:
        if peer is None:
            content, from_mirror = await self._kept.read(starts, stops)
            self._counters.bytes_from_mirror += from_mirror
            return _cut(content, stops - starts)
        answer = await self._asked(owner, peer, starts, stops)
        if answer is not None:
            return answer[1]
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        return await self._read_store([span for start, stop in bounds for span in self._stretches.spans(start, stop)])

    async def _ask_elders(self, stretches: Rows) -> tuple[Rows, list[bytes]]:
        """Of stretches that this machine owns, those that their earlier owners have, and the bytes of these."""
        present = await self._peers.present()
        if not self._peers.came_late:
            return stretches[:0], []
        others = {owner: peer for owner, peer in present.items() if peer is not None}
        held, contents = [stretches[:0]], []
        for owner, peer, where in _by_owner(stretches, others):
            assert peer is not None
            starts = stretches[where] * self._stretches.size
            stops = np.minimum(starts + self._stretches.size, self._stretches.n_bytes)
            answer = await self._asked(owner, peer, starts, stops, only_held=True)
            if answer is not None:
                held.append(stretches[where][answer[0]])
                contents += answer[1]
        return np.concatenate(held), contents

    async def _asked(
        self, owner: str, peer: Peer, starts: Rows, stops: Rows, *, only_held: bool = False
    ) -> tuple[NDArray[np.bool_], list[bytes]] | None:
        """The answer of a peer: which ranges it has, and their bytes; None if it gives none, or a wrong one."""
        if self._peers.avoids(owner):
            return None
        try:
            held, content, stated = await self._answer(peer, starts, stops, only_held=only_held)
            sizes = (stops - starts)[held]
            if not (held.all() or only_held) or len(content) != sizes.sum() or checksum(content) != stated:
                raise ValueError("its answer differs from its checksum")
        except Exception as error:  # noqa: BLE001 -- whatever befalls a peer, the store has the bytes
            log.info("the machine %s did not answer (%r): reading from the store", owner, error)
            self._peers.avoid(owner)
            return None
        self._counters.bytes_from_peers += len(content)
        return held, _cut(content, sizes)

    async def _answer(self, peer: Peer, starts: Rows, stops: Rows, *, only_held: bool) -> Answer:
        """What a peer answers. It may take as long as a read of the store, if it is there all the time.

        It may be waiting for the store. If all others gave up then, they would read the same from the store again.
        """
        asking = asyncio.ensure_future(peer.ask(starts, stops, only_held=only_held))
        try:
            async with asyncio.timeout(self._patience_s):
                while not (await asyncio.wait({asking}, timeout=self._deadline_s))[0]:
                    async with asyncio.timeout(self._deadline_s):
                        await peer.answer()
            return asking.result()
        finally:
            asking.cancel()

    async def discard(self, spans: Sequence[Span]) -> None:
        """Makes the owners of some spans forget them, because chunks in them differ from their checksums."""
        _, starts, _ = self._stretches.pieces(spans)
        for _, peer, where in _by_owner(starts // self._stretches.size, await self._peers.present()):
            (self._kept if peer is None else peer).discard(starts[where])


def _cut(content: NDArray[np.uint8], sizes: Rows) -> list[bytes]:
    """The bytes of some ranges, which lie one after another."""
    ends = np.cumsum(sizes)
    return [content[begin:end].tobytes() for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]


def _by_owner(
    stretches: Rows, present: Mapping[str, Peer | None]
) -> Iterator[tuple[str, Peer | None, NDArray[np.intp]]]:
    """The machines that own some stretches, and the positions of these."""
    if not present:
        return
    owners = owners_of(stretches, list(present))
    for number, (owner, peer) in enumerate(present.items()):
        where = np.flatnonzero(owners == number)
        if len(where):
            yield owner, peer, where
