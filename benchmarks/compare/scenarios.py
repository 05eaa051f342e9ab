"""The scenarios of run.py. Each is a function of the session that runs its peers in turns and writes the records.

SCENARIOS has them by name. A peer says in its module of peers/ in which of them it takes part. The scenarios of
new_processes.py start a process for every peer and turn. `kept` starts one for every peer and case, whose first epoch
is checked and not measured; then the peers take turns. The turns of a case are made in one stretch, also if the run is
stopped and resumed (`Session.left`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.compare import inputs
from benchmarks.compare.inputs import Data
from benchmarks.compare.new_processes import (
    cold_warm_cloud,
    cold_warm_local,
    conversion,
    first,
    in_place,
    memory,
    scaling,
)
from benchmarks.compare.session import Case, Contender, Place, Session, expect
from benchmarks.harness.measuring import Figures, pss_bytes
from benchmarks.harness.sides import Reader


def kept(session: Session, scenario: str, data: Data, case: Case, options: Case) -> None:
    """Turns of one case. `options` are those of the readers."""
    preset, left_out = session.preset, set[str]()
    with contextlib.ExitStack() as stack:
        readers: dict[str, tuple[Reader, Figures]] = {}
        for turn in (0, *preset.turns_of(scenario)):  # turn 0 starts and checks
            for each in session.taking_part(scenario, turn):
                if each.name in left_out:
                    continue
                place = Place(scenario=scenario, peer=each.name, case=case, turn=turn, data=data.name)
                with session.attempt(place, left_out):
                    if not turn:
                        one = stack.enter_context(session.reader(each, data, options))
                        readers[each.name] = (one, session.checked(one, data, each.side))
                        continue
                    one, found = readers[each.name]
                    figures = session.cached(one, data, most_s=preset.most_s)
                    expect(figures, data, each.side)
                    session.measurement(place, figures, **found)


def order(session: Session) -> None:
    """Speed and entropy by the sizes of blocks and fetches. Minibatches have 64 rows."""
    data, preset = session.data["synthetic"], session.preset
    pairs = itertools.product(preset.blocks, preset.factors)
    cases = [{"block_rows": block, "fetch_factor": factor} for block, factor in pairs if 64 * factor >= block]
    for case in session.left("order", data.name, cases):
        options = session.sizes(block=case["block_rows"], fetch_rows=64 * case["fetch_factor"])
        kept(session, "order", data, case, options)


def minibatch(session: Session) -> None:
    """Minibatches of several sizes, of blocks of 64 rows."""
    data = session.data["synthetic"]
    for case in session.left("minibatch", data.name, [{"batch_size": size} for size in session.preset.batch_sizes]):
        fetch = max(case["batch_size"], session.preset.fetch_rows)
        kept(session, "minibatch", data, case, session.sizes(batch_size=case["batch_size"], fetch_rows=fetch))


def random(session: Session) -> None:
    """Perfectly random rows: blocks of one row."""
    data = session.data["synthetic"]
    for case in session.left("random", data.name, [{}]):
        kept(session, "random", data, case, session.sizes(block=1))


def panel(session: Session) -> None:
    """Minibatches of the most variable genes alone, of several sizes and of blocks of 64 rows.

    They are chosen from the data of all genes, and then read from data that have no others.
    """
    data, genes = inputs.panel(session.data["synthetic"], session.preset.panel_genes)
    written = inputs.of_genes(data, genes, session.work / "panel" / "data.h5ad")
    cases = [{"genes": len(genes), "batch_size": size} for size in session.preset.batch_sizes]
    for each, chosen in ((data, {"genes": genes}), (written, {})):
        for case in session.left("panel", each.name, cases):
            fetch = max(case["batch_size"], session.preset.fetch_rows)
            options = {**session.sizes(batch_size=case["batch_size"], fetch_rows=fetch), **chosen}
            kept(session, "panel", each, case, options)


def tokens(session: Session) -> None:
    """Tokens instead of values."""
    data = session.data["synthetic"]
    for case in session.left("tokens", data.name, [{"tokenizer": name} for name in session.preset.tokenizers]):
        kept(session, "tokens", data, case, {"tokens": case["tokenizer"]})


def sets(session: Session) -> None:
    """Sets of treated cells of one cell line and drug, each with a control. Controls do not count."""
    data, size = session.data["screen"], inputs.SCREEN_SET
    options = {**session.sizes(batch_size=8 * size), "set_size": size, "layout": "dense"}
    for case in session.left("sets", data.name, [{"set_size": size}]):
        kept(session, "sets", data, case, options)


def processes(session: Session) -> None:
    """Several processes of one machine, each with an epoch of its own over the same store. Rows are those of all."""
    data = session.data["synthetic"]
    for case in session.left("processes", data.name, [{"processes": count} for count in session.preset.processes]):
        left_out = set[str]()
        with contextlib.ExitStack() as stack:
            groups: dict[str, list[Reader]] = {}
            for turn in (0, *session.preset.turns_of("processes")):
                for each in session.taking_part("processes", turn):
                    place = Place(scenario="processes", peer=each.name, case=case, turn=turn, data=data.name)
                    if each.name in left_out:
                        continue
                    with session.attempt(place, left_out):
                        if not turn:
                            own = {"workers": max(1, len(os.sched_getaffinity(0)) // case["processes"])}
                            group = [session.reader(each, data, own) for _ in range(case["processes"])]
                            groups[each.name] = [stack.enter_context(one) for one in group]
                            session.checked(groups[each.name][0], data, each.side)  # fills the mirror
                            at_once(groups[each.name], each, data, session.preset.most_s)
                            continue
                        figures = at_once(groups[each.name], each, data, session.preset.most_s)
                        session.measurement(place, figures, pss_bytes=figures["pss_bytes"])


def at_once(readers: list[Reader], each: Contender, data: Data, most_s: float) -> Figures:
    """The figures of epochs in several processes at once: sums, and the time until the last one has ended."""
    with ThreadPoolExecutor(len(readers)) as threads:
        found = list(threads.map(lambda one: one.ask(most_s=most_s), readers))
    seconds = max(figures["ended_at"] for figures in found) - min(figures["began_at"] for figures in found)
    for figures in found:
        expect(figures, data, each.side)
    names = ("rows", "user_s", "system_s", "peak_bytes", "workers_bytes")
    firsts = max(figures["first_minibatch_s"] for figures in found)
    pss = sum(pss_bytes(one.process.pid) for one in readers)
    summed = {name: sum(figures[name] for figures in found) for name in names}
    ended = all(figures["ended"] for figures in found)
    return {**summed, "seconds": seconds, "first_minibatch_s": firsts, "pss_bytes": pss, "ended": ended}


SCENARIOS: dict[str, Callable[[Session], None]] = {
    function.__name__: function
    for function in (
        conversion,
        cold_warm_local,
        cold_warm_cloud,
        in_place,
        order,
        minibatch,
        random,
        panel,
        tokens,
        sets,
        first,
        memory,
        scaling,
        processes,
    )
}
