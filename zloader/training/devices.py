"""Devices to which an epoch delivers its minibatches: GPUs with streams, and others.

A device copies page-locked memory on a stream of its own, beside training. delivery.py fills that memory.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from zloader.common.errors import OptionError
from zloader.training.arrays import PackedRows
from zloader.training.minibatch import Minibatch

# Taken minibatches whose training may still run on the device. A training loop that waits for nothing queues work far
# ahead of the device, and the memory of all minibatches in the queue would be in use.
_MOST_TRAINED = 2
_TYPES = ("cuda", "xpu", "mps")

Finish = Callable[[list[torch.Tensor]], Minibatch]


@dataclass(frozen=True)
class Sent:
    """A minibatch on its way to a device.

    `copied` waits until the staging memory of the minibatch may be filled again. It does not refer to the minibatch.
    `take` returns the minibatch for use on the calling thread's current stream. It is called at most once.
    """

    copied: Callable[[], object]
    take: Callable[[], Minibatch]


class Device(ABC):
    """A device during one epoch. One thread sends, and the consumer takes what was sent."""

    @abstractmethod
    def staging(self, n_bytes: int) -> torch.Tensor:
        """Memory on the host (uint8) from which it can copy."""

    @abstractmethod
    def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
        """Begins to copy tensors in staging memory to the device, and calls `finish` with the copies.

        `finish` makes a minibatch of them with torch alone. The minibatch does not share the staging memory.
        """


class PlainDevice(Device):
    """A device without streams: minibatches are made on the host, and copied when they are complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def staging(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
        minibatch = finish(staged).each(self._copied)
        return Sent(copied=lambda: None, take=lambda: minibatch)

    def _copied(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64 and self._device.type == "mps":
            tensor = tensor.to(torch.float32)  # mps has no float64
        return tensor.to(self._device)


class StreamDevice(Device):
    """A GPU of torch.cuda or torch.xpu, with a stream for copies and conversions."""

    def __init__(self, device: torch.device) -> None:
        self._gpu: Any = getattr(torch, device.type)
        index = self._gpu.current_device() if device.index is None else device.index  # of the consumer's thread
        self._device = torch.device(device.type, index)
        self._stream = self._gpu.Stream(self._device)
        # A blocking event lets the waiting thread sleep instead of spin.
        self._event = functools.partial(self._gpu.Event, **({"blocking": True} if device.type == "cuda" else {}))
        self._trained: deque[Any] = deque()  # events on the consumer's stream, one per minibatch taken

    def staging(self, n_bytes: int) -> torch.Tensor:
        with self._gpu.device(self._device):  # pinning begins to use the thread's current device, which takes memory
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
        while len(self._trained) > _MOST_TRAINED:
            _wait(self._trained.popleft())
        with self._gpu.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in staged]
            copied = self._recorded(self._stream)
            minibatch = finish(copies)
            ready = self._recorded(self._stream)
        return Sent(copied=functools.partial(_wait, copied), take=functools.partial(self._taken, minibatch, ready))

    def _recorded(self, stream: Any) -> Any:
        event = self._event()
        event.record(stream)
        return event

    def _taken(self, minibatch: Minibatch, ready: Any) -> Minibatch:
        """Makes the consumer's current stream wait for a minibatch, and keeps its memory until that stream is done."""
        stream = self._gpu.current_stream(self._device)
        self._trained.append(self._recorded(stream))
        stream.wait_event(ready)

        def keep(tensor: Any) -> Any:
            for part in parts_of(tensor):
                part.record_stream(stream)
            return tensor

        minibatch.each(keep)
        return minibatch


def _wait(event: Any) -> None:
    if not event.query():  # synchronising takes longer even if the event is over
        event.synchronize()


def parts_of(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, PackedRows):
        return [tensor.indptr, tensor.genes, tensor.values]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def copied(minibatch: Minibatch, device: torch.device) -> Minibatch:
    """The minibatch on a device. The copy runs beside the computation, on CUDA through page-locked memory."""
    if device.type == "cuda" and minibatch.index.device.type == "cpu":
        minibatch = minibatch.pin_memory()  # without it the copy would block
    return minibatch.to(device, non_blocking=device.type != "mps")  # on mps, such copies race


# ---- options


def usable_device(device: Any, layout: str) -> str | Device | None:
    """A loader's `device` as a string, or None for minibatches in the memory of the host.

    Raises OptionError if it is not available, or cannot hold the layout. Tests give a Device of their own.
    """
    if device is None or isinstance(device, Device):
        return _require_tensors(device, layout)
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        wanted = None
    if isinstance(device, bool) or not isinstance(device, str | torch.device) or wanted is None:
        raise OptionError(f"device must be a torch.device or a string such as 'cuda' or 'cuda:1', not {device!r:.100}")
    if wanted.type == "cpu":
        return None
    available = [f"{kind}:{index}" for kind in _TYPES for index in range(_count(kind))]
    if wanted.type not in _TYPES or (wanted.index or 0) >= _count(wanted.type):
        raise OptionError(f"device={str(device)!r} is not available. Available: {', '.join(['cpu', *available])}")
    if wanted.type == "mps" and layout == "csr":
        _require_csr(wanted)
    return _require_tensors(str(wanted), layout)


def _require_tensors(device: str | Device | None, layout: str) -> str | Device | None:
    if device is not None and layout == "scipy":
        raise OptionError(f"layout={layout!r} has no tensors, so leave device out, or take layout 'csr' or 'dense'")
    return device


def _require_csr(device: torch.device) -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    try:
        torch.sparse_csr_tensor(empty, empty[:0], torch.zeros(0), size=(0, 1)).to(device)
    except (RuntimeError, NotImplementedError) as error:
        raise OptionError(
            f"torch {torch.__version__} has no sparse CSR tensors on {device}: take layout='dense' or 'packed'"
        ) from error


def _count(kind: str) -> int:
    """Devices of a kind that torch can use."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def opened(device: Any) -> Device:
    """The device for one epoch. Called by the thread that takes the minibatches, because 'cuda' is its current GPU."""
    if torch.utils.data.get_worker_info() is not None:
        raise OptionError(
            f"device={device!r} does not work in DataLoader workers: use num_workers=0, which is the fast way, or "
            "leave device out and let the DataLoader pin memory"
        )
    if isinstance(device, Device):
        return device
    usable_device(device, "dense")  # a pickled loader may come from another machine
    wanted = torch.device(device)
    return PlainDevice(wanted) if wanted.type == "mps" else StreamDevice(wanted)
