"""Writes objects sequentially and atomically: readers never see a partial object.

A local file is written under a temporary name, synced to disk and renamed. An S3 object is a multipart upload: two
parts at a time are uploaded while the next are prepared, and the object appears when the upload is completed.

No write continues after a conversion has raised an error. A thread cannot be stopped, and a request cannot be recalled.
So both are waited for before an error is raised, even if more signals arrive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from zloader.access.location import Location
from zloader.access.scheme import access_errors, is_denial
from zloader.common.concurrent_calls import fulfil
from zloader.common.errors import AccessDeniedError, StoreError, StoreNotFoundError, ZloaderError
from zloader.common.options import MiB

PARTIAL = ".partial"  # suffix of local files being written
_PART_BYTES = 16 * MiB  # S3 allows 5 MiB to 5 GiB per part, and at most 10,000 parts
_DELETED_AT_ONCE = 1000  # S3's limit per request
_UPLOADS = 2  # parts uploaded at once per object; two objects (indices and data) are written at a time
_PUT_AT_ONCE = 8  # small objects
DEADLINE_S = 120.0  # for writes in progress; one part of an upload (16 MiB) takes this long at 140 kB/s


@contextlib.contextmanager
def translated(doing: str, url: str) -> Iterator[None]:
    """Translates errors of file systems and S3 clients into zloader's errors."""
    try:
        yield
    except ZloaderError:
        raise
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"cannot {doing} {url} ({error}): does the bucket exist?") from error
    except access_errors() as error:
        if is_denial(error):
            raise AccessDeniedError(
                f"not allowed to {doing} {url} ({error}): check the permissions of the directory, or the key and "
                "secret in storage_options or the AWS_* variables"
            ) from error
        advice = ": free some space or repair the server, and run it again (convert: with --resume)"
        raise StoreError(f"cannot {doing} {url}: {error}{advice if doing.startswith('write') else ''}") from error


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(path.name + PARTIAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def commit(self, durable: bool) -> None:
        self._file.flush()
        if durable:  # a power failure must not leave the final name without its bytes
            _sync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk cannot take the rest of the buffer
            self._file.close()
        self._partial.unlink(missing_ok=True)


def _sync(file: int) -> None:
    """Writes a file to disk. On macOS, fsync leaves it in the cache of the drive."""
    try:
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):  # not macOS, or a file system without it
        os.fsync(file)


class _Upload:
    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._upload: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="zloader-upload")
        self._uploading: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []

    def write(self, piece: bytes) -> None:
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= _PART_BYTES:
            self._send_part()

    def _send_part(self) -> None:
        if not self._upload:
            started = self._filesystem.call_s3("create_multipart_upload", **self._object)
            self._upload = {**self._object, "UploadId": started["UploadId"]}
        while len(self._uploading) >= _UPLOADS:
            self._parts.append(self._uploading.popleft().result())
        number = len(self._parts) + len(self._uploading) + 1
        body, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
        self._uploading.append(self._threads.submit(self._put_part, number, body))

    def _put_part(self, number: int, body: bytes) -> dict[str, Any]:
        answer = self._filesystem.call_s3("upload_part", **self._upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def commit(self, durable: bool) -> None:
        if not self._upload:  # small enough for one request
            self._filesystem.pipe_file(self._path, b"".join(self._pending))
        else:
            if self._pending:
                self._send_part()
            self._parts += [part.result() for part in self._uploading]
            whole = {"Parts": self._parts}
            self._filesystem.call_s3("complete_multipart_upload", **self._upload, MultipartUpload=whole)
        self._threads.shutdown()

    def abort(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._upload:
            self._filesystem.call_s3("abort_multipart_upload", **self._upload)


class ObjectWriter:
    """The object `key` below a location, being written. Raises StoreError and its subclasses."""

    def __init__(self, location: Location, key: str) -> None:
        self._at = (f"write {key} to", location.url)
        with translated(*self._at):
            path = f"{location.path}/{key}"
            is_file = location.scheme == "file"
            self._inner = _LocalFile(Path(path)) if is_file else _Upload(location.filesystem(), path)

    def write(self, piece: bytes) -> None:
        """Appends bytes."""
        with translated(*self._at):
            self._inner.write(piece)

    def commit(self, *, durable: bool = True) -> None:
        """Completes the object and makes it visible. A `durable` one on a disk outlasts a power failure."""
        with translated(*self._at):
            self._inner.commit(durable)

    def abort(self) -> None:
        """Discards the object."""
        with translated(*self._at):
            self._inner.abort()


def delete_objects(location: Location, keys: Sequence[str]) -> None:
    """Deletes exactly these objects below a location, and on a disk also the directories that become empty.

    Objects that S3 refuses to delete stay, without an error. `rm` of s3fs would treat * ? [ in keys as patterns.
    """
    with translated("delete from", location.url):
        if location.scheme == "file":
            _delete_files(Path(location.path), keys)
            return
        filesystem = location.filesystem()
        bucket, prefix, _ = filesystem.split_path(location.path)
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            objects = [{"Key": f"{prefix}/{key}".lstrip("/")} for key in keys[first : first + _DELETED_AT_ONCE]]
            filesystem.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})


def _delete_files(root: Path, keys: Sequence[str]) -> None:
    for key in keys:
        (root / key).unlink(missing_ok=True)
    above = {directory for key in keys for directory in PurePath(key).parents[:-1]}
    for directory in sorted(above, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            (root / directory).rmdir()


def put_all(puts: Iterable[Callable[[], None]], at: str) -> None:
    """Stores objects, several at a time. No write is left running when an error is raised, even that of a signal."""
    pool = ThreadPoolExecutor(_PUT_AT_ONCE, thread_name_prefix="zloader-put")
    try:
        for stored in [pool.submit(put) for put in puts]:
            stored.result()
    finally:
        run_to_completion(partial(pool.shutdown, cancel_futures=True), at)


Result = TypeVar("Result")


def run_to_completion(write: Callable[[], Result], at: str, *, deadline_s: float = DEADLINE_S) -> Result:
    """The result of `write`, which runs to its end even if signals interrupt the caller.

    It runs in its own thread, because s3fs leaves its request running when it is interrupted. Raises the errors of
    `write`, and StoreError if it is still running `deadline_s` seconds after the last interrupt.
    """
    ended: Future[Result] = Future()
    thread = threading.Thread(target=fulfil, args=(ended, write), daemon=True, name="zloader-write")
    starts, interrupt = iter([thread.start]), None
    while True:
        try:
            for start in starts:
                start()
            wait([ended], None if interrupt is None else deadline_s)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if not ended.done():
        raise StoreError(
            f"a write to {at} is still running after {deadline_s:.0f} s: end this process before writing there again"
        ) from interrupt
    if interrupt is not None:
        raise interrupt
    return ended.result()
