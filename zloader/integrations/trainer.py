"""What the integrations with Lightning, scvi-tools and accelerate share: ranks of a Trainer, and copies to a device."""

from __future__ import annotations

from typing import Any

import torch

from zloader.training.minibatch import Minibatch


def rank_of(trainer: Any) -> dict[str, int]:
    """The rank of this process as options of a Loader, or none without a Trainer.

    The Trainer is asked, because a process that it launches has WORLD_SIZE in its environment, but no RANK.
    """
    if trainer is None:
        return {}
    place = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return {"rank": place["rank"], "world_size": place["num_replicas"], "local_world_size": trainer.num_devices}


def copied(minibatch: Minibatch, device: torch.device) -> Minibatch:
    """The minibatch on a device. The copy runs beside the computation, on CUDA through page-locked memory."""
    if device.type == "cuda" and minibatch.index.device.type == "cpu":
        minibatch = minibatch.pin_memory()  # without it the copy would block
    return minibatch.to(device, non_blocking=device.type != "mps")  # on mps, such copies race
