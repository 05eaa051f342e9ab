"""The mirror of one matrix: its rows, or those of a panel of its genes beside rows with all genes (rows_file.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from zloader.caching.directory import MirrorDirectory, cached_path
from zloader.caching.leases import Leases
from zloader.caching.rows_file import Held, RowsFile
from zloader.storage.layout import MatrixLayout
from zloader.storage.row_blocks import PANEL, RowForm

log = logging.getLogger("zloader")


@dataclass(frozen=True, kw_only=True)
class CacheStatistics(Held):
    """How much of a matrix is in the cache; returned by `Dataset.cache_statistics`.

    Attributes:
        directory: Directory of the mirror.
        chunks, chunks_held: Blocks of rows of the matrix, and how many of them are cached.
        bytes_in_all, bytes_held: Bytes of all blocks, estimated from those that are cached, and bytes of these.
        allocated_bytes: Disk space of all mirrors in the cache, in bytes.
        max_bytes: Limit for `allocated_bytes`; None means no limit.
        full: Whether the cache has stopped accepting blocks.

    >>> for minibatch in zl.Loader(dataset):  # one epoch fills the mirror
    ...     pass
    >>> statistics = dataset.cache_statistics()
    >>> statistics.share, statistics.full
    (1.0, False)
    """

    directory: Path
    allocated_bytes: int
    max_bytes: int | None
    full: bool


def contents_of(files: Sequence[RowsFile]) -> dict[str, Any]:
    """The fields of Held for some matrices together, and whether one of them accepts no more rows."""
    return Held.sums(file.held for file in files) | {"full": not all(file.writable for file in files)}


@dataclass(frozen=True)
class Mirror:
    """The mirror of the rows of one matrix, or of some of its genes.

    Rows with all genes, if there are any beside these, are in `whole`. They are read, but not filled any more.
    """

    directory: MirrorDirectory
    rows: RowsFile
    whole: RowsFile | None

    def leases(self) -> Leases:
        """A new owner of leases."""
        return Leases(self.directory.path)

    def record_verified(self) -> None:
        """Records the verified files, so that no process has to compare their checksums again."""
        self.rows.record_verified()
        if self.whole is not None:
            self.whole.record_verified()


def open_rows(directory: MirrorDirectory, matrix: MatrixLayout, panel: NDArray[Any] | None) -> Mirror | None:
    """The mirror of a matrix, or of a panel of its genes, given as the column of each gene.

    None if there is nothing to keep, or, with a warning, if its files cannot be created.
    """
    if not matrix.values.n_elements:
        return None
    try:
        form, whole = (RowForm.of(matrix, each, compact=directory.form == "compact") for each in (panel, None))
        has_whole = whole.name != form.name and has_rows(directory, whole)
        panels = directory.path.glob(f"{cached_path(directory.path, f'{matrix.path}{PANEL}', 'rows').stem}*.rows")
        is_another = not has_whole and not has_rows(directory, form) and any(panels)
        of_whole = RowsFile(directory, whole) if has_whole else None
        if of_whole is not None:
            of_whole.writable = False
        try:
            rows = RowsFile(directory, form)
        except OSError:  # the cache is full or read-only
            if of_whole is None:
                raise
            return Mirror(directory, of_whole, None)
        if is_another:
            log.warning(
                "%s has %s with other genes, and not with these: the store is read again. A mirror of all genes, as "
                "zl.warm of the whole dataset makes, serves every choice of genes",
                directory.path,
                matrix.path,
            )
        return Mirror(directory, rows, of_whole)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", directory.path, error)
        return None


def has_rows(directory: MirrorDirectory, form: RowForm) -> bool:
    """Whether the mirror has files of these rows, with some of their blocks or none."""
    return all(cached_path(directory.path, form.name, suffix).exists() for suffix in ("rows", "index"))
