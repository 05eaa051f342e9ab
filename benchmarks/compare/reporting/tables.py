"""The sections of the benchmark report: text, tables and figures, which report.py renders as HTML or as Markdown."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.compare.reporting import costs, elsewhere, figures
from benchmarks.compare.reporting.page import Section, Table
from benchmarks.compare.reporting.records import Key, Records, Run
from benchmarks.compare.reporting.results import Entry, Headline, Results, is_rival
from benchmarks.compare.reporting.turns import Spread
from benchmarks.compare.reporting.words import (
    CEILING,
    ENTROPY,
    LIMITS,
    OURS,
    TERMS,
    UNFAIR,
    Figure,
    axis_name,
    case_text,
    is_ours,
    number,
    others,
    scenario,
    value_text,
)
from zloader.common.messages import size

_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failed|Rows)\b")
_LONGEST_ERROR = 400
_BOUNDED = "only that there are not too many cells"  # what is noticed in a checked epoch that was not compared


def sections(results: Results) -> list[Section]:
    """The whole report."""
    return [
        at_a_glance(results),
        *_behind(results),
        *(_scenario(results, name) for name in results.scenarios),
        *costs.sections(results),
        *_limits(results.records),
        _tools(results),
        *_absent(results.records),
        _method(results.records),
        Section(title="What is unfair", points=[*_unfair(results.records.run), *results.records.run.notes]),
        Section(title="What the words mean", terms=TERMS),
        Section(title="Machine and command", facts=machine(results.records)),
    ]


def _unfair(run: Run) -> Sequence[str]:
    return elsewhere.UNFAIR if run.preset == elsewhere.REAL else UNFAIR


# ---- overview


def verdict(results: Results) -> str:
    """A sentence for the cold and for the warm epoch from a local disk, or for the first two headlines."""
    found = results.headlines()
    chosen = [headline for headline in found if "local disk" in headline.label] or found[:2]
    return " ".join(map(_sentence, chosen)) or "zloader was not measured in the scenarios that sum up a run."


def alone(results: Results) -> str:
    """That no other loader was measured, and why if the run says so; "" if one was."""
    if any(is_rival(each.peer) for each in results.records.measurements):
        return ""
    said = results.records.run.extra.get("alone")
    return str(said or "No other loader was measured, so nothing was compared.")


def _sentence(headline: Headline) -> str:
    ours, other = headline.ours, headline.other
    said = (
        f"{headline.label[0].upper()}{headline.label[1:]}: {_in_prose(ours.peer)} {_with_unit(ours, headline.figure)}"
    )
    if other is None or other.against is None:
        return f"{said}."
    best = f"{_in_prose(other.peer)}, the best other tool, {_with_unit(other, headline.figure)}"
    return f"{said}; {best}. {_compared(headline, other)}"


def _in_prose(peer: str) -> str:
    """The name without its comma: `annbatch (obstore)`."""
    tool, _, variant = peer.partition(", ")
    return f"{tool} ({variant})" if variant else tool


def _compared(headline: Headline, other: Entry) -> str:
    """The ratio, with as much certainty as the turns allow."""
    peer, ratio, against = _in_prose(headline.ours.peer), _against(other), other.against
    if headline.turns == 1:
        return f"In this one turn, {peer} was {ratio} as fast; one turn says nothing about chance."
    if against is not None and against.low <= 1 <= against.high:
        return f"Neither is faster in every turn: {peer} is {ratio} as fast."
    return f"{peer} is {ratio} as fast."


def _with_unit(entry: Entry, figure: Figure) -> str:
    return f"{_value(entry, figure)}{figure.unit}"


def _value(entry: Entry, figure: Figure) -> str:
    return ("≥ " if entry.at_least else "") + figure.text(entry.figure.median)


def _against(entry: Entry) -> str:
    """zloader's advantage. It is smaller than measured if the other one would be faster in a longer epoch."""
    return ("≤ " if entry.at_least else "") + times(entry.against) if entry.against else ""


def _certain(ratio: str, turns: int) -> str:
    """The ratio, and `one turn` if there was only one."""
    return ", ".join(filter(None, [ratio, "one turn" if turns == 1 else ""]))


def times(measured: Spread) -> str:
    """A ratio with its range.

    >>> times(Spread(2.0, 1.5, 2.5))
    '2.0 × (1.5 to 2.5)'
    """
    median, low, high = (_ratio(value) for value in (measured.median, measured.low, measured.high))
    return f"{median} ×" if low == high == median else f"{median} × ({low} to {high})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 20 else number(value)


