"""`quality` compared with slow counts, with random and ordered rows, and with scDataset's published table."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError
from zloader.dataset.views import RowSet
from zloader.order.shuffling import BlockShuffling, stratified
from zloader.selecting.columns import ObsColumn

pytestmark = pytest.mark.any_version

ROWS = 1_400_000


def plates() -> np.ndarray:
    """The plate of each row: 14 consecutive plates, of sizes for which random minibatches have 3.63 bits."""
    shares = np.linspace(0.7, 1.3, 14) / 14
    ends = np.round(np.cumsum(shares) * ROWS).astype(int)
    return np.repeat(np.arange(14, dtype=np.int8), np.diff(ends, prepend=0))


PLATES = plates()


def measured(sampling, fetch_factor=256, *, labels=PLATES, batch_size=64, **options):
    plan = plan_of(
        dataset_rows=len(labels), sampling=sampling, batch_size=batch_size, fetch_factor=fetch_factor, **options
    )
    return zl.quality(labels, plan)


# (block_size, fetch_factor): bits. From the table in scDataset's paper, for minibatches of 64 rows of Tahoe-100M.
PUBLISHED = {
    (4, 1): 3.14,
    (16, 1): 1.76,
    (16, 4): 3.05,
    (16, 16): 3.48,
    (16, 64): 3.58,
    (64, 4): 1.75,
    (64, 64): 3.45,
    (4, 16): 3.59,
}


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "fetch_factor"), PUBLISHED, ids=str)
def test_the_published_entropies_are_reproduced(block_size, fetch_factor):
    seen = measured(zl.BlockShuffling(block_size), fetch_factor)
    # Not exact, because the table is published without the sizes of the plates.
    assert seen.entropy_bits == pytest.approx(PUBLISHED[block_size, fetch_factor], abs=0.05)
    assert seen.random_entropy_bits == pytest.approx(3.63, abs=0.01)


def test_where_the_defaults_stand():
    seen = measured(stratified(), zl.Loader.fetch_factor, batch_size=zl.Loader.batch_size)
    assert seen.entropy_bits > 3.6
    assert seen.entropy_bits == pytest.approx(seen.random_entropy_bits, abs=0.01)
    assert seen.entropy_sd_bits == pytest.approx(seen.random_entropy_sd_bits, abs=0.01)


@pytest.mark.parametrize(("n_labels", "left"), [(2, 0.5), (14, 0.2), (56, 0.5), (300, 0.9)])
def test_strata_bring_entropy_nearer_to_random_for_any_number_of_labels(n_labels, left):
    """With many strata per label or many labels per stratum, at most `left` of the deficit of random blocks remains."""
    labels = np.arange(ROWS) * n_labels // ROWS
    seen = [measured(BlockShuffling(64, n_strata=n), labels=labels) for n in (64, 1)]
    in_strata, at_random = (each.random_entropy_bits - each.entropy_bits for each in seen)
    assert -0.01 < in_strata < left * at_random


@pytest.mark.every(12)
@pytest.mark.parametrize("n_rows", [1, 64, 65, 130, 1000, 2142, 5000, 20_000, 200_000, 10_000_000])
@pytest.mark.parametrize(("block_size", "fetch_factor"), [(64, 256), (256, 16), (64, 4)], ids=str)
def test_the_default_mixes_no_worse_than_blocks_alone(n_rows, block_size, fetch_factor):
    """At any size. Clearly better where an epoch has several fetches and these have several blocks."""
    labels = (np.arange(n_rows) * 14 // n_rows).astype(np.int8)
    batch_size = min(64, n_rows)
    block_size = min(block_size, batch_size * fetch_factor)
    seeds = range(20 if n_rows <= 5000 else 4 if n_rows <= 20_000 else 1)

    def seen(sampling):
        all_seen = [measured(sampling, fetch_factor, labels=labels, batch_size=batch_size, seed=seed) for seed in seeds]
        return np.array([each.entropy_bits for each in all_seen]), all_seen[0].random_entropy_bits

    default, random = seen(stratified(block_size))
    plain, _ = seen(BlockShuffling(block_size))
    noise = 3 * math.sqrt((default.var() + plain.var()) / len(seeds)) + 0.001
    assert default.mean() > plain.mean() - noise
    if n_rows >= 5000 and n_rows > batch_size * fetch_factor:
        assert random - default.mean() < 0.95 * (random - plain.mean())


def test_single_rows_are_as_good_as_random():
    seen = measured(zl.BlockShuffling(1), 16)
    assert seen.entropy_bits == pytest.approx(seen.random_entropy_bits, abs=0.01)
    assert seen.entropy_sd_bits == pytest.approx(seen.random_entropy_sd_bits, abs=0.01)


def test_a_subset_is_all_the_rows_there_are():
    chosen = np.flatnonzero(PLATES == 3)[::7]
    seen = measured(zl.BlockShuffling(1, indices=chosen))
    assert (seen.entropy_bits, seen.random_entropy_bits) == (0, 0)


@pytest.mark.parametrize("rows", [None, np.arange(7, 20_000)], ids=["dataset", "view"])
def test_indices_count_however_the_labels_are_named(rows):
    """Labels given as the name of an obs column or as an array give the same plan and the same measures."""
    labels = np.arange(20_000) * 14 // 20_000
    chosen = None if rows is None else RowSet.of(np.isin(np.arange(20_000), rows))
    own = np.where(np.arange(20_000) < 5000, labels, np.nan)[slice(None) if rows is None else rows]
    column = ObsColumn(values=own)
    seen = []
    for named in ("c", own):
        table = SimpleNamespace(obs_column={"c": column}.__getitem__, n_obs=len(own))
        seen.append(measured(zl.ClassBalancedSampling(named), 64, labels=labels, table=table, chosen=chosen))
    assert seen[0] == seen[1]
    assert seen[0].random_entropy_bits == pytest.approx(1.9, abs=0.05)


@given(
    n_rows=st.integers(30, 400),
    seed=st.integers(0, 99),
    given_as=st.sampled_from(["view", "view and indices", "indices", "indices, some twice, in any order"]),
)
def test_a_subset_is_measured_as_if_it_were_the_dataset(n_rows, seed, given_as):
    rng = np.random.default_rng(seed)
    labels, chosen = rng.integers(0, 4, n_rows), np.sort(rng.choice(n_rows, 20, replace=False))
    view = None
    if given_as == "view":
        sampling, view = zl.BlockShuffling(3), RowSet.of(np.isin(np.arange(n_rows), chosen))
    elif given_as == "view and indices":
        wide = np.union1d(chosen, rng.integers(0, n_rows, 10))
        sampling = zl.BlockShuffling(3, indices=np.searchsorted(wide, chosen))
        view = RowSet.of(np.isin(np.arange(n_rows), wide))
    elif given_as == "indices":
        sampling = zl.BlockShuffling(3, indices=chosen)
    else:
        order = rng.permutation(np.append(np.arange(20), [3, 7, 7, 7]))
        sampling, alone = zl.Streaming(indices=chosen[order]), zl.Streaming(indices=order)
    if not given_as.endswith("order"):
        alone = zl.BlockShuffling(3)
    seen = measured(sampling, 2, labels=labels, batch_size=4, chosen=view)
    wanted = measured(alone, 2, labels=labels[chosen], batch_size=4)
    assert seen == wanted


def test_a_large_view_holds_few_bytes_a_row():
    labels = np.zeros(8_000_000, np.int8)
    sampling, chosen = zl.BlockShuffling(8), RowSet.of(np.arange(len(labels)) % 2 == 0)
    measured(sampling, 64, labels=labels, batch_size=8, chosen=chosen)  # compile first
    tracemalloc.start()
    try:
        measured(sampling, 64, labels=labels, batch_size=8, chosen=chosen)
        # An int64 per row of the view would take 4 bytes per row of the dataset.
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(labels)
    finally:
        tracemalloc.stop()


def test_random_entropy_is_what_drawing_gives():
    labels = np.repeat(np.arange(5), [10, 20, 30, 40, 900])
    seen = measured(zl.BlockShuffling(1), 1, labels=labels, batch_size=20)
    rng = np.random.default_rng(1)
    drawn = [_entropy(rng.choice(labels, 20, replace=False)) for _ in range(5000)]
    assert seen.random_entropy_bits == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / 50**0.5)


@pytest.mark.parametrize(
    ("sampling", "options", "taking_part"),
    [
        (zl.BlockWeightedSampling(np.ones(20), total_size=500, block_size=4), {}, range(20)),
        (zl.Streaming(indices=[1, 2] * 40), {}, [1, 2]),
    ],
    ids=["weighted", "listed twice"],
)
def test_where_a_minibatch_has_more_rows_than_there_are_random_ones_are_drawn_with_replacement(
    sampling, options, taking_part
):
    labels = np.arange(20) % 3
    seen = measured(sampling, 2, labels=labels, batch_size=32, **options)
    rng = np.random.default_rng(1)
    drawn = [_entropy(labels[rng.choice(taking_part, 32)]) for _ in range(2000)]
    assert seen.random_entropy_bits == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / 1024**0.5)
    assert seen.random_entropy_sd_bits == pytest.approx(np.std(drawn), rel=0.2)
    assert seen.entropy_bits > 0.95 * np.log2(len(set(labels[taking_part])))


def test_every_rank_is_measured_by_itself():
    ranks = [measured(zl.BlockShuffling(64), 64, rank=rank, world_size=2) for rank in range(2)]
    assert ranks[0] != ranks[1]
    assert ranks[0].entropy_bits == pytest.approx(ranks[1].entropy_bits, abs=0.03)


def _entropy(labels) -> float:
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.slow
@settings(deadline=None)
@given(
    n_rows=st.integers(1, 300),
    batch_size=st.integers(1, 12),
    fetch_factor=st.integers(1, 8),
    block_size=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_measures_are_what_slow_counting_gives(n_rows, batch_size, fetch_factor, block_size, seed):
    labels = np.random.default_rng(seed).integers(-1, 4, n_rows)
    sampling = zl.BlockShuffling(min(block_size, batch_size * fetch_factor))
    plan = plan_of(dataset_rows=n_rows, sampling=sampling, batch_size=batch_size, fetch_factor=fetch_factor, seed=seed)
    fetches = map(plan.fetch, range(plan.n_fetches))
    cut = [np.split(fetch.rows[fetch.order], fetch.cuts[1:-1]) for fetch in fetches]
    minibatches = [rows for fetch in cut for rows in fetch if len(rows) == batch_size]
    if not minibatches:
        with pytest.raises(OptionError, match="lower batch_size"):
            zl.quality(labels, plan)
        return
    seen = zl.quality(labels, plan)
    assert seen.minibatches == len(minibatches)
    entropies = [_entropy(labels[rows]) for rows in minibatches]
    assert seen.entropy_bits == pytest.approx(np.mean(entropies), abs=1e-9)
    assert seen.entropy_sd_bits == pytest.approx(np.std(entropies), abs=1e-9)


NAMES = ["a", "b", "c", None]
CODES = np.arange(400) // 7 % 4
NAMED = [NAMES[code] for code in CODES]
LABELS = {
    "codes": np.where(CODES == 3, -1, CODES).astype(">i4"),
    "a list": NAMED,
    "objects": np.array(NAMED, object),
    "objects with NaN": np.array([np.nan if name is None else name for name in NAMED], object),
    "strings": np.array(list(map(str, NAMED))),
    "bytes": np.array(list(map(str, NAMED)), "S"),
    "a Categorical": pd.Categorical(NAMED),
    "a Series": pd.Series(NAMED, index=CODES),
    "a Series of categories": pd.Series(pd.Categorical(NAMED)),
    "a Series of strings": pd.Series(NAMED, dtype="string"),
    "nullable whole numbers": pd.Series(np.where(CODES == 3, None, CODES), dtype="Int64"),
    "an Index": pd.Index(NAMED),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
def test_labels_of_any_kind_are_measured_as_their_codes(labels):
    """Missing labels count as one label."""
    assert measured(zl.BlockShuffling(4), 4, labels=labels, batch_size=8) == measured(
        zl.BlockShuffling(4), 4, labels=CODES, batch_size=8
    )


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.zeros(9, int), r"one label for each of the 10 rows, not an array of shape \(9,\)"),
        (["a"] * 11, r"one label for each of the 10 rows, not an array of shape \(11,\)"),
        (np.zeros((10, 1), int), "one label for each of the 10 rows"),
        (pd.DataFrame({"plate": range(10)}), "one label for each of the 10 rows"),
        ("plate", "one label for each of the 10 rows"),
        (np.append(np.arange(9.0), np.nan), "whole numbers, not float64"),
        (pd.Series(range(10), dtype="Float32"), "whole numbers, not Float32"),
        ([0.5] * 10, "whole numbers, not float64"),
    ],
)
def test_labels_must_be_one_a_row(labels, said):
    plan = plan_of(dataset_rows=10, sampling=zl.Streaming(), batch_size=2, fetch_factor=2)
    with pytest.raises(OptionError, match=said):
        zl.quality(labels, plan)


def test_labels_of_a_view_alone_are_refused():
    plan = plan_of(sampling=zl.Streaming(), chosen=RowSet.of(np.arange(10) < 6), batch_size=2, fetch_factor=2)
    with pytest.raises(OptionError, match="the 6 rows of a view, but the labels of all 10 rows of the whole dataset"):
        zl.quality(list("abcabc"), plan)
    with pytest.raises(OptionError, match="one label for each of the 10 rows"):
        zl.quality(list("abcab"), plan)
    assert zl.quality(list("ababababab"), plan).entropy_bits == 1


def test_what_is_no_plan_is_refused():
    with pytest.raises(OptionError, match=r"measures the plan of an epoch, such as loader\.plan"):
        zl.quality([0, 1], "cell_type")
