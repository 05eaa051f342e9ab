"""The section on costs: processor seconds and dollars of cold and warm epochs, for every tool.

The dollars of an epoch of 100 million cells are those of its processor seconds, at CORE_HOUR, and those of its GETs and
egress, at the prices of the run. A machine that waits is not counted, nor are disks, GPUs or conversions.
"""

from __future__ import annotations

from benchmarks.compare.reporting.page import Section, Table
from benchmarks.compare.reporting.records import Key, Measurement
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.words import Figure, number, scenario

CORE_HOUR = 0.05  # dollars: about the list price of a vCPU of a general machine on demand, at the large clouds
_EPOCH_CELLS = 100_000_000  # as in Tahoe-100M
_SCENARIOS = ("cold_warm_local", "cold_warm_cloud", "real")
_EPOCHS = ("cold", "warm")


def _cpu(measured: Measurement) -> float | None:
    return None if measured.cpu_s_per_row is None else 1e6 * measured.cpu_s_per_row


def _dollars(measured: Measurement) -> float | None:
    if measured.cpu_s_per_row is None or not measured.rows:
        return None
    store = (measured.dollars or 0.0) / measured.rows
    return _EPOCH_CELLS * (measured.cpu_s_per_row * CORE_HOUR / 3600 + store)


_FIGURES = (
    Figure(name="CPU s / million cells", axis="", of=_cpu, text=number, of_prefetched=True),
    Figure(name="$ / epoch", axis="", of=_dollars, text=lambda dollars: f"{dollars:.2f}", of_prefetched=True),
)


def sections(results: Results) -> list[Section]:
    """A table of the first data set for each scenario with cold and warm epochs; no section without one."""
    found = [name for name in _SCENARIOS if name in results.scenarios]
    tables = [table for name in found for table in _tables(results, name)]
    if not tables:
        return []
    prices = results.records.run.prices
    store = ", ".join(f"${prices[name]:g} per {name.replace('_', ' ')}" for name in prices)
    text = (
        "What does an epoch cost? CPU seconds are those of all threads and workers, per million cells. Dollars are for "
        f"an epoch of 100 million cells: these CPU seconds at ${CORE_HOUR:g} per core and hour, and the reads from "
        f"the bucket{f' ({store})' if store else ''}. Waiting cores, GPUs, disks and conversions are not in them."
    )
    return [Section(title="What an epoch costs", text=[text], tables=tables)]


def _tables(results: Results, name: str) -> list[Table]:
    data = next(iter(results.data(name)), None)
    keys = {dict(key.case).get("epoch"): key for key in results.keys(name, data)} if data else {}
    header = ["tool", *(f"{epoch}: {figure.name}" for epoch in _EPOCHS for figure in _FIGURES)]
    peers = list(dict.fromkeys(peer for key in keys.values() for peer in results.turns(key)))
    rows = [[peer, *_cells(results, keys, peer)] for peer in peers]
    caption = f"{scenario(name).title}, {data}."
    return [Table(caption, header, [row for row in rows if any(row[1:])])] if rows else []


def _cells(results: Results, keys: dict[object, Key], peer: str) -> list[str]:
    """The figures of a tool, with a bound where an epoch ended early."""
    cells = []
    for epoch in _EPOCHS:
        for figure in _FIGURES:
            key = keys.get(epoch)
            measured = results.spread(key, peer, figure) if key and peer in results.turns(key) else None
            bound = "≤ " if measured and key and results.at_most(key, peer, figure) else ""
            cells.append(bound + figure.text(measured.median) if measured else "")
    return cells
