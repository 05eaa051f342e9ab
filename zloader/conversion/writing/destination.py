"""Where a conversion writes: what may be replaced, and what marks it as unfinished.

The first object written is a marker and the last is the root's `zarr.json`, after which the marker goes. Until then
nothing opens as a store, and whoever finds the marker may clear the rest away. Once the sources have been validated the
marker is the journal as well: what is being converted and how, so that it can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import WrapperStore

from zloader.access.listed_store import METADATA, is_metadata
from zloader.access.location import Location
from zloader.common.errors import (
    AccessDeniedError,
    FormatError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from zloader.conversion.joining.problems import listed
from zloader.conversion.writing.object_writer import ObjectWriter, create_object, delete_objects, translated
from zloader.conversion.writing.ownership import MARKER, is_litter, is_under_way, may_belong, strangers
from zloader.conversion.writing.pending_writes import Writes, in_full

_ROOT = "zarr.json"
_NOTE = "A zloader conversion that has not ended: convert again, or go on with --resume."


class Destination:
    """The place of a store to be: first `check`, then `claimed` while the source is validated, then `replaced`.

    All raise AccessDeniedError, StoreNotFoundError (no such bucket) or StoreError.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def check(self, *, overwrite: bool) -> None:
        """Raises StoreExistsError unless there is nothing, an unfinished conversion, or an AnnData store to overwrite.

        Also where something else lies among its objects, and OptionError for a place inside a Zarr hierarchy.
        """
        self.location.require_writable()
        url, around = self.location.url, self.location.enclosing((_ROOT, ".zgroup", ".zarray", MARKER))
        if around is not None:
            raise OptionError(
                f"{url} lies inside another store ({around} is there), which it would damage: choose another place"
            )
        there = {name for name in self.location.names() if not is_litter(name)}
        whole = there.intersection(METADATA)  # a marker beside it was left by a conversion that replaced nothing yet
        if there and not whole and MARKER not in there:
            raise StoreExistsError(
                f"{url} holds something that is no AnnData store ({listed(sorted(there), 3)}): it is never "
                "overwritten. Move it away"
            )
        if whole and not overwrite:
            raise StoreExistsError(
                f"there is already a store at {url}: pass overwrite=True (--overwrite) to replace it"
            )
        if there:
            self._replaceable()

    def _replaceable(self) -> list[str]:
        """What may be deleted to make room for a new store. Raises StoreExistsError where anything else is there."""
        keys = [key for key in self.objects() if key != MARKER and not is_litter(key)]
        others = strangers(self.location, keys)
        if others:
            raise StoreExistsError(
                f"{len(others)} of the objects at {self.location.url} do not belong to the store there, and are never "
                f"deleted: {listed(others)}. Move them away, or choose another place"
            )
        return keys

    def journal(self) -> dict[str, Any] | None:
        """The journal of an interrupted conversion; None where there is none, or it had replaced nothing yet."""
        if self.location.find_object(MARKER) is None:
            return None
        with translated(f"read {MARKER} from", self.location.url):
            marker = self.location.filesystem().cat_file(f"{self.location.path}/{MARKER}")
        try:
            journal: dict[str, Any] | None = json.loads(marker).get("journal")
        except ValueError:
            return None
        return journal

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Marks the place as being written. What is there stays; an error in the context leaves it as it was."""
        marked = MARKER in self.objects()
        directory = Path(self.location.path) if self.location.scheme == "file" else None
        is_new = directory is not None and not directory.exists()
        try:
            self._in_full(self._mark, None)
            yield
        except BaseException:
            if not marked:
                with contextlib.suppress(StoreError):  # a marker that stays does no harm, and the first error says more
                    self._in_full(self._unmark)
            if directory is not None and is_new:
                with contextlib.suppress(OSError):  # something else was put there meanwhile
                    directory.rmdir()
            raise

    @contextlib.contextmanager
    def replaced(self, journal: Mapping[str, Any], *, resuming: bool = False) -> Iterator[PendingStore]:
        """Deletes what is there, gives the store to fill, and makes it one that opens if there was no error.

        When `resuming` nothing is deleted but what was being written when the one before was interrupted.
        """
        self._in_full(self._drop_unfinished)
        if not resuming:
            self._in_full(self._clear)
            self._in_full(self._mark, journal)
        store = PendingStore(self.zarr_store(), self.location.url)
        with _committed(store):
            yield store
        self._in_full(self._unmark)

    def opened(self) -> PendingStore:
        """The store that is there, all its metadata in memory as its root has them. Nothing is written."""
        store = PendingStore(self.zarr_store(), self.location.url)
        with translated(f"read {_ROOT} from", self.location.url):
            store.hold(json.loads(self.location.filesystem().cat_file(f"{self.location.path}/{_ROOT}")))
        return store

    @contextlib.contextmanager
    def extended(self, store: PendingStore) -> Iterator[None]:
        """Lets more be written to a store that was `opened`, which others see if there was no error."""
        self._in_full(self._drop_unfinished)
        with _committed(store):
            yield

    def zarr_store(self) -> Store:
        """A zarr store to write to."""
        return self.location.zarr_store(read_only=False)

    def create_object(self, key: str) -> ObjectWriter:
        """Begins to write one object."""
        return create_object(self.location, key)

    def objects(self) -> dict[str, int]:
        """What is there: bytes by key."""
        try:
            return {key: entry.size for key, entry in self.location.listing().items()}
        except StoreNotFoundError:
            return {}  # a bucket that is not there shows in `claimed`

    def _in_full(self, write: Callable[..., None], *args: Any) -> None:
        in_full(partial(write, *args), self.location.url)

    def _mark(self, journal: Mapping[str, Any] | None) -> None:
        marker = json.dumps({"note": _NOTE, "journal": journal}).encode()
        path = f"{self.location.path}/{MARKER}"
        with translated("write to", self.location.url):
            if self.location.scheme == "file":
                self.location.filesystem().makedirs(self.location.path, exist_ok=True)
        if journal is None:
            with translated("write to", self.location.url):
                self.location.filesystem().pipe_file(path, marker)
            return
        writer = create_object(self.location, MARKER)  # a journal is there whole or not at all
        try:
            writer.write(marker)
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def _unmark(self) -> None:
        with translated("delete from", self.location.url):
            self.location.filesystem().rm_file(f"{self.location.path}/{MARKER}")

    def _clear(self) -> None:
        """Deletes the store that is there but for the marker, the root's metadata first."""
        keys = self._replaceable()
        roots, others = [[key for key in keys if (key in METADATA) is is_root] for is_root in (True, False)]
        delete_objects(self.location, roots)
        delete_objects(self.location, others)
        left = self.objects().keys() & set(keys)
        if left:  # S3 answers with what it did not delete, which is no error
            raise AccessDeniedError(f"not allowed to delete {min(left)} from {self.location.url}: check the rights")

    def _drop_unfinished(self) -> None:
        """Deletes local files that were being written, and ends uploads, whose parts are paid for unseen."""
        filesystem, path = self.location.filesystem(), self.location.path
        with translated("delete from", self.location.url):
            for key in self.objects():
                if is_under_way(key):
                    filesystem.rm_file(f"{path}/{key}")
        if self.location.scheme != "s3":
            return
        bucket, key, _ = filesystem.split_path(path)
        prefix = f"{key}/" if key else ""
        with contextlib.suppress(OSError, BotoCoreError, ClientError):  # not every key may do this, and it is only tidy
            found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in found.get("Uploads", []):
                if may_belong(upload["Key"].removeprefix(prefix)):
                    which = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **which)


