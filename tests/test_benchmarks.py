"""The benchmarks: the simulated cloud, the bound of the memory, the trainings, the simulated cluster, and run.py."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, fill_bucket

import zloader as zl
from benchmarks.compare.reporting import records
from benchmarks.harness import measuring, readers, sides
from benchmarks.harness.cloud import LinkSpeed, cloud
from benchmarks.training import bill, models

pytestmark = pytest.mark.any_version

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OBJECT = bytes(range(256)) * 20_000  # 5 MB, so that bodies are sent in several pieces; a shift changes every byte


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    fill_bucket(made, OBJECT)
    return made


@pytest.fixture(scope="module")
def endpoint(root: Path) -> Iterator[str]:
    with cloud(root, LinkSpeed(ttfb_ms=5, conn_mbps=50, total_mbps=150)) as running:
        yield running.endpoint


@pytest.fixture
def connected(endpoint: str) -> Iterator[Callable[[], http.client.HTTPConnection]]:
    opened: list[http.client.HTTPConnection] = []

    def connect() -> http.client.HTTPConnection:
        opened.append(http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=PATIENCE_S))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET", **fields: str) -> tuple[int, bytes]:
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in fields.items()})
    response = connection.getresponse()
    return response.status, response.read()


def test_ranges_on_one_connection(connected):
    connection = connected()
    for start, stop in ((0, 1), (100, 200), (0, 1 << 16), (7, (1 << 16) + 8), (5, 3 << 20), (0, len(OBJECT))):
        assert ask(connection, "/bucket/object", Range=f"bytes={start}-{stop - 1}") == (206, OBJECT[start:stop])
    assert ask(connection, "/bucket/object") == (200, OBJECT)


def test_a_mapped_file_that_is_replaced_is_read_anew(connected, root):
    connection, path = connected(), root / "bucket" / "replaced"
    for content in (b"first", b"second one"):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        for _ in range(2):
            assert ask(connection, "/bucket/replaced") == (200, content)
    path.unlink()
    assert ask(connection, "/bucket/replaced")[0] == 404


def test_rates_and_counters(connected):
    control = connected()
    ask(control, "/__sim/reset", "POST")
    connections = [connected() for _ in range(8)]
    began = time.monotonic()
    with ThreadPoolExecutor(len(connections)) as threads:
        answers = list(threads.map(lambda connection: ask(connection, "/bucket/object"), connections))
    seconds = time.monotonic() - began
    assert answers == [(200, OBJECT)] * 8
    burst_s = 0.1  # bursts and the first piece of each response may be early
    assert seconds > 8 * len(OBJECT) / 150e6 - burst_s
    assert seconds > len(OBJECT) / 50e6 - burst_s
    counts = json.loads(ask(control, "/__sim/stats")[1])
    assert (counts["requests"], counts["bytes_out"], counts["active"]) == (8, 8 * len(OBJECT), 0)
    assert 0 < counts["peak_active"] <= 8


@pytest.fixture
def run() -> SimpleNamespace:
    """run.py and what it is made of, by name."""
    names = ["peers", "scenarios", "session", "inputs", "rivals", "resuming"]
    modules = {name: importlib.import_module(f"benchmarks.compare.{name}") for name in ["run", *names]}
    return SimpleNamespace(**modules, readers=readers, sides=sides, measuring=measuring, records=records)


def test_every_peer_is_known_without_its_packages(run):
    """run.py lists the peers in its own Python, and each one is imported in that of its environment."""
    code = (
        "from benchmarks.compare import peers, rivals; from benchmarks.harness import readers;"
        "print(*(name for name in peers.MODULES if peers.peer(name).sides and peers.module(name).epochs))"
    )
    command, env = [sys.executable, "-S", "-c", code], measuring.importing()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S, env=env)
    assert done.stdout.split() == list(run.peers.MODULES)
    files = {path.stem for path in (BENCHMARKS / "compare" / "peers").glob("*.py")} - {"__init__"}
    assert files == {name.replace("-", "_") for name in run.peers.MODULES}


def test_sides_are_consistent(run):
    sides = [(tool, name, side) for tool in run.peers.MODULES for name, side in run.peers.peer(tool).sides.items()]
    assert len({name for _, name, _ in sides}) == len(sides)
    for _, name, side in sides:
        assert set(side.scenarios) <= set(run.scenarios.SCENARIOS), name
        assert side.store or "conversion" not in side.scenarios, name
        assert side.how.endswith("."), name
    writers = {tool for tool in run.peers.MODULES if hasattr(run.peers.module(tool), "write")}
    assert {side.store.split("-")[0] for *_, side in sides if side.store} <= {tool.split("-")[0] for tool in writers}
    taken = {scenario for *_, side in sides for scenario in side.scenarios}
    assert taken == set(run.scenarios.SCENARIOS)


@pytest.fixture
def session(run, tmp_path) -> Any:
    return session_of(run, tmp_path)


def session_of(run: SimpleNamespace, work: Path, **more: Any) -> Any:
    prices = run.session.Prices()
    return run.session.Session(
        preset=run.run.TINY, prices=prices, speed=None, work=work, output=work / "run.jsonl", **more
    )


def lines_of(session: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in session.output.read_text().splitlines()]


def test_a_hung_peer_is_recorded_and_leaves_nothing_behind(run, session, tmp_path):
    hanging = tmp_path / "python"  # in place of the Python of an environment
    hanging.write_text("#!/bin/sh\nsleep 600 &\nsleep 600\n")
    hanging.chmod(0o755)
    location = run.sides.StoreLocation(store=tmp_path, url=str(tmp_path))
    place = run.session.Place(scenario="random", peer="some peer", case={"epoch": "cold"}, turn=1, data="synthetic")
    failed = set()
    with (
        session.attempt(place, failed),
        run.sides.reader("some peer", hanging, location, {}, tmp_path, deadline_s=0.5) as reader,
    ):
        group = reader.process.pid
        reader.ask()
    assert failed == {"some peer"}
    (record,) = lines_of(session)
    assert record.pop("error").endswith("did not answer for 0.5 s")
    assert record == {"record": "failed", **vars(place)}
    deadline = time.monotonic() + PATIENCE_S
    while members := running(group):  # the kernel ends them when it gets to it
        assert time.monotonic() < deadline, members


def running(group: int) -> list[str]:
    """The processes of a group, without those that have ended and wait to be reaped."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, of_group, *_ = process.read_text().rpartition(")")[2].split()
            found += [process.parent.name] * (int(of_group) == group and state != "Z")
    return found


