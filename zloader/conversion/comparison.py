"""Compares every value of a store with its sources: two contents, window by window and element by element.

Equal bits, NaNs and missing values count as equal. The first difference of each matrix, column or element is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from zloader.common.errors import (
    CorruptChunkError,
    FormatError,
    MissingObjectError,
    OptionError,
    SourceError,
    TruncatedObjectError,
)
from zloader.common.progress import Bars
from zloader.common.records import Rows
from zloader.conversion.elements import ElementWriter, values_of
from zloader.conversion.encode import ConvertOptions
from zloader.conversion.hierarchy import Findings
from zloader.conversion.port import Matrix, Opened, Part, Window
from zloader.conversion.reorder import SOURCE_ROW
from zloader.conversion.selection import RENAMED, Selection
from zloader.dataset.store import OpenedStore
from zloader.selecting.gene_names import GenesBy

DAMAGED = (FormatError, CorruptChunkError, TruncatedObjectError, MissingObjectError)
AGAINST = "against"  # the `where` of problems that concern the sources
_LACKING, _MORE = "is in the sources, but not in the store", "is in the store, but not in the sources"
_SHOWN = 60  # characters of a value
_GROUPS = ("layers", "obsm", "obsp", "varm", "varp", "raw/varm", "obsmap", "varmap")


def compare(store: OpenedStore, in_store: Opened, in_sources: Opened, findings: Findings, bars: Bars) -> set[str]:
    """Reports the first difference of every element. Returns the paths of matrices that are canonical and equal."""
    _compare_sources(store.root.attrs.get("zloader", {}).get("sources"), in_sources, findings)
    stored = {part.path: part for part in in_store.parts}
    wanted = {part.path: part for part in in_sources.parts}
    for path in stored.keys() - wanted.keys():
        findings.add(path, _MORE)
    equal = set[str]()
    for path, part in wanted.items():
        kind = part.attributes["encoding-type"]
        if path in stored and stored[path].attributes["encoding-type"] == kind:
            comparison = _Comparison(part, stored[path], store, findings, bars)
            comparison.run()
            equal |= {part.at(name) for name in comparison.equal}
        else:
            findings.add(path or AGAINST, f"is no {kind} in the store, but one in the sources")
    return equal


def arrangement(store: OpenedStore, in_store: Opened, genes_by: GenesBy) -> tuple[Selection, dict[str, Any]]:
    """What was chosen of the sources of a store, and the order of the rows. Raises OptionError if `genes_by` lacks."""
    provenance: Mapping[str, Any] = store.root.attrs.get("zloader", {})
    content, order = in_store.parts[0].content, None
    if provenance.get("order") is not None:  # ConvertOptions checks that it has each row once
        order = ConvertOptions(order=content.obs_column(SOURCE_ROW).to_numpy()).order
    chosen = dict(provenance.get("select") or {})
    recorded = chosen.get("genes_by", chosen.pop("gene_column", None))  # its name in stores of earlier versions
    if genes_by is None and recorded == RENAMED:
        raise OptionError("genes were given new names, which the store does not keep: repeat genes_by (--genes-by)")
    chosen["genes_by"] = recorded if genes_by is None else genes_by
    if "genes" in chosen:
        chosen["genes"] = list(content.var.index)
    return Selection(**chosen), {"shuffle_seed": provenance.get("shuffle_seed"), "order": order}


@contextlib.contextmanager
def reporting(findings: Findings, where: str, said: str = "cannot be compared: ") -> Iterator[None]:
    """Reports an error of the sources or the stored elements as a problem."""
    try:
        yield
    except (SourceError, OptionError, *DAMAGED) as error:
        findings.add(where, f"{said}{error}")


def _compare_sources(recorded: Any, found: Opened, findings: Findings) -> None:
    if recorded is not None and len(recorded) != len(found.n_rows):
        labels = ", ".join(str(source["label"]) for source in recorded)
        findings.add(AGAINST, f"the store was made from {len(recorded)} sources ({labels}), not {len(found.n_rows)}")
    for before, name, n_rows in zip(recorded or (), found.names, found.n_rows, strict=False):
        if before["rows"] != n_rows:
            what = f"has {n_rows} rows, but {before['label']} had {before['rows']} when the store was made"
            findings.add(AGAINST, f"{name} {what}")


class _Comparison:
    """Compares one part of a store with the part that it should be."""

    def __init__(self, wanted: Part, found: Part, store: OpenedStore, findings: Findings, bars: Bars) -> None:
        self._part, self._wanted, self._found = wanted, wanted.content, found.content
        self._store, self._findings, self._bars = store, findings, bars
        self.equal: list[str] = []  # matrices that are canonical and equal

    def run(self) -> None:
        """Reports the first difference of every element."""
        self._compare_obs()
        frames = {"var": (self._wanted.var, self._found.var), "raw/var": (self._wanted.raw_var, self._found.raw_var)}
        for path, (wanted, found) in frames.items():
            with reporting(self._findings, self._part.at(path)):
                if wanted is not None and found is not None:
                    self._add_all(element_differences(path, wanted, found, "gene"))
        in_sources = {*self._compare_matrices(), *self._compare_elements()}
        # All elements but obs, var, raw/var and uns, whose entries have been compared one by one.
        below = [f"{group}/{name}" for group in _GROUPS for name in self._store.keys(self._part.at(group))]
        for path in [*(matrix.name for matrix in self._found.matrices()), *below]:
            if path not in in_sources:
                self._add(path, _MORE)

    def _add(self, path: str, what: str) -> None:
        self._findings.add(self._part.at(path), what)

    def _add_all(self, found: Iterator[tuple[str, str]]) -> None:
        for path, what in found:
            self._add(path, what)

    def _is_comparable(self, path: str) -> bool:
        if self._part.at(path) not in self._store:
            self._add(path, _LACKING)
            return False
        if self._part.at(path) in self._findings:
            self._add(path, "is damaged, so it was not compared with the sources")
            return False
        return True

    def _compare_obs(self) -> None:
        wanted, found, n_stored = self._wanted, self._found, -1
        with reporting(self._findings, self._part.at("obs")):
            names, stored = wanted.obs_names(), found.obs_names()
            n_stored = len(stored)
            if len(names) != len(stored):
                self._add("obs", f"has {len(stored)} rows, but {len(names)} in the sources")
            n = min(len(names), len(stored))
            self._add_all(element_differences("obs/_index", names[:n], stored[:n], "row"))
            for name in sorted({*wanted.obs_columns} ^ {*found.obs_columns}):
                self._add(f"obs/{name}", _LACKING if name in wanted.obs_columns else _MORE)
            if wanted.obs_columns != found.obs_columns and sorted(wanted.obs_columns) == sorted(found.obs_columns):
                self._add("obs", f"its columns are in another order: {in_both(found.obs_columns, wanted.obs_columns)}")
        for name in wanted.obs_columns if n_stored == wanted.n_rows else ():
            with reporting(self._findings, self._part.at(f"obs/{name}")):
                if name in found.obs_columns and self._is_comparable(f"obs/{name}"):
                    columns = wanted.obs_column(name), found.obs_column(name)
                    self._add_all(element_differences(f"obs/{name}", *columns, "row"))

    def _compare_matrices(self) -> Iterator[str]:
        stored = {matrix.name: matrix for matrix in self._found.matrices()}
        for wanted in self._wanted.matrices():
            path = wanted.name
            yield path
            with contextlib.ExitStack() as opened, reporting(self._findings, self._part.at(path)):
                opened.enter_context(wanted)
                if not self._is_comparable(path):
                    continue
                if (found := stored.get(path)) is None:
                    self._add(path, "is no matrix in the store, but one in the sources")
                elif self._has_its_form(wanted, opened.enter_context(found)):
                    self._compare_matrix(wanted, found)

    def _has_its_form(self, wanted: Matrix, found: Matrix) -> bool:
        """Whether a matrix is sparse or dense, as in the sources, and has its shape. Reports also another dtype."""
        dtype = self._store.recorded_dtypes(self._part.at(wanted.name)).get("data", str(found.dtype))
        forms = {
            "dtype": (dtype, str(wanted.dtype)),
            "form": ("dense" if found.dense else "sparse", "dense" if wanted.dense else "sparse"),
            "shape": ((found.n_rows, found.n_genes), (wanted.n_rows, wanted.n_genes)),
        }
        differing = [name for name, (stored, given) in forms.items() if stored != given]
        for name in differing:
            self._add(wanted.name, f"has {name} {forms[name][0]}, but {forms[name][1]} in the sources")
        return differing in ([], ["dtype"])

    def _compare_matrix(self, wanted: Matrix, found: Matrix) -> None:
        advance = self._bars.add(f"comparing {wanted.name}", wanted.n_rows)
        common, first, n_rows, row, mended = np.result_type(wanted.dtype, found.dtype), "", 0, 0, 0

        def windows() -> Iterator[Window]:
            nonlocal mended
            for window in found.windows():
                mended += len(window.mended)
                yield window

        for one, other in _in_step(wanted.windows(), windows()):
            same = np.array_equal(one.lengths, other.lengths) and np.array_equal(one.genes, other.genes)
            values = [window.values.astype(common, copy=False) for window in (one, other)]
            if not same or bits_differ(values[0], values[1]).any():
                ones, others = (
                    _by_place(part, window, wanted.n_genes) for part, window in zip(values, (one, other), strict=True)
                )
                places = _differing(ones, others)
                if not first:
                    at_row, column = divmod(int(places[0]), wanted.n_genes)
                    where = f"row {row + at_row}, {self._column_name(wanted.name, column)}"
                    first = f"{where}: {in_both(others.get(places[0]), ones.get(places[0]))}"
                n_rows += len(np.unique(places // wanted.n_genes))
            row += len(one.lengths)
            advance(len(one.lengths))
        if not first and not mended and row == found.n_rows:
            self.equal.append(wanted.name)
        if first:
            self._add(wanted.name, f"{first}; {'1 row differs' if n_rows == 1 else f'{n_rows} rows differ'}")

    def _column_name(self, matrix: str, column: int) -> str:
        if matrix.startswith("obsm/"):
            return f"column {column}"
        if matrix.startswith("obsp/"):
            return f"column {column} ({self._wanted.obs_names()[column]!r})"
        raw_var = self._wanted.raw_var if matrix == "raw/X" else None
        genes = self._wanted.var if raw_var is None else raw_var
        return f"gene {genes.index[column]!r} ({column})"

    def _compare_elements(self) -> Iterator[str]:
        for path, element in self._wanted.elements():
            yield path
            with reporting(self._findings, self._part.at(path)):
                is_empty = path == "uns" and self._part.at(path) not in self._store
                if is_empty or self._is_comparable(path):
                    found = {} if is_empty else self._store.element(self._part.at(path))
                    self._add_all(element_differences(path, element, found))


def _in_step(ones: Iterator[Window], others: Iterator[Window]) -> Iterator[tuple[Window, Window]]:
    """Pairs of windows of the same rows."""
    one = other = None
    while True:
        one, other = one or next(ones, None), other or next(others, None)
        if one is None or other is None:
            return
        n = min(len(one.lengths), len(other.lengths))
        yield one.between(0, n), other.between(0, n)
        one, other = (
            window.between(n, len(window.lengths)) if n < len(window.lengths) else None for window in (one, other)
        )


def _by_place(values: NDArray[Any], window: Window, n_columns: int) -> pd.Series:
    """The values of a window by place, which is row * n_columns + column."""
    places = np.repeat(np.arange(len(window.lengths), dtype=np.int64), window.lengths) * n_columns
    places += window.genes if len(window.genes) else np.arange(len(places)) % max(1, n_columns)
    return pd.Series(values, index=places)


def _differing(one: pd.Series, other: pd.Series) -> Rows:
    """The ascending places of values that differ or that only one of two has."""
    both = one.index.intersection(other.index)
    changed = both[bits_differ(one[both].to_numpy(), other[both].to_numpy())]
    return np.asarray(changed.union(one.index.symmetric_difference(other.index)), np.int64)


# ---- elements, as the arrays that anndata makes of them


def arrays_of(element: Any) -> dict[str, Any]:
    """The arrays of an element as it is stored, and the attributes of its groups, by path; its own path is ""."""
    if isinstance(element, pd.Series | pd.Index):
        is_plain = isinstance(element.dtype, pd.StringDtype) and not element.hasnans
        element = element.to_numpy(object) if is_plain else values_of(element)
    root = zarr.create_group(MemoryStore(), zarr_format=3)
    ElementWriter(root, ConvertOptions(codec="none"), of="the sources").write("element", element)
    whole = root["element"]
    members = whole.members(max_depth=None) if isinstance(whole, zarr.Group) else ()
    made: dict[str, Any] = {}
    for path, node in [("", whole), *sorted(members)]:
        made[path] = np.asarray(node[...]) if isinstance(node, zarr.Array) else dict(node.attrs)
        if isinstance(node, zarr.Array) and made[path].dtype.kind in "UT":
            made[path] = made[path].astype(object)
        above, _, name = path.rpartition("/")
        if name == "values" and str(made[above].get("encoding-type")).startswith("nullable"):
            made[path][made[f"{path.removesuffix('values')}mask"]] = made[path].dtype.type()  # whatever is there
    return made


def element_differences(path: str, wanted: Any, found: Any, axis: str = "entry") -> Iterator[tuple[str, str]]:
    """The path and the first difference of each part of an element that differs. `axis` names an entry."""
    # Columns usually are equal, which pandas sees at once, although 0.0 equals -0.0 there.
    is_column = isinstance(wanted, pd.Series | pd.Index) and wanted.dtype == found.dtype
    if is_column and wanted.dtype.kind not in "fc" and pd.Series(wanted.array).equals(pd.Series(found.array)):
        return
    ones, others = arrays_of(wanted), arrays_of(found)
    apart: set[str] = set()  # the paths of which nothing below is compared
    for part in sorted({*ones, *others}):
        above, _, name = part.rpartition("/")
        if part and above in apart:
            apart.add(part)
            continue
        one, other, said, at = ones.get(part), others.get(part), "", f"{path}/{part}".rstrip("/")
        if part and isinstance(ones[above], dict) and ones[above]["encoding-type"] not in ("dict", "dataframe"):
            said, at = f"its {name} ", f"{path}/{above}".rstrip("/")
        if one is None or other is None or isinstance(one, dict) != isinstance(other, dict):
            apart.add(part)
            what = _LACKING if other is None else _MORE if one is None else "is of another kind in the sources"
            yield at, said + what
        elif isinstance(one, dict):
            if sorted(one.get("column-order", ())) != sorted(other.get("column-order", ())):  # as its columns say
                one, other = ({**each, "column-order": []} for each in (one, other))
            for key in sorted(one.keys() | other.keys()):
                if one.get(key) != other.get(key):
                    yield at, f"its {key} is {in_both(other.get(key), one.get(key))}"
            if one["encoding-type"] != other["encoding-type"]:
                apart.add(part)
        elif (differing := _difference(one, other, axis)) is not None:
            yield at, said + differing


def _difference(values: NDArray[Any], stored: NDArray[Any], axis: str) -> str | None:
    # anndata reads a number as one of Python's, and text in records as wide as its longest.
    if values.dtype.kind == stored.dtype.kind and (values.dtype.names or not values.shape):
        common = np.promote_types(values.dtype, stored.dtype)
        values, stored = values.astype(common), stored.astype(common)
    for part in ("dtype", "shape"):
        if getattr(values, part) != getattr(stored, part):
            return f"has {part} {getattr(stored, part)}, but {getattr(values, part)} in the sources"
    differ = bits_differ(values, stored)
    if not differ.any():
        return None
    first = tuple(np.argwhere(differ)[0].tolist())
    at = f"{axis} {', '.join(map(str, first))}: " if first else ""
    return f"{at}{in_both(stored[first], values[first])}; {np.count_nonzero(differ)} differ"


def bits_differ(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Where two arrays of equal dtype and shape differ. -0.0 differs from 0.0; NaN equals NaN."""
    if one.dtype.names and one.size:
        fields = [bits_differ(one[name], other[name]) for name in one.dtype.names]
        differing: NDArray[np.bool_] = np.logical_or.reduce(
            [field.reshape(*one.shape, -1).any(axis=-1) for field in fields]
        )
        return differing
    if one.dtype.kind in "fmM" and one.dtype.itemsize <= 8:
        bits = f"u{one.dtype.itemsize}"
        differ = np.asarray(one, order="C").view(bits) != np.asarray(other, order="C").view(bits)
    else:
        differ = one != other
    differ = np.asarray(differ, bool)
    if one.dtype.kind in "fc" and differ.any():
        differ &= ~(np.isnan(one) & np.isnan(other))
    return differ


def in_both(found: Any, wanted: Any) -> str:
    """A stored value and the value of the sources, for a message."""
    return f"{_shown(found)} in the store, but {_shown(wanted)} in the sources"


def _shown(value: Any) -> str:
    if value is None or value is pd.NA:
        return "nothing"
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
