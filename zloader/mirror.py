"""The local mirror: decoded arrays as flat files, filled chunk by chunk.

Element i of an array stands at byte i * itemsize of a sparse file NAME.flat. Beside it, NAME.sums holds one 64-bit word
a chunk: 0 while the chunk is not there, else its crc32c with a bit above it. The word is stored after the chunk's
bytes, in one aligned write, so a process killed at any moment leaves a chunk either whole or not there. A process
compares every chunk with its checksum when it first uses it: after power loss, truncation or a flipped byte the chunk
is a miss, to be read again.

The directory is named after the fingerprint of the dataset: changed objects have another mirror. Several processes may
fill and read one mirror at once, since all write the same bytes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from zloader.decode import checksum
from zloader.layout import ArrayLayout
from zloader.terms import Rows

log = logging.getLogger("zloader")

_PRESENT = 1 << 32  # set in every word of a chunk that is there, so that a checksum of 0 is told from absence
_VERSION = 1  # of the files' format; part of the directory's name
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory holds mirrors made by zloader.\n"


def mirror_directory(cache: Path, fingerprint: str) -> Path:
    """Where the mirror of a dataset lies below a cache directory; made, with mode 0700, where it does not exist.

    Raises OSError where that is not possible.
    """
    directory = cache / f"{fingerprint}-v{_VERSION}"
    if not cache.exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / "CACHEDIR.TAG").write_text(_TAG)  # https://bford.info/cachedir: backups leave it out
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


class MirrorArray:
    """The mirror of one array. Raises OSError when its files cannot be made or opened."""

    def __init__(self, directory: Path, layout: ArrayLayout) -> None:
        self.layout = layout
        self._path = _file_of(directory, layout.path, "flat")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        n_bytes = layout.n_elements * layout.dtype.itemsize
        if os.fstat(self._file).st_size != n_bytes:
            os.truncate(self._file, n_bytes)
        self.elements = np.frombuffer(_mapped(self._file, n_bytes, mmap.ACCESS_READ), layout.dtype)
        self._words = _mapped_words(_file_of(directory, layout.path, "sums"), layout.n_chunks)
        # Chunks whose checksum this process has compared or written itself.
        self._trusted = np.zeros(layout.n_chunks, bool)
        self.writable = True

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def holds(self, chunks: Rows) -> bool:
        """Whether all chunks are there and known to be right, without looking at their bytes."""
        return bool(self._trusted[chunks].all())

    def unproved(self, chunks: Rows) -> bool:
        """Whether there are chunks among them whose bytes `missing` would have to look at."""
        return bool(((self._words[chunks] != 0) & ~self._trusted[chunks]).any())

    def missing(self, chunks: Rows) -> Rows:
        """Those of `chunks` that are not there or not what was written; compares checksums on first use."""
        missing = self._words[chunks] == 0
        for position in np.flatnonzero(~missing & ~self._trusted[chunks]).tolist():
            chunk = int(chunks[position])
            if self._words[chunk] == _PRESENT | checksum(self._chunk(chunk)):
                self._trusted[chunk] = True
            else:
                log.warning("a chunk in %s differs from its checksum: it is read again from the store", self._path)
                self._words[chunk] = 0
                missing[position] = True
        return np.asarray(chunks[missing])

    def _chunk(self, chunk: int) -> NDArray[Any]:
        first = chunk * self.layout.chunk_elements
        return self.elements[first : first + self.layout.chunk_elements]

    def copy(self, chunks: Rows, slots: Sequence[NDArray[Any]]) -> None:
        """Copies chunks that are there, or the first elements of each, to where each belongs."""
        for chunk, slot in zip(chunks.tolist(), slots, strict=True):
            slot[:] = self._chunk(chunk)[: len(slot)]

    def put(self, first: int, elements: NDArray[Any]) -> None:
        """Writes decoded chunks, `first` and those that follow it; after a failure (a full disk, say) keeps no more."""
        if not self.writable:
            return
        width = self.layout.chunk_elements
        try:
            _write_all(self._file, elements, first * width * self.layout.dtype.itemsize)
        except OSError as error:
            self.writable = False
            log.warning("cannot write the mirror %s (%s): reading goes on without filling it", self._path, error)
            return
        for chunk, begin in enumerate(range(0, len(elements), width), first):
            self._words[chunk] = _PRESENT | checksum(elements[begin : begin + width])
            self._trusted[chunk] = True


def _file_of(directory: Path, name: str, suffix: str) -> Path:
    """Where something of an array is kept; the name comes from the store and never leads out of the directory."""
    return directory / f"{quote(name, safe='')}.{suffix}"


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A name of this thread's own beside `path`, to be moved there when it is whole; gone afterwards."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.draft")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _mapped_words(path: Path, n_chunks: int) -> NDArray[np.uint64]:
    """The words of all chunks, shared with every process that maps them; a file of another size counts for nothing."""
    n_bytes = 8 * n_chunks
    if not path.exists() or path.stat().st_size != n_bytes:
        with _draft(path) as draft:
            with draft.open("wb") as file:
                if n_bytes:
                    os.posix_fallocate(file.fileno(), 0, n_bytes)  # storing to a hole of a full disk kills a process
            draft.chmod(0o600)
            try:
                if path.exists():  # of another size: nothing in it counts
                    draft.replace(path)
                else:
                    path.hardlink_to(draft)
            except FileExistsError:
                pass  # another process was first: its file is as good
            except OSError:  # no hard links on this file system
                draft.replace(path)
    with path.open("r+b") as file:
        return np.frombuffer(_mapped(file.fileno(), n_bytes, mmap.ACCESS_WRITE), np.uint64)


def _mapped(file: int, n_bytes: int, access: int) -> mmap.mmap | bytes:
    return mmap.mmap(file, n_bytes, access=access) if n_bytes else b""


def _write_all(file: int, elements: NDArray[Any], offset: int) -> None:
    left = elements.view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


class Mirror:
    """The mirror of some arrays of one dataset, below a cache directory."""

    def __init__(self, directory: Path, arrays: Sequence[ArrayLayout]) -> None:
        self.arrays = {layout.path: MirrorArray(directory, layout) for layout in arrays}


def open_mirror(cache: Path, fingerprint: str, arrays: Sequence[ArrayLayout]) -> Mirror | None:
    """The mirror of a dataset, or None, with a warning, where the directory cannot be used."""
    try:
        return Mirror(mirror_directory(cache, fingerprint), arrays)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", cache, error)
        return None


def load_column(directory: Path, name: str) -> NDArray[Any] | None:
    """A whole array kept by `save_column`, memory-mapped and read-only, or None where there is none to trust."""
    path = _file_of(directory, name, "npy")
    try:
        content = np.memmap(path, np.uint8, mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: an empty file
        log.warning("cannot use %s (%s): it is read again from the store", path, error)
        return None
    if len(content) < 4 or checksum(content[:-4]) != int.from_bytes(content[-4:].tobytes(), "little"):
        log.warning("%s differs from its checksum: it is read again from the store", path)
        return None
    return np.asarray(np.load(path, mmap_mode="r"))


def save_column(directory: Path, name: str, column: NDArray[Any]) -> None:
    """Keeps a whole array as an .npy file with the crc32c of it all behind; appears at once or not at all."""
    path = _file_of(directory, name, "npy")
    try:
        with _draft(path) as draft:
            with draft.open("wb") as file:
                np.save(file, column)
            content = np.memmap(draft, np.uint8, mode="r")
            with draft.open("ab") as file:
                file.write(checksum(content).to_bytes(4, "little"))
            draft.replace(path)
    except OSError as error:
        log.warning("cannot keep %s in the mirror (%s)", name, error)
