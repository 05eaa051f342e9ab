"""Minibatches made on the machines of a Ray cluster: `import zloader.ray as zr`. Needs the extra `ray`."""

from typing import Any

try:
    import ray.exceptions  # noqa: F401 - a folder named ray is not Ray
except ImportError as error:
    raise ImportError('zloader.ray needs Ray: pip install "zloader[ray]"') from error

from zloader.common.removed import absent
from zloader.ray.streams import Stream, stream

__all__ = ["Stream", "stream"]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
