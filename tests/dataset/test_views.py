"""Views: their rows, splits, and loaders over views, checked by value."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator
from itertools import combinations, product

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import check_minibatch, counts, dense, plan_of, write_store
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError
from zloader.dataset.matrices import as_scipy
from zloader.dataset.splits import parts_of_rows
from zloader.dataset.views import RowSet, rows_matching
from zloader.insight.cost import epoch_costs
from zloader.selecting.columns import ObsColumn, as_numbers

OBS = ["cell_type", "donor", "n_counts", "passed", "lane"]
PARTS = [counts(211, 37, seed=1), counts(160, 37, seed=2), counts(132, 37, seed=3)]


def _united():
    """The three AnnData concatenated."""
    for number, part in enumerate(PARTS):
        part.obs_names = [f"{number} {name}" for name in part.obs_names]
        part.obsm["X_pca"] = np.random.default_rng(number).random((part.n_obs, 3)).astype(np.float32)
    united = ad.concat(PARTS)
    united.obs["cell_type"] = pd.Categorical(united.obs["cell_type"], PARTS[0].obs["cell_type"].cat.categories)
    return united


ADATA = _united()
N = ADATA.n_obs


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("stores")
    for number, part in enumerate(PARTS):
        write_store(part, folder / f"{number}.zarr", folder)
    return [str(folder / f"{number}.zarr") for number in range(len(PARTS))]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("one")
    write_store(ADATA, folder / "all.zarr", folder)
    return str(folder / "all.zarr")


@pytest.fixture(params=["one", "one, mirror", "several", "several, mirror"])
def dataset(request, one, urls, tmp_path) -> zl.Dataset:
    cache = tmp_path / "cache" if "mirror" in request.param else None
    return zl.open_dataset(one if "one" in request.param else urls, cache=cache)


def column(**columns) -> object:
    """A function like `Dataset.obs_column` for these columns."""
    kept = {
        name: values if isinstance(values, ObsColumn) else as_numbers(name, values) for name, values in columns.items()
    }
    return kept.__getitem__


# ------------------------------------------------------------------------------------------------ sets of rows

MASKS = st.integers(0, 2000).flatmap(lambda n: st.tuples(st.just(n), st.floats(0, 1), st.integers(0, 99)))


def mask_like(made: tuple[int, float, int]) -> np.ndarray:
    n, share, seed = made
    return np.random.default_rng(seed).random(n) < share


@given(made=MASKS, of_it=st.floats(0, 1))
@example(made=(512, 1.0, 0), of_it=1.0)
@example(made=(513, 1.0, 0), of_it=0.0)
@example(made=(0, 0.5, 0), of_it=0.5)
def test_a_set_of_rows_knows_its_rows(made, of_it):
    mask = mask_like(made)
    rows = np.flatnonzero(mask)
    chosen = RowSet.of(mask)
    assert len(chosen) == len(rows)
    np.testing.assert_array_equal(chosen.mask(), mask)
    np.testing.assert_array_equal(chosen.numbers(np.arange(len(rows))), rows)
    np.testing.assert_array_equal(chosen.numbers(np.arange(len(rows))[::-3]), rows[::-3])
    np.testing.assert_array_equal(chosen.positions(rows[::-3]), np.arange(len(rows))[::-3])
    inner = np.random.default_rng(1).random(len(rows)) < of_it
    np.testing.assert_array_equal(np.flatnonzero(chosen.narrowed(RowSet.of(inner)).mask()), rows[inner])


@given(made=MASKS, start=st.integers(0, 2000), stop=st.integers(0, 2000), step=st.integers(1, 700))
def test_sets_of_rows_are_made_of_masks_and_ranges(made, start, stop, step):
    mask = mask_like(made)
    found, in_range = RowSet.of(mask), RowSet.of_range(len(mask), range(start, stop, step))
    np.testing.assert_array_equal(found.mask(), mask)
    np.testing.assert_array_equal(found.numbers(np.arange(len(found))), np.flatnonzero(mask))
    np.testing.assert_array_equal(np.flatnonzero(in_range.mask()), np.arange(len(mask))[start:stop:step])
    assert RowSet.of(mask).digest("print") == found.digest("print")


def test_a_range_of_a_step_beyond_64_bits_is_its_first_row():
    for start in (0, 3):
        assert np.flatnonzero(RowSet.of_range(9, range(start, 9, 10**30)).mask()).tolist() == [start]


@given(made=MASKS, place=st.integers(0, 1999))
def test_sets_of_other_rows_have_other_digests(made, place):
    mask = mask_like(made)
    other = mask.copy()
    if len(mask):
        other[place % len(mask)] ^= True
    digest = RowSet.of(mask).digest("print")
    assert (RowSet.of(other).digest("print") == digest) == (len(mask) == 0)
    assert RowSet.of(np.append(mask, False)).digest("print") != digest
    assert RowSet.of(mask).digest("other print") != digest
    assert RowSet.of(mask.copy()).digest("print") == digest


# ------------------------------------------------------------------------------------------------ splitting


def split_rows(shares, of, n_rows, **how) -> np.ndarray:
    """The part of each of `n_rows` rows."""
    return parts_of_rows(shares, of, n_rows, **how)


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(
    lambda weights: [weight / max(1, sum(weights)) for weight in weights]
)
CODES = st.tuples(st.integers(0, 400), st.integers(1, 12), st.integers(0, 99)).map(
    lambda made: np.random.default_rng(made[2]).integers(-1, made[1], made[0]).astype(np.int8)
)


def labelled(codes: np.ndarray) -> object:
    return column(donor=ObsColumn(values=codes, coded=pd.Index([f"d{number}" for number in range(12)])))


@given(shares=SHARES, codes=CODES, seed=st.integers(0, 5), how=st.sampled_from(["rows", "by", "stratify"]))
def test_parts_are_a_partition_of_the_sizes_asked_for(shares, codes, seed, how):
    n = len(codes)
    if how == "by" and np.diff(np.round(np.cumsum(shares) * n), prepend=0).astype(bool).sum() > len(set(codes)):
        how = "rows"  # fewer labels than parts
    given_by = {"by": "donor" if how == "by" else None, "stratify": "donor" if how == "stratify" else None}
    parts = split_rows(shares, labelled(codes), n, **given_by, seed=seed)
    assert parts.shape == (n,)
    assert not n or (parts.min() >= 0 and parts.max() <= len(shares))
    if sum(shares) >= 1 - 1e-9 and how != "by":
        assert not (parts == len(shares)).any()  # no rows are left over
    sizes = np.bincount(parts, minlength=len(shares) + 1)[: len(shares)]
    if how != "by":
        assert (np.abs(sizes - np.array(shares) * n) <= 1).all()
    if how == "by":
        assert all(len(set(parts[codes == code])) == 1 for code in set(codes))
    if how == "stratify":
        for code in set(codes):
            of_label = np.bincount(parts[codes == code], minlength=len(shares) + 1)[: len(shares)]
            assert (np.abs(of_label - np.array(shares) * (codes == code).sum()) <= len(shares) + 1).all()
    again = split_rows(shares, labelled(codes), n, **given_by, seed=seed)
    np.testing.assert_array_equal(parts, again)


@given(codes=CODES, cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)), stratify=st.booleans())
def test_sizes_are_met_exactly(codes, cuts, stratify):
    n = len(codes)
    first, last = sorted(int(cut * n) for cut in cuts)
    sizes = [first, last - first]
    parts = split_rows(sizes, labelled(codes), n, by=None, stratify="donor" if stratify else None, seed=3)
    assert np.bincount(parts, minlength=3).tolist() == [*sizes, n - last]


@pytest.mark.parametrize("shares", [[0.9, 0.1], [0.8, 0.1, 0.1], [0.5, 0.3], [40, 60]])
def test_groups_are_dealt_out_as_near_to_the_sizes_as_the_smallest_of_them(shares):
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(100), rng.integers(1, 60, 100)).astype(np.int16)
    n = len(codes)
    wanted = np.array(shares) if isinstance(shares[0], int) else np.array(shares) * n
    sides = set()
    for seed in range(6):
        parts = split_rows(shares, column(donor=codes), n, by="donor", stratify=None, seed=seed)
        assert all(len(set(parts[codes == code])) == 1 for code in range(100))
        sizes = np.bincount(parts, minlength=len(shares) + 1)[: len(shares)]
        assert np.abs(sizes - wanted).max() <= 5
        sides.add(tuple(parts))
    assert len(sides) == 6


@pytest.mark.parametrize(
    ("counts", "shares", "sizes"),
    [
        ([40, 52, 34], [0.8, 0.2], [92, 34]),
        ([100] * 5, [0.9, 0.1], [400, 100]),
        ([55, 39], [0.5, 0.3], [55, 39]),
        ([1000, 1, 1], [0.5, 0.3, 0.2], [1000, 1, 1]),
    ],
)
def test_no_part_is_empty_and_a_fuller_one_is_taken_where_it_is_nearer(counts, shares, sizes):
    codes = np.repeat(np.arange(len(counts)), counts)
    of_seed = [split_rows(shares, column(d=codes), len(codes), by="d", stratify=None, seed=seed) for seed in range(9)]
    assert all(np.bincount(parts, minlength=len(shares)).tolist() == sizes for parts in of_seed)
    # Among labels of equal size the seed decides.
    assert len(set(counts)) > 1 or len({tuple(parts) for parts in of_seed}) > 1


@given(
    counts=st.lists(st.integers(1, 60), min_size=4, max_size=9),
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    rest=st.sampled_from([0, 3]),
    seed=st.integers(0, 5),
)
def test_no_group_moved_and_no_two_exchanged_bring_parts_nearer(counts, shares, rest, seed):
    """Compared with every possible move and exchange."""
    codes, n_parts = np.repeat(np.arange(len(counts)), counts), len(shares)
    sizes = np.diff(len(codes) * np.cumsum(shares) // (sum(shares) + rest), prepend=0).tolist()
    if 0 in sizes:
        return
    parts = split_rows(sizes, column(donor=codes), len(codes), by="donor", stratify=None, seed=seed)
    of_group = parts[np.searchsorted(codes, np.arange(len(counts)))]
    assert set(range(n_parts)) <= set(of_group)

    def apart(of_group: np.ndarray) -> float:
        found = np.bincount(of_group, weights=counts, minlength=n_parts + 1)
        empty = (np.bincount(of_group, minlength=n_parts + 1)[:n_parts] == 0).any()
        return np.inf if empty else np.abs(found - [*sizes, len(codes) - sum(sizes)]).sum()

    def others() -> Iterator[np.ndarray]:
        for group, part in product(range(len(counts)), range(n_parts + 1)):
            other = of_group.copy()
            other[group] = part
            yield other
        for one, two in combinations(range(len(counts)), 2):
            other = of_group.copy()
            other[[one, two]] = other[[two, one]]
            yield other

    assert apart(of_group) <= min(map(apart, others()))


def test_parts_are_the_same_on_every_machine():
    codes = (np.arange(60) % 7 - 1).astype(np.int8)
    for way, golden in {
        (None, None): "012102000120211000101020101001220211111000022010000010002102",
        ("donor", None): "101200010120001012000101200010120001012000101200010120001012",
        (None, "donor"): "000102001000010110002101021020100011200112202110012212100002",
    }.items():
        parts = split_rows([0.5, 0.3], labelled(codes), 60, by=way[0], stratify=way[1], seed=11)
        assert "".join(map(str, parts)) == golden


def test_the_windows_of_a_split_do_not_show(monkeypatch):
    codes = np.random.default_rng(0).integers(-1, 5, 1000).astype(np.int8)
    ways = [{"by": None, "stratify": None}, {"by": "donor", "stratify": None}, {"by": None, "stratify": "donor"}]
    whole = [split_rows([0.7, 0.2], labelled(codes), 1000, **way, seed=0) for way in ways]
    monkeypatch.setattr("zloader.common.records.WINDOW_ROWS", 13)
    for way, parts in zip(ways, whole, strict=True):
        np.testing.assert_array_equal(split_rows([0.7, 0.2], labelled(codes), 1000, **way, seed=0), parts)


@pytest.mark.parametrize(
    ("shares", "options", "message"),
    [
        ([], {}, "give each part"),
        ([0.7, 0.5], {}, "add up to 1.2"),
        ([-0.1, 0.5], {}, "give each part"),
        ([0.5, 10], {}, "fractions for all parts or numbers of rows for all parts"),
        ([60, 50], {}, r"60 \+ 50 rows need more than the 100"),
        ([2**70, 1], {}, f"{2**70} .* more than the 100"),
        ([0.5], {"by": ["donor", 3]}, r"by must be a list of names \(strings\), but it holds 3"),
        ([0.5], {"stratify": 3}, "stratify must be the name"),
        ([0.5], {"by": "donor", "stratify": "donor"}, "not both"),
        ([0.2] * 5, {"by": "donor"}, "5 parts need as many labels, but obs column 'donor' has 4"),
        ([0.5], {"by": "score"}, "holds float64"),
    ],
)
def test_splits_that_make_no_sense_are_refused(shares, options, message):
    of = column(donor=np.arange(100) % 4, score=np.arange(100) / 2)
    with pytest.raises(OptionError, match=message):
        split_rows(shares, of, 100, **{"by": None, "stratify": None, "seed": 0, **options})


@pytest.mark.parametrize("way", ["by", "stratify"])
@pytest.mark.parametrize("dtype", ["Int64", "boolean"])
def test_numbers_and_booleans_that_are_missing_count_as_one_label(way, dtype):
    numbers = pd.array([0, 1, None, 1, None, 0, None, 0] * 9, dtype=dtype)
    labels = pd.Categorical(pd.Series(numbers).astype("Int64").map({0: "no", 1: "yes"}))
    options = {"by": None, "stratify": None, "seed": 4, way: "made"}
    parts = split_rows([0.6, 0.4], column(made=numbers), 72, **options)
    np.testing.assert_array_equal(parts, split_rows([0.6, 0.4], column(made=labels), 72, **options))
    assert len(set(parts)) == 2


@pytest.mark.parametrize("shares", [[0.8, 0.2], [0.9, 0.1], [1 / 3] * 3, [0.9, 0.1, 0]])
def test_fractions_of_single_precision_leave_no_row_over(shares):
    n = 3_000_000
    parts = split_rows(list(np.array(shares, np.float32)), column(), n, by=None, stratify=None, seed=np.int64(0))
    assert np.abs(np.bincount(parts, minlength=len(shares)) - n * np.array(shares)).max() <= 1
    assert parts.max() < len(shares)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (np.ones(9, bool), "a mask over all 10 rows"),
        (np.ones((10, 1), bool), "a mask over all 10 rows"),
        ([3, 10], "row 10 does not exist"),
        ([-1], "row -1 does not exist"),
        ([3, 4, 3], "row 3 more than once"),
        ([0.5], "must be a 1-d sequence of row numbers"),
        ([[1, 2]], "must be a 1-d sequence of row numbers"),
        (["a"], "must be a 1-d sequence of row numbers"),
        (pd.array([True, None] * 5), "must be a 1-d sequence"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(condition, message):
    with pytest.raises(OptionError, match=message):
        rows_matching(condition, column(), 10)


@given(
    seed=st.integers(0, 99),
    n=st.integers(0, 3000),
    inner=st.floats(0, 1),
)
def test_a_row_set_is_narrowed(seed, n, inner):
    rng = np.random.default_rng(seed)
    mask, values = rng.random(n) < 0.6, rng.integers(0, 99, (n, 2))
    part, of_part = np.zeros(n, np.uint8), rng.random(np.count_nonzero(mask)) < inner
    part[mask] = 1 + of_part
    rows = RowSet.of(mask)
    rest, outer, narrow = (RowSet.of(part == number) for number in range(3))
    assert rows.all_numbers().tolist() == np.flatnonzero(mask).tolist()
    np.testing.assert_array_equal(rows.taken(values), values[mask])
    assert rows.narrowed(RowSet.of(of_part)).all_numbers().tolist() == narrow.all_numbers().tolist()
    assert narrow.all_numbers().tolist() == np.flatnonzero(mask)[of_part].tolist()
    assert rest.mask().tolist() == (~mask).tolist()
    assert len(outer) + len(narrow) == len(rows)


@pytest.mark.any_version
@pytest.mark.slow
def test_many_rows_take_little_memory():
    """Only arrays: one byte per row for the mask, and one bit per row for each RowSet."""
    n = 20_000_000
    codes = (np.arange(n, dtype=np.int64) // 70_000 % 250).astype(np.uint8).view(np.int8) % 100
    of = column(donor=ObsColumn(values=codes, coded=pd.Index([f"d{number}" for number in range(100)])))
    (
        rows_matching("donor == 'd1'", of, 10),
        split_rows([0.5], of, 100, by="donor", stratify=None, seed=0),
    )  # compile first
    tracemalloc.start()
    try:
        chosen = rows_matching("donor in ['d1', 'd2', 'd3'] or not donor != 'd7'", of, n)
        held = chosen.bits.nbytes + chosen.before.nbytes
        for way in (
            {"by": "donor", "stratify": None},
            {"by": None, "stratify": "donor"},
            {"by": None, "stratify": None},
        ):
            part_of_row = parts_of_rows([0.8, 0.1, 0.1], of, n, **way, seed=0)
            parts = [RowSet.of(part_of_row == number) for number in range(3)]
            assert sum(map(len, parts)) == n
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < n * 0.15
    assert len(pickle.dumps(chosen)) < n * 0.15
    assert most < 6 * n


# ------------------------------------------------------------------------------------------------ views of a dataset


def check_view(view: zl.View, rows: np.ndarray) -> None:
    """Compares everything that a view says about itself with the rows it should have."""
    assert (len(view), view.n_obs, view.n_vars) == (len(rows), len(rows), ADATA.n_vars)
    np.testing.assert_array_equal(view.row_numbers, rows)
    wanted = ADATA.obs.iloc[rows]
    assert view.obs(["lane"]).index.equals(wanted.index)
    for name in OBS:
        found = view.obs()[name]
        assert found.isna().tolist() == wanted[name].isna().tolist()
        assert found.dropna().tolist() == wanted[name].dropna().tolist()
    np.testing.assert_array_equal(view.obs_column("lane").values, wanted["lane"])
    np.testing.assert_array_equal(view.obsm_array("X_pca"), ADATA.obsm["X_pca"][rows])
    assert view.categories("cell_type").equals(ADATA.obs["cell_type"].cat.categories)
    assert view.obs_columns == OBS
    assert view.var_names.equals(ADATA.var_names)
    if len(rows) > 2:
        asked = [len(rows) - 1, 0, 1, 0]
        taken = view.take(asked)
        np.testing.assert_array_equal(dense(taken), ADATA.X[rows[asked]].toarray())
        assert taken.obs_names.tolist() == ADATA.obs_names[rows[asked]].tolist()
        np.testing.assert_array_equal(dense(as_scipy(view.read_rows(np.array(asked)))), dense(taken))


@pytest.mark.slow
def test_views_and_views_of_views(dataset):
    obs = ADATA.obs
    cells = dataset.where("cell_type == 'a' and n_counts > 500")
    rows = np.flatnonzero((obs["cell_type"] == "a") & (obs["n_counts"] > 500))
    check_view(cells, rows)
    lanes = cells.where("lane in [0, 3]")
    inner = rows[obs["lane"].iloc[rows].isin([0, 3])]
    check_view(lanes, inner)
    check_view(lanes.where(np.arange(len(inner)) % 2 == 0), inner[::2])
    check_view(lanes.where([2, 0]), inner[[0, 2]])
    check_view(dataset.where(obs["passed"]), np.flatnonzero(obs["passed"]))
    check_view(dataset.where([]), np.empty(0, np.int64))
    assert lanes.whole is cells.whole is dataset
    assert repr(lanes).startswith(f"View with n_obs x n_vars = {len(inner)} x 37 of the {N} rows of {dataset.url}\n")
    assert isinstance(lanes, zl.Dataset)


def test_columns_of_any_name_choose_rows(tmp_path):
    adata = counts(9, 5)
    adata.obs = pd.DataFrame({"cell type": list("aabbbabab"), "µm": np.arange(9)}, index=adata.obs_names)
    write_store(adata, tmp_path / "named.zarr", tmp_path)
    view = zl.open_dataset(tmp_path / "named.zarr").where("`cell type` == 'b' and µm > 2")
    assert view.row_numbers.tolist() == [3, 4, 6, 8]
    assert view.where("µm in [4, 5, 6]").row_numbers.tolist() == [4, 6]


def test_fingerprints_differ_by_the_rows_alone(dataset):
    lanes = [dataset.where(f"lane == {lane}") for lane in range(5)]
    prints = {dataset.fingerprint, dataset.where(np.ones(N, bool)).fingerprint, *(lane.fingerprint for lane in lanes)}
    assert len(prints) == 7
    for lane in lanes:
        assert dataset.where(lane.row_numbers).fingerprint == lane.fingerprint
        assert lane.where(np.ones(len(lane), bool)).fingerprint == lane.fingerprint
        assert pickle.loads(pickle.dumps(lane)).fingerprint == lane.fingerprint


def test_no_donor_is_on_both_sides(dataset):
    parts = dataset.split([0.6, 0.3, 0.1], by="donor", seed=1)
    donors = [set(part.obs(["donor"])["donor"]) for part in parts]
    assert sum(map(len, donors)) == len(set().union(*donors)) == 3
    rows = np.concatenate([part.row_numbers for part in parts])
    np.testing.assert_array_equal(np.sort(rows), np.arange(N))


def test_parts_keep_proportions_of_labels_and_can_be_split_again(dataset):
    train, test = dataset.split([0.8, 0.2], stratify="cell_type", seed=2)
    assert len(train) + len(test) == N
    assert len(train) == round(0.8 * N)
    whole = ADATA.obs["cell_type"].value_counts(dropna=False)
    for part, share in ((train, 0.8), (test, 0.2)):
        found = part.obs(["cell_type"])["cell_type"].value_counts(dropna=False)
        assert (found - whole * share).abs().max() <= 2
    first, second = train.split([100, 50])
    assert (len(first), len(second)) == (100, 50)
    assert not set(first.row_numbers) & set(second.row_numbers)
    assert set(first.row_numbers) | set(second.row_numbers) <= set(train.row_numbers)
    assert set(first.row_numbers) != set(train.split([100, 50], seed=1)[0].row_numbers)


def test_what_is_not_there_is_listed(dataset):
    with pytest.raises(MissingColumnError, match=r"'tissue'.*'cell_type', 'donor'"):
        dataset.where("tissue == 'lung'")
    with pytest.raises(MissingColumnError, match=r"'tissue'.*'cell_type', 'donor'"):
        dataset.split([0.5], by="tissue")
    with pytest.raises(OptionError, match="'d1', 'd10', 'd2'"):
        dataset.where("donor == 'd3'")
    view = dataset.where("lane == 1")
    with pytest.raises(OptionError, match=f"rows 0 to {len(view) - 1}"):
        view.take([len(view)])
    with pytest.raises(OptionError, match=f"a mask over all {len(view)} rows"):
        view.where(np.ones(N, bool))
    with pytest.raises(OptionError, match="0 rows"):
        zl.Loader(dataset.where([]), batch_size=4, fetch_factor=2)


# ------------------------------------------------------------------------------------------------ loaders

SIZES = {"batch_size": 8, "fetch_factor": 4, "obs": OBS, "obsm": ["X_pca"]}
SAMPLINGS = [
    None,
    zl.BlockShuffling(8),
    zl.BlockShuffling(1),
    zl.Streaming(),
    zl.Streaming(shuffle=True),
    zl.MixtureOfScanners(n_scanners=3, block_size=4),
    zl.BlockWeightedSampling({"d1": 2, "d2": 2, "d10": 2}, column="donor", block_size=4, replace=False),
]


def epoch(loader) -> np.ndarray:
    """The row numbers of an epoch, after checking all values."""
    rows = []
    for minibatch in loader:
        rows.append(check_minibatch(minibatch, ADATA))
        np.testing.assert_array_equal(minibatch.obsm["X_pca"].numpy(), ADATA.obsm["X_pca"][rows[-1]])
    return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_every_row_of_a_view_comes_once_with_its_values(dataset, sampling):
    view = dataset.where("lane != 2 and n_counts >= 300")
    loader = zl.Loader(view, sampling=sampling, **SIZES)
    first, second = epoch(loader), epoch(loader)
    for rows in (first, second):
        np.testing.assert_array_equal(np.sort(rows), view.row_numbers)
    assert len(loader) == -(-len(view) // 8)
    assert isinstance(sampling, zl.Streaming) or first.tolist() != second.tolist()


@pytest.mark.every(4)
def test_rows_of_a_minibatch_are_positions_in_what_the_loader_was_given(dataset):
    view = dataset.where(np.arange(dataset.n_obs) % 3 > 0)
    for loaded in (dataset, view, view.where(np.arange(view.n_obs) % 5 > 1)):
        numbers, out = np.arange(dataset.n_obs) if loaded is dataset else loaded.row_numbers, np.full(loaded.n_obs, -1)
        for minibatch in zl.Loader(loaded, batch_size=16, fetch_factor=4, sampling=zl.BlockShuffling(4)):
            assert minibatch.row.dtype == minibatch.index.dtype == torch.int64
            out[minibatch.row] = minibatch.index
        np.testing.assert_array_equal(out, numbers)
    repeated = zl.Loader(view, sampling=zl.Streaming(indices=[7, 3, 7]))
    assert [minibatch.row.tolist() for minibatch in repeated] == [[7, 3, 7]]


@pytest.mark.every(2)
def test_ranks_share_out_a_view(dataset):
    view = dataset.where("passed")
    rows = [epoch(zl.Loader(view, rank=rank, world_size=3, **SIZES)) for rank in range(3)]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), view.row_numbers)


@pytest.mark.every(3)
def test_weights_labels_and_indices_are_those_of_the_views_rows(dataset):
    view = dataset.where("lane in [1, 4]")
    weights = np.zeros(len(view))
    weights[[3, 5, 9]] = 1, 2, 1
    drawn = epoch(zl.Loader(view, sampling=zl.BlockWeightedSampling(weights, block_size=4, total_size=200), **SIZES))
    assert set(drawn) == set(view.row_numbers[[3, 5, 9]])
    balanced = zl.ClassBalancedSampling("cell_type", block_size=4, total_size=300)
    drawn = epoch(zl.Loader(view, sampling=balanced, **SIZES))
    assert set(drawn) <= set(view.row_numbers)
    assert set(ADATA.obs["cell_type"].iloc[drawn]) == {"a", "b", "c"}
    some = epoch(zl.Loader(view, sampling=zl.BlockShuffling(4, indices=[7, 2, 11]), **SIZES))
    assert set(some) == set(view.row_numbers[[2, 7, 11]])
    with pytest.raises(OptionError, match=f"{N} rows, but the dataset has {len(view)}"):
        zl.Loader(view, sampling=zl.BlockWeightedSampling(np.ones(N), block_size=4), **SIZES)


@pytest.mark.any_version
@pytest.mark.slow
def test_a_worker_that_is_spawned_yields_the_view(urls, tmp_path):
    view = zl.open_dataset(urls, cache=tmp_path / "cache").where("lane == 3")
    loader = zl.Loader(view, **SIZES)
    worker = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    np.testing.assert_array_equal(np.sort(epoch(worker)), view.row_numbers)


@pytest.mark.slow
def test_only_what_a_view_needs_is_read(urls, one, tmp_path):
    for opened, cache in ((one, None), (urls, None), (one, tmp_path / "cache")):
        dataset = zl.open_dataset(opened, cache=cache)
        view = dataset.where(np.arange(N) // 50 == 4)
        loader, whole = zl.Loader(view, **SIZES), zl.Loader(dataset, **SIZES)
        foretold = epoch_costs(view, loader.plan(0))
        foretold_whole = epoch_costs(dataset, whole.plan(0))
        epoch(loader)
        part = loader.statistics()
        expected = foretold.unmirrored if cache is None else foretold.first_mirrored
        assert (part.gets, part.bytes_read) == (expected.gets, expected.bytes_read)
        assert foretold.unmirrored.gets < foretold_whole.unmirrored.gets
        assert foretold.unmirrored.bytes_read < foretold_whole.unmirrored.bytes_read / 2
        epoch(whole)
        assert cache or part.bytes_read < whole.statistics().bytes_read / 2
        assert cache or part.gets < whole.statistics().gets
    epoch(loader)
    assert loader.statistics().gets == 0  # view and dataset share the mirror


def test_a_view_of_blocks_reads_neighbours_together():
    """Blocks are consecutive rows of the view, so they are consecutive in the store wherever the view is."""
    mask = np.zeros(1000, bool)
    mask[100:300] = mask[600:900] = True
    plan = plan_of(sampling=zl.BlockShuffling(50), chosen=RowSet.of(mask), batch_size=50, fetch_factor=2)
    assert (plan.n_rows, plan.n_fetches, plan.sweeps) == (500, 5, False)
    runs = [np.diff(plan.fetch(number).rows.reshape(2, 50), axis=1) for number in range(5)]
    assert (np.concatenate(runs) == 1).all()


@pytest.mark.every(4)
def test_a_run_over_a_view_is_resumed(dataset):
    view = dataset.where("lane in [0, 1, 4]")
    loader = zl.Loader(view, **SIZES)
    under_way = iter(loader)
    seen = [next(under_way).index.numpy() for _ in range(5)]
    state = loader.state_dict()
    rest = [minibatch.index.tolist() for minibatch in under_way]
    again = zl.Loader(view, **SIZES)
    again.load_state_dict(state)
    assert [minibatch.index.tolist() for minibatch in again] == rest
    for rank in range(2):  # as two ranks
        other = zl.Loader(view, rank=rank, world_size=2, **SIZES)
        other.load_state_dict(state)
        seen.append(epoch(other))
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), view.row_numbers)
    with pytest.raises(OptionError, match="fingerprint"):
        zl.Loader(dataset.where("lane in [0, 1, 3]"), **SIZES).load_state_dict(state)


def test_the_quality_of_a_plan_over_a_view_is_measured_against_its_rows(dataset):
    """A view of a single label has no entropy in any order, however mixed the other rows are."""
    view = dataset.where("lane == 3")
    plan = zl.Loader(view, **SIZES).plan(0)
    np.testing.assert_array_equal(np.flatnonzero(plan.order.chosen()), view.row_numbers)
    found = zl.quality(dataset.obs_column("lane").values, plan)
    assert (found.entropy_bits, found.random_entropy_bits) == (0, 0)
    some = zl.Loader(view, sampling=zl.BlockShuffling(4, indices=[1, 2, 9]), **SIZES).plan(0)
    np.testing.assert_array_equal(np.flatnonzero(some.order.chosen()), view.row_numbers[[1, 2, 9]])


class Astray(zl.Sampling):
    """A custom sampling that returns wrong row numbers, shifted by `by`."""

    def __init__(self, by) -> None:
        self.by = by

    def order(self, dataset, batch_size, fetch_rows):
        n_rows = dataset.n_obs
        return zl.Order(
            dataset_rows=n_rows, n_rows=n_rows, draw=lambda start, stop, *of: np.arange(start, stop) + self.by
        )


@pytest.mark.parametrize("by", [-1, 1, 10**9])
def test_rows_that_a_view_has_not_are_refused(dataset, by):
    view = dataset.where(np.arange(N) % 3 == 0)
    plan = zl.Loader(view, sampling=Astray(by), x=None).plan(0)
    with pytest.raises(OptionError, match=rf"from 0 to {len(view.row_numbers) - 1}, but gave"):
        plan.fetch(0)
