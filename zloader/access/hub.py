"""hf:// URLs: datasets, models and buckets of the Hugging Face Hub. huggingface_hub reads metadata, obstore chunks.

A branch or tag is resolved to a commit once, when a store is opened. Reading then names the commit, and so do the tags
of objects, and thus fingerprints.

The Hub answers a read with a redirect to a CDN, and limits how often it is asked. huggingface_hub waits as long as the
Hub says after an answer 429. For chunks, each object's address at the CDN is asked for once, and then used for all
reads of it for some minutes. After an answer 429, nothing is asked for until the time that the Hub names.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from zloader.access.object_files import ObjectScheme, kept_store, read_once
from zloader.access.scheme import ReadRange, access_errors, is_denial, libraries, status_of, wait_s
from zloader.access.stored_objects import StoredObject
from zloader.common.concurrent_calls import aside
from zloader.common.errors import OptionError, StoreNotFoundError
from zloader.common.locks import cached_property

_REPOSITORY = re.compile(
    r"(?P<kind>(?:datasets|spaces|models|buckets)/)?(?!(?:datasets|spaces|models|buckets)/)(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_KEPT_S = 600.0  # addresses at the CDN are valid for an hour
_ASKED_AT_ONCE = 16  # addresses
_TIMEOUT_S = 20.0  # of one question
_needed = functools.partial(libraries, "hf", "huggingface_hub", "hf")


class Hub(ObjectScheme):
    """hf:// URLs. Keys of a store are those of the repository or bucket."""

    known = ("token", "endpoint")
    variables = "HF_TOKEN"
    default = "the file of 'hf auth login', or none, which suffices for public repositories"
    form = "datasets/ORG/NAME/PATH"
    advice = "HF_TOKEN, 'hf auth login', or the token in storage_options, and whether you may see the repository"
    if_nothing = "check the repository and the path, and HF_TOKEN if the repository is private"

    @property
    def parts(self) -> re.Match[str]:
        """Kind, name, revision and path of the URL. Raises OptionError."""
        found = _REPOSITORY.fullmatch(self.rest)
        if found is None:
            raise OptionError(
                f"cannot open {self.url!r}: write hf://datasets/ORG/NAME/PATH, hf://datasets/ORG/NAME@REVISION/PATH, "
                "hf://buckets/ORG/NAME/PATH or, for a model, hf://ORG/NAME/PATH"
            )
        if found["kind"] == "buckets/" and found["revision"]:
            raise OptionError(f"cannot open {self.url!r}: a bucket has no revisions. Leave out @{found['revision']}")
        return found

    @property
    def commit(self) -> str:
        """The commit of the location, else the revision in its URL, else empty."""
        return str(self.location.revision or self.parts["revision"] or "")

    @property
    def path(self) -> str:
        """The path at the commit of the location, if it has one. Raises OptionError."""
        return "/".join(self.split()).rstrip("/")

    def split(self) -> tuple[str, str]:
        found, at = self.parts, f"@{quote(self.commit, safe='%')}" if self.commit else ""
        return f"{found['kind'] or ''}{found['name']}{at}", found["path"] or ""

    @cached_property
    def api(self) -> Any:
        """The client of the Hub. It finds the token: HF_TOKEN, or the file of 'hf auth login'."""
        with _needed():
            from huggingface_hub import HfApi
        self.require_options()
        return HfApi(**self.options)

    def access(self) -> dict[str, Any]:
        return {"headers": {name: str(value) for name, value in self.api._build_hf_headers().items()}}

    def revision(self) -> str:
        """The commit that the branch or tag of a URL now is. Buckets have none."""
        found = self.parts
        if found["kind"] == "buckets/" or self.location.revision:
            return str(self.location.revision)
        with self.location.translated("look up the revision of"):
            api = self.api
            from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

            kind = (found["kind"] or "models/")[:-2]
            try:
                about = api.repo_info(found["name"], revision=found["revision"], repo_type=kind, timeout=_TIMEOUT_S)
            except HFValidationError as error:
                raise OptionError(f"cannot open {self.url}: {error}") from error
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                if is_denial(error):
                    raise
                missing = "revision" if isinstance(error, RevisionNotFoundError) else "repository"
                raise StoreNotFoundError(
                    f"there is no such {missing}: {self.url}. Check its name, and HF_TOKEN if it is private"
                ) from error
            return str(about.sha)

    # ---- listings and metadata

    def _asked(self, of_repository: str, of_bucket: str, **options: Any) -> list[tuple[str, StoredObject | None]]:
        """The tag is the commit, and the hash of the content that the Hub also sends as ETag."""
        kind, name = self.parts["kind"], self.parts["name"]
        if kind == "buckets/":
            found = getattr(self.api, of_bucket)(name, **options)
        else:
            where = {"revision": self.commit or None, "repo_type": (kind or "models/")[:-2]}
            found = getattr(self.api, of_repository)(name, **options, **where)
        asked: list[tuple[str, StoredObject | None]] = []
        for each in found:
            stored = None
            if hasattr(each, "size"):
                tag = str(each.xet_hash or "") if kind == "buckets/" else ""
                tag = tag or f"{self.commit} {each.lfs.sha256 if each.lfs else each.blob_id}"
                stored = StoredObject(size=each.size, tag=tag, stamp=tag)
            asked.append((each.path, stored))
        return asked

    def find(self, key: str) -> StoredObject:
        for _, stored in self._asked("get_paths_info", "get_bucket_paths_info", paths=[self.key(key)]):
            if stored is not None:
                return stored
        raise FileNotFoundError(key)

    def inside(self, key: str, *, recursive: bool = False) -> list[tuple[str, StoredObject | None]]:
        from huggingface_hub.errors import EntryNotFoundError

        inside = {"prefix" if self.parts["kind"] == "buckets/" else "path_in_repo": key or None}
        try:
            return self._asked("list_repo_tree", "list_bucket_tree", recursive=recursive, **inside)
        except EntryNotFoundError:
            return []

    def address(self, key: str) -> str:
        """Where the Hub has an object."""
        found = self.parts
        kind = {"models/": "", None: ""}.get(found["kind"], found["kind"])
        revision = "" if kind == "buckets/" else f"/{quote(self.commit or 'main', safe='%')}"
        return f"{self.api.endpoint}/{kind}{found['name']}/resolve{revision}/{quote(self.key(key))}"

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            hf_raise_for_status,
            http_backoff,
        )

        headers = dict(self.access()["headers"])
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        # After a failed connection it would close the session of all threads.
        answer = http_backoff("GET", self.address(key), headers=headers, timeout=_TIMEOUT_S, retry_on_exceptions=())
        if answer.status_code in (404, 416):
            if answer.status_code == 404:
                raise FileNotFoundError(f"{self.url}/{key}")
            return b""  # the object ends before the range begins
        hf_raise_for_status(answer)
        return bytes(answer.content)

    # ---- chunks

    def look_up(self, key: str) -> Address:
        """Asks for the address of an object at the CDN. Raises FileNotFoundError and the errors of huggingface_hub."""
        asked_s, api = time.monotonic(), self.api
        from huggingface_hub import get_hf_file_metadata

        try:
            found = get_hf_file_metadata(self.address(key), token=api.token, endpoint=api.endpoint, timeout=_TIMEOUT_S)
        except Exception as error:
            if status_of(error) == 404:
                raise FileNotFoundError(str(error)) from error
            raise
        at_hub = found.location.startswith(api.endpoint)  # a small file, which the Hub itself sends
        store = kept_store("HTTPStore", found.location, **(self.access() if at_hub else {}), retries=False)
        tag = f"{found.commit_hash} {found.etag}"
        if not self.location.revision:
            tag = found.xet_file_data.file_hash if found.xet_file_data else ""
        return Address(store, asked_s, tag)

    def read_range(self) -> ReadRange | None:
        _ = self.api
        return _Addresses(self).read


