"""Producers: actors that make the minibatches of any fetch of a plan, and the crew that starts and replaces them.

A producer has no state but its copy of the loader. Which rows a fetch has, and in which order, is arithmetic. So any
producer can go on where another one died, and the minibatches are the same, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray

from zloader.common.errors import OptionError, ProducerError
from zloader.common.malloc import keep_freed_memory
from zloader.order.plan import Fetch, Plan, Remaining
from zloader.reading.bridge import Bridge, Put
from zloader.reading.fetch import FetchScheduler
from zloader.reading.held import held_share
from zloader.reading.resources import BufferPool, Counters
from zloader.training.loader import Loader
from zloader.training.minibatch import silence_sparse_warnings

# A producer reads one fetch while it gathers another.
LANES = 2
# These say that a producer, its machine, or its results are gone. Reading the data has not failed.
LOST = (
    ray.exceptions.RayActorError,  # the actor died, or its machine cannot be reached
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,  # Ray killed it
    ray.exceptions.ObjectLostError,
)
_MOST_FAILED_STARTS = 8  # in a row


def pickled(value: Any) -> NDArray[np.uint8]:
    """A value as bytes that Ray does not copy, and whose arrays will be writable, as compiled loops need them."""
    return np.frombuffer(ray.cloudpickle.dumps(value), np.uint8)


def unpickled(value: NDArray[np.uint8]) -> Any:
    """The value of which `pickled` has made these bytes."""
    return ray.cloudpickle.loads(value)


class Producer:
    """The actor. `open` comes first."""

    def __init__(self) -> None:
        self._buffers = BufferPool()
        self._plan: tuple[int, Plan] | None = None

    def open(self, loader: NDArray[np.uint8]) -> tuple[str, int]:
        """Opens the stores of a pickled loader. Returns the ids of this machine and of this process."""
        self._loader: Loader = unpickled(loader)
        silence_sparse_warnings()
        if self._loader.options.tune_malloc:
            keep_freed_memory()
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def make(
        self, number: int, plan: NDArray[np.uint8], remaining: Remaining
    ) -> Iterator[tuple[Sequence[Any], Counters]]:
        """Yields groups of minibatches, as the loader's recipe makes them, each with what was counted so far.

        `plan` is the pickled plan of epoch `number` of the stream.
        """
        loader, epoch_plan = self._loader, self._plan_of(number, plan)
        scheduler = FetchScheduler(loader.recipe(epoch_plan.epoch), loader.options, self._buffers)
        ready_bytes = loader.options.ready_bytes // 4
        with contextlib.closing(_groups(scheduler, epoch_plan.rest_of(remaining), ready_bytes)) as groups:
            for group in groups:  # Ray sends values into the generator, which `yield from` would pass on
                yield group, scheduler.counters

    def held(self, number: int, plan: NDArray[np.uint8], coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of this machine hold."""
        epoch_plan = self._plan_of(number, plan)
        recipe = self._loader.recipe(epoch_plan.epoch)
        return [held_share(recipe, epoch_plan.rest_of(remaining).rows) for remaining in coming]

    def _plan_of(self, number: int, plan: NDArray[np.uint8]) -> Plan:
        of_epoch = self._plan
        if of_epoch is None or of_epoch[0] != number:
            of_epoch = self._plan = number, unpickled(plan)
        return of_epoch[1]


def _groups(scheduler: FetchScheduler, fetch: Fetch, ready_bytes: int) -> Bridge[Sequence[Any]]:
    """The minibatches of a fetch in the groups in which they are gathered."""

    async def produce(put: Put[Sequence[Any]]) -> None:
        await scheduler.run([fetch], lambda items, n_bytes: put([items], n_bytes))

    return Bridge(produce, ready_bytes=ready_bytes, name="zloader-fetch")


@dataclass(eq=False)
class Member:
    """A producer of a crew. Its `machine` and `pid` are known once it has opened the stores."""

    actor: Any
    opened: Any  # the reference to the result of `open`
    machine: str = ""
    pid: int = 0
    lost: bool = False


def cause_of(error: Any, member: Member) -> BaseException:
    """The error that a producer has raised, of which Ray has made its own."""
    cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
    where = f", on Ray node {member.machine}, process {member.pid}" if member.machine else ""
    cause.add_note(f"raised by a producer{where}")
    return cause


