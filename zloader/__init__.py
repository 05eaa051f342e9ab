"""zloader trains PyTorch models straight from single-cell AnnData kept as sharded Zarr in object storage.

Convert a file once, open the store, and iterate over shuffled minibatches:

>>> import zloader as zl
>>> report = zl.convert("cells.h5ad", "cells.zarr", progress=False)
>>> dataset = zl.open_dataset("cells.zarr")
>>> loader = zl.Loader(dataset, batch_size=64, obs=["cell_type"])
>>> for minibatch in loader:
...     x, labels = minibatch.x, minibatch.obs["cell_type"]
>>> x.layout, labels.dtype
(torch.sparse_csr, torch.int64)

Stores may also be at `s3://`, `gs://`, `az://`, `hf://` and `https://` URLs.
`zl.open_dataset(url, cache="/nvme/zloader")` keeps a local mirror, so that every epoch after the first is read from
disk instead of the network.

Each public name is imported with its module on first use, because torch alone takes a second and 180 MB, and commands
such as `zloader --help` do not need it.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "zloader runs on Linux and macOS, not on Windows itself: install and run it in WSL, the Windows Subsystem for "
        "Linux (https://learn.microsoft.com/windows/wsl/install)"
    )

from zloader.common.errors import ZloaderError
from zloader.common.version import __version__ as __version__

if TYPE_CHECKING:
    from zloader import tokenizers as tokenizers
    from zloader import transforms as transforms
    from zloader.caching.rows_file import CacheStatistics
    from zloader.common.options import Cache, FetchOptions
    from zloader.conversion.convert import ConversionReport, convert
    from zloader.conversion.encode import ConvertOptions
    from zloader.conversion.example import example_h5ad
    from zloader.conversion.memory import RowSource
    from zloader.conversion.parquet import Parquet
    from zloader.conversion.selection import Selection
    from zloader.conversion.verify import Verification, verify
    from zloader.dataset.dataset import Dataset, View, open_dataset
    from zloader.dataset.warm import Warmed, warm
    from zloader.insight.quality import Quality, quality
    from zloader.order.cell_sets import CellSets
    from zloader.order.companions import MatchedControls, Neighbors
    from zloader.order.sampling import Order, Sampling
    from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming
    from zloader.order.weighted import BlockWeightedSampling, ClassBalancedSampling, Mixture
    from zloader.training.arrays import PackedRows
    from zloader.training.epoch import Statistics
    from zloader.training.loader import Loader
    from zloader.training.minibatch import Minibatch


__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "Cache",
    "CacheStatistics",
    "CellSets",
    "ClassBalancedSampling",
    "ConversionReport",
    "ConvertOptions",
    "Dataset",
    "FetchOptions",
    "Loader",
    "MatchedControls",
    "Minibatch",
    "Mixture",
    "MixtureOfScanners",
    "Neighbors",
    "Order",
    "PackedRows",
    "Parquet",
    "Quality",
    "RowSource",
    "Sampling",
    "Selection",
    "Statistics",
    "Streaming",
    "Verification",
    "View",
    "Warmed",
    "ZloaderError",
    "convert",
    "example_h5ad",
    "open_dataset",
    "quality",
    "verify",
    "warm",
]

# The public names of each module. A test compares them with the imports above, which serve type checkers and editors.
_NAMES = {
    "caching.rows_file": "CacheStatistics",
    "common.options": "Cache FetchOptions",
    "conversion.convert": "ConversionReport convert",
    "conversion.encode": "ConvertOptions",
    "conversion.example": "example_h5ad",
    "conversion.memory": "RowSource",
    "conversion.parquet": "Parquet",
    "conversion.selection": "Selection",
    "conversion.verify": "Verification verify",
    "dataset.dataset": "Dataset View open_dataset",
    "dataset.warm": "Warmed warm",
    "insight.quality": "Quality quality",
    "order.cell_sets": "CellSets",
    "order.companions": "MatchedControls Neighbors",
    "order.sampling": "Order Sampling",
    "order.shuffling": "BlockShuffling MixtureOfScanners Streaming",
    "order.weighted": "BlockWeightedSampling ClassBalancedSampling Mixture",
    "training.arrays": "PackedRows",
    "training.epoch": "Statistics",
    "training.loader": "Loader",
    "training.minibatch": "Minibatch",
}
_MODULES = {name: f"zloader.{module}" for module, names in _NAMES.items() for name in names.split()}

_FOLDERS = ("tokenizers", "transforms")  # whose names are public too, as in zl.transforms.Clip

if not TYPE_CHECKING:  # a visible __getattr__ would let every misspelt name pass a type checker

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"zloader.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from zloader.common.keywords import answers

        found = globals()[name] = answers(getattr(importlib.import_module(_MODULES[name]), name))
        return found


def __dir__() -> list[str]:
    """The public names. Without this, modules, folders and imports would be listed too."""
    return sorted([*__all__, *_FOLDERS, *(name for name in globals() if name.startswith("__"))])
