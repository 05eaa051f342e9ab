"""scGPT's tokens equal those of a function that makes them one cell at a time, with np.quantile and np.digitize."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizing import csr, scgpt_cell

import zloader as zl
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

NAMES = [f"gene {number}" for number in range(30)]
VOCABULARY = {"<pad>": 0, "<cls>": 1, "<eoc>": 2} | {name: 5 + number for number, name in enumerate(NAMES[:25])}


def tokens_of(rows, *, seed=0, epoch=0, numbers=None, names=NAMES, **options):
    """The tokens of rows, padded, and the numbers of these rows in the dataset."""
    made = zl.tokenizers.ScGPT(VOCABULARY, **options).bind(names, "X of cells.zarr").at(seed, epoch)
    rows = np.asarray(rows)
    numbers = np.arange(len(rows)) if numbers is None else np.asarray(numbers)
    return made.rows(csr(rows), numbers, None).cut(0, len(rows))


def unpadded(tokens, row):
    n = tokens.lengths[row]
    assert tokens.attention_mask[row].tolist() == [place < n for place in range(tokens.input_ids.shape[1])]
    assert (tokens.input_ids[row, n:] == 0).all()
    assert (tokens.values[row, n:] == -2).all()
    return tokens.input_ids[row, :n].tolist(), tokens.values[row, :n].tolist()


def counts_of(*counts):
    return np.array([*counts, *[0] * (30 - len(counts))], np.float32)


# Five bins have four edges: the least value, two between, and the greatest value.
GOLDEN = {
    "distinct": (counts_of(1, 2, 3, 4), [1, 2, 3, 4]),
    "zeros are left out": (counts_of(0, 4, 0, 1, 3, 2), [4, 1, 3, 2]),
    "ties take the last bin": (counts_of(1, 1, 1, 1, 9), [3, 3, 3, 3, 4]),
    "one value": (counts_of(7), [4]),
    "equal values": (counts_of(5, 5), [4, 4]),
    "empty": (counts_of(), []),
    "fractions": (counts_of(0.5, 0.25, 0.75, 1.0), [2, 1, 3, 4]),
    "large": (counts_of(5000, 1e6, 2, 70_000), [2, 4, 1, 3]),
}


@pytest.mark.parametrize(("counts", "bins"), GOLDEN.values(), ids=GOLDEN)
def test_golden_bins(counts, bins):
    ids, values = unpadded(tokens_of([counts], n_bins=5, side="one"), 0)
    assert ids == [1, *(5 + np.flatnonzero(counts)).tolist()]
    assert values == [0, *bins]


def test_genes_outside_the_vocabulary_are_left_out():
    counts = np.zeros(30, np.float32)
    counts[[3, 26, 27]] = [1, 50, 60]
    assert unpadded(tokens_of([counts], n_bins=None), 0) == ([1, 8], [0, 10_000])
    counts[3] = 0
    assert unpadded(tokens_of([counts]), 0) == ([1], [0])


OPTIONS = {
    "n_bins": st.sampled_from([None, 2, 3, 5, 51]),
    "max_length": st.integers(2, 30),
    "normalize": st.sampled_from([1e4, 1.0, None]),
    "log1p": st.booleans(),
    "sample": st.booleans(),
    "side": st.sampled_from(["both", "one"]),
}
whole = st.integers(0, 5)
fractions = st.one_of(st.just(0.0), st.floats(0.125, 1e6, width=32))


@given(
    rows=st.one_of(
        *[
            arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(30)), elements=of)
            for of in (whole, fractions)
        ]
    ),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_rows_equal_those_made_one_at_a_time(rows, seed, epoch, options):
    numbers = 1000 + 7 * np.arange(len(rows))
    tokens = tokens_of(rows, seed=seed, epoch=epoch, numbers=numbers, **options)
    for at, counts in enumerate(rows):
        where = {"seed": seed, "epoch": epoch, "row": int(numbers[at])}
        ids, values = scgpt_cell(counts, NAMES, VOCABULARY, **options, **where)
        found_ids, found = unpadded(tokens, at)
        assert found_ids == ids
        np.testing.assert_array_equal(found, np.float32(values))


@pytest.mark.parametrize("kind", ["counts", "floats"])
def test_bins_of_long_rows(kind):
    """As many values as cells have, where edges fall on values and between them."""
    rng = np.random.default_rng(1)
    names = [f"g{number}" for number in range(3000)]
    vocabulary = {"<pad>": 0, "<cls>": 1} | {name: 2 + number for number, name in enumerate(names)}
    rows = np.zeros((20, 3000), np.float32)
    for number in range(20):
        n = int(rng.integers(1, 3000))
        drawn = rng.geometric(0.5, n) if kind == "counts" else rng.gamma(2.0, size=n)
        rows[number, rng.choice(3000, n, replace=False)] = drawn
    made = zl.tokenizers.ScGPT(vocabulary, max_length=3001).bind(names, "X of cells.zarr")
    tokens = made.rows(csr(rows), np.arange(20), None).cut(0, 20)
    for number in range(20):
        ids, values = scgpt_cell(rows[number], names, vocabulary, max_length=3001, row=number)
        assert unpadded(tokens, number) == (ids, values)


def test_every_gene_is_sampled_equally_often():
    counts = np.ones((4000, 25), np.float32)
    tokens = tokens_of(counts, names=NAMES[:25], max_length=11)
    assert (tokens.lengths == 11).all()
    assert (np.diff(tokens.input_ids[:, 1:], axis=1) > 0).all()
    times = np.bincount(tokens.input_ids[:, 1:].ravel() - 5, minlength=25)
    assert abs(times - 1600).max() < 5 * np.sqrt(4000 * 0.4 * 0.6)


def test_random_bins_are_drawn_equally_often():
    tokens = tokens_of(np.ones((500, 20), np.float32), names=NAMES[:20])
    times = np.bincount(tokens.values[:, 1:].ravel().astype(int), minlength=51)
    assert times[0] == 0
    assert abs(times[1:] - 200).max() < 5 * np.sqrt(200)


def test_random_choices_depend_on_seed_epoch_and_row_only():
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 4, (40, 30)).astype(np.float32)
    options = {"max_length": 12}
    one = tokens_of(rows, **options)
    order = rng.permutation(40)
    other = tokens_of(rows[order], numbers=order, **options)
    np.testing.assert_array_equal(other.input_ids, one.input_ids[order])
    np.testing.assert_array_equal(other.values, one.values[order])
    for changed in ({"seed": 1}, {"epoch": 1}, {"numbers": np.arange(40) + 1}):
        assert (tokens_of(rows, **options, **changed).input_ids != one.input_ids).any()


def test_special_tokens_and_padding_are_as_asked():
    rows = [counts_of(1, 2), counts_of()]
    tokens = tokens_of(rows, n_bins=3, max_length=5, cls=None, eos="<eoc>", pad=9_999, pad_value=0, pad_to=6)
    assert tokens.input_ids.tolist() == [[5, 6, 2, *[9_999] * 3], [2, *[9_999] * 5]]
    assert tokens.values.tolist() == [[1, 2, 0, 0, 0, 0], [0] * 6]
    assert tokens.lengths.tolist() == [3, 1]


def test_a_gene_that_a_row_has_twice_is_summed_and_one_of_two_columns_is_not():
    made = zl.tokenizers.ScGPT(VOCABULARY, n_bins=None, normalize=None).bind(
        ["gene 3", "gene 1", "gene 3"], "X of cells.zarr"
    )
    x = csr([[1, 2, 4]])
    tokens = made.rows(x, np.arange(1), None).cut(0, 1)
    assert (tokens.input_ids.tolist(), tokens.values.tolist()) == ([[1, 8, 6, 8]], [[0, 1, 2, 4]])
    x.indices[:] = [1, 0, 1]
    tokens = made.rows(x, np.arange(1), None).cut(0, 1)
    assert (tokens.input_ids.tolist(), tokens.values.tolist()) == ([[1, 8, 6]], [[0, 2, 5]])


@pytest.mark.parametrize("wrong", [-0.5, np.nan, np.inf])
def test_values_that_are_no_counts_name_their_row(wrong):
    rows = [counts_of(1), counts_of(1, wrong)]
    with pytest.raises(OptionError, match=rf"X of cells.zarr holds {float(wrong)} in row 77 of the dataset"):
        tokens_of(rows, numbers=[76, 77])


WRONG = {
    "max_length": ({"max_length": 1}, "max_length=1 leaves no room for a gene beside the special"),
    "normalize": ({"normalize": 0}, "normalize must be a number above 0 or None, not 0"),
    "infinite": ({"normalize": float("inf")}, "normalize must be a finite number, not inf"),
    "log1p": ({"log1p": "yes"}, "log1p must be True or False, not 'yes'"),
    "sample": ({"sample": None}, "sample must be True or False, not None"),
    "side": ({"side": "left"}, "side must be one of 'both', 'one', not 'left'"),
    "pad_value": ({"pad_value": None}, "pad_value must be a finite number, not None"),
    "cls": ({"cls": "[CLS]"}, "vocabulary has no '.CLS.'"),
    "pad": ({"pad": None}, "pad must be the name or the id of a token, not None"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        zl.tokenizers.ScGPT(VOCABULARY, **options)


def test_a_special_token_with_the_id_of_a_gene_is_refused():
    made = zl.tokenizers.ScGPT(VOCABULARY, pad=5)
    with pytest.raises(OptionError, match="pad has the id 5, and so has the gene 'gene 0'"):
        made.bind(NAMES, "X of cells.zarr")
