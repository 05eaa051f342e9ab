"""Compiled loops where nothing can be kept on disk, and what makes compiling slow."""

from __future__ import annotations

import ast
import os
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
from zloader.insight.machine_state import about_compiled
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
