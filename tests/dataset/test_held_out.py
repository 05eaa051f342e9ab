"""Splits by several columns, and parts that are united of views: labels held out, and controls in one part only."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

RNG = np.random.default_rng(7)
ADATA = counts(900, 8)
ADATA.obs["line"] = pd.Categorical.from_codes(RNG.choice([-1, 0, 1, 2], 900, p=[0.1, 0.3, 0.3, 0.3]), [*"ABC"])
ADATA.obs["drug"] = pd.Categorical(RNG.choice(["DMSO", "x", "y", "z", "w"], 900, p=[0.2, 0.2, 0.2, 0.2, 0.2]))
LINE, DRUG = ADATA.obs["line"].to_numpy(object), ADATA.obs["drug"].to_numpy(object)
DMSO = "drug == 'DMSO'"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("cells")
    write_store(ADATA, folder / "cells.zarr", folder)
    return zl.open_dataset(folder / "cells.zarr")


def rows_of(parts) -> list[np.ndarray]:
    """The rows of each part. No row is in two."""
    rows = [view.row_numbers for view in parts]
    for one, other in combinations(rows, 2):
        assert not {*one.tolist()} & {*other.tolist()}
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_some_drugs_of_a_line_are_held_out_and_its_controls_are_divided(dataset, seed):
    shares = [0.5, 0.25, 0.25]
    held = dataset.where("line == 'C'")
    treated = held.where("drug != 'DMSO'").split(shares, by="drug", seed=seed)
    controls = held.where(DMSO).split(shares, seed=seed)
    united = [[one.row_numbers, other.row_numbers] for one, other in zip(treated, controls, strict=True)]
    united[0].append(np.setdiff1d(np.arange(900), held.row_numbers))
    split = [dataset.where(np.concatenate(of_part)) for of_part in united]
    rows = rows_of(split)
    assert sum(map(len, rows)) == 900
    assert {*np.flatnonzero(LINE != "C").tolist()} <= {*rows[0].tolist()}
    drugs = [{*DRUG[of_part[LINE[of_part] == "C"]]} - {"DMSO"} for of_part in rows]
    assert sorted(drug for each in drugs for drug in each) == ["w", "x", "y", "z"]
    n_controls = np.count_nonzero((LINE == "C") & (DRUG == "DMSO"))
    for share, of_part, view in zip(shares, rows, split, strict=True):
        own = of_part[LINE[of_part] == "C"]
        assert abs(np.count_nonzero(DRUG[own] == "DMSO") - share * n_controls) <= 1
        sampling = zl.CellSets(["line", "drug"], 4)
        loader = zl.Loader(view, sampling=sampling, controls=zl.MatchedControls(DMSO, "line"), batch_size=4)
        seen = {row for minibatch in loader for row in minibatch.control.index.tolist()}
        assert seen <= {*of_part.tolist()}


def test_groups_of_several_columns_stay_together(dataset):
    rows = rows_of(dataset.split([0.7, 0.3], by=["line", "drug"]))
    assert sum(map(len, rows)) == 900
    groups = [{*zip(LINE[of_part], DRUG[of_part], strict=True)} for of_part in rows]
    assert {line for line, _ in groups[0] & groups[1]} <= {None, np.nan}  # rows without a line are one group
    with pytest.raises(OptionError, match="20 parts need as many labels, but 2 obs columns together"):
        dataset.split([0.05] * 20, by=["line", "drug"])


def test_strata_of_several_columns(dataset):
    train, test = dataset.split([0.75, 0.25], stratify=["line", "drug"], seed=3)
    for line in "ABC":
        for drug in ("DMSO", "x", "y", "z", "w"):
            total, own = (
                np.count_nonzero((LINE[rows] == line) & (DRUG[rows] == drug))
                for rows in (np.arange(900), train.row_numbers)
            )
            assert abs(own - 0.75 * total) <= 1
    assert len(train) + len(test) == 900


def test_a_split_of_a_view(dataset):
    view = dataset.where("line in ['A', 'B']")
    rows = rows_of(view.split([0.5, 0.5], by="line"))
    assert sorted({*LINE[of_part]} for of_part in rows) == [{"A"}, {"B"}]


def test_the_windows_of_a_split_by_several_columns_do_not_show(dataset, monkeypatch):
    ways = [{"by": "drug"}, {"stratify": "drug"}, {}, {"by": ["drug", "line"]}]
    whole = [rows_of(dataset.split([0.5, 0.4], **way, seed=2)) for way in ways]
    monkeypatch.setattr("zloader.common.records.WINDOW_ROWS", 512)
    for way, rows in zip(ways, whole, strict=True):
        again = rows_of(dataset.split([0.5, 0.4], **way, seed=2))
        assert [found.tolist() for found in again] == [found.tolist() for found in rows]
