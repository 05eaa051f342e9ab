"""Imports point down the layers, and only some rooms may name the large libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import PATIENCE_S

import zloader

PACKAGE = Path(zloader.__file__).parent

# A package's rooms have its layer. The package itself ("zloader") is its face: it may import every room below the top.
TOP = 7
LAYERS = {
    "zloader.terms": 0,
    "zloader.errors": 0,
    "zloader.malloc": 0,
    "zloader.compiled": 0,
    "zloader.sharing": 0,
    "zloader.layout": 1,
    "zloader.metadata": 1,
    "zloader.permutation": 1,
    "zloader.sampling": 1,
    "zloader.draws": 1,
    "zloader.weighted": 1,
    "zloader.plan": 1,
    "zloader.resume": 1,
    "zloader.columns": 1,
    "zloader.expressions": 1,
    "zloader.views": 1,
    "zloader.splits": 1,
    "zloader.genes": 1,
    "zloader.blosc": 1,
    "zloader.decode": 1,
    "zloader.limits": 1,
    "zloader.gather": 1,
    "zloader.access": 2,
    "zloader.caching": 2,
    "zloader.store": 2,
    "zloader.mirror": 2,
    "zloader.bridge": 2,
    "zloader.workshop": 2,
    "zloader.reader": 2,
    "zloader.parts": 2,
    "zloader.fetch": 2,
    "zloader.opened": 3,
    "zloader.annotated": 3,
    "zloader.table": 3,
    "zloader.dataset": 3,
    "zloader.suggest": 3,
    "zloader.quality": 3,
    "zloader.epochs": 3,
    "zloader.ranks": 3,
    "zloader.minibatch": 3,
    "zloader.loader": 3,
    "zloader.cost": 3,
    "zloader.summary": 3,
    "zloader.warm": 3,
    "zloader.progress": 3,
    "zloader.sources": 3,
    "zloader.joining": 4,
    "zloader.writing": 5,
    "zloader.convert": 6,
    "zloader.append": 6,
    "zloader.checking": 6,
    "zloader.verify": 6,
    "zloader": 6,
    "zloader.commands": TOP,
    "zloader.cli": TOP,
}
MAY_NAME = {
    "tensorstore": {"zloader.store"},
    "torch": {
        "zloader.epochs",
        "zloader.ranks",
        "zloader.minibatch",
        "zloader.loader",
        "zloader.transforms",
        "zloader.commands.demo",
    },
    "anndata": {
        "zloader.opened",
        "zloader.table",
        "zloader.dataset",
        "zloader.convert",
        "zloader.sources.inputs",
        "zloader.sources.anndatas",
        "zloader.sources.nodes",
        "zloader.sources.tenx",
        "zloader.joining.content",
        "zloader.joining.genes",
        "zloader.joining.union",
        "zloader.joining.parts",
        "zloader.writing.elements",
        "zloader.writing.growth",
        "zloader.writing.fit",
        "zloader.checking.compare",
    },
}
# `zloader.testing` stands beside the layers: other people's tests use it, so it may need little.
TESTING_MAY_NAME = {*sys.stdlib_module_names, "s3fs", "botocore"}  # whose errors s3fs lets through
TESTING_LAYER = 2


def _module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
ROOMS = [name for name in FILES if not name.startswith("zloader.testing")]
TESTING = [name for name in FILES if name.startswith("zloader.testing")]


def _layer(name: str) -> int | None:
    """The layer of a room, or of the package it is in."""
    return LAYERS.get(name, LAYERS.get(name.rpartition(".")[0]) if name.count(".") > 1 else None)


def _imports(name: str) -> set[str]:
    """Every module that the file names in an import statement, anywhere in it; those of zloader in full."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: write imports in full"
            # `from zloader import gather` names a room, `from zloader.terms import Span` something in one.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & FILES.keys() or {str(node.module)}
    return found


def _own(name: str) -> set[str]:
    return {module for module in _imports(name) if module.split(".")[0] == "zloader"}


def _libraries(name: str) -> set[str]:
    return {module.split(".")[0] for module in _imports(name)} - {"zloader"}


def _all_below(name: str) -> set[str]:
    """The room and every room that it needs, directly or not."""
    found: set[str] = set()
    left = {name}
    while left:
        room = left.pop()
        found.add(room)
        left |= _own(room) - found
    return found


@pytest.mark.parametrize("name", ROOMS)
def test_imports_point_down(name):
    layer = _layer(name)
    assert layer is not None, f"{name} has no layer: give it one in this file"
    for module in _own(name):
        assert module in FILES, f"{name} imports {module}, which does not exist"
        if module.startswith("zloader.testing"):
            assert layer == TOP, f"{name} imports {module}: only the top layer starts servers"
        elif _layer(module) is not None:  # else its own test fails
            assert _layer(module) <= layer, f"{name} imports {module}, which lies above it"


def test_there_are_no_cycles():
    try:
        order = list(TopologicalSorter({name: _own(name) for name in FILES}).static_order())
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(error.args[1])}")
    assert set(order) == set(FILES)


@pytest.mark.parametrize("library", MAY_NAME)
def test_a_large_library_is_named_where_it_belongs(library):
    naming = {name for name in FILES if library in _libraries(name)}
    assert naming, f"nobody imports {library}: is this test looking in the right place?"
    assert naming <= MAY_NAME[library]


@pytest.mark.parametrize("name", TESTING)
def test_the_servers_for_tests_need_little(name):
    assert _libraries(name) <= TESTING_MAY_NAME
    for module in _own(name):
        assert module.startswith("zloader.testing") or _layer(module) <= TESTING_LAYER


def test_plan_to_minibatch_names_no_torch():
    needed = _all_below("zloader.fetch")
    assert {"zloader.plan", "zloader.gather", "zloader.reader", "zloader.mirror"} <= needed
    assert not needed & {"zloader", "zloader.loader", "zloader.dataset"}
    assert "torch" not in set().union(*map(_libraries, needed))


# `import zloader.fetch` would run the package's __init__, the face, which shows the Loader as well. So the package is
# put in place empty: then exactly the rooms that fetch needs are run, and whatever they import with them.
_WITHOUT_TORCH = """
import importlib.abc, sys, types

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, NoTorch())
package = types.ModuleType("zloader")
package.__path__ = [sys.argv[1]]
sys.modules["zloader"] = package
try:
    import torch
except ImportError:
    pass
else:
    sys.exit("the block does not work")
import zloader.fetch, zloader.store, zloader.plan
assert not any(name.split(".")[0] == "torch" for name in sys.modules)
print(*sorted(name for name in sys.modules if name.startswith("zloader.")))
"""


def test_plan_to_minibatch_runs_where_torch_is_not_installed():
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    needed = _all_below("zloader.fetch") | _all_below("zloader.store")
    packages = {name.rpartition(".")[0] for name in needed} - {"zloader"}
    assert set(done.stdout.split()) == needed | packages
