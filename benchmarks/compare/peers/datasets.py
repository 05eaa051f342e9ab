"""Hugging Face Datasets: an Arrow table, or Parquet files, with the genes and values of each row as lists."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.peers import (
    EPOCHS,
    Epoch,
    Epochs,
    Peer,
    Request,
    Side,
    aws_variables,
    fetch_rows,
    workers_bytes,
)

_FORMAT = "Arrow, written by Dataset.save_to_disk: lists of genes (int32) and values (float32), a label"
_HOW = (
    "load_from_disk with format numpy in a DataLoader with one worker per core, which the page 'Use with PyTorch' "
    "advises."
)
_SHARDS = 64

PEER = Peer(
    requirements=("datasets", "anndata", "torch", "s3fs"),
    packages=("datasets", "pyarrow", "torch", "s3fs", "numpy"),
    sides={
        "HF Datasets": Side(
            how=f"{_HOW} Random rows (shuffle=True): the DataLoader asks for the rows of a minibatch at once. "
            "Minibatches are concatenated NumPy arrays.",
            format=_FORMAT,
            store="datasets",
            scenarios=(*EPOCHS, "conversion"),
            order="single random cells",
        ),
        "HF Datasets, iterable": Side(
            how=f"{_HOW} As an IterableDataset of 64 shards with a shuffle buffer of a fetch of rows, which the page "
            "'Differences between Dataset and IterableDataset' advises for speed.",
            format=_FORMAT,
            store="datasets",
            scenarios=("cold_warm_local", "order"),
            order="shards in random order, and a shuffled buffer of a fetch",
            options={"iterable": True},
        ),
        "HF Datasets, S3": Side(
            how="load_dataset('arrow', data_files='s3://...', streaming=True), as the pages 'Stream' and 'Cloud "
            "storage' have it, in a DataLoader with one worker per core, and shuffled in a buffer of a fetch of rows.",
            format=_FORMAT,
            store="datasets",
            scenarios=("cold_warm_cloud",),
            order="shards in random order, and a shuffled buffer of a fetch",
            options={"iterable": True},
        ),
        "HF Datasets, Parquet": Side(
            how="load_dataset('parquet', streaming=True), in a DataLoader with one worker per core, and shuffled in a "
            "buffer of a fetch of rows. Tahoe-100M lies on the Hub in this form, and its card reads it so.",
            format=f"Parquet, written by Dataset.to_parquet as {_SHARDS} files: lists of genes (int32) and values "
            "(float32), a label",
            store="datasets-parquet",
            scenarios=("cold_warm_local", "cold_warm_cloud"),
            order="files in random order, and a shuffled buffer of a fetch",
            options={"iterable": True, "files": "parquet"},
        ),
    },
)
_WINDOW = 4096  # rows read at a time


def write(conversion: str, sources: list[str], store: str) -> Callable[[], Any]:
    """An Arrow table, or for `datasets-parquet` Parquet files, written row by row from the backed file."""
    import anndata.io  # noqa: F401 - csr_rows needs it
    from datasets import Dataset, Features, Sequence, Value

    (source,) = sources
    features = Features(
        {"genes": Sequence(Value("int32")), "values": Sequence(Value("float32")), "label": Value("int32")}
    )

    def convert() -> None:
        with tempfile.TemporaryDirectory() as cache:
            table = Dataset.from_generator(csr_rows, gen_kwargs={"source": source}, features=features, cache_dir=cache)
            if conversion == "datasets":
                table.save_to_disk(store, num_shards=_SHARDS)  # so that each worker has some
                return
            Path(store).mkdir(parents=True)
            for number in range(_SHARDS):
                shard = table.shard(num_shards=_SHARDS, index=number, contiguous=True)
                shard.to_parquet(Path(store, f"{number:02}.parquet"))

    return convert


def csr_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of an .h5ad file, for formats of one record per row. The label is the first categorical column."""
    import h5py
    import numpy as np
    from anndata.io import read_elem

    with h5py.File(source) as file:
        obs = read_elem(file["obs"])
        codes = next(obs[name].cat.codes.to_numpy() for name in obs if obs[name].dtype == "category")
        indptr = file["X/indptr"][:]
        for start in range(0, len(codes), _WINDOW):
            stop = min(start + _WINDOW, len(codes))
            here = slice(indptr[start], indptr[stop])
            genes, values = file["X/indices"][here].astype(np.int32), file["X/data"][here].astype(np.float32)
            for row in range(start, stop):
                own = slice(indptr[row] - here.start, indptr[row + 1] - here.start)
                yield {"genes": genes[own], "values": values[own], "label": int(codes[row])}


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Records of `csr_rows` as one minibatch."""
    import numpy as np

    return {
        "indptr": np.cumsum([0, *(len(row["genes"]) for row in rows)]),
        "genes": np.concatenate([row["genes"] for row in rows]),
        "values": np.concatenate([row["values"] for row in rows]),
        "label": np.array([row["label"] for row in rows]),
    }


def epochs(options: Request) -> Epochs:
    """Epochs of a DataLoader."""
    from datasets import load_dataset, load_from_disk
    from torch.utils.data import DataLoader

    given = {"batch_size": options["batch_size"], "num_workers": options["workers"], "collate_fn": collated}
    os.environ |= aws_variables(options)
    files = options.get("files", "arrow")
    if "storage_options" in options or files == "parquet":
        shards = load_dataset(files, data_files=f"{options['store']}/*.{files}", split="train", streaming=True)
    elif options.get("iterable"):
        shards = load_from_disk(options["store"]).with_format("numpy").to_iterable_dataset(num_shards=_SHARDS)
    if options.get("iterable"):
        shuffled = shards.shuffle(seed=0, buffer_size=fetch_rows(options))
        loader = DataLoader(shuffled.with_format("numpy"), **given)
    else:
        loader = DataLoader(load_from_disk(options["store"]).with_format("numpy"), shuffle=True, **given)
    return lambda _: Epoch(
        minibatches=iter(loader),
        size=lambda minibatch: len(minibatch["label"]),
        values=lambda minibatch: minibatch["values"],
        labels=lambda minibatch: minibatch["label"],
        workers_bytes=workers_bytes,
    )
