"""`zr.stream`: the minibatches of a Loader, made by producers on the machines of a Ray cluster."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import ray
import torch.utils.data

from zloader.common.checks import parse_size, require_at_least, require_count, require_one_of
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.producing.production import Production
from zloader.producing.window import MeanBytes, Window
from zloader.ray.alive import node_of
from zloader.ray.crew import Crew
from zloader.reading.bridge import Bridge
from zloader.reading.resources import Counters
from zloader.training.epoch import EpochWork, Statistics
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch


@answers
def stream(
    loader: Loader,
    *,
    producers: int = 2,
    ahead_bytes: int | str | None = None,
    resources: Mapping[str, Any] | None = None,
    locality: Literal["any", "machine"] = "any",
    overtake_s: float = 30.0,
    start_s: float = 300.0,
) -> Stream:
    """The minibatches of this rank's `loader`, in its order and bit for bit, made by producers on a Ray cluster.

    >>> minibatches = zr.stream(loader, producers=16, ahead_bytes="8GiB", resources={"num_cpus": 2})  # doctest: +SKIP
    >>> for minibatch in minibatches:  # each iteration is an epoch, as with the loader
    ...     train(minibatch)
    >>> first = next(iter(minibatches))  # a look at the first minibatch does not cost an epoch  # doctest: +SKIP

    Producers are processes on any machine of the cluster, which read through the cache of their machine. If some die,
    others make their fetches, and new ones are started. Every minibatch comes exactly once. Each rank has producers of
    its own.

    Args:
        loader: the Loader of this rank. Its `state_dict`, `load_state_dict`, `set_epoch` and `statistics` are those of
            the stream. Every machine must be able to open its stores. A `device` gets minibatches on this machine.
        producers: how many there are. `resize` changes it, even during an epoch.
        ahead_bytes: minibatches that are made ahead, as bytes or a string such as "8GiB". They wait in the object store
            of this machine, and as many bytes again on those of the producers. Default: a quarter of the object store,
            up to 1 GiB.
        resources: what each producer takes of its machine, as options of a Ray actor, such as
            `{"num_cpus": 2, "memory": 4 << 30}`. It uses as many threads as it has cores. Default: one core, spread
            over the machines.
        locality: `"machine"` gives a fetch to a producer on the machine whose mirror holds more of it than the others,
            if one is free. Default: `"any"`.
        overtake_s: a fetch without progress for so many seconds is made by another producer, too. The one that is
            overtaken is replaced. Default: 30.
        start_s: how long to wait for the first producer, for a new one when all are lost, and for progress with the
            fetch that comes next. Default: 300.

    Raises OptionError for an invalid option. Iterating raises the errors of a Loader, when their minibatch is due, and
    ProducerError if no producer can be started, if one after another dies with the same fetch, if none makes progress,
    if Ray is shut down in this process, or if the head of the cluster or this machine's raylet is gone.
    """
    if not isinstance(loader, Loader):
        raise OptionError(f"zr.stream needs a zl.Loader, not {loader!r:.100}")
    require_count(producers=producers)
    ahead = _ahead_bytes(ahead_bytes)
    require_at_least(0.001, overtake_s=overtake_s, start_s=start_s)
    require_one_of(["any", "machine"], locality=locality)
    crew = Crew(loader=loader, size=producers, resources=dict(resources or {}), start_s=start_s)
    return Stream(loader, crew, ahead_bytes=ahead, overtake_s=overtake_s, by_mirror=locality == "machine")


@answers
class Stream(torch.utils.data.IterableDataset[Minibatch]):
    """What `zr.stream` returns: an iterable of minibatches, and one epoch per iteration. Producers stay in between.

    Epochs that run at the same time have producers of their own. Closing the stream, or leaving its `with` block, ends
    them; so does dropping it and its iterators.
    """

    def __init__(self, loader: Loader, crew: Crew, *, ahead_bytes: int, overtake_s: float, by_mirror: bool) -> None:
        self.loader = loader
        self._crew, self._ahead_bytes, self._overtake_s, self._by_mirror = crew, ahead_bytes, overtake_s, by_mirror
        self._mean = MeanBytes(n_bytes=loader.recipes.expected_bytes(loader.batch_size))
        self._running: weakref.WeakSet[Production] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Minibatch]:
        """The next epoch of the loader, or the rest of the one that `load_state_dict` restored."""
        if torch.utils.data.get_worker_info() is not None:
            raise OptionError("a stream cannot be used in a DataLoader worker: iterate over it in the training process")
        return self.loader.epoch_by(self._start)

    def _start(self, work: EpochWork) -> tuple[Bridge[Any], Counters]:
        plan = self._crew.share(work.plan)
        window = Window(work.remaining, self._mean, ahead_bytes=self._ahead_bytes, overtake_s=self._overtake_s)
        production = Production(
            self._crew, plan, window, self._mean, by_mirror=self._by_mirror, stall_s=self._crew.start_s
        )
        self._running.add(production)
        # One byte a group, so that one group is handed over at a time: the window bounds all others.
        return Bridge(production.run, ready_bytes=1, name="zloader-ray"), production.counters

    def resize(self, producers: int) -> None:
        """Changes the number of producers, now, even while an epoch runs."""
        require_count(producers=producers)
        self._crew.resize(int(producers))
        for production in list(self._running):
            production.resized()

    def close(self) -> None:
        """Ends the producers. An epoch under way raises ProducerError."""
        self._crew.close()

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
        """Figures of the current or last epoch. Reads are those of all fetches that producers have completed."""
        return self.loader.statistics()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ahead_bytes(wanted: int | str | None) -> int:
    """The bytes that may wait in the object store of this machine. Raises OptionError if it is smaller."""
    here = node_of(ray.get_runtime_context().get_node_id(), ray.nodes())  # Ray may not list a new node yet
    room = 4 << 30 if here is None else int(here["Resources"]["object_store_memory"])
    ahead_bytes = min(1 << 30, room // 4) if wanted is None else parse_size(wanted, "ahead_bytes")
    if here is not None and ahead_bytes > room:
        raise OptionError(
            f"ahead_bytes={wanted!r} does not fit into the object store of this machine, which has {room >> 20} MiB: "
            "lower it, or start Ray with a larger object_store_memory"
        )
    return ahead_bytes
