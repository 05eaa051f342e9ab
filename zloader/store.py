"""Where a store lives and how its bytes are read: URLs, listing, TensorStore.

Metadata and listing go through fsspec and zarr; the bytes of chunks go through TensorStore, one
ranged GET a span. Credentials and endpoints are taken from the same `storage_options` and `AWS_*` variables for both.
This is the only module that names tensorstore.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import tensorstore as ts
import zarr.abc.store
import zarr.storage
from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

from zloader.errors import (
    AccessDeniedError,
    DeadlineError,
    ForkError,
    MissingObjectError,
    OptionError,
    ReadError,
    StoreChangedError,
    StoreError,
    StoreNotFoundError,
    TruncatedObjectError,
)
from zloader.terms import FetchOptions, Span

SCHEMES = ("file", "s3")


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Size in bytes and tag (ETag, or modification time for local files) of one object, as listed."""

    size: int
    tag: str


@dataclass(frozen=True, kw_only=True)
class Location:
    """A URL together with the options that open it.

    `url` is a local path, `file://` or `s3://bucket/prefix`; `storage_options` are s3fs's and are never shown.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise OptionError(f"cannot open {self.url!r}: give a local path or a URL that starts with {known}")
        if self.scheme == "s3" and not urlsplit(self.url).netloc:
            raise OptionError(f"cannot open {self.url!r}: an S3 URL reads s3://BUCKET/KEY")

    @property
    def scheme(self) -> str:
        """`"file"` or `"s3"`."""
        return urlsplit(self.url).scheme if "://" in self.url else "file"

    @property
    def path(self) -> str:
        """The absolute local path, or `bucket/prefix`; never ends in a slash."""
        if self.scheme == "file":
            bare = unquote(urlsplit(self.url).path) if "://" in self.url else self.url
            return str(Path(bare).expanduser().absolute())
        parts = urlsplit(self.url)
        return f"{parts.netloc}/{parts.path.strip('/')}".rstrip("/")

    def filesystem(self) -> Any:
        """The fsspec file system that holds `path`, with nothing cached of its listings."""
        return fsspec.filesystem(self.scheme, **self._fsspec_options())

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """A zarr store rooted at this URL, for metadata and small arrays."""
        if self.scheme == "file":
            return zarr.storage.LocalStore(self.path, read_only=read_only)
        return zarr.storage.FsspecStore.from_url(
            f"s3://{self.path}", storage_options=self._fsspec_options(), read_only=read_only
        )

    def _fsspec_options(self) -> dict[str, Any]:
        return {} if self.scheme == "file" else {"use_listings_cache": False, **self.s3_options()}

    def s3_options(self) -> dict[str, Any]:
        """`storage_options` with what they leave to the AWS_* variables filled in, for s3fs and TensorStore alike.

        fsspec gives out one client for equal options for ever, so the variables must show in the options: else
        credentials mended in a running process would not be seen.
        """
        options, client = dict(self.storage_options), dict(self.storage_options.get("client_kwargs") or {})
        if not (client.keys() | options.keys()) & {"key", "anon", "profile", "aws_access_key_id"}:
            names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
            if "AWS_PROFILE" in os.environ:
                names = {"profile": "AWS_PROFILE"}
            options |= {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and not (options.get("endpoint_url") or client.get("endpoint_url")):
            options["endpoint_url"] = endpoint
        return options

    def listing(self) -> dict[str, StoredObject]:
        """Every object below the URL by key relative to it, from one listing.

        Raises StoreNotFoundError where there is none, AccessDeniedError where the credentials do not allow to look.
        """
        filesystem = self.filesystem()
        try:
            found = filesystem.find(self.path, detail=True)
        except FileNotFoundError:
            found = {}
        except (PermissionError, NoCredentialsError, PartialCredentialsError) as error:
            raise AccessDeniedError(
                f"not allowed to list {self.url}: {error}. "
                "Check the key and secret in storage_options or the AWS_* variables"
            ) from error
        except (OSError, BotoCoreError) as error:
            raise StoreError(
                f"cannot list {self.url}: {error}. Is the endpoint right, and does its server run?"
            ) from error
        if not found:
            raise StoreNotFoundError(f"nothing is stored at {self.url}: check the bucket, the key and the endpoint")
        return {
            key[len(self.path) + 1 :]: StoredObject(size=int(entry["size"]), tag=_tag(entry))
            for key, entry in found.items()
        }

    def find_object(self, key: str) -> StoredObject | None:
        """One object as it is now; None where it is not. Raises StoreError."""
        try:
            entry = self.filesystem().info(f"{self.path}/{key}")
        except FileNotFoundError:
            return None
        except (OSError, BotoCoreError) as error:
            raise StoreError(f"cannot look at {key} of {self.url}: {error}") from error
        return StoredObject(size=int(entry["size"]), tag=_tag(entry))


def _tag(entry: Mapping[str, Any]) -> str:
    return str(entry["ETag"]) if "ETag" in entry else repr(entry.get("mtime"))


class ObjectSource:
    """Reads spans of a location's objects through TensorStore; a Source.

    Nothing is opened before the first `read`, which must happen in the process that iterates.
    """

    def __init__(self, location: Location, objects: Mapping[str, StoredObject], options: FetchOptions) -> None:
        """`objects` are those that were listed when the store was opened: others are not taken for them."""
        self._location, self._objects, self._options = location, objects, options
        self._generations: dict[str, bytes] = {}  # of each object read from, as TensorStore has it
        self._credentials = _Credentials()
        self._opening: asyncio.Task[Any] | None = None

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises a ReadError, AccessDeniedError or StoreChangedError, each with URL, key and range.
        """
        if self._opening is None:  # several fetches may come at once: one of them opens
            self._opening = asyncio.ensure_future(_open_kvstore(self._location, self._credentials))
        kvstore = await self._opening
        reads = [_start(kvstore, span) for span in spans]  # TensorStore starts them all now
        try:
            return [await self._finished(kvstore, span, read) for span, read in zip(spans, reads, strict=True)]
        finally:
            for read in reads:
                read.cancel()

    async def _finished(self, kvstore: Any, span: Span, read: Any) -> bytes:
        """What one read gave, asked for again where it gave too little."""
        for attempt in range(self._options.retries + 1):
            try:
                async with asyncio.timeout(self._options.deadline_s):
                    result = await _result(read if attempt == 0 else _start(kvstore, span))
            except TimeoutError as error:
                raise DeadlineError(
                    f"{self._at(span)} did not finish within deadline_s={self._options.deadline_s}: "
                    "is the server reachable? A slow link needs a longer deadline_s"
                ) from error
            except (ValueError, OSError) as error:  # how TensorStore shows native failures: status word first
                if not str(error).startswith("OUT_OF_RANGE"):
                    raise self._translated(error, span) from error
                gave = str(error).partition(": ")[2]
                continue
            if result.state == "missing":
                raise MissingObjectError(
                    f"{self._at(span)}: there is no such object. Was the store changed or deleted?"
                )
            await self._check_unchanged(span, result.stamp.generation)
            stored: bytes = result.value
            if len(stored) == span.size:
                return stored
            gave = f"it gave {len(stored)} of {span.size} bytes"
        await self._check_there(span)
        raise TruncatedObjectError(
            f"{self._at(span)} failed {self._options.retries + 1} times ({gave}): the object was cut short. "
            "Restore or convert the store again"
        )

    async def _check_unchanged(self, span: Span, generation: bytes) -> None:
        """Raises StoreChangedError when an object is not the one that was listed, or was read from before."""
        known = self._generations.get(span.key)
        if known == generation:
            return
        if known is not None:
            raise self._changed(span)
        # An S3 generation ends in the ETag. Where that is not the one listed, and for files, it takes another look.
        if not (self._location.scheme == "s3" and generation.endswith(self._objects[span.key].tag.encode())):
            await self._check_there(span)
        self._generations[span.key] = generation

    async def _check_there(self, span: Span) -> None:
        """Raises StoreChangedError when another object is there now than the one that was listed."""
        if await asyncio.to_thread(self._location.find_object, span.key) != self._objects[span.key]:
            raise self._changed(span)

    def _changed(self, span: Span) -> StoreChangedError:
        return StoreChangedError(
            f"{self._at(span)}: the object is not the one that was there when the store was opened. Open it again"
        )

    def _at(self, span: Span) -> str:
        return f"{self._location.url}: reading {span.key} bytes {span.start}-{span.stop - 1}"

    def _translated(self, error: Exception, span: Span) -> StoreError:
        status, _, rest = str(error).partition(":")
        reason = rest.strip().splitlines()[0][:300] if rest.strip() else str(error)[:300]
        if status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
            return AccessDeniedError(
                f"{self._at(span)} is not allowed ({reason}). "
                "Check the key and secret in storage_options or the AWS_* variables"
            )
        return ReadError(f"{self._at(span)} failed after TensorStore's retries: {status}: {reason}")


