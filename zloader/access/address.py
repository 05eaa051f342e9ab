"""A Location as the modules of single schemes see it, which location.py imports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Address(Protocol):
    """The URL, options and revision of a store. `Location` is the only one."""

    @property
    def url(self) -> str:
        """As it was given."""

    @property
    def path(self) -> str:
        """What file systems call it."""

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """The options for the scheme's library."""

    @property
    def revision(self) -> str:
        """The commit of a repository, or empty."""

    def filesystem(self, *, asynchronous: bool = False) -> Any:
        """The fsspec file system, without a listings cache."""

    def translated(self, doing: str) -> AbstractContextManager[None]:
        """Translates errors of libraries into zloader's."""

    def kept(self, filesystem: Any) -> Any:
        """Returns a file system after adding a reference that keeps it alive until the process ends."""
