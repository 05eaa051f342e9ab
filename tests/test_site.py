"""The pages of the site say what the code does: messages, names, commands, extras, pictures, a tutorial."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers import counts

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.output import unbroken
from zloader.common import errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
PAGES = sorted(DOCS.rglob("*.md"))


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of docs/, which is no package."""
    monkeypatch.syspath_prepend(path.parent)
    return importlib.import_module(path.stem)


def drawn(svg: str) -> tuple[list[str], int]:
    """The texts of a picture of matplotlib, and the number of its shapes."""
    return re.findall(r"<!-- (.*?) -->", svg), len(re.findall(r"<(?:path|use)\b", svg))


@pytest.mark.every(3)
@pytest.mark.any_version
@pytest.mark.parametrize("name", [path.stem for path in sorted(PICTURES.glob("*.svg"))])
def test_a_picture_is_the_one_that_its_script_draws(name, monkeypatch, tmp_path):
    style = imported(PICTURES / "style.py", monkeypatch)
    written = style.write(imported(PICTURES / f"{name}.py", monkeypatch).draw(), name, tmp_path)
    texts, shapes = drawn(written.read_text())
    assert len(texts) > 3
    assert (texts, shapes) == drawn((PICTURES / f"{name}.svg").read_text())
    assert any(f"pictures/{name}.svg" in page.read_text() for page in PAGES)


def test_every_script_has_its_picture():
    scripts = {path.stem for path in PICTURES.glob("*.py")} - {"style"}
    assert {path.stem for path in PICTURES.glob("*.svg")} == scripts


def texts_of_the_source() -> list[str]:
    """All strings of zloader, with … for the values in them."""
    found = []
    for path in (ROOT / "zloader").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found.append(re.sub(r"%[sd]|%\.\df|\{\}", "…", node.value))
    return found


@pytest.mark.slow
def test_the_messages_of_troubleshooting_are_those_of_the_source():
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) > 30
    texts = texts_of_the_source()
    for message in quoted:
        parts = [part.strip() for part in message.split("…")]
        assert any(in_turn(parts, text) for text in texts), f"zloader has no message {message!r}"


def in_turn(parts: list[str], text: str) -> bool:
    """Whether the text has these parts one after another."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def listed_in(path: Path) -> list[str]:
    """The names in `__all__` of a module, which is not imported, because its package may be missing."""
    (names,) = re.findall(r"^__all__ = (\[.*?\])", path.read_text(), re.DOTALL | re.MULTILINE)
    return list(ast.literal_eval(names))


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    documented = re.findall(r"^\.\. auto(?:class|function|exception):: (\S+)$", pages, re.MULTILINE)
    package = ROOT / "zloader"
    public = [f"zloader.{name}" for name in zl.__all__]
    for folder in ("transforms", "tokenizers", "ray", "testing"):
        public += [f"zloader.{folder}.{name}" for name in listed_in(package / folder / "__init__.py")]
    for module in (package / "integrations").glob("*.py"):
        if "\n__all__ = " in module.read_text():
            public += [f"zloader.integrations.{module.stem}.{name}" for name in listed_in(module)]
    assert sorted(documented) == sorted(public)


def test_names_of_zl_exist():
    for path in {path for page in PAGES for path in re.findall(r"\bzl((?:\.\w+)+)", page.read_text())}:
        found: Any = zl
        for name in path.split(".")[1:]:
            if found is zl:
                assert name in {*zl.__all__, *zl._FOLDERS}, f"zl{path}"
            found = getattr(found, name)


def test_the_reference_of_commands_has_every_flag(monkeypatch):
    text = imported(DOCS / "extensions" / "cli_reference.py", monkeypatch).reference()
    program = typer.main.get_command(app)
    pending = [(f"zloader {name}", command) for name, command in program.commands.items()]
    while pending:
        name, command = pending.pop()
        pending += [(f"{name} {inner}", each) for inner, each in getattr(command, "commands", {}).items()]
        (section,) = re.findall(rf"^## {name}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        assert command.help.split("\n")[0] in section
        for flag in [flag for each in command.params for flag in each.opts if flag.startswith("--")]:
            assert f"`{flag}" in section or f" {flag}" in section, f"{name} {flag}"


def test_errors_of_the_pages_exist():
    for page in PAGES:
        named = set(re.findall(r"`(\w+Error)`", page.read_text()))
        assert named <= {*dir(errors), *dir(builtins)}, page.name


def test_the_extras_are_those_of_the_package():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(extras)


@pytest.mark.slow
@pytest.mark.any_version
def test_a_training_on_two_ranks_resumes_after_an_interruption(interpreter, tmp_path, monkeypatch):
    adata = counts(150, 40)
    adata.obs["cell_type"] = ["T", "B", "NK"] * 50
    zl.convert(adata, tmp_path / "pbmc.zarr", progress=False)
    page = (DOCS / "tutorials" / "several_gpus.md").read_text()
    script = re.search(r"<!-- train -->\n```py\n(.*?)```", page, re.DOTALL)[1]
    start = 'dist.init_process_group("nccl" if gpu else "gloo"'
    assert start in script

    def run(name: str, *arguments: str) -> tuple[list[int], list[str]]:
        """The exit status of both ranks, and the lines that they printed. They meet at a file instead of a port."""
        meeting = f'init_method="file://{tmp_path / name}", rank=int(os.environ["RANK"]), world_size=2'
        ranks = []
        for rank in range(2):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
            code = script.replace(start, f"{start}, {meeting}")
            ranks.append(interpreter.running(code, *arguments, **environment))
        with ranks[0] as first, ranks[1] as second:
            (out, err), (other, _) = first.communicate(), second.communicate()
            return [first.wait(), second.wait()], [*out.splitlines(), *other.splitlines(), *(err.splitlines()[-1:])]

    monkeypatch.chdir(tmp_path)
    ended, whole = run("whole")
    assert (ended, len(whole)) == ([0, 0], 3), whole
    Path("checkpoint.pt").unlink()
    ended, lines = run("stopped", "--stop-after", "6")
    assert 0 not in ended
    assert lines[0] == whole[0]
    assert run("resumed") == ([0, 0], whole)


def test_no_two_pages_have_the_same_title():
    pages = [*PAGES, *(ROOT / "benchmarks").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    titles = [re.search(r"^# (.*)$", page.read_text(), re.MULTILINE)[1] for page in pages]
    titles += [
        re.search(r"^# (.*)$", "".join(json.loads(path.read_text())["cells"][0]["source"]), re.MULTILINE)[1]
        for path in (ROOT / "notebooks").glob("*.ipynb")
    ]
    assert len(titles) > 40
    assert sorted(titles) == sorted(set(titles))


def test_numbers_of_the_generated_figures_do_not_break():
    for page in (DOCS / "benchmarks.md", ROOT / "README.md"):
        rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
        assert any("\N{NO-BREAK SPACE}" in row for row in rows)
        assert [row for row in rows if unbroken(row) != row] == []
