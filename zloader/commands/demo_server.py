"""The demo's own S3 server in a temporary directory, removed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zloader.testing.seaweed import SeaweedFS

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    finished = False
    with contextlib.ExitStack() as stack:
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a signal here would leave the directory behind
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
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
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
