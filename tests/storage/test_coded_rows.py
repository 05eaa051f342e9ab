"""Rows in blocks, raw or coded, give back the same bits, and take no more room than they are promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zloader.reading.gather import SourceRows
from zloader.reading.matrix_reader import packed
from zloader.storage.coded_rows import ALIGNED, ENTRY_BYTES, HEAD_BYTES, RAW, take_genes, take_values, words_of
from zloader.storage.row_blocks import KeptRows, RowForm, begun_blocks, bounds_of, places_of

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

Row = tuple[np.ndarray, np.ndarray]  # genes and values


class Packed:
    """Rows packed into blocks, in memory that was full of the byte `before`.

    In the source, `gap` other elements are before each row. `block_rows` are all rows unless given.
    """

    def __init__(
        self, rows: list[Row], *, coded: bool = True, block_rows: int = 0, before: int = 0xA5, gap: int = 3
    ) -> None:
        genes, values = (part.dtype for part in rows[0])
        self.form = form_of(len(rows), genes, values, block_rows=block_rows or len(rows), coded=coded)
        self.lengths = np.array([len(genes) for genes, _ in rows], np.int64)
        starts = np.cumsum(self.lengths + gap) - self.lengths
        apart = [[array for row in rows for array in (np.full(gap, 77, row[k].dtype), row[k])] for k in (0, 1)]
        of_genes, of_values = (np.concatenate(each) for each in apart)
        self.sums = np.arange(len(rows)) - 0.5
        most = self.form.most_bytes(len(rows), int(self.lengths.sum()))
        # More than the promised room, to see that the rest is not touched.
        self.memory = np.full(most // ALIGNED + 9, before, np.uint64).view(np.uint8)
        self.memory[:] = before
        source = SourceRows(
            at=slice(None), genes=of_genes, values=of_values, starts=(starts, starts), lengths=self.lengths
        )
        self.ends = packed(self.form, source, self.sums, self.memory)
        self.begins = np.append(0, self.ends)[:-1]
        self.n_bytes = int(self.ends[-1])
        assert self.n_bytes <= most
        assert (self.memory[self.n_bytes :] == before).all()

    @property
    def content(self) -> np.ndarray:
        return self.memory[: self.n_bytes]

    @property
    def kept(self) -> KeptRows:
        blocks, within = np.divmod(np.arange(len(self.lengths)), self.form.block_rows)
        return places_of(self.form, self.content, self.begins[blocks], within)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        blocks, within = np.divmod(np.arange(len(self.lengths)), self.form.block_rows)
        return bounds_of(self.form, self.content, self.begins[blocks], self.ends[blocks], within)

    def table(self, block: int) -> np.ndarray:
        """The entries of a block: the first byte, the length and the sum of each row."""
        content = self.content[self.begins[block] :][: self.form.block_rows * ENTRY_BYTES]
        return content.view([("offset", "<u8"), ("length", "<u8"), ("sum", "<f8")])

    @property
    def starts(self) -> np.ndarray:
        """The first byte of each row."""
        begins = [begin + self.table(block)["offset"].astype(int) for block, begin in enumerate(self.begins)]
        return np.concatenate(begins)[: len(self.lengths)]

    def heads(self, number: int) -> list[int]:
        """The two numbers in the head of a row."""
        at = int(self.starts[number])
        return self.content[at : at + HEAD_BYTES].view("<u2").tolist()

    def row(self, number: int, *dtypes: Any) -> Row:
        """The decoded row, in the stored dtypes or others."""
        genes, values = (np.full(self.lengths[number], 99, dtype) for dtype in dtypes or self.form.dtypes)
        views, head = self.kept.coded, int(self.starts[number])
        take_values(views, head, take_genes(views, head, genes), values)
        return genes, values

    def raw_row(self, number: int) -> Row:
        """The row as it lies in memory, which is raw."""
        n, kept = self.lengths[number], self.kept
        parts = zip((kept.genes, kept.values), kept.starts, strict=True)
        genes, values = (part[at[number] : at[number] + n] for part, at in parts)
        return genes, values

    def end(self, number: int) -> int:
        """The byte after a row, from its head alone."""
        n, at = int(self.lengths[number]), int(self.starts[number]) + HEAD_BYTES
        for part, (head, dtype) in enumerate(zip(self.heads(number), self.form.dtypes, strict=True)):
            if head == RAW:
                at = -(-at // dtype.itemsize) * dtype.itemsize + n * dtype.itemsize
            else:
                at += (n if part == 0 or head & 0x8000 else (n + 1) // 2) + 4 * (head & 0x7FFF)
        return -(-at // ALIGNED) * ALIGNED


def form_of(n_rows: int, genes: Any, values: Any, *, block_rows: int, coded: bool = False, width: int = 0) -> RowForm:
    return RowForm(
        name="X", n_rows=n_rows, block_rows=block_rows, genes=None if genes is None else np.dtype(genes),
        values=np.dtype(values), width=width, coded=coded, decoded_bytes=0,
    )  # fmt: skip


def check(rows: list[Row], **options: Any) -> Packed:
    block = Packed(rows, **options)
    kept, size, raw = block.kept, block.form.block_rows, not block.form.coded
    assert len(block.ends) == -(-len(rows) // size)
    assert kept.lengths.tolist() == block.lengths.tolist()
    assert kept.totals.tolist() == block.sums.tolist()
    last = (len(block.ends) - 1) * size
    assert not block.table(-1)[len(rows) - last :].tobytes().strip(b"\0")
    # Rows lie one after another.
    firsts = np.arange(len(rows)) % size == 0
    ends = np.array([block.end(number) for number in range(len(rows))])
    np.testing.assert_array_equal(block.starts[firsts], block.begins + size * ENTRY_BYTES)
    np.testing.assert_array_equal(block.starts[~firsts], ends[:-1][~firsts[1:]])
    np.testing.assert_array_equal(ends[np.append(firsts[1:], True)], block.ends)
    np.testing.assert_array_equal(block.bounds, [block.starts, ends])
    assert not (block.starts % ALIGNED).any()
    for number, wanted in enumerate(rows):
        assert not raw or block.heads(number) == [RAW, RAW]
        for found, part in zip(block.raw_row(number) if raw else block.row(number), wanted, strict=True):
            assert found.dtype == part.dtype
            assert found.tobytes() == part.tobytes()
    return block


def is_raw(block: Packed, number: int, part: int) -> bool:
    """Whether the genes (0) or the values (1) of a row are as they were."""
    return block.heads(number)[part] == RAW


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
def some_rows(draw: st.DrawFn, pair: tuple[str, str]) -> list[Row]:
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
@pytest.mark.parametrize("coded", [True, False], ids=["coded", "raw"])
@given(data=st.data(), gap=st.integers(0, 3), block_rows=st.integers(1, 7))
def test_rows_have_the_same_bits_after_decoding(pair, coded, data, gap, block_rows):
    """And the same rows are the same bytes, alone or beside others.

    So processes that write a block at the same time do no harm, and nothing of the memory before gets into the file.
    """
    rows = data.draw(some_rows(pair))
    whole = check(rows, coded=coded, block_rows=block_rows)
    other = Packed(rows, coded=coded, block_rows=block_rows, before=0xFF, gap=gap)
    np.testing.assert_array_equal(whole.content, other.content)
    for number, row in enumerate(rows):
        begin, end = int(whole.starts[number]), whole.end(number)
        alone = Packed([row], coded=coded, gap=gap, before=0)
        np.testing.assert_array_equal(whole.content[begin:end], alone.content[ENTRY_BYTES:])


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
        rows = [(long_genes(genes, len(some), 1), some) for some in of_values]
        for options in ({}, {"block_rows": 3}, {"coded": False}, {"coded": False, "block_rows": 3}):
            check(rows, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("values", ["bool", "int8", "uint16", "float16", "float32", "uint64", "float64"])
@pytest.mark.parametrize("genes", ["uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("block_rows", [1, 4, 13, 32])
def test_raw_rows_of_values_of_all_sizes(values, genes, block_rows):
    chance = np.random.default_rng(block_rows)
    rows = []
    for length in [0, 1, 2, 3, 0, 0, 5, 7, 40, 1, 0, 9, 0]:
        bits = chance.integers(0, 2 if values == "bool" else 256, length * np.dtype(values).itemsize, np.uint8)
        rows.append((chance.integers(0, 200, length).astype(genes), bits.view(values)))
    whole = check(rows, coded=False, block_rows=block_rows)
    for before in (0, 0xFF):
        other = Packed(rows, coded=False, block_rows=block_rows, before=before, gap=0)
        np.testing.assert_array_equal(whole.content, other.content)


@pytest.mark.parametrize("values", ["bool", "int8", "uint16", "float16", "float32", "int64"])
@pytest.mark.parametrize("width", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("block_rows", [1, 4, 11, 32])
def test_dense_rows_are_their_values_alone(values, width, block_rows):
    n_rows, dtype = 11, np.dtype(values)
    bits = np.random.default_rng(width).integers(0, 2 if values == "bool" else 256, n_rows * width * dtype.itemsize)
    dense = bits.astype(np.uint8).view(dtype).reshape(n_rows, width)
    form = form_of(n_rows, None, dtype, block_rows=block_rows, width=width)
    most, contents = form.most_bytes(n_rows, n_rows * width), []
    for before in (0xA5, 0):
        memory = np.full(most // ALIGNED + 9, 0, np.uint64).view(np.uint8)
        memory[:] = before
        ends, (places,) = begun_blocks(form, np.full(n_rows, width), np.zeros(n_rows), memory)
        for first, place in zip(range(0, n_rows, block_rows), places, strict=True):
            of_block = dense[first : first + block_rows].ravel()
            words_of(memory, dtype)[place : place + len(of_block)] = of_block
        assert (ends <= most).all()
        assert not (ends % ALIGNED).any()
        assert (memory[ends[-1] :] == before).all()
        contents.append(memory[: ends[-1]])
    np.testing.assert_array_equal(*contents)
    rows = np.array([0, 10, 3, 3, 7])
    kept = places_of(form, contents[0], np.append(0, ends)[rows // block_rows], rows % block_rows)
    assert kept.lengths.tolist() == [width] * len(rows)
    assert kept.totals is None
    elements = contents[0].view(dtype)
    for row, start in zip(rows, kept.starts[1], strict=True):
        assert elements[start : start + width].tobytes() == dense[row].tobytes()


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


@pytest.mark.parametrize("coded", [True, False])
def test_a_block_of_empty_rows_has_only_its_table_and_heads(coded):
    empty = np.empty(0, np.uint16), np.empty(0, np.float32)
    assert check([empty] * 5, coded=coded).n_bytes == 5 * (ENTRY_BYTES + 8)
    assert check([empty] * 5, coded=coded, block_rows=4).n_bytes == 8 * ENTRY_BYTES + 5 * 8
