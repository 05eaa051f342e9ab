"""`zloader doctor`: what a maintainer asks for first, in one command. It changes nothing and prints no secrets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json

if TYPE_CHECKING:
    from zloader.insight.doctor import Check, Finding

_STYLES = {"good": "green", "advice": "yellow", "broken": "bold red", "unknown": "dim"}
_MARKS = {"good": "ok", "advice": "!", "broken": "FAULT", "unknown": "?"}


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """The flags of `doctor`."""

    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Store that you cannot open, or that is slow.", show_default=False),
    ] = None
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Cache directory. None is made.", show_default="none")
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def doctor(flags: DoctorFlags) -> None:
    """Check versions, the machine, the GPU, a cache directory and the way to a store, and say what to change.

    Reads the store for two seconds. Copy the output into a bug report: it has the names of credentials, but no secrets.
    Exits with status 1 if something is broken.
    """
    with terminal.console(stderr=True).status("looking"):
        found = _examined(flags)
    broken = [finding for finding in found if finding.state == "broken"]
    document: dict[str, Any] = {"ok": not broken, "findings": [dataclasses.asdict(finding) for finding in found]}
    terminal.print_result(document, lambda console: _show(console, found), as_json=flags.as_json)
    if broken:
        raise typer.Exit(1)


def _examined(flags: DoctorFlags) -> list[Finding]:
    from zloader.insight import doctor

    parts: dict[str, dict[str, Check]] = {
        "versions": {"python": doctor.about_python, "libraries": doctor.about_libraries},
        "machine": {
            "cores": doctor.about_cores,
            "memory": doctor.about_memory,
            "files": doctor.about_files,
            "compiled": doctor.about_compiled,
        },
        "GPU": {"gpu": doctor.about_gpu},
    }
    if (directory := flags.cache) is not None:
        parts["cache"] = {"cache": lambda: doctor.about_cache(directory)}
    if (url := flags.url) is not None:
        parts["store"] = {"store": lambda: doctor.about_store(url, flags.access.storage_options)}
    return [finding for part, checks in parts.items() for finding in doctor.gathered(part, checks)]


def _show(console: Console, found: Sequence[Finding]) -> None:
    for part, findings in itertools.groupby(found, lambda finding: finding.part):
        table = terminal.new_table("", part, "")
        table.columns[2].overflow = "fold"
        for finding in findings:
            mark = Text(_MARKS[finding.state], style=_STYLES[finding.state])
            table.add_row(mark, finding.name, finding.value)
        console.print(table)
    advised = [finding for finding in found if finding.advice]
    console.print("what to change:" if advised else "nothing to change", style="bold")
    for finding in advised:
        console.print(f"- {finding.part}, {finding.name}: {finding.advice}")
