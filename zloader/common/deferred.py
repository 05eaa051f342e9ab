"""Libraries that are imported when they are first used, because opening a store and training from it may not need them.

pandas takes a third of a second, and brings pyarrow if that is installed. Labels, names and tables need it; codes and
numbers of obs columns do not. Modules write `from zloader.common.deferred import pd`. A name of it that is used while
a module is imported, as in a type alias, would import pandas at once: tests/common/test_deferred.py notices that.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from zloader.common.locks import hold_at_forks

__all__ = ["Deferred", "pd"]

# Held while a module is imported, which a process that is forked meanwhile could never import.
_importing = threading.RLock()
hold_at_forks(_importing)


class Deferred:
    """Stands for a module, which is imported when one of its names is first asked for. Any thread may ask."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        with _importing:
            return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Deferred("pandas")
