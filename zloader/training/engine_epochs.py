"""The epochs of a Loader with `processes`: its engines, and how they share its memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from zloader.common.options import MIN_MEMORY, FetchOptions
from zloader.producing.engines import Engines
from zloader.producing.production import Production
from zloader.producing.window import LANES, MeanBytes, Window
from zloader.reading.bridge import Bridge
from zloader.reading.resources import Counters
from zloader.training.epoch import EpochWork
from zloader.training.recipes import LoaderRecipes

log = logging.getLogger("zloader")

_OVERTAKE_S = 60.0  # without progress with a fetch, until another engine makes it, too
_STALL_S = 300.0  # without progress, or without an engine that starts, until the epoch ends with an error


class EngineEpochs:
    """Makes epochs with up to `processes` engines, fewer if the memory holds fewer fetches of `fetch_rows` rows.

    Raises whatever pickling a function of the user raises.
    """

    def __init__(self, recipes: LoaderRecipes, processes: int, *, batch_size: int, fetch_rows: int) -> None:
        options, fetch_bytes = recipes.options, max(1.0, recipes.expected_bytes(fetch_rows))
        at_once = max(1, int(options.buffer_bytes / fetch_bytes))
        size = min(processes, at_once)
        if size < processes:
            log.warning(
                "processes=%d, but FetchOptions.memory holds %d fetches of about %d MiB at a time, so %d of them work: "
                "lower fetch_factor, or give more memory",
                processes,
                at_once,
                fetch_bytes / (1 << 20),
                size,
            )
        self._lanes = min(LANES, max(1, at_once // size))
        self._ahead_bytes = options.ready_bytes // 3
        self._engines = Engines(recipes.of_arrays(_share(options, size)), size, start_s=_STALL_S)
        self._cut = recipes.cutting(ready=True).cut
        self._mean = MeanBytes(n_bytes=recipes.expected_bytes(batch_size))

    @property
    def here(self) -> bool:
        """Whether this process has made the engines, and not one that it was forked from."""
        return self._engines.here

    def start(self, work: EpochWork) -> tuple[Bridge[Any], Counters]:
        """Begins an epoch."""
        window = Window(work.remaining, self._mean, ahead_bytes=self._ahead_bytes, overtake_s=_OVERTAKE_S)
        plan = self._engines.share(work.plan, self._cut)
        production = Production(
            self._engines, plan, window, self._mean, by_mirror=False, stall_s=_STALL_S, lanes=self._lanes
        )
        # One byte a group, so that one group is handed over at a time: the window bounds all others.
        return Bridge(production.run, ready_bytes=1, name="zloader-engines"), production.counters


def _share(options: FetchOptions, size: int) -> FetchOptions:
    """The memory and threads of one engine of `size`. A third of the ready minibatches waits here."""
    return replace(
        options,
        memory=max(MIN_MEMORY, options.memory // size),
        in_flight_bytes=options.in_flight_bytes // size,
        buffer_bytes=options.buffer_bytes // size,
        ready_bytes=2 * options.ready_bytes // (3 * size),
        threads=max(1, options.threads // size),
    )
