"""obs columns of every kind as numbers: strings, missing values and dates, from every place, and what they mean."""

from __future__ import annotations

import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import counts, write_store

import zloader as zl
from zloader.caching import kept
from zloader.common.errors import FormatError, OptionError
from zloader.dataset.store import OpenedStore
from zloader.testing import SeaweedFS

N_ROWS = 60
CHUNK_ROWS = 8
SIZES: dict[str, Any] = {"batch_size": 7, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
ROWS = np.arange(N_ROWS)
WORDS = [f"word {row * 7 % 13} ä" for row in ROWS]
DAYS = np.datetime64("2024-02-25", "D") + ROWS // 4
NO_DAY = np.iinfo(np.int64).min


def some(values: Any) -> list[Any]:
    """The values, of which every fifth is missing."""
    return [None if row % 5 == 3 else value for row, value in enumerate(values)]


def table() -> ad.AnnData:
    adata = counts(N_ROWS, 9)
    adata.obs["word"] = pd.array(WORDS, dtype=object)
    adata.obs["maybe word"] = pd.array(some(WORDS), dtype="string")
    adata.obs["label"] = pd.Categorical(some(WORDS))
    adata.obs["count"] = pd.array(some((1 << 60) + ROWS * 0), dtype="Int64").fillna(1 << 60)
    adata.obs["maybe count"] = pd.array(some(ROWS), dtype="Int64")
    adata.obs["maybe flag"] = pd.array(some(ROWS % 2 == 0), dtype="boolean")
    adata.obs["day"] = pd.Series(DAYS.astype("M8[s]"), adata.obs_names)
    adata.obs["maybe time"] = pd.Series(some(DAYS.astype("M8[ns]")), adata.obs_names, dtype="M8[ns]")
    adata.obs["waited"] = pd.Series((ROWS * 60).astype("m8[s]"), adata.obs_names)
    return adata


ADATA = table()
COLUMNS = [
    "word",
    "maybe word",
    "label",
    "count",
    "maybe count",
    "maybe flag",
    "day",
    "maybe time",
    "waited",
    "lane",
    "cell_type",
]
DTYPES = {
    "count": "int64",
    "maybe count": "float64",
    "maybe flag": "float64",
    "day": "datetime64[s]",
    "maybe time": "datetime64[ns]",
    "waited": "timedelta64[s]",
    "lane": "int32",
}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two chunks."""
    monkeypatch.setattr("zloader.dataset.obs._WINDOW_ROWS", 2 * CHUNK_ROWS)


def write(adata: ad.AnnData, dest: Any, **options: Any) -> Any:
    zl.convert(adata, dest, options=zl.ConvertOptions(chunk_rows=2, shard_size="4KiB"), progress=False, **options)
    return dest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, with several chunks of strings in one shard per column."""
    path = tmp_path_factory.mktemp("columns") / "a.zarr"
    write(ADATA, path)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    with warnings.catch_warnings(), ad.settings.override(allow_write_nullable_strings=True):
        warnings.simplefilter("ignore")  # zarr and anndata warn about formats
        for name, words in (("word", np.array(WORDS, object)), ("maybe word", ADATA.obs["maybe word"].array)):
            ad.io.write_elem(
                root["obs"], name, words, dataset_kwargs={"chunks": (CHUNK_ROWS,), "shards": (8 * CHUNK_ROWS,)}
            )
        zarr.consolidate_metadata(path)
    return path


@pytest.fixture(scope="module")
def remote(seaweed: SeaweedFS) -> str:
    url = f"s3://{seaweed.bucket}/{uuid.uuid4().hex}/a.zarr"
    return write(ADATA, url, storage_options=seaweed.storage_options)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("halves")
    parts = [ADATA[:17].copy(), ADATA[17:].copy()]
    return [write(part, folder / f"{number}.zarr") for number, part in enumerate(parts)]


@pytest.fixture(params=["", "mirror", "two stores", "view", "s3, mirror"])
def dataset(request: pytest.FixtureRequest, store: Path, tmp_path: Path) -> zl.Dataset:
    """The rows from every place; from a mirror after it was filled."""
    cache = tmp_path / "cache" if "mirror" in request.param else None
    urls: Any = store
    options = None
    if "s3" in request.param:
        urls, options = request.getfixturevalue("remote"), request.getfixturevalue("seaweed").storage_options
    elif request.param == "two stores":
        urls = request.getfixturevalue("halves")
    if cache is not None:
        zl.open_dataset(urls, cache=cache, storage_options=options).observations.cache_all()
    opened = zl.open_dataset(urls, cache=cache, storage_options=options)
    return opened[5:50] if request.param == "view" else opened


def meant(loader: zl.Loader, name: str, values: np.ndarray[Any, Any]) -> list[Any]:
    """The values of a column by `loader.labels`, None where they are missing."""
    labels = loader.labels[name]
    if isinstance(labels, pd.Index):
        return [None if code < 0 else labels[code] for code in values]
    shown = values.view(labels)
    return [None if missing else value for value, missing in zip(shown.tolist(), pd.isna(shown), strict=True)]


def wanted(name: str, rows: Any) -> list[Any]:
    column = ADATA.obs[name].iloc[rows]
    values = column.to_numpy(DTYPES[name], na_value=np.nan) if "maybe" in name and name in DTYPES else column.to_numpy()
    return [None if missing else value for value, missing in zip(values.tolist(), column.isna(), strict=True)]


@pytest.mark.every(2)
def test_every_column_means_what_was_written(dataset: zl.Dataset) -> None:
    loader = zl.Loader(dataset, x=None, obs=COLUMNS, **SIZES)
    assert list(loader.labels) == COLUMNS
    seen = 0
    for minibatch in loader:
        for name, column in minibatch.obs.items():
            assert meant(loader, name, column.numpy()) == wanted(name, minibatch.index), name
            kind = DTYPES.get(name, "int64")
            assert str(column.dtype) == f"torch.{kind if '64[' not in kind else 'int64'}", name
        seen += len(minibatch)
    assert seen == dataset.n_obs


@pytest.mark.every(2)
def test_labels_are_categories_or_dtypes(dataset: zl.Dataset) -> None:
    loader = zl.Loader(dataset, obs=COLUMNS, **SIZES)
    for name, labels in loader.labels.items():
        if name in DTYPES:
            assert labels == np.dtype(DTYPES[name])
            with pytest.raises(OptionError, match="holds numbers or dates"):
                dataset.categories(name)
        else:
            assert labels.equals(dataset.categories(name))
            assert labels.dtype == object
    for name in ("word", "maybe word"):
        assert loader.labels[name].tolist() == sorted({word for word in ADATA.obs[name] if word is not pd.NA})
        assert dataset.obs_column(name).values.dtype == np.int8
    assert zl.Loader(dataset).labels == {}


@pytest.mark.every(2)
def test_a_missing_date_is_the_lowest_number(dataset: zl.Dataset) -> None:
    (minibatch,) = zl.Loader(dataset, x=None, obs=["maybe time"], batch_size=100, shuffle=False)
    column = minibatch.obs["maybe time"].numpy()
    assert (column == NO_DAY).tolist() == ADATA.obs["maybe time"].iloc[minibatch.index].isna().tolist()


@pytest.mark.every(4)
def test_frames_and_anndata_have_the_values_too(dataset: zl.Dataset) -> None:
    rows = ROWS if dataset.n_obs == N_ROWS else ROWS[5:50]
    frames = [dataset.obs(), dataset.take(np.arange(dataset.n_obs)).obs]
    for frame in frames:
        for name in COLUMNS:
            shown = [None if missing else value for value, missing in zip(frame[name], frame[name].isna(), strict=True)]
            expected = ADATA.obs[name].iloc[rows]
            assert shown == [None if m else v for v, m in zip(expected, expected.isna(), strict=True)], name


CONDITIONS = {
    "day >= '2024-02-27'": lambda obs: obs["day"] >= "2024-02-27",
    "'2024-02-27' != day": lambda obs: obs["day"] != "2024-02-27",
    "day == '2024-03'": lambda obs: obs["day"] == "2024-03-01",
    "day in ['2024-02-27', '2024-02-28T00:00:00']": lambda obs: (
        (obs["day"] == "2024-02-27") | (obs["day"] == "2024-02-28")
    ),
    "`maybe time` != '2024-02-27'": lambda obs: obs["maybe time"].notna() & (obs["maybe time"] != "2024-02-27"),
    "not `maybe time` < '2024-02-27'": lambda obs: obs["maybe time"] >= "2024-02-27",
    "`maybe time` not in ['2024-02-27']": lambda obs: obs["maybe time"].notna() & (obs["maybe time"] != "2024-02-27"),
    "waited < 600": lambda obs: obs["waited"] < pd.Timedelta(600, "s"),
    "day == day and `maybe time` == `maybe time`": lambda obs: obs["maybe time"].notna(),
    "`maybe word` == 'word 7 ä'": lambda obs: obs["maybe word"].eq("word 7 ä").fillna(False),
    "`maybe flag` == True": lambda obs: obs["maybe flag"].fillna(False),
    "`maybe count` >= 30": lambda obs: obs["maybe count"].ge(30).fillna(False),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_rows_are_chosen_by_columns_of_every_kind(store: Path, condition: str) -> None:
    chosen = zl.open_dataset(store).where(condition)
    assert 0 < chosen.n_obs < N_ROWS
    assert chosen.row_numbers.tolist() == np.flatnonzero(CONDITIONS[condition](ADATA.obs)).tolist()


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("day == 5", r"day holds datetime64\[s\]: compare it with text such as '2024-03-31'"),
        ("day == 'yesterday'", "compare it with text"),
        ("day == 'now'", "compare it with text"),
        ("day == '2024-02-30'", "compare it with text"),
        ("day == '2024-02-27T00:00Z'", "compare it with text"),
        ("day == '2024-02-27T00:00:00.5'", "no more precise"),
        ("`maybe time` == '9999-12-31'", "compare it with text"),
        ("waited == '600'", "compare it with a whole number"),
        ("waited == 0.5", "compare it with a whole number"),
        ("day == `maybe time`", r"datetime64\[s\] and datetime64\[ns\] cannot be compared"),
        ("day == lane", "cannot be compared"),
        ("day", "does not hold booleans"),
    ],
)
def test_dates_are_compared_with_dates_only(store: Path, condition: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        zl.open_dataset(store).where(condition)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["word", "maybe word", "day", "maybe time", "waited", "maybe flag", "maybe count"])
def test_splits_and_samplings_take_columns_of_every_kind(store: Path, name: str) -> None:
    dataset = zl.open_dataset(store)
    values = dataset.obs_column(name).values
    halves = dataset.split([0.5, 0.5], by=name)
    assert sum(half.n_obs for half in halves) == N_ROWS
    labels = [set(np.unique(half.obs_column(name).values.astype("S")).tolist()) for half in halves]
    assert not labels[0] & labels[1]
    if len(np.unique(values)) < 20:
        parts = dataset.split([0.5, 0.5], stratify=name)
        assert sum(part.n_obs for part in parts) == N_ROWS
    balanced = zl.Loader(dataset, x=None, sampling=zl.ClassBalancedSampling(name), batch_size=100)
    drawn = np.concatenate([minibatch.index.numpy() for minibatch in balanced])
    assert ADATA.obs[name].iloc[drawn].notna().all()


