"""The torch side: wires plan -> fetch -> minibatch -> tensors in one visible function, `Loader.__iter__`."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch.utils.data

from zloader.common.checks import names_of, require_count, require_one_of
from zloader.common.errors import ConcurrentUseError, OptionError
from zloader.common.malloc import keep_freed_memory
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays, Statistics
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.order.epochs import EpochCount
from zloader.order.plan import Plan
from zloader.order.ranks import Locality, RankPlacement, place_of
from zloader.order.resume import Position, as_state, described, position_of, resumed
from zloader.order.sampling import Sampling, bound, default_block_size, require_sampling, sized, stratified
from zloader.reading.bridge import Bridge
from zloader.reading.fetch import FetchScheduler, Recipe
from zloader.reading.resources import BufferPool, Counters
from zloader.selecting.genes import ChosenGenes, Genes
from zloader.training.minibatch import Minibatch, as_minibatch, silence_sparse_warnings

__all__ = ["Loader", "Minibatch"]

log = logging.getLogger("zloader")
LAYOUTS = ("csr", "dense", "scipy", "anndata")
DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(eq=False)
class Loader(torch.utils.data.IterableDataset[Minibatch]):
    """Iterates over shuffled minibatches of a dataset; each iteration is one epoch, the first is epoch 0.

    A fetch loads `batch_size * fetch_factor` rows, permutes them in memory and is cut into minibatches. `x` is `"X"`,
    `"layers/NAME"`, `"raw/X"` or None; `obs` lists columns and `obsm` arrays. `genes` chooses the columns of x and
    their order: a list of names or positions, or a mask over all; None takes all. `layout` is `"csr"`
    (torch.sparse_csr), `"dense"`, `"scipy"` or `"anndata"`, `dtype` that of x: `"float32"`, `"float64"`, `"int32"` or
    `"int64"`. Values are rounded to the nearest float, but one that `dtype` cannot hold is refused: a fraction, NaN or
    a number out of range as an integer, and 1e300 as float32, which would be infinite. `sampling` is BlockShuffling in
    blocks of 64 rows and 64 strata unless given. `seed` decides every order.

    `rank` and `world_size` come from torch.distributed where it is initialised, else from RANK and WORLD_SIZE. Every
    rank yields as many minibatches, and no row is lost for that (of minibatches of one row, fewer than `world_size`).
    With `drop_last` smaller minibatches are left out, fewer than `world_size * batch_size` rows; with
    `remainder="pad"` they are filled up with rows that come again. With `locality="machine"` the ranks of a machine,
    `local_world_size` (or LOCAL_WORLD_SIZE) each, share out the same contiguous part of the rows in every epoch: its
    mirror holds that part alone, for which minibatches mix the rows of one part only. Where the rows are no multiple
    of the machines, fewer rows than there are machines are left out, others each epoch: two epochs have all.

    Any thread may take the next minibatch of an iterator or close it, but two that take one at the same time raise
    ConcurrentUseError. Iterators that exist side by side do not disturb one another: each is an epoch of its own, and
    `state_dict` and `statistics`, which any thread may call, speak of the one that began last.

    Raises OptionError, MissingColumnError or FormatError when made; in the loop any ReadError, and OptionError for a
    value that `dtype` cannot hold.
    """

    dataset: Dataset
    _: KW_ONLY
    batch_size: int = 64
    fetch_factor: int = 256
    sampling: Sampling | None = None
    x: str | None = "X"
    obs: Sequence[str] = ()
    obsm: Sequence[str] = ()
    genes: Genes | None = field(default=None, repr=False)  # there may be thousands
    layout: Literal["csr", "dense", "scipy", "anndata"] = "csr"
    dtype: str = "float32"
    seed: int = 0
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    remainder: Literal["drop", "pad"] = "drop"
    locality: Locality = "global"
    local_world_size: int | None = None
    options: FetchOptions = field(default_factory=FetchOptions)

    def __post_init__(self) -> None:
        require_dataset(self.dataset)
        if not isinstance(self.options, FetchOptions):
            raise OptionError(f"options must be a zl.FetchOptions, not {self.options!r:.100}")
        require_count(batch_size=self.batch_size, fetch_factor=self.fetch_factor)
        require_one_of(LAYOUTS, layout=self.layout)
        require_one_of(DTYPES, dtype=self.dtype)
        self.obs, self.obsm = names_of(obs=self.obs), names_of(obsm=self.obsm)
        if self.x is None and (self.layout == "anndata" or self.genes is not None):
            raise OptionError(f"{'genes' if self.genes is not None else repr(self.layout)} needs an x: it is None")
        silence_sparse_warnings()
        self.dataset.require_obs(self.obs)
        self.dataset.require_obsm(self.obsm)
        self._genes: ChosenGenes | None = None
        if self.x is not None:
            matrices = self.dataset.matrices(self.x)
            self._genes = None if self.genes is None else self.dataset.choose_genes(self.genes, matrices[0])
        fetch_rows = int(self.batch_size) * int(self.fetch_factor)
        sampling = stratified(default_block_size(fetch_rows)) if self.sampling is None else self.sampling
        require_sampling(sampling)
        self._sampling = sized(bound(sampling, self.dataset.obs_column), fetch_rows)
        self._epochs = EpochCount()
        self._sent_from: RankPlacement | None = None  # of the process that pickled this loader
        self._own: Position | None = None  # of this worker, one of several, in the epoch that begins next
        self._current: _Record | None = None  # of the epoch that state_dict speaks of
        self._record = _Record(epoch=0)
        self._buffers = BufferPool()  # kept from epoch to epoch
        self.plan(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`, and those after it the following ones."""
        self.plan(epoch)
        self._restart(Position(epoch=int(epoch)))

    def plan(self, epoch: int) -> Plan:
        """The plan of a whole epoch for this rank; raises OptionError for sizes that make no sense."""
        place = self._place()
        return Plan(
            dataset_rows=self.dataset.whole.n_obs,
            sampling=self.dataset.sampled(place.keep_to_part(self._sampling, self.dataset.n_obs)),
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            seed=self.seed,
            epoch=epoch,
            rank=place.rank,
            world_size=place.world_size,
            drop_last=self.drop_last,
            remainder=self.remainder,
        )

    def _place(self) -> RankPlacement:
        if self._sent_from is not None and torch.utils.data.get_worker_info() is not None:
            return self._sent_from  # torch.distributed is initialised in the rank, not in its workers
        return place_of(self.rank, self.world_size, self.locality, self.local_world_size)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sent_from": self._place()}

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is: a few numbers and strings, for `load_state_dict` of a loader made alike.

        They say which minibatches have been received, whatever was made ahead, and are the same on every rank: all are
        taken to be at the same minibatch. In a DataLoader worker, those are meant that it has yielded. Raises
        OptionError in a process whose workers iterate: they run ahead of it.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is None and self._epochs.left_to_workers:
            raise OptionError(
                "DataLoader workers iterate, and this process does not know what they have yielded: use num_workers=0, "
                "or torchdata's StatefulDataLoader"
            )
        current = self._current  # read once: another thread may begin an epoch
        if current is None:
            position = self._own or self._epochs.next()
        elif current.finished and worker is None:
            position = Position(epoch=current.epoch + 1)
        else:
            position = current.position
        return as_state(position, self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration what was left of the epoch that a state was saved in.

        With as many ranks as then it goes on bit for bit, with another number every row that no rank had seen comes
        once (but for fewer than `world_size`, where not every rank would get one). Nothing of what was received is
        read. Raises OptionError, naming the difference, for a state of another run.
        """
        worker = torch.utils.data.get_worker_info()
        position = position_of(state, self._identity)
        plan = self.plan(position.epoch)
        own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        position.require_place(*own, plan.world_size)
        resumed(plan, position.stretches)
        self._restart(position)

    def _restart(self, position: Position) -> None:
        self._epochs.restart(position)
        self._own = position if position.of_workers > 1 else None
        self._current = None

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What a state must share with the loader that it is given to."""
        place = self._place()
        return {
            "fingerprint": self.dataset.fingerprint,
            "rows": int(self.dataset.n_obs),
            "seed": int(self.seed),
            "sampling": described(self._sampling if self.sampling is None else self.sampling),
            "batch_size": int(self.batch_size),
            "fetch_factor": int(self.fetch_factor),
            "drop_last": bool(self.drop_last),
            "remainder": self.remainder,
            "locality": self.locality,
            "machines": place.machines,
        }

    def __len__(self) -> int:
        """Minibatches that a whole epoch yields on this rank, over all its workers."""
        return self.plan(0).n_minibatches

    def statistics(self) -> Statistics:
        """Figures of the epoch under way or, after it, of the last one (in this process, not in DataLoader workers)."""
        return self._record.statistics()

    def __iter__(self) -> Iterator[Minibatch]:
        worker = torch.utils.data.get_worker_info()
        worker_id, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        position, self._own = self._own, None
        begun = self._epochs.begin(worker)
        position = position or begun
        whole = self.plan(position.epoch)
        plan, done = resumed(whole, position.stretches)
        skip = position.worker_minibatches
        if n_workers > 1:
            position = replace(position, worker=worker_id, of_workers=n_workers, of_ranks=plan.world_size)
        # Before all that takes time: another thread may ask for the state meanwhile.
        record = _Record(epoch=plan.epoch, begun_at=position, world_size=plan.world_size)
        self._record = self._current = record
        fetches = plan.fetches(done=done, worker=worker_id, n_workers=n_workers, skip=skip)

        recipe = Recipe(
            parts=self.dataset.parts(self.x, self.options),
            columns=lambda: {name: self.dataset.whole.obs_column(name) for name in self.obs},
            obsm=lambda: {name: self.dataset.whole.obsm_array(name) for name in self.obsm},
            dense=self.layout == "dense",
            dtype=self.dtype,
            genes=self._genes,
            sweeping=whole.sweeps and n_workers == 1 and not position.stretches,
        )
        var = self.dataset.var_of(self.x, self._genes) if self.x is not None and self.layout == "anndata" else None
        silence_sparse_warnings()
        if self.options.tune_malloc:
            keep_freed_memory()
        scheduler = FetchScheduler(recipe, self.options, self._buffers)
        record.counters = scheduler.counters

        log.debug(
            "epoch %d of %s begins: rank %d of %d, worker %d of %d",
            plan.epoch,
            [store.location.url for store in self.dataset.stores],  # not the dataset: its repr may have to read
            plan.rank,
            plan.world_size,
            worker_id,
            n_workers,
        )
        bridge = scheduler.start(fetches, name="zloader-fetch")
        convert = functools.partial(as_minibatch, self.dataset, self.layout, var)
        return _Epoch(bridge, record, convert, self._epochs)


@dataclass
class _Record:
    """What is known of an epoch while it lasts and after; holds no thread, so that a dropped epoch can end."""

    epoch: int
    counters: Counters = field(default_factory=Counters)
    begun_at: Position = field(default_factory=lambda: Position(epoch=0))
    world_size: int = 1
    finished: bool = False
    rows: int = 0
    minibatches: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def position(self) -> Position:
        """Where the consumer is."""
        return self.begun_at.later(self.world_size, self.minibatches)

    def statistics(self) -> Statistics:
        """The figures so far."""
        return Statistics(
            epoch=self.epoch,
            rows=self.rows,
            minibatches=self.minibatches,
            wait_s=self.wait_s,
            elapsed_s=self.elapsed_s,
            **vars(self.counters),
        )


class _Epoch(Iterator[Minibatch]):
    """The iterator of one epoch; dropping it ends its threads."""

    def __init__(self, bridge: Bridge[MinibatchArrays], record: _Record, convert: Any, epochs: EpochCount) -> None:
        self._bridge = bridge
        self._record = record
        self._convert = convert
        self._epochs = epochs
        self._closed = False
        self._in_use = threading.Lock()

    def __next__(self) -> Minibatch:
        if not self._in_use.acquire(blocking=False):
            raise ConcurrentUseError(
                "another thread is waiting for this iterator's next minibatch: only one thread at a time may call "
                "next(). Hold a lock around it, or have one thread hand the minibatches to the others"
            )
        try:
            return self._next()
        finally:
            self._in_use.release()

    def _next(self) -> Minibatch:
        if self._closed:
            raise StopIteration
        try:
            minibatch: Minibatch = self._convert(next(self._bridge))
        except StopIteration:
            self._record.finished = not self._closed
            log.debug("epoch ends: %r", self._record.statistics())
            raise
        except BaseException as error:
            self.close()  # what comes after an error is no end of the epoch
            log.debug("epoch ends with %r: %r", error, self._record.statistics())
            raise
        finally:
            self._record.wait_s = self._bridge.wait_s
            self._record.elapsed_s = time.perf_counter() - self._record.started
        self._record.rows += len(minibatch)
        self._record.minibatches += 1
        return minibatch

    def close(self) -> None:
        """Ends the epoch and its threads now; dropping the iterator does so too."""
        self._closed = True
        self._bridge.close()

    def state_dict(self) -> dict[str, bool]:
        """What torchdata's StatefulDataLoader wants to know beside the state of the loader."""
        return {"finished": self._record.finished}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Called by StatefulDataLoader on an iterator that has just begun: one that was at its end stays there.

        The loader's state then speaks of the next epoch, which this iterator began and gives back.
        """
        if state["finished"] and torch.utils.data.get_worker_info() is None:
            self.close()
            self._epochs.restart(self._record.begun_at)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the iterator of a Loader cannot be copied or pickled, since threads belong to it: pickle the Loader, or "
            "save its state_dict()"
        )
