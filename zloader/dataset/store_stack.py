"""Stores of a manifest that are written alike and have the same genes, seen as one store.

Their arrays are joined (storage/joined.py), so a fetch, a mirror and an epoch handle them as one, however many there
are. What a manifest does not record, such as an obs column with a value per row, is read from the stores themselves,
which are opened for it one by one, a few at a time.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import Listing, StoredObject, joint_fingerprint
from zloader.caching.mirror import open_array, open_mirror_directory
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, OptionError, StoreChangedError
from zloader.common.locks import cached_property, forkable_lock
from zloader.common.messages import suggestion
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import Rows
from zloader.dataset.manifest import ADVICE, absolute, labels_of, location_at, names_by_set, parsed, root_and_key
from zloader.dataset.paged_offsets import PagedOffsets
from zloader.dataset.stacked_offsets import StackedOffsets
from zloader.dataset.store import OpenedStore
from zloader.reading.matrix_parts import MatrixPart
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.recorded import joined_layout

_MOST_STORES = 1 << 14  # in a stack: the mirror of a stack is another one once a store of it has changed
_MOST_OPEN = 64
_PAGE_ROWS = 1 << 12  # of offsets: a page is read from the stores that it covers

Opener = Callable[[Location, Cache | None, bool], OpenedStore]


def stacks_of(
    manifest: Location, table: pd.DataFrame, cache: Cache | None, *, offline: bool, opens: Opener
) -> list[StoreStack]:
    """The stores of a manifest in their order, in as few stacks as that allows."""
    table = table.assign(**{name: _labels(table[name]) for name in labels_of(table)})
    roots, keys = zip(*(root_and_key(manifest, url) for url in table["url"]), strict=True)
    kinds = table[["layout", "gene_set", "obs"]].assign(root=roots)
    begins = np.flatnonzero(np.append(True, (kinds.iloc[1:].to_numpy() != kinds.iloc[:-1].to_numpy()).any(axis=1)))
    genes = {gene_set: GeneNames(text) for gene_set, text in names_by_set(table).items()}
    stacks: list[StoreStack] = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(table)], strict=True):
        for first in range(begin, end, _MOST_STORES):
            some = slice(first, min(first + _MOST_STORES, end))
            made = StoreStack(
                manifest,
                table.iloc[some],
                location_at(manifest, roots[first]),
                keys[some],
                genes[table["gene_set"].iloc[first]],
            )
            made.open(cache, number=len(stacks), offline=offline, opens=opens)
            stacks.append(made)
    return stacks


def _labels(values: pd.Series) -> pd.Series:
    """A column of labels as numbers, booleans or categories, which are the same for all stacks."""
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_complex_dtype(values):
        return values.astype(float) if values.isna().any() else values.astype(values.to_numpy().dtype)
    text = values.astype(object).where(values.isna(), values.astype(str))
    return pd.Series(pd.Categorical(text), index=values.index)


@dataclass(frozen=True, eq=False)
class GeneNames:
    """The names of the genes of some stores, by frame, in JSON. Empty if the manifest does not have them."""

    text: str

    @cached_property
    def of(self) -> Mapping[str, pd.Index]:
        """The names in `"var"` and `"raw/var"`."""
        found = parsed(self.text, "gene_names") if self.text else {}
        of_frames = {frame: names for frame, names in found.items() if frame in ("var", "raw/var")}
        for frame, names in of_frames.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise FormatError(f"gene_names of the manifest has no list of names of {frame}. {ADVICE}")
        return {frame: pd.Index(names, dtype=object) for frame, names in of_frames.items()}


@dataclass(frozen=True, kw_only=True)
class StackedNode:
    """What is known of an array of all stores, without an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attrs: Mapping[str, Any]