def at_a_glance(results: Results) -> Section:
    """zloader beside the best other tool, one row per headline, with mixing and cells in memory where measured."""
    rows, headlines = [], results.headlines()
    remembered = any(found.memory for found in headlines)
    mixed = any(any(found.mixing) for found in headlines)
    for found in headlines:
        ours = _with_unit(found.ours, found.figure)
        other = against = ""
        if found.other:
            other = f"{found.other.peer}: {_with_unit(found.other, found.figure)}"
            against = _against(found.other)
        more = [_bits(found)] * mixed + [_in_memory(found)] * remembered
        rows.append([found.label, ours, other, _certain(against, found.turns), *more])
    header = ["", OURS, "best other tool", "zloader is … as fast"]
    header += ["entropy, bits"] * mixed + [CEILING] * remembered
    return Section(title="At a glance", tables=[Table(_medians(results), header, rows)] if rows else [])


def _in_memory(found: Headline) -> str:
    return f"{found.figure.text(found.memory.median)}{found.figure.unit}" if found.memory else ""


def _bits(found: Headline) -> str:
    """The entropies of zloader and of the other tool."""
    return " and ".join(ENTROPY.text(each.median) for each in found.mixing if each) if all(found.mixing) else ""


def _medians(results: Results) -> str:
    return (
        f"Medians over turns, with the data set {results.first_data} unless another one is named. Ratios are medians "
        "of the ratios of the turns, with their range."
    )


_MAIN = (
    " This is about the main figure of each scenario. In other columns, such as memory, entropy and GETs, other tools "
    "may be better, too."
)
_CEILING = f" {CEILING} is not counted here: it is no loader, and its figures are in each scenario."


def _behind(results: Results) -> list[Section]:
    found = results.behind()
    rows = []
    for key, ours, other in found:
        figure = scenario(key.scenario).figure
        values = [f"{e.peer}: {_with_unit(e, figure)}" for e in (other, ours)]
        words = ", ".join(filter(None, [scenario(key.scenario).title, key.data, case_text(key)]))
        rows.append([words, *values, _certain(_against(other), results.common_turns(key, ours, other))])
    if not any(is_ours(peer) for peer in results.peers):
        return []
    header = ["case", "better", OURS, "zloader's advantage"]
    text = f"In these cases another loader was better than zloader, in the median of the turns.{_MAIN}{_CEILING}"
    none = alone(results) or f"No other loader was better than zloader in any case of this run.{_MAIN}{_CEILING}"
    caption = "The best other tool in each case. zloader's advantage is a ratio. Above 1: zloader is better."
    tables = [Table(caption, header, rows, words=True)] if rows else []
    return [Section(title="Where another tool is better", text=[text if rows else none], tables=tables)]


# ---- scenarios


def _scenario(results: Results, name: str) -> Section:
    known = scenario(name)
    data = results.data(name)
    return Section(
        title=known.title,
        text=[known.question] if known.question else [],
        charts=[chart for each in data for chart in figures.charts(results, name, each)],
        tables=[_table(results, name, each) for each in data],
    )


def _table(results: Results, name: str, data: str) -> Table:
    """A row per case and peer, the best peer of each case first. Columns without a figure are left out."""
    figure = scenario(name).figure
    keys = results.keys(name, data)
    axes = list(dict.fromkeys(axis for key in keys for axis, _ in key.case))
    found = [(key, entry) for key in keys for entry in results.entries(key, figure)]
    columns = [other for other in others(figure) if _has(results, keys, other)]
    compared = any(entry.against for _, entry in found)
    header = ["tool", *map(axis_name, axes), figure.name, "range", "turns", *([figure.against] if compared else [])]
    rows = []
    for key, entry in found:
        case = dict(key.case)
        cells = [entry.peer, *(value_text(case[axis]) if axis in case else "" for axis in axes), *_entry(entry, figure)]
        cells += [str(len(results.turns(key)[entry.peer])), *([_against(entry)] if compared else [])]
        rows.append(cells + [_median(results, key, entry.peer, other) for other in columns])
    counted = _turns(results, keys)
    caption = f"{data}: {counted}." if counted == "one turn" else f"{data}: medians over {counted}."
    return Table(caption, [*header, *(other.name for other in columns)], rows)


def _has(results: Results, keys: Sequence[Key], figure: Figure) -> bool:
    return any(results.spread(key, peer, figure) for key in keys for peer in results.turns(key))


def _entry(entry: Entry, figure: Figure) -> list[str]:
    measured = entry.figure
    several = measured.low < measured.high
    between = f"{figure.text(measured.low)} to {figure.text(measured.high)}" if several else ""
    return [_value(entry, figure), between]


def _median(results: Results, key: Key, peer: str, figure: Figure) -> str:
    measured = results.spread(key, peer, figure)
    bound = "≤ " if results.at_most(key, peer, figure) else ""
    return bound + figure.text(measured.median) if measured else ""


