"""How the bytes of chunks are read: TensorStore, one ranged GET a span.

This is the only module that names tensorstore.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from zloader.errors import (
    AccessDeniedError,
    DeadlineError,
    ForkError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreError,
    TruncatedObjectError,
)
from zloader.kvstore import Credentials, kvstore_spec
from zloader.location import Location, StoredObject
from zloader.terms import FetchOptions, Span


class ObjectSource:
    """Reads spans of a location's objects through TensorStore; a Source.

    Nothing is opened before the first `read`, which must happen in the process that iterates.
    """

    def __init__(self, location: Location, objects: Mapping[str, StoredObject], options: FetchOptions) -> None:
        """`objects` are those that were listed when the store was opened: others are not taken for them."""
        self._location, self._objects, self._options = location, objects, options
        self._generations: dict[str, bytes] = {}  # of each object read from, as TensorStore has it
        self._credentials = Credentials()
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


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    _claim_process()
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error
