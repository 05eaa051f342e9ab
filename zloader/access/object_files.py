"""What obstore reads: buckets, containers and web servers, as schemes and as a file system of fsspec.

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
import functools
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from fsspec import AbstractFileSystem

from zloader.access.scheme import ReadRange, Scheme, access_errors, claim_process, require_known, status_of, uses
from zloader.common.concurrent_calls import concurrently

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
    options: tuple[str, ...] = ()  # of storage_options

    def require_options(self, location: Any) -> None:
        """Raises OptionError for options that there are not."""
        require_known(location.storage_options, location.scheme, self.options)

    def access(self, location: Any) -> tuple[str, dict[str, Any]]:
        """Which credentials are found, without secrets, and what `kept_store` needs. Raises OptionError."""
        raise NotImplementedError

    def address(self, location: Any, prefix: str) -> tuple[str, dict[str, Any]]:
        """What obstore calls the store that a location is in, and its options, with `prefix` before all keys."""
        return self.split(location)[0], {"prefix": prefix or None}

    def split(self, location: Any) -> tuple[str, str]:
        """The two parts of a location's path: the store, and a prefix of the keys in it."""
        root, _, prefix = location.path.partition("/")
        return root, prefix

    def store(self, location: Any, *, prefix: str = "", retries: bool) -> Any:
        """The store of obstore that a location is in. Raises OptionError."""
        self.require_options(location)
        where, options = self.address(location, prefix)
        return kept_store(self.library, where, retries=retries, **options, **self.access(location)[1])

    def credentials(self, location: Any) -> str:
        self.require_options(location)
        return self.access(location)[0]

    def sync_files(self, location: Any) -> Any:
        """The file system, which is not asynchronous."""
        return ObjectFiles(self.split(location)[0], self.store(location, retries=True))

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        if not asynchronous:
            return self.sync_files(location)
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        return AsyncFileSystemWrapper(self.sync_files(location), asynchronous=True)

    def read_range(self, location: Any) -> ReadRange | None:
        with location.translated("open"):
            store = self.store(location, prefix=self.split(location)[1], retries=False)
        return functools.partial(read_once, store)


async def read_once(store: Any, key: str, start: int, stop: int, tag: str = "") -> tuple[str, bytes]:
    """A range of an object, and the object's tag. If `tag` is an ETag, the object must still have it."""
    options: dict[str, Any] = {"range": (start, stop)}
    if _STRONG_TAG.fullmatch(tag):
        options["if_match"] = f'"{tag}"'
    result = await awaited(store.get_async(key, options=options))
    return tag_of(result.meta), (await awaited(result.bytes_async())).to_bytes()


async def awaited(read: Any) -> Any:
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


class ObjectFiles(AbstractFileSystem):  # type: ignore[misc]
    """The objects of a store of obstore, read-only. Their paths begin with `root`."""

    cachable = False

    def __init__(self, root: str, store: Any) -> None:
        super().__init__()
        self.root, self._store = root, store

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def key(self, path: str) -> str:
        """The key in the store of the object at a path."""
        return path[len(self.root) :].strip("/")

    def entry(self, key: str, *, size: int | None = None, tag: str = "") -> dict[str, Any]:
        """The entry of an object, or of a directory, which has no size."""
        kind = "directory" if size is None else "file"
        return {"name": f"{self.root}/{key}".rstrip("/"), "size": size or 0, "type": kind, "ETag": tag}

    def _of(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return self.entry(meta["path"], size=meta["size"], tag=tag_of(meta))

    def head(self, key: str) -> dict[str, Any]:
        """The entry of an object. Raises FileNotFoundError."""
        return self._of(self._store.head(key))

    def tree(self, key: str, *, recursive: bool) -> list[dict[str, Any]]:
        """The objects below a key; unless `recursive`, the objects and directories directly below. Maybe empty."""
        try:
            if recursive:
                listed = [self._of(meta) for batch in self._store.list(key or None) for meta in batch]
                return _without_folders(listed, self.entry(key)["name"])
            found = self._store.list_with_delimiter(key or None)
        except access_errors() as error:
            if status_of(error) == 404:  # there is no such bucket
                return []
            raise
        objects = [meta for meta in found["objects"] if meta["path"] != key]
        return [*map(self._of, objects), *map(self.entry, found["common_prefixes"])]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """The entry of an object or a directory. Raises FileNotFoundError."""
        key = self.key(path)
        try:
            if key:
                return self.head(key)
        except FileNotFoundError:
            if not self.tree(key, recursive=False):
                raise
        return self.entry(key)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is directly below a path, or the object at it. Raises FileNotFoundError."""
        key = self.key(path)
        entries = self.tree(key, recursive=False) or [self.head(key)]
        return entries if detail else [entry["name"] for entry in entries]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any
    ) -> Any:
        """All objects below a path, from one listing, or the object at it; empty if there is none."""
        if withdirs or maxdepth is not None:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **options)
        key = self.key(path)
        try:
            entries = self.tree(key, recursive=True) or ([self.head(key)] if key else [])
        except FileNotFoundError:
            entries = []
        return {entry["name"]: entry for entry in entries} if detail else [entry["name"] for entry in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of an object, or of a range of it."""
        key = self.key(path)
        within: Any = (start or 0, end)
        if end is None:
            within = {"suffix": -start} if start and start < 0 else {"offset": start} if start else None
        try:
            return bytes(self._store.get(key, options={"range": within} if within else {}).bytes())
        except access_errors() as error:
            if status_of(error) == 416:  # the object ends before the range begins
                return b""
            raise

    def cat_ranges(
        self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], *_: Any, **__: Any
    ) -> list[bytes]:
        """The bytes of a range of each path."""
        return concurrently(lambda which: self.cat_file(*which), list(zip(paths, starts, ends, strict=True)))


def _without_folders(entries: list[dict[str, Any]], root: str) -> list[dict[str, Any]]:
    """Drops the empty objects that consoles create for folders. obstore does not show the slash at their end."""
    if all(entry["size"] for entry in entries):
        return entries
    folders = {root}
    for entry in entries:
        name = entry["name"].rpartition("/")[0]
        while name not in folders and len(name) > len(root):
            folders.add(name)
            name = name.rpartition("/")[0]
    return [entry for entry in entries if entry["size"] or entry["name"] not in folders]
