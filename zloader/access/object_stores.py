"""What obstore needs to read objects, for the schemes that TensorStore does not read.

obstore was chosen over fsspec because it needs half to a fifth of the CPU time per byte, and returns the ETag of each
answer (benchmarks/LOG.md). It makes single requests: `zloader.reading.object_source` retries until the deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from zloader.common.errors import OptionError

# A stalled connection is dropped after as long as by TensorStore. The deadline of a read bounds all its attempts.
_CLIENT = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "24h"}
_ONE_REQUEST = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_FEW_REQUESTS = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


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
