"""Progress bars for long operations, drawn on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from zloader.common.messages import printable


class _UnitColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit


class _CountColumn(_UnitColumn):
    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f" of {task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{of} {self._unit}")


class _RateColumn(_UnitColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        return Text(f"{speed / 1e6:.1f} M {self._unit}/s")


@contextlib.contextmanager
def progress_bars(*, shown: bool, unit: str = "values") -> Iterator[Bars]:
    """Draws progress bars inside the context, if `shown` is True and stderr is a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _CountColumn(unit),
        _RateColumn(unit),
        TimeRemainingColumn(),
    )
    with _drawn(*columns, shown=shown) as bars:
        yield Bars(bars)


@contextlib.contextmanager
def byte_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Draws one bar inside the context, if stderr is a terminal. Call the result with (bytes done, bytes in total)."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with _drawn(*columns, shown=True) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _drawn(*columns: ProgressColumn, shown: bool) -> RichProgress:
    return RichProgress(*columns, console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()))


class Bars:
    """One bar per task."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars

    def add(self, description: str, total: int | None) -> Callable[[int], None]:
        """Adds a bar. `total` is None if it is not known.

        Call the result with the number of values, or other units, finished since the previous call.
        """
        task = self._bars.add_task(printable(description), total=total)
        return lambda done: self._bars.advance(task, done)
