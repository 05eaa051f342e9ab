"""Argument checks. Each raises OptionError with the name of the option, its value and the expected values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from zloader.common.errors import OptionError

MAX_COUNT = 1 << 62  # above any count of bytes, rows or threads
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(size: int | str, option: str = "") -> int:
    """The number of bytes in a size such as 1000, "256MiB", "64 MB" or "2G". Raises OptionError for anything else.

    K, M, G and T are powers of 1000, with or without a B; Ki, Mi, Gi and Ti are powers of 1024. An error names the
    `option`, if given.
    """
    parts = re.fullmatch(r"\s*(\d+|\d+\.\d+(?=\s*[kmgt]))\s*([kmgt]i?)?b?\s*", str(size), re.IGNORECASE)
    if isinstance(size, bool) or parts is None:
        raise OptionError(
            f"{option}{': ' * bool(option)}{size!r:.100} is not a size: give a number of bytes, or a string such as "
            "'64 MB' or '2G' (powers of 1000) or '256MiB' (powers of 1024)"
        )
    return int(float(parts[1]) * _UNITS[(parts[2] or "").lower()])


def absolute_path(path: str, folder: str = "") -> Path:
    """The path below a folder, by default the working directory, with `~` expanded.

    Raises OptionError for one that has no meaning here.
    """
    try:
        return Path(folder, Path(path).expanduser()).absolute()
    except (RuntimeError, OSError) as error:  # no such user, or the working directory was deleted
        raise OptionError(f"cannot tell where {path!r} is: {error}. Give an absolute path") from error


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy, and not a truth value."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def require_at_least(least: float, **values: float) -> None:
    """Raises OptionError unless every value is a number of at least `least`."""
    for name, value in values.items():
        if not is_number(value) or not value >= least:
            raise OptionError(f"{name} must be a number of at least {least}, not {value!r}")


def require_count(**values: int) -> None:
    """Raises OptionError unless every value is a whole number of at least 1."""
    require_whole(1, **values)


def require_whole(least: int, /, **values: int) -> None:
    """Raises OptionError unless every value is a whole number of at least `least` and below 2**62."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if value >= MAX_COUNT:
            raise OptionError(f"{name} must be a whole number below 2**62, not {value!r}")


def require_natural(**values: int) -> None:
    """Raises OptionError unless every value is a whole number of at least 0, however large."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise OptionError(f"{name} must be a whole number of at least 0, not {value!r}")


def require_flag(**values: bool) -> None:
    """Raises OptionError unless every value is True or False."""
    for name, value in values.items():
        if not isinstance(value, (bool, np.bool_)):
            raise OptionError(f"{name} must be True or False, not {value!r}")


def require_one_of(known: Sequence[str], **values: str) -> None:
    """Raises OptionError unless every value is one of the `known` words."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in known:
            raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def name_of_dtype(known: Sequence[str], **dtypes: Any) -> str:
    """The name of a dtype, which an option gives by name or as an object of torch, NumPy or ml_dtypes.

    Raises OptionError unless it is one of the `known` names.
    """
    ((option, dtype),) = dtypes.items()
    name = dtype
    if isinstance(dtype, type | np.dtype):
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name
    elif not isinstance(dtype, str):
        name = str(dtype)
    if isinstance(name, str) and (name := name.removeprefix("torch.")) in known:
        return name
    raise OptionError(f"{option} must be one of {', '.join(map(repr, known))}, not {dtype!r:.100}")


def names_of(**values: Iterable[str]) -> list[str]:
    """The names listed by an option, as a list. Raises OptionError unless it is a list of strings."""
    ((option, names),) = values.items()
    if isinstance(names, str) or names is None:
        raise OptionError(f"{option} must be a list of names: write {option}={[names] if names else []!r}")
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, bytes) else [names]
    for name in found:
        if not isinstance(name, str):
            raise OptionError(f"{option} must be a list of names (strings), but it holds {name!r:.100}")
    return found


def one_or_more(**values: str | Iterable[str]) -> list[str]:
    """The names that an option gives, a single one or a list. Raises OptionError for an empty list and for repeats."""
    ((option, names),) = values.items()
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        return [names]  # anything else is refused as an unknown name
    found = names_of(**{option: names})
    if not found:
        raise OptionError(f"{option} is an empty list: give at least one name")
    for name in found:
        if found.count(name) > 1:
            raise OptionError(f"{option} lists {name!r} more than once: list each name once")
    return found
