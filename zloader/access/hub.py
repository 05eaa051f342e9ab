"""hf:// URLs: datasets, models and buckets of the Hugging Face Hub, found with huggingface_hub.

A branch or tag is resolved to a commit once, when a store is opened. Reading then names the commit, and so do the tags
of objects, and thus fingerprints.

The Hub answers a read with a redirect to a CDN, and limits how often it is asked. So each object's address at the CDN
is asked for once, and then used for all reads of it for some minutes. After an answer 429, nothing is asked for until
the time that the Hub names.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from zloader.access.object_stores import libraries
from zloader.access.retry import MISSING, ReadFailure, denied
from zloader.access.storage_options import require_known
from zloader.common.concurrent_calls import aside, concurrently
from zloader.common.errors import OptionError, StoreNotFoundError
from zloader.common.messages import reason_of

_REPOSITORY = re.compile(
    r"(?P<kind>(?:datasets|spaces|models|buckets)/)?(?!(?:datasets|spaces|models|buckets)/)(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
ADVICE = "HF_TOKEN, 'hf auth login', or the token in storage_options, and whether you may see the repository"
_KEPT_S = 600.0  # addresses at the CDN are valid for an hour
_ASKED_AT_ONCE = 16  # addresses
_TIMEOUT_S = 20.0  # of one question
_needed = functools.partial(libraries, "hf", "huggingface_hub", "hf")


def _parts(url: str, rest: str) -> re.Match[str]:
    found = _REPOSITORY.fullmatch(rest)
    if found is None:
        raise OptionError(
            f"cannot open {url!r}: write hf://datasets/ORG/NAME/PATH, hf://datasets/ORG/NAME@REVISION/PATH, "
            "hf://buckets/ORG/NAME/PATH or, for a model, hf://ORG/NAME/PATH"
        )
    if found["kind"] == "buckets/" and found["revision"]:
        raise OptionError(f"cannot open {url!r}: a bucket has no revisions. Leave out @{found['revision']}")
    return found


def hub_path(url: str, rest: str, revision: str) -> str:
    """What HfFileSystem calls an object, at `revision` if it is not empty. Raises OptionError."""
    found = _parts(url, rest)
    revision = revision or found["revision"] or ""
    at = f"@{quote(revision, safe='%')}" if revision else ""
    return f"{found['kind'] or ''}{found['name']}{at}" + (f"/{found['path']}" if found["path"] else "")


def hub_revision(location: Any) -> str:
    """The commit that the branch or tag of a URL now is. Buckets have none."""
    found = _parts(location.url, location.url.partition("://")[2].strip("/"))
    if found["kind"] == "buckets/" or location.revision:
        return str(location.revision)
    files = location.filesystem()
    with location.translated("look up the revision of"):
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

        kind = (found["kind"] or "models/")[:-2]
        try:
            about = files._api.repo_info(found["name"], revision=found["revision"], repo_type=kind, timeout=_TIMEOUT_S)
        except HFValidationError as error:
            raise OptionError(f"cannot open {location.url}: {error}") from error
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            if is_denial(error):
                raise
            missing = "revision" if isinstance(error, RevisionNotFoundError) else "repository"
            raise StoreNotFoundError(
                f"there is no such {missing}: {location.url}. Check its name, and HF_TOKEN if it is private"
            ) from error
        return str(about.sha)


def hub_files(location: Any) -> Any:
    """HfFileSystem, without earlier listings. It finds the token: HF_TOKEN, or the file of 'hf auth login'."""
    with _needed():
        from huggingface_hub import HfFileSystem
    require_known(location.storage_options, "hf", {"token", "endpoint"})

    class HubFiles(HfFileSystem):
        def cat_ranges(
            self, paths: Any, starts: Any, ends: Any, *_: Any, on_error: str = "return", **options: Any
        ) -> Any:
            def read(which: tuple[str, int, int]) -> Any:
                try:
                    return self.cat_file(*which, cache_type="none")  # otherwise it would read ahead
                except Exception as error:
                    if on_error == "raise":
                        raise
                    return error

            return concurrently(read, list(zip(paths, starts, ends, strict=True)))

    return HubFiles(**{**location.storage_options, "skip_instance_cache": True})


def hub_zarr_store(location: Any) -> Any:
    """A read-only zarr store at a location. Each read asks the Hub, which redirects it."""
    from zarr.storage import FsspecStore

    from zloader.access.web import WebFiles

    files = location.filesystem()
    headers = {name: str(value) for name, value in files._api._build_hf_headers().items()}
    # The signature in a redirect's address is valid only as it is written. aiohttp sends no token to another host.
    client = {"trust_env": True, "requote_redirect_url": False}
    web = WebFiles(headers=headers, allow_redirects=True, client_kwargs=client, asynchronous=True)
    web.advice = f"check {ADVICE}"
    return FsspecStore(location.kept(web), read_only=True, path=_address(files, location.path, quoted=False))


def hub_tag(revision: str, entry: Mapping[str, Any]) -> str:
    """The tag of an object: the commit, and the hash of its content that the Hub also sends as ETag."""
    if "blob_id" not in entry:
        return str(entry.get("xet_hash") or "")  # in a bucket
    lfs = entry.get("lfs")
    return f"{revision} {lfs['sha256'] if lfs else entry['blob_id']}"


def _address(files: Any, path: str, *, quoted: bool = True) -> str:
    found = _parts(path, path)
    kind = {"models/": "", None: ""}.get(found["kind"], found["kind"])
    inner = f"resolve/{found['revision'] or 'main'}" if kind != "buckets/" else "resolve"
    inside = found["path"] or ""
    return f"{files.endpoint}/{kind}{found['name']}/{inner}/{quote(inside) if quoted else inside}"


class ObjectAddress(NamedTuple):
    """Where an object is now: a URL, the headers for reading it, and the object's tag, if answers have none."""

    url: str
    headers: Mapping[str, str]
    tag: str | None


