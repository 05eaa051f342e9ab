"""The Loader wires plan -> fetch -> minibatch -> arrays of a framework, visibly, in one function: `Loader._run`."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from zloader.common.checks import require_count
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.machine import keep_freed_memory
from zloader.common.options import FetchOptions
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.order.cell_sets import SetCounts, SetOrder
from zloader.order.companions import MatchedControls, Neighbors
from zloader.order.plan import Plan
from zloader.order.ranks import Rank, own_rank
from zloader.order.resume import Position, as_state, described, position_of, resumed
from zloader.order.sampling import Sampling
from zloader.order.shuffling import sampling_of
from zloader.reading.bridge import Bridge
from zloader.reading.fetch import FetchScheduler
from zloader.reading.resources import BufferPool, Counters
from zloader.training.epoch import (
    EpochIterator,
    EpochRecord,
    EpochWork,
    Progress,
    RunningEpoch,
    StartWork,
    Statistics,
    worker_info,
)
from zloader.training.minibatch import Minibatch
from zloader.training.recipes import LoaderRecipes, Tokenizer, bound_companions
from zloader.transforms.transform import Transforms

__all__ = ["Loader", "Minibatch"]

log = logging.getLogger("zloader")

if TYPE_CHECKING:
    import torch.utils.data

    from zloader.training.arrays import Dtype
    from zloader.training.device import Device

    _Dataset: TypeAlias = torch.utils.data.IterableDataset[Minibatch]
else:
    _Dataset = Iterable[Minibatch]  # for torch it becomes an IterableDataset when a loader is made


@dataclass(eq=False, repr=False)
class Loader(_Dataset):
    """Yields shuffled minibatches of a dataset. Each iteration is one epoch, and the first is epoch 0.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("cells.zarr")
    >>> loader = zl.Loader(dataset, batch_size=64, obs=["cell_type"], layout="dense")
    >>> len(loader)
    8
    >>> for epoch in range(2):
    ...     for minibatch in loader:
    ...         x, cell_type = minibatch.x, minibatch.obs["cell_type"]
    >>> x.shape, x.dtype, cell_type.dtype
    (torch.Size([55, 97]), torch.float32, torch.int64)
    >>> both = next(iter(zl.Loader(dataset, batch_size=64, x=["X", "layers/spliced"])))
    >>> {name: x.shape for name, x in both.x.items()}
    {'X': torch.Size([64, 97]), 'layers/spliced': torch.Size([64, 97])}
    >>> state = loader.state_dict()  # to resume: zl.Loader(dataset, ...).load_state_dict(state)

    A fetch loads up to `batch_size * fetch_factor` rows, permutes them in memory and cuts them into minibatches. The
    fetches of an epoch are equally long. Unless the sampling or an option below says otherwise, every row comes exactly
    once per epoch. All ranks yield the same number of minibatches, so with `batch_size=1` fewer than `world_size` rows
    are dropped per epoch.

    Args:
        dataset: a Dataset, or a View of some of its rows or genes: `dataset[:, genes]` chooses the columns of x.
        batch_size: rows per minibatch.
        fetch_factor: the most minibatches per fetch. A higher factor shuffles better and takes more memory.
        sampling: the order of the rows, as an object or by name. Default: `"block_shuffling"`, that is BlockShuffling
            with 64 strata and blocks of 64 rows, or of a fetch if that has fewer. Other names are `"streaming"` (rows
            in order), `"mixture_of_scanners"`, and `"random"` (BlockShuffling with blocks of one row).
        controls: zl.MatchedControls, for control rows that agree with each row: `minibatch.control`. A fetch has them
            in addition to its `batch_size * fetch_factor` rows.
        neighbors: zl.Neighbors, for the nearest rows of each row in a graph of obsp: `minibatch.neighbors`. A fetch has
            them in addition, too.
        shuffle: False yields the rows in order, for validation and prediction; it is `sampling="streaming"`. True is
            the default order.
        x: the matrix to load: `"X"`, `"layers/NAME"`, `"raw/X"`, or None for no matrix; `"rna:X"` of a modality. A list
            of names loads several matrices of the same rows: `minibatch.x` is then a dict by name.
        obs: names of the obs columns to load. `labels` says what their numbers mean.
        obsm: names of the obsm arrays to load, such as `"X_pca"`, or `"rna:X_pca"` of a modality.
        tokens: a zl.tokenizers.Geneformer or zl.tokenizers.ScGPT, which makes `minibatch.tokens`.
        layout: the type of `minibatch.x`: `"csr"` (torch.sparse_csr), `"dense"` (torch.Tensor), `"packed"` (PackedRows,
            in the stored dtypes, or float32 with transforms and for float16) or `"scipy"` (CSR matrix).
        dtype: the dtype of x: `"float32"` (the default), `"float64"`, `"int32"` or `"int64"`, or such a dtype of torch
            or NumPy. An integer dtype has to hold every value of the stored one. Layout packed takes none.
        transforms: objects of zl.transforms, such as `[zl.transforms.LogNormalize(1e4)]`, that change x while it is
            gathered, in this order. A list is for every matrix; a dict has a list for each matrix by name.
        batch_transform: a function of your own that gets each Minibatch. The loader yields what it returns. It runs
            after `transforms`, in several threads at once.
        framework: whose arrays minibatches hold: `"torch"` or `"numpy"`. With NumPy, torch is not imported, and x is a
            PackedRows with layout csr or packed. A DataLoader needs torch.
        device: where minibatches arrive: `"cuda"`, `"cuda:1"`, `"xpu"`, `"mps"`, or a torch.device. The next ones are
            on the device before they are asked for. Needs layout csr, dense or packed. Default: the memory of the host.
        seed: decides every order and the draws of transforms. A whole number of at least 0.
        drop_last: whether to drop minibatches with fewer than `batch_size` rows.
        rank, world_size: the number of this training process, and how many there are. Default: from torch.distributed
            if it is initialised, else from RANK and WORLD_SIZE in the environment, else 0 and 1.
        options: memory, threads, retries and deadlines of reads (see FetchOptions).

    Raises OptionError, MissingColumnError or FormatError when it is constructed. Iterating raises any ReadError,
    OptionError for a value that a transform cannot take, and the errors of your own function.
    """

    dataset: Dataset
    _: KW_ONLY
    batch_size: int = 64
    fetch_factor: int = 256
    sampling: Sampling | str | None = None
    controls: MatchedControls | None = None
    neighbors: Neighbors | None = None
    shuffle: bool | None = None
    x: str | Sequence[str] | None = "X"
    obs: Sequence[str] = ()
    obsm: Sequence[str] = ()
    tokens: Tokenizer | None = None
    layout: Literal["csr", "dense", "packed", "scipy"] = "csr"
    dtype: Dtype | None = None
    transforms: Transforms = field(default=(), repr=False)
    batch_transform: Callable[[Minibatch], Any] | None = None
    framework: Literal["torch", "numpy"] = "torch"
    device: str | torch.device | Device | None = None
    seed: int = 0
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    options: FetchOptions = field(default_factory=FetchOptions)

    def __post_init__(self) -> None:
        require_dataset(self.dataset)
        if not isinstance(self.options, FetchOptions):
            raise OptionError(f"options must be a zl.FetchOptions, not {self.options!r:.100}")
        require_count(batch_size=self.batch_size, fetch_factor=self.fetch_factor)
        fetch_rows = int(self.batch_size) * int(self.fetch_factor)
        self._wanted_sampling = sampling_of(self.sampling, self.shuffle, fetch_rows)
        self._order = self.dataset.ordered(
            self._wanted_sampling, batch_size=int(self.batch_size), fetch_rows=fetch_rows
        )
        self._companions = bound_companions(self.controls, self.neighbors, self.dataset, self._order)
        # How this loader makes minibatches, in this process or in another that has a copy.
        bound: dict[str, Any] = {
            "sampling": self._wanted_sampling,
            "order": self._order,
            "companions": self._companions,
        }
        given = {each.name: getattr(self, each.name) for each in fields(LoaderRecipes) if each.name not in bound}
        self.recipes = LoaderRecipes(**bound, **given)
        made = self.recipes
        self.x, self.obs, self.obsm, self.dtype, self.device = made.x, made.obs, made.obsm, made.dtype, made.device
        self._progress = Progress(in_workers=self.framework == "torch")
        self._pickled_rank: Rank | None = None  # of the process that pickled this loader
        self._buffers = BufferPool()  # kept from epoch to epoch
        self.plan(0)
        self._register()

    def __repr__(self) -> str:
        """One line: the dataset, and the size of minibatches."""
        dataset = repr(self.dataset).partition("\n")[0]
        return f"<Loader of {dataset}: batch_size={self.batch_size}, fetch_factor={self.fetch_factor}>"

    @property
    def labels(self) -> dict[str, pd.Index | np.dtype[Any]]:
        """The meaning of the numbers in `minibatch.obs`, for each column.

        For categories and strings, the labels in the order of their codes: `labels["cell_type"][codes]`. For numbers
        and dates, the dtype of their values: `column.numpy().view(labels["date"])` are the dates. Reads the columns,
        except large ones of categories or numbers.
        """
        return {name: self.dataset.whole.labels(name) for name in self.obs}

    @property
    def set_counts(self) -> SetCounts | None:
        """How many groups, rows and sets CellSets has, and how many it leaves out; None for another sampling."""
        return self._order.counts if isinstance(self._order, SetOrder) else None

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`; later iterations count up from there."""
        self.plan(epoch)
        self._progress.restart(Position(epoch=int(epoch)))

    def plan(self, epoch: int) -> Plan:
        """The plan of a whole epoch for this rank. Raises OptionError for sizes that cannot work together."""
        rank, world_size = self._rank()
        return Plan(
            order=self._order,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            seed=self.seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            companions=self._companions,
        )

    def _rank(self) -> Rank:
        if self._pickled_rank is not None and worker_info() is not None:
            return self._pickled_rank  # torch.distributed is initialised in the rank, not in its workers
        return own_rank(self.rank, self.world_size)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pickled_rank": self._rank()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        """Makes loaders iterable datasets of torch, which this module does not import, if they have tensors."""
        if self.framework == "torch":
            import torch.utils.data

            torch.utils.data.IterableDataset.register(Loader)

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """The consumer's position, for `load_state_dict` of a loader with the same options.

        The state counts the minibatches that the consumer has received, not those that were prepared ahead. It is a
        few numbers, strings and lists of numbers, which JSON can hold. Ranks are assumed to be at the same minibatch,
        so their states are equal, and it is enough to save the state of one rank. In a DataLoader worker, the state
        counts the minibatches that this worker has yielded. The last `unused` minibatches do not count as received:
        give their number if your loop takes minibatches ahead of the step that uses them.

        Raises OptionError in a process whose DataLoader workers iterate, because they run ahead of it.
        """
        return as_state(self._progress.position(unused), self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch that `state` was saved in.

        With the same number of ranks, the remaining minibatches are bit-identical. With another number, every row that
        no rank had received comes exactly once, except that fewer than `world_size` rows are dropped if there are not
        enough left for every rank. Rows that were already received are not read again.

        Raises OptionError, naming the difference, if the state belongs to other data or options; and if Lightning's
        Trainer restores it, which ends epochs at other places than the loader.
        """
        if sys._getframe(1).f_globals.get("__name__", "").endswith(".utilities.combined_loader"):
            raise OptionError(
                "Lightning's Trainer does not tell a Loader where its epochs end, so a Loader alone cannot resume in "
                "it: give it to the Trainer as trainer.fit(model, datamodule=DataModule(train=loader), ckpt_path=...), "
                "with DataModule from zloader.integrations.lightning, which resumes from this checkpoint, too"
            )
        worker = worker_info()
        position = position_of(state, self._identity)
        plan = self.plan(position.epoch)
        worker_id, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        position.require_worker(worker_id, n_workers, plan.world_size)
        resumed(plan, position.stretches)
        self._progress.restart(position)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """The entries of a state that must equal those of the loader it is loaded into."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "rows": int(self.dataset.n_obs),
            "seed": int(self.seed),
            "sampling": described(self._wanted_sampling)
            + "".join(f" with {described(each)}" for each in (self.controls, self.neighbors) if each is not None),
            "batch_size": int(self.batch_size),
            "fetch_factor": int(self.fetch_factor),
            "drop_last": bool(self.drop_last),
        }

    def __len__(self) -> int:
        """Minibatches per whole epoch on this rank, over all its workers."""
        return self.plan(0).n_minibatches

    def statistics(self) -> Statistics:
        """Figures of the current epoch, or of the last one if it has ended.

        They cover this process only, not DataLoader workers.
        """
        return self._progress.record.statistics()

    def __iter__(self) -> Iterator[Minibatch]:
        """The next epoch, or the rest of the one that `load_state_dict` restored.

        The epoch begins when its first minibatch is asked for. Taking one minibatch and dropping the iterator, as in
        `next(iter(loader))`, does not use up the epoch: the next iterator yields it from its start. In DataLoader
        workers every iteration uses up an epoch, because they read ahead.

        Dropping the iterator, as leaving a `for` loop does, ends its threads; so does its `close()`.
        """
        return self.epoch_by(self._start)

    def epoch_by(self, start: StartWork) -> EpochIterator:
        """Like `__iter__`, with minibatches that `start` has made, for example by other machines."""
        return EpochIterator(functools.partial(self._run, start))

    def _run(self, start: StartWork) -> RunningEpoch:
        """Wires plan -> fetch -> minibatch -> arrays of the framework."""
        worker = worker_info()
        if worker is not None and self.framework != "torch":
            raise OptionError(
                f"framework={self.framework!r} does not work in DataLoader workers: iterate over the loader itself, "
                "which reads in threads of its own, or take framework='torch'"
            )
        with contextlib.ExitStack() as undo:
            position, uncount = self._progress.begin(worker)
            undo.callback(uncount)
            recipes = self.recipes
            lent = recipes.lent()
            worker_id, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
            whole = self.plan(position.epoch)
            plan, done = resumed(whole, position.stretches)
            skip = position.worker_minibatches
            if n_workers > 1:
                position = replace(position, worker=worker_id, of_workers=n_workers, of_ranks=plan.world_size)
            record = EpochRecord(
                epoch=plan.epoch, begun_at=position, world_size=plan.world_size, companions=self._companions
            )
            # Before the slow steps below: another thread may ask for the state during them.
            self._progress.follow(record)

            sweeps = whole.sweeps and n_workers == 1 and not position.stretches
            work = EpochWork(
                plan=plan,
                remaining=plan.remaining(done=done, worker=worker_id, n_workers=n_workers, skip=skip),
                recipe=functools.partial(recipes.recipe, plan.epoch, lent, sweeps=sweeps),
            )
            keep_freed_memory()
            urls = [store.location.url for store in self.dataset.stores]  # the dataset's repr might read from the store
            message = "epoch %d of %s begins: rank %d of %d, worker %d of %d"
            log.debug(message, plan.epoch, urls, plan.rank, plan.world_size, worker_id, n_workers)
            bridge, record.counters = start(work)
            convert: Callable[[Any], Minibatch] = recipes.minibatch
            if lent is not None:
                from zloader.training.device import Delivery, deliver

                delivery = Delivery(layout=self.layout, dtype=recipes.dtype)
                bridge = deliver(bridge, lent, delivery, recipes.minibatch, self.options.ready_bytes)
                convert = methodcaller("take")
            undo.pop_all()
            return RunningEpoch(bridge=bridge, record=record, convert=convert, uncount=uncount)

    def _start(self, work: EpochWork) -> tuple[Bridge[Any], Counters]:
        scheduler = FetchScheduler(work.recipe(ready=True), self.options, self._buffers)
        return scheduler.start(map(work.plan.rest_of, work.remaining), name="zloader-fetch"), scheduler.counters
