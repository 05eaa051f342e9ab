"""What is stored with its rows in another order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.conversion.port import Content, Matrix
from zloader.conversion.reorder import Permutation, ShuffledMatrix

SOURCE_ROW = "source_row"  # the obs column with the original row number of each row


class ArrangedContent(Content):
    """A Content with its rows in another order. Raises OptionError if obs already has a column `source_row`."""

    def __init__(self, content: Content, positions: Permutation, *, bucket_bytes: int) -> None:
        """`positions` gives the new positions of source rows. `bucket_bytes` bounds the memory for sorting rows."""
        if SOURCE_ROW in content.obs_columns:
            raise OptionError(
                f"obs already has a column {SOURCE_ROW!r}: choose other columns with "
                "select=zl.Selection(obs=[...]) (--obs)"
            )
        self._content, self._positions, self._bucket_bytes = content, positions, bucket_bytes
        self.n_rows, self.var, self.raw_var = content.n_rows, content.var, content.raw_var
        self.dropped, self.groups = content.dropped, content.groups
        self.obs_columns = [*content.obs_columns, SOURCE_ROW]

    @cached_property
    def order(self) -> Rows:
        """The source row of each row, in the new order."""
        rows = np.arange(self.n_rows, dtype=np.int64)
        order = np.empty_like(rows)
        order[self._positions(rows)] = rows
        return order

    def obs_names(self) -> pd.Index:
        return self._content.obs_names()[self.order]

    def obs_column(self, name: str) -> pd.Series:
        if name == SOURCE_ROW:
            return pd.Series(self.order)
        return self._content.obs_column(name).iloc[self.order].reset_index(drop=True)

    def matrices(self) -> Iterator[Matrix]:
        """Each is rearranged out of core."""
        for matrix in self._content.matrices():
            square = matrix.name.startswith("obsp/")
            yield ShuffledMatrix(matrix, self._positions, window_bytes=self._bucket_bytes, columns=square)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """Those by row are in the new order, and so are the rows of modalities."""
        for path, element in self._content.elements():
            if path.startswith(("obsm/", "obsp/")):
                rows = element.tocsr() if scipy.sparse.issparse(element) else element
                element = rows.iloc[self.order] if isinstance(rows, pd.DataFrame) else rows[self.order]
                if path.startswith("obsp/"):
                    element = element[:, self.order]
            elif path.startswith("obsmap/"):
                has = np.asarray(element).reshape(-1)[self.order] > 0
                element = np.where(has, np.cumsum(has), 0).astype(element.dtype)
            yield path, element
