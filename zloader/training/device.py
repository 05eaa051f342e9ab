"""Sends the minibatches of an epoch to a device, on a thread of its own.

Minibatches are gathered in the narrow form of reading/forms.py, so that few bytes cross the bus. The genes and values
are gathered straight into page-locked memory that is lent by this module. All smaller tensors of a minibatch are laid
out one after another in a block of such memory, and cross the bus with one copy, on a stream beside training. On the
device x takes its layout. No lent memory and no block is filled again before the copy from it is done.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import MinibatchArrays, Rows
from zloader.reading.bridge import Bridge, Channel
from zloader.training.arrays import PackedRows, is_sparse
from zloader.training.minibatch import Minibatch

_BLOCKS = 4  # of staging memory; with fewer, the thread would wait for copies
_LEAST_LENT = 4096  # bytes; smaller arrays share a copy
# Bytes from which other tensors cross the bus alone. Smaller ones share memory on the device, and one of them that is
# kept, such as labels, keeps the others.
_LEAST_ALONE = 65_536
_MOST_AHEAD = 8  # minibatches, beyond which more do not help
_ALIGNED = 64  # bytes; more than any dtype needs


# Taken minibatches whose training may still run on the device. A training loop that waits for nothing queues work far
# ahead of the device, and the memory of all minibatches in the queue would be in use.
_MOST_TRAINED = 2
_TYPES = ("cuda", "xpu", "mps")

Finish = Callable[[list[torch.Tensor]], Minibatch]


class Sent(NamedTuple):
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
    """The dense tensors of which a tensor or PackedRows consists."""
    if isinstance(tensor, PackedRows):
        return [tensor.indptr, tensor.genes, tensor.values]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()] if is_sparse(tensor) else [tensor]


def copied(minibatch: Minibatch, device: torch.device) -> Minibatch:
    """The minibatch on a device. The copy runs beside the computation, on CUDA through page-locked memory."""
    if device.type == "cuda" and minibatch.index.device.type == "cpu":
        minibatch = minibatch.pin_memory()  # without it the copy would block
    return minibatch.to(device, non_blocking=device.type != "mps")  # on mps, such copies race


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How minibatches that were gathered in the narrow form become those of `layout` and `dtype`."""

    layout: str
    dtype: str | None

    def finished(self, x: Any) -> Any:
        """x in its layout."""
        if self.dtype is None:
            return x
        dtype = getattr(torch, self.dtype)
        if not isinstance(x, PackedRows):
            return x.to(dtype)
        x = PackedRows(x.indptr, x.genes, x.values.to(dtype), x.n_genes)
        if self.layout == "csr":
            return x.csr(dtype)
        # No row has a gene twice. So nothing is summed, and half floats need no wider tensor meanwhile.
        out = torch.zeros(len(x) * x.n_genes, dtype=dtype, device=x.device)
        return out.scatter_(0, x.places(), x.values).view(x.shape)

    def n_bytes(self, x: Any) -> int:
        """Bytes of x in its layout."""
        if isinstance(x, dict):
            return sum(map(self.n_bytes, x.values()))
        if x is None or self.dtype is None:
            return 0 if x is None else int(x.nbytes)
        n_values = len(x.values) if isinstance(x, PackedRows) and self.layout == "csr" else int(np.prod(x.shape))
        return n_values * (int(getattr(torch, self.dtype).itemsize) + (4 if self.layout == "csr" else 0))


