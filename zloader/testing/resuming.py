"""Checks that a loader can be stopped and resumed before any minibatch."""

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
    """Saves the state before every minibatch, restores it in a new loader, and asserts that the same data follows.

    `make_loader` returns a new loader: a zl.Loader, or an object with `state_dict` and `load_state_dict` such as a
    StatefulDataLoader around one. Every restored loader must finish the first epoch and repeat the `n_epochs - 1`
    epochs after it. The state after the last minibatch of the first epoch is tested too. Minibatches are compared by
    `described(minibatch)`. States pass through JSON if they can. Only every `every`-th state is tested, from the state
    before minibatch `begin` on.

    Raises AssertionError with the first epoch that differs.

        assert_resumes_anywhere(lambda: zl.Loader(zl.open_dataset(url), seed=1), every=7)
    """
    uninterrupted = make_loader()
    states: list[Any] = []
    epochs: list[list[Any]] = [[]]
    minibatches = iter(uninterrupted)
    while True:
        states.append(uninterrupted.state_dict())
        try:
            epochs[0].append(described(next(minibatches)))
        except StopIteration:
            break
    after = uninterrupted.state_dict()
    epochs += [[described(minibatch) for minibatch in uninterrupted] for _ in range(n_epochs - 1)]
    for n_done, state in [*enumerate(states)][begin::every]:
        tail = list(_epochs_from(make_loader(), state, described, n_epochs))
        wanted = [epochs[0][n_done:], *epochs[1:]]
        for number, (got, expected) in enumerate(zip(tail, wanted, strict=True)):
            assert got == expected, f"resumed before minibatch {n_done}, epoch {number} differs: {got} != {expected}"
    tail = list(_epochs_from(make_loader(), after, described, n_epochs - 1))
    assert tail == epochs[1:], f"resumed after the first epoch: {tail} != {epochs[1:]}"


def _epochs_from(loader: Any, state: Any, described: Callable[[Any], Any], n_epochs: int) -> Iterator[list[Any]]:
    with contextlib.suppress(TypeError):  # with workers, a StatefulDataLoader's state is not JSON
        state = json.loads(json.dumps(state))
    loader.load_state_dict(state)
    for _ in range(n_epochs):
        yield [described(minibatch) for minibatch in loader]
