"""A transform, the rows of x that it changes in place, and the transforms that a Loader lists. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.messages import suggestion
from zloader.common.records import CsrArrays, Rows, X


class RefusedValue(Exception):
    """Raised by `Transform.apply` for a value that it cannot take, with the number of its row in x and the reason.

    The rows of x are numbered from 0, in the order of `x.starts`; `x.rows` has their numbers in the dataset.

    >>> raise zl.transforms.RefusedValue(0, -1.0, "Root takes no negative values")
    Traceback (most recent call last):
    zloader.transforms.transform.RefusedValue: (0, -1.0, 'Root takes no negative values')

    The training loop gets an OptionError that also names the matrix, the store and the row of the dataset.
    """

    def __init__(self, row: int, value: Any, why: str) -> None:
        super().__init__(row, value, why)
        self.row, self.value, self.why = row, value, why


@dataclass(kw_only=True)  # not frozen, which would refuse `x.values += 1`
class RowValues:
    """The values of some rows of x, which a transform changes in place: row i is `values[starts[i] : starts[i + 1]]`.

    >>> x = zl.transforms.RowValues.of(np.array([[5.0, 0, 2]]), rows=np.array([17]))
    >>> zl.transforms.Clip(0, 3).apply(x)
    >>> x.values, x.starts, x.columns
    (array([3., 0., 2.]), array([0, 3]), None)

    - `values`: one-dimensional, in the dtype of x.
    - `starts`: int64, one more than there are rows.
    - `columns`: the column of each value in CSR form, where most zeros are left out; None if the rows are dense.
    - `rows`: the rows of the whole dataset, int64.
    - `seed`, `epoch`, `number`: for random draws. `number` is the place of the transform in its list.
    - `totals`: the sum of each row with all genes (float64), or one of its negative values if it has any. None if x has
      all genes.
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


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The genes that are the columns of x, for `Transform.bound`.

    >>> columns = zl.transforms.Columns(n_genes=2, find_names=lambda: pd.Index(["INS", "GCG"]), where="X of a.zarr")
    >>> columns.names.tolist()
    ['INS', 'GCG']

    `find_names` reads their names. `where` names their place in messages.
    """

    n_genes: int
    find_names: Callable[[], pd.Index]
    where: str

    @cached_property
    def names(self) -> pd.Index:
        """The names of the genes, in the order of the columns."""
        return self.find_names()


class Transform(ABC):
    """Base class of the transforms, also of your own: `apply` changes values in place.

    >>> class Root(zl.transforms.Transform):
    ...     makes_fractions = True
    ...
    ...     def apply(self, x):
    ...         np.sqrt(x.values, out=x.values)
    >>> loader = zl.Loader(dataset, transforms=[Root()], layout="dense", shuffle=False)
    >>> counts = zl.Loader(dataset, layout="dense", shuffle=False)
    >>> next(iter(loader)).x.allclose(next(iter(counts)).x.sqrt())
    True

    The attributes say which transforms, layouts and dtypes it can be combined with. A subclass sets those that differ
    as class attributes or properties. Wrong ones give wrong values, so compare a dense and a CSR layout, of all
    genes and of a panel.

    - `whole_rows`: it looks at other values of the row, so that it must see all genes, also those that a panel lacks.
    - `row_totals`: of the genes that x lacks it needs only `x.totals`.
    - `by_gene`: it has a value for each column of x.
    - `needs_counts`: it takes whole numbers of at least 0 only.
    - `makes_fractions`: whole numbers may become fractions.
    - `makes_zeros`: another value may become zero, which CSR then leaves out.
    - `fills_zeros`: a zero may become another value, which CSR cannot hold. True, or a text that says how to avoid it,
      such as "let the range contain 0".
    """

    whole_rows: ClassVar[bool] = False
    row_totals: ClassVar[bool] = False
    by_gene: ClassVar[bool] = False
    needs_counts: ClassVar[bool] = False

    @property
    def makes_fractions(self) -> bool:
        """Whether whole numbers may become fractions."""
        return False

    @property
    def makes_zeros(self) -> bool:
        """Whether another value may become zero."""
        return False

    @property
    def fills_zeros(self) -> str | bool:
        """Whether, or how to avoid that, zeros become other values."""
        return False

    def __repr__(self) -> str:  # for errors; a dataclass has its own
        return f"{type(self).__name__}(...)"

    def bound(self, columns: Columns) -> Transform:
        """The transform for these columns. Raises OptionError if it has values for other genes."""
        return self

    def require_dtype(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - most transforms fit every dtype
        """Raises OptionError if x of this dtype cannot hold the result."""

    @abstractmethod
    def apply(self, x: RowValues) -> None:
        """Changes `x.values` in place. Raises RefusedValue. Several threads may call it at once."""


Transforms: TypeAlias = Sequence[Transform] | Mapping[str, Sequence[Transform]]


def transforms_of(transforms: Transforms, matrices: Sequence[str]) -> dict[str, tuple[Transform, ...]]:
    """The transforms of each matrix, from a list for all of them or a mapping. Matrices without any are left out.

    Raises OptionError for anything but transforms, for unknown matrices, and without a matrix.
    """
    if not isinstance(transforms, Mapping):
        listed = _listed(transforms)
        if listed and not matrices:
            raise OptionError("transforms need an x, but x is None: name a matrix, such as x='X'")
        return dict.fromkeys(matrices, listed) if listed else {}
    for name in transforms:
        if name not in matrices:
            raise OptionError(
                f"transforms has a list for {name!r:.100}, but the loader's matrices are: "
                f"{', '.join(map(repr, matrices)) or 'none'}{suggestion(name, matrices)}"
            )
    of_matrices = {name: _listed(of_matrix) for name, of_matrix in transforms.items()}
    return {name: of_matrix for name, of_matrix in of_matrices.items() if of_matrix}


def _listed(transforms: Any) -> tuple[Transform, ...]:
    if isinstance(transforms, Transform):
        raise OptionError(f"transforms must be a list: write transforms=[{transforms!r}]")
    if isinstance(transforms, str | bytes) or not isinstance(transforms, Iterable):
        raise OptionError(f"transforms must be a list such as [zl.transforms.LogNormalize(1e4)], not {transforms!r}")
    found = tuple(transforms)
    for transform in found:
        if not isinstance(transform, Transform):
            raise OptionError(_refusal(transform))
    return found


def _refusal(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Transform):
        return f"transforms holds the class {given.__name__}: make a transform of it, as in {given.__name__}(...)"
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    refusal = f"transforms must hold objects of zl.transforms, such as LogNormalize(1e4), not {given!r:.100}"
    if callable(given):
        refusal += ". Pass a function of your own as batch_transform"
    return refusal + suggestion(name, [kind.__name__ for kind in _kinds(Transform)])


def _kinds(of: type[Any]) -> Iterator[type[Any]]:
    """The classes of transforms: those of this package, which imports them all, and those of the user."""
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


def bound_transforms(
    transforms: Sequence[Transform], columns: Columns, *, dense: bool, dtype: str, chosen: bool
) -> tuple[Transform, ...]:
    """The transforms for these columns of x, which may be `chosen` among the genes.

    `dtype` is that in which the transforms compute.

    Raises OptionError if they cannot be combined with each other, the layout, the dtype or the genes.
    """
    for transform in transforms:
        transform.require_dtype(np.dtype(dtype))
        if transform.makes_fractions and np.dtype(dtype).kind != "f":
            raise OptionError(
                f"{transform} makes fractions, which {dtype} cannot hold: choose a dtype of floats, such as 'float32'"
            )
        if transform.fills_zeros and not dense:
            raise OptionError(
                f"{transform} makes other values of zeros, which only layout='dense' can hold: give a Loader that "
                "layout" + (f", or {transform.fills_zeros}" if isinstance(transform.fills_zeros, str) else "")
            )
    for first, second in combinations(transforms, 2):
        if first.makes_fractions and second.needs_counts:
            raise OptionError(f"{second} needs counts, but {first} makes fractions of them: list {second} first")
    for number, transform in enumerate(transforms):
        later = [each for each in transforms[number:] if each.whole_rows]
        if chosen and transform.by_gene and later:
            raise OptionError(
                f"{later[0]} looks at all genes of a row, but {transform} before it has numbers for the chosen genes "
                f"only: list {later[0]} first"
            )
    bound = tuple(transform.bound(columns) for transform in transforms)
    for transform, given in zip(transforms, bound, strict=True):
        if not isinstance(given, Transform):
            raise OptionError(f"bound of {transform} must return the transform for these columns, not {given!r:.100}")
    return bound
