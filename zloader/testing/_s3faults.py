"""What goes wrong in the S3 simulator: the kinds of fault, and which requests they befall."""

from __future__ import annotations

import random
import re
import threading
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
    """One fault: what happens (`kind` and the fields it names), and to which requests.

    It befalls `count` requests (None: all), after leaving out the first `skip`, of those that have this `method`
    ("*": any), a path where the regular expression `match` is found, ask for `min_bytes` or more, and pass a
    throw of the dice with probability `p`.

    Errors: OptionError for an unknown kind or value.
    """

    kind: str
    match: str = ""
    method: str = "GET"
    p: float = 1.0
    count: int | None = None
    skip: int = 0
    min_bytes: int = 0
    status: int = 503  # status: answered instead of the object, with S3's error document...
    code: str = "SlowDown"
    message: str = "Please reduce your request rate."
    body: str | None = None  # ...or with this text, say a load balancer's
    after: int = 0  # reset, truncate, noclen, stall: bytes of the body sent before; reset: -1 is before the head
    seconds: float | None = None  # delay: before the head (default 1); stall: of silence, then the end (default 3600)
    at: int | None = None  # flip: offset in the body, by default its middle
    n: int = 1  # flip: bytes inverted
    bps: float = 1000  # slow: bytes a second
    by: int = 1  # short: bytes missing from an otherwise correct answer
    value: str = '"simulated"'  # etag: the ETag shown

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"no fault is of kind {self.kind!r}: it is one of {', '.join(KINDS)}")
        if not 0 <= self.p <= 1:
            raise OptionError(f"p={self.p!r} is no probability: give a number from 0 to 1")
        try:
            re.compile(self.match)
        except re.error as error:
            raise OptionError(f"match={self.match!r} is not a regular expression: {error}") from error


def parse_fault(fault: HttpFault | Mapping[str, Any]) -> HttpFault:
    """A fault as it is, or from its fields by name."""
    if isinstance(fault, HttpFault):
        return fault
    try:
        return HttpFault(**fault)
    except TypeError as error:
        known = ", ".join(HttpFault.__dataclass_fields__)
        raise OptionError(f"{dict(fault)!r} is no fault ({error}): the fields are {known}") from error


class FaultScript:
    """Faults with the count of what they have met; the first that applies is taken."""

    def __init__(self, faults: Iterable[HttpFault], rng: random.Random) -> None:
        self.faults = tuple(faults)
        self._rng = rng
        self._seen = [0] * len(self.faults)
        self._hits = [0] * len(self.faults)
        self._lock = threading.Lock()

    def pick(self, method: str, path: str, asked: str) -> HttpFault | None:
        """The fault that befalls this request; `asked` is its Range field, or empty."""
        if not self.faults:
            return None
        with self._lock:
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
