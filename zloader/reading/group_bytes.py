"""Bytes of the minibatches that will be made of a fetch. Pure.

They are summed up over the rows of a fetch once, so that a group of minibatches costs two look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from zloader.common.records import Rows
from zloader.order.plan import Fetch
from zloader.reading.forms import Transforming
from zloader.reading.gather import indptr_of
from zloader.reading.matrix_rows import PlannedRows
from zloader.reading.recipe import Recipe


class GroupBytes:
    """Bytes of x and of the tokens in the minibatches between cuts of a fetch, or an upper bound."""

    def __init__(self, recipe: Recipe, fetch: Fetch, x: Sequence[PlannedRows]) -> None:
        self._tokens = recipe.tokens
        # The bytes before each row in the order of the minibatches, and the transforms that will take more.
        self._gathered: list[tuple[Rows, Transforming | None]] = []
        for name, rows in zip(recipe.x, x, strict=True):
            if recipe.is_wanted(name):
                transforming = recipe.transforms.get(name)
                form = recipe.form if transforming is None else transforming.gathering
                self._gathered.append((indptr_of(rows.row_bytes(form)[fetch.order]), transforming))
            if recipe.tokens is not None and recipe.tokens.options.x == name:
                self._gathered.append((indptr_of(rows.row_bytes(rows.exact)[fetch.order]), None))
                self._lengths = rows.lengths[fetch.order]

    def __call__(self, cuts: Rows) -> int:
        """Those of the minibatches between the first and the last cut."""
        first, last = int(cuts[0]), int(cuts[-1])
        n_bytes = 0
        for before, transforming in self._gathered:
            gathered = int(before[last] - before[first])
            n_bytes += gathered + (0 if transforming is None else transforming.more_bytes(last - first, gathered))
        return n_bytes + (0 if self._tokens is None else self._tokens.n_bytes(self._lengths[first:last]))
