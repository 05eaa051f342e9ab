"""http(s):// URLs: stores on a web server, which cannot be listed.

The consolidated metadata implies which objects to look for (listed_store.py). The first byte of each is requested, 64
at a time. The answer has the size and the ETag, and proves that the server supports byte ranges. HEAD is not used,
because servers may refuse it for addresses that are signed for GET.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fsspec.asyn import get_loop, sync

from zloader.access.object_files import ObjectScheme, awaited, kept_store, status_of, tag_of
from zloader.access.stored_objects import TRUSTED_SINCE, StoredObject
from zloader.common.errors import OptionError, StoreError

_CONCURRENCY = 64  # requests
# Parameters that sign an address of Amazon, Google, Azure and CloudFront, and change each time.
_SIGNING = re.compile(
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|signature|expires|token|"
    r"s[vsrtepi]|srt|spr|sip|sig|sk(oid|tid|t|e|s|v)|sdd|(sao|suo|sc)id",
    re.IGNORECASE,
)


class Web(ObjectScheme):
    """http(s):// URLs."""

    form = "HOST/PATH"
    advice = (
        'the headers that the server requires, in storage_options: {"headers": {"Authorization": ...}}; a signed '
        "address may have expired"
    )
    is_web = True
    is_source = False

    def split(self, location: Any) -> tuple[str, str]:
        scheme, _, rest = location.path.partition("://")
        host, _, prefix = rest.partition("/")
        return f"{scheme}://{host}", prefix

    def store(self, location: Any, *, prefix: str = "", retries: bool) -> Any:
        unknown = location.storage_options.keys() - {"headers", "query"}
        if unknown:
            raise OptionError(
                f"storage_options for http(s) accept only headers and query, not {', '.join(sorted(unknown))}: "
                'pass {"headers": {"Authorization": ...}} if the server requires credentials'
            )
        root, headers = self.split(location)[0], location.storage_options.get("headers")
        address = f"{root}/{quote(prefix)}".rstrip("/")
        if query := location.storage_options.get("query"):
            address += f"?{query}"  # of each request
        return kept_store("HTTPStore", address, endpoint_url=root, headers=headers, retries=retries)

    def find_object(self, location: Any, key: str) -> StoredObject:
        found = self.find(location, [key])
        if key not in found:
            raise FileNotFoundError(f"{location.url}/{key}")
        return found[key]

    def find(self, location: Any, keys: Iterable[str]) -> dict[str, StoredObject]:
        """The objects of `keys` below a location that exist."""
        store = self.store(location, prefix=self.split(location)[1], retries=True)
        found: dict[str, StoredObject] = sync(get_loop(), _find, store, iter(keys), location.path)
        return found

    def origin(self, location: Any) -> str:
        """The address, with what of a query does not sign it: that may say which file it is."""
        query = parse_qsl(location.storage_options.get("query", ""), keep_blank_values=True)
        named = [(name, value) for name, value in query if not _SIGNING.fullmatch(name)]
        return f"{location.path}?{urlencode(named)}" if named else str(location.path)

    def credentials(self, location: Any) -> str:
        query = ", and the query of the address" if location.storage_options.get("query") else ""
        return f"headers: {', '.join(location.storage_options.get('headers') or ()) or 'none'}{query}"


async def _find(store: Any, keys: Iterator[str], url: str) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}

    async def work() -> None:
        for key in keys:  # the workers share one iterator, so at most _CONCURRENCY keys are in memory
            if (entry := await _stored_object(store, key, url)) is not None:
                found[key] = entry

    tasks = [asyncio.ensure_future(work()) for _ in range(_CONCURRENCY)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _stored_object(store: Any, key: str, url: str) -> StoredObject | None:
    """What the server says of an object: its tag is the ETag, else the time of its last change, else empty."""
    from obstore.exceptions import BaseError, NotSupportedError

    try:
        result = await awaited(store.get_async(key, options={"range": (0, 1)}))
        await awaited(result.bytes_async())
    except FileNotFoundError:
        return None
    except BaseError as error:
        if status_of(error) == 410:
            return None
        if status_of(error) != 416 and not isinstance(error, NotSupportedError):
            raise
        result = await awaited(store.get_async(key))
        if result.meta["size"]:  # not an empty object, which has no first byte
            raise StoreError(
                f"the server of {url}/{key} does not support byte ranges, which reading shards requires: it answered a "
                "request of the first byte with the whole object. Use another server, or copy the store"
            ) from error
    tag, modified = tag_of(result.meta), result.meta["last_modified"].timestamp()
    # An ETag does not help if the time is artificial: most servers derive the ETag from the file's time and size.
    trusted = modified == 0 or modified >= TRUSTED_SINCE
    return StoredObject(size=result.meta["size"], tag=tag, stamp=tag if trusted else "")
