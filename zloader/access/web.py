"""Stores on a web server, which cannot be listed: what is there follows from the consolidated metadata.

One byte is asked of every object that the metadata imply, 64 at once: the answer holds size and ETag, and proves that
the server serves byte ranges. Redirects are not followed, since TensorStore does not follow them either.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import aiohttp
import yarl
import zarr
import zarr.errors
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

from zloader.access.implied_objects import UNDECODABLE, implied_keys, members_of
from zloader.access.listed_store import ListedStore
from zloader.access.stored_objects import TRUSTED_SINCE, StoredObject
from zloader.common.errors import (
    AccessDeniedError,
    FormatError,
    OptionError,
    StoreError,
    StoreNotFoundError,
    ZloaderError,
)

Answer = TypeVar("Answer")

_AT_ONCE = 64
_PAUSES_S = (0.2, 0.4, 0.8)  # after which what may pass is tried again
_DEADLINE = aiohttp.ClientTimeout(total=30)  # of one request
_ROOTS = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")


class ReadOnly:
    """Refuses what a writer does first, on any file system of fsspec that it is mixed into."""

    async def _pipe_file(self, path: str, value: bytes, **options: object) -> None:
        raise OptionError(f"cannot write to {path}: stores are written to a local path or s3:// alone")


class WebFiles(ReadOnly, HTTPFileSystem):  # type: ignore[misc]
    """Files below http(s) addresses. Paths are plain text, which becomes an address whatever signs it holds."""

    def encode_url(self, url: str) -> yarl.URL:
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        return yarl.URL(f"{scheme}://{host}/{quote(path)}", encoded=True)

    async def set_session(self) -> aiohttp.ClientSession:
        is_new = self._session is None
        session: aiohttp.ClientSession = await super().set_session()
        if is_new and self.asynchronous:  # fsspec closes only those of its own loop, and aiohttp complains of the rest
            weakref.finalize(self, self.close_session, None, session)
        return session

    def _raise_not_found_for_status(self, response: aiohttp.ClientResponse, url: str) -> None:
        if response.status in (404, 410):
            raise FileNotFoundError(url)
        if response.status not in (200, 206):
            _refuse(response, url)

    async def _cat_file(self, url: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        stored: bytes = await _patiently(url, functools.partial(super()._cat_file, url, start, end, **options))
        return stored


def web_files(storage_options: Mapping[str, Any], *, asynchronous: bool = False) -> WebFiles:
    """The file system for http(s). Raises OptionError for options other than `headers`, which all requests carry."""
    unknown = storage_options.keys() - {"headers"}
    if unknown:
        raise OptionError(
            f"storage_options for http(s) take only headers, not {', '.join(sorted(unknown))}: "
            'give {"headers": {"Authorization": ...}} where a server wants credentials'
        )
    headers = dict(storage_options.get("headers") or {})
    # The proxies of the environment, as TensorStore takes them.
    client = {"trust_env": True}
    return WebFiles(headers=headers, allow_redirects=False, client_kwargs=client, asynchronous=asynchronous)


def find(filesystem: WebFiles, root: str, keys: Iterable[str]) -> dict[str, StoredObject]:
    """Those of the objects below `root` that are there; their tags are ETag, else Last-Modified, else empty.

    Raises AccessDeniedError and StoreError: also for a redirect, and where byte ranges are not served.
    """
    found: dict[str, StoredObject] = sync(filesystem.loop, _find, filesystem, root, iter(keys))
    return found


def listing(filesystem: WebFiles, root: str, store: Any) -> dict[str, StoredObject]:
    """Those of the objects of a whole store (`store` is zarr's, below `root`) that are there.

    Raises StoreNotFoundError, FormatError where metadata are not consolidated, and what `find` does.
    """
    roots = find(filesystem, root, _ROOTS)
    if not roots.keys() & {"zarr.json", ".zgroup"}:
        raise StoreNotFoundError(f"there is no zarr.json or .zgroup at {root}: check the address")
    try:
        sizes = {key: entry.size for key, entry in roots.items()}
        group = zarr.open_group(ListedStore(store, root, sizes, all_listed=False), mode="r")
    except ZloaderError:
        raise
    except UNDECODABLE as error:
        raise FormatError(f"{root} is not a Zarr group: {error}") from error
    if group.metadata.consolidated_metadata is None:
        raise FormatError(
            f"the metadata of {root} are not consolidated, and a web server cannot be listed: run "
            "zarr.consolidate_metadata on the store where it can be written, or 'zloader convert' on it"
        )
    return roots | find(filesystem, root, implied_keys(members_of(group, root)))


async def _find(filesystem: WebFiles, root: str, keys: Iterator[str]) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}

    async def take_turns() -> None:
        for key in keys:  # all share the iterator, so that no more keys are held than are asked for
            path = f"{root}/{key}"
            there = await _patiently(path, functools.partial(_first_byte, filesystem, path))
            if there is not None:
                found[key] = there

    await filesystem.set_session()
    tasks = [asyncio.ensure_future(take_turns()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _patiently(path: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """What `ask` gives, which is tried again when the server is busy or the connection breaks."""
    for pause_s in _PAUSES_S:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            return await ask()
        await asyncio.sleep(pause_s)
    try:
        return await ask()
    except (aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise StoreError(f"cannot read {path}: {why}. Is the address right, and does its server run?") from error


async def _first_byte(filesystem: WebFiles, path: str) -> StoredObject | None:
    """What is there, or None."""
    headers = filesystem.kwargs["headers"] | {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
    request = filesystem.kwargs | {"headers": headers, "timeout": _DEADLINE}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(path), **request) as response:
        return _stored_object(response, path)


def _stored_object(response: aiohttp.ClientResponse, path: str) -> StoredObject | None:
    if response.status in (404, 410):
        return None
    if response.status not in (200, 206, 416):
        _refuse(response, path)
    if response.status == 416 or (response.status == 200 and response.content_length == 0):
        return _as_stored(response, 0)  # there is no first byte
    whole = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
    if response.status == 200 or not whole:
        response.close()  # or all of it would be read
        raise StoreError(
            f"the server of {path} does not serve byte ranges (it answered status {response.status} when asked for "
            "the first byte), and shards are read in parts: use a server that does, or copy the store"
        )
    return _as_stored(response, int(whole[1]))


def _as_stored(response: aiohttp.ClientResponse, size: int) -> StoredObject:
    modified = response.headers.get("Last-Modified", "")
    tag = (response.headers.get("ETag") or modified).strip('"')
    return StoredObject(size=size, tag=tag, stamp=tag if _is_trusted(modified) else "")


def _is_trusted(modified: str) -> bool:
    """Whether a Last-Modified, if there is one, is a time at which a file was written.

    Most servers make the ETag of a file from its time and size, so that it tells no more than the time does.
    """
    try:
        return not modified or email.utils.parsedate_to_datetime(modified).timestamp() >= TRUSTED_SINCE
    except ValueError:
        return False


def _refuse(response: aiohttp.ClientResponse, path: str) -> NoReturn:
    if response.status in (401, 403, 407):
        raise AccessDeniedError(
            f"not allowed to read {path} (status {response.status}): give the headers that its server wants in "
            'storage_options, {"headers": {"Authorization": ...}}'
        )
    if 300 <= response.status < 400:
        target = response.headers.get("Location", "nowhere").partition("?")[0]  # the query may be a signature
        raise StoreError(f"{path} is redirected to {target} (status {response.status}): open the store there")
    if response.status in (408, 429) or response.status >= 500:
        raise aiohttp.ClientError(f"its server answered status {response.status}")  # its own kind would hold headers
    raise StoreError(f"cannot read {path}: its server answered status {response.status}")