def test_strings_are_coded_in_windows(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    window = OpenedStore.window

    def recorded(self: OpenedStore, path: str, start: int, stop: int) -> Any:
        read.append((path, start))
        found = window(self, path, start, stop)
        assert len(found) <= 2 * CHUNK_ROWS
        return found

    monkeypatch.setattr(OpenedStore, "window", recorded)
    zl.open_dataset(store).obs_column("maybe word")
    starts = range(0, N_ROWS, 2 * CHUNK_ROWS)
    assert sorted(read) == sorted((f"obs/maybe word/{part}", start) for start in starts for part in ("mask", "values"))


# ---- Several stores


def stores(tmp_path: Path, *columns: Any) -> zl.Dataset:
    urls = []
    for number, values in enumerate(columns):
        part = ADATA[:2].copy()
        part.obs["c"] = values
        urls.append(write(part, tmp_path / f"{number}.zarr"))
    return zl.open_dataset(urls)


@pytest.mark.slow
def test_dates_of_several_stores_get_the_finest_unit(tmp_path: Path) -> None:
    coarse, fine = pd.Series(["2024-01-01", None], dtype="M8[s]"), pd.Series(["2024-01-02", None], dtype="M8[us]")
    dataset = stores(tmp_path, coarse.array, fine.array)
    loader = zl.Loader(dataset, x=None, obs=["c"], shuffle=False)
    assert loader.labels == {"c": np.dtype("M8[us]")}
    (minibatch,) = loader
    shown = minibatch.obs["c"].numpy().view("M8[us]")
    np.testing.assert_array_equal(shown, np.array(["2024-01-01", "NaT", "2024-01-02", "NaT"], "M8[us]"))


@pytest.mark.slow
def test_a_date_that_the_finest_unit_cannot_hold_is_refused(tmp_path: Path) -> None:
    early, fine = pd.Series(["0800-12-25", None], dtype="M8[s]"), pd.Series(["2024-01-02", None], dtype="M8[ns]")
    dataset = stores(tmp_path, early.array, fine.array)
    for read in (lambda: dataset.obs_column("c"), lambda: dataset.obs(["c"])):
        with pytest.raises(FormatError, match=r"'c' holds 0800-12-25T00:00:00 in one of the stores.*datetime64\[ns\]"):
            read()


KINDS = {
    "numbers": [1, 2],
    "strings": pd.array(["a", "b"], dtype=object),
    "dates": pd.to_datetime(["2024", "2025"]),
    "durations": pd.to_timedelta([1, 2], unit="s"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("numbers", "strings"), ("strings", "dates"), ("dates", "numbers"), ("durations", "dates")],
    ids=lambda kind: kind,
)
def test_values_of_different_kinds_are_refused_when_the_loader_is_made(tmp_path: Path, one: str, other: str) -> None:
    dataset = stores(tmp_path, KINDS[one], KINDS[other])
    for read in (lambda: zl.Loader(dataset, obs=["c"]), lambda: dataset.obs(["c"])):
        with pytest.raises(FormatError, match=rf"'c' holds {one} in .*0\.zarr and {other} in .*1\.zarr"):
            read()


# ---- Columns that are no tensors


def with_element(tmp_path: Path, element: Any) -> Path:
    """A store whose column `lane` was replaced."""
    write(ADATA, tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r+", use_consolidated=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr and anndata warn about formats
        del root["obs/lane"]
        ad.io.write_elem(root["obs"], "lane", element)
        zarr.consolidate_metadata(tmp_path / "a.zarr")
    return tmp_path / "a.zarr"


def test_columns_that_are_no_tensors_are_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    dataset = zl.open_dataset(with_element(tmp_path, ROWS * 1j))
    says = r"'lane' holds complex numbers in \S+: only numbers, categories, strings and dates"
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, obs=["lane"])
    dataset.observations.cache_all()
    assert dataset.obs(["lane"])["lane"].tolist() == (ROWS * 1j).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "element", [np.array(WORDS[:7], object), pd.array(some(WORDS[:7]), dtype="string")], ids=["plain", "nullable"]
)
def test_strings_of_another_length_are_refused(tmp_path: Path, element: Any) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        store = with_element(tmp_path, element)
    with pytest.raises(FormatError, match=r"'lane' of .* has shape \(7,\), but the store has 60 rows"):
        zl.open_dataset(store).obs_column("lane")


