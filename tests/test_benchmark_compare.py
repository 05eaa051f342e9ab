"""benchmarks/compare/differences.py: records that are refused, intervals, pairing by a reference, and verdicts."""

from __future__ import annotations

import itertools
import json
import math

import benchmark_runs
import numpy as np
import pytest
from benchmark_runs import RUN, measurement, peers, whole_run, write

from benchmarks.compare import differences
from benchmarks.compare.reporting import records, turns

pytestmark = pytest.mark.any_version

GOOD = measurement("random", "zloader", 1, 100)


# ---- records


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        (["\n"], "is empty"),
        (["hello\n"], "line 1: not JSON, so this is not a file of run.py: hello"),
        (['{"name": 1}\n'], "line 1: not a record of run.py"),
        (["[1, 2]\n"], "line 1: not a record of run.py"),
        ([GOOD], "line 1: the first record is not that of a run"),
        ([RUN], "has no measurements; did its run end early?"),
        (
            [RUN, {"record": "failed", "scenario": "order", "peer": "x", "error": "a\nb"}],
            "has no measurements; all 1 failed, the first one x, order: a\nb",
        ),
        ([RUN, {**GOOD, "seconds": 1e-300}], "seconds is 1e-300, but it must be a number from 0"),
        ([RUN, {**GOOD, "seconds": 1e-12}], "seconds is 1e-12, but a measurement takes time"),
        ([RUN, GOOD, RUN], "line 3: a second run begins here"),
        ([RUN, GOOD, '{"record": "measurement", "scen'], "line 3: the file ends within this record"),
        ([RUN, '{"record": "measurement", "scen\n', GOOD], "line 2: not JSON"),
        ([{**RUN, "format": 2}, GOOD], "format 2, but this version reads format 1"),
        ([RUN, {**GOOD, "record": "news"}], "line 2: not a record of run.py"),
        ([RUN, {name: GOOD[name] for name in GOOD if name != "turn"}], "turn is missing from the measurement"),
        ([RUN, {**GOOD, "seconds": "1"}], "line 2: seconds is '1', but it must be a number from 0"),
        ([RUN, {**GOOD, "seconds": True}], "seconds is True"),
        ([RUN, {**GOOD, "seconds": 0}], "seconds is 0, but a measurement takes time"),
        ([RUN, {**GOOD, "seconds": math.nan}], "seconds is nan"),
        ([RUN, {**GOOD, "seconds": -1.0}], "seconds is -1.0"),
        ([RUN, {**GOOD, "rows": 10**400}], "rows is 1000"),
        ([RUN, {**GOOD, "rows": 1.5}], "rows is 1.5, but it must be a whole number from 0"),
        ([RUN, {**GOOD, "case": ["cold"]}], "case is ['cold'], but it must be a list or an object"),
        ([RUN, {**GOOD, "case": {"epoch": None}}], "case, epoch is None, but it must be a string or a number"),
        ([{**RUN, "data": [1]}, GOOD], "data: 1 is not an object with the keys of Data"),
        ([RUN, GOOD, GOOD], "line 3: measures the peer, case and turn of line 2 again"),
    ],
    ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else None,
)
def test_a_file_that_is_not_a_run_is_refused(tmp_path, lines, said):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    with pytest.raises(records.RecordsError) as raised:
        records.read(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_records_are_read_as_they_were_written(tmp_path):
    written = [
        RUN,
        {**peers("zloader")[0], "colour": "blue"},
        {**GOOD, "gets": None, "server_s": 1.5, "rows": 1e3},
        "\n",
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line if isinstance(line, str) else records.line(line) for line in written).rstrip("\n"))
    read = records.read(path)
    assert (read.run.commit, read.run.data[0].genes) == (RUN["commit"], 50)
    assert read.peers[0].extra == {"colour": "blue"}
    (found,) = read.measurements
    assert (found.gets, found.extra, found.rows, found.rows_per_s) == (None, {"server_s": 1.5}, 1000, 100)
    assert found.cpu_s_per_row == pytest.approx(12.5 / 1000)
    with pytest.raises(records.RecordsError, match="turn is 'one'"):
        records.line({**GOOD, "turn": "one"})


# ---- intervals


