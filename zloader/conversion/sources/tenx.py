"""What 10x Genomics' Cell Ranger writes, read by scanpy (optional) into memory."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from zloader.common.errors import SourceError
from zloader.conversion.sources.locations import SourceLocation
from zloader.conversion.sources.nodes import Node, reading

MATRIX_FILES = ("matrix.mtx", "matrix.mtx.gz")


def is_10x(file: Node) -> bool:
    """Whether an HDF5 file is one of Cell Ranger's: of version 3 and later, or older with a group a genome."""
    groups = (file[name] for name in file.names())
    return any(not group.is_array and "barcodes" in group and "indptr" in group for group in groups)


def read_10x(place: SourceLocation, reader: str) -> Any:
    """The whole matrix as an AnnData, through scanpy's `read_10x_h5` or `read_10x_mtx`.

    All features are kept, not gene expression alone, and gene names stay as they are, also when one comes twice.
    Raises SourceError.
    """
    if not place.is_local:
        raise SourceError(f"{place.name} holds a 10x matrix, which is read from a local disk only: download it")
    scanpy = _scanpy(place)
    keep_all = {"gex_only": False} if reader == "read_10x_h5" else {"gex_only": False, "make_unique": False}
    with reading(place.name, "cannot be read by scanpy as a 10x matrix"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that names come twice is for whoever joins to say
        return getattr(scanpy, reader)(place.path, **keep_all)


def _scanpy(place: SourceLocation) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, while they are imported
        try:
            return importlib.import_module("scanpy")
        except ImportError as error:
            raise SourceError(
                f'{place.name} holds a 10x matrix, which is read through scanpy: pip install "zloader[scanpy]"'
            ) from error
