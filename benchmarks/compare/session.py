"""What the scenarios of run.py share: the peers that can run, their stores, their processes, and the records."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import peers, rivals
from benchmarks.compare.inputs import Data
from benchmarks.compare.peers import Peer, Side
from benchmarks.compare.presets import Preset
from benchmarks.compare.resuming import Earlier
from benchmarks.compare.rivals import EnvironmentFailed
from benchmarks.harness import measuring
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.measuring import CommandFailed, Figures
from benchmarks.harness.sides import Reader, ReaderFailed, StoreLocation, reader, store_location

_DIFFERENCE = 1e-6  # of a sum of values: tools add up float32 in different orders
Case = Mapping[str, Any]


class WrongRows(Exception):
    """A peer gave out other rows, or other values, than the data has."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars: of a thousand GETs, and of a GB read (0 within a region)."""

    thousand_gets: float = 0.0004
    gigabyte_egress: float = 0.0

    def of(self, gets: int, n_bytes: int) -> float:
        """The dollars of an epoch."""
        return gets / 1e3 * self.thousand_gets + n_bytes / 1e9 * self.gigabyte_egress

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """An option for each price."""
        for name, value in vars(cls()).items():
            text = f"dollars of a {name.replace('_', ' ')} (default: {value:g})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help=text)

    @classmethod
    def given(cls, options: argparse.Namespace) -> Prices:
        """The prices of a command line."""
        return cls(**{name: getattr(options, name) for name in vars(cls())})


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A side of a tool, and the Python that runs it."""

    name: str
    tool: str
    python: Path
    side: Side


@dataclass(kw_only=True)
class Session:
    """A run under way."""

    preset: Preset
    prices: Prices
    speed: LinkSpeed | None
    work: Path
    output: Path
    contenders: list[Contender] = field(default_factory=list)
    data: dict[str, Data] = field(default_factory=dict)
    earlier: Earlier = field(default_factory=Earlier)
    failures: set[str] = field(default_factory=set)
    _used: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of a peer in a case
    _preparing_s: float = 0.0  # spent on stores
    _stores: dict[tuple[str, str], Path | str] = field(default_factory=dict)

    # ---- records

    def record(self, kind: str, **fields: Any) -> None:
        """Writes one line at once, so that a run that is killed keeps what it has measured."""
        with self.output.open("a") as lines:
            print(json.dumps({"record": kind, **fields}), file=lines)

    def say(self, text: str) -> None:
        """Progress."""
        print(text, file=sys.stderr, flush=True)

    def left(self, scenario: str, data: str, cases: Iterable[Case]) -> Iterator[Case]:
        """The cases that the file of a resumed run lacks. Each is recorded as done when the next one is asked for."""
        for case in cases:
            if self.earlier.has(scenario, data, case):
                self.say(f"{scenario}, {data}, {dict(case)}: done before")
                continue
            began = time.monotonic()
            yield case
            self.record("done", scenario=scenario, data=data, case=dict(case), seconds=time.monotonic() - began)

    def measurement(self, where: Place, figures: Figures, **more: Any) -> None:
        """Writes a measurement from the figures of readers.py."""
        gets, n_bytes = figures.get("requests"), figures.get("served_bytes")
        fields = {
            "rows": figures["rows"],
            "seconds": figures["seconds"],
            "ended": figures.get("ended", True),
            "user_s": figures["user_s"],
            "system_s": figures["system_s"],
            "peak_bytes": figures["peak_bytes"] + figures.get("workers_bytes", 0),
            "first_s": figures.get("first_minibatch_s"),
            "gets": gets,
            "bytes": n_bytes,
            "wait_share": None,
            "entropy": None,
            "dollars": None if gets is None else self.prices.of(gets, n_bytes),
            "load": os.getloadavg()[0],
        }
        self.record("measurement", **where.fields(), **fields | more)
        rate = fields["rows"] / fields["seconds"]
        self.say(f"{where}: {rate:,.0f} rows/s, {fields['seconds']:.2f} s")

    @contextlib.contextmanager
    def attempt(self, where: Place, left_out: set[str]) -> Iterator[None]:
        """Writes a `failed` record and adds the peer to `left_out` if the code within fails because of the peer.

        A peer that has used its time for a case is also left out, but not before its first measured turn.
        """
        began = time.monotonic() - self._preparing_s
        try:
            yield
            self._used[str(replace(where, turn=0))] += time.monotonic() - self._preparing_s - began
            if where.turn and self._used[str(replace(where, turn=0))] > self.preset.peer_s:
                left_out.add(where.peer)
        except (ReaderFailed, CommandFailed, WrongRows) as error:
            left_out.add(where.peer)
            self.failures.add(where.peer)
            reason = measuring.last_lines(str(error))
            self.record("failed", **where.fields(), error=reason)
            self.say(f"{where}: FAILED: {' '.join(reason.splitlines()[-1:])}")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """What is done within is not a part of a peer's time for a case, such as writing a store."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._preparing_s += time.monotonic() - began

    # ---- peers

    def add(self, names: Sequence[str], options: Any) -> list[Figures]:
        """Makes the environments of the tools. Returns the records of all that can run, and of those that cannot."""
        records = []
        for name in names:
            found = peers.peer(name)
            if self.earlier.missing.issuperset(found.sides):
                continue
            try:
                python = self.python(name, found, options)
                command = measuring.program("compare.rivals", "versions", name, python=python)
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=measuring.importing())
                versions = json.loads(done.stdout)
            except (EnvironmentFailed, subprocess.CalledProcessError) as error:
                reason = measuring.last_lines(getattr(error, "stderr", None) or str(error))
                self.say(f"{name} is missing: {reason}")
                self.failures.update(found.sides)
                records += [{"record": "missing", "peer": side, "reason": reason} for side in found.sides]
                continue
            about = {"version": versions["packages"].get(found.packages[0], "?"), **versions, "tool": name}
            for side_name, side in found.sides.items():
                own = {"how": side.how, "format": side.format, "order": side.order}
                records.append({"record": "peer", "peer": side_name, **about, **own})
                self.contenders.append(Contender(name=side_name, tool=name, python=python, side=side))
        return records

    def python(self, name: str, found: Peer, options: Any) -> Path:
        """The Python that runs a tool. Raises EnvironmentFailed."""
        if name == "zloader" or (options.tiny and found.light):
            return Path(sys.executable)
        given = {"python": options.python, "directory": options.environments, "constrain": options.constrain}
        return rivals.environment(name, **given)

    def taking_part(self, scenario: str, turn: int, data: str = "synthetic") -> list[Contender]:
        """The contenders of a turn of a scenario, in an order that is random and the same in every run."""
        found = [each for each in self.contenders if scenario in each.side.scenarios]
        if self.preset.main_sides or data not in ("synthetic", "screen"):
            found = [each for at, each in enumerate(found) if each.tool not in [one.tool for one in found[:at]]]
        random.Random(f"{scenario} {data} {turn}").shuffle(found)
        return found

    # ---- stores

    def store(self, contender: Contender, data: Data) -> Path:
        """The store of a contender, which is converted when it is first asked for. Raises CommandFailed."""
        if contender.side.store is None:
            return data.path
        key = (contender.side.store, data.name)
        if key not in self._stores:
            store = self.stored_at(contender, data)
            try:
                with self.preparing():
                    self.convert(contender, data, store)
                self._stores[key] = store
            except CommandFailed as error:
                self._stores[key] = str(error)
        found = self._stores[key]
        if isinstance(found, str):
            raise CommandFailed(found)
        return found

    def put(self, contender: Contender, data: Data, store: Path) -> None:
        """Says where the store of a contender is."""
        self._stores[str(contender.side.store), data.name] = store

    def stored_at(self, contender: Contender, data: Data) -> Path:
        """Where the store of a contender is. Its folder is the bucket of the simulated cloud."""
        return self.work / data.name / str(contender.side.store)

    def convert(self, contender: Contender, data: Data, store: Path, *, copies: int = 1) -> Figures:
        """Converts the data, in a process of its own."""
        self.say(f"converting {data.name} for {contender.name}")
        shutil.rmtree(store, ignore_errors=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        arguments = ("write", contender.side.store, data.path, store, "--copies", copies)
        command = measuring.program("compare.rivals", *arguments, python=contender.python)
        return measuring.measured(command, work=self.work, deadline_s=2 * self.preset.deadline_s)

    # ---- processes

    def located(self, contender: Contender, data: Data, *, cloud: bool) -> AbstractContextManager[StoreLocation]:
        """Where a contender reads the data. Raises CommandFailed if its store cannot be converted."""
        return store_location(self.store(contender, data), self.speed if cloud else None)

    @contextlib.contextmanager
    def reader(
        self, contender: Contender, data: Data, options: Case, *, mirror: Path | None = None, cloud: bool = False
    ) -> Iterator[Reader]:
        """Starts a process of a contender. Raises CommandFailed if its store cannot be converted."""
        given = {"obs": data.label, "workers": len(os.sched_getaffinity(0)), **self.sizes(), **options}
        given |= contender.side.options
        if contender.side.mirrored:
            given["mirror"] = str(mirror or self.mirror(data))
        kept = ", kept" if "memory kept" in contender.name else ""
        with (
            self.located(contender, data, cloud=cloud) as location,
            reader(
                contender.tool + kept, contender.python, location, given, self.work, deadline_s=self.preset.deadline_s
            ) as one,
        ):
            yield one

    def sizes(self, *, block: int = 64, batch_size: int = 64, fetch_rows: int | None = None) -> Figures:
        """The options of a reader for sizes of blocks, minibatches and fetches."""
        blocks = max(1, (fetch_rows or self.preset.fetch_rows) // block)
        return {"chunk_size": block, "preload_nchunks": blocks, "batch_size": batch_size}

    def mirror(self, data: Data) -> Path:
        """The mirror that the processes of zloader share."""
        return self.work / "mirrors" / data.name

    def most_s(self, side: Side) -> float:
        """When an epoch ends early that may fill a mirror. Later epochs are warm only if it ends late."""
        return self.preset.check_s if side.mirrored else self.preset.most_s

    def cached(self, one: Reader, data: Data, **request: Any) -> Figures:
        """An epoch with the store and the mirror in the page cache."""
        for path in self.mirror(data).rglob("*"):
            if path.is_file():
                measuring.read_through(path)
        return one.epoch(**request)

    def checked(self, one: Reader, data: Data, side: Side, *, thoroughly: bool = False) -> Figures:
        """`entropy` and `checked` of an epoch whose rows and values are compared with the truth. Raises WrongRows.

        Unless `thoroughly`, it ends as early as a measured one.
        """
        most_s = self.preset.check_s if thoroughly else self.most_s(side)
        figures = self.cached(one, data, check=True, most_s=most_s)
        expect(figures, data, side)
        known = "total" in figures and data.total is not None and "sample" not in side.options
        compared = "rows and values" if known else "rows"
        found: Figures = {"checked": compared if figures["ended"] and side.whole else None}
        return found | ({"entropy": figures["entropy"]} if "entropy" in figures else {})


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record belongs."""

    scenario: str
    peer: str
    case: Case
    turn: int
    data: str

    def fields(self) -> Figures:
        """As the fields of a record."""
        return {**vars(self), "case": dict(self.case)}

    def __str__(self) -> str:
        case = ", ".join(f"{axis} {value}" for axis, value in self.case.items())
        return f"{self.scenario}, {self.data}, {case}, turn {self.turn}, {self.peer}"


def expect(figures: Figures, data: Data, side: Side) -> None:
    """Raises WrongRows unless an epoch gave out all rows, and the right values if it summed them."""
    rows = side.options.get("sample", data.rows)
    if not side.whole and figures["rows"] <= rows:
        return
    if figures["rows"] > rows or (figures["ended"] and figures["rows"] != rows):
        raise WrongRows(f"an epoch gave {figures['rows']:,} rows, and the data have {rows:,}")
    total = figures.get("total")
    if not figures["ended"] or total is None or data.total is None or "sample" in side.options:
        return
    if abs(total - data.total) > _DIFFERENCE * abs(data.total):
        raise WrongRows(f"the values of an epoch add up to {total:,.0f}, and those of the data to {data.total:,.0f}")
