"""The parts of the sources that a conversion stores: the choice, and what the sources have of it in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.joining.genes import GeneAxis
from zloader.conversion.sources.inputs import Input, Problems, by_source, refuse_unknown
from zloader.conversion.sources.nodes import Node, require_names
from zloader.conversion.sources.windows import JoinedMatrix, SourceMatrix
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


# ---- the parts that were chosen

_CHOOSE = "choose parts that all sources have with select=zl.Selection({0}=[...]) (--{0} a,b), or [] (--{0} none)"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One matrix of the store: its `path` in the sources, and the `widths` and gene maps of each source."""

    name: str
    path: str
    n_genes: int
    widths: list[int]
    maps: list[Rows | None]

    @classmethod
    def of_genes(cls, name: str, path: str, axis: GeneAxis) -> Stack:
        """A matrix over the genes of `axis`."""
        return cls(name=name, path=path, n_genes=len(axis.var), widths=axis.widths, maps=axis.maps)

    @classmethod
    def of_columns(cls, path: str, width: int, n_sources: int) -> Stack:
        """A matrix with `width` columns in every source."""
        return cls(name=path, path=path, n_genes=width, widths=[width] * n_sources, maps=[None] * n_sources)

    def open(self, sources: Sequence[Input], window_bytes: int) -> SourceMatrix:
        """The joined matrix of all sources. Raises SourceError."""
        above, _, name = self.name.rpartition("/")
        require_names(above, [name])
        parts = [self.open_part(source, number, window_bytes) for number, source in enumerate(sources)]
        if len(parts) == 1 and self.maps[0] is None:
            return parts[0]
        return JoinedMatrix(self.name, list(zip(parts, self.maps, strict=True)), n_genes=self.n_genes)

    def open_part(self, source: Input, number: int, window_bytes: int) -> SourceMatrix:
        """The part in source `number`. Raises SourceError."""
        shape = (source.n_rows, self.widths[number])
        return source.matrix(self.path, self.name, shape=shape, window_bytes=window_bytes)


def keys_of(sources: Sequence[Input], part: str) -> list[str]:
    """The names in `part` (layers, obsm, varm, ...) that any source has."""
    return list(dict.fromkeys(key for source in sources for key in source.keys(part)))


def gene_matrices(sources: Sequence[Input], select: Selection) -> dict[str, str]:
    """Maps X and the layers of the store to their paths in the sources.

    Raises SourceError if only some of the sources have them, and OptionError if none has.
    """
    paths = {"X": select.x} if _has_x(sources, select.x) else {}
    layers = [path for path in shared(sources, "layers", select) if path != select.x]
    if select.x == "raw/X" and layers:
        raise OptionError(
            f"the layers ({listed(layers)}) have other genes than raw/X: leave them out with "
            "select=zl.Selection(layers=[]) (--layers none)"
        )
    return paths | {path: path for path in layers}


def _has_x(sources: Sequence[Input], x: str) -> bool:
    lacking = [source.name for source in sources if x not in source]
    if lacking and len(lacking) < len(sources):
        raise SourceError(
            f"{x} is missing in {listed(lacking)}, but other sources have it: choose the matrix for X with "
            "select=zl.Selection(x=...) (--x)"
        )
    if lacking and x != "X":
        paths = ["X", "raw/X", *(f"layers/{name}" for name in keys_of(sources, "layers"))]
        refuse_unknown("x", [x], [path for path in paths if any(path in source for source in sources)])
    return not lacking


def shared(sources: Sequence[Input], part: str, select: Selection) -> list[str]:
    """The chosen paths in layers or obsm. Raises SourceError unless all sources have them."""
    wanted, available = getattr(select, part), keys_of(sources, part)
    names = available if wanted is None else wanted
    refuse_unknown(part, names, available)
    with Problems() as problems:
        for name in names:
            lacking = [source.name for source in sources if name not in source.keys(part)]
            if lacking and f"{part}/{name}" != select.x:
                choose = _CHOOSE.format(part)
                problems.add(f"{part}/{name} is missing in {listed(lacking)}, but other sources have it: {choose}")
    return [f"{part}/{name}" for name in names]


def common_width(sources: Sequence[Input], path: str) -> int | None:
    """The width of a dense matrix, None for any other element. Raises SourceError if the sources disagree."""
    nodes = {source.name: source.node(path) for source in sources}
    kinds = {name: _kind_by_rows(node) for name, node in nodes.items()}
    found = set(kinds.values())
    if len(found) > 1 and found != {"dense", "sparse"}:
        raise SourceError(f"{path} cannot be joined: it is {by_source(kinds)}. {_CHOOSE.format('obsm').capitalize()}")
    if not found <= {"dense", "sparse", "array"}:
        return None
    shapes = {name: node.shape[1:] for name, node in nodes.items()}
    if len(set(shapes.values())) > 1:
        widths = {name: f"{' x '.join(map(str, shape))} wide" for name, shape in shapes.items()}
        raise SourceError(f"{path} cannot be joined: it is {by_source(widths)}. {_CHOOSE.format('obsm').capitalize()}")
    return next(iter(shapes.values()))[0] if found == {"dense"} else None


def _kind_by_rows(node: Node) -> str:
    if node.encoding != "dense":
        return "sparse" if node.encoding in ("csr", "csc") else node.encoding
    is_numbers = node.dtype.kind in "biuf" and node.dtype.itemsize <= 8
    return "dense" if is_numbers and len(node.shape) == 2 else "array"
