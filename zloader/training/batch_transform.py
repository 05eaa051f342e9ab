"""The user's own function of minibatches, which runs in the threads that gather them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from zloader.common.errors import OptionError
from zloader.common.messages import listed
from zloader.common.records import MinibatchArrays, Rows
from zloader.training.arrays import is_sparse, is_tensor
from zloader.training.minibatch import Minibatch

BatchTransform = Callable[[Minibatch], Any]
Convert = Callable[[MinibatchArrays, Sequence[int]], Sequence[Minibatch]]  # the minibatches between cuts of arrays
_DEPTH = 4  # of containers in which bytes are counted


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


def require_function(batch_transform: Any) -> None:
    """Raises OptionError for anything but a function, or None."""
    if batch_transform is not None and (not callable(batch_transform) or isinstance(batch_transform, type)):
        raise OptionError(
            f"batch_transform must be a function of a Minibatch, not {batch_transform!r:.100}: objects of "
            "zl.transforms go into the list transforms=[...]"
        )


def made(
    convert: Convert, function: BatchTransform | None, together: MinibatchArrays, cuts: Sequence[int]
) -> list[Made]:
    """The minibatches between cuts, each as the function returns it. The last one has the error, if there is one."""
    items: list[Made] = []
    try:
        items.extend(_each(convert, function, together, cuts))
    except BaseException as error:  # noqa: BLE001 - raised again by the consumer
        items.append(Made(value=None, index=together.index[:0], nbytes=0, error=error))
    return items


def _each(
    convert: Convert, function: BatchTransform | None, together: MinibatchArrays, cuts: Sequence[int]
) -> Iterator[Made]:
    share = together.nbytes // max(1, len(together.index))  # bytes per row
    index = together.index if function is None else together.index.copy()  # the function may write to its minibatch's
    for minibatch, (first, last) in zip(convert(together, cuts), pairwise(cuts), strict=True):
        value, rows, n_bytes = minibatch, index[first:last], share * (last - first)
        if function is not None:
            value = _called(function, minibatch, rows)
        if function is not None or minibatch.tokens is not None:  # they are padded by now
            n_bytes = max(n_bytes, _bytes_of(value))
        yield Made(value=value, index=rows, nbytes=n_bytes)


def _called(function: BatchTransform, minibatch: Minibatch, rows: Rows) -> Any:
    """What the function returns. Its errors are raised with a note of its name and the rows."""
    try:
        return function(minibatch)
    except Exception as error:
        named: Any = function
        while isinstance(named, functools.partial):
            named = named.func
        name = getattr(named, "__qualname__", type(named).__qualname__)
        note = f"raised by batch_transform {name} for {len(rows)} rows of the dataset: {listed(rows)}"
        error.add_note(note)
        if isinstance(error, StopIteration | StopAsyncIteration):  # it would end the epoch as if it were complete
            raise RuntimeError(f"{error!r} {note}") from error
        raise


def _bytes_of(value: Any, depth: int = _DEPTH) -> int:
    """Bytes of the tensors and arrays in an object, as far as they can be found."""
    if is_sparse(value):
        value = value.crow_indices(), value.col_indices(), value.values()
    if isinstance(value, np.ndarray) or (is_tensor(value) and str(value.layout) == "torch.strided"):
        return int(value.nbytes)
    if not depth:
        return 0
    parts: Any = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif is_dataclass(value) or "scipy" in type(value).__module__:
        parts = vars(value).values()
    return sum(_bytes_of(each, depth - 1) for each in parts)
