"""The mirror of one matrix: a file of blocks of rows, raw or coded, and an index that says which blocks are there.

    NAME.rows    blocks of rows (storage/row_blocks.py), in the order in which they were written
    NAME.index   eleven 64-bit words that describe the rows, and then two words for each block

The first word of a block is its first byte in NAME.rows. The second is 0 while the block is absent, a lease (leases.py)
while some process is reading it from the store, and else its size and its crc32c. It is stored after the bytes of the
block and the first word, in one aligned write. So a process killed at any moment leaves each block complete or absent.

A process compares a block with its checksum when it first uses it, unless the files have not changed since all blocks
were verified (directory.py). After power loss, truncation or a flipped byte, the block is a miss, and is read from the
store and written again. Any number of processes fill and read a file at once: each appends to room of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.directory import MirrorDirectory, cached_path, draft_path, opened, qualified_name
from zloader.caching.leases import LEASED, Leases
from zloader.common import page_cache
from zloader.common.file_systems import close_with
from zloader.common.locks import forkable_lock
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import distinct
from zloader.storage.row_blocks import KeptRows, RowForm, bounds_of, places_of

log = logging.getLogger("zloader")

_MAGIC = int.from_bytes(b"zrows-2\0", "little")
_HEADER = 11  # words
_ALIGNED = 64  # blocks that are written together begin at a multiple of it
_UNIT = 8  # bytes, in which the size of a block is stored
_WINDOW = 1 << 17  # blocks looked at at a time
_MANY_BLOCKS = 1 << 20  # their words take 16 MiB
# Longer writes get huge pages, which a virtual machine may have to ask its host for: three times the processor time.
_WRITE_BYTES = 1 << 20
_LARGE_FILE, _MOST_MAPPED = 8 << 30, 256 << 20
_ROWS_OF_WHOLE = 8  # rows of a block, on average, for which all of it is prefetched


@dataclass(frozen=True, kw_only=True)
class Held:
    """How much of some matrices or arrays is in a mirror, in blocks of rows and in bytes."""

    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int

    @classmethod
    def of(cls, words: Iterable[NDArray[np.uint64]], n_blocks: int, decoded_bytes: int) -> Held:
        """How much there is, given the words of blocks. The bytes of all are estimated from it, if there is any."""
        sizes = [sizes_in(each[is_present(each)]) for each in words]
        held, n_bytes = sum(map(len, sizes)), sum(int(each.sum()) for each in sizes)
        in_all = n_bytes * n_blocks // held if held else decoded_bytes
        return cls(chunks=n_blocks, chunks_held=held, bytes_in_all=in_all, bytes_held=n_bytes)

    @staticmethod
    def sums(parts: Iterable[Held]) -> dict[str, int]:
        """The fields of some together."""
        parts = list(parts)
        return {each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Held)}

    @property
    def share(self) -> float:
        """The share of the bytes that the mirror holds, from 0 to 1."""
        return self.bytes_held / self.bytes_in_all if self.bytes_in_all else 1.0


class RowsFile:
    """The rows of one matrix in the mirror, as `form` describes them.

    Rows of the same matrix that were kept in the other form stay in that, and the next ones join them. Raises OSError
    if the files cannot be created or opened.
    """

    def __init__(self, directory: MirrorDirectory, form: RowForm) -> None:
        self._directory = directory
        self._path, self._index_path = (cached_path(directory.path, form.name, suffix) for suffix in ("rows", "index"))
        self._file, words, self.form = _open(directory, self._path, self._index_path, form)
        self._offsets, self._words = words[0::2], words[1::2]
        close_with(self, self._file)
        self._content, self._mapped_bytes = np.empty(0, np.uint8), 0
        self._lock = forkable_lock()  # threads that wait for the file system would do so busily
        verified = directory.verified.contains(self._path, self._index_path)
        # Blocks that this process has verified or written, or that were recorded as verified.
        self._verified = np.zeros(form.n_blocks, bool)  # takes no memory until it is written to
        if verified:
            for first, present in self._present_windows():
                self._verified[first : first + len(present)] = present
        self._unrecorded = not verified
        self.writable = self._words.flags.writeable

    # ---- what is there

    def blocks(self, rows: Rows) -> Rows:
        """The blocks of some rows, ascending."""
        return distinct(rows // self.form.block_rows)

    def _present(self, blocks: Rows | slice) -> NDArray[np.bool_]:
        return is_present(self._words[blocks])

    def _present_windows(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Which blocks are present, in windows, each with its first block. There may be 60 million.

        Windows without any are left out. So an almost empty mirror takes hardly any memory here.
        """
        for first in range(0, self.form.n_blocks, _WINDOW):
            present = self._present(slice(first, first + _WINDOW))
            if present.any():
                yield first, present
            page_cache.release(self._words)

    def contains(self, blocks: Rows) -> bool:
        """Whether all blocks are present and verified already. Does not read their bytes."""
        # Another process may have discarded a block.
        return bool((self._verified[blocks] & self._present(blocks)).all())

    def absent(self, blocks: Rows) -> Rows:
        """The blocks that are absent. Verifies nothing."""
        return np.asarray(blocks[~self._present(blocks)])

    def has_unverified(self, blocks: Rows) -> bool:
        """Whether any block is present but not verified yet, so that `missing` would read its bytes."""
        return bool((self._present(blocks) & ~self._verified[blocks]).any())

    def missing(self, blocks: Rows) -> Rows:
        """The blocks that are absent or damaged, in the order given; verifies checksums on first use."""
        words = self._words[blocks]
        missing = ~is_present(words)
        unverified = np.flatnonzero(~missing & ~self._verified[blocks])
        if len(unverified):
            words = words[unverified]
            starts, stops = self._bounds(blocks[unverified])
            content = self._mapped(stops, int((stops - starts).sum()))
            checked = zip(unverified.tolist(), words.tolist(), starts.tolist(), stops.tolist(), strict=True)
            for position, word, start, stop in checked:
                block = int(blocks[position])
                missing[position] = word != word_of(content[start:stop])
                self._verified[block] = not missing[position]
                if missing[position] and self._words[block] == word:  # no other process has replaced it meanwhile
                    log.warning("a block in %s differs from its checksum; reading it from the store", self._path)
                    if self.writable:
                        self._words[block] = 0
        if self.form.n_blocks > _MANY_BLOCKS:  # a fetch uses words all over the file
            page_cache.release(self._words)
        return np.asarray(blocks[missing])

    def record_verified(self) -> None:
        """Records the files as verified, if this process has verified or written every present block."""
        if not self._unrecorded or not os.fstat(self._file).st_nlink:  # deleted: others may be at its path
            return
        if all(self._verified[first : first + len(held)][held].all() for first, held in self._present_windows()):
            self._directory.verified.record([self._path, self._index_path])
            self._unrecorded = False

    @property
    def held(self) -> Held:
        """How much of the matrix is present."""
        words = (self._words[first : first + len(present)] for first, present in self._present_windows())
        return Held.of(words, self.form.n_blocks, self.form.decoded_bytes)

    def bytes_of(self, blocks: Rows) -> int:
        """Bytes of some present blocks."""
        return int(sizes_in(self._words[blocks]).sum())

    # ---- rows

    def _bounds(self, blocks: Rows) -> tuple[Rows, Rows]:
        """The first byte of each present block, and the byte after its last."""
        starts = self._offsets[blocks].astype(np.int64)
        return starts, starts + sizes_in(self._words[blocks])

    def _mapped(self, stops: Rows, n_bytes: int) -> NDArray[np.uint8]:
        """The content of the file, of which so many bytes will be read, up to the largest of `stops`.

        Pages that have been read stay mapped, and each 2 MiB of the file that they lie in take 4 KiB for page tables,
        which are only given back with the map: 12 GB for a file of 6 TB. So a large file is mapped anew when they have
        become many. Arrays made before keep the old map.
        """
        content = self._content
        self._mapped_bytes += n_bytes
        many = self._mapped_bytes > _MOST_MAPPED and len(content) > _LARGE_FILE
        if many or (len(stops) and int(stops.max()) > len(content)):
            size = os.fstat(self._file).st_size // _UNIT * _UNIT
            memory = map_file(self._file, size, mmap.ACCESS_READ, mmap.MADV_RANDOM)
            content, self._mapped_bytes = np.frombuffer(memory, np.uint8), 0
            self._content = content
        return content

    def rows(self, rows: Rows) -> KeptRows:
        """Some rows of present blocks."""
        blocks, within = np.divmod(rows, self.form.block_rows)
        starts, stops = self._bounds(blocks)
        content = self._mapped(stops, 0)
        firsts = np.flatnonzero(np.diff(starts, prepend=-1))  # of the rows, the first one of each block
        few = len(firsts) * _ROWS_OF_WHOLE >= len(starts)
        # The kernel loads whole blocks, or their tables first, which say where the few rows are.
        until = starts + self.form.table_bytes if few else stops
        page_cache.prefetch(self._file, starts[firsts], until[firsts])
        found = places_of(self.form, content, starts, within)
        if few:
            page_cache.prefetch(self._file, *bounds_of(self.form, content, starts, stops, within))
        self._mapped(stops, int(found.lengths.sum()) * 2)
        return found

    # ---- filling

    def acquire(self, blocks: Rows, leases: Leases) -> tuple[Rows, Rows]:
        """Leases absent blocks (given in ascending order); returns those leased now, and those leased already.

        Both are empty once the mirror accepts no more blocks.
        """
        with leases.exclusive():
            words = self._words[blocks]
            absent = ~is_present(words)
            alive = absent & leases.alive(np.where(absent, words, np.uint64(0)))
            mine = blocks[absent & ~alive] if self.writable else blocks[:0]
            self._words[mine] = leases.word
        return mine, np.asarray(blocks[alive])

    def release(self, blocks: Rows, leases: Leases) -> None:
        """Releases the owner's leases on blocks. Blocks that have been written meanwhile stay present."""
        if leases.word:
            self._words[blocks[self._words[blocks] == leases.word]] = 0

    def put(self, blocks: Rows, ends: Rows, content: NDArray[np.uint8]) -> None:
        """Writes blocks that lie one after another in some memory, each up to its end, a multiple of 8.

        Those that do not fit on disk or into the limits of the cache are left out, and from then on all are.
        """
        starts = np.append(0, ends[:-1])[: len(ends)]
        with self._lock:
            n, offset = self._reserve(np.diff(ends, prepend=0)) if self.writable else (0, 0)
            if not n or not self._write(offset, content[: ends[n - 1]]):
                return
        pieces = zip(starts[:n].tolist(), ends[:n].tolist(), strict=True)
        words = np.array([word_of(content[start:end]) for start, end in pieces], np.uint64)
        self._offsets[blocks[:n]] = (offset + starts[:n]).astype(np.uint64)
        self._words[blocks[:n]] = words
        self._verified[blocks[:n]] = True

    def _reserve(self, sizes: Rows) -> tuple[int, int]:
        """Appends room for blocks to the file, and for no other process: how many of them fit, and where it begins."""
        try:
            with opened(self._path, os.O_RDWR) as file:  # a lock of its own, even in a fork
                fcntl.flock(file, fcntl.LOCK_EX)
                found, mine = os.fstat(file), os.fstat(self._file)
                if found.st_ino != mine.st_ino:
                    raise OSError("it was replaced")
                begin = -(-found.st_size // _ALIGNED) * _ALIGNED
                offsets = begin + np.append(0, np.cumsum(sizes))
                done = self._directory.space.allocate(file, begin, sizes.tolist())
                if os.fstat(file).st_size < offsets[done]:
                    os.ftruncate(file, int(offsets[done]))
        except OSError as error:
            self._stop_writing(error)
            return 0, 0
        if done < len(sizes):
            self.writable = False
            log.info("the mirror %s has reached the limits of its cache; the rest is read from the store", self._path)
        return done, begin

    def _write(self, offset: int, content: NDArray[Any]) -> bool:
        """Writes bytes to the file; returns whether that succeeded. After a failure (full disk), nothing is written."""
        left = content.data
        try:
            while left:
                written = os.pwrite(self._file, left[:_WRITE_BYTES], offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            self._stop_writing(error)
            return False
        self._unrecorded = True
        return True

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            log.warning("cannot write the mirror %s (%s); reading continues without filling it", self._path, error)


# ---- words


def word_of(content: NDArray[np.uint8]) -> int:
    """The word of a present block with this content."""
    return (len(content) // _UNIT) << 32 | checksum(content)


def is_present(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which words are of present blocks, as opposed to absent ones and leases."""
    return np.asarray((words != 0) & (words < LEASED))


def sizes_in(words: NDArray[np.uint64]) -> Rows:
    """The bytes of present blocks."""
    return (words >> np.uint64(32)).astype(np.int64) * _UNIT


def open_file(path: Path) -> int:
    """Opens a file for reading and writing; read-only if it cannot be opened for writing."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError:
        return os.open(path, os.O_RDONLY | flags)


def map_file(file: int, n_bytes: int, access: int, advice: int = mmap.MADV_NORMAL) -> mmap.mmap | bytes:
    """Memory-maps a file. An empty file, which cannot be mapped, gives b""."""
    if not n_bytes:
        return b""
    memory = mmap.mmap(file, n_bytes, access=access)
    memory.madvise(advice)
    return memory


# ---- the index


def _header(path: Path, form: RowForm) -> NDArray[np.uint64]:
    """What describes the rows, a hash of the qualified name, and a checksum of these."""
    kinds = [int.from_bytes(b"" if dtype is None else dtype.str.encode(), "little") for dtype in form.dtypes]
    words = np.array(
        [_MAGIC, form.n_rows, form.block_rows, *kinds, form.width, form.coded, 0, 0, form.decoded_bytes, 0], "<u8"
    )
    words[7:9] = np.frombuffer(hashlib.sha256(qualified_name(path)).digest(), "<u8", 2)
    words[-1] = checksum(words[:-1])
    return words


@dataclass(frozen=True, kw_only=True)
class RowsIndex:
    """An index file that is read in windows: the words of 60 million blocks take 1 GB."""

    n_blocks: int
    decoded_bytes: int
    file: int

    @classmethod
    def read(cls, path: Path, file: int) -> RowsIndex:
        """Raises ValueError with the reason if the file is not valid."""
        content = os.pread(file, 8 * _HEADER, 0)
        header = np.frombuffer(content[: len(content) // 8 * 8], "<u8")
        if not len(header) or header[0] != _MAGIC:
            raise ValueError("is from another version of zloader")
        if len(header) < _HEADER or header[-1] != checksum(header[:-1]):
            raise ValueError("differs from its checksum")
        if (header[7:9] != np.frombuffer(hashlib.sha256(qualified_name(path)).digest(), "<u8", 2)).any():
            raise ValueError("belongs to another matrix or mirror")
        n_blocks = -(-int(header[1]) // int(header[2]))
        size, found = 8 * (_HEADER + 2 * n_blocks), os.fstat(file).st_size
        if found != size:
            raise ValueError(f"has {found} bytes instead of {size}")
        return cls(n_blocks=n_blocks, decoded_bytes=int(header[9]), file=file)

    def windows(self) -> Iterator[tuple[int, Rows, NDArray[np.uint64]]]:
        """All blocks in windows: the first block, the first byte of each, and its word."""
        for first in range(0, self.n_blocks, _WINDOW):
            n = min(_WINDOW, self.n_blocks - first)
            content = os.pread(self.file, 16 * n, 8 * (_HEADER + 2 * first))
            if len(content) < 16 * n:
                raise OSError("a file of the mirror was truncated while it was read")
            offsets, words = np.frombuffer(content, "<u8").reshape(n, 2).T
            yield first, offsets.astype(np.int64), words

    def mark_absent(self, block: int, word: int) -> None:
        """Sets the word of a block to 0, unless another process has changed it since it was `word`."""
        at = 8 * (_HEADER + 2 * block + 1)
        if int.from_bytes(os.pread(self.file, 8, at), "little") == word:
            os.pwrite(self.file, bytes(8), at)


_Opened = tuple[int, NDArray[np.uint64], RowForm]  # a file of rows, the words of all blocks, and the form of the rows


def _open(directory: MirrorDirectory, path: Path, index_path: Path, form: RowForm) -> _Opened:
    """Opens the rows, and maps the words of all blocks into memory shared with every process.

    An index that is damaged, of other rows, or without rows is replaced, together with the rows. Processes that have
    both open go on with them. So that none has an old index with new rows, these are created last.
    """
    size = 8 * (_HEADER + 2 * -(-form.n_rows // form.block_rows))
    while (found := _opened(path, index_path, size, form)) is None:
        # So that no process maps a file that another one is about to replace.
        with opened(directory.path / "owners", os.O_RDWR | os.O_CREAT) as lock:
            with contextlib.suppress(OSError):  # this file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _opened(path, index_path, size, form)) is not None:  # written by another process meanwhile
                break
            _write_index(directory, index_path, path, _header(index_path, form), size)
    return found


def _opened(path: Path, index_path: Path, size: int, form: RowForm) -> _Opened | None:
    """Opens rows, raw or coded. None if they or their index are missing, or if it is not one of such rows."""
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        file = open_file(path)
        stack.callback(os.close, file)
        index = open_file(index_path)
        stack.callback(os.close, index)
        header = os.pread(index, 8 * _HEADER, 0)
        found = next((each for each in form.raw_and_coded if _header(index_path, each).tobytes() == header), None)
        if found is not None and os.fstat(index).st_size == size and os.fstat(file).st_nlink:
            access = mmap.ACCESS_WRITE if os.access(index_path, os.W_OK) else mmap.ACCESS_READ
            return os.dup(file), np.frombuffer(map_file(index, size, access), "<u8")[_HEADER:], found
    return None


def _write_index(
    directory: MirrorDirectory, path: Path, rows_path: Path, header: NDArray[np.uint64], size: int
) -> None:
    """Writes an index in which all blocks are absent, in place of an invalid one and of its rows."""
    if path.exists():
        log.warning("%s is damaged, of another array or without its rows: discarding all its blocks", path)
    with draft_path(path) as draft:
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            if not directory.space.allocate(file.fileno(), 0, [size]):
                raise OSError(f"{path} does not fit into the cache")
            file.write(header.tobytes())
            # A store to a hole on a full disk raises SIGBUS, so all blocks are allocated.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.write(bytes(size - header.nbytes))
        if not rows_path.is_symlink():  # a link is left alone, and refused when it is opened
            rows_path.unlink(missing_ok=True)  # whoever has it open goes on with it
        draft.replace(path)
    with opened(rows_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
        pass
