"""Minibatches for a training loop that uses Hugging Face's accelerate.

`accelerator.prepare` shards or dispatches every DataLoader among the processes. A Loader has done that already: each
process reads its own rows. So `prepare` here does the rest of what accelerate does for a DataLoader: it moves
minibatches to the accelerator's device, tells its gradient state when the epoch ends, and saves and restores the
position of the loader with the accelerator's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.dataset.dataset import Dataset
from zloader.order.plan import Plan
from zloader.order.ranks import own_rank
from zloader.order.resume import resumed
from zloader.training.device import copied
from zloader.training.loader import Loader, Minibatch

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
except ImportError as error:
    raise ImportError('zloader.integrations.accelerate needs accelerate: pip install "zloader[huggingface]"') from error

__all__ = ["PreparedLoader", "prepare"]


@answers
def prepare(accelerator: Accelerator, loader: Loader) -> PreparedLoader:
    """The minibatches of this process, on its device, for `for minibatch in prepare(accelerator, loader)`.

    Call it in every process, after the Accelerator was made. The position of the loader becomes a part of
    `accelerator.save_state` and `load_state`. Preparing a loader again returns the same object.

    `batch_size` is the number of rows per process. `dispatch_batches` of the accelerator has no effect.

    Raises OptionError if the ranks of loader and accelerator differ, or if the last minibatches of the processes would
    differ in size although the accelerator has `even_batches`.
    """
    if isinstance(loader, PreparedLoader):
        loader = loader.loader
    if not isinstance(loader, Loader):
        raise OptionError(
            f"prepare takes a zl.Loader, not {type(loader).__name__}: give it the Loader itself. It reads in threads "
            "and needs no DataLoader around it"
        )
    _require_fitting(accelerator, loader)
    for registered in accelerator._custom_objects:
        if isinstance(registered, PreparedLoader) and registered.loader is loader:
            return registered
    prepared = PreparedLoader(accelerator, loader)
    accelerator.register_for_checkpointing(prepared)
    return prepared


class _Progress:
    """What the gradient state asks of a DataLoader that is being iterated over."""

    end_of_dataloader = False
    remainder = 0


@answers
class PreparedLoader:
    """A Loader for the processes of an Accelerator. Made by `prepare`.

    Each iteration is an epoch, or the rest of the one that was restored. At the last minibatch,
    `accelerator.gradient_state.end_of_dataloader` is true, so that `accelerator.accumulate` makes a step.
    """

    def __init__(self, accelerator: Accelerator, loader: Loader) -> None:
        self.loader = loader
        self._accelerator = accelerator
        self._restored: int | None = None  # the epoch that load_state_dict restored and that has not begun since

    @property
    def dataset(self) -> Dataset:
        """The dataset or view of the loader. transformers takes the number of rows from it."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Minibatches per whole epoch of this process."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`. A position in this epoch that was restored is kept."""
        if epoch != self._restored:
            self._restored = None
            self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, which is the same in all processes."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch in which `state` was saved."""
        self.loader.load_state_dict(state)
        self._restored = int(state["epoch"])

    def __iter__(self) -> Iterator[Any]:
        minibatches = iter(self.loader)
        progress = _Progress()  # of this iteration, because several may be under way
        gradient_state = self._accelerator.gradient_state
        gradient_state._add_dataloader(progress)
        left = None
        try:
            for minibatch in minibatches:
                if left is None:
                    self._restored = None
                    left, last_rows = self._after_the_first()
                else:
                    left -= 1
                if left == 0:
                    progress.end_of_dataloader = True
                    progress.remainder = last_rows
                yield self._moved(minibatch)
        finally:
            gradient_state._remove_dataloader(progress)

    def _after_the_first(self) -> tuple[int, int]:
        """How many minibatches follow the first one, and `_last_rows`.

        Known in advance, so that no minibatch is taken ahead: the loader's state counts those that were taken.
        """
        state = self.loader.state_dict()
        plan, done = resumed(self.loader.plan(state["epoch"]), state["stretches"])
        return plan.n_minibatches - done, _last_rows(plan, self._accelerator.num_processes)

    def _moved(self, minibatch: Any) -> Any:
        device = self._accelerator.device
        if device.type == "cpu" or self.loader.device is not None or not self._accelerator.device_placement:
            return minibatch
        if isinstance(minibatch, Minibatch):
            return copied(minibatch, device)
        return send_to_device(minibatch, device, non_blocking=True)


def _last_rows(plan: Plan, n_processes: int) -> int:
    """The rows of the last minibatches of all processes together, or 0 if these are full or differ in size.

    Of what was gathered at the last minibatch, `gather_for_metrics` keeps this many rows, or all if it is 0.
    """
    if plan.drop_last:
        return 0
    rows, uneven = divmod(plan.n_rows % (plan.world_size * plan.batch_size), plan.world_size)
    return 0 if uneven else rows * n_processes


def _require_fitting(accelerator: Accelerator, loader: Loader) -> None:
    """Raises OptionError if processes would train on the wrong rows, or wait for each other forever."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise OptionError(
            "prepare gives every process other rows, but this accelerator has several processes per copy of the model, "
            "which need the same rows: iterate over zl.Loader(rank=..., world_size=...) with the number of the copy"
        )
    place = own_rank(loader.rank, loader.world_size)
    index, processes = accelerator.process_index, accelerator.num_processes
    if (place.rank, place.world_size) != (index, processes):
        raise OptionError(
            f"the loader is for rank {place.rank} of {place.world_size}, but this is process {index} of {processes} of "
            "the accelerator: give zl.Loader(rank=accelerator.process_index, world_size=accelerator.num_processes)"
        )
    plan = loader.plan(0)
    full = plan.drop_last or plan.batch_size == 1
    if accelerator.even_batches and not full and plan.n_rows % plan.world_size:
        raise OptionError(
            f"{plan.n_rows} rows do not divide evenly among {plan.world_size} processes, so their last minibatches "
            "differ by a row, and accelerator.gather would hang or fail there: give zl.Loader drop_last=True, or set "
            "accelerator.even_batches = False if you gather no rows"
        )
