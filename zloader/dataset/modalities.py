"""How the matrices of a MuData store are named.

MuData keeps each modality as an AnnData of its own in `mod/NAME`. A matrix of a modality is named `NAME:X`,
`NAME:raw/X` or `NAME:layers/LAYER`, and an obs column `NAME:COLUMN`, as muon names them. So are its obsm arrays,
`NAME:X_pca`.
"""

from __future__ import annotations

import re

MUDATA = "MuData"
ROOTS = ("anndata", "AnnData", MUDATA)  # encoding-types of a root; R's MuDataSeurat writes the second
_MATRIX = re.compile(r"([^/]+):(X|raw/X|layers/.+)", re.DOTALL)


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
