"""Compiled loops where nothing can be kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

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
