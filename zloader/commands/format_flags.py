"""Flags of convert and verify for sources in formats that have options of their own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from zloader.common.errors import OptionError

_of_parquet = functools.partial(typer.Option, rich_help_panel="Sources in Parquet")
_of_soma = functools.partial(typer.Option, rich_help_panel="Sources in SOMA")


@dataclass(frozen=True, kw_only=True)
class FormatFlags:
    """The options of `zl.Parquet` and `zl.Soma`."""

    gene_metadata: Annotated[str | None, _of_parquet(metavar="FILE", help="Parquet file with a row for each gene.")] = (
        None
    )
    lists: Annotated[
        str | None,
        _of_parquet(
            metavar="GENES,VALUES",
            help="Columns of lists: ids or names of genes, and values.",
            show_default="genes,expressions",
        ),
    ] = None
    gene_id: Annotated[
        str | None,
        _of_parquet(metavar="NAME", help="Column of --gene-metadata with the ids or names.", show_default="token_id"),
    ] = None
    obs_names: Annotated[
        str | None, _of_parquet(metavar="NAME", help="Column with the names of cells.", show_default="numbers")
    ] = None
    where: Annotated[
        str | None, _of_soma(metavar="FILTER", help="Which cells, as a value filter of SOMA.", show_default="all")
    ] = None
    measurement: Annotated[
        str | None, _of_soma(metavar="NAME", help="Measurement to read.", show_default="the only one")
    ] = None
    soma_layer: Annotated[
        str | None,
        _of_soma(metavar="NAME", help="Array in X of the measurement to read.", show_default="the only one"),
    ] = None

    def given_to(self, sources: list[str]) -> list[Any]:
        """The sources with these options. Raises OptionError for options of several formats."""
        of_parquet = {
            "gene_metadata": self.gene_metadata,
            "lists": None if self.lists is None else tuple(name.strip() for name in self.lists.split(",")),
            "gene_id": self.gene_id,
            "obs_names": self.obs_names,
        }
        of_soma = {"where": self.where, "measurement": self.measurement, "layer": self.soma_layer}
        given: list[dict[str, Any]] = [
            {name: value for name, value in of.items() if value is not None} for of in (of_parquet, of_soma)
        ]
        if all(given):
            raise OptionError("the sources cannot be in Parquet and in SOMA: give only the flags of one format")
        if not any(given):
            return list(sources)
        from zloader.conversion.sources.parquet import Parquet
        from zloader.conversion.sources.soma import Soma

        return [Parquet(source, **given[0]) if given[0] else Soma(source, **given[1]) for source in sources]
