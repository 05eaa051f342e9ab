"""The class of a Loader, which is one of torch only if the loader yields tensors.

DataLoader recognises an IterableDataset by its class, and torch may not be imported to define the Loader. So a loader
changes its class when it is constructed or unpickled, to one that is made once for each class of loaders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from zloader.training.minibatch import Minibatch

if TYPE_CHECKING:
    import torch.utils.data

    _Base: TypeAlias = torch.utils.data.IterableDataset[Minibatch]
else:
    _Base = Iterable[Minibatch]


class OfFramework(_Base):
    """A loader that becomes a torch.utils.data.IterableDataset if its `framework` is torch."""

    framework: str

    def become_dataset(self) -> None:
        """Called when the loader is complete."""
        self.__class__ = _without_torch(type(self))
        if self.framework == "torch":
            from zloader.training.tensors import as_dataset

            self.__class__ = as_dataset(type(self))

    def __reduce__(self) -> Any:
        return _blank, (_without_torch(type(self)),), self.__getstate__()  # that of torch is found by no name

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.become_dataset()


def _without_torch(loader: type[OfFramework]) -> type[OfFramework]:
    found: type[OfFramework] = getattr(loader, "without_torch", loader)
    return found


def _blank(loader: type[OfFramework]) -> OfFramework:
    return object.__new__(loader)
