"""Minibatches of a Loader as Lightning's loops and scvi's models iterate over them.

Lightning iterates once in vain before training, stops after `len` minibatches without asking for the end of the epoch,
and restores states only of unfinished epochs. So the state that is saved here is the one before the next minibatch was
taken ahead: after the last minibatch it is that of the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zloader.common.errors import OptionError
from zloader.integrations.scvi_encoding import MinibatchEncoder, Tensors
from zloader.training.loader import Loader
from zloader.training.minibatch import Minibatch

ALONE = {"rank": 0, "world_size": 1, "local_world_size": 1}  # options of a Loader for all rows in one process


class TrainingBatches:
    """The epochs of a Loader, one per iteration. An epoch begins with the first `next`.

    With a second Loader, items are pairs of a minibatch of each. The second Loader goes on over the epochs of the first
    and begins again when it ends.
    """

    def __init__(self, loader: Loader, labelled: Loader | None = None) -> None:
        if labelled is not None and not len(labelled):
            raise OptionError("no minibatch of labelled rows: label more rows, or take a smaller batch_size")
        self.loader, self.labelled = loader, labelled
        self._position: dict[str, Any] | None = None  # of the iteration under way
        self._labelled_iterator: Iterator[Minibatch] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Minibatch | list[Minibatch]]:
        self._position = None
        minibatches = iter(self.loader)
        following = next(minibatches, None)
        while following is not None:
            minibatch, self._position = following, self.loader.state_dict()
            following = next(minibatches, None)
            if following is None:
                self._position = None  # the epoch has ended, and the Loader's own state says so
            yield minibatch if self.labelled is None else [minibatch, self._next_labelled(self.labelled)]

    def _next_labelled(self, loader: Loader) -> Minibatch:
        while True:
            if self._labelled_iterator is None:
                self._labelled_iterator = iter(loader)
            minibatch = next(self._labelled_iterator, None)
            if minibatch is not None:
                return minibatch
            self._labelled_iterator = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last minibatch that was handed out."""
        state = {"loader": self._position or self.loader.state_dict()}
        return state if self.labelled is None else state | {"labelled": self.labelled.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch. Raises OptionError for a state of other data or options."""
        self.loader.load_state_dict(state["loader"])
        if self.labelled is not None:
            self.labelled.load_state_dict(state["labelled"])
        self._position = self._labelled_iterator = None

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that has not begun yet."""
        state = self.state_dict()["loader"]
        return int(state["epoch"]) + bool(state["stretches"])


@dataclass(frozen=True, kw_only=True)
class InferenceBatches:
    """The rows of a dataset in order, as dicts of tensors: scvi applies no hook of a data module to them."""

    loader: Loader
    encoder: MinibatchEncoder
    device: torch.device | None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Tensors]:
        for minibatch in self.loader:
            yield self.encoder(minibatch if self.device is None else minibatch.to(self.device))


def paired(tensors: Tensors, n_labels: int) -> list[Tensors | None]:
    """A minibatch and those of its rows that have a label, for the classifier of SCANVI; None if there are none."""
    known = tensors["labels"][:, 0] < n_labels
    return [tensors, {name: tensor[known] for name, tensor in tensors.items()} if known.any() else None]