class PendingStore(WrapperStore[Store]):
    """Keeps all metadata (`zarr.json`) in memory until `commit`, so that nothing opens before, not even a group.

    Metadata is looked for in memory alone, which saves some ten requests an array where there is none; what is there
    already must be given to `hold`.
    """

    def __init__(self, store: Store, url: str = "") -> None:
        super().__init__(store)
        self._url = url
        self._held: dict[str, Buffer] = {}
        self._writes = Writes(url)

    def hold(self, root: Mapping[str, Any]) -> None:
        """Takes all metadata from the root's: those of single nodes may be ahead, after a `commit` that was cut off."""
        consolidated = root.get("consolidated_metadata")
        if not consolidated:
            raise FormatError(f"the metadata of {self._url} is not consolidated: zarr.consolidate_metadata it")
        for path, node in {"": root, **consolidated["metadata"]}.items():
            document = {part: value for part, value in node.items() if part != "consolidated_metadata"}
            stored = json.dumps(document).encode()
            self._held[f"{path}/{_ROOT}".lstrip("/")] = default_buffer_prototype().buffer.from_bytes(stored)

    def commit(self) -> None:
        """Stores the metadata, the root's after all other: from then on the store opens."""
        sync(self._commit())

    def abandon(self) -> None:
        """Refuses all further objects and waits for those that are being written.

        zarr's own thread goes on with what it was told to write, after Ctrl-C and when one of many objects fails.
        Raises StoreError when that takes too long.
        """
        self._writes.end()

    async def _commit(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for key, value in self._held.items():
                    if key != _ROOT:
                        group.create_task(self._put(key, value))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        await self._put(_ROOT, self._held[_ROOT])

    async def _put(self, key: str, value: Buffer) -> None:
        with translated(f"write {key} to", self._url):
            await self._writes.run(self._store.set(key, value))

    async def set(self, key: str, value: Buffer) -> None:
        if is_metadata(key):
            self._held[key] = value
        else:
            await self._put(key, value)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if is_metadata(key):
            return self._held.get(key)
        with translated(f"read {key} from", self._url):
            return await self._store.get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        if is_metadata(key):
            return key in self._held
        with translated(f"look for {key} in", self._url):
            return await self._store.exists(key)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not await self.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        for key, value in values:
            await self.set(key, value)

    async def delete(self, key: str) -> None:
        if is_metadata(key):
            self._held.pop(key, None)
        else:
            await self._writes.run(self._store.delete(key))

    async def delete_dir(self, prefix: str) -> None:
        await self._writes.run(self._store.delete_dir(prefix))

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names of the groups and arrays below a prefix."""
        above = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in sorted({key[len(above) :].split("/")[0] for key in self._held if key.startswith(above)}):
            yield name


@contextlib.contextmanager
def _committed(store: PendingStore) -> Iterator[None]:
    """Commits a store when the context ends, unless by an error."""
    try:
        yield
        store.commit()
    except BaseException:
        store.abandon()
        raise
