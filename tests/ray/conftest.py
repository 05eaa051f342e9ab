"""A Ray cluster on loopback for the tests of zloader.ray."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import NEVER_S, PATIENCE_S

# Ray reads some of these when it is imported, and its processes inherit them.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on 127.0.0.1 only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The machine may be slow.
    "RAY_raylet_start_wait_time_s": str(int(PATIENCE_S)),
    "RAY_worker_register_timeout_seconds": str(int(PATIENCE_S)),
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(int(PATIENCE_S)),
    "RAY_worker_niceness": "0",  # as the tests beside it
}


MACHINE = {"num_cpus": 2, "object_store_memory": 100 << 20}
TESTS = [Path(__file__).parent, Path(__file__).parents[1]]  # whose modules Ray's processes may import


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Ray Train leaves a handler of SIGINT behind, which would end the process of the tests."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """One machine of two cores, which is processes on this one."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short, because it is part of the names of sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)  # Ray writes a token there
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, TESTS), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(int(NEVER_S)))
        running = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
        try:
            ray.init(address=running.address, log_to_driver=False)
            yield running
        finally:
            # Ray sometimes waits for ever for its thread that listens to the head node. Without the node, it ends.
            ends = threading.Timer(60, running.shutdown)
            ends.start()
            ray.shutdown()
            ends.cancel()
            ends.join()
            running.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def two_machines(cluster: Any) -> Any:
    """The cluster with another machine."""
    cluster.add_node(**MACHINE)
    return cluster
