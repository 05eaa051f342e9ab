"""README, CONTRIBUTING and docs are correct: code runs, options and links exist, commands are those that CI runs."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
from pathlib import Path

import anndata
import numpy as np
import pytest
import typer.main
from helpers import counts
from test_layers import FLOORS

import zloader as zl
from zloader.commands.cli import app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
RUN_HERE = [page for page in DOCS if page.stem not in ("ray", "scvi")]  # tests of their own run those
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).with_suffix("").as_posix()


# anndata warns about its next version, and zarr that the metadata of Zarr v3 are not consolidated by its specification.
QUIET = pytest.mark.filterwarnings("ignore:zarr v3 autosharding", "ignore:Consolidated metadata")


def doc(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def fenced(page: str, marker: str) -> str:
    """The fenced lines below a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", page, re.DOTALL)[1]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)


def named_in_table(page: str, header: str) -> set[str]:
    """The names in back-quotes in the first column of the table with this header."""
    rows = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}


def test_the_example_runs_as_it_stands_and_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    code = fenced(text, "example")
    exec(code, {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert "epoch 0: 2,142 rows" in shown
    assert len(re.findall(r"epoch [12]: 2,142 rows.* 0 GETs", shown)) == 2
    losses = [float(loss) for loss in re.findall(r"^(\d\.\d+(?:e-\d+)?) <Statistics", shown, re.MULTILINE)]
    said = re.search(r"falls from (\S+) to (\S+) in three epochs", text).groups()
    assert [f"{loss:.1g}" for loss in losses[::2]] == list(said)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15


def test_predictions_of_a_view_find_their_places(pbmc):
    names = {"__name__": "__main__", "zl": zl, "dataset": zl.open_dataset("pbmc.zarr")}
    exec(fenced(doc("loader"), "predict"), names)
    written = anndata.read_h5ad("predictions.h5ad")
    chosen = pbmc[names["val"].row_numbers]
    assert written.obs_names.tolist() == chosen.obs_names.tolist()
    assert written.obs["cell_type"].tolist() == chosen.obs["cell_type"].tolist()
    np.testing.assert_array_equal(written.obsm["X_model"], chosen.X[:, :2].toarray())


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize("where", ["local", "s3"])
def test_predictions_are_written_back(pbmc, where, request, tmp_path):
    url, options, code = "pbmc.zarr", {}, fenced(doc("loader"), "write back")
    if where == "s3":
        s3 = request.getfixturevalue("s3")
        url, options = s3.url("pbmc.zarr"), {"storage_options": s3.storage_options}
        zl.convert(tmp_path / "pbmc.h5ad", url, progress=False, **options)
        code = code.replace('"pbmc.zarr"', repr(url)).replace('cache="cache"', 'cache="cache", **options')
        code = code.replace("use_consolidated=False", "use_consolidated=False, **options")
    before = zl.open_dataset(url, cache="cache", **options)
    names = {"__name__": "__main__", "zl": zl, "dataset": before, "options": options}
    exec(fenced(doc("loader"), "predict"), names)
    names["predicted"][:] = 0  # zarr leaves out chunks of zeros unless it is told to write them
    exec(code, names)
    dataset = names["dataset"]
    assert dataset.fingerprint != before.fingerprint
    wanted = np.full((150, 2), np.nan, np.float32)
    wanted[names["val"].row_numbers] = 0
    loader = zl.Loader(dataset, obsm=["X_model"], shuffle=False)
    np.testing.assert_array_equal(np.concatenate([minibatch.obsm["X_model"] for minibatch in loader]), wanted)
    assert zl.verify(url, progress=False, **options).ok


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with the pbmc.h5ad, pbmc.zarr and own.zarr that the pages of docs/ use, and the AnnData."""
    folder = tmp_path_factory.mktemp("written")
    adata = counts(150, 40)
    adata.obs["donor"] = [f"donor {row % 10}" for row in range(150)]
    adata.obs["plate"] = [f"plate {row // 30}" for row in range(150)]
    adata.obs["cell_type"] = ["T", "B", "NK"] * 50
    adata.obs["n_counts"] = 10.0 * np.arange(150)
    adata.layers["spliced"] = adata.X
    adata.write_h5ad(folder / "pbmc.h5ad")
    zl.convert(adata, folder / "pbmc.zarr", progress=False)
    zl.convert(adata[:50, 10:], folder / "own.zarr", progress=False)
    return folder, adata


@pytest.fixture
def pbmc(written, tmp_path, monkeypatch):
    """Makes a copy of the directory the current one."""
    folder, adata = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return adata.copy()


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize("page", [page for page in RUN_HERE if blocks(page, "python")], ids=name_of)
@pytest.mark.filterwarnings("ignore:Some cells have zero counts", "ignore:'set_vital' is deprecated")  # torchdata warns
def test_the_code_of_a_page_runs(page, pbmc):
    if "import jax" in page.read_text():
        pytest.importorskip("jax")
    names = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def test_the_lines_about_views_run_as_they_stand(pbmc):
    names = {"__name__": "__main__", "zl": zl, "dataset": zl.open_dataset("pbmc.zarr")}
    exec(fenced(doc("views"), "views"), names)
    donors = [{row % 10 for row in names[part].row_numbers} for part in ("train", "val")]
    assert sorted([*donors[0], *donors[1]]) == list(range(10))
    wanted = [row for row in range(51, 150, 3) if row % 10 in donors[0]]
    assert names["t_cells"].row_numbers.tolist() == wanted
    assert sorted(np.concatenate([minibatch.index for minibatch in names["loader"]])) == wanted


def test_the_options_of_the_loader_are_those_it_lists():
    named = named_in_table(doc("loader"), "| option | meaning |")
    assert named == {field.name for field in dataclasses.fields(zl.Loader)} - {"dataset"}


def test_the_options_of_reading_exist():
    page = doc("loader")
    named = named_in_table(page[page.index("## Reading options") :], "| option | meaning |")
    assert named == {field.name for field in dataclasses.fields(zl.FetchOptions)}


def test_every_sampling_is_listed():
    found = {name: getattr(zl, name) for name in zl.__all__}
    samplings = {name for name, value in found.items() if isinstance(value, type) and issubclass(value, zl.Sampling)}
    listed = doc("shuffling").split("## Which sizes to take")[0]
    assert {"Sampling", "BlockShuffling"} <= samplings <= set(re.findall(r"`zl\.(\w+)", listed))


def test_every_transform_is_listed():
    assert named_in_table(doc("transforms"), "| transform | does |") == {*zl.transforms.__all__} - {"GeneStatistics"}


def test_the_commands_of_zloader_take_these_flags():
    program = typer.main.get_command(app)
    context = program.make_context("zloader", [], resilient_parsing=True)
    for line in (line for page in PAGES for code in blocks(page, "bash") for line in code.splitlines()):
        words = shlex.split(line, comments=True)
        if words[:1] == ["zloader"]:
            command = program
            arguments = words[1:]
            while hasattr(command, "commands"):
                name, command, arguments = command.resolve_command(context, arguments)
            command.make_context(name, list(arguments), parent=context)  # a wrong flag or number raises


def test_every_command_is_in_the_readme():
    commands = set(typer.main.get_command(app).commands)
    assert commands <= set(re.findall(r"`(?:zloader )?(\w+)`", README.read_text()))


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("https://", "#")):  # Sphinx checks those to a heading
                assert (page.parent / target).is_file(), f"{name_of(page)} links to {target}"


def test_the_readme_is_short_and_links_every_page_of_docs():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", text))
    assert linked == {page.name for page in DOCS if page.parent.name == "docs"}


def test_the_figures_of_the_readme_are_those_of_its_page():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 4
    page = "benchmarks" if (ROOT / "docs" / "benchmarks.md").exists() else "performance"
    assert set(rows) <= set(doc(page).splitlines())


def test_the_commands_are_those_that_ci_runs():
    for marker in ("tests", "demo"):
        command = fenced(README.read_text(), marker)
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "for name in tests demo" in ci.read_text()


def tree_paths() -> set[str]:
    """The modules of the tree of docs/architecture.md, relative to zloader/."""
    paths, folders = set(), []
    for line in fenced(doc("architecture"), "tree").splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folders = folders[: len(indent) // 2]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.add("".join([*folders, name]).removeprefix("zloader/"))
    return paths


def test_the_tree_names_every_module():
    package = ROOT / "zloader"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert tree_paths() == modules | {"__init__.py"}


def test_the_table_of_folders_has_their_floors():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {name: int(floor) for name, floor in re.findall(r"^\| `(\w+)/` \| (\d+) \|", text, re.MULTILINE)} == FLOORS
