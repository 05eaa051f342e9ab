"""What the README says is true: its lines run, its options exist, its commands are what CI runs."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import numpy as np
from helpers import counts

import zloader as zl

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def fenced(marker: str) -> str:
    """The fenced lines below a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)[1]


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    adata = counts(150, 40)
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.add_categories("rest").fillna("rest")
    adata.write_h5ad(tmp_path / "pbmc.h5ad")
    monkeypatch.chdir(tmp_path)
    code = fenced("example")
    exec(code, {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "epoch 0: 150 rows" in shown
    assert re.search(r"epoch 1: 150 rows.* 0 GETs", shown)
    assert "n_obs × n_vars = 3 × 40" in shown
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 13


def test_the_lines_about_views_run_as_they_stand(tmp_path):
    adata = counts(150, 40)
    adata.obs["donor"] = [f"donor {row % 10}" for row in range(150)]
    adata.obs["cell_type"] = ["T", "B", "NK"] * 50
    adata.obs["n_counts"] = 10.0 * np.arange(150)
    zl.convert(adata, tmp_path / "pbmc.zarr", progress=False)
    names = {"__name__": "__main__", "zl": zl, "dataset": zl.open_dataset(tmp_path / "pbmc.zarr")}
    exec(fenced("views"), names)
    donors = [{row % 10 for row in names[part].row_numbers} for part in ("train", "val")]
    assert sorted([*donors[0], *donors[1]]) == list(range(10))
    wanted = [row for row in range(51, 150, 3) if row % 10 in donors[0]]
    assert names["t_cells"].row_numbers.tolist() == wanted
    assert sorted(np.concatenate([minibatch.index for minibatch in names["loader"]])) == wanted


def test_the_options_it_lists_exist():
    table = README[README.index("| option | meaning |") : README.index("With `torch.utils")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 8
    assert named <= {field.name for field in dataclasses.fields(zl.Loader)}
    fetching = set(re.findall(r"(\w+)=\.\.\.", table))
    assert fetching <= {field.name for field in dataclasses.fields(zl.FetchOptions)}


def test_the_commands_are_those_that_ci_runs():
    for marker in ("tests", "demo"):
        command = fenced(marker)
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e ")
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "for name in tests demo" in ci.read_text()


def test_the_tree_names_every_module():
    tree = README[README.index("zloader/\n") : README.index("## Limits")]
    package = ROOT / "zloader"
    modules = {path.name for path in package.rglob("*.py") if "testing" not in path.parts} - {"__init__.py"}
    assert modules == set(re.findall(r"\w+\.py", tree))
