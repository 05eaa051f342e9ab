"""Imports point to lower floors, and only some modules may import the large libraries."""

from __future__ import annotations

import ast
import functools
import math
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import PATIENCE_S

import zloader

PACKAGE = Path(zloader.__file__).parent

# Every folder is a stage of the pipeline. It may import from itself and from folders on lower floors.
FLOORS = {
    "commands": 8,
    "integrations": 8,
    "ray": 8,
    "conversion": 7,
    "insight": 7,
    "training": 7,
    "dataset": 6,
    "reading": 5,
    "caching": 4,
    "transforms": 4,
    "tokenizers": 4,
    "access": 3,
    "order": 3,
    "storage": 2,
    "selecting": 2,
    "testing": 2,
    "common": 1,
}
MAY_IMPORT = {
    "tensorstore": {"zloader.reading.tensorstore_reader"},
    "torch": {
        "zloader.order.epochs",
        "zloader.training.device",
        "zloader.training.minibatch",
        "zloader.training.arrays",
        "zloader.training.loader",
        "zloader.training.tensors",
        "zloader.ray.streams",
        "zloader.commands.demo_run",
        "zloader.commands.doctor",
        "zloader.integrations.lightning",
        "zloader.integrations.scvi",
    },
    "lightning": {"zloader.integrations.lightning"},
    "ray": {
        "zloader.ray",
        "zloader.ray.sent",
        "zloader.ray.streams",
    },
    "anndata": {
        "zloader.dataset.elements",
        "zloader.dataset.table",
        "zloader.conversion.chosen",
        "zloader.conversion.columns",
        "zloader.conversion.comparison",
        "zloader.conversion.contents",
        "zloader.conversion.elements",
        "zloader.conversion.memory",
        "zloader.conversion.nodes",
        "zloader.conversion.opening",
    },
}
# `zloader.testing` is also for the tests of other projects, so it has few dependencies.
TESTING_MAY_IMPORT = {*sys.stdlib_module_names, "s3fs", "botocore"}  # s3fs raises botocore's errors


def _module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
TESTING = [name for name in FILES if name.startswith("zloader.testing")]


def _floor(name: str) -> float:
    """The floor of a module's folder. The package itself is above all floors, because it exports from every folder."""
    return FLOORS[name.split(".")[1]] if name not in ("zloader", "zloader.__main__") else math.inf


@functools.cache
def _nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(FILES[name].read_text())))


@functools.cache
def _imports(name: str) -> set[str]:
    """The modules in all import statements of the file, with full names for those of zloader."""
    found = set()
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: use absolute imports"
            # `from zloader.reading import gather` names a module, `from zloader.common.records import Span` a member.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & FILES.keys() or {str(node.module)}
    return found


def _own(name: str) -> set[str]:
    return {module for module in _imports(name) if module.split(".")[0] == "zloader"}


def _libraries(name: str) -> set[str]:
    return {module.split(".")[0] for module in _imports(name)} - {"zloader"}


def _dependencies(name: str) -> set[str]:
    """The module and every module that it imports, directly or indirectly, with the packages that contain them."""
    found: set[str] = set()
    left = {name}
    while left:
        module = left.pop()
        found.add(module)
        package = module.rpartition(".")[0]
        left |= (_own(module) | ({package} - {"zloader", ""})) - found
    return found


@pytest.mark.slow
def test_imports_point_down():
    for name, module in ((each, module) for each in FILES for module in _own(each)):
        assert module in FILES, f"{name} imports {module}, which does not exist"
        if module.split(".")[1:2] != name.split(".")[1:2]:
            assert _floor(module) < _floor(name), f"{name} imports {module}, which is not on a lower floor"


def test_every_folder_has_a_floor():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == FLOORS.keys()
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_nothing_has_a_destructor():
    """A `__del__` may find its module without names when the interpreter ends. A weakref.finalize does not run then."""
    assert [name for name in FILES for each in _nodes(name) if getattr(each, "name", "") == "__del__"] == []


def test_there_are_no_cycles():
    try:
        order = list(TopologicalSorter({name: _own(name) for name in FILES}).static_order())
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(error.args[1])}")
    assert set(order) == set(FILES)


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_large_libraries_are_imported_only_where_allowed(library):
    naming = {name for name in FILES if library in _libraries(name)}
    assert naming, f"no module imports {library}: does this test look in the right directory?"
    assert naming <= MAY_IMPORT[library]


def test_zloader_testing_has_few_dependencies():
    for name in TESTING:
        assert _libraries(name) <= TESTING_MAY_IMPORT, name


def test_plan_to_minibatch_does_not_import_torch():
    needed = _dependencies("zloader.order.plan") | _dependencies("zloader.reading.fetch")
    steps = ("zloader.order.plan", "zloader.reading.chunks", "zloader.caching.rows_file", "zloader.reading.gather")
    assert {*steps} <= needed
    assert not needed & {"zloader", "zloader.training.loader", "zloader.dataset.dataset"}
    assert "torch" not in set().union(*map(_libraries, needed))


# `import zloader.reading.fetch` would run `zloader/__init__.py`, which exports the Loader. So the script installs an
# empty package instead. Then only the modules that fetch needs run, and their imports.
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
import zloader.reading.fetch, zloader.reading.object_source, zloader.reading.tensorstore_reader, zloader.order.plan
import zloader.access.location
assert not any(name.split(".")[0] == "torch" for name in sys.modules)
print(*sorted(name for name in sys.modules if name.startswith("zloader.")))
"""


@pytest.mark.slow
def test_plan_to_minibatch_runs_where_torch_is_not_installed():
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    starts = ("zloader.order.plan", "zloader.reading.fetch", "zloader.reading.object_source")
    needed = set().union(*map(_dependencies, starts))
    assert set(done.stdout.split()) == needed
