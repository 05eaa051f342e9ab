"""What names the version, the versions of Python or the requirements says the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import zloader as zl

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_CONDA = {"torch": "pytorch", "isal": "python-isal"}
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_version() -> None:
    assert read("CITATION.cff")["version"] == read("conda/recipe.yaml")["context"]["version"] == zl.__version__
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == zl.__version__
    assert versions[-1] == "0.1.0"


def test_the_versions_of_python() -> None:
    classified = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python ::" in each]
    assert read(".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    assert read("conda/recipe.yaml")["context"]["python_min"] == classified[0]
    for page in ("README.md", "docs/install.md"):
        assert f"Python {classified[0]} to {classified[-1]}" in (ROOT / page).read_text(), page


def test_the_recipe_has_the_requirements() -> None:
    required = [Requirement(each) for each in PROJECT["dependencies"]]
    wanted = {f"{OF_CONDA.get(each.name, each.name)} {each.specifier}".strip() for each in required}
    recipe = read("conda/recipe.yaml")["requirements"]["run"]
    assert set(recipe[1:]) == wanted


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_and_templates_can_be_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def test_only_the_job_that_publishes_may_publish() -> None:
    release = read(".github/workflows/release.yml")
    assert release["permissions"] == {"contents": "read"}
    allowed = {name for name, job in release["jobs"].items() if "id-token" in job.get("permissions", {})}
    assert allowed == {"publish"}
    assert set(release["jobs"]["publish"]["needs"]) == {"tests", "build"}


def test_a_report_asks_for_the_doctor() -> None:
    (first, *_) = [each for each in read(".github/ISSUE_TEMPLATE/bug.yml")["body"] if each["type"] == "textarea"]
    assert first["id"] == "doctor"
    assert first["validations"]["required"]
