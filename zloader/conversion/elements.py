"""Writes the small elements of a store (frames, embeddings, uns) through anndata, one at a time.

anndata converts values it cannot store to text, and drops masks. Elements that would change this way are refused, or
converted to a form that reads back equal, such as columns of objects.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anndata as ad
import anndata.experimental
import numpy as np
import pandas as pd
import scipy.sparse
import zarr
import zarr.errors
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from zloader.common.errors import SourceError, StoreError, ZloaderError
from zloader.common.options import MiB
from zloader.conversion.columns import is_storable, kind_of, storable
from zloader.conversion.encode import ConvertOptions, grid, small_codecs
from zloader.conversion.nodes import require_names
from zloader.conversion.port import Content

_LOSSLESS = {"O": ("string", "empty"), "S": ("bytes",), "U": ("string",)}  # by array kind, objects that read back equal
_CHUNK_BYTES = MiB  # these arrays are read whole: few chunks, but enough to decode in several threads
# Of a larger array of numbers, a fetch reads only the chunks that hold its rows, a few hundred of them.
_LARGE_BYTES, _CHUNK_BYTES_OF_LARGE = 32 * MiB, MiB // 16


@contextlib.contextmanager
def library_settings() -> Iterator[None]:
    """Sets zarr and anndata up for writing; the caller's settings are restored at the end.

    zarr also stores chunks that are all zeros, so a missing chunk is always an error. Its own codec pipeline is used
    even if the caller has configured another, because others write in threads that PendingStore cannot wait for.
    """
    settings = {
        "array.write_empty_chunks": True,
        "codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    }
    with (
        warnings.catch_warnings(),
        zarr.config.set(settings),
        ad.settings.override(allow_write_nullable_strings=True, auto_shard_zarr_v3=False),
    ):
        # These warn that consolidated metadata, fixed-length strings, dates and records are not in the Zarr v3
        # specification yet. AnnData needs all of them.
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        warnings.simplefilter("ignore", zarr.errors.UnstableSpecificationWarning)
        yield


class ElementWriter:
    """Writes elements below a group, with checksums and without omitting chunks. Raises SourceError or StoreError."""

    def __init__(
        self, root: zarr.Group, options: ConvertOptions, *, of: str, flush: Callable[[], None] = lambda: None
    ) -> None:
        """`of` names the sources in messages. `flush` is called after each array or element."""
        self._options, self._of, self._flush = options, of, flush
        self._groups = {"": root}  # by path

    def write_content(self, content: Content) -> None:
        """Stores everything but the matrices, one obs column or element in memory at a time."""
        columns = ((name, content.obs_column(name)) for name in content.obs_columns)
        self.write_frame("obs", content.obs_names(), columns, content.obs_columns)
        self.write("var", content.var)
        if content.raw_var is not None:
            self.write_group("raw", "raw")
            self.write("raw/var", content.raw_var)
            self.write_group("raw/varm")
        for name, attributes in content.groups.items():
            self.write_group(name, **attributes)
        for path, element in content.elements():
            self.write(path, element)

    def write(self, path: str, element: Any) -> None:
        """Stores an element at a path whose parent groups exist."""
        above, _, name = path.rpartition("/")
        require_names(above, [name])
        if isinstance(element, dict):
            require_names(path, element)
            self.write_group(path)
            for name, value in element.items():
                self.write(f"{path}/{name}", value)
        elif isinstance(element, pd.DataFrame):
            columns = ((name, _storable(path, column)) for name, column in element.items())
            self.write_frame(path, element.index, columns, list(element.columns))
        else:
            self._write_leaf(path, element)

    def _write_leaf(self, path: str, element: Any) -> None:
        above, _, name = path.rpartition("/")
        group = self._groups[above]
        try:
            if isinstance(element, np.ndarray) and element.dtype.kind in "mM":
                self._write_times(group, name, element)
            else:
                anndata.experimental.write_dispatched(group, name, element, callback=self._write)
            self._flush()
        except SourceError as error:
            raise SourceError(f"{path} of {self._of} cannot be stored: {error}") from error
        except ZloaderError:
            raise
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise SourceError(
                f"{path} of {self._of} cannot be stored, because its type is {type(element).__name__} ({why}): change "
                "or remove it"
            ) from error

    def write_group(self, path: str, kind: str = "dict", version: str = "0.1.0", **attributes: Any) -> None:
        """Makes an empty group with this encoding."""
        encoding = {"encoding-type": kind, "encoding-version": version}
        self._groups[path] = self._groups[""].create_group(path, attributes=encoding | attributes)

    def write_frame(
        self, path: str, index: pd.Index, columns: Iterable[tuple[str, pd.Series]], names: list[str]
    ) -> None:
        """Stores a data frame column by column, in anndata's format. `names` are the names of `columns`."""
        name = "_index" if index.name is None else str(index.name)
        require_names(path, names)
        if "_index" in names:
            raise SourceError(f"{path} has a column '_index', a name that AnnData reserves for the index: rename it")
        if name not in names:
            require_names(f"the index of {path}", [name])
        self.write_group(path, "dataframe", "0.2.0", **{"_index": name, "column-order": names})
        if name not in names:
            self._write_leaf(f"{path}/{name}", values_of(_plain_names(index)))
        for column, series in columns:
            if column == name and not _objects(series).equals(_objects(index)):
                raise SourceError(
                    f"{path} has a column {name!r} whose values differ from the index of the same name: rename one"
                )
            self._write_leaf(f"{path}/{column}", values_of(series))

    def _write(self, function: Any, into: zarr.Group, key: str, leaf: Any, *, dataset_kwargs: Any, iospec: Any) -> None:
        _refuse_lossy(leaf)
        if (
            isinstance(leaf, pd.DataFrame) and leaf.index.name not in leaf.columns
        ):  # anndata compares index and column of one name
            leaf = leaf.set_axis(_plain_names(leaf.index))
        function(into, key, leaf, dataset_kwargs={**dataset_kwargs, **self._storage(leaf)})
        if leaf is None:  # anndata omits the one chunk of a None
            array: Any = into[key]
            array[...] = False

    def _write_times(self, group: zarr.Group, name: str, times: np.ndarray[Any, Any]) -> None:
        """Stores dates or durations, which anndata can read but not write."""
        if np.datetime_data(times.dtype)[0] == "generic":
            raise SourceError("it holds dates or durations without a unit: give it one, such as datetime64[ns]")
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
        """Grid and codecs for an array that anndata writes. Empty for elements that consist of several arrays."""
        if scipy.sparse.issparse(leaf):
            length, widths, item_bytes = leaf.nnz, [], 8
        elif isinstance(leaf, np.ndarray) and leaf.ndim:
            length, widths = len(leaf), [max(1, size) for size in leaf.shape[1:]]
            item_bytes = leaf.dtype.itemsize * int(np.prod(widths, dtype=np.int64))
        else:
            is_scalar = isinstance(leaf, (np.ndarray, np.generic, str, int, float, complex))
            return {"compressors": small_codecs("none")} if is_scalar else {}
        large = length * item_bytes > _LARGE_BYTES and isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
        chunk = (_CHUNK_BYTES_OF_LARGE if large else _CHUNK_BYTES) // max(1, item_bytes)
        cut = grid(length, chunk=chunk, item_bytes=item_bytes, shard_bytes=self._options.shard_bytes)
        # zarr cannot shard structured arrays, because it cannot hash their fill value.
        is_plain = not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "V"
        shards = {"shards": (cut.shard, *widths)} if length > cut.chunk and is_plain else {}
        return {"chunks": (cut.chunk, *widths), "compressors": small_codecs(self._options.codec), **shards}


