"""Coded rows give back the same bits, whatever is in them, and take no more room than they are promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zloader.storage.coded_rows import (
    ALIGNED,
    ENTRY,
    ENTRY_BYTES,
    RAW,
    code_rows,
    most_bytes,
    row_bytes,
    take_genes,
    take_values,
    views_of,
)

pytestmark = pytest.mark.any_version

# Genes and values are coded independently, and a pair takes seconds to compile. Every dtype is in a pair. Those that
# the other tests need come first, and after each third.
PAIRS = (("uint16", "float32"), ("uint8", "int8"), ("uint32", "uint8"), ("int64", "int64"), ("uint32", "uint16"))
PAIRS += (("uint16", "int32"), ("uint32", "float64"), ("int64", "int16"), ("uint8", "uint32"), ("uint8", "uint64"))
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
LENGTHS = (0, 1, 2, 32_766, 32_767, 32_768, 70_000)
ODD_FLOATS = (0.0, -0.0, 0.5, 1.5, -1.0, -0.25, 15.0, 16.0, 255.0, 256.0, 2.0**20 - 1, 2.0**20, 2.0**24 - 1, 2.0**24)
ODD_FLOATS += (2.0**24 + 1, 2.0**31, 2.0**53, 2.0**63, 2.0**64, 1e38, -1e38, np.inf, -np.inf, np.nan, 1e-45)
ODD_WHOLE = (0, 1, 2, 14, 15, 16, 17, 254, 255, 256, 257, 2**12, 2**16 - 1, 2**16, 2**20 - 1, 2**20, 2**20 + 1)
ODD_WHOLE += (2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
ODD_WHOLE += (-1, -2, -128, -(2**15), -(2**31), -(2**63))


class Block:
    """Rows, given as pairs of genes and values, coded into memory that was full of the byte `before`."""

    def __init__(self, rows: list[tuple[np.ndarray, np.ndarray]], *, before: int = 0xA5, gap: int = 3) -> None:
        self.dtypes = rows[0][0].dtype, rows[0][1].dtype
        self.lengths = np.array([len(genes) for genes, _ in rows], np.int64)
        apart = [[array for row in rows for array in (np.full(gap, 77, row[k].dtype), row[k])] for k in (0, 1)]
        starts = np.cumsum(self.lengths + gap) - self.lengths
        itemsizes = sum(dtype.itemsize for dtype in self.dtypes)
        self.most = int(most_bytes(len(rows), int(self.lengths.sum()), itemsizes))
        # More than the promised room, to see that the rest is not touched.
        self.memory = np.full((self.most + 64) // 8, before, np.uint64).view(np.uint8)
        self.memory[:] = before
        self.entries = np.zeros(len(rows), ENTRY)
        views = views_of(self.memory, *self.dtypes)
        of_genes, of_values = (np.concatenate(each) for each in apart)
        self.n_bytes = code_rows(of_genes, of_values, (starts, starts), self.lengths, self.entries, views)
        self.memory[: self.entries.nbytes] = self.entries.view(np.uint8)
        assert self.n_bytes <= self.most
        assert (self.memory[self.n_bytes :] == before).all()

    @property
    def heads(self) -> np.ndarray:
        return self.entries["offset"].astype(np.int64)

    def row(self, number: int, *dtypes: Any) -> tuple[np.ndarray, np.ndarray]:
        """The decoded row, in the stored dtypes or others."""
        genes, values = (np.full(self.lengths[number], 99, dtype) for dtype in dtypes or self.dtypes)
        views = views_of(self.memory[: self.n_bytes], *self.dtypes)
        head = int(self.heads[number])
        take_values(views, head, take_genes(views, head, genes), values)
        return genes, values


def check(rows: list[tuple[np.ndarray, np.ndarray]]) -> Block:
    block = Block(rows)
    assert block.entries["length"].tolist() == block.lengths.tolist()
    first = -(-len(rows) * ENTRY_BYTES // ALIGNED) * ALIGNED
    assert block.heads[0] == first
    sizes = row_bytes(views_of(block.memory[: block.n_bytes], *block.dtypes), block.heads, block.lengths)
    np.testing.assert_array_equal(block.heads + sizes, np.append(block.heads[1:], block.n_bytes))
    assert not (block.heads % ALIGNED).any()
    for number, wanted in enumerate(rows):
        for found, part in zip(block.row(number), wanted, strict=True):
            assert found.dtype == part.dtype
            assert found.tobytes() == part.tobytes()
    return block


def is_raw(block: Block, number: int, part: int) -> bool:
    """Whether the genes (0) or the values (1) of a row are as they were."""
    at = int(block.heads[number]) + 2 * part
    return int(block.memory[at : at + 2].view("<u2")[0]) == RAW


def values_in(dtype: str) -> st.SearchStrategy[Any]:
    """Values of a dtype: mostly small whole numbers, and odd ones."""
    of = np.dtype(dtype)
    if of.kind == "f":
        with np.errstate(all="ignore"):
            odd = [float(of.type(value)) for value in ODD_FLOATS]
        return st.integers(0, 20) | st.sampled_from(odd) | st.floats(width=8 * of.itemsize)
    least, most = np.iinfo(of).min, np.iinfo(of).max
    odd = [value for value in ODD_WHOLE if least <= value <= most]
    return st.integers(0, 20) | st.integers(0, min(300, most)) | st.sampled_from(odd) | st.integers(least, most)


def genes_in(dtype: str, length: int) -> st.SearchStrategy[np.ndarray]:
    """Genes that ascend, with steps of all sizes, or that are in any order, repeated too."""
    most = np.iinfo(dtype).max
    steps = st.integers(0, 3) | st.integers(0, 600) | st.sampled_from([255, 256, 2**16, 2**24 - 1, 2**24, 2**40])
    ascending = st.lists(steps, min_size=length, max_size=length).map(
        lambda found: np.minimum(np.cumsum(np.array(found, np.int64)), most).astype(dtype)
    )
    return ascending | arrays.arrays(dtype, length, elements=st.integers(0, most))


@st.composite
def some_rows(draw: st.DrawFn, pair: tuple[str, str]) -> list[tuple[np.ndarray, np.ndarray]]:
    genes, values = pair
    of_values = values_in(values)
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    rows = []
    for length in lengths:
        found = draw(st.lists(of_values, min_size=length, max_size=length))
        rows.append((draw(genes_in(genes, length)), np.array(found, values)))
    return rows


@pytest.mark.slow
@EVERY_PAIR
@given(data=st.data(), gap=st.integers(0, 3))
def test_rows_have_the_same_bits_after_decoding(pair, data, gap):
    """And the same rows are the same bytes, alone or beside others.

    So processes that write a block at the same time do no harm, and nothing of the memory before gets into the file.
    """
    rows = data.draw(some_rows(pair))
    whole, other = check(rows), Block(rows, before=0xFF, gap=gap)
    np.testing.assert_array_equal(whole.memory[: whole.n_bytes], other.memory[: other.n_bytes])
    for begin, row in zip(whole.heads.tolist(), rows, strict=True):
        alone = Block([row], gap=gap, before=0)
        size = alone.n_bytes - ENTRY_BYTES
        np.testing.assert_array_equal(
            whole.memory[begin : begin + size], alone.memory[ENTRY_BYTES : ENTRY_BYTES + size]
        )


LEAST = {"small": 1, "some large": 1, "beyond a byte": 256, "beyond 20 bits": 2**20, "odd": 0}


def long_values(dtype: str, length: int, kind: str, seed: int) -> np.ndarray:
    """Values of which all are small, or some or all are exceptions from the low bits, or some are odd."""
    chance, of = np.random.default_rng(seed), np.dtype(dtype)
    highest = 2**24 if of.kind == "f" else int(np.iinfo(of).max)
    least = LEAST[kind] if LEAST[kind] <= highest else 0
    values = chance.integers(least, min(highest, 2**24 - 1, max(least, 14) + 1), length, endpoint=True)
    with np.errstate(all="ignore"):
        values = values.astype(of)
    if kind in ("some large", "odd") and length:
        some = chance.integers(0, length, 1 + length // 50)
        values[some] = min(highest, 70_000)
    if kind == "odd" and length:
        values[-1] = np.nan if of.kind == "f" else np.iinfo(of).min
    return values


def long_genes(dtype: str, length: int, seed: int) -> np.ndarray:
    steps = np.random.default_rng(seed).integers(0, 3, length)
    if np.dtype(dtype).itemsize > 2:
        steps[::97] += 300
    genes = np.cumsum(steps)
    return genes.astype(dtype) if genes.max(initial=0) <= np.iinfo(dtype).max else genes.astype(dtype) % 251


@pytest.mark.every(3)
@EVERY_PAIR
def test_rows_of_all_lengths(pair):
    genes, values = pair
    for kind in LEAST:
        of_values = [long_values(values, length, kind, length) for length in LENGTHS]
        check([(long_genes(genes, len(some), 1), some) for some in of_values])


@pytest.mark.parametrize(("genes", "values"), [("int64", "int64"), ("uint32", "float64")])
@pytest.mark.parametrize("length", [32_765, 32_766, 32_767, 32_768])
def test_a_row_of_which_every_value_is_an_exception_does_not_pass_for_raw(genes, values, length):
    row = np.arange(length).astype(genes), (np.arange(length) + 2**20).astype(values)
    every_step = np.cumsum(np.full(length, 256)).astype(genes), row[1]
    block = check([row, every_step])
    assert is_raw(block, 0, 1) == (length > 32_766)
    assert is_raw(block, 1, 0) == (length > 32_766 or genes == "uint32")  # which would not be shorter


@pytest.mark.parametrize(
    ("values", "coded"),
    [
        ([1, 2, 3, 15] * 3, True),
        ([16] * 12, True),
        ([0.0] * 12, True),
        ([1, 2, 3, -0.0] * 3, False),
        ([1, 2, 3, 0.5] * 3, False),
        ([1, 2, 3, np.nan] * 3, False),
        ([1, 2, 3, np.inf] * 3, False),
        ([1, 2, 3, -1] * 3, False),
        ([1] * 11 + [2**20 - 1], True),
        ([1] * 11 + [2**20], True),
        ([1] * 11 + [2**24 - 1], True),
        ([1] * 11 + [2**24], False),
        ([1] * 11 + [2.0**63], False),
        ([1] * 11 + [2.0**64], False),
    ],
)
@pytest.mark.parametrize(("genes", "dtype"), [("uint16", "float32"), ("uint32", "float64")])
def test_whole_floats_are_coded_and_others_are_not(values, coded, genes, dtype):
    block = check([(np.arange(12).astype(genes), np.array(values, dtype))])
    assert is_raw(block, 0, 1) != coded
    assert not is_raw(block, 0, 0)


def test_genes_that_do_not_ascend_are_raw_and_repeated_ones_are_not():
    ones = np.ones(8, np.float32)
    repeated, descending = np.array([3, 3, 3, 4, 4, 9, 9, 9], np.uint16), np.arange(8, dtype=np.uint16)[::-1].copy()
    block = check([(repeated, ones), (descending, ones)])
    assert [is_raw(block, number, 0) for number in range(2)] == [False, True]


@example(exceptions=[0, 1], length=2)
@example(exceptions=[], length=1)
@example(exceptions=list(range(64)), length=64)
@given(exceptions=st.lists(st.integers(0, 63), max_size=20), length=st.integers(1, 64))
def test_exceptions_anywhere_in_a_row(exceptions, length):
    """Values of 1, 2 and 4 bytes in one row, and steps of 1 and 3 bytes."""
    some = [at for at in sorted(set(exceptions)) if at < length]
    genes, values = np.ones(length, np.int64), np.full(length, 3, np.int64)
    genes[some], values[some] = 70_000, np.resize([16, 255, 256, 65_535, 65_536, 2**20 - 1, 2**24 - 1], len(some))
    check([(np.cumsum(genes).astype(np.uint32), values.astype(np.float64))] * 2)
    check([(np.cumsum(genes), values)])


@pytest.mark.parametrize("wider", [("int32", "float64"), ("int64", "float64")])
def test_rows_are_decoded_into_wider_dtypes(wider):
    values = [[7, 300, 70_000], [2.5, np.inf, -0.0], [1, 2, 3]]
    rows = [(np.array([1, 2, 2], np.uint16), np.array(some, np.float32)) for some in values]
    block = check([*rows, (np.array([9, 2, 5], np.uint16), np.array([1, 2, 2**24], np.float32))])
    for number, (genes, some) in enumerate(rows):
        found = block.row(number, *wider)
        assert found[0].tolist() == genes.tolist()
        assert found[1].tobytes() == some.astype(np.float64).tobytes()


@pytest.mark.parametrize(("genes", "values"), [("uint16", "float32"), ("int64", "int64"), ("uint32", "float64")])
def test_counts_of_mostly_ones_take_less_than_two_bytes_each(genes, values):
    chance = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        some = np.flatnonzero(chance.random(30_000) < 0.07).astype(genes)
        rows.append((some, np.minimum(chance.geometric(0.7, len(some)), 120).astype(values)))
    block = check(rows)
    assert block.n_bytes < 1.7 * block.lengths.sum()


def test_a_block_of_empty_rows_has_only_its_table_and_heads():
    empty = np.empty(0, np.uint16), np.empty(0, np.float32)
    block = check([empty] * 5)
    assert block.n_bytes == 5 * (ENTRY_BYTES + 8)
