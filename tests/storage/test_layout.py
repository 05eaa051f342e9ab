"""The layout arithmetic agrees with slow loops and with arrays written by zarr-python."""

from __future__ import annotations

import dataclasses
import itertools
import json

import google_crc32c
import numpy as np
import pytest
import zarr
import zarr.codecs
from helpers import offsets_in_memory, vector_layout
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.chunk_key_encodings import DefaultChunkKeyEncoding

from zloader.common.errors import CorruptChunkError, FormatError, TruncatedObjectError
from zloader.storage.decode import Decoder
from zloader.storage.layout import (
    ABSENT,
    MatrixLayout,
    ObjectIndex,
    align_to_runs,
    chunks_of,
    coalesce,
    distinct,
    expand,
    fill_gaps,
    reads_of,
)
from zloader.storage.metadata import array_layout

pytestmark = pytest.mark.any_version

LAYOUT = vector_layout("X/data", "<u2", n_elements=95, chunk_elements=10, chunks_per_shard=4)


def _layout_of(chunks_per_shard):
    placement = dataclasses.replace(LAYOUT.placement, chunks_per_object=chunks_per_shard)
    return dataclasses.replace(LAYOUT, placement=placement)


def _int64(*values):
    return np.array(values, np.int64)


# ---- coalescing

# Ranges as (start, stop), and the indices of those that start a read with gap_bytes=10 and max_read_bytes=100.
COALESCED = {
    "nothing": ([], []),
    "one": ([(5, 9)], [0]),
    "one larger than the cap": ([(5, 1005)], [0]),
    "neighbours": ([(0, 20), (20, 40), (40, 60)], [0]),
    "a gap of the allowed size": ([(0, 20), (30, 40)], [0]),
    "a gap one byte too wide": ([(0, 20), (31, 40)], [0, 1]),
    "gaps that add up": ([(0, 10), (20, 30), (40, 50), (60, 70)], [0]),
    "exactly the cap": ([(0, 50), (50, 100)], [0]),
    "one byte more than the cap": ([(0, 50), (50, 101)], [0, 1]),
    "caps in a row": ([(0, 60), (60, 120), (120, 180), (180, 240)], [0, 1, 3]),
    "the cap counts from the first byte of a read": ([(1000, 1050), (1050, 1100)], [0]),
    "it counts anew after a gap": ([(0, 90), (150, 240)], [0, 1]),
    "small after large": ([(0, 950), (950, 960)], [0]),  # one range above the cap
    "large after small": ([(0, 10), (10, 960)], [0, 1]),
    "an empty range": ([(0, 10), (10, 10), (10, 20)], [0]),
}


@pytest.mark.parametrize(("ranges", "opens"), COALESCED.values(), ids=COALESCED.keys())
def test_coalesce(ranges, opens):
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    assert coalesce(starts, stops, gap_bytes=10, max_read_bytes=100).tolist() == opens


def test_coalesce_without_a_gap_still_joins_neighbours():
    starts, stops = _int64(0, 10, 21), _int64(10, 20, 30)
    assert coalesce(starts, stops, gap_bytes=0, max_read_bytes=100).tolist() == [0, 2]


