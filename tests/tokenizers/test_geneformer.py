"""Geneformer's tokens equal those of a function that makes them one cell at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizing import SPECIAL, csr, geneformer_cell

import zloader as zl
from zloader.common.errors import OptionError

pytestmark = pytest.mark.any_version

NAMES = [f"ENSG{number}" for number in range(12)]
TOKENS = SPECIAL | {name: 10 + 3 * number for number, name in enumerate(NAMES[:9])}  # three genes are unknown
MEDIANS = dict(zip(NAMES, [1.0, 1.0, 2.0, 0.5, 1.0, 3.0, 0.3, 1.0, 2.0, 1, 1, 1], strict=True))
V1 = {"version": "v1"}
V2 = {"version": "v2"}


def tokens_of(rows, names=NAMES, *, totals=None, **options):
    """The tokens of rows, padded."""
    made = zl.tokenizers.Geneformer(TOKENS, MEDIANS, **options).bind(names, "X of cells.zarr")
    rows = np.asarray(rows, np.float32) if not isinstance(rows, np.ndarray) else rows
    return made.rows(csr(rows), np.arange(len(rows)), totals).cut(0, len(rows))


def unpadded(tokens, row):
    n = tokens.lengths[row]
    assert tokens.attention_mask[row].tolist() == [place < n for place in range(tokens.input_ids.shape[1])]
    assert (tokens.input_ids[row, n:] == 0).all()
    assert (tokens.values[row, n:] == 0).all()
    return tokens.input_ids[row, :n].tolist(), tokens.values[row, :n].tolist()


def row(**counts):
    return [counts.get(f"g{number}", 0) for number in range(12)]


# Worked out by hand: the total is that of all genes, 10 000 / 10 = 1 000 per count.
GOLDEN = {
    "by value": (row(g0=2, g2=8), [16, 10], [4000.0, 2000.0]),
    "median above count": (row(g0=2, g3=3, g5=5), [19, 10, 25], [6000.0, 2000.0, 5000 / 3]),
    "ties by gene": (row(g7=2, g0=2, g4=2, g1=2, g9=2), [10, 13, 22, 31], [2000.0] * 4),
    "unknown genes count in the total": (row(g0=5, g10=5), [10], [5000.0]),
    "one gene": (row(g4=10), [22], [10_000.0]),
    "empty": (row(), [], []),
    "unknown genes only": (row(g9=1, g11=9), [], []),
}


@pytest.mark.parametrize(("counts", "ids", "values"), GOLDEN.values(), ids=GOLDEN)
def test_golden_rows(counts, ids, values):
    found_ids, found = unpadded(tokens_of([counts], **V1), 0)
    assert found_ids == ids
    np.testing.assert_allclose(found, values, rtol=1e-7)
    with_special = unpadded(tokens_of([counts], **V2), 0)
    assert with_special == ([2, *ids, 3], [0.0, *found, 0.0])


@pytest.mark.parametrize(("version", "max_length", "kept"), [("v1", 3, 3), ("v1", 1, 1), ("v2", 4, 2), ("v2", 3, 1)])
def test_longer_rows_are_cut_to_the_genes_of_highest_value(version, max_length, kept):
    counts = row(g0=1, g1=2, g4=3, g7=4)
    ids, _ = unpadded(tokens_of([counts], version=version, max_length=max_length), 0)
    genes = [31, 22, 13, 10][:kept]
    assert ids == (genes if version == "v1" else [2, *genes, 3])


def test_lengths_are_those_of_the_models():
    rows = np.ones((1, 5000), np.float32)
    names = [f"g{number}" for number in range(5000)]
    for version, length in (("v1", 2048), ("v2", 4096)):
        made = zl.tokenizers.Geneformer(
            SPECIAL | {name: 4 + k for k, name in enumerate(names)}, dict.fromkeys(names, 1.0), version=version
        )
        ids = made.bind(names, "X of cells.zarr").rows(csr(rows), np.arange(1), None).cut(0, 1).input_ids
        assert ids.shape == (1, length)
        assert ids.dtype == np.int64


def test_genes_of_one_token_are_summed():
    names = ["ENSG3", "ENSG0", "ENSG3", None, "ENSG4"]
    tokens = tokens_of([[1, 2, 3, 4, 0], [0, 2, 1, 0, 2]], names, **V1)
    assert unpadded(tokens, 0) == ([19, 10], [8000.0, 2000.0])
    # A summed gene is in the place of the first of its columns, also for ties.
    assert unpadded(tokens, 1)[0] == [19, 10, 22]


def test_genes_are_looked_up_in_capitals_and_in_a_mapping():
    assert unpadded(tokens_of([[1, 2]], ["ensg0", "x"], **V1), 0)[0] == [10]
    mapping = {"x": "ENSG1", "ENSG5": "ENSG2", "gone": "ENSG99"}
    assert unpadded(tokens_of([[1, 2, 3]], ["ENSG5", "x", "gone"], gene_mapping=mapping, **V1), 0)[0] == [13, 16]


def test_totals_from_obs_change_values_but_no_order():
    rows = [row(g0=2, g2=8), row(), row(g1=1)]
    tokens = tokens_of(rows, totals=np.array([20, 0, 1]), **V1)
    assert unpadded(tokens, 0) == ([16, 10], [2000.0, 1000.0])
    with pytest.raises(OptionError, match="'total' holds 0 in row 2 of the dataset, which has counts"):
        tokens_of(rows, totals=np.array([20, 1, 0]), n_counts="total", **V1)


@pytest.mark.parametrize("wrong", [-1, np.nan, np.inf])
def test_values_that_are_no_counts_name_their_row(wrong):
    rows = [row(g0=1), row(g1=2, g10=wrong)]
    with pytest.raises(OptionError, match=rf"X of cells.zarr holds {float(wrong)} in row 1 of the dataset.*x='raw/X'"):
        tokens_of(rows)


def test_padding_is_as_asked():
    tokens = tokens_of([row(g0=1), row()], max_length=6, pad_to=8, dtype="int32", pad=7, cls="<cls>", eos=None)
    assert tokens.input_ids.dtype == np.int32
    assert tokens_of([row(g0=1)], dtype=np.int32).input_ids.dtype == np.int32
    assert tokens.input_ids.tolist() == [[2, 10, 7, 7, 7, 7, 7, 7], [2, 7, 7, 7, 7, 7, 7, 7]]
    assert tokens.lengths.tolist() == [2, 1]
    assert tokens_of([row(), row()], **V1).input_ids.shape == (2, 0)


whole = st.integers(0, 6)
fractions = st.one_of(st.just(0.0), st.floats(0, 1e6, width=32))


@given(
    rows=arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(12)), elements=st.one_of(whole, fractions)),
    max_length=st.integers(3, 14),
    special=st.booleans(),
    names=st.permutations(NAMES),
    repeated=st.integers(0, 11),
)
def test_rows_equal_those_made_one_at_a_time(rows, max_length, special, names, repeated):
    names = [names[0] if position == repeated else name for position, name in enumerate(names)]
    tokens = tokens_of(rows, names, version="v2" if special else "v1", max_length=max_length)
    for number, counts in enumerate(rows):
        ids, values = geneformer_cell(counts, names, TOKENS, MEDIANS, max_length=max_length, special=special)
        found_ids, found = unpadded(tokens, number)
        assert found_ids == ids
        np.testing.assert_array_equal(found, np.float32(values))


@pytest.mark.parametrize("spread", [0.0, 1e-15, 1e-12, 1e-6, 1.0, 300.0], ids=lambda spread: f"spread {spread}")
def test_long_rows_are_sorted_by_all_bits(spread):
    """Values that differ in few bits, or in nearly all."""
    rng = np.random.default_rng(0)
    names = [f"g{number}" for number in range(3000)]
    # From small to large, the worst order for the insertion of values that are equal in their first bits.
    medians = dict(zip(names, np.sort(np.exp(spread * rng.random(3000)))[::-1].tolist(), strict=True))
    tokens = SPECIAL | {name: 4 + number for number, name in enumerate(names)}
    counts = np.ones((1, 3000), np.float32)
    made = zl.tokenizers.Geneformer(tokens, medians, version="v1", max_length=3000).bind(names, "X of cells.zarr")
    ids = made.rows(csr(counts), np.arange(1), None).cut(0, 1).input_ids[0].tolist()
    assert ids == geneformer_cell(counts[0], names, tokens, medians, max_length=3000, special=False)[0]


WRONG = {
    "version": ({"version": "v3"}, "version must be one of 'v1', 'v2', not 'v3'"),
    "room": ({"max_length": 2}, "max_length=2 leaves no room for a gene beside the special"),
    "pad_to": ({"pad_to": 100}, "pad_to=100 is shorter than rows of max_length=4096 tokens"),
    "dtype": ({"dtype": "int8"}, "dtype must be one of 'int64', 'int32', not 'int8'"),
    "pad name": ({"pad": "<padd>"}, "the vocabulary has no '<padd>'.*Did you mean '<pad>'"),
    "pad": ({"pad": None}, "pad must be the name or the id of a token, not None"),
    "cls": ({"cls": -3}, "the vocabulary has no -3, which is the default or chosen cls token"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        zl.tokenizers.Geneformer(TOKENS, MEDIANS, **options)


def test_missing_medians_are_refused():
    medians = dict.fromkeys(NAMES[:7], 1.0)
    made = zl.tokenizers.Geneformer(TOKENS, medians)
    with pytest.raises(OptionError, match=r"gene_medians lacks 2 of the 9 genes that X of cells.zarr and the token"):
        made.bind(NAMES, "X of cells.zarr")
