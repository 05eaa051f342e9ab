"""Libraries that are imported when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S, counts, write_store

_EPOCH = """
import sys
import zloader as zl
for cache in (None, "cache", "cache"):
    dataset = zl.open_dataset("counts.zarr", cache=cache)
    loader = zl.Loader(dataset, obs=["cell_type", "lane", "n_counts"], layout="dense", framework="numpy")
    assert sum(map(len, loader)) == 60
    print(*({"pandas", "rich", "anndata", "torch", "numba", "llvmlite", "scipy"} & sys.modules.keys()))
print(list(loader.labels["cell_type"]), "pandas" in sys.modules)
"""

_FORK = """
import os, sys, threading
from pathlib import Path
from zloader.common.deferred import Deferred
Path("slow.py").write_text("import __main__, time; __main__.begun.set(); time.sleep(0.5); found = 1")
sys.path.insert(0, ".")
begun, slow = threading.Event(), Deferred("slow")
thread = threading.Thread(target=lambda: slow.found)
thread.start()
begun.wait()
child = os.fork()
if not child:
    os._exit(slow.found + 6)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""


def run(code: str, folder: Path) -> list[str]:
    """The lines that a new process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_epoch_of_codes_and_numbers_imports_neither_pandas_nor_numba(tmp_path: Path) -> None:
    adata = counts(60, 20)
    write_store(adata, tmp_path / "counts.zarr", tmp_path)
    labels = list(adata.obs["cell_type"].cat.categories)
    assert run(_EPOCH, tmp_path) == ["", "", "", f"{labels} True"]


def test_a_process_forked_during_an_import_can_import_the_module(tmp_path: Path) -> None:
    assert run(_FORK, tmp_path) == ["7"]  # without the lock, the child waits forever