class StoreStack(OpenedStore):
    """Some stores of a manifest. Its rows are theirs, one store after another."""

    if_changed = ADVICE

    def __init__(
        self, manifest: Location, table: pd.DataFrame, root: Location, keys: Sequence[str], genes: GeneNames
    ) -> None:
        """Nothing is read: `table` has the rows of the manifest. The stores have these keys below `root`."""
        self.location, self._root, self._keys, self._genes = manifest, root, keys, genes
        self.labels = table[labels_of(table)]
        self.ends: Rows = np.cumsum(table["rows"].to_numpy(np.int64))
        self.n_obs = int(self.ends[-1])
        self.urls, self._stored, self._prints, self._stamps = (
            table[name].tolist() for name in ("url", "stored", "fingerprint", "stamp")
        )
        self.fingerprint = joint_fingerprint(["stack", *self._prints])
        self._layout = parsed(table["layout"].iloc[0], "layout", holds=["n_genes", "matrices"])
        self._obs = parsed(table["obs"].iloc[0], "obs", holds=["columns", "obsm"])
        self._matrices: dict[str, MatrixLayout] = {}
        self._open: OrderedDict[int, OpenedStore] = OrderedDict()
        self._lock = forkable_lock()

    def open(self, cache: Cache | None, *, number: int, offline: bool, opens: Opener) -> None:
        """Opens the mirror of the stores. `opens` opens one of them."""
        self.offline, self._opens, self._cache = offline, opens, cache
        known = cache is not None and all(self._stamps)
        self.mirror_fingerprint = joint_fingerprint(["stack", *self._stamps]) if known else None
        self.mirror_directory = None
        if cache is not None and self.mirror_fingerprint is not None:
            address = f"{self.location.address} ({number}: {len(self.urls)} stores)"
            self.mirror_directory = open_mirror_directory(cache, self.mirror_fingerprint, address)
        self._mirrors, self._offsets = {}, {}

    # ---- what the manifest records

    @cached_property
    def objects(self) -> Listing:  # type: ignore[override]
        """The objects of all recorded arrays."""
        entries = (
            (prefix + key, StoredObject(*entry))
            for prefix, stored in zip(self._prefixes, self._records, strict=True)
            for key, entry in stored["objects"].items()
        )
        try:
            return Listing(entries)
        except (TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"the objects in {self.location.url} cannot be used ({error}). {ADVICE}") from error

    @cached_property
    def _sizes(self) -> Mapping[str, int]:  # type: ignore[override]
        return self.objects.sizes

    @cached_property
    def _records(self) -> list[Mapping[str, Any]]:
        return [parsed(text, "stored", holds=["arrays", "objects"]) for text in self._stored]

    @cached_property
    def _prefixes(self) -> list[str]:
        return list(self._keys) if self._layout.get("kind") == "hdf5" else [f"{key}/" for key in self._keys]

    @property
    def n_stores(self) -> int:  # type: ignore[override]
        """How many stores there are."""
        return len(self.urls)

    @property
    def modalities(self) -> list[str]:
        return []

    @property
    def matrix_names(self) -> list[str]:
        return list(self._layout["matrices"])

    @property
    def obs_columns(self) -> list[str]:
        """The labels of the manifest, and the columns that every store has."""
        return list(dict.fromkeys([*self.labels.columns, *self._obs["columns"]]))

    def kinds(self, name: str) -> tuple[str, str]:
        """The kind of values of an obs column of the stores, as `kind_of` names it, and as `info` shows it."""
        kind, shown = self._obs["columns"][name]
        return kind, shown

    def keys(self, group: str) -> list[str]:
        if group == "layers":
            return sorted(name.removeprefix("layers/") for name in self.matrix_names if name.startswith("layers/"))
        return sorted(self._obs["obsm"]) if group == "obsm" else []

    def names(self, frame: str) -> pd.Index:
        found = self._genes.of.get(frame)
        return self.member(0).names(frame) if found is None else found

    def length(self, frame: str) -> int:
        return self.n_obs if frame == "obs" else int(self._layout["n_genes"][frame])

    def node(self, path: str) -> Any:
        group, _, name = path.partition("/")
        if group == "obsm" and name in self._obs["obsm"]:
            shape, dtype = self._obs["obsm"][name]
            return StackedNode(shape=(self.n_obs, *shape), dtype=np.dtype(dtype), attrs={})
        if group in ("obs", "obsm"):
            return StackedNode(shape=(self.n_obs,), dtype=np.dtype(object), attrs={})
        return self.member(0).node(path)

    def element(self, path: str) -> Any:
        if path.startswith(("var/", "raw/var/")):
            raise OptionError(
                f"the genes of {self.location.url} are joined by the names that were indexed: give genes_by to "
                "zl.index instead of zl.open_dataset"
            )
        return self.member(0).element(path)

    def __contains__(self, path: str) -> bool:
        return path in self.matrix_names or path in ("obs", "var")

    @property
    def root(self) -> Any:
        return self.member(0).root

    def known_columns(self, frame: str) -> list[str]:
        return self.obs_columns if frame == "obs" else []

    def known_members(self, group: str) -> set[str]:
        return set(self.obs_columns if group == "obs" else self.keys(group))

    def known_length(self, frame: str) -> int | None:
        return self.length(frame)

    # ---- matrices

    def matrix(self, name: str) -> MatrixLayout:
        if name not in self._matrices:
            if not isinstance(name, str) or name not in self.matrix_names:
                raise FormatError(
                    f"there is no matrix {name!r} in all stores of {self.location.url}; there are: "
                    f"{', '.join(self.matrix_names)}{suggestion(name, self.matrix_names)}"
                )
            with self._usable(name):
                self._matrices[name] = self._read_matrix(name)
        return self._matrices[name]

    @contextlib.contextmanager
    def _usable(self, name: str) -> Iterator[None]:
        """Raises FormatError for what the record of a matrix cannot hold, whatever it is."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise FormatError(
                f"what {self.location.url} records of {name} cannot be used ({error!r}). {ADVICE}"
            ) from error

    def _read_matrix(self, name: str) -> MatrixLayout:
        arrays = [self._joined(common) for common in self._layout["matrices"][name]["arrays"]]
        genes = arrays[0] if len(arrays) > 1 else None
        n_genes = self.length("raw/var" if name.startswith("raw/") else "var")
        if genes is None and (arrays[0].joined is None or (arrays[0].joined.ends != self.ends * n_genes).any()):
            raise ValueError("its values are not rows x genes")
        return MatrixLayout(path=name, n_rows=self.n_obs, n_genes=n_genes, values=arrays[-1], genes=genes)

    def _joined(self, common: Mapping[str, Any]) -> ArrayLayout:
        own = [self._own(store, common["path"]) for store in range(len(self.urls))]
        layout = joined_layout(common, own, self._prefixes)
        Decoder(layout)  # raises an error for codecs that do not exist
        return layout

    def _own(self, store: int, path: str) -> Sequence[Any]:
        own = self._records[store]["arrays"].get(path)
        if not isinstance(own, list) or len(own) != 3:
            raise FormatError(f"{self.location.url} has no record of {path} of {self.urls[store]}. {ADVICE}")
        return own

    def shape(self, name: str) -> tuple[int, int]:
        matrix = self.matrix(name)
        return matrix.n_rows, matrix.n_genes

    def offsets(self, matrix: MatrixLayout) -> NDArray[np.integer] | PagedOffsets | None:
        if matrix.genes is None:
            return None
        if matrix.path not in self._offsets:
            assert matrix.values.joined is not None
            genes = matrix.genes.joined
            if genes is None or (genes.ends != matrix.values.joined.ends).any():
                raise FormatError(f"{self.location.url} has stores with more values than genes. {ADVICE}")
            pages = ArrayLayout.plain(
                f"{matrix.path}/indptr", np.dtype(np.int64), n_elements=self.n_obs + 1, chunk_elements=_PAGE_ROWS
            )
            mirror = None if self.mirror_directory is None else open_array(self.mirror_directory, pages)
            with self._usable(matrix.path):
                part = self._offsets_part(matrix.path)
            self._offsets[matrix.path] = StackedOffsets(
                pages,
                part,
                row_ends=self.ends,
                value_ends=matrix.values.joined.ends,
                urls=self.urls,
                where=f"{matrix.path}/indptr of {self.location.url}",
                mirror=mirror,
            )
        return self._offsets[matrix.path]

    def _offsets_part(self, matrix: str) -> MatrixPart:
        """The offsets of all stores. Those of store k are row k."""
        layout = self._joined(self._layout["matrices"][matrix]["indptr"])
        assert layout.joined is not None
        return MatrixPart(
            url=self._root.url,
            matrix=MatrixLayout(path=layout.path, n_rows=len(self.urls), n_genes=1, values=layout, genes=None),
            indptr=np.append(0, layout.joined.ends),
            object_sizes=self._sizes,
            source=self.source(FetchOptions()),
            mirror=None,
        )

    @property
    def named(self) -> str:
        more = f" and {self.n_stores - 1} more stores" if self.n_stores > 1 else ""
        return f"{absolute(self.location, self.urls[0])}{more} (in {self.location.url})"

    @property
    def read_from(self) -> Location:
        return self._root

    def recorded_dtypes(self, path: str) -> dict[str, Any]:
        return dict(self._layout["matrices"][path]["dtypes"])

    # ---- the stores themselves

    def member(self, store: int) -> OpenedStore:
        """One of the stores, opened. Raises StoreChangedError if it has changed since it was indexed."""
        with self._lock:
            if store in self._open:
                self._open.move_to_end(store)
                return self._open[store]
        url = absolute(self.location, self.urls[store])
        if self.offline and store:
            raise OptionError(f"{url} has to be opened for this, and {self.location.url} was opened offline")
        # The first one has a mirror, for var. The others would need a directory each.
        opened = self._opens(location_at(self.location, url), None if store else self._cache, self.offline)
        if opened.fingerprint != self._prints[store]:
            raise StoreChangedError(f"{url} has changed since it was indexed in {self.location.url}. {ADVICE}")
        with self._lock:
            self._open[store] = opened
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return opened
