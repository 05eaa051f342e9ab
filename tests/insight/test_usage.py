"""What this process and its machine use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zloader.common import machine
from zloader.insight import usage

pytestmark = pytest.mark.any_version


@pytest.mark.skipif(usage.processor_s() is None, reason="needs Linux, and all cores of the machine")
def test_cores_that_this_process_may_not_use_do_not_count_as_busy(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: machine.available_cores() + 1)
    assert usage.processor_s() is None


@pytest.mark.parametrize(
    ("name", "written", "limited"),
    [("cpu.max", "max 100000\n", False), ("cpu.max", "150000 100000\n", True),
     ("cpu/cpu.cfs_quota_us", "-1\n", False), ("cpu/cpu.cfs_quota_us", "50000\n", True)],
)  # fmt: skip
def test_nor_do_the_cores_outside_of_a_container(monkeypatch, tmp_path, name, written, limited):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    without = usage.processor_s()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(written)
    assert (usage.processor_s() is None) == (limited or without is None)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_the_processor_time_of_a_child_counts_whichever_thread_started_it():
    children = []
    thread = threading.Thread(
        target=lambda: children.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    )
    before_s, own_s = usage.cpu_s(), time.process_time()
    thread.start()
    thread.join()
    try:
        while usage.cpu_s() - before_s < time.process_time() - own_s + 0.1:
            time.sleep(0.05)
    finally:
        children[0].kill()
        children[0].wait()
    assert usage.cpu_s() - before_s >= time.process_time() - own_s + 0.1, "nor is it lost when the child ends"
