"""Rows of arrays whose chunks hold parts of rows: the plan and the decoder bring what zarr reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from helpers import vector_layout
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.errors import FormatError
from zloader.reading.chunks import located
from zloader.reading.read_plan import Elements
from zloader.storage.decode import Decoder, _copy_parts, columns_of, copy_parts
from zloader.storage.layout import ABSENT, ArrayLayout, Grid, MatrixLayout, ObjectIndex, chunks_of, distinct, reads_of
from zloader.storage.metadata import layout_of
from zloader.storage.row_blocks import RowForm

# shape, chunks, shards (None: not sharded)
GRIDS: dict[str, Any] = {
    "as anndata writes it": ((300, 70), (75, 18), None),
    "dividing": ((24, 6), (8, 3), None),
    "ragged": ((37, 7), (5, 3), None),
    "one column": ((37, 7), (5, 1), None),
    "one row": ((37, 7), (1, 3), None),
    "one element": ((5, 4), (1, 1), None),
    "all rows": ((37, 7), (37, 2), None),
    "wider than rows": ((37, 7), (5, 8), None),
    "larger than the array": ((3, 2), (5, 8), None),
    "sharded": ((37, 7), (4, 2), (8, 4)),
    "shards of whole rows": ((37, 7), (4, 7), (8, 14)),
    "shards of one chunk": ((37, 7), (4, 2), (4, 2)),
    "shards over all columns": ((37, 7), (4, 2), (8, 8)),
    "shards over all rows": ((37, 7), (4, 2), (40, 2)),
    "one shard": ((37, 7), (4, 2), (40, 8)),
    "three dimensions": ((13, 5, 6), (4, 2, 4), None),
    "three dimensions, sharded": ((13, 5, 6), (4, 2, 3), (8, 4, 6)),
    "three dimensions, the last one whole": ((13, 5, 6), (4, 2, 6), None),
}


def rows_of(root: Path, layout: ArrayLayout, rows: np.ndarray) -> np.ndarray:
    """Some rows of an array, by the plan of their reads, plain file reads and the decoder."""
    width = layout.grid.row_elements
    needed = Elements.of([layout], rows * width, (rows + 1) * width)
    ((chunks_of_jobs, jobs),) = needed.jobs
    chunks = distinct(chunks_of_jobs)
    np.testing.assert_array_equal(chunks, chunks_of(rows * width, (rows + 1) * width, layout))
    indexes = {}
    for shard in distinct(chunks // layout.chunks_per_shard).tolist():
        file = root / layout.shard_key(shard)
        found = layout.find_index(shard, file.stat().st_size if file.exists() else None, str(root))
        if not isinstance(found, np.ndarray):
            found = layout.placement.parse(file.read_bytes()[found.start : found.stop], shard, file.stat().st_size)
        indexes[shard] = ObjectIndex(found)
    reads = reads_of(layout, chunks, indexes, gap_bytes=64, max_read_bytes=200)
    stored = [(root / span.key).read_bytes()[span.start : span.stop] for span in reads.spans]
    jobs, out = located(chunks_of_jobs, jobs, reads), np.full(needed.n_elements, 99, layout.dtype)
    here = jobs["read"] >= 0
    np.testing.assert_array_equal(distinct(chunks_of_jobs[~here]), reads.absent)
    assert not Decoder(layout).decode_all(stored, jobs[here], out)
    for job in jobs[~here]:
        columns = slice(job["column"], job["column"] + job["stop"] - job["first"])
        columns_of(out, job["begin"], job["rows"], width)[:, columns] = layout.fill_value
    return np.stack([out[begin : begin + width] for begin in needed.begins]) if len(rows) else out.reshape(0, width)


@pytest.mark.parametrize(
    ("name", "zarr_format"), [(name, form) for name in GRIDS for form in (2, 3) if form == 3 or GRIDS[name][2] is None]
)
def test_rows_are_those_that_zarr_reads(tmp_path: Path, name: str, zarr_format: int) -> None:
    shape, chunks, shards = GRIDS[name]
    rng = np.random.default_rng(1)
    values = rng.integers(1, 1000, shape).astype("u2")
    values[: shape[0] // 2, : shape[1] // 2] = 0  # chunks of which are not written
    array = zarr.create_array(
        tmp_path / "X", shape=shape, chunks=chunks, shards=shards, dtype="u2", fill_value=0, zarr_format=zarr_format
    )
    array[...] = values
    layout = layout_of(_named(array), absent_is_fill=True)
    assert layout.grid is not None
    assert layout.n_elements == values.size
    assert layout.band_elements == chunks[0] * layout.grid.row_elements
    written = {str(file.relative_to(tmp_path)) for file in (tmp_path / "X").rglob("*") if file.is_file()}
    assert written - {"X/zarr.json", "X/.zarray", "X/.zattrs"} <= {
        layout.shard_key(shard) for shard in range(layout.n_shards)
    }
    flat = values.reshape(shape[0], -1)
    for rows in ([], [0], [shape[0] - 1], np.arange(shape[0]), rng.integers(0, shape[0], 30), [2, 1, 1, 0]):
        rows = np.asarray(rows, np.int64) % shape[0]
        np.testing.assert_array_equal(rows_of(tmp_path, layout, rows), flat[rows])


def _named(array: Any) -> Any:
    return zarr.open_array(array.store_path.store.root.parent, path="X", mode="r")


@given(data=st.data())
def test_every_element_has_one_place(data: st.DataObject) -> None:
    """A chunk and a place in it, where NumPy finds it, too."""
    n_dims = data.draw(st.integers(2, 3))
    sizes = st.lists(st.integers(1, 6), min_size=n_dims, max_size=n_dims)
    shape, chunk, times = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    outer = [size * n for size, n in zip(chunk, times, strict=True)]
    grid = Grid.of("X", shape, chunk, outer)
    if grid is None:
        assert chunk[1:] == shape[1:] == outer[1:]
        return
    objects = [-(-whole // size) for whole, size in zip(shape, outer, strict=True)]
    assert list(grid.objects) == objects
    begins, lengths, chunks, parts = grid.pieces
    for row in range(shape[0]):
        found = {}
        first = int(grid.first_chunks(np.array([row // chunk[0]]))[0])
        for begin, n, number, part in zip(begins, lengths, chunks, parts, strict=True):
            for step in range(int(n)):
                place = row % chunk[0] * grid.part_elements + part + step
                found[int(begin) + step] = (first + int(number), int(place))
        assert sorted(found) == list(range(math.prod(shape[1:])))
        for flat, place in found.items():
            at = (row, *np.unravel_index(flat, shape[1:]))
            of_object = np.ravel_multi_index([int(i) // size for i, size in zip(at, outer, strict=True)], objects)
            within = [int(i) % big // size for i, big, size in zip(at, outer, chunk, strict=True)]
            number = of_object * math.prod(times) + np.ravel_multi_index(within, times)
            in_chunk = np.ravel_multi_index([int(i) % size for i, size in zip(at, chunk, strict=True)], chunk)
            assert place == (number, in_chunk)


WRONG: dict[str, Any] = {
    "no rows": ((40, 6), (0, 6), (0, 6)),
    "no columns": ((40, 6), (8, 0), (8, 0)),
    "shards that cut chunks": ((40, 6), (4, 3), (6, 6)),
    "shards smaller than chunks": ((40, 6), (8, 6), (4, 6)),
    "a negative size": ((40, 6), (-8, 6), (-8, 6)),
    "chunks of too many elements": ((40, 6), (10**15, 10**9), (10**15, 10**9)),
    "shards of too many elements": ((40, 6), (4, 3), (4 * 10**12, 3 * 10**12)),
    "too many elements": ((10**15, 10**9), (10**6, 10**6), (10**6, 10**6)),
}


@pytest.mark.parametrize(("shape", "chunk", "outer"), WRONG.values(), ids=WRONG.keys())
def test_damaged_grids_are_refused(shape: Any, chunk: Any, outer: Any) -> None:
    with pytest.raises(FormatError, match=r"X has chunks of .* is damaged"):
        Grid.of("X", shape, chunk, outer)


def test_rows_in_too_many_pieces_are_refused() -> None:
    """Damaged metadata may claim any number of columns."""
    with pytest.raises(FormatError, match=r"X has chunks of \(8, 1\), which cut a row .*: run 'zloader convert'"):
        Grid.of("X", (40, 10**15), (8, 1), (8, 1))


def test_chunks_that_were_not_written_are_absent_in_shards_of_both_axes(tmp_path: Path) -> None:
    values = np.zeros((16, 8), "f4")
    values[9, 5] = 3
    array = zarr.create_array(tmp_path / "X", shape=(16, 8), chunks=(2, 2), shards=(8, 4), dtype="f4", fill_value=0)
    array[...] = values
    layout = layout_of(_named(array), absent_is_fill=True)
    shards = [tmp_path / layout.shard_key(number) for number in range(4)]
    assert [shard.exists() for shard in shards] == [False, False, False, True]
    size = shards[3].stat().st_size
    span = layout.find_index(3, size, "")
    table = layout.placement.parse(shards[3].read_bytes()[span.start : span.stop], 3, size)
    assert np.flatnonzero(table[:, 0] != ABSENT).tolist() == [0]
    np.testing.assert_array_equal(rows_of(tmp_path, layout, np.arange(16)), values)


@given(data=st.data(), dtype=st.sampled_from(["u1", "u2", "u4", "u8"]))
def test_parts_are_copied_alike_with_and_without_the_compiler(data: st.DataObject, dtype: str) -> None:
    shape, chunk = (data.draw(st.tuples(st.integers(1, 20), st.integers(1, 9))) for _ in range(2))
    grid = Grid.of("X", shape, chunk, chunk)
    if grid is None:
        return
    layout = vector_layout("X", dtype, n_elements=math.prod(shape), chunk_elements=math.prod(chunk))
    layout = replace(layout, grid=grid)
    rows = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=12)), np.int64)
    needed = Elements.of([layout], rows * shape[1], (rows + 1) * shape[1])
    ((_, jobs),) = needed.jobs
    whole = np.random.default_rng(0).integers(0, 250, math.prod(chunk)).astype(dtype)
    plain, fast = (np.zeros(needed.n_elements, dtype) for _ in range(2))
    _copy_parts(jobs, whole, plain, grid.part_elements, grid.row_elements)
    copy_parts._compiled()(jobs, whole, fast, grid.part_elements, grid.row_elements)
    np.testing.assert_array_equal(plain, fast)
    columns = np.arange(shape[1])
    wanted = whole.reshape(chunk)[(rows % chunk[0])[:, None], columns % chunk[1]]
    np.testing.assert_array_equal(fast.reshape(wanted.shape), wanted)


# Rows of a chunk, bytes of a row, rows of a block: about 128 KiB in a divisor of the rows of a chunk.
BLOCKS = {(1250, 8000): 25, (750, 2800): 50, (313, 8000): 313, (751, 2800): 751, (100_003, 800): 1, (3, 2800): 45}


@pytest.mark.parametrize(("chunk", "rows"), BLOCKS.items(), ids=str)
def test_blocks_of_a_mirror_divide_bands_and_are_not_tiny(chunk: tuple[int, int], rows: int) -> None:
    shape = (200_000, chunk[1] // 4)
    grid = Grid.of("X", shape, (chunk[0], 5), (chunk[0], 5))
    values = vector_layout("X", "f4", n_elements=math.prod(shape), chunk_elements=chunk[0] * 5)
    matrix = MatrixLayout(path="X", n_rows=shape[0], n_genes=shape[1], values=replace(values, grid=grid), genes=None)
    assert RowForm.of(matrix, None, compact=False).block_rows == rows
