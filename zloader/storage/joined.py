"""Arrays of many stores that are stored alike, as one array. Pure.

Elements and chunks of the stores follow one another. The chunks of each store have a size of their own, because writers
choose it by the size of the array.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zloader.common.locks import cached_property
from zloader.common.records import Rows, Span
from zloader.storage.placement import Index, Placement


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedGrid:
    """Store k has the elements before `ends[k]`, in chunks of `widths[k]`. Its last chunk holds what is left."""

    ends: Rows
    widths: Rows

    @cached_property
    def n_chunks(self) -> Rows:
        """The number of chunks of each store."""
        return -(-np.diff(self.ends, prepend=0) // self.widths)

    @cached_property
    def _begins(self) -> Rows:
        return self.ends - np.diff(self.ends, prepend=0)

    @cached_property
    def _first_chunks(self) -> Rows:
        return np.cumsum(self.n_chunks) - self.n_chunks

    def chunk_of(self, elements: Rows) -> Rows:
        """The chunk of each element."""
        stores = np.searchsorted(self.ends, elements, side="right")
        return self._first_chunks[stores] + (elements - self._begins[stores]) // self.widths[stores]

    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first element of each chunk, and the element after its last."""
        stores = self._stores(chunks)
        first = self._begins[stores] + (chunks - self._first_chunks[stores]) * self.widths[stores]
        return first, np.minimum(first + self.widths[stores], self.ends[stores])

    def width(self, chunks: Rows) -> Rows:
        """The elements of each chunk as it is stored, padded at the end of a store."""
        return self.widths[self._stores(chunks)]

    def _stores(self, chunks: Rows) -> Rows:
        return np.searchsorted(self._first_chunks + self.n_chunks, chunks, side="right")


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedPlacement(Placement):
    """The objects of all stores, one store after another, with the keys of store k below `prefixes[k]`.

    Store k has `n_chunks[k]` chunks, placed by `parts[k]`.
    """

    prefixes: Sequence[str]
    parts: Sequence[Placement]
    n_chunks: Rows

    @cached_property
    def chunks_per_object(self) -> int:  # type: ignore[override]
        """Chunks of the largest object."""
        return max((part.chunks_per_object for part in self.parts), default=1)

    @cached_property
    def index_bytes(self) -> int:  # type: ignore[override]
        """Of the largest object."""
        return max((part.index_bytes for part in self.parts), default=0)

    def index_bytes_of(self, number: int) -> int:
        return self.parts[self._own(number)[0]].index_bytes

    @cached_property
    def _first_objects(self) -> Rows:
        """The first object of each store, and the number of all."""
        numbers = [part.n_objects(n) for part, n in zip(self.parts, self.n_chunks.tolist(), strict=True)]
        return np.cumsum([0, *numbers], dtype=np.int64)

    @cached_property
    def _first_chunks(self) -> Rows:
        """The first chunk of each object, and the number of all."""
        ends = np.cumsum(self.n_chunks)
        begins, n_objects = ends - self.n_chunks, np.diff(self._first_objects)
        within = np.arange(self._first_objects[-1]) - np.repeat(self._first_objects[:-1], n_objects)
        per_object = np.array([part.chunks_per_object for part in self.parts], np.int64)
        return np.append(np.repeat(begins, n_objects) + within * np.repeat(per_object, n_objects), ends[-1:])

    def object_of(self, chunks: Rows) -> Rows:
        return np.searchsorted(self._first_chunks[:-1], chunks, side="right") - 1

    def first_chunk(self, objects: Rows) -> Rows:
        return self._first_chunks[objects]

    def n_objects(self, n_chunks: int) -> int:
        return int(self._first_objects[-1])

    def stored_bytes(self, objects: range, object_sizes: Mapping[str, int]) -> tuple[int, int]:
        n_bytes = n_chunks = 0
        for number in objects:
            store, own = self._own(number)
            sizes = {self.parts[store].key(own): object_sizes.get(self.key(number), 0)}
            n_bytes += self.parts[store].stored_bytes(range(own, own + 1), sizes)[0]
            n_chunks += int(self._first_chunks[number + 1] - self._first_chunks[number])
        return n_bytes, n_chunks

    def key(self, number: int) -> str:
        store, own = self._own(number)
        return self.prefixes[store] + self.parts[store].key(own)

    def index(self, number: int, object_size: int) -> Span | Index:
        store, own = self._own(number)
        found = self.parts[store].index(own, object_size)
        return Span(key=self.key(number), start=found.start, stop=found.stop) if isinstance(found, Span) else found

    def parse(self, stored: bytes, number: int, object_size: int) -> Index:
        store, own = self._own(number)
        return self.parts[store].parse(stored, own, object_size)

    def _own(self, number: int) -> tuple[int, int]:
        """The store of an object, and the number of the object there."""
        store = bisect.bisect_right(self._firsts, number) - 1
        return store, number - self._firsts[store]

    @cached_property
    def _firsts(self) -> list[int]:
        found: list[int] = self._first_objects.tolist()  # searching one number in a list is ten times as fast
        return found
