"""The transforms of a Loader as it lists them: checked, and bound to the columns of each matrix. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.transforms.transform import Columns, Transform

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
        refusal += ". Pass a function of your own as fetch_transform or batch_transform"
    from zloader import transforms  # which imports all of them, and the Loader this module

    public = [each for each in transforms.__all__ if issubclass(getattr(transforms, each), Transform)]
    return refusal + suggestion(name, public)


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
    return tuple(_bound(transform, columns) for transform in transforms)


def _bound(transform: Transform, columns: Columns) -> Transform:
    bound: Any = transform.bound(columns)
    if not isinstance(bound, Transform):
        raise OptionError(f"bound of {transform} must return the transform for these columns, not {bound!r:.100}")
    return bound
