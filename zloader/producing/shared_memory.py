"""Memory that processes of this machine share: values that one process puts there, and another reads without a copy.

A value is a pickle, and the arrays of which it refers to lie beside it (pickle protocol 5). The memory is a file that
has no name, so it goes when the last process that has it open ends, however that happens. It is not in /dev/shm, whose
size containers limit.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import ProducerError

_ALIGNED = 64  # bytes, as JAX and compiled loops like their arrays
_PAGE = mmap.PAGESIZE
_LENGTH = np.dtype("<u8")


class Packed:
    """A value as a pickle and the memory of its arrays."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = io.BytesIO()
        _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
        self._parts = [text.getbuffer(), *(buffer.raw() for buffer in buffers)]
        lengths = [part.nbytes for part in self._parts]
        self._head = np.array([len(lengths), *lengths], _LENGTH)
        self.nbytes = self._head.nbytes + sum(map(_padded, lengths)) + _ALIGNED

    def write(self, memory: NDArray[np.uint8]) -> None:
        """Puts the value at the beginning of the memory."""
        memory[: self._head.nbytes] = self._head.view(np.uint8)
        at = _padded(self._head.nbytes)
        for part in self._parts:
            memory[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
            at += _padded(part.nbytes)


def unpacked(memory: NDArray[np.uint8]) -> Any:
    """The value at the beginning of the memory. Its arrays lie there, and are writable if the memory is."""
    n_parts = int(memory[: _LENGTH.itemsize].view(_LENGTH)[0])
    lengths = memory[_LENGTH.itemsize : (1 + n_parts) * _LENGTH.itemsize].view(_LENGTH).tolist()
    parts: list[Any] = []
    at = _padded((1 + n_parts) * _LENGTH.itemsize)
    for length in lengths:
        parts.append(memory[at : at + length])
        at += _padded(length)
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
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):  # a page that is missing later would be SIGBUS
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise ProducerError(
                f"there are no {size} bytes of shared memory for the next minibatches ({error}): lower "
                "FetchOptions.memory, processes or batch_size"
            ) from error
        return cls(fd, size)

    @classmethod
    def of_value(cls, value: Any) -> Memory:
        """Memory that holds a value, for processes that get the descriptor."""
        packed = Packed(value)
        memory = cls.made(packed.nbytes)
        packed.write(memory.bytes)
        return memory

    def forget(self, first: int) -> None:
        """Gives pages from byte `first` on back to the machine, where that is possible. They read as zeros then."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, first, self.n_bytes - first)


def value_of(fd: int, n_bytes: int) -> Any:
    """The value that another process has put into memory. Arrays are copied when they are written to. Closes `fd`."""
    memory = Memory(fd, n_bytes, mmap.ACCESS_COPY)
    memory.close()
    return unpacked(memory.bytes)


# ---- slots: memory for groups of minibatches, which is used again

_BUSY = 0  # the byte that says whether somebody reads the slot: its writer sets it, and its reader clears it
_FIRST = _PAGE  # where the value begins: the page before stays when others are given back


class Slots:
    """The memory of a process that makes minibatches. Thread-safe if `take` is called by one thread at a time."""

    def __init__(self) -> None:
        self._slots: list[Memory] = []

    def take(self, packed: Packed) -> tuple[int, Memory]:
        """Puts a value into a slot that nobody reads, and returns the slot and its number."""
        n_bytes = _FIRST + packed.nbytes
        free = [(slot.n_bytes, number) for number, slot in enumerate(self._slots) if not slot.bytes[_BUSY]]
        number = min((number for size, number in free if size >= n_bytes), default=None, key=self._size)
        if number is None:
            number = len(self._slots)
            self._slots.append(Memory.made(_FIRST + _rounded(packed.nbytes)))
        slot = self._slots[number]
        packed.write(slot.bytes[_FIRST:])
        slot.bytes[_BUSY] = 1
        return number, slot

    def _size(self, number: int) -> int:
        return self._slots[number].n_bytes

    def forget_free(self) -> None:
        """Gives the pages of free slots back to the machine."""
        for slot in self._slots:
            if not slot.bytes[_BUSY]:
                slot.forget(_FIRST)


def _rounded(n_bytes: int) -> int:
    """An eighth more at most, so that slots fit values of similar sizes."""
    step = max(_PAGE, 1 << max(0, n_bytes.bit_length() - 4))
    return -(-n_bytes // step) * step


def leased(slot: Memory) -> Any:
    """The value in a slot. The slot is free again when nothing refers to the memory of its arrays any more."""
    return unpacked(np.asarray(_Lease(slot))[_FIRST:])


def copied(slot: Memory) -> Any:
    """The value in a slot, in memory of its own. The slot is free again."""
    value = unpacked(slot.bytes[_FIRST:].copy())
    release(slot)
    return value


def is_busy(slot: Memory) -> bool:
    """Whether somebody reads a slot."""
    return bool(slot.bytes[_BUSY])


def release(slot: Memory) -> None:
    """Says that nobody reads a slot."""
    slot.bytes[_BUSY] = 0


class _Lease:
    """The memory of a slot, as the base of all arrays in it."""

    def __init__(self, slot: Memory) -> None:
        self._slot = slot  # keeps the memory
        self._end = weakref.finalize(self, release, slot)
        self._end.atexit = False
        self.__array_interface__ = slot.bytes.__array_interface__
        _leases.add(self)

    def keep(self) -> None:
        """Lets the slot be busy for ever."""
        self._end.detach()


_leases: weakref.WeakSet[_Lease] = weakref.WeakSet()


def _keep_all() -> None:
    """Before a fork: either process may read the minibatches that there are longer than the other."""
    for lease in list(_leases):
        lease.keep()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_all)
