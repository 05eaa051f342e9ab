"""Serves the S3 simulator's requests from local files: ROOT/BUCKET/KEY, read-only."""

from __future__ import annotations

import email.utils
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from zloader.testing._s3wire import DisconnectError, Exchange, send_body


class Files:
    """GET, HEAD, Range, If-Match, If-None-Match and ListObjectsV2 over a directory. Bodies are sent with sendfile.

    Links that lead out of the bucket count as missing. Signatures are ignored.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)

    def close(self) -> None:
        """Does nothing."""

    def respond(self, exchange: Exchange) -> bool:
        """Answers one request. Returns whether the connection can be reused."""
        exchange.skip_request_body()
        bucket, _, key = exchange.request.path.lstrip("/").partition("/")
        directory = f"{self._root}/{bucket}"
        if exchange.request.method not in ("GET", "HEAD"):
            exchange.send_error(405, "MethodNotAllowed", "This server is read-only.")
        elif key and (fd := _open_inside(directory, key)) is not None:
            try:
                return _send_file(exchange, fd, os.fstat(fd))
            finally:
                os.close(fd)
        elif bucket in ("", ".", "..") or not Path(directory).is_dir():
            exchange.send_error(404, "NoSuchBucket", "The specified bucket does not exist")
        elif key:
            exchange.send_error(404, "NoSuchKey", "The specified key does not exist.")
        else:
            _send_listing(exchange, Path(directory))
        return True


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


def _send_file(exchange: Exchange, fd: int, status: os.stat_result) -> bool:
    fields, fault = exchange.request.fields, exchange.fault
    etag = fault.value if fault and fault.kind == "etag" else _etag(status)
    if fields.get("if-match", "*") not in (etag, "*"):
        exchange.send_error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
        return True
    if fields.get("if-none-match") in (etag, "*"):
        exchange.send_head(304, [f"ETag: {etag}"])
        return True
    size = status.st_size
    asked = None if exchange.kind == "ignore_range" else _range(fields.get("range", ""), size)
    start, stop = asked or (0, size)
    if asked and start >= stop:
        exchange.send_error(416, "InvalidRange", "The requested range is not satisfiable")
        return True
    if fault and fault.kind == "short":
        stop = max(start + 1, stop - fault.by)
    head = [
        "Server: s3sim",
        "Date: " + email.utils.formatdate(usegmt=True),
        "Last-Modified: " + email.utils.formatdate(status.st_mtime, usegmt=True),
        f"ETag: {etag}",
        "Accept-Ranges: bytes",
        "Content-Type: application/octet-stream",
        "Connection: close" if exchange.kind == "noclen" else f"Content-Length: {stop - start}",
    ]
    if asked:
        head.append(f"Content-Range: bytes {start}-{stop - 1}/{size}")
    body_bytes = stop - start if exchange.request.method == "GET" else 0
    exchange.send_head(206 if asked else 200, head, body_bytes=body_bytes)
    return exchange.request.method == "HEAD" or send_body(exchange, _FileBody(exchange, fd, start), body_bytes)


class _FileBody:
    """Bytes of an open file from `offset` on."""

    def __init__(self, exchange: Exchange, fd: int, offset: int) -> None:
        self._exchange, self._fd, self._offset = exchange, fd, offset

    def send(self, start: int, stop: int) -> None:
        start, stop = start + self._offset, stop + self._offset
        to = self._exchange.wire.sock.fileno()
        while start < stop:
            sent = os.sendfile(to, self._fd, start, self._exchange.allow(stop - start))
            if not sent:  # the file has been truncated
                raise DisconnectError
            start += sent
            self._exchange.entry["bytes"] += sent

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._fd, stop - start, self._offset + start)


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


def _etag(status: os.stat_result) -> str:
    identity = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
    return f'"{hashlib.md5(identity.encode(), usedforsecurity=False).hexdigest()}"'


# ---- listing


def _send_listing(exchange: Exchange, directory: Path) -> None:
    query = exchange.request.query
    if "location" in query:
        exchange.send_document(200, '<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>')
        return
    prefix, limit = query.get("prefix", ""), int(query.get("max-keys") or 1000)
    after = query.get("continuation-token") or query.get("start-after") or ""
    keys = sorted(_keys(directory, prefix, after)) if exchange.request.method == "GET" else []
    found, folded, last, more = _page(keys, prefix, query.get("delimiter", ""), limit)
    exchange.send_document(
        200,
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(directory.name)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(found) + len(folded)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        + (f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else "")
        + "".join(_contents(directory, key) for key in found)
        + "".join(f"<CommonPrefixes><Prefix>{escape(fold)}</Prefix></CommonPrefixes>" for fold in folded)
        + "</ListBucketResult>",
        "x-amz-bucket-region: us-east-1",
    )


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
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(_etag(status))}</ETag>"
        f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
