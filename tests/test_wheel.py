"""The wheel and the sdist: what they hold, and that they work where nothing of this checkout is."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import PATIENCE_S
from installed import ROOT, Installed, install

import zloader as zl

pytest.importorskip("build")
pytest.importorskip("hatchling")
pytestmark = pytest.mark.slow

EXTRAS = importlib.metadata.metadata("zloader").get_all("Provides-Extra")
OF_TESTS = {"test", "docs", "bench", "notebooks"}

_IMPORT_ALL = """
import importlib, json, pkgutil
import zloader
failed = {}
for found in pkgutil.walk_packages(zloader.__path__, "zloader."):
    if found.name == "zloader.__main__":
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        failed[found.name] = error.name
    except Exception as error:
        failed[found.name] = repr(error)
print(json.dumps({"in": zloader.__file__, "failed": failed}))
"""
_TYPED = """
import torch
import zloader as zl


def train(url: str, epochs: int) -> float:
    dataset: zl.Dataset = zl.open_dataset(url, cache="cache")
    loader = zl.Loader(dataset, batch_size=32, obs=["cell_type"], layout="dense")
    total = 0.0
    for _ in range(epochs):
        for minibatch in loader:
            codes: torch.Tensor = minibatch.obs["cell_type"]
            total += float(codes.sum()) + len(minibatch)
            reveal_type(minibatch)
    view: zl.View = dataset.where("donor == 'a'")
    packed = next(iter(zl.Loader(view, layout="packed"))).x
    if isinstance(packed, zl.PackedRows):
        total += float(packed.dense("bfloat16").sum())
    return total
"""


def build(kind: str, source: Path, out: Path) -> Path:
    """The sdist or wheel of a directory."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (path for path in out.iterdir() if path.suffix == {"wheel": ".whl", "sdist": ".gz"}[kind])
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(path, filter="data")
    return path / f"zloader-{zl.__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist makes."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheel and no extra."""
    return install(wheel, [], tmp_path_factory.mktemp("plain") / "environment")


def hashes(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    assert hashes(wheel) == hashes(build("wheel", ROOT, tmp_path))


def test_what_the_wheel_holds(wheel: Path) -> None:
    assert wheel.name == f"zloader-{zl.__version__}-py3-none-any.whl"
    names = set(hashes(wheel))
    assert {name.split("/")[0] for name in names} == {"zloader", f"zloader-{zl.__version__}.dist-info"}
    assert {"zloader/py.typed", "zloader/data/page.html", "zloader/data/pancreas_human.h5ad.xz"} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zloader").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert not [name for name in names if re.search("azurite|simulat|test_|conftest|__pycache__", name)]
    stated = re.search(r"The wheel has (\d+) MB", (ROOT / "docs" / "install.md").read_text())
    assert stated is not None
    assert round(wheel.stat().st_size / 1e6) == int(stated[1])


def test_what_the_sdist_holds(unpacked: Path) -> None:
    for name in (
        "README.md",
        "tests/conftest.py",
        "tests/data/anndata-0.8.0.zip",
        "docs/index.md",
        ".ci/run",
        "CITATION.cff",
    ):
        assert (unpacked / name).is_file(), name
    for name in (".git", "build", "dist", ".venv"):
        assert not (unpacked / name).exists(), name


def example() -> str:
    """The Python code of the README's example."""
    return re.search("<!-- example -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_it_works_without_extras(plain: Installed, tmp_path: Path) -> None:
    run = functools.partial(plain.run, cwd=tmp_path)
    assert "No broken requirements" in run("python", "-m", "pip", "check")
    assert run("zloader", "--version") == f"zloader {zl.__version__}\n"
    assert "convert" in run("zloader", "--help")
    losses = [float(line.split()[0]) for line in run("python", "-c", example()).splitlines()]
    assert len(losses) == 3
    assert losses[2] < 0.05 < losses[0]
    found = json.loads(run("zloader", "doctor", tmp_path / "pancreas.zarr", "--cache", tmp_path / "cache", "--json"))
    assert found["ok"], found


def test_every_module_imports_with_its_extra(wheel: Path, plain: Installed, tmp_path: Path) -> None:
    without = json.loads(plain.run("python", "-c", _IMPORT_ALL, cwd=tmp_path))
    assert Path(without["in"]).is_relative_to(plain.path)
    every = install(wheel, [each for each in EXTRAS if each not in OF_TESTS], tmp_path / "every")
    failed = json.loads(every.run("python", "-c", _IMPORT_ALL, cwd=tmp_path))["failed"]
    for module, missing in failed.items():  # of an extra that is not installed here
        assert missing not in importlib.metadata.packages_distributions(), f"{module} cannot import {missing}"
    assert set(failed) <= set(without["failed"])
    apart = r"zloader\.(integrations|ray)"
    assert all(re.match(apart, module) for module in without["failed"]), without["failed"]
    assert "No broken requirements" in every.run("python", "-m", "pip", "check", cwd=tmp_path)
    every.run("zloader", "demo", cwd=tmp_path)
    assert (tmp_path / "zloader-demo.html").stat().st_size > 10_000


def test_types_reach_users(plain: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TYPED)
    python = plain.path / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "script.py"]
    environment = {"PATH": "/usr/bin:/bin", "MYPY_CACHE_DIR": str(tmp_path / "mypy")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "zloader.training.minibatch.Minibatch"' in done.stdout
