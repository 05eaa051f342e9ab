"""The content of a store in shuffled order: the interface of Content, with permuted rows."""

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

SOURCE_ROW = "source_row"  # the obs column with the original row number of each row


class ShuffledContent:
    """A Content with its rows permuted pseudo-randomly by `seed`.

    Raises OptionError if obs already has a column `source_row`.
    """

    def __init__(self, content: Content, seed: int, *, bucket_bytes: int) -> None:
        """`bucket_bytes` bounds the memory for sorting rows."""
        if SOURCE_ROW in content.obs_columns:
            raise OptionError(
                f"obs already has a column {SOURCE_ROW!r}: choose other columns with "
                "select=zl.Selection(obs=[...]) (--obs)"
            )
        self._content, self._key, self._bucket_bytes = content, key_of(seed), bucket_bytes
        self.n_rows, self.var, self.raw_var, self.dropped = (
            content.n_rows,
            content.var,
            content.raw_var,
            content.dropped,
        )
        self.obs_columns = [*content.obs_columns, SOURCE_ROW]

    def _positions(self, rows: Rows) -> Rows:
        """The new positions of source rows."""
        return permute(rows, self.n_rows, self._key)

    @cached_property
    def _order(self) -> Rows:
        """The source row of each row, in the new order."""
        rows = np.arange(self.n_rows, dtype=np.int64)
        order = np.empty_like(rows)
        order[self._positions(rows)] = rows
        return order

    def obs_names(self) -> pd.Index:
        """The obs names in the new order."""
        return self._content.obs_names()[self._order]

    def obs_column(self, name: str) -> pd.Series:
        """An obs column in the new order, or `source_row`."""
        if name == SOURCE_ROW:
            return pd.Series(self._order)
        return self._content.obs_column(name).iloc[self._order]

    def matrices(self, window_bytes: int) -> Iterator[SourceMatrix]:
        """The matrices of `Content.matrices`, each shuffled out of core."""
        for matrix in self._content.matrices(window_bytes):
            square = matrix.name.startswith("obsp/")
            yield ShuffledMatrix(matrix, self._positions, window_bytes=self._bucket_bytes, columns=square)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """The elements of `Content.elements`. Those of obsm and obsp are in the new order."""
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
    """The content in the order to store it in: shuffled if `shuffle_seed` is given."""
    return content if shuffle_seed is None else ShuffledContent(content, shuffle_seed, bucket_bytes=bucket_bytes)