def _turns(results: Results, keys: Sequence[Key]) -> str:
    """How many turns there were: `5 turns`, or `1 to 5 turns` if peers have different numbers of them."""
    counts = sorted({len(turns) for key in keys for turns in results.turns(key).values()})
    if counts == [1]:
        return "one turn"
    return f"{counts[0]} turns" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} turns"


# ---- what was measured, with what and where


def _limits(records: Records) -> list[Section]:
    rows = [
        [LIMITS.get(limit.name, limit.name) + (f" ({limit.data})" if limit.data else ""),
         size(limit.bytes_per_s) if limit.bytes_per_s is not None else "",
         number(limit.rows_per_s) if limit.rows_per_s is not None else ""]
        for limit in records.limits
    ]  # fmt: skip
    text = (
        "How fast parts of this machine are by themselves, measured once before the tools. They are the lines in the "
        "figures of speed. Cells are those of zloader's store: those of another format have other bytes and are "
        "decoded in another way. Cells from the mirror, or from memory, are not decoded or read again. Copying is for "
        'CSR minibatches, 8 bytes per value: "zloader, packed" has fewer, and may exceed it. On a machine with '
        "other work, a tool may be a little faster than a limit that was measured at another time."
    )
    tables = [Table("Measured in the same run.", ["limit", "bytes/s", "cells/s"], rows)]
    return [Section(title="Limits of the machine", text=[text], tables=tables)] if rows else []


_INSTALLED = "It runs with the versions that were installed there."
_NEWEST = (
    "Each other tool runs with the newest versions that pip gave for it and its dependencies when its environment was "
    "made, on the Python of the table: that of the benchmark where it suits. zloader runs in the environment in which "
    "the benchmark was started."
)


def _tools(results: Results) -> Section:
    run = results.records.run
    rows = [
        [peer.peer, peer.version, peer.python, peer.format, peer.order, _checks(results, peer.peer), peer.how,
         ", ".join(f"{name} {version}" for name, version in peer.packages.items())]
        for peer in sorted(results.records.peers, key=lambda peer: results.peers.index(peer.peer))
    ]  # fmt: skip
    header = ["tool", "version", "Python", "format", "order", "checked", "how it is set up", "with"]
    installed = _INSTALLED if run.preset == elsewhere.REAL else _NEWEST
    text = (
        f'Each tool is set up as its documentation advises. {installed} The column "checked" says what of an epoch was '
        f'compared with the data; "{_BOUNDED}" is said of epochs that ended early, and of tools that leave out cells.'
    )
    if constrained := _constraints(run.command):
        text += f" The command of this run held these back: {', '.join(constrained)}."
    return Section(title="The tools", text=[text], tables=[Table("Versions and settings.", header, rows, words=True)])


def _checks(results: Results, peer: str) -> str:
    """What the checked epochs of a tool compared, with the numbers of cases if it is not the same in all."""
    keys = [key for name in results.scenarios for data in results.data(name) for key in results.keys(name, data)]
    first = [next(iter(turns.values())) for key in keys if (turns := results.turns(key).get(peer))]
    found = Counter(str(each.extra["checked"] or _BOUNDED) for each in first if "checked" in each.extra)
    if len(found) < 2:
        return "".join(found)
    return ", ".join(f"{what} ({count} of {found.total()} cases)" for what, count in found.most_common())


def _constraints(command: Sequence[str]) -> list[str]:
    """The versions that the options --constrain of run.py asked for."""
    return [after for option, after in pairwise(command) if option == "--constrain"]


def _absent(records: Records) -> list[Section]:
    missing = [
        [each.peer, scenario(each.scenario).title if each.scenario else "all", each.reason] for each in records.missing
    ]
    failed = [
        [each.peer, scenario(each.scenario).title,
         ", ".join([*(f"{axis_name(axis)} {value_text(value)}" for axis, value in each.case.items()),
                    *([f"turn {each.turn}"] if each.turn is not None else [])]), last_words(each.error)]
        for each in records.failed
    ]  # fmt: skip
    tables = []
    if missing:
        tables.append(Table("Not measured.", ["tool", "scenario", "reason"], missing, words=True))
    if failed:
        caption = "Ended with an error." + (_FAULTS if records.run.notes else "")
        tables.append(Table(caption, ["tool", "scenario", "case", "error"], failed, words=True))
    text = [] if tables else ["All tools were installed, and none failed."]
    if records.end is None:
        text.append("The run was stopped before its end, so cases or scenarios may be missing.")
    return [Section(title="Missing and failed", text=text, tables=tables)]


_FAULTS = ' The last points under "What is unfair" say which of these were faults of the benchmark.'


