"""The user's own functions of minibatches, which run in the threads that gather them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from zloader.common.errors import OptionError
from zloader.common.loaded import is_array, is_sparse, is_tensor
from zloader.common.messages import listed
from zloader.common.records import MinibatchArrays, Rows
from zloader.reading.forms import called
from zloader.reading.recipe import Cutting
from zloader.training.minibatch import Minibatch

Convert = Callable[[MinibatchArrays, Sequence[int]], Sequence[Minibatch]]  # the minibatches between cuts of arrays
_DEPTH = 4  # of containers in which bytes are counted


def one_of(convert: Convert, arrays: MinibatchArrays) -> Minibatch:
    """The only minibatch of arrays."""
    (minibatch,) = convert(arrays, (0, len(arrays.index)))
    return minibatch


@dataclass(kw_only=True)  # not frozen, which would take three times as long
class Made:
    """The loader's item for a minibatch of the rows `index`, and about how many bytes it takes; or an error instead.

    Errors travel as items, past the event loop, which would handle a KeyboardInterrupt or a StopIteration itself.
    """

    value: Any
    index: Rows
    nbytes: int
    error: BaseException | None = None

    def yielded(self) -> Any:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, kw_only=True)
class OwnTransforms:
    """A function of several minibatches at once, and one of each minibatch; None for none.

    It makes these minibatches, too, in the threads that gather.
    Raises OptionError for anything but functions.
    """

    fetch: Callable[[Minibatch], Minibatch] | None
    batch: Callable[[Minibatch], Any] | None

    def __post_init__(self) -> None:
        for name, function in (("fetch_transform", self.fetch), ("batch_transform", self.batch)):
            if function is not None and not callable(function):
                raise OptionError(
                    f"{name} must be a function of a Minibatch, not {function!r:.100}: objects of zl.transforms go "
                    "into the list transforms=[...]"
                )
            if isinstance(function, type):
                raise OptionError(f"{name} must be a function of a Minibatch, not the class {function.__name__}")

    def __bool__(self) -> bool:
        return self.fetch is not None or self.batch is not None

    def cutting(self, converter: Callable[[], Convert]) -> Cutting:
        """How a recipe cuts minibatches. A fetch_transform gets the same minibatches at once in every run."""
        return Cutting(cut=functools.partial(self.cut, converter()), grows=bool(self), regroups=self.fetch is None)

    def cut(self, convert: Convert, together: MinibatchArrays, cuts: Sequence[int]) -> list[Made]:
        """The minibatches between cuts, transformed. The last one has the error, if there is one."""
        made: list[Made] = []
        try:
            made.extend(self._each(convert, together, cuts))
        except BaseException as error:  # noqa: BLE001 - raised again by the consumer
            made.append(Made(value=None, index=together.index[:0], nbytes=0, error=error))
        return made

    def _each(self, convert: Convert, together: MinibatchArrays, cuts: Sequence[int]) -> Iterator[Made]:
        share = together.nbytes // max(1, len(together.index))  # bytes per row
        index = together.index.copy() if self else together.index  # a function may write to that of its minibatch
        minibatches: Iterable[Minibatch]
        if self.fetch is None:
            minibatches = convert(together, cuts)
        else:
            of_all = one_of(convert, together)
            of_all = _checked(self.fetch, _called("fetch_transform", self.fetch, of_all, index), index)
            minibatches = (_rows_of(of_all, first, last) for first, last in pairwise(cuts))
        for minibatch, (first, last) in zip(minibatches, pairwise(cuts), strict=True):
            yield self._made(minibatch, index[first:last], share * (last - first))

    def _made(self, minibatch: Minibatch, index: Rows, n_bytes: int) -> Made:
        made: Any = minibatch
        if self.batch is not None:
            made = _called("batch_transform", self.batch, made, index)
        if self or minibatch.tokens is not None:  # they are padded by now
            n_bytes = max(n_bytes, _bytes_of(made))
        return Made(value=made, index=index, nbytes=n_bytes)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def _called(option: str, function: Callable[[Minibatch], Any], minibatch: Minibatch, index: Rows) -> Any:
    return called(f"{option} {_name(function)}", function, minibatch, index)


def _checked(function: Callable[[Minibatch], Any], made: Any, index: Rows) -> Minibatch:
    """The result of a fetch_transform. Raises OptionError unless it has the same rows in the same order."""
    what = f"fetch_transform {_name(function)}"
    rows = f"{len(index)} rows of the dataset: {listed(index)}"
    if not isinstance(made, Minibatch):
        raise OptionError(f"{what} must return a zl.Minibatch, not {type(made).__name__}, for {rows}")
    if not np.array_equal(np.asarray(made.index.cpu() if is_tensor(made.index) else made.index), index):
        raise OptionError(
            f"{what} changed the number or the order of the rows, which fetch_transform must not do, for {rows}. "
            "Change them in batch_transform, whose result the loader yields as it is"
        )
    arrays = {"row": made.row, "obs_names": made.obs_names, **made.obs, **made.obsm}
    arrays |= made.x if isinstance(made.x, dict) else {"x": made.x}
    for name, array in arrays.items():
        shape = getattr(array, "shape", None)
        if array is not None and (not shape or shape[0] != len(index)):
            raise OptionError(f"{what} returned {name} of shape {shape and tuple(shape)} for {rows}")
    return made


def _rows_of(minibatch: Minibatch, first: int, last: int) -> Minibatch:
    """The rows `[first, last)` of a minibatch, which share its memory where their kind allows it."""
    parts = {each.name: _cut(getattr(minibatch, each.name), first, last) for each in fields(minibatch)}
    return replace(minibatch, **parts)


def _cut(rows: Any, first: int, last: int) -> Any:
    if rows is None:
        return None
    if isinstance(rows, dict):
        return {name: _cut(each, first, last) for name, each in rows.items()}
    if not is_sparse(rows):
        cut = rows[first:last]
        return cut.copy() if getattr(cut, "is_view", False) is True else cut  # an AnnData of its own
    import torch

    starts = rows.crow_indices()[first : last + 1]
    begin, end = int(starts[0]), int(starts[-1])
    return torch.sparse_csr_tensor(
        starts - begin,
        rows.col_indices()[begin:end],
        rows.values()[begin:end],
        size=(last - first, rows.shape[1]),
        check_invariants=False,  # they are those of `rows`
    )


def _bytes_of(made: Any, depth: int = _DEPTH) -> int:
    """Bytes of the tensors and arrays in an object, as far as they can be found."""
    if is_sparse(made):
        return sum(part.nbytes for part in (made.crow_indices(), made.col_indices(), made.values()))
    if is_array(made):
        return 0 if is_tensor(made) and str(made.layout) != "torch.strided" else int(made.nbytes)
    if not depth or isinstance(made, str | bytes):
        return 0
    if is_dataclass(made):
        return sum(_bytes_of(getattr(made, each.name), depth - 1) for each in fields(made))
    if isinstance(made, Mapping):
        return sum(_bytes_of(each, depth - 1) for each in made.values())
    if isinstance(made, list | tuple):
        return sum(_bytes_of(each, depth - 1) for each in made)
    parts = [getattr(made, name, None) for name in ("data", "indices", "indptr")]  # of a SciPy matrix
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