def _start(kvstore: Any, span: Span) -> Any:
    return kvstore.read(span.key, byte_range=slice(span.start, span.stop))


async def _result(read: Any) -> Any:
    """Waits for a TensorStore future; cancels the read when the wait is cancelled.

    Not `await read`: that makes TensorStore complain on stderr when a cancelled read ends after the loop is closed.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def on_done(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the epoch has ended, and nobody waits
            loop.call_soon_threadsafe(settle)

    read.add_done_callback(on_done)
    try:
        await done
    finally:
        read.cancel()
    return read.result()


# The process that first used TensorStore. It aborts a process that was forked after that, so we refuse before it does.
_first_user: int | None = None


def _claim_process() -> None:
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise ForkError(
            f"process {_first_user} had read a store before process {os.getpid()} was forked from it, and TensorStore "
            "cannot be used after that: start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', "
            "or use num_workers=0, which is the fast way"
        )


async def _open_kvstore(location: Location, credentials: _Credentials) -> Any:
    _claim_process()
    try:
        return await ts.KvStore.open(_kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error


def _kvstore_spec(location: Location, credentials: _Credentials) -> dict[str, Any]:
    # curl gives up a connection that stalls this long; read once a process. Our own deadline is the outer bound.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "20")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    if location.scheme == "file":
        return {"driver": "file", "path": location.path + "/"}
    bucket, _, prefix = location.path.partition("/")
    options = location.s3_options()
    client = dict(options.get("client_kwargs") or {})
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": bucket,
        "path": f"{prefix}/" if prefix else "",
        "aws_credentials": credentials.spec(options),
        # Bytes in flight are bounded by the fetch; the count only has to be out of its way.
        "s3_request_concurrency": {"limit": 256},
        # 0.1 s doubling to 4 s: a permanent failure shows after about 15 s, not after TensorStore's default of 15 min.
        "s3_request_retries": {"max_retries": 8, "initial_delay": "100ms", "max_delay": "4s"},
    }
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    return spec


class _Credentials:
    """What TensorStore is told of s3fs's credentials options.

    It takes a key and a secret only from a file or the environment, so explicit ones are handed over in an anonymous
    file in memory, which lives as long as this object.
    """

    _file: int | None = None

    def spec(self, options: Mapping[str, Any]) -> dict[str, str]:
        """TensorStore's `aws_credentials`."""
        client = dict(options.get("client_kwargs") or {})
        key = options.get("key") or client.get("aws_access_key_id")
        if options.get("anon"):
            return {"type": "anonymous"}
        if key:
            return self._in_memory(
                aws_access_key_id=str(key),
                aws_secret_access_key=str(options.get("secret") or client.get("aws_secret_access_key") or ""),
                aws_session_token=str(options.get("token") or client.get("aws_session_token") or ""),
            )
        profile = options.get("profile")
        known = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
        if profile or known.exists():
            config = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
            files = {"credentials_file": known, "config_file": config}
            there = {name: str(path if path.exists() else os.devnull) for name, path in files.items()}
            return {"type": "profile", "profile": str(profile or "default"), **there}
        return {"type": "default"}

    def _in_memory(self, **secrets: str) -> dict[str, str]:
        lines = [f"{name} = {value}" for name, value in secrets.items() if value]
        self._file = os.memfd_create("zloader-credentials", os.MFD_CLOEXEC)
        os.write(self._file, "\n".join(["[zloader]", *lines, ""]).encode())
        path = f"/proc/self/fd/{self._file}"
        return {"type": "profile", "profile": "zloader", "credentials_file": path, "config_file": os.devnull}

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
