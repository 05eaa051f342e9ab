"""The matrix of one store as part of a dataset, and the readers of its arrays during an epoch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from zloader.caching.mirror import Mirror
from zloader.common.options import FetchOptions
from zloader.common.records import ByteSource, Rows
from zloader.reading.gates import ByteBudget
from zloader.reading.matrix_reader import MatrixReader
from zloader.reading.read_plan import share_of
from zloader.reading.resources import Counters, Resources
from zloader.selecting.genes import ChosenGenes
from zloader.selecting.row_maps import RowMap, looked_up
from zloader.storage.layout import MatrixLayout
from zloader.storage.placement import ObjectIndex
from zloader.storage.row_offsets import RowOffsets


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


@contextlib.contextmanager
def opened_readers(
    parts: Sequence[MatrixPart], options: FetchOptions, counters: Counters, *, sweeping: int
) -> Iterator[list[MatrixReader]]:
    """The reader of each part. They share threads and one bound on the bytes in flight.

    `sweeping` has the rows, one after another, that will be read completely. On leaving, the mirrors record the chunks
    whose checksums were verified, and the leases are released, so that other processes may download the remaining
    chunks.
    """
    in_flight, bands = ByteBudget(options.in_flight_bytes), ByteBudget(options.memory // 8)
    own_buffers = threading.local()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(options.threads, thread_name_prefix="zloader-decode"))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        readers: list[MatrixReader] = []
        for part in parts:
            resources = Resources(
                url=part.url,
                options=options,
                source=part.open_source(),
                object_sizes=part.object_sizes,
                counters=counters,
                threads=threads,
                in_flight=in_flight,
                bands=bands,
                sweeping=share_of(sweeping, part.n_rows),
                own_buffers=own_buffers,
                indexes=part.indexes,
            )
            leases = None
            if part.mirror is not None:
                stack.callback(part.mirror.record_verified)
                leases = stack.enter_context(contextlib.closing(part.mirror.leases()))
            mirror = part.mirror
            rows, whole = (None, None) if mirror is None else (mirror.rows, mirror.whole)
            if rows is not None and rows.form.is_whole and part.genes is not None and part.matrix.genes is not None:
                rows, whole = None, rows  # there is no room for the genes
            readers.append(MatrixReader(part.matrix, part.indptr, rows, whole, part.genes, leases, resources))
        yield readers
