"""zloader: a store written by `zloader convert`, read with a mirror on the local disk, or without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.compare.peers import EPOCHS, Epoch, Epochs, Peer, Request, Side, fetch_rows

_FORMAT = "AnnData Zarr v3 by `zloader convert`: CSR, lz4 with bitshuffle, chunks of about 16 rows"
_HOW = (
    "zl.Loader with BlockShuffling(block size), without its default strata, and fetches of the size that the scenario "
    "asks for (README and docs/loader.md); torch with one thread: torch CSR (dense in sets with controls), row numbers "
    "and one obs column"
)
_MIRRORED = f"{_HOW}. The mirror is on the local disk."
_COMPACT = f"{_MIRRORED} It is compact and has the chosen genes only, those of dataset[:, genes] (docs/cache.md)."

_VALUES = {"csr": lambda one: one.x.values(), "dense": lambda one: one.x, "packed": lambda one: one.x.values}

PEER = Peer(
    packages=("zloader", "torch", "anndata", "zarr", "tensorstore", "numpy"),
    light=True,
    sides={
        "zloader": Side(
            how=_MIRRORED,
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            scenarios=(*EPOCHS, "cold_warm_cloud", "order", "tokens", "sets", "scaling", "processes", "conversion"),
            reads=("zarr", "remote zarr"),
        ),
        "zloader, no mirror": Side(
            how=f"{_HOW}. Without a mirror, so that every epoch decodes the store.",
            format=_FORMAT,
            store="zloader",
            scenarios=("cold_warm_local", "cold_warm_cloud", "order", "first", "memory"),
            reads=("zarr", "remote zarr"),
        ),
        "zloader, h5ad": Side(
            how=f"{_MIRRORED} The file itself is opened; nothing is converted.",
            format=".h5ad, as anndata writes it",
            store=None,
            mirrored=True,
            scenarios=("in_place",),
            reads=("remote h5ad",),
        ),
        "zloader, h5ad, no mirror": Side(
            how=f"{_HOW}. The file itself is opened, without a mirror.",
            format=".h5ad, as anndata writes it",
            store=None,
            scenarios=("in_place",),
            reads=("remote h5ad",),
        ),
        "zloader, dense": Side(
            how=f"{_MIRRORED} Minibatches are dense float32.",
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            options={"layout": "dense"},
            scenarios=("cold_warm_local",),
        ),
        "zloader, packed": Side(
            how=f"{_MIRRORED} Minibatches keep the stored dtypes.",
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            options={"layout": "packed"},
            scenarios=("cold_warm_local", "minibatch"),
        ),
        "zloader, default strata": Side(
            how=_MIRRORED.replace("without", "with"),
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            options={"n_strata": 64},
            scenarios=("cold_warm_local",),
            order="blocks of 64 cells, in 64 strata",
        ),
        "zloader, shuffled": Side(
            how="`zloader convert --shuffle`: the rows are shuffled while they are written.",
            format=f"{_FORMAT}, rows shuffled when written",
            store="zloader-shuffled",
            scenarios=("conversion",),
        ),
        "zloader, compact": Side(
            how=_COMPACT,
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            options={"form": "compact"},
            scenarios=("panel",),
        ),
        "zloader, compact, dense": Side(
            how=f"{_COMPACT} Minibatches are dense float32.",
            format=_FORMAT,
            store="zloader",
            mirrored=True,
            options={"form": "compact", "layout": "dense"},
            scenarios=("panel",),
        ),
    },
)


def write(conversion: str, sources: list[str], store: str) -> Callable[[], Any]:
    """`zl.convert` with its defaults, or shuffled."""
    from zloader import ConvertOptions, convert  # `import zloader` alone would leave its imports to the first call
    from zloader.common.compiled import load_compiler

    load_compiler()
    layout = ConvertOptions(shuffle_seed=0 if conversion == "zloader-shuffled" else None)
    return lambda: convert(sources, store, progress=False, options=layout)


def epochs(options: Request) -> Epochs:
    """Epochs of zl.Loader: of one loader for all requests, or of a new one if the request names a mirror."""
    import torch

    import zloader as zl

    torch.set_num_threads(1)

    def opened(mirror: str | None) -> zl.Loader:
        dataset = _dataset(options, mirror)
        rows = _sets(dataset, options["set_size"]) if "set_size" in options else {"dataset": dataset}
        return zl.Loader(
            batch_size=options["batch_size"],
            fetch_factor=fetch_rows(options) // options["batch_size"],
            **{"sampling": _order(options), **rows},
            obs=[options["obs"]] if "obs" in options else [],
            **({"layout": options["layout"]} if "layout" in options else {}),
            **({"x": None, "tokens": tokenizer(options["tokens"], dataset)} if "tokens" in options else {}),
        )

    kept = opened(options.get("mirror"))

    def epoch(request: Request) -> Epoch:
        began = time.perf_counter()
        loader = opened(request["mirror"]) if "mirror" in request else kept
        opened_s = time.perf_counter() - began

        def statistics() -> Request:
            counted = loader.statistics()
            names = ("epoch", "gets", "bytes_read", "chunks_decoded", "most_in_flight_bytes", "decode_s", "gather_s")
            names += ("bytes_from_mirror",)
            return {"opened_s": opened_s, **{name: getattr(counted, name) for name in names}}

        return Epoch(
            minibatches=iter(loader),
            values=None if "tokens" in options else _VALUES[options.get("layout", "csr")],
            labels=(lambda minibatch: minibatch.obs[options["obs"]]) if "obs" in options else None,
            statistics=statistics,
        )

    return epoch


def _dataset(options: Request, mirror: str | None) -> Any:
    """The store, with a mirror in a directory if one is given, or the chosen genes of it."""
    import zloader as zl

    cache = zl.Cache(mirror, form=options.get("form", zl.Cache.form)) if mirror else None
    dataset = zl.open_dataset(options["store"], cache=cache, storage_options=options.get("storage_options"))
    if "sample" in options:
        dataset = dataset[_spread(dataset.n_obs, options["sample"], options["chunk_size"])]
    return dataset[:, options["genes"]] if "genes" in options else dataset


def _order(options: Request) -> Any:
    """Shuffled blocks, or the rows that another loader gave out, in its order."""
    import numpy as np

    import zloader as zl

    if "replayed" not in options:
        return zl.BlockShuffling(options["chunk_size"], n_strata=options.get("n_strata", 1))
    recorded = np.load(options["replayed"]).astype(np.int64)

    class Replayed(zl.Sampling):
        def order(self, dataset: Any, batch_size: int, fetch_rows: int) -> zl.Order:
            def draw(start: int, stop: int, seed: int, epoch: int) -> Any:
                return recorded[start:stop]

            return zl.Order(dataset_rows=dataset.n_obs, n_rows=len(recorded), draw=draw)

    return Replayed()


def _spread(n_obs: int, rows: int, block: int) -> Any:
    """The numbers of so many rows: whole blocks, evenly spread over all rows."""
    import numpy as np

    starts = block * np.linspace(0, n_obs // block - 1, rows // block).astype(np.int64)
    return (starts[:, None] + np.arange(block)).ravel()


def _sets(dataset: Any, set_size: int) -> Request:
    """The treated rows of a screen (see screens.py) in sets of one cell line and drug, each row with a control."""
    import zloader as zl

    return {
        "dataset": dataset.where("drug != 'DMSO'"),
        "sampling": zl.CellSets(["cell_line", "drug"], set_size=set_size),
        "controls": zl.MatchedControls(dataset.where("drug == 'DMSO'"), match="cell_line"),
    }


def tokenizer(name: str, dataset: Any) -> Any:
    """A tokenizer of 2 048 tokens per row that knows every gene."""
    import numpy as np

    import zloader as zl

    special = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3}
    names = dataset.var_names.tolist()
    vocabulary = special | {gene: len(special) + number for number, gene in enumerate(names)}
    if name.startswith("scGPT"):
        return zl.tokenizers.ScGPT(vocabulary, max_length=2048)
    medians = dict(zip(names, np.random.default_rng(0).lognormal(0, 1, len(names)).tolist(), strict=True))
    return zl.tokenizers.Geneformer(vocabulary, medians, max_length=2048)
