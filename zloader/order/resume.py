"""Where a run stands, as a few numbers that JSON can hold, and what is left of its epoch. Pure.

All ranks are at the same minibatch, as training in lock step has it: so one number says what each of them has received,
and the state of any rank will do for all. With as many ranks as before, each goes on where it was, bit for bit. With
another number of ranks, what nobody has seen of the epoch is dealt anew, and the state remembers both stretches: how
many ranks received how many minibatches each, one stretch after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zloader.common.errors import OptionError
from zloader.order.plan import Plan

VERSION = 1
MOST_STRETCHES = 16  # in one epoch
_NUMBERS = ("epoch", "stretches", "worker", "of_workers", "of_ranks", "worker_minibatches")


@dataclass(frozen=True, kw_only=True)
class Position:
    """What the consumer has received: `stretches` of the epoch are pairs of world size and minibatches of each rank.

    Of a DataLoader worker that is one of several, `worker_minibatches` are its own since then, of `of_ranks` ranks.
    """

    epoch: int
    stretches: tuple[tuple[int, int], ...] = ()
    worker: int = 0
    of_workers: int = 1
    of_ranks: int = 1
    worker_minibatches: int = 0

    def require_place(self, worker: int, of_workers: int, of_ranks: int) -> None:
        """Raises OptionError unless whoever is `worker` of `of_workers` can go on from here."""
        if self.of_workers == 1:
            return
        then, now = (self.worker, self.of_workers, self.of_ranks), (worker, of_workers, of_ranks)
        if then != now:
            raise OptionError(
                "the state is that of DataLoader worker {} of {} in a world of {} ranks, and this is {} of {} in a "
                "world of {}: load it with as many workers and ranks; only what Loader.state_dict gives in a loop "
                "without workers fits any number of them, no state of StatefulDataLoader does".format(*then, *now)
            )

    def later(self, world_size: int, n_minibatches: int) -> Position:
        """The position after `n_minibatches` more of each of `world_size` ranks, or of this one of several workers."""
        if self.of_workers > 1:
            return replace(self, worker_minibatches=self.worker_minibatches + n_minibatches)
        before, done = _split(self.stretches, world_size)
        if not done + n_minibatches:
            return self
        return replace(self, stretches=(*before, (world_size, done + n_minibatches)))


def _split(stretches: Sequence[tuple[int, int]], world_size: int) -> tuple[Sequence[tuple[int, int]], int]:
    """The stretches of other world sizes, and the minibatches of one of this size after them."""
    if stretches and stretches[-1][0] == world_size:
        return stretches[:-1], stretches[-1][1]
    return stretches, 0


def resumed(plan: Plan, stretches: Sequence[tuple[int, int]]) -> tuple[Plan, int]:
    """The plan of an epoch's rest, and how many minibatches of it this rank has received.

    Costs the memory of a fetch of each former rank, where their number has changed; nothing is read. Raises OptionError
    for stretches that no such epoch has.
    """
    before, done = _split(stretches, plan.world_size)
    for world_size, minibatches in before:
        then = replace(plan, rank=0, world_size=world_size)
        _require_position(then, minibatches)
        plan = replace(plan, sampling=then.unseen(minibatches))
    _require_position(plan, done)
    return plan, done


def _require_position(plan: Plan, done: int) -> None:
    if done > plan.n_minibatches:
        raise OptionError(
            f"the state is after {done} minibatches of each of {plan.world_size} ranks, but there are "
            f"{plan.n_minibatches}: it is of other data or options"
        )


def as_state(position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What `state_dict` gives: numbers, strings and lists of them."""
    stretches = [list(stretch) for stretch in position.stretches]
    return {"version": VERSION, **dataclasses.asdict(position), "stretches": stretches, **identity}


def position_of(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """The position that a state holds. Raises OptionError, naming the difference, unless it is of the same run."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise OptionError(f"this is no state of a zloader.Loader: {state!r:.200}")
    if not _is_same(state["version"], VERSION):
        raise OptionError(
            f"the state is of version {state['version']!r}, but this zloader reads version {VERSION}: resume with the "
            "zloader that saved it, or begin the epoch anew with set_epoch"
        )
    missing = [name for name in (*_NUMBERS, *identity) if name not in state]
    if missing:
        raise OptionError(f"the state has no {missing[0]!r}: it is damaged")
    differences = [
        f"{name} was {state[name]!r}, is {now!r}" for name, now in identity.items() if not _is_same(state[name], now)
    ]
    if differences:
        raise OptionError(
            f"the state is of another run: {'; '.join(differences)}. Give the loader what it had, or begin the epoch "
            "anew with set_epoch"
        )
    try:
        stretches = tuple((_whole(world_size), _whole(minibatches)) for world_size, minibatches in state["stretches"])
        numbers = {name: _whole(state[name]) for name in _NUMBERS if name != "stretches"}
    except (TypeError, ValueError) as error:
        raise OptionError(f"the state is damaged: {error}") from error
    if len(stretches) > MOST_STRETCHES:
        raise OptionError(f"the state is damaged: {state!r:.300}")
    return Position(stretches=stretches, **numbers)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} is no whole number that it can hold")
    return int(number)


def _is_same(then: Any, now: Any) -> bool:
    try:
        return bool(then == now)
    except (TypeError, ValueError):  # an array, or what is missing to pandas
        return False


@reprlib.recursive_repr()
def described(options: Any) -> str:
    """A sampling as text that changes whenever its public options do, and is the same in every process.

    Long lists stand as their checksum. Private attributes and what a cached_property keeps are no options.
    """
    kind = type(options)
    if dataclasses.is_dataclass(options):
        named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.init}
    else:
        state: Any = object.__getstate__(options)  # the attributes; where there are slots, theirs too
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
    if hasattr(value, "n_rows"):  # a sampling within one
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
