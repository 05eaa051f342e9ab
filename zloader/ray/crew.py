"""The producers of a stream on a Ray cluster: starts them, replaces them, and translates Ray's errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray

from zloader.common.errors import OptionError, ProducerError
from zloader.order.plan import Plan, Remaining
from zloader.producing.producer import CarriedError, received
from zloader.producing.window import LANES, FailedError, LostError
from zloader.ray.alive import cluster_of_ray
from zloader.ray.producers import Actor, pickled
from zloader.reading.resources import Counters
from zloader.training.loader import Loader

_LOST = (
    ray.exceptions.RayActorError,  # the actor died, or its machine cannot be reached
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,  # Ray killed it
    ray.exceptions.ObjectLostError,
)
_MOST_FAILED_STARTS = 8  # in a row
_GROUPS_AHEAD = 2  # groups of a fetch that a producer makes before they are asked for
_CHECK_S = 0.5  # how often a stream asks whether its producers and Ray are there: Ray does not tell those that wait
_WATCH_S = 0.25  # the same, of the raylet: it must refuse twice in the second after which Ray ends this process


@dataclass(frozen=True)
class SharedPlan:
    """The plan of an epoch in the object store, and the number of the epoch within the stream."""

    number: int
    plan: Any


@dataclass(eq=False)
class Member:
    """A producer of a crew. Its `machine` and `pid` are known once it has opened the stores."""

    actor: Any
    opened: Any  # the reference to the result of `open`
    session: str
    machine: str = ""
    pid: int = 0
    lost: bool = False

    @property
    def reachable(self) -> bool:
        """Whether it can be told anything. Otherwise Ray, if it was shut down, would start anew for that."""
        return not self.lost and _session() == self.session

    @property
    def where(self) -> str:
        """The words that name it in errors."""
        return f", on Ray node {self.machine}, process {self.pid}" if self.machine else ""

    def _require_reachable(self) -> None:
        if not self.reachable:
            raise LostError("the producer was dropped, or Ray shut down")

    def make(self, plan: SharedPlan, remaining: Remaining, ready_bytes: int) -> RemoteMaking:
        """Begins what remains of a fetch."""
        self._require_reachable()
        method = self.actor.make.options(num_returns="streaming", _generator_backpressure_num_objects=_GROUPS_AHEAD)
        return RemoteMaking(self, method.remote(plan.number, plan.plan, remaining, ready_bytes))

    async def held(self, plan: SharedPlan, coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of its machine hold."""
        self._require_reachable()
        with _translated(self):
            shares: list[float] = await _Checked(self.actor.held.remote(plan.number, plan.plan, list(coming)), self)
        return shares

    async def ended(self) -> None:
        """Returns when the producer is dead."""
        try:
            while self.reachable:
                await _Checked(self.actor.answer.remote(), self)
                await asyncio.sleep(_CHECK_S)
        except Exception as error:
            if self.reachable and not isinstance(error, _LOST):
                raise


@dataclass(frozen=True)
class _Checked:
    """What to await of Ray. Raises LostError instead of going on when Ray has been shut down meanwhile.

    `ray.shutdown` wakes all that wait, and Ray ends the process if its own coroutines go on then.
    """

    awaitable: Any
    member: Member

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.awaitable.__await__()
        thrown: BaseException | None = None
        while True:
            if not self.member.reachable:
                raise thrown or LostError("Ray shut down")
            try:
                waited_for = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            try:
                thrown = None
                yield waited_for
            except BaseException as error:  # noqa: BLE001 -- thrown into what is awaited
                thrown = error


class RemoteMaking:
    """A fetch that a producer makes, as a stream of objects."""

    def __init__(self, member: Member, made: Any) -> None:
        self._member = member
        self._made: Any = made

    async def next(self) -> tuple[Sequence[Any], Counters] | None:
        """The next group; None at the end."""
        try:
            with _translated(self._member):
                reference = await _Checked(anext(self._made), self._member)
                items, counted = await _Checked(reference, self._member)
        except StopAsyncIteration:
            self._made = None
            return None
        return [writable(received(item, self._member.where)) for item in items], counted

    def cancel(self) -> None:
        """Ends the making, if it has not ended."""
        made, self._made = self._made, None
        if made is not None and self._member.reachable:
            ray.cancel(made)


@contextlib.contextmanager
def _translated(member: Member) -> Iterator[None]:
    """Raises LostError or FailedError for what a producer has raised, of which Ray has made errors of its own."""
    try:
        yield
    except _LOST as error:
        raise LostError(str(error)) from error
    except (ray.exceptions.RayTaskError, ray.exceptions.RaySystemError) as error:
        raise FailedError from cause_of(error, member)


