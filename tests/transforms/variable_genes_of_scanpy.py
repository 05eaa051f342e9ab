"""Writes variable_genes.json, what scanpy finds in the cells that come with zloader. Needs scanpy and scikit-misc."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import anndata as ad
import scanpy as sc

import zloader as zl

MIN_CELLS, N_TOP, SAMPLE = 10, 100, 1500  # every SAMPLE-th gene has its numbers in the file


def cells() -> ad.AnnData:
    with tempfile.TemporaryDirectory() as folder:
        adata = ad.read_h5ad(zl.example_h5ad(f"{folder}/cells.h5ad"))
    adata.X = adata.X.astype("float64")
    return adata


def case(flavor: str, batch_key: str | None) -> dict[str, object]:
    adata = cells()
    expressed = (adata.X > 0).sum(axis=0).A1 >= MIN_CELLS
    if flavor != "seurat_v3":
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
    adata = adata[:, expressed].copy()
    table = sc.pp.highly_variable_genes(adata, flavor=flavor, n_top_genes=N_TOP, batch_key=batch_key, inplace=False)
    some = table.loc[adata.var_names].iloc[::SAMPLE].drop(columns=["mean_bin", "gene_name"], errors="ignore")
    columns = {name: some[name].astype(float).where(some[name].notna(), None).tolist() for name in some}
    chosen = adata.var_names[table.loc[adata.var_names, "highly_variable"]].tolist()
    given = {"flavor": flavor, "batch_key": batch_key, "n_top_genes": N_TOP, "min_cells": MIN_CELLS}
    return {**given, "chosen": chosen, "genes": some.index.tolist(), "columns": columns}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cases = [case(flavor, key) for flavor in ("seurat_v3", "seurat", "cell_ranger") for key in (None, "donor")]
    lines = ",\n".join(json.dumps(each) for each in cases)
    (Path(__file__).parent / "variable_genes.json").write_text(f"[\n{lines}\n]\n")
