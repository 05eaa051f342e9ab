"""`zr.stream`: the minibatches of a Loader, made by tasks on the machines of a Ray cluster.

A fetch is a function of the recipes of the loader, the plan of the epoch, and its number. So each fetch is a task. Ray
runs it wherever there is room, and again if its process or machine is lost. The minibatches are the same, bit for bit.
Tasks begin in the order of their fetches and never wait for the consumer, so that none keeps the cores that the next
fetch needs. The bytes of those that have begun bound the memory: their minibatches wait in the object stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch.utils.data
from numpy.typing import NDArray

from zloader.common.checks import parse_size, require_at_least, require_count
from zloader.common.errors import OptionError, ProducerError
from zloader.common.keywords import answers
from zloader.common.machine import keep_freed_memory
from zloader.order.plan import Plan, Remaining
from zloader.ray.sent import pickled, sendable, unpickled, writable
from zloader.reading.bridge import Bridge, Channel
from zloader.reading.fetch import FetchScheduler
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool, Counters
from zloader.training.epoch import EpochWork, Statistics
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch
from zloader.training.recipes import LoaderRecipes

_POLL_S = 0.05  # for which `ray.shutdown`, and other streams of this process, may have to wait
_MOST_OPENED = 8  # recipes and epochs that a process of Ray keeps for its next tasks


@answers
def stream(
    loader: Loader,
    *,
    tasks: int = 4,
    ahead_bytes: int | str | None = None,
    resources: Mapping[str, Any] | None = None,
    deadline_s: float = 300.0,
) -> Stream:
    """The minibatches of this rank's `loader`, in its order and bit for bit, made by tasks on a Ray cluster.

    >>> minibatches = zr.stream(loader, tasks=16, ahead_bytes="8GiB", resources={"num_cpus": 2})  # doctest: +SKIP
    >>> for minibatch in minibatches:  # each iteration is an epoch, as with the loader
    ...     train(minibatch)
    >>> first = next(iter(minibatches))  # a look at the first minibatch does not cost an epoch  # doctest: +SKIP

    Each task makes one fetch, on any machine of the cluster, and reads through the cache of its machine. If its process
    or its machine dies, Ray runs it again. Every minibatch comes exactly once. Each rank has tasks of its own.

    Args:
        loader: the Loader of this rank. Its `state_dict`, `load_state_dict`, `set_epoch` and `statistics` are those of
            the stream. Every machine must be able to open its stores. A `device` gets minibatches on this machine.
        tasks: how many fetches are made ahead at most. `resize` changes it, even during an epoch.
        ahead_bytes: minibatches that are made ahead, as bytes or a string such as "8GiB". They wait in the object
            stores of the machines. A fetch that is larger is made alone. Default: a quarter of this machine's object
            store, up to 1 GiB.
        resources: what each task takes of its machine, as options of a Ray task, such as
            `{"num_cpus": 2, "memory": 4 << 30}`. It uses as many threads as it has cores. Default: one core, spread
            over the machines.
        deadline_s: how long to wait for progress with the fetch that comes next. Default: 300.

    Raises OptionError for an invalid option. Iterating raises the errors of a Loader, when their minibatch is due, and
    ProducerError if the next fetch makes no progress, if Ray gives it up, or if Ray is shut down in this process.
    """
    if not isinstance(loader, Loader):
        raise OptionError(f"zr.stream needs a zl.Loader, not {loader!r:.100}")
    require_count(tasks=tasks)
    require_at_least(0.001, deadline_s=deadline_s)
    return Stream(loader, tasks, _ahead_bytes(ahead_bytes), dict(resources or {}), deadline_s)


@answers
class Stream(torch.utils.data.IterableDataset[Minibatch]):
    """What `zr.stream` returns: an iterable of minibatches, and one epoch per iteration."""

    def __init__(
        self, loader: Loader, tasks: int, ahead_bytes: int, resources: dict[str, Any], deadline_s: float
    ) -> None:
        self.loader, self.tasks, self.ahead_bytes, self.deadline_s = loader, tasks, ahead_bytes, deadline_s
        self.resources = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **resources}
        try:
            self.make = ray.remote(_make).options(**self.resources, num_returns="streaming", max_retries=-1)
        except (TypeError, ValueError) as error:
            raise OptionError(f"resources={self.resources!r:.200}: {error}") from error
        options = loader.recipes.options
        threads = min(max(1, int(self.resources["num_cpus"] or 1)), options.threads)
        self.recipes = ray.put(pickled(replace(loader.recipes, options=replace(options, threads=threads))))
        self.session = _session()

    def __iter__(self) -> Iterator[Minibatch]:
        """The next epoch of the loader, or the rest of the one that `load_state_dict` restored."""
        if torch.utils.data.get_worker_info() is not None:
            raise OptionError("a stream cannot be used in a DataLoader worker: iterate over it in the training process")
        return self.loader.epoch_by(self._start)

    def _start(self, work: EpochWork) -> tuple[Bridge[Any], Counters]:
        epoch = _Epoch(self, work)
        # One byte a group, so that one group is handed over at a time: all others count as made ahead.
        return Bridge(epoch.run, ready_bytes=1, name="zloader-ray"), epoch.counters

    def resize(self, tasks: int) -> None:
        """Changes the number of tasks, even while an epoch runs."""
        require_count(tasks=tasks)
        self.tasks = int(tasks)

    def __len__(self) -> int:
        """Minibatches per whole epoch on this rank."""
        return len(self.loader)

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """The state of the loader: what this process has received, without the last `unused` minibatches."""
        return self.loader.state_dict(unused=unused)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch that `state` was saved in, by a stream or a loader."""
        self.loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`."""
        self.loader.set_epoch(epoch)

    def statistics(self) -> Statistics:
        """Figures of the current or last epoch. Reads are those of all fetches that have come completely."""
        return self.loader.statistics()


# ---- the training process


@dataclass(eq=False)
class _Begun:
    """A fetch that a task makes. `next` is the reference to its next value, if Ray has it already."""

    remaining: Remaining
    task: Any
    n_taken: int = 0  # minibatches
    next: Any = None


class _Epoch:
    """An epoch under way: begins tasks ahead, and puts their minibatches in order."""

    def __init__(self, stream: Stream, work: EpochWork) -> None:
        self.counters = Counters()
        self._stream, self._later = stream, work.remaining
        self._begun: deque[_Begun] = deque()
        self._coming = next(self._later, None)
        # The bytes of an expected minibatch and of all that have come, to know the mean.
        loader = stream.loader
        self._n_bytes, self._n_minibatches = int(loader.recipes.expected_bytes(loader.batch_size)), 1
        with self._connected():
            self._plan = ray.put(pickled(work.plan))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Keeps Ray from being shut down meanwhile by another thread. Raises ProducerError if it has been.

        Ray would start anew for a call after `ray.shutdown`, and ends the process if it is shut down during a call.
        """
        with getattr(ray._private.worker, "_connect_or_shutdown_lock", contextlib.nullcontext()):
            if _session() != self._stream.session:
                raise ProducerError(
                    "Ray was shut down in this process after the stream was made: call ray.init and make a new stream. "
                    "The state_dict of this one says where it was"
                )
            yield

    async def run(self, put: Channel[Any]) -> None:
        """Puts all minibatches. Raises the first error in their order, and then ends the tasks.

        If the consumer leaves early, those that have begun are not cancelled: Ray would replace their processes, which
        takes seconds, when the next epoch needs them.
        """
        try:
            while (items := await self._next()) is not None:
                await put([writable(item) for item in items], 1)  # waits until the consumer has the group before
                self._begun[0].n_taken += len(items)
        except Exception:
            await asyncio.to_thread(self._cancel)
            raise

    async def _next(self) -> Sequence[Any] | None:
        """The next minibatches; None at the end. Raises ProducerError if they do not come in time."""
        since_s = time.monotonic()
        while True:
            finished, items = await asyncio.to_thread(self._poll)
            if finished or items:
                return items
            if time.monotonic() - since_s > self._stream.deadline_s:
                raise ProducerError(await asyncio.to_thread(self._why_nothing_comes))

    def _poll(self) -> tuple[bool, Sequence[Any] | None]:
        """Whether the epoch has ended, and the next minibatches, if they have come."""
        with self._connected():
            self._begin_more()
            if not self._begun:
                return True, None
            fetch = self._begun[0]
            value = self._value_of(fetch)
        if isinstance(value, Exception):
            raise value
        if isinstance(value, Counters):
            self._end(fetch, value)
            return False, None
        if value is not None:
            self._n_bytes += sum(item.nbytes for item in value)
            self._n_minibatches += len(value)
        return False, value

    def _begin_more(self) -> None:
        """Begins the tasks for which there is room."""
        while self._coming is not None and len(self._begun) < self._stream.tasks:
            left = [*(each.remaining.size - each.n_taken for each in self._begun), self._coming.size]
            if self._begun and sum(left) * self._n_bytes / self._n_minibatches > self._stream.ahead_bytes:
                return
            stream = self._stream
            ids = stream.recipes.hex(), self._plan.hex()
            task = stream.make.remote(ids, stream.recipes, self._plan, self._coming)
            self._begun.append(_Begun(self._coming, task))
            self._coming = next(self._later, None)

    def _value_of(self, fetch: _Begun) -> Any:
        """The next value of a task; None if it has not come. Raises ProducerError for errors of Ray."""
        try:
            if fetch.next is None:
                if not ray.wait([fetch.task], timeout=_POLL_S)[0]:
                    return None
                fetch.next = next(fetch.task)
            value = ray.get(fetch.next, timeout=_POLL_S)
        except ray.exceptions.GetTimeoutError:  # it is lost, and made again
            return None
        except StopIteration:
            raise ProducerError(
                f"fetch {fetch.remaining.number} ended after {fetch.n_taken} of {fetch.remaining.size} minibatches"
            ) from None
        except (ray.exceptions.RayTaskError, ray.exceptions.RaySystemError) as error:
            cause = getattr(error, "cause", error)
            raise ProducerError(
                f"Ray cannot make or send fetch {fetch.remaining.number}: {cause!r:.1000}. All machines need zloader, "
                "and what batch_transform returns must survive pickling: return tensors, arrays or plain objects"
            ) from error
        except ray.exceptions.RayError as error:
            raise ProducerError(
                f"Ray has given fetch {fetch.remaining.number} up: {error}. If its tasks run out of memory, lower "
                "fetch_factor or FetchOptions.memory, or give resources={'memory': ...}"
            ) from error
        fetch.next = None
        return value

    def _end(self, fetch: _Begun, counted: Counters) -> None:
        """Drops the first fetch, which is complete, and adds what was counted for it."""
        self._begun.popleft()
        if fetch.n_taken != fetch.remaining.size:
            raise ProducerError(
                f"fetch {fetch.remaining.number} has {fetch.n_taken} minibatches, not {fetch.remaining.size}"
            )
        most = max(self.counters.most_in_flight_bytes, counted.most_in_flight_bytes)
        for name, value in vars(counted).items():
            setattr(self.counters, name, getattr(self.counters, name) + value)
        self.counters.most_in_flight_bytes = most

    def _why_nothing_comes(self) -> str:
        with self._connected():
            wanted = {key: each for key, each in self._stream.resources.items() if key != "scheduling_strategy"}
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            shown = [{key: value for key, value in node.items() if not key.startswith("node:")} for node in nodes]
            return (
                f"fetch {self._begun[0].remaining.number} has made no progress for {self._stream.deadline_s:g} s. Its "
                f"task asks for {wanted}; {ray.available_resources()} of the cluster are free; its machines have "
                f"{shown!r:.1000}. Give resources= that one of the machines has, add machines, end other work, or give "
                "a larger deadline_s"
            )

    def _cancel(self) -> None:
        """Ends the tasks that are not needed any more."""
        begun, self._begun = self._begun, deque()
        with contextlib.suppress(ProducerError), self._connected():
            for fetch in begun:
                ray.cancel(fetch.task)


def _session() -> str:
    """What this process is to the cluster: another one after every `ray.init`, and empty without Ray."""
    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""


def _ahead_bytes(wanted: int | str | None) -> int:
    """The bytes that may be made ahead. Raises OptionError if the object store of this machine is smaller."""
    node_id = ray.get_runtime_context().get_node_id()
    here = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)  # Ray may not list a new node yet
    room = 4 << 30 if here is None else int(here["Resources"]["object_store_memory"])
    ahead_bytes = min(1 << 30, room // 4) if wanted is None else parse_size(wanted, "ahead_bytes")
    if here is not None and ahead_bytes > room:
        raise OptionError(
            f"ahead_bytes={wanted!r} does not fit into the object store of this machine, which has {room >> 20} MiB: "
            "lower it, or start Ray with a larger object_store_memory"
        )
    return ahead_bytes


# ---- the processes of Ray

_opened: dict[str, Any] = {}  # of this process, by the id of the object from which it was opened


def _once(key: str, opened: Callable[[], Any]) -> Any:
    """What is opened once, as long as it is among the last ones that were used."""
    value = _opened.pop(key, None) or opened()
    _opened[key] = value
    if len(_opened) > _MOST_OPENED:
        del _opened[next(iter(_opened))]
    return value


def _loader_of(recipes: NDArray[np.uint8]) -> tuple[LoaderRecipes, BufferPool]:
    opened: LoaderRecipes = unpickled(recipes)
    keep_freed_memory()
    return opened, BufferPool()


def _epoch_of(plan: NDArray[np.uint8], recipes: LoaderRecipes) -> tuple[Plan, Recipe]:
    """All fetches of an epoch share its recipe, which has the shard indexes that were read."""
    opened: Plan = unpickled(plan)
    return opened, recipes.recipe(opened.epoch)


def _make(
    ids: tuple[str, str], recipes: NDArray[np.uint8], plan: NDArray[np.uint8], remaining: Remaining
) -> Iterator[Sequence[Any] | Counters | Exception]:
    """Yields the groups of minibatches of what remains of a fetch, then what was counted; or an error at its place."""
    try:
        opened, buffers = _once(ids[0], lambda: _loader_of(recipes))
        epoch_plan, recipe = _once(ids[1], lambda: _epoch_of(plan, opened))
        scheduler = FetchScheduler(recipe, opened.options, buffers)
        bridge = scheduler.start([epoch_plan.rest_of(remaining)], name="zloader-fetch")
        with contextlib.closing(bridge):
            while group := bridge.next_group():
                error = getattr(group[-1], "error", None)  # of a batch_transform
                if len(group) > (error is not None):
                    yield group[: len(group) - (error is not None)]
                if error is not None:
                    yield sendable(error)
                    return
        yield scheduler.counters
    except Exception as error:  # noqa: BLE001 -- raised by the training process
        yield sendable(error)
