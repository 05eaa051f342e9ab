"""The small elements of a store (frames, embeddings, uns): written whole by anndata, one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anndata.experimental
import numpy as np
import pandas as pd
import scipy.sparse
import zarr

from zloader.errors import SourceError, StoreError, ZloaderError
from zloader.terms import MiB
from zloader.writing.encode import ConvertOptions, grid, zarr_codecs

_CHUNK_BYTES = MiB  # such arrays are read whole: few chunks, but enough to decode in several threads


class ElementWriter:
    """Writes elements below a group, with checksums, and never a chunk left out. Raises SourceError or StoreError."""

    def __init__(self, root: zarr.Group, options: ConvertOptions, *, of: str) -> None:
        """`of` names the sources in messages."""
        self._root, self._options, self._of = root, options, of

    def write(self, path: str, element: Any) -> None:
        """Stores what anndata can store at a path; its parent groups are there."""
        above, _, name = path.rpartition("/")
        group: Any = self._root[above] if above else self._root
        if isinstance(element, np.ndarray) and element.dtype.kind in "mM":
            self._write_times(group, name, element)
            return
        try:
            anndata.experimental.write_dispatched(group, name, element, callback=self._write)
        except ZloaderError:
            raise
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        except Exception as error:
            raise SourceError(f"{path} of {self._of} cannot be written as Zarr: {error}") from error

    def write_group(self, path: str, kind: str = "dict", version: str = "0.1.0", **attributes: Any) -> None:
        """Makes an empty element of this encoding."""
        encoding = {"encoding-type": kind, "encoding-version": version}
        self._root.create_group(path, attributes=encoding | attributes)

    def write_frame(
        self, path: str, index: pd.Index, columns: Iterable[tuple[str, pd.Series]], names: list[str]
    ) -> None:
        """Stores a data frame column by column, as anndata stores it whole; `names` are those of `columns`."""
        name = "_index" if index.name is None else str(index.name)
        self.write_group(path, "dataframe", "0.2.0", **{"_index": name, "column-order": names})
        if name not in names:
            self.write(f"{path}/{name}", _values(_plain_names(index)))
        for column, series in columns:
            self.write(f"{path}/{column}", _values(series))

    def _write(self, function: Any, into: zarr.Group, key: str, leaf: Any, *, dataset_kwargs: Any, iospec: Any) -> None:
        if isinstance(leaf, pd.DataFrame) and leaf.index.name not in leaf.columns:  # anndata compares those two
            leaf = leaf.set_axis(_plain_names(leaf.index))
        function(into, key, leaf, dataset_kwargs={**dataset_kwargs, **self._storage(leaf)})
        if leaf is None:  # anndata leaves the one chunk away that stands for None
            array: Any = into[key]
            array[...] = False

    def _write_times(self, group: zarr.Group, name: str, times: np.ndarray[Any, Any]) -> None:
        """anndata reads dates but does not write them."""
        array = group.create_array(
            name,
            shape=times.shape,
            dtype=times.dtype,
            fill_value=np.array("NaT", times.dtype)[()],
            attributes={"encoding-type": "array", "encoding-version": "0.2.0"},
            **self._storage(times),
        )
        array[...] = times

    def _storage(self, leaf: Any) -> dict[str, Any]:
        """Grid and codecs for an array that anndata writes; nothing for what is made of arrays."""
        if scipy.sparse.issparse(leaf):
            length, widths, item_bytes = leaf.nnz, [], 8
        elif isinstance(leaf, np.ndarray) and leaf.ndim:
            length, widths = len(leaf), [max(1, size) for size in leaf.shape[1:]]
            item_bytes = leaf.dtype.itemsize * int(np.prod(widths, dtype=np.int64))
        else:
            is_scalar = isinstance(leaf, (np.ndarray, np.generic, str, int, float, complex))
            return {"compressors": zarr_codecs("none", None)} if is_scalar else {}
        chunk = _CHUNK_BYTES // max(1, item_bytes)
        cut = grid(length, chunk=chunk, item_bytes=item_bytes, shard_bytes=self._options.shard_bytes)
        # zarr cannot shard records, whose fill value it does not hash.
        is_plain = not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "V"
        shards = {"shards": (cut.shard, *widths)} if length > cut.chunk and is_plain else {}
        return {"chunks": (cut.chunk, *widths), "compressors": zarr_codecs(self._options.codec, None), **shards}


def _plain_names(index: pd.Index) -> pd.Index:
    """The index of a frame as objects where it is text without a missing value: an array of strings says all of it.

    Of pandas' text dtypes anndata stores a mask beside the values, which its older versions cannot read as an index.
    """
    if not isinstance(index.dtype, pd.StringDtype) or index.hasnans:
        return index
    return pd.Index(index.to_numpy(object), dtype=object, name=index.name)


def _values(column: pd.Series | pd.Index) -> Any:
    """What anndata writes of a column: an ndarray, or the extension array of nullable, categorical and such types."""
    return column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array
