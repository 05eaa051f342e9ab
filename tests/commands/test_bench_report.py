"""The report of `zloader bench`: its figures and tables have the measured numbers."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import typer.main
from pages import Page
from reported import MIXING, SETTINGS, bench_run, epoch, said, to_copy, with_figures

from zloader.commands.bench_report import report
from zloader.commands.bench_run import BenchRun
from zloader.commands.cli import app

pytestmark = pytest.mark.any_version

FLAGS = ["--batch-size", "64", "--endpoint-url", "http://127.0.0.1:9"]


def rendered(run: BenchRun) -> Page:
    return Page(report(run, {"anon": True}, FLAGS).html())


@pytest.fixture(scope="module")
def page() -> Page:
    return rendered(bench_run(quality=MIXING))


def test_the_tables_have_the_numbers(page):
    assert "epoch kind rows/s time first minibatch after waiting GETs read from the store read rate" in page.text
    assert "0 cold 640 10.00 s 0.50 s 90% 50 3.0 GB 300 MB/s 40% $0.27" in page.text
    assert "1 warm 3,200 2.00 s 0.50 s 90% 0 0 B 0 B/s 100% under $0.0001" in page.text
    assert (
        "GETs under $0.0001 $0 egress $0.27 $0 NVMe under $0.0001 under $0.0001 in all $0.27 under $0.0001" in page.text
    )
    assert "$0.0004 for 1000 GETs, $0.09 for a GB read" in page.text
    assert "3.0 GB read from the store, cold: 50 GETs, $0.27 an epoch" in page.text


def test_the_advice_is_on_top(page):
    text = page.text
    assert "Cold epochs: The link bounds you: bytes arrived at 300 MB/s, 94% of the 320 MB/s that the link" in text
    assert "Warm epochs are 5.0 times as fast as cold ones: 3,200 rows/s against 640." in text
    assert text.index("The link bounds you") < text.index("Where the time of an epoch went")


def test_the_order_is_judged_only_if_asked(page):
    assert "Minibatches have 75% of the entropy of random ones, by plate." in page.text
    assert "most neighbouring rows in a minibatch 7 pairs of rows from one block 1.23%" in page.text
    assert "entropy" not in " ".join(said(report(bench_run(), {}, FLAGS)))


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        ({"cache": None}, ["--cache zloader-cache", "$0.27"], ["The mirror filling"]),
        ({"epochs": [epoch(3, "warm")]}, ["rows/s, warm"], ["Reading from the store over time", "rows/s, cold"]),
        ({"local": True}, ["The disk bounds you", "disk 320 MB/s, measured by reading without decoding",
                           "limit: the disk"], ["the link"]),
        ({"local": True, "epochs": [with_figures(epoch(0), disk_bytes=0.3e9)]},
         ["90% of what the cold epoch read was there. If all of it came from the disk, 683 rows/s would be the most."],
         ["The disk bounds you"]),
        ({"local": True, "link_bytes_per_s": None}, ["Reads of a local store cost nothing", "disk not measured",
                                                     "keeps files that were used lately in memory"], ["egress"]),
        ({"step_s": 0.09}, ["GPUs $0.0083", "limit: your step", "90 ms of sleep each"], []),
        ({"load": 1.7}, ["its load was 1.7 with 2 cores"], []),
        ({"epochs": [dataclasses.replace(epoch(0), complete=False)]}, ["The run was interrupted in epoch 0",
                                                                      "0 cold, interrupted 640"], []),
        ({"epochs": [epoch(k, elapsed_s=0.1, began_s=k / 5) for k in range(70)]},
         ["The first 50 of 70 epochs", "The first 20 of 70 epochs"], ["times as fast"]),
    ],
    ids=["no mirror", "only warm", "a disk", "in memory", "local", "steps", "a busy machine",
         "interrupted", "many epochs"],
)  # fmt: skip
def test_pages_of_other_runs(changes, there, not_there):
    text = " ".join(said(report(bench_run(**changes), {}, FLAGS)))
    assert [words for words in there if words not in text] == []
    assert [words for words in not_there if words in text] == []


def test_advice_is_about_one_epoch_and_not_about_medians_of_several():
    """The medians of these would be an epoch of 10 s that waited 15 s."""
    figures = [(9.0, 1.0), (10.0, 2.0), (20.0, 15.0), (21.0, 20.0), (5.0, 20.0)]
    epochs = [
        with_figures(epoch(k), elapsed_s=elapsed_s, wait_s=wait_s) for k, (elapsed_s, wait_s) in enumerate(figures)
    ]
    pace = bench_run(epochs).paces["cold"]
    assert (pace.elapsed_s, pace.wait_s) == (10.0, 2.0)


def test_the_code_and_the_commands_fit_the_run(page):
    assert "zl.open_dataset('s3://b/atlas.zarr', cache='/nvme/zloader', storage_options={'anon': True})" in page.code[0]
    assert "obs=['cell_type'])" in page.code[0]
    compile(page.code[0], "page", "exec")
    found = [shlex.split(line) for block in page.code for line in block.splitlines() if line.startswith("zloader ")]
    assert [words[1] for words in found] == ["bench"]
    for _, name, *arguments in found:
        typer.main.get_command(app).commands[name].make_context(name, list(arguments))
        assert name != "bench" or {"s3://b/atlas.zarr", "/nvme/zloader", *FLAGS} <= set(arguments)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["symbol"], "genes_by='symbol'"),
        (["none", "orthologs.tsv"],
         r"genes_by=[None, pd.read_csv('orthologs.tsv', sep='\t', header=None, index_col=0)[1]]"),
    ],
)  # fmt: skip
def test_the_code_names_genes_as_the_run_did(given, text):
    code = to_copy(report(bench_run(settings=SETTINGS | {"genes_by": given}), {}, FLAGS))[0]
    assert text in code
    assert ("import pandas as pd" in code) == ("pd." in text)
    compile(code, "page", "exec")
