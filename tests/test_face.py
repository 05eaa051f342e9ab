"""The public names of the package, and the modules that are imported to show help."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import zloader as zl


def run(script, *arguments):
    """Runs a script in a new process. Returns its output, parsed as JSON."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_public_names_are_importable_and_listed():
    assert {*zl.__all__, "__version__"} <= set(dir(zl))
    for name in zl.__all__:
        found = getattr(zl, name)
        assert found.__name__ == name
        assert getattr(sys.modules[found.__module__], name) is found
        assert pickle.loads(pickle.dumps(found)) is found


@pytest.mark.parametrize("name", zl.__all__)
def test_every_public_name_has_an_example(name):
    """The tests of each folder run them."""
    assert ">>> " in getattr(zl, name).__doc__


def test_type_checkers_see_the_public_names():
    """The imports for type checkers, the lazy lookup and `__all__` have the same names and modules."""
    tree = ast.parse(Path(zl.__file__).read_text())
    (typing_only,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {alias.name: statement.module for statement in typing_only.body for alias in statement.names}
    assert seen == zl._MODULES
    assert sorted(zl.__all__) == sorted([*seen, "ZloaderError"])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zloader' has no attribute 'Lodaer'"):
        _ = zl.Lodaer
    with pytest.raises(ImportError, match="Lodaer"):
        from zloader import Lodaer  # noqa: F401


def test_public_names_differ_from_folder_names():
    """Importing a folder sets an attribute of the package, which would hide a function with the same name."""
    folders = {path.name for path in Path(zl.__file__).parent.iterdir() if path.is_dir()}
    assert not folders & {*zl.__all__}


_HELP = """
import contextlib, io, json, sys
before = set(sys.modules)
import zloader.commands.cli
from typer.main import get_command
command = get_command(zloader.commands.cli.app)
pages = [[], *([name] for name in command.commands), *(["cache", name] for name in command.commands["cache"].commands)]
shown = io.StringIO()
for names in pages:
    with contextlib.redirect_stdout(shown):
        command([*names, "--help"], prog_name="zloader", standalone_mode=False)
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "pages": len(pages),
    "usages": shown.getvalue().count("Usage: "),
    "roots": sorted(root for root in roots - sys.stdlib_module_names if not root.startswith("_sysconfigdata")),
    "zloader": sorted(name for name in sys.modules if name.startswith("zloader.")),
}))
"""
# typer, rich and their (optional) dependencies.
LIGHT = {"annotated_doc", "annotated_types", "attr", "click", "colorama", "markdown_it", "mdurl", "pydantic",
         "pydantic_core", "pygments", "rich", "shellingham", "typer", "typing_extensions", "typing_inspection",
         "zloader"}  # fmt: skip


def test_help_imports_only_small_packages():
    """For every command. Importing numpy alone would take longer than showing the help."""
    seen = run(_HELP)
    assert seen["pages"] > 10
    assert seen["usages"] == seen["pages"]
    assert set(seen["roots"]) <= LIGHT
    own = {name for name in seen["zloader"] if not name.startswith("zloader.commands")}
    assert own == {"zloader.common", "zloader.common.errors"}


def test_importing_zloader_imports_only_small_packages():
    loaded = run("import json, sys, zloader; print(json.dumps(sorted(sys.modules)))")
    assert not {"anndata", "dask", "numba", "numpy", "pandas", "tensorstore", "torch", "zarr"} & set(loaded)
