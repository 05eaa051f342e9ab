"""The destination of a conversion: checks that it may be replaced, and commits the new store atomically.

A conversion writes a marker first, then the objects, then the root's `zarr.json`, and deletes the marker last. Until
the root is written, the destination does not open as a store, and the marker allows anyone to clear it. The marker
records the sources and options, so that the conversion can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zarr
import zarr.errors
from zarr.storage import MemoryStore

from zloader.access.listed_store import METADATA, ListedStore, is_metadata
from zloader.access.location import Location
from zloader.access.scheme import access_errors
from zloader.access.zarr_groups import open_zarr_group
from zloader.common.errors import (
    AccessDeniedError,
    OptionError,
    SourceError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from zloader.common.messages import listed
from zloader.conversion.object_writer import (
    PARTIAL,
    ObjectWriter,
    delete_objects,
    put_all,
    run_to_completion,
    translated,
)

_ROOT = "zarr.json"
MARKER = "zloader.partial"
CHECKPOINT = f"{MARKER}-"  # begins the names of objects that say how far a matrix is stored
_ELEMENTS = ("X", "raw", "obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns", "mod", "obsmap", "varmap")
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*|c")  # c/0/1 of Zarr v3, c of its scalars, 0.1 or 0/1 of v2
# Files that desktops create in every folder, and the empty objects ending in a slash by which S3 consoles show folders.
_LITTER = re.compile(r"(?s)(.*/)?(\.DS_Store|\._[^/]*|Thumbs\.db|desktop\.ini|)")
_NOTE = "An unfinished zloader conversion: convert again, or continue it with --resume."


class Destination:
    """The location of a store to write: `check` it, then use `replaced`.

    All methods raise AccessDeniedError, StoreNotFoundError (the bucket does not exist) or StoreError.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def check(self, *, overwrite: bool) -> bool:
        """Checks that the destination is empty, an unfinished conversion, or a store to overwrite: whether it is one.

        Raises StoreExistsError otherwise, or if there are foreign objects among the store's objects, and OptionError
        for a location inside a Zarr hierarchy.
        """
        self.location.require_writable()
        url, parent_file = self.location.url, self.location.enclosing((_ROOT, ".zgroup", ".zarray", MARKER))
        if parent_file is not None:
            raise OptionError(f"{url} is inside another store ({parent_file} exists): choose another destination")
        names = {name for name in self.location.names() if not _is_litter(name)}
        # With root metadata, a marker only means that a conversion stopped before it replaced the old store.
        has_root = names.intersection(METADATA)
        if names and not has_root and MARKER not in names:
            raise StoreExistsError(
                f"{url} is not an AnnData store, but it is not empty ({listed(sorted(names), 3)}): move its files "
                "away, or choose another destination"
            )
        if has_root and not overwrite:
            raise StoreExistsError(
                f"there is already a store at {url}: pass overwrite=True (--overwrite) to replace it"
            )
        if names:
            self._replaceable()
        return bool(has_root)

    def _replaceable(self) -> list[str]:
        """The objects to delete before writing a new store. Raises StoreExistsError if there are foreign objects."""
        keys = [key for key in self.objects() if key != MARKER and not _is_litter(key)]
        foreign = _foreign_objects(self.location, keys)
        if foreign:
            raise StoreExistsError(
                f"{len(foreign)} of the objects at {self.location.url} do not belong to the store, so they are not "
                f"deleted: {listed(foreign)}. Move them away, or choose another destination"
            )
        return keys

    def journal(self) -> dict[str, Any] | None:
        """The journal of an interrupted conversion, or None if there is none or it had not replaced anything yet."""
        journal: dict[str, Any] | None = self._document(MARKER).get("journal")
        return journal

    def finished(self) -> dict[str, Any]:
        """What a conversion recorded (`_Conversion.record`) that has finished here, or {}. The root comes last."""
        attributes = self._document(_ROOT).get("attributes") or {}
        recorded: dict[str, Any] = attributes.get("zloader", {}).get("conversion", {})
        return recorded

    def _document(self, key: str) -> dict[str, Any]:
        """The JSON object at a key; {} if there is none."""
        if self.location.find_object(key) is None:
            return {}
        try:
            document = json.loads(self.read(key))
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    @contextlib.contextmanager
    def replaced(self, journal: Mapping[str, Any], *, resuming: bool = False) -> Iterator[PendingStore]:
        """Deletes the old store, yields the store to fill, and commits it unless the context ends with an error.

        When `resuming`, only partially written objects are deleted. What was written is deleted after a SourceError.
        """
        directory = Path(self.location.path) if self.location.scheme == "file" else None
        is_new = directory is not None and not directory.exists()
        self._complete(self._drop_unfinished)
        if not resuming:
            if self.objects():
                self._complete(self._mark, None)  # so that anyone may clear what is left of the old store
                self._complete(self._clear)
            self._complete(self._mark, journal)
        store = PendingStore(partial(self.put, durable=False), self.location.url)
        try:
            yield store
            store.commit()
        except BaseException as error:
            if isinstance(error, (SourceError, OptionError)) and not resuming:
                with contextlib.suppress(StoreError):  # what is left can be replaced, and the first error is raised
                    self._complete(self._drop_unfinished)
                    self._complete(self._clear)
                    self._complete(self._unmark)
                if directory is not None and is_new:
                    with contextlib.suppress(OSError):  # no longer empty: another program has written to it
                        directory.rmdir()
            raise
        self._complete(self._unmark)

    def settle(self) -> None:
        """Deletes the mark of a conversion that has finished, if it was cut off before it did so itself."""
        if self.location.find_object(MARKER) is not None:
            self._complete(self._unmark)

    def read(self, key: str) -> bytes:
        """The bytes of an object."""
        return self.location.read(key)

    def put(self, key: str, stored: bytes, *, durable: bool = True) -> None:
        """Stores an object, which appears at once."""
        _put(self.create_object(key), stored, durable=durable)

    def create_object(self, key: str) -> ObjectWriter:
        """Starts writing an object."""
        return ObjectWriter(self.location, key)

    def objects(self) -> dict[str, int]:
        """The sizes in bytes of all objects at the destination, by key."""
        try:
            return {key: entry.size for key, entry in self.location.listing().items()}
        except StoreNotFoundError:
            return {}  # `replaced` reports a missing bucket

    def _complete(self, write: Callable[..., None], *args: Any) -> None:
        run_to_completion(partial(write, *args), self.location.url)

    def _mark(self, journal: Mapping[str, Any] | None) -> None:
        _put(ObjectWriter(self.location, MARKER), json.dumps({"note": _NOTE, "journal": journal}).encode())

    def _unmark(self) -> None:
        """Deletes the checkpoints and then the mark."""
        delete_objects(self.location, [key for key in self.objects() if key.startswith(CHECKPOINT)])
        with translated("delete from", self.location.url):
            self.location.filesystem().rm_file(f"{self.location.path}/{MARKER}")

    def _clear(self) -> None:
        """Deletes the old store except for the marker: the root's metadata, then those of groups in it, then the rest.

        So neither the store nor a modality of it opens with some of its objects.
        """
        keys = self._replaceable()
        metadata = [key for key in keys if is_metadata(key)]
        delete_objects(self.location, [key for key in metadata if key in METADATA])
        delete_objects(self.location, [key for key in metadata if key not in METADATA])
        delete_objects(self.location, [key for key in keys if not is_metadata(key)])
        left = self.objects().keys() & set(keys)
        if left:  # S3 reports objects that it did not delete in a successful response
            raise AccessDeniedError(
                f"not allowed to delete {min(left)} from {self.location.url}: check your permissions there"
            )

    def _drop_unfinished(self) -> None:
        """Deletes partial local files, and aborts unfinished uploads, whose invisible parts would be billed."""
        filesystem, path = self.location.filesystem(), self.location.path
        with translated("delete from", self.location.url):
            for key in self.objects():
                if _is_partial(key):
                    filesystem.rm_file(f"{path}/{key}")
        if self.location.scheme != "s3":
            return
        bucket, key, _ = filesystem.split_path(path)
        prefix = f"{key}/" if key else ""
        # Optional cleanup, which not all credentials allow.
        with contextlib.suppress(*access_errors()):
            found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in found.get("Uploads", []):
                if _may_belong(upload["Key"].removeprefix(prefix)):
                    which = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **which)