def test_errors_are_recorded_without_the_folders_of_this_machine(run):
    raised = (
        """File "/home/me/a/reader.py", line 3\nError: no '/home/me/x y' in s3://a/b/c, see http://c.d/e/f/ and a/b"""
    )
    shown = """File "…/reader.py", line 3\nError: no '…/x y' in s3://a/b/c, see http://c.d/e/f/ and a/b"""
    assert run.measuring.last_lines(raised) == shown
    assert run.measuring.last_lines(f"{raised} ", 3) == "a/b"


def test_epochs_are_compared_with_the_data(run):
    data = run.inputs.Data(name="a", path=Path("a"), rows=10, genes=3, values=5, total=100.0, label="plate")
    side = run.peers.Side(how="As it is.", format="", store=None)
    right = {"rows": 10, "ended": True, "total": 100.0}
    run.session.expect(right, data, side)
    run.session.expect({"rows": 4, "ended": False, "total": 3.0}, data, side)  # it ended early
    for wrong in ({"rows": 9}, {"rows": 11}, {"rows": 11, "ended": False}, {"total": 100.1}):
        with pytest.raises(run.session.WrongRows):
            run.session.expect(right | wrong, data, side)
    part = replace(side, whole=False)
    run.session.expect({"rows": 9, "ended": True, "total": 90.0}, data, part)
    with pytest.raises(run.session.WrongRows):
        run.session.expect({"rows": 11, "ended": True}, data, part)


def test_a_checked_epoch_counts_rows_values_and_entropy(run):
    minibatches = [np.array([1, 1, 2, 2]), np.array([3, 3, 3, 3]), np.array([7, 8])]
    epoch = run.peers.Epoch(minibatches=iter(minibatches), values=lambda one: one, labels=lambda one: one)
    figures = run.readers.measured(lambda _: epoch, {"check": True}, first_fetch=1, batch_size=4)
    assert (figures["rows"], figures["ended"], figures["total"]) == (10, True, 33)
    assert figures["entropy"] == 0.5  # of two full minibatches, one bit and none


def test_an_epoch_ends_after_so_many_rows(run):
    epoch = run.peers.Epoch(minibatches=iter([np.zeros(4)] * 3))
    figures = run.readers.measured(lambda _: epoch, {"rows": 8}, first_fetch=1)
    assert (figures["rows"], figures["ended"]) == (8, False)
    assert len(list(epoch.minibatches)) == 1


