"""Which block_size and fetch_factor suit a store and a memory: arithmetic on its metadata, without reading values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zloader.common.checks import require_count
from zloader.common.errors import FormatError
from zloader.common.options import FetchOptions
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.order.sampling import BlockShuffling, stratified

# Blocks of two chunks: chunks are decoded whole, so that a block of B rows costs B rows and a chunk's more.
_BLOCK_CHUNKS = 2
# Blocks in a fetch. Of 14 plates in a row, minibatches of 64 then have the entropy of random rows to 0.01 bits (0.05
# without strata, and 0.18 with 64 blocks: D'Ascenzo and Cultrera di Montesano 2025), and of the pairs of rows in a
# minibatch, one in 256 is of one block.
_BLOCKS = 256
_LEAST_BLOCKS = 64  # that smaller blocks are worth decoding more for,
_MOST_DECODED = 4  # but not more than so many rows for each one of a block


@dataclass(frozen=True, kw_only=True, repr=False)
class Suggestion:
    """Sizes for a Loader and its sampling; its repr says why.

    `rows_per_chunk` is what the store has on average, `spread` how many of its rows there are for each one of a view
    (else 1), `fetch_rows` what one fetch has, `fetch_bytes` what its chunks decode to, of the `memory_bytes` for all
    fetches that are loaded at once.
    """

    batch_size: int
    fetch_factor: int
    block_size: int
    rows_per_chunk: float
    spread: float
    fetch_rows: int
    fetch_bytes: int
    memory_bytes: int

    @property
    def sampling(self) -> BlockShuffling:
        """Blocks of that size, as a Loader takes them."""
        return stratified(self.block_size)

    def __repr__(self) -> str:
        decoded = _decoded_rows(self.block_size, self.rows_per_chunk, self.spread) / self.block_size
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
    The rows of a view are taken to be spread evenly over the dataset, as those of a split are. Raises OptionError, or
    FormatError for a matrix that cannot be read or has no rows.
    """
    require_dataset(dataset)
    matrices = [matrix for matrix in dataset.matrices(x) if matrix.n_rows]
    n_rows = sum(matrix.n_rows for matrix in matrices)
    if not n_rows or not dataset.n_obs:
        raise FormatError(f"{dataset.url} has no rows to load")
    arrays = [(array, matrix.n_rows) for matrix in matrices for array in matrix.arrays]
    return sizes(
        n_rows=dataset.n_obs,
        row_bytes=sum(array.n_elements * array.dtype.itemsize for array, _ in arrays) / n_rows,
        # Of an array with fewer elements than a chunk, all rows are in one chunk.
        rows_per_chunk=max(min(rows, array.chunk_elements * rows / max(1, array.n_elements)) for array, rows in arrays),
        spread=max(1.0, n_rows / dataset.n_obs),
        batch_size=batch_size,
        options=FetchOptions(memory=memory),
    )


def sizes(
    *, n_rows: int, row_bytes: float, rows_per_chunk: float, spread: float = 1, batch_size: int, options: FetchOptions
) -> Suggestion:
    """The same for `n_rows` of a matrix, every `spread`-th, with so many bytes a row once decoded and rows a chunk."""
    require_count(batch_size=batch_size)
    room_rows = options.buffer_bytes / (options.prefetch + 1) / max(1.0, row_bytes)  # once decoded

    def decoded(block_size: int) -> float:
        return _decoded_rows(block_size, rows_per_chunk, spread)

    block_size = 1 << max(0, round(math.log2(_BLOCK_CHUNKS * rows_per_chunk)))
    while room_rows / decoded(block_size) < _LEAST_BLOCKS:
        if block_size == 1 or decoded(block_size // 2) > block_size // 2 * _MOST_DECODED:
            break
        block_size //= 2
    n_blocks = min(_BLOCKS, room_rows / decoded(block_size))
    if n_blocks < 1:  # nothing fits: one minibatch at a time, whatever it takes
        n_blocks = 0
    fetch_factor = max(1, min(int(n_blocks * block_size) // batch_size, -(-n_rows // batch_size)))
    block_size = min(block_size, batch_size * fetch_factor)
    fetch_rows = min(batch_size * fetch_factor, n_rows)
    decoded_rows = min(fetch_rows / block_size * decoded(block_size), n_rows * spread)
    return Suggestion(
        batch_size=int(batch_size),
        fetch_factor=fetch_factor,
        block_size=block_size,
        rows_per_chunk=rows_per_chunk,
        spread=spread,
        fetch_rows=fetch_rows,
        fetch_bytes=math.ceil(decoded_rows * row_bytes),
        memory_bytes=options.buffer_bytes,
    )


def _decoded_rows(block_size: int, rows_per_chunk: float, spread: float) -> float:
    """Rows in the chunks of a block that begins anywhere, on average; at most a chunk for each of its rows."""
    return min(block_size * spread + max(0.0, rows_per_chunk - 1), block_size * max(spread, rows_per_chunk))
