"""Transforms equal scanpy's functions, in every layout, and depend on the values, seed, epoch and row alone."""

from __future__ import annotations

import pickle
import re

import anndata as ad
import numpy as np
import pytest
import scanpy
import scipy.sparse as sp
import sklearn.preprocessing
import torch
from helpers import counts, dense, of_genes, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.reading.forms import Transforming
from zloader.testing import assert_resumes_anywhere
from zloader.training.recipes import LAYOUTS
from zloader.transforms import Clip, Downsample, LogNormalize, Normalize, Scale
from zloader.transforms.normalizing import _log_normalize, sum_of
from zloader.transforms.transform import Transform

pytestmark = pytest.mark.filterwarnings("ignore:Some cells have zero counts", "ignore:zero-centering a sparse")
SIZES = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4), "seed": 2}
GENES = [7, 2, 29, 11]
STD = np.linspace(0.5, 30, 30)


def source(n_rows: int = 120, seed: int = 0) -> ad.AnnData:
    adata = counts(n_rows, 30, seed=seed)
    adata.layers["dense"] = adata.X.toarray()
    adata.layers["negative"] = sp.csr_matrix(adata.X - 3 * (adata.X > 200).astype(np.float32))
    adata.layers["negative"].data[5] = -2.5
    return adata


ADATA = source()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("transforms")
    write_store(ADATA, folder / "store.zarr", folder)
    return zl.open_dataset(folder / "store.zarr")


def values(dataset: zl.Dataset, *transforms: Transform, epoch: int = 0, **options) -> np.ndarray:
    """x of all rows, in their order."""
    dataset = of_genes(dataset, options.pop("genes", None))
    loader = zl.Loader(dataset, transforms=transforms, **{**SIZES, **options})
    loader.set_epoch(epoch)
    rows, parts = [], []
    for minibatch in loader:
        rows.append(minibatch.row.numpy())
        parts.append(dense(minibatch.x).astype(np.float64))
    return np.concatenate(parts)[np.argsort(np.concatenate(rows))]


def by_scanpy(*steps, adata: ad.AnnData = ADATA) -> np.ndarray:
    made = ad.AnnData(adata.X.copy())
    for step in steps:
        step(made)
    return dense(made.X)


def normalized(adata: ad.AnnData) -> None:
    scanpy.pp.normalize_total(adata, target_sum=1e4)


LIKE_SCANPY = {
    "normalize": ([Normalize(1e4)], [normalized]),
    "log": ([LogNormalize(1e4)], [normalized, scanpy.pp.log1p]),
    "log to a base": ([LogNormalize(1e4, base=2)], [normalized, lambda adata: scanpy.pp.log1p(adata, base=2)]),
    "another target": (
        [LogNormalize(250.5)],
        [lambda adata: scanpy.pp.normalize_total(adata, target_sum=250.5), scanpy.pp.log1p],
    ),
    "binary": ([Clip(0, 1)], [lambda adata: sklearn.preprocessing.binarize(adata.X, copy=False)]),
    "clipped": ([Clip(0, 3)], [lambda adata: np.clip(adata.X.data, 0, 3, out=adata.X.data)]),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LIKE_SCANPY)