def _plain_names(index: pd.Index) -> pd.Index:
    """Converts an index of text without missing values to objects, which anndata stores as a plain string array.

    For pandas' text dtypes, anndata stores a mask beside the values, which its older versions cannot read as an index.
    """
    if not isinstance(index.dtype, pd.StringDtype) or index.hasnans:
        return index
    return pd.Index(index.to_numpy(object), dtype=object, name=index.name)


def values_of(column: pd.Series | pd.Index) -> Any:
    """The array of a column that anndata writes: an ndarray, or an extension array (nullable, categorical, ...)."""
    return column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array


def _storable(path: str, column: pd.Series) -> pd.Series:
    try:
        return storable(column)
    except SourceError as error:
        raise SourceError(f"{path}/{column.name} cannot be stored: {error}") from error


def _objects(values: pd.Series | pd.Index) -> pd.Series:
    """The values as objects, which compare equal across dtypes."""
    return pd.Series(values.to_numpy(object))


def _refuse_lossy(leaf: Any) -> None:
    """Raises SourceError for an element that anndata would store with changed values."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise SourceError("it has masked values, but masks cannot be stored: fill them (.filled)")
    if isinstance(leaf, pd.Categorical) and not is_storable(kind_of(leaf.categories)):
        raise SourceError(f"its categories are {kind_of(leaf.categories)}, not text, numbers or dates: convert them")
    array = np.array(leaf) if isinstance(leaf, list) else leaf
    if not isinstance(array, np.ndarray):
        return
    for field in array.dtype.names or ():
        _refuse_lossy(array[field])
    if array.dtype == object or (array is not leaf and array.dtype.kind in _LOSSLESS):
        kind = pd.api.types.infer_dtype(np.asarray(leaf, object).ravel(), skipna=False)
        if kind not in _LOSSLESS[array.dtype.kind]:
            raise SourceError(f"it holds objects ({kind}), but only text can be stored as objects: give it a dtype")


class MetadataStore(MemoryStore):
    """A store that keeps metadata only, for a trial."""

    async def set(self, key: str, value: Buffer, byte_range: tuple[int, int] | None = None) -> None:
        if key.endswith("zarr.json"):
            await super().set(key, value, byte_range)
