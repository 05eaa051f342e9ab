"""`zloader bench`: its figures are the loader's, its epochs are complete, and it ends on a signal."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import signal
import statistics
import time
from pathlib import Path

import pytest
from forked import CLI
from helpers import counts, write_store
from pages import Page
from test_cli import params, zloader

import benchmarks.real as real
import zloader as zl
from zloader.commands import bench as bench_command
from zloader.commands.bench import BenchEpoch, BenchRun, kind_of, run_epoch
from zloader.common.errors import ZloaderError
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE
from zloader.training.recipes import DTYPES

pytestmark = pytest.mark.any_version

ADATA = counts(503, 97)
SIZES = {"batch_size": 16, "fetch_factor": 4, "block_size": 8}
FLAGS = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(autouse=True)
def _no_epoch_is_short(monkeypatch):
    monkeypatch.setattr(bench_command, "_ENOUGH_S", 0)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder)
    return folder


@pytest.fixture(scope="module")
def store(bucket) -> Path:
    return bucket / "atlas" / "counts.zarr"


def documented(*arguments):
    return json.loads(zloader("bench", *arguments, "--json").stdout)


def test_cold_epochs_cost_what_info_foretells(store):
    began = time.monotonic()
    seen = documented(store, *FLAGS, "--epochs", 2, "--obs", "cell_type, donor")
    took = time.monotonic() - began
    foretold = json.loads(zloader("info", store, "--json", *FLAGS).stdout)["epoch"]["unmirrored"]
    assert (seen["rows"], seen["genes"], seen["obs"]) == (503, 97, ["cell_type", "donor"])
    assert [(epoch["epoch"], epoch["kind"], epoch["complete"]) for epoch in seen["epochs"]] == [
        (0, "cold", True),
        (1, "cold", True),
    ]
    first = seen["epochs"][0]["figures"]
    assert (first["rows"], first["minibatches"]) == (503, 32)
    assert first["gets"] == foretold["gets"]
    assert first["bytes_read"] == foretold["bytes_read"]
    assert first["mirror_share"] == 0
    assert 0 < first["first_minibatch_s"] < took
    assert first["rows_per_s"] == pytest.approx(503 / first["elapsed_s"])
    assert {field.name for field in dataclasses.fields(zl.Statistics)} <= first.keys() | {"epoch"}


def test_a_mirror_is_filled_once_and_then_warm(store, tmp_path):
    kinds, first = [], []
    for _ in range(2):
        seen = documented(store, *FLAGS, "--cache", tmp_path / "cache")
        kinds += [epoch["kind"] for epoch in seen["epochs"]]
        first.append(seen["epochs"][0]["figures"])
        for epoch in seen["epochs"]:
            assert epoch["figures"]["rows"] == 503
            assert (
                (epoch["kind"] == "warm") == (epoch["figures"]["gets"] == 0) == (epoch["figures"]["mirror_share"] == 1)
            )
    assert kinds == ["cold", "warm", "warm", "warm", "warm", "warm"]
    assert first[0]["chunks_decoded"] > 0
    assert (first[0]["mirrored_before"], first[0]["mirrored_after"]) == (0, 1)
    assert (first[1]["mirrored_before"], first[1]["mirrored_after"]) == (1, 1)
    assert seen["medians"].keys() == {"warm"}
    assert seen["medians"]["warm"]["epochs"] == 3


def test_medians_are_of_complete_epochs_of_one_kind():
    epochs = [
        BenchEpoch(epoch=number, kind=kind, complete=complete, figures={"gets": gets}, timeline=None)
        for number, (kind, complete, gets) in enumerate(
            [("cold", True, 9), ("warm", True, 1), ("warm", True, 4), ("warm", True, 2), ("warm", False, 100)]
        )
    ]
    run = BenchRun(shape=(1, 1), settings={}, load=0.0, epochs=epochs)
    assert run.medians == {"cold": {"epochs": 1, "gets": 9}, "warm": {"epochs": 3, "gets": 2}}
    assert BenchRun(shape=(1, 1), settings={}, load=0.0).medians == {}


def test_as_text_a_line_an_epoch_and_a_table(store, tmp_path):
    done = zloader("bench", store, *FLAGS, "--cache", tmp_path / "cache")
    head, *lines = done.stdout.splitlines()
    assert head == f"{store}: 503 rows x 97 genes"
    assert [line.split(":")[0] for line in lines[:3]] == ["epoch 0, cold", "epoch 1, warm", "epoch 2, warm"]
    assert "chunks from the mirror 100%" in lines[1]
    assert re.fullmatch(r" +cold, median of 1 +warm, median of 2 *", lines[3])
    rows = {line[:24].strip(): line[24:].split() for line in lines[4:]}
    assert rows["GETs"][1] == "0"
    assert int(rows["GETs"][0]) > 0
    assert "\x1b" not in done.stdout
    assert real.parsed(shlex.split(lines[-1].partition("benchmarks.real ")[2])).store == str(store)
    assert {words.split(":")[0] for words in lines if "you" in words} == {"Cold epochs", "Warm epochs"}


def test_short_epochs_are_repeated_and_cold_ones_begin_with_an_empty_mirror(store, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_command, "_ENOUGH_S", 1e9)
    monkeypatch.setattr(bench_command, "_MOST_REPEATS", 2)
    cache = tmp_path / "cache"
    done = zloader("bench", store, *FLAGS, "--cache", cache, "--json")
    seen = json.loads(done.stdout)
    assert [epoch["kind"] for epoch in seen["epochs"]] == ["cold", "warm", "warm", "cold", "cold", "warm", "warm"]
    assert [epoch["epoch"] for epoch in seen["epochs"]] == list(range(7))
    cold = [epoch["figures"] for epoch in seen["epochs"] if epoch["kind"] == "cold"]
    assert {(each["mirrored_before"], each["mirrored_after"]) for each in cold} == {(0, 1)}
    assert len({(each["gets"], each["bytes_read"]) for each in cold}) == 1
    assert {kind: figures["epochs"] for kind, figures in seen["medians"].items()} == {"cold": 3, "warm": 4}
    assert "cold epochs are short, so 2 more were measured" in done.stderr
    assert not list(cache.glob("bench-*"))
    assert [epoch["kind"] for epoch in documented(store, *FLAGS, "--epochs", 1)["epochs"]] == ["cold"] * 3


def test_epochs_are_repeated_until_they_took_long_enough(store, monkeypatch):
    """Each takes 0.75 s here, by its figures."""
    monkeypatch.setattr(bench_command, "_ENOUGH_S", 2)

    def measured(loader, epochs, **_):
        run_epoch(loader, epochs)
        epochs[-1].figures["elapsed_s"] = 0.75

    monkeypatch.setattr(bench_command, "run_epoch", measured)
    assert len(documented(store, *FLAGS, "--epochs", 1)["epochs"]) == 3
    assert len(documented(store, *FLAGS, "--epochs", 4)["epochs"]) == 4


@pytest.mark.parametrize(
    ("decoded", "from_mirror", "before", "kind"),
    [(9, 0, 0, "cold"), (9, 5, 0, "cold"), (9, 5, 0.5, "mixed"), (9, 0, 0.5, "cold"), (0, 9, 0.9, "warm"),
     (0, 9, 0, "warm"), (0, 0, 1, "cold")],
)  # fmt: skip
def test_what_an_epoch_began_with_decides_its_kind(decoded, from_mirror, before, kind):
    figures = {"chunks_decoded": decoded, "chunks_from_mirror": from_mirror, "mirrored_before": before}
    assert kind_of(figures) == kind


def test_an_epoch_that_begins_with_a_part_of_the_mirror_is_mixed(store, tmp_path):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    for _ in zl.Loader(dataset, batch_size=16, fetch_factor=4, sampling=zl.Streaming(indices=list(range(40)))):
        pass
    assert 0 < dataset.cache_statistics().share < 1
    seen = documented(store, *FLAGS, "--cache", tmp_path / "cache", "--epochs", 2)
    assert [epoch["kind"] for epoch in seen["epochs"]] == ["mixed", "warm"]
    assert 0 < seen["epochs"][0]["figures"]["mirrored_before"] < 1


def test_the_report_has_what_is_printed(store, tmp_path):
    report = tmp_path / "bench.html"
    done = zloader("bench", store, *FLAGS, "--cache", tmp_path / "cache", "--report", report, "--epochs", 2)
    page = Page(report.read_text())
    assert f"zloader bench: {store}" in page.text
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    table = lines.index("cold, median of 1 warm, median of 1")
    end = next(number for number, line in enumerate(lines) if line.startswith("Cold epochs: "))
    assert end > table + 5
    shown = page.text.replace("\xa0", " ")
    assert [line for line in lines[table : end + 2] if line not in shown] == []
    assert len(page.all("svg")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.html", "cache"]


def test_blocks_shrink_with_a_fetch_as_a_loaders_do(store):
    seen = documented(store, "--batch-size", 4, "--fetch-factor", 4, "--epochs", 1)
    loader = zl.Loader(zl.open_dataset(store), batch_size=4, fetch_factor=4)
    for _ in loader:
        pass
    assert seen["block_size"] == 16
    assert seen["epochs"][0]["figures"]["gets"] == loader.statistics().gets


def test_the_consumer_takes_its_time(store):
    seen = documented(store, *FLAGS, "--epochs", 1, "--step-ms", 5)["epochs"][0]["figures"]
    assert seen["elapsed_s"] * (1 - seen["wait_share"]) > 31 * 0.005  # statistics() stop at the last minibatch


def test_several_stores_are_read_as_one(store, tmp_path):
    write_store(counts(60, 97, seed=1), tmp_path / "more.zarr", tmp_path)
    seen = documented(store, tmp_path / "more.zarr", "--epochs", 2, "--cache", tmp_path / "cache")
    assert seen["rows"] == 563
    assert [epoch["figures"]["rows"] for epoch in seen["epochs"]] == [563, 563]
    assert seen["epochs"][1]["kind"] == "warm"


@pytest.mark.parametrize("layout", ["dense", pytest.param("scipy", marks=pytest.mark.slow)])
def test_layouts_and_dtypes(store, layout):
    seen = documented(store, "--epochs", 1, "--layout", layout, "--dtype", "int32")
    assert (seen["layout"], seen["dtype"]) == (layout, "int32")
    assert seen["epochs"][0]["complete"]


@pytest.mark.slow
def test_over_s3(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    write_store(counts(60, 20), s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    flags = ("--endpoint-url", s3.endpoint_url, "--region", "us-east-1", "--epochs", 2, "--cache", tmp_path / "cache")
    seen = documented(s3.url("counts.zarr"), *flags)
    assert [epoch["figures"]["rows"] for epoch in seen["epochs"]] == [60, 60]
    assert seen["epochs"][1]["kind"] == "warm"
    assert s3.storage_options["secret"] not in json.dumps(seen)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--obs", "nothing"), "there is no obs column 'nothing'"),
        (("--report", "no/such/folder.html"), "cannot write no/such/folder.html"),
        (("--link-speed", "fast"), "'fast' is not a size"),
    ],
)
def test_an_error_is_one_line(store, flags, said):
    done = zloader("bench", store, *flags, "--json", status=1)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert said in line
    assert done.stdout == ""


def test_an_epoch_that_is_not_every_row_once_is_an_error(store):
    dataset = zl.open_dataset(store)
    seen: list[BenchEpoch] = []
    with pytest.raises(ZloaderError, match="its rows should be 503, but came to 496"):
        run_epoch(zl.Loader(dataset, batch_size=16, drop_last=True), seen)
    twice = zl.Streaming(indices=[*range(502), 0])
    with pytest.raises(ZloaderError, match="its sum of row numbers should be"):
        run_epoch(zl.Loader(dataset, sampling=twice), seen)
    run_epoch(zl.Loader(dataset), seen)
    assert [epoch.complete for epoch in seen] == [False, False, True]


@pytest.mark.slow
def test_stores_with_other_genes_and_several_matrices(store, tmp_path):
    adata = counts(60, 97)
    adata.var_names = [f"gene {gene}" for gene in range(90, 187)]
    adata.layers["more"] = adata.X
    write_store(adata, tmp_path / "a.zarr", tmp_path)
    seen = documented(store, tmp_path / "a.zarr", *FLAGS, "--epochs", 1, "--join", "outer")
    assert (seen["rows"], seen["genes"], seen["join"]) == (563, 187, "outer")
    assert "genes" in zloader("bench", store, tmp_path / "a.zarr", "--epochs", 1, status=1).stderr
    seen = documented(tmp_path / "a.zarr", *FLAGS, "--epochs", 1, "--x", "X", "--x", "layers/more")
    foretold = json.loads(
        zloader("info", tmp_path / "a.zarr", "--json", *FLAGS, "--x", "X", "--x", "layers/more").stdout
    )
    assert seen["x"] == foretold["epoch"]["x"] == ["X", "layers/more"]
    figures = seen["epochs"][0]["figures"]
    assert {name: figures[name] for name in ("gets", "bytes_read")} == {
        name: foretold["epoch"]["unmirrored"][name] for name in ("gets", "bytes_read")
    }


def test_the_loop_is_the_loaders(store):
    flags = params("bench")
    for name, default in (
        ("batch_size", zl.Loader.batch_size),
        ("fetch_factor", zl.Loader.fetch_factor),
        ("block_size", DEFAULT_BLOCK_SIZE),
        ("x", zl.Loader.x),
    ):
        assert flags[name].show_default == str(default)
    assert flags["layout"].default == zl.Loader.layout
    assert flags["dtype"].show_default == zl.Loader(zl.open_dataset(store)).dtype
    assert all(dtype in flags["dtype"].help for dtype in DTYPES)
    assert not {"key", "secret", "token", "password"} & flags.keys()


@pytest.mark.slow  # the link is slow
def test_the_link_is_measured_if_an_epoch_read_from_it(bucket, sim, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    server = sim(root=bucket, total_mbps=0.02)
    flags = ("--endpoint-url", server.url, "--region", "us-east-1", "--epochs", 1, *FLAGS)
    seen = documented("s3://atlas/counts.zarr", *flags)
    assert 0 < seen["link_bytes_per_s"] < 40_000
    stated = documented("s3://atlas/counts.zarr", *flags, "--link-speed", "1GB/s")
    assert stated["link_bytes_per_s"] == 10**9
    assert stated["advice"]["cold"]["bound"] == "reads"


@pytest.mark.slow  # each starts several interpreters
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_measured(interpreter, store, number, tmp_path):
    report = tmp_path / "bench.html"
    flags = (*FLAGS, "--epochs", 1000, "--step-ms", 3, "--report", report)
    with interpreter.running(CLI, "bench", store, *flags) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(number)
        rest, complaints = process.communicate()
    assert [line.split(":")[0] for line in lines[1:]] == ["epoch 0, cold", "epoch 1, cold"]
    assert process.returncode == 128 + number
    assert complaints == ("interrupted\n" if number == signal.SIGINT else "")
    assert re.search(r"cold, median of \d+", rest)
    assert re.search(r"^GETs +[1-9]", rest, re.MULTILINE)
    assert re.search(r"The run was interrupted after \d+ epochs\.", Page(report.read_text()).text)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.html"]


@pytest.mark.slow
def test_ctrl_c_while_the_server_stalls(interpreter, bucket, sim, monkeypatch):
    """With --json, the figures measured so far are still one document."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    server = sim(root=bucket)
    flags = ("--endpoint-url", server.url, "--region", "us-east-1", "--json", "--epochs", 1000, *FLAGS)
    with interpreter.running(CLI, "bench", "s3://atlas/counts.zarr", *flags) as process:
        lines = [process.stderr.readline() for _ in range(2)]
        server.faults = [{"match": "X/(indices|data)/c/", "kind": "stall", "after": 10}]
        while "fault_stall" not in server.stats():
            assert process.poll() is None, "bench ended before the signal"
        process.send_signal(signal.SIGINT)
        found, complaints = process.communicate(zl.FetchOptions.deadline_s / 2)  # it does not wait for the deadline
    assert lines[1].startswith("epoch 0, cold")
    assert complaints.endswith("interrupted\n")
    seen = json.loads(found)
    assert seen["interrupted"]
    assert seen["epochs"][0]["figures"]["rows"] == 503
    assert seen["medians"]["cold"]["gets"] == statistics.median(
        epoch["figures"]["gets"] for epoch in seen["epochs"] if epoch["complete"]
    )
