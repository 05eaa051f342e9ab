"""Compares two benchmark runs: is B faster or slower than A, beyond noise?

    python -m benchmarks.compare.differences A.jsonl B.jsonl [--json] [--reference PEER|none] [--seed 0]

A and B are files of run.py. For every scenario, data set, case and peer that both have, the script prints the ratio of
B to A in cells/s and in CPU seconds per cell, each with its 95 % interval (reporting/turns.py says how it is found).
B is "faster" or "slower" if the interval does not contain 1, otherwise the difference is "within noise". With a single
turn there is no interval, and the verdict is "one turn only".

The turns of the two files are paired by their numbers. If the runs had different presets or machines, or were under
different loads, their speeds differ for reasons that are not in the code. Then each figure is first divided by the
figure of a reference in the same turn of the same file: annbatch, or the AnnData in memory, in the same version in
both. The output says which pairing each line has. `--reference` chooses another reference, or none.

Of 100 comparisons without any difference, about 5 are called faster or slower by chance; the output says how many there
are. It names peers that have other versions in the two files. The exit status is 0 whatever the verdicts, and 1 if a
file cannot be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.reporting.records import Key, Measurement, Records, RecordsError, Turns, read
from benchmarks.compare.reporting.turns import Figure, Interval, interval
from benchmarks.harness.measuring import table

REFERENCES = ("annbatch", "AnnData in memory")  # the first that both files have; others only by --reference
NONE = "none"
LOAD_PER_CORE = 0.25  # median loads that differ by more are different conditions
_MOST_LISTED = 5
HEADER = ("scenario", "data", "case", "peer", "paired by", "turns", "cells/s", "95 %", "", "CPU", "95 %", "")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The ratios of B to A of one peer in one case. `relative_to` is the reference, None if there is none.

    `cpu` is None if a file lacks CPU seconds. Verdicts of CPU seconds are "less", "more" or "within noise".
    """

    scenario: str
    data: str
    case: dict[str, Any]
    peer: str
    relative_to: str | None
    speed: Interval
    verdict: str
    cpu: Interval | None
    cpu_verdict: str | None


def compare(a: Records, b: Records, reference: str | None = None, *, seed: int = 0) -> list[Comparison]:
    """The comparisons of all peers and cases that both runs have.

    `reference` is a peer, `none`, or None to choose. Raises RecordsError if the runs have no case in common.
    """
    wanted = chosen_references(a, b) if reference is None else [] if reference == NONE else [reference]
    for side in (a, b):
        if reference not in (None, NONE, *(measured.peer for measured in side.measurements)):
            raise RecordsError(f"{side.path} has no measurement of the reference {reference!r}")
    before, after = a.turns(), b.turns()
    found = []
    for key in before.keys() & after.keys() - set(_different_data(before, a, b)):
        for peer in before[key].keys() & after[key].keys():
            other = next(
                (name for name in wanted if name != peer and _shared(before[key], after[key], [name, peer])), None
            )
            sides = before[key], after[key]
            speed = _interval(sides, (peer, other), _speed, seed)
            if speed is not None:
                cpu = _interval(sides, (peer, other), _cpu, seed)
                found.append((key, _comparison(key, (peer, other), speed, cpu)))
    if not found:
        others = sorted({key.data for key in _different_data([*before, *after], a, b)})
        sizes = f" (with other sizes: {', '.join(others)})" if others else ""
        contents = f"{_contents(a)}, but {_contents(b)}{sizes}"
        raise RecordsError(f"{a.path} and {b.path} have no case in common: {contents}")
    places = {key: place for place, key in enumerate(after)}
    return [comparison for _, _, comparison in sorted((places[key], c.peer, c) for key, c in found)]


def _comparison(key: Key, names: tuple[str, str | None], speed: Interval, cpu: Interval | None) -> Comparison:
    return Comparison(
        scenario=key.scenario,
        data=key.data,
        case=dict(key.case),
        peer=names[0],
        relative_to=names[1],
        speed=speed,
        verdict=_verdict(speed, "faster", "slower"),
        cpu=cpu,
        cpu_verdict=_verdict(cpu, "more", "less") if cpu else None,
    )


