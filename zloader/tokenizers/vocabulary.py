"""Vocabularies: dictionaries of token ids, medians or names, checked.

A dictionary is a mapping or a JSON file. Pickles are refused, because reading one runs any code that is in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from zloader.common.errors import OptionError
from zloader.common.messages import suggestion

Given: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
A_TOKEN = "a whole number from 0 to 2**31 - 1"


def is_token(stored: Any) -> bool:
    """Whether it can be a token id."""
    return isinstance(stored, int | np.integer) and not isinstance(stored, bool) and 0 <= int(stored) < 2**31


def dictionary(option: str, given: Given, fits: Callable[[Any], bool], what: str) -> dict[str, Any]:
    """A dictionary from names to values that fit. Raises OptionError, which says `what` a value must be."""
    if isinstance(given, str | os.PathLike):
        given = _read_json(option, Path(given))
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            f"{option} must be a dict with entries, or the path of a JSON file with one, not {given!r:.100}: of a "
            "GeneVocab take get_stoi()"
        )
    for name, stored in given.items():
        if not isinstance(name, str) or not fits(stored):
            raise OptionError(f"{option} must have {what} for each name, not {stored!r:.100} for {name!r}")
    return {name: stored.item() if isinstance(stored, np.generic) else stored for name, stored in given.items()}


def _read_json(option: str, path: Path) -> Any:
    try:
        content = path.read_bytes()
        if content[:1] == b"\x80":  # the first byte of every pickle since protocol 2
            raise OptionError(
                f"{option}: {path} is a pickle. zloader does not read pickles, because reading one runs any code that "
                "is in it. Convert it to JSON once; docs/tokens.md has a script that refuses pickles with code in them"
            )
        return json.loads(content)
    except OSError as error:
        raise OptionError(f"{option}: {path} cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{option}: {path} is not a JSON file: {error}") from error


def special_id(option: str, given: str | int | None, tokens: Mapping[str, int]) -> int:
    """The id of a special token, given by name or as a number, or -1. Raises OptionError for one that is unknown."""
    found = tokens.get(given) if isinstance(given, str) else given
    if given is not None and not is_token(found):
        raise OptionError(
            f"the vocabulary has no {given!r}, which is the default or chosen {option} token: give its id, as in "
            f"{option}=0, or another name{suggestion(str(given), [name for name in tokens if name[:1] in '<[_'])}"
        )
    return -1 if found is None else int(found)
