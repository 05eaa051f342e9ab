"""The rank of this process among those that divide the rows."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from zloader.common.errors import OptionError


class Rank(NamedTuple):
    """A rank among the `world_size` ranks that divide the rows."""

    rank: int
    world_size: int


def own_rank(rank: int | None, world_size: int | None) -> Rank:
    """The rank from the arguments, torch.distributed or the environment. Raises OptionError."""
    if (rank is None) != (world_size is None):
        raise OptionError("give rank and world_size together, or neither")
    if rank is not None and world_size is not None:
        return Rank(rank, world_size)
    distributed: Any = sys.modules.get("torch.distributed")  # what is not imported is not initialised
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    rank, world_size = _variable("RANK"), _variable("WORLD_SIZE")
    if rank is None and world_size in (None, 1):
        return Rank(0, 1)
    if rank is None or world_size is None:
        present, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        raise OptionError(
            f"the environment has {present}={os.environ[present]} but no {missing}: set RANK and WORLD_SIZE, as "
            "torchrun does, or give rank and world_size"
        )
    return Rank(rank, world_size)


def _variable(name: str) -> int | None:
    """A whole number from the environment, or None if the variable is not set."""
    text = os.environ.get(name)
    if text is not None and not text.strip().isdecimal():
        raise OptionError(f"the environment has {name}={text!r}, which is not a whole number: correct it or unset it")
    return None if text is None else int(text)