@pytest.mark.slow
def test_a_panel_is_checked_against_the_values_of_its_genes(run, tmp_path):
    adata, path = counts(300, 80), tmp_path / "a.h5ad"
    adata.write_h5ad(path)
    figures = {"rows": 300, "genes": 80, "values": adata.X.nnz, "total": float(adata.X.sum())}
    whole = run.inputs.Data(name="a", path=path, label="cell_type", **figures)
    data, genes = run.inputs.panel(whole, 20)
    chosen = adata.X[:, genes]
    assert (genes, data.genes) == (sorted(set(genes)), 20)
    assert (data.values, data.total) == (chosen.nnz, chosen.sum())
    written = run.inputs.of_genes(data, genes, tmp_path / "panel" / "a.h5ad")
    assert replace(written, name="a", path=path) == data
    options = {"store": str(path), "obs": "cell_type", "batch_size": 64, "genes": genes}
    epochs, side = run.peers.module("anndata").epochs(options), run.peers.Side(how="", format="", store=None)
    given = run.readers.measured(epochs, {"check": True}, first_fetch=1)
    run.session.expect(given, data, side)
    with pytest.raises(run.session.WrongRows, match="the values of an epoch add up to"):
        run.session.expect(given, whole, side)


# ---- a run that is stopped and resumed

FIGURES = {"rows": 10, "seconds": 0.5, "user_s": 0.1, "system_s": 0.1, "peak_bytes": 1000}
RUN = {"format": 1, "commit": "0123", "preset": "tiny", "sizes": {"blocks": (1, 2)}, "prices": {"gets": 0.5}}


class Stopped(Exception):
    """In place of a kill."""


def measure(run: SimpleNamespace, session: Any, *, turns: int = 2, until: tuple[int, int] = (9, 9)) -> None:
    """Three cases of a scenario. It is stopped before the turn and case `until`."""
    for case in session.left("order", "synthetic", [{"block_rows": rows} for rows in (1, 2, 3)]):
        for turn in range(1, turns + 1):
            if (case["block_rows"], turn) == until:
                raise Stopped
            place = run.session.Place(scenario="order", peer="zloader", case=case, turn=turn, data="synthetic")
            session.measurement(place, FIGURES)


def resumed(run: SimpleNamespace, work: Path) -> Any:
    """A session that goes on with the file of an earlier one."""
    earlier = run.resuming.read(work / "run.jsonl")
    run.resuming.write(earlier)
    return session_of(run, work, earlier=earlier)


@pytest.mark.parametrize("until", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)], ids=str)
def test_a_resumed_run_measures_whole_cases_once(run, session, tmp_path, until):
    session.record("run", **RUN)
    with pytest.raises(Stopped):
        measure(run, session, until=until)
    before = [line for line in lines_of(session) if line["record"] == "done"]
    assert len(before) == until[0] - 1
    again = resumed(run, tmp_path)
    left = [line for line in lines_of(again) if line["record"] == "measurement"]
    assert [line["case"] for line in left] == [line["case"] for line in before for _ in range(2)]
    measure(run, again)
    again.record("end", seconds=1, failures=[])
    found = run.records.read(again.output)
    assert [(each.case["block_rows"], each.turn) for each in found.measurements] == [
        (rows, turn) for rows in (1, 2, 3) for turn in (1, 2)
    ]
    assert found.end is not None
    with pytest.raises(SystemExit, match="its run has ended"):
        run.resuming.read(again.output)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_not_finished_is_cut_off(run, session, tmp_path, capsys, cut):
    session.record("run", **RUN)
    measure(run, session)
    whole = session.output.read_text()
    session.output.write_text(whole[:-cut])
    assert len(resumed(run, tmp_path).earlier.records) == 1 + 4 + 2 + (3 if cut == 1 else 0)
    assert ("was not finished and is cut off" in capsys.readouterr().err) == (cut > 1)
    assert session.output.read_text() == whole[: len(session.output.read_text())]


def test_a_run_goes_on_only_as_it_began(run, session, tmp_path):
    session.record("run", **RUN)
    session.record("peer", peer="zloader", version="1", packages={"zarr": "3.1"})
    earlier = resumed(run, tmp_path).earlier
    earlier.expect_run({**RUN, "load": [1.0]})
    for changed in ({"commit": "4567"}, {"sizes": {"blocks": [1]}}, {"prices": {"gets": 1}}, {"link": {"ttfb_ms": 1}}):
        (name,) = changed
        with pytest.raises(SystemExit, match=f"cannot be resumed: its {name} is "):
            earlier.expect_run({**RUN, **changed})
    earlier.expect_side("zloader", {"record": "peer", "peer": "zloader", "version": "1", "packages": {"zarr": "3.1"}})
    with pytest.raises(SystemExit, match=r"packages of zloader was \{'zarr': '3.1'\}, and is now \{'zarr': '3.2'\}"):
        earlier.expect_side(
            "zloader", {"record": "peer", "peer": "zloader", "version": "1", "packages": {"zarr": "3.2"}}
        )
    with pytest.raises(SystemExit, match="record of zloader was 'peer', and is now 'missing'"):
        earlier.expect_side("zloader", {"record": "missing", "peer": "zloader", "reason": "none"})


