"""homeobox: an atlas of LanceDB tables and Zarr arrays, read in random order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, fetch_rows

_FIELD = "gene_expression"  # a feature space that it knows
_LAYER = "counts"

PEER = Peer(
    requirements=("homeobox[ml]",),
    packages=("homeobox", "torch", "lancedb", "zarr", "anndata", "numpy"),
    least_python=(3, 12),
    sides={
        "homeobox": Side(
            how='to_unimodal_dataset(mode="iterable", shuffle=True), which its README offers for throughput: blocks of '
            "the rows of a fetch, read two ahead. Minibatches are arrays in CSR form and a frame of polars.",
            format="homeobox's atlas: LanceDB tables and Zarr arrays, counts as uint32, as its README has it",
            store="homeobox",
            scenarios=(*EPOCHS, "conversion"),
            order="single random cells",
        )
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """An atlas of one AnnData in memory, optimised, with a snapshot."""
    import anndata
    import homeobox as hox
    import numpy as np
    import pandas as pd
    import polars as pl

    (source,) = sources

    def convert() -> None:
        adata = anndata.read_h5ad(source)
        labels = [name for name in adata.obs if isinstance(adata.obs[name].dtype, pd.CategoricalDtype)]
        genes, cells = _schemas(hox, labels)
        adata.X = adata.X.astype(np.uint32)
        adata.obs = adata.obs[labels].astype(str)
        var = pd.DataFrame({"gene_symbol": adata.var_names.tolist()}, index=adata.var_names)
        genes.compute_stable_uids(var)
        atlas = hox.create_or_open_atlas(
            atlas_path=store,
            obs_schemas={"cells": cells},
            dataset_table_name="datasets",
            dataset_schema=hox.DatasetSchema,
            registry_schemas={_FIELD: genes},
        )
        atlas.register_features(_FIELD, pl.from_pandas(var))
        adata.var = var
        record = hox.DatasetSchema(zarr_group="cells", feature_space=_FIELD, n_rows=adata.n_obs)
        hox.add_from_anndata(atlas, adata, field_name=_FIELD, zarr_layer=_LAYER, dataset_record=record)
        atlas.optimize()
        atlas.snapshot()

    return convert


def _schemas(hox: Any, labels: list[str]) -> tuple[Any, Any]:
    """Those of genes, and of cells with labels."""

    class Genes(hox.FeatureBaseSchema):  # type: ignore[misc]
        gene_symbol: str = hox.StableUIDField.declare(default=...)

    cells: dict[str, Any] = {_FIELD: hox.PointerField.declare(feature_space=_FIELD)}
    annotations = {_FIELD: hox.SparseZarrPointer | None, **dict.fromkeys(labels, str)}
    return Genes, type("Cells", (hox.HoxBaseSchema,), {**cells, "__annotations__": annotations, "__module__": __name__})


def epochs(options: Request) -> Epochs:
    """Epochs of one dataset."""
    import homeobox as hox

    atlas = hox.RaggedAtlas.checkout_latest(options["store"])
    dataset = atlas.query().to_unimodal_dataset(
        _FIELD,
        metadata_columns=[options["obs"]],
        mode="iterable",
        batch_size=options["batch_size"],
        io_batch_size=fetch_rows(options),
        shuffle=True,
    )
    loader = hox.dataloader.make_loader(dataset)
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: len(minibatch.offsets) - 1,
        values=lambda minibatch: minibatch.layers[_LAYER],
        labels=lambda minibatch: minibatch.metadata[options["obs"]].to_numpy(),
    )
