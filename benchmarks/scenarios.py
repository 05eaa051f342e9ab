"""The scenarios of run.py. Each is a function of the session that runs its peers in turns and writes the records.

SCENARIOS has them by name. A peer says in its module of peers/ in which of them it takes part. `cold_warm`,
`first` and `scaling` start a process for every peer and turn. `kept` starts one for every peer and case, whose first
epoch is checked and not measured; then the peers take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import inputs
import rivals
import wide
from inputs import Data
from rivals import Figures, in_new_process, read_through
from session import Case, Contender, Place, Session, expect
from sides import Reader

WORK_S = 0.003  # a training step, for the share of waiting
_EPOCHS = 3  # of the scenario `memory`


def in_order(contenders: Iterable[Contender], turn: int) -> list[Contender]:
    """The contenders of a turn: every other turn in reverse order."""
    return list(contenders)[:: 1 if turn % 2 else -1]


# ---- new processes


def cold_warm_local(session: Session) -> None:
    """The first epoch of a new process, with an empty mirror and the store not in the page cache, and its second."""
    for data in base(session):
        cold_warm(session, data, cloud=False)


def cold_warm_cloud(session: Session) -> None:
    """The same through a simulated cloud."""
    cold_warm(session, session.data["synthetic"], cloud=True)


def base(session: Session) -> list[Data]:
    """The synthetic data, and the real ones, which alone are enough if the run is not thorough."""
    both = [data for data in session.data.values() if data.name != "screen"]
    return both if session.preset.thorough else both[-1:]


def cold_warm(session: Session, data: Data, *, cloud: bool) -> None:
    """Two epochs of every contender in turns. In the first turn an epoch is checked, and two measure the waiting."""
    scenario = "cold_warm_cloud" if cloud else "cold_warm_local"
    failed, checked = set[str](), dict[str, Figures]()
    for turn in range(1, session.preset.turns + 1):
        for each in in_order(session.taking_part(scenario), turn):
            place = partial(Place, scenario=scenario, peer=each.name, turn=turn, data=data.name)
            if each.name in failed:
                continue
            with session.attempt(place(case={"epoch": "cold"}), failed):
                with from_nothing(session, each, data, cloud=cloud) as one:
                    epochs = {"cold": cold(session, one), "warm": one.epoch(most_s=session.preset.most_s)}
                    waits: dict[str, Figures] = {"cold": {}, "warm": {}}
                    for figures in epochs.values():
                        expect(figures, data, each.side)
                    if turn == 1:
                        checked[each.name] = session.checked(one, data, each.side)
                        waits["warm"] = waiting(one.epoch(work_s=WORK_S, most_s=session.preset.most_s))
                if turn == 1 and session.preset.thorough:
                    with from_nothing(session, each, data, cloud=cloud) as one:
                        waits["cold"] = waiting(cold(session, one, work_s=WORK_S))
                for epoch, figures in epochs.items():
                    session.measurement(place(case={"epoch": epoch}), figures, **checked[each.name], **waits[epoch])


@contextlib.contextmanager
def from_nothing(session: Session, each: Contender, data: Data, *, cloud: bool) -> Iterator[Reader]:
    """A new process with an empty mirror."""
    mirror = session.work / "mirrors" / "cold"
    shutil.rmtree(mirror, ignore_errors=True)
    with session.reader(each, data, {}, mirror=mirror, cloud=cloud) as one:
        yield one


def cold(session: Session, one: Reader, **request: Any) -> Figures:
    """An epoch whose store is not in the page cache. In a cloud it is: there the link is measured, not the disk."""
    run = one.location.counted if one.location.cloud else one.location.uncached
    return run(partial(one.ask, most_s=session.preset.most_s, **request))


def waiting(figures: Figures) -> Figures:
    """The share of the time after the first fetch for which a consumer waited. None if there was no second fetch."""
    return {"wait_share": figures["waited_s"] / figures["after_s"] if figures["waited_s"] else None}


def first(session: Session) -> None:
    """Seconds from the start of a process to its first minibatch: the interpreter, imports, opening and reading."""
    data, failed = session.data["synthetic"], set[str]()
    for turn in range(0, session.preset.turns + 1):  # turn 0 fills the mirrors, and is not recorded
        for each in in_order(session.taking_part("first"), turn):
            place = Place(scenario="first", peer=each.name, case={}, turn=turn, data=data.name)
            if each.name in failed or not (turn or each.side.mirrored):
                continue
            with session.attempt(place, failed):
                figures = from_start(session, each, data, rows=1 if turn else None)
                if turn:
                    session.measurement(place, figures)


def from_start(session: Session, each: Contender, data: Data, *, rows: int | None = 1) -> Figures:
    """The first minibatch of a new process, timed from its start, with everything in the page cache."""
    for path in (session.store(each, data), *session.mirror(data).rglob("*")):
        for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
            if file.is_file():
                read_through(file)
    began = time.perf_counter()
    with session.reader(each, data, {}) as one:
        figures = one.ask(**({"rows": rows} if rows else {}))
        seconds = time.perf_counter() - began
        return {**figures, **one.ask(started=True), "seconds": seconds, "first_minibatch_s": seconds}


# ---- processes that are kept


def kept(
    session: Session, scenario: str, data: Data, case: Case, options: Case, *, most_s: float | None = None
) -> None:
    """Turns of one case. `options` are those of the readers."""
    preset, failed = session.preset, set[str]()
    with contextlib.ExitStack() as stack:
        readers: dict[str, tuple[Reader, Figures]] = {}
        for turn in range(0, preset.turns + 1):  # turn 0 starts and checks
            for each in in_order(session.taking_part(scenario), turn):
                if each.name in failed:
                    continue
                place = Place(scenario=scenario, peer=each.name, case=case, turn=turn, data=data.name)
                with session.attempt(place, failed):
                    if not turn:
                        one = stack.enter_context(session.reader(each, data, options))
                        readers[each.name] = (one, session.checked(one, data, each.side))
                        continue
                    one, found = readers[each.name]
                    figures = session.cached(one, data, most_s=most_s or preset.most_s)
                    expect(figures, data, each.side)
                    session.measurement(place, figures, **found)


def order(session: Session) -> None:
    """Speed and entropy by the sizes of blocks and fetches. Minibatches have 64 rows."""
    for block, factor in itertools.product(session.preset.blocks, session.preset.factors):
        if 64 * factor >= block:
            options = session.sizes(block=block, fetch_rows=64 * factor)
            kept(session, "order", session.data["synthetic"], {"block_rows": block, "fetch_factor": factor}, options)


def minibatch(session: Session) -> None:
    """Minibatches of several sizes, of blocks of 64 rows."""
    for size in session.preset.batch_sizes:
        fetch = max(size, session.preset.fetch_rows)
        options = session.sizes(batch_size=size, fetch_rows=fetch)
        kept(session, "minibatch", session.data["synthetic"], {"batch_size": size}, options)


def random(session: Session) -> None:
    """Perfectly random rows: blocks of one row."""
    kept(session, "random", session.data["synthetic"], {}, session.sizes(block=1))


def tokens(session: Session) -> None:
    """Tokens instead of values."""
    for name in session.preset.tokenizers:
        kept(session, "tokens", session.data["synthetic"], {"tokenizer": name}, {"tokens": name})


def sets(session: Session) -> None:
    """Sets of treated cells of one cell line and drug, each with a control. Controls do not count."""
    size = inputs.SCREEN_SET
    options = {**session.sizes(batch_size=8 * size), "set_size": size, "layout": "dense"}
    kept(session, "sets", session.data["screen"], {"set_size": size}, options)


def memory(session: Session) -> None:
    """The peak of the resident set in three epochs of one process. The peers run one after another."""
    data, failed = session.data["synthetic"], set[str]()
    for each in session.taking_part("memory"):
        start = Place(scenario="memory", peer=each.name, case={"epoch": 1}, turn=1, data=data.name)
        with session.attempt(start, failed), session.reader(each, data, {}) as one:
            for epoch in range(1, _EPOCHS + 1):
                figures = one.epoch(most_s=session.preset.most_s)
                expect(figures, data, each.side)
                place = Place(scenario="memory", peer=each.name, case={"epoch": epoch}, turn=1, data=data.name)
                session.measurement(place, figures)


def processes(session: Session) -> None:
    """Several processes of one machine, each with an epoch of its own over the same store. Rows are those of all."""
    data = session.data["synthetic"]
    for count in session.preset.processes:
        failed = set[str]()
        with contextlib.ExitStack() as stack:
            groups: dict[str, list[Reader]] = {}
            for turn in range(0, session.preset.turns + 1):
                for each in in_order(session.taking_part("processes"), turn):
                    place = Place(
                        scenario="processes", peer=each.name, case={"processes": count}, turn=turn, data=data.name
                    )
                    if each.name in failed:
                        continue
                    with session.attempt(place, failed):
                        if not turn:
                            started = [stack.enter_context(session.reader(each, data, {})) for _ in range(count)]
                            groups[each.name] = started
                            for one in started:  # the first fills the mirror
                                session.checked(one, data, each.side)
                            continue
                        figures = at_once(groups[each.name], each, data, session.preset.most_s)
                        session.measurement(place, figures, pss_bytes=figures["pss_bytes"])


def at_once(readers: list[Reader], each: Contender, data: Data, most_s: float) -> Figures:
    """The figures of epochs in several processes at once: sums, and the time until the last one has ended."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(readers)) as threads:
        found = list(threads.map(lambda one: one.ask(most_s=most_s), readers))
    seconds = time.perf_counter() - began
    for figures in found:
        expect(figures, data, each.side)
    names = ("rows", "user_s", "system_s", "peak_bytes")
    firsts = max(figures["first_minibatch_s"] for figures in found)
    pss = sum(wide.pss_bytes(one.process.pid) for one in readers)
    summed = {name: sum(figures[name] for figures in found) for name in names}
    return {**summed, "seconds": seconds, "first_minibatch_s": firsts, "pss_bytes": pss}


