"""`zloader quality`: its entropies are the plans', its speeds are the link's or measured, and its figures are valid."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store
from test_cli import params, zloader

import zloader as zl
from zloader.commands.quality import _figure, measured
from zloader.dataset.cost import epoch_costs
from zloader.order.plan import Plan
from zloader.order.sampling import DEFAULT_BLOCK_SIZE, stratified

pytestmark = pytest.mark.any_version

ROWS = 1400
FLAGS = ("--label", "plate", "--batch-size", 16, "--block-sizes", "2,8,64", "--fetch-factors", "1,4")
AWKWARD = ("$\\alph$", "細胞")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    adata = counts(ROWS, 60)
    for name in AWKWARD:
        adata.obs[name] = np.arange(ROWS) % 3
    adata.obs["plate"] = pd.Categorical.from_codes(np.arange(ROWS) * 14 // ROWS, [f"<plate {k}>" for k in range(14)])
    write_store(adata, folder / "plates.zarr", folder)
    return folder / "plates.zarr"


def documented(*arguments):
    return json.loads(zloader("quality", *arguments, "--json").stdout)


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


def test_speed_is_measured_when_asked(store):
    seen = documented(store, *FLAGS, "--measure")
    assert seen["link_bytes_per_s"] is None
    assert all(10 < cell["rows_per_s"] < 1e8 for cell in seen["cells"])
    assert len({cell["rows_per_s"] for cell in seen["cells"]}) == 5


def test_as_text_blocks_go_down_and_fetches_across(store):
    head, speed, columns, *lines = zloader("quality", store, *FLAGS).stdout.splitlines()
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


def test_the_page_and_the_picture(store, tmp_path):
    page, picture = tmp_path / "q.html", tmp_path / "q.png"
    seen = documented(store, *FLAGS, "--html", page, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert not re.search(r"<script|src=|https?://(?!www\.w3\.org)", text)
    assert "1,400 rows by plate" in text
    assert "Rows/s are at 400 MB/s without a mirror. A Loader uses stratified blocks (dashed lines)" in text
    drawn = ET.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])
    words = " ".join("".join(node.itertext()).strip() for node in drawn.iter())
    rows = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td><td>(\d\.\d\d) ± [\d.]+</td><td>(\d\.\d\d) ±", text)
    assert rows == [
        (
            str(cell["block_size"]),
            str(cell["fetch_factor"]),
            f"{cell['quality']['entropy_bits']:.2f}",
            f"{cell['stratified']['entropy_bits']:.2f}",
        )
        for cell in seen["cells"]
    ]
    assert all(f"{plain} ({in_strata})" in words for *_, plain, in_strata in rows)
    assert "dashed: stratified" in words
    zloader("quality", store, *FLAGS, "--html", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


@pytest.mark.parametrize("label", AWKWARD)
def test_a_label_that_is_hard_to_draw_is_drawn_without_a_word(store, tmp_path, label):
    done = zloader("quality", store, "--label", label, "--png", tmp_path / "q.png", "--html", tmp_path / "q.html")
    assert done.stderr == ""
    assert (tmp_path / "q.png").stat().st_size > 0
    assert f"entropy of {label}, bits" in (tmp_path / "q.html").read_text()


@pytest.mark.parametrize("label", ["plate", AWKWARD[0]])
@pytest.mark.parametrize("link", [10**5, 4 * 10**8, 10**13])
def test_ticks_do_not_overlap_and_markers_are_within_the_frame(store, label, link):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    grid = measured(zl.Loader(zl.open_dataset(store)), label, [(4, 1), (4, 16), (64, 1), (64, 16)], link)
    figure = _figure(grid)
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[1]
    for axis, end in ((axes.xaxis, 0), (axes.yaxis, 1)):
        boxes = [label.get_window_extent().get_points()[:, end] for label in axis.get_ticklabels() if label.get_text()]
        assert len(boxes) > 1
        assert all(first[1] < second[0] for first, second in itertools.pairwise(boxes))
    frame = axes.get_window_extent().padded(-5)  # half a marker of 6 points at 100 dots per inch
    for line in axes.lines:
        if line.get_marker() == "o" and len(line.get_xdata()):
            heights = axes.transData.transform(line.get_xydata())[:, 1]
            assert frame.y0 < heights.min() <= heights.max() < frame.y1


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
        (("--label", "nothing"), "there is no obs column 'nothing'"),
        (("--label", "n_counts"), "obs column 'n_counts' holds float32"),
        (("--label", "plate", "--block-sizes", "4;16"), "'4;16' is not a list of whole numbers"),
        (("--label", "plate", "--block-sizes", "0"), "block_size must be a whole number of at least 1"),
        (
            ("--label", "plate", "--block-sizes", "512", "--fetch-factors", "2"),
            "every block is larger than every fetch",
        ),
        (("--label", "plate", "--batch-size", "2000"), "no full minibatch of 2000 rows"),
        (("--label", "plate", "--batch-size", "0"), "batch_size must be a whole number of at least 1"),
        (("--label", "plate", "--x", "layers/none"), "there is no matrix 'layers/none'"),
        (("--label", "plate", "--link-speed", "fast"), "'fast' is not a size"),
        (("--label", "plate", "--link-speed", "0"), "link_speed must be a number of at least 1"),
        (("--label", "plate", "--html", "no/such/folder.html"), "cannot write no/such/folder.html"),
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
