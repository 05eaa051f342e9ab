"""hf:// URLs: datasets, models and buckets of the Hugging Face Hub. huggingface_hub lists them, obstore reads them.

A branch or tag is resolved to a commit once, when a store is opened. Reading then names the commit, and so do the tags
of objects, and thus fingerprints.

The Hub answers a read with a redirect to a CDN, and limits how often it is asked. obstore follows it when it reads
metadata. For chunks, each object's address at the CDN is asked for once, and then used for all reads of it for some
minutes. After an answer 429, nothing is asked for until the time that the Hub names.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from zloader.access.object_files import ObjectFiles, ObjectScheme, kept_store, read_once
from zloader.access.scheme import ReadRange, access_errors, is_denial, libraries, status_of, wait_s
from zloader.common.concurrent_calls import aside
from zloader.common.errors import OptionError, ReadError, StoreNotFoundError
from zloader.common.messages import cause

_REPOSITORY = re.compile(
    r"(?P<kind>(?:datasets|spaces|models|buckets)/)?(?!(?:datasets|spaces|models|buckets)/)(?P<name>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_KEPT_S = 600.0  # addresses at the CDN are valid for an hour
_ASKED_AT_ONCE = 16  # addresses
_TIMEOUT_S = 20.0  # of one question
_MOST_WAIT_S = 60.0  # for the Hub's limit, when metadata are read
_needed = functools.partial(libraries, "hf", "huggingface_hub", "hf")


class Hub(ObjectScheme):
    """hf:// URLs."""

    library = "HTTPStore"
    options = ("token", "endpoint")
    form = "datasets/ORG/NAME/PATH"
    advice = "HF_TOKEN, 'hf auth login', or the token in storage_options, and whether you may see the repository"
    if_nothing = "check the repository and the path, and HF_TOKEN if the repository is private"

    def path(self, location: Any, rest: str) -> str:
        """The path at the commit of the location, if it has one. Raises OptionError."""
        found = _parts(location.url, rest)
        revision = location.revision or found["revision"] or ""
        at = f"@{quote(revision, safe='%')}" if revision else ""
        return f"{found['kind'] or ''}{found['name']}{at}" + (f"/{found['path']}" if found["path"] else "")

    def split(self, location: Any) -> tuple[str, str]:
        prefix = _parts(location.path, location.path)["path"] or ""
        return location.path.removesuffix(prefix).rstrip("/"), prefix

    def revision(self, location: Any) -> str:
        """The commit that the branch or tag of a URL now is. Buckets have none."""
        found = _parts(location.url, location.url.partition("://")[2].strip("/"))
        if found["kind"] == "buckets/" or location.revision:
            return str(location.revision)
        with location.translated("look up the revision of"):
            api = _api(location)
            from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

            kind = (found["kind"] or "models/")[:-2]
            try:
                about = api.repo_info(found["name"], revision=found["revision"], repo_type=kind, timeout=_TIMEOUT_S)
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

    def address(self, location: Any, prefix: str) -> tuple[str, dict[str, Any]]:
        return _address(_api(location), self.split(location)[0], prefix), {}

    def access(self, location: Any) -> tuple[str, dict[str, Any]]:
        with _needed():
            from huggingface_hub import get_token
        found = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the file of 'hf auth login'"
        if location.storage_options.get("token"):
            found = "token in storage_options"
        elif not get_token():
            found = "none, which suffices for public repositories"
        return found, {"headers": _headers(_api(location))}

    def sync_files(self, location: Any) -> Any:
        return _HubFiles(location, self.store(location, retries=True))

    def read_range(self, location: Any) -> ReadRange | None:
        _api(location)
        return _Addresses(location).read


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


def _api(location: Any) -> Any:
    """The client of the Hub. It finds the token: HF_TOKEN, or the file of 'hf auth login'."""
    with _needed():
        from huggingface_hub import HfApi
    location.kind.require_options(location)
    return HfApi(**location.storage_options)


def _headers(api: Any) -> dict[str, str]:
    return {name: str(value) for name, value in api._build_hf_headers().items()}


def _address(api: Any, root: str, path: str) -> str:
    found = _parts(root, root)
    kind = {"models/": "", None: ""}.get(found["kind"], found["kind"])
    inner = f"resolve/{found['revision'] or 'main'}" if kind != "buckets/" else "resolve"
    return f"{api.endpoint}/{kind}{found['name']}/{inner}/{quote(path)}".rstrip("/")


def _metadata(api: Any, address: str) -> Any:
    """What the Hub says of a file. Raises the errors of huggingface_hub."""
    from huggingface_hub import get_hf_file_metadata

    return get_hf_file_metadata(address, token=api.token, endpoint=api.endpoint, timeout=_TIMEOUT_S)


