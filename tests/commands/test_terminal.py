"""Names in a store and in file systems are printed so that they cannot steer a terminal, by commands and by Python."""

from __future__ import annotations

import io
import logging
import re
import shutil
import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import MissingColumnError, SourceError
from zloader.common.messages import warn_user
from zloader.common.progress import progress_bars

# No colour, a title, a link, the one-character form of a code, an overwritten line, a forged line, reversed text.
NASTY = "\x1b[666mA\x1b]0;B\x07\x1b]8;;u\x07\x9b2JC\rD\n#E\u202eF\x7f[red]G[bold]:smile:"
LABEL = f"{NASTY}[/][/red]"  # a slash cannot be part of a file's name
PLAIN = repr(NASTY)[1:-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An .h5ad file, the store of it, and a store without an object. All that has a name has a nasty one."""
    folder = tmp_path_factory.mktemp("terminal") / NASTY
    folder.mkdir()
    x = sp.csr_matrix(np.arange(240, dtype=np.float32).reshape(60, 4) % 3)
    labels = pd.Categorical.from_codes(np.arange(60) % 2, [LABEL, "B"])
    obs = pd.DataFrame({NASTY: labels, "label": labels}, index=[f"{LABEL}{row}" for row in range(60)])
    var = pd.DataFrame({NASTY: range(4)}, index=[f"{LABEL}{gene}" for gene in range(4)])
    cells = ad.AnnData(x, obs=obs, var=var, layers={NASTY: x}, obsm={NASTY: x.toarray()}, uns={NASTY: 1})
    cells.write_h5ad(folder / "cells.h5ad")
    zl.convert(str(folder / "cells.h5ad"), str(folder / "cells.zarr"), progress=False)
    shutil.copytree(folder / "cells.zarr", folder / "damaged.zarr")
    for shard in (folder / "damaged.zarr").glob("layers/*/data/c/0"):
        shard.unlink()
    return folder


def check(text):
    """Only the codes of Rich itself are in the text, which never sets a colour 666 and begins no line of its own."""
    text = re.sub(r"\x1b\[(?!666)[\d;?]*[A-Za-z]|\r(?!D)", "", text)
    for line in text.split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("#E"), line


COMMANDS = [
    (0, ["info", "cells.h5ad"]),
    (0, ["info", "cells.zarr", "--x", f"layers/{NASTY}", "--group", NASTY, "--set-size", "2"]),
    (1, ["info", "cells.zarr", "--group", f"{NASTY}!"]),
    (1, ["info", f"{NASTY}.zarr"]),
    (2, ["info", "cells.h5ad", NASTY]),
    (2, [NASTY]),
    (0, ["convert", "cells.h5ad", f"{NASTY}.new.zarr", "--overwrite"]),
    (1, ["convert", "cells.h5ad", f"{NASTY}.new.zarr"]),
    (1, ["convert", "cells.h5ad", "none.zarr", "--layers", f"{NASTY}!"]),
    (0, ["verify", "cells.zarr"]),
    (1, ["verify", "damaged.zarr", "--against", "cells.h5ad"]),
    (1, ["verify", "damaged.zarr", "--json"]),
    (0, ["warm", "cells.zarr", "--cache", NASTY, "--x", f"layers/{NASTY}"]),
    (0, ["cache", "ls", NASTY]),
    (0, ["cache", "verify", NASTY]),
    (0, ["cache", "clear", NASTY, "--yes"]),
    (0, ["bench", "cells.zarr", "--epochs", "1", "--batch-size", "8", "--obs", NASTY]),
    (0, ["doctor", "cells.zarr", "--cache", "."]),
]


@pytest.mark.parametrize("terminal", [False, True])
def test_commands_print_nothing_that_a_terminal_obeys(folder, monkeypatch, caplog, terminal):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    silent = []
    for status, words in COMMANDS:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == status, done.output
        check(done.stdout)
        check(done.stderr)
        if "[red]G[bold]:smile:" not in done.output:
            silent.append(words[:2])
    # The doctor's table folds long paths, where it is 120 columns wide.
    silent = [words for words in silent if words[0] != "doctor"]
    assert silent == [["verify", "cells.zarr"], ["cache", "verify"], ["bench", "cells.zarr"]]
    assert "stale" not in caplog.text  # as metadata of names with a newline were said to be


def test_an_unforeseen_error_ends_a_command_with_its_traceback(folder, monkeypatch):
    def fails(_):
        raise OSError(LABEL.replace("\n", "")) from ValueError(LABEL.replace("\n", ""))

    monkeypatch.chdir(folder)
    monkeypatch.setattr("zloader.insight.summary.summarize", fails)
    with pytest.raises(SystemExit) as ended:
        app(["info", "cells.zarr"])
    assert "Traceback" in ended.value.code
    assert "OSError: \\x1b[666mA" in ended.value.code
    assert "ValueError: \\x1b[666mA" in ended.value.code
    check(ended.value.code)


def test_errors_warnings_and_logs_name_things_on_one_line(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    dataset = zl.open_dataset("cells.zarr")
    tries = [
        lambda: dataset.obs_column(f"{NASTY}!"),
        lambda: dataset.where(f"label == '{NASTY}"),
        lambda: dataset[:, [NASTY]],
        lambda: zl.open_dataset(f"{NASTY}/none.zarr"),
        lambda: zl.convert(f"{NASTY}.h5ad", "none.zarr"),
        lambda: list(zl.Loader(zl.open_dataset("damaged.zarr"), x=f"layers/{NASTY}", batch_size=8)),
    ]
    for attempt in tries:
        with pytest.raises(zl.ZloaderError) as raised:
            attempt()
        check(str(raised.value))
    loader = zl.Loader(dataset, batch_size=8, obs=[NASTY])
    for text in (repr(dataset), repr(next(iter(loader)))):
        assert PLAIN in text
        check(text)
    check(repr(loader))
    with pytest.warns(UserWarning, match="C") as caught:
        warn_user(NASTY)
    assert str(caught[0].message) == PLAIN
    logging.getLogger("zloader").warning("%s in %d", NASTY, 3)
    assert f"{PLAIN} in 3" in caplog.messages


def test_an_error_of_several_lines_keeps_them():
    assert str(SourceError("a\nb", "c")) == "a\\nb\nc"
    assert str(MissingColumnError("it's")) == "it's"


def test_progress_bars_show_names_as_they_are(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "2000")
    with progress_bars(shown=True) as bars:
        bars.add(f"reading {LABEL}", 10)(10)
    assert f"reading {repr(LABEL)[1:-1]}" in terminal.getvalue()
    check(terminal.getvalue())
