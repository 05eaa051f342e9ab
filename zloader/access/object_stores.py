"""What the clients of object stores need: options of obstore, refusals, and file systems that cannot write.

obstore reads the schemes that TensorStore does not read. It was chosen over fsspec because it needs half to a fifth of
the CPU time per byte, and returns the ETag of each answer (benchmarks/LOG.md). It makes single requests:
`zloader.reading.object_source` retries until the deadline.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from zloader.common.errors import ForkError, OptionError

# A stalled connection is dropped after as long as by TensorStore. The deadline of a read bounds all its attempts.
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "24h"}
_ONE_REQUEST = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_FEW_REQUESTS = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_first_users: dict[str, int] = {}  # the process that first used each library


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A bucket or container: how to open it, the prefix of keys, and the field of obstore's metadata with the tag."""

    open: Callable[[], Any]
    prefix: str
    tag: str = "e_tag"

    def path(self, key: str) -> str:
        """The path of an object in the bucket."""
        return f"{self.prefix}/{key}".lstrip("/")


def client_options(*, endpoint: str, headers: Mapping[str, str] | None = None, retries: bool = False) -> dict[str, Any]:
    """The keywords `client_options` and `retry_config` of any store of obstore."""
    options = {**_CLIENT, "allow_http": endpoint.startswith("http://"), "default_headers": dict(headers or {})}
    return {"client_options": options, "retry_config": _FEW_REQUESTS if retries else _ONE_REQUEST}


@contextlib.contextmanager
def libraries(scheme: str, needed: str, extra: str) -> Iterator[None]:
    """Raises OptionError with the extra that installs them if libraries cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise OptionError(
            f'{scheme}:// needs {needed}, which cannot be imported ({error}): pip install "zloader[{extra}]"'
        ) from error


def claim_process(library: str) -> None:
    """Raises ForkError in a process that was forked from one that has used this library.

    TensorStore aborts there, and obstore waits for threads that do not exist.
    """
    user = _first_users.setdefault(library, os.getpid())
    if user != os.getpid():
        raise ForkError(
            f"process {user} had already read a store when process {os.getpid()} was forked from it, and {library} "
            "does not survive a fork: start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', "
            "or use num_workers=0, which is faster"
        )


class ReadOnly:
    """A mixin for fsspec file systems that rejects the first operation of a writer."""

    async def _pipe_file(self, path: str, value: bytes, **options: object) -> None:
        raise OptionError(f"cannot write to {path}: stores can only be written to a local path or s3://")
