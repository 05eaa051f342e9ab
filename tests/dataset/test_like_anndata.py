"""What datasets and views share with AnnData: shape, repr, rows by slice, mask and name, and layers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import counts, dense, write_store

import zloader as zl
from zloader.common.errors import FormatError, MissingColumnError, OptionError

ADATA = counts(50, 12)
ADATA.var["highly_variable"] = True
ADATA.layers["spliced"] = ADATA.X * 2
ADATA.layers["dense"] = ADATA.X.toarray() + 1
ADATA.obsm["X_pca"] = np.arange(100, dtype=np.float32).reshape(50, 2)
LINES = """
    obs: 'cell_type', 'donor', 'n_counts', 'passed', 'lane'
    var: 'highly_variable'
    obsm: 'X_pca'
    layers: 'dense', 'spliced'"""
PASSED = ADATA.obs["passed"].to_numpy()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("alike")
    write_store(ADATA, tmp / "bucket" / "a.zarr", tmp)
    return tmp / "bucket" / "a.zarr"


@pytest.fixture
def dataset(store: Path) -> zl.Dataset:
    return zl.open_dataset(store)


def test_shape_and_length(dataset: zl.Dataset) -> None:
    view = dataset[10:20]
    assert (dataset.shape, view.shape) == ((50, 12), (10, 12))
    assert (len(dataset), len(view)) == (50, 10)


def test_the_repr_is_that_of_anndata(dataset: zl.Dataset, store: Path) -> None:
    assert repr(dataset) == f"Dataset with n_obs x n_vars = 50 x 12 of {store}{LINES}"
    assert repr(dataset[:10]) == f"View with n_obs x n_vars = 10 x 12 of the 50 rows of {store}{LINES}"
    of_anndata = [line.strip() for line in repr(ADATA).splitlines()[1:4]]
    assert of_anndata == [line.strip() for line in repr(dataset).splitlines()[1:4]]


@pytest.mark.parametrize("consolidated", [True, False], ids=["", "not consolidated"])
def test_the_repr_makes_no_request_if_metadata_are_consolidated(
    store: Path, tmp_path: Path, sim: Any, consolidated: bool
) -> None:
    copied = shutil.copytree(store.parent, tmp_path / "bucket")
    if not consolidated:
        root = json.loads((copied / "a.zarr" / "zarr.json").read_text())
        del root["consolidated_metadata"]
        (copied / "a.zarr" / "zarr.json").write_text(json.dumps(root))
    server = sim()
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://bucket/a.zarr", storage_options=options)
    before = server.stats()["requests"]
    first = repr(dataset)
    after = server.stats()["requests"]
    assert (after == before) == consolidated
    assert set(LINES.splitlines()) <= set(f"\n{first}".splitlines()) | {""}
    assert first.startswith("Dataset with n_obs x n_vars = 50 x 12 of s3://bucket/a.zarr\n")
    assert dataset.shape == (50, 12)
    assert repr(dataset) == first
    assert server.stats()["requests"] == after


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("wrong", [None, 5, [], {"_index": 5}, {"_index": "none", "column-order": 5}, {"_index": "/"}])
def test_the_repr_never_raises(store: Path, tmp_path: Path, wrong: Any) -> None:
    damaged = shutil.copytree(store, tmp_path / "a.zarr")
    root = zarr.open_group(damaged, mode="r+", use_consolidated=False)
    for frame in ("obs", "var"):
        root[frame].attrs.put(wrong if isinstance(wrong, dict) else {"_index": wrong, "column-order": wrong})
    for consolidated in (False, True):
        if consolidated:
            zarr.consolidate_metadata(damaged)
        dataset = zl.open_dataset(damaged)
        assert repr(dataset).startswith("Dataset ")
        assert str(damaged) in repr(dataset)


ROWS = [
    slice(10, 20),
    slice(None),
    slice(-5, None),
    slice(1, 40, 7),
    PASSED,
    PASSED.tolist(),
    [3, 7, 20],
    np.array([0, 49]),
    range(5),
    [],
    list(ADATA.obs_names[[3, 7]]),
    pd.Series(PASSED, ADATA.obs_names),
]


@pytest.mark.every(6)
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows)[:20])
@pytest.mark.parametrize("layer", [None, "spliced", "dense"])
def test_rows_of_a_dataset_are_those_of_its_anndata(dataset: zl.Dataset, rows: Any, layer: str | None) -> None:
    wanted = ADATA[rows] if len(rows if not isinstance(rows, slice) else [1]) else ADATA[np.zeros(50, bool)]
    view, layers = dataset[rows], [] if layer is None else [layer]
    for taken in (dataset.take(rows, layers=layers), view.take(slice(None), layers=layers)):
        assert taken.obs_names.tolist() == wanted.obs_names.tolist()
        np.testing.assert_array_equal(dense(taken.X), wanted.X.toarray())
        assert [name for name in taken.layers if name] == layers  # anndata 0.13 lists X as None
        for name in layers:
            np.testing.assert_array_equal(dense(taken.layers[name]), dense(wanted.layers[name]))
        np.testing.assert_array_equal(taken.obsm["X_pca"], wanted.obsm["X_pca"])
        pd.testing.assert_series_equal(taken.obs["lane"], wanted.obs["lane"], check_names=False, check_index_type=False)
    assert view.obs_names.tolist() == wanted.obs_names.tolist()
    np.testing.assert_array_equal(view.row_numbers, ADATA.obs_names.get_indexer(wanted.obs_names))


@pytest.mark.parametrize("n_stores", [1, 2])
def test_a_part_of_the_rows_has_no_categories_without_rows(store: Path, n_stores: int) -> None:
    dataset = zl.open_dataset([store] * n_stores)
    view = dataset.where("cell_type in ['c', 'a'] and lane > 1")
    for taken in (view.to_adata(layers=[]), dataset.take(view.row_numbers[::-1])):
        assert taken.obs["cell_type"].cat.categories.tolist() == ["a", "c"]
        assert set(taken.obs["cell_type"]) == {"a", "c"}
    whole = ["a", "b", "c", "never used"]
    assert dataset.to_adata(layers=[]).obs["cell_type"].cat.categories.tolist() == whole
    assert view.categories("cell_type").tolist() == whole  # the codes of minibatches mean the same in every view


def test_take_keeps_any_order_and_a_view_does_not(dataset: zl.Dataset) -> None:
    for rows in ([5, 3], [3, 3], slice(None, None, -1), [-1, 0]):
        wanted = np.arange(50)[rows]
        assert dataset.take(rows).obs_names.tolist() == ADATA.obs_names[wanted].tolist()
        with pytest.raises(OptionError, match=r"ascending and do not repeat.*dataset.take\(rows\)"):
            _ = dataset[rows]
    view = dataset[10:20]
    assert view.take([-1, 0]).obs_names.tolist() == ADATA.obs_names[[19, 10]].tolist()
    assert view[2:4].row_numbers.tolist() == [12, 13]
    assert view.take(ADATA.obs_names[15]).obs_names.tolist() == [ADATA.obs_names[15]]
    with pytest.raises(OptionError, match="rows are not in the dataset"):
        view.take(ADATA.obs_names[25])


@pytest.mark.parametrize("index", [0, -1, np.int64(3), "cell 3"], ids=str)
def test_single_rows_are_refused(dataset: zl.Dataset, index: Any) -> None:
    with pytest.raises(OptionError, match=r"iterate over zl\.Loader.*dataset\[10:20\]"):
        _ = dataset[index]


def test_layers_may_be_named_as_matrices(dataset: zl.Dataset) -> None:
    taken = dataset.take([1], layers=["layers/spliced", "dense"])
    assert [name for name in taken.layers if name] == ["spliced", "dense"]
    with pytest.raises(FormatError, match=r"no matrix 'layers/splcied' in .*Did you mean 'layers/spliced'\?"):
        dataset.take([1], layers=["splcied"])
    with pytest.raises(OptionError, match=r"layers must be a list of names: write layers=\['spliced'\]"):
        dataset.take([1], layers="spliced")


def test_a_store_without_x_gives_an_anndata_without_x(tmp_path: Path) -> None:
    adata = ADATA.copy()
    adata.X = None
    with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns about consolidated metadata
        adata.write_zarr(tmp_path / "a.zarr")
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    taken = dataset.take([4, 2], layers=["spliced"])
    assert taken.X is None
    np.testing.assert_array_equal(dense(taken.layers["spliced"]), dense(ADATA.layers["spliced"][[4, 2]]))


# ---- The nearest name


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"x": "spliced"}, FormatError, r"'layers/spliced'\?$"),
        ({"x": "layers/Dense"}, FormatError, r"'layers/dense'\?$"),
        ({"x": "x"}, FormatError, r"'X'\?$"),
        ({"obs": ["celltype"]}, MissingColumnError, r"'cell_type'\?$"),
        ({"obs": ["Donor"]}, MissingColumnError, r"'donor'\?$"),
        ({"obsm": ["pca"]}, MissingColumnError, r"'X_pca'\?$"),
    ],
    ids=str,
)
def test_the_nearest_name_is_suggested(dataset: zl.Dataset, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"Did you mean.*{says}"):
        zl.Loader(dataset, **options)


@pytest.mark.parametrize("gene", ["Gene 1", "gene-1"])
def test_the_nearest_gene_is_suggested(dataset: zl.Dataset, gene: str) -> None:
    with pytest.raises(OptionError, match=r"Did you mean 'gene 1'"):
        dataset[:, [gene]]


def test_the_nearest_name_is_suggested_in_expressions(dataset: zl.Dataset) -> None:
    with pytest.raises(MissingColumnError, match=r"Did you mean 'cell_type'\?"):
        dataset.where("cel_type == 'a'")
    with pytest.raises(OptionError, match=r"no label 'Never used'.*Did you mean 'never used'\?"):
        dataset.where("cell_type == 'Never used'")


ODD: list[Any] = [{"a": 1}, [1, [2]], {1, 2}, slice(3), np.ones((2, 2)), object(), None, 5, ["a"], pd.DataFrame()]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("method", ["obsm_array", "obs_column", "categories", "where", "take"])
def test_odd_arguments_are_refused_by_name(dataset: zl.Dataset, method: str, value: Any) -> None:
    if (method, type(value)) in (("take", slice), ("take", int)):
        return
    with pytest.raises((OptionError, MissingColumnError)):
        getattr(dataset, method)(value)


@pytest.mark.parametrize("name", ["X", "layers", "obsm", "raw", "uns", "to_memory", "copy"])
def test_names_of_anndata_say_what_to_use_instead(store, name):
    dataset = zl.open_dataset(store)
    for each in (dataset, dataset.where("passed")):
        assert not hasattr(each, name)
        with pytest.raises(AttributeError, match=rf"is no AnnData, and has no {name}: .*(zl|dataset|zloader)\."):
            getattr(each, name)


def test_other_names_have_pythons_own_error(store):
    with pytest.raises(AttributeError, match="'Dataset' object has no attribute 'obs_nams'"):
        zl.open_dataset(store).obs_nams  # noqa: B018
