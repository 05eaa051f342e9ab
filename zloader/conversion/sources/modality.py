"""One modality of a MuData file or Zarr, as the AnnData that it is, with the obs columns of the whole MuData.

The name of the modality follows that of the file, as in mudata: `cite.h5mu/rna`, or `cite.zarr/mod/rna`. The columns of
the whole are those that `mudata.push_obs` gives each modality. They are read one at a time, as all columns are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.sources.anndata_input import StoredInput
from zloader.conversion.sources.locations import Objects, SourceLocation
from zloader.conversion.sources.nodes import Node

_IN_FILE = re.compile(r"(.+\.h5mu)(?:/mod)?/([^/]+)/?")
_IN_ZARR = re.compile(r"(.+)/mod/([^/]+)/?")


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


class ModalityInput(StoredInput):
    """The modality `modality` of the MuData `root`. Raises SourceError, which lists the modalities, if it is not there.

    Of the columns of obs of the whole, those that a modality already has, and copies of theirs, such as `rna:n_genes`,
    are left out.
    """

    def __init__(
        self,
        root: Any,
        location: SourceLocation,
        modality: str | None,
        *,
        objects: Objects,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._whole = Node(root, location.name)
        modalities = self._whole["mod"].names() if "mod" in self._whole else []
        form = f"{location.name}/{{}}" if location.path.endswith(".h5mu") else f"{location.name}/mod/{{}}"
        if modality not in modalities:
            said = "is a MuData" if modality is None else f"has no modality {modality!r}"
            raise SourceError(
                f"{location.name} {said}: convert one of its modalities ({listed(modalities)}) by its name, such as "
                f"{form.format(modalities[0] if modalities else 'rna')}"
            )
        self._of_whole: list[str] = []
        group = self._whole["mod"][str(modality)].native
        super().__init__(group, form.format(modality), f"{location.label}/{modality}", objects=objects, close=close)
        self._of_whole = self._columns_of_whole(modalities) if f"obsmap/{modality}" in self._whole else []
        self._map = f"obsmap/{modality}"
        self.obs_columns = [*self.obs_columns, *self._of_whole]

    def _columns_of_whole(self, modalities: list[str]) -> list[str]:
        names = [str(name) for name in self._whole["obs"].attrs.get("column-order", [])]
        copies = tuple(f"{modality}:" for modality in modalities)
        return [name for name in names if name not in self.obs_columns and not name.startswith(copies)]

    def _rows_in_whole(self) -> Rows:
        """The row in the whole of each row. Raises SourceError if the whole lacks a row."""
        positions = np.asarray(self._whole[self._map].element()).reshape(-1).astype(np.int64)
        rows = np.full(self.n_rows, -1, np.int64)
        present = np.flatnonzero((positions > 0) & (positions <= self.n_rows))
        rows[positions[present] - 1] = present
        if self.n_rows and rows.min() < 0:
            raise SourceError(f"{self._whole.at}: {self._map} has no place for row {np.argmin(rows)} of {self.name}")
        return rows

    def _column(self, name: str) -> Any:
        if name not in self._of_whole:
            return super()._column(name)
        values = pd.Series(self._whole[f"obs/{name}"].element())
        rows = self._rows_in_whole()
        if len(rows) and rows.max() >= len(values):
            raise SourceError(f"{self._whole.at}: obs/{name} has {len(values)} rows, but row {rows.max()} is needed")
        return values.iloc[rows].array

    def node(self, path: str) -> Node:
        if path.startswith("obs/") and path.removeprefix("obs/") in self._of_whole:
            return self._whole[path]
        return super().node(path)
