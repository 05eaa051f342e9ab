"""Minibatches and caches of the machines of a Ray cluster: `import zloader.ray as zr`. Needs the extra `ray`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import ray.exceptions  # noqa: F401 - a folder named ray is not Ray
except ImportError as error:
    raise ImportError('zloader.ray needs Ray: pip install "zloader[ray]"') from error

from zloader.common.removed import absent

if TYPE_CHECKING:
    from zloader.ray.datasource import read
    from zloader.ray.shared_cache import SharedCache, cache, keepers
    from zloader.ray.streams import Stream, stream
    from zloader.ray.tables import Collate

__all__ = ["Collate", "SharedCache", "Stream", "cache", "keepers", "read", "stream"]

# Imported on first use: ray.data takes seconds, and the keeper of a cache needs no torch.
_MODULES = {
    "Collate": "tables",
    "SharedCache": "shared_cache",
    "Stream": "streams",
    "cache": "shared_cache",
    "keepers": "shared_cache",
    "read": "datasource",
    "stream": "streams",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"zloader.ray.{_MODULES[name]}"), name)
    raise absent(__name__, name)
