"""What a Selection chooses of an AnnData, whatever it is read from."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anndata.utils
import pandas as pd
import scipy.sparse

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.options import FetchOptions, MiB
from zloader.common.records import Rows
from zloader.conversion.nodes import require_names
from zloader.conversion.port import Content, Matrix
from zloader.conversion.selection import Selection

GROUPS = ("layers", "obsm", "varm", "obsp", "varp")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides anndata's warnings about repeated names and pandas' warnings about empty columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def unique(names: pd.Index) -> pd.Index:
    """The names, of which repeated ones get a number."""
    with quiet():
        return anndata.utils.make_index_unique(names)


def refuse_unknown(option: str, names: Sequence[str] | None, available: Sequence[str]) -> list[str]:
    """The names, or all that are available. Raises OptionError, which lists those, for a name that is not there."""
    unknown = [name for name in names or () if name not in available]
    if unknown:
        raise OptionError(f"{option}: no source has {listed(unknown)}. Available: {listed(available, 100)}")
    return list(available if names is None else names)


def taken(element: Any, positions: Rows | None, *, columns: bool = False) -> Any:
    """Some rows, and with `columns` the same columns, of an element that has an axis of rows."""
    if positions is None:
        return element
    if isinstance(element, pd.DataFrame):
        return element.iloc[positions]
    rows = element.tocsr() if scipy.sparse.issparse(element) else element
    return rows[positions][:, positions] if columns else rows[positions]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How sources are read and their rows arranged: `window_bytes` bound what is sorted at once."""

    window_bytes: int = 64 * MiB
    memory: int = 256 * MiB
    shuffle_seed: int | None = None
    order: Any = None

    @property
    def options(self) -> FetchOptions:
        """How rows of a Dataset are read."""
        return FetchOptions(memory=max(16 * MiB, self.memory))


class ChosenContent(Content):
    """What `select` chooses of an AnnData: which columns, matrices and elements, under which names and in what order.

    Subclasses read them.
    """

    rows: Rows | None = None  # of the elements that are stored; None for all of them
    raw_var: pd.DataFrame | None = None
    _genes: Rows | None = None  # the positions of the genes among those of the source, and of those of raw
    _raw_genes: Rows | None = None
    _joins = False  # whether there are several sources, of which elements that are not by row of obs are dropped

    def __init__(self, select: Selection, obs_columns: Sequence[str]) -> None:
        self._select = select
        self.dropped: list[str] = []
        self.groups: Mapping[str, Mapping[str, Any]] = {name: {} for name in GROUPS}
        self.obs_columns = refuse_unknown("obs", select.obs, obs_columns)
        if (added := select.source_column) is not None:
            if added in self.obs_columns:
                raise OptionError(f"obs already has a column {added!r}: choose another source_column (--source-column)")
            self.obs_columns.append(added)

    def _choose_matrices(self, known: Sequence[str]) -> None:
        """Maps X, the layers and raw/X of the store to their names in the sources."""
        select, self.known = self._select, known
        if select.x != "X":
            refuse_unknown("x", [select.x], known)
        layers = refuse_unknown(
            "layers", select.layers, [name.removeprefix("layers/") for name in known if name.startswith("layers/")]
        )
        self.matrix_names = {"X": select.x} if select.x in known else {}
        self.matrix_names |= {f"layers/{name}": f"layers/{name}" for name in layers if f"layers/{name}" != select.x}
        if select.x == "raw/X" and len(self.matrix_names) > 1:
            raise OptionError(
                f"the layers ({listed(layers)}) have other genes than raw/X: leave them out with "
                "select=zl.Selection(layers=[]) (--layers none)"
            )
        if select.raw and select.x != "raw/X" and "raw/X" in known:
            self.matrix_names["raw/X"] = "raw/X"

    def _unique(self, names: pd.Index) -> pd.Index:
        return unique(names) if self._select.unique_obs_names else names

    @contextlib.contextmanager
    def _naming(self, name: str, of: Callable[[], str]) -> Iterator[None]:
        """Adds the column, what it is a column of and what to do to a SourceError."""
        try:
            yield
        except SourceError as error:
            raise SourceError(
                f"obs column {name!r} {of()}: {error}. Convert it to one type, or list the columns to store with "
                "select=zl.Selection(obs=[...]) (--obs a,b)"
            ) from error

    def matrices(self) -> Iterator[Matrix]:
        for name, of_source in self.matrix_names.items():
            require_names(name.rpartition("/")[0] or "X", [name.rpartition("/")[2]])
            yield self._matrix(name, of_source)
        yield from map(self._array, self._arrays)
        yield from map(self._graph, self._graphs)

    def elements(self) -> Iterator[tuple[str, Any]]:
        raw = "raw/" if self._select.x == "raw/X" else ""
        for part in ("varm",) if raw else ("varm", "varp"):
            yield from self._gene_elements(part, raw)
        yield "uns", self._uns()
        for path in [*self._obsm, *(f"obsp/{name}" for name in self._keys("obsp"))]:
            if self._joins and path not in self._arrays:
                self._drop([path])
            elif path not in self._arrays and path not in self._graphs:
                element = taken(self._element(path, "obs"), self.rows, columns=path.startswith("obsp/"))
                yield path, _with_names(element, self.obs_names)
        for name in self._keys("raw/varm") if self.raw_var is not None else ():
            yield from self._of_genes(f"raw/varm/{name}", f"raw/varm/{name}", self._raw_genes, self.raw_var)

    def _gene_elements(self, part: str, raw: str) -> Iterator[tuple[str, Any]]:
        for name in self._keys(f"{raw}{part}"):
            yield from self._of_genes(f"{part}/{name}", f"{raw}{part}/{name}", self._genes, self.var)

    def _of_genes(
        self, path: str, of_source: str, positions: Rows | None, var: pd.DataFrame | None
    ) -> Iterator[tuple[str, Any]]:
        if self._joins or (positions is not None and (positions < 0).any()):
            self._drop([path])
            return
        element = self._element(of_source, "raw/var" if of_source.startswith("raw/") else "var")
        element = taken(element, positions, columns=path.startswith("varp/"))
        yield path, _with_names(element, lambda: var.index)  # type: ignore[union-attr]

    def _drop(self, paths: Sequence[str]) -> None:
        """Records elements that cannot be joined; each only once, even if `elements` is called again."""
        self.dropped += [path for path in paths if path not in self.dropped]

    # ---- what subclasses read

    _obsm: Sequence[str]  # the paths of the chosen elements of obsm
    _arrays: Sequence[str]  # those that are arrays of numbers
    _graphs: Sequence[str]  # the CSR matrices in obsp

    @abstractmethod
    def _keys(self, part: str) -> Sequence[str]:
        """The names in a group."""

    @abstractmethod
    def _element(self, path: str, frame: str) -> Any:
        """An element, which has as many rows as a frame."""

    @abstractmethod
    def _uns(self) -> dict[str, Any]:
        """The elements of uns."""

    @abstractmethod
    def _matrix(self, name: str, of_source: str) -> Matrix:
        """A matrix of genes."""

    @abstractmethod
    def _array(self, path: str) -> Matrix:
        """An array of numbers in obsm."""

    @abstractmethod
    def _graph(self, path: str) -> Matrix:
        """A CSR matrix in obsp."""


def _with_names(element: Any, names: Callable[[], pd.Index]) -> Any:
    return element.set_axis(names()) if isinstance(element, pd.DataFrame) else element
