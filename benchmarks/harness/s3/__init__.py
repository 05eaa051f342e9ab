"""An S3 simulator with configurable latency, bandwidth and faults, and a request log. Standard library only."""

from __future__ import annotations

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.server import Sim
from benchmarks.harness.s3.wire import Shaping

__all__ = ["HttpFault", "Shaping", "Sim"]
