"""Minibatches made on the machines of a Ray cluster: `import zloader.ray as zr`. Needs the extra `ray`."""

try:
    import ray.exceptions  # noqa: F401 - a folder named ray is not Ray
except ImportError as error:
    raise ImportError('zloader.ray needs Ray: pip install "zloader[ray]"') from error

from zloader.ray.streams import Stream, stream

__all__ = ["Stream", "stream"]
