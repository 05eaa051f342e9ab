"""The keepers of the machines that share a cache: the actors, and how other processes find and ask them.

A keeper reads the stretches that its machine owns (zloader.reading.peers) from the store, keeps them in the cache of
the machine, and sends them to others through Ray's object store. Its name has the identity of the cache directory, by
which it is found. It ends with the process that started it. Then another process of the machine starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.caching.place import identity_of, make_cache
from zloader.common.checks import require_at_least, require_count
from zloader.common.concurrent_calls import aside
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.options import FetchOptions
from zloader.common.records import Rows, Span
from zloader.reading.back_pressure import ByteBudget
from zloader.reading.peers import Answer, Peer, PeerCache, SharedReads, SharedStore
from zloader.reading.resources import Counters, timed
from zloader.reading.stretches import KeptStretches, Stretches
from zloader.storage.decode import checksum

log = logging.getLogger("zloader")

NAMESPACE = "zloader"
_LOOK_S = 5.0  # how often a process looks for machines that have come or gone
_PING_S = 2.0  # in which a keeper that is avoided has to answer in order to be asked again
_LATE = 0.05  # the share of what a machine owns that it holds when it can be said to have begun
_CALLS = 256  # at once, of a keeper
_THREADS = 4  # of a keeper


@dataclass(frozen=True)
class ClusterCache(PeerCache):
    """The options of a cache that the machines of a Ray cluster share."""

    _: KW_ONLY
    machines: int = 1
    wait_s: float = 60.0
    deadline_s: float = 10.0
    group: str = ""
    address: str = field(default="auto", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(machines=self.machines)
        require_at_least(0, wait_s=self.wait_s)
        require_at_least(0.001, deadline_s=self.deadline_s)
        if not isinstance(self.group, str) or "/" in self.group:
            raise OptionError(f"group= is a name without '/', not {self.group!r:.100}")

    @property
    def prefix(self) -> str:
        """What the names of all keepers of the group begin with."""
        return f"keeper/{self.group}/"


class Machines:
    """The keepers of the machines that share a cache, looked up anew every few seconds. Thread-safe."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
        self.identity = identity_of(make_cache(cache.directory))
        self._own: Any = None  # it ends when its creator drops the handle
        self._keepers: dict[str, Any] = {}
        self._avoided: set[str] = set()
        self._looked_s: float | None = None
        self._lock = threading.Lock()

    async def others(self) -> Mapping[str, Any]:
        """The keepers of the other machines that there are, by identity. Only the first call waits for them."""
        if self._looked_s is None:
            await aside(self._look)
        elif time.monotonic() - self._looked_s > _LOOK_S and not self._lock.locked():
            threading.Thread(target=self._look, name="zloader-look", daemon=True).start()
        return self._keepers

    def avoid(self, identity: str) -> None:
        """Does not ask a machine until it answers again."""
        self._avoided.add(identity)

    def avoids(self, identity: str) -> bool:
        """Whether a machine is not to be asked."""
        return identity in self._avoided

    def _look(self) -> None:
        with self._lock:
            first = self._looked_s is None
            if not first and time.monotonic() - (self._looked_s or 0) <= _LOOK_S:
                return  # another thread has just looked
            try:
                self._wait() if first else self._find()
                self._ping()
            except Exception as error:  # noqa: BLE001 -- Ray raises errors of many kinds, and the store has the bytes
                level = logging.WARNING if first else logging.INFO
                log.log(level, "cannot look for the other machines that share the cache: %s", error)
            self._looked_s = time.monotonic()

    def _wait(self) -> None:
        """Waits until all machines are there, and their keepers answer."""
        if not ray.is_initialized():  # a DataLoader worker, or another process that was given the dataset
            ray.init(address=self._cache.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        deadline = time.monotonic() + self._cache.wait_s
        while self._find() < self._cache.machines:
            if time.monotonic() > deadline:
                log.warning(
                    "%d of %d machines share the cache after %g s: the others read the store by themselves until they "
                    "come",
                    len(self._keepers) + 1,
                    self._cache.machines,
                    self._cache.wait_s,
                )
                break
            time.sleep(0.1)
        left_s = max(1.0, deadline - time.monotonic())
        if answers := [each.answer.remote() for each in self._keepers.values()]:
            ray.wait(answers, num_returns=len(answers), timeout=left_s)

    def _ping(self) -> None:
        """Finds out which of the keepers that are avoided answer again."""
        self._avoided &= self._keepers.keys()
        asked = {self._keepers[identity].answer.remote(): identity for identity in self._avoided}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PING_S) if asked else ([], [])
        for answer in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(answer)
                self._avoided.discard(asked[answer])

    def _find(self) -> int:
        """Looks up the keepers, starts that of this machine if it is not there, and returns how many there are."""
        found = names_of(self._cache)
        if self.identity not in found:
            self._own = _start_keeper(self._cache, self.identity)
        keepers = {}
        for identity, name in found.items():
            if identity != self.identity:
                known = None if identity in self._avoided else self._keepers.get(identity)  # or else it may be another
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    keepers[identity] = known or ray.get_actor(name, NAMESPACE)
        self._keepers = keepers
        return len(keepers) + (self.identity in found)


