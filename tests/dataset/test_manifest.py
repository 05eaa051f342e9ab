"""Manifests: thousands of stores opened as one, against anndata.concat; labels, staleness, damage, hostile tables."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import assert_same_minibatches, check_seen_once, dense, digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import (
    CorruptChunkError,
    FormatError,
    MissingObjectError,
    OptionError,
    StoreChangedError,
    StoreNotFoundError,
    ZloaderError,
)
from zloader.dataset import store_stack
from zloader.dataset.manifest import COLUMNS

pytest.importorskip("pyarrow")
GENES = 40
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
PATIENT = settings(deadline=None, suppress_health_check=SLOW)
LOADER: dict[str, Any] = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(7)}


def cells(number: int, n_rows: int, genes: int = GENES) -> ad.AnnData:
    """Some rows, with a label of the store, a column of labels and one of numbers, obsm, and a layer."""
    rng = np.random.default_rng(number)
    x = scipy.sparse.random(n_rows, genes, 0.3, "csr", np.float32, rng=rng)
    x.data = np.round(x.data * 90) + 1
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(["B", "T", "NK"], n_rows)),
            "plate": pd.Categorical([f"p{number % 3}"] * n_rows),
            "score": rng.random(n_rows),
        },
        index=[f"c{number}_{row}" for row in range(n_rows)],
    )
    adata = ad.AnnData(x, obs=obs, var=pd.DataFrame(index=[f"g{gene}" for gene in range(genes)]))
    adata.obsm["X_pca"] = rng.random((n_rows, 3)).astype(np.float32)
    adata.layers["spliced"] = x * 2
    return adata


def write(path: Path, adata: ad.AnnData, **options: Any) -> Path:
    """A file, or a store if the path ends in .zarr."""
    if path.suffix == ".h5ad":
        adata.write_h5ad(path, **options)
        return path
    zl.convert(adata, path, options=zl.ConvertOptions(chunk_rows=3, **options), progress=False)
    return path


SIZES = {"a.zarr": 50, "b.h5ad": 70, "c.zarr": 33, "d.h5ad": 90, "empty.zarr": 0, "e.zarr": 120, "f.h5ad": 5}
FILES = {name: cells(number, size) for number, (name, size) in enumerate(SIZES.items())}
# As they are written alike: stores, an uncompressed file, and compressed files.
ORDER = ["a.zarr", "c.zarr", "empty.zarr", "e.zarr", "b.h5ad", "d.h5ad", "f.h5ad"]
ALL = ad.concat([FILES[name] for name in ORDER])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    root = tmp_path_factory.mktemp("stores")
    for name, adata in FILES.items():
        gzip = {"compression": "gzip"} if name in ("d.h5ad", "f.h5ad") else {}
        write(root / name, adata, **gzip)
    return root


@pytest.fixture(scope="module")
def manifest(stores):
    zl.index([stores / name for name in FILES], stores / "all.parquet", progress=False)
    return stores / "all.parquet"


def copied(stores: Path, to: Path) -> Path:
    """A copy of the stores in `to`, with a manifest of its own."""
    shutil.copytree(stores, to, dirs_exist_ok=True)
    zl.index([to / name for name in FILES], to / "all.parquet", overwrite=True, progress=False)
    return to / "all.parquet"


def check_all(dataset: zl.Dataset, adata: ad.AnnData, **options: Any) -> zl.Loader:
    """Reads an epoch, and compares every row."""
    loader = zl.Loader(dataset, obs=["cell_type", "plate", "score"], **LOADER | options)
    seen: list[int] = []
    wanted, labels = dense(adata.X), {name: dataset.categories(name) for name in ("cell_type", "plate")}
    for minibatch in loader:
        rows = minibatch.index.numpy()
        np.testing.assert_array_equal(dense(minibatch.x), wanted[rows])
        for name, categories in labels.items():
            assert categories[minibatch.obs[name].numpy()].tolist() == adata.obs[name].iloc[rows].tolist()
        np.testing.assert_array_equal(minibatch.obs["score"], adata.obs["score"].to_numpy()[rows])
        seen += rows.tolist()
    check_seen_once(loader.plan(0), seen, 1)
    return loader


def test_a_manifest_equals_the_concatenated_stores(manifest):
    dataset = zl.open_dataset(manifest)
    assert dataset.shape == ALL.shape
    assert dataset.obs_columns == ["plate", "cell_type", "score"]
    assert dataset.obsm_names == ["X_pca"]
    found = dataset.take(range(dataset.n_obs), layers=["spliced"])
    np.testing.assert_array_equal(dense(found.X), dense(ALL.X))
    np.testing.assert_array_equal(dense(found.layers["spliced"]), dense(ALL.layers["spliced"]))
    np.testing.assert_array_equal(found.obsm["X_pca"], ALL.obsm["X_pca"])
    assert found.obs_names.tolist() == ALL.obs_names.tolist()
    assert found.var_names.tolist() == ALL.var_names.tolist()
    for name in ALL.obs:
        assert found.obs[name].tolist() == ALL.obs[name].tolist()
    rows = np.random.default_rng(0).integers(0, len(ALL), 200)
    some = dataset.take(rows)
    np.testing.assert_array_equal(dense(some.X), dense(ALL.X)[rows])
    assert some.obs_names.tolist() == ALL.obs_names[rows].tolist()
    assert some.obs["cell_type"].tolist() == ALL.obs["cell_type"].iloc[rows].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, *zl.Cache.forms])
@pytest.mark.parametrize("x", ["X", "layers/spliced"])
def test_every_row_is_read_once_and_later_from_the_mirror(manifest, tmp_path, form, x):
    cache = None if form is None else zl.Cache(directory=tmp_path / "cache", form=form)
    wanted = ALL if x == "X" else ad.AnnData(ALL.layers["spliced"], obs=ALL.obs)
    check_all(zl.open_dataset(manifest, cache=cache), wanted, x=x)
    again = check_all(zl.open_dataset(manifest, cache=cache), wanted, x=x)
    assert (again.statistics().gets == 0) == (form is not None)
    if form is not None:
        runner = CliRunner().invoke(app, ["cache", "verify", str(tmp_path / "cache"), "--json"])
        assert runner.exit_code == 0, runner.output
        assert json.loads(runner.stdout)["ok"]
        directories = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
        assert len(directories) <= 1 + 2 * len(again.dataset.stores)  # however many stores a stack has


def test_a_csv_manifest_is_the_same(manifest, stores):
    pd.read_parquet(manifest).to_csv(stores / "all.csv", index=False)
    check_all(zl.open_dataset(stores / "all.csv"), ALL)
    assert zl.open_dataset(stores / "all.csv").fingerprint == zl.open_dataset(manifest).fingerprint


def test_opening_and_labels_need_no_store(stores, tmp_path):
    manifest = copied(stores, tmp_path / "gone")
    for name in FILES:
        path = tmp_path / "gone" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    dataset = zl.open_dataset(manifest)
    assert repr(dataset).startswith(f"Dataset with n_obs x n_vars = {len(ALL)} x {GENES}")
    assert dataset.var_names.tolist() == ALL.var_names.tolist()
    chosen = dataset.where("plate == 'p1'")
    assert chosen.row_numbers.tolist() == np.flatnonzero(ALL.obs["plate"] == "p1").tolist()
    assert dataset.obs_column("plate").labels.tolist() == ["p0", "p1", "p2"]
    zl.Loader(dataset, obs=["plate"]).plan(0)
    with pytest.raises(StoreNotFoundError):
        dataset.obs_column("cell_type")
    with pytest.raises(MissingObjectError, match=r"a.zarr/X/.*zloader|there is no such file"):
        next(iter(zl.Loader(dataset.where("plate == 'p0'"))))


@pytest.mark.slow
def test_columns_added_with_pandas_are_labels(manifest, stores):
    table = pd.read_parquet(manifest)
    table["tissue"] = ["lung" if number % 2 else None for number in range(len(table))]
    table["dose"] = np.arange(len(table)) / 2
    table["root"] = "r"  # a name that is also used inside
    table.to_parquet(stores / "labelled.parquet", index=False)
    dataset = zl.open_dataset(stores / "labelled.parquet")
    sizes = table["rows"].to_numpy()
    tissue = np.repeat([number % 2 == 1 for number in range(len(ORDER))], sizes)
    assert len(dataset.where("tissue == 'lung'")) == tissue.sum()
    np.testing.assert_array_equal(dataset.obs_column("dose").values, np.repeat(np.arange(len(ORDER)) / 2, sizes))
    assert dataset.obs(["tissue"])["tissue"].isna().tolist() == (~tissue).tolist()
    lung = table[table["tissue"] == "lung"]  # without the row that has the genes
    lung.to_parquet(stores / "lung.parquet", index=False)
    smaller = zl.open_dataset(stores / "lung.parquet")
    assert smaller.shape == (tissue.sum(), GENES)
    assert smaller.var_names.tolist() == ALL.var_names.tolist()
    check_all(smaller, ALL[tissue])


@pytest.mark.slow
def test_the_order_and_resuming_are_those_of_rows(manifest, stores):
    one = zl.open_dataset([stores / name for name in ORDER])
    assert digest(zl.Loader(zl.open_dataset(manifest), **LOADER)) == digest(zl.Loader(one, **LOADER))
    loader = zl.Loader(zl.open_dataset(manifest), **LOADER)
    epoch = iter(loader)
    for _ in range(5):
        next(epoch)
    state = loader.state_dict()
    resumed = zl.Loader(pickle.loads(pickle.dumps(zl.open_dataset(manifest))), **LOADER)
    resumed.load_state_dict(state)
    assert_same_minibatches(resumed, epoch)


@pytest.mark.slow
def test_many_stacks_are_as_one(manifest, monkeypatch, tmp_path):
    monkeypatch.setattr(store_stack, "_MOST_STORES", 2)
    monkeypatch.setattr(store_stack, "_PAGE_ROWS", 7)
    monkeypatch.setattr(store_stack, "_MOST_OPEN", 1)
    dataset = zl.open_dataset(manifest, cache=tmp_path / "cache")
    assert len(dataset.stores) == 5
    check_all(dataset, ALL)
    warmed = zl.warm(dataset)
    assert warmed.chunks_held == warmed.chunks
    assert check_all(zl.open_dataset(manifest, cache=tmp_path / "cache"), ALL).statistics().gets == 0
    offline = zl.open_dataset(manifest, cache=tmp_path / "cache", offline=True)
    check_all(offline, ALL)
    assert offline.names_of(np.array([3, 200])).tolist() == ALL.obs_names[[3, 200]].tolist()


@pytest.mark.slow
def test_workers_and_ranks(manifest):
    from torch.utils.data import DataLoader

    for rank in range(2):
        loader = zl.Loader(zl.open_dataset(manifest), rank=rank, world_size=2, **LOADER)
        seen = np.concatenate([each.index for each in DataLoader(loader, batch_size=None, num_workers=2)])
        assert len(np.unique(seen)) == len(seen)
        wanted = np.concatenate([each.index for each in zl.Loader(loader.dataset, rank=rank, world_size=2, **LOADER)])
        assert sorted(seen) == sorted(wanted)


@pytest.mark.slow
@settings(PATIENT, max_examples=8)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_random_stores_equal_their_concatenation(tmp_path_factory, sizes, is_dense, random):
    root = tmp_path_factory.mktemp("random")
    adatas = {}
    for number, size in enumerate(sizes):
        adata = cells(number, size, 11)
        if is_dense:
            adata.X = dense(adata.X)
        path = write(root / f"{number}{random.choice(['.zarr', '.h5ad'])}", adata)
        adatas[path.name] = adata
    done = zl.index(sorted(root.iterdir()), root / "m.csv", progress=False)
    assert (done.stores, done.rows) == (len(sizes), sum(sizes))
    dataset = zl.open_dataset(root / "m.csv", cache=root / "cache")
    together = ad.concat([adatas[url] for url in pd.read_csv(root / "m.csv")["url"]])
    np.testing.assert_array_equal(dense(dataset.take(range(sum(sizes))).X), dense(together.X))
    if sum(sizes):
        check_all(dataset, together)
        assert check_all(zl.open_dataset(root / "m.csv", cache=root / "cache"), together).statistics().gets == 0


# ---- genes


@pytest.mark.filterwarnings("ignore:join=:UserWarning")
def test_stores_with_other_genes(stores, tmp_path):
    other = cells(9, 25)
    other.var_names = [f"g{gene}" for gene in range(30, 70)]
    write(tmp_path / "other.zarr", other)
    manifest = tmp_path / "two.parquet"
    done = zl.index([stores / "a.zarr", tmp_path / "other.zarr", stores / "c.zarr"], manifest, progress=False)
    assert done.gene_sets == 2
    with pytest.raises(FormatError, match=r"in .*other\.zarr .*a\.zarr and 1 more stores.*join='inner'"):
        zl.open_dataset(manifest)
    adatas = [FILES["a.zarr"], FILES["c.zarr"], other]
    for join in ("inner", "outer"):
        together = ad.concat(adatas, join=join)
        dataset = zl.open_dataset(manifest, join=join)
        assert dataset.var_names.tolist() == together.var_names.tolist()
        check_all(dataset, ad.AnnData(scipy.sparse.csr_matrix(together.X), obs=together.obs))
    apart = zl.open_dataset(manifest, join="separate")
    assert apart.n_vars == 2 * GENES
    assert apart.var_names.tolist() == [*adatas[0].var_names, *other.var_names]
    check_all(apart, ad.AnnData(scipy.sparse.block_diag([ad.concat(adatas[:2]).X, other.X], "csr"), obs=together.obs))
    assert apart[:, [0, 1, GENES + 3]].take(range(apart.n_obs)).shape == (apart.n_obs, 3)


@pytest.mark.parametrize("kind", ["geneformer", "scgpt"])
def test_tokens_take_the_genes_of_each_store(stores, tmp_path, kind):
    other = cells(9, 25)
    other.var_names = [f"g{gene}" for gene in range(30, 70)]
    write(tmp_path / "other.zarr", other)
    zl.index([stores / "a.zarr", tmp_path / "other.zarr"], tmp_path / "two.parquet", progress=False)
    names = [f"g{gene}" for gene in range(5, 60)]
    tokens = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3} | {name: 4 + n for n, name in enumerate(names)}
    if kind == "geneformer":
        tokenizer: Any = zl.tokenizers.Geneformer(tokens, {name: 1 + n / 9 for n, name in enumerate(names)})
    else:
        tokenizer = zl.tokenizers.ScGPT(tokens | {"<eoc>": 100})
    apart = zl.open_dataset(tmp_path / "two.parquet", join="separate")
    order = {"sampling": zl.Streaming(), "batch_size": 25, "x": None, "tokens": tokenizer}
    found = list(zl.Loader(apart, **order))
    of_each = [zl.open_dataset(path) for path in (stores / "a.zarr", tmp_path / "other.zarr")]
    single = [minibatch for dataset in of_each for minibatch in zl.Loader(dataset, **order)]
    for one, other_one in zip(found, single, strict=True):
        np.testing.assert_array_equal(one.tokens.input_ids, other_one.tokens.input_ids)
        if kind == "geneformer" or int(one.index[-1]) < SIZES["a.zarr"]:  # ScGPT draws by the number of the row
            np.testing.assert_array_equal(one.tokens.values, other_one.tokens.values)


def test_genes_are_named_when_they_are_indexed(tmp_path):
    for number in range(2):
        adata = cells(number, 20)
        adata.var["symbol"] = [f"S{gene}" for gene in range(GENES)]
        adata.var_names = [f"{number}_{gene}" for gene in range(GENES)]
        write(tmp_path / f"{number}.zarr", adata)
    zl.index(tmp_path / "*.zarr", tmp_path / "m.parquet", genes_by="symbol", progress=False)
    assert zl.open_dataset(tmp_path / "m.parquet").var_names.tolist() == [f"S{gene}" for gene in range(GENES)]
    with pytest.raises(OptionError, match=r"zl\.index"):
        zl.open_dataset(tmp_path / "m.parquet", genes_by="symbol")
    again = functools.partial(zl.index, tmp_path / "*.zarr", tmp_path / "m.parquet", update=True, progress=False)
    assert again(genes_by="symbol").reused == 2
    assert again().reused == 0  # under other names
    assert zl.open_dataset(tmp_path / "m.parquet", join="outer").n_vars == 2 * GENES
    assert again().reused == 2


# ---- what is wrong


@pytest.mark.slow
def test_a_changed_store_is_noticed(stores, tmp_path):
    manifest = copied(stores, tmp_path / "changed")
    write(tmp_path / "changed" / "b.h5ad", cells(50, 70))
    dataset = zl.open_dataset(manifest)
    with pytest.raises(StoreChangedError, match="Index the stores again"):
        list(zl.Loader(dataset, **LOADER))
    with pytest.raises(StoreChangedError, match=r"b\.h5ad has changed since it was indexed"):
        dataset.obs_column("cell_type")
    zl.index([tmp_path / "changed" / name for name in FILES], manifest, update=True, progress=False)
    assert len(list(zl.Loader(zl.open_dataset(manifest), **LOADER)))


@pytest.mark.slow
def test_update_reads_only_what_has_changed(stores, tmp_path):
    manifest = copied(stores, tmp_path / "grown")
    table = pd.read_parquet(manifest)
    table["batch"] = [f"b{number}" for number in range(len(table))]
    table.to_parquet(manifest, index=False)
    write(tmp_path / "grown" / "new.h5ad", cells(20, 15))
    urls = [tmp_path / "grown" / name for name in [*FILES, "new.h5ad"]]
    with pytest.raises(OptionError, match="--update"):
        zl.index(urls, manifest, progress=False)
    done = zl.index(urls, manifest, update=True, progress=False)
    assert (done.stores, done.reused) == (len(FILES) + 1, len(FILES))
    found = pd.read_parquet(manifest).set_index("url")["batch"]
    assert found.drop("new.h5ad").to_dict() == dict(zip(table["url"], table["batch"], strict=True))
    assert pd.isna(found["new.h5ad"])
    assert len(zl.open_dataset(manifest).where("batch == 'b3'")) == table["rows"].iloc[3]


@pytest.mark.slow
def test_stores_move_together_with_their_manifest(stores, tmp_path):
    copied(stores, tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    check_all(zl.open_dataset(tmp_path / "there" / "all.parquet"), ALL)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda table: table.drop(columns="stored"), FormatError, "it lacks stored"),
        (lambda table: table.iloc[:0], FormatError, "lists no stores"),
        (lambda table: table.assign(rows=-1), FormatError, "no number of rows"),
        (lambda table: table.assign(rows="many"), FormatError, "no number of rows"),
        (lambda table: table.assign(url=""), FormatError, "has no URL"),
        (lambda table: table.assign(layout="{"), FormatError, "layout of the manifest cannot be read"),
        (lambda table: table.assign(layout=json.dumps({"version": 99})), FormatError, "another version"),
        (lambda table: table.assign(rows=table["rows"] + 1), FormatError, "damaged"),
        (lambda table: table.assign(stored='{"arrays": {}, "objects": {}}'), FormatError, "no record of"),
        (lambda table: table.assign(stored="[]"), FormatError, "Index the stores again"),
        (lambda table: table.assign(url="nowhere/" + table["url"]), ZloaderError, "no such"),
    ],
)
def test_a_damaged_manifest_says_what_to_do(manifest, stores, change, error, message):
    path = stores / f"damaged{os.getpid()}.parquet"
    change(pd.read_parquet(manifest)).to_parquet(path, index=False)
    with pytest.raises(error, match=message):
        list(zl.Loader(zl.open_dataset(path), **LOADER))


def test_truncated_and_foreign_files(manifest, tmp_path):
    content = manifest.read_bytes()
    for name, bad in {"half": content[: len(content) // 2], "text": b"not parquet", "none": b""}.items():
        (tmp_path / f"{name}.parquet").write_bytes(bad)
        with pytest.raises(FormatError, match="cannot be read as a table of stores"):
            zl.open_dataset(tmp_path / f"{name}.parquet")
    pd.DataFrame({"gene": ["a"], "count": [1]}).to_csv(tmp_path / "cells.csv")
    with pytest.raises(FormatError, match="zloader convert"):
        zl.open_dataset(tmp_path / "cells.csv")
    with pytest.raises(StoreNotFoundError, match="no manifest"):
        zl.open_dataset(tmp_path / "missing.parquet")


NUMBERS = st.sampled_from([0, -1, 1, 7, 2**31, 2**49, 2**62, 2**70, 1.5, "x", None])


@pytest.mark.slow
@settings(PATIENT, max_examples=40)
@given(
    st.sampled_from(["a.zarr", "d.h5ad", "b.h5ad"]),
    st.sampled_from(["X/data", "X/indices", "X/indptr"]),
    st.integers(0, 2),
    NUMBERS,
)
def test_hostile_numbers_end_in_an_error_or_the_right_values(manifest, stores, name, path, at, number):
    table = pd.read_parquet(manifest)
    row = table.index[table["url"] == name][0]
    stored = json.loads(table.loc[row, "stored"])
    stored["arrays"][path][at] = number
    table.loc[row, "stored"] = json.dumps(stored)
    hostile = stores / f"hostile{os.getpid()}.parquet"
    table.to_parquet(hostile, index=False)
    try:
        found = zl.open_dataset(hostile).take(range(len(ALL)))
    except ZloaderError:
        return
    np.testing.assert_array_equal(dense(found.X), dense(ALL.X))


@pytest.mark.slow
@settings(PATIENT, max_examples=30)
@given(st.integers(0, 10**9), st.binary(min_size=1, max_size=3))
def test_flipped_bytes_end_in_an_error_or_the_right_values(manifest, stores, at, flipped):
    path = stores / f"flipped{os.getpid()}.csv"
    content = bytearray(pd.read_parquet(manifest).to_csv(index=False).encode())
    at %= len(content)
    content[at : at + len(flipped)] = flipped
    path.write_bytes(bytes(content))
    try:
        dataset = zl.open_dataset(path)
        found = dataset.take(range(dataset.n_obs))
    except (ZloaderError, CorruptChunkError):
        return
    if found.shape == ALL.shape:
        np.testing.assert_array_equal(dense(found.X), dense(ALL.X))


def test_what_cannot_be_indexed(stores, tmp_path):
    with pytest.raises(OptionError, match=r"\.parquet or \.csv"):
        zl.index(stores / "a.zarr", tmp_path / "m.txt")
    with pytest.raises(OptionError, match="nothing to index"):
        zl.index([], tmp_path / "m.csv")
    with pytest.raises(StoreNotFoundError):
        zl.index([stores / "a.zarr", stores / "missing.zarr"], tmp_path / "m.csv", progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command(stores, tmp_path):
    urls = [str(stores / name) for name in FILES]
    done = CliRunner().invoke(app, ["index", *urls, "-o", str(tmp_path / "m.csv"), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["stores"], document["rows"], document["labels"]) == (len(FILES), len(ALL), ["plate"])
    again = CliRunner().invoke(app, ["index", *urls, "-o", str(tmp_path / "m.csv")])
    assert again.exit_code == 1
    assert "--overwrite" in again.output
    shown = CliRunner().invoke(app, ["info", str(tmp_path / "m.csv"), "--json"])
    assert json.loads(shown.stdout)["stores"] == len(FILES)
    assert set(COLUMNS) <= set(pd.read_csv(tmp_path / "m.csv").columns)


@pytest.mark.slow
def test_from_a_bucket(s3, stores, tmp_path):
    for name in ("a.zarr", "c.zarr"):
        zl.convert(FILES[name], s3.url(f"plates/{name}"), storage_options=s3.storage_options, progress=False)
    urls = [s3.url("plates/a.zarr"), s3.url("plates/c.zarr"), stores / "e.zarr"]
    wanted = ad.concat([FILES["a.zarr"], FILES["c.zarr"], FILES["e.zarr"]])
    for manifest in (s3.url("all.parquet"), tmp_path / "all.parquet"):
        zl.index(urls, manifest, storage_options=s3.storage_options, progress=False)
        dataset = zl.open_dataset(manifest, cache=tmp_path / "cache", storage_options=s3.storage_options)
        together = ad.concat([FILES[Path(url).name] for stack in dataset.stores for url in stack.urls])
        assert together.shape == wanted.shape
        check_all(dataset, together)
    assert pd.read_parquet(tmp_path / "all.parquet")["url"].iloc[0].startswith("s3://")
