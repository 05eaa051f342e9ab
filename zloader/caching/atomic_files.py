"""Atomic writes of small files, their checksums, and the names of cached files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import google_crc32c


def cached_path(directory: Path, name: str, suffix: str) -> Path:
    """The path of the file that caches an array, column or object called `name`. It is always inside `directory`.

    Capital letters after the first slash are escaped as well (X/data, obs/%44onor), so that two columns or layers whose
    names differ only in case have two files, even where the file system ignores case, as on macOS.
    """
    first, slash, rest = quote(name, safe="/").partition("/")
    escaped = re.sub("%..|[A-Z]", lambda found: found[0] if len(found[0]) > 1 else f"%{ord(found[0]):X}", rest)
    return directory / f"{(first + slash + escaped).replace('/', '%2F')}.{suffix}"


def has_files(directory: Path, name: str, *suffixes: str) -> bool:
    """Whether all files that cache an array or rows called `name` are there."""
    return all(cached_path(directory, name, suffix).exists() for suffix in suffixes)


def qualified_name(path: Path) -> bytes:
    """The name of a mirror and of a file in it. Checksums include it, so that a moved or renamed file is detected."""
    return os.fsencode(f"{path.parent.name}/{path.name}\n")


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


def checksum_of(path: Path, content: bytes) -> bytes:
    """The last four bytes of a small file: the crc32c of its qualified name followed by its content."""
    return int(google_crc32c.extend(google_crc32c.value(qualified_name(path)), content)).to_bytes(4, "little")


def read_checked(path: Path) -> bytes | None:
    """The content of a small file that ends in its checksum, or None if it differs from it. Raises OSError."""
    stored = path.read_bytes()
    return stored[:-4] if len(stored) >= 4 and checksum_of(path, stored[:-4]) == stored[-4:] else None
