"""Compiled loops that turn the genes of stored rows into the columns of x. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows


@compiled
def map_rows(
    genes: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, column_of: NDArray[Any], out: NDArray[Any]
) -> None:
    """Copies rows of genes as the columns that they have in x."""
    for row in range(len(starts)):
        n = lengths[row]
        taken = genes[starts[row] : starts[row] + n]
        given = out[at[row] : at[row] + n]
        for i in range(n):
            given[i] = column_of[taken[i]]


@compiled
def select_values(
    genes: NDArray[Any],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    column_of: NDArray[Any],
    n_columns: int,
    out: tuple[NDArray[Any], NDArray[Any], Rows],
) -> None:
    """Packs the columns and values of chosen genes into `out`, row after row, and counts the values per row.

    `out` needs room for all stored values: every value is written, and the next one overwrites it if its gene is not
    chosen. Without a branch per value this is two to four times as fast when many genes are chosen.
    """
    columns, packed, counts = out
    first = 0
    for row in range(len(lengths)):
        n = lengths[row]
        stored = genes[starts[0][row] : starts[0][row] + n]
        taken = values[starts[1][row] : starts[1][row] + n]
        given_columns = columns[first : first + n]
        given_values = packed[first : first + n]
        to = 0
        for i in range(n):
            column = column_of[stored[i]]
            given_columns[to] = column
            given_values[to] = taken[i]
            to += column < n_columns
        counts[row] = to
        first += to


@compiled
def _sort_by_byte(
    columns: NDArray[Any], values: NDArray[Any], shift: int, out: tuple[NDArray[Any], NDArray[Any]], places: Rows
) -> None:
    places[:] = 0
    for i in range(len(columns)):
        places[((columns[i] >> shift) & 255) + 1] += 1
    for byte in range(255):
        places[byte + 1] += places[byte]
    for i in range(len(columns)):
        byte = (columns[i] >> shift) & 255
        out[0][places[byte]] = columns[i]
        out[1][places[byte]] = values[i]
        places[byte] += 1


@compiled
def sort_rows(columns: NDArray[Any], values: NDArray[Any], at: Rows, lengths: Rows, n_columns: int) -> None:
    """Sorts each row by column: a stable radix sort, two bytes per pass, linear in the values."""
    longest = lengths.max() if len(lengths) else 0
    spare_columns, spare_values = np.empty(longest, columns.dtype), np.empty(longest, values.dtype)
    places = np.empty(257, np.int64)
    for row in range(len(lengths)):
        first, n = at[row], lengths[row]
        here = (columns[first : first + n], values[first : first + n])
        there = (spare_columns[:n], spare_values[:n])
        for shift in range(0, 64, 16):
            if (n_columns - 1) >> shift:
                _sort_by_byte(here[0], here[1], shift, there, places)
                _sort_by_byte(there[0], there[1], shift + 8, here, places)


@compiled
def select_columns(source: NDArray[Any], starts: Rows, positions: Rows, out: NDArray[Any]) -> None:
    """Copies some genes of dense rows. A position of -1 gives zeros."""
    for row in range(len(starts)):
        taken = source[starts[row] :]
        given = out[row]
        for i in range(len(positions)):
            given[i] = taken[positions[i]] if positions[i] >= 0 else given.dtype.type(0)
