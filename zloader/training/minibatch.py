"""A minibatch: a dict of the arrays that the training loop receives; made in groups, and by a function of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import listed, printable, suggestion
from zloader.common.records import MinibatchArrays, Rows
from zloader.training.arrays import NumPy, PackedRows, is_sparse, is_tensor

if TYPE_CHECKING:
    import torch

Cuts = Sequence[int]
_DEPTH = 4  # of containers in which bytes are counted


class ByName(dict[str, Any]):
    """Tensors of obs columns, obsm arrays or tokens. A name that was not loaded raises MissingColumnError."""

    def __missing__(self, name: Any) -> NoReturn:
        raise MissingColumnError(self._lacking(name))

    def _lacking(self, name: Any) -> str:
        known = list(map(str, self))
        return (
            f"the minibatch has no {name!r} here, only: {listed(known)}{suggestion(name, known) or '.'} A Loader loads "
            "minibatch.obs[...] and minibatch.obsm[...] as its options obs=[...] and obsm=[...] say."
        )


class Minibatch(ByName):
    """The rows of one training step, as tensors, or as the arrays of the loader's `framework`.

    It is a dict whose entries are attributes, too: `minibatch["x"]` is `minibatch.x`, and `model(**minibatch)` gets
    them by name. An entry that the loader was not asked for is missing, and None as an attribute. All entries have the
    same row order, and `len()` is the number of rows.

    >>> import zloader as zl
    >>> minibatch = next(iter(zl.Loader(zl.open_dataset("cells.zarr"), batch_size=8, obs=["cell_type"])))
    >>> len(minibatch), minibatch.x.shape[0], minibatch.obs["cell_type"].dtype
    (8, 8, torch.int64)
    >>> list(minibatch)
    ['row', 'index', 'x', 'obs', 'obsm']

    Attributes:
        x: rows x genes, as the loader's `layout` says: a torch sparse CSR tensor (with int32 indices), a dense tensor,
            a PackedRows, or a SciPy CSR matrix. NumPy has PackedRows for the first and third. If the loader has a list
            of matrices, a dict with one such x for each name.
        obs: a tensor of one value per row for each column. Categories and strings are int64 codes, -1 where a value is
            missing; numbers have their stored dtype; dates are int64. `loader.labels` says what they mean.
        obsm: a tensor of rows x dims for each name, in its stored dtype.
        row: the position of each row in the dataset or view that the loader was given, int64. For predictions of a
            view: `out = np.empty(view.n_obs)`, then `out[minibatch.row] = ...` for each minibatch.
        index: the row numbers in the whole dataset, int64. They equal `row` unless the loader was given a view.
        tokens: if the loader has a tokenizer, a dict of tensors of rows x places: `input_ids` (int64 or int32, padded
            with the tokenizer's pad id), `values` (float32) and `attention_mask` (bool, False at padding); and
            `lengths`, the number of tokens of each row, int64.
        present: for each modality of x and obsm, which rows it has (bool), if the dataset has modalities. Rows that a
            modality lacks are zeros in x and obsm.
        control: the control rows, a Minibatch of its own, if the loader has `controls`.
        neighbors: the neighbours of the rows, a Minibatch of its own, if the loader has `neighbors`.
        neighbor_weights: the weights of the neighbours, rows x k, float32; 0 where a row has fewer.
        set_of_row: the number of each row's set in the minibatch, int64, if the sampling is CellSets.
        group: the labels of each set for each column that sets agree in, NumPy arrays, if the sampling is CellSets.
    """

    if TYPE_CHECKING:
        x: Any
        obs: dict[str, torch.Tensor]
        obsm: dict[str, torch.Tensor]
        row: torch.Tensor
        index: torch.Tensor
        tokens: dict[str, torch.Tensor] | None
        present: dict[str, torch.Tensor] | None
        control: Minibatch | None
        neighbors: Minibatch | None
        neighbor_weights: torch.Tensor | None
        set_of_row: torch.Tensor | None
        group: dict[str, NDArray[Any]] | None
    else:

        def __getattr__(self, name: str) -> Any:
            if name in self:
                return self[name]
            raise AttributeError(self._lacking(name), name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            self[name] = value

    __eq__ = object.__eq__  # like a tensor, which may be a key; equality of dicts would compare tensors
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.get("index", ()))

    def __repr__(self) -> str:
        """The number of rows, then a line for each entry: its dtype and shape, or its names."""
        lines = (f"    {name}: {_shown(value)}" for name, value in self.items())
        return "\n".join([f"Minibatch of {len(self)} rows", *lines])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Minibatch:
        """A copy on the device. x must be a tensor, a PackedRows or None."""
        self._require_tensors()
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Minibatch:
        """A copy in page-locked memory, as DataLoader needs it. x must be a tensor, a PackedRows or None."""
        self._require_tensors()
        return self.each(_pinned)

    def _require_tensors(self) -> None:
        if not is_tensor(self["index"]):
            raise OptionError(
                f"a minibatch of {type(self['index']).__name__} has no tensors to move: load with framework='torch'"
            )

    def each(self, function: Callable[[Any], Any]) -> Minibatch:
        """The minibatch with a function applied to each of its tensors and PackedRows; once if two entries share it."""
        done: dict[int, Any] = {}

        def of(value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((name, of(part)) for name, part in value.items())
            if not (is_tensor(value) or isinstance(value, PackedRows)):
                return value
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]

        found: Minibatch = of(self)
        return found


def _entry(name: str) -> property:
    """An entry as a property, because __getattr__ takes several times as long. torch.compile takes no methodcaller."""
    return property(lambda minibatch: minibatch.get(name))


for _name in (
    *("row", "index", "x", "obs", "obsm", "tokens", "present", "control", "neighbors", "neighbor_weights"),
    *("set_of_row", "group"),
):
    setattr(Minibatch, _name, _entry(_name))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return printable(", ".join(map(str, value)))
    if isinstance(value, PackedRows) or not hasattr(value, "dtype"):
        return repr(value)
    return f"{value.dtype} {'x'.join(map(str, value.shape))}"


def minibatches_of(
    framework: NumPy, layout: str, x: str | Sequence[str] | None, arrays: MinibatchArrays, positions: Rows, cuts: Cuts
) -> list[Minibatch]:
    """The minibatches between successive cuts of arrays, with `x` as a Loader takes it. `positions` are their `row`.

    Each kind of array is cut at once: 8 minibatches of 64 rows take half the time of one after another, which is
    time under Python's lock. Row numbers come first, because accelerate takes the batch size from the first entry.
    """
    index = framework.arrays(arrays.index, cuts)
    made: dict[str, Sequence[Any]] = {
        "row": index if positions is arrays.index else framework.arrays(positions, cuts),
        "index": index,
    }
    if x is not None:
        of = {name: framework.x(layout, matrix, cuts) for name, matrix in arrays.x.items()}
        made["x"] = (
            of[x]
            if isinstance(x, str)
            else [{name: pieces[number] for name, pieces in of.items()} for number in range(len(cuts) - 1)]
        )
    made["obs"] = _by_name(framework, arrays.obs, cuts)
    made["obsm"] = _by_name(framework, arrays.obsm, cuts)
    if arrays.tokens is not None:
        tokens = (vars(arrays.tokens.cut(first, last)).items() for first, last in pairwise(cuts))
        made["tokens"] = [ByName((name, framework.array(array)) for name, array in each) for each in tokens]
    if arrays.present:
        made["present"] = _by_name(framework, arrays.present, cuts)
    return [Minibatch(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


def _by_name(framework: NumPy, arrays: Mapping[str, NDArray[Any]], cuts: Cuts) -> list[ByName]:
    made = [ByName() for _ in cuts[1:]]
    for name, values in arrays.items():
        for minibatch, array in zip(made, framework.arrays(values, cuts), strict=True):
            minibatch[name] = array
    return made


def _pinned(tensor: Any) -> Any:
    if not is_sparse(tensor):
        return tensor.pin_memory()
    import torch

    return torch.sparse_csr_tensor(  # of parts, because torch before 2.5 does not pin them as one
        tensor.crow_indices().pin_memory(),
        tensor.col_indices().pin_memory(),
        tensor.values().pin_memory(),
        size=tensor.shape,
        check_invariants=False,
    )


# ---- items of an epoch: minibatches that the threads made which gather, and what the user's function made of them


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


BatchTransform = Callable[[Minibatch], Any]
Convert = Callable[[MinibatchArrays, Cuts], Sequence[Minibatch]]  # the minibatches between cuts of arrays


def made(convert: Convert, function: BatchTransform | None, together: MinibatchArrays, cuts: Cuts) -> list[Made]:
    """The minibatches between cuts, each as the function returns it. The last one has the error, if there is one."""
    items: list[Made] = []
    try:
        items.extend(_each(convert, function, together, cuts))
    except BaseException as error:  # noqa: BLE001 - raised again by the consumer
        items.append(Made(value=None, index=together.index[:0], nbytes=0, error=error))
    return items


def _each(convert: Convert, function: BatchTransform | None, together: MinibatchArrays, cuts: Cuts) -> Iterator[Made]:
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