@dataclass(kw_only=True)
class _Found:
    """The addresses of a store's objects, with the time at which they were asked for, by key."""

    addresses: dict[str, tuple[float, ObjectAddress]] = field(default_factory=dict)
    silent_until: float = 0.0  # because of a rate limit


_OF_STORES: dict[tuple[str, str], _Found] = {}  # of this process, so that a new epoch asks for nothing again


class HubAddresses:
    """The addresses of a repository's or bucket's objects at the CDN. Nothing is asked for before the first `find`."""

    def __init__(self, location: Any) -> None:
        self._location = location
        self._files: Any = None
        self._asking: dict[str, asyncio.Task[ObjectAddress]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._found = _Found()
        if location.revision:  # what a key of a bucket stands for may change
            which = (location.path, repr(sorted(location.storage_options.items())))
            self._found = _OF_STORES.setdefault(which, self._found)

    async def find(self, key: str) -> ObjectAddress:
        """The address of an object. Raises the errors of huggingface_hub."""
        asked_s, address = self._found.addresses.get(key, (float("-inf"), None))
        if address is not None and time.monotonic() - asked_s < _KEPT_S:
            return address
        if (loop := asyncio.get_running_loop()) is not self._loop:  # tasks of a loop that has ended never end
            self._loop, self._turns, self._asking = loop, asyncio.Semaphore(_ASKED_AT_ONCE), {}
        if key not in self._asking:
            self._asking[key] = asyncio.ensure_future(self._ask(key))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])  # other reads of the object wait for the same answer

    def forget(self, key: str) -> None:
        """Has an address that may have expired looked up before the next read."""
        self._found.addresses.pop(key, None)

    async def _ask(self, key: str) -> ObjectAddress:
        async with self._turns:
            await asyncio.sleep(max(0.0, self._found.silent_until - time.monotonic()))
            asked_s = time.monotonic()
            address = await aside(self._look_up, key)
        self._found.addresses[key] = (asked_s, address)
        return address

    def _look_up(self, key: str) -> ObjectAddress:
        try:
            found = self._metadata(key)
        except Exception as error:
            until = time.monotonic() + rate_limit_s(error)
            self._found.silent_until = max(self._found.silent_until, until)
            raise
        at_hub = found.location.startswith(self._files.endpoint)  # a small file, which the Hub itself sends
        headers = self._files._api._build_hf_headers() if at_hub else {}
        tag = f"{found.commit_hash} {found.etag}"
        if not self._location.revision:
            tag = found.xet_file_data.file_hash if found.xet_file_data else ""
        return ObjectAddress(found.location, headers, tag)

    def _metadata(self, key: str) -> Any:
        from huggingface_hub import get_hf_file_metadata

        if self._files is None:
            self._files = self._location.filesystem()
        address = _address(self._files, f"{self._location.path}/{key}")
        endpoint, token = self._files.endpoint, self._files.token
        return get_hf_file_metadata(address, token=token, endpoint=endpoint, timeout=_TIMEOUT_S)


class WebAddresses(HubAddresses):
    """The addresses to which a web server redirects reads of a store's objects."""

    def _look_up(self, key: str) -> ObjectAddress:
        from zloader.access.web import address_of

        url, headers = address_of(self._location.filesystem(), f"{self._location.path}/{key}")
        return ObjectAddress(url, headers, None)


def rate_limit_s(error: BaseException) -> float:
    """The seconds after which the Hub wants to be asked again; 0 if it does not say."""
    from huggingface_hub.utils._http import parse_ratelimit_headers

    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = parse_ratelimit_headers(headers)
    after = headers.get("Retry-After", "")
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return float(after) if after.isdigit() else 0.0


def unfound(error: Exception, advice: str) -> ReadFailure:
    """The ReadFailure of an address that could not be found; `advice` is what to check if access is denied."""
    answer = reason_of(error)
    code = getattr(getattr(error, "response", None), "status_code", None)
    if is_denial(error):
        return denied(answer, advice)
    if code == 404:
        return MISSING
    if code is not None and code < 500 and code not in (408, 425, 429):
        return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)
    return ReadFailure(answer=answer, wait_s=rate_limit_s(error))


def hub_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the Hub's client and of aiohttp. Raises OptionError if huggingface_hub is not installed."""
    with _needed():
        from aiohttp import ClientError
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    return HfHubHTTPError.__mro__[1], EntryNotFoundError, ClientError  # the first is any error of its client


def credentials_found(location: Any) -> str:
    """Where a token for the Hub is. Raises OptionError if huggingface_hub is not installed."""
    with _needed():
        from huggingface_hub import get_token
    if location.storage_options.get("token"):
        return "token in storage_options"
    if not get_token():
        return "none, which suffices for public repositories"
    return "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the file of 'hf auth login'"


def is_denial(error: BaseException) -> bool:
    """Whether the token is missing or not sufficient."""
    return getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