def _put(writer: ObjectWriter, stored: bytes, *, durable: bool = True) -> None:
    try:
        writer.write(stored)
        writer.commit(durable=durable)
    except BaseException:
        writer.abort()
        raise


class PendingStore(MemoryStore):
    """Keeps what zarr writes in memory, until it is stored with `put`. So zarr's own threads write nothing there.

    Metadata (`zarr.json`) stay until `commit`, so that no group or array opens before.
    """

    def __init__(self, put: Callable[[str, bytes], None], url: str) -> None:
        super().__init__()
        self._put, self._url = put, url

    def flush(self) -> None:
        """Stores the chunks that have been written."""
        self._store_all([key for key in self._store_dict if not is_metadata(key)])

    def commit(self) -> None:
        """Stores the rest: the metadata of a group after all that it holds, and the root's last. Then it opens."""
        self.flush()
        for depth in sorted({key.count("/") for key in self._store_dict}, reverse=True):
            self._store_all([key for key in self._store_dict if key.count("/") == depth])

    def _store_all(self, keys: Sequence[str]) -> None:
        put_all((partial(self._put, key, self._store_dict.pop(key).to_bytes()) for key in keys), self._url)


# ---- what belongs to a store: only these objects may be replaced
#
# The metadata of a complete AnnData store lists its groups and arrays. An interrupted conversion has incomplete
# metadata or none, so its objects are recognised by their names.


