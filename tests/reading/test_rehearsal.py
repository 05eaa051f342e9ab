"""An epoch loads no compiled loop that its Loader has not loaded when it was made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S, counts, write_store

# In a new process, because the loops of other tests are loaded already.
_CODE = """
import itertools, shutil
import zloader as zl
import zloader.dataset.matrices
from zloader.common import compiled
from zloader.order import permutation
from zloader.reading import loops
from zloader.storage import decode

def loaded():
    functions = [each for module in (permutation, loops, decode) for each in vars(module).values()]
    dispatchers = [each._dispatcher for each in functions if isinstance(each, compiled._Compiled)]
    return [sig for each in dispatchers if each is not None for sig in each.signatures]

zloader.dataset.matrices.FEW = 0  # NumPy does without loops for more values than these
for x, layout in itertools.product(["X", "layers/dense"], ["csr", "dense", "packed"]):
    counted = []
    for cache in (None, zl.Cache("cache")):
        dataset = zl.open_dataset("counts.zarr", cache=cache)
        loader = zl.Loader(dataset, x=x, layout=layout, framework="numpy", seed=2)
        counted.append(len(loaded()))
        assert sum(map(len, loader)) == 400
        counted.append(len(loaded()))
    print(*counted)
"""


@pytest.mark.slow
def test_an_epoch_needs_no_further_loops(tmp_path: Path) -> None:
    adata = counts(400, 3000)  # rows that are long enough to be read from the map of a mirror
    adata.layers["dense"] = adata.X.toarray()
    write_store(adata, tmp_path / "counts.zarr", tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", _CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, env=environment)
    assert not done.returncode, done.stderr
    rows = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert all(len(set(row)) == 1 for row in rows), rows
    assert rows[0][0] > 3, rows  # a Loader has loaded some
    assert rows[0][0] < rows[-1][0], rows  # and other forms need others
