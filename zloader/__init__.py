"""zloader trains PyTorch models straight from single-cell AnnData kept as sharded Zarr in object storage."""

from zloader.convert import ConversionReport, convert
from zloader.dataset import Dataset, open_dataset
from zloader.encode import ConvertOptions
from zloader.errors import ZloaderError
from zloader.loader import Loader, Minibatch
from zloader.sampling import BlockShuffling, Streaming
from zloader.terms import Cache, FetchOptions, Statistics

__version__ = "0.1.0"

__all__ = [
    "BlockShuffling",
    "Cache",
    "ConversionReport",
    "ConvertOptions",
    "Dataset",
    "FetchOptions",
    "Loader",
    "Minibatch",
    "Statistics",
    "Streaming",
    "ZloaderError",
    "convert",
    "open_dataset",
]
