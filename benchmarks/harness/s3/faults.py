"""Faults of the S3 simulator: their kinds, and the requests they apply to."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zloader.common.errors import OptionError

KINDS = (
    "status",
    "reset",
    "truncate",
    "noclen",
    "stall",
    "flip",
    "slow",
    "delay",
    "ignore_range",
    "short",
    "etag",
)
_WHOLE_OBJECT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class HttpFault:
    """One fault: `kind`, the fields of that kind, and the requests it applies to.

    A request qualifies if it has this `method` ("*": any), its path contains a match of the regular expression
    `match`, it asks for `min_bytes` or more, and a random draw succeeds with probability `p`. The first `skip` matching
    requests are left out, and the fault applies to at most `count` requests (None: no limit).

    Raises OptionError for an unknown kind or an invalid value.
    """

    kind: str
    match: str = ""
    method: str = "GET"
    p: float = 1.0
    count: int | None = None
    skip: int = 0
    min_bytes: int = 0
    status: int = 503  # status: the response instead of the object, with S3's error document...
    code: str = "SlowDown"
    message: str = "Please reduce your request rate."
    body: str | None = None  # ...or with this text, for example a load balancer's
    after: int = 0  # reset, truncate, noclen, stall: body bytes sent first; reset: -1 means before the head
    seconds: float | None = None  # delay: before the head (default 1); stall: silence before closing (default 3600)
    at: int | None = None  # flip: offset in the body, by default its middle
    n: int = 1  # flip: bytes to invert
    bps: float = 1000  # slow: bytes per second
    by: int = 1  # short: bytes missing from an otherwise correct response
    value: str = '"simulated"'  # etag: the ETag to send

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"unknown kind of fault {self.kind!r}: choose one of {', '.join(KINDS)}")
        if not 0 <= self.p <= 1:
            raise OptionError(f"p={self.p!r} is not a probability: give a number from 0 to 1")
        try:
            re.compile(self.match)
        except re.error as error:
            raise OptionError(f"match={self.match!r} is not a regular expression: {error}") from error


def parse_fault(fault: HttpFault | Mapping[str, Any]) -> HttpFault:
    """Returns an HttpFault unchanged, or makes one from a mapping of its fields."""
    if isinstance(fault, HttpFault):
        return fault
    try:
        return HttpFault(**fault)
    except TypeError as error:
        known = ", ".join(HttpFault.__dataclass_fields__)
        raise OptionError(f"{dict(fault)!r} is not a valid fault ({error}): its fields can be {known}") from error


class FaultScript:
    """Picks the first fault that applies to a request, and counts the requests of each fault."""

    def __init__(self, faults: Iterable[HttpFault], rng: random.Random) -> None:
        self.faults = tuple(faults)
        self._rng = rng
        self._seen = [0] * len(self.faults)
        self._hits = [0] * len(self.faults)

    def pick(self, method: str, path: str, asked: str) -> HttpFault | None:
        """The fault that applies to this request, or None. `asked` is its Range header, or empty."""
        if not self.faults:
            return None
        for i, fault in enumerate(self.faults):
            if self._applies(i, method, path, _asked_bytes(asked)):
                self._hits[i] += 1
                return fault
        return None

    def _applies(self, i: int, method: str, path: str, asked_bytes: int) -> bool:
        fault = self.faults[i]
        if fault.method not in (method, "*") or asked_bytes < fault.min_bytes or not re.search(fault.match, path):
            return False
        self._seen[i] += 1
        spent = fault.count is not None and self._hits[i] >= fault.count
        return self._seen[i] > fault.skip and not spent and self._rng.random() < fault.p


def _asked_bytes(asked: str) -> int:
    match = re.match(r"bytes=(\d*)-(\d+)$", asked)
    if not match:
        return _WHOLE_OBJECT
    first, last = match.groups()
    return int(last) - int(first) + 1 if first else int(last)
