"""The code of docs/ray.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import write_store
from test_stream import ADATA

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# What the cluster of the tests has.
SMALLER = {
    '"s3://bucket/cells.zarr", cache="/nvme/zloader"': "url",
    'cache="/nvme/zloader")[': "cache=None)[",
    "num_cpus=2)": "num_cpus=0.1)",
    'tasks=16, ahead_bytes="8GiB", resources={"num_cpus": 2}': 'tasks=1, resources={"num_cpus": 0.1}',
    '"tasks": 4, "resources": {"num_cpus": 1}': '"tasks": 1, "resources": {"num_cpus": 0.1}',
    "ScalingConfig(num_workers=2)": 'ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1})',
}


def smaller(code: str) -> str:
    for text, other in SMALLER.items():
        code = code.replace(text, other)
    return code


@pytest.mark.any_version
@pytest.mark.long
@pytest.mark.slow  # TorchTrainer starts four processes
def test_the_code_of_the_page_runs(cluster, tmp_path):
    write_store(ADATA, tmp_path / "counts.zarr", tmp_path)
    names = {"__name__": "__main__", "url": str(tmp_path / "counts.zarr"), "storage_path": str(tmp_path / "results")}
    assert len(CODE) == 3
    for text in SMALLER:
        assert any(text in code for code in CODE)
    for code in CODE:
        exec(smaller(code), names)
    assert names["result"].error is None
    np.testing.assert_array_equal(names["expressed"], np.diff(ADATA.X.tocsr().indptr))
