"""Reading an empty or truncated object raises an error. It is never taken for a chunk of fill values."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.experimental import write_dispatched
from sources import assert_same

import zloader as zl
from zloader.access.listed_store import is_metadata
from zloader.access.location import Location
from zloader.common.errors import MissingObjectError, TruncatedObjectError, ZloaderError

N_ROWS, N_GENES = 45, 8
SMALL = zl.ConvertOptions(chunk_rows=1, shard_size=256)  # two objects per obs column
CUTS: dict[str, Callable[[bytes], bytes]] = {"empty": lambda _: b"", "half": lambda stored: stored[: len(stored) // 2]}


def annotated() -> ad.AnnData:
    """An AnnData in which hardly any value equals a fill value."""
    numbers = np.arange(1, N_ROWS + 1)
    obs = pd.DataFrame(
        {
            "whole": numbers,
            "label": pd.Categorical.from_codes(numbers % 2 + 1, ["a", "b", "c"]),
            "text": [f"text {number}" for number in numbers],
            "maybe": pd.array([number if number % 3 else None for number in numbers], dtype="Int32"),
        },
        index=[f"cell {number}" for number in numbers],
    ).astype({"text": object})  # stored as one array with every version of pandas
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(N_GENES)]}, index=[f"g{i}" for i in range(N_GENES)])
    x = sp.csr_matrix(np.random.default_rng(0).integers(0, 5, (N_ROWS, N_GENES)).astype(np.float32))
    adata = ad.AnnData(
        X=x,
        obs=obs,
        var=var.astype({"symbol": object}),
        obsm={"e": np.stack([numbers, -numbers], axis=1).astype(np.float32)},
        varm={"loadings": np.ones((N_GENES, 2))},
        uns={"numbers": np.arange(1, 5), "word": "hello"},
    )
    adata.raw = ad.AnnData(X=x, obs=obs, var=adata.var)
    return adata


def by_us(dest: Path) -> None:
    zl.convert(annotated(), dest, options=SMALL, progress=False)


def by_anndata(zarr_format: int, *, shards: bool = False, **codecs: Any) -> Callable[[Path], None]:
    """Writes a store without consolidated metadata. Long arrays have several chunks, fewer in the last shard."""

    def write_leaf(function: Any, group: Any, key: str, leaf: Any, *, dataset_kwargs: Any, iospec: Any) -> None:
        grid: dict[str, Any] = {}
        if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) >= N_GENES:
            chunk = -(-len(leaf) // 3)
            grid = {"chunks": (chunk, *leaf.shape[1:])} | ({"shards": (2 * chunk, *leaf.shape[1:])} if shards else {})
        function(group, key, leaf, dataset_kwargs=dict(dataset_kwargs) | codecs | grid)

    def write(dest: Path) -> None:
        with ad.settings.override(auto_shard_zarr_v3=False):
            write_dispatched(zarr.create_group(dest, zarr_format=zarr_format), "/", annotated(), callback=write_leaf)

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "ours": by_us,
    "v2": by_anndata(2),
    "v3 plain": by_anndata(3, compressors=None),
    "v3 shards": by_anndata(3, shards=True),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the store of a writer, written once per module."""
    folder = tmp_path_factory.mktemp("stores")

    def store(writer: str) -> Path:
        path = folder / f"{writer}.zarr"
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of anndata and zarr, about their formats
                WRITERS[writer](path)
        return path

    return store


