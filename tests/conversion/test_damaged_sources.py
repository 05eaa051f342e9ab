"""Randomly damaged sources either raise a SourceError that names them, or are converted to the values that are read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import anndata as ad
import h5py
import pytest
from damage import IN_HDF5, check, h5ad
from helpers import TESTS
from sources import counts

import zloader as zl
from zloader.common import errors

COPIES = "zarr v2: metadata"  # the nodes are read where these copies of their metadata are damaged
OTHERS = {
    "zarr v2: bytes": 5,
    COPIES: 8,
    "zarr v2: nodes": 20,
    "zarr v3: bytes": 5,
    "zarr v3: metadata": 8,
    "zarr v3: cut": 4,
    "our zarr: bytes": 5,
    "our zarr: metadata": 8,
    "our zarr: cut": 4,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of anndata, about the damage
@pytest.mark.parametrize("case", OTHERS)
def test_damaged_zarr(tmp_path: Path, case: str) -> None:
    kind, damage = case.split(": ")
    outcomes = list(check(kind, damage, OTHERS[case], tmp_path / "place"))
    assert len(outcomes) == OTHERS[case]
    assert ("refused" in outcomes) == (case != COPIES)


@pytest.mark.slow
def test_damaged_hdf5(tmp_path: Path) -> None:
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(TESTS / "damage.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    if done.returncode < 0:
        pytest.skip(f"HDF5 crashed by signal {-done.returncode} after {done.stdout.splitlines()[-1:]}")
    assert done.returncode == 0, done.stderr
    found = Counter(line.rpartition(": ")[0] for line in done.stdout.splitlines())
    assert found == {f"{kind}, {damage}": n for kind, damage, n in IN_HDF5}
    assert {line.rpartition(": ")[2] for line in done.stdout.splitlines()} == {"refused", "equal"}


@pytest.mark.parametrize("group", ["layers", "obsm", "obsp", "varm", "varp", "uns"])
def test_a_group_that_cannot_be_read_is_not_left_out(tmp_path: Path, group: str) -> None:
    path = h5ad(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        del file[group]
        file[group] = h5py.SoftLink("/nowhere")
    with pytest.raises(errors.SourceError, match=rf"{group} of .*a\.h5ad"):
        zl.convert(path, tmp_path / "a.zarr", progress=False)


def test_genes_of_a_csc_matrix_with_indices_that_are_no_integers(tmp_path: Path) -> None:
    """Which is not read in place, so that anndata chooses the genes."""
    path = tmp_path / "a.h5ad"
    ad.AnnData(counts().tocsc()).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        indices = file["X/indices"][:]
        del file["X/indices"]
        file["X/indices"] = indices + 0.5
    for select in (zl.Selection(), zl.Selection(genes=["3", "1"])):
        with pytest.raises(errors.SourceError, match="integers"):
            zl.convert(path, tmp_path / "a.zarr", select=select, progress=False)