def _verdict(measured: Interval, above: str, below: str) -> str:
    if measured.turns == 1:
        return "one turn only"
    if not measured.beyond_noise:
        return "within noise"
    return above if measured.ratio > 1 else below


def _speed(measured: Measurement) -> float | None:
    """Cells/s, or the reciprocal of the seconds where no cells are given out."""
    return measured.rows_per_s or 1 / measured.seconds


def _cpu(measured: Measurement) -> float | None:
    return measured.cpu_s_per_row if measured.rows else measured.cpu_s


# ---- pairing


def _shared(before: dict[str, Turns], after: dict[str, Turns], peers: Iterable[str]) -> set[int]:
    """The turns that both files have of all these peers."""
    return set.intersection(*(set(side.get(peer, {})) for side in (before, after) for peer in peers))


def _interval(
    sides: tuple[dict[str, Turns], dict[str, Turns]], names: tuple[str, str | None], figure: Figure, seed: int
) -> Interval | None:
    """The ratio of B to A over the turns that both have; None if no such turn has the figure."""
    before, after = sides
    peers = [name for name in names if name is not None]
    ratios = []
    for turn in sorted(_shared(before, after, peers)):
        values = [[figure(side[peer][turn]) for side in (after, before)] for peer in peers]
        if all(value for pair in values for value in pair):
            own, *reference = [b / a for b, a in values]
            ratios.append(own / math.prod(reference))
    return interval(ratios, seed=seed) if ratios else None


def _different_data(keys: Iterable[Key], a: Records, b: Records) -> list[Key]:
    """The cases whose data sets have the same name but not the same size."""
    sizes = [{data.name: (data.rows, data.genes, data.values) for data in side.run.data} for side in (a, b)]
    differing = {name for name in sizes[0].keys() & sizes[1].keys() if sizes[0][name] != sizes[1][name]}
    return [key for key in keys if key.data in differing]


def conditions(a: Records, b: Records) -> list[str]:
    """How the conditions of the runs differ, in words. Empty if they are alike."""
    found = [
        f"{words} {before or 'unknown'} and {after or 'unknown'}"
        for words, before, after in (
            ("presets", a.run.preset, b.run.preset),
            ("processors", a.run.processor, b.run.processor),
            ("cores", a.run.cores, b.run.cores),
            ("disks", a.run.disk, b.run.disk),
            ("kernels", a.run.kernel, b.run.kernel),
        )
        if before != after
    ]
    loads = [_load(side) for side in (a, b)]
    if None not in loads and abs(loads[0] - loads[1]) > LOAD_PER_CORE * max(1, a.run.cores or 1):
        found.append(f"loads {loads[0]:.1f} and {loads[1]:.1f}")
    return found


def other_versions(a: Records, b: Records) -> list[str]:
    """The peers of both files whose version, or that of a package that they use, differs, and how."""
    found = []
    before = {peer.peer: {"": peer.version, "Python": peer.python, **peer.packages} for peer in a.peers}
    for peer in b.peers:
        versions = {"": peer.version, "Python": peer.python, **peer.packages}
        old = before.get(peer.peer, versions)
        changed = [name for name in dict.fromkeys([*old, *versions]) if old.get(name) != versions.get(name)]
        words = [f"{name} {old.get(name)} and {versions.get(name)}".strip() for name in changed if name != peer.peer]
        if words:
            found.append(f"{peer.peer}: {', '.join(words)}")
    return found


def _load(records: Records) -> float | None:
    loads = [measured.load for measured in records.measurements if measured.load is not None]
    return statistics.median(loads) if loads else None


def chosen_references(a: Records, b: Records) -> list[str]:
    """The references by which to pair if the conditions differ: those whose version is the same in both files."""
    versions = [{peer.peer: (peer.version, peer.packages) for peer in side.peers} for side in (a, b)]
    same = [name for name in REFERENCES if name in versions[0] and versions[0].get(name) == versions[1].get(name)]
    return same if conditions(a, b) else []


# ---- output


