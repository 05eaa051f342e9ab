"""zloader trains PyTorch models straight from single-cell AnnData kept as sharded Zarr in object storage."""

from typing import TYPE_CHECKING, Any

from zloader.append import AppendReport, append
from zloader.convert import ConversionReport, convert
from zloader.dataset import Dataset, View, open_dataset
from zloader.errors import ZloaderError
from zloader.joining.selection import Selection
from zloader.quality import Quality, quality
from zloader.sampling import BlockShuffling, MixtureOfScanners, Sampling, Streaming
from zloader.suggest import Suggestion, suggest
from zloader.terms import Cache, CacheStatistics, FetchOptions, Statistics
from zloader.verify import Verification, verify
from zloader.warm import Warmed, warm
from zloader.weighted import BlockWeightedSampling, ClassBalancedSampling
from zloader.writing.encode import ConvertOptions

if TYPE_CHECKING:
    from zloader.loader import Loader, Minibatch

__version__ = "0.1.0"

__all__ = [
    "AppendReport",
    "BlockShuffling",
    "BlockWeightedSampling",
    "Cache",
    "CacheStatistics",
    "ClassBalancedSampling",
    "ConversionReport",
    "ConvertOptions",
    "Dataset",
    "FetchOptions",
    "Loader",
    "Minibatch",
    "MixtureOfScanners",
    "Quality",
    "Sampling",
    "Selection",
    "Statistics",
    "Streaming",
    "Suggestion",
    "Verification",
    "View",
    "Warmed",
    "ZloaderError",
    "append",
    "convert",
    "open_dataset",
    "quality",
    "suggest",
    "verify",
    "warm",
]


def __getattr__(name: str) -> Any:
    """Loads torch, which takes a second and 180 MB, for those who train and not for those who convert."""
    if name not in ("Loader", "Minibatch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zloader import loader

    return getattr(loader, name)
