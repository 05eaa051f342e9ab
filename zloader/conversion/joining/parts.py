"""Find the matrices and elements of the sources to store, and check that the sources agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.joining.genes import GeneAxis
from zloader.conversion.joining.selection import Selection
from zloader.conversion.sources.inputs import Input, Problems, by_source, refuse_unknown
from zloader.conversion.sources.join import JoinedMatrix
from zloader.conversion.sources.nodes import Node, require_names
from zloader.conversion.sources.windows import SourceMatrix

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
    layers = [path for path in _shared(sources, "layers", select) if path != select.x]
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


def _shared(sources: Sequence[Input], part: str, select: Selection) -> list[str]:
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


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """obsm and obsp: the matrices, the paths of other elements, and the paths that cannot be joined."""

    stacks: list[Stack] = field(default_factory=list)
    elements: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def row_parts(sources: Sequence[Input], select: Selection) -> RowParts:
    """The obsm and obsp to store. Raises SourceError with all problems if the sources disagree, and OptionError."""
    parts = RowParts()
    with Problems() as problems:
        for path in _shared(sources, "obsm", select):
            with problems.noting():
                width = _common_width(sources, path)
                if width is None:
                    parts.elements.append(path)
                else:
                    parts.stacks.append(Stack.of_columns(path, width, len(sources)))
    for path in (f"obsp/{name}" for name in keys_of(sources, "obsp")):
        if len(sources) > 1:
            parts.dropped.append(path)
        elif sources[0].node(path).encoding == "csr":
            parts.stacks.append(Stack.of_columns(path, sources[0].n_rows, 1))
        else:
            parts.elements.append(path)
    return parts


def _common_width(sources: Sequence[Input], path: str) -> int | None:
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
