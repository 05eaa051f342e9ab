"""The bundled cells as a file."""

from __future__ import annotations

import pytest

import zloader as zl
from zloader.common.errors import OptionError


def test_the_example_is_written_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = zl.example_h5ad()
    assert str(path) == "pancreas_human.h5ad"
    written = path.stat().st_mtime_ns
    assert zl.example_h5ad("pancreas_human.h5ad") == path
    assert path.stat().st_mtime_ns == written
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_of_the_user_is_overwritten(tmp_path, kind):
    mine = tmp_path / "mine.h5ad"
    if kind == "file":
        mine.write_text("mine")
    else:
        mine.mkdir()
    with pytest.raises(OptionError, match="exists and is not the example"):
        zl.example_h5ad(mine)
    assert kind == "directory" or mine.read_text() == "mine"


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        zl.example_h5ad(tmp_path / "nowhere" / "x.h5ad")
