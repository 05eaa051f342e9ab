"""What this machine has, and what needs too much of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.common import machine
from zloader.common.errors import OptionError
from zloader.selecting.columns import ObsColumn
from zloader.selecting.groups import groups_of

pytestmark = pytest.mark.any_version

N = 1000
COLUMN = ObsColumn(values=np.arange(N))
WEIGHTS = np.arange(N, dtype=np.float32)

NEEDS: dict[str, tuple[int, str, Callable[[], Any]]] = {
    "groups": (N, "fewer stores", lambda: groups_of(["lane"], lambda name: _labels(), N)),
    "groups by two columns": (2 * N, "fewer stores", lambda: groups_of(["lane", "day"], lambda name: _labels(), N)),
    "sets": (5 * N, "fewer stores", lambda: zl.CellSets("lane", set_size=10).order(_Table(), 10, 20)),
    "classes of numbers": (16 * N, "column of categories", lambda: COLUMN.classes("obs column 'lane'")),
}


def _labels() -> ObsColumn:
    return ObsColumn(values=(np.arange(N) % 2).astype(np.int8), coded=pd.Index(["a", "b"]))


class _Table:
    """A dataset with one column."""

    n_obs = N

    def obs_column(self, column: str) -> ObsColumn:
        return _labels()

    def rows_of(self, group: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_more_than_half_of_the_memory_is_refused(monkeypatch, name):
    n_bytes, advice, make = NEEDS[name]
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * n_bytes)
    make()
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * n_bytes - 1)
    with pytest.raises(OptionError, match=f"would take .* GB, more than half of the .* of memory here: .*{advice}"):
        make()


def test_the_names_of_too_many_rows_are_refused(monkeypatch, example_dataset):
    monkeypatch.setattr(machine, "available_bytes", lambda: 200 * len(example_dataset) - 1)
    for read in (lambda: example_dataset.obs_names, example_dataset.obs):
        with pytest.raises(OptionError, match=r"names .*would take .* of memory here"):
            read()
    assert len(example_dataset.names_of([0, 1])) == 2
    assert len(example_dataset[:19].obs()) == 19
    monkeypatch.setattr(machine, "available_bytes", lambda: 200 * len(example_dataset))
    assert len(example_dataset.obs_names) == len(example_dataset.obs()) == len(example_dataset)


@pytest.fixture
def example_dataset(tmp_path) -> zl.Dataset:
    write_store(counts(20, 10), tmp_path / "counts.zarr", tmp_path)
    return zl.open_dataset(tmp_path / "counts.zarr")
