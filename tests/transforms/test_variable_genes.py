"""Highly variable genes are those that scanpy finds in memory."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers import of_genes, write_store
from packaging.version import Version

import zloader as zl
from zloader.common.errors import OptionError
from zloader.dataset import gene_statistics
from zloader.reading.fetch import FetchScheduler
from zloader.transforms import LogNormalize

COUNTS, LOG = "layers/counts", "X"
MATRIX = {"seurat_v3": COUNTS, "seurat": LOG, "cell_ranger": LOG}
LIMITS = {"n_top_genes": None, "min_mean": 0.05, "max_mean": 2.5, "min_disp": 0.2}
CHOICES = [
    pytest.param(flavor, {"n_top_genes": 40, **options}, id=f"{flavor} {', '.join(options)}")
    for flavor in MATRIX
    for options in ({}, {"batch_key": "batch"}, LIMITS, {**LIMITS, "batch_key": "batch"})
    if flavor != "seurat_v3" or "min_mean" not in options
] + [
    pytest.param("seurat_v3", {"n_top_genes": 30, "span": 0.6, "batch_key": "number"}, id="span"),
    pytest.param("seurat", {"n_top_genes": 500, "n_bins": 7, "batch_key": "number"}, id="bins, too many wanted"),
]

# scanpy 1.12 rounds the means of batches, so genes of equal means differ in the last bit, and loess magnifies that: it
# finds up to 1 % other variances than for the rows of one batch alone.
ROUNDS_BATCHES = importlib.util.find_spec("scanpy") is not None and Version(version("scanpy")) >= Version("1.12")


def table_of_scanpy(adata: ad.AnnData, flavor: str, **options: object) -> pd.DataFrame:
    """The table of scanpy, with the rows in the order of the genes."""
    sc = pytest.importorskip("scanpy")
    layer = MATRIX[flavor].removeprefix("layers/") if flavor == "seurat_v3" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sc.pp.highly_variable_genes(adata.copy(), flavor=flavor, layer=layer, inplace=False, **options)
    if "mean_bin" in found:  # intervals until scanpy 1.12
        found["mean_bin"] = found["mean_bin"].cat.rename_categories(str)
    return found.loc[adata.var_names]


def random_cells(n_rows: int = 700, n_genes: int = 160, seed: int = 0) -> ad.AnnData:
    """Counts with overdispersed genes, a gene without counts, a constant one, and one that a batch lacks."""
    rng = np.random.default_rng(seed)
    means = rng.gamma(0.6, 1.5, n_genes) + 0.02
    x = rng.poisson(means * rng.gamma(1 / rng.gamma(2, 0.4, n_genes).clip(0.05), size=(n_rows, n_genes)).clip(0, 40))
    batch = rng.choice(["b", "a", "c"], n_rows, p=[0.5, 0.3, 0.2])
    x[:, 3], x[:, 5], x[batch == "a", 7] = 0, 2, 0
    obs = pd.DataFrame({"batch": pd.Categorical(batch), "number": rng.integers(0, 2, n_rows)})
    obs.index = [f"cell {row}" for row in range(n_rows)]
    var = pd.DataFrame(index=[f"gene {gene}" for gene in rng.permutation(n_genes)])
    counts = sp.csr_matrix(x.astype(np.float32))
    scaled = x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e3
    log = sp.csr_matrix(np.log1p(scaled))
    return ad.AnnData(log, obs=obs, var=var, layers={"counts": counts})


CELLS = random_cells()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("variable_genes")
    write_store(CELLS, folder / "store.zarr", folder)
    return str(folder / "store.zarr")


OTHER = random_cells(300, seed=1)[:, 20:]


@pytest.fixture(scope="module")
def joined(store, tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("other")
    write_store(OTHER, folder / "other.zarr", folder)
    return zl.open_dataset([store, folder / "other.zarr"], join="inner")


def check(
    dataset: zl.Dataset, adata: ad.AnnData, flavor: str, *, genes: np.ndarray | None = None, **options: object
) -> None:
    adata = adata.copy()
    if options.get("batch_key") == "number" and flavor != "seurat_v3":
        adata.obs["number"] = adata.obs["number"].astype("category")  # scanpy takes numbers for seurat_v3 only
    wanted = table_of_scanpy(adata, flavor, **options)
    dataset = of_genes(dataset, genes)
    found = dataset.highly_variable_genes(flavor=flavor, x=MATRIX[flavor], **options, progress=False)
    assert found["highly_variable"].sum() > 0
    if ROUNDS_BATCHES and flavor == "seurat_v3" and "batch_key" in options:
        assert list(found) == list(wanted)
        assert (found["highly_variable"] == wanted["highly_variable"]).mean() > 0.97
        found, wanted = found[["means", "variances"]], wanted[["means", "variances"]]
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-8, check_names=False)


@pytest.mark.every(6)
@pytest.mark.parametrize(("flavor", "options"), CHOICES)
def test_it_equals_scanpy(store, flavor, options):
    check(zl.open_dataset(store), CELLS, flavor, **options)


@pytest.mark.slow
@pytest.mark.parametrize("flavor", MATRIX)
def test_of_views_several_stores_and_genes(store, joined, flavor):
    options = {"n_top_genes": 25, "batch_key": "batch"}
    dataset = zl.open_dataset(store)
    rows = np.arange(20, 650, 2)
    check(dataset[rows], CELLS[rows], flavor, **options)
    genes = np.flatnonzero(np.arange(CELLS.n_vars) % 7)
    check(dataset, CELLS[:, genes], flavor, **options, genes=genes)
    both = ad.concat([CELLS, OTHER], index_unique="-")[:, joined.var_names].copy()
    both.obs["batch"] = both.obs["batch"].astype("category")
    check(joined, both, flavor, **options)


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, 2])
def test_logarithms_by_a_transform_or_of_a_base(tmp_path, base):
    sc = pytest.importorskip("scanpy")
    adata = ad.AnnData(CELLS.layers["counts"].copy(), obs=CELLS.obs, var=CELLS.var)
    write_store(adata, tmp_path / "counts.zarr", tmp_path)
    sc.pp.normalize_total(adata, target_sum=1e3)
    sc.pp.log1p(adata, base=base)
    wanted = table_of_scanpy(adata, "seurat", n_top_genes=20)
    zl.convert(adata, tmp_path / "log.zarr", progress=False)
    log = [LogNormalize(1e3, base=base)]
    for url, transforms in (("counts.zarr", log), ("log.zarr", [])):
        dataset = zl.open_dataset(tmp_path / url)
        found = dataset.highly_variable_genes(20, flavor="seurat", transforms=transforms, progress=False)
        pd.testing.assert_frame_equal(found[["means", "dispersions"]], wanted[["means", "dispersions"]], rtol=1e-5)
        assert found["highly_variable"].tolist() == wanted["highly_variable"].tolist()


# Made by scanpy 1.11.5 of the cells that come with zloader: `python tests/transforms/variable_genes_of_scanpy.py`.
EXPECTED = json.loads((Path(__file__).parent / "variable_genes.json").read_text())


@pytest.fixture(scope="module")
def pancreas(tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("pancreas")
    zl.convert(zl.example_h5ad(folder / "cells.h5ad"), folder / "cells.zarr", progress=False)
    return zl.open_dataset(folder / "cells.zarr", cache=folder / "cache")


@pytest.mark.every(2)
@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case['flavor']} {case['batch_key']}")
def test_it_equals_what_scanpy_found(pancreas, case):
    log = [] if case["flavor"] == "seurat_v3" else [LogNormalize(1e4)]
    genes = pancreas.gene_statistics(progress=False).nonzero >= case["min_cells"]
    found = pancreas[:, genes].highly_variable_genes(
        case["n_top_genes"], flavor=case["flavor"], batch_key=case["batch_key"], transforms=log, progress=False
    )
    assert found.index[found["highly_variable"]].tolist() == case["chosen"]
    some = found.loc[case["genes"]]
    for name, wanted in case["columns"].items():
        np.testing.assert_allclose(
            some[name].astype(float), np.array(wanted, float), rtol=2e-6, atol=2e-6, err_msg=name
        )


def same_numbers(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    return a.select_dtypes("number").to_numpy().tobytes() == b.select_dtypes("number").to_numpy().tobytes()


def test_the_cache_keeps_the_sums(store, tmp_path, monkeypatch):
    dataset = zl.open_dataset(store, cache=tmp_path)
    calls = [
        lambda of: of.highly_variable_genes(x=COUNTS),
        lambda of: of.highly_variable_genes(x=COUNTS, batch_key="batch"),
        lambda of: of.highly_variable_genes(x=COUNTS, span=0.5),
        lambda of: of.highly_variable_genes(flavor="seurat", n_top_genes=20),
        lambda of: of.highly_variable_genes(flavor="seurat", n_top_genes=20, batch_key="number"),
        lambda of: of.highly_variable_genes(flavor="cell_ranger", n_top_genes=20),
        lambda of: of[::2].highly_variable_genes(x=COUNTS),
    ]
    first = [call(dataset) for call in calls]
    assert not any(same_numbers(first[0], other) for other in first[1:])
    monkeypatch.setattr(FetchScheduler, "start", None)  # nothing may be read again
    again = zl.open_dataset(store, cache=tmp_path, offline=True)
    for call, wanted in zip(calls, first, strict=True):
        pd.testing.assert_frame_equal(call(again), wanted, check_exact=True)
    assert again.highly_variable_genes(30, x=COUNTS)["highly_variable"].sum() == 30


@pytest.mark.slow
def test_the_result_does_not_depend_on_threads_memory_or_the_order_of_batches(store, tmp_path):
    dataset = zl.open_dataset(store)
    for options in ({"x": COUNTS}, {"flavor": "seurat", "n_top_genes": 20}):
        wanted = dataset.highly_variable_genes(**options, batch_key="batch")
        for fetching in (zl.FetchOptions(threads=1), zl.FetchOptions(threads=3, memory="16MiB")):
            found = dataset.highly_variable_genes(**options, batch_key="batch", options=fetching)
            assert same_numbers(found, wanted)
    rows = np.argsort(CELLS.obs["batch"].cat.codes, kind="stable")
    write_store(CELLS[rows].copy(), tmp_path / "sorted.zarr", tmp_path)
    ordered = zl.open_dataset(tmp_path / "sorted.zarr").highly_variable_genes(x=COUNTS, batch_key="batch")
    pd.testing.assert_frame_equal(ordered, dataset.highly_variable_genes(x=COUNTS, batch_key="batch"), rtol=1e-12)


def test_many_parts_of_each_batch(store, monkeypatch):
    """The parts of 64 rows have all batches, and some parts of 1 row have one."""
    whole = zl.open_dataset(store).highly_variable_genes(40, x=COUNTS, batch_key="batch")
    for rows in (1, 64):
        monkeypatch.setattr(gene_statistics, "_PART_ROWS", rows)
        found = zl.open_dataset(store).highly_variable_genes(40, x=COUNTS, batch_key="batch")
        pd.testing.assert_frame_equal(found, whole, rtol=1e-12)


def test_values_that_are_no_counts_bring_a_warning(store):
    dataset = zl.open_dataset(store)
    with pytest.warns(UserWarning, match="expects counts, but some values are negative or no whole numbers"):
        found = dataset.highly_variable_genes(40, progress=False)
    pd.testing.assert_frame_equal(
        found.select_dtypes("number"),
        table_of_scanpy(
            ad.AnnData(CELLS.X, var=CELLS.var, layers={"counts": CELLS.X}), "seurat_v3", n_top_genes=40
        ).select_dtypes("number"),
        rtol=1e-8,
    )


def test_a_batch_is_a_label_a_number_a_truth_value_or_a_date(tmp_path):
    adata, batch = CELLS.copy(), np.arange(CELLS.n_obs) % 2
    adata.obs["label"] = pd.Categorical.from_codes(batch + 1, ["none has it", "a", "b"])
    adata.obs["string"], adata.obs["truth"] = np.array(["x", "y"])[batch], batch == 1
    adata.obs["date"] = pd.to_datetime(["2020-01-01", "2021-01-01"])[batch]
    zl.convert(adata, tmp_path / "store.zarr", progress=False)
    dataset = zl.open_dataset(tmp_path / "store.zarr")
    names = ("label", "string", "truth", "date")
    first, *others = (dataset.highly_variable_genes(30, x=COUNTS, batch_key=name) for name in names)
    assert first["highly_variable_nbatches"].max() == 2
    for other in others:
        pd.testing.assert_frame_equal(other, first, check_exact=True)


REFUSED = {
    "flavor": ({"flavor": "seurat_v4"}, "flavor must be one of 'seurat_v3', 'seurat', 'cell_ranger'"),
    "top": ({"n_top_genes": 0}, "n_top_genes must be a whole number of at least 1"),
    "no top": ({"n_top_genes": None}, "ranks genes: say how many"),
    "bins": ({"flavor": "seurat", "n_bins": 0}, "n_bins must be a whole number"),
    "span": ({"x": COUNTS, "span": 0.001}, "the loess of flavor='seurat_v3' fails for these rows, in which"),
    "few genes": ({"x": COUNTS, "genes": [0, 1]}, "too few genes for a local fit"),
    "no span": ({"span": 1.5}, "span is a share of the genes"),
    "counts": ({"x": "layers/large", "flavor": "seurat"}, r"takes logarithms, and \d+ is none"),
    "alike": ({"x": "layers/rare", "flavor": "cell_ranger"}, "too many means are the same"),
    "missing": ({"batch_key": "missing"}, "3 rows have no batch, because obs column 'missing'"),
    "NaN": ({"batch_key": "nan"}, "2 rows have no batch, because obs column 'nan'"),
    "alone": ({"batch_key": "alone"}, r"a single row, and so no variance: alone=one \(1 rows\)\. Leave"),
    "column": ({"batch_key": "bacht"}, "Did you mean 'batch'"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> zl.Dataset:
    adata = CELLS[:200].copy()
    adata.layers["large"] = adata.layers["counts"] * 1000
    adata.layers["rare"] = sp.csr_matrix(np.eye(*adata.shape, dtype=np.float32))
    adata.obs["missing"] = pd.Categorical(["a"] * 197 + [None] * 3)
    adata.obs["nan"] = [0.0] * 198 + [np.nan] * 2
    adata.obs["alone"] = pd.Categorical(["one"] + ["more"] * 199)
    folder = tmp_path_factory.mktemp("odd")
    write_store(adata, folder / "odd.zarr", folder)
    return zl.open_dataset(folder / "odd.zarr")


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_it_refuses_what_has_no_answer(odd, options, message):
    odd = of_genes(odd, options.get("genes"))
    with pytest.raises(zl.ZloaderError, match=message):
        odd.highly_variable_genes(**{name: value for name, value in options.items() if name != "genes"}, progress=False)


def test_it_refuses_a_single_row_and_names_the_extra(odd, monkeypatch):
    with pytest.raises(OptionError, match="at least 2 rows, and there are 1"):
        odd[:1].highly_variable_genes()
    monkeypatch.setitem(sys.modules, "skmisc.loess", None)
    with pytest.raises(OptionError, match=r'pip install "zloader\[genes\]"'):
        odd.highly_variable_genes(x=COUNTS)
