"""What a conversion takes of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from zloader.common.errors import OptionError
from zloader.conversion.joining.problems import listed

_JOINS = (None, "inner", "outer")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of the sources goes into the store. Raises OptionError.

    `x` ("X", "layers/NAME" or "raw/X") becomes X; with "raw/X", raw's var becomes var. `layers`, `obsm` and `obs` are
    names to take, None for all; raw is left out when `raw` is false. Genes of several sources are joined by `join`:
    "inner", "outer", or None where all have the same; or `genes` are those to take, in this order, absent ones being
    zeros. `gene_column` is a column of var to name (and join) genes by. `source_column` adds an obs column with the
    label of each row's source; `unique_obs_names` appends -1, -2 ... to names that come again.
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
                raise OptionError(f"{option} must be a list of names, such as [{names!r}], not one name")
            if names is not None:
                object.__setattr__(self, option, tuple(dict.fromkeys(map(str, names))))
                self._check_repeats(option, names)
        if self.x not in ("X", "raw/X") and not (self.x.startswith("layers/") and len(self.x) > len("layers/")):
            raise OptionError(f"x must be 'X', 'layers/NAME' or 'raw/X', not {self.x!r}")
        if self.join not in _JOINS:
            raise OptionError(f"join must be one of {', '.join(map(repr, _JOINS))}, not {self.join!r}")
        if self.genes is not None and self.join is not None:
            raise OptionError(f"genes are chosen by a list or by join={self.join!r}, not by both")
        if self.genes is not None and not self.genes:
            raise OptionError("genes lists none")

    def _check_repeats(self, option: str, names: Sequence[str]) -> None:
        listed_names = pd.Index(list(map(str, names)))
        repeated = listed_names[listed_names.duplicated()].unique()
        if len(repeated):
            raise OptionError(f"{option} has {len(repeated)} names more than once: {listed(repeated)}")
