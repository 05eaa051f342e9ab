"""Whose arrays minibatches hold: the port to NumPy, torch (tensors.py) and JAX (jax_arrays.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays, X
from zloader.dataset.in_memory import as_scipy
from zloader.reading.gather import csr_cut_apart
from zloader.training.csr_rows import CsrRows


class Framework(ABC):
    """Makes the arrays of minibatches of those that were gathered, and in their memory."""

    name: str

    @abstractmethod
    def array(self, values: NDArray[Any]) -> Any:
        """An array of one or several values per row."""

    @abstractmethod
    def dense(self, values: NDArray[Any]) -> Any:
        """An array of values of x."""

    @abstractmethod
    def csr(self, x: CsrArrays) -> Any:
        """x in CSR form."""

    @abstractmethod
    def packed(self, x: CsrArrays) -> Any:
        """x in CSR form, with its values as they are."""

    @abstractmethod
    def usable_device(self, device: Any, layout: str) -> Any:
        """The device of a loader in its usual form; None for the usual place. Raises OptionError."""

    def require_dtype(self, dtype: str | None) -> None:  # noqa: B027 - most take every dtype
        """Raises OptionError if x cannot have a dtype."""

    def require_even(self, device: Any, batch_size: int, *, full: bool) -> None:  # noqa: B027 - most take every number
        """Raises OptionError unless minibatches can be divided over a device that is several.

        `full` says that all of them have `batch_size` rows.
        """

    def adopt(self, loader: type) -> None:  # noqa: B027 - most ask nothing of a class
        """Makes a class of loaders an iterable dataset of the framework."""

    def require_workers(self) -> None:
        """Raises OptionError unless the workers of a DataLoader can iterate: they share the count of epochs."""
        raise OptionError(
            f"framework={self.name!r} does not work in DataLoader workers: iterate over the loader itself, which reads "
            "in threads of its own, or take framework='torch'"
        )

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Called before minibatches are made in a process."""

    def finished(self, minibatch: Any, device: Any) -> Any:
        """A Minibatch as the consumer gets it, on a device. Called in its thread."""
        return minibatch

    def arrays(self, values: NDArray[Any], cuts: Sequence[int]) -> list[Any]:
        """The arrays of minibatches between successive cuts, each as `array` makes it."""
        return [self.array(values[first:last]) for first, last in pairwise(cuts)]

    def x(self, layout: str, x: X, cuts: Sequence[int]) -> list[Any]:
        """A matrix of minibatches between successive cuts in its layout."""
        if isinstance(x, CsrArrays):
            made = {"scipy": as_scipy, "packed": self.packed}.get(layout, self.csr)
            return [made(piece) for piece in csr_cut_apart(x, cuts)]
        make = self.array if layout == "packed" else self.dense
        return [make(x[first:last]) for first, last in pairwise(cuts)]


@dataclass(frozen=True)
class NumPy(Framework):
    """The gathered arrays themselves."""

    name: str = "numpy"

    def array(self, values: NDArray[Any]) -> Any:
        return values

    def dense(self, values: NDArray[Any]) -> Any:
        return values

    def csr(self, x: CsrArrays) -> CsrRows:
        return CsrRows(x.indptr, x.indices, self.dense(x.values), (len(x.indptr) - 1, x.n_genes))

    def packed(self, x: CsrArrays) -> CsrRows:
        return CsrRows(x.indptr, x.indices, x.values, (len(x.indptr) - 1, x.n_genes))

    def usable_device(self, device: Any, layout: str) -> Any:
        if device is not None:
            raise OptionError(
                f"NumPy has no devices: leave device={device!r:.100} out, or take framework='torch' or 'jax'"
            )
        return None
