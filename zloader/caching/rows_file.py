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
import errno
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Collection, Iterator, Sequence
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
from zloader.storage.layout import MatrixLayout, distinct
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
    def of(cls, blocks: NDArray[np.uint64], decoded_bytes: int) -> Held:
        """How much there is, given the words of all blocks. The bytes of all are estimated from it, if there is any."""
        sizes = [sizes_in(words[is_present(words)]) for _, words in windows(blocks)]
        held, n_bytes = sum(map(len, sizes)), sum(int(each.sum()) for each in sizes)
        in_all = n_bytes * len(blocks) // held if held else decoded_bytes
        return cls(chunks=len(blocks), chunks_held=held, bytes_in_all=in_all, bytes_held=n_bytes)

    @staticmethod
    def sums(parts: Collection[Held]) -> dict[str, int]:
        """The fields of some together."""
        return {each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Held)}

    @property
    def share(self) -> float:
        """The share of the bytes that the mirror holds, from 0 to 1."""
        return self.bytes_held / self.bytes_in_all if self.bytes_in_all else 1.0


@dataclass(frozen=True, kw_only=True)
class CacheStatistics(Held):
    """How much of a matrix is in the cache; returned by `Dataset.cache_statistics`.

    Attributes:
        directory: Directory of the mirror.
        chunks, chunks_held: Blocks of rows of the matrix, and how many of them are cached.
        bytes_in_all, bytes_held: Bytes of all blocks, estimated from those that are cached, and bytes of these.
        allocated_bytes: Disk space of all mirrors in the cache, in bytes.
        max_bytes: Limit for `allocated_bytes`; None means no limit.
        full: Whether the cache has stopped accepting blocks.

    >>> for minibatch in zl.Loader(dataset):  # one epoch fills the mirror
    ...     pass
    >>> statistics = dataset.cache_statistics()
    >>> statistics.share, statistics.full
    (1.0, False)
    """

    directory: Path
    allocated_bytes: int
    max_bytes: int | None
    full: bool


def contents_of(files: Sequence[RowsFile]) -> dict[str, Any]:
    """The fields of Held for some matrices together, and whether one of them accepts no more rows."""
    return Held.sums([file.held for file in files]) | {"full": not all(file.writable for file in files)}


class RowsFile:
    """The rows of one matrix in the mirror, as `form` describes them.

    Rows of the same matrix that were kept in the other form stay in that, and the next ones join them. Raises OSError
    if the files cannot be created or opened.
    """

    def __init__(self, directory: MirrorDirectory, form: RowForm) -> None:
        self._directory = directory
        self._path, self._index_path = (cached_path(directory.path, form.name, suffix) for suffix in ("rows", "index"))
        self._file, self._index, self.form = _open(directory, self._path, self._index_path, form)
        self._offsets, self._words = self._index.T
        close_with(self, self._file)
        self._content, self._mapped_bytes = np.empty(0, np.uint8), 0
        self._lock = forkable_lock()  # threads that wait for the file system would do so busily
        verified = directory.verified.contains(self._path, self._index_path)
        # Blocks that this process has verified or written, or that were recorded as verified.
        self._verified = np.zeros(form.n_blocks, bool)  # takes no memory until it is written to
        if verified:
            for first, words in windows(self._index):
                self._verified[first : first + len(words)] = is_present(words)
        self._unrecorded = not verified
        self.writable = self._words.flags.writeable

    # ---- what is there

    def blocks(self, rows: Rows) -> Rows:
        """The blocks of some rows, ascending."""
        return distinct(rows // self.form.block_rows)

    def _present(self, blocks: Rows) -> NDArray[np.bool_]:
        return is_present(self._words[blocks])

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
            page_cache.release(self._index)
        return np.asarray(blocks[missing])

    def record_verified(self) -> None:
        """Records the files as verified, if this process has verified or written every present block."""
        if not self._unrecorded or not os.fstat(self._file).st_nlink:  # deleted: others may be at its path
            return
        present = ((first, is_present(words)) for first, words in windows(self._index))
        if all(self._verified[first : first + len(held)][held].all() for first, held in present):
            self._directory.verified.record([self._path, self._index_path])
            self._unrecorded = False

    @property
    def held(self) -> Held:
        """How much of the matrix is present."""
        return Held.of(self._index, self.form.decoded_bytes)

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
    words[7:9] = _name_words(path)
    words[-1] = checksum(words[:-1])
    return words


def _name_words(path: Path) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha256(qualified_name(path)).digest(), "<u8", 2)


