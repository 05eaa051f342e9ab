"""The reference of the `zloader` command, made from the command itself.

On the page that has the line `<!-- commands -->`, the reference takes the place of this line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from zloader.commands.cli import app as program

MARKER = "<!-- commands -->"


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True}


def _insert(app: Any, name: str, source: list[str]) -> None:
    if MARKER in source[0].splitlines():
        source[0] = source[0].replace(MARKER, reference())


def reference() -> str:
    """One section of Markdown per command, with its usage, its help and its arguments."""
    command = typer.main.get_command(program)
    context = command.make_context("zloader", [], resilient_parsing=True)
    return "\n\n".join(part for name in sorted(command.commands) for part in _sections(name, command, context))


def _sections(name: str, parent: Any, context: Any) -> Iterator[str]:
    """The parts of the section of a command, and of those of its own commands."""
    command = parent.commands[name]
    inner = type(context)(command, info_name=name, parent=context)
    yield f"## {inner.command_path}"
    if hasattr(command, "commands"):
        yield _plain(command.help)
        for each in sorted(command.commands):
            yield from _sections(each, command, inner)
        return
    yield f"```text\n{inner.command_path} {' '.join(command.collect_usage_pieces(inner))}\n```"
    yield _plain(command.help)
    records = [record for each in command.params if (record := each.get_help_record(inner))]
    if records:
        rows = [f"| `{_cell(_short(names))}` | {_cell(text)} |" for names, text in records]
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    if command.epilog:
        yield _plain(command.epilog)


def _plain(text: str | None) -> str:
    """Help as Markdown: typer ends a paragraph that keeps its lines with a form feed or a backspace."""
    return (text or "").replace("\b", "").replace("\f", "\n").strip()


def _short(names: str) -> str:
    """The names of an argument without types that say nothing: `SRC... <list[str]>` becomes `SRC...`."""
    return re.sub(r" range>", ">", re.sub(r" <(list\[)?str\]?>", "", names))


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
