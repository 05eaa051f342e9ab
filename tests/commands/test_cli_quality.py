"""`zloader quality`: its entropies are the plans', its speeds are the link's or measured, and its figures are valid."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store
from test_cli import params, zloader

import zloader as zl
from zloader.insight.cost import epoch_costs
from zloader.order.plan import Plan
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, stratified

pytestmark = pytest.mark.any_version

ROWS = 1400
FLAGS = ("--label", "plate", "--batch-size", 16, "--block-sizes", "2,8,64", "--fetch-factors", "1,4")
AWKWARD = "$^$ 細胞"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    adata = counts(ROWS, 60)
    adata.obs[AWKWARD] = np.arange(ROWS) % 3
    adata.obs["plate"] = pd.Categorical.from_codes(np.arange(ROWS) * 14 // ROWS, [f"<plate {k}>" for k in range(14)])
    adata.layers["more"] = adata.X
    write_store(adata, folder / "plates.zarr", folder)
    return folder / "plates.zarr"


def documented(*arguments):
    return json.loads(zloader("quality", *arguments, "--json").stdout)


@pytest.mark.slow
def test_each_cell_is_what_its_plan_has_and_costs(store):
    seen = documented(store, *FLAGS, "--link-speed", "1MB")
    assert (seen["rows"], seen["label"], seen["batch_size"]) == (ROWS, "plate", 16)
    assert seen["link_bytes_per_s"] == 1_000_000
    sizes = [(cell["block_size"], cell["fetch_factor"]) for cell in seen["cells"]]
    assert sizes == [(2, 1), (2, 4), (8, 1), (8, 4), (64, 4)]  # a block of 64 is larger than a fetch of 16
    dataset = zl.open_dataset(store)
    for cell, (block_size, fetch_factor) in zip(seen["cells"], sizes, strict=True):
        plan = Plan(dataset_rows=ROWS, sampling=zl.BlockShuffling(block_size), batch_size=16, fetch_factor=fetch_factor)
        labels = dataset.obs_column("plate").values
        assert cell["quality"] == pytest.approx(vars(zl.quality(labels, plan)))
        as_loaders_have_it = dataclasses.replace(plan, sampling=stratified(block_size))
        assert cell["stratified"] == pytest.approx(vars(zl.quality(labels, as_loaders_have_it)))
        cost = epoch_costs(dataset, plan).unmirrored
        assert (cell["gets"], cell["bytes_read"]) == (cost.gets, cost.bytes_read)
        assert cell["rows_per_s"] == pytest.approx(ROWS / (cost.bytes_read / 1e6))


@pytest.mark.slow
def test_speed_is_measured_when_asked(store):
    seen = documented(store, *FLAGS, "--measure")
    assert seen["link_bytes_per_s"] is None
    assert all(10 < cell["rows_per_s"] < 1e8 for cell in seen["cells"])
    assert len({cell["rows_per_s"] for cell in seen["cells"]}) == 5


@pytest.mark.slow
def test_as_text_blocks_go_down_and_fetches_across(store):
    head, speed, columns, *lines, verdict, line = zloader("quality", store, *FLAGS).stdout.splitlines()
    assert re.fullmatch(
        rf"{re.escape(str(store))}: 1,400 rows by plate; random minibatches of 16 have 3\.\d\d bits", head
    )
    assert speed == (
        "Each cell: bits for blocks in random order (for stratified blocks, the default), rows/s at 400 MB/s without "
        "a mirror"
    )
    assert columns.split() == ["block_size", "fetch_factor", "1", "fetch_factor", "4"]
    assert [line.split()[0] for line in lines] == ["2", "8", "64"]
    assert [len(re.findall(r"\d\.\d\d \(\d\.\d\d\), [\d,]+", line)) for line in lines] == [2, 2, 1]
    assert verdict.startswith("The default order mixes plate ")
    assert line.startswith("loader = zl.Loader(dataset, batch_size=16, ")


@pytest.mark.slow
def test_the_default_is_measured_even_if_it_is_not_asked_for(store):
    seen = documented(store, *FLAGS)
    default = seen["default"]
    assert (default["block_size"], default["fetch_factor"]) == (DEFAULT_BLOCK_SIZE, zl.Loader.fetch_factor)
    assert default not in seen["cells"]
    plan = zl.Loader(zl.open_dataset(store), batch_size=16, rank=0, world_size=1).plan(0)
    labels = zl.open_dataset(store).obs_column("plate").values
    assert default["stratified"] == pytest.approx(vars(zl.quality(labels, plan)))
    asked = documented(store, "--label", "plate", "--block-sizes", "64", "--fetch-factors", "256")
    assert asked["cells"] == [asked["default"]] == [asked["recommended"]]


@pytest.mark.slow
@pytest.mark.parametrize("x", ["X", pytest.param("layers/more", marks=pytest.mark.slow)])
def test_the_line_makes_the_recommended_loader(store, x):
    seen = documented(store, "--label", "plate", "--batch-size", 4, "--block-sizes", "1,2", "--x", x)
    sizes = [(seen[name]["block_size"], seen[name]["fetch_factor"]) for name in ("default", "recommended")]
    assert sizes[0] != sizes[1]
    assert seen["verdict"].count(f"block_size={sizes[1][0]} and fetch_factor={sizes[1][1]}") == 1
    dataset = zl.open_dataset(store)
    loader = eval(seen["loader"], {"zl": zl, "dataset": dataset})
    assert (loader.batch_size, loader.fetch_factor, loader.x) == (4, sizes[1][1], x)
    labels = dataset.obs_column("plate").values
    assert seen["recommended"]["stratified"] == pytest.approx(vars(zl.quality(labels, loader.plan(0))))
    assert next(iter(loader)).x.shape == (4, 60)


@pytest.mark.slow
def test_the_page_and_the_picture(store, tmp_path):
    page, picture = tmp_path / "q.html", tmp_path / "q.png"
    zloader("quality", store, *FLAGS, "--html", page, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1,400 rows by plate" in page.read_text()
    zloader("quality", store, *FLAGS, "--html", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--png", "q.txt/q.png"), "cannot write q.txt/q.png"),
        (("--html", "q.txt/q.html"), "cannot write q.txt/q.html"),
        (("--png", "q.png", "--html", "../here/q.png"), "--html and --png both name ../here/q.png"),
    ],
)
def test_a_path_that_will_not_do_is_refused_before_anything_is_read(tmp_path, monkeypatch, flags, said):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "q.txt").touch()
    monkeypatch.chdir(tmp_path / "here")
    done = zloader("quality", "no/such/store", "--label", "plate", *flags, status=1)
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--label", "n_counts"), "obs column 'n_counts' holds float32"),
        (("--label", "plate", "--block-sizes", "4;16"), "'4;16' is not a list of whole numbers"),
        (
            ("--label", "plate", "--block-sizes", "512", "--fetch-factors", "2"),
            "every block is larger than every fetch",
        ),
        (("--label", "plate", "--link-speed", "fast"), "'fast' is not a size"),
    ],
)
def test_an_error_is_one_line(store, flags, said):
    done = zloader("quality", store, *flags, status=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert done.stdout == ""


def test_the_defaults_are_among_the_cells():
    flags = params("quality")
    assert flags["batch_size"].show_default == str(zl.Loader.batch_size)
    assert str(DEFAULT_BLOCK_SIZE) in flags["block_sizes"].default.split(",")
    assert str(zl.Loader.fetch_factor) in flags["fetch_factors"].default.split(",")
    assert not {"key", "secret", "token", "password"} & flags.keys()
