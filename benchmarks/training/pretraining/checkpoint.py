"""The checkpoints of pretrain.py: a file with the model, the optimizer, the loader's state, and all figures so far."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch


def require_writable(path: Path) -> None:
    """Exits if no checkpoint can be saved here, to be called before a long run."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise SystemExit(f"cannot save a checkpoint at {path}: give the path of a file in an existing directory")


def write(path: Path, identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Replaces the file at once, so that a kill leaves either the old checkpoint or the new one.

    Exits if it cannot be written, for example because the disk is full. The old checkpoint stays then.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save({"identity": identity, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own error for a short write
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise SystemExit(f"cannot save the checkpoint {path}: {error}") from error


def read(path: Path, identity: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """The state in a file, or None if there is no file. Exits if it was saved by another run."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not compare checksums
            if (damaged := file.testzip()) is not None:
                raise ValueError(f"{damaged} is damaged")
        state = dict(torch.load(path, map_location=device, weights_only=True))
        saved = dict(state.pop("identity"))
    except OSError as error:
        raise SystemExit(f"cannot read the checkpoint {path}: {error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise SystemExit(f"{path} is no checkpoint of pretrain.py: remove it, or name another file") from error
    changed = [
        f"{name} was {saved.get(name)!r}, is {identity.get(name)!r}"
        for name in sorted(saved | identity)
        if saved.get(name) != identity.get(name)
    ]
    if changed:
        raise SystemExit(
            f"{path} is of another run: {'; '.join(changed)}. Give the same options, or another file as --checkpoint"
        )
    return state
