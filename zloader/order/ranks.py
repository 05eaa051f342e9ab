"""The rank of this process, and the parts of the rows that its machine reads."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

from zloader.common.checks import require_count, require_one_of, require_whole
from zloader.common.errors import OptionError
from zloader.order.draws import Draws
from zloader.order.parts import DealtParts
from zloader.order.sampling import Sampling
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming

Locality = Literal["global", "machine"]


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank among the `world_size` ranks that divide the rows. Several `machines` have a part of the rows each."""

    rank: int
    world_size: int
    machines: int = 1

    def keep_to_parts(self, sampling: Sampling, dataset_rows: int) -> Sampling:
        """The sampling within the part of each machine. Raises OptionError if it cannot be restricted."""
        if self.machines == 1:
            return sampling
        if not isinstance(sampling, Streaming | BlockShuffling | MixtureOfScanners):
            kind = "weighted sampling" if isinstance(sampling, Draws) else type(sampling).__name__
            raise OptionError(
                f"locality='machine' needs Streaming, BlockShuffling or MixtureOfScanners, not {kind}: use one of "
                "these, or locality='global'"
            )
        if sampling.indices is not None:
            raise OptionError(
                f"locality='machine' takes {type(sampling).__name__} without indices: give the Loader the view "
                "dataset.where(indices) instead, or use locality='global'"
            )
        if dataset_rows < self.machines:
            raise OptionError(
                f"{dataset_rows} rows cannot be divided among {self.machines} machines: use fewer machines or "
                "locality='global'"
            )
        return DealtParts(sampling=sampling, n_obs=dataset_rows, machines=self.machines)


def placement_of(
    rank: int | None,
    world_size: int | None,
    locality: Locality,
    local_world_size: int | None,
) -> RankPlacement:
    """The rank from the arguments, torch.distributed or the environment; with "machine", the number of machines."""
    require_one_of(["global", "machine"], locality=locality)
    rank, world_size = _rank_and_world_size(rank, world_size)
    if locality == "global":
        return RankPlacement(rank=rank, world_size=world_size)
    if local_world_size is None:
        local_world_size = _variable("LOCAL_WORLD_SIZE")
    local = 1 if local_world_size is None else local_world_size
    require_count(world_size=world_size, local_world_size=local)
    require_whole(0, rank=rank)
    if world_size % local:
        raise OptionError(
            f"locality='machine' needs the same number of ranks on every machine, but world_size {world_size} is "
            f"not a multiple of local_world_size {local}"
        )
    if rank >= world_size:
        raise OptionError(f"rank {rank} does not exist in a world of {world_size}: ranks are numbered from 0")
    return RankPlacement(rank=rank, world_size=world_size, machines=world_size // local)


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise OptionError("give rank and world_size together, or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    distributed: Any = sys.modules.get("torch.distributed")  # what is not imported is not initialised
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world_size = _variable("RANK"), _variable("WORLD_SIZE")
    if rank is None and world_size in (None, 1):
        return 0, 1
    if rank is None or world_size is None:
        present, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        raise OptionError(
            f"the environment has {present}={os.environ[present]} but no {missing}: set RANK and WORLD_SIZE, as "
            "torchrun does, or give rank and world_size"
        )
    return rank, world_size


def _variable(name: str) -> int | None:
    """A whole number from the environment, or None if the variable is not set."""
    text = os.environ.get(name)
    if text is not None and not text.strip().isdecimal():
        raise OptionError(f"the environment has {name}={text!r}, which is not a whole number: correct it or unset it")
    return None if text is None else int(text)
