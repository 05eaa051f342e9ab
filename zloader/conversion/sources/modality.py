"""A MuData file or Zarr as a source: the whole, or one modality as an AnnData with the obs columns of the whole.

The name of the modality follows that of the file, as in mudata: `cite.h5mu/rna`, or `cite.zarr/mod/rna`. The columns of
the whole are those that `mudata.push_obs` gives each modality. They are read one at a time, as all columns are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from zloader.common.errors import SourceError
from zloader.common.locks import cached_property
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.sources.anndata_input import Input, StoredInput, column_of
from zloader.conversion.sources.locations import Objects, SourceLocation
from zloader.conversion.sources.nodes import Node, reading, require_names
from zloader.selecting.row_maps import RowMap, checked_map, in_whole
from zloader.storage.metadata import stored_length

_IN_FILE = re.compile(r"(?s)(.+\.h5mu)(?:/mod)?/([^/]+)/?")
_IN_ZARR = re.compile(r"(?s)(.+)/mod/([^/]+)/?")


def split_modality(source: str) -> tuple[str, str | None]:
    """The file that `FILE.h5mu/NAME` names, and the modality; None for any other path or URL."""
    found = _IN_FILE.fullmatch(source)
    return (found[1], found[2]) if found else (source, None)


def whole_of(location: SourceLocation) -> tuple[SourceLocation, str] | None:
    """The MuData Zarr and the name of the modality, of a location that ends with /mod/NAME."""
    found = [_IN_ZARR.fullmatch(part) for part in (location.url, location.name, location.path)]
    if not all(found):
        return None
    url, name, path = (match[1] for match in found if match)
    return dataclasses.replace(location, url=url, name=name, path=path), str(found[2][2]) if found[2] else ""


def is_mudata(root: Node) -> bool:
    """Whether a group is a MuData."""
    return str(root.attrs.get("encoding-type")) == "MuData" or ("mod" in root and "obsmap" in root)


class MuDataInput(StoredInput):
    """A whole MuData: the elements of its root, which is no AnnData, and its `modalities` in their order.

    Raises SourceError for a MuData without modalities, or whose modalities share genes instead of rows.
    """

    def __init__(
        self, root: Any, location: SourceLocation, *, objects: Objects, close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(root, location.name, location.label, objects=objects, close=close)
        form, names = _form_of(location), modalities_of(self._root)
        if not names:
            raise SourceError(f"{self.name} is a MuData without modalities: there is nothing to convert")
        require_names(f"{self.name}: mod", names)
        for name in names:
            if is_mudata(self._root["mod"][name]):
                raise SourceError(
                    f"the modality {name!r} of {self.name} is a MuData itself: convert its modalities one by one, or "
                    "make them modalities of the whole"
                )
        axis = self._root.attrs.get("axis", 0)
        if axis != 0:
            raise SourceError(
                f"the modalities of {self.name} share genes (axis {axis}), and not only rows: convert them one by one, "
                f"such as {form.format(names[0])}"
            )
        self.modalities = {
            name: StoredInput(self._root["mod"][name].native, form.format(name), f"{self.label}/{name}", objects=[])
            for name in names
        }
        self._maps: dict[str, RowMap] = {}

    def row_of(self, modality: str) -> RowMap:
        """For each row of the whole, its row in a modality, or -1. Raises SourceError if the map is damaged."""
        if modality not in self._maps:
            self._maps[modality] = _map_of(self._root, modality, self.modalities[modality].n_rows)
        return self._maps[modality]


def require_anndata(inputs: Sequence[Input]) -> None:
    """Raises SourceError, which lists the modalities, for a whole MuData."""
    for source in inputs:
        if isinstance(source, MuDataInput):
            first = next(iter(source.modalities.values()))
            raise SourceError(
                f"{source.name} is a MuData, and an AnnData is needed: name one of its modalities "
                f"({listed(source.modalities)}), such as {first.name}"
            )


def modalities_of(root: Node) -> list[str]:
    """The names of the modalities of a MuData, in their order."""
    if "mod" not in root or root["mod"].is_array:
        return []
    names, order = root["mod"].names(), root["mod"].attrs.get("mod-order")
    named = [] if order is None else [str(name) for name in order]
    return named if sorted(named) == names else names


def _form_of(location: SourceLocation) -> str:
    """The name of a modality of a MuData, with {} for its own name."""
    return f"{location.name}/{{}}" if location.path.endswith(".h5mu") else f"{location.name}/mod/{{}}"


def _map_of(root: Node, modality: str, n_rows: int) -> RowMap:
    path = f"obsmap/{modality}"
    if path not in root:
        raise SourceError(
            f"{root.at} does not say which rows its modality {modality!r} has ({path}): open it with mudata 0.2 or "
            "later, run mdata.update(), and write it again"
        )
    frame = root["obs"]
    with reading(f"{root.at}: obs"):
        n_whole = stored_length(frame[str(frame.attrs["_index"])].native)

    def refused(why: str) -> SourceError:
        return SourceError(f"{root.at}: {path} cannot be used because {why}: the file is damaged")

    return checked_map(np.asarray(root[path].element()), n_whole=n_whole or 0, n_rows=n_rows, refused=refused)


class ModalityInput(StoredInput):
    """The modality `modality` of the MuData `root`. Raises SourceError, which lists the modalities, if it is not there.

    Of the columns of obs of the whole, those that a modality already has, and copies of theirs, such as `rna:n_genes`,
    are left out.
    """

    def __init__(
        self,
        root: Any,
        location: SourceLocation,
        modality: str,
        *,
        objects: Objects,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._whole, self._modality = Node(root, location.name), modality
        form, modalities = _form_of(location), modalities_of(self._whole)
        if modality not in modalities:
            raise SourceError(
                f"{location.name} has no modality {modality!r}: name one of its modalities ({listed(modalities)}), "
                f"such as {form.format(modalities[0] if modalities else 'rna')}"
            )
        self._of_whole: list[str] = []
        group = self._whole["mod"][modality].native
        super().__init__(group, form.format(modality), f"{location.label}/{modality}", objects=objects, close=close)
        if f"obsmap/{modality}" in self._whole:
            names = [str(name) for name in self._whole["obs"].attrs.get("column-order", [])]
            copies = tuple(f"{each}:" for each in modalities)
            self._of_whole = [n for n in names if n not in self.obs_columns and not n.startswith(copies)]
            self.obs_columns = [*self.obs_columns, *self._of_whole]

    @cached_property
    def _rows_in_whole(self) -> Rows:
        return in_whole(_map_of(self._whole, self._modality, self.n_rows), self.n_rows)

    def _column(self, name: str) -> Any:
        if name not in self._of_whole:
            return super()._column(name)
        values = pd.Series(column_of(self._whole["obs"], self._whole[f"obs/{name}"]))
        rows = self._rows_in_whole
        if len(rows) and rows.max() >= len(values):
            raise SourceError(f"{self._whole.at}: obs/{name} has {len(values)} rows, but row {rows.max()} is needed")
        return values.iloc[rows].array

    def node(self, path: str) -> Node:
        if path.startswith("obs/") and path.removeprefix("obs/") in self._of_whole:
            return self._whole[path]
        return super().node(path)