def last_words(error: str) -> str:
    """The message of the last exception in the last lines of a program, or its last line.

    >>> last_words("  File x, line 3, in y\\n    z()\\nValueError: no z\\n  in y")
    'ValueError: no z in y'
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["nothing was said"]
    raised = [place for place, line in enumerate(lines) if _RAISED.match(line)]
    text = " ".join(lines[raised[-1] if raised else -1 :])
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 1]}…"


def _method(records: Records) -> Section:
    run = records.run
    data = [
        [each.name, value_text(each.rows), *("" if n is None else value_text(n) for n in (each.genes, each.values)),
         number(each.values / each.rows) if each.values and each.rows else ""]
        for each in run.data
    ]  # fmt: skip
    points = [*_points(run), *map(str, run.extra.get("points", []))]
    link = run.extra.get("link")
    if isinstance(link, dict):
        points.append(_link(link))
    if run.prices:
        points.append(
            f"Dollars are computed from these prices: {_listed(run.prices)}. Without a price of egress, bytes are "
            "free, as they are within the region of a bucket."
        )
    tables = [Table("The data.", ["data set", "cells", "genes", "values", "values per cell"], data)] if data else []
    return Section(title="Method", points=points, tables=tables)


def _points(run: Run) -> Sequence[str]:
    """How the tools were measured."""
    if run.preset == elsewhere.REAL:
        return [*elsewhere.METHOD, f"Epochs of slow tools end early{_after(run)}. {_EARLY}", _UPPER]
    return [
        "Every tool runs in a process of its own: zloader in the environment in which the benchmark was started, every "
        "other tool in one with its own dependencies.",
        "The tools take turns: in each turn, each of them runs the same case once, on the same cells. What has a "
        "single turn, such as the memory over epochs, is measured one tool after the other, once.",
        "Every figure is the median over turns, except the waiting, which is measured in one epoch. Ratios to zloader "
        "are taken within each turn. A tool that takes too long for a case has fewer turns; the tables give their "
        "number.",
        "In scenarios that compare cells/s, each tool also gives out an epoch that is checked and not measured. A "
        "complete checked epoch must give out all cells, and values with the right sum. Slow tools' checked epochs end "
        "early, and then only too many cells are noticed. The values of protoplast and of tokens are not compared. A "
        "tool whose cells are wrong is listed as failed. Conversions are checked when their stores are read.",
        "Except in cold epochs and in new processes, the first epoch is not measured. zloader's mirror is full then.",
        f"Epochs of slow tools end early{_after(run)}. {_EARLY}",
        _UPPER,
    ]


_EARLY = (
    "Cells per second count the cells that were given out until then. A speed with ≥ is that of an epoch that ended "
    "early, and of which the wait for the first minibatch took more than a fifth: the tool would probably be faster in "
    "a longer epoch. If it took more than half, there is no ratio."
)
_UPPER = (
    "GETs, bytes, dollars and CPU seconds per cell are divided by the cells that were given out. In an epoch that "
    "ended early they include cells that were prefetched but not given out, so they are upper bounds, with ≤. Usually "
    "these are epochs of other tools."
)


def _after(run: Run) -> str:
    sizes = run.extra.get("sizes")
    most_s = sizes.get("most_s") if isinstance(sizes, dict) else None
    return f", {most_s:g} s after their first minibatch" if isinstance(most_s, int | float) else ""


def _link(link: Mapping[str, Any]) -> str:
    """The link of the simulated cloud, as cloud.LinkSpeed has it."""
    return (
        f"The link of the simulated cloud: a median of {link.get('ttfb_ms', 0):g} ms to the first byte (log-normal, "
        f"sigma {link.get('ttfb_sigma', 0):g}), {link.get('conn_mbps', 0):g} MB/s per connection, and "
        f"{link.get('total_mbps', 0):g} MB/s in all{', over TLS' if link.get('tls') else ''}."
    )


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def machine(records: Records) -> dict[str, str]:
    """When, where and how the run was made."""
    run = records.run
    facts = {
        "began": run.began or "at an unknown time",
        "commit": (run.commit or "unknown") + (" with uncommitted changes" if run.dirty else ""),
        "command": shlex.join(run.command),
        "preset": run.preset,
        "processor": run.processor + (f", {run.cores} cores" if run.cores else ""),
        "memory": size(run.memory_bytes) if run.memory_bytes else "",
        "disk": run.disk or "",
        "kernel": run.kernel,
        "Python": run.python,
        "load at the start": ", ".join(f"{load:g}" for load in run.load) + (" (1, 5, 15 minutes)" if run.load else ""),
        "resumed": ", ".join(each.began for each in records.resumed),
        "records": records.path.name,
    }
    return {name: fact for name, fact in facts.items() if fact}
