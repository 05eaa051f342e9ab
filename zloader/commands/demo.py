"""`zloader demo`: its flags, its results, and its own S3 server in a temporary directory, removed at the end.

demo_run.py trains; it imports torch, so it is imported by the command only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from zloader.commands import terminal
from zloader.commands.charts import COLD, WARM
from zloader.commands.command import ENDING_SIGNALS, EndedError, app, takes_flags
from zloader.commands.flags import Json
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.conversion.convert import ConversionReport
    from zloader.testing.seaweed import SeaweedFS


_OTHER_LINES = 4  # table header, status, and the line of the cursor
_WAITING = 0.5  # share of the time from which the loader, and not the model, sets the pace


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """The flags of `demo`."""

    file: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Your own .h5ad, instead of the bundled pancreas cells."),
    ] = None
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="obs column to predict.", show_default="cell_type1, or the first suitable column"
        ),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the train/held-out split and the shuffling.")] = 0
    report: Annotated[Path, typer.Option(metavar="PATH", help="Where to write the HTML report.")] = Path(
        "zloader-demo.html"
    )
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server running until Ctrl-C, and keep its files after that.")
    ] = False
    as_json: Json = False


@app.command()
@takes_flags
def demo(flags: DemoFlags) -> None:
    """Train on real cells from an S3 server on this machine, and compare cold and warm epochs.

    The server is SeaweedFS in a temporary directory. Both are removed at the end, unless --keep is given.
    """
    from zloader.commands.report import require_drawable

    path = flags.report
    require_drawable(path)
    output = TerminalOutput(terminal.console(stderr=flags.as_json))
    output.step("loading torch and starting SeaweedFS")
    from zloader.commands.demo_report import report
    from zloader.commands.demo_run import run_demo

    with running_demo_server(keep=flags.keep) as demo_server:
        with output:
            given: Any = {"file": flags.file, "label": flags.label, "epochs": flags.epochs, "seed": flags.seed}
            run = run_demo(demo_server.directory, demo_server.s3, output, **given)
        report(run).write(path)
        output.step(run.summary)
        output.step(run.verdict)
        output.step(f"report: {path.absolute()}")
        if flags.as_json:
            terminal.print_json(_document(run, path))
        if flags.keep:
            _serve(output, demo_server, run)


def _document(run: DemoRun, report: Path) -> dict[str, Any]:
    document = dataclasses.asdict(run)
    del document["steps"]
    for name, passes in (("epochs", run.epochs), ("loading", run.loading)):
        for figures, each in zip(document[name], passes, strict=True):
            figures["cold"] = each.cold
    return document | {"seen": run.summary, "verdict": run.verdict, "report": str(report.absolute())}


def _serve(output: TerminalOutput, demo_server: DemoServer, run: DemoRun) -> None:
    """Prints how to reach the server and its files, then waits for a signal."""
    access = write_access(demo_server)
    with contextlib.suppress(KeyboardInterrupt, EndedError):
        output.step(f"store: {run.conversion.destination}, server: {demo_server.s3.endpoint_url}")
        output.step(f"files: {demo_server.directory} (server in seaweedfs/, mirror in cache/)")
        output.step(f"try, in another terminal: . {access} && zloader info {run.conversion.destination}")
        output.step(f"Ctrl-C, or kill {os.getpid()}, stops the server; the files stay until you remove them")
        signal.pause()
    output.step("stopping the server once it has flushed its files")


# ---- the server


@dataclass(frozen=True, kw_only=True)
class DemoServer:
    """The directory with all files of the demo, and the S3 server that runs in it."""

    directory: Path
    s3: SeaweedFS


@contextlib.contextmanager
def running_demo_server(*, keep: bool) -> Iterator[DemoServer]:
    """Starts an S3 server in a temporary directory; stops the server and removes the directory on leaving.

    With `keep` the directory stays, unless the body failed or was interrupted.
    """
    from zloader.testing.seaweed import SeaweedFS

    finished = False
    with contextlib.ExitStack() as stack:
        unblocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, ENDING_SIGNALS
        )  # a signal here would leave the directory behind
        try:
            directory = Path(tempfile.mkdtemp(prefix="zloader-demo-"))
            s3 = SeaweedFS(directory / "seaweedfs", keep=keep)
            stack.callback(lambda: _clean_up(directory, s3, keep=keep and finished))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with _own_environment(directory):
            s3.start()
            yield DemoServer(directory=directory, s3=s3)
        finished = True


def write_access(demo_server: DemoServer) -> Path:
    """Writes a shell script, mode 0600, that sets the AWS_* variables for a server that was kept."""
    path = demo_server.directory / "access.sh"
    path.touch(mode=0o600)
    options = demo_server.s3.storage_options
    path.write_text(
        f"export AWS_ACCESS_KEY_ID={options['key']}\n"
        f"export AWS_SECRET_ACCESS_KEY={options['secret']}\n"
        f"export AWS_ENDPOINT_URL={demo_server.s3.endpoint_url}\n"
    )
    return path


def _clean_up(directory: Path, s3: SeaweedFS, *, keep: bool) -> None:
    """Stops the server and removes the directory. Further signals are ignored meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING_SIGNALS}
    try:
        s3.stop()
        if not keep:
            shutil.rmtree(directory)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _own_environment(directory: Path) -> Iterator[None]:
    """Unsets AWS_* and bypasses the proxy for loopback: the user's settings do not apply to the demo's own server.

    torch makes a directory for compiled code as soon as an optimizer exists. It goes to `directory`, not /tmp.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "torch")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- the results, as figures, as sentences, and as a table in a terminal


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
