"""Codes of obs columns as scvi-tools expects them. Needs no scvi-tools."""

from __future__ import annotations

import importlib
import itertools
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import MissingColumnError, OptionError
from zloader.integrations.scvi_encoding import encoding_of, labels_of, require_finite
from zloader.integrations.scvi_registry import TrainingBatches

N_ROWS = 90


@pytest.fixture(scope="module")
def adata():
    adata = counts(N_ROWS, 12)
    adata.obs["type"] = pd.Categorical(np.resize(["T", "Unknown", "B"], N_ROWS), ["unused", "T", "Unknown", "B"])
    adata.obs["some"] = pd.Categorical(np.resize(["T", None, "B"], N_ROWS))
    adata.obs["none"] = "Unknown"
    adata.obs["gap"] = np.resize([1.0, np.nan, 3.0], N_ROWS)
    adata.obs["level"] = np.linspace(0, 1, N_ROWS)
    return adata


@pytest.fixture(scope="module")
def dataset(adata, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("encoding")
    write_store(adata, tmp / "a.zarr", tmp)
    return zl.open_dataset(tmp / "a.zarr")


def codes_in_minibatches(dataset, encoding):
    """The code of each row, by row number."""
    look_up = encoding.look_up(dataset)
    codes = np.full(dataset.n_obs, -9)
    for minibatch in zl.Loader(dataset, x=None, obs=[encoding.name], batch_size=16):
        found = look_up.codes(minibatch.obs[encoding.name])
        assert found.dtype == torch.int64
        assert found.shape == (len(minibatch), 1)
        codes[minibatch.row] = found[:, 0]
    return codes


@pytest.mark.parametrize("name", ["type", "donor", "lane", "passed"])
def test_codes_are_those_of_pandas(dataset, adata, name):
    column = adata.obs[name].astype("category")
    encoding = encoding_of(dataset, name)
    column = column.cat.remove_unused_categories()
    assert encoding.labels.tolist() == column.cat.categories.to_numpy().tolist()
    np.testing.assert_array_equal(codes_in_minibatches(dataset, encoding), column.cat.codes)
    np.testing.assert_array_equal(encoding.codes_of_rows(dataset), column.cat.codes)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("cell_type", OptionError, "has no value in some rows, such as row"),
        ("gap", OptionError, "has no value in some rows, such as row 1"),
        ("level", OptionError, "choose a column of labels"),
        ("cell_typ", MissingColumnError, "Did you mean 'cell_type'"),
    ],
)
def test_columns_that_are_no_batches(dataset, name, error, match):
    with pytest.raises(error, match=match):
        encoding_of(dataset, name)


@pytest.mark.parametrize(
    ("name", "labels", "missing"),
    [
        ("type", ["T", "B", "Unknown"], 2),  # scvi exchanges it with the last label
        ("some", ["B", "T", "Unknown"], 2),
        ("donor", ["d1", "d10", "d2"], 3),  # no row is unlabelled: one class more would be wrong
        ("none", ["Unknown"], 0),
    ],
)
def test_the_unlabelled_category_is_last_and_only_there_if_needed(dataset, adata, name, labels, missing):
    encoding = labels_of(dataset, name, "Unknown", dataset)
    assert encoding.labels.tolist() == labels
    assert encoding.missing == missing
    assert encoding.labels.dtype == object
    expected = adata.obs[name].astype(object).fillna("Unknown")
    found = np.array([*labels[:missing], "Unknown", *labels[missing + 1 :]], object)
    for codes in (codes_in_minibatches(dataset, encoding), encoding.codes_of_rows(dataset)):
        assert found[codes].tolist() == expected.tolist()


def test_an_unlabelled_category_that_does_not_exist(dataset):
    with pytest.raises(
        OptionError, match=r"'unknown' is no label of obs column 'type', which has .* Did you mean 'Unknown'\? Rows"
    ):
        labels_of(dataset, "type", "unknown", dataset)


