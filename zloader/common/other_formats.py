"""Formats that zloader does not read by itself: how a folder is recognised, and how its cells become a store."""

from __future__ import annotations

from collections.abc import Collection

_MARKS = {
    "matrix.mtx": "10x",
    "matrix.mtx.gz": "10x",
    "__tiledb_group.tdb": "SOMA",
    "expression.lance": "SLAF",
    "header.sch": "SCDL",
}


_PACKED = {
    b"version https://git-lfs": "is a pointer of Git LFS instead of the file: run 'git lfs pull' in its repository",
    b"/annex/objects/": "is a pointer of git-annex instead of the file: run 'git annex get' in its repository",
    b"\x1f\x8b": "is compressed with gzip: unpack it with 'gunzip'",
    b"BZh": "is compressed with bzip2: unpack it with 'bunzip2'",
    b"\xfd7zXZ": "is compressed with xz: unpack it with 'unxz'",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it with 'unzstd'",
    b"PK\x03\x04": "is a zip archive: unpack it with 'unzip'",
    b"<": "is a web page: download the file itself",
}


def why_unreadable(first: bytes) -> str:
    """What a file that begins with these bytes is instead of one of HDF5, and what to do; "" if it is unknown."""
    return next((why for begin, why in _PACKED.items() if first.lstrip().startswith(begin)), "")


def conversion_of_folder(url: str, names: Collection[str]) -> str:
    """What a folder with these names in it is, and how it is converted; "" if it is in none of these formats."""
    found = next((format_name for mark, format_name in _MARKS.items() if mark in names), None)
    if found is None:
        return ""
    if found == "10x":
        return f"{url} is a 10x directory. {conversion_of_10x(url, 'read_10x_mtx')}"
    return (
        f"{url} is in the format {found}. It is read by a zl.RowSource of yours: copy it from docs/howto/own_format.md"
    )


def conversion_of_hdf5(url: str, names: Collection[str]) -> str:
    """What an HDF5 file without obs and var, but with these names at its root, is, and how its cells are converted."""
    path = url.rpartition("/")[2]
    if {"matrix", "row_attrs", "col_attrs"} <= set(names):
        read, store = f"ad.io.read_loom({path!r})", f"{path.removesuffix('.loom')}.zarr"
        return f"It is a loom file. Convert what anndata (ad) reads with loompy: zl.convert({read}, {store!r})"
    if "assays" in names:
        return f"It is an h5Seurat file. Make an .h5ad file of it in R: SeuratDisk::Convert({path!r}, dest = 'h5ad')"
    if "matrix" in names:
        return "It may be a part of a 10x file, without barcodes or indptr: download the whole file"
    return "Read its cells into an AnnData in Python, and convert that: zl.convert(adata, 'cells.zarr')"


def conversion_of_10x(url: str, reader: str) -> str:
    """How cells in a format of 10x are converted, which this `reader` of scanpy reads."""
    path = url.rpartition("/")[2] if "://" in url else url  # scanpy reads local paths
    call = f"zl.convert(sc.{reader}({path!r}), {path.removesuffix('.h5') + '.zarr'!r})"
    return f"{'Download it, and convert' if path != url else 'Convert'} what scanpy (sc) reads in Python: {call}"