def test_it_equals_scanpy(dataset, name, layout):
    transforms, steps = LIKE_SCANPY[name]
    wanted = by_scanpy(*steps)
    for genes in (None, GENES):
        found = values(dataset, *transforms, layout=layout, genes=genes)
        np.testing.assert_allclose(found, wanted[:, genes or slice(None)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", ["X", "layers/dense"])
def test_scaling_equals_scanpy(dataset, x):
    log = [LogNormalize(1e4)]
    statistics = dataset.gene_statistics(transforms=log)
    wanted = by_scanpy(normalized, scanpy.pp.log1p, lambda adata: scanpy.pp.scale(adata, max_value=2))
    for genes in (None, GENES):
        scaled = values(dataset, *log, Scale(statistics), Clip(-2, 2), layout="dense", x=x, genes=genes)
        np.testing.assert_allclose(scaled, wanted[:, genes or slice(None)], rtol=1e-5, atol=1e-5)
    wanted = by_scanpy(normalized, scanpy.pp.log1p, lambda adata: scanpy.pp.scale(adata, zero_center=False))
    for layout in ("csr", "dense"):
        scaled = values(dataset, *log, Scale(std=statistics), layout=layout, x=x)
        np.testing.assert_allclose(scaled, wanted, rtol=1e-5, atol=1e-5)


def test_arrays_scale_the_columns_of_x(dataset):
    mean, std = np.arange(4.0), np.array([1.0, 0, 2, 4])
    found = values(dataset, Scale(mean, std), layout="dense", genes=GENES)
    np.testing.assert_allclose(found, (dense(ADATA.X)[:, GENES] - mean) / [1, 1, 2, 4], rtol=1e-6)


# ---- Downsampling


@pytest.mark.parametrize("n", [1, 20, 700, 1500, 10**9])
def test_downsampled_rows_have_the_totals_of_scanpy(dataset, n):
    found, x = values(dataset, Downsample(n)), dense(ADATA.X)
    wanted = by_scanpy(lambda adata: scanpy.pp.downsample_counts(adata, counts_per_cell=n, replace=False))
    np.testing.assert_array_equal(found.sum(axis=1), wanted.sum(axis=1))
    assert ((found >= 0) & (found <= x) & (found == np.floor(found))).all()


@pytest.mark.parametrize("take", [3, 9], ids=["draws", "removes"])
def test_draws_are_those_without_replacement(take):
    """Each gene follows a hypergeometric distribution, and so does the product of two genes."""
    row = np.array([1, 0, 6, 2, 3, 0], np.float32)
    n_rows, total = 60_000, row.sum()
    transforming = Transforming(transforms=[Downsample(take)], seed=5, epoch=3, dense=True, dtype="float32")
    drawn = transforming.x(np.tile(row, (n_rows, 1)), np.arange(n_rows)).astype(np.float64)
    assert (drawn.sum(axis=1) == take).all()
    mean = take * row / total
    covariance = take * (total - take) / (total - 1) * (np.diag(row / total) - np.outer(row, row) / total**2)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=6 * np.sqrt(covariance.diagonal().max() / n_rows))
    np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=0.03)
    found = np.bincount(drawn[:, 2].astype(int), minlength=7) / n_rows
    from scipy.stats import hypergeom

    np.testing.assert_allclose(found, hypergeom(int(total), 6, take).pmf(range(7)), atol=0.012)


def test_many_counts_take_little_time():
    """A row of 2**50 counts is drawn from, not counted out."""
    row = np.array([[2.0**50, 2.0**50, 0, 2.0**49]])
    transforming = Transforming(transforms=[Downsample(1000)], seed=0, epoch=0, dense=True, dtype="float64")
    drawn = transforming.x(row, np.arange(1))[0]
    assert drawn.sum() == 1000
    assert (abs(drawn - [400, 400, 0, 200]) < 100).all()


def test_draws_depend_on_seed_epoch_and_row_alone(dataset, tmp_path):
    transforms = [Downsample(30)]
    wanted = values(dataset, *transforms)
    others = [
        {"batch_size": 7},
        {"sampling": "streaming"},
        {"layout": "dense"},
        {"x": "layers/dense"},
        {"dtype": "int64"},
        {"options": zl.FetchOptions(threads=1, memory="16MiB")},
    ]
    for options in others:
        np.testing.assert_array_equal(values(dataset, *transforms, **options), wanted, err_msg=str(options))
    np.testing.assert_array_equal(values(dataset, *transforms, genes=GENES), wanted[:, GENES])
    rows = np.arange(1, 120, 2)
    np.testing.assert_array_equal(values(dataset[rows], *transforms), wanted[rows])
    for options in ({"seed": 3}, {"epoch": 1}):
        assert (values(dataset, *transforms, **options) != wanted).any(axis=1).sum() > 80
    twice = values(dataset, Downsample(60), *transforms)
    assert (twice != wanted).any(axis=1).sum() > 80


@pytest.mark.parametrize("where", ["mirror", pytest.param("s3", marks=pytest.mark.slow)])
def test_the_place_of_the_store_does_not_matter(dataset, where, tmp_path, request):
    transforms = [Downsample(100), LogNormalize(1e4)]
    wanted = values(dataset, *transforms)
    if where == "mirror":
        there = zl.open_dataset(dataset.url, cache=tmp_path)
    else:
        s3 = request.getfixturevalue("s3")
        write_store(ADATA, s3.url("store.zarr"), tmp_path, storage_options=s3.storage_options)
        there = zl.open_dataset(s3.url("store.zarr"), storage_options=s3.storage_options)
    for _ in range(2):
        np.testing.assert_array_equal(values(there, *transforms), wanted)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_and_ranks_draw_the_same(dataset):
    loader = zl.Loader(dataset, transforms=[Downsample(30)], rank=1, world_size=2, **SIZES)
    wanted = {int(row): x for minibatch in loader for row, x in zip(minibatch.row, dense(minibatch.x), strict=True)}
    assert len(wanted) == 60
    loader = zl.Loader(dataset, transforms=[Downsample(30)], **SIZES)
    everywhere = values(dataset, Downsample(30))
    for row, x in wanted.items():
        np.testing.assert_array_equal(x, everywhere[row])
    for minibatch in DataLoader(loader, batch_size=None, num_workers=2):
        np.testing.assert_array_equal(dense(minibatch.x), everywhere[minibatch.row])


