"""Where obstore finds objects, for the schemes that TensorStore does not read: the port, and one store for a bucket.

obstore was chosen over fsspec because it needs half to a fifth of the CPU time per byte, and returns the ETag of each
answer (benchmarks/LOG.md). It makes single requests: `zloader.access.retry` retries until the deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from zloader.common.errors import OptionError

# A stalled connection is dropped after as long as by TensorStore. The Retrier's deadline bounds the whole read.
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "24h"}
_ONE_REQUEST = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_FEW_REQUESTS = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class Place(NamedTuple):
    """Where an object is: obstore's store, the path in it, and the object's tag if it is already known."""

    store: Any
    path: str
    tag: str | None = None


class ObjectStores(Protocol):
    """Finds the obstore store of each object. It opens nothing before the first `place`."""

    tag_name: str  # of the field of obstore's metadata that is the tag of a listed object

    async def place(self, key: str) -> Place:
        """The place of an object. Raises the errors of the library that knows it."""

    def is_outdated(self, key: str) -> bool:
        """Whether a place may have expired, so that a denied read is to be tried again. It is then looked up again."""


class OneStore:
    """All objects are in one store, below a prefix."""

    def __init__(self, open_store: Callable[[], Any], prefix: str, tag_name: str = "e_tag") -> None:
        self._open, self._prefix, self.tag_name = open_store, prefix, tag_name

    async def place(self, key: str) -> Place:
        return Place(self._store, f"{self._prefix}/{key}".lstrip("/"))

    def is_outdated(self, key: str) -> bool:
        return False

    @cached_property
    def _store(self) -> Any:
        return self._open()


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
