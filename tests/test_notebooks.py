"""The notebooks run, use public names only, and are committed with small outputs."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from helpers import PATIENCE_S
from nbclient import NotebookClient

import zloader as zl
import zloader.testing

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MAX_BYTES = 400_000


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def public_names(module: str) -> set[str]:
    """The names in a module's `__all__`. An integration is not imported, because it may lack its package."""
    if module == "zloader.testing":
        return {*zloader.testing.__all__}
    assert module.startswith("zloader.integrations.")
    source = Path(zl.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    (listed,) = re.findall(r"^__all__ = (\[.*?\])", source, re.DOTALL | re.MULTILINE)
    return {*ast.literal_eval(listed)}


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code_of(notebook) for output in cell.outputs)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def committed(path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


def test_outputs_are_committed_and_small(path, committed):
    assert path.stat().st_size < MAX_BYTES
    code = code_of(committed)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {(output.output_type, output.get("name")) for cell in code for output in cell.outputs}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    assert pictures(committed) >= 2


def test_public_names_only(committed):
    for cell in code_of(committed):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                assert {name.name for name in node.names if name.name.startswith("zloader")} <= {"zloader"}
            if isinstance(node, ast.ImportFrom) and node.module.startswith("zloader"):
                public = public_names(node.module)
                assert {name.name for name in node.names} <= public
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zl":
                assert node.attr in {*zl.__all__, *zl._FOLDERS}
            if isinstance(node, ast.Attribute):
                assert node.attr == "__init__" or not node.attr.startswith("_")


def test_links_lead_somewhere(path, committed):
    for cell in committed.cells:
        if cell.cell_type == "markdown":
            for part in cell.source.split("](")[1:]:
                target = part.split(")")[0]
                assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.slow
def test_it_runs(committed, tmp_path):
    """In a process of its own, in an empty directory. A cell that raises fails the test with its traceback."""
    for cell in code_of(committed):
        for package in re.findall(r"^import (scvi)$", cell.source, re.MULTILINE):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f'{package} is not installed: pip install "zloader[{package}]"')
    before = pictures(committed)
    client = NotebookClient(
        committed, timeout=3 * PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert pictures(committed) == before