@pytest.fixture
def store(written: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the store that `convert` wrote."""
    return Path(shutil.copytree(written("ours"), tmp_path / "a.zarr"))


@contextlib.contextmanager
def damaged(store: Path, key: str, cut: str) -> Iterator[int]:
    """Truncates an object for the duration of the block; gives the truncated size."""
    whole = (store / key).read_bytes()
    try:
        (store / key).write_bytes(CUTS[cut](whole))
        yield len(CUTS[cut](whole))
    finally:
        (store / key).write_bytes(whole)


def stored_at(store: Path, key: str) -> str:
    """The key of a chunk of text. Newer versions of pandas store text as values and a mask."""
    return key if (store / key).exists() else key.replace("/c/", "/values/c/")


def chunk_keys(store: Path, *parts: str) -> list[str]:
    """The keys of the objects below these paths, without metadata."""
    paths = [path for part in parts for path in (store / part).rglob("*") if path.is_file()]
    return [key for key in (str(path.relative_to(store)) for path in sorted(paths)) if not is_metadata(key)]


def outcome(function: Callable[[], Any], key: str, size: int) -> Any:
    """The result of a function, or None if it raises a ZloaderError that names the object, and its size if it is 0."""
    try:
        return function()
    except ZloaderError as error:
        said = str(error)
    assert key in said
    assert size or "0 bytes" in said
    return None


def refused(function: Callable[[], Any], key: str, size: int) -> None:
    assert outcome(function, key, size) is None, f"{key} was not refused"


def minibatches(dataset: zl.Dataset) -> list[Any]:
    sizes: dict[str, Any] = {"batch_size": 10, "fetch_factor": 2, "sampling": zl.BlockShuffling(5)}
    loader = zl.Loader(dataset, obs=["whole", "label"], obsm=["e"], layout="dense", **sizes)
    return [[m.x.numpy(), m.obs["whole"].numpy(), m.obs["label"].numpy(), m.obsm["e"].numpy()] for m in loader]


ROUTES: dict[str, Callable[[zl.Dataset], Any]] = {
    "minibatches": minibatches,
    "take": lambda dataset: [dataset.take([3, N_ROWS - 1, 0]).X.toarray(), dataset.take([N_ROWS - 1]).obs],
    "obs": lambda dataset: dataset.obs(),
    "obs_column": lambda dataset: [
        np.asarray(dataset.obs_column(name).values) for name in ("whole", "label", "text", "maybe")
    ],
    "obsm_array": lambda dataset: np.asarray(dataset.obsm_array("e")),
    "var": lambda dataset: dataset.var,
    "var_names": lambda dataset: dataset.var_names.to_numpy(),
    "indptr": lambda dataset: dataset.store.offsets(dataset.store.matrix("X")).bounds(np.arange(N_ROWS))[1],
    "where": lambda dataset: dataset.where("whole > 7 and label == 'b'").row_numbers,
    "split": lambda dataset: dataset.split([0.5, 0.5], by="text")[0].row_numbers,
}


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(*((each if isinstance(each, list) else [each]) for each in (found, wanted)), strict=True):
        if isinstance(other, list):
            assert_equal(one, other)
        else:
            assert_same(one, other)


# ---- reading


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_way_to_read_refuses_it_or_does_without(written, tmp_path, writer, cut):
    store = Path(shutil.copytree(written(writer), tmp_path / "a.zarr"))
    routes = ROUTES if writer == "ours" else {name: ROUTES[name] for name in ("take", "obs", "obsm_array", "var")}
    whole = zl.open_dataset(store)
    wanted = {name: read(whole) for name, read in routes.items()}
    refusals = dict.fromkeys(routes, 0)
    for key in chunk_keys(store, "X", "obs", "obsm/e", "var"):
        with damaged(store, key, cut) as size:
            dataset = zl.open_dataset(store)
            for name, read in routes.items():
                found = outcome(lambda read=read, dataset=dataset: read(dataset), key, size)
                refusals[name] += found is None
                if found is not None:
                    assert_equal(found, wanted[name])
    assert all(refusals.values()), refusals


METADATA = {
    "ours": ["zarr.json"],
    "v2": [".zgroup", ".zattrs", "obs/.zattrs", "obs/whole/.zarray", "X/.zattrs", "X/data/.zarray", "var/.zgroup"],
    "v3 shards": ["zarr.json", "obs/zarr.json", "obs/label/zarr.json", "obs/label/codes/zarr.json", "X/data/zarr.json"],
}


@pytest.mark.every(3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("writer", METADATA)
def test_metadata(written, tmp_path, writer, cut):
    store = Path(shutil.copytree(written(writer), tmp_path / "a.zarr"))
    for key in METADATA[writer]:
        with damaged(store, key, cut) as size:
            refused(lambda: zl.open_dataset(store).take([0]), key, size)


@pytest.mark.parametrize("key", ["obs/whole/c/0", "obsm/e/c/0/0", "X/indptr/c/0", "zarr.json"])
def test_an_object_that_is_cut_after_opening(store, key):
    dataset = zl.open_dataset(store)
    routes = [ROUTES[name] for name in ("obs", "obsm_array", "indptr")]
    with damaged(store, key, "empty"):
        results = [outcome(lambda read=read: read(dataset), key, 0) for read in routes]
    assert sum(result is None for result in results) == (key != "zarr.json")


def test_a_store_of_another_writer_may_leave_chunks_out(written, tmp_path):
    store = Path(shutil.copytree(written("v3 plain"), tmp_path / "a.zarr"))
    (store / "obs/whole/c/0").unlink()
    wanted = annotated().obs["whole"].to_numpy(copy=True)
    wanted[:15] = 0
    np.testing.assert_array_equal(zl.open_dataset(store).obs_column("whole").values, wanted)


def test_stores_of_a_collection(written, tmp_path):
    for number in range(2):
        shutil.copytree(written("ours"), tmp_path / "a.zarr" / f"dataset_{number}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(tmp_path / "a.zarr", mode="a", zarr_format=3)
        root.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    with damaged(tmp_path / "a.zarr", "dataset_1/obs/whole/c/1", "empty") as size:
        dataset = zl.open_dataset(tmp_path / "a.zarr")
        refused(lambda: dataset.obs_column("whole"), "dataset_1: obs/whole/c/1", size)
        refused(
            lambda: zl.convert(tmp_path / "a.zarr", tmp_path / "b.zarr", progress=False),
            "dataset_1: obs/whole/c/1",
            size,
        )


# ---- mirrors


@pytest.mark.every(2)
@pytest.mark.parametrize("key", ["obs/whole/c/0", "obs/label/codes/c/0", "obsm/e/c/0/0", "X/indptr/c/0", "X/data/c/0"])
def test_nothing_of_it_comes_into_a_mirror(store, tmp_path, key):
    with damaged(store, key, "empty") as size:
        dataset = zl.open_dataset(store, cache=tmp_path / "cache")
        for read in (zl.warm, *ROUTES.values()):
            outcome(lambda read=read: read(dataset), key, size)
        refused(lambda: minibatches(zl.open_dataset(store, cache=tmp_path / "cache")), key, size)
        with pytest.raises(ZloaderError, match=f"{key} has 0 bytes|not in the mirror"):
            minibatches(zl.open_dataset(store, cache=tmp_path / "cache", offline=True))


def test_a_mirror_of_what_is_not_consolidated(written, tmp_path):
    online = zl.open_dataset(written("v3 shards"), cache=tmp_path / "cache")
    wanted = online.obs()
    zl.warm(online)
    dataset = zl.open_dataset(written("v3 shards"), cache=tmp_path / "cache", offline=True)
    assert_same(dataset.obs(), wanted)
    assert dataset.obsm_names == ["e"]
    assert len(minibatches(dataset)) == 5


# ---- servers


REMOTE = ["zarr.json", "X/indptr/c/0", "obs/maybe/mask/c/0", "obsm/e/c/0/0"]


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_on_servers(store, tmp_path, request, scheme, cut):
    if scheme == "s3":
        s3 = request.getfixturevalue("s3")
        location = Location(url=s3.url("a.zarr"), storage_options=s3.storage_options)
        location.filesystem().put(f"{store}/", f"{location.path}/", recursive=True)
    else:
        (tmp_path / "bucket").mkdir()
        store = store.rename(tmp_path / "bucket" / "a.zarr")
        location = Location(url=f"{request.getfixturevalue('sim')().url}/bucket/a.zarr")
    options = {"storage_options": dict(location.storage_options)}
    for number, key in enumerate(REMOTE):
        with damaged(store, key, cut) as size:
            if scheme == "s3":
                location.filesystem().pipe_file(f"{location.path}/{key}", (store / key).read_bytes())
            refused(lambda: minibatches_and_obs(zl.open_dataset(location.url, **options)), key, size)
            dest = tmp_path / f"{number}.zarr"
            refused(lambda dest=dest: convert(location.url, dest, source_options=options["storage_options"]), key, size)
            assert not (dest / "zarr.json").exists()
        if scheme == "s3":
            location.filesystem().pipe_file(f"{location.path}/{key}", (store / key).read_bytes())


def minibatches_and_obs(dataset: zl.Dataset) -> None:
    minibatches(dataset)
    dataset.obs()


def convert(source: Any, dest: Path, **options: Any) -> None:
    zl.convert(source, dest, options=SMALL, progress=False, **options)


GONE = {"nothing": {"status": 200, "body": ""}, "not found": {"status": 404, "code": "NoSuchKey"}}


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("fault", GONE.values(), ids=GONE)
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_server_that_answers_otherwise_than_it_lists(written, tmp_path, sim, scheme, fault):
    shutil.copytree(written("ours"), tmp_path / "bucket" / "a.zarr")
    server = sim()
    url = "s3://bucket/a.zarr" if scheme == "s3" else f"{server.url}/bucket/a.zarr"
    options = {"anon": True, "endpoint_url": server.url} if scheme == "s3" else {}
    dataset = zl.open_dataset(url, storage_options=options, cache=tmp_path / "cache")
    server.faults = [{"kind": "status", "match": "/c/", **fault}]
    for name, key in {"obs": "obs/", "indptr": "X/indptr/c/"}.items():
        with pytest.raises((MissingObjectError, TruncatedObjectError), match=key):
            ROUTES[name](dataset)
    with pytest.raises(ZloaderError, match=r"/c/0"):
        convert(url, tmp_path / "b.zarr", source_options=options)


# ---- sources


SOURCES = {
    "ours": ["X/data/c/0", "X/indptr/c/0", "obs/whole/c/1", "obs/maybe/mask/c/0", "raw/var/symbol/c/0", "uns/word/c"],
    "v2": [
        "X/data/0",
        "obs/label/codes/2",
        "obs/maybe/values/1",
        "varm/loadings/0.0",
        "raw/X/indptr/0",
        "uns/numbers/0",
    ],
    "v3 shards": ["X/indices/c/0", "obs/text/c/1", "obsm/e/c/0/0", "uns/numbers/c/0", "X/data/zarr.json", "zarr.json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("writer", SOURCES)
def test_sources_are_refused(written, tmp_path, writer, cut):
    source = Path(shutil.copytree(written(writer), tmp_path / "a.zarr"))
    for key in [stored_at(source, key) for key in SOURCES[writer]]:
        with damaged(source, key, cut) as size:
            refused(lambda: convert(source, tmp_path / "b.zarr"), key, size)
            assert not (tmp_path / "b.zarr/zarr.json").exists()


@pytest.mark.every(2)
@pytest.mark.parametrize("writer", SOURCES)
def test_an_empty_object_of_a_source_costs_no_store(written, tmp_path, writer):
    """The existing store is not replaced, although `convert` reads obs and uns late."""
    source = Path(shutil.copytree(written(writer), tmp_path / "a.zarr"))
    convert(annotated(), tmp_path / "b.zarr")
    key = next(key for key in SOURCES[writer] if key.startswith("obs/"))
    with damaged(source, key, "empty") as size:
        refused(lambda: convert(source, tmp_path / "b.zarr", overwrite=True), key, size)
    assert zl.verify(tmp_path / "b.zarr", progress=False).ok


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_verify_names_it(store, cut):
    for named in [
        "X/data/c/0",
        "X/indptr/c/1",
        "obs/text/c/0",
        "obs/label/codes/c/0",
        "uns/word/c",
        "obs/whole/zarr.json",
    ]:
        key = stored_at(store, named)
        with damaged(store, key, cut) as size:
            (problem,) = zl.verify(store, progress=False).problems
        # Text is read by zarr, which does not say which object is damaged.
        assert problem.where == key or (problem.where in ("obs/text", "uns/word") and key.startswith(problem.where))
        assert size or "0 bytes" in problem.what


def test_verify_names_the_metadata_of_the_root(store):
    with damaged(store, "zarr.json", "empty"):
        (problem,) = zl.verify(store, progress=False).problems
    assert problem.where == "zarr.json"
    assert "has 0 bytes" in problem.what
