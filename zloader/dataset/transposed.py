"""A CSC matrix as rows: it is transposed in memory when it is first used.

Its arrays are read like those of a CSR matrix, from objects in memory that hold uncompressed chunks. So readers and
mirrors treat them like any other. A mirror that has them all saves the next process from transposing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import FormatError
from zloader.common.locks import forkable_lock
from zloader.common.messages import size
from zloader.common.records import Span
from zloader.storage.layout import ArrayLayout, MatrixLayout, Placement
from zloader.storage.metadata import number_dtype

log = logging.getLogger("zloader")

_CHUNK = 1 << 14  # elements


Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"  # by path
Reading: TypeAlias = "Callable[[Callable[..., Arrays]], Arrays]"


class TransposedMatrix:
    """The rows of a CSC matrix, and the ByteSource of their arrays.

    `takes_bytes` is the memory that transposing takes, at most: SciPy has the columns and the rows at the same time,
    with the numbers of rows and genes as int32.
    """

    retries = 0

    def __init__(self, path: str, shape: tuple[int, int], url: str, nodes: Sequence[Any], read: Reading) -> None:
        """`nodes` are the stored data, indices and indptr, and `read(make)` is `make` of what they hold.

        Raises FormatError if the matrix does not hold numbers.
        """
        self._path, self._url, self._read_columns = path, url, read
        values, rows, indptr = nodes
        dtype = number_dtype(f"{path}/data of {url}", values.dtype)
        for node in (rows, indptr):
            if node.dtype.kind not in "iu":
                raise FormatError(f"{node.path} of {url} holds {node.dtype}, not integers: the store is damaged")
        n_values, (n_rows, n_genes) = int(values.size), shape
        genes = _in_memory(f"{path}/indices", np.min_scalar_type(max(0, n_genes - 1)), n_values)
        self.layout = MatrixLayout(
            path=path,
            n_rows=n_rows,
            n_genes=n_genes,
            values=_in_memory(f"{path}/data", dtype, n_values),
            genes=genes.narrowed(n_genes),
        )
        self.takes_bytes = n_values * (2 * dtype.itemsize + rows.dtype.itemsize + 8) + 16 * (n_rows + n_genes)
        self._arrays: Arrays | None = None
        self._lock = forkable_lock()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the objects that the rows are read from, by key."""
        return {array.path: array.n_elements * array.dtype.itemsize for array in self.layout.arrays}

    def offsets(self, start: int, stop: int) -> NDArray[Any]:
        """Entries of the indptr of the rows."""
        return self._array(f"{self._path}/indptr")[start:stop]

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span. Transposes, if no row was needed before."""
        return await asyncio.get_running_loop().run_in_executor(None, self._read, spans)

    def _read(self, spans: Sequence[Span]) -> list[bytes]:
        return [self._array(span.key).view(np.uint8)[span.start : span.stop].tobytes() for span in spans]

    def _array(self, path: str) -> NDArray[Any]:
        with self._lock:
            if self._arrays is None:
                log.warning(
                    "%s of %s is stored by columns (csc_matrix): it is transposed in memory, which takes %s. 'zloader "
                    "convert' writes it by rows",
                    self._path,
                    self._url,
                    size(self.takes_bytes),
                )
                self._arrays = self._read_columns(self._transposed)
            return self._arrays[path]

    def _transposed(self, stored: NDArray[Any], rows: NDArray[Any], indptr: NDArray[Any]) -> Arrays:
        # Imported here because other matrices do not need it.
        import scipy.sparse

        values = self.layout.values
        bits = f"u{values.dtype.itemsize}"  # values are only moved, and SciPy has no float16
        shape = self.layout.n_rows, self.layout.n_genes
        columns = scipy.sparse.csc_matrix((stored.astype(values.dtype, copy=False).view(bits), rows, indptr), shape)
        del stored, rows
        columns.check_format()
        made = columns.tocsr()
        del columns
        found = {f"{self._path}/indptr": made.indptr}
        for array, elements in zip(self.layout.arrays, (made.indices, made.data), strict=True):
            found[array.path] = np.zeros(array.n_elements, array.dtype)  # columns may end before the arrays do
            found[array.path].view(elements.dtype if array is values else array.dtype)[: made.nnz] = elements
        return found


def _in_memory(path: str, dtype: np.dtype[Any], n_elements: int) -> ArrayLayout:
    """The layout of an array whose bytes are the object `path`."""
    bounds = np.minimum(np.arange(0, n_elements + _CHUNK, _CHUNK), n_elements).astype(np.uint64) * dtype.itemsize
    table = np.stack([bounds[:-1], np.diff(bounds)], axis=1).astype(np.uint64)
    return ArrayLayout(
        path=path,
        dtype=dtype,
        n_elements=n_elements,
        chunk_elements=_CHUNK,
        codecs=({"name": "bytes"},),
        placement=Placement(path=path, chunks_per_object=max(1, len(table)), table=table),
        cut=True,
    )
