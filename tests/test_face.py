"""The public names of the package, whatever was imported first, and what is imported to show help."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import zloader as zl

# Public functions that are named as the module that they are in.
NAMESAKES = ("append", "convert", "quality", "suggest", "verify", "warm")


def run(script, *arguments):
    """What a script prints in a process of its own, as JSON."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_public_name_is_found_and_listed():
    assert {*zl.__all__, "__version__"} <= set(dir(zl))
    for name in zl.__all__:
        found = getattr(zl, name)
        assert found.__name__ == name
        assert getattr(sys.modules[found.__module__], name) is found
        assert pickle.loads(pickle.dumps(found)) is found


def test_type_checkers_see_the_names_that_are_found():
    """The same names of the same modules are imported for type checkers, looked up when used, and listed."""
    tree = ast.parse(Path(zl.__file__).read_text())
    (typing_only,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {alias.name: statement.module for statement in typing_only.body for alias in statement.names}
    assert seen == zl._MODULES
    assert sorted(zl.__all__) == sorted([*seen, "ZloaderError"])


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zloader' has no attribute 'Lodaer'"):
        _ = zl.Lodaer
    with pytest.raises(ImportError, match="Lodaer"):
        from zloader import Lodaer  # noqa: F401


ORDERS = {
    "the package": "import zloader",
    "a name": "from zloader import convert",
    "the module": "import zloader.convert",
    "the module under another name": "import zloader.convert as other; assert inspect.isfunction(other)",
    "another name of the module": "from zloader.convert import ConversionReport",
    "every module": "for name in NAMESAKES: importlib.import_module(f'zloader.{name}')",
    "a module, then the name, then the module": (
        "import zloader.quality; from zloader import quality; import zloader.quality, zloader.convert"
    ),
    "a function that is unpickled": "assert inspect.isfunction(pickle.loads(b'czloader.convert\\nconvert\\n.'))",
    "a module that is loaded again": "import zloader.warm; importlib.reload(sys.modules['zloader.warm'])",
    "the package loaded again": "import zloader.warm; importlib.reload(zloader)",
    "threads": """
import threading
import zloader
together = threading.Barrier(8)
found = []
def use(first):
    together.wait()
    for name in NAMESAKES[first:] + NAMESAKES[:first]:
        found.append(inspect.isfunction(getattr(zloader, name)))
        importlib.import_module(f"zloader.{name}")
threads = [threading.Thread(target=use, args=(number % len(NAMESAKES),)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [True] * 8 * len(NAMESAKES), found
""",
}

_EACH_ANEW = """
import importlib, inspect, json, pickle, sys, traceback
orders, NAMESAKES = json.loads(sys.argv[1]), tuple(json.loads(sys.argv[2]))
failed = {}
for order, statements in orders.items():
    for name in [name for name in sys.modules if name.split(".")[0] == "zloader"]:
        del sys.modules[name]
    try:
        exec(statements, globals())
        import zloader as zl
        for name in NAMESAKES:
            function = getattr(zl, name)
            assert inspect.isfunction(function), (name, function)
            assert function is getattr(importlib.import_module(f"zloader.{name}"), name)
            assert getattr(zl, name) is function
    except Exception:
        failed[order] = traceback.format_exc()
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failed_orders():
    """One process for all: it forgets zloader's modules before each."""
    return run(_EACH_ANEW, json.dumps(ORDERS), json.dumps(NAMESAKES))


@pytest.mark.parametrize("order", ORDERS)
def test_functions_are_no_modules_whatever_is_imported_first(order, failed_orders):
    assert order not in failed_orders, failed_orders[order]


_HELP = """
import contextlib, io, json, sys
before = set(sys.modules)
import zloader.cli
from typer.main import get_command
command = get_command(zloader.cli.app)
asked = [[], *([name] for name in command.commands), *(["cache", name] for name in command.commands["cache"].commands)]
shown = io.StringIO()
for names in asked:
    with contextlib.redirect_stdout(shown):
        command([*names, "--help"], prog_name="zloader", standalone_mode=False)
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "pages": len(asked),
    "usages": shown.getvalue().count("Usage: "),
    "roots": sorted(root for root in roots - sys.stdlib_module_names if not root.startswith("_sysconfigdata")),
    "zloader": sorted(name for name in sys.modules if name.startswith("zloader.")),
}))
"""
# typer and rich, and what they import where it is installed.
LIGHT = {"annotated_doc", "annotated_types", "attr", "click", "colorama", "markdown_it", "mdurl", "pydantic",
         "pydantic_core", "pygments", "rich", "shellingham", "typer", "typing_extensions", "typing_inspection",
         "zloader"}  # fmt: skip


def test_help_imports_nothing_large():
    """Of the command and of every command: numpy alone would take longer than all of it."""
    seen = run(_HELP)
    assert seen["pages"] > 10
    assert seen["usages"] == seen["pages"]
    assert set(seen["roots"]) <= LIGHT
    own = {name for name in seen["zloader"] if not name.startswith("zloader.commands")}
    assert own == {"zloader.cli", "zloader.errors"}


def test_importing_the_package_imports_nothing_large():
    loaded = run("import json, sys, zloader; print(json.dumps(sorted(sys.modules)))")
    assert not {"anndata", "dask", "numba", "numpy", "pandas", "tensorstore", "torch", "zarr"} & set(loaded)
