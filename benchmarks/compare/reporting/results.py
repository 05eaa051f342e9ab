"""The measurements of a run by scenario, data set and case, and how zloader compares with the other peers in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.compare.reporting.records import Key, Measurement, Records, Turns
from benchmarks.compare.reporting.turns import Spread, figures, ratios, spread
from benchmarks.compare.reporting.words import (
    CEILING,
    CELLS,
    ENTROPY,
    OURS,
    Figure,
    case_order,
    is_ours,
    scenario,
    scenario_order,
)

_WHOLE = 0.9  # of the rows of a data set, for files without `ended`; some loaders leave out a few
_LONG_START = 0.2  # of the time of an epoch
_HARDLY_BEGUN = 0.5  # the same


@dataclass(frozen=True)
class Entry:
    """One peer in one case: the spread of the figure, and that of zloader's advantage, above 1 if zloader is better.

    `at_least` says that the figure is a speed that the peer would exceed in a longer epoch.
    """

    peer: str
    figure: Spread
    against: Spread | None
    at_least: bool = False


@dataclass(frozen=True)
class Headline:
    """A case that stands for its scenario: zloader beside the best other tool, None if there is no other.

    `turns` is the number of turns in which both were measured, or zloader if there is no other. `memory` is the figure
    of an AnnData in memory, and `mixing` the entropy of labels that zloader and the other tool gave, if measured.
    """

    label: str
    figure: Figure
    ours: Entry
    other: Entry | None
    turns: int = 0
    memory: Spread | None = None
    mixing: tuple[Spread | None, Spread | None] = (None, None)


_HEADLINES: Sequence[tuple[str, Mapping[str, str | int], str]] = (
    ("cold_warm_local", {"epoch": "cold"}, "cold epoch, local disk"),
    ("cold_warm_cloud", {"epoch": "cold"}, "cold epoch, simulated cloud"),
    ("cold_warm_local", {"epoch": "warm"}, "warm epoch, local disk"),
    ("cold_warm_cloud", {"epoch": "warm"}, "warm epoch, simulated cloud (zloader: its copy on the disk)"),
    ("in_place", {"compression": "none", "epoch": "cold"}, "cold epoch from an .h5ad file"),
    ("in_place", {"compression": "none", "epoch": "warm"}, "warm epoch from an .h5ad file"),
    ("real", {"epoch": "cold"}, "cold epoch, this store"),
    ("real", {"epoch": "warm"}, "warm epoch, this store"),
    ("random", {}, "perfectly random cells"),
    ("minibatch", {"batch_size": 1024}, "minibatches of 1 024"),
    ("first", {}, "time to the first minibatch"),
)


def _of_all_sizes(key: Key) -> Key:
    """The same case, in one group with stores of other sizes, each of which run.py calls a data set of its own."""
    rows = dict(key.case).get("rows")
    return dataclasses.replace(key, data="synthetic, all sizes") if key.data == f"rows_{rows}" else key


class Results:
    """The measurements of a run, grouped."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._turns: dict[Key, dict[str, Turns]] = {}
        for key, turns in records.turns().items():
            self._turns.setdefault(_of_all_sizes(key), {}).update(turns)
        names = [peer.peer for peer in records.peers] + [measured.peer for measured in records.measurements]
        tools = [name.split(",")[0] for name in names]
        self.peers = sorted(
            dict.fromkeys(names), key=lambda name: (not is_ours(name), name == CEILING, tools.index(name.split(",")[0]))
        )

    @property
    def scenarios(self) -> list[str]:
        return sorted({key.scenario for key in self._turns}, key=scenario_order)

    @property
    def first_data(self) -> str:
        """The data set that the run names first."""
        return self.records.run.data[0].name if self.records.run.data else self.records.measurements[0].data

    def data(self, scenario: str) -> list[str]:
        """The data sets of a scenario, in the order in which the run names them."""
        known = [data.name for data in self.records.run.data]
        found = dict.fromkeys(key.data for key in self._turns if key.scenario == scenario)
        return sorted(found, key=lambda name: known.index(name) if name in known else len(known))

    def keys(self, scenario: str, data: str) -> list[Key]:
        return sorted((key for key in self._turns if (key.scenario, key.data) == (scenario, data)), key=case_order)

    def turns(self, key: Key) -> Mapping[str, Turns]:
        return self._turns[key]

    def spread(self, key: Key, peer: str, figure: Figure) -> Spread | None:
        """The spread of a figure over the turns of a peer, None if it was not measured."""
        return spread(figures(self._turns[key].get(peer, {}), figure.of))

    def entries(self, key: Key, figure: Figure) -> list[Entry]:
        """The peers of a case that have the figure, the best first."""
        found = [(peer, self.spread(key, peer, figure)) for peer in self._turns[key]]
        ours = self._reference(key, figure)
        entries = []
        for peer, measured in found:
            if measured:
                hardly_begun = self._cut_short(key, peer, figure, _HARDLY_BEGUN)
                against = None if hardly_begun else self._against(key, peer, ours, figure)
                entries.append(Entry(peer, measured, against, self._cut_short(key, peer, figure)))
        return sorted(entries, key=lambda entry: entry.figure.median, reverse=figure.higher_is_better)

    def _cut_short(self, key: Key, peer: str, figure: Figure, share: float = _LONG_START) -> bool:
        """Whether an epoch ended early, and more than a share of it was the wait for its first minibatch."""
        return figure is CELLS and any(
            not self._ended(each) and (each.first_s or 0) > share * each.seconds
            for each in self._turns[key][peer].values()
        )

    def at_most(self, key: Key, peer: str, figure: Figure) -> bool:
        """Whether a figure is an upper bound, because it also counts prefetched cells of an epoch that ended early."""
        return figure.of_prefetched and not all(map(self._ended, self._turns[key][peer].values()))

    def _ended(self, measured: Measurement) -> bool:
        """Whether an epoch gave out all its rows. In older files, one that gave out nearly all rows of the data did."""
        if measured.ended is not None:
            return measured.ended
        rows = next((data.rows for data in self.records.run.data if data.name == measured.data), 0)
        return measured.rows >= _WHOLE * rows

    def _reference(self, key: Key, figure: Figure) -> str | None:
        """zloader, or its best variant where zloader itself was not measured."""
        ours = {
            peer: measured
            for peer in self._turns[key]
            if is_ours(peer) and (measured := self.spread(key, peer, figure))
        }
        if OURS in ours or not ours:
            return OURS if ours else None
        best = max if figure.higher_is_better else min
        return best(ours, key=lambda peer: ours[peer].median)

    def _against(self, key: Key, peer: str, ours: str | None, figure: Figure) -> Spread | None:
        if ours is None or peer == ours:
            return None
        mine, theirs = self._turns[key][ours], self._turns[key][peer]
        over, under = (mine, theirs) if figure.higher_is_better else (theirs, mine)
        return spread(list(ratios(over, under, figure.of).values()))

    def reference(self, key: Key, figure: Figure) -> Entry | None:
        ours = self._reference(key, figure)
        return next((entry for entry in self.entries(key, figure) if entry.peer == ours), None)

    def headlines(self) -> list[Headline]:
        """Cases that were measured with zloader, each with the best of the other tools, for the first data set."""
        found = []
        for name, wanted, label in _HEADLINES:
            figure = scenario(name).figure
            for data in self.data(name)[:1]:
                keys = [key for key in self.keys(name, data) if wanted.items() <= dict(key.case).items()]
                ours = self.reference(keys[0], figure) if keys else None
                if ours:
                    others = [entry for entry in self.entries(keys[0], figure) if is_rival(entry.peer)]
                    other = others[0] if others else None
                    of = label if data == self.first_data else f"{label} ({data})"
                    turns, memory = self.common_turns(keys[0], ours, other), self.spread(keys[0], CEILING, figure)
                    mixing = [self.spread(keys[0], each.peer, ENTROPY) if each else None for each in (ours, other)]
                    found.append(Headline(of, figure, ours, other, turns, memory, (mixing[0], mixing[1])))
        return found

    def common_turns(self, key: Key, one: Entry, other: Entry | None) -> int:
        """The number of turns in which both were measured, or the one if there is no other."""
        turns = self._turns[key]
        return len(turns[one.peer].keys() & turns[(other or one).peer].keys())

    def behind(self) -> list[tuple[Key, Entry, Entry]]:
        """The cases in which another loader is better than zloader: the case, zloader, and the best other loader."""
        found = []
        for name in self.scenarios:
            figure = scenario(name).figure
            for data in self.data(name):
                for key in self.keys(name, data):
                    ours = self.reference(key, figure)
                    ahead = [e for e in self.entries(key, figure) if is_rival(e.peer) and e.against]
                    ahead = [entry for entry in ahead if entry.against and entry.against.median < 1]
                    if ours and ahead:
                        found.append((key, ours, ahead[0]))
        return found


def is_rival(peer: str) -> bool:
    """Whether this is another loader: neither zloader nor cells in memory."""
    return not is_ours(peer) and peer != CEILING
