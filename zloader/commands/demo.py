"""`zloader demo`: its flags, its own S3 server in a temporary directory, and what it says.

demo_run.py trains; it imports torch, so it is imported by the command only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zloader.commands import output
from zloader.commands.command import ENDING_SIGNALS, EndedError, app, takes_flags
from zloader.commands.flags import Json

if TYPE_CHECKING:
    from collections.abc import Callable

    from zloader.commands.demo_run import DemoRun
    from zloader.testing.seaweed import SeaweedFS

_LOOK_S = 0.2  # how often the server that is kept running looks for a signal


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
    output.require_writable(flags.report)
    say = output.console(stderr=flags.as_json).print
    say("loading torch and starting SeaweedFS")
    from zloader.commands.demo_run import run_demo

    with running_demo_server(keep=flags.keep) as server:
        given: Any = {"file": flags.file, "label": flags.label, "epochs": flags.epochs, "seed": flags.seed}
        run = run_demo(server.directory, server.s3, say, **given)
        run.page().write(flags.report)
        say(run.table)
        say(run.sentence)
        say(f"report: {flags.report.absolute()}")
        if flags.as_json:
            output.print_json(_document(run, flags.report))
        if flags.keep:
            _serve(say, server, run)


def _document(run: DemoRun, report: Path) -> dict[str, Any]:
    document = dataclasses.asdict(run)
    del document["timelines"]
    for name, passes in (("epochs", run.epochs), ("loading", run.loading)):
        for figures, each in zip(document[name], passes, strict=True):
            figures |= {"kind": each.kind, "rows_per_s": each.rows_per_s}
    return document | {"sentence": run.sentence, "report": str(report.absolute())}


def _serve(say: Callable[[str], None], server: DemoServer, run: DemoRun) -> None:
    """Prints how to reach the server and its files, then waits for a signal."""
    access = write_access(server)
    with contextlib.suppress(KeyboardInterrupt, EndedError):
        say(f"store: {run.conversion.destination}, server: {server.s3.endpoint_url}")
        say(f"files: {server.directory} (server in seaweedfs/, mirror in cache/)")
        say(f"try, in another terminal: . {access} && zloader info {run.conversion.destination}")
        say(f"Ctrl-C, or kill {os.getpid()}, stops the server; the files stay until you remove them")
        while True:  # signal.pause would miss a signal that arrives just before it
            time.sleep(_LOOK_S)
    say("stopping the server once it has flushed its files")


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
        # A signal here would leave the directory behind.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
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


def write_access(server: DemoServer) -> Path:
    """Writes a shell script, mode 0600, that sets the AWS_* variables for a server that was kept."""
    path = server.directory / "access.sh"
    path.touch(mode=0o600)
    options = server.s3.storage_options
    path.write_text(
        f"export AWS_ACCESS_KEY_ID={options['key']}\n"
        f"export AWS_SECRET_ACCESS_KEY={options['secret']}\n"
        f"export AWS_ENDPOINT_URL={server.s3.endpoint_url}\n"
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
