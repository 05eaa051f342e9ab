"""zloader trains PyTorch models straight from single-cell AnnData kept as sharded Zarr in object storage.

A public name is imported with its module when it is first used: torch alone takes a second and 180 MB, and whoever asks
for `zloader --help` needs none of it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zloader.errors import ZloaderError

if TYPE_CHECKING:
    from zloader.append import AppendReport, append
    from zloader.convert import ConversionReport, convert
    from zloader.dataset import Dataset, View, open_dataset
    from zloader.joining.selection import Selection
    from zloader.loader import Loader
    from zloader.minibatch import Minibatch
    from zloader.quality import Quality, quality
    from zloader.sampling import BlockShuffling, MixtureOfScanners, Sampling, Streaming
    from zloader.suggest import Suggestion, suggest
    from zloader.terms import Cache, CacheStatistics, FetchOptions, Statistics
    from zloader.verify import Verification, verify
    from zloader.warm import Warmed, warm
    from zloader.weighted import BlockWeightedSampling, ClassBalancedSampling
    from zloader.writing.encode import ConvertOptions

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

# The module of each public name; a test compares it with the imports above, which are for type checkers and editors.
_MODULES = {
    "AppendReport": "zloader.append",
    "BlockShuffling": "zloader.sampling",
    "BlockWeightedSampling": "zloader.weighted",
    "Cache": "zloader.terms",
    "CacheStatistics": "zloader.terms",
    "ClassBalancedSampling": "zloader.weighted",
    "ConversionReport": "zloader.convert",
    "ConvertOptions": "zloader.writing.encode",
    "Dataset": "zloader.dataset",
    "FetchOptions": "zloader.terms",
    "Loader": "zloader.loader",
    "Minibatch": "zloader.minibatch",
    "MixtureOfScanners": "zloader.sampling",
    "Quality": "zloader.quality",
    "Sampling": "zloader.sampling",
    "Selection": "zloader.joining.selection",
    "Statistics": "zloader.terms",
    "Streaming": "zloader.sampling",
    "Suggestion": "zloader.suggest",
    "Verification": "zloader.verify",
    "View": "zloader.dataset",
    "Warmed": "zloader.warm",
    "append": "zloader.append",
    "convert": "zloader.convert",
    "open_dataset": "zloader.dataset",
    "quality": "zloader.quality",
    "suggest": "zloader.suggest",
    "verify": "zloader.verify",
    "warm": "zloader.warm",
}

if not TYPE_CHECKING:  # or every misspelt name would pass a type checker

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """The package, in which `convert` and the like are functions, whatever is imported in which order.

    Importing the module zloader.convert sets it as the attribute `convert` of the package, which would hide the
    function of that name. It is not set; an import statement finds the module in sys.modules.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
