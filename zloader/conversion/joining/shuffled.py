"""What goes into a store, in shuffled order: the same interface as Content, every row elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.conversion.joining.content import Content
from zloader.conversion.sources.shuffle import ShuffledMatrix
from zloader.conversion.sources.windows import SourceMatrix
from zloader.order.permutation import key_of, permute

SOURCE_ROW = "source_row"  # the obs column that says where each row was


class ShuffledContent:
    """A Content with its rows in an order that `seed` decides: every order is as likely as any other.

    Raises OptionError when obs has a column `source_row` already.
    """

    def __init__(self, content: Content, seed: int, *, bucket_bytes: int) -> None:
        """`bucket_bytes` bounds the rows that are held to be sorted."""
        if SOURCE_ROW in content.obs_columns:
            raise OptionError(f"obs has a column {SOURCE_ROW!r} already: choose columns with obs=[...] (--obs)")
        self._content, self._key, self._bucket_bytes = content, key_of(seed), bucket_bytes
        self.n_rows, self.var, self.raw_var, self.dropped = (
            content.n_rows,
            content.var,
            content.raw_var,
            content.dropped,
        )
        self.obs_columns = [*content.obs_columns, SOURCE_ROW]

    def _places(self, rows: Rows) -> Rows:
        return permute(rows, self.n_rows, self._key)

    @cached_property
    def _order(self) -> Rows:
        """The source row of every row."""
        rows = np.arange(self.n_rows, dtype=np.int64)
        order = np.empty_like(rows)
        order[self._places(rows)] = rows
        return order

    def obs_names(self) -> pd.Index:
        """The obs names in the new order."""
        return self._content.obs_names()[self._order]

    def obs_column(self, name: str) -> pd.Series:
        """An obs column in the new order, or the one that says where each row was."""
        if name == SOURCE_ROW:
            return pd.Series(self._order)
        return self._content.obs_column(name).iloc[self._order]

    def matrices(self, window_bytes: int) -> Iterator[SourceMatrix]:
        """The matrices of `Content.matrices`, shuffled out of core."""
        for matrix in self._content.matrices(window_bytes):
            square = matrix.name.startswith("obsp/")
            yield ShuffledMatrix(matrix, self._places, window_bytes=self._bucket_bytes, columns=square)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """The elements of `Content.elements`, in the new order where they go by rows."""
        for path, element in self._content.elements():
            if path.startswith(("obsm/", "obsp/")):
                yield path, self._reordered(element, columns=path.startswith("obsp/"))
            else:
                yield path, element

    def _reordered(self, element: Any, *, columns: bool) -> Any:
        if isinstance(element, pd.DataFrame):
            return element.iloc[self._order]
        rows = element.tocsr()[self._order] if scipy.sparse.issparse(element) else element[self._order]
        return rows[:, self._order] if columns else rows


def arranged(content: Content, shuffle_seed: int | None, *, bucket_bytes: int) -> Content | ShuffledContent:
    """The content in the order in which it is stored."""
    return content if shuffle_seed is None else ShuffledContent(content, shuffle_seed, bucket_bytes=bucket_bytes)
