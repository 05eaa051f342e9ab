"""Where the demo happens: an S3 server of its own in a temporary directory, and nothing of it left afterwards."""

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
    """The directory that all of the demo's files are in, and the server that runs in it."""

    directory: Path
    server: SeaweedFS


@contextlib.contextmanager
def workplace(*, keep: bool) -> Iterator[DemoServer]:
    """A running S3 server in a temporary directory. Both are gone afterwards.

    With `keep` the directory stays, unless what was done here failed or was interrupted.
    """
    directory = Path(tempfile.mkdtemp(prefix="zloader-demo-"))
    server = SeaweedFS(directory / "seaweedfs", keep=keep)
    finished = False
    try:
        with _own_environment(directory):
            server.start()
            yield DemoServer(directory=directory, server=server)
        finished = True
    finally:
        _clear_up(directory, server, keep=keep and finished)


def write_access(place: DemoServer) -> Path:
    """A shell script, mode 0600, that sets the AWS_* variables for those who go on with a kept server."""
    path = place.directory / "access.sh"
    path.touch(mode=0o600)
    options = place.server.storage_options
    path.write_text(
        f"export AWS_ACCESS_KEY_ID={options['key']}\n"
        f"export AWS_SECRET_ACCESS_KEY={options['secret']}\n"
        f"export AWS_ENDPOINT_URL={place.server.endpoint_url}\n"
    )
    return path


def _clear_up(directory: Path, server: SeaweedFS, *, keep: bool) -> None:
    """Stops and removes; a second Ctrl-C meanwhile changes nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        server.stop()
        if not keep:
            shutil.rmtree(directory)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _own_environment(directory: Path) -> Iterator[None]:
    """Meanwhile no AWS_* variables and no proxy for loopback, since this S3 server is none of the user's.

    torch makes a directory for compiled code as soon as there is an optimizer: here, not in /tmp.
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
