"""verify: intact stores have no problems, and every kind of damage and difference is reported with its location."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import anndata as ad
import google_crc32c
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from conftest import S3
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import (
    LAYOUTS,
    SMALL,
    STRINGS,
    FailingDestination,
    convert,
    counts,
    disk_full,
    frame,
    full_anndata,
    write_h5ad,
)

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.comparison import bits_differ, element_differences
from zloader.conversion.convert import convert_to
from zloader.conversion.destination import MARKER
from zloader.conversion.elements import library_settings
from zloader.conversion.scan import StoredArray
from zloader.conversion.verify import Verification, verify
from zloader.storage.metadata import layout_of

SHUFFLED = dataclasses.replace(SMALL, shuffle_seed=7)


def check(url: Path | str, **options: Any) -> Verification:
    return verify(url, progress=False, **options)


def found(url: Path | str, **options: Any) -> list[tuple[str, str]]:
    return [(problem.where, problem.what) for problem in check(url, **options).problems]


def assert_named(problems: Sequence[tuple[str, str]], wanted: Mapping[str, str]) -> None:
    """Asserts that there are problems at exactly these paths, and that one at each path contains its text."""
    assert {where for where, _ in problems} == set(wanted), problems
    for wanted_path, text in wanted.items():
        assert any(text in what for where, what in problems if where == wanted_path), problems


def write_full(path: Path, adata: ad.AnnData | None = None) -> Path:
    with ad.settings.override(allow_write_nullable_strings=True):
        (adata or full_anndata()).write_h5ad(path, convert_strings_to_categoricals=False)
    return path


@contextlib.contextmanager
def quiet_zarr() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every kind of element of an AnnData, beside its source. Tests must not change it."""
    directory = tmp_path_factory.mktemp("sound")
    convert(write_full(directory / "a.h5ad"), directory / "a.zarr")
    return directory / "a.zarr"


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A copy of `sound` that tests may damage."""
    return Path(shutil.copytree(sound, tmp_path / "a.zarr"))


# ---- intact stores


@pytest.mark.slow
def test_a_sound_store(sound: Path) -> None:
    seen = check(sound, against=sound.with_name("a.h5ad"))
    assert seen.problems == ()
    assert seen.ok
    stored = [path for path in sound.rglob("*") if path.is_file()]
    arrays = [node for _, node in zarr.open_group(sound, mode="r").members(max_depth=None) if hasattr(node, "shape")]
    assert (seen.rows, seen.genes, seen.objects) == (60, 300, len(stored))
    assert (seen.arrays, seen.values) == (len(arrays), sum(array.size for array in arrays))
    assert seen.bytes_read == sum(path.stat().st_size for path in stored)
    assert seen.chunks == sum(
        int(np.prod([-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]))
        for array in arrays
    )
    assert seen.against == (str(sound.with_name("a.h5ad")),)
    assert json.loads(json.dumps(dataclasses.asdict(seen)))["problems"] == []


@pytest.mark.every(10)
@pytest.mark.parametrize("options", [SMALL, SHUFFLED], ids=["in order", "shuffled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(tmp_path: Path, layout: str, options: zl.ConvertOptions) -> None:
    x = counts(dtype=np.float64)
    x.data[:3] = np.nan, -0.0, np.inf
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](x), layers={"more": LAYOUTS[layout](counts(seed=1))})
    convert(source, tmp_path / "a.zarr", options)
    assert found(tmp_path / "a.zarr", against=source) == []


@pytest.mark.slow
def test_full_and_shuffled(tmp_path: Path) -> None:
    source = write_full(tmp_path / "a.h5ad")
    convert(source, tmp_path / "a.zarr", SHUFFLED)
    assert found(tmp_path / "a.zarr", against=source) == []
    assert found(tmp_path / "a.zarr", against=full_anndata()) == []  # in memory


def test_joined_sources(tmp_path: Path) -> None:
    sources = []
    for number in range(2):
        x, var = counts(30, seed=number), frame(300, "g")
        if number:
            x, var = x[:, :5:-1].tocsr(), var[:5:-1]
        kinds = pd.Categorical([f"k{number}", "both", None] * 10)
        obs = frame(30, f"s{number}c").assign(kind=kinds)
        sources.append(write_h5ad(tmp_path / f"{number}.h5ad", x, obs=obs, var=var))
    select = zl.Selection(join="outer", source_column="plate")
    convert(sources, tmp_path / "a.zarr", SHUFFLED, select=select)
    assert found(tmp_path / "a.zarr", against=sources) == []
    problems = found(tmp_path / "a.zarr", against=sources[0])
    assert problems[0] == ("against", "the store was made from 2 sources (0, 1), not 1")
    assert ("obs", "has 60 rows, but 30 in the sources") in problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "select", [{"x": "layers/csr"}, {"x": "raw/X", "layers": []}, {"obs": ["kind"], "obsm": []}], ids=str
)
def test_chosen_parts(sound: Path, tmp_path: Path, select: dict[str, Any]) -> None:
    source = sound.with_name("a.h5ad")
    convert(source, tmp_path / "b.zarr", select=zl.Selection(**select))
    assert found(tmp_path / "b.zarr", against=source) == []


def test_chosen_genes(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    convert(source, tmp_path / "a.zarr", select=zl.Selection(genes=["gene7", "gene2"]))
    assert found(tmp_path / "a.zarr", against=source) == []


@pytest.mark.every(5)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_next_to_nothing(tmp_path: Path, layout: str, shape: tuple[int, int]) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](sp.csr_matrix(shape, dtype=np.float32)))
    convert(source, tmp_path / "a.zarr")
    assert found(tmp_path / "a.zarr", against=source) == []


# ---- stores written by other programs


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_store_that_anndata_wrote(tmp_path: Path, sharded: bool) -> None:
    adata = full_anndata()
    del adata.layers["csc"]
    adata.layers["zeros"] = np.zeros(adata.shape, np.float32)  # zarr omits chunks of zeros
    with (
        quiet_zarr(),
        ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=sharded, allow_write_nullable_strings=True),
    ):
        adata.write_zarr(tmp_path / "a.zarr")
    assert found(tmp_path / "a.zarr", against=adata) == []
    del adata.uns["text"]
    adata.X.data[3] += 1
    problems = found(tmp_path / "a.zarr", against=adata)
    assert_named(problems, {"X": "1 row differs", "uns/text": "not in the sources"})


def test_csc_is_sound_unless_convert_wrote_the_store(tmp_path: Path) -> None:
    with quiet_zarr(), ad.settings.override(zarr_write_format=3), zarr.config.set({"array.write_empty_chunks": True}):
        ad.AnnData(counts().tocsc()).write_zarr(tmp_path / "a.zarr")
        assert found(tmp_path / "a.zarr") == []
        root = zarr.open_group(tmp_path / "a.zarr", mode="r+", use_consolidated=False)
        del root["raw"]
        root.attrs["zloader"] = {}
        zarr.consolidate_metadata(tmp_path / "a.zarr")
    assert_named(found(tmp_path / "a.zarr"), {"X": "csc_matrix"})


def by_hand(
    path: Path,
    x: sp.csr_matrix,
    *,
    shape: tuple[int, int] | None = None,
    ours: bool = True,
    chunk: int = 50,
    shard: int = 200,
    **arrays: Any,
) -> Path:
    """A store whose X has these arrays, valid or not, sharded by zarr.

    It claims to be written by `convert` if it is `ours`.
    """
    shape = shape or x.shape
    with quiet_zarr(), ad.settings.override(zarr_write_format=3):
        with zarr.config.set({"array.write_empty_chunks": True}):
            ad.AnnData(obs=frame(shape[0], "c"), var=frame(shape[1], "g")).write_zarr(path)
        root = zarr.open_group(path, mode="r+", use_consolidated=False)
        del root["raw"]  # null, without its chunk
        root.attrs.update({"zloader": {}} if ours else {})
        group = root.create_group("X", attributes={"encoding-type": "csr_matrix", "shape": list(x.shape)})
        with zarr.config.set({"array.write_empty_chunks": ours}):
            for name in ("indptr", "indices", "data"):
                values = np.asarray(arrays.get(name, getattr(x, name)))
                made = group.create_array(
                    name, shape=values.shape, dtype=values.dtype, chunks=(chunk,), shards=(shard,)
                )
                made[:] = values
        zarr.consolidate_metadata(path)
    return path


def test_sharded_by_zarr(tmp_path: Path) -> None:
    x = counts()
    x.data[100:400] = 0  # chunks with only fill values, and shards without an object
    assert found(by_hand(tmp_path / "a.zarr", x, ours=False)) == []
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert root["X/data"].nchunks_initialized < root["X/data"].nchunks


# ---- damage


def flip(path: Path, at: int = 20) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path, by: int = 3) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits a metadata object."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


TEXT = str(PurePosixPath("obs/string", STRINGS, "c/0"))
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "chunk": ("X/data/c/1", flip, "chunk 0 of X/data/c/1: its crc32c differs"),
    "index": ("X/indices/c/0", lambda path: flip(path, -9), "shard index of X/indices/c/0 does not match"),
    "dense chunk": ("layers/dense/c/0/0", flip, "its crc32c differs"),
    "raw": ("raw/X/data/c/0", flip, "its crc32c differs"),
    "indptr": ("X/indptr/c/0", flip, "its crc32c differs"),
    "codes": ("obs/kind/codes/c/0", flip, "its crc32c differs"),
    "strings": (TEXT, flip, f"whose object {TEXT} ("),
    "records": ("uns/records/c/0", flip, "whose object uns/records/c/0 ("),
    "embedding": ("obsm/X_pca/c/0/0", flip, "its crc32c differs"),
    "nested": ("uns/nested/array/c/0/0", flip, "its crc32c differs"),
    "cut short": ("X/data/c/0", cut, "does not match its checksum"),
    "nothing left": ("X/data/c/2", lambda path: path.write_bytes(b""), "has 0 bytes, but must have at least"),
    "shard gone": ("X/data/c/2", Path.unlink, "is missing: the store is incomplete"),
    "strings gone": (TEXT, Path.unlink, "is missing: the store is incomplete"),
    "scalar gone": ("uns/number/c", Path.unlink, "is missing: the store is incomplete"),
    "not ours": ("X/data/c/99", Path.touch, "belongs to no array"),
    "left over": ("X/data/c/1.partial", Path.touch, "belongs to no array"),
    "marker": (MARKER, Path.touch, "did not finish"),
    "metadata gone": ("X/zarr.json", Path.unlink, "is missing, but is in the consolidated"),
    "metadata broken": ("X/data/zarr.json", lambda path: flip(path, 0), "is not the metadata"),
    "metadata changed": (
        "X/zarr.json",
        lambda path: edit(path, lambda node: node["attributes"].update(more=1)),
        "differs from the consolidated",
    ),
}


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize(("key", "damage", "what"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(store: Path, key: str, damage: Callable[[Path], None], what: str) -> None:
    damage(store / key)
    assert_named(found(store), {key.rpartition("/c/")[0] if "whose object" in what else key: what})


def test_the_first_problem_of_each_array_is_named(store: Path) -> None:
    keys = ("X/data/c/0", "X/data/c/1", "layers/csr/indices/c/0", "obs/kind/codes/c/0")
    for key in keys:
        flip(store / key)
    (store / "varm/PCs/c/0/0").unlink()
    flip(store / "X/data/c/0", -40)  # this damages the index, so the chunks cannot be found
    assert {where for where, _ in found(store)} == {*keys, "varm/PCs/c/0/0"} - {"X/data/c/1"}


@pytest.mark.parametrize("chunk", [0, 1])
def test_any_chunk_of_a_shard_is_named(store: Path, chunk: int) -> None:
    shard = store / "X/indices/c/0"
    table = np.frombuffer(shard.read_bytes()[-36:-4], "<u8").reshape(2, 2)
    flip(shard, int(table[chunk, 0]) + 18)
    ((where, what),) = found(store)
    assert (where, what.split(":")[0]) == ("X/indices/c/0", f"chunk {chunk} of X/indices/c/0")


def test_a_node_that_readers_do_not_see(store: Path) -> None:
    shutil.copytree(store / "varm/PCs", store / "varm/other")
    assert_named(found(store), {"varm/other/zarr.json": "not in the consolidated metadata"})


def test_the_root_is_gone(store: Path) -> None:
    (store / "zarr.json").unlink()
    assert_named(found(store), {"zarr.json": "it has no zarr.json"})


def test_the_root_is_broken(store: Path) -> None:
    edit(store / "zarr.json", lambda node: node["consolidated_metadata"]["metadata"]["X"].update(strange=1))
    assert_named(found(store), {"X/zarr.json": "differs from the consolidated metadata of the root"})


def test_a_conversion_that_did_not_end(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    with pytest.raises(errors.StoreError):
        convert_to(FailingDestination(Location(url=str(dest)), survives=6, fail=disk_full), source, options=SMALL)
    seen = check(dest, against=source)
    assert_named([(problem.where, problem.what) for problem in seen.problems], {MARKER: "convert with --resume"})
    assert not seen.ok
    assert (seen.rows, seen.objects > 0) == (0, True)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError):
        check(tmp_path / "none.zarr")


# ---- validity of matrices


def disordered(*rows: int) -> sp.csr_matrix:
    """Counts with the values of these rows in reverse order."""
    x = counts()
    for row in rows:
        part = slice(x.indptr[row], x.indptr[row + 1])
        x.indices[part] = x.indices[part][::-1].copy()
    return x


def changed(x: sp.csr_matrix, part: str, at: int, value: int) -> dict[str, Any]:
    values = getattr(x, part).copy()
    values[at] = value
    return {part: values}


X = counts()
FORMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "not ascending": ({"x": disordered(40)}, {"X": "genes of row 40 are repeated or not in ascending"}),
    "several": ({"x": disordered(2, 5, 40)}, {"X": "genes of row 2 are repeated or not in ascending"}),
    "twice": (changed(X, "indices", 1, X.indices[0]), {"X": "genes of row 0 are repeated or not in ascending"}),
    "gene too high": (
        changed(X, "indices", X.indptr[9] - 1, 300),
        {"X": "row 8 has a value for gene 300, but there are 300"},
    ),
    "gene below 0": (changed(X, "indices", X.indptr[8], -1), {"X": "row 8 has a value for gene -1"}),
    "indptr falls": (changed(X, "indptr", 30, 0), {"X/indptr": "decreases at row 29"}),
    "indptr begins late": (changed(X, "indptr", 0, 1), {"X/indptr": "begins with 1"}),
    "indptr ends early": (
        {"indptr": np.minimum(X.indptr, X.nnz - 1)},
        {"X/indptr": f"ends with {X.nnz - 1}, but {X.nnz}"},
    ),
    "indptr too short": ({"indptr": X.indptr[:-1]}, {"X": "these do not match"}),
    "values missing": ({"data": X.data[:-1]}, {"X": "these do not match"}),
    "other shape": ({"shape": (60, 301)}, {"X": "has shape (60, 300), but obs and var require 60 x 301"}),
}


@pytest.mark.every(12)
@pytest.mark.parametrize(("arrays", "wanted"), FORMS.values(), ids=FORMS.keys())
def test_a_matrix_that_is_not_canonical(tmp_path: Path, arrays: dict[str, Any], wanted: dict[str, str]) -> None:
    problems = found(by_hand(tmp_path / "a.zarr", **{"x": X} | arrays))
    assert_named(problems, wanted)


def test_shapes_and_codes(store: Path) -> None:
    with quiet_zarr():
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
        for path, length in {"obs/float": 59, "obs/count/mask": 59, "obsm/X_pca": 59, "varm/PCs": 301}.items():
            root[path].resize((length, *root[path].shape[1:]))
        root["obs/kind/codes"][3] = 4
        root["layers/csr"].attrs["shape"] = [60, 299]
        zarr.consolidate_metadata(store)
    wanted = {
        "obs/float": "has shape (59,), but obs/barcode has (60,)",
        "obs/count/mask": "has shape (59,), but obs/count/values has (60,)",
        "obsm/X_pca": "has shape (59, 5), but obs and var require 60 ...",
        "varm/PCs": "has shape (301, 5), but obs and var require 300 ...",
        "obs/kind": "row 3 has code 4, but there are 4 categories",
        "layers/csr": "has shape (60, 299), but obs and var require 60 x 300",
    }
    assert_named(found(store), wanted)


@settings(max_examples=40)
@given(data=st.data(), chunk=st.integers(1, 4), chunks=st.integers(1, 3))
def test_rows_against_the_slow_oracle(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, chunk: int, chunks: int
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=12))
    indptr, n = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
    genes = np.concatenate([[], *(np.sort(data.draw(st.permutations(range(6)))[:length]) for length in lengths)])
    wrong = data.draw(st.lists(st.tuples(st.integers(0, max(0, n - 1)), st.integers(-1, 6)), max_size=2 if n else 0))
    for at, gene in wrong:
        genes[at] = gene
    if move := data.draw(st.integers(-2, 2)):
        indptr[data.draw(st.integers(0, len(lengths)))] += move
    like = sp.csr_matrix((len(lengths), 6), dtype=np.float32)
    arrays = {"indptr": indptr, "indices": genes.astype(np.int32), "data": np.ones(n, np.float32)}
    path = tmp_path_factory.mktemp("rows") / "a.zarr"
    problems = dict(found(by_hand(path, like, chunk=chunk, shard=chunk * chunks, **arrays)))
    if move and (indptr[0] or indptr[-1] != n or (np.diff(indptr) < 0).any()):
        assert set(problems) - {"X"} == {"X/indptr"}
        return
    rows = [genes[indptr[row] : indptr[row + 1]] for row in range(len(lengths))]
    outside = [row for row, some in enumerate(rows) if ((some < 0) | (some >= 6)).any()]
    fallen = [row for row, some in enumerate(rows) if (np.diff(some) <= 0).any()]
    assert set(problems) == ({"X"} if outside or fallen else set())
    if problems:
        named = int(re.search(r"row (\d+) ", problems["X"])[1])
        assert named in (outside if "has a value for gene" in problems["X"] else fallen)


def elements_of(array: Any) -> np.ndarray:
    """All elements of a StoredArray or ReadArray, whose chunks say where they begin."""
    chunks = [chunk for piece in range(array.n_pieces) for chunk in array.chunks(piece)]
    sizes = [len(elements) for _, elements in chunks]
    assert [at for at, _ in chunks] == np.cumsum([0, *sizes[:-1]]).tolist()
    return np.concatenate([elements for _, elements in chunks])


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["X/indices", "layers/dense", "varp/pairs"])
def test_a_shard_is_read_in_pieces_of_any_size(sound: Path, name: str) -> None:
    """Shards of real stores are larger than one read."""
    store = zl.open_dataset(sound).store
    for read_bytes in (1, 700, 3000, 9000, 1 << 20):
        stored = StoredArray(store.location, store.array_layout(name), store.object_sizes(), read_bytes=read_bytes)
        assert stored.n_pieces > 1
        np.testing.assert_array_equal(elements_of(stored), store.node(name)[:].reshape(-1))


@given(order=st.permutations(range(5)), absent=st.sets(st.integers(0, 4)), read_bytes=st.integers(1, 100))
def test_chunks_may_lie_anywhere_in_a_shard_of_another_program(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], absent: set[int], read_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "anywhere.zarr"
    array = zarr.create_array(
        path, shape=(18,), chunks=(4,), shards=(20,), dtype="u2", compressors=None, overwrite=True
    )
    values = np.arange(1, 21, dtype="<u2")
    content, table = b"", np.full((5, 2), np.iinfo(np.uint64).max, "<u8")
    for chunk in order:
        if chunk not in absent:
            table[chunk] = len(content), 8
            content += values[4 * chunk : 4 * chunk + 4].tobytes() + b"gap" * (chunk == 2)
    index = table.tobytes()
    content += index + int(google_crc32c.value(index)).to_bytes(4, "little")
    (path / "c").mkdir(exist_ok=True)
    (path / "c/0").write_bytes(content)
    layout = layout_of(array, absent_is_fill=True)
    stored = StoredArray(Location(url=str(path)), layout, {"/c/0": len(content)}, read_bytes=read_bytes)
    wanted = np.where(np.isin(np.arange(20) // 4, [*absent]), 0, values)[:18]
    np.testing.assert_array_equal(elements_of(stored), wanted)
    assert array[:].tolist() == wanted.tolist()


# ---- comparison with the sources


Change = Callable[[ad.AnnData], Any]


def put(part: Callable[[ad.AnnData], Any], at: Any, value: Any) -> Change:
    """Changes one entry."""

    def change(adata: ad.AnnData) -> None:
        part(adata)[at] = value

    return change


def relabel(adata: ad.AnnData) -> None:
    codes = adata.obs["kind"].cat.codes.to_numpy().copy()
    codes[5] = (codes[5] + 2) % 4 - 1
    adata.obs["kind"] = pd.Categorical.from_codes(codes, adata.obs["kind"].cat.categories)


def forget_categories(adata: ad.AnnData) -> None:
    adata.obs["kind"] = adata.obs["kind"].cat.remove_unused_categories()


def come_and_go(adata: ad.AnnData) -> None:
    x = adata.X.toarray()
    x[0, adata.X.indices[0]] = 0
    x[7, :] = 1
    adata.X = sp.csr_matrix(x)


def rename(adata: ad.AnnData) -> None:
    adata.obs_names = ["x", *adata.obs_names[1:]]
    adata.var_names = [*adata.var_names[:-1], "y"]


def same_nested(adata: ad.AnnData) -> None:
    adata.uns["nested"]["array"] = np.zeros((2, 3))


GENE, GENE_3, VALUE, VALUE_3 = (part[at] for part in (X.indices, X.data) for at in (0, 3))
# Changes to the sources, and the problems they cause. Independent changes are tested together.
DIFFERENCES: dict[str, tuple[list[Change], dict[str, str]]] = {
    "values": (
        [
            put(lambda a: a.X.data, 3, 101),
            put(lambda a: a.layers["dense"], (59, 299), -0.0),
            put(lambda a: a.layers["csc"].data, 0, 200),
            put(lambda a: a.raw.X.data, 0, 101),
            put(lambda a: a.obsm["X_pca"], (4, 2), 9),
            put(lambda a: a.obsp["graph"].data, 0, 9),
            put(lambda a: a.varm["PCs"], (2, 1), 9),
            put(lambda a: a.varp["pairs"], (2, 1), 9),
        ],
        {
            "X": f"row 0, gene 'g{GENE_3}' ({GENE_3}): {VALUE_3} in the store, but 101.0 in the sources; 1 row differs",
            "layers/dense": "row 59, gene 'g299' (299): ",
            "layers/csc": "1 row differs",
            "raw/X": "row 0, gene 'raw",
            "obsm/X_pca": "row 4, column 2: ",
            "obsp/graph": "row 0, column ",
            "varm/PCs": "entry 2, 1: ",
            "varp/pairs": "1 differ",
        },
    ),
    "values that come and go": (
        [come_and_go],
        {"X": f"gene 'g{GENE}' ({GENE}): {VALUE} in the store, but nothing in the sources; 2 rows differ"},
    ),
    "dtype": ([lambda a: setattr(a, "X", a.X.astype("f8"))], {"X": "has dtype float32, but float64 in the sources"}),
    "form": ([lambda a: setattr(a, "X", a.X.toarray())], {"X": "has form sparse, but dense in the sources"}),
    "columns": (
        [
            relabel,
            put(lambda a: a.obs["string"].array, 9, "other"),
            put(lambda a: a.obs["maybe"].array, 0, None),
            put(lambda a: a.obs["float"].array, 0, np.nan),
            lambda a: a.obs.insert(0, "new", 1),
            put(lambda a: a.var["symbol"].array, 3, "x"),
            put(lambda a: a.obsm["frame"]["float"].array, 2, 9),
            lambda a: a.raw.var.insert(0, "new", 1),
        ],
        {
            "obs/kind": "row 5: ",
            "obs/string": "row 9: 'name 0 ä' in the store, but 'other' in the sources; 1 differ",
            "obs/maybe": "its mask row 0: False in the store, but True in the sources; 1 differ",
            "obs/float": "but nan in the sources",
            "obs/new": "not in the store",
            "var/symbol": "gene 3: 's3' in the store, but 'x' in the sources",
            "obsm/frame/float": "entry 2",
            "raw/var/new": "not in the store",
        },
    ),
    "categories and order": (
        [forget_categories, lambda a: setattr(a, "obs", a.obs[a.obs.columns[::-1]])],
        {"obs/kind": "its categories has shape (4,), but (3,)", "obs": "in another order"},
    ),
    "names": (
        [rename],
        {
            "obs/_index": "row 0: 'cell0' in the store, but 'x' in the sources; 1 differ",
            "obsm/frame": "its _index is 'barcode' in the store, but '_index' in the sources",
            "obsm/frame/barcode": "not in the sources",
            "obsm/frame/_index": "not in the store",
            "var/_index": "gene 299: 'g299' in the store, but 'y' in the sources",
        },
    ),
    "uns": (
        [
            lambda a: a.uns.update(text="bye", number=3.25, none=1, more=[1]),
            lambda a: a.uns.pop("flag"),
            same_nested,
            put(lambda a: a.uns["records"]["p"], 1, 9),
        ],
        {
            "uns/text": "'hello' in the store, but 'bye' in the sources",
            "uns/number": "3.5 in the store, but 3.25 in the sources",
            "uns/none": "has dtype bool, but int64 in the sources",
            "uns/more": "not in the store",
            "uns/flag": "is in the store, but not in the sources",
            "uns/nested/array": "has dtype int64, but float64 in the sources",
            "uns/records": "entry 1: (2, 0.25) in the store, but (2, 9.0) in the sources; 1 differ",
        },
    ),
    "elements": (
        [lambda a: a.layers.pop("csr"), lambda a: a.layers.update(new=counts()), lambda a: setattr(a, "raw", None)],
        {
            "layers/csr": "is in the store, but not in the sources",
            "layers/new": "not in the store",
            "raw/X": "is in the store, but not",
            "raw/varm/loadings": "is in the store, but not",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "wanted"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_differences_are_named(sound: Path, changes: list[Change], wanted: dict[str, str]) -> None:
    adata = full_anndata()
    for change in changes:
        change(adata)
    assert_named(found(sound, against=adata), wanted)


@pytest.mark.slow
def test_a_row_missing_and_another_order(tmp_path: Path) -> None:
    adata = full_anndata()
    convert(write_full(tmp_path / "a.h5ad"), tmp_path / "a.zarr")
    fewer = write_full(tmp_path / "fewer.h5ad", adata[np.arange(60) != 17].copy())
    problems = found(tmp_path / "a.zarr", against=fewer)
    assert ("obs", "has 60 rows, but 59 in the sources") in problems
    assert ("obs/_index", "row 17: 'cell17' in the store, but 'cell18' in the sources; 42 differ") in problems
    assert ("X", "has shape (60, 300), but (59, 300) in the sources") in problems
    assert {"against", "layers/dense", "raw/X", "obsm/X_pca", "obsp/graph"} <= {where for where, _ in problems}
    swapped = np.arange(60)
    swapped[[20, 21]] = 21, 20
    problems = found(tmp_path / "a.zarr", against=write_full(tmp_path / "swapped.h5ad", adata[swapped].copy()))
    assert ("obs/_index", "row 20: 'cell20' in the store, but 'cell21' in the sources; 2 differ") in problems
    (x,) = [what for where, what in problems if where == "X"]
    assert x.startswith("row 20, ")
    assert x.endswith("; 2 rows differ")


def test_a_value_in_another_row(tmp_path: Path) -> None:
    """All genes and values come in the same order, but the second row begins elsewhere."""
    for begin in (1, 2):
        x = sp.csr_matrix((np.ones(4, np.float32), np.arange(4), [0, begin, 4]))
        convert(write_h5ad(tmp_path / f"{begin}.h5ad", x), tmp_path / f"{begin}.zarr")
    assert_named(found(tmp_path / "1.zarr", against=tmp_path / "2.h5ad"), {"X": "2 rows differ"})


def test_what_is_damaged_is_not_compared(store: Path) -> None:
    flip(store / "X/data/c/0")
    flip(store / "uns/list/c/0")
    problems = found(store, against=full_anndata())
    for path in ("X", "uns"):
        assert any(where == path and "cannot be compared" in what for where, what in problems)
    assert len(problems) == 4


def test_genes_that_are_not_in_the_sources(tmp_path: Path) -> None:
    x = counts()
    convert([write_h5ad(tmp_path / f"{i}.h5ad", x) for i in range(2)], tmp_path / "a.zarr")
    other = write_h5ad(tmp_path / "other.h5ad", x, var=frame(300, "other"))
    problems = found(tmp_path / "a.zarr", against=[tmp_path / "0.h5ad", other])
    assert [where for where, _ in problems] == ["against"]
    assert problems[0][1].startswith("cannot be compared: ")


def test_a_source_that_is_not_there(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError):
        check(sound, against=tmp_path / "none.h5ad")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i8", "u1", "?", "M8[s]"])
def test_equal_are_equal_bits(dtype: str) -> None:
    one = np.array([0, 1, 2, 3], dtype)
    other = np.array([0, 1, 0, 3], dtype)
    assert bits_differ(one, one).tolist() == [False] * 4
    assert bits_differ(one, other).tolist() == [False, False, dtype != "?" or bool(one[2] != other[2]), False]
    if one.dtype.kind == "f":
        one[:2], other[:2] = (-0.0, np.nan), (0.0, -np.nan)
        assert bits_differ(one, other).tolist() == [True, False, True, False]


COLUMNS = [
    pd.array(["a", None, "b"], dtype="string"),
    np.array(["a", "c", "b"], object),
    pd.Categorical(["a", None, "b"]),
    pd.Categorical([None, None, None]),
    pd.Categorical([2, 1, 2], ordered=True),
    pd.array([1, None, 2], dtype="Int16"),
    np.array([1, 0, 2], np.int16),
    np.array([1.0, np.nan, 2.0]),
    np.array(["2020-01-01", "NaT", "2021-01-01"], "M8[s]"),
]


@pytest.mark.parametrize("number", range(len(COLUMNS)))
def test_columns(number: int) -> None:
    for other in range(len(COLUMNS)):
        columns = pd.Series(COLUMNS[number]), pd.Series(COLUMNS[other])
        with library_settings():
            differences = list(element_differences("obs/a", *columns, "row"))
        assert (differences == []) == (number == other), (number, other, differences)


def test_sparse_elements_and_those_of_other_kinds() -> None:
    one = sp.random(5, 7, 0.5, "csc", random_state=0)
    other = one.copy()
    with library_settings():
        assert list(element_differences("uns/a", one, other)) == []
        other.data[-1] += 1
        ((where, what),) = element_differences("uns/a", one, other)
        assert (where, what.endswith("; 1 differ")) == ("uns/a", True)
        for strange in (one.tocsr(), "text", None, {"a": 1}):
            assert {where for where, _ in element_differences("uns/a", one, strange)} == {"uns/a"}


# ---- S3


@pytest.mark.any_version
@pytest.mark.slow
def test_on_s3(s3: S3, tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), obs=frame(60, "cell").assign(string="x"))
    url, options = s3.url("a.zarr"), s3.storage_options
    convert(source, url, storage_options=options, source_options={})
    assert found(url, storage_options=options, source_options={}, against=source) == []
    filesystem = Location(url=url, storage_options=options).filesystem()
    bucket = f"{s3.bucket}/{s3.prefix}/a.zarr"
    content = bytearray(filesystem.cat_file(f"{bucket}/X/data/c/1"))
    content[20] ^= 1
    filesystem.pipe_file(f"{bucket}/X/data/c/1", bytes(content))
    filesystem.rm_file(f"{bucket}/{TEXT}")
    filesystem.pipe_file(f"{bucket}/X/data/c/77", b"")
    wanted = {"X/data/c/1": "crc32c", TEXT: "is missing", "X/data/c/77": "belongs to no array"}
    assert_named(found(url, storage_options=options), wanted)
    with pytest.raises(errors.StoreNotFoundError):
        check(s3.url("none.zarr"), storage_options=options)
    with pytest.raises(errors.AccessDeniedError):
        check(url, storage_options=options | {"secret": "wrong"})


@pytest.mark.parametrize("odd", ["unsorted", "repeated", "csc", "graph"])
def test_matrices_of_other_programs_are_sound_in_any_order(tmp_path, odd):
    rng = np.random.default_rng(0)
    x = sp.csr_matrix(rng.poisson(1.0, (40, 12)).astype(np.float32))
    adata = ad.AnnData(x, obs=pd.DataFrame(index=[f"c{i}" for i in range(40)]))
    adata.layers["odd"] = x.tocsc() if odd == "csc" else x.copy()
    if odd == "unsorted":
        adata = adata[:, rng.permutation(12)].copy()
        assert not adata.layers["odd"].has_sorted_indices
    if odd == "graph":
        adata.obsp["distances"] = sp.csr_matrix(
            (np.arange(1.0, 81), np.tile([7, 3], 40), np.arange(0, 81, 2)), shape=(40, 40)
        )
    if odd == "repeated":
        one = sp.csr_matrix(
            (np.append(x.data, x.data[:1]), np.append(x.indices, 0), np.append(x.indptr[:-1], x.nnz + 1)), shape=x.shape
        )
        one.has_canonical_format = one.has_sorted_indices = False
        adata.layers["odd"] = one
    path = tmp_path / "a.h5ad"
    adata.write_h5ad(path)
    assert verify(path, progress=False).problems == ()
    assert verify(path, against=path, progress=False).problems == ()
    convert(path, tmp_path / "a.zarr")
    assert verify(tmp_path / "a.zarr", against=path, progress=False).problems == ()
    changed = Path(shutil.copy(path, tmp_path / "changed.h5ad"))
    with h5py.File(changed, "r+") as file:
        file["layers/odd/data"][3] += 1
    found = verify(changed, against=path, progress=False).problems
    assert [problem.where for problem in found] == ["layers/odd"]