@pytest.mark.slow
def test_large_numbers_and_missing_values_are_refused(tmp_path: Path) -> None:
    dataset = stores(tmp_path, pd.array([2**53 + 1, None], dtype="Int64"))
    with pytest.raises(OptionError, match="holds 9007199254740993 and missing values"):
        dataset.obs_column("c")
    dataset = stores(tmp_path / "exact", pd.array([2**53, None], dtype="Int64"))
    assert dataset.obs_column("c").values.tolist()[0] == 2**53


def test_labels_too_large_to_be_cached_as_objects_are_available_offline(store, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MAX_BYTES", 20)
    wanted = zl.open_dataset(store).obs_column("cell_type")
    zl.open_dataset(store, cache=tmp_path / "cache").obs_column("cell_type")
    found = zl.open_dataset(store, cache=tmp_path / "cache", offline=True).obs_column("cell_type")
    np.testing.assert_array_equal(found.values, wanted.values)
    assert found.categories.equals(wanted.categories)


@pytest.mark.parametrize("damage", ["ordered", "codes"])
def test_a_damaged_categorical_is_an_error_that_names_it(store, tmp_path, damage):
    path = shutil.copytree(store, tmp_path / "a.zarr")
    column = zarr.open_group(path, mode="r+", use_consolidated=False)["obs/cell_type"]
    if damage == "ordered":
        del column.attrs["ordered"]
    else:
        del column["codes"]
        column.create_group("codes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, about its format
        zarr.consolidate_metadata(path)
    with pytest.raises(FormatError, match=r"cell_type.*the store is damaged"):
        zl.open_dataset(path).obs(["cell_type"])


@pytest.mark.parametrize("cached", [False, True])
def test_arrays_of_a_dataset_cannot_be_changed(tmp_path, cached):
    adata = counts(20, 4)
    adata.obsm["pca"] = np.ones((20, 2), np.float32)
    write_store(adata, tmp_path / "a.zarr", tmp_path / "source")
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    for urls in (tmp_path / "a.zarr", [tmp_path / "a.zarr", tmp_path / "b.zarr"]):
        dataset = zl.open_dataset(urls, cache=tmp_path / "cache" if cached else None)
        arrays = [dataset.obsm_array("pca"), *(dataset.obs_column(name).values for name in dataset.obs_columns)]
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0
        for minibatch in zl.Loader(dataset, obs=dataset.obs_columns, obsm=["pca"], framework="numpy", batch_size=8):
            for array in (*minibatch.obs.values(), *minibatch.obsm.values()):
                array[:] = 0  # a minibatch's own
        (whole,) = zl.Loader(dataset, obs=["lane"], obsm=["pca"], shuffle=False, batch_size=dataset.n_obs)
        assert whole.obs["lane"].tolist() == [*adata.obs["lane"]] * (dataset.n_obs // 20)
        assert whole.obsm["pca"].min() == 1
