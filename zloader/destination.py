"""Where a conversion writes: what may be replaced, and what marks it as unfinished.

The first object written is a marker, the last the root's `zarr.json`, after which the marker goes. Until then nothing
opens as a store, and whoever finds the marker may clear the rest away.
"""

from __future__ import annotations

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
_ROOTS = (_ROOT, ".zgroup", ".zarray", ".zattrs", ".zmetadata")


class Destination:
    """The place of a store to be. `claim` writes the marker, `clear` empties it, `release` takes the marker away.

    All raise AccessDeniedError, StoreNotFoundError (no such bucket) or StoreError.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def check(self, *, overwrite: bool) -> None:
        """Raises StoreExistsError unless there is nothing, an unfinished conversion, or a store to overwrite."""
        there, url = self._keys(), self.location.url
        if not there or MARKER in there:
            return
        if not there.intersection(_ROOTS):
            raise StoreExistsError(
                f"{url} holds something that is no Zarr store: it is never overwritten. Move it away"
            )
        if not overwrite:
            raise StoreExistsError(
                f"there is already a store at {url}: pass overwrite=True (--overwrite) to replace it"
            )

    def claim(self) -> None:
        """Marks the place as being written; what is there stays until `clear`."""
        filesystem, path = self.location.filesystem(), self.location.path
        with _translated("write to", self.location.url):
            filesystem.makedirs(path, exist_ok=True) if self.location.scheme == "file" else None
            filesystem.pipe_file(f"{path}/{MARKER}", b"A zloader conversion that has not ended. Run it again.\n")

    def clear(self) -> None:
        """Deletes everything but the marker, the root's metadata first."""
        filesystem, path = self.location.filesystem(), self.location.path
        names = {key.split("/")[0] for key in self._keys()} - {MARKER}
        roots = [f"{path}/{name}" for name in _ROOTS if name in names]
        others = [f"{path}/{name}" for name in sorted(names.difference(_ROOTS))]
        with _translated("delete what is in", self.location.url):
            for batch in (roots, others):
                if batch:
                    filesystem.rm(batch, recursive=True)

    def release(self) -> None:
        """Takes the marker away."""
        with _translated("delete from", self.location.url):
            self.location.filesystem().rm_file(f"{self.location.path}/{MARKER}")

    def store(self) -> PendingStore:
        """The zarr store to write to."""
        return PendingStore(self.location.zarr_store(read_only=False), self.location.url)

    def _keys(self) -> set[str]:
        try:
            with _translated("look at", self.location.url):
                return set(self.location.listing())
        except StoreNotFoundError:
            return set()  # a bucket that is not there shows in `claim`


class PendingStore(WrapperStore[Store]):
    """Keeps the root's `zarr.json` in memory until `commit`, and knows the `sizes` in bytes of what it has stored."""

    def __init__(self, store: Store, url: str = "") -> None:
        super().__init__(store)
        self._url = url
        self._root: Buffer | None = None
        self.sizes: dict[str, int] = {}

    def commit(self) -> None:
        """Stores the root's metadata: from now on the store opens."""
        assert self._root is not None
        root, self._root = self._root, None
        sync(self.set(_ROOT, root, hold=False))

    async def set(self, key: str, value: Buffer, *, hold: bool = True) -> None:
        """Stores an object whole, or holds the root's metadata back."""
        if key == _ROOT and hold:
            self._root = value
            return
        with _translated(f"write {key} to", self._url):
            await self._store.set(key, value)
        self.sizes[key] = len(value)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if key == _ROOT and self._root is not None:
            return self._root
        with _translated(f"read {key} from", self._url):
            return await self._store.get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        if key == _ROOT and self._root is not None:
            return True
        with _translated(f"look for {key} in", self._url):
            return await self._store.exists(key)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not await self.exists(key):
            await self.set(key, value)

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        for key, value in values:
            await self.set(key, value)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names below a prefix, without the marker: it is no part of the hierarchy."""
        async for name in self._store.list_dir(prefix):
            if prefix or name != MARKER:
                yield name


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
