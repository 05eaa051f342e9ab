"""Whether a loader can be stopped and resumed before any minibatch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any


def assert_resumes_anywhere(
    make_loader: Callable[[], Any],
    *,
    described: Callable[[Any], Any] = lambda minibatch: minibatch.index.tolist(),
    n_epochs: int = 2,
    begin: int = 0,
    every: int = 1,
) -> None:
    """Saves the state before every minibatch, restores each into a new loader, and demands the same tail.

    `make_loader` gives a new loader each time: a zl.Loader, or anything with its `state_dict` and `load_state_dict`
    (a StatefulDataLoader around one). The first epoch is seen to its end, also from after its last minibatch, and
    `n_epochs - 1` more as they follow; `described` is what two minibatches are compared by. States pass through JSON
    where they can. `every` leaves out all places but each `every`-th, from `begin` on.
    """
    whole = make_loader()
    states: list[Any] = []
    epochs: list[list[Any]] = [[]]
    minibatches = iter(whole)
    while True:
        states.append(whole.state_dict())
        try:
            epochs[0].append(described(next(minibatches)))
        except StopIteration:
            break
    after = whole.state_dict()
    epochs += [[described(minibatch) for minibatch in whole] for _ in range(n_epochs - 1)]
    places = [*enumerate(states)][begin::every]
    for place, state in places:
        tail = list(_epochs_from(make_loader(), state, described, n_epochs))
        wanted = [epochs[0][place:], *epochs[1:]]
        for number, (got, expected) in enumerate(zip(tail, wanted, strict=True)):
            assert got == expected, f"resumed before minibatch {place}, epoch {number} differs: {got} != {expected}"
    tail = list(_epochs_from(make_loader(), after, described, n_epochs - 1))
    assert tail == epochs[1:], f"resumed after the first epoch: {tail} != {epochs[1:]}"


def _epochs_from(loader: Any, state: Any, described: Callable[[Any], Any], n_epochs: int) -> Iterator[list[Any]]:
    with contextlib.suppress(TypeError):  # StatefulDataLoader's own, with workers, holds more than JSON does
        state = json.loads(json.dumps(state))
    loader.load_state_dict(state)
    for _ in range(n_epochs):
        yield [described(minibatch) for minibatch in loader]
