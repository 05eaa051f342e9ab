"""A form of the mirror that is laid out by rows: blocks of coded rows, of all genes of a matrix or of a panel.

NAME.rows is a sparse file in which each block has room for the most that its rows may take, so every process knows
where a block belongs. NAME.blocks beside it has a word for each block, and its offset and size (checksums.py).
storage/coded_rows.py describes a block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path, has_files
from zloader.caching.checksums import bounds_of
from zloader.caching.chunk_file import ChunkFile
from zloader.caching.directory import MirrorDirectory
from zloader.common import page_cache
from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.storage.coded_rows import ALIGNED, ENTRY, ENTRY_BYTES, most_bytes
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout, MatrixLayout, distinct

# Rows of a block, which takes 50 to 100 KB, so that little of its last page is unused. It is read from the store as a
# whole, even if a fetch needs a single row.
_BLOCK_ROWS, _PANEL_ROWS = 32, 128
_PANEL = "/panel "  # in names, before the digest of its genes
_ROWS_OF_WHOLE = 8  # rows of a block, on average, for which all of it is prefetched
_APART = 128  # bytes between the rooms of two blocks, at least, so that each begins at a multiple of 64


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """The rows that are kept, by `name`: their dtypes, and how many of them are in a block."""

    name: str
    genes: np.dtype[Any]
    values: np.dtype[Any]
    block_rows: int

    @classmethod
    def of(cls, matrix: MatrixLayout, panel: NDArray[Any] | None) -> RowForm | None:
        """The form of a CSR matrix, or of a panel: the column of each of its genes. None if its rows are not coded."""
        dtype = matrix.values.dtype
        if matrix.genes is None or dtype.kind not in "iuf" or dtype == np.float16:
            return None
        if panel is None:
            return cls(name=matrix.path, genes=matrix.genes.dtype, values=dtype, block_rows=_BLOCK_ROWS)
        digest = hashlib.sha256(f"{panel.dtype.str} {len(panel)}".encode() + panel.tobytes()).hexdigest()
        name = f"{matrix.path}{_PANEL}{digest[:16]}"
        return cls(name=name, genes=panel.dtype, values=dtype, block_rows=_PANEL_ROWS)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """The dtypes of genes and values."""
        return self.genes, self.values

    @property
    def itemsizes(self) -> int:
        """The bytes of a gene and a value."""
        return int(self.genes.itemsize + self.values.itemsize)


def has_rows(directory: MirrorDirectory, form: RowForm) -> bool:
    """Whether the mirror has files of these rows, with some of their blocks or none."""
    return has_files(directory.path, form.name, "rows", "blocks")


def has_panels(directory: MirrorDirectory, matrix: MatrixLayout) -> bool:
    """Whether the mirror has rows of the matrix with some of its genes."""
    first = cached_path(directory.path, f"{matrix.path}{_PANEL}", "rows").stem
    return any(path.name.startswith(first) for path in directory.path.glob("*.rows"))


@dataclass(frozen=True, kw_only=True)
class CodedRows:
    """Some coded rows: row i begins at byte `starts[i]` of `source` and has `lengths[i]` elements.

    `entries` is the table of these rows, and `dtypes` are those of genes and values.
    """

    source: NDArray[np.uint8]
    starts: Rows
    entries: NDArray[Any]
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]

    @property
    def lengths(self) -> Rows:
        return self.entries["length"].astype(np.int64)


@compiled
def _entries(words: NDArray[np.uint64], blocks: Rows, rows: Rows, out: NDArray[np.uint64]) -> None:
    """Copies the entries of some rows; row i is number `rows[i]` of the block at byte `blocks[i]`."""
    n_words = ENTRY_BYTES // 8
    for i in range(len(rows)):
        first = blocks[i] // 8 + rows[i] * n_words
        for k in range(n_words):
            out[i, k] = words[first + k]


class RowBlocks(ChunkFile):
    """Blocks of coded rows of one matrix. Raises OSError if its files cannot be created or opened.

    A chunk of its `layout` is a block, and an element is a row.
    """

    def __init__(self, directory: MirrorDirectory, matrix: MatrixLayout, form: RowForm) -> None:
        self.form, self._n_values = form, matrix.values.n_elements
        layout = ArrayLayout.plain(
            form.name, "uint8", n_elements=matrix.n_rows, chunk_elements=form.block_rows, chunks_per_shard=1 << 30
        )
        path, words_path = (cached_path(directory.path, form.name, suffix) for suffix in ("rows", "blocks"))
        rooms = most_bytes(matrix.n_rows, matrix.values.n_elements, form.itemsizes)
        super().__init__(directory, layout, path, words_path, int(rooms + _APART * (layout.n_chunks + 1)))

    def room(self, blocks: Rows, first_values: Rows) -> Rows:
        """The first byte of the room of each block, whose first row begins at these values of the matrix."""
        most = most_bytes(blocks * self.form.block_rows, first_values, self.form.itemsizes)
        return np.asarray(most + _APART * blocks)

    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first byte of each block in the file, and the byte after its last. Known only for present blocks."""
        offsets, sizes = self._places
        return bounds_of(np.stack([offsets[chunks], sizes[chunks]]), len(self.content))

    def _allocated(self, chunks: Rows) -> Rows:
        """How much space a block needs is known when its rows are coded: see `keep`."""
        return chunks if self.writable else chunks[:0]

    def keep(self, block: int, offset: int, content: NDArray[np.uint8]) -> None:
        """Writes a block into its room. After a failure (full disk) or at the limits, writes no more."""
        if not self.writable or not self._allocate([(offset, len(content))]) or not self._write(offset, content):
            return
        self._places[0][block], self._places[1][block] = offset, len(content)
        self._mark_present(block, np.array([checksum(content)], np.uint64))

    @property
    def bytes_in_all(self) -> int:
        """Coded bytes of all blocks, estimated from those that are present; without any, the most they may take."""
        held = self.n_present
        return self.present_bytes * self.layout.n_chunks // held if held else self._n_bytes

    @property
    def present_bytes(self) -> int:
        """Coded bytes of the present blocks."""
        sizes = self._places[1]
        return sum(int(sizes[first : first + len(held)][held].sum()) for first, held in self._present_windows())

    @property
    def decoded_chunk_bytes(self) -> int:
        """Bytes of the rows of a block, on average, before they are coded."""
        return max(1, self._n_values * self.form.itemsizes // max(1, self.layout.n_chunks))

    def blocks(self, rows: Rows) -> Rows:
        """The blocks of some rows, ascending."""
        return distinct(rows // self.form.block_rows)

    def coded_bytes(self, blocks: Rows) -> int:
        """Bytes of present blocks."""
        return int(self._places[1][blocks].sum())

    def rows(self, rows: Rows) -> CodedRows:
        """Some rows of present blocks."""
        blocks, within = np.divmod(rows, self.form.block_rows)
        starts, stops = self.bounds(blocks)
        self._prefetch(starts, stops, within)
        entries = np.empty(len(rows), ENTRY)
        words = self.content[: len(self.content) // ALIGNED * ALIGNED].view(np.uint64)
        _entries(words, starts, within, entries.view(np.uint64).reshape(len(rows), ENTRY_BYTES // 8))
        self.count_mapped(int(entries["length"].sum()) * 2)
        found = starts + entries["offset"].astype(np.int64)
        return CodedRows(source=self.content, starts=found, entries=entries, dtypes=self.form.dtypes)

    def _prefetch(self, starts: Rows, stops: Rows, within: Rows) -> None:
        """Makes the kernel load what will be read: whole blocks, or their tables and about where single rows are."""
        few = np.flatnonzero(np.diff(starts, prepend=-1))  # the first row of each block
        if len(few) * _ROWS_OF_WHOLE < len(starts):
            page_cache.prefetch(self._file, starts[few], stops[few])
            return
        tables = ENTRY_BYTES * self.form.block_rows
        mean = (stops - starts - tables) // self.form.block_rows
        rows = starts + tables + within * mean
        begins, ends = np.concatenate([starts[few], rows]), np.concatenate([starts[few] + tables, rows + mean])
        page_cache.prefetch(self._file, begins, ends)
