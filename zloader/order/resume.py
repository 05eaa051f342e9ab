"""The state of a run as a few JSON values, and the rest of its epoch. Pure.

In lock-step training all ranks have received the same number of minibatches. One number therefore describes all ranks,
and it is enough to save the state of one rank. With the same number of ranks, each rank continues where it was, bit for
bit. With another number of ranks, the rows of the epoch that no rank has received are dealt to the new ranks. The state
then has one stretch per number of ranks: the world size, and the minibatches received by each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from zloader.common.errors import OptionError
from zloader.order.plan import Plan
from zloader.order.sampling import Sampling

VERSION = 3  # changes whenever the same position would stand for other rows
MAX_STRETCHES = 16  # per epoch
_NUMBERS = ("epoch", "stretches", "worker", "of_workers", "of_ranks", "worker_minibatches")


class Stretch(NamedTuple):
    """Minibatches received per rank, in a world of so many ranks."""

    world_size: int
    minibatches: int


@dataclass(frozen=True, kw_only=True)
class Position:
    """What the consumer has received of an epoch.

    In a DataLoader worker that is one of several, `worker_minibatches` counts this worker's minibatches since the
    stretches, in a world of `of_ranks` ranks.
    """

    epoch: int
    stretches: tuple[Stretch, ...] = ()
    worker: int = 0
    of_workers: int = 1
    of_ranks: int = 1
    worker_minibatches: int = 0

    def require_worker(self, worker: int, of_workers: int, of_ranks: int) -> None:
        """Raises OptionError unless `worker` of `of_workers` in a world of `of_ranks` can continue from here."""
        if self.of_workers == 1:
            return
        then, now = (self.worker, self.of_workers, self.of_ranks), (worker, of_workers, of_ranks)
        if then != now:
            raise OptionError(
                "the state was saved by DataLoader worker {} of {} in a world of {} ranks, and this is {} of {} in a "
                "world of {}: load it with the same numbers of workers and ranks. States of StatefulDataLoader always "
                "need them; only Loader.state_dict without workers fits any number".format(*then, *now)
            )

    def later(self, world_size: int, n_minibatches: int) -> Position:
        """The position `n_minibatches` later on each of `world_size` ranks, or in this one of several workers."""
        if self.of_workers > 1:
            return replace(self, worker_minibatches=self.worker_minibatches + n_minibatches)
        before, done = _split(self.stretches, world_size)
        if not done + n_minibatches:
            return self
        return replace(self, stretches=(*before, Stretch(world_size, done + n_minibatches)))


def _split(stretches: Sequence[Stretch], world_size: int) -> tuple[Sequence[Stretch], int]:
    """The earlier stretches, and the minibatches of the last stretch if it has so many ranks (else 0)."""
    if stretches and stretches[-1].world_size == world_size:
        return stretches[:-1], stretches[-1].minibatches
    return stretches, 0


def resumed(plan: Plan, stretches: Iterable[Sequence[int]]) -> tuple[Plan, int]:
    """The plan of the rest of an epoch, and the number of its minibatches that this rank has received.

    `stretches` are those of a Position or of a state. Reads nothing. If the number of ranks has changed, it takes the
    memory of one fetch per former rank. Raises OptionError if the stretches do not fit the epoch.
    """
    before, done = _split([Stretch(*each) for each in stretches], plan.world_size)
    for world_size, minibatches in before:
        then = replace(plan, rank=0, world_size=world_size)
        _require_position(then, minibatches)
        plan = replace(plan, order=then.rest(minibatches))
    _require_position(plan, done)
    return plan, done


def _require_position(plan: Plan, done: int) -> None:
    if done > plan.n_minibatches:
        raise OptionError(
            f"the state is after {done} minibatches of each of {plan.world_size} ranks, but there are only "
            f"{plan.n_minibatches}: give the loader the data and options with which the state was saved"
        )


def as_state(position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `state_dict`: numbers, strings, and lists of these."""
    stretches = [list(stretch) for stretch in position.stretches]
    return {"version": VERSION, **dataclasses.asdict(position), "stretches": stretches, **identity}


def position_of(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """The position saved in a state. Raises OptionError, naming the differences, if it was saved by another run."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise OptionError(f"this is not a state of a zloader.Loader: {state!r:.200}. Give what state_dict() returned")
    if not _is_same(state["version"], VERSION):
        raise OptionError(
            f"the state is of version {state['version']!r}, but this zloader reads version {VERSION}: resume with the "
            "zloader that saved it, or restart the epoch with set_epoch"
        )
    missing = [name for name in (*_NUMBERS, *identity) if name not in state]
    if missing:
        raise OptionError(f"the state has no {missing[0]!r}, so it is damaged: restart the epoch with set_epoch")
    differences = [
        f"{name} was {state[name]!r}, is {now!r}" for name, now in identity.items() if not _is_same(state[name], now)
    ]
    if differences:
        raise OptionError(
            f"the state is of another run: {'; '.join(differences)}. Give the loader the same options, or restart the "
            "epoch with set_epoch"
        )
    try:
        stretches = tuple(Stretch(*map(_whole, each)) for each in state["stretches"])
        numbers = {name: _whole(state[name]) for name in _NUMBERS if name != "stretches"}
    except (TypeError, ValueError) as error:
        raise OptionError(f"the state is damaged: {error}") from error
    if len(stretches) > MAX_STRETCHES:
        raise OptionError(f"the state is damaged: {state!r:.300}")
    return Position(stretches=stretches, **numbers)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} is not a whole number from 0 to 2**62 - 1")
    return int(number)


def _is_same(then: Any, now: Any) -> bool:
    try:
        return bool(then == now)
    except (TypeError, ValueError):  # arrays and pandas.NA have no truth value
        return False


@reprlib.recursive_repr()
def described(options: Any) -> str:
    """Text that identifies a sampling: it changes with every public option and is the same in every process.

    Lists are replaced by their checksum. Private attributes and cached properties are left out.
    """
    kind = type(options)
    if dataclasses.is_dataclass(options):
        named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.init}
    else:
        state: Any = object.__getstate__(options)  # attributes in __dict__ and in slots
        parts = state if isinstance(state, tuple) else (state,)
        named = {
            name: value
            for name, value in sorted((name, part[name]) for part in parts if part for name in part)
            if not name.startswith("_") and not isinstance(getattr(kind, name, None), functools.cached_property)
        }
    return f"{kind.__name__}({', '.join(f'{name}={_text(value)}' for name, value in named.items())})"


def _text(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(fingerprint := getattr(value, "fingerprint", None), str):  # a dataset or view
        return f"<rows {fingerprint}>"
    if isinstance(value, Sampling):  # a sampling inside a sampling
        return described(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, Set):
        return _checksum(sorted(map(_text, value)))
    if isinstance(value, Collection):
        return _checksum(value if hasattr(value, "__array__") else list(value))
    kind: Any = type(value)
    if dataclasses.is_dataclass(kind) or kind.__repr__ is object.__repr__:
        return described(value)
    return re.sub(" at 0x[0-9A-Fa-f]+", "", repr(value))  # a path, a function, ...


def _checksum(values: Any) -> str:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.array([_text(item) for item in values])
    if array.dtype.kind == "O":
        array = np.array([item if isinstance(item, str) else _text(item) for item in array.flat])
    if array.dtype.kind not in "biuf":
        array = array.astype(str)
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    digest = hashlib.sha256(np.ascontiguousarray(array).data if array.dtype.kind != "U" else array.tobytes())
    return f"<{array.size} values, {digest.hexdigest()[:16]}>"
