"""Compiled loops that are kept on disk, or cannot be, and what makes compiling slow."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

import zloader

_CODE = """
import logging
logging.basicConfig()
from numba.core import caching
caching.CacheImpl._locator_classes = []  # as if no directory could be written
from zloader.common.compiled import count_bits
from zloader.commands.doctor import about_compiled
import numpy as np
print(count_bits(np.uint64(7)), next(iter(about_compiled())).value)
"""


@pytest.mark.slow
def test_loops_are_compiled_anew_and_a_warning_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CODE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": "/proc/none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, env=environment)
    assert done.stdout == "3 compiled anew by every process\n", done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1


_INNER = """
from zloader.common.compiled import compiled

@compiled
def inner(x):
    return x + {added}
"""
_OUTER = """
from zloader.common.compiled import compiled
from zloader.selecting.inner import inner

@compiled
def outer(x):
    return 10 * inner(x)
"""
_CALL = "from zloader.reading.outer import outer; print(outer(1), sum(outer._compiled().stats.cache_hits.values()))"


def test_a_kept_loop_follows_the_loops_that_it_calls_in_other_files(tmp_path: Path) -> None:
    """numba itself compares a kept loop with its own file only, so an upgrade could go on answering as before."""
    package = tmp_path / "zloader"
    shutil.copytree(Path(zloader.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    (package / "reading" / "outer.py").write_text(_OUTER)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = str(tmp_path)

    def called(added: int, command: str = _CALL) -> str:
        (package / "selecting" / "inner.py").write_text(_INNER.format(added=added))
        done = subprocess.run(
            [sys.executable, "-B", "-c", command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [called(1), called(1), called(2), called(2)] == ["20 0\n", "20 1\n", "30 0\n", "30 1\n"]
    assert len([*(package / "reading" / "__pycache__").glob("zloader-loops-*")]) == 1, (
        "that of other sources is removed"
    )
    upgraded = f"from pathlib import Path; Path('zloader/selecting/inner.py').write_text({_INNER.format(added=4)!r})"
    while_running = _CALL.replace("; ", f"; {upgraded}; ", 1)
    assert [called(3, while_running), called(4)] == ["40 0\n", "50 0\n"], "a process keeps nothing as of newer sources"


def test_loops_take_constants_from_files_of_loops_only():
    """Others do not count for the digest under which compiled loops are kept."""
    root = Path(zloader.__file__).parents[1]
    files = {path: path.read_text() for path in (root / "zloader").rglob("*.py")}
    with_loops = {path for path, text in files.items() if "\n@compiled" in text}
    for path in with_loops:
        tree = ast.parse(files[path])
        origins = {
            alias.asname or alias.name: root / f"{node.module.replace('.', '/')}.py"
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zloader.")
            for alias in node.names
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(map(_compiles, function.decorator_list)):
                used = {node.id for each in function.body for node in ast.walk(each) if isinstance(node, ast.Name)}
                assert {origins[name] for name in used & origins.keys()} <= with_loops, f"{path}: {function.name}"


def test_no_loop_assigns_an_array_to_a_slice():
    assigning = []
    for path in Path(zloader.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(_compiles(each) for each in function.decorator_list):
                assigning += [f"{path}:{line}" for line in _assigned_slices(function)]
    assert not assigning, "numba compiles for seconds how the error for another length is worded: write a loop"


def test_assigned_slices_are_found():
    found = ast.parse("def f(a, b):\n a[1:] = 0\n a[1:] = b\n a[0, :] = b[:2]\n a[0] = b[0]\n a[:2] += b\n")
    assert _assigned_slices(found.body[0]) == [3, 4]


def _compiles(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("compiled")


def _assigned_slices(function: ast.AST) -> list[int]:
    """The lines that assign anything but a constant to a slice. Adding in place is compiled in another way."""
    lines = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
            for target in node.targets:
                index = target.slice if isinstance(target, ast.Subscript) else None
                if any(isinstance(each, ast.Slice) for each in getattr(index, "elts", [index])):
                    lines.append(node.lineno)
    return lines
