"""Transforms of one's own: in every layout, of panels, in workers, resumed, and with errors."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from helpers import counts, dense, of_genes, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.testing import assert_resumes_anywhere
from zloader.training.recipes import LAYOUTS
from zloader.transforms import Columns, Normalize, RefusedValue, RowValues, Transform

SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "seed": 2}
ADATA = counts(60, 12)
X = ADATA.X.toarray()
LARGEST = np.maximum(X.max(axis=1, keepdims=True), 1)


class ByLargest(Transform):
    whole_rows = makes_fractions = True

    def apply(self, x: RowValues) -> None:
        for first, last in zip(x.starts[:-1], x.starts[1:], strict=True):
            x.values[first:last] /= max(x.values[first:last], default=1) or 1


class PlusOne(Transform):
    fills_zeros = True

    def apply(self, x: RowValues) -> None:
        x.values += 1


class Weighted(Transform):
    """Times the length of the gene's name."""

    by_gene = True
    weights: np.ndarray

    def bound(self, columns: Columns) -> Transform:
        bound = Weighted()
        bound.weights = columns.names.str.len().to_numpy()
        return bound

    def apply(self, x: RowValues) -> None:
        x.values *= np.resize(self.weights, len(x.values)) if x.columns is None else self.weights[x.columns]


class Raises(Transform):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def apply(self, x: RowValues) -> Any:
        raise self.error


class Returns(Transform):
    def apply(self, x: RowValues) -> Any:
        return x.values + 1


class Roots(Transform):
    makes_fractions = True

    def bound(self, columns: Columns) -> Any:
        return self if columns.n_genes == 12 else None

    def apply(self, x: RowValues) -> Any:
        return np.sqrt(x.values, out=x.values)


class Assigns(Transform):
    def apply(self, x: RowValues) -> None:
        x.values = x.values + 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("own")
    write_store(ADATA, folder / "store.zarr", folder)
    return zl.open_dataset(folder / "store.zarr", cache=folder / "cache")


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("genes", [None, [7, 2, 11]])
def test_every_layout_and_genes(dataset, layout, genes):
    chosen = slice(None) if genes is None else genes
    names = ADATA.var_names[chosen].str.len().to_numpy()
    dataset = of_genes(dataset, genes)
    for minibatch in zl.Loader(dataset, transforms=[ByLargest(), Weighted()], layout=layout, **SIZES):
        wanted = (X / LARGEST)[minibatch.index][:, chosen] * names
        np.testing.assert_allclose(dense(minibatch.x), wanted, rtol=1e-6)


def test_zeros_that_are_filled_count_in_whole_rows(dataset):
    for genes in (None, [7, 2, 11]):
        loader = zl.Loader(of_genes(dataset, genes), transforms=[PlusOne(), Normalize(1)], layout="dense", **SIZES)
        wanted = ((X + 1) / (X + 1).sum(axis=1, keepdims=True))[:, slice(None) if genes is None else genes]
        for minibatch in loader:
            np.testing.assert_allclose(minibatch.x, wanted[minibatch.index], rtol=1e-6)
    with pytest.raises(OptionError, match=r"only layout='dense' can hold: give a Loader that layout$"):
        zl.Loader(dataset, transforms=[PlusOne()])


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_pickles_and_resuming(dataset):
    loader = pickle.loads(pickle.dumps(zl.Loader(dataset, transforms=[ByLargest()], **SIZES)))
    for minibatch in DataLoader(loader, batch_size=None, num_workers=1):
        np.testing.assert_allclose(dense(minibatch.x), (X / LARGEST)[minibatch.index], rtol=1e-6)
    assert_resumes_anywhere(lambda: zl.Loader(dataset, transforms=[ByLargest()], **SIZES), every=3)


def test_the_cache_keeps_no_statistics_of_code_that_may_change(dataset, monkeypatch):
    before = dataset.gene_statistics(transforms=[ByLargest()], progress=False).mean
    monkeypatch.setattr(ByLargest, "apply", lambda self, x: None)
    after = dataset.gene_statistics(transforms=[ByLargest()], progress=False).mean
    np.testing.assert_allclose(before, (X / LARGEST).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(after, X.mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("transform", "error", "says"),
    [
        (Raises(KeyError("mine")), KeyError, "mine"),
        (Raises(StopIteration()), RuntimeError, "StopIteration.*raised by transform Raises for"),
        (Raises(RefusedValue(1, 5, "no fives")), OptionError, r"X of \S+ holds 5 in row \d+ of the dataset: no fives"),
        (Raises(RefusedValue(99, 5, "no")), OptionError, r"row 99 of a RefusedValue must be from 0 to \d+"),
        (Returns(), OptionError, "made new values, which nobody reads: change x.values in place"),
        (Assigns(), OptionError, "made new values, which nobody reads: change x.values in place"),
    ],
    ids=["any", "StopIteration", "refused", "no such row", "returned", "assigned"],
)
def test_errors_end_the_epoch(dataset, transform, error, says):
    with pytest.raises(error, match=says) as raised:
        list(zl.Loader(dataset, transforms=[transform], **SIZES))
    if error is KeyError:
        assert re.match(r"raised by transform Raises for \d+ rows of the dataset: \d", raised.value.__notes__[0])


def test_values_changed_in_place_may_be_returned(dataset):
    for minibatch in zl.Loader(dataset, transforms=[Roots()], **SIZES):
        np.testing.assert_allclose(dense(minibatch.x), np.sqrt(X[minibatch.index]), rtol=1e-6)


def test_errors_name_a_transform_by_its_class(dataset):
    with pytest.raises(OptionError, match=r"bound of Roots\(...\) must return the transform .*, not None"):
        zl.Loader(dataset[:, [1]], transforms=[Roots()])


def test_a_transform_without_apply_is_refused_at_once():
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (Transform,), {})()