def test_it_resumes_anywhere(dataset):
    assert_resumes_anywhere(
        lambda: zl.Loader(dataset, transforms=[Downsample(30), LogNormalize(1e4)], **SIZES), every=3
    )


# ---- Form


@pytest.mark.parametrize("transform", [Downsample(5), Clip(0, 3), LogNormalize(1)], ids=repr)
def test_csr_holds_no_zeros_and_ascending_genes(dataset, transform):
    for x in ("X", "layers/dense"):
        for minibatch in zl.Loader(dataset, x=x, transforms=[transform], layout="scipy", **SIZES):
            assert (minibatch.x.data != 0).all()
            assert minibatch.x.has_canonical_format
            assert len(minibatch.x.data) == minibatch.x.indptr[-1] == len(minibatch.x.indices)


def test_genes_that_occur_twice_are_summed_first():
    x = zl.common.records.CsrArrays(
        indptr=np.array([0, 3, 3, 5], np.int32),
        indices=np.array([1, 1, 4, 0, 2], np.int32),
        values=np.array([1, 2, 5, 3, 1], np.float32),
        n_genes=6,
    )
    transforming = Transforming(transforms=[LogNormalize(8)], seed=0, epoch=0, dense=False, dtype="float32")
    found = transforming.x(x, np.arange(3))
    assert found.indptr.tolist() == [0, 2, 2, 4]
    assert found.indices.tolist() == [1, 4, 0, 2]
    np.testing.assert_allclose(np.expm1(found.values), [3, 5, 6, 2], rtol=1e-6)


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-12)])
def test_dtypes(dataset, layout, dtype, rtol):
    loader = zl.Loader(dataset, transforms=[LogNormalize(1e4)], layout=layout, dtype=dtype, **SIZES)
    x = dense(ADATA.X).astype(np.float64)
    wanted = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4)
    for minibatch in loader:
        assert minibatch.x.dtype == getattr(torch, dtype)
        np.testing.assert_allclose(minibatch.x.to_dense().double(), wanted[minibatch.index], rtol=rtol)


def test_each_matrix_may_have_its_own(dataset):
    transforms = {"layers/dense": [Clip(0, 1)]}
    loader = zl.Loader(dataset[:, GENES], x=["X", "layers/dense"], transforms=transforms, layout="dense", **SIZES)
    for minibatch in loader:
        np.testing.assert_array_equal(minibatch.x["X"], dense(ADATA.X)[minibatch.index][:, GENES])
        np.testing.assert_array_equal(minibatch.x["layers/dense"], minibatch.x["X"] > 0)
    both = next(iter(zl.Loader(dataset, x=["X", "layers/dense"], transforms=[Clip(None, 2)], **SIZES))).x
    assert {int(x.to_dense().max()) for x in both.values()} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_joined_stores(tmp_path, layout):
    """Rows of whole stores are normalised over the joined genes, whichever of them are columns of x."""
    parts = [ADATA[:50, :20].copy(), ADATA[50:, 10:].copy()]
    for number, part in enumerate(parts):
        write_store(part, tmp_path / f"{number}.zarr", tmp_path)
    joined = zl.open_dataset([tmp_path / "0.zarr", tmp_path / "1.zarr"], join="outer")
    both = ad.concat(parts, join="outer")[:, joined.var_names]
    wanted = by_scanpy(normalized, scanpy.pp.log1p, adata=both)
    for genes in (None, ["gene 25", "gene 12", "gene 3"]):
        positions = slice(None) if genes is None else joined.var_names.get_indexer(genes)
        found = values(joined, LogNormalize(1e4), layout=layout, genes=genes)
        np.testing.assert_allclose(found, wanted[:, positions], rtol=1e-6, atol=1e-6)


def test_the_logarithm_is_exact_to_the_last_digits():
    x = np.concatenate([np.logspace(-38, 30, 200_000), np.linspace(0, 20_000, 200_001), [0.0, 1e-45]])
    x = x.astype(np.float32)
    found = x.copy()
    total = sum_of(x)  # of one row, which is therefore not scaled
    assert _log_normalize(found, np.array([0, len(x)]), None, total, None) == -1
    np.testing.assert_allclose(found, np.log1p(x.astype(np.float64)), rtol=1.2e-7)


def test_tiny_counts_are_normalised_like_others():
    """The factor of such a row is beyond float32."""
    row = np.array([[1e-38, 0, 3e-38]], np.float32)
    transforming = Transforming(transforms=[LogNormalize(100)], seed=0, epoch=0, dense=True, dtype="float32")
    np.testing.assert_allclose(np.expm1(transforming.x(row, np.arange(1))), [[25, 0, 75]], rtol=1e-6)


