"""Where a conversion writes: what may be replaced, and what marks it as unfinished.

The first object written is a marker and the last is the root's `zarr.json`, after which the marker goes. Until then
nothing opens as a store, and whoever finds the marker may clear the rest away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator

from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.core.sync import sync
from zarr.storage import WrapperStore

from zloader.errors import AccessDeniedError, StoreError, StoreExistsError, StoreNotFoundError, ZloaderError
from zloader.store import Location

MARKER = "zloader.partial"
_ROOT = "zarr.json"
_METADATA = (_ROOT, ".zgroup", ".zarray", ".zattrs", ".zmetadata")


class Destination:
    """The place of a store to be: first `check`, then `claimed` while the source is validated, then `replaced`.

    All raise AccessDeniedError, StoreNotFoundError (no such bucket) or StoreError.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def check(self, *, overwrite: bool) -> None:
        """Raises StoreExistsError unless there is nothing, an unfinished conversion, or a store to overwrite."""
        there, url = self._keys(), self.location.url
        whole = there.intersection(_METADATA)  # a marker beside it was left by a conversion that replaced nothing yet
        if not there or (MARKER in there and not whole):
            return
        if not whole:
            raise StoreExistsError(
                f"{url} holds something that is no Zarr store: it is never overwritten. Move it away"
            )
        if not overwrite:
            raise StoreExistsError(
                f"there is already a store at {url}: pass overwrite=True (--overwrite) to replace it"
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Marks the place as being written. What is there stays; an error in the context leaves it as it was."""
        marked = MARKER in self._keys()
        filesystem, path = self.location.filesystem(), self.location.path
        with _translated("write to", self.location.url):
            if self.location.scheme == "file":
                filesystem.makedirs(path, exist_ok=True)
            filesystem.pipe_file(f"{path}/{MARKER}", b"A zloader conversion that has not ended. Run it again.\n")
        try:
            yield
        except BaseException:
            if not marked:
                self._unmark()
            raise

    @contextlib.contextmanager
    def replaced(self) -> Iterator[PendingStore]:
        """Deletes what is there, gives the store to fill, and makes it one that opens if there was no error."""
        self._clear()
        store = PendingStore(self.location.zarr_store(read_only=False), self.location.url)
        try:
            yield store
            store.commit()
        except BaseException:
            store.abandon()
            raise
        self._unmark()

    def _clear(self) -> None:
        """Deletes everything but the marker, the root's metadata first."""
        filesystem, path = self.location.filesystem(), self.location.path
        names = {key.split("/")[0] for key in self._keys()} - {MARKER}
        roots = [f"{path}/{name}" for name in _METADATA if name in names]
        others = [f"{path}/{name}" for name in sorted(names.difference(_METADATA))]
        with _translated("delete what is in", self.location.url):
            for batch in (roots, others):
                if batch:
                    filesystem.rm(batch, recursive=True)
        left = self._keys() - {MARKER}
        if left:  # s3fs says nothing when it may write but not delete
            raise AccessDeniedError(f"not allowed to delete {min(left)} from {self.location.url}: check the rights")

    def _unmark(self) -> None:
        with _translated("delete from", self.location.url):
            self.location.filesystem().rm_file(f"{self.location.path}/{MARKER}")

    def _keys(self) -> set[str]:
        try:
            return set(self.location.listing())
        except StoreNotFoundError:
            return set()  # a bucket that is not there shows in `claimed`


class PendingStore(WrapperStore[Store]):
    """Keeps all metadata (`zarr.json`) in memory until `commit`, so that nothing opens before, not even a group.

    It is made for an empty place: metadata is looked for in memory alone, which saves some ten requests an array.
    `sizes` are the bytes of each object stored.
    """

    def __init__(self, store: Store, url: str = "") -> None:
        super().__init__(store)
        self._url = url
        self._held: dict[str, Buffer] = {}
        self._abandoned = False
        self.sizes: dict[str, int] = {}

    def commit(self) -> None:
        """Stores the metadata, the root's after all other: from then on the store opens."""
        sync(self._commit())

    def abandon(self) -> None:
        """Refuses all further objects: after Ctrl-C zarr's own thread goes on with what it was told to write."""
        self._abandoned = True

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
        if self._abandoned:
            raise StoreError(f"the conversion to {self._url} was interrupted: run it again")
        with _translated(f"write {key} to", self._url):
            await self._store.set(key, value)
        self.sizes[key] = len(value)

    async def set(self, key: str, value: Buffer) -> None:
        if _is_metadata(key):
            self._held[key] = value
        else:
            await self._put(key, value)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if _is_metadata(key):
            return self._held.get(key)
        with _translated(f"read {key} from", self._url):
            return await self._store.get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        if _is_metadata(key):
            return key in self._held
        with _translated(f"look for {key} in", self._url):
            return await self._store.exists(key)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not await self.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        for key, value in values:
            await self.set(key, value)

    async def delete(self, key: str) -> None:
        if _is_metadata(key):
            self._held.pop(key, None)
        else:
            await self._store.delete(key)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names of the groups and arrays below a prefix."""
        above = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in sorted({key[len(above) :].split("/")[0] for key in self._held if key.startswith(above)}):
            yield name


def _is_metadata(key: str) -> bool:
    return key.rsplit("/", 1)[-1] in _METADATA


@contextlib.contextmanager
def _translated(doing: str, url: str) -> Iterator[None]:
    """Turns the errors of file systems and S3 clients into ours."""
    try:
        yield
    except ZloaderError:
        raise
    except (PermissionError, NoCredentialsError, PartialCredentialsError) as error:
        raise AccessDeniedError(
            f"not allowed to {doing} {url} ({error}): check the rights of the directory, or the key and secret in "
            "storage_options or the AWS_* variables"
        ) from error
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"cannot {doing} {url} ({error}): does the bucket exist?") from error
    except (OSError, BotoCoreError) as error:
        raise StoreError(f"cannot {doing} {url}: {error}") from error
