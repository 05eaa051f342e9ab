"""What left zloader is named with what to do instead: names, options and commands."""

from __future__ import annotations

import importlib
import re

import pytest
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import KeywordError
from zloader.common.removed import _ADVICE

NAMES = {name: advice for name, advice in _ADVICE.items() if re.fullmatch(r"[\w.]+", name)}
OPTIONS = {name: advice for name, advice in _ADVICE.items() if name.endswith("=)")}
COMMANDS = {name: advice for name, advice in _ADVICE.items() if " " in name}


def test_every_entry_is_tried():
    assert {*NAMES, *OPTIONS, *COMMANDS} == {*_ADVICE}


@pytest.mark.parametrize("full_name", NAMES)
def test_a_name_that_left_is_named_with_what_to_do_instead(full_name):
    module, _, name = full_name.rpartition(".")
    if module == "zloader.ray":
        pytest.importorskip("ray")
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: {NAMES[full_name]}")):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("full_name", OPTIONS)
def test_an_option_that_left_is_named_with_what_to_do_instead(full_name):
    function, option = full_name.removesuffix("=)").split("(")
    owner = zl
    for name in function.split("."):
        owner = getattr(owner, name)
    with pytest.raises(KeywordError, match=re.escape(f"{function} has no option {option!r}: {OPTIONS[full_name]}")):
        owner(**{option: 1})


@pytest.mark.parametrize("full_name", COMMANDS)
def test_a_command_that_left_is_named_with_what_to_do_instead(full_name):
    shown = CliRunner().invoke(app, full_name.split()[1:], env={"COLUMNS": "300"})
    assert shown.exit_code == 2
    text = " ".join(re.sub("[│\n]", " ", shown.output).split())
    advice = COMMANDS[full_name]
    assert f"No such command '{full_name.split()[1]}'." in text
    assert advice[1:] in text


@pytest.mark.parametrize("page", sorted({*re.findall(r"docs/\S+\.md", " ".join(_ADVICE.values()))}))
def test_the_pages_exist(page, pytestconfig):
    assert (pytestconfig.rootpath / page).is_file()
