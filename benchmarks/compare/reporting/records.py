"""The records of a benchmark run, which run.py writes and report.py and compare.py read.

A run is a JSONL file: one JSON object per line, and `record` says of which kind it is. The first line is the `run`, and
the last the `end`. The other kinds are `peer`, `missing`, `limit`, `measurement`, `failed`, `done` and `resumed`; the
dataclasses below have their keys. All sizes are in bytes and all times in seconds. Keys that a dataclass lacks are kept
in `extra`. A figure that does not apply is null or left out.

A turn is one round in which every peer runs the same case once, so peers are compared turn by turn. This file imports
only the standard library, so that it runs in the Python of any environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.reporting.checked import RecordsError, Value, checked, shortened

FORMAT = 1
_LONGEST_LINE = 1 << 22  # characters; a longer line is in some other kind of file
_LONGEST_NAME = 100
_LEAST_S = 1e-9
_NAMES = ("peer", "scenario", "data", "name")
Case = tuple[tuple[str, Value], ...]


# ---- kinds of records


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set: `rows` cells, `genes`, and the number of stored values."""

    name: str
    rows: int
    genes: int | None = None
    values: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """When, where and how a run was made. `load` has the averages over 1, 5 and 15 minutes at the start."""

    format: int
    began: str = ""
    commit: str = ""
    dirty: bool = False
    command: list[str] = field(default_factory=list)
    preset: str = ""
    cores: int | None = None
    processor: str = ""
    memory_bytes: float | None = None
    disk: str | None = None
    kernel: str = ""
    python: str = ""
    load: list[float] = field(default_factory=list)
    rows: int | None = None
    data: list[Data] = field(default_factory=list)
    prices: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool in the run, and in `how` one or two sentences on how its documentation tunes it.

    `order` says in which order it gives out cells, such as `blocks of 64`. Older files lack it.
    """

    peer: str
    version: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    how: str = ""
    format: str = ""
    order: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A tool that could not be installed, or cannot run a scenario."""

    peer: str
    reason: str
    scenario: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The speed of one part of the machine by itself, measured in the same run.

    `rows_per_s` is for the rows of `data`, or of the run's first data set.
    """

    name: str
    data: str | None = None
    bytes_per_s: float | None = None
    rows_per_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One case of a scenario, run once by one peer. `rows` were given out in `seconds`.

    `first_s` is the time to the first minibatch, `entropy` is in bits, `wait_share` between 0 and 1. `ended` says
    whether the epoch gave out all its rows; older files lack it. `pss_bytes` is the memory of several processes, in
    which pages that they share count once.
    """

    scenario: str
    peer: str
    case: Mapping[str, Value]
    turn: int
    data: str
    rows: int
    seconds: float
    user_s: float | None = None
    system_s: float | None = None
    peak_bytes: float | None = None
    first_s: float | None = None
    gets: float | None = None
    bytes: float | None = None
    wait_share: float | None = None
    entropy: float | None = None
    dollars: float | None = None
    load: float | None = None
    ended: bool | None = None
    pss_bytes: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def cpu_s(self) -> float | None:
        """User and system seconds."""
        return None if self.user_s is None or self.system_s is None else self.user_s + self.system_s

    @property
    def cpu_s_per_row(self) -> float | None:
        return None if self.cpu_s is None or not self.rows else self.cpu_s / self.rows


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A measurement that ended with an error, whose last lines are `error`."""

    scenario: str
    peer: str
    error: str
    case: Mapping[str, Value] = field(default_factory=dict)
    turn: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Done:
    """All turns of a case have been made. `seconds` includes the conversions and checks for it."""

    scenario: str
    data: str
    case: Mapping[str, Value] = field(default_factory=dict)
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The run was stopped and went on here. `load` is as in Run."""

    began: str = ""
    load: list[float] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class End:
    """The run was not stopped. `seconds` have passed since it began or was resumed."""

    seconds: float
    failures: list[str] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)


_KINDS: dict[str, type] = {
    "run": Run, "peer": Peer, "missing": Missing, "limit": Limit, "measurement": Measurement, "failed": Failed,
    "done": Done, "resumed": Resumed, "end": End,
}  # fmt: skip


# ---- a run


@dataclass(frozen=True)
class Key:
    """One case of a scenario with one data set."""

    scenario: str
    data: str
    case: Case

    def __str__(self) -> str:
        return ", ".join([self.scenario, self.data, *(f"{axis} {value}" for axis, value in self.case)])


Turns = dict[int, Measurement]


