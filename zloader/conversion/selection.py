"""`zl.Selection`: the parts and genes of the sources that a conversion stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from zloader.common.errors import OptionError
from zloader.common.messages import listed
from zloader.selecting.gene_names import GenesBy, checked_genes_by

_JOINS = (None, "inner", "outer")
RENAMED = True  # recorded in place of `genes_by` for genes that were renamed by a mapping or a function


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Chooses the parts and genes of the sources that `convert` stores. By default it takes everything.

    >>> import zloader as zl
    >>> counts = zl.Selection(x="layers/counts", layers=[], obsm=[], raw=False)
    >>> atlas = zl.Selection(join="outer", genes_by="ensembl_id", source_column="donor")

    - `x`: the matrix that becomes X: "X", "layers/NAME" or "raw/X". With "raw/X", raw's var becomes var.
    - `layers`, `obsm`, `obs`: names to store. None stores all, an empty list none.
    - `raw`: False leaves raw out.
    - `join`: how to join the genes of several sources: "inner" keeps the shared genes, "outer" keeps all and fills with
      zeros, None requires every source to have the same genes.
    - `genes`: exactly these genes, in this order, instead of a `join`. A gene that a source lacks is filled with zeros.
    - `genes_by`: what names the genes, also for joining them. With None, var_names. Otherwise the var column of that
      name; or a mapping from names to new ones, such as orthologs; or a function of a name, such as str.upper. A gene
      without a new name keeps its own. A list has one of these for each source. The former names become a var column.
    - `source_column`: the name of an obs column to add, with the label of each row's source.
    - `unique_obs_names`: append -1, -2, ... to repeated obs names.

    Raises OptionError for contradictory or repeated values. `convert` raises it for names that no source has.
    """

    x: str = "X"
    layers: Sequence[str] | None = None
    obsm: Sequence[str] | None = None
    obs: Sequence[str] | None = None
    raw: bool = True
    join: str | None = None
    genes: Sequence[str] | None = None
    genes_by: GenesBy = None
    source_column: str | None = None
    unique_obs_names: bool = False

    def __post_init__(self) -> None:
        for option in ("layers", "obsm", "obs", "genes"):
            names = getattr(self, option)
            if isinstance(names, str):
                raise OptionError(f"{option} must be a list of names, such as [{names!r}], not a single string")
            if names is not None:
                object.__setattr__(self, option, tuple(dict.fromkeys(map(str, names))))
                listed_names = pd.Index(list(map(str, names)))
                repeated = listed_names[listed_names.duplicated()].unique()
                if len(repeated):
                    raise OptionError(f"{option} has repeated names: {listed(repeated)}. List each name once")
        if self.x not in ("X", "raw/X") and not (self.x.startswith("layers/") and len(self.x) > len("layers/")):
            raise OptionError(f"x must be 'X', 'layers/NAME' or 'raw/X', not {self.x!r}")
        if not (self.join is None or isinstance(self.join, str)) or self.join not in _JOINS:
            listing = "" if isinstance(self.join, str) else ". List genes with genes=[...] instead"
            raise OptionError(f"join must be 'inner', 'outer' or None, not {self.join!r:.100}{listing}")
        object.__setattr__(self, "genes_by", checked_genes_by(self.genes_by))
        if self.genes is not None and self.join is not None:
            raise OptionError(f"genes=[...] and join={self.join!r} exclude each other: pass only one")
        if self.genes is not None and not self.genes:
            raise OptionError("genes is empty: list at least one gene, or pass None for all")

    def plain(self, genes_by: Any) -> dict[str, Any]:
        """All options as plain types, with this `genes_by`, because their own may be functions."""
        return dataclasses.asdict(dataclasses.replace(self, genes_by=None)) | {"genes_by": genes_by}

    def recorded(self) -> dict[str, Any]:
        """The options as a store records them: without defaults, and without genes and their new names.

        New names, which may be as many as the genes, are recorded as RENAMED, and var columns by name.
        """
        each = self.genes_by if isinstance(self.genes_by, tuple) else [self.genes_by]
        select = self.plain(self.genes_by if all(by is None or isinstance(by, str) for by in each) else RENAMED)
        select["genes"] = None if self.genes is None else "var_names"
        return {name: value for name, value in select.items() if value != getattr(Selection(), name)}
