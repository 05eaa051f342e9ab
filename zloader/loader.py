"""The torch side: wires plan -> fetch -> minibatch -> tensors in one visible function, `Loader.__iter__`."""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import pandas as pd
import scipy.sparse
import torch
import torch.distributed
import torch.utils.data

from zloader.bridge import Bridge
from zloader.dataset import Dataset, as_scipy
from zloader.epochs import EpochCount
from zloader.errors import OptionError
from zloader.fetch import FetchScheduler, Recipe
from zloader.genes import ChosenGenes, Genes
from zloader.malloc import keep_freed_memory
from zloader.plan import Plan
from zloader.sampling import BlockShuffling, Sampling
from zloader.terms import CsrArrays, FetchOptions, MinibatchArrays, Statistics
from zloader.workshop import BufferPool, Counters

log = logging.getLogger("zloader")
LAYOUTS = ("csr", "dense", "scipy", "anndata")
DTYPES = ("float32", "float64", "int32", "int64")
DEFAULT_BLOCK_SIZE = 64  # rows; scDataset's and annbatch's figures are quoted for it


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one training step gets; all in the same row order.

    `x` is a torch sparse CSR tensor (with int32 indices), a dense tensor, a scipy CSR matrix or an AnnData (rows x
    genes), or None; `obs` maps a column to a tensor of one value a row (int64 codes of categories, -1 for none; numbers
    as they are stored), `obsm` a name to a tensor of rows x dims, as stored; `index` (int64) holds the dataset's row
    numbers.
    """

    x: Any
    obs: dict[str, torch.Tensor]
    obsm: dict[str, torch.Tensor]
    index: torch.Tensor

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Minibatch:
        """The same minibatch on a device (x must be a tensor or None)."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Minibatch:
        """The same minibatch in page-locked memory (x must be a tensor or None); DataLoader calls this."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Any) -> Minibatch:
        return Minibatch(
            x=None if self.x is None else function(self.x),
            obs={name: function(column) for name, column in self.obs.items()},
            obsm={name: function(array) for name, array in self.obsm.items()},
            index=function(self.index),
        )


@dataclass(eq=False)
class Loader(torch.utils.data.IterableDataset[Minibatch]):
    """Iterates over shuffled minibatches of a dataset; each iteration is one epoch, the first is epoch 0.

    A fetch loads `batch_size * fetch_factor` rows, permutes them in memory and is cut into minibatches. `x` is `"X"`,
    `"layers/NAME"`, `"raw/X"` or None; `obs` lists columns and `obsm` arrays. `genes` chooses the columns of x and
    their order: a list of names or positions, or a mask over all; None takes all. `layout` is `"csr"`
    (torch.sparse_csr), `"dense"`, `"scipy"` or `"anndata"`, `dtype` that of x: `"float32"`, `"float64"`, `"int32"` or
    `"int64"`. `sampling` is a
    Streaming or BlockShuffling (the default, in blocks of 64 rows). `seed` decides every order. With `drop_last` the
    last, smaller minibatch is left out. `rank` and `world_size` come from torch.distributed where it is initialised,
    else from RANK and WORLD_SIZE.

    Raises OptionError, MissingColumnError or FormatError when made; any ReadError in the loop.
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
    options: FetchOptions = field(default_factory=FetchOptions)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise OptionError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, not {self.layout!r}")
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(map(repr, DTYPES))}, not {self.dtype!r}")
        for name, names in (("obs", self.obs), ("obsm", self.obsm)):
            if isinstance(names, str):
                raise OptionError(f"{name} must be a list of names: write {name}=[{names!r}]")
        if self.x is None and (self.layout == "anndata" or self.genes is not None):
            raise OptionError(f"{'genes' if self.genes is not None else repr(self.layout)} needs an x: it is None")
        _silence_sparse_warnings()
        self.dataset.require_obs(self.obs)
        self.dataset.require_obsm(self.obsm)
        self._genes: ChosenGenes | None = None
        if self.x is not None:
            matrices = self.dataset.matrices(self.x)
            self._genes = None if self.genes is None else self.dataset.choose_genes(self.genes, matrices[0])
        self._epochs = EpochCount()
        self._record = _Record(epoch=0, counters=Counters())
        self._buffers = BufferPool()  # kept from epoch to epoch
        self.plan(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`, and those after it the following ones."""
        self.plan(epoch)
        self._epochs.restart(epoch)

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch for this rank; raises OptionError for sizes that make no sense."""
        rank, world_size = _rank_and_world_size(self.rank, self.world_size)
        default = BlockShuffling(block_size=min(DEFAULT_BLOCK_SIZE, max(1, self.batch_size * self.fetch_factor)))
        return Plan(
            dataset_rows=self.dataset.n_obs,
            sampling=default if self.sampling is None else self.sampling,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            seed=self.seed,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        """Minibatches that an epoch yields on this rank, over all its workers."""
        return self.plan(0).n_minibatches

    def statistics(self) -> Statistics:
        """Figures of the epoch under way or, after it, of the last one (in this process, not in DataLoader workers)."""
        return self._record.statistics()

    def __iter__(self) -> Iterator[Minibatch]:
        worker = torch.utils.data.get_worker_info()
        worker_id, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        plan = self.plan(self._epochs.begin(worker))
        fetches = map(plan.fetch, plan.fetch_numbers(worker=worker_id, n_workers=n_workers))

        recipe = Recipe(
            parts=self.dataset.parts(self.x, self.options),
            columns=lambda: {name: self.dataset.obs_column(name) for name in self.obs},
            obsm=lambda: {name: self.dataset.obsm_array(name) for name in self.obsm},
            dense=self.layout == "dense",
            dtype=self.dtype,
            genes=self._genes,
            sweeping=plan.sweeps and n_workers == 1,
        )
        var = self.dataset.var_of(self.x, self._genes) if self.x is not None and self.layout == "anndata" else None
        _silence_sparse_warnings()
        if self.options.tune_malloc:
            keep_freed_memory()
        scheduler = FetchScheduler(recipe, self.options, self._buffers)

        log.debug(
            "epoch %d of %s begins: rank %d of %d, worker %d of %d",
            plan.epoch,
            [store.location.url for store in self.dataset.stores],  # not the dataset: its repr may have to read
            plan.rank,
            plan.world_size,
            worker_id,
            n_workers,
        )
        self._record = _Record(epoch=plan.epoch, counters=scheduler.counters)
        bridge = scheduler.start(fetches, name="zloader-fetch")
        return _Epoch(bridge, self._record, functools.partial(_as_minibatch, self.dataset, self.layout, var))


@dataclass
class _Record:
    """What an epoch leaves behind for `statistics`; holds no thread, so that a dropped epoch can end."""

    epoch: int
    counters: Counters
    rows: int = 0
    minibatches: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

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

    def __init__(self, bridge: Bridge[MinibatchArrays], record: _Record, convert: Any) -> None:
        self._bridge = bridge
        self._record = record
        self._convert = convert

    def __next__(self) -> Minibatch:
        try:
            arrays = next(self._bridge)
        except BaseException as error:
            log.debug("epoch ends with %r: %r", error, self._record.statistics())
            raise
        finally:
            self._record.wait_s = self._bridge.wait_s
            self._record.elapsed_s = time.perf_counter() - self._record.started
        self._record.rows += len(arrays.index)
        self._record.minibatches += 1
        minibatch: Minibatch = self._convert(arrays)
        return minibatch

    def close(self) -> None:
        """Ends the epoch and its threads now; dropping the iterator does so too."""
        self._bridge.close()


def _as_minibatch(dataset: Dataset, layout: str, var: pd.DataFrame | None, arrays: MinibatchArrays) -> Minibatch:
    return Minibatch(
        x=_as_layout(layout, arrays) if var is None else dataset.to_anndata(arrays, var),
        obs={name: torch.from_numpy(column) for name, column in arrays.obs.items()},
        obsm={name: torch.from_numpy(array) for name, array in arrays.obsm.items()},
        index=torch.from_numpy(arrays.index),
    )


def _as_layout(layout: str, arrays: MinibatchArrays) -> torch.Tensor | scipy.sparse.csr_matrix | None:
    x = arrays.x
    if not isinstance(x, CsrArrays):
        return None if x is None else torch.from_numpy(x)
    if layout == "scipy":
        return as_scipy(x)
    return torch.sparse_csr_tensor(
        torch.from_numpy(x.indptr),
        torch.from_numpy(x.indices),
        torch.from_numpy(x.values),
        size=(len(x.indptr) - 1, x.n_genes),
        check_invariants=False,  # the gather makes them so; checking costs more than making
    )


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise OptionError("give rank and world_size together, or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def _silence_sparse_warnings() -> None:
    """Spends torch's once-a-process warnings on sparse CSR (in beta; invariants unchecked): nobody can act on them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        empty = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(empty, empty[:0], empty[:0], size=(0, 0))
