"""Reads what an HDF5 file says about its groups, arrays and chunks, in a process of its own (common/child.py).

A damaged or hostile file can crash libhdf5 or keep it busy for ever. So it runs in a child process with a deadline, and
reads no values but strings, which lie in heaps that only libhdf5 can read.

The cost is one pass over all objects of the file, and one over the index of each chunked array, which
prefetched_file.py reads ahead.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from zloader.common.child import give_up
from zloader.common.errors import StoreError
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.prefetched_file import PrefetchedFile
from zloader.storage.placement import ABSENT

_MOST_NODES = 1 << 18  # groups and arrays; a file with more is no AnnData
_MOST_DEPTH = 32
_MOST_CHUNKS = 1 << 26
_MOST_RECORDS = 1 << 20  # fields of records; a million with text take some seconds to read
_MOST_TEXT = 1 << 26  # characters of such a field, all as long as the longest
_BLOCK_BYTES = 32 << 10  # of arrays without chunks, which are cut into chunks of about so many bytes
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
_PLUGINS = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2"}


class Refused(Exception):
    """Why an object of the file cannot be read in place."""


def scan(file: h5py.File, most_inline: int = 1 << 17) -> tuple[dict[str, Any], list[NDArray[np.uint64]]]:
    """The nodes of a file by path, and the chunk tables of its arrays. Arrays of few strings come with their values."""
    nodes: dict[str, Any] = {}
    tables: list[NDArray[np.uint64]] = []
    base = _base_address(file)
    for path, node, why in _walk(file):
        if len(nodes) >= _MOST_NODES:
            raise Refused(f"it has more than {_MOST_NODES} groups and arrays")
        try:
            if node is None:
                raise Refused(why)
            attrs = _attributes(node)
            nodes[path] = {"attrs": attrs}
            if isinstance(node, h5py.Dataset):
                nodes[path] |= _array(node, tables, base, most_inline)
        except Refused as error:
            nodes[path] = {"refused": str(error)}
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, struct.error) as error:
            nodes[path] = {"refused": f"its description in the file is damaged ({error})"}
    return nodes, tables


def _base_address(file: h5py.File) -> int:
    """What is to be added to offsets of chunks: the size of the user block, if this version of HDF5 leaves it out."""
    if not file.userblock_size:
        return 0
    with h5py.File("probe", "w", driver="core", backing_store=False, userblock_size=512) as probe:
        probe.create_dataset("x", data=np.arange(97, dtype=np.int32), chunks=(97,))
        probe.flush()
        found = probe["x"].id.get_chunk_info(0).byte_offset
        image = bytes(probe.id.get_file_image())  # with or without the user block
        place = image.find(np.arange(97, dtype=np.int32).tobytes()) + (512 if image[:4] == b"\x89HDF" else 0)
        counted = place == found
    return 0 if counted else int(file.userblock_size)


def _walk(file: h5py.File) -> Iterator[tuple[str, Any, str]]:
    """The path of each object and the object, or None and why it is not read. Groups come before their members."""
    root = h5py.h5o.get_info(file.id)
    waiting: list[tuple[str, h5py.Group, tuple[int, ...]]] = [("", file, (root.addr,))]
    yield "", file, ""
    while waiting:
        above, group, parents = waiting.pop()
        for name in group:
            path = f"{above}/{name}".lstrip("/")
            try:
                link = group.get(name, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    yield path, None, f"it is a link to another file, {link.filename!r}"
                    continue
                node = group[name]
                found = h5py.h5o.get_info(node.id)
                if found.fileno != root.fileno:  # a soft link to an external link
                    yield path, None, f"it is a link to {link.path!r}, which is in another file"
                    continue
            except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
                yield path, None, f"its description in the file is damaged ({error})"
                continue
            if isinstance(node, h5py.Group):
                if found.addr in parents or len(parents) > _MOST_DEPTH:
                    yield path, None, "it contains itself"
                    continue
                yield path, node, ""
                waiting.append((path, node, (*parents, found.addr)))
            elif isinstance(node, h5py.Dataset):
                yield path, node, ""


def _attributes(node: Any) -> dict[str, Any]:
    """The attributes as JSON values. Those that have no form in JSON are left out; references become paths."""
    found = {}
    for name in node.attrs:
        try:
            value = node.attrs[name]
            found[str(name)] = _path_of(value, node) if isinstance(value, h5py.Reference) else _plain(value)
        except (TypeError, OSError, ValueError, UnicodeDecodeError):
            continue
    return found


def _path_of(reference: h5py.Reference, node: Any) -> Any:
    """The path of an object of the file, from the group of `node` on if the object lies below it."""
    path = node.file[reference].name
    return None if path is None else path.removeprefix(f"{node.parent.name.rstrip('/')}/")


def _plain(value: Any) -> Any:
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, h5py.Reference | h5py.RegionReference):
        return {"reference": True}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        single = not value.ndim or (value.size == 1 and value.dtype.kind in "biuf")  # R writes a number as an array
        return _plain(value.item()) if single else [_plain(each) for each in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError
    return value


def _array(node: h5py.Dataset, tables: list[NDArray[np.uint64]], base: int, most_inline: int) -> dict[str, Any]:
    """The description of an array, and its chunk table if it is read by byte ranges."""
    if node.is_virtual:
        raise Refused("it is a virtual dataset, whose values lie in other files")
    if node.external is not None:
        raise Refused("its values lie in other files (external storage)")
    if node.shape is None:
        return {"shape": None}
    shape = [int(size) for size in node.shape]
    if _is_text(node):
        few = not shape or math.prod(shape) <= most_inline
        inline = _strings(node, 0, shape[0] if shape else 1).hex() if few else None
        return {"shape": shape, "strings": True, "inline": inline}
    if node.dtype.names:
        if math.prod(shape) * len(node.dtype.names) > _MOST_RECORDS:
            raise Refused(f"it holds more than {_MOST_RECORDS} fields of records")
        # The lengths of text are known once it has been read. Of numbers, nothing has to be.
        dtype = _records(node[()] if node.dtype.hasobject else np.empty(0, node.dtype), node.dtype).dtype
        fields = [(name, dtype[name].str) for name in dtype.names or ()]
        return {"shape": shape, "records": True, "dtype": fields, "chunks": shape, "inline": None}
    most_bytes = {"f": 8, "c": 16}.get(node.dtype.kind, node.dtype.itemsize)
    if node.dtype.hasobject or node.dtype.kind not in "biufcSUV" or node.dtype.itemsize > most_bytes:
        raise Refused(f"it holds {node.dtype}")
    if not is_of_numpy(node):
        raise Refused("its numbers are of an HDF5 type that NumPy lacks, such as bfloat16")
    plist = node.id.get_create_plist()
    filters = [_filter(plist.get_filter(number), node.dtype) for number in range(plist.get_nfilters())]
    described = {"shape": shape, "dtype": node.dtype.str, "filters": filters, "fill": _fill_value(node)}
    if plist.get_layout() == h5py.h5d.COMPACT:
        return described | {"chunks": shape, "inline": np.asarray(node[()]).tobytes().hex()}
    if node.chunks is None:
        return described | {"chunks": _blocks(node, shape), "begin": node.id.get_offset()}
    chunks = [int(size) for size in node.chunks]
    tables.append(_chunk_table(node, chunks, filters, base))
    return described | {"chunks": chunks, "table": len(tables) - 1}


def is_of_numpy(node: h5py.Dataset) -> bool:
    """Whether the stored bits are those of the dtype of h5py, into which libhdf5 converts many other types."""
    stored = node.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID):
        stored = stored.get_super()
    if isinstance(stored, h5py.h5t.TypeFloatID):
        usual = h5py.h5t.py_create(node.dtype)
        return (stored.get_fields(), stored.get_ebias()) == (usual.get_fields(), usual.get_ebias())
    whole = not isinstance(stored, h5py.h5t.TypeIntegerID) or stored.get_precision() == 8 * stored.get_size()
    if not whole and stored.get_offset() == 0 and stored.get_sign() == h5py.h5t.SGN_NONE:
        whole = stored.get_pad()[1] == h5py.h5t.PAD_ZERO  # such as booleans of hdf5r, which have a precision of 1 bit
    return whole and stored.get_size() == node.dtype.itemsize and node.dtype.subdtype is None


def _is_text(node: h5py.Dataset) -> bool:
    """Whether an array holds strings. anndata reads those of a fixed length as bytes if they are a plain `array`."""
    if h5py.check_string_dtype(node.dtype) is None:
        return False
    return node.dtype.kind == "O" or _attributes(node).get("encoding-type") != "array"


def _fill_value(node: h5py.Dataset) -> str:
    return np.asarray(node.fillvalue, node.dtype).tobytes().hex()


def _filter(described: tuple[int, int, tuple[int, ...], bytes], dtype: np.dtype[Any]) -> dict[str, Any]:
    number, _, values, name = described
    known = _FILTERS.get(number) or _PLUGINS.get(number) or name.decode(errors="replace") or f"filter {number}"
    return {"name": known, "item": int(values[0]) if number == 2 and values else dtype.itemsize}


def _blocks(node: h5py.Dataset, shape: list[int]) -> list[int]:
    """Whole rows as the chunks of an array that is stored in one piece."""
    if not shape:
        return []
    row_bytes = node.dtype.itemsize * math.prod(shape[1:])
    chunks = [max(1, min(shape[0], _BLOCK_BYTES // max(1, row_bytes))), *(max(1, size) for size in shape[1:])]
    _n_chunks(shape, chunks)
    return chunks


def _n_chunks(shape: list[int], chunks: list[int]) -> int:
    n = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if n > _MOST_CHUNKS:
        raise Refused(f"it has {n} chunks, more than {_MOST_CHUNKS}")
    return n


def _chunk_table(node: h5py.Dataset, chunks: list[int], filters: list[dict[str, Any]], base: int) -> NDArray[np.uint64]:
    """Offset and size of each chunk of the grid, in row-major order."""
    grid = [-(-int(size) // chunk) for size, chunk in zip(node.shape, chunks, strict=True)]
    table = np.full((_n_chunks(list(node.shape), chunks), 2), ABSENT, np.uint64)
    raw = math.prod(chunks) * node.dtype.itemsize
    compressed = [number for number, each in enumerate(filters) if each["name"] not in ("shuffle", "fletcher32")]
    overhead = 4 * sum(each["name"] == "fletcher32" for each in filters)
    skipping = sum(1 << number for number in compressed)
    as_large: dict[bool, Any] = {}  # a chunk of the size of a plain one that was compressed, and one that was not

    def add(info: Any) -> None:
        place = 0
        for size, chunk, offset in zip(grid, chunks, info.chunk_offset, strict=True):
            if not 0 <= offset < size * chunk:
                raise Refused(f"its index has a chunk at {info.chunk_offset}, outside of its shape {node.shape}")
            place = place * size + offset // chunk
        # A filter may leave out a chunk that it cannot make smaller. Its size says so, or else the file is refused.
        skipped = bool(compressed) and info.filter_mask == skipping
        if (info.filter_mask and not skipped) or (skipped and info.size != raw + overhead):
            raise Refused(f"its chunk at {info.chunk_offset} was written with some of its filters only")
        if info.size == raw + overhead:
            as_large[not skipped] = info.chunk_offset
        table[place] = info.byte_offset + base, info.size

    if len(table):
        node.id.chunk_iter(add)
    if compressed and len(as_large) > 1:
        raise Refused(f"its chunk at {as_large[True]} is as large compressed as it is plain")
    for number in compressed:
        filters[number]["skips"] = False in as_large
    return table


def _strings(node: h5py.Dataset, start: int, n_rows: int) -> bytes:
    """`n_rows` rows of strings, empty ones after the last, as the bytes of numcodecs' vlen-utf8.

    Raises Refused for text that is not UTF-8.
    """
    import numcodecs

    try:
        text = node.asstr("utf-8")  # R marks its text as ASCII, whatever it holds
        found = np.asarray(text[start : start + n_rows] if node.shape else [text[()]], object)
    except UnicodeDecodeError as error:
        raise Refused(f"it holds text that is not UTF-8 ({error})") from error
    values = np.full(n_rows * math.prod(node.shape[1:]), "", object)
    values[: found.size] = found.reshape(-1)
    return bytes(numcodecs.VLenUTF8().encode(values))


def _records(found: NDArray[Any], stored: np.dtype[Any]) -> NDArray[Any]:
    """Records that h5py has read, such as uns has of scanpy, with text of a fixed length, as anndata stores it in Zarr.

    `stored` is the dtype that h5py gives their array. Raises Refused for records of anything but text and numbers.
    """
    columns = {}
    for name in stored.names or ():
        column = columns[name] = np.asarray(found[name])
        if h5py.check_string_dtype(stored[name]) is not None and column.dtype.hasobject:
            try:
                text = [each.decode() for each in column.reshape(-1)]
            except UnicodeDecodeError as error:
                raise Refused(f"it holds text that is not UTF-8 ({error})") from error
            if len(text) * max(map(len, text), default=0) > _MOST_TEXT:
                raise Refused(f"the text in {name!r} is too long")
            columns[name] = np.array(text, str).reshape(column.shape)
        elif column.dtype.kind not in "biufcSU" or column.shape != found.shape:
            raise Refused(f"it holds {stored}")
    records = np.empty(found.shape, [(name, column.dtype.newbyteorder("<")) for name, column in columns.items()])
    for name, column in columns.items():
        records[name] = column
    return records


# ---- in the child, of a file: a path, or, on a server, the Location of its folder and its name


def index(file: str | tuple[Any, str], listed: Any, most_inline: int) -> bytes:
    """The nodes as JSON (`document`) and the chunk tables (`table_N`), as NumPy arrays (npz) without pickles."""
    with _opened(file, listed) as opened:
        nodes, tables = scan(opened, most_inline)
    arrays: dict[str, Any] = {f"table_{number}": table for number, table in enumerate(tables)}
    out = io.BytesIO()
    np.savez(out, document=np.frombuffer(json.dumps({"nodes": nodes}).encode(), np.uint8), **arrays)
    return out.getvalue()


def strings(file: str | tuple[Any, str], listed: Any, path: str, start: int, n_rows: int) -> bytes:
    """`n_rows` rows of an array of strings, as the bytes of numcodecs' vlen-utf8."""
    with _opened(file, listed) as opened:
        return _strings(opened[path], start, n_rows)


def records(file: str | tuple[Any, str], listed: Any, path: str) -> bytes:
    """An array of records, in the dtype that the index says."""
    with _opened(file, listed) as opened:
        return _records(opened[path][()], opened[path].dtype).tobytes()


def _opened(file: str | tuple[Any, str], listed: Any) -> h5py.File:
    if isinstance(file, str):
        return h5py.File(file, "r", locking="best-effort")  # a file system may have no locks
    # Imported here because it imports TensorStore, which local files do not need.
    from zloader.reading.object_source import ObjectSource

    folder, name = file
    loop = asyncio.new_event_loop()
    source = ObjectSource(folder, {name: listed}, FetchOptions())

    def read(spans: list[tuple[int, int]]) -> list[bytes]:
        wanted = [Span(key=name, start=start, stop=stop) for start, stop in spans]
        try:
            return loop.run_until_complete(source.read(wanted))
        except StoreError as error:
            give_up(error)  # libhdf5 would only say that it cannot read

    return h5py.File(PrefetchedFile(read, listed.size), "r")
