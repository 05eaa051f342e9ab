"""Files on a web server: a file system for fsspec, and whether objects exist.

The first byte of each object is requested, 64 objects at a time. The response contains the size and ETag, and proves
that the server supports byte ranges. Redirects are followed. TensorStore does not follow them, so it reads an object
at the address to which the server redirects, which is asked for again when its signature has expired.
"""

from __future__ import annotations

import asyncio
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

from zloader.access.object_stores import ReadOnly
from zloader.access.stored_objects import TRUSTED_SINCE, StoredObject
from zloader.common.errors import AccessDeniedError, OptionError, StoreError

Answer = TypeVar("Answer")

_CONCURRENCY = 64  # requests
_ADVICE = 'pass the headers that the server requires in storage_options, such as {"headers": {"Authorization": ...}}'
_OF_REQUEST = {"Host", "Range", "Accept-Encoding"}  # headers of one request, not of all
_PAUSES_S = (0.2, 0.4, 0.8)  # before the retries of a transient failure
_MOST_WAIT_S = 60.0  # altogether, if the server says for how long
_DEADLINE = aiohttp.ClientTimeout(total=30)  # per request


class _BusyError(aiohttp.ClientError):
    """The server is busy, and maybe says for how long. A ClientResponseError would contain the request's headers."""

    def __init__(self, status: int, retry_after: str) -> None:
        self.wait_s = float(retry_after) if retry_after.isdigit() else 0.0
        asks = f" and asks to wait {retry_after} s" if self.wait_s else ""
        super().__init__(f"the server returned status {status}{asks}")


class WebFiles(ReadOnly, HTTPFileSystem):  # type: ignore[misc]
    """Files below http(s) addresses. Paths are plain text; special characters are quoted in the URL."""

    advice = _ADVICE  # if access is denied

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
            _raise_for_status(response, url, self.advice)

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
    client["requote_redirect_url"] = False  # a signature is valid only as it is written
    return WebFiles(headers=headers, allow_redirects=True, client_kwargs=client, asynchronous=asynchronous)


def find(filesystem: WebFiles, root: str, keys: Iterable[str]) -> dict[str, StoredObject]:
    """The objects below `root` that exist, out of `keys`. Their tag is the ETag, else Last-Modified, else empty.

    Raises AccessDeniedError and StoreError, the latter also for a redirect or a server without byte ranges.
    """
    found: dict[str, StoredObject] = sync(filesystem.loop, _find, filesystem, root, iter(keys))
    return found


async def _find(filesystem: WebFiles, root: str, keys: Iterator[str]) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}

    async def work() -> None:
        for key in keys:  # the workers share one iterator, so at most _CONCURRENCY keys are in memory
            path = f"{root}/{key}"
            entry = await _with_retries(path, functools.partial(_first_byte, filesystem, path, _stored_object))
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
    left_s = _MOST_WAIT_S
    for pause_s in _PAUSES_S:
        try:
            return await request()
        except (aiohttp.ClientError, TimeoutError) as error:
            wait_s = max(pause_s, getattr(error, "wait_s", 0.0))
            if wait_s > left_s:
                raise _failure(path, error) from error
            left_s -= wait_s
            await asyncio.sleep(wait_s)
    try:
        return await request()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(path, error) from error


def _failure(path: str, error: Exception) -> StoreError:
    reason = str(error) or type(error).__name__
    return StoreError(f"cannot read {path}: {reason}. Is the address correct, and is its server running?")


def address_of(filesystem: WebFiles, path: str) -> tuple[str, Mapping[str, str]]:
    """Where an object is after redirects: its address, and the headers to send there. Raises the errors of `find`."""
    found: tuple[str, Mapping[str, str]] = sync(
        filesystem.loop, _with_retries, path, functools.partial(_first_byte, filesystem, path, _address)
    )
    return found


def _address(response: aiohttp.ClientResponse, path: str) -> tuple[str, Mapping[str, str]]:
    if response.status not in (200, 206):
        _raise_for_status(response, path)
    asked = response.history[0].url if response.history else response.url
    kept = response.request_info.headers.items() if asked.origin() == response.url.origin() else ()
    return str(response.url), {name: value for name, value in kept if name not in _OF_REQUEST}


async def _first_byte(
    filesystem: WebFiles, path: str, result: Callable[[aiohttp.ClientResponse, str], Answer]
) -> Answer:
    """What `result` makes of the answer to a request for the first byte of the object at a path."""
    headers = filesystem.kwargs["headers"] | {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
    request = filesystem.kwargs | {"headers": headers, "timeout": _DEADLINE}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(path), **request) as response:
        return result(response, path)


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


def _raise_for_status(response: aiohttp.ClientResponse, path: str, advice: str = _ADVICE) -> NoReturn:
    if response.status in (401, 403, 407):
        raise AccessDeniedError(f"access to {path} was denied (status {response.status}): {advice}")
    if response.status in (408, 429) or response.status >= 500:
        raise _BusyError(response.status, response.headers.get("Retry-After", ""))
    raise StoreError(f"cannot read {path}: the server returned status {response.status}")
