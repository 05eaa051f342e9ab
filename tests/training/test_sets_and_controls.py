"""Sets of rows and their controls, through a Loader, with values compared with AnnData."""

from __future__ import annotations

import itertools
import pickle

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from helpers import assert_same_minibatches, counts, dense, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError
from zloader.testing import assert_resumes_anywhere
from zloader.training.recipes import LAYOUTS

pytestmark = pytest.mark.any_version

SIZES = {"batch_size": 24, "fetch_factor": 3}
SETS = zl.CellSets(["line", "drug"], set_size=8)
CONTROLS = zl.MatchedControls("drug == 'DMSO'", match=["line", "plate"], fallback=["line"])


def screen(n_rows=700) -> ad.AnnData:
    """Counts of three cell lines under four drugs on two plates. Line C has no control on plate 2."""
    adata = counts(n_rows, 20)
    rng = np.random.default_rng(5)
    adata.obs["line"] = pd.Categorical.from_codes(rng.choice([-1, 0, 1, 2], n_rows, p=[0.05, 0.5, 0.3, 0.15]), [*"ABC"])
    adata.obs["plate"] = rng.integers(1, 3, n_rows)
    adata.obs["drug"] = pd.Categorical(rng.choice(["DMSO", "x", "y", "z"], n_rows, p=[0.4, 0.3, 0.2, 0.1]))
    adata.obs.loc[(adata.obs["line"] == "C") & (adata.obs["plate"] == 2) & (adata.obs["drug"] == "DMSO"), "drug"] = "x"
    adata.obsm["X_pca"] = rng.random((n_rows, 3))
    adata.layers["doubled"] = adata.X * 2
    return adata


ADATA = screen()
OBS, VALUES = ADATA.obs, ADATA.X.toarray()


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("screen")
    write_store(ADATA, folder / "screen.zarr", folder)
    return str(folder / "screen.zarr")


def loader_of(url, **options) -> zl.Loader:
    dataset = zl.open_dataset(url) if isinstance(url, str) else url
    return zl.Loader(dataset, **{"sampling": SETS, "controls": CONTROLS, "obs": ["line", "plate"], **SIZES, **options})


def pairs(loader) -> list[tuple[list[int], list[int]]]:
    """The rows and the controls of each minibatch."""
    return [(each.index.tolist(), each.control.index.tolist()) for each in loader]


def assert_controlled(minibatch, n=1) -> int:
    """Compares a minibatch and its controls with the AnnData. Returns the number of controls of a fallback."""
    rows, controls = minibatch.index.numpy(), minibatch.control.index.numpy().reshape(-1, n)
    assert controls.shape == (len(rows), n)
    np.testing.assert_array_equal(dense(minibatch.x), VALUES[rows])
    np.testing.assert_array_equal(dense(minibatch.control.x), VALUES[controls.reshape(-1)])
    assert (OBS["drug"].to_numpy()[controls] == "DMSO").all()
    line, plate = OBS["line"].to_numpy(), OBS["plate"].to_numpy()
    assert (line[controls] == line[rows][:, None]).all()
    apart = plate[controls] != plate[rows][:, None]
    assert (line[rows][apart.any(axis=1)] == "C").all()
    return np.count_nonzero(apart)


