"""Elements that are read without anndata are equal to those that anndata reads."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr

from zloader.dataset.elements import read_element

# What pandas infers for strings from version 3 on, where missing values are NaN instead of NA.
INFERRED = pd.Series(["a"]).dtype if pd.Series(["a"]).dtype != object else "string"
COLUMNS = {
    "floats": np.array([1.5, np.nan, -0.0], np.float32),
    "large": np.array([2**63, 0, 1], np.uint64),
    "bools": np.array([True, False, True]),
    "strings": np.array(["b", "", "ä"], object),
    "categories": pd.Categorical(["b", None, "a"]),
    "ordered": pd.Categorical(["lo", "hi", "lo"], categories=["lo", "hi", "never used"], ordered=True),
    "numbered": pd.Categorical([3, 1, 3]),
    "no categories": pd.Categorical([None, None, None]),
    "integers or missing": pd.array([1, None, 3], dtype="Int8"),
    "bools or missing": pd.array([True, None, False], dtype="boolean"),
    "strings or missing": pd.array(["b", None, "ä"], dtype="string"),
    "inferred strings": pd.array(["b", "", "ä"], dtype=INFERRED),
    "table": np.arange(6).reshape(3, 2),
    "empty": np.zeros(0, np.int16),
    "frame": pd.DataFrame({"a": [1, 2]}, index=["x", "y"]),
}


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        pd.testing.assert_extension_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")  # anndata, about its next version
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in COLUMNS])
def test_an_element_is_read_as_anndata_reads_it(name, zarr_format):
    root = zarr.open_group(zarr.storage.MemoryStore(), mode="w", zarr_format=zarr_format)
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.io.write_elem(root, "element", COLUMNS[name])
    same(read_element(root["element"]), ad.io.read_elem(root["element"]))