@lru_cache
def machines_of(cache: ClusterCache) -> Machines:
    """The machines that share a cache. A process looks for them only once, however many stores it opens."""
    return Machines(cache)


def names_of(cache: ClusterCache) -> dict[str, str]:
    """The names of the keepers that there are, by the identities of their machines."""
    require_ray()
    listed = [(each["name"], each["namespace"]) for each in ray.util.list_named_actors(all_namespaces=True)]
    prefix = cache.prefix
    return {name.removeprefix(prefix): name for name, space in listed if space == NAMESPACE and name.startswith(prefix)}


def _start_keeper(cache: ClusterCache, identity: str) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: Mapping[str, Any] = {
        "name": cache.prefix + identity,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": _CALLS,
        "scheduling_strategy": here,
    }
    return ray.remote(Keeper).options(**options).remote(cache)


class StorePeers:
    """The other machines, as the keepers of one store."""

    def __init__(self, cache: ClusterCache, store: SharedStore, n_bytes: int) -> None:
        self._machines, self._wait_s = machines_of(cache), cache.wait_s
        self._store, self._n_bytes = store, n_bytes
        self.identity = self._machines.identity
        self.came_late: bool | None = None
        self._peers: dict[str, RayPeer] = {}
        self._lock = threading.Lock()

    async def present(self) -> Mapping[str, Peer | None]:
        keepers = await self._machines.others()
        for identity, keeper in keepers.items():
            if identity not in self._peers or self._peers[identity].keeper is not keeper:
                self._peers[identity] = RayPeer(keeper, self._store)
        peers = {identity: self._peers[identity] for identity in keepers}
        if self.came_late is None:
            await aside(self._introduce, list(keepers.values()))
        return {self.identity: None, **peers}

    def _introduce(self, keepers: Sequence[Any]) -> None:
        """Has all keepers open the store, which can take them longer than an answer may take."""
        with self._lock:
            if self.came_late is not None:
                return
            late = False
            try:
                require_ray()
                store = ray.put(self._store)  # once, because the sizes of many objects take megabytes
                asked = [keeper.add.remote(store) for keeper in keepers]
                ready, _ = ray.wait(asked, num_returns=len(asked), timeout=self._wait_s) if asked else ([], [])
                late = max(map(ray.get, ready), default=0) > _LATE * self._n_bytes / (len(keepers) + 1)
            except Exception as error:  # noqa: BLE001 -- a keeper that does not answer is avoided when it is asked
                log.info("a machine that shares the cache did not open the store: %r", error)
            self.came_late = late

    def avoid(self, identity: str) -> None:
        self._machines.avoid(identity)

    def avoids(self, identity: str) -> bool:
        return self._machines.avoids(identity)


class RayPeer:
    """The keeper of another machine, asked for the bytes of one store."""

    def __init__(self, keeper: Any, store: SharedStore) -> None:
        self.keeper, self._store = keeper, store

    async def ask(self, starts: Rows, stops: Rows, *, only_held: bool = False) -> Answer:
        require_ray()
        answer = await self.keeper.ask.remote(self._store.fingerprint, starts, stops, only_held)
        if answer is None:  # it has been started again
            await self.keeper.add.remote(self._store)
            answer = await self.keeper.ask.remote(self._store.fingerprint, starts, stops, only_held)
        return answer  # type: ignore[no-any-return]

    async def answer(self) -> None:
        require_ray()
        await self.keeper.answer.remote()

    def discard(self, starts: Rows) -> None:
        with contextlib.suppress(Exception):  # it has ended, or Ray has
            require_ray()
            self.keeper.discard.remote(self._store.fingerprint, starts)


