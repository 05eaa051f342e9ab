"""A transform, the rows of x that it changes in place, and the transforms that a Loader lists. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import CsrArrays, Rows, X


class RefusedValue(Exception):
    """A value that a transform cannot take, with the number of its row in x and the reason."""

    def __init__(self, row: int, value: object, why: str) -> None:
        super().__init__(row, value, why)
        self.row, self.value, self.why = row, value, why


@dataclass(kw_only=True)
class RowValues:
    """The values of some rows of x, which a transform changes in place: row i is `values[starts[i] : starts[i + 1]]`.

    `values` has one dimension and the dtype of x. `columns` has the column of each value in CSR form; None if the rows
    are dense. `rows` are the rows of the whole dataset. `number` is the place of the transform in its list. `totals`
    has the sum of each row with all genes, or one of its negative values; None if x has all genes.
    """

    values: NDArray[Any]
    starts: Rows
    columns: NDArray[np.integer] | None
    rows: Rows
    seed: int
    epoch: int
    number: int
    totals: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, x: X, rows: Rows, *, seed: int = 0, epoch: int = 0, number: int = 0) -> RowValues:
        """The rows of x, which share its memory. x is a dense array of rows x genes, in C order."""
        if isinstance(x, CsrArrays):
            values, starts, columns = x.values, x.indptr.astype(np.int64, copy=False), x.indices
        else:
            values, starts, columns = x.reshape(-1), np.arange(x.shape[0] + 1) * x.shape[1], None
        return cls(values=values, starts=starts, columns=columns, rows=rows, seed=seed, epoch=epoch, number=number)


class Transform(ABC):
    """Base class of the transforms. The attributes say what one does, and so with which others it can be combined.

    - `whole_rows`: it looks at other values of the row, so that it must see all genes, also those that a panel lacks.
    - `row_totals`: of the genes that x lacks it needs only `x.totals`.
    - `by_gene`: it has a value for each column of x.
    - `needs_counts`: it takes whole numbers of at least 0 only.
    - `needs_floats`: it makes numbers that no dtype of integers holds.
    - `makes_zeros`: another value may become zero, which CSR then leaves out.
    - `fills_zeros`: a zero may become another value, which CSR cannot hold.
    """

    whole_rows = row_totals = by_gene = needs_counts = needs_floats = makes_zeros = fills_zeros = False

    def bound(self, n_genes: int, names: Callable[[], pd.Index], where: str) -> Transform:
        """The transform for these columns of x. Raises OptionError if it has values for other genes."""
        return self

    @abstractmethod
    def apply(self, x: RowValues) -> None:
        """Changes `x.values` in place. Raises RefusedValue. Several threads may call it at once."""


Transforms: TypeAlias = Sequence[Transform] | Mapping[str, Sequence[Transform]]


def transforms_of(transforms: Transforms, matrices: Sequence[str]) -> dict[str, tuple[Transform, ...]]:
    """The transforms of each matrix, from a list for all of them or a mapping. Matrices without any are left out.

    Raises OptionError for anything but transforms, for unknown matrices, and without a matrix.
    """
    if not isinstance(transforms, Mapping):
        transforms = dict.fromkeys(matrices or [""], transforms)
    found = {name: of_matrix for name, each in transforms.items() if (of_matrix := _listed(each))}
    for name in found:
        if name not in matrices:
            raise OptionError(
                f"transforms has a list for {name!r:.100}, but the loader's matrices are: "
                f"{', '.join(map(repr, matrices)) or 'none'}{suggestion(name, matrices)}"
            )
    return found


def _listed(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    found = tuple(transforms) if isinstance(transforms, list | tuple) else (None,)
    if not all(isinstance(each, Transform) for each in found):
        raise OptionError(
            f"transforms must be a list of objects of zl.transforms, such as [LogNormalize(1e4)], not "
            f"{transforms!r:.100}. A function of your own goes into batch_transform"
        )
    return found


def require_combinable(transforms: Sequence[Transform], *, dense: bool, dtype: str, chosen: bool) -> None:
    """Raises OptionError if transforms do not fit each other, the layout, the dtype, or columns `chosen` among all."""
    for transform in transforms:
        if transform.needs_floats and np.dtype(dtype).kind != "f":
            raise OptionError(
                f"{transform} makes numbers which {dtype} cannot hold: choose a dtype of floats, such as 'float32'"
            )
        if transform.fills_zeros and not dense:
            raise OptionError(
                f"{transform} makes other values of zeros, which only layout='dense' can hold: give a Loader that "
                "layout, or leave out the mean of Scale, or let the range of Clip contain 0"
            )
    for first, second in combinations(transforms, 2):
        if first.needs_floats and second.needs_counts:
            raise OptionError(f"{second} needs counts, but {first} makes fractions of them: list {second} first")
        if chosen and first.by_gene and second.whole_rows:
            raise OptionError(
                f"{second} looks at all genes of a row, but {first} before it has numbers for the chosen genes only: "
                f"list {second} first"
            )
