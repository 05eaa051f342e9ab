"""The report of the demo: what it says of a run, and what it tells the reader to copy."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from helpers import PATIENCE_S
from pages import Page
from reported import demo_run, figures, loading, said, to_copy
from test_cli import zloader

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.demo_report import report
from zloader.commands.demo_run import BUNDLED_LABEL
from zloader.conversion.example import NAME as BUNDLED

pytestmark = pytest.mark.any_version


def rendered(**changes: Any) -> Page:
    return Page(report(demo_run(**changes)).html())


@pytest.fixture(scope="module")
def page() -> Page:
    return rendered()


def test_it_says_what_happened(page):
    text = page.text
    assert (
        "Epoch 1 read 56.0 MB from S3 in 56 GETs. Epochs 2 to 3 made 0 GETs: all 640 training cells came from" in text
    )
    for row in ("1 cold, S3 1,280 56 56.0 MB 25.0% 1.000 90.0%", "3 warm, mirror 1,280 0 0 B 8.3% 0.333 90.0%"):
        assert row in text
    for fact in (
        "900 × 2,000",
        "180,000 (10.0%)",
        "3.0 MB",
        "X/data float32 → uint8",
        "cell_type, 5 categories",
        "majority-class accuracy 30.0%",
        "100 cells without a cell_type",
        "blocks of 16 cells",
        "12.3 kB of metadata",
        "Python 3.11.7",
    ):
        assert fact in text
    assert "Baron" not in text


def test_the_bundled_cells_are_attributed():
    text = " ".join(said(report(demo_run(bundled=True))))
    assert "Baron et al. 2016" in text
    assert "GSE84133" in text
    assert "MIT" in text


def test_the_verdict_compares_accuracy_and_speed():
    assert demo_run().verdict == (
        "The model predicts cell_type correctly for 90.0% of the held-out cells; the majority-class accuracy is 30.0%. "
        "Loading alone runs at 4,000 cells/s from S3 and 64,000 cells/s from the mirror, 16.0 times as many. "
        "In epoch 3 training waited for cells 8% of the time: the model sets the pace."
    )
    assert "majority-class accuracy is 95.0%, which is no worse." in demo_run(guess_accuracy=0.95).verdict
    full = demo_run(loading=[loading(4000, gets=56), loading(4000, gets=7)])
    assert "mirror" not in full.verdict, "a pass that read from S3 is not one from the mirror"
    slow = dataclasses.replace(figures(1, gets=1), wait_share=0.8)
    assert "waited for cells 80% of the time: loading sets the pace" in demo_run(1, epochs=[slow]).verdict


def commands(blocks: list[str]) -> list[list[str]]:
    """The words of the command lines."""
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("zloader ", "python "))]


@pytest.mark.parametrize("source", [BUNDLED, "my cells' copy.h5ad"])
def test_commands_to_try_next_are_valid(source):
    found = commands(to_copy(report(demo_run(source=source, bundled=source == BUNDLED, label="cell type"))))
    assert [words[1] for words in found if words[0] == "zloader"] == ["convert", "bench", "demo", "demo"]
    for program, name, *arguments in found:
        if program == "zloader":
            command = typer.main.get_command(app).commands[name]
            command.make_context(name, arguments)  # raises an error for flags and values that it does not know
    assert (found[0][0] == "python") == (source == BUNDLED)
    assert (["--data", source, "--label", "cell type"] == found[-1][2:6]) == (source != BUNDLED)


@pytest.mark.any_version
@pytest.mark.slow  # it converts and reads all of the bundled cells
def test_commands_to_try_next_work_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = to_copy(report(demo_run(source=BUNDLED, bundled=True, label=BUNDLED_LABEL)))
    for program, *arguments in commands(blocks):
        if program == "python":
            subprocess.run([sys.executable, *arguments], check=True, timeout=PATIENCE_S)
        elif arguments[0] != "demo":  # test_demo.py runs the demo
            zloader(*arguments)
    names: dict[str, Any] = {}
    exec(blocks[0], names)  # the lines of Python, once the commands have made the store
    assert names["loader"].batch_size == 64
    assert names["minibatch"].obs["cell_type1"].shape == (2142 % 64,)
    assert names["zl"] is zl


def test_epochs_that_went_on_reading_are_not_called_warm():
    run = demo_run(epochs=[figures(1, gets=56), figures(2, gets=3, started_s=0.6)])
    assert "warm" not in "".join(epoch.source for epoch in run.epochs)
    assert "0 GETs" not in run.summary
    assert "the mirror was incomplete" in run.summary