def _contents(records: Records) -> str:
    scenarios = ", ".join(sorted({measured.scenario for measured in records.measurements}))
    data = ", ".join(dict.fromkeys(f"{measured.data}" for measured in records.measurements))
    return f"{records.path.name} has {scenarios} with {data}"


def document(a: Records, b: Records, found: Sequence[Comparison]) -> dict[str, Any]:
    """The comparisons as one JSON document. Intervals without an end are null."""
    runs = {
        side: {"file": str(of.path), "commit": of.run.commit, "began": of.run.began, "processor": of.run.processor}
        for side, of in (("a", a), ("b", b))
    }
    differ = {"differ": conditions(a, b), "versions": other_versions(a, b), "only": _only(a, b)}
    return {**runs, **differ, "comparisons": [_json(each) for each in found]}


def _json(found: Comparison) -> dict[str, Any]:
    written = dataclasses.asdict(found)
    for name in ("speed", "cpu"):
        if written[name] and written[name]["high"] == math.inf:
            written[name] |= {"low": None, "high": None}
    return written


def _only(a: Records, b: Records) -> dict[str, list[str]]:
    """The cases and peers that only one of the runs has, and those whose data sets differ in size."""
    sides = [{f"{key}: {peer}" for key, peers in of.turns().items() for peer in peers} for of in (a, b)]
    differing = {str(key) for key in _different_data([*a.turns(), *b.turns()], a, b)}
    return {"a": sorted(sides[0] - sides[1]), "b": sorted(sides[1] - sides[0]), "other_data": sorted(differing)}


def show(a: Records, b: Records, found: Sequence[Comparison]) -> None:
    """Prints the comparisons as a table, and what they rest on."""
    for side, of in (("A", a), ("B", b)):
        dirty = " with uncommitted changes" if of.run.dirty else ""
        print(f"{side}: {of.path}, commit {of.run.commit}{dirty}, {of.run.began}, {of.run.processor}")
    table([HEADER, *map(_line, found)])
    differ = conditions(a, b)
    if differ:
        print(f"The conditions differ: {'; '.join(differ)}.")
        alone = sum(each.relative_to is None for each in found)
        if alone:
            print(f"{alone} of {len(found)} lines are paired by turn alone: their ratios include that difference.")
    if versions := other_versions(a, b):
        print(f"Other versions in A and B: {_some(versions)}.")
    only = _only(a, b)
    for side, other in (("a", "A"), ("b", "B")):
        if only[side]:
            print(f"Only in {other}: {_some(only[side])}.")
    if only["other_data"]:
        print(f"Not compared, because the data have another size: {_some(only['other_data'])}.")
    n = sum(each.speed.turns > 1 for each in found)
    print(f"{n} comparisons of cells/s: by chance alone, about {n / 20:.1f} would be called faster or slower.")


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MOST_LISTED
    return "; ".join(names[:_MOST_LISTED]) + (f"; and {more} more (--json lists them)" if more > 0 else "")


def _line(found: Comparison) -> list[str]:
    case = ", ".join(f"{axis} {value}" for axis, value in found.case.items())
    paired = f"turn, over {found.relative_to}" if found.relative_to else "turn"
    cells = [found.scenario, found.data, case, found.peer, paired, str(found.speed.turns), *_cells(found.speed)]
    return [*cells, found.verdict, *(_cells(found.cpu) if found.cpu else ["", ""]), found.cpu_verdict or ""]


def _cells(measured: Interval) -> list[str]:
    between = "" if measured.turns == 1 else f"{measured.low:.3g} to {measured.high:.3g}"
    return [f"{measured.ratio:.3f}", between]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="the JSONL file of the run before")
    parser.add_argument("b", type=Path, help="the JSONL file of the run after")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--reference", help="pair by the ratios to this peer; none: by turn alone (default: see above)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, not {options.seed}")
    try:
        a, b = read(options.a), read(options.b)
        found = compare(a, b, options.reference, seed=options.seed)
    except RecordsError as error:
        sys.exit(str(error))
    with contextlib.suppress(BrokenPipeError):
        if options.json:
            print(json.dumps(document(a, b, found), allow_nan=False))
        else:
            show(a, b, found)


if __name__ == "__main__":
    main()
