"""Progress bars for long operations, drawn on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from zloader.common.messages import printable, size


class _AmountColumn(ProgressColumn):
    """How much is done, of how much, and how fast."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        done, total, speed = (
            None if n is None else size(n) if self._unit == "bytes" else f"{n:,.0f}"
            for n in (task.completed, task.total, task.finished_speed or task.speed or 0.0)
        )
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        return Text(f"{done}{'' if total is None else f' of {total}'}{unit}, {speed}{unit}/s")


class Bars:
    """One bar per task."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def add(self, description: str, total: int | None) -> Callable[..., None]:
        """Adds a bar. `total` is None if it is not known.

        Call the result with the number of values, or other units, finished since the previous call. A second number
        is a new total.
        """
        task = self._bars.add_task(printable(description), total=total)
        return lambda done, total=None: self._bars.update(task, advance=done, total=total)


@contextlib.contextmanager
def progress_bars(*, shown: bool, unit: str = "values") -> Iterator[Bars]:
    """Draws progress bars inside the context, if `shown` is True and stderr is a terminal."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), _AmountColumn(unit), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not (shown and sys.stderr.isatty())) as bars:
        yield Bars(bars)
