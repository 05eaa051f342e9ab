"""Rows of a CSR matrix coded one by one: a row takes about half its bytes, and can be decoded alone. Pure.

A coded row is, in this order:

- its head: two uint16, the numbers of exceptions among its genes and among its values, RAW for what is not coded
- its genes, as steps from each to the next: the lowest byte of each step, then the exceptions
- its values: the lowest half byte of each, those of the second half of the row in the upper half bytes, and then the
  exceptions. If they would be shorter with whole bytes, as genes are, bit 15 of the head says so

An exception is two uint16: the position of a step or value that is too large, and the rest of it without its lowest
bits. Whole numbers are coded in any dtype. Whatever does not fit (fractions, negative values and steps, rows of more
than 32 766 elements), or would not be shorter, is raw: in the stored dtype, aligned to it. Decoding gives back the same
bits. Unused bytes are 0, so that the same rows are the same bytes, whoever codes them.

row_blocks.py describes the blocks of rows that a mirror keeps.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows

ENTRY_WORDS = 3  # of a row in the table of its block (row_blocks.py)
ENTRY_BYTES = 8 * ENTRY_WORDS
ALIGNED = 8  # rows and blocks begin at multiples of it
RAW = 0xFFFF  # exceptions
HEAD_BYTES, _EXCEPTION_BYTES = 4, 4
_BYTES = 0x8000  # set where values have whole bytes
_LARGE = 1 << 30  # a larger gene or value is raw
_COUNT_BYTES = 0.6  # of a coded count, about: 0.5 up to 15, as most are, 4.5 or 1 above
_MOST = 0x7FFE  # elements of a row that is coded; with one more, _BYTES and its exceptions could be RAW

# The bytes of coded rows as they are, and the same memory in the dtypes of genes and values.
Views: TypeAlias = tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any]]


def views_of(content: NDArray[np.uint8], genes: np.dtype[Any], values: np.dtype[Any]) -> Views:
    """Coded rows with genes and values of these dtypes. The memory is aligned to 8 bytes."""
    return content, words_of(content, genes), words_of(content, values)


def words_of(content: NDArray[np.uint8], dtype: Any) -> NDArray[Any]:
    """Memory in another dtype of up to 8 bytes, without what is left at its end."""
    return content[: len(content) // ALIGNED * ALIGNED].view(dtype)


def likely_bytes(
    n_rows: int, n_values: int, n_genes: int, dtypes: tuple[np.dtype[Any], np.dtype[Any]]
) -> tuple[int, bool]:
    """The bytes of coded rows, about, and whether they may be much fewer, as where floats turn out to be counts.

    Integers are taken for counts, and the steps from gene to gene for those of genes at random.
    """
    genes, values = dtypes
    long_steps = (1 - n_values / max(1, n_rows * n_genes)) ** 255
    gene_bytes = min(genes.itemsize, 1 + _EXCEPTION_BYTES * long_steps)
    value_bytes = values.itemsize if values.kind == "f" else _COUNT_BYTES
    per_row = ENTRY_BYTES + HEAD_BYTES + ALIGNED
    return round(n_rows * per_row + n_values * (gene_bytes + value_bytes)), values.kind == "f"


@compiled
def _put_word(out: NDArray[np.uint8], at: int, word: Any) -> None:
    out[at], out[at + 1] = word & 0xFF, word >> 8


@compiled
def _word_at(content: NDArray[np.uint8], at: int) -> Any:
    return np.int64(content[at]) | (np.int64(content[at + 1]) << 8)


@compiled
def _aligned(at: int, to: int) -> int:
    return (at + to - 1) // to * to


# ---- coding


@compiled
def _padded(out: NDArray[np.uint8], at: int, to: int) -> int:
    """The next multiple of `to`, with zeros before it."""
    end = _aligned(at, to)
    for i in range(at, end):
        out[i] = 0
    return int(end)


# Loops without branches, over int32, because processors do several elements of such a loop at a time.


@compiled
def _take_rests(numbers: NDArray[Any], in_steps: bool, rests: NDArray[np.int32]) -> bool:
    """Takes each number, or its step from the one before. Returns whether all are whole, and from 0 to _LARGE."""
    unfit, before = False, np.int32(0)
    for i in range(len(numbers)):
        below = numbers[i] if numbers[i] < _LARGE else _LARGE
        number = np.int32(below if below > 0 else 0)
        rests[i] = number - before
        unfit |= (numbers[i] != number) | np.signbit(numbers[i]) | (rests[i] < 0)
        before = number if in_steps else before
    return not unfit


@compiled
def _coded_bits(rests: NDArray[np.int32], in_steps: bool, itemsize: int) -> tuple[int, int]:
    """The bits of each number, or of its step, with which all are shortest (0: raw), and the number of exceptions."""
    n, over_half, over_byte, most = len(rests), np.int32(0), np.int32(0), np.int32(0)
    for i in range(n):
        over_half += np.int32(rests[i] > 0xF)
        over_byte += np.int32(rests[i] > 0xFF)
        most = max(most, rests[i])
    halves, whole = (n + 1) // 2 + _EXCEPTION_BYTES * over_half, n + _EXCEPTION_BYTES * over_byte
    bits = 4 if halves < whole and not in_steps and most >> 4 <= 0xFFFF else 8
    shorter = (halves if bits == 4 else whole) < n * itemsize
    return bits if most >> bits <= 0xFFFF and shorter else 0, int(over_half if bits == 4 else over_byte)


@compiled
def _put(
    numbers: NDArray[Any], in_steps: bool, out: NDArray[np.uint8], typed: NDArray[Any], at: int
) -> tuple[int, int]:
    """Writes numbers from byte `at` on. Returns their part of the head, and the byte after them."""
    n, bits, exceptions = len(numbers), 0, 0
    rests = np.empty(n if n <= _MOST else 0, np.int32)
    if n <= _MOST and _take_rests(numbers, in_steps, rests):
        bits, exceptions = _coded_bits(rests, in_steps, numbers.itemsize)
    if bits == 0:
        first = _padded(out, at, numbers.itemsize) // numbers.itemsize
        given = typed[first : first + n]
        for i in range(n):
            given[i] = numbers[i]
        return RAW, (first + n) * numbers.itemsize
    n_low = n if bits == 8 else (n + 1) // 2
    low, first_half, others = out[at : at + n_low], rests[:n_low], rests[n_low:]
    most, end = (1 << bits) - 1, at + n_low + _EXCEPTION_BYTES * exceptions
    for i in range(n_low):
        low[i] = first_half[i] & most
    for i in range(len(others)):
        low[i] |= (others[i] & most) << 4
    if exceptions:
        _put_exceptions(rests, bits, out[at + n_low : end])
    return exceptions | (_BYTES if bits == 8 and not in_steps else 0), end


@compiled
def _put_exceptions(rests: NDArray[np.int32], bits: int, out: NDArray[np.uint8]) -> None:
    to, most = 0, (1 << bits) - 1
    for i in range(len(rests)):
        if rests[i] > most:
            _put_word(out, to, i)
            _put_word(out, to + 2, rests[i] >> bits)
            to += _EXCEPTION_BYTES


@compiled
def code_blocks(  # noqa: PLR0913
    genes: NDArray[Any],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    sums: NDArray[np.uint64],
    block_rows: int,
    out: Views,
    words: NDArray[np.uint64],
    ends: Rows,
) -> None:
    """Codes rows in blocks, one after another in `out`, and notes the byte after each block.

    `sums` are the bits of the third word of each row's entry, and `words` is the memory of `out`.
    """
    content, typed_genes, typed_values = out
    to = 0
    for block in range(len(ends)):
        first, begin = block * block_rows, to
        stop = min(first + block_rows, len(lengths))
        to += block_rows * ENTRY_BYTES
        words[begin // 8 : to // 8] = 0  # the last block may have fewer rows
        for row in range(first, stop):
            n, head = lengths[row], to
            of_genes = genes[starts[0][row] : starts[0][row] + n]
            of_values = values[starts[1][row] : starts[1][row] + n]
            exceptions, to = _put(of_genes, True, content, typed_genes, head + HEAD_BYTES)
            _put_word(content, head, exceptions)
            exceptions, to = _put(of_values, False, content, typed_values, to)
            _put_word(content, head + 2, exceptions)
            to = _padded(content, to, ALIGNED)
            entry = begin // 8 + (row - first) * ENTRY_WORDS
            words[entry], words[entry + 1], words[entry + 2] = head - begin, n, sums[row]
        ends[block] = to


# ---- decoding


@compiled
def _take_raw(typed: NDArray[Any], at: int, given: NDArray[Any]) -> int:
    first = _aligned(at, typed.itemsize) // typed.itemsize
    taken = typed[first : first + len(given)]
    for i in range(len(given)):
        given[i] = taken[i]
    return int(first + len(given)) * typed.itemsize


@compiled
def take_genes(rows: Views, head: int, given: NDArray[Any]) -> int:
    """Decodes the genes of the row at byte `head`. Returns the byte after them."""
    content, typed, _ = rows
    exceptions, n, at = _word_at(content, head), len(given), head + HEAD_BYTES
    if exceptions == RAW:
        return _take_raw(typed, at, given)
    steps, gene, begin = content[at : at + n], np.int64(0), 0
    for exception in range(exceptions + 1):
        place = at + n + _EXCEPTION_BYTES * exception
        stop = _word_at(content, place) if exception < exceptions else n
        taken, of_run = steps[begin:stop], given[begin:stop]
        for i in range(len(of_run)):
            gene += taken[i]
            of_run[i] = gene
        if exception < exceptions:
            gene += steps[stop] + (_word_at(content, place + 2) << 8)
            given[stop] = gene
        begin = stop + 1
    return int(at + n) + _EXCEPTION_BYTES * int(exceptions)


@compiled
def take_values(rows: Views, head: int, at: int, given: NDArray[Any]) -> None:
    """Decodes the values at byte `at` of the row at byte `head`, in the stored dtype or one that holds its values."""
    content, _, typed = rows
    exceptions, n = _word_at(content, head + 2), len(given)
    if exceptions == RAW:
        _take_raw(typed, at, given)
        return
    bits = 8 if exceptions & _BYTES else 4
    exceptions &= _BYTES - 1
    n_low = n if bits == 8 else (n + 1) // 2
    low, first, last = content[at : at + n_low], given[:n_low], given[n_low:]
    for i in range(n_low):
        first[i] = low[i] & 0xF if bits == 4 else low[i]
    for i in range(n - n_low):
        last[i] = low[i] >> 4
    for place in range(at + n_low, at + n_low + _EXCEPTION_BYTES * exceptions, _EXCEPTION_BYTES):
        i = _word_at(content, place)
        lowest = low[i] & ((1 << bits) - 1) if i < n_low else low[i - n_low] >> 4
        given[i] = lowest + (_word_at(content, place + 2) << bits)
