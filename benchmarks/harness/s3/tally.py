"""The S3 simulator's counters and request log."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TypedDict

_LOG_ENTRIES = 10_000


class LogEntry(TypedDict):
    """One request. Fields that are None or 0 at first are filled in while it is answered."""

    t: float  # time.time() of its arrival
    method: str
    path: str  # with the query, as sent
    range: str | None
    status: int | None
    bytes: int  # of the response body, sent so far
    fault: str | None  # the kind of fault
    seconds: float | None


class Tally:
    """Counters, and a log of the last 10,000 requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self.clear()

    def clear(self) -> None:
        """Resets the counters and the log. Requests in progress stay active."""
        with self._changed:
            self._counts: Counter[str] = Counter(requests=0, bytes_out=0)
            self._log: deque[LogEntry] = deque(maxlen=_LOG_ENTRIES)
            self._peak = self._active

    def count(self, name: str) -> None:
        """Increments the counter `name`."""
        with self._changed:
            self._counts[name] += 1

    def begin(self, entry: LogEntry) -> None:
        """Records the arrival of a request."""
        with self._changed:
            self._log.append(entry)
            self._counts["requests"] += 1
            self._counts[entry["method"]] += 1
            if entry["fault"]:
                self._counts[f"fault_{entry['fault']}"] += 1
            self._active += 1
            self._peak = max(self._peak, self._active)

    def answered(self, entry: LogEntry, status: int) -> None:
        """Records the status, before the head is sent, so that a client that has read the head finds it counted."""
        with self._changed:
            entry["status"] = status
            self._counts[f"status_{status}"] += 1

    def end(self, entry: LogEntry, seconds: float) -> None:
        """Records the end of a request, successful or not."""
        with self._changed:
            entry["seconds"] = round(seconds, 6)
            self._counts["bytes_out"] += entry["bytes"]
            self._active -= 1
            self._changed.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until no request is in progress. Returns False after `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active, timeout=deadline_s)

    def stats(self) -> dict[str, int]:
        """All counters."""
        with self._changed:
            return {**self._counts, "active": self._active, "peak_active": self._peak}

    def log(self) -> list[LogEntry]:
        """The requests, oldest first."""
        with self._changed:
            return list(self._log)
