"""TileDB-SOMA-ML: a TileDB-SOMA experiment, read in chunks of rows that are shuffled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, fetch_rows, workers_bytes

PEER = Peer(
    requirements=("tiledbsoma-ml", "tiledbsoma"),
    packages=("tiledbsoma-ml", "tiledbsoma", "torch", "anndata", "numpy"),
    least_python=(3, 10),
    below_python=(3, 14),
    sides={
        "TileDB-SOMA-ML": Side(
            how="ExperimentDataset with shuffle=True, shuffle_chunk_size of a block, return_sparse_X=True and "
            "io_batch_size of a fetch (as for the other tools; its default is 65 536 rows), in experiment_dataloader "
            "(README). No worker processes, its default: it has threads of its own. In S3 with the vfs.s3 settings of "
            "TileDB's configuration. Minibatches are scipy matrices and DataFrames. Its main branch (2d60468) reads "
            "shuffled epochs by the same code.",
            format="TileDB-SOMA, by tiledbsoma.io.from_h5ad with its defaults",
            store="tiledbsoma-ml",
            scenarios=(*EPOCHS, "order", "cold_warm_cloud", "conversion"),
        )
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """tiledbsoma's ingestion with its defaults."""
    import tiledbsoma.io

    (source,) = sources
    return lambda: tiledbsoma.io.from_h5ad(store, source, measurement_name="RNA")


def epochs(options: Request) -> Epochs:
    """Epochs of one dataset."""
    import tiledbsoma
    from tiledbsoma_ml import ExperimentDataset, experiment_dataloader

    experiment = tiledbsoma.open(options["store"], context=tiledbsoma.SOMATileDBContext(tiledb_config=_s3(options)))
    dataset = ExperimentDataset(
        experiment.axis_query("RNA"),
        layer_name="data",
        obs_column_names=[options["obs"]],
        batch_size=options["batch_size"],
        io_batch_size=fetch_rows(options),
        shuffle=True,
        shuffle_chunk_size=options["chunk_size"],
        return_sparse_X=True,
        seed=0,
    )
    loader = experiment_dataloader(dataset)
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: minibatch[0].shape[0],
        values=lambda minibatch: minibatch[0].data,
        labels=lambda minibatch: minibatch[1][options["obs"]],
        workers_bytes=workers_bytes,
    )


def _s3(options: Request) -> dict[str, str]:
    """TileDB's configuration for the cloud of a store, {} for a local one."""
    if "storage_options" not in options:
        return {}
    given = options["storage_options"]
    scheme, _, address = given["endpoint_url"].partition("://")
    return {
        "vfs.s3.scheme": scheme,
        "vfs.s3.endpoint_override": address,
        "vfs.s3.use_virtual_addressing": "false",
        "vfs.s3.region": "us-east-1",
        "vfs.s3.aws_access_key_id": given["key"],
        "vfs.s3.aws_secret_access_key": given["secret"],
    }
