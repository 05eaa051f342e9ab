"""A minibatch as arrays of a framework, as the training loop receives it."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABCMeta
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import name_of_dtype
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.messages import listed, printable, suggestion
from zloader.common.records import MinibatchArrays, Rows
from zloader.training.frameworks import NumPy
from zloader.training.tokens import Tokens

DTYPES = ("float32", "float64", "int32", "int64")

if TYPE_CHECKING:
    import torch

Cuts = Sequence[int]


class ByName(dict[str, Any]):
    """Tensors of obs columns or obsm arrays. A name that was not loaded raises MissingColumnError."""

    def __missing__(self, name: Any) -> NoReturn:
        raise MissingColumnError(
            f"the minibatch has no {name!r}, only: {listed(self)}{suggestion(name, self) or '.'} A Loader loads the "
            "obs columns and obsm arrays that its options obs=[...] and obsm=[...] name."
        )


class _FromParts(ABCMeta):
    """Makes `Minibatch({...})` the same as `Minibatch(**{...})`, because libraries rebuild a Mapping in this way."""

    def __call__(cls, *parts: Mapping[str, Any], **named: Any) -> Any:
        return super().__call__(**dict(*parts, **named))


# Not frozen, because Lightning's precisions such as bf16-true put converted tensors into a copy.
@dataclass(kw_only=True, eq=False, repr=False)
class Minibatch(Mapping[str, Any], metaclass=_FromParts):
    """The rows of one training step, as tensors, or as the arrays of the loader's `framework`.

    All fields have the same row order, and `len()` is the number of rows.

    >>> import zloader as zl
    >>> minibatch = next(iter(zl.Loader(zl.open_dataset("cells.zarr"), batch_size=8, obs=["cell_type"])))
    >>> len(minibatch), minibatch.x.shape[0], minibatch.obs["cell_type"].dtype
    (8, 8, torch.int64)

    Attributes:
        x: rows x genes, as the loader's `layout` says: a torch sparse CSR tensor (with int32 indices), a dense tensor,
            a PackedRows, or a SciPy CSR matrix; None if the loader has no x. NumPy has CsrRows for the first and third.
            If the loader has a list of matrices, a dict with one such x for each name.
        obs: a tensor of one value per row for each column. Categories and strings are int64 codes, -1 where a value is
            missing; numbers have their stored dtype; dates are int64. `loader.labels` says what they mean.
        obsm: a tensor of rows x dims for each name, in its stored dtype.
        row: the position of each row in the dataset or view that the loader was given, int64. For predictions of a
            view: `out = np.empty(view.n_obs)`, then `out[minibatch.row] = ...` for each minibatch.
        index: the row numbers in the whole dataset, int64. They equal `row` unless the loader was given a view.
        tokens: the tokens of the rows, if the loader has a tokenizer: `input_ids`, `values`, `attention_mask`,
            `lengths` and `labels`; else None.
        present: for each modality of x and obsm, which rows it has (bool), if the dataset has modalities; else None.
            Rows that a modality lacks are zeros in x and obsm.
        control: the control rows, a Minibatch of its own, if the loader has `controls`; else None.
        neighbors: the neighbours of the rows, a Minibatch of its own, if the loader has `neighbors`; else None.
        neighbor_weights: the weights of the neighbours, rows x k, float32; 0 where a row has fewer.
        set_of_row: the number of each row's set in the minibatch, int64, if the sampling is CellSets; else None.
        group: the labels of each set for each column that sets agree in, NumPy arrays, if the sampling is CellSets.

    A Minibatch is also a read-only Mapping of its fields, as the libraries of Hugging Face need it: `minibatch["x"]`,
    `model(**minibatch)`. Fields that are None are left out. obs columns are no keys of their own:
    `minibatch["obs"]["cell_type"]`. `len()` counts rows even so, and `len(minibatch.keys())` counts the fields. A
    minibatch is equal to itself only, like a tensor that is used as a key.

    >>> list(minibatch)
    ['row', 'index', 'x', 'obs', 'obsm']
    """

    x: Any = None
    obs: dict[str, torch.Tensor]
    obsm: dict[str, torch.Tensor]
    row: torch.Tensor
    index: torch.Tensor
    tokens: Tokens | None = None
    present: dict[str, torch.Tensor] | None = None
    control: Minibatch | None = None
    neighbors: Minibatch | None = None
    neighbor_weights: torch.Tensor | None = None
    set_of_row: torch.Tensor | None = None
    group: dict[str, NDArray[Any]] | None = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def of(cls, given: Iterable[tuple[str, Any]]) -> Minibatch:
        """A minibatch of these fields: a fifth of the time of `Minibatch(...)`. Others have their defaults."""
        made = object.__new__(cls)
        made.__dict__.update(given)
        return made

    def __repr__(self) -> str:
        """The number of rows, then a line for each field: the dtypes and shapes of its tensors."""
        lines = (f"    {name}: {shown}" for name, value in self._parts.items() if (shown := _shown(value)))
        return "\n".join([f"Minibatch of {len(self)} rows", *lines])

    def __len__(self) -> int:
        return len(self.index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)  # raises Python's own error
        known = [field.name for field in dataclasses.fields(self)]
        near = suggestion(name, known)
        raise AttributeError(f"the minibatch has no {name!r}; it has: {listed(known)}{near}", name=name, obj=self)

    @property
    def _parts(self) -> dict[str, Any]:
        """The Mapping. Row numbers come first, because accelerate takes the batch size from the first value."""
        names = ["row", "index", *(field.name for field in dataclasses.fields(self))]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __getitem__(self, name: str) -> Any:
        parts = self._parts
        if name in parts:
            return parts[name]
        for group in ("obs", "obsm"):
            if name in parts[group]:
                raise MissingColumnError(f"{name!r} is a column of {group}: write minibatch.{group}[{name!r}]")
        raise MissingColumnError(f"the minibatch has no {name!r}; it has: {listed(parts)}{suggestion(name, parts)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    # Those of Mapping would have as many entries as the minibatch has rows.

    def keys(self) -> KeysView[str]:
        """The names of the fields that are not None."""
        return self._parts.keys()

    def values(self) -> ValuesView[Any]:
        """The fields that are not None."""
        return self._parts.values()

    def items(self) -> ItemsView[str, Any]:
        """The fields that are not None, with their names."""
        return self._parts.items()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Minibatch:
        """A copy on the device. x must be a tensor, a PackedRows or None."""
        return self._tensors().each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Minibatch:
        """A copy in page-locked memory, as DataLoader needs it. x must be a tensor, a PackedRows or None."""
        return self._tensors().each(_pinned)

    def _tensors(self) -> Minibatch:
        """The minibatch. Raises OptionError unless it has tensors."""
        if is_tensor(self.index):
            return self
        raise OptionError(
            f"a minibatch of {type(self.index).__name__} has no tensors to move: load with framework='torch'"
        )

    def each(self, function: Any) -> Minibatch:
        """The minibatch with a function applied to each tensor, and to x as a whole, which may be a PackedRows."""
        index = function(self.index)
        return dataclasses.replace(
            self,
            x=self._each_x(function),
            obs=ByName((name, function(column)) for name, column in self.obs.items()),
            obsm=ByName((name, function(array)) for name, array in self.obsm.items()),
            row=index if self.row is self.index else function(self.row),
            index=index,
            tokens=None if self.tokens is None else self.tokens.each(function),
            present={each: function(has) for each, has in self.present.items()} if self.present else None,
            control=None if self.control is None else self.control.each(function),
            neighbors=None if self.neighbors is None else self.neighbors.each(function),
            neighbor_weights=None if self.neighbor_weights is None else function(self.neighbor_weights),
            set_of_row=None if self.set_of_row is None else function(self.set_of_row),
        )

    def _each_x(self, function: Any) -> Any:
        if isinstance(self.x, dict):
            return {name: function(x) for name, x in self.x.items()}
        return None if self.x is None else function(self.x)


def _shown(value: Any) -> str:
    """The dtypes and shapes of the tensors in a field of a minibatch, in one line."""
    if isinstance(value, Minibatch):
        return f"a Minibatch of {len(value)} rows"
    if isinstance(value, Tokens):
        value = {name: each for name, each in vars(value).items() if each is not None}
    if isinstance(value, dict):
        return ", ".join(f"{printable(name)} {_shown(each)}" for name, each in value.items())
    if not is_array(value):
        return " ".join(repr(value).split())
    words = [str(value.dtype), "x".join(map(str, value.shape))]
    if is_tensor(value):
        words += [str(value.layout)] if is_sparse(value) else []
        words += [] if value.device.type == "cpu" else [f"on {value.device}"]
    return " ".join(words).replace("torch.", "")


def minibatches_of(
    framework: NumPy, layout: str, x: str | Sequence[str] | None, arrays: MinibatchArrays, positions: Rows, cuts: Cuts
) -> list[Minibatch]:
    """The minibatches between successive cuts of arrays, with `x` as a Loader takes it. `positions` are their `row`.

    Each kind of array is cut at once: 8 minibatches of 64 rows take half the time of one after another, which is
    time under Python's lock.
    """
    index = framework.arrays(arrays.index, cuts)
    made: dict[str, Sequence[Any]] = {
        "obs": _by_name(framework, arrays.obs, cuts),
        "obsm": _by_name(framework, arrays.obsm, cuts),
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
    if arrays.present:
        made["present"] = [dict(each) for each in _by_name(framework, arrays.present, cuts)]
    if arrays.tokens is not None:
        tokens = (arrays.tokens.cut(first, last) for first, last in pairwise(cuts))
        made["tokens"] = [Tokens.of(each, framework.array) for each in tokens]
    return [Minibatch.of(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


def _by_name(framework: NumPy, arrays: Mapping[str, NDArray[Any]], cuts: Cuts) -> list[ByName]:
    made = [ByName() for _ in cuts[1:]]
    for name, values in arrays.items():
        for minibatch, array in zip(made, framework.arrays(values, cuts), strict=True):
            minibatch[name] = array
    return made


def usable_dtype(dtype: Any, layout: str) -> str | None:
    """The name of a dtype; None for the stored dtypes of "packed". Raises OptionError if x cannot have it."""
    if layout == "packed":
        if dtype is not None:
            raise OptionError(
                f"layout='packed' has the stored dtypes: leave dtype={dtype!r:.100} out, and give it to "
                "minibatch.x.csr, dense or padded"
            )
        return None
    if "float16" in str(dtype):
        raise OptionError(
            f"half floats are made on the device: leave dtype={dtype!r:.100} out, and convert x there, as "
            "minibatch.x.to(torch.bfloat16) does (docs/howto/mixed_precision.md)"
        )
    return "float32" if dtype is None else name_of_dtype(DTYPES, dtype=dtype)


def is_tensor(found: Any) -> bool:
    """Whether it is a torch.Tensor. torch is not imported: what is not loaded has made nothing."""
    return isinstance(found, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_sparse(found: Any) -> bool:
    """Whether it is a torch.sparse_csr tensor."""
    return is_tensor(found) and str(found.layout) == "torch.sparse_csr"


def is_array(found: Any) -> bool:
    """Whether it is a tensor, or an array of NumPy."""
    return is_tensor(found) or isinstance(found, np.ndarray)


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
