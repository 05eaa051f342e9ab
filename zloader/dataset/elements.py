"""Names of the elements of a store, and columns of the common kinds read with zarr alone, everything else with anndata.

Importing anndata takes as long as importing torch, because it imports dask, xarray and awkward where they are
installed. Training on numbers, categories and strings does not need it.

MuData keeps each modality as an AnnData of its own in `mod/NAME`. A matrix of a modality is named `NAME:X`,
`NAME:raw/X` or `NAME:layers/LAYER`, and an obs column `NAME:COLUMN`, as muon names them. So are its obsm arrays,
`NAME:X_pca`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from zloader.common.deferred import pd
from zloader.common.errors import FormatError
from zloader.selecting.columns import native

_ARRAYS = (("array", "0.2.0"), ("string-array", "0.2.0"))
_MASKED = {("nullable-integer", "0.1.0"): "IntegerArray", ("nullable-boolean", "0.1.0"): "BooleanArray"}
_STRINGS = ("nullable-string-array", "0.1.0")
_OLD_FRAME = ("dataframe", "0.1.0")
MUDATA = "MuData"
ROOTS = ("anndata", "AnnData", MUDATA)  # encoding-types of a root; R's MuDataSeurat writes the second
_MATRIX = re.compile(r"([^/]+):(X|raw/X|layers/.+)", re.DOTALL)


# ---- names of the matrices of modalities


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


# ---- elements


def read_element(node: Any) -> Any:
    """An element as `anndata.io.read_elem` reads it. Raises any error of zarr or anndata for a damaged element."""
    kind = _encoding(node)
    if is_array(node):
        return node[()] if kind in _ARRAYS else _read_by_anndata(node)
    if kind == ("categorical", "0.2.0"):
        codes, categories = read_element(node["codes"]), read_element(node["categories"])
        return pd.Categorical.from_codes(codes, categories, ordered=bool(node.attrs["ordered"]))
    if kind in _MASKED:
        values = native(read_element(node["values"]))  # pandas has no others
        return getattr(pd.arrays, _MASKED[kind])(values, mask=read_element(node["mask"]))
    if kind == _STRINGS and _reads_strings_as_pandas():
        dtype = pd.StringDtype(na_value=np.nan if node.attrs.get("na-value") == "NaN" else pd.NA)
        strings = pd.array(read_element(node["values"]), dtype=dtype)
        strings[read_element(node["mask"])] = pd.NA
        return strings
    return _read_by_anndata(node)


def _read_by_anndata(node: Any) -> Any:
    if (of_hdf5 := getattr(node, "native", None)) is None:
        return load_anndata().io.read_elem(node)
    for _, member in () if is_array(node) else node.members():
        if isinstance(member, FormatError):
            raise member
    return read_hdf5_element(of_hdf5)


def read_hdf5_element(native: Any) -> Any:
    """An element of h5py as anndata reads it, but text that is UTF-8, whatever other tools call it."""
    try:
        return load_anndata().io.read_elem(native)
    except UnicodeDecodeError:
        return load_anndata().experimental.read_dispatched(native, _text_as_utf8)


def _text_as_utf8(read: Callable[[Any], Any], _name: str, element: Any, **_of_type: Any) -> Any:
    import h5py

    is_text = isinstance(element, h5py.Dataset) and h5py.check_string_dtype(element.dtype) is not None
    return element.asstr("utf-8")[()] if is_text else read(element)


def is_array(node: Any) -> bool:
    """Whether a node is an array, of zarr or of an HDF5 file, and not a group."""
    return hasattr(node, "shape")


def matrix_encoding(node: Any) -> str:
    """How a matrix is stored: `dense`, `csr_matrix` or another encoding. Before 0.7, anndata named it otherwise."""
    if is_array(node):
        return "dense"
    sparse = node.attrs.get("h5sparse_format")
    return str(node.attrs.get("encoding-type")) if sparse is None else f"{sparse}_matrix"


def _encoding(node: Any) -> tuple[Any, Any]:
    return node.attrs.get("encoding-type"), node.attrs.get("encoding-version")


def is_name(name: Any) -> bool:
    """Whether a metadata value is a relative path that stays below its group."""
    return isinstance(name, str) and {"", ".", ".."}.isdisjoint(name.split("/"))


# ---- frames of earlier versions


def is_outdated(node: Any) -> bool:
    """Whether a frame is in a form that anndata wrote before 0.8: records, or codes whose categories lie apart."""
    return bool(node.dtype.names) if is_array(node) else _encoding(node) == _OLD_FRAME


def renewed(path: str, node: Any, labels: Callable[[str], Any]) -> Any:
    """An outdated frame, obsm or varm as a group in memory in today's form.

    `labels` returns the labels of a column of records, given their path in uns, or None. Raises any error of anndata.
    """
    group = zarr.open_group(MemoryStore(), mode="w", zarr_format=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anndata says that the form is old
        found = _read_by_anndata(node)
        if is_array(node):
            columns = {name: found[name] for name in found.dtype.names}
            found = columns if path.endswith(("obsm", "varm")) else _frame_of(columns, labels)
        above, _, name = path.rpartition("/")  # because anndata writes no key with a slash
        load_anndata().io.write_elem(group.require_group(above) if above else group, name, found)
    return group[path]


def _frame_of(columns: dict[str, Any], labels: Callable[[str], Any]) -> pd.DataFrame:
    """The frame of some records, whose first field is the index."""
    frame = pd.DataFrame(columns)
    for name in frame:
        if (found := labels(f"uns/{name}_categories")) is None:
            continue
        categories = np.atleast_1d(found)
        if (frame[name] < len(categories)).all():  # else they are those of a column of var
            frame[name] = pd.Categorical.from_codes(frame[name], categories)
    return frame.set_index(frame.columns[0])


def _reads_strings_as_pandas() -> bool:
    """Whether anndata reads nullable strings as below: from pandas 3 on, where it writes strings so by default."""
    return int(pd.__version__.partition(".")[0]) >= 3


def load_anndata() -> Any:
    """The module anndata, imported on the first call."""
    import anndata

    return anndata
