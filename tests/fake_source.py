"""A byte source over a directory, with scripted faults and random completion order."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zloader.common.errors import ReadError
from zloader.common.records import Span


@dataclass(kw_only=True)
class Fault:
    """A fault in reads of keys that match the regular expression `key`: the first `count` reads after `skip`.

    Kind `"error"` raises ReadError, and `"flip"` inverts the middle byte of the result.
    """

    kind: str
    key: str = ""
    skip: int = 0
    count: int = 1 << 60
    seen: int = 0

    def hits(self, span: Span) -> bool:
        """Counts a matching read, and returns whether the fault applies to it."""
        if not re.search(self.key, span.key):
            return False
        self.seen += 1
        return self.skip < self.seen <= self.skip + self.count


class FakeSource:
    """Reads files below `root`. `reads` lists every requested span, in request order.

    With a `seed`, each read lets a random number of other reads finish first, which shuffles the completion order.
    """

    retries = 0

    def __init__(self, root: Path, *, faults: Sequence[Fault] = (), seed: int | None = None) -> None:
        self.root = root
        self.faults = list(faults)
        self.reads: list[Span] = []
        self._random = None if seed is None else random.Random(seed)

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order, after any faults."""
        self.reads += spans
        return [await self._read(span) for span in spans]

    async def _read(self, span: Span) -> bytes:
        for _ in range(self._random.randrange(20) if self._random else 0):
            await asyncio.sleep(0)
        with (self.root / span.key).open("rb") as file:
            file.seek(span.start)
            stored = file.read(span.size)
        for fault in self.faults:
            if fault.hits(span):
                if fault.kind == "error":
                    raise ReadError(f"scripted fault: {span.key} bytes {span.start}-{span.stop - 1}")
                middle = len(stored) // 2
                stored = stored[:middle] + bytes([stored[middle] ^ 0xFF]) + stored[middle + 1 :]
        return stored