@pytest.mark.slow  # two tiny runs of zloader
def test_a_run_that_was_killed_goes_on(run, tmp_path):
    output, scenarios = tmp_path / "run.jsonl", ["random", "minibatch", "first"]
    flags = ("--quick", "--tiny", "--peers", "zloader", "--work", tmp_path, "--scenario", ",".join(scenarios))
    command = measuring.program("compare.run", *flags)
    with subprocess.Popen([*command, "--output", output]) as killed:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not (output.exists() and '"done", "scenario": "random"' in output.read_text()):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        killed.kill()
    with output.open("a") as file:
        file.write('{"record": "measu')
    before = output.read_text()
    done = subprocess.run([*command, "--resume", output], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("was not finished and is cut off", "random, synthetic, {}: done before"):
        assert words in done.stderr
    found = run.records.read(output)
    assert [each.scenario for each in found.measurements] == scenarios
    assert next(line for line in before.splitlines() if '"random", "peer"' in line) in output.read_text().splitlines()
    assert (found.end.failures, len(found.resumed), len(found.limits)) == ([], 1, 4)
    again = subprocess.run([*command, "--resume", output], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (again.returncode, "its run has ended" in again.stderr) == (1, True)


def test_a_peer_that_cannot_be_installed_is_missing(run, session, monkeypatch):
    def fails(*_: Any, **__: Any) -> Path:
        raise run.rivals.EnvironmentFailed("no such package")

    monkeypatch.setattr(run.rivals, "environment", fails)
    found = session.add(["annbatch"], SimpleNamespace(tiny=False, python=None, environments=None, constrain=[]))
    assert not session.contenders
    assert not session.output.exists()
    assert {record["peer"] for record in found} == set(run.peers.peer("annbatch").sides)
    assert all(record == {"record": "missing", "peer": record["peer"], "reason": "no such package"} for record in found)


def test_the_trainings_run_and_compare_with_their_baselines(tmp_path, capsys):
    screen = models.Screen(cell_lines=3, drugs=4, genes=60, rows_per_group=20)
    models.screens.write(tmp_path / "screen.h5ad", screen)
    zl.convert(tmp_path / "screen.h5ad", tmp_path / "screen.zarr", progress=False)
    dataset = zl.open_dataset(tmp_path / "screen.zarr")
    runs = {
        "tokens": models.tokens_run(dataset, epochs=1, n_genes=30),
        "sets": models.sets_run(dataset, epochs=2, set_size=8, per_line=1),
    }
    assert runs["tokens"]["rows"] == 192
    assert runs["sets"]["rows"] == 2 * 6 * 16  # two of the three drugs of each line, two sets of each
    for figures in runs.values():
        assert figures["rows_per_s"] > 0
        assert 0 <= figures["wait_share"] <= 1
        assert all(loss > 0 for loss in figures["losses"].values())
    assert models.print_trainings({"a": {**runs["sets"], "losses": {"model": 1.0, "no shift": 2.0}}})
    assert not models.print_trainings({"a": {**runs["sets"], "losses": {"model": 1.0, "no shift": 1.0}}})
    assert "did not fall below" in capsys.readouterr().out


def test_the_bill_reproduces_the_committed_figures(tmp_path, capsys):
    """Those of docs/performance.md and of benchmarks/README.md, and rates that zloader bench measured."""
    tahoe = bill.Run().bill()
    assert (round(tahoe["hours"], 1), round(tahoe["dollars"])) == (9.5, 229)
    assert round(tahoe["cold"]["dollars"]["GETs"] + tahoe["cold"]["dollars"]["egress"], 2) == 0.21
    assert tahoe["cold"]["bound_by"] == tahoe["warm"]["bound_by"] == "gpu"
    medians = {
        "cold": {"rows_per_s": 24_600.0, "bytes_read": 4e6, "gets": 110},
        "warm": {"rows_per_s": 48_000.0, "bytes_read": 0, "gets": 0},
    }
    measured = {"rows": 11_000, "step_ms": 0, "link_bytes_per_s": 3e8, "medians": medians}
    (tmp_path / "bench.json").write_text(json.dumps(measured))
    flags = ["--epochs", "8", "--gpus", "1", "--gpu-rows-per-s", "922.4"]
    bill.main(["--measured", str(tmp_path / "bench.json"), *flags])
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert round(made["hours"] * 3600) == 95
    of = made["run"]
    assert (of["rows"], of["gets_per_row"], of["link_megabytes_per_s"]) == (11_000, 0.01, 300)
    assert (of["cold_rows_per_s"], of["warm_rows_per_s"]) == (24_600, 48_000)
    slow = bill.Run(gpu_rows_per_s=1e6, link_megabytes_per_s=1200).bill()
    assert (slow["cold"]["bound_by"], slow["warm"]["bound_by"]) == ("link", "loading")
