"""What obstore reads: buckets, containers and web servers.

obstore was chosen over fsspec's own clients because it needs half to a fifth of the CPU time per byte, and returns the
ETag of each answer (benchmarks/LOG.md). It retries listings and metadata a few times. Reads of chunks are single
requests, which `zloader.reading.object_source` retries until its deadline. Functions import obstore, because local
files do not need it.

A read that is awaited ends in a thread of obstore, which needs Python's lock for a moment. If the interpreter has ended
by then, the process aborts. So such reads are counted, and at exit, once the epochs have been closed, the last of them
are waited for.
"""

from __future__ import annotations

import email.utils
import os
import re
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fsspec import AbstractFileSystem

from zloader.access.scheme import ReadRange, Scheme, access_errors, claim_process, require_known, status_of, uses
from zloader.access.stored_objects import Listing, StoredObject
from zloader.common.locks import cached_property

# A stalled connection is dropped after as long as by TensorStore. The deadline of a read bounds all its attempts.
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "24h"}
_ONE_REQUEST = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_FEW_REQUESTS = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_STRONG_TAG = re.compile("[!#-~]+")  # not a time, nor a weak ETag, with which nothing matches
_STORES: dict[str, Any] = {}  # of this process, each with its connections
_AWAITED: weakref.WeakSet[Any] = weakref.WeakSet()  # reads that obstore still refers to
_EXIT_S = 2.0  # that a process waits for them


def kept_store(
    kind: str, where: str, *, headers: Mapping[str, str] | None = None, retries: bool, **options: Any
) -> Any:
    """A store of obstore, such as GCSStore(where, **options). Equal calls return the same one."""
    from obstore import store

    claim_process("obstore")
    key = repr((kind, where, headers, retries, sorted(options.items())))
    if key not in _STORES:
        address = str(options.get("endpoint") or options.get("base_url") or where)
        client = {**_CLIENT, "allow_http": address.startswith("http://"), "default_headers": dict(headers or {})}
        policy = _FEW_REQUESTS if retries else _ONE_REQUEST
        _STORES[key] = getattr(store, kind)(where, client_options=client, retry_config=policy, **options)
    return _STORES[key]


def tag_of(meta: Mapping[str, Any]) -> str:
    """The ETag of an object, else the time of its last change; empty if the server says neither."""
    if meta["e_tag"]:
        return str(meta["e_tag"]).strip('"')
    modified = meta["last_modified"]
    return email.utils.format_datetime(modified, usegmt=True) if modified.timestamp() else ""


class ObjectScheme(Scheme):
    """A kind of URL that obstore reads."""

    library = ""  # obstore's class of store
    known: tuple[str, ...] = ()  # options of storage_options
    variables = "\0"  # what names of environment variables begin with, for messages
    default = ""  # where credentials come from if there are neither options nor variables

    def access(self) -> dict[str, Any]:
        """The options of `kept_store`. Raises OptionError."""
        raise NotImplementedError

    def split(self) -> tuple[str, str]:
        """The two parts of the path: what obstore calls the store, and a prefix of the keys in it."""
        root, _, prefix = self.path.partition("/")
        return root, prefix

    def require_options(self) -> None:
        """Raises OptionError for options that there are not."""
        require_known(self.options, self.location.scheme, self.known)

    def open(self, *, retries: bool) -> Any:
        """The store of obstore. Raises OptionError."""
        self.require_options()
        return kept_store(self.library, self.split()[0], retries=retries, **self.access())

    @cached_property
    def store(self) -> Any:
        """The store of obstore for listings and metadata."""
        return self.open(retries=True)

    def credentials(self) -> str:
        self.require_options()
        self.access()
        found = [*self.options, *sorted(name for name in os.environ if name.startswith(self.variables))]
        return ", ".join(found) or self.default

    @cached_property
    def files(self) -> Any:
        return _Files(self)

    def key(self, key: str) -> str:
        """The key in the store of obstore."""
        return f"{self.split()[1]}/{key}".strip("/")

    def find(self, key: str) -> StoredObject:
        return _stored(self.store.head(self.key(key)))

    def inside(self, key: str, *, recursive: bool = False) -> list[tuple[str, StoredObject | None]]:
        """The objects below a key of the store; unless `recursive`, what is directly below, None for a directory."""
        try:
            if recursive:
                return [(meta["path"], _stored(meta)) for batch in self.store.list(key or None) for meta in batch]
            found = self.store.list_with_delimiter(key or None)
        except access_errors() as error:
            if status_of(error) == 404:  # there is no such bucket
                return []
            raise
        objects = [(meta["path"], _stored(meta)) for meta in found["objects"] if meta["path"] != key]
        return [*objects, *((path, None) for path in found["common_prefixes"])]

    def listing(self) -> Listing:
        prefix = self.key("")
        inside = self.inside(prefix, recursive=True)
        found = _without_folders({path[len(prefix) :].strip("/"): stored for path, stored in inside if stored})
        return Listing((found or ({"": self.find("")} if prefix else {})).items())

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        within: Any = {"offset": start} if stop is None else (start, stop)
        try:
            options = {"range": within} if start or stop is not None else {}
            return bytes(self.store.get(self.key(key), options=options).bytes())
        except access_errors() as error:
            if status_of(error) == 416:  # the object ends before the range begins
                return b""
            raise

    def read_range(self) -> ReadRange | None:
        with self.location.translated("open"):
            store = self.open(retries=False)

        async def read(key: str, start: int, stop: int, tag: str) -> tuple[str, bytes]:
            return await read_once(store, self.key(key), start, stop, tag)

        return read


