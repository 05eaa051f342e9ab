"""The parts and genes of the sources that a conversion stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from zloader.common.errors import OptionError
from zloader.common.nearest import listed

_JOINS = (None, "inner", "outer")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Chooses the parts and genes of the sources that `convert` stores. By default it takes everything.

    >>> import zloader as zl
    >>> counts = zl.Selection(x="layers/counts", layers=[], obsm=[], raw=False)
    >>> atlas = zl.Selection(join="outer", gene_column="ensembl_id", source_column="donor")

    - `x`: the matrix that becomes X: "X", "layers/NAME" or "raw/X". With "raw/X", raw's var becomes var.
    - `layers`, `obsm`, `obs`: names to store. None stores all, an empty list none.
    - `raw`: False leaves raw out.
    - `join`: how to join the genes of several sources: "inner" keeps the shared genes, "outer" keeps all and fills with
      zeros, None requires every source to have the same genes.
    - `genes`: exactly these genes, in this order, instead of a `join`. A gene that a source lacks is filled with zeros.
    - `gene_column`: the var column that names the genes, also for joining them; None uses var_names.
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
    gene_column: str | None = None
    source_column: str | None = None
    unique_obs_names: bool = False

    def __post_init__(self) -> None:
        for option in ("layers", "obsm", "obs", "genes"):
            names = getattr(self, option)
            if isinstance(names, str):
                raise OptionError(f"{option} must be a list of names, such as [{names!r}], not a single string")
            if names is not None:
                object.__setattr__(self, option, tuple(dict.fromkeys(map(str, names))))
                self._check_repeats(option, names)
        if self.x not in ("X", "raw/X") and not (self.x.startswith("layers/") and len(self.x) > len("layers/")):
            raise OptionError(f"x must be 'X', 'layers/NAME' or 'raw/X', not {self.x!r}")
        if self.join not in _JOINS:
            raise OptionError(f"join must be one of {', '.join(map(repr, _JOINS))}, not {self.join!r}")
        if self.genes is not None and self.join is not None:
            raise OptionError(f"genes=[...] and join={self.join!r} exclude each other: pass only one")
        if self.genes is not None and not self.genes:
            raise OptionError("genes is empty: list at least one gene, or pass None for all")

    def _check_repeats(self, option: str, names: Sequence[str]) -> None:
        listed_names = pd.Index(list(map(str, names)))
        repeated = listed_names[listed_names.duplicated()].unique()
        if len(repeated):
            raise OptionError(f"{option} has repeated names: {listed(repeated)}. List each name once")
