"""Shared by all `zloader` commands: the application, errors and signals, and flags that are fields of a dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
import typer.core

from zloader.common.errors import ZloaderError
from zloader.common.messages import printable, printable_lines
from zloader.common.version import __version__

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    before = {number: signal.signal(number, _end) for number in ENDING_SIGNALS}
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


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """While the context lasts, a warning is one line without the place in the code, which a user did not write."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


_ORDER = ("demo", "convert", "verify", "info", "warm", "cache", "bench", "doctor")


class _Commands(typer.core.TyperGroup):
    """Prints errors as one line, and exits with status 128 + N on signal N once all contexts have been left."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which a newcomer needs them."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _signals_end(), _plain_warnings():
                return super().invoke(ctx)
        except ZloaderError as error:
            if os.environ.get("ZLOADER_DEBUG", "") not in ("", "0"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            _leave(128 + signal.SIGINT)
        except EndedError as error:
            _leave(128 + error.number)
        except Exception as error:
            if hasattr(error, "format_message"):  # wrong arguments, such as the files of a directory
                error.message = printable(error.message)  # type: ignore[attr-defined]
            raise


def _leave(status: int) -> NoReturn:
    """Exits at once. Cleanup is done, and the libraries' threads would print errors during a normal shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


class _App(typer.Typer):
    """Shows the traceback of an error of another kind, in which text from a store may be."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 - Python would print the message as it is
            sys.exit(printable_lines(traceback.format_exc().rstrip()))


app = _App(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # rich tracebacks show local variables, including credentials
    help="Train PyTorch models directly on single-cell AnnData stored as sharded Zarr in object storage.",
)


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ["ZLOADER_DEBUG"] = "1"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zloader {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Defines the options that come before the command's name."""


KEYS = "Credentials come from the AWS_* variables or the AWS configuration, never from the command line."
_Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error. Also: ZLOADER_DEBUG=1.", callback=_debug),
]


def takes_flags(run: Callable[[Any], None]) -> Callable[..., None]:
    """Makes a command of a function of one dataclass. Its fields are the flags and arguments, as typer reads them.

    If the type of a field is a dataclass itself, such as Access, its fields are flags too. Every command has --debug.
    """
    (kind,) = (hint for name, hint in get_type_hints(run).items() if name != "return")

    @functools.wraps(run)
    def command(*, debug: bool, **given: Any) -> None:
        run(_made(kind, given))

    parameters = [*_parameters(kind), _parameter("debug", _Debug, default=False)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters(kind: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if _has_flags(hint):
            yield from _parameters(hint)
        else:
            required = field.default is dataclasses.MISSING
            yield _parameter(field.name, hint, default=inspect.Parameter.empty if required else field.default)


def _parameter(name: str, hint: Any, *, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    return kind(**{name: _made(hint, given) if _has_flags(hint) else given[name] for name, hint in hints.items()})


def _has_flags(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)
