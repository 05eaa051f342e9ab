"""Which block_size and fetch_factor suit a store and a memory: arithmetic on its metadata, without reading values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zloader.dataset import Dataset
from zloader.errors import FormatError
from zloader.sampling import BlockShuffling, stratified
from zloader.terms import FetchOptions, require_count

# Blocks of two chunks: chunks are decoded whole, so that a block of B rows costs B rows and a chunk's more.
_BLOCK_CHUNKS = 2
# Blocks in a fetch. Of 14 plates in a row, minibatches of 64 then have the entropy of random rows to 0.01 bits (0.05
# without strata, and 0.18 with 64 blocks: D'Ascenzo and Cultrera di Montesano 2025), and of the pairs of rows in a
# minibatch, one in 256 is of one block.
_BLOCKS = 256
_LEAST_BLOCKS = 64  # that smaller blocks are worth decoding more for
_LEAST_BLOCK = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Suggestion:
    """Sizes for a Loader and its sampling; its repr says why.

    `rows_per_chunk` is what the store has on average, `fetch_rows` what one fetch has, `fetch_bytes` what its chunks
    decode to, of the `memory_bytes` for all fetches that are loaded at once.
    """

    batch_size: int
    fetch_factor: int
    block_size: int
    rows_per_chunk: float
    fetch_rows: int
    fetch_bytes: int
    memory_bytes: int

    @property
    def sampling(self) -> BlockShuffling:
        """Blocks of that size, as a Loader takes them."""
        return stratified(self.block_size)

    def __repr__(self) -> str:
        decoded = _decoded_rows(self.block_size, self.rows_per_chunk) / self.block_size
        n_blocks = -(-self.fetch_rows // self.block_size)
        return (
            f"<Suggestion: batch_size={self.batch_size}, fetch_factor={self.fetch_factor}, "
            f"sampling={self.sampling}: a chunk has {self.rows_per_chunk:,.1f} rows, so that "
            f"{decoded:.1f} rows are decoded for each of a block; a fetch mixes {n_blocks} blocks, "
            f"{self.fetch_rows:,} rows, and takes {self.fetch_bytes / 1e6:,.1f} of {self.memory_bytes / 1e6:,.1f} MB>"
        )


def suggest(dataset: Dataset, *, batch_size: int = 64, memory: int | str = 0, x: str = "X") -> Suggestion:
    """Sizes that mix rows well and decode little more than them, for fetches that fit `memory`, as FetchOptions has it.

    Blocks are about two chunks long, and a fetch has 256 of them; less memory gives fewer and then shorter blocks.
    Of a view, chunks are taken to be as full of its rows as of all. Raises OptionError, or FormatError for a matrix
    that cannot be read.
    """
    matrices = [matrix for matrix in dataset.matrices(x) if matrix.n_rows]
    n_rows = sum(matrix.n_rows for matrix in matrices)
    if not n_rows:
        raise FormatError(f"{dataset.url} has no rows to load")
    arrays = [(array, matrix.n_rows) for matrix in matrices for array in matrix.arrays]
    return sizes(
        n_rows=dataset.n_obs,
        row_bytes=sum(array.n_elements * array.dtype.itemsize for array, _ in arrays) / n_rows,
        # Of an array with fewer elements than a chunk, all rows are in one chunk.
        rows_per_chunk=max(min(rows, array.chunk_elements * rows / max(1, array.n_elements)) for array, rows in arrays),
        batch_size=batch_size,
        options=FetchOptions(memory=memory),
    )


def sizes(
    *, n_rows: int, row_bytes: float, rows_per_chunk: float, batch_size: int, options: FetchOptions
) -> Suggestion:
    """The same for a matrix of `n_rows`, with so many bytes a row once decoded and so many rows a chunk."""
    require_count(batch_size=batch_size)
    room = options.buffer_bytes / (options.prefetch + 1)
    block_size = 1 << max(0, round(math.log2(_BLOCK_CHUNKS * rows_per_chunk)))
    while block_size > _LEAST_BLOCK and _blocks(block_size, rows_per_chunk, row_bytes, room) < _LEAST_BLOCKS:
        block_size //= 2
    n_blocks = min(_BLOCKS, _blocks(block_size, rows_per_chunk, row_bytes, room))
    if n_blocks < 1:  # nothing fits: one minibatch at a time, whatever it takes
        n_blocks = 0
    fetch_factor = max(1, min(int(n_blocks * block_size) // batch_size, -(-n_rows // batch_size)))
    block_size = min(block_size, batch_size * fetch_factor)
    fetch_rows = min(batch_size * fetch_factor, n_rows)
    decoded_rows = fetch_rows / block_size * _decoded_rows(block_size, rows_per_chunk)
    return Suggestion(
        batch_size=int(batch_size),
        fetch_factor=fetch_factor,
        block_size=block_size,
        rows_per_chunk=rows_per_chunk,
        fetch_rows=fetch_rows,
        fetch_bytes=math.ceil(min(decoded_rows, n_rows) * row_bytes),
        memory_bytes=options.buffer_bytes,
    )


def _decoded_rows(block_size: int, rows_per_chunk: float) -> float:
    """Rows in the chunks of a block that begins anywhere, on average."""
    return block_size + max(0.0, rows_per_chunk - 1)


def _blocks(block_size: int, rows_per_chunk: float, row_bytes: float, room: float) -> float:
    """How many blocks decode to no more than `room` bytes."""
    return room / max(1.0, _decoded_rows(block_size, rows_per_chunk) * row_bytes)
