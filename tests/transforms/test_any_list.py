"""Any list of transforms equals NumPy on dense rows of all genes, in any layout, with or without `genes=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import counts, dense, write_store
from hypothesis import HealthCheck, example, given, settings

import zloader as zl
from zloader.common.errors import OptionError
from zloader.transforms import Binarize, Clip, Downsample, LogNormalize, Normalize, Scale
from zloader.transforms.transform import RowValues, Transform

N_ROWS, N_GENES = 9, 6
ADATA = counts(N_ROWS, N_GENES, density=0.5)
ADATA.X.data %= 7  # with stored zeros
ADATA.layers["dense"] = ADATA.X.toarray()


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
        case Binarize():
            return (x > 0).astype(np.float64)
        case Scale():
            return (x - (0 if transform.mean is None else transform.mean)) / transform.std
    if (x < 0).any():
        raise OptionError("negative")
    if isinstance(transform, Downsample):  # its draws have tests of their own
        drawn = x.copy()
        starts = np.arange(len(x) + 1) * x.shape[1]
        values = RowValues(values=drawn.reshape(-1), starts=starts, columns=None, rows=np.arange(len(x)), seed=3, epoch=0)
        transform.apply(values, number)
        return drawn
    totals = x.sum(axis=1, keepdims=True)
    x = x * transform.target_sum / np.where(totals > 0, totals, 1)
    return np.log1p(x) if isinstance(transform, LogNormalize) else x


LIMITS = st.sampled_from([None, -2, -1, 0, 1, 3])
CLIPS = st.tuples(LIMITS, LIMITS).filter(lambda both: any(each is not None for each in both)).map(
    lambda both: Clip(*both) if None in both else Clip(*sorted(both))
)
ANY = st.one_of(
    CLIPS,
    st.just(Binarize()),
    st.sampled_from([2, 5]).map(Downsample),
    st.sampled_from([50, 3.5]).map(Normalize),
    st.sampled_from([50, 3.5]).map(LogNormalize),
    st.just("scale"),
    st.just("scale to the mean"),
)
GENES = st.none() | st.permutations(range(N_GENES)).flatmap(
    lambda genes: st.integers(1, N_GENES).map(lambda n: genes[:n])
)


@example([Clip(1, 3), Normalize(50)], [0, 1, 4], "dense", "X", None)
@example([Clip(None, -1), Scale(std=np.ones(3)), Binarize(), Downsample(2)], [5, 1, 4], "dense", "layers/dense", None)
@given(
    transforms=st.lists(ANY, min_size=1, max_size=5),
    genes=GENES,
    layout=st.sampled_from(["dense", "dense", "csr", "packed", "scipy", "anndata"]),
    x=st.sampled_from(["X", "layers/dense"]),
    dtype=st.sampled_from([None, "float64", "int64", "float16"]),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_list_equals_numpy_on_rows_of_all_genes(
    dataset: zl.Dataset, transforms: Sequence[Any], genes: list[int] | None, layout: Any, x: str, dtype: str | None
) -> None:
    columns = np.arange(1.0, 1 + (N_GENES if genes is None else len(genes)))
    scales = {"scale": Scale(std=columns), "scale to the mean": Scale(columns / 2, columns)}
    transforms = [scales.get(each, each) if isinstance(each, str) else each for each in transforms]
    dtype = None if layout == "packed" or (dtype == "float16" and layout in ("scipy", "anndata")) else dtype
    try:
        loader = zl.Loader(
            dataset, transforms=transforms, genes=genes, layout=layout, x=x, dtype=dtype, batch_size=N_ROWS,
            shuffle=False, seed=3,
        )  # fmt: skip
    except OptionError:
        assert refused(transforms, layout, dtype, genes)
        return
    assert not refused(transforms, layout, dtype, genes)
    wanted = ADATA.X.toarray().astype(np.float64)
    try:
        for number, transform in enumerate(transforms):
            if genes is not None and not any(each.whole_rows for each in transforms[number:]):
                wanted, genes = wanted[:, genes], None
            wanted = of_numpy(transform, wanted, number)
    except OptionError:
        with pytest.raises(OptionError, match="no negative values|draws from counts"):
            next(iter(loader))
        return
    wanted = wanted if genes is None else wanted[:, genes]
    rtol = 2e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(dense(next(iter(loader)).x), wanted, rtol=rtol, atol=rtol)


def refused(transforms: Sequence[Transform], layout: str, dtype: str | None, genes: list[int] | None) -> bool:
    """Whether no loader can have these transforms."""
    fractions = [number for number, each in enumerate(transforms) if isinstance(each, (Normalize, Scale))]
    draws = [number for number, each in enumerate(transforms) if isinstance(each, Downsample)]
    whole = [number for number, each in enumerate(transforms) if isinstance(each, (Normalize, Downsample))]
    scales = [number for number, each in enumerate(transforms) if isinstance(each, Scale)]
    return (
        (dtype == "int64" and bool(fractions))
        or (layout != "dense" and any(of_numpy(each, np.zeros((1, 1)), 0).any() for each in ones(transforms)))
        or any(first < later for first in fractions for later in draws)
        or (genes is not None and any(first < later for first in scales for later in whole))
    )


def ones(transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms of one column."""
    return [
        Scale(each.mean if each.mean is None else each.mean[:1], each.std[:1]) if isinstance(each, Scale) else each
        for each in transforms
    ]