@dataclass(frozen=True, kw_only=True)
class Records:
    """All records of a run, in the order of the file."""

    path: Path
    run: Run
    peers: list[Peer]
    missing: list[Missing]
    limits: list[Limit]
    measurements: list[Measurement]
    failed: list[Failed]
    resumed: list[Resumed]
    end: End | None

    def turns(self) -> dict[Key, dict[str, Turns]]:
        """The measurements by case, peer and turn, each in the order in which they first come."""
        found: dict[Key, dict[str, Turns]] = {}
        for each in self.measurements:
            found.setdefault(key_of(each), {}).setdefault(each.peer, {})[each.turn] = each
        return found


def key_of(measured: Measurement) -> Key:
    return Key(measured.scenario, measured.data, tuple(sorted(measured.case.items())))


def read(path: Path) -> Records:
    """Reads a run and checks every record.

    Raises RecordsError if the file cannot be read, is empty, ends within a record, comes from something else than
    run.py, or contains no measurement.
    """
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    lines: dict[tuple[Any, ...], int] = {}
    for number, record in _objects(path):
        where = f"{path}, line {number}"
        parsed = _record(record, where)
        kind = record["record"]
        if (kind == "run") == bool(found["run"]):
            problem = "a second run begins here" if kind == "run" else "the first record is not that of a run"
            raise RecordsError(f"{where}: {problem}; every run of run.py has a file of its own")
        found[kind].append(parsed)
        if kind == "measurement":
            earlier = lines.setdefault((key_of(parsed), parsed.peer, parsed.turn), number)
            if earlier != number:
                raise RecordsError(
                    f"{where}: measures the peer, case and turn of line {earlier} again; keep one of them"
                )
    if not found["run"]:
        raise RecordsError(f"{path} is empty; run.py writes the file while it measures")
    if not found["measurement"]:
        failed = [f"{each.peer}, {each.scenario}: {shortened(each.error.strip()[-60:])}" for each in found["failed"]]
        why = f"all {len(failed)} failed, the first one {failed[0]}" if failed else "did its run end early?"
        raise RecordsError(f"{path} has no measurements; {why}")
    return Records(
        path=path, run=found["run"][0], peers=found["peer"], missing=found["missing"], limits=found["limit"],
        measurements=found["measurement"], failed=found["failed"], resumed=found["resumed"],
        end=found["end"][-1] if found["end"] else None,
    )  # fmt: skip


def line(record: Mapping[str, Any]) -> str:
    """A record as its line, checked as `read` checks it. Raises RecordsError."""
    _record(record, "record")
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of the file with the numbers of their lines."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
                if text.strip():
                    yield number, _object(text, f"{path}, line {number}")
    except OSError as error:
        raise RecordsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordsError(f"{path} is not a JSONL file of run.py: it is not text in UTF-8") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.endswith("\n") and text.startswith("{") and len(text) < _LONGEST_LINE:
            raise RecordsError(
                f"{where}: the file ends within this record, as after a run that was ended. To use the records before "
                "it, delete this line. `run.py --resume` goes on with the run"
            ) from error
        raise RecordsError(f"{where}: not JSON, so this is not a file of run.py: {shortened(text.strip())}") from error
    if not isinstance(found, dict) or found.get("record") not in _KINDS:
        raise RecordsError(f"{where}: not a record of run.py ({', '.join(_KINDS)}): {shortened(text.strip())}")
    return found


def _record(record: Mapping[str, Any], where: str) -> Any:
    """The dataclass of a record. Raises RecordsError."""
    kind = record.get("record")
    if kind not in _KINDS:
        raise RecordsError(f"{where}: {kind!r} is not a kind of record; the kinds are {', '.join(_KINDS)}")
    if kind == "run" and record.get("format") != FORMAT:
        raise RecordsError(f"{where}: format {record.get('format')!r}, but this version reads format {FORMAT}")
    found = checked(_KINDS[kind], {name: value for name, value in record.items() if name != "record"}, where)
    if isinstance(found, Measurement) and found.seconds < _LEAST_S:
        raise RecordsError(f"{where}: seconds is {found.seconds:g}, but a measurement takes time")
    _require_names(found, where)
    return found


def _require_names(found: Any, where: str) -> None:
    """Raises RecordsError for a name that cannot be written into tables and figures."""
    names = [(name, getattr(found, name, None)) for name in _NAMES]
    names += [("case", name) for item in getattr(found, "case", {}).items() for name in item]
    names += [("data", data.name) for data in (found.data if isinstance(found, Run) else [])]
    for kind, name in names:
        if isinstance(name, str) and not (name.isprintable() and len(name) <= _LONGEST_NAME and name.strip()):
            raise RecordsError(
                f"{where}: {kind} {shortened(repr(name))} is no name: it must be printable, with 1 to {_LONGEST_NAME} "
                "characters"
            )
