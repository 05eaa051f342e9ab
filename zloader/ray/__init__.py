"""Minibatches made by the machines of a Ray cluster: `import zloader.ray as zr`. Needs the extra `ray`."""

from typing import TYPE_CHECKING, Any

try:
    import ray.exceptions  # noqa: F401 - a folder named ray is not Ray
except ImportError as error:
    raise ImportError('zloader.ray needs Ray: pip install "zloader[ray]"') from error

from zloader.ray.stream import Stream, stream

if TYPE_CHECKING:
    from zloader.ray.datasource import read
    from zloader.ray.tables import Collate

__all__ = ["Collate", "Stream", "read", "stream"]


def __getattr__(name: str) -> Any:
    """Imports the parts that use ray.data on first use, because it takes seconds, and streams do not need it."""
    if name == "read":
        from zloader.ray.datasource import read

        return read
    if name == "Collate":
        from zloader.ray.tables import Collate

        return Collate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
