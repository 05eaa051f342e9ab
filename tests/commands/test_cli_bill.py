"""`zloader bill`: its sums, what bounds a run, and the figures that it takes from `zloader bench`."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
from helpers import counts, write_store
from test_cli import zloader

from zloader.commands.bill import BillFlags
from zloader.commands.bill_run import Run, Setup
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

RUN = Run(
    rows=3_600_000,
    epochs=3,
    parameters=1e6,
    tokens_per_row=1000,
    gpus=2,
    machines=1,
    mfu=0.5,
    peak_tflops=12,
    gpu_rows_per_s=None,
    cold_rows_per_s=3000,
    warm_rows_per_s=9000,
    link_megabytes_per_s=10,
    mirror=True,
    bytes_per_row=1000,
    gets_per_row=0.01,
    mirror_bytes_per_row=10_000,
    producers=0,
    gpu_hour=2,
    producer_hour=0.5,
    thousand_gets=0.5,
    gigabyte_egress=0.1,
    nvme_gigabyte_month=7.3,
)


def bill(*flags):
    return json.loads(zloader("bill", "--json", *flags).stdout)


def test_a_gpu_takes_six_flops_per_parameter_and_token():
    assert RUN.gpu_rate == pytest.approx(6e12 / (6 * 1e6 * 1000))
    assert dataclasses.replace(RUN, gpu_rows_per_s=7).gpu_rate == 7


@pytest.mark.parametrize(
    ("change", "cold", "warm"),
    [
        ({}, ("gpu", 2000), ("gpu", 2000)),
        ({"gpu_rows_per_s": 1e6}, ("loading", 6000), ("loading", 18_000)),
        ({"gpu_rows_per_s": 1e6, "link_megabytes_per_s": 5}, ("link", 5000), ("loading", 18_000)),
        ({"gpu_rows_per_s": 1e6, "producers": 3}, ("loading", 9000), ("loading", 27_000)),
        ({"gpu_rows_per_s": 1e6, "producers": 3, "link_megabytes_per_s": 1}, ("link", 3000), ("loading", 27_000)),
        ({"gpu_rows_per_s": 1e6, "machines": 2, "link_megabytes_per_s": 2}, ("link", 4000), ("loading", 18_000)),
    ],
    ids=["the GPUs", "loading", "the link", "producers", "the link of producers", "the links of machines"],
)
def test_the_slowest_part_sets_the_pace(change, cold, warm):
    run = dataclasses.replace(RUN, **change)
    for epoch, (bound_by, rows_per_s) in ((run.epoch(0), cold), (run.epoch(1), warm)):
        assert (epoch.bound_by, epoch.rows_per_s) == (bound_by, rows_per_s)
        assert epoch.hours == pytest.approx(1000 / rows_per_s)
        assert epoch.gpu_wait_share == pytest.approx(1 - rows_per_s / (2 * run.gpu_rate))


def test_dollars_by_item():
    run = dataclasses.replace(RUN, producers=4)  # 2000 rows/s: half an hour
    cold, warm = run.epoch(0), run.epoch(1)
    nvme = 36 * 7.3 * 0.5 / 730
    assert cold.dollars == pytest.approx({"GPUs": 2, "producers": 1, "GETs": 18, "egress": 0.36, "NVMe": nvme})
    assert warm.dollars == pytest.approx({"GPUs": 2, "producers": 1, "GETs": 0, "egress": 0, "NVMe": nvme})
    assert run.totals() == pytest.approx((1.5, cold.total_dollars + 2 * warm.total_dollars))


def test_without_a_mirror_every_epoch_reads_from_the_store():
    run = dataclasses.replace(RUN, mirror=False)
    cold = run.epoch(0)
    assert cold.dollars["NVMe"] == 0
    assert run.totals() == pytest.approx((3 * cold.hours, 3 * cold.total_dollars))


def test_own_mirrors_read_what_a_machine_has_not_met():
    run = dataclasses.replace(RUN, copies="own", machines=4)
    assert [run.epoch(number).gigabytes for number in range(3)] == pytest.approx([3.6, 2.7, 2.025])
    assert run.epoch(0).dollars["NVMe"] == pytest.approx(36 * 2.3125 * 7.3 * 0.5 / 730)
    assert dataclasses.replace(run, machines=1).epoch(1).gigabytes == 0
    assert "second epoch" in (text := zloader("bill", "--machines", 4, "--copies", "own").stdout)
    assert "last epoch" in text


def test_one_copy_is_sent_between_machines_and_decoded_in_every_epoch():
    run = dataclasses.replace(RUN, copies="one", machines=4, gpu_rows_per_s=1e6, link_megabytes_per_s=1)
    first, later = run.epoch(0), run.epoch(1)
    assert (first.gigabytes, later.gigabytes) == pytest.approx((3.6, 0))
    assert first.peer_gigabytes == later.peer_gigabytes == pytest.approx(2.7)
    assert (first.bound_by, first.rows_per_s) == ("link", 4000)
    assert (later.bound_by, later.rows_per_s) == ("peers", pytest.approx(4000 / 0.75))
    assert later.dollars["NVMe"] == pytest.approx(3.6 * 7.3 * later.hours / 730)
    fast = dataclasses.replace(run, link_megabytes_per_s=1e6).epoch(2)
    assert (fast.bound_by, fast.rows_per_s) == ("loading", 6000)
    assert "GB from other machines" in zloader("bill", "--machines", 4, "--copies", "one").stdout
    with pytest.raises(OptionError, match="copies"):
        BillFlags(setup=Setup(copies="two")).run()


def test_flags_reach_the_run():
    flags = [name for name in RUN.__dataclass_fields__ if name not in ("mirror", "gpu_rows_per_s", "gpus")]
    given = [word for name in flags for word in (f"--{name.replace('_', '-')}", str(getattr(RUN, name)))]
    seen = bill(*given, "--gpus", 2)
    assert seen["run"] == dataclasses.asdict(RUN)
    assert (seen["hours"], seen["dollars"]) == pytest.approx(RUN.totals())


def test_as_text_with_all_prices_and_the_verdict():
    text = zloader("bill").stdout
    assert "the GPUs set the pace" in text
    for words in ("GPU hour $3", "producer hour $0.8", "1000 GETs $0.0004", "GB read $0", "as published, fast-scgpt"):
        assert words in text
    assert "each later epoch" not in zloader("bill", "--no-mirror").stdout


@pytest.mark.parametrize("flags", [["--parameters", "1e6"], ["--tokens-per-row", "1"], ["--gpu-rows-per-s", "5000"]])
def test_rates_of_others_are_for_models_of_their_size(flags):
    assert "published" not in zloader("bill", *flags).stdout
    assert bill(*flags)["hours_per_epoch_as_published"] == bill(*flags)["published"] == {}
    alike = bill("--parameters", "60e6", "--rows", "96e6")
    assert len(alike["hours_per_epoch_as_published"]) == 2
    assert alike["published"]["fast-scgpt, eight H100"] == {
        "rows_per_s": 31_900, "mfu": 0.316, "rows": 96_000, "epochs": 0.001,
    }  # fmt: skip


def test_small_runs_are_not_rounded_to_nothing():
    text = zloader("bill", "--rows", 3000, "--gpus", 1, "--epochs", 1).stdout
    assert re.search(r"whole run: 0\.00\d+ hours, \$0\.00\d+", text)
    assert "$0.00 \n" not in zloader("bill").stdout


def test_figures_of_a_measured_store(tmp_path):
    store, file = tmp_path / "s.zarr", tmp_path / "bench.json"
    write_store(counts(200, 30), store, tmp_path)
    measured = json.loads(zloader("bench", store, "--cache", tmp_path / "cache", "--epochs", 2, "--json").stdout)
    file.write_text(json.dumps(measured))
    refused = zloader("bill", "--measured", file, status=1)
    assert "were too short to tell how fast loading is" in refused.stderr
    for advice in measured["advice"].values():
        advice["bound"] = "loading"  # as if the store were larger
    file.write_text(json.dumps(measured))
    cold, warm = (epoch["figures"] for epoch in measured["epochs"])
    run = bill("--measured", file)["run"]
    assert run["rows"] == 200
    assert (run["cold_rows_per_s"], run["warm_rows_per_s"]) == (cold["rows_per_s"], warm["rows_per_s"])
    assert (run["bytes_per_row"], run["gets_per_row"]) == (cold["bytes_read"] / 200, cold["gets"] / 200)
    assert bill("--measured", file, "--rows", "1e6")["run"]["rows"] == 1e6


def test_the_rate_of_a_short_epoch_is_not_taken(tmp_path):
    file = bench_file(tmp_path / "bench.json", advice={**ADVICE, "warm": {"bound": "short"}})
    document = bill("--measured", file)
    assert (document["run"]["cold_rows_per_s"], document["run"]["warm_rows_per_s"]) == (2, 400e3)
    assert document["sources"]["warm_rows_per_s"] == "default"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "nan"], "--rows must be a number greater than 0, not nan"),
        (["--tokens-per-row", "-3"], "--tokens-per-row must be a number greater than 0, not -3"),
        (["--gpu-hour", "-1"], "--gpu-hour must be a number of at least 0, not -1"),
        (["--rows", "1e300"], "--rows must be a number greater than 0, from 1e-15 to 1e+15, not 1e+300"),
        (
            ["--epochs", "1" + 400 * "0"],
            "--epochs must be a number greater than 0, from 1e-15 to 1e+15, not 10000000000000000000",
        ),
        (
            ["--gpu-rows-per-s", "1e-300"],
            "--gpu-rows-per-s must be a number greater than 0, from 1e-15 to 1e+15, not 1e-300",
        ),
        (["--mfu", "40"], "--mfu is a share of the peak, at most 1, not 40"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_figures(flags, said):
    assert zloader("bill", *flags, status=1).stderr.strip() == f"error: {said}"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 5}', '{"rows": 5, "epochs": [{"complete": true}]}', '"x"',
                                  '{"rows": 0, "epochs": [{"complete": true, "figures": {"gets": 1}}]}',
                                  pytest.param(9999 * "[", id="deep")])  # fmt: skip
def test_a_file_that_is_no_measurement(text, tmp_path):
    (tmp_path / "other.json").write_text(text)
    error = zloader("bill", "--measured", tmp_path / "other.json", status=1).stderr
    assert "is not the output of 'zloader bench --json'" in error
    assert str(tmp_path / "missing") in zloader("bill", "--measured", tmp_path / "missing", status=1).stderr


EPOCHS = [
    {"kind": "mixed", "complete": True, "figures": {"rows_per_s": 9.0, "gets": 9, "bytes_read": 9}},
    {"kind": "cold", "complete": False, "figures": {"rows_per_s": 8.0, "gets": 8, "bytes_read": 8}},
    {"kind": "cold", "complete": True, "figures": {"rows_per_s": 2.0, "gets": 3, "bytes_read": 40}},
    {"kind": "warm", "complete": True, "figures": {"rows_per_s": 5.0, "gets": 0, "bytes_read": 0}},
]


ADVICE = {kind: {"bound": "loading"} for kind in ("cold", "mixed", "warm")}


def bench_file(path, **changes):
    document = {"rows": 10, "step_ms": 0, "link_bytes_per_s": 3e6, "epochs": EPOCHS, "advice": ADVICE, **changes}
    path.write_text(json.dumps(document))
    return path


def test_only_whole_cold_and_warm_epochs_and_the_link_are_taken(tmp_path):
    run = bill("--measured", bench_file(tmp_path / "bench.json"))["run"]
    names = ("cold_rows_per_s", "warm_rows_per_s", "bytes_per_row", "gets_per_row", "link_megabytes_per_s")
    assert [run[name] for name in names] == [2.0, 5.0, 4.0, 0.3, 3.0]


def test_it_says_where_each_rate_comes_from(tmp_path):
    flags = ["--measured", bench_file(tmp_path / "bench.json", epochs=EPOCHS[:3]), "--gets-per-row", "0.5"]
    text = zloader("bill", *flags).stdout
    assert "2 rows/s a process from the store (measured), 400,000 rows/s a process from the mirror (default)" in text
    assert "3 MB/s a link (measured), 4 bytes a row (measured), 0.5 GETs a row (given)" in text
    sources = bill(*flags)["sources"]
    assert (sources["rows"], sources["warm_rows_per_s"], sources["gets_per_row"]) == ("measured", "default", "given")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_ms": 20.0}, "was measured with --step-ms 20, so its rates are those of the steps, not of loading"),
        ({"epochs": EPOCHS[:2]}, "has no complete epoch that was cold or warm"),
        ({"epochs": []}, "has no complete epoch that was cold or warm"),
        ({"advice": {kind: {"bound": "short"} for kind in ADVICE}}, "were too short to tell how fast loading is"),
    ],
    ids=["steps", "only a mixed one", "none", "too short"],
)
def test_measurements_that_say_nothing_of_loading(tmp_path, changes, said):
    assert said in zloader("bill", "--measured", bench_file(tmp_path / "bench.json", **changes), status=1).stderr


def test_the_rates_that_are_free_of_a_price_stay_finite():
    free = bill("--gpu-hour", 0, "--nvme-gigabyte-month", 0, "--thousand-gets", 0)
    assert free["dollars"] == 0
    assert math.isfinite(free["hours"])