def test_loaders_with_transforms_can_be_pickled(dataset):
    transforms = [Downsample(30), LogNormalize(1e4), Scale(std=STD)]
    loader = pickle.loads(pickle.dumps(zl.Loader(dataset, transforms=transforms, **SIZES)))
    for one, other in zip(loader, zl.Loader(dataset, transforms=transforms, **SIZES), strict=True):
        np.testing.assert_array_equal(dense(one.x), dense(other.x))


# ---- Errors


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (Downsample(10), "Downsample draws from counts, which are whole numbers of at least 0"),
        (LogNormalize(1), "LogNormalize takes no negative values"),
        (Normalize(1), "Normalize takes no negative values"),
    ],
    ids=repr,
)
def test_values_that_are_no_counts_are_refused(dataset, transform, says, layout):
    bad = np.flatnonzero(dense(ADATA.layers["negative"]) == -2.5)[0] // 30
    where = rf"layers/negative of \S+store\.zarr holds -2\.5 in row {bad} of the dataset: {says}"
    with pytest.raises(OptionError, match=where):
        values(dataset, transform, x="layers/negative", layout=layout)


def test_nan_is_no_count_and_stays_nan_otherwise():
    row = np.array([[1, np.nan, 3]], np.float32)

    def made(transform: Transform) -> list[float]:
        transforming = Transforming(transforms=[transform], seed=0, epoch=0, dense=True, dtype="float32")
        return transforming.x(row.copy(), np.arange(1))[0].tolist()

    with pytest.raises(Exception, match="nan"):
        made(Downsample(1))
    assert np.isnan(made(LogNormalize(1))).all()
    assert np.isnan(made(Clip(0, 2))).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Normalize(0), "target_sum must be a number above 0"),
        (lambda: LogNormalize(float("inf")), "target_sum must be a number above 0"),
        (lambda: LogNormalize(1, base=1), "base must be a number above 1"),
        (lambda: Clip(3, 1), "numbers low <= high, or None for no limit, not 3, 1"),
        (lambda: Clip(float("nan"), 1), "numbers low <= high.*nan, 1"),
        (lambda: Clip("0", 1), "numbers low <= high.*'0', 1"),
        (lambda: Scale(), "Scale needs a mean or a std"),
        (lambda: Scale(1.0), "mean must be an array of one number per gene"),
        (lambda: Scale(std=[1, -1]), "std is -1.0 for gene 1"),
        (lambda: Scale(std=["a"]), "std must be an array"),
    ],
)
def test_options_that_cannot_be_used_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transforms": [LogNormalize]}, "must be a list of objects of zl.transforms, .*LogNormalize"),
        ({"transforms": [np.log1p]}, "A function of your own goes into batch_transform"),
        ({"transforms": LogNormalize(1)}, r"must be a list .*, not LogNormalize\(target_sum=1"),
        ({"transforms": None}, r"transforms must be a list .*, not None"),
        ({"transforms": {"x": [Clip(0, 1)]}}, "the loader's matrices are: 'X'.*Did you mean 'X'"),
        ({"transforms": [Clip(0, 1)], "x": None}, "the loader's matrices are: none"),
        ({"transforms": [LogNormalize(1)], "dtype": "int32"}, "makes numbers which int32 cannot hold"),
        ({"transforms": [Clip(0, 1e10)], "dtype": "int32"}, "makes numbers which int32 cannot hold"),
        (
            {"transforms": [Clip(1, 2)]},
            "only layout='dense' can hold: give a Loader that layout, or .*let the range of Clip contain 0",
        ),
        ({"transforms": [Scale(STD, STD)]}, r"only layout='dense' can hold.*leave out the mean"),
        ({"transforms": [LogNormalize(1), Downsample(5)]}, r"Downsample\(counts=5\) needs counts"),
        ({"transforms": [Scale(std=STD)], "genes": GENES}, r"30 numbers, but X of \S+ has 4 columns"),
        ({"transforms": [Scale(std=STD[:4]), Normalize(1)], "genes": GENES}, "looks at all genes of a row"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:40],
)
def test_combinations_that_cannot_work_are_refused_when_the_loader_is_made(dataset, options, says):
    dataset = of_genes(dataset, options.get("genes"))
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, **{name: value for name, value in options.items() if name != "genes"})


def test_statistics_of_other_genes_are_refused(dataset, tmp_path):
    other = ADATA[:, :20].copy()
    other.var_names = [name.replace("gene", "Gene") if name == "gene 3" else name for name in other.var_names]
    write_store(other, tmp_path / "other.zarr", tmp_path)
    statistics = zl.open_dataset(tmp_path / "other.zarr").gene_statistics(progress=False)
    says = r"lack, .* 11 of 30 genes of X of \S+: gene 3, gene 20, gene 21 and 8 more.*Did you mean 'Gene 3'"
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, transforms=[Scale(std=statistics)])
    zl.Loader(dataset[:, ["gene 7", "gene 1"]], transforms=[Scale(std=statistics)])
