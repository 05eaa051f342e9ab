"""Serves the S3 simulator's requests from local files: ROOT/BUCKET/KEY, read-only."""

from __future__ import annotations

import email.utils
import functools
import hashlib
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.messages import Body, Head, InMemory, Reply, document, error_document, response_head


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The facts about a file that responses depend on."""

    size: int
    etag: str
    modified: str  # as in Last-Modified


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response. Its body is `document`, or bytes [start, stop) of the requested file if `document` is None.

    Responses to HEAD have the same fields and no body.
    """

    status: int
    fields: tuple[str, ...] = ()  # without Content-Type and Content-Length of a document
    document: str | None = None
    start: int = 0
    stop: int = 0


class Files:
    """GET, HEAD, Range, If-Match, If-None-Match and ListObjectsV2 over a directory.

    Links that lead out of the bucket count as missing. Signatures are ignored. The facts about a file are read for each
    request. A `mapped` file is sent from memory, which saves a copy; it must not get shorter, or the process ends.
    """

    def __init__(self, root: str | os.PathLike[str], *, mapped: bool = False) -> None:
        self._root, self._mapped = os.path.realpath(root), mapped
        self._maps: dict[str, tuple[StoredFile, InMemory]] = {}

    def reply(self, request: Head, fault: HttpFault | None) -> Reply:
        """The response to one request."""
        if request.path in self._maps and request.method in ("GET", "HEAD"):
            file, body = self._maps[request.path]
            if _facts(f"{self._root}/{request.path.lstrip('/')}") == file:
                return _sent(request, file_answer(request, file, fault), body)
        fd = self._opened(request)
        if fd is None:
            return _documented(request, self.answer(request))
        file = stored_file(os.fstat(fd))
        answer = file_answer(request, file, fault)
        if answer.document is not None or request.method == "HEAD" or answer.stop == answer.start:
            os.close(fd)
            return _documented(request, answer)
        if not self._mapped:
            return _sent(request, answer, _OpenFile(fd))
        body = InMemory(memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ)))
        os.close(fd)
        self._maps[request.path] = file, body
        return _sent(request, answer, body)

    def _opened(self, request: Head) -> int | None:
        """Opens the file that a GET or HEAD asks for. Returns None for other requests, and if it does not exist."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        return _open_inside(f"{self._root}/{bucket}", key) if key and request.method in ("GET", "HEAD") else None

    def answer(self, request: Head) -> Answer:
        """The response to a request that asks for no existing file: a listing or an error."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        directory = Path(f"{self._root}/{bucket}")
        if request.method not in ("GET", "HEAD"):
            return _error(request, 405, "MethodNotAllowed", "This server is read-only.")
        if bucket in ("", ".", "..") or not directory.is_dir():
            return _error(request, 404, "NoSuchBucket", "The specified bucket does not exist")
        if key:
            return _error(request, 404, "NoSuchKey", "The specified key does not exist.")
        return _listing(request, directory)


def _facts(path: str) -> StoredFile | None:
    try:
        return stored_file(Path(path).stat())
    except OSError:
        return None


