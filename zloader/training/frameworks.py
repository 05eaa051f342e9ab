"""Minibatches of NumPy arrays. tensors.py makes those of torch, and is imported only if a loader asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

from zloader.common.records import CsrArrays, X
from zloader.dataset.matrices import as_scipy
from zloader.reading.gather import csr_cut_apart
from zloader.training.csr_rows import CsrRows


class NumPy:
    """Makes the arrays of minibatches of those that were gathered, and in their memory: these arrays themselves."""

    def array(self, values: NDArray[Any]) -> Any:
        """An array of one or several values per row, or of dense rows."""
        return values

    def csr(self, x: CsrArrays) -> Any:
        """x in CSR form."""
        return self.packed(x)

    def packed(self, x: CsrArrays) -> Any:
        """x in CSR form, with its values as they are."""
        return CsrRows(x.indptr, x.indices, x.values, (len(x.indptr) - 1, x.n_genes))

    def arrays(self, values: NDArray[Any], cuts: Sequence[int]) -> list[Any]:
        """The arrays of minibatches between successive cuts, each as `array` makes it."""
        return [self.array(values[first:last]) for first, last in pairwise(cuts)]

    def x(self, layout: str, x: X, cuts: Sequence[int]) -> list[Any]:
        """A matrix of minibatches between successive cuts in its layout."""
        if isinstance(x, CsrArrays):
            made = {"scipy": as_scipy, "packed": self.packed}.get(layout, self.csr)
            return [made(piece) for piece in csr_cut_apart(x, cuts)]
        return self.arrays(x, cuts)
