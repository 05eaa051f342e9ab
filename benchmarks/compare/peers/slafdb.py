"""SLAF: a Lance table read by its own loader, as values or as tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare.peers import Epoch, Epochs, Peer, Request, Side, aws_variables

_TOKENS = {"Geneformer": "geneformer", "scGPT": "scgpt"}
_FORMAT = "SLAF (Lance), with the defaults of SLAFConverter"
_RAW = (
    "SLAFDataLoader with raw_mode: minibatches are Polars tables of cell, gene and value, and no obs columns. A new "
    "loader for each epoch, as its n_epochs=1 requires."
)

PEER = Peer(
    requirements=("slafdb", "torch", "psutil"),  # it needs psutil without requiring it
    packages=("slafdb", "pylance", "polars", "torch", "numpy"),
    least_python=(3, 10),
    below_python=(3, 14),
    sides={
        "SLAF, Mixture of Scanners": Side(
            how=f"{_RAW} The order is its default, 16 scanners (guide in the docstring of SLAFDataLoader).",
            format=_FORMAT,
            store="slafdb",
            scenarios=("cold_warm_local", "minibatch", "first", "memory", "conversion"),
            order="random places of the file, read by turns",
            options={"raw_mode": True},
        ),
        "SLAF, sequential": Side(
            how=f"{_RAW} use_mixture_of_scanners=False and by_fragment=False, which the docstring of SLAFDataLoader "
            "advises for the highest throughput, and 50 batches per chunk, its default for that order. Not shuffled.",
            format=_FORMAT,
            store="slafdb",
            scenarios=("cold_warm_local",),
            order="as stored, not shuffled",
            options={"raw_mode": True, "use_mixture_of_scanners": False, "by_fragment": False, "batches_per_chunk": 50},
        ),
        "SLAF, S3": Side(
            how=f"{_RAW} From S3 with parallelize_fragment_reads=True, which the docstring of SLAFDataLoader advises "
            "for data in a cloud, in its default order. Not with 16 batches per chunk, which it advises too: version "
            "0.5.2 then gives out no rows of a small table.",
            format=_FORMAT,
            store="slafdb",
            scenarios=("cold_warm_cloud",),
            order="random places of the file, read by turns",
            options={"raw_mode": True, "parallelize_fragment_reads": True},
        ),
        "SLAF": Side(
            how="SLAFDataLoader with its own tokenizers, at most 2 048 genes per row and 51 bins, every gene in the "
            "vocabulary, in its default order. Its Geneformer ranks raw counts, without medians.",
            format=_FORMAT,
            store="slafdb",
            scenarios=("tokens",),
            order="random places of the file, read by turns",
        ),
    },
)


def write(_: str, sources: list[str], store: str) -> Callable[[], Any]:
    """SLAF's converter with its defaults."""
    from slaf.data import SLAFConverter

    (source,) = sources
    return lambda: SLAFConverter().convert(source, store)


def epochs(options: Request) -> Epochs:
    """Epochs of SLAFDataLoader, with the tokenizer that `tokens` names, or with X as it is.

    A new loader is made for each epoch, as its `n_epochs=1` requires, and stopped after the last row.
    """
    from slaf import SLAFArray
    from slaf.ml import SLAFDataLoader

    os.environ |= aws_variables(options)
    array = SLAFArray(options["store"])
    array.wait_for_metadata()  # its loader hangs if it starts before they have been read in the background
    names = ("raw_mode", "use_mixture_of_scanners", "by_fragment", "batches_per_chunk", "parallelize_fragment_reads")
    given = {name: options[name] for name in names if name in options}
    if "tokens" in options:
        given |= {
            "tokenizer_type": _TOKENS[options["tokens"]],
            "max_genes": 2048,
            "vocab_size": array.shape[1] + 1,
            "n_expression_bins": 51,
        }

    def epoch(_: Request) -> Epoch:
        loader = SLAFDataLoader(array, batch_size=options["batch_size"], verbose=False, **given)

        def stop() -> Request:
            prefetcher = loader._dataset.prefetcher
            prefetcher.stop()  # waits for a second only
            prefetcher.worker_thread.join()
            return {}

        def minibatches() -> Iterator[Any]:
            left = array.shape[0]
            for minibatch in loader:
                left -= len(minibatch["cell_ids"])
                yield minibatch
                if left <= 0:
                    return  # it would wait for more for up to a minute

        return Epoch(
            minibatches=minibatches(),
            size=lambda minibatch: len(minibatch["cell_ids"]),
            values=(lambda minibatch: minibatch["x"]["value"].to_numpy()) if "raw_mode" in given else None,
            statistics=stop,
        )

    return epoch
