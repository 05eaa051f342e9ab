"""Read the output of 10x Genomics' Cell Ranger into memory, with scanpy (optional)."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from zloader.common.errors import SourceError
from zloader.conversion.sources.locations import SourceLocation
from zloader.conversion.sources.nodes import Node, reading

MATRIX_FILES = ("matrix.mtx", "matrix.mtx.gz")


def is_10x(file: Node) -> bool:
    """Whether an HDF5 file was written by Cell Ranger: version 3 or later, or older with one group per genome."""
    groups = (file[name] for name in file.names())
    return any(not group.is_array and "barcodes" in group and "indptr" in group for group in groups)


def read_10x(location: SourceLocation, reader: str) -> Any:
    """The whole matrix as an AnnData, through scanpy's `read_10x_h5` or `read_10x_mtx`.

    All features are kept, not only gene expression. Gene names are unchanged, even if some are repeated.
    Raises SourceError.
    """
    if not location.is_local:
        raise SourceError(f"{location.name} holds a 10x matrix, which can only be read from a local disk: download it")
    scanpy = _scanpy(location)
    keep_all = {"gex_only": False} if reader == "read_10x_h5" else {"gex_only": False, "make_unique": False}
    with reading(location.name, "cannot be read by scanpy as a 10x matrix"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # repeated names are reported when genes are joined
        return getattr(scanpy, reader)(location.path, **keep_all)


def _scanpy(location: SourceLocation) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by libraries during the import
        try:
            return importlib.import_module("scanpy")
        except ImportError as error:
            raise SourceError(
                f'{location.name} holds a 10x matrix, which is read by scanpy: pip install "zloader[scanpy]"'
            ) from error