@dataclass(kw_only=True)
class Crew:
    """Starts up to `size` producers with a copy of the loader, and keeps them from epoch to epoch. Thread-safe."""

    loader: Loader
    size: int
    resources: dict[str, Any]
    start_s: float
    _members: set[Member] = field(default_factory=set)
    _free: list[Member] = field(default_factory=list)
    _failed_starts: int = 0
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.resources = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **self.resources}
        threads = max(1, int(self.resources["num_cpus"] or 1))
        loader = copy.copy(self.loader)
        loader.options = replace(loader.options, threads=min(threads, loader.options.threads))
        try:
            self._actor = ray.remote(Producer).options(
                **self.resources,
                max_concurrency=LANES + 1,  # `held` does not wait for fetches
                max_restarts=0,  # the stream starts another producer, which need not be on the same machine
                max_task_retries=0,
                placement_group_capture_child_tasks=False,  # that of a trainer has no room for its producers
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"resources={self.resources!r:.200}: {error}") from error
        self._loader = ray.put(pickled(loader))

    async def join(self, others_work: Callable[[], bool]) -> Member:
        """A producer that is ready to work. Waits for one as long as others work.

        Raises ProducerError if none does and none starts for `start_s`, and any error in opening the stores.
        """
        while True:
            member = self._taken()
            try:
                member.machine, member.pid = await self._opened(member, others_work)
            except LOST as error:
                self.drop(member)
                self._failed_starts += 1
                if self._failed_starts > _MOST_FAILED_STARTS or getattr(error, "actor_init_failed", False):
                    raise ProducerError(f"producers die when they start, the last one with: {error}") from error
            except ray.exceptions.RayTaskError as error:
                self.drop(member)
                raise cause_of(error, member) from error
            except BaseException:
                self.leave(member)
                raise
            else:
                self._failed_starts = 0
                return member

    def _taken(self) -> Member:
        with self._lock:
            if self._closed:
                raise ProducerError("the stream was closed during an epoch: close it after its iterators")
            if self._free:
                return self._free.pop()
            actor = self._actor.remote()
            member = Member(actor=actor, opened=actor.open.remote(self._loader))
            self._members.add(member)
            return member

    async def _opened(self, member: Member, others_work: Callable[[], bool]) -> tuple[str, int]:
        opened: asyncio.Future[tuple[str, int]] = asyncio.ensure_future(_awaited(member.opened))
        try:
            while not (await asyncio.wait({opened}, timeout=self.start_s))[0]:
                if not others_work():
                    raise ProducerError(self._why_none_starts())
            return opened.result()
        finally:
            opened.cancel()

    def _why_none_starts(self) -> str:
        wanted = {name: amount for name, amount in self.resources.items() if name != "scheduling_strategy"}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        shown = [{key: value for key, value in node.items() if not key.startswith("node:")} for node in nodes]
        return (
            f"no producer has started for {self.start_s:g} s. Each one asks for {wanted}; of {ray.cluster_resources()} "
            f"in the cluster, {ray.available_resources()} are free; its machines have {shown!r:.1000}. Give resources= "
            "that one of the machines has, add machines, or end other work"
        )

    def leave(self, member: Member) -> None:
        """Keeps a producer for the next epoch, unless there are more than `size`."""
        with self._lock:
            if member.lost:
                return
            if len(self._members) <= self.size:
                self._free.append(member)
                return
        self.drop(member)

    def drop(self, member: Member) -> None:
        """Ends a producer, if it is not dead already."""
        with self._lock:
            member.lost = True
            self._members.discard(member)
        if ray.is_initialized():
            ray.kill(member.actor)

    def resize(self, size: int) -> None:
        """Changes the number of producers. Ends those that are free and too many."""
        with self._lock:
            self.size = size
            spare = [self._free.pop() for _ in range(min(len(self._free), max(0, len(self._members) - size)))]
        for member in spare:
            self.drop(member)

    def close(self) -> None:
        """Ends all producers."""
        with self._lock:
            self._closed = True
            self._free.clear()
        for member in list(self._members):
            self.drop(member)


async def _awaited(reference: Any) -> Any:
    return await reference
