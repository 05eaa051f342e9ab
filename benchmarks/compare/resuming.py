"""A run that was stopped and goes on: which records of its file still count.

run.py writes a record `done` after the last turn of each case. The turns of a case are compared with one another, so
they must be made in one stretch: the records of a case without `done` are dropped, and the case is measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Case = Mapping[str, Any]
# Fields of the record `run` that must not change. Both parts share one set of limits, so they come from one machine.
SAME = (
    "format",
    "preset",
    "sizes",
    "commit",
    "changes",
    "tools",
    "data",
    "link",
    "prices",
    "processor",
    "cores",
    "machine",
    "disk",
    "kernel",
    "memory_bytes",
    "python",
)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The records of a run that goes on, without those that are dropped. By default there are none."""

    path: Path | None = None
    records: list[Record] = field(default_factory=list)
    n_dropped: int = 0

    @property
    def sides(self) -> dict[str, Record]:
        """The records of sides, those that are missing included."""
        return {each["peer"]: each for each in self.records if each["record"] in ("peer", "missing")}

    @property
    def missing(self) -> set[str]:
        """The sides that could not be installed."""
        return {side for side, record in self.sides.items() if record["record"] == "missing"}

    @property
    def failures(self) -> set[str]:
        """The sides that are missing or have failed."""
        return self.missing | {each["peer"] for each in self.records if each["record"] == "failed"}

    def has(self, scenario: str, data: str, case: Case) -> bool:
        """Whether all turns of a case have been made."""
        wanted = {"scenario": scenario, "data": data, "case": dict(case)}
        return any(each["record"] == "done" and wanted.items() <= each.items() for each in self.records)

    def expect_run(self, run: Record) -> None:
        """Exits unless a run is made in the same way and on the same machine as the earlier part."""
        for name in SAME:
            before, now = self.records[0].get(name), json.loads(json.dumps(run.get(name)))
            if before != now:
                sys.exit(f"{self.path} cannot be resumed: its {name} is {before!r}, and this run's is {now!r}")

    def expect_side(self, side: str, record: Record) -> None:
        """Exits unless a side has the versions that it had before."""
        before, now = self.sides[side], json.loads(json.dumps(record))
        for name in before | now:
            if before.get(name) != now.get(name):
                was, is_now = (repr(each.get(name)) for each in (before, now))
                sys.exit(f"{self.path} cannot be resumed: {name} of {side} was {was}, and is now {is_now}")


def read(path: Path) -> Earlier:
    """The file of a run that was stopped. Exits if it is none, or if the run has ended."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        sys.exit(f"{path} cannot be resumed: {error.strerror}")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            found.append((record["record"], record))
        except (ValueError, TypeError, KeyError):
            if number < len(lines) or number == 1:
                sys.exit(f"{path} cannot be resumed: line {number} is not a record of run.py")
            print(f"{path}: the last line was not finished and is cut off", file=sys.stderr)
    kinds = [kind for kind, _ in found]
    if kinds[:1] != ["run"]:
        sys.exit(f"{path} cannot be resumed: it does not begin with the record of a run")
    if "end" in kinds:
        sys.exit(f"{path} cannot be resumed: its run has ended, so nothing is left to measure")
    records = [record for _, record in found]
    done = [record for record in records if record["record"] == "done"]
    kept = [record for record in records if _counts(record, done)]
    return Earlier(path=path, records=kept, n_dropped=len(records) - len(kept))


def _counts(record: Record, done: list[Record]) -> bool:
    """Whether a record is kept. A case that is done has all measurements whose cases contain it."""
    if record["record"] == "limit":
        return any(each["scenario"] == "limits" for each in done)
    if record["record"] not in ("measurement", "failed"):
        return True
    return any(
        (each["scenario"], each["data"]) == (record["scenario"], record["data"])
        and each["case"].items() <= record["case"].items()
        for each in done
    )


def write(earlier: Earlier) -> None:
    """Replaces the file by the records that are kept."""
    assert earlier.path is not None
    new = earlier.path.with_name(f"{earlier.path.name}.new")
    new.write_text("".join(json.dumps(record) + "\n" for record in earlier.records))
    new.replace(earlier.path)