@pytest.mark.parametrize(("name", "known"), [("donor", ["d1", "d2"]), ("lane", [0, 1])])
def test_the_labels_of_a_view_are_those_of_its_rows(dataset, name, known):
    view = dataset.where(f"{name} in {known}")
    assert encoding_of(view, name).labels.tolist() == known
    assert labels_of(view, name, "Unknown", view).labels.tolist() == known
    assert len(labels_of(view, name, "Unknown", dataset).labels) == dataset.obs([name])[name].nunique()
    encoding = labels_of(dataset, name, "Unknown", view)
    assert encoding.labels.tolist() == [*known, "Unknown"]
    unknown = ~dataset.obs([name])[name].isin(known)
    np.testing.assert_array_equal(codes_in_minibatches(dataset, encoding)[unknown], 2)
    with pytest.raises(OptionError, match=r"has the label .*, which was not in the training data"):
        encoding_of(view, name).look_up(dataset)


def test_another_dataset_gets_the_codes_of_the_training(dataset, adata, tmp_path):
    other = adata[:30].copy()
    other.obs["donor"] = np.resize(["d2", "d1"], 30)
    other.obs["some"] = np.resize(["new", "T"], 30)
    del other.obs["type"]
    write_store(other, tmp_path / "b.zarr", tmp_path)
    query = zl.open_dataset(tmp_path / "b.zarr")
    assert codes_in_minibatches(query, encoding_of(dataset, "donor")).tolist() == [2, 0] * 15
    assert codes_in_minibatches(query, labels_of(dataset, "some", "Unknown", dataset)).tolist() == [2, 1] * 15
    of_a_query = labels_of(query, "type", "Unknown", dataset)
    assert (of_a_query.labels.tolist(), of_a_query.look_up(query)) == (["T", "B", "Unknown"], None)
    assert of_a_query.codes_of_rows(query).tolist() == [2] * 30
    with pytest.raises(MissingColumnError, match="type"):
        encoding_of(dataset, "type").look_up(query)
    with pytest.raises(OptionError, match="has the label 'd10', which was not in the training data"):
        encoding_of(query, "donor").look_up(dataset)


@pytest.mark.parametrize(
    ("name", "match"),
    [("gap", "is nan in 30 rows, such as row 1"), ("donor", "holds no numbers")],
)
def test_continuous_covariates_that_cannot_be_used(dataset, name, match):
    require_finite(dataset, ["level", "n_counts", "lane", "passed"])
    with pytest.raises(OptionError, match=match):
        require_finite(dataset, ["level", name])


def rows_of(items):
    return [[each.row.tolist() for each in item] if isinstance(item, list) else item.row.tolist() for item in items]


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


@pytest.mark.parametrize("paired", [False, True], ids=["alone", "paired"])
@pytest.mark.parametrize("batch_size", [32, N_ROWS], ids=["three minibatches", "one minibatch"])
def test_training_resumes_anywhere_though_no_end_is_asked_for(dataset, paired, batch_size):
    """Lightning drops an iterator before the first minibatch, and stops after the last one."""

    def batches():
        labelled = zl.Loader(dataset[10:45], x=None, batch_size=16) if paired else None
        return TrainingBatches(zl.Loader(dataset, x=None, batch_size=batch_size), labelled)

    whole, expected, states = batches(), [], []
    for epoch in range(3):
        iter(whole)
        iterator = iter(whole)
        for _ in range(len(whole)):
            states.append(whole.state_dict())
            expected += rows_of(take(iterator, 1))
        rows = [item[0] if paired else item for item in expected[-len(whole) :]]
        assert sorted(itertools.chain(*rows)) == [*range(N_ROWS)]
        assert whole.next_epoch == epoch + 1
    assert len({str(item) for item in expected}) == len(expected)
    for number, state in enumerate(states):
        resumed = batches()
        resumed.load_state_dict(state)
        left = len(whole) - number % len(whole)
        assert rows_of(take(iter(resumed), left)) == expected[number : number + left]


def test_pairs_need_labelled_minibatches(dataset):
    labelled = zl.Loader(dataset[:5], x=None, batch_size=16, drop_last=True)
    with pytest.raises(OptionError, match="no minibatch of labelled rows"):
        TrainingBatches(zl.Loader(dataset, x=None), labelled)


def test_without_scvi_tools_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scvi", None)
    monkeypatch.delitem(sys.modules, "zloader.integrations.scvi", raising=False)
    with pytest.raises(ImportError, match=r'pip install "zloader\[scvi\]"'):
        importlib.import_module("zloader.integrations.scvi")
