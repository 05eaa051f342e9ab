"""What a FetchScheduler is asked to make of rows: the arrays that it reads, and the form of their minibatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.rows_file import Mirror
from zloader.common.records import ByteSource, MinibatchArrays, Rows
from zloader.reading import gather
from zloader.reading.forms import Form, Transforming
from zloader.selecting.columns import ObsColumn
from zloader.selecting.genes import ChosenGenes
from zloader.selecting.row_maps import RowMap, looked_up
from zloader.storage.layout import MatrixLayout, ObjectIndex
from zloader.storage.row_offsets import RowOffsets
from zloader.tokenizers.tokenizer import BoundTokenizer


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """One store's matrix. Its rows are consecutive rows of the dataset.

    `url` names the store in messages. `indptr` looks up row offsets; None for a dense matrix. `object_sizes` has the
    bytes per stored object. `open_source` opens a source, which belongs to one event loop. `genes` are the columns of
    x; None for the genes as stored. `indexes` grows by the shard indexes that are read, by array and shard, so that all
    readers of this part read each of them once.

    `row_of` has the row of the matrix for each row of the store, or -1 where the matrix lacks it, and a minibatch has
    no values. None stands for the same rows.
    """

    url: str
    matrix: MatrixLayout
    indptr: RowOffsets | None
    object_sizes: Mapping[str, int]
    open_source: Callable[[], ByteSource]
    mirror: Mirror | None
    genes: ChosenGenes | None = None
    row_of: RowMap | None = None
    indexes: dict[str, dict[int, ObjectIndex]] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """Rows of the dataset that are rows of this store."""
        return self.matrix.n_rows if self.row_of is None else len(self.row_of)

    def held(self, rows: Rows, at: Rows | slice) -> tuple[Rows, Rows | slice]:
        """The rows of the matrix for some rows of the store that are at places `at`, without those that it lacks."""
        if self.row_of is None:
            return rows, at
        of_matrix, has = looked_up(self.row_of, rows)
        places = np.arange(len(rows)) + (at.start or 0) if isinstance(at, slice) else at
        return of_matrix, places[has]

    @property
    def n_columns(self) -> int:
        """Columns of x, the same in all parts of a matrix."""
        return self.matrix.n_genes if self.genes is None else len(self.genes)

    def has_totals(self, dtype: str) -> bool:
        """Whether the mirror knows the totals that whole rows have in a dtype, to the last bit."""
        is_kept = self.mirror is not None and self.matrix.genes is not None
        return is_kept and np.can_cast(self.matrix.values.dtype, dtype, "safe")


@dataclass(frozen=True, kw_only=True)
class PagedColumn:
    """A large obsm array: each fetch loads its rows, like those of x.

    `parts` has the array in each store, as a dense matrix of the same dtype. A row has the shape `row_shape`.
    """

    parts: Sequence[MatrixPart]
    row_shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make minibatches from rows.

    `x` has the parts of each matrix, in the order of their rows. All matrices have the same rows. `form` is that of all
    of them, but for those that have `transforms`. `tokens` makes tokens of a matrix, which may be left out of `wanted`,
    the matrices that minibatches carry.

    `obs` and `obsm` return the obs columns and obsm arrays of all rows of the dataset; they are called while the first
    rows are read. `paged` has the obsm arrays whose rows are loaded with each fetch. `present` says for each modality
    which rows of the dataset it has. `told` are the obs columns whose missing labels were logged.

    `cut` makes the items that are put of minibatches that were gathered as one, given the rows at which it is cut, from
    0 to its last. `grows` says that they may take more memory than what was gathered; then fewer minibatches are
    gathered as one.

    `sweeps` says that the fetches make up an epoch of all rows. `compiled` says that numba is loaded, if it is not yet,
    because there are loops that need it, or because their work takes longer.
    """

    x: Mapping[str, Sequence[MatrixPart]]
    form: Form
    transforms: Mapping[str, Transforming] = field(default_factory=dict)
    wanted: Collection[str] | None = None
    tokens: BoundTokenizer | None = None
    obs: Callable[[], Mapping[str, ObsColumn]] = dict
    obsm: Callable[[], Mapping[str, NDArray[Any]]] = dict
    paged: Mapping[str, PagedColumn] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    cut: Callable[[MinibatchArrays, Sequence[int]], Sequence[Any]] = gather.cut_apart
    grows: bool = False
    sweeps: bool = False
    compiled: bool = True

    def is_wanted(self, name: str) -> bool:
        """Whether minibatches carry a matrix."""
        return self.wanted is None or name in self.wanted

    @property
    def arrays(self) -> list[Sequence[MatrixPart]]:
        """The parts of each array that is read: of each matrix, then of each paged column."""
        return [*self.x.values(), *(column.parts for column in self.paged.values())]

    @property
    def ends(self) -> Rows:
        """The row before which each store ends."""
        return np.cumsum([part.n_rows for part in next(iter(self.arrays), [])], dtype=np.int64)
