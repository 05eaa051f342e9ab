"""zloader and the other tools that are installed, on a store where it lies. Nothing but the results is written.

    python -m benchmarks.real --store s3://BUCKET/atlas.zarr --anon --minutes 30
    python -m benchmarks.real --store gs://BUCKET/plate1.h5ad --project MY-PROJECT --output plate1.html

The store may be anything that `zl.open_dataset` opens: AnnData Zarr, an annbatch collection or an .h5ad file, locally
or at a URL. It is only read. Mirrors are in a temporary directory (`--work` says where), which is removed at the end.
The tools run in this Python, or in the environments that `python -m benchmarks.compare.rivals make NAME` has made.
Nothing is installed. Of tools that could read the store but are not installed, it says how to install them. The page
also lists those that cannot read it.

It measures the link or the disk, cold and warm epochs in turns, the share of waiting of a consumer that takes 3 ms per
minibatch, and GETs, bytes and dollars; and it computes the dollars of a whole epoch from the plan. The minutes are
divided among the tools. In a large store, zloader reads a sample of cells, so that its cold epoch ends and the next one
is warm; the epochs of other tools end early. After `--minutes` the run ends, whatever is under way. The page of
report.py is written then, and also after Ctrl-C. Beside it are the records of run.py as JSONL.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import peers, report, rivals, run
from benchmarks.compare.inputs import Data
from benchmarks.compare.new_processes import cold_warm
from benchmarks.compare.opening import BLOCK, FETCH_ROWS, FREE_SHARE, H5AD, Opened, opened
from benchmarks.compare.peers import Peer
from benchmarks.compare.presets import QUICK, Preset
from benchmarks.compare.reporting.elsewhere import REAL
from benchmarks.compare.reporting.records import RecordsError, read
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.tables import alone, verdict
from benchmarks.compare.session import Contender, Prices, Session
from benchmarks.harness.sides import StoreElsewhere, StoreLocation
from zloader.commands.flags import Access
from zloader.common.errors import ZloaderError
from zloader.common.messages import size

_START_S = 10.0  # for a process of a tool: imports and opening
_LEAST_S = 2.0  # of an epoch, without which nothing is measured
_ENOUGH_S = 8.0  # of an epoch, for which there should be more turns
_COUNTED_SHARE = 0.6  # of the seconds of an epoch; the others are for its first minibatch
_LATE = 3.0  # times the seconds that a process has, after which it is killed
_PREPARING_S = 40.0  # opening, link, trial and costs
_LEAST_ROWS, _LEAST_FETCHES = 1024, 4


class TimeIsUp(Exception):
    """The minutes of the run are over."""


@dataclass(kw_only=True)
class RealSession(Session):
    """A run over a store that is read where it lies, by tools that are installed."""

    where: StoreElsewhere
    kind: str
    ends_at: float
    _turn_at: float = 0.0

    def python(self, name: str, found: Peer, options: Any) -> Path:
        """The Python in which a tool is installed. Raises EnvironmentFailed."""
        return Path(sys.executable) if name == "zloader" else rivals.installed(name, options.environments)

    def located(self, contender: Contender, data: Data, *, cloud: bool) -> AbstractContextManager[StoreLocation]:
        """The store itself, for all contenders."""
        return contextlib.nullcontext(self.where)

    def taking_part(self, scenario: str, turn: int, data: str = "store") -> list[Contender]:
        """All contenders, every other turn in reverse order. None if a turn as long as the last would end too late."""
        now = time.monotonic()
        if turn > 1 and 2 * now - self._turn_at > self.ends_at:
            self.ends_at = now  # for the turns after it, too
            return []
        self._turn_at = now
        return self.contenders[:: 1 if turn % 2 else -1]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", required=True, metavar="URL", help="a local path, s3://, gs://, az://, hf:// or http"
    )
    parser.add_argument("--minutes", type=float, default=30, help="of the whole run (default: 30)")
    parser.add_argument("--turns", type=int, default=9, help="the most, if there is time for them (default: 9)")
    parser.add_argument("--peers", default=",".join(peers.MODULES), help="comma-separated (default: all)")
    parser.add_argument("--output", type=Path, metavar="PAGE.html", help="default: a new file in the current folder")
    parser.add_argument("--work", type=Path, help="directory for mirrors (default: a temporary directory)")
    parser.add_argument("--environments", type=Path, help="directory of the environments of rivals.py")
    Prices.add_options(parser)
    for field in dataclasses.fields(Access):
        kind: dict[str, Any] = {"action": "store_true"} if field.default is False else {}
        parser.add_argument(f"--{field.name.replace('_', '-')}", help="as of the zloader command", **kind)
    options = parser.parse_args(arguments)
    options.preset, options.peers = REAL, options.peers.split(",")
    if unknown := set(options.peers) - set(peers.MODULES):
        parser.error(f"--peers: unknown: {', '.join(sorted(unknown))} (known: {', '.join(peers.MODULES)})")
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        parser.error(f"--minutes must be a number above 0, not {options.minutes:g}")
    if options.turns < 1:
        parser.error(f"--turns must be at least 1, not {options.turns}")
    options.output = options.output or Path(time.strftime("real-%Y%m%d-%H%M%S.html"))
    options.records = options.output.with_suffix(".jsonl")
    for path in (options.output, options.records):
        if path.exists():
            parser.error(f"--output: {path} exists; give another name")
        if not path.parent.is_dir():
            parser.error(f"--output: there is no directory {path.parent}")
    if options.work and not options.work.is_dir():
        parser.error(f"--work: there is no directory {options.work}")
    return options


# ---- before the tools run


def location(options: argparse.Namespace) -> tuple[StoreElsewhere, str]:
    """Where the store is, and its kind (see peers.KINDS)."""
    access = Access(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Access)})
    form = "h5ad" if options.store.endswith(H5AD) else "zarr"
    if "://" not in options.store:
        path = Path(options.store).absolute()
        return StoreElsewhere(url=str(path), store=path), form
    given = access.storage_options
    if options.store.startswith("gs://") and given.pop("anon", False):
        given["token"] = "anon"  # as gcsfs has it
    return StoreElsewhere(url=options.store, storage_options=given), f"remote {form}"


def preset_of(store: Opened, n_sides: int, seconds: float, free_bytes: int, most_turns: int = 9) -> Preset:
    """The sizes and times of the run. Exits if the time is too short for the store."""
    each_s = seconds / n_sides
    epoch_s = next((found for turns in (3, 2) if (found := _epoch_s(each_s, turns)) >= _ENOUGH_S), _epoch_s(each_s, 1))
    most_s = _COUNTED_SHARE * epoch_s
    rows = store.sample(most_s, free_bytes)
    if rows < min(_LEAST_ROWS, store.data.rows):
        sys.exit(
            f"zloader would read only {rows:,} cells in an epoch of {most_s:.1f} s whose mirror may take "
            f"{size(FREE_SHARE * free_bytes)}: give more --minutes, fewer --peers, or a --work on a larger disk"
        )
    return replace(
        QUICK,
        rows=rows,
        genes=store.data.genes,
        turns=most_turns,
        other_turns={},
        peer_s=each_s,
        most_s=most_s,
        check_s=epoch_s,
        deadline_s=_LATE * (_START_S + epoch_s),
        fetch_rows=min(FETCH_ROWS, max(BLOCK, rows // _LEAST_FETCHES // BLOCK * BLOCK)),
        main_sides=False,
    )


def _epoch_s(each_s: float, turns: int) -> float:
    """The seconds that a side has for an epoch, of which there are two a turn and three more in the first."""
    return (each_s - (turns + 1) * _START_S) / (2 * turns + 3)


def require_time(minutes: float, n_sides: int) -> float:
    """The seconds for the tools. Exits if they are too few."""
    seconds = 60 * minutes - _PREPARING_S
    if _epoch_s(seconds / n_sides, 1) < _LEAST_S:
        least = (_PREPARING_S + n_sides * (2 * _START_S + 5 * _LEAST_S)) / 60
        sys.exit(
            f"--minutes {minutes:g} is too short for {n_sides} ways of reading: give at least {least:.1f}, or fewer "
            "--peers"
        )
    return seconds


# ---- the run


def sampled(contender: Contender, rows: int) -> Contender:
    """zloader with a sample of the cells. Other tools read the whole store."""
    if contender.tool != "zloader":
        return contender
    how = f"{contender.side.how.removesuffix('.')}. It reads {rows:,} cells in blocks from all over the store."
    options = {**contender.side.options, "sample": rows}
    return replace(contender, side=replace(contender.side, how=how, options=options))


def can_read(name: str, kind: str) -> bool:
    """Whether a tool reads a store of this kind where it lies."""
    return any(side.can_read(kind) for side in peers.peer(name).sides.values())


def not_compared(kind: str, able: Collection[str], running: Collection[str]) -> str:
    """That no other loader than zloader runs, why, and what installs one; "" if one runs."""
    if set(running) - {"zloader"}:
        return ""
    commands = [f"pip install {shlex.join(peers.peer(name).requirements)}" for name in able if name != "zloader"]
    if commands:
        return f"No other loader is installed, so nothing was compared. To install one: {', or '.join(commands)}"
    return f"No other loader of --peers reads a store of the kind {kind!r} where it lies, so nothing was compared."


def points(store: Opened, where: StoreElsewhere, preset: Preset, prices: Prices) -> list[str]:
    """What the page says of this store and of its costs."""
    rows, n_bytes = store.data.rows, size(store.stored_bytes)
    found = [f"The store {where.url} has {rows:,} cells, whose X takes {n_bytes}."]
    if preset.rows < rows:
        found.append(f"zloader read a sample of {preset.rows:,} cells in each epoch.")
    if where.store is None:
        costs = store.costs(preset.fetch_rows)
        named = {"without a mirror": costs.unmirrored, "that fills a mirror": costs.first_mirrored}
        for name, cost in named.items():
            about = "" if cost.exact else "about "
            dollars = prices.of(cost.gets, cost.bytes_read)
            found.append(
                f"An epoch of zloader over all cells {name} makes {about}{cost.gets:,} GETs and reads "
                f"{size(cost.bytes_read)}, for {dollars:.2g} dollars, as its plan says."
            )
        found.append("Once the mirror is full, epochs of zloader read nothing from the store.")
    return found


def measure(session: RealSession, options: argparse.Namespace, ready: list[float]) -> None:
    """Opens the store, and runs the tools in turns."""
    able = [name for name in options.peers if can_read(name, session.kind)]
    sides = session.add(able, options)
    unable = f"it cannot read a store of the kind {session.kind!r} where it lies"
    sides += [{"record": "missing", "peer": name, "reason": unable} for name in options.peers if name not in able]
    session.contenders = [each for each in session.contenders if each.side.can_read(session.kind)]
    names = {each.name for each in session.contenders}
    if not names:
        sys.exit(f"no tool of --peers is installed that can read {session.where.url}; zloader can")
    seconds = require_time(options.minutes, len(names))
    session.say(f"{'; '.join(sorted(names))}: {options.minutes:g} minutes")
    reason = not_compared(session.kind, able, {each.tool for each in session.contenders})
    store = opened(session.where, seconds)
    session.data = {store.data.name: store.data}
    session.preset = preset_of(store, len(names), seconds, shutil.disk_usage(session.work).free, options.turns)
    if session.preset.rows < store.data.rows:
        session.contenders = [sampled(each, session.preset.rows) for each in session.contenders]
    said = points(store, session.where, session.preset, session.prices)
    session.record("run", **run.about(options, session, module="real"), points=said, alone=reason)
    ready.append(time.monotonic())
    print(*said, sep="\n", file=sys.stderr)
    how = {each.name: {"how": each.side.how} for each in session.contenders}
    others = {side for name in peers.MODULES for side in list(peers.peer(name).sides)[1:]}
    for side in sides:
        kind, name = side.pop("record"), side["peer"]
        if name in names or (kind == "missing" and name not in others):  # a line for each missing tool is enough
            session.record(kind, **side | how.get(name, {}))
    if store.bytes_per_s:
        rows_per_s = store.bytes_per_s * store.data.rows / max(1, store.stored_bytes)
        name = "disk" if session.where.store else "link"
        session.record("limit", name=name, bytes_per_s=store.bytes_per_s, rows_per_s=rows_per_s)
    cold_warm(session, store.data, REAL, cloud=session.where.store is None)


@contextlib.contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp after so many seconds."""

    def end(number: int, _: object) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the page and the records."""
    options, began, ready = parsed(arguments), time.monotonic(), list[float]()
    where, kind = location(options)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the processes of the run end with it
    stopped = ""
    with tempfile.TemporaryDirectory(dir=options.work, prefix="zloader-real-") as directory:
        session = RealSession(
            preset=QUICK,
            prices=Prices.given(options),
            speed=None,
            work=Path(directory).absolute(),
            output=options.records,
            where=where,
            kind=kind,
            ends_at=began + 60 * options.minutes,
        )
        try:
            with ending_after(60 * options.minutes):
                measure(session, options, ready)
            session.record("end", seconds=time.monotonic() - began, failures=sorted(session.failures))
        except ZloaderError as error:
            sys.exit(f"cannot read {options.store}: {error}")
        except (TimeIsUp, KeyboardInterrupt) as error:
            stopped = f"the {options.minutes:g} minutes are over" if isinstance(error, TimeIsUp) else "interrupted"
    if stopped:
        print(f"{stopped}: the page has what was measured until now", file=sys.stderr)
    if not ready:
        sys.exit("nothing was measured yet, so no page is written")
    try:
        results = Results(read(options.records))
    except RecordsError as error:
        sys.exit(str(error))
    options.output.write_text(report.html(results), encoding="utf-8")
    print(verdict(results), alone(results), file=sys.stderr)
    print(options.output)
    if stopped == "interrupted":
        sys.exit(130)


if __name__ == "__main__":
    main()
