"""Leaving an epoch in every way, and worker processes of every kind (invariants 16 and 17)."""

from __future__ import annotations

import functools
import gc
import json
import logging
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Interpreter
from helpers import NEVER_S, TESTS, assert_threads_end, check_minibatch, counts, digest, write_store

import zloader as zl
from benchmarks.harness.s3 import Sim

ADATA = counts(503, 97)
SIZES = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}
ELEMENTS = "X/(indices|data)/c/"
STALL = {"kind": "stall", "match": ELEMENTS, "after": 10}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lifecycle")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder)
    return folder


@pytest.fixture(scope="module")
def server(bucket: Path) -> Iterator[Sim]:
    with Sim(root=bucket) as running:
        yield running


def over(server: Sim) -> dict[str, Any]:
    """Arguments that open the store on a simulator, without read timeouts."""
    options = {"key": "any", "secret": "any", "endpoint_url": server.url, "config_kwargs": {"read_timeout": NEVER_S}}
    return {"url": "s3://atlas/counts.zarr", "storage_options": options}


@pytest.fixture(params=["disk", "disk, mirror", "S3"])
def loader(request, bucket, tmp_path) -> zl.Loader:
    place: dict[str, Any] = {"url": bucket / "atlas" / "counts.zarr"}
    if request.param == "S3":
        place = over(request.getfixturevalue("server"))
    cache = tmp_path / "cache" if "mirror" in request.param else None
    return zl.Loader(zl.open_dataset(**place, cache=cache), **SIZES)


def rows_of(minibatches: Any) -> list[int]:
    """The rows of an epoch in ascending order. Each minibatch is compared with the source."""
    return sorted(np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in minibatches]).tolist())


# ---- ways of leaving. What each function returns is kept until the threads have ended, as notebooks keep errors.


def leave_by_break(loader):
    for _ in loader:
        break


def leave_by_exception(loader):
    def train():
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    return caught


def leave_by_exit(loader):
    def train():
        for _ in loader:
            sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        train()
    return caught


def leave_by_interrupt(loader):
    def train():
        for _ in loader:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train()
    return caught


def leave_in_a_cycle(loader):
    cycle = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()


def leave_without_taking(loader):
    iter(loader)


def leave_by_close(loader):
    minibatches = iter(loader)
    next(minibatches)
    minibatches.close()
    return minibatches


WAYS = [
    leave_by_break,
    leave_by_exception,
    leave_by_exit,
    leave_by_interrupt,
    leave_in_a_cycle,
    leave_without_taking,
    leave_by_close,
]


@pytest.mark.every(8)
@pytest.mark.parametrize("leave", WAYS)
def test_leaving_ends_the_threads_and_the_next_epoch_works(loader, leave):
    kept = leave(loader)
    assert_threads_end()
    assert rows_of(loader) == list(range(503))
    assert_threads_end()
    del kept


@pytest.mark.every(2)
def test_an_epoch_outlives_its_loader_and_ends_with_its_iterator(loader):
    minibatches = iter(loader)
    first = next(minibatches)
    del loader
    gc.collect()
    assert rows_of([first, *minibatches]) == list(range(503))
    assert_threads_end()


def test_epochs_side_by_side_do_not_end_each_other(loader):
    left, other = iter(loader), iter(loader)
    taken = [next(other)]
    next(left)
    del left
    assert rows_of([*taken, *other]) == list(range(503))
    assert_threads_end()


# ---- a stalling server