class Address(NamedTuple):
    """Where an object is now, at what time it was asked for, and the object's tag, if answers have another."""

    store: Any
    asked_s: float
    tag: str


@dataclass(kw_only=True)
class _Found:
    """The addresses of a store's objects, by key."""

    addresses: dict[str, Address] = field(default_factory=dict)
    silent_until: float = 0.0  # because of a rate limit, which is an answer 429
    limited: Exception | None = None


_OF_STORES: dict[tuple[str, str], _Found] = {}  # of this process, so that a new epoch asks for nothing again


class _Addresses:
    """The addresses of a repository's or bucket's objects at the CDN. Nothing is asked for before the first read."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._asking: dict[str, asyncio.Task[Address]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._found = _Found()
        if hub.location.revision:  # what a key of a bucket stands for may change
            which = (hub.path, repr(sorted(hub.options.items())))
            self._found = _OF_STORES.setdefault(which, self._found)

    async def read(self, key: str, start: int, stop: int, _: str) -> tuple[str, bytes]:
        """Reads a range of an object. The CDN has other tags. Raises the errors of huggingface_hub and of obstore."""
        found = await self._find(key)
        try:
            tag, stored = await read_once(found.store, "", start, stop)
        except access_errors() as error:
            if not is_denial(error):
                raise
            if self._found.addresses.get(key) is found:  # it may have expired
                del self._found.addresses[key]
            found = await self._find(key)
            tag, stored = await read_once(found.store, "", start, stop)
        return found.tag or tag, stored

    async def _find(self, key: str) -> Address:
        found = self._found.addresses.get(key)
        if found is not None and time.monotonic() - found.asked_s < _KEPT_S:
            return found
        if (loop := asyncio.get_running_loop()) is not self._loop:  # tasks of a loop that has ended never end
            self._loop, self._turns, self._asking = loop, asyncio.Semaphore(_ASKED_AT_ONCE), {}
        if key not in self._asking:
            self._asking[key] = asyncio.ensure_future(self._ask(key))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])  # other reads of the object wait for the same answer

    async def _ask(self, key: str) -> Address:
        async with self._turns:
            if self._found.limited is not None and time.monotonic() < self._found.silent_until:
                raise self._found.limited
            try:
                self._found.addresses[key] = found = await aside(self._hub.look_up, key)
            except Exception as error:
                if pause_s := wait_s(error):
                    self._found.silent_until, self._found.limited = time.monotonic() + pause_s, error
                raise
        return found
