"""`zr.cache`: the machines of a Ray cluster keep one copy of a store together.

Each machine has a keeper (zloader.ray.keeping), which other machines ask for the stretches that it owns. The training
processes of a machine use the same files, so they need no actor for what their own machine keeps.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.util

from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.ray.keeping import NAMESPACE, ClusterCache, StorePeers, names_of
from zloader.reading.peers import SharedReads, SharedStore
from zloader.reading.resources import Resources
from zloader.reading.stretches import KeptStretches, Stretches

log = logging.getLogger("zloader")


@answers
@dataclass(frozen=True)
class SharedCache(ClusterCache):
    """What `zr.cache` returns. Give it to `zl.open_dataset`."""

    def sharing(self, directory: MirrorDirectory, store: SharedStore) -> RaySharing:
        """Shares the stretches of a store, of which this machine keeps some in `directory`."""
        return RaySharing(self, directory, store)


class RaySharing:
    """Shares what this process reads of one store with the other machines of a Ray cluster."""

    def __init__(self, cache: SharedCache, directory: MirrorDirectory, store: SharedStore) -> None:
        self._cache, self._store = cache, store
        self._stretches = Stretches(store.object_sizes)
        self._directory = directory
        self._mirror = MirrorArray(directory, self._stretches.layout)
        self._peers = StorePeers(cache, store, self._stretches.n_bytes)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[SharedReads]:
        """What reads the store in an epoch."""
        with contextlib.closing(Leases(self._directory.path)) as leases:
            kept = KeptStretches(
                self._stretches,
                self._mirror,
                leases,
                read_store=resources.read_store,
                run=resources.run,
                deadline_s=resources.options.deadline_s,
            )
            yield SharedReads(
                self._stretches,
                kept,
                self._peers,
                read_store=resources.read_store,
                counters=resources.counters,
                deadline_s=self._cache.deadline_s,
                patience_s=resources.options.deadline_s,
            )
        self._mirror.record_verified()


@answers
def cache(
    directory: Any,
    *,
    machines: int | None = None,
    max_bytes: int | str | None = None,
    min_free_bytes: int | str = 0,
    wait_s: float = 60.0,
    deadline_s: float = 10.0,
    group: str = "",
) -> SharedCache:
    """A cache on a local disk of each machine, in which all machines of the Ray cluster keep one copy together.

    >>> dataset = zl.open_dataset("s3://bucket/cells.zarr", cache=zr.cache("/nvme/zloader", machines=64))

    Each piece of 512 KiB of a store has an owner among the machines, which reads it from the store once and keeps it.
    The other machines ask the owner. The order and the values of minibatches stay as they are without it. If an owner
    ends, does not answer or sends something wrong, its pieces are read from the store.

    - `directory`, `max_bytes`, `min_free_bytes`: as for zl.Cache, for this machine.
    - `machines`: before the first read, wait until so many machines are there, up to `wait_s` seconds. Default:
      WORLD_SIZE / LOCAL_WORLD_SIZE, as torchrun sets them, else 1.
    - `deadline_s`: seconds after which a machine that does not answer, not even a ping, is passed over.
    - `group`: machines share with those that give the same group.

    Connects this process to the Ray that runs on this machine, unless it is connected already. Raises OptionError if
    there is none, and for invalid arguments.
    """
    if not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise OptionError(
                f"zr.cache needs Ray on this machine ({error}): run 'ray start --head' on one machine, and 'ray start "
                "--address=ADDRESS' on the others"
            ) from error
    return SharedCache(
        directory,
        machines=_machines() if machines is None else machines,
        max_bytes=max_bytes,
        min_free_bytes=min_free_bytes,
        wait_s=wait_s,
        deadline_s=deadline_s,
        group=group,
        address=ray.get_runtime_context().gcs_address,
    )


def _machines() -> int:
    """The machines that torchrun says there are; 1 if it says nothing."""
    stated = [os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if not all(each.isdecimal() and int(each) for each in stated):
        return 1
    world, local = map(int, stated)
    return -(-world // local)


@answers
def keepers(cache: SharedCache, *, timeout_s: float = 10.0) -> dict[str, list[dict[str, Any]]]:
    """What the keepers of all machines have read from stores, sent to others, and hold, by identity of the machine.

    Each has a list with a dict for each store: `url`, `gets`, `bytes_read`, `bytes_from_peers`, `bytes_sent` and
    `bytes_held`. What training processes have read is in their own `statistics()`. Keepers that do not answer within
    `timeout_s` seconds are left out.
    """
    asked = {}
    for identity, name in names_of(cache).items():
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            asked[identity] = ray.get_actor(name, NAMESPACE).figures.remote()
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    answers = {}
    for identity, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):
            if answer in ready:
                answers[identity] = ray.get(answer)
    return answers