@pytest.fixture
def stalling(sim, bucket) -> tuple[zl.Loader, Sim]:
    """A loader whose reads neither end nor reach their deadline."""
    server = sim(root=bucket)
    loader = zl.Loader(zl.open_dataset(**over(server)), **SIZES, options=zl.FetchOptions(deadline_s=NEVER_S))
    assert rows_of(loader) == list(range(503))
    server.faults = [STALL | {"skip": loader.statistics().gets // 2}]  # so that the first minibatches arrive
    return loader, server


def drop_while_stalled(loader, stalled):
    minibatches = iter(loader)
    next(minibatches)
    stalled()
    del minibatches


def interrupt_while_waiting(loader, stalled):
    """Ctrl-C in next(), where a loop over a slow store spends its time. The error is kept, as in a notebook."""

    def interrupt():
        stalled()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def train():
        for _ in loader:
            pass

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        train()
    return caught


@pytest.mark.parametrize("leave", [drop_while_stalled, interrupt_while_waiting])
def test_leaving_while_the_server_stalls(stalling, leave):
    loader, server = stalling

    def stalled():
        while "fault_stall" not in server.stats():
            threading.Event().wait(0.01)

    kept = leave(loader, stalled)
    assert_threads_end()
    server.faults = []
    assert rows_of(loader) == list(range(503))
    del kept


# ---- the end of the process

# Runs each way of ending in its own process, and prints the exit status and stderr of each. Stalls and deadlines never
# end, so a process that waits for either does not end.
_EXITS = """
import json, os, signal, sys, tempfile, threading, time, urllib.request
import s3fs
import zloader as zl
from zloader.training.loader import Loader

sizes = {"batch_size": 4, "fetch_factor": 2, "sampling": zl.BlockShuffling(2)}

def ask(what, settings=None):
    body = None if settings is None else json.dumps(settings).encode()
    with urllib.request.urlopen(place["server"] + "/__sim/" + what, body) as answer:
        return json.load(answer)

def begun():
    if place["faults"]:
        ask("reset"), ask("config", {"faults": place["faults"]})
    options = zl.FetchOptions(deadline_s=place["deadline_s"])
    minibatches = iter(Loader(zl.open_dataset(**place["open"]), **sizes, options=options))
    if place["taking"]:
        next(minibatches)
    else:
        threading.Thread(target=next, args=(minibatches, None), daemon=True).start()
    while place["faults"] and "fault_" + place["faults"][0]["kind"] not in ask("stats"):
        time.sleep(0.01)
    return minibatches

def close_first():
    begun().close()

def hold():
    globals()["held"] = begun()

def hold_in_a_cycle():
    cycle = [begun()]
    cycle.append(cycle)

def begin_on_a_thread():
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()

def keep_the_error():
    try:
        fail()
    except ZeroDivisionError as error:
        sys.last_value = error

def exit_3():
    for _ in [begun()]:
        sys.exit(3)

def fail():
    for _ in [begun()]:
        raise ZeroDivisionError("on purpose")

def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in [begun()]:
        os.kill(os.getpid(), signal.SIGINT)

for place in json.loads(sys.argv[1]):
    for way in place["ways"]:
        said = tempfile.TemporaryFile("w+")
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            globals()[way]()
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([place["name"], way, status, said.read()]), flush=True)
"""
_STATUS = {"exit_3": 3, "fail": 1, "interrupt": -signal.SIGINT}
_SAYS = {"fail": "ZeroDivisionError: on purpose", "interrupt": "KeyboardInterrupt"}
_ENDS = {
    "disk": ["close_first", "hold", "interrupt"],
    "stalled S3": [
        "close_first",
        "hold_in_a_cycle",
        "begin_on_a_thread",
        "keep_the_error",
        "exit_3",
        "fail",
        "interrupt",
    ],
    "slow HEAD": ["hold"],
}
_UNTAGGED = {"kind": "etag", "match": ELEMENTS, "value": '"another"'}


def run_script(interpreter: Interpreter, script: str, *arguments: Any) -> list[Any]:
    """Runs a script; returns its output, one JSON document per line."""
    done = interpreter.run(script, *map(json.dumps, arguments))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def ends(bucket, interpreter) -> dict[tuple[str, str], Any]:
    """The exit status and stderr of each way of ending a process, for each place."""
    with Sim(root=bucket) as server:
        faults = {
            "disk": [],
            "stalled S3": [STALL | {"skip": 40}],
            "slow HEAD": [{"kind": "delay", "match": ELEMENTS, "method": "HEAD", "seconds": NEVER_S}, _UNTAGGED],
        }
        places = [
            {
                "name": name,
                "open": {"url": str(bucket / "atlas" / "counts.zarr")} if name == "disk" else over(server),
                "server": server.url,
                "faults": faults[name],
                "deadline_s": NEVER_S,
                "taking": name != "slow HEAD",
                "ways": ways,
            }
            for name, ways in _ENDS.items()
        ]
        return {(place, way): end for place, way, *end in run_script(interpreter, _EXITS, places)}


def check_end(ends, place, way):
    status, said = ends[place, way]
    assert status == _STATUS.get(way, 0), said
    if way in _SAYS:
        assert said.startswith("Traceback"), said
        assert said.splitlines()[-1] == _SAYS[way]
        assert said.count("Traceback") == 1
    else:
        assert said == ""


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize(("place", "way"), [(p, way) for p in ("disk", "stalled S3") for way in _ENDS[p]])
def test_the_process_ends_in_mid_epoch(ends, place, way):
    check_end(ends, place, way)


@pytest.mark.any_version
@pytest.mark.slow
def test_the_process_ends_while_an_object_is_looked_at_again(ends):
    check_end(ends, "slow HEAD", "hold")


# ---- worker processes

# Prints the outcome of each check, one per epoch: "right" (every row once, with its values), "ForkError", or what else
# went wrong.
_WORKERS = """
import json, multiprocessing, sys, warnings
import numpy as np
from torch.utils.data import DataLoader
import zloader as zl
from zloader.training.loader import Loader
sys.path.insert(0, json.loads(sys.argv[1]))
from helpers import InTurn, check_minibatch, counts

warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
context, places, adata = json.loads(sys.argv[2]), json.loads(sys.argv[3]), counts(503, 97)
if context == "forkserver":
    multiprocessing.set_forkserver_preload(["zloader.training.loader"])  # once instead of in every worker

def loader(name, mirrored=False):
    place, cache = places[name]
    sizes = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(8)}
    dataset = zl.open_dataset(**place, cache=cache if mirrored else None)
    return Loader(dataset, obs=["cell_type", "donor", "lane"], **sizes)

def through(loaders, n, persistent=False):
    how = {"multiprocessing_context": context, "persistent_workers": persistent} if n else {}
    return DataLoader(InTurn(loaders), batch_size=None, num_workers=n, **how)

def epoch(minibatches, n_minibatches):
    # The outcome and the order of rows for each loader.
    rows = {name: [] for name in n_minibatches}
    try:
        for name, minibatch in minibatches:
            rows[name].append(check_minibatch(minibatch, adata))
    except RuntimeError as error:
        refused = "ForkError" in str(error) and "spawn" in str(error)
        return {name: ("ForkError" if refused else repr(error), []) for name in rows}
    seen = {}
    for name, parts in rows.items():
        order = np.concatenate(parts).tolist() if parts else []
        whole = len(parts) == n_minibatches[name] and sorted(order) == list(range(503))
        seen[name] = "right" if whole else "wrong rows", order
    return seen

def check(what, loaders, minibatches, n_epochs=1):
    n_minibatches = {name: len(each) for name, each in loaders.items()}
    seen = [epoch(minibatches, n_minibatches) for _ in range(n_epochs)]
    for name in loaders:
        found = [got[name][0] for got in seen]
        if n_epochs > 1 and seen[0][name][1] and seen[0][name][1] == seen[1][name][1]:
            found.append("the same order twice")
        print(json.dumps([name, what, found]), flush=True)

def check_workers(what, loaders, n, persistent=False, n_epochs=1):
    check(what, loaders, through(loaders, n, persistent), n_epochs)

# Forked workers start at once, and a failure must not end the check of another place.
forked = context == "fork"
together = [[name] for name in places] if forked else [[*places]]
for names in together:
    check_workers("unread, 2 persistent", {name: loader(name) for name in names}, 2, True, 2)
if forked:
    for name in places:
        check_workers("unread, 2, mirror", {name: loader(name, True)}, 2)
        left = {name: loader(name)}
        broken = through(left, 1)
        next(iter(broken))
        check("unread, 1, after a break", left, broken)
used = {name: loader(name) for name in places}
check_workers("0", used, 0, n_epochs=2)
for names in together:
    check_workers("read, 1", {name: used[name] for name in names}, 1)
for name in places:
    under_way = iter(used[name])
    first = next(under_way)
    if forked:
        check_workers("read, 2, full mirror", {name: loader(name, True)}, 2)
        check_workers("under way, 2", {name: loader(name)}, 2)
    check("the one under way", {name: used[name]}, [(name, minibatch) for minibatch in [first, *under_way]])
if forked:
    changing = {"disk": loader("disk", True)}
    check_workers("first 1, then 2", changing, 1)
    check_workers("first 1, then 2", changing, 2)
"""
_CHECKS = {
    "unread, 2 persistent": 2,
    "unread, 2, mirror": 1,
    "unread, 1, after a break": 1,
    "0": 2,
    "read, 1": 1,
    "read, 2, full mirror": 1,
    "under way, 2": 1,
    "the one under way": 1,
}
_FORKED_ONLY = {"unread, 2, mirror", "unread, 1, after a break", "read, 2, full mirror", "under way, 2"}


@pytest.fixture(scope="module")
def workers(bucket, tmp_path_factory, interpreter) -> Callable[[str], list[Any]]:
    """Runs the script with one way of starting processes; returns its output."""

    @functools.cache
    def run(context: str) -> list[Any]:
        caches = tmp_path_factory.mktemp(context)
        with Sim(root=bucket) as server:
            places = {
                "disk": [{"url": str(bucket / "atlas" / "counts.zarr")}, str(caches / "disk")],
                "S3": [over(server), str(caches / "S3")],
            }
            return run_script(interpreter, _WORKERS, str(TESTS), context, places)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "S3"])
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_yield_every_row_once_or_say_what_to_do(workers, context, place):
    """Invariant 16. A process forked from one that has read a store may use a mirror, but not TensorStore."""
    said = [each for each in workers(context) if each[0] == place and each[1] in _CHECKS]
    seen = {name: found for _, name, found in said}
    assert seen.keys() == _CHECKS.keys() - (set() if context == "fork" else _FORKED_ONLY)
    for name, n_epochs in ((name, _CHECKS[name]) for name in seen):
        refused = place == "S3" and context == "fork" and name in ("read, 1", "under way, 2")
        assert seen[name] == ["ForkError" if refused else "right"] * n_epochs, name