@pytest.mark.every(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_minibatches_have_whole_sets_with_their_labels_and_matched_controls(url, layout):
    loader = loader_of(url, layout=layout, obsm=["X_pca"])
    for epoch in range(2):
        fallbacks, seen = 0, []
        for minibatch in loader:
            fallbacks += assert_controlled(minibatch)
            rows, sets = minibatch.index.numpy(), minibatch.set_of_row.numpy()
            seen += rows.tolist()
            assert sets.tolist() == np.repeat(np.arange(len(rows) // 8), 8).tolist()
            for name in ("line", "drug"):
                assert minibatch.group[name][sets].tolist() == OBS[name].iloc[rows].tolist()
            for each in (minibatch, minibatch.control):
                np.testing.assert_array_equal(each.obsm["X_pca"].numpy(), ADATA.obsm["X_pca"][each.index.numpy()])
        assert len({*seen}) == len(seen) == OBS.groupby(["line", "drug"], observed=True).size().floordiv(8).sum() * 8
        statistics = loader.statistics()
        assert statistics.fallback_controls == fallbacks > 0
        assert (statistics.epoch, statistics.rows) == (epoch, 2 * len(seen))


def test_several_controls_of_a_row_differ_and_every_control_is_drawn(url):
    drawn = []
    loader = loader_of(url, controls=zl.MatchedControls("drug == 'DMSO'", match="line", n=3), x=None)
    for _ in range(8):
        for minibatch in loader:
            controls = minibatch.control.index.view(-1, 3)
            assert all(len({*each}) == 3 for each in controls.tolist())
            drawn += controls.reshape(-1).tolist()
    pool = np.flatnonzero((OBS["drug"] == "DMSO") & OBS["line"].notna())
    assert {*drawn} == {*pool.tolist()}
    of_line = pool[OBS["line"].iloc[pool] == "A"]
    times = np.bincount(drawn, minlength=700)[of_line]
    assert times.std() < 2 * np.sqrt(times.mean())  # like a Poisson distribution


def test_controls_of_any_sampling(url):
    loader = loader_of(zl.open_dataset(url).where("line in ['A', 'B', 'C']"), sampling=None)
    minibatches = list(loader)
    assert sum(map(len, minibatches)) == OBS["line"].notna().sum()
    assert minibatches[0].set_of_row is minibatches[0].group is None
    assert sum(map(assert_controlled, minibatches)) == loader.statistics().fallback_controls


@pytest.mark.slow
def test_a_mirror_gives_the_same_minibatches(url, tmp_path):
    dataset = zl.open_dataset(url, cache=tmp_path / "cache")
    for _ in range(2):
        for found, wanted in zip(loader_of(dataset), loader_of(url), strict=True):
            assert_same_minibatches([found, found.control], [wanted, wanted.control])


@pytest.mark.slow  # starts an S3 server
def test_a_bucket_gives_the_same_minibatches(url, s3, tmp_path):
    write_store(ADATA, s3.url("screen.zarr"), tmp_path, storage_options=s3.storage_options)
    remote = zl.open_dataset(s3.url("screen.zarr"), storage_options=s3.storage_options)
    for found, wanted in zip(loader_of(remote), loader_of(url), strict=True):
        assert_same_minibatches([found, found.control], [wanted, wanted.control])


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_out_sets_whose_rows_keep_their_controls(url, world_size):
    options = {"x": None, "sampling": zl.CellSets(["line", "drug"], 8), "world_size": world_size}
    whole = {
        row: control
        for rows, controls in pairs(loader_of(url, **options | {"world_size": 1, "rank": 0}))
        for row, control in zip(rows, controls, strict=True)
    }
    seen = [pairs(loader_of(url, rank=rank, **options)) for rank in range(world_size)]
    assert len({*map(len, seen)}) == 1
    rows = [row for of_rank in seen for rows, _ in of_rank for row in rows]
    assert sorted(rows) == sorted(whole)
    for found, controls in itertools.chain(*seen):
        assert [whole[row] for row in found] == controls


def test_workers_share_out_the_same_order(url):
    loader = loader_of(url, x=None)
    with_workers = DataLoader(loader_of(url, x=None), batch_size=None, num_workers=2)
    assert sorted(pairs(with_workers)) == sorted(pairs(loader))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rest": "fill"}, {"weights": "balanced", "epoch_sets": 20}], ids=str)
def test_it_resumes_anywhere(url, options):
    dataset = zl.open_dataset(url)
    assert_resumes_anywhere(
        lambda: loader_of(dataset, x=None, sampling=zl.CellSets(["line", "drug"], 8, **options)),
        described=lambda minibatch: (
            minibatch.index.tolist(),
            minibatch.control.index.tolist(),
            minibatch.set_of_row.tolist(),
        ),
        every=2,
    )


def test_a_state_of_other_sets_or_controls_is_refused(url):
    state = loader_of(url).state_dict()
    loader_of(url).load_state_dict(state)
    for options in (
        {"controls": None},
        {"sampling": zl.CellSets(["line", "drug"], 4)},
        {"controls": zl.MatchedControls("drug == 'x'", "line")},
    ):
        with pytest.raises(OptionError, match=r"the state is of another run: sampling was .CellSets"):
            loader_of(url, **options).load_state_dict(state)


def test_everything_else_that_a_minibatch_has(url):
    scgpt = zl.tokenizers.ScGPT({name: number for number, name in enumerate(["<pad>", "<cls>", *ADATA.var_names])})
    options = {"tokens": scgpt, "x": ["X", "layers/doubled"], "transforms": [zl.transforms.Clip(0, 9)]}
    for minibatch in loader_of(zl.open_dataset(url)[:, [3, 1]], **options):
        for each in (minibatch, minibatch.control):
            rows = each.index.numpy()
            wanted = VALUES[rows][:, [3, 1]]
            np.testing.assert_array_equal(dense(each.x["X"]), np.minimum(wanted, 9))
            np.testing.assert_array_equal(dense(each.x["layers/doubled"]), np.minimum(2 * wanted, 9))
            assert each.tokens["lengths"].tolist() == (1 + np.count_nonzero(wanted, axis=1)).tolist()


def test_a_batch_transform_gets_the_controls(url):
    wanted = [dense(each.x) - dense(each.control.x) for each in loader_of(url)]
    loader = loader_of(url, batch_transform=lambda each: each.x.to_dense() - each.control.x.to_dense())
    for found, difference in zip(loader, wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), difference)
    assert loader.statistics().rows == 2 * sum(map(len, wanted))


def test_a_minibatch_moves_with_its_controls(url):
    minibatch = next(iter(loader_of(url)))
    assert {*minibatch} == {"row", "index", "x", "obs", "obsm", "control", "set_of_row", "group"}
    copied = minibatch.to("meta")
    assert {copied.control.x.device.type, copied.control.index.device.type, copied.set_of_row.device.type} == {"meta"}
    again = pickle.loads(pickle.dumps(minibatch))
    assert_same_minibatches([again.control], [minibatch.control])


def test_controls_are_rows_of_the_view(url):
    dataset = zl.open_dataset(url)
    train, test = dataset.split([0.5, 0.5], stratify="drug", seed=1)
    options = {
        "controls": zl.MatchedControls("drug == 'DMSO'", match=["line"]),
        "sampling": zl.CellSets(["line", "drug"], 4),
    }
    controls = []
    for view in (train, test):
        rows = [row for each in loader_of(view, **options) for row in each.control.index.tolist()]
        assert {*rows} <= {*view.row_numbers.tolist()}
        for each in loader_of(view, **options):
            assert view.row_numbers[each.control.row.numpy()].tolist() == each.control.index.tolist()
        controls.append({*rows})
    assert not controls[0] & controls[1]


def test_controls_of_a_view_are_taken_as_they_are(url):
    dataset = zl.open_dataset(url)
    treated = dataset.where("drug != 'DMSO'")
    loader = loader_of(treated, controls=zl.MatchedControls(dataset.where("drug == 'DMSO'"), match="line"))
    for minibatch in loader:
        assert minibatch.control.obs["line"].tolist() == minibatch.obs["line"].tolist()
        assert (OBS["drug"].iloc[minibatch.control.index.numpy()] == "DMSO").all()
        assert {*minibatch.group["drug"]} <= {"x", "y", "z"}
        assert {*minibatch.control.row.tolist()} == {-1}


def test_groups_and_rows_that_are_left_out_are_counted(url):
    found = loader_of(url, sampling=zl.CellSets(["line", "drug"], 8, least=30)).set_counts
    sizes = OBS.groupby(["line", "drug"], observed=True).size()
    assert found.unlabelled_rows == OBS["line"].isna().sum()
    assert (found.small_groups, found.small_rows) == ((sizes < 30).sum(), sizes[sizes < 30].sum())
    assert (found.groups, found.rows) == ((sizes >= 30).sum(), sizes[sizes >= 30].sum())
    assert found.small_groups > 0
    assert loader_of(zl.open_dataset(url), sampling=None, controls=None).set_counts is None


def test_the_need_of_a_fallback_is_said_once(url, caplog):
    loader = loader_of(url)
    for _ in loader:
        pass
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    n_rows = np.count_nonzero((OBS["line"] == "C") & (OBS["plate"] == 2))
    assert message.startswith(f"controls: {n_rows} rows of 1 groups agree with no control in line, plate")
    assert f"line=C/plate=2 ({n_rows} rows)" in message


def test_the_need_of_a_fallback_counts_the_rows_of_the_sampling(url, caplog):
    rows = np.flatnonzero((OBS["line"] == "C") & (OBS["plate"] == 2))[:3]
    list(loader_of(url, sampling=zl.BlockShuffling(4, indices=[*rows, 0])))
    (message,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert message.startswith("controls: 3 rows of 1 groups")
    assert message.endswith("line=C/plate=2 (3 rows)")


def controls_of(*arguments, **options):
    return {"controls": zl.MatchedControls(*arguments, **options)}


REFUSED = {
    "no control": (
        lambda: controls_of("drug == 'DMSO'", ["line", "plate"]),
        OptionError,
        r"\d+ rows of 1 groups have no control, because no row that meets \"drug == 'DMSO'\" agrees with them in line, "
        r"plate: line=C/plate=2 \(\d+ rows\)",
    ),
    "no label": (
        lambda: controls_of("drug == 'DMSO'", "line") | {"sampling": None},
        OptionError,
        r"\d+ rows of 1 groups have no control, .* line=nan",
    ),
    "no row": (lambda: controls_of("lane == 99", "line"), OptionError, "none meets the condition 'lane == 99'"),
    "an unknown column": (lambda: controls_of("drug == 'DMSO'", "lin"), MissingColumnError, "Did you mean 'line'"),
    "an unknown group": (lambda: {"sampling": zl.CellSets("drg", 8)}, MissingColumnError, "Did you mean 'drug'"),
    "an unknown label": (lambda: controls_of("drug == 'DSMO'", "line"), OptionError, "Did you mean 'DMSO'"),
    "n": (lambda: controls_of("drug == 'DMSO'", "line", n=0), OptionError, "n must be a whole number"),
    "a wider fallback": (
        lambda: controls_of("drug == 'DMSO'", "line", fallback=["plate"]),
        OptionError,
        "must be fewer columns than match",
    ),
    "not controls": (lambda: {"controls": "drug == 'DMSO'"}, OptionError, "controls must be a zl.MatchedControls"),
    "batch_size": (lambda: {"batch_size": 20}, OptionError, "batch_size 20 is not a multiple of set_size 8"),
}


@pytest.mark.parametrize(("options", "kind", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_when_the_loader_is_made(url, options, kind, says):
    with pytest.raises(kind, match=says):
        loader_of(url, **options())


def test_fallbacks_are_tried_in_turn(url):
    everyone = zl.MatchedControls("drug == 'DMSO'", match=["line", "plate"], n=2, fallback=[["line"], []])
    loader = loader_of(url, controls=everyone, sampling=None, x=None)
    line, plate = OBS["line"].to_numpy(), OBS["plate"].to_numpy()
    for minibatch in loader:
        controls = minibatch.control.index.view(-1, 2).tolist()
        for row, (one, other) in zip(minibatch.index.tolist(), controls, strict=True):
            assert one != other
            if isinstance(line[row], str):
                assert line[one] == line[other] == line[row]
                assert line[row] == "C" or plate[one] == plate[other] == plate[row]
    assert loader.statistics().fallback_controls == 2 * np.count_nonzero(
        OBS["line"].isna() | ((OBS["line"] == "C") & (OBS["plate"] == 2))
    )
