"""Which block_size and fetch_factor suit a dataset and the available memory? Computed from metadata alone.

A large fetch of many small blocks mixes rows well. Small blocks cost decoding, because a chunk is always decoded whole.
So blocks are about two chunks long, and a fetch has 256 of them. If memory is short, a fetch gets fewer blocks, down to
64, and then shorter ones, as long as at most four rows are decoded per row of a block.

The rows of sets, controls and neighbours are single rows. A fetch of sets has as many rows as one of blocks would have,
or fewer if the chunks of all these rows take more memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zloader.common.checks import one_or_more, require_count
from zloader.common.errors import FormatError, OptionError
from zloader.common.keywords import answers
from zloader.common.options import FetchOptions
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.order.cell_sets import CellSets, whole_sets
from zloader.order.controls import MatchedControls
from zloader.order.neighbors import Neighbors
from zloader.order.shuffling import BlockShuffling, stratified

# A chunk is decoded whole, so a block of B rows decodes B rows plus one chunk on average.
_BLOCK_CHUNKS = 2
# With 14 plates stored one after another, minibatches of 64 rows from 256 blocks have the entropy of random rows to
# within 0.01 bits (0.05 without strata; 0.18 with 64 blocks: D'Ascenzo and Cultrera di Montesano 2025). One in 256
# pairs of rows in a minibatch is from the same block.
_BLOCKS = 256
_LEAST_BLOCKS = 64  # below this, make blocks shorter instead
_MOST_DECODED = 4  # rows decoded per row of a block; do not make blocks so short that it is more


@dataclass(frozen=True, kw_only=True, repr=False)
class Suggestion:
    """Sizes for a Loader, returned by `suggest`. The repr explains the choice.

    >>> import zloader as zl
    >>> zl.suggest(zl.open_dataset("atlas.zarr"))  # doctest: +ELLIPSIS
    <Suggestion: batch_size=64, ...: a chunk has ... rows, so ... rows are decoded per row of a block...>

    - `batch_size`, `fetch_factor` and `sampling`: arguments of a Loader. `sampling` has blocks of `block_size` rows, or
      is the given one.
    - `n_controls`, `n_neighbors`: controls and neighbours per row.
    - `rows_per_chunk`: rows in a stored chunk, on average.
    - `spread`: for a view, rows of the stores per row of the view; otherwise 1.
    - `fetch_rows`, `fetch_bytes`: the most rows in one fetch without controls and neighbours, and the decoded size of
      the chunks of all of them. It is an upper bound: each neighbour counts with a chunk of its own, as if neighbours
      were stored anywhere.
    - `memory_bytes`: the memory for all loaded fetches together.
    """

    batch_size: int
    fetch_factor: int
    sampling: BlockShuffling | CellSets
    block_size: int
    n_controls: int
    n_neighbors: int
    rows_per_chunk: float
    spread: float
    fetch_rows: int
    fetch_bytes: int
    memory_bytes: int

    def __repr__(self) -> str:
        decoded = _decoded_rows(self.block_size, self.rows_per_chunk, self.spread) / self.block_size
        rows = f"{self.fetch_rows:,} rows"
        if isinstance(self.sampling, BlockShuffling):
            n_blocks = -(-self.fetch_rows // self.block_size)
            of_what, mixed = "row of a block", f"mixes up to {n_blocks} blocks with {rows}"
        else:
            of_what, mixed = "row", f"has up to {rows}"
        more = {"controls": self.n_controls, "neighbours": self.n_neighbors}
        companions = "".join(f" and {self.fetch_rows * n:,} {what}" for what, n in more.items() if n)
        return (
            f"<Suggestion: batch_size={self.batch_size}, fetch_factor={self.fetch_factor}, "
            f"sampling={self.sampling}: a chunk has {self.rows_per_chunk:,.1f} rows, so {decoded:.1f} rows are "
            f"decoded per {of_what}; a fetch {mixed}{companions} and takes up to {self.fetch_bytes / 1e6:,.1f} of "
            f"{self.memory_bytes / 1e6:,.1f} MB>"
        )


@answers
def suggest(
    dataset: Dataset,
    *,
    batch_size: int = 64,
    memory: int | str = 0,
    x: str | Sequence[str] = "X",
    sampling: CellSets | None = None,
    controls: MatchedControls | None = None,
    neighbors: Neighbors | None = None,
) -> Suggestion:
    """Suggests a fetch_factor and a block size that mix rows well, decode few extra rows and fit into memory.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr")
    >>> sizes = zl.suggest(dataset, batch_size=64, memory="1GB")
    >>> sizes.batch_size, sizes.fetch_factor, sizes.block_size
    (64, 16, 256)
    >>> loader = zl.Loader(
    ...     dataset,
    ...     batch_size=sizes.batch_size,
    ...     fetch_factor=sizes.fetch_factor,
    ...     sampling=sizes.sampling,
    ...     options=zl.FetchOptions(memory="1GB"),
    ... )

    - `batch_size`: rows per minibatch.
    - `memory`: the memory budget of the loader, as in zl.FetchOptions: bytes, text such as "8GB", or 0 for its default.
    - `x`: the matrix to load, or a list of matrices.
    - `sampling`: the sets of the Loader, if it has any. Only the fetch_factor is suggested then.
    - `controls`, `neighbors`: the controls and neighbours of the Loader, if it has any.

    Reads metadata only. The rows of a view are assumed to be spread evenly over the dataset, as those of a split are.
    Raises OptionError for unusable arguments, and FormatError if the matrix cannot be read or there are no rows.
    """
    require_dataset(dataset)
    if not isinstance(sampling, CellSets | None):
        raise OptionError(f"sampling must be a zl.CellSets, not {sampling!r:.100}: suggest finds blocks by itself")
    if not isinstance(controls, MatchedControls | None):
        raise OptionError(f"controls must be a zl.MatchedControls, not {controls!r:.100}")
    if not isinstance(neighbors, Neighbors | None):
        raise OptionError(f"neighbors must be a zl.Neighbors, not {neighbors!r:.100}")
    matrices = [matrix for name in one_or_more(x=x) for matrix in dataset.matrices.layouts(name) if matrix.n_rows]
    n_rows = dataset.whole.n_obs
    if not n_rows or not dataset.n_obs:
        raise FormatError(f"{dataset.url} has no rows to load")
    arrays = [(array, matrix.n_rows) for matrix in matrices for array in matrix.arrays]
    return sizes(
        n_rows=dataset.n_obs,
        row_bytes=sum(array.n_elements * array.dtype.itemsize for array, _ in arrays) / n_rows,
        # If an array has fewer elements than a chunk, all of its rows are in one chunk.
        rows_per_chunk=max(min(rows, array.chunk_elements * rows / max(1, array.n_elements)) for array, rows in arrays),
        spread=max(1.0, n_rows / dataset.n_obs),
        batch_size=batch_size,
        options=FetchOptions(memory=memory),
        sets=sampling,
        n_controls=controls.n if controls else 0,
        n_neighbors=neighbors.k if neighbors else 0,
    )


def sizes(  # noqa: PLR0913
    *,
    n_rows: int,
    row_bytes: float,
    rows_per_chunk: float,
    spread: float = 1,
    batch_size: int,
    options: FetchOptions,
    sets: CellSets | None = None,
    n_controls: int = 0,
    n_neighbors: int = 0,
) -> Suggestion:
    """`suggest` for every `spread`-th row of a matrix, `n_rows` in all, with `row_bytes` decoded bytes per row."""
    require_count(batch_size=batch_size)
    if sets:
        whole_sets(batch_size, sets.set_size)
    room_rows = options.buffer_bytes / (options.prefetch + 1) / max(1.0, row_bytes)  # decoded rows per fetch

    def decoded(block_size: int) -> float:
        return _decoded_rows(block_size, rows_per_chunk, spread)

    def with_companions(block_size: int) -> float:
        return decoded(block_size) + block_size * (n_controls + n_neighbors) * decoded(1)

    block_size = 1 << max(0, round(math.log2(_BLOCK_CHUNKS * rows_per_chunk)))
    while room_rows / with_companions(block_size) < _LEAST_BLOCKS and not sets:
        if block_size == 1 or decoded(block_size // 2) > block_size // 2 * _MOST_DECODED:
            break
        block_size //= 2
    most_blocks = _BLOCKS
    if sets:
        most_blocks, block_size = _BLOCKS * block_size, 1
    n_blocks = min(most_blocks, room_rows / with_companions(block_size))
    if n_blocks < 1:  # not even one block fits: load one minibatch at a time, regardless of its size
        n_blocks = 0
    fetch_factor = max(1, min(int(n_blocks * block_size) // batch_size, -(-n_rows // batch_size)))
    block_size = min(block_size, batch_size * fetch_factor)
    fetch_rows = min(batch_size * fetch_factor, n_rows)
    per_row = with_companions(block_size) / block_size
    return Suggestion(
        batch_size=int(batch_size),
        fetch_factor=fetch_factor,
        sampling=sets or stratified(block_size),
        block_size=block_size,
        n_controls=n_controls,
        n_neighbors=n_neighbors,
        rows_per_chunk=rows_per_chunk,
        spread=spread,
        fetch_rows=fetch_rows,
        fetch_bytes=math.ceil(min(fetch_rows * per_row, n_rows * spread) * row_bytes),
        memory_bytes=options.buffer_bytes,
    )


def _decoded_rows(block_size: int, rows_per_chunk: float, spread: float) -> float:
    """The average number of rows in the chunks of a block at a random position; at most one chunk per row."""
    return min(block_size * spread + max(0.0, rows_per_chunk - 1), block_size * max(spread, rows_per_chunk))
