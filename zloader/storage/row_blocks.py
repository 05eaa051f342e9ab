"""Blocks of rows, as a mirror keeps them: the rows of a matrix one after another, raw or coded. Pure.

A block of CSR rows begins with a table of three 64-bit words for each row: its first byte, counted from the block; the
number of its elements; and as float64 the sum of the row with all genes, which is 0 except in a panel. A row is a head
of four bytes, its genes and its values. In a raw row, whose head has all bits set, both are in their stored dtypes,
aligned to them; coded_rows.py describes the others. A block of dense rows is their values alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.storage.coded_rows import ALIGNED, ENTRY_BYTES, ENTRY_WORDS, HEAD_BYTES, RAW, Views, views_of, words_of
from zloader.storage.layout import MatrixLayout, expand

# A block takes 50 to 250 KB, so that little of its last page is unused. It is read from the store as a whole, even if a
# fetch needs a single row.
_BLOCK_ROWS, _PANEL_ROWS = 32, 128
_DENSE_BYTES, _LARGEST_DENSE_BYTES = 128 << 10, 8 << 20
PANEL = "/panel "  # in names, before the digest of its genes


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """How the rows of one matrix, or of a panel of its genes, are kept by `name`.

    CSR rows have `genes` and `values` in these dtypes. Dense rows have `width` values each, and no genes.
    """

    name: str
    n_rows: int
    block_rows: int
    genes: np.dtype[Any] | None
    values: np.dtype[Any]
    width: int
    coded: bool
    decoded_bytes: int

    @classmethod
    def of(cls, matrix: MatrixLayout, panel: NDArray[Any] | None, *, compact: bool) -> RowForm:
        """The form of a matrix, or of a panel of CSR rows, given as the column of each gene."""
        values, genes = matrix.values.dtype, None if matrix.genes is None else matrix.genes.dtype
        form = cls(
            name=matrix.path,
            n_rows=matrix.n_rows,
            block_rows=_BLOCK_ROWS,
            genes=genes,
            values=values,
            width=0,
            coded=compact and genes is not None and values.kind in "iuf" and values != np.float16,
            decoded_bytes=sum(array.n_elements * array.dtype.itemsize for array in matrix.arrays),
        )
        if genes is None:
            chunk_rows = max(1, matrix.values.band_elements // max(1, matrix.n_genes))
            size = _dense_rows(chunk_rows, max(1, matrix.n_genes * values.itemsize))
            return replace(form, block_rows=size, width=matrix.n_genes)
        if panel is None:
            return form
        digest = hashlib.sha256(f"{panel.dtype.str} {len(panel)}".encode() + panel.tobytes()).hexdigest()
        return replace(form, name=f"{form.name}{PANEL}{digest[:16]}", block_rows=_PANEL_ROWS, genes=panel.dtype)

    @property
    def dtypes(self) -> tuple[np.dtype[Any] | None, np.dtype[Any]]:
        """The dtypes of genes and values."""
        return self.genes, self.values

    @property
    def is_whole(self) -> bool:
        """Whether the rows have all genes."""
        return PANEL not in self.name

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.n_rows // self.block_rows)

    @property
    def raw_and_coded(self) -> tuple[RowForm, RowForm]:
        """The same rows, raw and coded."""
        return replace(self, coded=False), replace(self, coded=True)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table at the beginning of a block."""
        return 0 if self.genes is None else self.block_rows * ENTRY_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a dense row."""
        return int(self.width * self.values.itemsize)

    @property
    def block_bytes(self) -> int:
        """Decoded bytes of the rows of a block, on average."""
        return max(1, self.decoded_bytes * self.block_rows // max(1, self.n_rows))

    def rows_of(self, blocks: Rows) -> Rows:
        """All rows of some blocks."""
        firsts = blocks * self.block_rows
        return expand(firsts, np.minimum(firsts + self.block_rows, self.n_rows) - firsts)

    def most_bytes(self, n_rows: int, n_values: int) -> int:
        """Bytes of some rows in blocks, at most."""
        n_blocks = -(-n_rows // self.block_rows)
        if self.genes is None:
            return n_rows * self.row_bytes + n_blocks * ALIGNED
        heads = n_blocks * self.block_rows * ENTRY_BYTES + n_rows * (HEAD_BYTES + 3 * ALIGNED)
        return heads + n_values * (self.genes.itemsize + self.values.itemsize) + 64

    def places_in_rows(self, starts: Rows, lengths: Rows) -> tuple[Rows, Rows, Rows]:
        """Where genes and values of raw rows begin, and where the rows end, from where they begin. In bytes."""
        assert self.genes is not None
        genes = _aligned(starts + HEAD_BYTES, self.genes.itemsize)
        values = _aligned(genes + lengths * self.genes.itemsize, self.values.itemsize)
        return genes, values, _aligned(values + lengths * self.values.itemsize, ALIGNED)


def _dense_rows(chunk_rows: int, row_bytes: int) -> int:
    """Rows of a block of dense rows: a whole number of chunks, or the divisor of a large one's rows that fits best.

    Small blocks cost more than large ones.
    """
    few = max(1, _DENSE_BYTES // row_bytes)
    if few >= chunk_rows:
        return chunk_rows * (few // chunk_rows)
    divisors = [n for n in range(1, math.isqrt(chunk_rows) + 1) if chunk_rows % n == 0]
    divisors += [chunk_rows // n for n in divisors]
    size = min(divisors, key=lambda rows: max(rows / few, few / rows))
    larger = min(rows for rows in divisors if 2 * rows >= few)
    # As of 313 rows, whose blocks would have 1.
    return larger if 2 * size < few and larger * row_bytes <= _LARGEST_DENSE_BYTES else size


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """Some rows in the memory of a mirror, whose fields are those of SourceRows in zloader.reading.gather."""

    genes: NDArray[Any] | None
    values: NDArray[Any]
    starts: tuple[Rows, Rows]
    lengths: Rows
    coded: Views | None
    totals: NDArray[np.float64] | None


def begun_blocks(
    form: RowForm, lengths: Rows, sums: NDArray[np.float64], memory: NDArray[np.uint8]
) -> tuple[Rows, Sequence[Rows]]:
    """Begins blocks of raw rows, one after another, at the beginning of some memory. Unused bytes are 0.

    Returns the byte after each block, and where the genes and the values of each row belong, in elements. Of dense
    rows, returns where the values of each block belong. `sums` are those of CSR rows with all genes.
    """
    n_blocks = -(-len(lengths) // form.block_rows)
    words = words_of(memory, np.uint64)
    if form.genes is None:
        sizes = np.diff(np.minimum(np.arange(n_blocks + 1) * form.block_rows, len(lengths))) * form.row_bytes
        ends = np.cumsum(-(-sizes // ALIGNED) * ALIGNED)
        words[ends[ends > 0] // ALIGNED - 1] = 0
        return ends, [np.append(0, ends[:-1])[:n_blocks] // form.values.itemsize]
    n_rows = len(lengths)
    block, within = np.divmod(np.arange(n_rows), form.block_rows)
    genes, values, stops = form.places_in_rows(np.zeros_like(lengths), lengths)
    heads = np.cumsum(stops) - stops + (block + 1) * form.table_bytes
    genes, values, stops = heads + genes, heads + values, heads + stops
    ends = stops[np.minimum(np.arange(1, n_blocks + 1) * form.block_rows, n_rows) - 1]
    begins = np.append(0, ends)[block]
    if in_last := n_rows % form.block_rows:
        words[begins[-1] // 8 + in_last * ENTRY_WORDS : heads[-in_last] // 8] = 0
    words[(values - 1) // 8] = 0
    words[stops // 8 - 1] = 0
    words[heads // 8] = RAW << 16 | RAW
    entries = begins // 8 + within * ENTRY_WORDS
    words[entries], words[entries + 1], words[entries + 2] = heads - begins, lengths, sums.view(np.uint64)
    return ends, (genes // form.genes.itemsize, values // form.values.itemsize)


def places_of(form: RowForm, content: NDArray[np.uint8], blocks: Rows, within: Rows) -> KeptRows:
    """Rows of blocks that begin at these bytes of some memory; row i is number `within[i]` of its block."""
    if form.genes is None:
        heads, lengths = blocks + within * form.row_bytes, np.full(len(blocks), form.width)
        starts, values = (heads, heads // form.values.itemsize), words_of(content, form.values)
        return KeptRows(genes=None, values=values, starts=starts, lengths=lengths, coded=None, totals=None)
    words, entries = words_of(content, np.uint64), blocks // 8 + within * ENTRY_WORDS
    offsets, lengths, sums = (words[entries + k] for k in range(ENTRY_WORDS))
    heads, lengths, views = (
        blocks + offsets.astype(np.int64),
        lengths.astype(np.int64),
        views_of(content, form.genes, form.values),
    )
    starts = heads, heads
    if not form.coded:
        genes, values, _ = form.places_in_rows(heads, lengths)
        starts = genes // form.genes.itemsize, values // form.values.itemsize
    coded, totals = views if form.coded else None, sums.view(np.float64)
    return KeptRows(genes=views[1], values=views[2], starts=starts, lengths=lengths, coded=coded, totals=totals)


def bounds_of(form: RowForm, content: NDArray[np.uint8], blocks: Rows, ends: Rows, within: Rows) -> tuple[Rows, Rows]:
    """The first byte of each row of `places_of`, and the byte after its last; block i ends before byte `ends[i]`."""
    if form.genes is None:
        begins = blocks + within * form.row_bytes
        return begins, begins + form.row_bytes
    words, entries = words_of(content, np.uint64), blocks // 8 + within * ENTRY_WORDS
    begins, nexts = (blocks + words[entries + k].astype(np.int64) for k in (0, ENTRY_WORDS))
    is_last = (within == form.block_rows - 1) | (nexts == blocks)  # the last block may have fewer rows
    return begins, np.where(is_last, ends, nexts)


def _aligned(at: Any, to: int) -> Any:
    return (at + (to - 1)) // to * to
