"""Files and stores from other versions of anndata, pandas and zarr, and from the installed versions."""

from __future__ import annotations

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
import versions
import zarr
from anndata.tests.helpers import assert_equal, gen_adata

import zloader as zl

SMALL = zl.ConvertOptions(chunk_rows=1, shard_size="4KiB", preserve_dtype=True)
X_TYPES = {
    "csr": sp.csr_matrix,
    "csc": sp.csc_matrix,
    "csr array": sp.csr_array,
    "csc array": sp.csc_array,
    "dense": np.asarray,
}
SHAPES = [(11, 7), (40, 120)]
ARCHIVES = sorted(versions.DATA.glob("*.zip"))
ALWAYS = ("anndata-0.8.0", "anndata-0.13.4")  # the others are slow tests
ARCHIVE_PARAMS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in ALWAYS else [pytest.mark.slow]) for path in ARCHIVES
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignores the warnings of anndata's test helpers and dependencies about formats and deprecations."""
    with warnings.catch_warnings(), ad.settings.override(allow_write_nullable_strings=True):
        warnings.simplefilter("ignore")
        yield


def in_memory(adata: ad.AnnData, _: Path) -> ad.AnnData:
    return adata


def as_h5ad(adata: ad.AnnData, tmp: Path) -> Path:
    adata.write_h5ad(tmp / "a.h5ad", convert_strings_to_categoricals=False)
    return tmp / "a.h5ad"


def as_zarr(adata: ad.AnnData, tmp: Path) -> Path:
    adata.write_zarr(tmp / "source.zarr", convert_strings_to_categoricals=False)
    return tmp / "source.zarr"


SOURCES: dict[str, Callable[[ad.AnnData, Path], Any]] = {"memory": in_memory, "h5ad": as_h5ad, "zarr": as_zarr}


def converted(source: Any, tmp: Path) -> ad.AnnData:
    zl.convert(source, tmp / "a.zarr", options=SMALL, progress=False)
    return ad.read_zarr(tmp / "a.zarr")


def text_columns(n_rows: int) -> pd.DataFrame:
    """Text in every dtype of pandas, with and without missing values, and categories of every kind."""
    words = [f"word {row % 3} ä" for row in range(n_rows)]
    some = [word if row % 4 else None for row, word in enumerate(words)]
    columns = {
        "object": pd.array(np.array(words, object), dtype=object),
        "inferred": pd.Series(words).array,
        "string": pd.array(words, dtype="string"),
        "some string": pd.array(some, dtype="string"),
        "category": pd.Categorical(some),
        "string category": pd.Categorical(pd.array(some, dtype="string")),
        "integer category": pd.Categorical([row % 3 if row % 4 else None for row in range(n_rows)]),
        "float category": pd.Categorical([row % 3 / 2 if row % 4 else None for row in range(n_rows)]),
        "boolean category": pd.Categorical([row % 3 == 0 if row % 4 else None for row in range(n_rows)]),
        "maybe integer": pd.array([row if row % 4 else None for row in range(n_rows)], dtype="Int32"),
        "maybe boolean": pd.array([row % 3 == 0 if row % 4 else None for row in range(n_rows)], dtype="boolean"),
    }
    if hasattr(pd.Series(words).astype("str").dtype, "na_value"):
        columns["some str"] = pd.Series(some).astype("str").array
    return pd.DataFrame(columns)


# Every shape and every type of X, with the kinds of source in rotation.
GENERATED = [
    pytest.param(shape, x_type, list(SOURCES)[(row + column) % 3], id=f"{shape}-{x_type}")
    for row, shape in enumerate(SHAPES)
    for column, x_type in enumerate(X_TYPES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "x_type", "source"), GENERATED)
