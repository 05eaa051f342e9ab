"""The checkpoints of pretrain.py: a file with the model, the optimizer, the loader's state, and all figures so far."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch


def write(path: Path, identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Replaces the file at once, so that a kill leaves either the old checkpoint or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save({"identity": identity, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path, identity: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """The state in a file, or None if there is no file. Exits if it was saved by another run."""
    if not path.exists():
        return None
    try:
        state = dict(torch.load(path, map_location=device, weights_only=True))
        saved = dict(state.pop("identity"))
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:
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
