"""Files that appear whole or not at all, and their names. Pure file-system work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote


def file_of(directory: Path, name: str, suffix: str) -> Path:
    """Where something named by the store is kept; no name leads out of the directory."""
    return directory / f"{quote(name, safe='')}.{suffix}"


def full_name(path: Path) -> bytes:
    """The names of a mirror and of a file in it. A checksum that includes them tells a file that was moved there."""
    return os.fsencode(f"{path.parent.name}/{path.name}\n")


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A name of this thread's own beside `path`, to be moved there when it is whole; gone afterwards."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.draft")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file that appears at once or not at all."""
    with draft_of(path) as draft:
        draft.write_bytes(content)
        draft.chmod(0o600)
        draft.replace(path)
