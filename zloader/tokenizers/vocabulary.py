"""Vocabularies: dictionaries of token ids or medians, checked, and matched with the genes of a dataset.

A dictionary is a mapping or a JSON file. Pickles are refused, because reading one runs any code that is in it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number
from zloader.common.errors import OptionError
from zloader.common.messages import listed, suggestion

Given: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
Value = TypeVar("Value")
_MOST_ID = np.iinfo(np.int32).max
_SHOWN = 3
_PICKLE = "zloader does not read pickles, because reading one runs any code that is in it. Convert it to JSON once; "
_CONVERT = "docs/tokens.md has a script that refuses pickles with code in them"


def dictionary(option: str, given: Given, value: Callable[[str, str, Any], Value]) -> dict[str, Value]:
    """A dictionary from names to checked values. `value(option, name, stored)` checks one. Raises OptionError."""
    if isinstance(given, str | os.PathLike):
        given = _read_json(option, Path(given))
    if not isinstance(given, Mapping):
        raise OptionError(
            f"{option} must be a dict, or the path of a JSON file with one, not {type(given).__name__}: of a GeneVocab "
            "take get_stoi()"
        )
    for name in given:
        if not isinstance(name, str):
            raise OptionError(f"{option} must have names as keys (strings), but it has {name!r:.100}")
    if not given:
        raise OptionError(f"{option} is empty")
    return {str(name): value(option, name, stored) for name, stored in given.items()}


def _read_json(option: str, path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"{option}: {path} cannot be read: {error.strerror or error}") from error
    if path.suffix in (".pkl", ".pickle") or content[:1] == b"\x80":  # the first byte of every pickle since protocol 2
        raise OptionError(f"{option}: {path} is a pickle. {_PICKLE}{_CONVERT}")
    try:
        return json.loads(content)
    except ValueError as error:  # wrong encodings, too
        raise OptionError(f"{option}: {path} is not a JSON file: {error}") from error


def token_id(option: str, name: str, stored: Any) -> int:
    """A token id. Raises OptionError."""
    if isinstance(stored, bool | np.bool_) or not isinstance(stored, int | np.integer) or not 0 <= stored <= _MOST_ID:
        raise OptionError(f"{option}[{name!r}] must be a whole number from 0 to 2**31 - 1, not {stored!r:.100}")
    return int(stored)


def median(option: str, name: str, stored: Any) -> float:
    """A median above zero. Raises OptionError."""
    if not is_number(stored) or not 0 < stored < math.inf:
        raise OptionError(f"{option}[{name!r}] must be a number above 0, not {stored!r:.100}")
    return float(stored)


def name_of(option: str, name: str, stored: Any) -> str:
    """A name that another stands for. Raises OptionError."""
    if not isinstance(stored, str):
        raise OptionError(f"{option}[{name!r}] must be a name (a string), not {stored!r:.100}")
    return stored


def special_id(option: str, given: str | int | None, tokens: Mapping[str, int], of: str) -> int | None:
    """The id of a special token, given by name or as a number. Raises OptionError if `tokens` does not have it."""
    if given is None:
        return None
    if not isinstance(given, str):
        return token_id(option, "id", given)
    if given not in tokens:
        raise OptionError(
            f"{of} has no {given!r}, which is the default or chosen {option} token: give its id, as in {option}=0, or "
            f"another name{suggestion(given, [name for name in tokens if name[:1] in '<[_'])}"
        )
    return tokens[given]


@dataclass(frozen=True, kw_only=True)
class GeneNames:
    """The genes of a matrix: `names` of its columns, None where a gene has none.

    Messages name the matrix as `where`, and the names as `named_by`. `other_names` returns what else could name genes:
    the values of var columns, by column.
    """

    names: Sequence[str | None]
    where: str
    named_by: str
    other_names: Callable[[], Mapping[str, Iterable[Any]]] = dict


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneTokens:
    """The tokens of the columns of a matrix.

    A column has the slot `slot_of[column]`, or -1 if it has no token. Slots are columns: a column's own, or the first
    one with the same token if such genes are summed. `token_of` and `median_of` are looked up by slot.
    """

    slot_of: NDArray[np.int32]
    token_of: NDArray[np.int32]
    median_of: NDArray[np.float64]

    @property
    def n_known(self) -> int:
        """The columns with a token."""
        return int(np.count_nonzero(self.slot_of >= 0))


def gene_tokens(
    genes: GeneNames,
    tokens: Mapping[str, int],
    special: Mapping[str, int | None],
    *,
    option: str,
    spelled: Callable[[str], str] = str,
    summed: bool = False,
) -> GeneTokens:
    """Looks up the tokens of genes. `spelled` gives the name in the vocabulary of a name in the dataset.

    `summed` says that genes of the same token are summed. Raises OptionError if no gene has a token, or if one has that
    of a special token.
    """
    token_of = np.full(len(genes.names), -1, np.int32)
    for column, name in enumerate(genes.names):
        if name is not None:
            token_of[column] = tokens.get(spelled(name), -1)
    if not (token_of >= 0).any():
        raise OptionError(_unknown(genes, tokens, option, spelled))
    for name, token in special.items():
        if token is not None and (token_of == token).any():
            gene = genes.names[int(np.argmax(token_of == token))]
            raise OptionError(
                f"{name} has the id {token}, and so has the gene {gene!r} in {option}: give {name} an id of its own"
            )
    slot_of = np.where(token_of >= 0, np.arange(len(token_of)), -1).astype(np.int32)
    if summed:
        known = np.flatnonzero(token_of >= 0)
        _, first, which = np.unique(token_of[known], return_index=True, return_inverse=True)
        slot_of[known] = known[first][which]
    return GeneTokens(slot_of=slot_of, token_of=token_of, median_of=np.ones(0))


def _unknown(genes: GeneNames, tokens: Mapping[str, int], option: str, spelled: Callable[[str], str]) -> str:
    """The message if no gene has a token: with a var column that has known names, or with the nearest name."""
    known = [name for name in tokens if not name.startswith("<")]
    names = [name for name in genes.names if name is not None]
    message = (
        f"none of the {len(genes.names)} genes of {genes.where} is among the {len(known)} genes of {option}: "
        f"{genes.named_by} has names such as {listed(map(repr, names[:_SHOWN]))}, and {option} such as "
        f"{listed(map(repr, known[:_SHOWN]))}. "
    )
    found = {
        column: sum(isinstance(name, str) and spelled(name) in tokens for name in values)
        for column, values in genes.other_names().items()
    }
    best = max(found, key=lambda column: found[column], default=None)
    if best is not None and found[best]:
        how = "genes_by=None" if best == "var_names" else f"genes_by={best!r}"
        return f"{message}{best} has {found[best]} names that {option} knows: give {how}"
    unversioned = sum(spelled(name.partition(".")[0]) in tokens for name in names)
    if unversioned:
        return (
            f"{message}Without the version after the dot, {unversioned} would be: store the names without versions, "
            "in var_names or in a var column that genes_by names"
        )
    upper = sum(spelled(name.upper()) in tokens for name in names)
    if upper or any(name.startswith("ENSMUS") for name in names):
        how = f"In upper case, {upper} would be: open the dataset with genes_by=str.upper, or" if upper else "Open it"
        return f"{message}These may be mouse genes. {how} with a mapping to human orthologs: genes_by={{...}}"
    near = suggestion(names[0], known)[2:] if names else ""  # without the full stop before it
    return f"{message}{near + ' ' if near else ''}Name the genes by a var column with genes_by=..."