def stored_file(status: os.stat_result) -> StoredFile:
    """The facts about a file."""
    return _stored_file(status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _stored_file(inode: int, mtime_ns: int, size: int) -> StoredFile:
    identity = f"{inode}-{mtime_ns}-{size}"
    etag = f'"{hashlib.md5(identity.encode(), usedforsecurity=False).hexdigest()}"'
    return StoredFile(size=size, etag=etag, modified=email.utils.formatdate(mtime_ns / 1e9, usegmt=True))


def file_answer(request: Head, file: StoredFile, fault: HttpFault | None = None) -> Answer:
    """The response to a GET or HEAD of an existing file, changed by the fault if any."""
    fields, kind = request.fields, fault.kind if fault else None
    etag = fault.value if fault and fault.kind == "etag" else file.etag
    if fields.get("if-match", "*") not in (etag, "*"):
        return _error(
            request, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
        )
    if fields.get("if-none-match") in (etag, "*"):
        return Answer(status=304, fields=(f"ETag: {etag}",))
    asked = None if kind == "ignore_range" else _range(fields.get("range", ""), file.size)
    start, stop = asked or (0, file.size)
    if asked and start >= stop:
        return _error(request, 416, "InvalidRange", "The requested range is not satisfiable")
    if fault and fault.kind == "short":
        stop = max(start + 1, stop - fault.by)
    head = [
        "Server: s3sim",
        "Date: " + _date(int(time.time())),
        "Last-Modified: " + file.modified,
        f"ETag: {etag}",
        "Accept-Ranges: bytes",
        "Content-Type: application/octet-stream",
        "Connection: close" if kind == "noclen" else f"Content-Length: {stop - start}",
    ]
    if asked:
        head.append(f"Content-Range: bytes {start}-{stop - 1}/{file.size}")
    return Answer(status=206 if asked else 200, fields=tuple(head), start=start, stop=stop)


@functools.lru_cache(maxsize=1)
def _date(now: int) -> str:
    return email.utils.formatdate(now, usegmt=True)


def _error(request: Head, status: int, code: str, message: str) -> Answer:
    return Answer(status=status, document=error_document(code, message, request.path))


def _documented(request: Head, answer: Answer) -> Reply:
    """A response with a document or without a body."""
    if answer.document is not None:
        return document(request.method, answer.status, answer.document, *answer.fields)
    return Reply(status=answer.status, head=response_head(answer.status, answer.fields), body=InMemory())


def _sent(request: Head, answer: Answer, body: Body) -> Reply:
    """A response with bytes of a file."""
    if answer.document is not None or request.method == "HEAD":
        return _documented(request, answer)
    head = response_head(answer.status, answer.fields)
    return Reply(status=answer.status, head=head, body=body, start=answer.start, stop=answer.stop)


def _open_inside(directory: str, key: str) -> int | None:
    """Opens a file. Returns None if it does not exist or is outside the bucket."""
    try:
        fd = os.open(f"{directory}/{key}", os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO must not block
    except OSError:
        return None
    real = str(Path(f"/proc/self/fd/{fd}").readlink())  # the path without links and dots, in one system call
    if real.startswith(f"{directory}/") and stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


class _OpenFile:
    """An open file, read when a piece of it is due."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._fd, stop - start, start)

    def close(self) -> None:
        os.close(self._fd)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """The start and stop of a Range header, or None if it is missing or not in a form that S3 understands."""
    match = re.match(r"bytes=(\d*)-(\d*)$", asked)
    if not match or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def _is_inside(directory: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(directory) and path.is_file()


# ---- listing


def _listing(request: Head, directory: Path) -> Answer:
    query = request.query
    if "location" in query:
        return Answer(status=200, document='<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>')
    prefix, limit = query.get("prefix", ""), int(query.get("max-keys") or 1000)
    after = query.get("continuation-token") or query.get("start-after") or ""
    keys = sorted(_keys(directory, prefix, after)) if request.method == "GET" else []
    found, folded, last, more = _page(keys, prefix, query.get("delimiter", ""), limit)
    document = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(directory.name)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(found) + len(folded)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        + (f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else "")
        + "".join(_contents(directory, key) for key in found)
        + "".join(f"<CommonPrefixes><Prefix>{escape(fold)}</Prefix></CommonPrefixes>" for fold in folded)
        + "</ListBucketResult>"
    )
    return Answer(status=200, fields=("x-amz-bucket-region: us-east-1",), document=document)


def _keys(directory: Path, prefix: str, after: str) -> Iterator[str]:
    for parent, _, names in os.walk(directory / prefix.rpartition("/")[0]):
        for name in names:
            path = Path(parent, name)
            key = os.path.relpath(path, directory)
            if key.startswith(prefix) and key > after and _is_inside(directory, path):
                yield key


def _page(keys: list[str], prefix: str, delimiter: str, limit: int) -> tuple[list[str], list[str], str, bool]:
    """The keys and common prefixes of one page, the last key of the page, and whether there are more pages."""
    found: list[str] = []
    folded: dict[str, None] = {}
    last = ""
    for key in keys:
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        fold = key[: cut + len(delimiter)] if cut >= 0 else None
        if fold is None or fold not in folded:
            if len(found) + len(folded) >= limit:
                return found, list(folded), last, True
            if fold is None:
                found.append(key)
            else:
                folded[fold] = None
        last = key
    return found, list(folded), last, False


def _contents(directory: Path, key: str) -> str:
    status = (directory / key).stat()
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(stored_file(status).etag)}</ETag>"
        f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