def mapped_index(path: Path, file: int, access: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The header of an index, in which word 9 is the decoded bytes of all rows, and the two words of each block.

    Raises ValueError if the file is not an intact index of the matrix and the mirror that its path names.
    """
    size = os.fstat(file).st_size
    words = np.frombuffer(map_file(file, size // 8 * 8, access), "<u8")
    header = words[:_HEADER]
    if not (
        len(header) == _HEADER
        and header[0] == _MAGIC
        and header[-1] == checksum(header[:-1])
        and (header[7:9] == _name_words(path)).all()
        and size == 8 * (_HEADER + 2 * -(-int(header[1]) // int(header[2])))
    ):
        raise ValueError("is damaged, or from another version, matrix or mirror")
    return header, words[_HEADER:].reshape(-1, 2)


def windows(blocks: NDArray[np.uint64]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """The words of blocks in windows, each with its first block. Windows without blocks that are present are left out.

    There may be 60 million, whose words take 1 GB. An almost empty mirror takes hardly any memory here.
    """
    for first in range(0, len(blocks), _WINDOW):
        words = blocks[first : first + _WINDOW, 1]
        if is_present(words).any():
            yield first, words
        page_cache.release(blocks)


_Opened = tuple[int, NDArray[np.uint64], RowForm]  # a file of rows, the words of all blocks, and the form of the rows


def _open(directory: MirrorDirectory, path: Path, index_path: Path, form: RowForm) -> _Opened:
    """Opens the rows, and maps the words of all blocks into memory shared with every process.

    An index that is damaged, of other rows, or without rows is replaced, together with the rows. Processes that have
    both open go on with them. So that none has an old index with new rows, these are created last.
    """
    while (found := _opened(path, index_path, form)) is None:
        # So that no process maps a file that another one is about to replace.
        with opened(directory.path / "owners", os.O_RDWR | os.O_CREAT) as lock:
            with contextlib.suppress(OSError):  # this file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _opened(path, index_path, form)) is not None:  # written by another process meanwhile
                break
            _write_index(directory, index_path, path, form)
    return found


def _opened(path: Path, index_path: Path, form: RowForm) -> _Opened | None:
    """Opens rows, raw or coded. None if they or their index are missing, or if it is not one of such rows."""
    with contextlib.suppress(FileNotFoundError, ValueError), contextlib.ExitStack() as stack:
        try:
            file, index = (stack.enter_context(opened(each, os.O_RDWR)) for each in (path, index_path))
            access = mmap.ACCESS_WRITE
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            file, index = (stack.enter_context(opened(each, os.O_RDONLY)) for each in (path, index_path))
            access = mmap.ACCESS_READ
        header, blocks = mapped_index(index_path, index, access)
        found = next((each for each in form.raw_and_coded if (_header(index_path, each) == header).all()), None)
        if found is not None and os.fstat(file).st_nlink:
            return os.dup(file), blocks, found
    return None


def _write_index(directory: MirrorDirectory, path: Path, rows_path: Path, form: RowForm) -> None:
    """Writes an index in which all blocks are absent, in place of an invalid one and of its rows."""
    header, size = _header(path, form), 8 * (_HEADER + 2 * form.n_blocks)
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


# ---- mirrors


@dataclass(frozen=True)
class Mirror:
    """The mirror of the rows of one matrix, or of some of its genes.

    Rows with all genes, if there are any beside these, are in `whole`. They are read, but not filled any more.
    """

    directory: MirrorDirectory
    rows: RowsFile
    whole: RowsFile | None

    def record_verified(self) -> None:
        """Records the verified files, so that no process has to compare their checksums again."""
        for file in (self.rows, self.whole):
            if file is not None:
                file.record_verified()


def open_rows(directory: MirrorDirectory, matrix: MatrixLayout, panel: NDArray[Any] | None) -> Mirror | None:
    """The mirror of a matrix, or of a panel of its genes, given as the column of each gene.

    None if there is nothing to keep, or, with a warning, if its files cannot be created.
    """
    if not matrix.values.n_elements:
        return None
    try:
        form, whole = (RowForm.of(matrix, each, compact=directory.form == "compact") for each in (panel, None))
        has_whole = whole.name != form.name and has_rows(directory, whole)
        if not has_whole:
            return Mirror(directory, RowsFile(directory, form), None)
        of_whole = RowsFile(directory, whole)
        of_whole.writable = False
        try:
            return Mirror(directory, RowsFile(directory, form), of_whole)
        except OSError:  # the cache is full or read-only
            return Mirror(directory, of_whole, None)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", directory.path, error)
        return None


def has_rows(directory: MirrorDirectory, form: RowForm) -> bool:
    """Whether the mirror has files of these rows, with some of their blocks or none."""
    return all(cached_path(directory.path, form.name, suffix).exists() for suffix in ("rows", "index"))
