"""The obs names of a store, looked up by row.

Names are read in segments of about half a million rows, each when one of its rows is first asked for. A segment is kept
as the UTF-8 text of its names, one after another, and the offset of each: 8 bytes per row and the text, where Python
strings take 60 bytes per row and the text. With a cache, segments are written to the mirror and memory-mapped, so that
the processes of a machine share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.kept import load_array, save_array
from zloader.common import page_cache
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.dataset.elements import is_array
from zloader.dataset.store import OpenedStore
from zloader.reading.gather import indptr_of
from zloader.reading.loops import copy_rows
from zloader.selecting.groups import by_value

_SEGMENT_ROWS = 1 << 19  # about 40 MB of Python strings while a segment is read
_MISSING = "nan"  # as pandas writes a missing name
_OFFSETS, _TEXT = np.dtype(np.int64), np.dtype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Names as UTF-8: name i is the bytes from `offsets[i]` to `offsets[i + 1]` of `text`."""

    offsets: Rows
    text: NDArray[np.uint8]

    @classmethod
    def of(cls, names: Iterable[str]) -> Text:
        """Encodes names."""
        encoded = [name.encode() for name in names]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(offsets=indptr_of(lengths), text=np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def taken(self, positions: Rows) -> Text:
        """The names at some positions."""
        starts = self.offsets[positions]
        lengths = self.offsets[positions + 1] - starts
        offsets = indptr_of(lengths)
        text = np.empty(offsets[-1], np.uint8)
        copy_rows(self.text, starts, lengths, offsets[:-1], text)
        return Text(offsets=offsets, text=text)

    def strings(self) -> list[str]:
        """The names as Python strings."""
        encoded = self.text.tobytes()
        if encoded.isascii():
            whole = encoded.decode("ascii")
            return [whole[start:stop] for start, stop in pairwise(self.offsets.tolist())]
        return [encoded[start:stop].decode() for start, stop in pairwise(self.offsets.tolist())]


class ObsNames:
    """The obs names of one store."""

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._segments: dict[int, Text] = {}

    def of(self, rows: Rows, *, keep: bool = True) -> NDArray[np.object_]:
        """The names of some rows. Raises FormatError if they cannot be read, and any ReadError.

        With `keep=False`, segments that are read now do not stay in memory, unless they are memory-mapped.
        """
        names = np.empty(len(rows), object)
        segment, within = np.divmod(rows, self._segment_rows)
        # In the smallest dtype, because NumPy sorts one or two bytes by radix, in linear time.
        smallest = np.min_scalar_type(self._store.n_obs // self._segment_rows)
        for number, here in by_value(segment.astype(smallest)):
            of_segment = self._segment(number, keep=keep)
            names[here] = of_segment.taken(within[here]).strings()
            page_cache.release(of_segment.offsets)
            page_cache.release(of_segment.text)
        return names

    def whole(self) -> Any:
        """The names of all rows, as the index of a frame. Offline, and of a categorical index, they are strings."""
        if self._store.offline or self._array[1] == "categorical":  # large arrays and codes are only cached as names
            return self.of(np.arange(self._store.n_obs), keep=False)
        return self._store.names("obs").array

    def load_all(self) -> None:
        """Reads the names of all rows, which writes them to the cache."""
        for number in range(-(-self._store.n_obs // self._segment_rows)):
            self._segment(number)

    @cached_property
    def _array(self) -> tuple[str, str]:
        """The path of the array with one entry per row, and the encoding of the index if it is a group."""
        path = self._store.index_path("obs")
        node = self._store.node(path)
        if is_array(node):
            return path, ""
        encoding = str(node.attrs.get("encoding-type"))
        return f"{path}/{'codes' if encoding == 'categorical' else 'values'}", encoding

    @cached_property
    def _segment_rows(self) -> int:
        chunk_rows = int(self._store.node(self._array[0]).chunks[0])
        return max(1, _SEGMENT_ROWS // max(1, chunk_rows)) * max(1, chunk_rows)

    @cached_property
    def _labels(self) -> NDArray[np.object_]:
        """The labels of a categorical index, and last the name of a row without a label."""
        labels = self._store.element(f"{self._store.index_path('obs')}/categories")
        return np.array([*_as_strings(np.asarray(labels)), _MISSING], object)

    def _segment(self, number: int, *, keep: bool = True) -> Text:
        if number in self._segments:
            return self._segments[number]
        first = number * self._segment_rows
        n_rows = min(self._segment_rows, self._store.n_obs - first)
        segment = self._cached(number, n_rows) or self._saved(number, self._read(first, n_rows))
        if keep or page_cache.is_mapped(segment.offsets):
            self._segments[number] = segment
        return segment

    def _cached(self, number: int, n_rows: int) -> Text | None:
        directory = self._store.mirror_directory
        if directory is None:
            return None
        offsets = load_array(directory, f"/obs_names/{number}/offsets", shape=(n_rows + 1,), dtype=_OFFSETS)
        if offsets is None:
            return None
        text = load_array(directory, f"/obs_names/{number}/text", shape=(int(offsets[-1]),), dtype=_TEXT)
        return None if text is None else Text(offsets=offsets, text=text)

    def _saved(self, number: int, names: Text) -> Text:
        """The names as memory-mapped arrays if the cache takes them, otherwise as they are."""
        directory = self._store.mirror_directory
        if directory is None:
            return names
        for part, array in (("text", names.text), ("offsets", names.offsets)):
            save_array(directory, f"/obs_names/{number}/{part}", [array], shape=array.shape, dtype=array.dtype)
        return self._cached(number, len(names)) or names

    def _read(self, first: int, n_rows: int) -> Text:
        path, encoding = self._array
        stored = self._store.window(path, first, first + n_rows)
        if encoding == "categorical":
            if stored.dtype.kind not in "iu" or not ((stored >= -1) & (stored < len(self._labels) - 1)).all():
                raise self._store.damaged(path, "it holds codes without a label")
            return Text.of(self._labels[stored])  # -1 is the last
        names = _as_strings(stored)
        if encoding.startswith("nullable"):
            mask = self._store.window(f"{path.removesuffix('values')}mask", first, first + n_rows)
            if mask.shape != stored.shape:
                raise self._store.damaged(path, "its mask has another length")
            names = [_MISSING if missing else name for name, missing in zip(names, mask.tolist(), strict=True)]
        return Text.of(names)


def _as_strings(values: NDArray[Any]) -> list[str]:
    """Names as anndata shows them: strings as they are, others as text."""
    if values.dtype.kind == "S":
        return [value.decode(errors="replace") for value in values.tolist()]
    return [value if isinstance(value, str) else _MISSING if value is None else str(value) for value in values.tolist()]
