"""Stores on a web server, which cannot be listed: the consolidated metadata implies which objects to look for.

The first byte of every implied object is requested, 64 objects at a time. The response contains the size and ETag, and
proves that the server supports byte ranges. Redirects are not followed, since TensorStore does not follow them either.
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
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

from zloader.access.listed_store import ListedStore
from zloader.access.stored_objects import TRUSTED_SINCE, StoredObject
from zloader.access.zarr_groups import UNDECODABLE, implied_keys, members_of, open_zarr_group
from zloader.common.errors import (
    AccessDeniedError,
    FormatError,
    OptionError,
    StoreError,
    StoreNotFoundError,
    ZloaderError,
)

Answer = TypeVar("Answer")

_CONCURRENCY = 64  # requests
_PAUSES_S = (0.2, 0.4, 0.8)  # before the retries of a transient failure
_DEADLINE = aiohttp.ClientTimeout(total=30)  # per request
_ROOTS = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")


class ReadOnly:
    """A mixin for fsspec file systems that rejects the first operation of a writer."""

    async def _pipe_file(self, path: str, value: bytes, **options: object) -> None:
        raise OptionError(f"cannot write to {path}: stores can only be written to a local path or s3://")


class WebFiles(ReadOnly, HTTPFileSystem):  # type: ignore[misc]
    """Files below http(s) addresses. Paths are plain text; special characters are quoted in the URL."""

    def encode_url(self, url: str) -> yarl.URL:
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        return yarl.URL(f"{scheme}://{host}/{quote(path)}", encoded=True)

    async def set_session(self) -> aiohttp.ClientSession:
        is_new = self._session is None
        session: aiohttp.ClientSession = await super().set_session()
        if is_new and self.asynchronous:  # fsspec only closes sessions of its own loop; aiohttp warns about others
            weakref.finalize(self, self.close_session, None, session)
        return session

    def _raise_not_found_for_status(self, response: aiohttp.ClientResponse, url: str) -> None:
        if response.status in (404, 410):
            raise FileNotFoundError(url)
        if response.status not in (200, 206):
            _raise_for_status(response, url)

    async def _cat_file(self, url: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        stored: bytes = await _with_retries(url, functools.partial(super()._cat_file, url, start, end, **options))
        return stored


def web_files(storage_options: Mapping[str, Any], *, asynchronous: bool = False) -> WebFiles:
    """The file system for http(s). Raises OptionError for options other than `headers`, sent with every request."""
    unknown = storage_options.keys() - {"headers"}
    if unknown:
        raise OptionError(
            f"storage_options for http(s) accept only headers, not {', '.join(sorted(unknown))}: "
            'pass {"headers": {"Authorization": ...}} if the server requires credentials'
        )
    headers = dict(storage_options.get("headers") or {})
    # Use the proxies set in the environment, as TensorStore does.
    client = {"trust_env": True}
    return WebFiles(headers=headers, allow_redirects=False, client_kwargs=client, asynchronous=asynchronous)


def find(filesystem: WebFiles, root: str, keys: Iterable[str]) -> dict[str, StoredObject]:
    """The objects below `root` that exist, out of `keys`. Their tag is the ETag, else Last-Modified, else empty.

    Raises AccessDeniedError and StoreError, the latter also for a redirect or a server without byte ranges.
    """
    found: dict[str, StoredObject] = sync(filesystem.loop, _find, filesystem, root, iter(keys))
    return found


def listing(filesystem: WebFiles, root: str, store: Any) -> dict[str, StoredObject]:
    """The objects of a whole store that exist; `store` is the zarr store at `root`.

    Raises StoreNotFoundError, FormatError if the metadata is not consolidated, and the errors of `find`.
    """
    roots = find(filesystem, root, _ROOTS)
    if not roots.keys() & {"zarr.json", ".zgroup"}:
        raise StoreNotFoundError(f"found no zarr.json or .zgroup at {root}: check the address")
    try:
        sizes = {key: entry.size for key, entry in roots.items()}
        group = open_zarr_group(ListedStore(store, root, sizes, all_listed=False))
    except ZloaderError:
        raise
    except UNDECODABLE as error:
        raise FormatError(f"{root} is not a Zarr group: {error}") from error
    if group.metadata.consolidated_metadata is None:
        raise FormatError(
            f"the metadata of {root} is not consolidated, and a web server cannot be listed: run "
            "zarr.consolidate_metadata on the original store, or convert it with 'zloader convert'"
        )
    return roots | find(filesystem, root, implied_keys(members_of(group, root)))


async def _find(filesystem: WebFiles, root: str, keys: Iterator[str]) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}

    async def work() -> None:
        for key in keys:  # the workers share one iterator, so at most _CONCURRENCY keys are in memory
            path = f"{root}/{key}"
            entry = await _with_retries(path, functools.partial(_first_byte, filesystem, path))
            if entry is not None:
                found[key] = entry

    await filesystem.set_session()
    tasks = [asyncio.ensure_future(work()) for _ in range(_CONCURRENCY)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _with_retries(path: str, request: Callable[[], Awaitable[Answer]]) -> Answer:
    """The result of `request`, retried if the server is busy or the connection breaks."""
    for pause_s in _PAUSES_S:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            return await request()
        await asyncio.sleep(pause_s)
    try:
        return await request()
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise StoreError(f"cannot read {path}: {reason}. Is the address correct, and is its server running?") from error


async def _first_byte(filesystem: WebFiles, path: str) -> StoredObject | None:
    """The object at a path, or None, from a request for its first byte."""
    headers = filesystem.kwargs["headers"] | {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
    request = filesystem.kwargs | {"headers": headers, "timeout": _DEADLINE}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(path), **request) as response:
        return _stored_object(response, path)


def _stored_object(response: aiohttp.ClientResponse, path: str) -> StoredObject | None:
    if response.status in (404, 410):
        return None
    if response.status not in (200, 206, 416):
        _raise_for_status(response, path)
    if response.status == 416 or (response.status == 200 and response.content_length == 0):
        return _as_stored(response, 0)  # the object is empty
    whole = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
    if response.status == 200 or not whole:
        response.close()  # otherwise the whole object would be downloaded
        raise StoreError(
            f"the server of {path} does not support byte ranges, which reading shards requires (status "
            f"{response.status} for a request of the first byte): use another server, or copy the store"
        )
    return _as_stored(response, int(whole[1]))


def _as_stored(response: aiohttp.ClientResponse, size: int) -> StoredObject:
    modified = response.headers.get("Last-Modified", "")
    tag = (response.headers.get("ETag") or modified).strip('"')
    return StoredObject(size=size, tag=tag, stamp=tag if _is_trusted(modified) else "")


def _is_trusted(modified: str) -> bool:
    """Whether a Last-Modified header is absent, or can be the time at which the file was written.

    An ETag does not help if the time is artificial: most servers derive the ETag from the file's time and size.
    """
    try:
        return not modified or email.utils.parsedate_to_datetime(modified).timestamp() >= TRUSTED_SINCE
    except ValueError:
        return False


def _raise_for_status(response: aiohttp.ClientResponse, path: str) -> NoReturn:
    if response.status in (401, 403, 407):
        raise AccessDeniedError(
            f"access to {path} was denied (status {response.status}): pass the headers that the server requires in "
            'storage_options, such as {"headers": {"Authorization": ...}}'
        )
    if 300 <= response.status < 400:
        target = response.headers.get("Location", "nowhere").partition("?")[0]  # the query may contain a signature
        raise StoreError(f"{path} redirects to {target} (status {response.status}): open the store at that address")
    if response.status in (408, 429) or response.status >= 500:
        # Not a ClientResponseError, which would contain the request's headers.
        raise aiohttp.ClientError(f"the server returned status {response.status}")
    raise StoreError(f"cannot read {path}: the server returned status {response.status}")
