"""Sends the minibatches of an epoch to a device, on a thread of its own.

Minibatches are gathered in the narrow form of reading/forms.py, so that few bytes cross the bus. The genes and values
are gathered straight into page-locked memory that is lent by this module. All smaller tensors of a minibatch are laid
out one after another in a block of such memory, and cross the bus with one copy. On the device x takes its layout. No
lent memory and no block is filled again before the copy from it is done.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from zloader.common.records import MinibatchArrays, Rows
from zloader.reading.bridge import Bridge, Channel
from zloader.training.arrays import PackedRows
from zloader.training.devices import Device, Sent, parts_of
from zloader.training.minibatch import Minibatch

_BLOCKS = 4  # of staging memory; with fewer, the thread would wait for copies
_LEAST_LENT = 4096  # bytes; smaller arrays share a copy
# Bytes from which other tensors cross the bus alone. Smaller ones share memory on the device, and one of them that is
# kept, such as labels, keeps the others.
_LEAST_ALONE = 65_536
_MOST_AHEAD = 8  # minibatches, beyond which more do not help
_ALIGNED = 64  # bytes; more than any dtype needs


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
    """The minibatch of the rows `index`, on its way."""

    index: Rows
    sent: Sent

    def taken(self) -> Minibatch:
        """The minibatch. Called at most once."""
        return self.sent.take()


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
                await put([Delivered(arrays.index, sending.send(minibatch, arrays))], n_bytes)

    return Bridge(produce, ready_bytes=ahead_bytes, name="zloader-device", source=host)


@dataclass(frozen=True)
class _InUse:
    """Staging memory from which a copy runs: a block, and arrays that may be in lent memory."""

    block: torch.Tensor
    arrays: MinibatchArrays
    copied: Callable[[], object]


class _Sending:
    """Sends minibatches, and keeps staging memory from being filled again before the copy from it is done."""

    def __init__(self, lent: LentMemory, delivery: Delivery) -> None:
        self._lent = lent
        self._delivery = delivery
        self._in_use: deque[_InUse] = deque()

    def send(self, minibatch: Minibatch, arrays: MinibatchArrays) -> Sent:
        """Sends a minibatch whose tensors share the memory of `arrays`."""
        tensors = _tensors_of(minibatch)
        held = self._lent.held(tensors)
        lent = list(itertools.compress(tensors, held))
        others = sorted((tensor for tensor, is_held in zip(tensors, held, strict=True) if not is_held), key=_nbytes)
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
        self._in_use.append(_InUse(block, arrays, sent.copied))
        return sent

    def _block(self, n_bytes: int) -> torch.Tensor:
        """A block to be filled, after the copies from it and from the lent memory of that minibatch are done."""
        if len(self._in_use) == _BLOCKS:
            earliest = self._in_use.popleft()
            earliest.copied()
            if earliest.block.nbytes >= n_bytes:
                return earliest.block
        return self._lent.device.staging(_rounded(n_bytes))

    def close(self) -> None:
        """Waits for all copies, because a taken minibatch may still need one."""
        while self._in_use:
            self._in_use.popleft().copied()


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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


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
