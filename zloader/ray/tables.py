"""Minibatches as Arrow tables, and Arrow tables as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from ray.data.collate_fn import ArrowBatchCollateFn

from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.records import CsrArrays, MinibatchArrays
from zloader.training.tensors import silence_sparse_warnings

_MOST_VALUES = np.iinfo(np.int32).max  # in a column of lists


def table_of(arrays: MinibatchArrays) -> pa.Table:
    """The rows of a minibatch. It shares the memory of numbers."""
    columns: dict[str, Any] = {"index": arrays.index}
    for name, x in arrays.x.items():
        if isinstance(x, CsrArrays):
            columns |= {f"{name}/genes": _lists(x, x.indices), f"{name}/values": _lists(x, x.values)}
        else:
            columns[name] = _tensors(x)
    columns |= {f"obs/{name}": values for name, values in arrays.obs.items()}
    columns |= {f"obsm/{name}": _tensors(array) for name, array in arrays.obsm.items()}
    columns |= {f"present/{modality}": has for modality, has in arrays.present.items()}
    if arrays.names is not None:
        columns["obs_names"] = pa.array(arrays.names, pa.string())
    return pa.table(columns)


def _lists(x: CsrArrays, values: NDArray[Any]) -> pa.ListArray:
    if len(values) > _MOST_VALUES:
        raise OptionError(
            f"{len(x.indptr) - 1} rows have {len(values)} values, too many for one block: lower batch_size"
        )
    return pa.ListArray.from_arrays(pa.array(x.indptr.astype(np.int32, copy=False)), pa.array(values))


def _tensors(array: NDArray[Any]) -> Any:
    """An array of rows x ... as a column of tensors."""
    if array.ndim == 1:
        return array
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    kind = pa.fixed_shape_tensor(flat.type, array.shape[1:])
    storage = pa.FixedSizeListArray.from_arrays(flat, type=kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)


@answers
class Collate(ArrowBatchCollateFn):  # type: ignore[misc]
    """A `collate_fn` of `iter_torch_batches`: makes torch tensors of the columns of a batch.

    >>> collate = zr.Collate({"X": dataset.n_vars})  # doctest: +SKIP
    >>> for batch in ds.iter_torch_batches(batch_size=64, collate_fn=collate):  # doctest: +SKIP
    ...     batch["X"], batch["obs/cell_type"]

    The lists `X/genes` and `X/values` become one sparse CSR tensor `X`, with as many columns as `n_genes` says. Tensor
    columns and numbers become dense tensors. Names stay a NumPy array of strings.
    """

    def __init__(self, n_genes: Mapping[str, int]) -> None:
        self._n_genes = dict(n_genes)

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        silence_sparse_warnings()
        made: dict[str, Any] = {}
        for name in batch.column_names:
            column = _combined(batch.column(name))
            matrix, _, part = name.rpartition("/")
            if pa.types.is_list(column.type) and part == "genes":
                values = _combined(batch.column(f"{matrix}/values"))
                made[matrix] = self._csr(matrix, column, values)
            elif pa.types.is_string(column.type):
                made[name] = column.to_numpy(zero_copy_only=False)
            elif not pa.types.is_list(column.type):
                made[name] = _tensor(column)
        return made

    def _csr(self, matrix: str, genes: pa.ListArray, values: pa.ListArray) -> torch.Tensor:
        if matrix not in self._n_genes:
            raise OptionError(f"zr.Collate needs the number of genes of {matrix!r}: zr.Collate({{{matrix!r}: ...}})")
        starts = np.asarray(genes.offsets)
        # `flatten`, because `values` of a slice are those of the whole array.
        return torch.sparse_csr_tensor(
            torch.from_numpy(starts - starts[0]),
            torch.from_numpy(np.array(genes.flatten())),
            torch.from_numpy(np.array(values.flatten())),
            size=(len(genes), self._n_genes[matrix]),
            check_invariants=False,
        )


def _combined(column: pa.ChunkedArray) -> Any:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _tensor(column: Any) -> torch.Tensor:
    if isinstance(column.type, pa.FixedShapeTensorType):
        return torch.from_numpy(np.array(column.to_numpy_ndarray()))
    return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))