def test_few_turns_have_an_interval_of_student():
    """The logarithms are 0, log 2 and log 4: mean log 2, standard error log 2 / sqrt 3. t of 3 turns is 4.303."""
    found = turns.interval([1.0, 2.0, 4.0])
    half = 4.303 / math.sqrt(3)
    assert (found.ratio, found.turns) == (pytest.approx(2.0), 3)
    assert (found.low, found.high) == (pytest.approx(2 ** (1 - half)), pytest.approx(2 ** (1 + half)))
    assert turns.interval([3.0]) == turns.Interval(pytest.approx(3.0), 0.0, math.inf, 1)
    assert turns.interval([2.0] * 4) == turns.Interval(*[pytest.approx(2.0)] * 3, 4)


def test_the_bootstrap_agrees_with_all_possible_draws():
    logs = np.log([1.0, 1.1, 1.3, 1.2, 1.6])
    draws = np.array(list(itertools.product(logs, repeat=5)))
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = (draws.mean(axis=1) - logs.mean()) / (draws.std(axis=1, ddof=1) / np.sqrt(5))
    low, high = np.sort(distances)[[78, 3046]]  # 2.5 % and 97.5 % of the 3 125
    error = logs.std(ddof=1) / np.sqrt(5)
    found = turns.interval(np.exp(logs))
    assert found.low == pytest.approx(math.exp(logs.mean() - high * error), rel=0.03)
    assert found.high == pytest.approx(math.exp(logs.mean() - low * error), rel=0.03)
    assert found == turns.interval(np.exp(logs))
    assert found != turns.interval(np.exp(logs), seed=1)


