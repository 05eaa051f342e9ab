"""An S3 simulator with configurable latency, bandwidth and faults, and a request log."""

from __future__ import annotations

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.server import Shaping
from benchmarks.harness.s3.sim import Sim

__all__ = ["HttpFault", "Shaping", "Sim"]
