"""The modalities of a MuData store: which matrices and obs columns they have, and which rows of the whole.

MuData keeps each modality as an AnnData of its own in `mod/NAME`, and in `obsmap/NAME`, for each row of the whole, the
number of its row there, counted from 1, or 0 if the modality lacks it. Nothing is aligned in memory: rows are looked up
when they are read, in 4 bytes per row and modality.

A matrix of a modality is named `NAME:X`, `NAME:raw/X` or `NAME:layers/LAYER`, and an obs column `NAME:COLUMN`, as
muon names them. So are its obsm arrays, `NAME:X_pca`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import FormatError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.dataset.elements import StoredElements
from zloader.selecting.row_maps import RowMap, checked_map, is_whole, looked_up

MUDATA = "MuData"
_MATRIX = re.compile(r"([^/]+):(X|raw/X|layers/.+)", re.DOTALL)
_PATH = re.compile(r"mod/([^/]+)/.+", re.DOTALL)


def path_of(x: str) -> str:
    """The path of a matrix in its store: `mod/rna/layers/counts` for `rna:layers/counts`."""
    named = _MATRIX.fullmatch(x)
    return x if named is None else f"mod/{named[1]}/{named[2]}"


def modality_of(x: str) -> str | None:
    """The modality that a matrix belongs to, by its name; None in an AnnData."""
    named = _MATRIX.fullmatch(x)
    return None if named is None else named[1]


def frame_of(x: str) -> str:
    """The path of the frame that describes the columns of a matrix."""
    named = _MATRIX.fullmatch(x)
    above, matrix = ("", x) if named is None else (f"mod/{named[1]}/", named[2])
    return f"{above}raw/var" if matrix.startswith("raw/") else f"{above}var"


def obs_of(x: str) -> str:
    """The path of the frame that describes the rows of a matrix."""
    named = _MATRIX.fullmatch(x)
    return "obs" if named is None else f"mod/{named[1]}/obs"


class ModalElements(StoredElements):
    """The elements of an AnnData or MuData store."""

    @cached_property
    def modalities(self) -> list[str]:
        """The names of the modalities, in their order; none in an AnnData."""
        if self.root.attrs.get("encoding-type") != MUDATA:
            return []
        names = self.keys("mod")
        order = self.node("mod").attrs.get("mod-order", names)
        return [str(name) for name in order] if sorted(map(str, order)) == names else names

    @cached_property
    def matrix_names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers of this store, or those of its modalities."""
        if not self.modalities:
            return self._matrices_in("")
        return [f"{each}:{name}" for each in self.modalities for name in self._matrices_in(f"mod/{each}/")]

    def _matrices_in(self, above: str) -> list[str]:
        layers = [f"layers/{layer}" for layer in self.keys(f"{above}layers")]
        return [name for name in ("X", "raw/X") if f"{above}{name}" in self] + layers

    @cached_property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns, in the order of the frame, and then those of the modalities."""
        return [*self.columns("obs"), *self._columns_of_modalities]

    def modality_of_column(self, name: str) -> tuple[str, str] | None:
        """The modality that an obs column belongs to, and its name there; None for a column of the whole."""
        return self._columns_of_modalities.get(name)

    @cached_property
    def _columns_of_modalities(self) -> dict[str, tuple[str, str]]:
        """The modality and the name there of each obs column of a modality. A column of the whole goes before it."""
        found: dict[str, tuple[str, str]] = {}
        for each in self.modalities:
            for column in self.columns(f"mod/{each}/obs"):
                found.setdefault(f"{each}:{column}", (each, column))
        return {name: of for name, of in found.items() if name not in self.columns("obs")}

    @cached_property
    def obsm_paths(self) -> dict[str, str]:
        """The paths of the obsm entries by name: those of the whole, and then `rna:NAME` of the modality rna."""
        found = {name: f"obsm/{name}" for name in self.keys("obsm")}
        for each in self.modalities:
            for name in self.keys(f"mod/{each}/obsm"):
                found.setdefault(f"{each}:{name}", f"mod/{each}/obsm/{name}")
        return found

    def modality_at(self, path: str) -> str | None:
        """The modality that an element at a path belongs to; None for one of the whole, and in an AnnData."""
        named = _PATH.fullmatch(path) if self.modalities else None
        return None if named is None else named[1]

    def rows_at(self, path: str) -> int:
        """The number of rows of the whole or of the modality that an element at a path belongs to."""
        modality = self.modality_at(path)
        return self.n_obs if modality is None else self.length(f"mod/{modality}/obs")

    def row_of(self, path: str) -> RowMap | None:
        """For each row of the whole, its row in the modality whose element is at a path, or -1.

        None if they are the same rows, and for an element that belongs to no modality.
        """
        modality = self.modality_at(path)
        return None if modality is None else self.rows_of(modality)

    def rows_in(self, path: str, rows: Rows) -> Rows:
        """The rows of the matrix at a path for some rows of the whole, without those that it lacks."""
        row_of = self.row_of(path)
        return rows if row_of is None else looked_up(row_of, rows)[0]

    def rows_of(self, modality: str) -> RowMap | None:
        """As `row_of`, for a modality by name. Raises FormatError if its rows are not given, or do not exist."""
        if modality not in self._rows:
            self._rows[modality] = self._read_rows(modality)
        return self._rows[modality]

    def has_rows(self, modality: str) -> NDArray[np.bool_]:
        """Which rows of the whole a modality has."""
        row_of = self.rows_of(modality)
        return np.ones(self.n_obs, bool) if row_of is None else row_of >= 0

    @cached_property
    def _rows(self) -> dict[str, RowMap | None]:
        return {}

    def _read_rows(self, modality: str) -> RowMap | None:
        path, n_rows = f"obsmap/{modality}", self.length(f"mod/{modality}/obs")
        if path not in self:
            raise FormatError(
                f"{self.location.url} does not say which rows its modality {modality!r} has ({path}): open it with "
                "mudata 0.2 or later, run mdata.update(), and write it again"
            )
        stored, refused = np.asarray(self.element(path)), partial(self.damaged, path)
        rows = checked_map(stored, n_whole=self.n_obs, n_rows=n_rows, refused=refused)
        return None if is_whole(rows, n_rows) else rows

    def require_axis(self) -> None:
        """Raises FormatError unless the modalities of a MuData describe the same rows."""
        axis: Any = self.root.attrs.get("axis", 0)
        if self.modalities and axis != 0:
            raise FormatError(
                f"the modalities of {self.location.url} share {'genes' if axis == 1 else 'rows and genes'} (axis "
                f"{axis}), and not rows: open them one by one, such as {self.location.url.rstrip('/')}/mod/"
                f"{self.modalities[0]}"
            )
