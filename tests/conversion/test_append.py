"""Rows appended to a store: the result, the inputs that are refused, and that the old store always stays readable."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
import zarr.codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import (
    HAS_TEXT_DTYPE,
    LAYOUTS,
    SMALL,
    STRINGS,
    FailingDestination,
    assert_same,
    convert,
    counts,
    dense,
    disk_full,
    files,
    frame,
    full_anndata,
    write_csr,
    write_h5ad,
)
from zarr.abc.store import Store
from zarr.storage import WrapperStore

import zloader as zl
from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.append import AppendReport, append, append_to
from zloader.conversion.writing.destination import Destination
from zloader.conversion.writing.fitting import first_unrepresentable


def add(dest: Path | str, *sources: Any, options: zl.ConvertOptions = SMALL, **more: Any) -> AppendReport:
    """Appends in windows of a few rows."""
    location = Location(url=str(dest), storage_options=more.pop("storage_options", {}))
    return append_to(Destination(location), list(sources), options=options, **more)


def cells(first: int, n: int, *, seed: int, n_genes: int = 300) -> ad.AnnData:
    """Rows of a family of compatible AnnData, with X, a layer, raw (over other genes) and obsm."""
    rng = np.random.default_rng(seed)
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(rng.choice(["b", f"only {seed}", "a"], n)),
            "ordered": pd.Categorical(rng.choice(["lo", "hi"], n), categories=["lo", "hi"], ordered=True),
            "numbered": pd.Categorical(rng.integers(0, 5, n)),
            "text": [f"text {i} ä" for i in range(n)],
            "flag": rng.random(n) > 0.5,
            "maybe": pd.array(rng.choice([True, False, None], n), dtype="boolean"),
            "count": pd.array(rng.choice([None, 3, 4], n), dtype="Int32"),
            "nullable text": pd.array(rng.choice(["x", "ä", None], n), dtype="string"),
            "float": np.where(rng.random(n) > 0.3, rng.random(n), np.nan),
        },
        index=pd.Index([f"cell {i}" for i in range(first, first + n)], name="barcode"),
    )
    adata = ad.AnnData(
        X=counts(n, n_genes, seed=seed),
        obs=obs,
        var=frame(n_genes, "gene").assign(symbol="s"),
        layers={"two": counts(n, n_genes, seed=seed + 100, dtype=np.int32)},
        obsm={"X_pca": rng.random((n, 5), np.float32)},
        uns={"from": seed},
    )
    adata.raw = ad.AnnData(X=counts(n, 40, seed=seed + 200), var=frame(40, "raw"), obs=obs)
    return adata


def united(column: pd.Series) -> pd.Series:
    """A column without the order of its categories."""
    is_text = isinstance(column.dtype, pd.CategoricalDtype) and not column.cat.ordered
    return column.astype(object) if is_text else column


def assert_equal_values(out: ad.AnnData, wanted: ad.AnnData) -> None:
    """Equal values, and equal dtypes in obs. Matrices keep the dtypes of the store."""
    assert list(out.obs_names) == list(wanted.obs_names)
    assert list(out.var_names) == list(wanted.var_names)
    assert list(out.obs) == list(wanted.obs)
    for name in wanted.obs:
        pd.testing.assert_series_equal(united(out.obs[name]), united(wanted.obs[name]), obj=name)
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))
    for part in ("layers", "obsm"):
        assert set(getattr(out, part)) == set(getattr(wanted, part))
        for name, values in getattr(wanted, part).items():
            np.testing.assert_array_equal(dense(getattr(out, part)[name]), dense(values))
    if wanted.raw is not None:
        assert list(out.raw.var_names) == list(wanted.raw.var_names)
        np.testing.assert_array_equal(dense(out.raw.X), dense(wanted.raw.X))


def assert_reads(dest: Path | str, wanted: ad.AnnData) -> None:
    """anndata and zloader read the same values."""
    assert_equal_values(ad.read_zarr(dest), wanted)
    dataset = zl.open_dataset(dest)
    rows = np.random.default_rng(0).permutation(dataset.n_obs)
    for name in dataset.matrix_names:
        values = dataset.read_rows(rows, x=name)
        if not isinstance(values, np.ndarray):
            shape = (len(rows), values.n_genes)
            values = sp.csr_matrix((values.values, values.indices, values.indptr), shape=shape).toarray()
        x = wanted.raw.X if name == "raw/X" else wanted.X if name == "X" else wanted.layers[name.partition("/")[2]]
        np.testing.assert_array_equal(values, dense(x)[rows])


def joined(*adatas: ad.AnnData) -> ad.AnnData:
    wanted = ad.concat(adatas, merge="first", uns_merge="first")
    wanted.obs.index.name = adatas[0].obs.index.name
    return wanted


def stored(path: Path, adata: ad.AnnData) -> Path:
    with ad.settings.override(allow_write_nullable_strings=True):
        adata.write_h5ad(path, convert_strings_to_categoricals=False)
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("start")
    convert(stored(place / "start.h5ad", cells(0, 60, seed=0)), place / "a.zarr")
    return place


@pytest.fixture
def start(tmp_path: Path, template: Path) -> Path:
    """A store of 60 rows."""
    return shutil.copytree(template / "a.zarr", tmp_path / "a.zarr")


# Results.


@pytest.mark.slow
def test_all_that_goes_by_rows(start: Path) -> None:
    more = [cells(60, 50, seed=1), cells(110, 1, seed=2), cells(111, 70, seed=3)]
    report = add(start, more[0])
    add(start, *more[1:])
    wanted = joined(cells(0, 60, seed=0), *more)
    assert_reads(start, wanted)
    out = ad.read_zarr(start)
    assert list(out.obs["kind"].cat.categories) == ["a", "b", "only 0", "only 1", "only 3"]
    assert list(out.obs["ordered"].cat.categories) == ["lo", "hi"]
    assert out.uns == {"from": 0}
    assert list(out.var["symbol"]) == ["s"] * 300
    assert out.obs.index.name == "barcode"
    assert (out.X.dtype, out.layers["two"].dtype) == (np.uint8, np.uint8)
    assert (report.rows_before, report.rows) == (60, 110)
    assert report.values_before == cells(0, 60, seed=0).X.nnz
    assert report.values == report.values_before + more[0].X.nnz
    assert json.loads(json.dumps(dataclasses.asdict(report)))["left_out"] == []


@pytest.mark.slow
def test_as_a_fresh_conversion_of_all(tmp_path: Path, start: Path, template: Path) -> None:
    more = [stored(tmp_path / f"{seed}.h5ad", cells(100 * seed, 40, seed=seed)) for seed in (1, 2)]
    for source in more:
        add(start, source)
    convert([template / "start.h5ad", *more], tmp_path / "fresh.zarr")
    out, fresh = ad.read_zarr(start), ad.read_zarr(tmp_path / "fresh.zarr")
    out.obs.index.name = fresh.obs.index.name
    assert_equal_values(out, fresh)
    assert out.X.dtype == fresh.X.dtype
    sources = dict(zarr.open_group(start, mode="r").attrs)["zloader"]["sources"]
    assert sources == dict(zarr.open_group(tmp_path / "fresh.zarr", mode="r").attrs)["zloader"]["sources"]


@pytest.mark.every(2)
@pytest.mark.parametrize("there", ["csr", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path: Path, layout: str, there: str) -> None:
    source = write_h5ad(tmp_path / "b.h5ad", LAYOUTS[layout](counts(50, seed=1)), obs=frame(50, "new"))
    dest = tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", LAYOUTS[there](counts())), dest)
    if (there, layout) in (("dense", "csr"), ("dense", "csc")):
        assert_refused(dest, "sparse, but dense in the store", source)
        return
    add(dest, source)
    assert_reads(dest, joined(ad.read_h5ad(tmp_path / "a.h5ad"), ad.read_h5ad(source)))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    density=st.sampled_from([0.0, 0.02, 0.3]),
    together=st.booleans(),
    kind=st.sampled_from(["csr", "dense"]),
    seed=st.integers(0, 5),
)
def test_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], density: float, together: bool, kind: str, seed: int
) -> None:
    parts = []
    for number, size in enumerate(sizes):
        x = sp.random(size, 97, density if number else 0.2, "csr", np.float32, random_state=seed + number)
        x.data[:] = 1 + np.arange(x.nnz) % 250
        parts.append(ad.AnnData(X=LAYOUTS[kind](x), obs=frame(size, f"{number} "), var=frame(97, "g")))
        parts[-1].obs["n"] = np.arange(size)
    dest = tmp_path_factory.mktemp("any") / "a.zarr"
    zl.convert(parts[0], dest, options=dataclasses.replace(SMALL, shard_size=2048), progress=False)
    for more in [parts[1:]] if together else [[part] for part in parts[1:]]:
        add(dest, *more, options=dataclasses.replace(SMALL, window_bytes=700))
    assert_reads(dest, joined(*parts))


def test_genes_in_another_order(start: Path) -> None:
    more = cells(60, 30, seed=1)
    order = np.random.default_rng(0).permutation(300)
    other = more[:, order].copy()
    other.raw = ad.AnnData(X=more.raw.X[:, ::-1].tocsc(), var=more.raw.var[::-1], obs=more.obs)
    add(start, other)
    assert_reads(start, joined(cells(0, 60, seed=0), more))


def test_rows_that_are_not_canonical(tmp_path: Path) -> None:
    convert(write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr")
    x = counts(seed=1)
    x.indices[: x.indptr[1]] = x.indices[: x.indptr[1]][::-1].copy()
    report = add(tmp_path / "a.zarr", write_csr(tmp_path / "b.h5ad", x, obs=frame(60, "new")))
    assert report.rows_made_canonical == {"X": 1}
    np.testing.assert_array_equal(ad.read_zarr(tmp_path / "a.zarr").X[60:].toarray(), x.toarray())
    assert ad.read_zarr(tmp_path / "a.zarr").X.has_canonical_format


@pytest.mark.slow
def test_obs_of_every_kind(tmp_path: Path) -> None:
    first, second = full_anndata(), full_anndata()
    for adata in (first, second):
        del adata.obsm["frame"], adata.obsm["sparse"], adata.obsp["graph"]
    second.obs_names = "second " + second.obs_names
    convert(stored(tmp_path / "a.h5ad", first), tmp_path / "a.zarr")
    add(tmp_path / "a.zarr", stored(tmp_path / "b.h5ad", second))
    out, wanted = ad.read_zarr(tmp_path / "a.zarr"), joined(first, second)
    assert_equal_values(out, wanted)
    pd.testing.assert_frame_equal(out.obs, wanted.obs.astype({"kind": out.obs["kind"].dtype}))
    for part in ("var", "varm", "varp", "uns"):
        assert_same(getattr(out, part), getattr(ad.read_h5ad(tmp_path / "a.h5ad"), part))


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("there", "more", "wanted"),
    [
        ([1, 2], np.array([3.0, 4.0]), [1, 2, 3, 4]),
        (np.array([1, 2], "u1"), pd.array([3, 4], dtype="Int64"), np.array([1, 2, 3, 4], "u1")),
        ([0.5, 1], pd.array([None, 4], dtype="Int64"), [0.5, 1, np.nan, 4]),
        (np.array([0.5, 1], "f4"), np.array([np.nan, 0.25]), np.array([0.5, 1, np.nan, 0.25], "f4")),
        (pd.array([1, None], dtype="Int32"), [1.0, np.nan], pd.array([1, None, 1, None], dtype="Int32")),
        (pd.array([True, None], dtype="boolean"), [True, False], pd.array([True, None, True, False], dtype="boolean")),
        (["a", "b"], pd.Categorical(["b", "c"]), ["a", "b", "b", "c"]),
        (pd.Categorical(["a", None]), ["c", "b"], pd.Categorical(["a", None, "c", "b"], ["a", "b", "c"])),
        (pd.Categorical([1, 2]), [2.0, 3.0], pd.Categorical([1, 2, 2, 3])),
        (pd.Categorical(["a", "b"]), pd.array([None, "b"], dtype="string"), pd.Categorical(["a", "b", None, "b"])),
        (pd.Categorical(["a", "b"]), [None, None], pd.Categorical(["a", "b", None, None])),
        (pd.to_datetime([0, None]), np.array([1, 2], "M8[s]"), pd.to_datetime([0, None, 1e9, 2e9])),
        (pd.array(["a", None], dtype="string"), ["c", "b"], pd.array(["a", None, "c", "b"], dtype="string")),
    ],
)
def test_columns_that_fit(tmp_path: Path, there: Any, more: Any, wanted: Any) -> None:
    first, second = (
        ad.AnnData(X=counts(2, 9), obs=pd.DataFrame({"c": pd.Series(values, index=[f"{name}0", f"{name}1"])}))
        for name, values in (("a", there), ("b", more))
    )
    zl.convert(first, tmp_path / "a.zarr", progress=False)
    add(tmp_path / "a.zarr", second)
    out = ad.read_zarr(tmp_path / "a.zarr").obs["c"].reset_index(drop=True)
    pd.testing.assert_series_equal(out, pd.Series(wanted, name="c"))


def test_ordered_categories_of_a_part(tmp_path: Path) -> None:
    scale = ["low", "middle", "high"]
    adatas = [
        ad.AnnData(X=counts(), obs=frame(60, name).assign(k=pd.Categorical([name] * 60, categories, ordered=True)))
        for name, categories in (("middle", scale), ("high", ["low", "high"]))
    ]
    zl.convert(adatas[0], tmp_path / "a.zarr", progress=False)
    add(tmp_path / "a.zarr", adatas[1])
    out = ad.read_zarr(tmp_path / "a.zarr").obs["k"]
    assert list(out) == ["middle"] * 60 + ["high"] * 60
    assert (list(out.cat.categories), out.cat.ordered) == (scale, True)


@pytest.mark.slow
def test_many_new_categories(tmp_path: Path) -> None:
    obs = frame(60, "c").assign(k=pd.Categorical(["one"] * 60))
    convert(write_h5ad(tmp_path / "a.h5ad", counts(), obs=obs), tmp_path / "a.zarr")
    obs = frame(126, "d").assign(k=pd.Categorical([f"k{i:03}" for i in range(126)]))
    add(tmp_path / "a.zarr", write_h5ad(tmp_path / "b.h5ad", counts(126), obs=obs))
    assert list(ad.read_zarr(tmp_path / "a.zarr").obs["k"]) == ["one"] * 60 + list(obs["k"])
    assert_refused(
        tmp_path / "a.zarr",
        r"'k' .* its 1 new categories make 128, but the store has room for 127 \(int8 codes\)",
        ad.AnnData(counts(), obs=frame(60, "e").assign(k="new"), var=frame(300, "gene")),
    )


def test_as_it_was_converted(tmp_path: Path) -> None:
    """The selection of the conversion also applies to the appended sources."""
    select = zl.Selection(
        x="layers/raw", layers=[], genes_by="id", source_column="plate", unique_obs_names=True, obs=["n"]
    )
    made = []
    for number in range(2):
        var = frame(300, f"alias {number} ").assign(id=[f"ENSG{i}" for i in range(300)])
        made.append(ad.AnnData(X=counts(dtype=np.float64) * 0.5, obs=frame(60, "c").assign(n=number, m=2), var=var))
        made[-1].layers["raw"] = counts(seed=number)
        stored(tmp_path / f"{number}.h5ad", made[-1])
    zl.convert(tmp_path / "0.h5ad", tmp_path / "a.zarr", select=select, options=SMALL, progress=False)
    report = add(tmp_path / "a.zarr", tmp_path / "1.h5ad")
    add(tmp_path / "a.zarr", tmp_path / "1.h5ad")
    out = ad.read_zarr(tmp_path / "a.zarr")
    x = sp.vstack([made[i].layers["raw"] for i in (0, 1, 1)])
    np.testing.assert_array_equal(out.X.toarray(), x.toarray())
    assert list(out.obs["plate"]) == ["0"] * 60 + ["1"] * 60 + ["1-1"] * 60
    assert list(out.obs_names) == [f"c{i}{end}" for end in ("", "-1", "-2") for i in range(60)]
    assert list(out.obs) == ["n", "plate"]
    assert report.left_out == ["obs/m"]
    sources = dict(zarr.open_group(tmp_path / "a.zarr", mode="r").attrs)["zloader"]["sources"]
    assert sources == [{"label": label, "rows": 60} for label in ("0", "1", "1-1")]


BLOSC = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", blocksize=16384)
KEPT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "lz4": ("lz4", None),
    "zstd": ("zstd", None),
    "pcodec": ("pcodec", None),
    "none": ("none", None),
    # The codecs of earlier versions, which stored no differences.
    "sorted bytes": ("lz4", {"compressors": [BLOSC, zarr.codecs.Crc32cCodec()]}),
}


def recode(dest: Path, codecs: dict[str, Any]) -> None:
    """Stores the arrays of X with other codecs in the same shards."""
    root = zarr.open_group(dest, mode="r+", use_consolidated=False)
    for name in ("indices", "data", "indptr"):
        before: Any = root[f"X/{name}"]
        grid = {"chunks": before.chunks, "shards": before.shards, "fill_value": before.fill_value}
        with zarr.config.set({"array.write_empty_chunks": True}):
            root.create_array(f"X/{name}", data=before[:], overwrite=True, **grid, **codecs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # consolidated metadata are not in the Zarr v3 specification
        zarr.consolidate_metadata(dest)


@pytest.mark.every(6)
@pytest.mark.parametrize(("codec", "recoded"), KEPT.values(), ids=KEPT.keys())
def test_new_chunks_have_the_codecs_of_the_old(tmp_path: Path, codec: str, recoded: dict[str, Any] | None) -> None:
    dest = tmp_path / "a.zarr"
    made = [ad.AnnData(counts(60, seed=i), obs=frame(60, f"{i} "), var=frame(300, "gene")) for i in range(2)]
    zl.convert(made[0], dest, options=dataclasses.replace(SMALL, codec=codec), progress=False)
    if recoded is not None:
        recode(dest, recoded)
    names = [f"X/{name}" for name in ("indices", "data", "indptr")]
    before = [zarr.open_group(dest, mode="r")[name].metadata.to_dict()["codecs"] for name in names]
    assert ("numcodecs" in json.dumps(before[0])) == (codec != "none" and recoded is None)
    add(dest, made[1])
    assert [zarr.open_group(dest, mode="r")[name].metadata.to_dict()["codecs"] for name in names] == before
    assert_reads(dest, joined(*made))
    assert zl.verify(dest, progress=False).problems == ()


def test_shards_without_checksums_do_not_grow(tmp_path: Path) -> None:
    made = ad.AnnData(counts(), obs=frame(60, "cell"), var=frame(300, "gene"))
    zl.convert(made, tmp_path / "a.zarr", options=SMALL, progress=False)
    recode(tmp_path / "a.zarr", {"compressors": [BLOSC]})
    assert_refused(tmp_path / "a.zarr", "has codecs or shards that this version", made, error=errors.StoreError)


def test_names_that_are_a_column(tmp_path: Path) -> None:
    def named(prefix: str) -> ad.AnnData:
        adata = ad.AnnData(X=counts(), obs=frame(60, prefix))
        adata.obs.index.name = "id"
        adata.obs["id"] = adata.obs_names.to_numpy()
        return adata

    zl.convert(named("a"), tmp_path / "a.zarr", progress=False)
    add(tmp_path / "a.zarr", named("b"))
    out = ad.read_zarr(tmp_path / "a.zarr")
    assert list(out.obs["id"]) == list(out.obs_names) == [f"{prefix}{i}" for prefix in "ab" for i in range(60)]
    other = named("c")
    other.obs.index = [f"other {i}" for i in range(60)]
    assert_refused(tmp_path / "a.zarr", "column 'id' is the index of .*, but differs from the obs names", other)


def test_what_the_store_has_not_is_left_out(start: Path) -> None:
    more = cells(60, 20, seed=1)
    more.obs["extra"] = 1
    more.layers["extra"] = more.X
    more.obsm["extra"] = more.obs[["extra"]]
    more.obsp["graph"] = sp.eye(20, format="csr")
    assert add(start, more).left_out == ["obs/extra", "layers/extra", "obsm/extra", "obsp/graph"]
    assert_reads(start, joined(cells(0, 60, seed=0), cells(60, 20, seed=1)))


def test_genes_whose_names_repeat(tmp_path: Path) -> None:
    var = pd.DataFrame(index=["g"] * 300)
    with pytest.warns(UserWarning, match="not unique"):
        adatas = [ad.AnnData(X=counts(seed=seed), obs=frame(60, str(seed)), var=var) for seed in (0, 1)]
    zl.convert(adatas[0], tmp_path / "a.zarr", progress=False)
    add(tmp_path / "a.zarr", adatas[1])
    with pytest.warns(UserWarning, match="not unique"):
        out = ad.read_zarr(tmp_path / "a.zarr")
    np.testing.assert_array_equal(out.X.toarray(), sp.vstack([counts(seed=0), counts(seed=1)]).toarray())


@pytest.mark.slow
def test_on_s3(s3: Any) -> None:
    url, options = s3.url("a.zarr"), s3.storage_options
    parts = [cells(0, 60, seed=0), cells(60, 50, seed=1)]
    zl.convert(parts[0], url, options=SMALL, storage_options=options, progress=False)
    destination = FailingDestination(Location(url=url, storage_options=options), survives=20, fail=disk_full)
    with pytest.raises(errors.StoreError, match="No space left"):
        append_to(destination, parts[1], options=SMALL)
    assert len(zl.open_dataset(url, storage_options=options)) == 60
    report = append(url, parts[1], storage_options=options, progress=False)
    assert (report.rows, report.destination) == (110, url)
    dataset = zl.open_dataset(url, storage_options=options)
    wanted = joined(*parts)
    out = dataset.take(np.arange(110))
    np.testing.assert_array_equal(dense(out.X), dense(wanted.X))
    pd.testing.assert_series_equal(united(out.obs["kind"]), united(wanted.obs["kind"]), check_names=False)


# Safety.


class _NothingIsDeleted(WrapperStore[Store]):
    async def delete(self, key: str) -> None:
        raise AssertionError(f"{key} was deleted")

    async def delete_dir(self, prefix: str) -> None:
        raise AssertionError(f"{prefix} was deleted")


class _Watched(FailingDestination):
    def zarr_store(self) -> Store:
        return _NothingIsDeleted(super().zarr_store())


def test_metadata_come_last_and_nothing_is_deleted(start: Path) -> None:
    destination = _Watched(Location(url=str(start)))
    append_to(destination, cells(60, 50, seed=1), options=SMALL)
    is_metadata = [key.endswith("zarr.json") for key in destination.stored]
    assert is_metadata == sorted(is_metadata)
    assert destination.stored[-1] == "zarr.json"
    assert is_metadata.count(False) > 30
    n_stored = len(files(start))
    add(start, cells(0, 0, seed=1)[:0])
    assert len(files(start)) == n_stored


@pytest.mark.any_version
@pytest.mark.slow
def test_a_failure_at_any_object_leaves_the_old_store(start: Path, tmp_path: Path) -> None:
    old, new, last = cells(0, 60, seed=0), cells(60, 50, seed=1), cells(200, 7, seed=2)
    before = files(start)
    destination = FailingDestination(Location(url=str(start)))
    append_to(destination, new, options=SMALL)
    whole, n_objects = files(start), len(destination.stored)
    n_metadata = sum(key.endswith("zarr.json") for key in destination.stored)
    for survives in [
        *range(0, n_objects - n_metadata, 5),
        *range(n_objects - n_metadata, n_objects, 13),
        n_objects - 1,
    ]:
        dest = tmp_path / f"{survives}.zarr"
        _restore(dest, before)
        destination = FailingDestination(Location(url=str(dest)), survives=survives, fail=disk_full)
        with pytest.raises(errors.StoreError, match="No space left"):
            append_to(destination, new, options=SMALL)
        assert_reads(dest, old)
        (dest / "X/data/c/7.partial").write_bytes(b"as kill -9 leaves it")
        add(dest, new)
        assert files(dest) == whole
    _restore(dest, before)  # then append another, smaller source
    with pytest.raises(errors.StoreError, match="No space left"):
        append_to(FailingDestination(Location(url=str(dest)), survives=n_objects - 1, fail=disk_full), new)
    add(dest, last)
    assert_reads(dest, joined(old, last))
    add(dest, new)
    assert_reads(dest, joined(old, last, new))


def _restore(dest: Path, content: dict[str, bytes]) -> None:
    for key in files(dest).keys() - content.keys() if dest.exists() else ():
        (dest / key).unlink()
    for key, stored_bytes in content.items():
        (dest / key).parent.mkdir(parents=True, exist_ok=True)
        (dest / key).write_bytes(stored_bytes)


# Refusals.


def assert_refused(
    dest: Path, match: str, *sources: Any, error: type[Exception] = errors.ZloaderError, **more: Any
) -> None:
    """Refused with this error before any byte is written."""
    before = files(dest)
    with pytest.raises(error, match=match):
        add(dest, *sources, **more)
    assert files(dest) == before


def _without(part: str, name: str) -> Callable[[ad.AnnData], Any]:
    def change(adata: ad.AnnData) -> None:
        del getattr(adata, part)[name]

    return change


def _with_x(change: Callable[[Any], Any]) -> Callable[[ad.AnnData], Any]:
    def changed(adata: ad.AnnData) -> None:
        adata.X = change(adata.X)

    return changed


def _with_obs(name: str, values: Callable[[int], Any]) -> Callable[[ad.AnnData], Any]:
    def change(adata: ad.AnnData) -> None:
        adata.obs[name] = values(adata.n_obs)

    return change


def _put(x: sp.csr_matrix, row: int, value: Any) -> sp.csr_matrix:
    x = x.astype(type(value))
    x.data[x.indptr[row]] = value
    return x


def _without_raw(adata: ad.AnnData) -> None:
    adata.raw = None


def _other_raw(adata: ad.AnnData) -> None:
    adata.raw = adata


def _wide(adata: ad.AnnData) -> None:
    adata.obsm["X_pca"] = np.zeros((adata.n_obs, 6), np.float32)


def _sparse_pca(adata: ad.AnnData) -> None:
    adata.obsm["X_pca"] = sp.csr_matrix(adata.obsm["X_pca"])


def _framed_pca(adata: ad.AnnData) -> None:
    adata.obsm["X_pca"] = pd.DataFrame(adata.obsm["X_pca"], index=adata.obs_names, columns=list("abcde"))


def _fine_pca(adata: ad.AnnData) -> None:
    adata.obsm["X_pca"] = adata.obsm["X_pca"] + np.float64(1) / 3


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda a: a[:, :-2],
            r"lacks 2 genes of the store \(gene298, gene299\): name genes as in the store with genes_by",
        ),
        (_without("layers", "two"), "lacks layers/two, which .* has: add it, or convert all sources together"),
        (_without("obsm", "X_pca"), "lacks obsm/X_pca"),
        (_without("obs", "float"), "lacks obs/float"),
        (_without_raw, "lacks raw/X"),
        (_other_raw, r"raw/var lacks 40 genes of the store \(raw0, .*raw9 and 30 more\) and has 300 genes"),
        (_wide, "obsm/X_pca has 6 columns, but 5 in the store"),
        (_sparse_pca, "obsm/X_pca"),
        (_framed_pca, "obsm/X_pca of the sources is not stored in the same form as"),
        (_fine_pca, r"obsm/X_pca holds .* \(float64\) in row 0 .* store's float32"),
        (
            _with_x(lambda x: _put(x, 4, np.float32(0.5))),
            r"^X holds 0.5 \(float32\) in row 4 .* store's uint8.*preserve_",
        ),
        (_with_x(lambda x: _put(x, 9, np.float64(np.nan))), r"^X holds nan \(float64\) in row 9"),
        (_with_x(lambda x: _put(x, 9, np.int32(300))), r"^X holds 300 \(int32\) in row 9"),
        (_with_x(lambda x: _put(x, 9, np.int64(-1)).tocsc()), r"^X holds -1 \(int64\) in row 9"),
        (_with_x(lambda x: _put(x, 9, np.float32(-0.0))), r"^X holds -0.0 \(float32\) in row 9"),
        (
            _with_obs("kind", lambda n: np.arange(n)),
            "obs column 'kind' does not fit .* it holds numbers, but the store's column holds text",
        ),
        (
            _with_obs("ordered", lambda n: pd.Categorical(["lo"] * n)),
            r"'ordered' .* lo \(not ordered\), .*, hi \(ordered\)",
        ),
        (
            _with_obs("ordered", lambda n: pd.Categorical(["lo"] * n, ["hi", "lo"], ordered=True)),
            r"'ordered' .* hi, lo \(ordered\), but in the store lo, hi \(ordered\): ordered",
        ),
        (_with_obs("kind", lambda n: pd.Categorical(["a"] * n, ordered=True)), r"'kind' .* a \(ordered\)"),
        (
            _with_obs("numbered", lambda n: np.arange(n) + 0.5),
            r"'numbered' .* 0.5 \(float64\), .* store's int64 cannot hold",
        ),
        pytest.param(
            _with_obs("text", lambda n: pd.array([None] * n, dtype="string")),
            "'text' .* 20 values are missing",
            marks=pytest.mark.skipif(HAS_TEXT_DTYPE, reason="pandas' dtype for text may have missing values"),
        ),
        (_with_obs("text", lambda n: np.arange(n)), "'text' .* it holds numbers, but the store's column holds text"),
        (_with_obs("flag", lambda n: np.arange(n)), "'flag' .* it holds numbers, but the store's .* true or false"),
        (_with_obs("flag", lambda n: pd.array([None] * n, dtype="boolean")), "'flag' .* 20 values are missing"),
        (
            _with_obs("count", lambda n: np.full(n, 2**40)),
            r"'count' .* 1099511627776 \(int64\), .* store's int32 cannot hold",
        ),
    ],
)
def test_sources_that_do_not_fit(start: Path, change: Callable[[ad.AnnData], Any], match: str) -> None:
    more = cells(60, 20, seed=1)
    changed = change(more)
    assert_refused(start, match, changed if isinstance(changed, ad.AnnData) else more, error=errors.SourceError)


def test_all_that_is_wrong_is_said(tmp_path: Path, start: Path) -> None:
    first, second = cells(60, 20, seed=1), cells(60, 20, seed=2)
    first.var_names = [*first.var_names[:-1], "another"]
    del second.layers["two"]
    match = (
        r"a\.h5ad: var lacks 1 genes of the store \(gene299\) and has 1 genes that the store lacks \(another\)[^$]*\n"
        r".*b\.h5ad lacks layers/two"
    )
    sources = [stored(tmp_path / f"{name}.h5ad", adata) for name, adata in (("a", first), ("b", second))]
    assert_refused(start, match, *sources, error=errors.SourceError)


@pytest.mark.slow
def test_stores_that_cannot_grow(tmp_path: Path) -> None:
    adata = cells(0, 6, seed=0, n_genes=9)
    del adata.raw, adata.obs["nullable text"]
    dest = tmp_path / "foreign.zarr"
    zl.convert(adata, dest, options=SMALL, progress=False)
    root = json.loads((dest / "zarr.json").read_text())
    del root["attributes"]["zloader"]
    (dest / "zarr.json").write_text(json.dumps(root))
    assert_refused(dest, "was not written by zloader: convert it first", adata, error=errors.FormatError)
    dest = tmp_path / "shuffled.zarr"
    zl.convert(adata, dest, options=dataclasses.replace(SMALL, shuffle_seed=1), progress=False)
    assert_refused(dest, "rows of .* are shuffled", adata, error=errors.StoreError)
    adata.obsp["graph"] = sp.eye(6, format="csr")
    adata.obsm["frame"] = adata.obs[["float"]]
    adata.obsm["sparse"] = counts(6, 4)
    zl.convert(adata, tmp_path / "a.zarr", options=SMALL, progress=False)
    match = "cannot append rows to obsp/graph, obsm/frame, obsm/sparse of .*: convert all sources together"
    assert_refused(tmp_path / "a.zarr", match, adata, error=errors.StoreError)
    with pytest.raises(errors.StoreNotFoundError):
        append(tmp_path / "nothing.zarr", adata, progress=False)


def test_a_store_does_not_grow_by_itself(start: Path) -> None:
    assert_refused(start, "one lies within the other", start, error=errors.OptionError)


TEXT = str(PurePosixPath("obs/text", STRINGS))


@pytest.mark.every(6)
@pytest.mark.parametrize("path", ["X/data", "X/indptr", "obsm/X_pca", "obs/float", TEXT, "obs/kind/categories"])
def test_a_damaged_store_is_no_ground_to_build_on(start: Path, path: str) -> None:
    add(start, cells(60, 7, seed=1))  # so that the last objects are not full
    before, more = files(start), cells(67, 20, seed=2)
    key = max((key for key in before if key.startswith(f"{path}/c/")), key=lambda key: (len(key), key))
    (start / key).write_bytes(before[key][:3] + bytes([before[key][3] ^ 4]) + before[key][4:])
    damaged = files(start)
    with pytest.raises(errors.StoreError, match=path):
        add(start, more)
    assert {name: files(start)[name] for name in (key, "zarr.json")} == {
        name: damaged[name] for name in (key, "zarr.json")
    }
    (start / key).unlink()
    assert_refused(start, "is missing: the store is incomplete", more, error=errors.MissingObjectError)


def test_a_store_laid_out_for_far_less(tmp_path: Path) -> None:
    tiny = ad.AnnData(X=sp.csr_matrix((1, 300), dtype=np.float32), obs=frame(1, "c"), var=frame(300, "gene"))
    zl.convert(tiny, tmp_path / "a.zarr", progress=False)
    more = ad.AnnData(X=counts(150, dtype=np.float32), obs=frame(150, "d"), var=frame(300, "gene"))
    match = r"X/data would be split into \d+ objects, because the store was laid out for 0 items"
    assert_refused(tmp_path / "a.zarr", match, more, error=errors.StoreError)


@given(
    values=st.lists(st.floats(width=32) | st.integers(-300, 70_000).map(float), max_size=5),
    before=st.sampled_from(["f4", "f8", "i8", "i4", "u8", "u2", "i1"]),
    after=st.sampled_from(["u1", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8"]),
)
def test_unfit_is_the_first_value_that_changes(values: list[float], before: str, after: str) -> None:
    """Compared with Python numbers. -0.0 and 0 are different values."""
    if np.dtype(before).kind != "f":
        limits = np.iinfo(before)
        values = [value for value in values if np.isfinite(value) and limits.min <= value <= limits.max]
    array = np.array(values, before)

    def changes(value: Any) -> bool:
        number = value.item()
        if np.dtype(after).kind == "f":
            with np.errstate(over="ignore"):
                return np.isfinite(number) and float(np.dtype(after).type(number)) != number
        limits = np.iinfo(after)
        return not (np.isfinite(number) and number == int(number) and limits.min <= number <= limits.max) or (
            isinstance(number, float) and number == 0 and np.signbit(number)
        )

    assert first_unrepresentable(array, np.dtype(after)) == next(
        (i for i, value in enumerate(array) if changes(value)), None
    )


class _Shrinking(np.ndarray):
    """Dense values of which the last row is missing from the second reading on."""

    readings = 0

    def __getitem__(self, items):
        found = super().__getitem__(items)
        if isinstance(items, slice) and items.stop == len(self):
            self.readings += 1
            return found[:-1] if self.readings > 1 else found
        return found


def test_a_dense_source_that_has_fewer_rows_on_the_second_reading(tmp_path):
    """Otherwise the last rows would be zeros."""
    x = np.arange(1, 201, dtype=np.float32).reshape(20, 10)
    zl.convert(ad.AnnData(x), tmp_path / "a.zarr", progress=False)
    source = ad.AnnData(x.copy().view(_Shrinking))
    with pytest.raises(errors.SourceError, match="X changed while it was being appended"):
        zl.append(tmp_path / "a.zarr", [source], progress=False)
    np.testing.assert_array_equal(zl.open_dataset(tmp_path / "a.zarr").take(slice(None)).X, x)
    zl.append(tmp_path / "a.zarr", [ad.AnnData(x + 1)], progress=False)
    np.testing.assert_array_equal(zl.open_dataset(tmp_path / "a.zarr").take(slice(None)).X, np.concatenate([x, x + 1]))
    assert zl.verify(tmp_path / "a.zarr", progress=False).ok


class _Moving(np.ndarray):
    """The indptr of a matrix in which one value has moved to the next row on the second reading."""

    readings = 0

    def __getitem__(self, items):
        found = super().__getitem__(items)
        if isinstance(items, slice) and len(found) > 9:
            self.readings += 1
            found = np.array(found)
            found[5] -= self.readings > 1
        return found


@pytest.mark.parametrize("command", ["convert", "append"])
def test_a_source_in_which_a_value_moves_to_another_row(tmp_path, command):
    """The total stays the same, so that otherwise indptr would be that of the first reading."""
    x = counts(20, 30, seed=1)
    zl.convert(ad.AnnData(x), tmp_path / "a.zarr", progress=False)
    source = ad.AnnData(counts(20, 30))
    source.X.indptr = source.X.indptr.view(_Moving)
    with pytest.raises(errors.SourceError, match=f"X changed while it was being {command}ed"):
        getattr(zl, command)(
            *([source, tmp_path / "b.zarr"] if command == "convert" else [tmp_path / "a.zarr", source])
        )
    assert source.X.indptr.readings > 1
    np.testing.assert_array_equal(zl.open_dataset(tmp_path / "a.zarr").take(slice(None)).X.toarray(), x.toarray())
