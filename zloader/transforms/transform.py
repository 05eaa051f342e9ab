"""A transform, and the rows of x that it changes in place. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.records import CsrArrays, Rows, X


class RefusedValue(Exception):
    """A value that a transform cannot take, the number of its row in x, and the reason."""

    def __init__(self, row: int, value: Any, why: str) -> None:
        super().__init__(row, value, why)
        self.row, self.value, self.why = row, value, why


@dataclass(frozen=True, kw_only=True)
class RowValues:
    """The values of some rows of x, for compiled loops: row i is `values[starts[i] : starts[i + 1]]`.

    `columns` has the column of each value, or is None if the rows are dense. `rows` are the rows of the dataset.
    """

    values: NDArray[Any]
    starts: Rows
    columns: NDArray[np.integer] | None
    rows: Rows
    seed: int
    epoch: int

    @classmethod
    def of(cls, x: X, rows: Rows, *, seed: int, epoch: int) -> RowValues:
        """The rows of x, which share its memory."""
        if isinstance(x, CsrArrays):
            starts = x.indptr.astype(np.int64, copy=False)
            return cls(values=x.values, starts=starts, columns=x.indices, rows=rows, seed=seed, epoch=epoch)
        starts = np.arange(x.shape[0] + 1) * x.shape[1]
        return cls(values=x.reshape(-1), starts=starts, columns=None, rows=rows, seed=seed, epoch=epoch)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The genes that are the columns of x. `find_names` reads their names. `where` names their place in messages."""

    n_genes: int
    find_names: Callable[[], pd.Index]
    where: str

    @cached_property
    def names(self) -> pd.Index:
        """The names of the genes, in the order of the columns."""
        return self.find_names()


class Transform:
    """Base class of the transforms. Its flags say which transforms, layouts and dtypes it can be combined with.

    `whole_rows`: it looks at all genes of a row. `by_gene`: it has a value for each gene. `needs_counts`: it takes
    whole numbers of at least 0 only.
    """

    whole_rows: ClassVar[bool] = False
    by_gene: ClassVar[bool] = False
    needs_counts: ClassVar[bool] = False

    @property
    def makes_fractions(self) -> bool:
        """Whether whole numbers become fractions."""
        return False

    @property
    def makes_zeros(self) -> bool:
        """Whether another value may become zero."""
        return False

    @property
    def fills_zeros(self) -> str:
        """How to avoid that zeros become other values, which CSR cannot hold; empty if they stay zero."""
        return ""

    def bound(self, columns: Columns) -> Transform:
        """The transform for these columns. Raises OptionError if it has values for other genes."""
        return self

    def require_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises OptionError if x of this dtype cannot hold the result."""

    def apply(self, x: RowValues, number: int) -> None:
        """Changes the values in place, as transform `number` of its list. Raises RefusedValue."""
        raise NotImplementedError
