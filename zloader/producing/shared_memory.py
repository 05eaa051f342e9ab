"""Memory that processes of this machine share: values that one process puts there, and another reads without a copy.

A value is a pickle, and the arrays of which it refers to lie beside it (pickle protocol 5). The memory is a file that
has no name, so it goes when the last process that has it open ends, however that happens. It is not in /dev/shm, whose
size containers limit.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import mmap
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import ProducerError

_ALIGNED = 64  # bytes, as compiled loops like their arrays
_PAGE = mmap.PAGESIZE
_INLINE = -1  # instead of the number of a slot: a part that lies beside the pickle
_PLACE = 24  # bytes: a slot, the first byte, and the length


class Packed:
    """A value as a pickle and the memory of its arrays. Those that lie in `slots` are only referred to."""

    def __init__(self, value: Any, slots: Slots | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = io.BytesIO()
        _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
        self._inline: list[memoryview] = []
        places: list[tuple[int, int, int]] = []
        for part in [text.getbuffer(), *(buffer.raw() for buffer in buffers)]:
            place = None if slots is None else slots.place_of(part)
            if place is None:
                self._inline.append(part)
            places.append(place or (_INLINE, 0, part.nbytes))
        self.referred = [number for number, *_ in places if number != _INLINE]
        self._head = np.array([len(places), 0, 0, *itertools.chain(*places)], np.int64)
        self.nbytes = _padded(self._head.nbytes) + sum(_padded(part.nbytes) for part in self._inline)

    def write(self, memory: NDArray[np.uint8]) -> None:
        """Puts the value at the beginning of the memory."""
        memory[: self._head.nbytes] = self._head.view(np.uint8)
        at = _padded(self._head.nbytes)
        for part in self._inline:
            memory[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
            at += _padded(part.nbytes)


def unpacked(memory: NDArray[np.uint8], leased: Callable[[int, int, int], NDArray[np.uint8]] | None = None) -> Any:
    """The value at the beginning of the memory. Its arrays lie there, and are writable if the memory is.

    `leased` returns the memory of those that lie in other slots: the slot, the first byte, and how many.
    """
    n_parts = int(memory[:8].view(np.int64)[0])
    places = memory[_PLACE : (1 + n_parts) * _PLACE].view(np.int64).reshape(-1, 3).tolist()
    parts: list[Any] = []
    at = _padded((1 + n_parts) * _PLACE)
    for number, first, length in places:
        if number == _INLINE:
            parts.append(memory[at : at + length])
            at += _padded(length)
        else:
            assert leased is not None
            parts.append(leased(number, first, length))
    return pickle.loads(parts[0], buffers=parts[1:])


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNED) * _ALIGNED


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Own functions go by value, and tensors as arrays."""

    def reducer_override(self, value: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return super().reducer_override(value)
        if value.device.type != "cpu" or value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        if value.layout == torch.sparse_csr:  # torch keeps every one that it unpickles itself
            return _sparse_csr, (value.crow_indices(), value.col_indices(), value.values(), tuple(value.shape))
        if value.layout != torch.strided:
            return NotImplemented
        if value.dtype == torch.bfloat16:
            return _bfloat16, (value.contiguous().view(torch.int16).numpy(),)
        return torch.from_numpy, (value.contiguous().numpy(),)


def _sparse_csr(indptr: Any, indices: Any, values: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.sparse_csr_tensor(indptr, indices, values, size=shape, check_invariants=False)


def _bfloat16(bits: NDArray[np.int16]) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


class Memory:
    """Memory under a file descriptor, mapped into this process. `close` closes the descriptor, and the map stays."""

    def __init__(self, fd: int, n_bytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        self.fd, self.n_bytes = fd, n_bytes
        self.close = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, n_bytes, access=access)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def made(cls, n_bytes: int) -> Memory:
        """New memory. Raises ProducerError if the machine has no more."""
        size = -(-n_bytes // _PAGE) * _PAGE
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("zloader", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, size)  # it has no pages yet
            return cls(fd, size)
        except OSError as error:
            os.close(fd)
            raise _full(size, error) from error

    def fill(self, first: int, n_bytes: int) -> None:
        """Makes sure that there are pages: one that is missing later would be SIGBUS. Raises ProducerError."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, first, n_bytes)
            except OSError as error:
                raise _full(n_bytes, error) from error

    @classmethod
    def of_value(cls, value: Any) -> Memory:
        """Memory that holds a value, for processes that get the descriptor."""
        packed = Packed(value)
        memory = cls.made(packed.nbytes)
        memory.fill(0, packed.nbytes)
        packed.write(memory.bytes)
        return memory

    def forget(self, first: int, n_bytes: int) -> None:
        """Gives pages back to the machine, where that is possible. They read as zeros then."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, first, n_bytes)


def _full(n_bytes: int, error: OSError) -> ProducerError:
    return ProducerError(
        f"there are no {n_bytes} bytes of shared memory for the next minibatches ({error}): lower "
        "FetchOptions.memory, processes or batch_size"
    )


def value_of(fd: int, n_bytes: int) -> Any:
    """The value that another process has put into memory. Arrays are copied when they are written to. Closes `fd`."""
    memory = Memory(fd, n_bytes, mmap.ACCESS_COPY)
    memory.close()
    return unpacked(memory.bytes)


# ---- slots: parts of memory for arrays and groups of minibatches, which are used again

_MOST_SLOTS = 1 << 20  # the bytes at the beginning say of each slot whether it is busy: its reader clears that
_LEAST_SHARED = 4096  # bytes; smaller arrays are copied


def range_for_slots() -> Memory:
    """An address range that is larger than the machine's memory. Pages come as slots are made."""
    return Memory.made(_MOST_SLOTS + 2 * os.sysconf("SC_PHYS_PAGES") * _PAGE)


class Slots:
    """The slots of a process that makes minibatches. Thread-safe.

    A slot is busy from the time it is taken until the reader of what was sent has dropped the last array in it, or
    until it is dropped here without having been sent.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._base = memory.bytes.ctypes.data
        self._firsts: list[int] = [_MOST_SLOTS]  # of each slot, and of the next one
        self._lent: dict[int, weakref.finalize[Any, Any]] = {}
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> int:
        """The number of a slot that nobody reads, which is busy from now on. Raises ProducerError."""
        with self._lock:
            busy, sizes = self._memory.bytes[: len(self._firsts) - 1], np.diff(self._firsts)
            fitting = np.flatnonzero((busy == 0) & (sizes >= n_bytes) & (sizes <= 2 * n_bytes + _LEAST_SHARED))
            if len(fitting):
                number = int(fitting[np.argmin(sizes[fitting])])
            else:
                number, first, size = len(sizes), self._firsts[-1], _rounded(n_bytes)
                if number == _MOST_SLOTS or first + size > self._memory.n_bytes:
                    raise _full(n_bytes, OSError("too many minibatches are kept"))
                self._memory.fill(first, size)
                self._firsts.append(first + size)
            self._memory.bytes[number] = 1
            return number

    def empty(self, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array with arbitrary contents, in a slot of its own unless it is small."""
        n_bytes = length * np.dtype(dtype).itemsize
        if n_bytes < _LEAST_SHARED:
            return np.empty(length, dtype)
        number = self.take(n_bytes)
        lease = _Lease(self._memory, number, self._firsts[number], n_bytes)
        self._lent[number] = lease.end
        return np.asarray(lease).view(dtype)

    def place_of(self, part: memoryview) -> tuple[int, int, int] | None:
        """The slot in which a part lies, its first byte, and its bytes; None if it lies elsewhere."""
        first = np.frombuffer(part, np.uint8).ctypes.data - self._base if part.nbytes else 0
        if not _MOST_SLOTS <= first < self._firsts[-1]:
            return None
        return bisect.bisect_right(self._firsts, first) - 1, first, part.nbytes

    def put(self, packed: Packed) -> tuple[int, int, int]:
        """Puts a value into a slot, and returns its number, first byte and bytes. They belong to the reader now."""
        number = self.take(packed.nbytes)
        first = self._firsts[number]
        packed.write(self._memory.bytes[first : first + packed.nbytes])
        for each in packed.referred:
            self._lent[each].detach()
        return number, first, packed.nbytes

    def forget_free(self, most_bytes: int) -> None:
        """Gives the pages of free slots beyond so many bytes back to the machine."""
        with self._lock:
            for number, (first, after) in enumerate(itertools.pairwise(self._firsts)):
                if not self._memory.bytes[number]:
                    most_bytes -= after - first
                    if most_bytes < 0:
                        self._memory.forget(first, after - first)


def _rounded(n_bytes: int) -> int:
    """An eighth more at most, so that slots fit arrays of similar sizes."""
    step = max(_PAGE, 1 << max(0, n_bytes.bit_length() - 4))
    return -(-n_bytes // step) * step


def read(memory: Memory, number: int, first: int, n_bytes: int) -> Any:
    """The value that was put into a slot. Slots are free again when nothing refers to arrays in them any more."""

    def leased(number: int, first: int, n_bytes: int) -> NDArray[np.uint8]:
        return np.asarray(_Lease(memory, number, first, n_bytes))

    return unpacked(leased(number, first, n_bytes), leased)


class _Lease:
    """Bytes of a slot, as the base of all arrays in them. The slot is free when it is dropped."""

    def __init__(self, memory: Memory, number: int, first: int, n_bytes: int) -> None:
        self._memory = memory  # keeps it mapped
        self.end = weakref.finalize(self, memory.bytes.__setitem__, number, 0)
        self.end.atexit = False
        self.__array_interface__ = memory.bytes[first : first + n_bytes].__array_interface__
        _leases.add(self)

    def keep(self) -> None:
        """Lets the slot be busy for ever."""
        self.end.detach()


_leases: weakref.WeakSet[_Lease] = weakref.WeakSet()


def _keep_all() -> None:
    """Before a fork: either process may read the minibatches that there are longer than the other."""
    for lease in list(_leases):
        lease.keep()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_all)