@given(
    pieces=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), min_size=1, max_size=40),
    gap_bytes=st.integers(0, 40),
    max_read_bytes=st.integers(1, 500),
)
def test_reads_respect_gap_and_cap_and_are_not_split_needlessly(pieces, gap_bytes, max_read_bytes):
    before, sizes = np.array(pieces, np.int64).T
    stops = np.cumsum(before + sizes)
    starts = stops - sizes
    opens = coalesce(starts, stops, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes).tolist()
    assert opens[0] == 0
    bounds = [*opens, len(starts)]
    apart = [i for i in range(1, len(starts)) if starts[i] - stops[i - 1] > gap_bytes]
    assert set(apart) <= set(opens)
    for begin, end in itertools.pairwise(bounds):
        assert begin < end
        assert stops[end - 1] - starts[begin] < max_read_bytes + sizes[begin]  # above the cap by at most one range
    for begin, end in itertools.pairwise([0, *apart, len(starts)]):
        n_reads = sum(begin <= opened < end for opened in opens)
        assert n_reads <= -(-(stops[end - 1] - starts[begin]) // max_read_bytes)


# ---- spans of chunks


@st.composite
def shards(draw):
    """The parsed indexes of some shards, and the chunk that owns each byte of each shard (-1: none)."""
    n_shards = draw(st.integers(1, 4))
    layout = _layout_of(draw(st.integers(1, 6)))
    layout = dataclasses.replace(layout, n_elements=n_shards * layout.chunks_per_shard * layout.chunk_elements)
    indexes, owners = {}, {}
    for shard in range(n_shards):
        table = np.full((layout.chunks_per_shard, 2), ABSENT, np.uint64)
        owner = []
        end_to_end = draw(st.booleans())  # otherwise with gaps, and in any order
        chunks = range(layout.chunks_per_shard)
        for within in chunks if end_to_end else draw(st.permutations(chunks)):
            if draw(st.integers(0, 9)):
                owner += [-1] * draw(st.integers(0, 0 if end_to_end else 30))
                size = draw(st.integers(1, 60))
                table[within] = len(owner), size
                owner += [shard * layout.chunks_per_shard + within] * size
        indexes[shard], owners[layout.shard_key(shard)] = ObjectIndex(table), np.array(owner, np.int64)
    return layout, indexes, owners


@given(shards=shards(), gap_bytes=st.integers(0, 50), max_read_bytes=st.integers(1, 300), draw=st.data())
def test_every_chunk_is_in_exactly_one_span_at_the_right_offset(shards, gap_bytes, max_read_bytes, draw):
    layout, indexes, owners = shards
    wanted = np.sort(_int64(*draw.draw(st.sets(st.integers(0, layout.n_chunks - 1), min_size=1))))
    reads = reads_of(layout, wanted, indexes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
    stored = {int(chunk): int((owner == chunk).sum()) for owner in owners.values() for chunk in set(owner.tolist())}

    assert sorted([*reads.chunks.tolist(), *reads.absent.tolist()]) == wanted.tolist()
    assert (np.diff(reads.chunks) > 0).all()
    assert all((chunk in stored) == (chunk not in reads.absent) for chunk in wanted.tolist())
    for number, span in enumerate(reads.spans):
        alone = reads.some(_int64(number))
        assert alone.spans == [span]
        assert not alone.numbers.any()
        owner = owners[span.key][span.start : span.stop]
        assert len(owner) == span.size  # inside the object
        for chunk, offset, size in zip(alone.chunks, alone.offsets, alone.sizes, strict=True):
            assert size == stored[int(chunk)]
            assert (owner[offset : offset + size] == chunk).all()
        by_offset = np.argsort(alone.offsets, kind="stable")
        offsets, sizes = alone.offsets[by_offset], alone.sizes[by_offset]
        assert (offsets[1:] - (offsets + sizes)[:-1] <= gap_bytes).all()
        assert offsets[0] == 0
        assert span.size < max_read_bytes + sizes[0]
    for first, second in itertools.combinations(reads.spans, 2):
        if first.key == second.key:
            assert first.stop <= second.start or second.stop <= first.start
    assert reads.n_bytes == sum(span.stop - span.start for span in reads.spans)
    later = reads.some(np.arange(1, len(reads.spans)))
    assert later.spans == reads.spans[1:]
    assert later.numbers.tolist() == (reads.numbers[reads.numbers > 0] - 1).tolist()


def test_a_shard_of_which_nothing_wanted_is_stored_gives_no_span():
    nothing = np.full((4, 2), ABSENT, np.uint64)
    something = np.array([[0, 7], [7, 5], [ABSENT, ABSENT], [12, 3]], np.uint64)
    indexes = {0: ObjectIndex(nothing), 1: ObjectIndex(something)}
    reads = reads_of(LAYOUT, _int64(1, 3, 4, 6), indexes, gap_bytes=0, max_read_bytes=100)
    assert [span.key for span in reads.spans] == ["X/data/c/1"]
    assert (reads.chunks.tolist(), reads.numbers.tolist()) == ([4], [0])
    assert reads.absent.tolist() == [1, 3, 6]


BEYOND = 1 << 32  # no 4-byte offset


@pytest.mark.parametrize(
    ("offsets", "stored"),
    [
        ([[0, 7], [7, 5], [12, 3]], [True, True, True]),
        ([[4, 7], [11, 5], [ABSENT, ABSENT]], [True, True, False]),
        ([[0, 7], [ABSENT, ABSENT], [7, 3]], [True, False, True]),
        ([[ABSENT, ABSENT], [0, 7], [7, 3]], [False, True, True]),
        ([[7, 5], [0, 7], [12, 3]], [True, True, True]),
        ([[0, 7], [8, 5], [13, 3]], [True, True, True]),
        ([[0, BEYOND - 2], [BEYOND - 2, 1], [BEYOND - 1, 1]], [True, True, True]),
        ([[BEYOND - 9, 7], [BEYOND - 2, 1], [BEYOND - 1, 0]], [True, True, True]),
        ([[ABSENT, ABSENT]] * 3, [False, False, False]),
    ],
    ids=["end to end", "the last absent", "a hole", "the first absent", "disordered", "gaps", "large", "4 GiB", "none"],
)
def test_a_shard_index_gives_the_ranges_of_its_table(offsets, stored):
    table = np.array(offsets, np.uint64)
    here, starts, sizes = ObjectIndex(table).ranges(_int64(2, 0, 1))
    assert here.tolist() == [stored[2], stored[0], stored[1]]
    wanted = table[[2, 0, 1]][here].astype(np.int64)
    assert (starts.tolist(), sizes.tolist()) == (wanted[:, 0].tolist(), wanted[:, 1].tolist())
    assert starts.dtype == sizes.dtype == np.int64


def test_no_chunks_need_no_spans():
    reads = reads_of(LAYOUT, _int64(), {}, gap_bytes=0, max_read_bytes=100)
    assert reads.spans == []
    assert len(reads.chunks) == len(reads.absent) == 0


# ---- rows, elements and chunks


def _vector(chunk_elements):
    return vector_layout("a", "u1", n_elements=2**50, chunk_elements=chunk_elements)


PAIRS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=30)


@given(pairs=PAIRS)
def test_expand_equals_a_loop(pairs):
    starts, lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    naive = [start + i for start, length in pairs for i in range(length)]
    assert expand(starts, lengths).tolist() == naive


@given(pairs=PAIRS, chunk_elements=st.integers(1, 50))
def test_chunks_of_equals_a_loop(pairs, chunk_elements):
    starts, lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    naive = {element // chunk_elements for start, length in pairs for element in range(start, start + length)}
    assert chunks_of(starts, starts + lengths, _vector(chunk_elements)).tolist() == sorted(naive)


@given(draw=st.data(), n_chunks=st.integers(1, 60), run=st.integers(1, 20))
def test_widened_takes_whole_runs(draw, n_chunks, run):
    chunks = draw.draw(st.sets(st.integers(0, n_chunks - 1)))
    wide = align_to_runs(_int64(*sorted(chunks)), run, n_chunks).tolist()
    assert wide == [chunk for chunk in range(n_chunks) if chunk // run in {wanted // run for wanted in chunks}]


@given(chunks=st.sets(st.integers(0, 60)).map(sorted), gap=st.integers(0, 6))
def test_gaps_up_to_a_size_are_filled(chunks, gap):
    filled = set(chunks)
    for one, other in itertools.pairwise(chunks):
        if other - one - 1 <= gap:
            filled |= set(range(one, other))
    assert fill_gaps(_int64(*chunks), gap).tolist() == sorted(filled)


def test_chunks_of_counts_beyond_two_to_the_31():
    start = 2**40 + 3
    assert chunks_of(_int64(start), _int64(start + 5), _vector(4)).tolist() == [2**38, 2**38 + 1]


def test_the_last_chunk_is_as_long_as_what_is_left():
    first, last = LAYOUT.chunk_bounds(_int64(0, 8, 9))
    assert first.tolist() == [0, 80, 90]
    assert last.tolist() == [10, 90, 95]
    assert (LAYOUT.n_chunks, LAYOUT.n_shards, LAYOUT.placement.index_bytes) == (10, 3, 68)


def test_an_array_without_elements_has_no_chunks():
    empty = dataclasses.replace(LAYOUT, n_elements=0)
    assert (empty.n_chunks, empty.n_shards) == (0, 0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_rows_of_a_csr_matrix_own_what_indptr_says(dtype):
    matrix = MatrixLayout(path="X", n_rows=3, n_genes=9, values=LAYOUT, genes=LAYOUT)
    starts, stops = matrix.elements_of(_int64(2, 0, 1), offsets_in_memory(np.array([0, 4, 4, 95], dtype)))
    assert (starts.tolist(), stops.tolist()) == ([4, 0, 4], [95, 4, 4])
    assert starts.dtype == stops.dtype == np.int64
    assert matrix.arrays == (LAYOUT, LAYOUT)


def test_rows_of_a_dense_matrix_own_as_many_elements_as_there_are_genes():
    matrix = MatrixLayout(path="X", n_rows=2**33, n_genes=5, values=LAYOUT, genes=None)
    starts, stops = matrix.elements_of(_int64(0, 2**32), None)
    assert (starts.tolist(), stops.tolist()) == ([0, 5 * 2**32], [5, 5 * 2**32 + 5])
    assert matrix.arrays == (LAYOUT,)


# ---- arrays written by zarr-python


def _codecs(*, inner, shards=None, checksum=True, location="end"):
    inside = [zarr.codecs.BytesCodec(), zarr.codecs.BloscCodec(cname="lz4"), zarr.codecs.Crc32cCodec()]
    if shards is None:
        return inside
    index = [zarr.codecs.BytesCodec(), zarr.codecs.Crc32cCodec()] if checksum else [zarr.codecs.BytesCodec()]
    return [zarr.codecs.ShardingCodec(chunk_shape=inner, codecs=inside, index_codecs=index, index_location=location)]


def _write(root, values, codecs, *, grid, separator="/", fill_value=0):
    array = zarr.create(
        store=str(root),
        path="X/data",
        shape=values.shape,
        chunks=grid,
        dtype=values.dtype,
        zarr_format=3,
        codecs=codecs,
        fill_value=fill_value,
        chunk_key_encoding=DefaultChunkKeyEncoding(separator=separator),
    )
    array[...] = values


def _metadata(root):
    return json.loads((root / "X/data/zarr.json").read_text())


def _read_back(root, layout):
    """Reads the whole array with the layout arithmetic, plain file reads and the Decoder."""
    elements = np.empty(layout.n_elements, layout.dtype)
    tables = {}
    for shard in range(layout.n_shards):
        file = root / layout.shard_key(shard)
        if not file.exists():
            tables[shard] = np.full((layout.chunks_per_shard, 2), ABSENT, np.uint64)
        elif layout.placement.sharded:
            span = layout.placement.index(shard, file.stat().st_size)
            index = file.read_bytes()[span.start : span.stop]
            tables[shard] = layout.placement.parse(index, shard, file.stat().st_size)
        else:
            tables[shard] = np.array([[0, file.stat().st_size]], np.uint64)
    indexes = {shard: ObjectIndex(table) for shard, table in tables.items()}
    chunks = np.arange(layout.n_chunks)
    reads = reads_of(layout, chunks, indexes, gap_bytes=64, max_read_bytes=200)
    first, last = layout.chunk_bounds(chunks)
    for chunk in reads.absent.tolist():
        elements[first[chunk] : last[chunk]] = layout.fill_value
    decoder = Decoder(layout)
    stored = [np.frombuffer((root / span.key).read_bytes(), np.uint8)[span.start : span.stop] for span in reads.spans]
    for chunk, number, offset, size in zip(reads.chunks, reads.numbers, reads.offsets, reads.sizes, strict=True):
        decoder.decode(stored[number][offset : offset + size], elements[first[chunk] : last[chunk]])
    return elements


# shape, chunk, shard (None: not sharded), other options
WRITTEN = {
    "1-d": ((103,), (10,), (40,), {}),
    "1-d, not sharded": ((103,), (10,), None, {}),
    "1-d, whole shards": ((80,), (10,), (40,), {}),
    "1-d, shards of one chunk": ((103,), (10,), (10,), {}),
    "1-d, smaller than a chunk": ((3,), (10,), (40,), {}),
    "1-d, one element": ((1,), (1,), None, {}),
    "2-d": ((37, 7), (4, 7), (12, 7), {}),
    "2-d, not sharded": ((37, 7), (4, 7), None, {}),
    "2-d, one gene": ((37, 1), (4, 1), (8, 1), {}),
    "3-d": ((9, 3, 2), (2, 3, 2), (4, 3, 2), {}),
    "index at the start": ((103,), (10,), (40,), {"location": "start"}),
    "index without crc32c": ((103,), (10,), (40,), {"checksum": False}),
    "index at the start without crc32c": ((37, 7), (4, 7), (12, 7), {"location": "start", "checksum": False}),
    "keys with dots": ((103,), (10,), (40,), {"separator": "."}),
    "2-d, keys with dots": ((37, 7), (4, 7), (12, 7), {"separator": "."}),
    "2-d, keys with dots, not sharded": ((37, 7), (4, 7), None, {"separator": "."}),
}


@pytest.mark.parametrize(("shape", "inner", "shards", "also"), WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_an_array_is_read_back_by_arithmetic(tmp_path, shape, inner, shards, also, dtype):
    values = np.random.default_rng(0).integers(1, 1000, shape).astype(dtype)
    codecs = _codecs(inner=inner, shards=shards, **{k: also[k] for k in also if k != "separator"})
    _write(tmp_path, values, codecs, grid=shards or inner, separator=also.get("separator", "/"))
    layout = array_layout("X/data", _metadata(tmp_path), absent_is_fill=False)
    assert {layout.shard_key(shard) for shard in range(layout.n_shards)} == {
        str(file.relative_to(tmp_path))
        for file in (tmp_path / "X/data").rglob("*")
        if file.is_file() and file.name != "zarr.json"
    }
    assert layout.n_elements == values.size
    np.testing.assert_array_equal(_read_back(tmp_path, layout), values.ravel())


@pytest.mark.parametrize(("dtype", "fill_value"), [("uint8", 0), ("uint8", 7), ("float32", np.nan), ("bool", False)])
def test_what_was_not_stored_is_found_absent(tmp_path, dtype, fill_value):
    """zarr does not store chunks and shards that hold only the fill value."""
    values = np.full(240, fill_value, dtype)
    values[[15, 95, 101]] = 1
    _write(tmp_path, values, _codecs(inner=(10,), shards=(40,)), grid=(40,), fill_value=fill_value)
    layout = array_layout("X/data", _metadata(tmp_path), absent_is_fill=True)
    assert [(tmp_path / layout.shard_key(shard)).exists() for shard in range(6)] == [True, False, True] + [False] * 3
    np.testing.assert_array_equal(_read_back(tmp_path, layout), values)


# ---- unsupported formats

BIG_ENDIAN = {"name": "bytes", "configuration": {"endian": "big"}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC32C = {"name": "crc32c"}
ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}


def _plain(**changes):
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [40, 6],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 6]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [BYTES, ZSTD],
    }
    return metadata | changes


def _grid(*shape):
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def _sharded(*after, chunk_shape=(4, 6), codecs=(BYTES,), index_codecs=(BYTES, CRC32C)):
    configuration = {
        "chunk_shape": list(chunk_shape),
        "codecs": list(codecs),
        "index_codecs": list(index_codecs),
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": configuration}, *after]


_V2 = {"zarr_format": 2, "shape": [40, 6], "chunks": [8, 6], "dtype": "<u2"}

UNREADABLE = {
    "zarr v1": {"zarr_format": 1, "shape": [40, 6], "chunks": [8, 6], "dtype": "<u2"},
    "zarr v2, big endian": _V2 | {"dtype": ">u2"},
    "zarr v2, by columns": _V2 | {"order": "F"},
    "zarr v2, unknown compressor": _V2 | {"compressor": {"id": "pcodec of the future"}},
    "zarr v2, unknown filter": _V2 | {"filters": [{"id": "filter of the future"}], "compressor": {"id": "zlib"}},
    "zarr v2, strings": _V2 | {"dtype": "|O"},
    "no format": {"shape": [40, 6]},
    "zarr v2, by columns, in chunks of columns": _V2 | {"order": "F", "chunks": [8, 3]},
    "transposed, in chunks of columns": _plain(
        chunk_grid=_grid(8, 3), codecs=[{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES]
    ),
    "unknown codec": _plain(codecs=[BYTES, {"name": "pcodec"}]),
    "unknown codec in shards": _plain(codecs=_sharded(codecs=[BYTES, {"name": "pcodec"}])),
    "transposed": _plain(codecs=[{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES]),
    "compressed after the checksum": _plain(codecs=[BYTES, CRC32C, ZSTD]),
    "no array codec": _plain(codecs=[ZSTD]),
    "big endian": _plain(codecs=[BIG_ENDIAN, ZSTD]),
    "big endian in shards": _plain(codecs=_sharded(codecs=[BIG_ENDIAN])),
    "big endian index": _plain(codecs=_sharded(index_codecs=[BIG_ENDIAN, CRC32C])),
    "compressed index": _plain(codecs=_sharded(index_codecs=[BYTES, ZSTD])),
    "shards compressed as a whole": _plain(codecs=_sharded(ZSTD)),
    "shards with a checksum as a whole": _plain(codecs=_sharded(CRC32C)),
    "shards in shards": _plain(codecs=_sharded(codecs=_sharded(chunk_shape=(2, 6)))),
    "unknown keys": _plain(chunk_key_encoding={"name": "v4", "configuration": {"separator": "."}}),
    "strings": _plain(data_type="string", codecs=[{"name": "vlen-utf8"}]),
}


@pytest.mark.parametrize("metadata", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_form_that_cannot_be_read_is_refused(metadata):
    Decoder(array_layout("X/data", _plain(), absent_is_fill=False))
    Decoder(array_layout("X/data", _plain(codecs=_sharded()), absent_is_fill=False))
    with pytest.raises(FormatError, match=r"X/data.*(zloader convert|write it again)"):
        Decoder(array_layout("X/data", metadata, absent_is_fill=False))


# ---- shard indexes

OBJECT_SIZE = 500
TABLE = np.array([[0, 100], [ABSENT, ABSENT], [100, 7], [300, 100]], np.uint64)


def _index(table, *, checksum=True):
    body = np.asarray(table, "<u8").tobytes()
    return body + google_crc32c.value(body).to_bytes(4, "little") * checksum


@pytest.mark.parametrize("checksum", [True, False])
def test_parse_index(checksum):
    placement = dataclasses.replace(LAYOUT.placement, index_checksum=checksum)
    table = placement.parse(_index(TABLE, checksum=checksum), 0, OBJECT_SIZE)
    np.testing.assert_array_equal(table, TABLE)


@given(place=st.integers(0, len(_index(TABLE)) - 1), change=st.integers(1, 255))
def test_a_flipped_byte_of_an_index_is_noticed(place, change):
    stored = bytearray(_index(TABLE))
    stored[place] ^= change
    with pytest.raises(CorruptChunkError, match="X/data/c/2"):
        LAYOUT.placement.parse(bytes(stored), 2, OBJECT_SIZE)


@pytest.mark.parametrize("checksum", [True, False])
def test_an_index_that_was_cut_short_is_noticed(checksum):
    placement = dataclasses.replace(LAYOUT.placement, index_checksum=checksum)
    whole = _index(TABLE, checksum=checksum)
    for length in range(len(whole)):
        with pytest.raises(CorruptChunkError):
            placement.parse(whole[:length], 0, OBJECT_SIZE)


BEYOND = {
    "one byte too far": [401, 100],
    "begins at the end": [500, 1],
    "begins beyond": [10_000, 1],
    "too long": [0, 501],
    "far too long": [0, 2**63],
    "wraps around": [2**64 - 50, 100],
    "size alone marked absent": [0, int(ABSENT)],
}


@pytest.mark.parametrize("entry", BEYOND.values(), ids=BEYOND.keys())
@pytest.mark.parametrize("checksum", [True, False])
def test_an_index_that_points_beyond_its_object_is_noticed(entry, checksum):
    placement = dataclasses.replace(LAYOUT.placement, index_checksum=checksum)
    table = TABLE.copy()
    table[3] = [400, 100]
    placement.parse(_index(table, checksum=checksum), 0, OBJECT_SIZE)
    table[3] = entry
    with pytest.raises(CorruptChunkError, match=r"X/data/c/0.*500"):
        placement.parse(_index(table, checksum=checksum), 0, OBJECT_SIZE)


def test_where_the_index_lies():
    at_end = LAYOUT.placement.index(2, OBJECT_SIZE)
    assert (at_end.key, at_end.start, at_end.stop) == ("X/data/c/2", OBJECT_SIZE - 68, OBJECT_SIZE)
    at_start = dataclasses.replace(LAYOUT.placement, index_at_end=False).index(2, OBJECT_SIZE)
    assert (at_start.start, at_start.stop) == (0, 68)


def test_an_object_smaller_than_its_index_is_noticed():
    LAYOUT.find_index(1, 68, "a.zarr")
    with pytest.raises(TruncatedObjectError, match=r"a\.zarr: X/data/c/1 has 67 bytes, but must have at least 68"):
        LAYOUT.find_index(1, 67, "a.zarr")


def test_an_empty_object_without_an_index_is_noticed():
    plain = vector_layout("X/data", "<u2", n_elements=95, chunk_elements=10)
    with pytest.raises(TruncatedObjectError, match="X/data/c/1 has 0 bytes"):
        plain.find_index(1, 0, "a.zarr")


@given(st.lists(st.integers(-9, 9)))
def test_distinct_equals_a_set(numbers):
    assert distinct(np.array(numbers, np.int64)).tolist() == sorted(set(numbers))