@pytest.mark.parametrize("n", [3, pytest.param(5, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_intervals_contain_the_true_ratio_in_about_95_of_100_runs(n, monkeypatch):
    monkeypatch.setattr(turns, "RESAMPLES", 1000)
    rng = np.random.default_rng(n)
    ratios = 1.3 * np.exp(rng.normal(0, 0.1, (600, n)))
    found = [turns.interval(each, seed=run) for run, each in enumerate(ratios)]
    covered = np.mean([each.low <= 1.3 <= each.high for each in found])
    assert 0.92 < covered < 0.98


# ---- comparing


def runs(tmp_path, *sides, **changes):
    """Two runs of one case with these cells/s by peer and turn. `changes` are made to the run of B."""
    paths = []
    for name, side in zip("ab", sides, strict=True):
        run = {**RUN, **(changes if name == "b" else {})}
        measured = [
            measurement("random", peer, turn, speed) for peer, of in side.items() for turn, speed in enumerate(of, 1)
        ]
        paths.append(write(tmp_path / f"{name}.jsonl", [run, *peers(*side), *measured]))
    return [records.read(path) for path in paths]


def test_a_case_worked_out_by_hand(tmp_path):
    """Turn by turn B is 2, 2 and 2 times A; turn 4 of A has no partner. CPU seconds per cell are half."""
    a, b = runs(tmp_path, {"zloader": [100, 150, 50, 80]}, {"zloader": [200, 300, 100]})
    (found,) = differences.compare(a, b)
    assert (found.speed.ratio, found.speed.turns, found.verdict) == (pytest.approx(2), 3, "faster")
    assert (found.cpu.ratio, found.cpu_verdict) == (pytest.approx(0.5), "less")
    (back,) = differences.compare(b, a)
    assert (back.speed.ratio, back.verdict, back.cpu_verdict) == (pytest.approx(0.5), "slower", "more")


def test_noise_is_called_noise(tmp_path):
    a, b = runs(tmp_path, {"zloader": [100, 120, 90, 110, 105]}, {"zloader": [104, 115, 95, 104, 108]})
    (found,) = differences.compare(a, b)
    assert found.speed.low < 1 < found.speed.high
    assert (found.verdict, found.cpu_verdict) == ("within noise", "within noise")
    (same,) = differences.compare(a, a)
    assert (same.speed.ratio, same.verdict) == (1, "within noise")
    one_a, one_b = runs(tmp_path, {"zloader": [100]}, {"zloader": [900]})
    assert differences.compare(one_a, one_b)[0].verdict == "one turn only"


LOADS_A, LOADS_B = [1.0, 0.5, 0.9, 0.4, 1.1], [0.3, 0.5, 0.2, 0.6, 0.25]  # the machine of B is slower and disturbed


def disturbed(tmp_path, **changes):
    """Runs in which zloader of B is 1.5 times as fast, though its machine is slower. annbatch did not change."""
    own = [1.0, 1.01, 0.99, 1.02, 0.98]
    return runs(
        tmp_path,
        {"zloader": [100 * load for load in LOADS_A], "annbatch": [40 * load for load in LOADS_A]},
        {"zloader": [150 * f * load for f, load in zip(own, LOADS_B, strict=True)],
         "annbatch": [40 * load for load in LOADS_B]},
        **changes,
    )  # fmt: skip


def test_runs_on_other_machines_are_paired_through_a_reference(tmp_path):
    a, b = disturbed(tmp_path, processor="Example 2")
    assert differences.conditions(a, b) == ["processors Example 1 and Example 2"]
    theirs, ours = differences.compare(a, b)
    assert (ours.relative_to, ours.verdict) == ("annbatch", "faster")
    assert ours.speed.ratio == pytest.approx(1.5, rel=0.01)
    assert 1.45 < ours.speed.low < 1.5 < ours.speed.high < 1.55
    assert (theirs.relative_to, theirs.speed.ratio < 0.6) == (None, True)
    alone = differences.compare(a, b, differences.NONE)[1]
    assert (alone.relative_to, alone.verdict) == (None, "within noise")


def test_other_loads_choose_a_reference_and_another_version_of_it_does_not(tmp_path):
    a, b = disturbed(tmp_path)
    assert differences.conditions(a, b) == []
    assert {found.relative_to for found in differences.compare(a, b)} == {None}
    loaded = [json.loads(line) for line in b.path.read_text().splitlines()]
    loaded = [{**record, "load": 3.0} if record["record"] == "measurement" else record for record in loaded]
    write(b.path, loaded)
    b = records.read(b.path)
    assert differences.conditions(a, b) == ["loads 1.0 and 3.0"]
    assert differences.compare(a, b)[1].relative_to == "annbatch"
    write(b.path, [{**record, "version": "9"} if record["record"] == "peer" else record for record in loaded])
    assert differences.compare(a, records.read(b.path))[1].relative_to is None


def test_what_cannot_be_compared_is_said(tmp_path):
    a, b = runs(tmp_path, {"zloader": [1, 2]}, {"annbatch": [1, 2]})
    with pytest.raises(records.RecordsError, match=r"no case in common: a\.jsonl has random with synthetic, but b"):
        differences.compare(a, b)
    a, b = runs(tmp_path, {"zloader": [1]}, {"zloader": [1]}, data=[{"name": "synthetic", "rows": 7}])
    with pytest.raises(records.RecordsError, match=r"no case in common: .* \(with other sizes: synthetic\)"):
        differences.compare(a, b)
    a, b = runs(tmp_path, {"zloader": [1]}, {"zloader": [1]})
    with pytest.raises(records.RecordsError, match="no measurement of the reference 'anbatch'"):
        differences.compare(a, b, "anbatch")


# ---- the command


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", whole_run())
    slower = [record for record in whole_run(seed=1, zloader=0.5) if record.get("scenario") != "sets"]
    b = write(tmp_path / "b.jsonl", slower)
    differences.main([str(a), str(b)])
    shown = capsys.readouterr().out
    assert "Only in A: sets, synthetic: " in shown
    assert "by chance alone, about" in shown
    differences.main([str(a), str(b), "--json"])
    document = json.loads(capsys.readouterr().out)
    cases = {(each["scenario"], json.dumps(each["case"]), each["peer"]): each for each in document["comparisons"]}
    assert len(cases) == len(document["comparisons"]) == (len(benchmark_runs.CASES) - 1) * len(benchmark_runs.SPEEDS)
    warm = cases["cold_warm_local", '{"epoch": "warm"}', "zloader"]
    assert warm["speed"]["low"] < 0.5 < warm["speed"]["high"]
    assert document["only"]["a"] == sorted(f"sets, synthetic: {peer}" for peer in benchmark_runs.SPEEDS)
    verdicts = [each["verdict"] for each in document["comparisons"] if each["peer"] != "zloader"]
    assert verdicts.count("within noise") > 0.85 * len(verdicts)