def cause_of(error: Any, member: Member) -> BaseException:
    """The error that a producer has raised. Ray has made its own of it, or met one with what the producer sends."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, CarriedError):
        return cause.opened(member.where)
    return ProducerError(
        f"Ray cannot send what a producer has made{member.where}: {cause!r:.1000}. What batch_transform returns must "
        "survive pickling: return tensors, arrays or plain objects"
    )


@dataclass(kw_only=True)
class Crew:
    """Starts up to `size` producers with the recipes of the loader, and keeps them from epoch to epoch. Thread-safe."""

    loader: Loader
    size: int
    resources: dict[str, Any]
    start_s: float
    _members: set[Member] = field(default_factory=set)
    _free: list[Member] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _failed_starts: int = 0
    _closed: bool = False
    _gone: str = ""  # why there is no cluster any more
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.resources = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **self.resources}
        threads = max(1, int(self.resources["num_cpus"] or 1))
        recipes = self.loader.recipes
        options = replace(recipes.options, threads=min(threads, recipes.options.threads))
        try:
            self._actor = ray.remote(Actor).options(
                **self.resources,
                max_concurrency=LANES + 2,  # `held` and `answer` do not wait for fetches
                max_restarts=0,  # the stream starts another producer, which need not be on the same machine
                max_task_retries=0,
                placement_group_capture_child_tasks=False,  # that of a trainer has no room for its producers
            )
        except (TypeError, ValueError) as error:
            raise OptionError(f"resources={self.resources!r:.200}: {error}") from error
        self._recipes = ray.put(pickled(replace(recipes, options=options)))
        self._session = _session()
        self._cluster = cluster_of_ray()

    def share(self, plan: Plan) -> SharedPlan:
        """Puts the plan of an epoch where producers find it. Raises ProducerError if Ray has been shut down."""
        self._require_ray()
        return SharedPlan(next(self._numbers), ray.put(pickled(plan)))

    def _require_ray(self) -> None:
        if self._gone:
            raise ProducerError(self._gone)
        if _session() != self._session:
            raise ProducerError(
                "Ray was shut down in this process after the stream was made, and its producers with it: call ray.init "
                "and make a new stream. The state_dict of this one says where it was"
            )

    async def watch(self) -> None:
        """Raises ProducerError when Ray has been shut down in this process, or its cluster is gone."""
        while True:
            self._require_ray()
            try:
                await self._cluster.require()
            except ProducerError as error:
                self._abandon(str(error))
                raise
            await asyncio.sleep(_WATCH_S)

    def _abandon(self, reason: str) -> None:
        """Forgets all producers without a word to Ray, which might never answer."""
        with self._lock:
            self._gone = reason
            self._free.clear()
            for member in self._members:
                member.lost = True
            self._members.clear()

    async def join(self, others_work: Callable[[], bool]) -> Member:
        """A producer that is ready to work. Waits for one as long as others work.

        Raises ProducerError if none does and none starts for `start_s`, and any error in opening the stores.
        """
        while True:
            member = self._taken()
            try:
                member.machine, member.pid = await self._opened(member, others_work)
            except ray.exceptions.RayTaskError as error:
                self.drop(member)
                raise cause_of(error, member) from error
            except ray.exceptions.RayError as error:
                self.drop(member)
                self._failed_starts += 1
                again = isinstance(error, _LOST) and not getattr(error, "actor_init_failed", False)
                if not again or self._failed_starts > _MOST_FAILED_STARTS:
                    raise ProducerError(f"producers cannot start, the last one because: {error}") from error
            except LostError:  # Ray was shut down, or the stream closed
                self.drop(member)
            except (asyncio.CancelledError, ProducerError):  # it may start later
                self.leave(member)
                raise
            except BaseException:
                self.drop(member)
                raise
            else:
                self._failed_starts = 0
                return member

    def _taken(self) -> Member:
        with self._lock:
            if self._closed:
                raise ProducerError("the stream was closed during an epoch: close it after its iterators")
            self._require_ray()
            if self._free:
                return self._free.pop()
            actor = self._actor.remote()
            member = Member(actor=actor, opened=actor.open.remote(self._recipes), session=self._session)
            self._members.add(member)
            return member

    async def _opened(self, member: Member, others_work: Callable[[], bool]) -> tuple[str, int]:
        opened: asyncio.Future[tuple[str, int]] = asyncio.ensure_future(_Checked(member.opened, member))
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
            self._members.discard(member)
            reachable, member.lost = member.reachable, True
        if reachable:
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


def _session() -> str:
    """What this process is to the cluster: another one after every `ray.init`, and empty without Ray.

    Waits for a `ray.shutdown` that another thread has begun. Ray would end the process if references to its objects
    were dropped meanwhile, and that is what happens here when Ray is gone.
    """
    with getattr(ray._private.worker, "_connect_or_shutdown_lock", contextlib.nullcontext()):
        return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""


class _Writable:
    """The memory of an array that is marked read-only, as the base of a writable one."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(value: Any) -> Any:
    """A minibatch whose arrays are writable, as a Loader's are.

    Ray marks the arrays of its objects as read-only, because processes may share them. Nobody else reads an object
    with minibatches. The memory is that of the object, and is freed with the last array or tensor in it.
    """
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else np.asarray(_Writable(value))
    if isinstance(value, dict):
        return type(value)((name, writable(each)) for name, each in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: writable(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