def _is_litter(key: str) -> bool:
    """Whether a desktop or S3 console made an object: it neither blocks a destination nor is deleted."""
    return _LITTER.fullmatch(key) is not None


def _may_belong(key: str) -> bool:
    """Whether the name of an object fits a complete or partial object of an AnnData store."""
    return _belongs(_finished(key), None)


def _is_partial(key: str) -> bool:
    """Whether an object is a partial object of a store, written by zloader or by zarr."""
    return _finished(key) != key and _may_belong(key)


def _foreign_objects(location: Location, keys: Sequence[str]) -> list[str]:
    """The objects that belong neither to the AnnData store at a location nor to a zloader conversion.

    Raises StoreExistsError if there is another kind of Zarr hierarchy, AccessDeniedError, StoreError.
    """
    nodes = _nodes(location) if set(keys).intersection(METADATA) else None
    return sorted(key for key in keys if not (_is_litter(key) or _belongs(_finished(key), nodes)))


def _nodes(location: Location) -> dict[str, bool]:
    """The paths of all groups and arrays of the AnnData store at a location, each with whether it is an array."""
    with translated("read the metadata of", location.url), warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)  # about foreign objects
        try:
            root = open_zarr_group(ListedStore(location, location.listing().sizes, all_listed=True))
            encoding = root.attrs.get("encoding-type")
            nodes = {path: isinstance(node, zarr.Array) for path, node in root.members(max_depth=None)}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # zarr.errors are ValueErrors
            raise _not_anndata(location, f"its metadata cannot be read: {error}") from error
    if encoding not in ("anndata", "MuData"):
        raise _not_anndata(location, f"the encoding-type of its root is {encoding!r}")
    return nodes


def _not_anndata(location: Location, why: str) -> StoreExistsError:
    return StoreExistsError(
        f"{location.url} is not an AnnData store ({why}): move its files away, or choose another destination"
    )


def _finished(key: str) -> str:
    """The final key of a partial object; other keys are returned unchanged."""
    return key if key == MARKER else key.removesuffix(PARTIAL)


def _belongs(key: str, nodes: Mapping[str, bool] | None) -> bool:
    """Whether a complete object belongs to these groups and arrays; None stands for any that an AnnData may have."""
    *parts, last = key.split("/")
    if not parts:
        return last in (MARKER, *METADATA) or last.startswith(CHECKPOINT)
    if parts[0] not in _ELEMENTS:
        return False
    if last in METADATA:
        return nodes is None or "/".join(parts) in nodes
    for depth in range(1, len(parts) + 1):
        is_array = nodes is None or nodes.get("/".join(parts[:depth]), False)
        if is_array and _CHUNK.fullmatch("/".join([*parts[depth:], last])):
            return True
    return False
