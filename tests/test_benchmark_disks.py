"""benchmarks/harness/cgroups.py, and the sums of questions/larger.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from benchmarks.harness.cgroups import cgroup
from benchmarks.questions import larger

pytestmark = pytest.mark.any_version

GROWS = "import sys; sys.stdin.readline(); held = bytearray(int(sys.argv[1])); print(len(held))"


@pytest.mark.parametrize(("n_bytes", "killed"), [(1 << 20, False), (512 << 20, True)])
def test_a_process_in_a_group_gets_no_more_memory_than_its_limit(n_bytes, killed):
    try:
        with cgroup() as group:
            group.limit(128 << 20)
            command = [sys.executable, "-S", "-c", GROWS, str(n_bytes)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                group.add(process.pid)
                answer, _ = process.communicate(b"go\n")
    except OSError as error:
        pytest.skip(f"there are no memory cgroups: {error}")
    assert (process.returncode != 0, answer) == (killed, b"" if killed else b"%d\n" % n_bytes)
    assert not group.directory.exists()


def test_a_group_is_removed_while_its_process_lives_on():
    try:
        with subprocess.Popen(["sleep", "60"]) as process, contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            with cgroup() as group:
                group.add(process.pid)
            assert process.poll() is None
    except OSError as error:
        pytest.skip(f"there are no memory cgroups: {error}")
    assert not group.directory.exists()


def test_bytes_are_those_of_a_cell_and_the_disk_is_that_of_the_turn():
    run = {"device_bytes": 3e6, "seconds": 2.0, "rows": 1000, "user_s": 1.0, "system_s": 0.5, "first_minibatch_s": 0.1}
    run |= {"peak_bytes": 2e6, "workers_bytes": 1e6, "disk": 6.0}
    assert larger.shown(run) == {
        "read": 1.5, "share": 0.25, "bytes": 3000.0, "cpu": 150.0, "peak": 3.0, "first": 0.1,
    }  # fmt: skip
    assert larger.line("x", [run]) == ["x", "500", "(500 to 500)", "2", "0.25", "3.0", "150.00", "3", "0.1"]
