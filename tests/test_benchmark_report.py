"""benchmarks/compare/report.py: the page, the figures, the Markdown and README's section, made from synthetic runs."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import benchmark_runs
import pytest
from benchmark_runs import RUN, measurement, peers, whole_run, write
from pages import Page, drawn

from benchmarks.compare import report
from benchmarks.compare.reporting import costs, figures, records, tables, words
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.turns import Spread

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[1]
SUMMED_UP = (None, "cold_warm_local", "order")  # the scenarios whose figures are in the documentation
FULL_RUN = ROOT / "benchmarks" / "full.jsonl"


def results(tmp_path: Path, lines: list[benchmark_runs.Record]) -> Results:
    return Results(records.read(write(tmp_path / "run.jsonl", lines)))


def section(found: Results, title: str) -> tables.Section:
    return next(each for each in tables.sections(found) if each.title == title)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(tmp_path_factory.mktemp("run"), whole_run())


@pytest.fixture(scope="module")
def page(whole: Results) -> Page:
    return Page(report.html(whole))


# ---- the page


def test_the_page_has_every_scenario_and_tool(whole, page):
    headings = [section.title for section in tables.sections(whole)]
    assert len(whole.scenarios) == 13
    for name in whole.scenarios:
        assert tables.scenario(name).title in headings
    for heading in headings:
        assert heading in page.text
    for peer in benchmark_runs.SPEEDS:
        assert f"{peer} as its documentation says." in page.text
    for said in ("no wheel for Python 3.12", "ValueError: no <tokenizer> | of that name", "0123456789abcdef"):
        assert said in page.text


def test_the_page_is_one_file_without_scripts(page):
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert {link["href"] for link in page.all("link")} == {"data:,"}
    assert all(str(link["href"]).startswith("#") for link in page.all("a"))


# ---- ratios


def one_case(*speeds: tuple[str, list[float]], scenario: str = "random", **more: object) -> list[benchmark_runs.Record]:
    measured = [
        measurement(scenario, peer, turn, speed, **more) for peer, of in speeds for turn, speed in enumerate(of, 1)
    ]
    return [RUN, *peers(*(peer for peer, _ in speeds)), *measured]


def test_ratios_are_paired_by_turn(tmp_path):
    """Within the turns zloader is 2, 2 and 8 times as fast; the ratio of the medians would be 4."""
    found = results(tmp_path, one_case(("zloader", [100, 400, 800]), ("annbatch", [50, 200, 100])))
    (headline,) = found.headlines()
    assert headline.other is not None
    assert headline.other.against == Spread(2.0, 2.0, 8.0)
    assert tables.times(headline.other.against) == "2.0 × (2.0 to 8.0)"
    (table,) = tables.at_a_glance(found).tables
    assert table.rows == [["perfectly random cells", "400 cells/s", "annbatch: 100 cells/s", "2.0 × (2.0 to 8.0)"]]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([100, 110], [50, 50], "zloader is 2.1 × (2.0 to 2.2) as fast."),
        ([100, 40], [50, 50], "Neither is faster in every turn: zloader is 1.4 × (0.80 to 2.0) as fast."),
        ([100], [50], "In this one turn, zloader was 2.0 × as fast; one turn says nothing about chance."),
    ],
)
def test_the_verdict_claims_no_more_than_the_turns_show(tmp_path, ours, theirs, said):
    assert tables.verdict(results(tmp_path, one_case(("zloader", ours), ("annbatch", theirs)))).endswith(said)


def test_an_epoch_that_hardly_began_gives_a_bound_and_no_speed(tmp_path):
    """They waited for the first minibatch, and ended early; the first one went on for a minute before."""
    cut = {"rows": 64, "seconds": 5.0, "first_s": 2.0}
    lines = [RUN, *peers("zloader", "annbatch", "x", "y"), measurement("random", "zloader", 1, 500),
             measurement("random", "annbatch", 1, 1) | cut | {"rows": 640, "seconds": 64.0},
             measurement("random", "x", 1, 1) | cut,
             measurement("random", "y", 1, 1) | cut | {"rows": 32, "first_s": 4.0}]  # fmt: skip
    text = Page(report.html(results(tmp_path, lines))).text
    assert "annbatch 10 1 50 × ≤ " in text
    assert "x ≥ 12.8 1 ≤ 39.1 × ≤ " in text
    (table,) = section(results(tmp_path, lines), "Perfectly random cells").tables
    assert [row[4] for row in table.rows] == ["", "≤ 39.1 ×", "50 ×", ""]
    assert "x ≥ 12.8 cells/s" not in text.split("At a glance")[0]
    (chart,) = figures.charts(results(tmp_path, lines), "random", "synthetic")
    assert {"≥ 12.8", "10"} <= {text.get_text() for text in drawn(chart).axes[0].texts}


def test_mixing_and_cells_in_memory_stand_beside_the_speed(tmp_path):
    lines = one_case(("zloader", [100]), ("annbatch", [50]), ("AnnData in memory", [120]))
    for line, bits in zip(lines[-3:-1], (3.5, 3.7), strict=True):
        line["entropy"] = bits
    (table,) = tables.at_a_glance(results(tmp_path, lines)).tables
    assert table.header[-2:] == ["entropy, bits", "AnnData in memory"]
    assert table.rows[0][-2:] == ["3.50 and 3.70", "120 cells/s"]


def test_costs_are_those_of_processors_and_of_reads(tmp_path):
    """4 000 CPU seconds per 1 000 cells, and $0.004 for their GETs; the second tool ended early, so it has a bound."""
    spent = {"user_s": 3600.0, "system_s": 400.0, "dollars": 0.004, "ended": True}
    case = {"epoch": "cold"}
    lines = [RUN, *peers("zloader", "annbatch"),
             measurement("cold_warm_cloud", "zloader", 1, 100, case=case) | spent | {"rows": 1000},
             measurement("cold_warm_cloud", "annbatch", 1, 100, case=case) | spent | {"rows": 500, "ended": False},
             ]  # fmt: skip
    (table,) = section(results(tmp_path, lines), "What an epoch costs").tables
    dollars = 1e5 * (4000 * costs.CORE_HOUR / 3600 + 0.004)
    assert table.rows == [
        ["zloader", "4 000 000", f"{dollars:.2f}", "", ""],
        ["annbatch", "≤ 8 000 000", f"≤ {2 * dollars:.2f}", "", ""],
    ]


def test_a_case_with_another_data_set_says_so(tmp_path):
    lines = one_case(("zloader", [100]), scenario="cold_warm_local", case={"epoch": "cold"}, data="pancreas")
    found = results(tmp_path, lines)
    assert tables.verdict(found) == "Cold epoch, local disk (pancreas): zloader 100 cells/s."
    (table,) = tables.at_a_glance(found).tables
    assert table.rows[0][0] == "cold epoch, local disk (pancreas)"


@pytest.mark.parametrize(
    ("part", "bound"),
    [({"rows": 100}, "≤ "), ({"rows": 100, "ended": True}, ""), ({"rows": 1000, "ended": False}, "≤ ")],
    ids=["older file", "ended", "ended early"],
)
def test_reads_are_per_cell_and_bounds_of_epochs_that_ended_early(tmp_path, part, bound):
    """Both made one GET a hundred cells; but the second one did so for cells that it did not give out, too."""
    whole = {"gets": 10, "bytes": 5e5, "dollars": 4e-6, "user_s": 4.0, "system_s": 1.0}
    part |= {name: figure * part["rows"] / 1000 for name, figure in whole.items()}
    lines = [RUN, *peers("zloader", "annbatch"), measurement("random", "zloader", 1, 100, **whole),
             measurement("random", "annbatch", 1, 100, **part)]  # fmt: skip
    (table,) = section(results(tmp_path, lines), "Perfectly random cells").tables
    names = ("CPU s / 100k cells", "GETs / 1000 cells", "read / cell", "$ / million cells")
    figures = {row[0]: [row[table.header.index(name)] for name in names] for row in table.rows}
    assert figures["zloader"] == ["500", "10", "500 B", "0.004"]
    assert figures["annbatch"] == [f"{bound}500", f"{bound}10", f"{bound}500 B", f"{bound}0.004"]


def test_cases_in_which_another_tool_is_better_are_listed(tmp_path):
    lines = one_case(("zloader", [100, 100]), ("annbatch", [200, 200]), ("AnnData in memory", [400, 400]))
    lines += [measurement("first", peer, 1, 1000, first_s=s) for peer, s in (("zloader", 2.0), ("annbatch", 0.5))]
    rows = [row for table in tables.sections(results(tmp_path, lines))[1].tables for row in table.rows]
    assert rows == [
        ["Perfectly random cells, synthetic", "annbatch: 200 cells/s", "zloader: 100 cells/s", "0.50 ×"],
        ["Time to the first minibatch, synthetic", "annbatch: 0.5 s", "zloader: 2 s", "0.25 ×, one turn"],
    ]
    ahead = results(tmp_path, one_case(("zloader", [100]), ("annbatch", [50])))
    (text,) = tables.sections(ahead)[1].text
    assert text.startswith("No other loader was better than zloader in any case of this run.")
    for peer in ("zloader, no mirror", "AnnData in memory"):
        alone = results(tmp_path, one_case(("zloader", [100]), (peer, [50])))
        assert tables.sections(alone)[1].text == ["No other loader was measured, so nothing was compared."]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "lines",
    [
        one_case(("zloader", [100])),
        one_case(("annbatch", [100, 90])),
        one_case(("zloader, dense", [100]), ("AnnData in memory", [0.001]), scenario="cold_warm_local",
                 case={"epoch": "warm"}, peak_bytes=None, user_s=None, first_s=None, load=None),
        [{"record": "run", "format": 1, "began": "", "commit": ""}, measurement("memory", "x", 1, 5, case={"n": 0})],
        [RUN, measurement("order", "x", 1, 5, case={"block_rows": 1, "fetch_factor": 1})],
        [RUN, measurement("scaling", "x", 1, 5, rows=0, case={"rows": 10}), measurement("order", "x", 1, 5)],
        [RUN, measurement("random", "x", 1, 5, rows=10**18, seconds=1e-9, gets=10**18, bytes=10**18, dollars=1e-18)],
        [RUN, {"record": "missing", "peer": "x", "reason": "half: \ud800"}, measurement("first", "x", 1, 5)],
        [RUN, measurement("method", "x", 1, 5), {"record": "failed", "scenario": "y", "peer": "x", "error": " \n"}],
    ],
    ids=["one", "no zloader", "few figures", "no machine", "one pair of sizes", "no rows", "huge", "half a character",
         "a scenario named as a section"],
)  # fmt: skip
def test_small_runs_have_a_report(tmp_path, lines):
    found = results(tmp_path, lines)
    report.main([str(found.records.path), "--output", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md")])
    page = Page((tmp_path / "r.html").read_text())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert found.peers[0] in page.text
    assert found.peers[0] in (tmp_path / "r.md").read_text()


def test_names_cannot_break_out_of_the_page(tmp_path):
    name = "<script>alert(1)</script>|`*$x$"
    found = results(
        tmp_path, [*one_case(("zloader", [100]), (name, [50])), {"record": "missing", "peer": name, "reason": name}]
    )
    page = Page(report.html(found))
    assert "script" not in {tag for tag, _ in page.tags}
    assert name in page.text
    for line in report.markdown(found, "figures").splitlines():
        assert "<script" not in line.replace("\\<", "")


def test_a_failure_is_shown_with_its_last_words(tmp_path):
    error = "self.x(3)\n    ^^^^^\n  File x.py, line 4, in x\nRuntimeError: there is no x,\n  but a y\n"
    failed = {"record": "failed", "scenario": "random", "peer": "annbatch", "error": error}
    text = Page(report.html(results(tmp_path, [*one_case(("zloader", [100])), failed]))).text
    assert "RuntimeError: there is no x, but a y" in text
    assert "self.x(3)" not in text
    assert len(tables.last_words("x" * 9999)) == 400


def test_examples_of_docstrings_are_correct():
    for module in (tables, words):
        done = doctest.testmod(module)
        assert done.attempted > 0
        assert done.failed == 0


# ---- figures


# ---- Markdown and README


@pytest.mark.slow
def test_the_command_writes_page_markdown_figures_and_readme(tmp_path, capsys):
    run = write(tmp_path / "full.jsonl", [line for line in whole_run(2) if line.get("scenario") in SUMMED_UP])
    readme = tmp_path / "README.md"
    readme.write_text(f"# A\n\n{report.BEGIN}\nold\n{report.END}\n\n## B\n")
    page = tmp_path / "docs" / "benchmarks.md"
    arguments = [str(run), "--markdown", str(page), "--readme", str(readme)]
    report.main([*arguments, "--output", str(tmp_path / "report.html")])
    written = capsys.readouterr().out.split()
    assert all(Path(path).stat().st_size > 1000 for path in written if not path.endswith("README.md"))
    text, docs = readme.read_text(), page.read_text()
    assert text.startswith("# A\n\n<!-- benchmarks -->\n")
    assert text.endswith("<!-- end of benchmarks -->\n\n## B\n")
    assert "[docs/benchmarks.md](docs/benchmarks.md)" in text
    for folder, written, n in ((tmp_path, text, 1), (tmp_path / "docs", docs, 2)):
        images = re.findall(r"!\[[^]]{20,}\]\(([^)]+)\)", written)
        assert len(images) == n
        assert all((folder / image).read_text().rstrip().endswith("</svg>") for image in images)
    assert {line for line in text.splitlines() if line.startswith("| ")} <= set(docs.splitlines())
    assert "commit 0123456789abcdef" in docs
    report.main(arguments)
    assert (readme.read_text(), page.read_text()) == (text, docs)


def test_nothing_is_written_if_the_run_or_the_markers_are_bad(tmp_path):
    good, bad = write(tmp_path / "good.jsonl", whole_run(1)), write(tmp_path / "bad.jsonl", [RUN])
    readme = tmp_path / "README.md"
    readme.write_text("# No markers\n")
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit, match="has no measurements"):
        report.main([str(bad), "--markdown", str(page)])
    with pytest.raises(SystemExit, match="2"):
        report.main([str(good), "--output", str(good)])
    with pytest.raises(SystemExit, match="2"):
        report.main([str(good), "--output", str(page), "--markdown", str(page)])
    with pytest.raises(SystemExit, match=r"README\.md cannot be changed: it must have the lines <!-- benchmarks -->"):
        report.main([str(good), "--markdown", str(page), "--readme", str(readme)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "bad.jsonl", "good.jsonl"]


@pytest.mark.skipif(not FULL_RUN.exists(), reason="no full run is committed yet")
def test_the_figures_of_the_readme_come_from_the_committed_run():
    """All of the section, because a figure outside the markers could be from anywhere."""
    found = Results(records.read(FULL_RUN))
    readme = (ROOT / "README.md").read_text()
    section = report.readme_section(found, "docs/benchmarks.md", "docs/figures")
    (how_fast,) = re.findall(r"^## How fast\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    assert how_fast.strip() == section
    assert (ROOT / "docs" / "benchmarks.md").read_text() == report.markdown(found, "figures")
