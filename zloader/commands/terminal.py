"""What all commands print: on a console, as one JSON document, and in tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zloader.common.messages import printable

_WIDTH = 120  # columns of output that does not go to a terminal


class _Console(Console):
    """A console whose output is all given as strings, one for each line or cell."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text), **style)


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; 120 columns wide if that is not a terminal."""
    plain: Any = {"stderr": stderr, "highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
    console = _Console(**plain)
    return console if console.is_terminal else _Console(**plain, width=_WIDTH)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


def print_result(document: Any, show: Callable[[Console], None], *, as_json: bool) -> None:
    """Prints the result of a command on stdout: as one JSON document, or as the text that `show` prints."""
    if as_json:
        print_json(document)
    else:
        show(console())


def new_table(*columns: str) -> Table:
    """A table with these columns. A name that begins with > marks a right-aligned column."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table
