"""Objects written from front to back, which nobody sees before they are whole.

A local file is written under another name, made durable and then renamed. On S3 an object goes up in parts, a few at
a time, while the next are still being made; it exists once all are there.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

from zloader.access.location import Location
from zloader.common.errors import AccessDeniedError, StoreError, StoreNotFoundError, ZloaderError
from zloader.common.options import MiB

PARTIAL = ".partial"  # ends the name of a local file that is being written, by zarr as well
_PART_BYTES = 16 * MiB  # S3 takes 5 MiB to 5 GiB, and at most 10 000 parts
_DELETED_AT_ONCE = 1000  # as many as S3 takes in one request
_UPLOADS = 2  # parts of one object under way at once; two objects (indices and data) are written at a time


@contextlib.contextmanager
def translated(doing: str, url: str) -> Iterator[None]:
    """Turns the errors of file systems and S3 clients into ours."""
    try:
        yield
    except ZloaderError:
        raise
    except (PermissionError, NoCredentialsError, PartialCredentialsError) as error:
        raise AccessDeniedError(
            f"not allowed to {doing} {url} ({error}): check the rights of the directory, or the key and secret in "
            "storage_options or the AWS_* variables"
        ) from error
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"cannot {doing} {url} ({error}): does the bucket exist?") from error
    except (OSError, BotoCoreError) as error:
        advice = ": free some room there, or mend the server, and run it again (convert: with --resume)"
        raise StoreError(f"cannot {doing} {url}: {error}{advice if doing.startswith('write') else ''}") from error


class ObjectWriter(ABC):
    """One object being written; `size` is what was written so far, in bytes. Raises StoreError and its children."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, piece: bytes) -> None:
        """Adds bytes at the end."""
        self._write(piece)
        self.size += len(piece)

    @abstractmethod
    def _write(self, piece: bytes) -> None: ...

    @abstractmethod
    def commit(self) -> None:
        """Makes the object be there, whole."""

    @abstractmethod
    def abort(self) -> None:
        """Leaves nothing."""


class _File(ObjectWriter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._partial = path, path.with_name(path.name + PARTIAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")

    def _write(self, piece: bytes) -> None:
        self._file.write(piece)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())  # else a power failure could leave a name without its bytes
        self._file.close()
        self._partial.replace(self._path)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk does not take what is still in memory
            self._file.close()
        self._partial.unlink(missing_ok=True)


class _Upload(ObjectWriter):
    def __init__(self, filesystem: Any, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path
        bucket, key, _ = filesystem.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._upload: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="zloader-upload")
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []

    def _write(self, piece: bytes) -> None:
        self._gathered.append(piece)
        self._gathered_bytes += len(piece)
        if self._gathered_bytes >= _PART_BYTES:
            self._send_part()

    def _send_part(self) -> None:
        if not self._upload:
            started = self._filesystem.call_s3("create_multipart_upload", **self._object)
            self._upload = {**self._object, "UploadId": started["UploadId"]}
        while len(self._under_way) >= _UPLOADS:
            self._parts.append(self._under_way.popleft().result())
        number = len(self._parts) + len(self._under_way) + 1
        body, self._gathered, self._gathered_bytes = b"".join(self._gathered), [], 0
        self._under_way.append(self._threads.submit(self._put_part, number, body))

    def _put_part(self, number: int, body: bytes) -> dict[str, Any]:
        answer = self._filesystem.call_s3("upload_part", **self._upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def commit(self) -> None:
        if not self._upload:  # small: one request
            self._filesystem.pipe_file(self._path, b"".join(self._gathered))
        else:
            if self._gathered:
                self._send_part()
            self._parts += [part.result() for part in self._under_way]
            whole = {"Parts": self._parts}
            self._filesystem.call_s3("complete_multipart_upload", **self._upload, MultipartUpload=whole)
        self._threads.shutdown()

    def abort(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._upload:
            self._filesystem.call_s3("abort_multipart_upload", **self._upload)


class _Translated(ObjectWriter):
    """Another writer, whose errors become ours."""

    def __init__(self, location: Location, key: str) -> None:
        super().__init__()
        self._at = (f"write {key} to", location.url)
        with translated(*self._at):
            path = f"{location.path}/{key}"
            is_file = location.scheme == "file"
            self._inner: ObjectWriter = _File(Path(path)) if is_file else _Upload(location.filesystem(), path)

    def _write(self, piece: bytes) -> None:
        with translated(*self._at):
            self._inner.write(piece)

    def commit(self) -> None:
        with translated(*self._at):
            self._inner.commit()

    def abort(self) -> None:
        with translated(*self._at):
            self._inner.abort()


def create_object(location: Location, key: str) -> ObjectWriter:
    """Begins to write the object `key` below a location."""
    return _Translated(location, key)


def delete_objects(location: Location, keys: Sequence[str]) -> None:
    """Deletes exactly these objects below a location, and on a disk the directories that are then empty.

    What S3 does not let be deleted stays without an error. `rm` of s3fs is not exact: it takes * ? [ for patterns.
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
        with contextlib.suppress(OSError):  # it holds something else
            (root / directory).rmdir()
