"""Every codec pipeline decodes arrays written by zarr-python, and corrupt bytes are detected."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import lzma
import tracemalloc
import zlib

import google_crc32c
import numcodecs.blosc
import numcodecs.lz4
import numcodecs.registry
import numcodecs.zstd
import numpy as np
import pytest
import zarr
import zarr.storage
from hypothesis import given
from hypothesis import strategies as st
from pcodec import ChunkConfig, standalone
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from zloader.common.compiled import compiler_is_loaded, load_compiler
from zloader.common.errors import CorruptChunkError, FormatError
from zloader.common.options import MiB
from zloader.storage import decode
from zloader.storage.decode import Decoder, checksum
from zloader.storage.metadata import array_layout

pytestmark = pytest.mark.usefixtures("compiler")

CHUNK = 50  # elements
COMPRESSORS = {
    "none": [],
    **{
        f"blosc {cname} {shuffle}": [BloscCodec(cname=cname, shuffle=shuffle)]
        for cname, shuffle in itertools.product(["lz4", "zstd"], ["shuffle", "bitshuffle", "noshuffle"])
    },
    "blosc lz4hc": [BloscCodec(cname="lz4hc", clevel=9)],
    "blosc zlib": [BloscCodec(cname="zlib")],
    "blosc blosclz": [BloscCodec(cname="blosclz")],
    "blosc stored": [BloscCodec(clevel=0)],
    "zstd": [ZstdCodec(level=3)],
    "zstd with its own checksum": [ZstdCodec(level=0, checksum=True)],
    "gzip": [GzipCodec(level=6)],
    "zstd gzip": [ZstdCodec(level=1), GzipCodec(level=1)],
    "numcodecs lz4": [{"name": "numcodecs.lz4", "configuration": {"acceleration": 1}}],
}
DELTAS = [f"delta {codec}" for codec in ("blosc lz4 bitshuffle", "blosc zstd shuffle", "zstd", "none", "pcodec")]
CODECS = [*COMPRESSORS, "pcodec", *DELTAS]
DTYPES = ["uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64", "float16", "float32", "float64", "bool"]
CHECKED = pytest.mark.parametrize("checked", [False, True], ids=["plain", "crc32c"])


@pytest.fixture(scope="session")
def compiler():
    """Until numba is loaded, chunks are decoded one by one."""
    load_compiler()


def _values(n, dtype):
    """Numbers that compress a little, including the extremes of the dtype."""
    values = np.random.default_rng(3).integers(0, 5, n).astype(dtype)
    if values.dtype.kind in "iu":
        values[::7] = np.iinfo(dtype).max
        values[1::7] = np.iinfo(dtype).min
    elif values.dtype.kind == "f":
        values[:5] = [np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).smallest_subnormal]
    return values


def _delta(dtype, **types):
    return {"name": "numcodecs.delta", "configuration": {"dtype": np.dtype(dtype).str, **types}}


def _written(values, codec, *, checked=False, filters=()):
    """Writes an unsharded array with zarr in chunks of CHUNK. Returns its layout and the stored bytes of each chunk."""
    name = codec.removeprefix("delta ")
    serializer = {"name": "numcodecs.pcodec", "configuration": {"level": 8}} if name == "pcodec" else "auto"
    objects = {}
    array = zarr.create_array(
        zarr.storage.MemoryStore(objects),
        name="x",
        shape=values.shape,
        dtype=values.dtype,
        chunks=(CHUNK,),
        filters=[*filters, *[_delta(values.dtype)] * (name != codec)],
        serializer=serializer,
        compressors=[*COMPRESSORS.get(name, []), *[Crc32cCodec()] * checked],
        config={"write_empty_chunks": True},
    )
    array[:] = values
    layout = array_layout("x", json.loads(objects["x/zarr.json"].to_bytes()), absent_is_fill=False)
    assert (layout.codecs[-1]["name"] == "crc32c") == checked
    keys = map(layout.shard_key, range(layout.n_shards))
    return layout, [np.frombuffer(objects[key].to_bytes(), np.uint8) for key in keys]


@functools.cache
def _chunk(codec, *, checked=False):
    """The layout, the values and the stored bytes of one chunk of uint16."""
    values = _values(CHUNK, "uint16")
    layout, (stored,) = _written(values, codec, checked=checked)
    return layout, values, stored


def _decoded(layout, stored, n=CHUNK):
    """Decodes the first `n` elements of one chunk. Batch decoding must give the same elements or the same error."""
    (whole,), corrupt = _decoded_all(layout, [stored], [n])
    found = np.zeros(n, layout.dtype)
    try:
        Decoder(layout).decode(stored, found)
    except CorruptChunkError as error:
        assert [(position, str(reason)) for position, reason in corrupt] == [(0, str(error))]  # noqa: PT017 - raised again
        raise
    assert not corrupt
    _same(whole[:n], found)
    return found


def _decoded_all(layout, stored, lengths=None):
    """Decodes chunks in one batch: two chunks per read with a byte between them, written to `out` in reverse."""
    pairs = [stored[i : i + 2] for i in range(0, len(stored), 2)]
    sizes = np.array([len(content) for content in stored], np.int64)
    offsets = np.array([0 if i % 2 == 0 else sizes[i - 1] + 1 for i in range(len(stored))], np.int64)
    width = layout.chunk_elements
    begins = np.arange(len(stored))[::-1] * width
    chunks = np.empty(len(stored), decode.CHUNK)
    chunks["read"], chunks["offset"], chunks["size"], chunks["begin"] = (
        np.arange(len(stored)) // 2,
        offsets,
        sizes,
        begins,
    )
    chunks["elements"] = width
    chunks["first"], chunks["stop"] = 0, [width] * len(stored) if lengths is None else lengths
    reads = [b"!".join(content.tobytes() for content in pair) for pair in pairs]
    out = np.zeros(len(stored) * width, layout.dtype)
    corrupt = Decoder(layout).decode_all(reads, chunks, out)
    return [out[begin : begin + width] for begin in begins], corrupt


def _same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.tobytes() == wanted.tobytes()  # compares NaN and -0.0 too


# ---- valid chunks


@pytest.mark.every(2)
@CHECKED
@pytest.mark.parametrize(
    ("dtype", "codec"), [("uint16", codec) for codec in CODECS] + [("float32", codec) for codec in CODECS[:-1]]
)
def test_what_zarr_wrote_is_decoded(dtype, codec, checked):
    values = _values(3 * CHUNK + 7, dtype)
    if codec in DELTAS and dtype == "float32":
        values = np.arange(len(values), dtype=dtype) ** 2  # numbers whose differences are exact
    layout, stored = _written(values, codec, checked=checked)
    decoder = Decoder(layout)
    found = np.zeros(len(values), dtype)
    for chunk, content in enumerate(stored):
        decoder.decode(content, found[chunk * CHUNK : (chunk + 1) * CHUNK])  # the last chunk is shorter
    _same(found, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_decoded(dtype):
    values = _values(CHUNK + 1, dtype)
    layout, stored = _written(values, "blosc lz4 shuffle", checked=True)
    _same(np.concatenate([_decoded(layout, stored[0]), _decoded(layout, stored[1], 1)]), values)


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_that_compress_badly_or_very_well_are_decoded(codec):
    noise = np.random.default_rng(0).integers(0, 2**64, CHUNK, np.uint64)
    values = np.concatenate([noise, np.zeros(CHUNK, np.uint64)])
    layout, stored = _written(values, codec)
    _same(np.concatenate([_decoded(layout, content) for content in stored]), values)


@pytest.mark.parametrize("codec", CODECS)
def test_the_stored_bytes_are_left_alone(codec):
    layout, values, stored = _chunk(codec, checked=True)
    assert not stored.flags.writeable
    for content in (stored, stored.copy(), np.concatenate([stored, stored])[len(stored) :]):
        _same(_decoded(layout, content), values)
        assert content.tobytes() == stored.tobytes()


# ---- corrupt chunks


@given(codec=st.sampled_from(CODECS), draw=st.data())
def test_a_flipped_byte_of_a_checked_chunk_is_noticed(codec, draw):
    layout, _, stored = _chunk(codec, checked=True)
    flipped = stored.copy()
    flipped[draw.draw(st.integers(0, len(stored) - 1))] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(CorruptChunkError, match="crc32c"):
        _decoded(layout, flipped)


@pytest.mark.parametrize("codec", ["zstd with its own checksum", "gzip"])
def test_a_flip_in_a_codec_with_a_checksum_of_its_own_is_noticed(codec):
    """Header fields without effect, such as the time in gzip, may change. The values are then still right."""
    layout, values, stored = _chunk(codec)
    n_noticed = 0
    for place, change in itertools.product(range(len(stored)), [0x01, 0x20, 0x80, 0xFF]):
        flipped = stored.copy()
        flipped[place] ^= change
        try:
            found = _decoded(layout, flipped)
        except CorruptChunkError:
            n_noticed += 1
        else:
            _same(found, values)
    assert n_noticed > 2 * len(stored)


@pytest.mark.every(2)
@CHECKED
@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_was_cut_short_is_noticed(codec, checked):
    layout, _, stored = _chunk(codec, checked=checked)
    for length in range(len(stored)):
        with pytest.raises(CorruptChunkError):
            _decoded(layout, stored[:length].copy())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", [1, CHUNK - 1, CHUNK + 1, 2 * CHUNK])
def test_a_chunk_of_another_size_is_noticed(codec, elements):
    layout, _, stored = _chunk(codec)
    other = dataclasses.replace(layout, chunk_elements=elements)
    for n in {1, elements}:  # also with only a part of the chunk requested
        with pytest.raises(CorruptChunkError):
            _decoded(other, stored, n)


@pytest.mark.parametrize("announced", [0, 1, 99, 101, 200, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("codec", [codec for codec in CODECS if "blosc" in codec])
def test_a_blosc_header_that_announces_another_size_is_noticed(codec, announced):
    """Blosc trusts its header and writes as many bytes as the header says."""
    layout, _, stored = _chunk(codec)
    wrong = stored.copy()
    wrong[4:8] = np.array([announced], "<u4").view(np.uint8)
    with pytest.raises(CorruptChunkError, match="header"):
        _decoded(layout, wrong)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_something_else_are_noticed(codec):
    layout, _, stored = _chunk(codec, checked=True)
    for other in (b"", b"x", b"<html>Service Unavailable</html>" * 20, bytes(len(stored) + 1)):
        with pytest.raises(CorruptChunkError):
            _decoded(layout, np.frombuffer(other, np.uint8))


# ---- chunks that would decode to far more than they may hold

ZEROS = bytes(1 << 25)
STREAMS = {
    "zlib": zlib.compress(ZEROS),
    "gzip": gzip.compress(ZEROS),
    "bz2": bz2.compress(ZEROS),
    "lzma": lzma.compress(ZEROS, preset=0),
    "zstd": numcodecs.zstd.compress(ZEROS),
    "lz4": numcodecs.lz4.compress(ZEROS),
}


def _zstd_frame(n_blocks):
    """A zstd frame that does not announce its size: blocks of 128 KiB zeros in four bytes each (RFC 8878, 3.1.1.2)."""
    blocks = [((i == n_blocks - 1) | 1 << 1 | 1 << 20).to_bytes(3, "little") + b"\0" for i in range(n_blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


BOMBS = {
    **{name: ([name], content) for name, content in STREAMS.items()},
    "a second member": (["gzip"], gzip.compress(bytes(2 * CHUNK)) + STREAMS["gzip"]),
    "a second frame": (["zstd"], numcodecs.zstd.compress(bytes(2 * CHUNK)) + STREAMS["zstd"]),
    "a frame of unknown size": (["zstd"], _zstd_frame(256)),
    "after a frame of known size": (["zstd"], numcodecs.zstd.compress(bytes(2 * CHUNK)) + _zstd_frame(256)),
    "the inner of two": (["zlib", "gzip"], gzip.compress(STREAMS["zlib"])),
    "the outer of two": (["zstd", "gzip"], STREAMS["gzip"]),
    "blosc inside": (["blosc", "gzip"], gzip.compress(numcodecs.blosc.compress(ZEROS, b"lz4", 5, 0))),
    "differences of other types": (["delta", "lzma"], STREAMS["lzma"]),
    "pcodec inside": (
        ["pcodec", "zlib"],
        zlib.compress(standalone.simple_compress(np.zeros(1 << 24, "u2"), ChunkConfig())),
    ),
}


def _coded(names, dtype="uint16"):
    """The layout of a Zarr v2 array of one chunk with these filters and compressor."""
    codecs = [{"id": name, **({"dtype": "<u2", "astype": "<u1"} if name == "delta" else {})} for name in names]
    metadata = {"zarr_format": 2, "shape": [CHUNK], "chunks": [CHUNK], "dtype": np.dtype(dtype).str}
    return array_layout("x", metadata | {"filters": codecs[:-1], "compressor": codecs[-1]}, absent_is_fill=False)


@pytest.mark.parametrize(("names", "content"), BOMBS.values(), ids=BOMBS.keys())
def test_a_decompression_bomb_is_refused_before_it_takes_memory(names, content):
    decoder, out = Decoder(_coded(names)), np.zeros(CHUNK, "uint16")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunkError):
            decoder.decode(np.frombuffer(content, np.uint8), out)
        assert tracemalloc.get_traced_memory()[1] < 4 * MiB
    finally:
        tracemalloc.stop()


def test_frames_and_members_that_hold_the_chunk_together_are_decoded():
    values = np.arange(CHUNK, dtype="uint16")
    halves = [values.tobytes()[:CHUNK], values.tobytes()[CHUNK:]]
    for name, compress in (("gzip", gzip.compress), ("bz2", bz2.compress), ("lzma", lzma.compress)):
        _same(_decoded(_coded([name]), np.frombuffer(b"".join(map(compress, halves)), np.uint8)), values)
    n = 1 << 16
    layout = dataclasses.replace(_coded(["zstd"]), n_elements=n, chunk_elements=n)
    found = np.ones(n, "uint16")
    Decoder(layout).decode(np.frombuffer(_zstd_frame(1), np.uint8), found)
    assert not found.any()


@pytest.mark.parametrize("name", ["pickle", "json2", "msgpack2", "vlen-bytes"])
def test_codecs_that_run_code_or_have_no_bound_are_refused(name):
    with pytest.raises(FormatError, match=name):
        Decoder(_coded([name, "zlib"]))


# ---- many chunks in one call


@pytest.fixture(params=[True, False], ids=["compiled", "one by one"])
def either_way(request, monkeypatch):
    """Runs with the C functions, and as if the libraries did not export them."""
    assert compiler_is_loaded()
    assert decode.decompresses_many()  # the installed wheels export the C functions
    monkeypatch.setattr(decode, "decompresses_many", lambda: request.param)


@pytest.mark.usefixtures("either_way")
@CHECKED
@pytest.mark.parametrize("codec", ["blosc lz4 shuffle", "blosc zstd bitshuffle", "zstd", "none"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "int64"])
def test_many_chunks_are_decoded_at_once(dtype, codec, checked):
    _many_are_decoded(dtype, codec, checked)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", DELTAS)
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int16", "int32", "int64"])
def test_many_chunks_of_differences_are_decoded_at_once(dtype, codec):
    """The values include jumps from one end of the dtype to the other, whose differences wrap around."""
    _many_are_decoded(dtype, codec, True)


def _many_are_decoded(dtype, codec, checked):
    values = _values(7 * CHUNK, dtype)
    layout, stored = _written(values, codec, checked=checked)
    found, corrupt = _decoded_all(layout, stored)
    assert not corrupt
    _same(np.concatenate(found), values)


@pytest.mark.usefixtures("either_way")
@CHECKED
@pytest.mark.parametrize("codec", ["blosc lz4 shuffle", "zstd", "delta blosc lz4 bitshuffle", "pcodec"])
def test_of_many_chunks_each_corrupt_one_is_told_and_the_others_are_right(codec, checked):
    values = _values(9 * CHUNK, "uint16")
    layout, stored = _written(values, codec, checked=checked)
    wrong = {1: stored[1][:-1], 4: stored[4][:3], 5: np.zeros(200, np.uint8), 8: stored[8][:0]}
    found, corrupt = _decoded_all(layout, [wrong.get(i, content) for i, content in enumerate(stored)])
    assert [position for position, _ in corrupt] == sorted(wrong)
    assert all(isinstance(error, CorruptChunkError) for _, error in corrupt)
    for i in set(range(9)) - set(wrong):
        _same(found[i], values[i * CHUNK : (i + 1) * CHUNK])


@given(draw=st.data(), compressed_as=st.sampled_from(["uint8", "uint16", "uint32", "float64"]), delta=st.booleans())
def test_what_is_needed_of_a_chunk_is_right_and_nothing_beside_it_is_touched(draw, compressed_as, delta):
    """Includes chunks of several Blosc blocks, and another item size than that of their elements."""
    n = 1 << 17
    values = np.random.default_rng(0).integers(0, 1 << draw.draw(st.integers(1, 16)), n).astype("uint16")
    block = draw.draw(st.sampled_from([1 << 12, 2 * n]))  # Blosc makes none of less than 64 KiB
    plain = numcodecs.Delta("<u2").encode(values) if delta else values
    content = numcodecs.blosc.compress(plain.view(compressed_as), b"lz4", 5, numcodecs.blosc.SHUFFLE, block)
    assert (int.from_bytes(content[8:12], "little") < 2 * n) == (block < 2 * n)
    layout, _, _ = _chunk("delta blosc lz4 bitshuffle" if delta else "blosc lz4 shuffle")
    layout = dataclasses.replace(layout, chunk_elements=n, n_elements=n)
    first = draw.draw(st.integers(0, n - 1))
    stop = draw.draw(st.integers(first + 1, n))
    begin, end = n, n + stop - first
    chunks = np.array([(0, 0, len(content), begin, first, stop, n)], decode.CHUNK)
    out = np.full(3 * n, 7, "uint16")
    assert Decoder(layout).decode_all([content], chunks, out) == []
    _same(out[begin:end], values[first:stop])
    assert (out[:begin] == 7).all()
    assert (out[end:] == 7).all()


# Only arrays of files are narrowed, and these have no differences.
PARTS = [(codec, narrow) for codec in ("none", "blosc lz4 shuffle", "zstd") for narrow in (None, "uint8", "uint16")]
PARTS += [(f"delta {codec}", None) for codec in ("none", "blosc lz4 bitshuffle")]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("codec", "narrow"), PARTS)
@pytest.mark.parametrize("kind", ["int32", "uint64"])
@pytest.mark.parametrize("cut", [False, True])
def test_every_part_of_a_chunk_is_decoded_into_its_place(codec, narrow, kind, cut):
    """Also into a narrower dtype, where elements out of bounds would fit, and from a last chunk that is short."""
    values = np.random.default_rng(1).integers(0, 250, CHUNK).astype(kind)
    layout, (stored,) = _written(values, codec, checked=True)
    n = 33 if cut and codec == "none" else CHUNK
    if n < CHUNK:
        body = values[:n].tobytes()
        stored = np.frombuffer(body + google_crc32c.value(body).to_bytes(4, "little"), np.uint8)
    stored_dtype = None if narrow is None else np.dtype(kind)
    layout = dataclasses.replace(layout, below=250, dtype=np.dtype(narrow or kind), stored_dtype=stored_dtype)
    wrong = values.copy()
    wrong[20] = 256 + 3
    for first, stop in [(0, n), (0, 1), (n - 1, n), (5, 30), (20, 21)]:
        out = np.full(3 * CHUNK, 7, layout.dtype)
        chunk = np.array([(0, 2, len(stored), 10, first, stop, n)], decode.CHUNK)
        assert Decoder(layout).decode_all([b"!!" + stored.tobytes()], chunk, out) == []
        _same(out[10 : 10 + stop - first], values[first:stop].astype(layout.dtype))
        assert (np.delete(out, slice(10, 10 + stop - first)) == 7).all()
        _, (content,) = _written(wrong, codec, checked=True)
        chunk = np.array([(0, 0, len(content), 10, first, stop, CHUNK)], decode.CHUNK)
        errors = Decoder(layout).decode_all([content], chunk, out)
        assert ["gene 259" in str(error) for _, error in errors] == [True] * (first <= 20 < stop)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", ["blosc lz4 shuffle", "delta blosc lz4 bitshuffle", "pcodec"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_elements_out_of_bounds_are_told_also_with_a_right_checksum(dtype, codec):
    values = np.arange(6 * CHUNK).astype(dtype) % 40
    values[2 * CHUNK + 3] = 41  # one too large
    values[5 * CHUNK + 7 :] = 99  # after the requested part of the last chunk, so not checked
    if np.dtype(dtype).kind == "i":
        values[4 * CHUNK + 5] = -1
    layout, stored = _written(values, codec, checked=True)
    layout = dataclasses.replace(layout, below=41)
    _, corrupt = _decoded_all(layout, stored, lengths=[CHUNK] * 5 + [7])
    assert [position for position, _ in corrupt] == [2, *[4] * (np.dtype(dtype).kind == "i")]
    assert "gene 41" in str(corrupt[0][1])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("codec", ["blosc lz4 shuffle", "delta blosc lz4 bitshuffle"])
@pytest.mark.parametrize("below", [127, 128, 200, 256, 300, 2**40])
def test_a_negative_element_is_out_of_bounds_for_any_number_of_genes(below, codec):
    values = np.array([0, 126, -1, 5, 126] * (CHUNK // 5), "int8")
    layout, stored = _written(values, codec)
    _, corrupt = _decoded_all(dataclasses.replace(layout, below=below), stored)
    assert "gene -1" in str(corrupt[0][1])


@pytest.mark.parametrize("types", [{"astype": "|i1"}, {"astype": "<i4"}], ids=["narrower", "wider"])
@pytest.mark.parametrize("codec", ["blosc lz4 bitshuffle", "gzip", "none"])
def test_differences_of_another_dtype_are_decoded(types, codec):
    values = np.cumsum(np.random.default_rng(0).integers(-9, 9, 2 * CHUNK)).astype("int16")
    layout, stored = _written(values, codec, filters=[_delta("<i2", **types)])
    _same(np.concatenate([_decoded(layout, content) for content in stored]), values)


def test_filters_are_undone_in_their_order():
    values = np.random.default_rng(0).integers(7, 100, CHUNK, "uint16")
    scale = {"offset": 7, "scale": 2, "dtype": "<u2", "astype": "<u4"}
    filters = [{"name": "numcodecs.fixedscaleoffset", "configuration": scale}, _delta("<u4")]
    layout, (stored,) = _written(values, "zstd", filters=filters)
    _same(_decoded(layout, stored), values)


@given(draw=st.data())
def test_whatever_happens_to_a_chunk_of_pcodec_is_a_corrupt_chunk_or_none(draw):
    """Without a checksum, so that the decoder itself meets the damage."""
    layout, _, stored = _chunk("pcodec")
    damaged = stored[: draw.draw(st.integers(0, len(stored)))].copy()
    for place in draw.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3 * (len(damaged) > 0))):
        damaged[place] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(CorruptChunkError):
        _decoded(layout, damaged)


def test_a_panic_of_a_decoder_is_a_corrupt_chunk():
    layout, _, stored = _chunk("pcodec")
    out = np.zeros(CHUNK, layout.dtype)
    out.flags.writeable = False  # pcodec panics, which Python sees as a BaseException
    with pytest.raises(CorruptChunkError, match="NotWriteable"):
        Decoder(layout).decode(stored, out)


def test_an_interrupt_of_a_decoder_stays_an_interrupt(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    layout, _, stored = _chunk("pcodec")
    monkeypatch.setattr(standalone, "simple_decompress_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Decoder(layout).decode(stored, np.zeros(CHUNK, layout.dtype))


# ---- making a decoder

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
UNKNOWN = {
    "unknown compressor": [BYTES, {"name": "pcodec"}],
    "big endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "unknown filter": [{"name": "numcodecs.nonesuch", "configuration": {}}, BYTES, {"name": "zstd"}],
    "filter without its settings": [{"name": "numcodecs.delta"}, BYTES],
    "filter in foreign byte order": [_delta(">u2"), BYTES],
    "checksum before the compressor": [BYTES, {"name": "crc32c"}, {"name": "zstd"}],
    "two checksums": [BYTES, {"name": "crc32c"}, {"name": "crc32c"}],
    "transposed": [{"name": "transpose", "configuration": {"order": [0]}}, BYTES],
    "strings": [{"name": "vlen-utf8"}, {"name": "zstd"}],
}


@pytest.mark.parametrize("codecs", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_codecs_are_refused_and_named(codecs):
    layout, _, _ = _chunk("none")
    with pytest.raises(FormatError, match=r"x is .*zloader convert") as caught:
        Decoder(dataclasses.replace(layout, codecs=tuple(codecs)))
    assert codecs[-1]["name"] in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    layout, _, _ = _chunk("pcodec")
    monkeypatch.delitem(numcodecs.registry.codec_registry, "pcodec")
    with pytest.raises(FormatError, match=r'pcodec, which is not installed: pip install "zloader\[pcodec\]"'):
        Decoder(layout)


@given(values=st.binary(max_size=100))
def test_checksum_is_the_crc32c_of_the_bytes(values):
    assert checksum(np.frombuffer(values, np.uint8)) == google_crc32c.value(values)
    words = np.frombuffer(values[: len(values) // 4 * 4], "<u4")
    assert checksum(words) == google_crc32c.value(words.tobytes())


def test_checksum_is_castagnolis():
    assert checksum(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of RFC 3720's polynomial