# ---- sizes


def scaling(session: Session) -> None:
    """Time and memory by the number of rows: from the start of a process to its first minibatch, then some of an epoch.

    Beyond the sizes of `scaling` there are only metadata and two values per row, and only the first minibatch counts.
    """
    for rows, whole in [*((n, True) for n in session.preset.scaling), *((n, False) for n in session.preset.metadata)]:
        failed = set[str]()
        contenders = [each for each in session.taking_part("scaling") if whole or each.tool == "zloader"]
        with of_size(session, rows, whole=whole) as (data, stored):
            for turn in range(0, session.preset.turns + 1):  # turn 0 converts and fills the mirror
                for each in in_order(contenders, turn):
                    place = Place(scenario="scaling", peer=each.name, case={"rows": rows}, turn=turn, data=data.name)
                    if each.name in failed:
                        continue
                    with session.attempt(place, failed):
                        if not turn:
                            stored(each)
                        figures = from_start(session, each, data)
                        if turn:
                            session.measurement(place, figures, metadata_only=not whole)


@contextlib.contextmanager
def of_size(session: Session, rows: int, *, whole: bool) -> Iterator[tuple[Data, Callable[[Contender], Any]]]:
    """Data of a size, and a function that writes a contender's store. All of it is deleted afterwards."""
    base, name = session.data["synthetic"], f"rows_{rows}"
    folder = session.work / name
    copies = max(1, rows // base.rows)
    data = Data(**{**vars(base), "name": name, "rows": rows})
    if whole and copies == 1:
        data = inputs.synthetic(folder / "data.h5ad", rows=rows, genes=session.preset.genes, name=name)

    def stored(each: Contender) -> None:
        store = session.stored_at(each, data)
        if whole:
            session.convert(each, data, store, copies=copies)
        else:
            folder.mkdir(exist_ok=True)
            in_new_process(wide.write, store, rows)
        session.put(each, data, store)

    try:
        yield data, stored
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(session.mirror(data), ignore_errors=True)


def conversion(session: Session) -> None:
    """Conversions of the synthetic data, in new processes. Seconds are those of the call, after the imports."""
    data, failed = session.data["synthetic"], set[str]()
    read_through(data.path)
    for turn in range(1, session.preset.turns + 1):
        for each in in_order(session.taking_part("conversion"), turn):
            place = Place(scenario="conversion", peer=each.name, case={}, turn=turn, data=data.name)
            if each.name in failed:
                continue
            with session.attempt(place, failed):
                store = session.stored_at(each, data)
                figures = session.convert(each, data, store)
                session.put(each, data, store)
                sizes = {"stored_bytes": rivals.stored_bytes(store), "process_s": figures["wall_s"]}
                session.measurement(place, {**figures, "rows": data.rows, "seconds": figures["call_s"]}, **sizes)


SCENARIOS: dict[str, Callable[[Session], None]] = {
    function.__name__: function
    for function in (
        conversion,
        cold_warm_local,
        cold_warm_cloud,
        order,
        minibatch,
        random,
        tokens,
        sets,
        first,
        memory,
        scaling,
        processes,
    )
}