def require_ray() -> None:
    if not ray.is_initialized():  # a call would start another Ray
        raise RuntimeError("Ray was shut down in this process")


class Keeper:
    """The actor of one machine, which keeps its stretches of all stores, and sends them to other machines."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache, self._options = replace(cache, machines=1), FetchOptions(threads=_THREADS)  # waits for nobody
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="zloader-keeper")
        self._sending = ByteBudget(self._options.in_flight_bytes)
        self._stores: dict[str, _KeptStore] = {}

    async def answer(self) -> None:
        """Does nothing. An error says that this process is dead."""

    async def add(self, store: SharedStore) -> int:
        """Opens a store, so that its bytes can be asked for. Returns how many of them this machine holds."""
        if store.fingerprint not in self._stores:
            run = partial(timed, self._threads)
            self._stores[store.fingerprint] = _KeptStore(self._cache, store, self._options, run)
            with contextlib.suppress(ZloaderError):  # raised again when it is asked for bytes
                await self._stores[store.fingerprint].begin()
        return self._stores[store.fingerprint].mirror.present_bytes

    async def ask(self, fingerprint: str, starts: Rows, stops: Rows, only_held: bool) -> Answer | None:
        """As Peer.ask; None for a store that was not added."""
        store = self._stores.get(fingerprint)
        if store is None:
            return None
        n_bytes = int((stops - starts).sum())
        await self._sending.acquire(n_bytes)
        try:
            held = await store.kept.held(starts) if only_held else np.ones(len(starts), bool)
            content, _ = await store.kept.read(starts[held], stops[held])
            stated, _ = await timed(self._threads, checksum, content)
            store.bytes_sent += len(content)
            return held, content, stated
        finally:
            self._sending.release(n_bytes)

    async def discard(self, fingerprint: str, starts: Rows) -> None:
        """As Peer.discard."""
        if (store := self._stores.get(fingerprint)) is not None:
            store.kept.discard(starts)

    async def figures(self) -> list[dict[str, Any]]:
        """Of each store its URL, what was read of it by this process, sent to others, and is held by the machine."""
        return [
            {
                "url": store.url,
                "gets": store.counters.gets,
                "bytes_read": store.counters.bytes_read,
                "bytes_from_peers": store.counters.bytes_from_peers,
                "bytes_sent": store.bytes_sent,
                "bytes_held": store.mirror.present_bytes,
            }
            for store in self._stores.values()
        ]


class _KeptStore:
    """A store of which a keeper has a part."""

    def __init__(self, cache: ClusterCache, store: SharedStore, options: FetchOptions, run: Any) -> None:
        self.url, self._source = store.url, store.source
        directory = MirrorDirectory(cache, store.fingerprint, store.address)
        self._stretches = stretches = Stretches(store.object_sizes)
        self.mirror = MirrorArray(directory, stretches.layout)
        self.counters, self.bytes_sent = Counters(), 0
        self.kept = KeptStretches(
            stretches,
            self.mirror,
            Leases(directory.path),
            read_store=self._read_store,
            run=run,
            deadline_s=options.deadline_s,
        )
        # As a reader it is never used, but it asks others for the stretches that they owned before this machine came.
        self._elders = SharedReads(
            stretches,
            self.kept,
            StorePeers(cache, store, stretches.n_bytes),
            read_store=self._read_store,
            counters=self.counters,
            deadline_s=cache.deadline_s,
            patience_s=options.deadline_s,
        )

    async def begin(self) -> None:
        """Connects to the store."""
        await self._source.read(self._stretches.spans(0, min(1, self._stretches.n_bytes)))

    async def _read_store(self, spans: Sequence[Span]) -> list[bytes]:
        self.counters.gets += len(spans)
        self.counters.bytes_read += sum(span.size for span in spans)
        return await self._source.read(spans)
