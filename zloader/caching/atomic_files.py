"""The names of the files of a mirror; how they are opened, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote


def cached_path(directory: Path, name: str, suffix: str) -> Path:
    """The path of the file that keeps an array, rows or an object called `name`. It is always inside `directory`.

    Capital letters after the first slash are escaped as well (X/data, obs/%44onor), so that two columns or layers whose
    names differ only in case have two files, even where the file system ignores case, as on macOS.
    """
    first, slash, rest = quote(name, safe="/").partition("/")
    escaped = re.sub("%..|[A-Z]", lambda found: found[0] if len(found[0]) > 1 else f"%{ord(found[0]):X}", rest)
    return directory / f"{(first + slash + escaped).replace('/', '%2F')}.{suffix}"


def qualified_name(path: Path) -> bytes:
    """The name of a mirror and of a file in it. Checksums include it, so that a moved or renamed file is detected."""
    return os.fsencode(f"{path.parent.name}/{path.name}\n")


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a file for a while, creating it with mode 0600 if the flags say so. Raises OSError for a link."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def draft_path(path: Path) -> Iterator[Path]:
    """A unique path beside `path`, to write and then rename. Deleted on exit unless renamed."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.draft")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file, mode 0600, by renaming: it appears complete or not at all."""
    with draft_path(path) as draft:
        draft.write_bytes(content)
        draft.chmod(0o600)
        draft.replace(path)
