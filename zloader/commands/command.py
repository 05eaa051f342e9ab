"""Shared by all `zloader` commands: the application, error and signal handling, and the common flags."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from zloader.common.errors import ZloaderError

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedError(BaseException):
    """The process received SIGTERM or SIGHUP, `number`."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else EndedError(number)


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """While the context lasts, SIGINT, SIGTERM and SIGHUP raise an exception in the main thread.

    Python discards exceptions raised in a destructor or weakref callback. When that happens, the signal is sent again.
    """
    before = {number: signal.signal(number, _end) for number in _ENDING_SIGNALS}
    default_hook = sys.unraisablehook

    def send_again(discarded: sys.UnraisableHookArgs) -> None:
        if isinstance(discarded.exc_value, (KeyboardInterrupt, EndedError)):
            number = getattr(discarded.exc_value, "number", signal.SIGINT)
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        else:
            default_hook(discarded)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = default_hook
        for number, handler in before.items():
            signal.signal(number, handler)


class _Commands(typer.core.TyperGroup):
    """Prints errors as one line, and exits with status 128 + N on signal N once all contexts have been left."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _signals_end():
                return super().invoke(ctx)
        except ZloaderError as error:
            if _debugging():
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            _leave(128 + signal.SIGINT)
        except EndedError as error:
            _leave(128 + error.number)


def _leave(status: int) -> NoReturn:
    """Exits at once. Cleanup is done, and the libraries' threads would print errors during a normal shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # rich tracebacks show local variables, including credentials
    help="Train PyTorch models directly on single-cell AnnData stored as sharded Zarr in object storage.",
)


def _debugging() -> bool:
    return os.environ.get("ZLOADER_DEBUG", "") not in ("", "0")


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ["ZLOADER_DEBUG"] = "1"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"zloader {version('zloader')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Defines the options that come before the command's name."""


_S3 = "Access to S3"
Url = Annotated[str, typer.Argument(metavar="URL", help="Store: a local path or s3://BUCKET/KEY.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error. Also: ZLOADER_DEBUG=1.", callback=_debug),
]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="S3 server, if it is not AWS.", rich_help_panel=_S3),
]
Region = Annotated[str | None, typer.Option("--region", help="Region of the bucket.", rich_help_panel=_S3)]
Profile = Annotated[
    str | None, typer.Option("--profile", help="Profile in the AWS configuration.", rich_help_panel=_S3)
]
Anonymous = Annotated[
    bool, typer.Option("--anon", help="Send no credentials, for public buckets.", rich_help_panel=_S3)
]
Matrices = Annotated[
    list[str] | None,
    typer.Option(
        "--x", metavar="NAME", help="Matrix: X, layers/NAME or raw/X. Repeat for several matrices.", show_default="X"
    ),
]
_LOADER = "Loader options"
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", help="Rows per minibatch.", show_default="64", rich_help_panel=_LOADER),
]
FetchFactor = Annotated[
    int | None,
    typer.Option("--fetch-factor", help="Minibatches per fetch.", show_default="256", rich_help_panel=_LOADER),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        help="Rows per shuffled block, at most one fetch.",
        show_default="64",
        rich_help_panel=_LOADER,
    ),
]
ObsColumns = Annotated[
    str, typer.Option("--obs", metavar="A,B", help="obs columns to read.", show_default="none", rich_help_panel=_LOADER)
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory limit for reads, fetches and minibatches.",
        show_default="set by the machine's memory",
        rich_help_panel=_LOADER,
    ),
]
Layout = Annotated[str, typer.Option("--layout", help="csr, dense, scipy or anndata.", rich_help_panel=_LOADER)]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, float64, int32 or int64.", rich_help_panel=_LOADER)]
PRICES = "Prices in dollars"
GpuHour = Annotated[float, typer.Option("--gpu-hour", help="A GPU for an hour.", rich_help_panel=PRICES)]
ThousandGets = Annotated[float, typer.Option("--thousand-gets", help="1000 GETs.", rich_help_panel=PRICES)]
GigabyteEgress = Annotated[
    float, typer.Option("--gigabyte-egress", help="A GB read; 0 within a region.", rich_help_panel=PRICES)
]
NvmeGigabyteMonth = Annotated[
    float,
    typer.Option("--nvme-gigabyte-month", help="A GB of local disk for a month.", rich_help_panel=PRICES),
]
KEYS = "Credentials come from the AWS_* variables or the AWS configuration, never from the command line."


def storage_options(
    endpoint_url: str | None, region: str | None, profile: str | None, anonymous: bool
) -> dict[str, Any]:
    """The s3fs options for these flags."""
    client = {"endpoint_url": endpoint_url, "region_name": region}
    client = {name: value for name, value in client.items() if value}
    given: dict[str, Any] = {"profile": profile, "anon": anonymous, "client_kwargs": client}
    return {name: value for name, value in given.items() if value}


def access_flags(endpoint_url: str | None, region: str | None, profile: str | None, anonymous: bool) -> list[str]:
    """The flags that were given, as words of a command line, for commands that a page says to try."""
    given = {"--endpoint-url": endpoint_url, "--region": region, "--profile": profile}
    words = [word for name, value in given.items() if value for word in (name, value)]
    return [*words, "--anon"] if anonymous else words


def loader_sizes(batch_size: int | None, fetch_factor: int | None, block_size: int | None) -> dict[str, int]:
    """The sizes by name. A size that is None takes the Loader's default."""
    from zloader.order.sampling import default_block_size
    from zloader.training.loader import Loader

    batch_size = Loader.batch_size if batch_size is None else batch_size
    fetch_factor = Loader.fetch_factor if fetch_factor is None else fetch_factor
    block_size = default_block_size(batch_size * fetch_factor) if block_size is None else block_size
    return {"batch_size": batch_size, "fetch_factor": fetch_factor, "block_size": block_size}


def x_of(given: list[str] | None) -> str | list[str]:
    """The x of a Loader for these --x flags: a single name, or a list of several."""
    names = given or ["X"]
    return names[0] if len(names) == 1 else names


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))
