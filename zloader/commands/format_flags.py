"""Flags of convert, append and verify for sources in formats that have options of their own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import typer

_of_parquet = functools.partial(typer.Option, rich_help_panel="Sources in Parquet")


@dataclass(frozen=True, kw_only=True)
class FormatFlags:
    """The options of `zl.Parquet`."""

    gene_metadata: Annotated[
        str | None, _of_parquet(metavar="FILE", help="Parquet file with the ids and names of genes.")
    ] = None
    lists: Annotated[
        str | None,
        _of_parquet(
            metavar="GENES,VALUES", help="Columns of lists: ids of genes, and values.", show_default="genes,expressions"
        ),
    ] = None
    gene_id: Annotated[
        str | None,
        _of_parquet(metavar="NAME", help="Column of --gene-metadata with the ids.", show_default="token_id"),
    ] = None
    obs_names: Annotated[
        str | None, _of_parquet(metavar="NAME", help="Column with the names of cells.", show_default="numbers")
    ] = None

    def given_to(self, sources: list[str]) -> Any:
        """The sources with these options."""
        options: dict[str, Any] = {
            "gene_metadata": self.gene_metadata,
            "lists": None if self.lists is None else tuple(name.strip() for name in self.lists.split(",")),
            "gene_id": self.gene_id,
            "obs_names": self.obs_names,
        }
        if not any(options.values()):
            return sources
        from zloader.conversion.sources.parquet import Parquet

        return [Parquet(source, **options) for source in sources]
