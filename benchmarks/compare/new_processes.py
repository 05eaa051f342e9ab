"""The scenarios of run.py in which a process starts for every peer and turn."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.compare import inputs
from benchmarks.compare.inputs import Data
from benchmarks.compare.session import Case, Contender, Place, Session, expect
from benchmarks.data import wide_store
from benchmarks.harness import measuring
from benchmarks.harness.measuring import Figures, in_new_process, read_through
from benchmarks.harness.sides import Reader
from zloader.common.machine import available_bytes

WORK_S = 0.003  # a training step, for the share of waiting
_EPOCHS = 3  # of the scenario `memory`
_TOUCHED = 4 << 30  # before a start of which every second counts: see measuring.touch


def cold_warm_local(session: Session) -> None:
    """The first epoch of a new process, with an empty mirror and the store not in the page cache, and its second."""
    for data in base(session):
        cold_warm(session, data, "cold_warm_local")


def cold_warm_cloud(session: Session) -> None:
    """The same through a simulated cloud."""
    cold_warm(session, session.data["synthetic"], "cold_warm_cloud", cloud=True)


def in_place(session: Session) -> None:
    """The same from the .h5ad file itself, uncompressed and compressed, by the tools that read such files."""
    data = session.data["synthetic"]
    for compression in session.preset.compressions:
        path = data.path if compression == "none" else inputs.compressed(data.path, compression)
        cold_warm(session, replace(data, path=path), "in_place", {"compression": compression})


def base(session: Session) -> list[Data]:
    """The synthetic data and the real ones, or only the real ones."""
    both = [data for data in session.data.values() if data.name != "screen"]
    return both[-1:] if session.preset.one_data else both


def cold_warm(
    session: Session, data: Data, scenario: str, case: Case = MappingProxyType({}), *, cloud: bool = False
) -> None:
    """Two epochs of every contender in turns. In the first turn an epoch is checked, and others measure the waiting.

    The waiting in cold epochs takes processes of its own, and is measured only where it is longest, in a cloud.
    """
    for _ in session.left(scenario, data.name, [case]):
        left_out, checked = set[str](), dict[str, Figures]()
        for turn in session.preset.turns_of(scenario, data.name):
            for each in session.taking_part(scenario, turn, data.name):
                place = partial(Place, scenario=scenario, peer=each.name, turn=turn, data=data.name)
                if each.name in left_out:
                    continue
                with session.attempt(place(case={**case, "epoch": "cold"}), left_out):
                    epochs, waits = two_epochs(session, each, data, cloud=cloud, first=turn == 1)
                    if turn == 1:
                        checked[each.name] = waits.pop("checked")
                    for epoch, figures in epochs.items():
                        more = checked[each.name] | waits.get(epoch, {})
                        session.measurement(place(case={**case, "epoch": epoch}), figures, **more)


def two_epochs(
    session: Session, each: Contender, data: Data, *, cloud: bool, first: bool
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """The figures of a cold and a warm epoch. In the first turn also those of the checked epoch, and of the waiting.

    The waiting of very slow peers is not measured.
    """
    most_s, more = session.preset.most_s, dict[str, Figures]()
    with from_nothing(session, each, data, cloud=cloud) as one:
        epochs = {"cold": cold(one, session.most_s(each.side)), "warm": one.epoch(most_s=most_s)}
        for figures in epochs.values():
            expect(figures, data, each.side)
        if first:
            more["checked"] = session.checked(one, data, each.side, thoroughly=True)
            slow = sum(figures["seconds"] for figures in epochs.values()) > session.preset.peer_s / 2
            more["warm"] = {} if slow else waiting(one.epoch(work_s=WORK_S, most_s=most_s))
    if first and cloud and not slow:
        with from_nothing(session, each, data, cloud=cloud) as one:
            more["cold"] = waiting(cold(one, session.most_s(each.side), work_s=WORK_S))
    return epochs, more


@contextlib.contextmanager
def from_nothing(session: Session, each: Contender, data: Data, *, cloud: bool) -> Iterator[Reader]:
    """A new process with an empty mirror."""
    mirror = session.work / "mirrors" / "cold"
    shutil.rmtree(mirror, ignore_errors=True)
    with session.reader(each, data, {}, mirror=mirror, cloud=cloud) as one:
        one.ask(started=True)  # it has opened the store, which is not a part of its epochs
        yield one


def cold(one: Reader, most_s: float, **request: Any) -> Figures:
    """An epoch whose store is not in the page cache. In a cloud it is: there the link is measured, not the disk."""
    run = one.location.counted if one.location.cloud else one.location.uncached
    return run(partial(one.ask, most_s=most_s, **request))


def waiting(figures: Figures) -> Figures:
    """The share of the time after the first fetch for which a consumer waited. None if there was no second fetch."""
    return {"wait_share": figures["waited_s"] / figures["after_s"] if figures["waited_s"] else None}


def first(session: Session) -> None:
    """Seconds from the start of a process to its first minibatch: the interpreter, imports, opening and reading."""
    data, left_out = session.data["synthetic"], set[str]()
    for _ in session.left("first", data.name, [{}]):
        for turn in (0, *session.preset.turns_of("first")):  # turn 0 fills mirrors and the page cache: not recorded
            for each in session.taking_part("first", turn):
                place = Place(scenario="first", peer=each.name, case={}, turn=turn, data=data.name)
                if each.name in left_out:
                    continue
                with session.attempt(place, left_out):
                    figures = from_start(session, each, data, rows=None if each.side.mirrored and not turn else 1)
                    if turn:
                        session.measurement(place, figures)


def from_start(session: Session, each: Contender, data: Data, *, rows: int | None = 1) -> Figures:
    """The first minibatch of a new process, timed from its start, with everything in the page cache."""
    store = session.store(each, data)
    with session.preparing():
        for path in (store, *session.mirror(data).rglob("*")):
            for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
                if file.is_file():
                    read_through(file)
    began = time.perf_counter()
    with session.reader(each, data, {}) as one:
        figures = one.ask(**({"rows": rows} if rows else {}))
        seconds = figures["first_at"] - began
        return {**figures, **one.ask(started=True), "seconds": seconds, "first_minibatch_s": seconds}


def memory(session: Session) -> None:
    """The peak of the resident set in three epochs of a new process."""
    data, left_out = session.data["synthetic"], set[str]()
    for _ in session.left("memory", data.name, [{}]):
        for turn in session.preset.turns_of("memory"):
            for each in session.taking_part("memory", turn):
                place = partial(Place, scenario="memory", peer=each.name, turn=turn, data=data.name)
                if each.name in left_out:
                    continue
                with session.attempt(place(case={"epoch": 1}), left_out), session.reader(each, data, {}) as one:
                    for epoch in range(1, _EPOCHS + 1):
                        figures = one.epoch(most_s=session.preset.most_s)
                        expect(figures, data, each.side)
                        session.measurement(place(case={"epoch": epoch}), figures)


def scaling(session: Session) -> None:
    """Time and memory of a new process up to its first minibatch, by the number of rows.

    Beyond the sizes of `scaling` there are only metadata and two values per row, and only zloader takes part.
    """
    preset = session.preset
    for rows in (*preset.scaling, *preset.metadata):
        for case in session.left("scaling", name_of_size(rows), [{"rows": rows}]):
            of_one_size(session, case, whole=rows in preset.scaling)


def of_one_size(session: Session, case: Case, *, whole: bool) -> None:
    """The turns of one number of rows. Only zloader reads data that are not `whole`."""
    left_out = set[str]()
    with of_size(session, case["rows"], whole=whole) as (data, stored):
        for turn in (0, *session.preset.turns_of("scaling")):  # turn 0 converts and fills the mirror
            for each in session.taking_part("scaling", turn):
                place = Place(scenario="scaling", peer=each.name, case=case, turn=turn, data=data.name)
                if each.name in left_out or not (whole or each.tool == "zloader"):
                    continue
                with session.attempt(place, left_out):
                    with session.preparing():
                        if not turn:
                            stored(each)
                        in_new_process(measuring.touch, min(_TOUCHED, available_bytes() // 4))
                    figures = from_start(session, each, data)
                    if turn:
                        session.measurement(place, figures, metadata_only=not whole)


def name_of_size(rows: int) -> str:
    """The name of the data set of a size."""
    return f"rows_{rows}"


@contextlib.contextmanager
def of_size(session: Session, rows: int, *, whole: bool) -> Iterator[tuple[Data, Callable[[Contender], Any]]]:
    """Data of a size, and a function that writes a contender's store. All of it is deleted afterwards."""
    base, name = session.data["synthetic"], name_of_size(rows)
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
            in_new_process(wide_store.write, store, rows)
        session.put(each, data, store)

    try:
        yield data, stored
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(session.mirror(data), ignore_errors=True)


def conversion(session: Session) -> None:
    """Conversions of the synthetic data, in new processes. Seconds are those of the call, after the imports."""
    data, left_out = session.data["synthetic"], set[str]()
    read_through(data.path)
    for _ in session.left("conversion", data.name, [{}]):
        for turn in session.preset.turns_of("conversion"):
            for each in session.taking_part("conversion", turn):
                place = Place(scenario="conversion", peer=each.name, case={}, turn=turn, data=data.name)
                if each.name in left_out:
                    continue
                with session.attempt(place, left_out):
                    store = session.stored_at(each, data)
                    figures = session.convert(each, data, store)
                    session.put(each, data, store)
                    sizes = {"stored_bytes": measuring.stored_bytes(store), "process_s": figures["wall_s"]}
                    figures |= {"rows": data.rows, "seconds": figures["call_s"]}
                    session.measurement(place, figures, **sizes)
