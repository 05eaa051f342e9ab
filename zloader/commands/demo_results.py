"""The results of a demo run, as figures, as sentences, and as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from zloader.commands import terminal
from zloader.commands.charts import COLD, WARM
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.conversion.convert import ConversionReport

_OTHER_LINES = 4  # table header, status, and the line of the cursor
_WAITING = 0.5  # share of the time from which the loader, and not the model, sets the pace


@dataclass(frozen=True, kw_only=True)
class LoadingFigures:
    """A pass over training cells: `rows` in `seconds`, and the reads from S3."""

    rows: int
    seconds: float
    rows_per_s: float
    gets: int
    bytes_read: int

    @property
    def cold(self) -> bool:
        """Whether anything was read from S3."""
        return self.gets > 0

    @property
    def source(self) -> str:
        """`cold, S3` or `warm, mirror`."""
        return "cold, S3" if self.cold else "warm, mirror"

    @property
    def name(self) -> str:
        """What a chart calls the pass."""
        return self.source

    @property
    def colour(self) -> str:
        """Its colour in the charts."""
        return COLD if self.cold else WARM


@dataclass(frozen=True, kw_only=True)
class EpochFigures(LoadingFigures):
    """One epoch of training, and the held-out pass after it. Figures of the pass include the training steps.

    Times are in seconds; `started_s` is since the start of training. `loss` is the mean over the epoch's rows.
    """

    epoch: int
    started_s: float
    minibatches: int
    wait_share: float
    loss: float
    held_out_rows: int
    held_out_gets: int
    held_out_bytes_read: int
    held_out_accuracy: float

    @property
    def name(self) -> str:
        return f"epoch {self.epoch}, {self.source}"

    @property
    def standard_error(self) -> float:
        """The standard error of the accuracy."""
        return float((self.held_out_accuracy * (1 - self.held_out_accuracy) / self.held_out_rows) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step. `done_s` is in seconds since the start of training."""

    epoch: int
    done_s: float
    rows: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The results of a demo run.

    `source` is the file's name without its directory. `unlabelled` rows were left out. `opening_bytes` of metadata,
    indptr and labels were read once, before the first epoch. `guess_accuracy` is the held-out accuracy of always
    predicting the majority class. `loading` are a cold and a warm pass without training, after the last epoch and
    through another mirror. In a large file they load the first cells only.
    """

    source: str
    bundled: bool
    label: str
    categories: int
    seed: int
    conversion: ConversionReport
    train_rows: int
    held_out_rows: int
    unlabelled: int
    guess_accuracy: float
    block_size: int
    batch_size: int
    fetch_rows: int
    opening_bytes: int
    machine: Mapping[str, str]
    epochs: Sequence[EpochFigures]
    loading: Sequence[LoadingFigures]
    steps: Sequence[Step] = field(repr=False)

    @property
    def summary(self) -> str:
        """A summary of the epochs in one to three sentences."""
        cold = [figures for figures in self.epochs if figures.cold]
        warm = [figures for figures in self.epochs if not figures.cold]
        sentences = []
        if cold:
            first = cold[0]
            sentences.append(f"Epoch {first.epoch} read {size(first.bytes_read)} from S3 in {first.gets:,} GETs.")
        if warm:
            which = f"Epoch {warm[0].epoch}" if len(warm) == 1 else f"Epochs {warm[0].epoch} to {warm[-1].epoch}"
            sentences.append(f"{which} made 0 GETs: all {warm[0].rows:,} training cells came from the mirror.")
        if len(cold) > 1:
            sentences.append("Later epochs read from S3 too, because the mirror was incomplete. Was its disk full?")
        return " ".join(sentences)

    @property
    def verdict(self) -> str:
        """How well the model does, how fast the cells come, and which of the two sets the pace."""
        last = self.epochs[-1]
        cold, warm = self.loading
        beaten = last.held_out_accuracy > self.guess_accuracy
        sentences = [
            f"The model predicts {self.label} correctly for {last.held_out_accuracy:.1%} of the held-out cells; the "
            f"majority-class accuracy is {self.guess_accuracy:.1%}" + ("." if beaten else ", which is no worse.")
        ]
        if not warm.cold:
            sentences.append(
                f"Loading alone runs at {cold.rows_per_s:,.0f} cells/s from S3 and {warm.rows_per_s:,.0f} "
                f"cells/s from the mirror, {warm.rows_per_s / cold.rows_per_s:,.1f} times as many."
            )
        pace = "the model sets the pace" if last.wait_share < _WAITING else "loading sets the pace"
        sentences.append(f"In epoch {last.epoch} training waited for cells {last.wait_share:.0%} of the time: {pace}.")
        return " ".join(sentences)


def epoch_rows(epochs: Iterable[EpochFigures]) -> list[list[str]]:
    """The table of epochs as text. EPOCH_HEADER is its header."""
    return [
        [
            str(figures.epoch),
            figures.source,
            f"{figures.rows_per_s:,.0f}",
            f"{figures.gets:,}",
            size(figures.bytes_read),
            f"{figures.wait_share:.1%}",
            f"{figures.loss:.3f}",
            f"{figures.held_out_accuracy:.1%}",
        ]
        for figures in epochs
    ]


EPOCH_HEADER = ("epoch", "source", "cells/s", "GETs", "read from S3", "waiting", "loss", "held-out accuracy")


class TerminalOutput:
    """Shows the demo's progress on a console: lines of text, then a table with one line per epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._epochs: list[EpochFigures] = []
        self._status = ""
        self._ended = False

    def step(self, text: str) -> None:
        """A step begins, or has a result to show."""
        self._console.print(text)

    def progress(self, epoch: int, rows: int, of_rows: int) -> None:
        """`rows` of the epoch's `of_rows` have been trained on."""
        self._status = f"epoch {epoch}: {rows:,} of {of_rows:,} cells" if rows < of_rows else ""
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8)
            self._live.start()

    def epoch(self, figures: EpochFigures) -> None:
        """An epoch has ended."""
        self._epochs.append(figures)

    def _render(self) -> Group:
        table = terminal.new_table(*(name if name in ("epoch", "source") else f">{name}" for name in EPOCH_HEADER))
        # Until the demo ends, only the epochs that fit on the screen.
        shown = self._epochs if self._ended else self._epochs[-max(1, self._console.height - _OTHER_LINES) :]
        for figures, cells in zip(shown, epoch_rows(shown), strict=True):
            table.add_row(*cells, style="blue" if figures.cold else "yellow")
        return Group(table, Text(self._status, style="dim"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._live is not None:
            self._live.stop()
            self._live = None
