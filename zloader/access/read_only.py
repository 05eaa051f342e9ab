"""File systems that cannot write: a mixin for those of fsspec."""

from __future__ import annotations

from zloader.common.errors import OptionError


class ReadOnly:
    """A mixin for fsspec file systems that rejects the first operation of a writer."""

    async def _pipe_file(self, path: str, value: bytes, **options: object) -> None:
        raise OptionError(f"cannot write to {path}: stores can only be written to a local path or s3://")
