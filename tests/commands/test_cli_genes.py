"""`zloader genes`: names of highly variable genes on stdout or in a file."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store
from test_cli import params, zloader

import zloader as zl
from zloader.transforms import LogNormalize

pytestmark = pytest.mark.any_version


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genes")
    adata = counts(300, 60)
    adata.obs["plate"] = pd.Categorical(["a", "b", "c"] * 100)
    adata.layers["more"] = adata.X
    adata.layers["large"] = adata.X * 1000
    write_store(adata, folder / "plates.zarr", folder)
    return folder / "plates.zarr"


def chosen(store, *arguments, **options):
    table = zl.open_dataset(store).highly_variable_genes(*arguments, **options)
    return table.index[table["highly_variable"]].tolist()


def test_names_go_to_stdout_or_to_a_file(store, tmp_path):
    wanted = chosen(store, 12)
    assert zloader("genes", store, "--top", 12).stdout.splitlines() == wanted
    done = zloader("genes", store, "--top", 12, "-o", tmp_path / "genes.txt")
    assert done.stdout == f"{store}: wrote 12 of 60 genes to {tmp_path / 'genes.txt'}\n"
    assert (tmp_path / "genes.txt").read_text().splitlines() == wanted


@pytest.mark.slow
def test_flags_are_options(store, tmp_path):
    wanted = chosen(store, 9, flavor="seurat", batch_key="plate", x="layers/more", transforms=[LogNormalize(1e3)])
    flags = ("--flavor", "seurat", "--batch-key", "plate", "--x", "layers/more", "--log-normalize", "1e3")
    for cache in ("--cache", tmp_path), ("--cache", tmp_path), ():
        document = json.loads(zloader("genes", store, "--top", 9, *flags, *cache, "--json").stdout)
        assert document == {"url": str(store), "rows": 300, "flavor": "seurat", "genes": wanted}
    assert len(list(tmp_path.rglob("gene_statistics*.flat"))) == 1
    assert params("genes")["top"].default == zl.Dataset.highly_variable_genes.__wrapped__.__defaults__[0]


def test_genes_that_few_rows_have_are_left_out(store):
    dataset = zl.open_dataset(store)
    nonzero = dataset.gene_statistics().nonzero
    least = int(np.median(nonzero))
    wanted = chosen(store, 60, genes=nonzero >= least)
    assert 0 < len(wanted) < 60
    assert zloader("genes", store, "--top", 60, "--min-cells", least).stdout.splitlines() == wanted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch-key", "plaet"), "Did you mean 'plate'"),
        (("--flavor", "seurat_v4"), "flavor must be one of"),
        (("--flavor", "seurat", "--x", "layers/large"), "or --log-normalize 1e4"),
        (("--top", 0), "n_top_genes must be"),
        (("--log-normalize", 0), "target_sum must be"),
        (("-o", "nowhere/genes.txt"), "cannot write nowhere/genes.txt: there is no directory nowhere"),
    ],
)
def test_errors_say_what_to_change(store, flags, message):
    assert message in zloader("genes", store, *flags, status=1).stderr