@pytest.mark.any_version
@pytest.mark.slow
def test_a_loader_may_be_used_with_another_number_of_workers(workers):
    assert [found for _, name, found in workers("fork") if name == "first 1, then 2"] == [["right"], ["right"]]


_FORK = """
import asyncio, gc, json, multiprocessing, sys
import zloader as zl
place = json.loads(sys.argv[1])

async def collect():
    gc.collect()
    await asyncio.sleep(0.1)

for _ in range(3):
    print(zl.open_dataset(**place).n_obs, flush=True)
    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(collect()))
    child.start()
    child.join()
"""


@pytest.mark.any_version
@pytest.mark.slow
def test_a_fork_leaves_the_connections_of_its_parent_open(server, interpreter):
    """They share one epoll: if a child closed its copy of an idle connection, the parent would wait for ever."""
    assert run_script(interpreter, _FORK, over(server)) == [503, 503, 503]


# ---- pickles and logs


@pytest.mark.slow
def test_loaders_and_datasets_pickle(loader):
    """Pickling works in mid-epoch, too. The copy counts epochs from where the original stood."""
    assert pickle.loads(pickle.dumps(loader.dataset)).fingerprint == loader.dataset.fingerprint
    assert digest(pickle.loads(pickle.dumps(loader))) == digest(loader)
    minibatches = iter(loader)
    first = next(minibatches)
    again = pickle.loads(pickle.dumps(loader))
    assert rows_of([first, *minibatches]) == list(range(503))
    assert digest(again) == digest(loader)


@pytest.mark.every(3)
def test_a_healthy_epoch_warns_of_nothing(loader, caplog):
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            assert rows_of(loader) == list(range(503))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
