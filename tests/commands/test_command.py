"""Commands whose flags are the fields of a dataclass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from zloader.commands.command import takes_flags

pytestmark = pytest.mark.any_version
Depth = Annotated[int, typer.Option(min=1, help="How deep.")]


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Depth = 2


@dataclass(frozen=True, kw_only=True)
class Flags:
    names: Annotated[list[str], typer.Argument(metavar="NAME")]
    path: Annotated[str | None, typer.Option("--path", metavar="PATH")] = None
    inner: Inner = Inner()
    as_json: Annotated[bool, typer.Option("--json")] = False


@dataclass(frozen=True, kw_only=True)
class Twice:
    depth: Depth = 1
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["a"], Flags(names=["a"])),
        (["a", "b", "--json"], Flags(names=["a", "b"], as_json=True)),
        (["a", "--depth", "3", "--path", "p"], Flags(names=["a"], path="p", inner=Inner(depth=3))),
        (["a", "--debug"], Flags(names=["a"])),
        ([], "Missing argument 'NAME'"),
        (["a", "--depth", "0"], "Invalid value for '--depth'"),
        (["a", "--inner", "3"], "No such option: --inner"),
    ],
)
def test_the_fields_of_a_dataclass_are_the_flags_of_a_command(monkeypatch, words, given):
    monkeypatch.setenv("ZLOADER_DEBUG", "")
    monkeypatch.setenv("TERM", "dumb")
    seen = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes_flags
    def command(flags: Flags) -> None:
        """Shows its flags."""
        seen.append(flags)

    done = CliRunner().invoke(app, words)
    if isinstance(given, str):
        assert done.exit_code == 2
        assert given in done.output
    else:
        assert seen == [given]
        assert done.exit_code == 0


def test_a_command_keeps_its_name_and_help_and_the_order_of_its_flags():
    def shown(flags: Flags) -> None:
        """Shows its flags."""

    command = takes_flags(shown)
    assert (command.__name__, command.__doc__) == ("shown", "Shows its flags.")
    assert list(inspect.signature(command).parameters) == ["names", "path", "depth", "as_json", "debug"]


def test_two_flags_of_one_name_are_refused():
    def shown(flags: Twice) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'depth'"):
        takes_flags(shown)