class _Lease:
    """The base of all arrays in a buffer, so that it is dropped after the last of them."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.__array_interface__ = buffer.numpy().__array_interface__


class LentMemory:
    """Staging memory of a device that gathers fill. It comes back when the last array in it is dropped. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._ends: dict[int, int] = {}  # of each buffer, by its first address
        self._free: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def empty(self, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array with arbitrary contents, in lent memory unless it is small."""
        n_bytes = length * dtype.itemsize
        if n_bytes < _LEAST_LENT:
            return np.empty(length, dtype)
        buffer = self._take(n_bytes)
        lease = _Lease(buffer)
        weakref.finalize(lease, self._free.__setitem__, buffer.data_ptr(), buffer).atexit = False  # needs no lock
        return np.asarray(lease)[:n_bytes].view(dtype)

    def _take(self, n_bytes: int) -> torch.Tensor:
        with self._lock:
            free = self._free.copy()
            fitting = {address: len(buffer) for address, buffer in free.items() if len(buffer) >= n_bytes}
            if fitting:
                return self._free.pop(min(fitting, key=fitting.__getitem__))
            if free:  # all are too small: drop one instead of keeping both
                address = next(iter(free))
                del self._free[address], self._ends[address]
        buffer = self.device.staging(_rounded(n_bytes))
        with self._lock:
            self._ends[buffer.data_ptr()] = buffer.data_ptr() + len(buffer)
        return buffer

    def held(self, tensors: Iterable[torch.Tensor]) -> list[bool]:
        """Whether each tensor is in lent memory."""
        with self._lock:
            ends = sorted(self._ends.items())
        found = []
        for tensor in tensors:
            address = tensor.data_ptr()
            before = bisect.bisect_right(ends, (address, sys.maxsize))
            found.append(before > 0 and address < ends[before - 1][1])
        return found


@dataclass(frozen=True)
class Delivered:
    """The minibatch of the rows `index`, on its way. `take` returns it, and is called at most once."""

    index: Rows
    take: Callable[[], Minibatch]


def deliver(
    host: Bridge[MinibatchArrays],
    lent: LentMemory,
    delivery: Delivery,
    minibatch_of: Callable[[MinibatchArrays], Minibatch],
    ahead_bytes: int,
) -> Bridge[Delivered]:
    """Iterates over the minibatches of `host` on a device, sent ahead by a thread of their own.

    `host` gathers in the narrow form, into `lent` memory of the device. `minibatch_of` makes a minibatch whose tensors
    share the memory of the arrays. At most 8 minibatches are ahead, and more than two only if all but the last take at
    most `ahead_bytes` together.
    """

    async def produce(put: Channel[Delivered]) -> None:
        with contextlib.closing(_Sending(lent, delivery)) as sending:
            for arrays in host:
                minibatch = minibatch_of(arrays)
                n_bytes = max(sum(map(delivery.n_bytes, _x_of(minibatch))), ahead_bytes // (_MOST_AHEAD - 1))
                # One is made, and waits until it fits, beside those that were put.
                await put([Delivered(arrays.index, sending.send(minibatch, arrays).take)], n_bytes)

    return Bridge(produce, ready_bytes=ahead_bytes, name="zloader-device", source=host)


class _Sending:
    """Sends minibatches, and keeps staging memory from being filled again before the copy from it is done."""

    def __init__(self, lent: LentMemory, delivery: Delivery) -> None:
        self._lent = lent
        self._delivery = delivery
        # Staging memory from which a copy runs: a block, arrays that may be in lent memory, and what waits for it.
        self._in_use: deque[tuple[torch.Tensor, MinibatchArrays, Callable[[], object]]] = deque()

    def send(self, minibatch: Minibatch, arrays: MinibatchArrays) -> Sent:
        """Sends a minibatch whose tensors share the memory of `arrays`."""
        tensors = _tensors_of(minibatch)
        held = self._lent.held(tensors)
        lent = list(itertools.compress(tensors, held))
        others = sorted(
            (tensor for tensor, is_held in zip(tensors, held, strict=True) if not is_held),
            key=operator.attrgetter("nbytes"),
        )
        n_small = sum(tensor.nbytes < _LEAST_ALONE for tensor in others)
        places = _places(others)
        block = self._block(places[-1])
        bytes_of_block = block.numpy()
        for tensor, place in zip(others, places, strict=False):
            array = tensor.numpy()  # NumPy copies on this thread alone, where torch would start threads of its own
            bytes_of_block[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        at = {id(tensor): (0, place) for tensor, place in zip(others[:n_small], places, strict=False)}
        staged = [block[: places[n_small]]]
        for tensor, place in zip(others[n_small:], places[n_small:], strict=False):
            at[id(tensor)] = len(staged), 0
            staged.append(block[place : place + tensor.nbytes])
        at |= {id(tensor): (len(staged) + number, 0) for number, tensor in enumerate(lent)}
        sent = self._lent.device.send([*staged, *lent], functools.partial(_unpacked, minibatch, at, self._delivery))
        self._in_use.append((block, arrays, sent.copied))
        return sent

    def _block(self, n_bytes: int) -> torch.Tensor:
        """A block to be filled, after the copies from it and from the lent memory of that minibatch are done."""
        if len(self._in_use) == _BLOCKS:
            block, _, copied = self._in_use.popleft()
            copied()
            if block.nbytes >= n_bytes:
                return block
        return self._lent.device.staging(_rounded(n_bytes))

    def close(self) -> None:
        """Waits for all copies, because a taken minibatch may still need one."""
        while self._in_use:
            self._in_use.popleft()[2]()


def _x_of(minibatch: Minibatch) -> list[Any]:
    """The x of a minibatch, and of its controls and neighbours."""
    companions = (minibatch.control, minibatch.neighbors)
    return [minibatch.x, *(each.x for each in companions if each is not None)]


def _tensors_of(minibatch: Minibatch) -> list[torch.Tensor]:
    """The tensors of a minibatch, each once."""
    found: dict[int, torch.Tensor] = {}

    def collect(tensor: Any) -> Any:
        found.update((id(part), part) for part in parts_of(tensor))
        return tensor

    minibatch.each(collect)
    return list(found.values())


def _rounded(n_bytes: int) -> int:
    """The next power of two, to which torch rounds page-locked memory."""
    return 1 << max(0, n_bytes - 1).bit_length()


def _places(tensors: list[torch.Tensor]) -> list[int]:
    """The first byte of each tensor in a block, and the end of the block."""
    sizes = (-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)
    return list(itertools.accumulate(sizes, initial=0))


def _unpacked(
    minibatch: Minibatch, at: dict[int, tuple[int, int]], delivery: Delivery, copies: list[torch.Tensor]
) -> Minibatch:
    """The minibatch with its tensors in copies, where tensor `t` begins at byte `at[id(t)][1]` of `at[id(t)][0]`."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        copy, first = at[id(tensor)]
        if copies[copy].dtype != tensor.dtype or copies[copy].shape != tensor.shape:
            return copies[copy][first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copies[copy]

    x_parts = {id(part) for x in _x_of(minibatch) for part in (x.values() if isinstance(x, dict) else [x])}

    def moved(tensor: Any) -> Any:
        if id(tensor) not in x_parts:
            return placed(tensor)
        return delivery.finished(tensor.each(placed) if isinstance(tensor, PackedRows) else placed(tensor))

    return minibatch.each(moved)


# ---- options


def usable_device(device: Any, layout: str) -> str | Device | None:
    """A loader's `device` as a string, or None for minibatches in the memory of the host.

    Raises OptionError if it is not available, or cannot hold the layout. Tests give a Device of their own.
    """
    if device is not None and layout == "scipy":
        raise OptionError("layout='scipy' has no tensors, so leave device out, or take layout 'csr' or 'dense'")
    if device is None or isinstance(device, Device):
        return device
    available = ["cpu", *(f"{kind}:{index}" for kind in _TYPES for index in range(_count(kind)))]
    try:
        wanted = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        wanted = None
    if wanted is None or (wanted.type != "cpu" and f"{wanted.type}:{wanted.index or 0}" not in available):
        raise OptionError(f"device={device!r:.100} is not available. Available: {', '.join(available)}")
    return None if wanted.type == "cpu" else str(wanted)


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