def test_generated_anndata_equal_their_conversion(
    tmp_path: Path, shape: tuple[int, int], x_type: str, source: str
) -> None:
    kinds = (sp.csr_matrix, np.ndarray, pd.DataFrame, sp.csr_array)
    adata = gen_adata(shape, X_TYPES[x_type], obsm_types=kinds, varm_types=kinds)
    assert_equal(converted(SOURCES[source](adata, tmp_path), tmp_path), adata)
    taken = zl.open_dataset(tmp_path / "a.zarr").take(np.arange(shape[0])[::-1])
    assert_equal(taken.obs, adata.obs[::-1])
    assert_equal(taken.X, adata.X[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("index", [object, "string", "inferred"], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_text_of_every_dtype_keeps_its_values(tmp_path: Path, source: str, index: Any) -> None:
    obs = text_columns(20)
    names = pd.Index([f"cell {row}" for row in range(20)], dtype=None if index == "inferred" else index)
    adata = ad.AnnData(sp.eye(20, format="csr", dtype=np.float32), obs=obs.set_axis(names))
    out = converted(SOURCES[source](adata, tmp_path), tmp_path).obs
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    for frame in (out, dataset.obs(), dataset.take(np.arange(20)).obs):
        assert list(frame.index) == list(names)
        assert list(frame.columns) == list(obs.columns)
        for name, column in obs.items():
            wanted = column.astype(object)
            assert list(frame[name].isna()) == list(wanted.isna()), name
            assert frame[name].dropna().tolist() == wanted.dropna().tolist(), name
    assert zarr.open_group(tmp_path / "a.zarr", mode="r")["obs/_index"].attrs["encoding-type"] == "string-array"


def test_labels_are_plain_python_values(tmp_path: Path) -> None:
    obs = text_columns(20)
    names = [f"cell {row}" for row in range(20)]
    adata = ad.AnnData(sp.eye(20, format="csr", dtype=np.float32), obs=obs.set_axis(pd.Index(names)))
    zl.convert(adata, tmp_path / "a.zarr", options=SMALL, progress=False)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    for name in obs:
        if name.startswith("maybe"):
            continue
        labels = dataset.categories(name)
        kind = {"integer": int, "float": float, "boolean": bool}.get(name.partition(" ")[0], str)
        assert {type(label) for label in labels.tolist()} == {kind}, name
        assert labels.dtype == (object if kind is str else np.dtype(kind)), name
        codes = dataset.obs_column(name).values
        missing = obs[name].isna().to_numpy()
        assert list(codes < 0) == list(missing), name
        assert [labels[code] for code in codes[~missing]] == obs[name].dropna().tolist(), name


@pytest.fixture(scope="module", params=ARCHIVE_PARAMS)
def written_elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked stores and files of another version of anndata, pandas and zarr."""
    directory = tmp_path_factory.mktemp(request.param.stem)
    shutil.unpack_archive(request.param, directory)
    return directory


@pytest.mark.slow
def test_stores_of_other_versions_open_and_convert(written_elsewhere: Path, tmp_path: Path) -> None:
    stores = sorted(path for path in written_elsewhere.iterdir() if path.suffix == ".zarr")
    assert stores
    for store in stores:
        assert_as_written(zl.open_dataset(store))
    for source in sorted(written_elsewhere.iterdir()):
        zl.convert(source, tmp_path / "out.zarr", options=SMALL, progress=False, overwrite=True)
        assert_as_written(zl.open_dataset(tmp_path / "out.zarr"))
        assert ad.read_zarr(tmp_path / "out.zarr").obs_names.tolist() == versions.wanted().obs_names.tolist()


def assert_as_written(dataset: zl.Dataset) -> None:
    """Compares every value that versions.py writes with the dataset and with a Loader's minibatches."""
    adata, columns = versions.wanted(), versions.obs()
    assert (dataset.n_obs, dataset.n_vars) == adata.shape
    assert dataset.var_names.tolist() == adata.var_names.tolist()
    assert dataset.var["symbol"].tolist() == adata.var["symbol"].tolist()
    obs = dataset.obs()
    assert obs.index.tolist() == adata.obs_names.tolist()
    loader = zl.Loader(dataset, batch_size=7, obs=dataset.obs_columns, sampling=zl.Streaming())
    minibatches = list(loader)
    x = np.concatenate([minibatch.x.to_dense().numpy() for minibatch in minibatches])
    np.testing.assert_array_equal(x, adata.X.toarray())
    assert set(obs) >= columns.keys() - {"some string"}  # anndata 0.10 cannot write it
    for name in set(obs) - {"src_path"}:  # added by annbatch
        values = columns[name]
        assert obs[name].astype(object).where(obs[name].notna(), None).tolist() == values, name
        numbers = np.concatenate([minibatch.obs[name].numpy() for minibatch in minibatches]).tolist()
        column = dataset.obs_column(name)
        if column.categories is not None:
            labels = dataset.categories(name).tolist()
            numbers = [None if code < 0 else labels[code] for code in numbers]
            assert [type(label) for label in numbers] == [type(value) for value in values]
        assert [None if number != number else number for number in numbers] == values, name
