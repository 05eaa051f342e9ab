"""Any list of transforms equals NumPy on dense rows of all genes, in any layout, of all genes or of a panel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import counts, dense, of_genes, write_store
from hypothesis import HealthCheck, given, settings

import zloader as zl
from zloader.common.errors import OptionError
from zloader.training.recipes import LAYOUTS
from zloader.transforms import Clip, Downsample, LogNormalize, Normalize, Scale
from zloader.transforms.transform import RowValues, Transform

N_ROWS, N_GENES = 9, 6
ADATA = counts(N_ROWS, N_GENES, density=0.5)
ADATA.X.data %= 7  # with stored zeros
ADATA.layers["dense"] = ADATA.X.toarray()
POOL = [
    Clip(1, 3),
    Clip(0, 4),
    Clip(None, 3),
    Clip(-1, 2),
    Clip(None, -1),
    Clip(0, 1),
    Downsample(5),
    Normalize(3.5),
    Normalize(50),
    LogNormalize(50),
    "scale",
    "scale to the mean",
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("lists")
    write_store(ADATA, folder / "store.zarr", folder)
    return zl.open_dataset(folder / "store.zarr")


def of_numpy(transform: Transform, x: np.ndarray, number: int) -> np.ndarray:
    """The transform of dense rows of all genes. Raises OptionError for values that it refuses."""
    match transform:
        case Clip():
            return np.clip(x, transform.low, transform.high)
        case Scale():
            return (x - (0 if transform.mean is None else transform.mean)) / transform.std
    if (x < 0).any():
        raise OptionError("negative")
    if isinstance(transform, Downsample):  # its draws have tests of their own
        drawn = x.copy()
        transform.apply(RowValues.of(drawn, np.arange(len(x)), seed=3, number=number))
        return drawn
    totals = x.sum(axis=1, keepdims=True)
    x = x * transform.target_sum / np.where(totals > 0, totals, 1)
    return np.log1p(x) if isinstance(transform, LogNormalize) else x


def refused(transforms: Sequence[Transform], layout: str, dtype: str | None, chosen: bool) -> bool:
    """Whether no loader can have these transforms."""

    def places(*kinds: type) -> list[int]:
        return [place for place, each in enumerate(transforms) if isinstance(each, kinds)]

    def is_before(first: Sequence[int], later: Sequence[int]) -> bool:
        return bool(first and later) and min(first) < max(later)

    def fills_zeros(each: Transform) -> bool:
        return each.mean is not None if isinstance(each, Scale) else each in (Clip(1, 3), Clip(None, -1))

    fractions, scales = places(Normalize, Scale), places(Scale)
    return (
        (dtype == "int64" and bool(fractions))
        or (layout != "dense" and any(map(fills_zeros, transforms)))
        or is_before(fractions, places(Downsample))
        or (chosen and is_before(scales, places(Normalize, Downsample)))
    )


def check(
    dataset: zl.Dataset, chosen: Sequence[Any], genes: list[int] | None, layout: Any, x: str, dtype: str | None = None
) -> None:
    columns = np.arange(1.0, 1 + (N_GENES if genes is None else len(genes)))
    scales = {"scale": Scale(std=columns), "scale to the mean": Scale(columns / 2, columns)}
    transforms = [scales[each] if isinstance(each, str) else each for each in chosen]
    options = {"layout": layout, "x": x, "dtype": dtype}
    try:
        loader = zl.Loader(
            of_genes(dataset, genes), transforms=transforms, batch_size=N_ROWS, shuffle=False, seed=3, **options
        )
    except OptionError:
        assert refused(transforms, layout, dtype, genes is not None)
        return
    assert not refused(transforms, layout, dtype, genes is not None)
    wanted = ADATA.X.toarray().astype(np.float64)
    last = max((place for place, each in enumerate(transforms) if each.whole_rows), default=-1)
    try:
        for number, transform in enumerate(transforms):
            wanted = of_numpy(transform, wanted[:, genes] if genes and number == last + 1 else wanted, number)
    except OptionError:
        with pytest.raises(OptionError, match=r"no negative values|draws from counts"):
            next(iter(loader))
        return
    wanted = wanted[:, genes] if genes and last == len(transforms) - 1 else wanted
    rtol = 1e-5
    np.testing.assert_allclose(
        dense(next(iter(loader)).x), wanted, rtol=rtol, atol=rtol, err_msg=f"{transforms} {genes} {options}"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_transform_in_each_layout(dataset: zl.Dataset, layout: str) -> None:
    for transform, genes, x in product(POOL, [None, [0, 5, 1]], ["X", "layers/dense"]):
        check(dataset, [transform], genes, layout, x)


@pytest.mark.slow
@pytest.mark.parametrize("x", ["X", "layers/dense"])
def test_all_pairs_with_genes_as_dense_rows(dataset: zl.Dataset, x: str) -> None:
    for pair in product(POOL, POOL):
        check(dataset, pair, [0, 5, 1], "dense", x)


@pytest.mark.slow
@given(
    transforms=st.lists(st.sampled_from(POOL), min_size=1, max_size=5),
    genes=st.none() | st.lists(st.integers(0, N_GENES - 1), min_size=1, unique=True),
    layout=st.sampled_from(LAYOUTS),
    x=st.sampled_from(["X", "layers/dense"]),
    dtype=st.sampled_from([None, "float64", "int64"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_in_any_layout(
    dataset: zl.Dataset, transforms: Sequence[Any], genes: list[int] | None, layout: str, x: str, dtype: str | None
) -> None:
    check(dataset, transforms, genes, layout, x, None if layout == "packed" else dtype)