class _HubFiles(ObjectFiles):
    """The files of a repository at a commit, or of a bucket."""

    def __init__(self, location: Any, store: Any) -> None:
        root, _ = location.kind.split(location)
        super().__init__(root, store)
        self._location, self._api, self._repository = location, _api(location), _parts(root, root)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Reads once more after the time that the Hub names, if it answers 429."""
        try:
            return super().cat_file(path, start, end)
        except access_errors() as error:
            if status_of(error) != 429:
                raise
            pause_s, key = self._wait_s(path), path.removeprefix(f"{self._location.path}/")
            if pause_s > _MOST_WAIT_S:
                raise ReadError(
                    f"cannot read {key} of {self._location.url}: the Hub limits how often it is asked (429), and asks "
                    f"to wait {pause_s:.0f} s. Try again then"
                ) from cause(error)
        time.sleep(pause_s)
        return super().cat_file(path, start, end)

    def _wait_s(self, path: str) -> float:
        """The seconds that the Hub asks to wait, which obstore does not tell."""
        try:
            _metadata(self._api, _address(self._api, self.root, self.key(path)))
        except access_errors() as error:
            return wait_s(error)
        return 0.0

    def _of_hub(self, found: Any) -> dict[str, Any]:
        """The tag is the commit, and the hash of the content that the Hub also sends as ETag."""
        if not hasattr(found, "size"):
            return self.entry(found.path)
        if self._repository["kind"] == "buckets/":
            return self.entry(found.path, size=found.size, tag=str(found.xet_hash or ""))
        commit = self._repository["revision"] or ""
        return self.entry(
            found.path, size=found.size, tag=f"{commit} {found.lfs.sha256 if found.lfs else found.blob_id}"
        )

    def _asked(self, of_repository: str, of_bucket: str, **options: Any) -> list[dict[str, Any]]:
        kind, name = self._repository["kind"], self._repository["name"]
        if kind == "buckets/":
            found = getattr(self._api, of_bucket)(name, **options)
        else:
            where = {"revision": self._repository["revision"], "repo_type": (kind or "models/")[:-2]}
            found = getattr(self._api, of_repository)(name, **options, **where)
        return [self._of_hub(each) for each in found]

    def head(self, key: str) -> dict[str, Any]:
        for entry in self._asked("get_paths_info", "get_bucket_paths_info", paths=[key]):
            if entry["type"] == "file":
                return entry
        raise FileNotFoundError(key)

    def tree(self, key: str, *, recursive: bool) -> list[dict[str, Any]]:
        from huggingface_hub.errors import EntryNotFoundError

        inside = {"prefix" if self._repository["kind"] == "buckets/" else "path_in_repo": key or None}
        try:
            found = self._asked("list_repo_tree", "list_bucket_tree", recursive=recursive, **inside)
        except EntryNotFoundError:
            return []
        return [entry for entry in found if entry["type"] == "file" or not recursive]


class _Address(NamedTuple):
    """Where an object is now, at what time it was asked for, and the object's tag, if answers have another."""

    store: Any
    asked_s: float
    tag: str


@dataclass(kw_only=True)
class _Found:
    """The addresses of a store's objects, by key."""

    addresses: dict[str, _Address] = field(default_factory=dict)
    silent_until: float = 0.0  # because of a rate limit, which is an answer 429
    limited: Exception | None = None


_OF_STORES: dict[tuple[str, str], _Found] = {}  # of this process, so that a new epoch asks for nothing again


class _Addresses:
    """The addresses of a repository's or bucket's objects at the CDN. Nothing is asked for before the first read."""

    def __init__(self, location: Any) -> None:
        self._location = location
        self._asking: dict[str, asyncio.Task[_Address]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._found = _Found()
        if location.revision:  # what a key of a bucket stands for may change
            which = (location.path, repr(sorted(location.storage_options.items())))
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

    async def _find(self, key: str) -> _Address:
        found = self._found.addresses.get(key)
        if found is not None and time.monotonic() - found.asked_s < _KEPT_S:
            return found
        if (loop := asyncio.get_running_loop()) is not self._loop:  # tasks of a loop that has ended never end
            self._loop, self._turns, self._asking = loop, asyncio.Semaphore(_ASKED_AT_ONCE), {}
        if key not in self._asking:
            self._asking[key] = asyncio.ensure_future(self._ask(key))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])  # other reads of the object wait for the same answer

    async def _ask(self, key: str) -> _Address:
        async with self._turns:
            if self._found.limited is not None and time.monotonic() < self._found.silent_until:
                raise self._found.limited
            self._found.addresses[key] = found = await aside(self._look_up, key)
        return found

    def _look_up(self, key: str) -> _Address:
        """Asks for the address of an object. Raises FileNotFoundError and the errors of huggingface_hub."""
        location, asked_s = self._location, time.monotonic()
        api, (root, prefix) = _api(location), location.kind.split(location)
        try:
            found = _metadata(api, _address(api, root, f"{prefix}/{key}".strip("/")))
        except Exception as error:
            if pause_s := wait_s(error):
                self._found.silent_until, self._found.limited = time.monotonic() + pause_s, error
            if status_of(error) == 404:
                raise FileNotFoundError(str(error)) from error
            raise
        at_hub = found.location.startswith(api.endpoint)  # a small file, which the Hub itself sends
        store = kept_store("HTTPStore", found.location, headers=_headers(api) if at_hub else {}, retries=False)
        tag = f"{found.commit_hash} {found.etag}"
        if not location.revision:
            tag = found.xet_file_data.file_hash if found.xet_file_data else ""
        return _Address(store, asked_s, tag)