def _stored(meta: Mapping[str, Any]) -> StoredObject:
    tag = tag_of(meta)
    return StoredObject(size=meta["size"], tag=tag, stamp=tag)


def _without_folders(found: dict[str, StoredObject]) -> dict[str, StoredObject]:
    """Drops the empty objects that consoles create for folders. obstore does not show the slash at their end."""
    if all(entry.size for entry in found.values()):
        return found
    folders = {""}
    for key in found:
        while (key := key.rpartition("/")[0]) not in folders:
            folders.add(key)
    return {key: entry for key, entry in found.items() if entry.size or key not in folders}


async def read_once(store: Any, key: str, start: int, stop: int, tag: str = "") -> tuple[str, bytes]:
    """A range of an object, and the object's tag. If `tag` is an ETag, the object must still have it."""
    options: dict[str, Any] = {"range": (start, stop)}
    if _STRONG_TAG.fullmatch(tag):
        options["if_match"] = f'"{tag}"'
    result = await _awaited(store.get_async(key, options=options))
    return tag_of(result.meta), (await _awaited(result.bytes_async())).to_bytes()


async def _awaited(read: Any) -> Any:
    """The result of a future of obstore, which is waited for when the process ends."""
    _AWAITED.add(read)
    try:
        return await read
    finally:
        del read  # a traceback must not keep it


def _finish_reads() -> None:
    if not uses("obstore"):  # in a forked process they never end
        return
    until = time.monotonic() + _EXIT_S
    while _AWAITED and time.monotonic() < until:
        repr(next(iter(_STORES.values())))  # any call of obstore drops what its threads have left to be dropped
        time.sleep(0.001)
    time.sleep(0.005)  # a thread that has just dropped a read gives back Python's lock


# Epochs end by finalizers, too. They are made later, so they run earlier.
weakref.finalize(_finish_reads, _finish_reads)


class _Files(AbstractFileSystem):  # type: ignore[misc]
    """What is directly below a path. fsspec finds the matches of a glob with it."""

    cachable = False

    def __init__(self, scheme: ObjectScheme) -> None:
        super().__init__()
        self._scheme, self._root = scheme, scheme.split()[0]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Raises FileNotFoundError."""
        key = path[len(self._root) :].strip("/")
        found = self._scheme.inside(key)
        if not found and key and key == self._scheme.key(""):
            found = [(key, self._scheme.find(""))]
        entries = [
            {"name": f"{self._root}/{name}", "size": 0, "type": "file" if stored else "directory"}
            for name, stored in found
        ]
        return entries if detail else [entry["name"] for entry in entries]
