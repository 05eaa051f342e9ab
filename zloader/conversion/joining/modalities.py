"""The parts of a store: the one AnnData, or the whole of a MuData and each of its modalities.

A modality is an AnnData of its own, joined over the sources like any other. The whole has no matrix: its obs, obsm and
obsp are by row, its var lists the genes of all modalities, and `obsmap/NAME` has the row of each row in a modality.

One order of the rows holds for all parts. The rows of a modality keep the order that they have in the whole, so its
obsmap counts them up, and a block of rows of the whole is a block of rows of each modality.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.conversion.joining.content import Content, RearrangedContent
from zloader.conversion.joining.selection import GeneRule, Selection, keys_of
from zloader.conversion.sources.inputs import Input, Problems, refuse_unknown
from zloader.conversion.sources.modality import MuDataInput, require_anndata
from zloader.conversion.sources.reorder import Permutation
from zloader.order.permutation import key_of, permute
from zloader.selecting.row_maps import RowMap, in_whole

_ANNDATA = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
_MODALITY = _ANNDATA | {"zloader": {"part_of": "MuData"}}  # opened by itself, it is a store whose objects all exist
_MUDATA = {"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0}
_OF_ANNDATA = ("x", "genes", "genes_by")  # options whose meaning differs from modality to modality
_OF_NAMES = ("layers", "obsm", "obs")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is stored in one group, whose `path` is empty for the root, with these `attributes`."""

    path: str
    content: Content | RearrangedContent
    attributes: Mapping[str, Any]

    def at(self, path: str) -> str:
        """The path in the store of one of its elements."""
        return f"{self.path}/{path}" if self.path else path


def parts_of(
    inputs: Sequence[Input],
    select: Selection,
    *,
    shuffle_seed: int | None,
    order: Sequence[int] | NDArray[np.integer] | None,
    bucket_bytes: int,
) -> list[Part]:
    """The parts of the store that the sources make, the root first.

    Its rows are shuffled, or in an `order` that is given, the row number of each row in the sources. Raises SourceError
    for MuData together with AnnData, or with other modalities, OptionError, and the errors of `Content`.
    """
    positions = _positions(sum(source.n_rows for source in inputs), shuffle_seed, order)
    whole = [source for source in inputs if isinstance(source, MuDataInput)]
    if whole and len(whole) == len(inputs):
        return _of_mudata(whole, select, positions, bucket_bytes)
    require_anndata(inputs)
    content = Content(inputs, select)
    return [Part(path="", content=_arranged(content, positions, bucket_bytes), attributes=_ANNDATA)]


def _positions(
    n_rows: int, shuffle_seed: int | None, order: Sequence[int] | NDArray[np.integer] | None
) -> Permutation | None:
    """Where rows of the sources are stored; None if they stay where they are."""
    if shuffle_seed is not None:
        key = key_of(shuffle_seed)
        return lambda rows: permute(rows, n_rows, key)
    if order is None:
        return None
    if len(order) != n_rows:
        raise OptionError(f"order has {len(order)} row numbers, but the sources have {n_rows} rows")
    positions = np.empty(n_rows, np.int64)
    positions[np.asarray(order)] = np.arange(n_rows)
    return positions.__getitem__


def _arranged(content: Content, positions: Permutation | None, bucket_bytes: int) -> Content | RearrangedContent:
    return content if positions is None else RearrangedContent(content, positions, bucket_bytes=bucket_bytes)


def _of_mudata(
    sources: Sequence[MuDataInput], select: Selection, positions: Permutation | None, bucket_bytes: int
) -> list[Part]:
    modalities = _modalities_of(sources)
    _require_known(select, [*modalities.values(), sources], sources[0])
    with Problems() as problems:
        contents = {}
        for name, inputs in modalities.items():
            with problems.noting():
                contents[name] = Content(inputs, _of_part(select, inputs))
    if not any("X" in one or one.keys("layers") for inputs in modalities.values() for one in inputs):
        raise SourceError(f"no modality of {sources[0].name} has X or layers, so there is nothing to train on")
    whole = WholeContent(sources, _of_whole(select, sources), contents)
    if select.unique_obs_names:
        for name, content in contents.items():
            content.names = functools.partial(whole.names_in, name)
    of_whole = _arranged(whole, positions, bucket_bytes)
    parts = [Part(path="", content=of_whole, attributes=_MUDATA)]
    for name, content in contents.items():
        ranks: Permutation | None = None
        if isinstance(of_whole, RearrangedContent):
            rows = whole.row_of(name)[of_whole.order]
            new = np.empty(content.n_rows, np.int64)
            new[rows[rows >= 0]] = np.arange(content.n_rows)
            ranks = new.__getitem__
        parts.append(Part(path=f"mod/{name}", content=_arranged(content, ranks, bucket_bytes), attributes=_MODALITY))
    return parts


def _modalities_of(sources: Sequence[MuDataInput]) -> dict[str, list[Input]]:
    """The modalities in the order of the first source, each as it is in every source."""
    first, *others = sources
    for other in others:
        if differing := sorted(first.modalities.keys() ^ other.modalities.keys()):
            raise SourceError(
                f"{first.name} has the modalities {listed(first.modalities)}, and {other.name} has "
                f"{listed(other.modalities)}: {listed(differing)} would be lacking. Convert modalities one by one, "
                f"such as {next(iter(first.modalities.values())).name}"
            )
    return {name: [source.modalities[name] for source in sources] for name in first.modalities}


def _require_known(select: Selection, parts: Sequence[Sequence[Input]], first: MuDataInput) -> None:
    """Raises OptionError for options that a MuData does not take, and for names that no part has."""
    for option in _OF_ANNDATA:
        if getattr(select, option) != getattr(Selection(), option):
            raise OptionError(
                f"{option} is for one AnnData, but {first.name} is a MuData with {listed(first.modalities)}: leave it "
                f"out, or convert its modalities one by one, such as {next(iter(first.modalities.values())).name}"
            )
    for option in _OF_NAMES:
        if (names := getattr(select, option)) is not None:
            refuse_unknown(option, names, dict.fromkeys(name for inputs in parts for name in _names(option, inputs)))


def _names(option: str, inputs: Sequence[Input]) -> list[str]:
    if option != "obs":
        return keys_of(inputs, option)
    return list(dict.fromkeys(name for source in inputs for name in source.obs_columns))


def _of_part(select: Selection, inputs: Sequence[Input]) -> Selection:
    """The selection of one modality: those of the chosen names that it has, and no `source_column`."""
    chosen: dict[str, Any] = {"source_column": None}
    for option in _OF_NAMES:
        if (names := getattr(select, option)) is not None:
            chosen[option] = [name for name in names if name in _names(option, inputs)]
    return dataclasses.replace(select, **chosen)


def _of_whole(select: Selection, sources: Sequence[MuDataInput]) -> Selection:
    """The selection of the whole. `obsm/NAME` of modalities, which says where they have rows, is made with obsmap."""
    obsm = [name for name in keys_of(sources, "obsm") if name not in sources[0].modalities]
    of_part = _of_part(dataclasses.replace(select, layers=None), sources)
    chosen = obsm if of_part.obsm is None else [name for name in obsm if name in of_part.obsm]
    return dataclasses.replace(of_part, obsm=chosen, source_column=select.source_column)


class WholeContent(Content):
    """The elements of the root of one or more MuData, over the genes of all `modalities`.

    Several are joined like `mudata.concat` joins them, except that var has names only, and obs the columns of all.
    """

    def __init__(self, sources: Sequence[MuDataInput], selection: Selection, modalities: Mapping[str, Content]) -> None:
        self._wholes, self._modalities = sources, modalities
        super().__init__(sources, selection)
        self.groups = {part: {} for part in ("obsm", "varm", "obsp", "varp", "obsmap", "varmap")}
        self.groups["mod"] = {"mod-order": list(modalities)}
        with Problems() as problems:
            for source in sources:
                for name in modalities:
                    with problems.noting():
                        source.row_of(name)
        if len(sources) > 1 and not (names := self.obs_names()).is_unique:
            repeated = names[names.duplicated()].unique()
            raise SourceError(
                f"{len(repeated)} obs names occur in several sources, such as {listed(repeated, 3)}, but a MuData "
                "aligns its modalities by them: make them unique with select=zl.Selection(unique_obs_names=True) "
                "(--unique-obs-names)"
            )

    def names_in(self, modality: str) -> pd.Index:
        """The obs names of the rows of a modality."""
        return self.obs_names()[in_whole(self.row_of(modality), self._modalities[modality].n_rows)]

    def row_of(self, modality: str) -> RowMap:
        """For each row of all sources, its row in a modality, or -1."""
        maps, begin = [], 0
        for source in self._wholes:
            of_source = source.row_of(modality)
            maps.append(np.where(of_source < 0, -1, of_source.astype(np.int64) + begin))
            begin += source.modalities[modality].n_rows
        return np.concatenate(maps)

    def _join_genes(self) -> None:
        self._rule, self.lost_genes = GeneRule(), ""
        if self._single is not None:
            self.var = self._single.var()
            return
        names = [content.var.index for content in self._modalities.values()]
        self.var = pd.DataFrame(index=pd.Index(np.concatenate([np.asarray(each, object) for each in names])))
        columns = dict.fromkeys(name for source in self._wholes for name in source.var().columns)
        self._drop([f"var/{name}" for name in columns])

    def _gene_elements(self, part: str) -> Iterator[tuple[str, Any]]:
        for name in keys_of(self._sources, part):
            if self._single is not None:
                yield f"{part}/{name}", self._single.element(f"{part}/{name}")
            elif part != "varm" or name not in self._modalities:
                self._drop([f"{part}/{name}"])

    def elements(self) -> Iterator[tuple[str, Any]]:
        """Those of `Content`, the maps of rows and genes, and where modalities have rows and genes."""
        yield from super().elements()
        if self._single is not None:
            in_obsm = [f"obsm/{name}" for name in self._modalities if f"obsm/{name}" in self._single]
            maps = [f"{part}/{name}" for part in ("obsmap", "varmap") for name in self._single.keys(part)]
            yield from ((path, self._single.element(path)) for path in in_obsm + maps)
            return
        begin = 0
        for name, content in self._modalities.items():
            genes = np.arange(len(self.var)) - begin
            genes[(genes < 0) | (genes >= len(content.var))] = -1
            yield from _maps("obs", name, self.row_of(name))
            yield from _maps("var", name, genes)
            begin += len(content.var)


def _maps(axis: str, modality: str, places: RowMap) -> Iterator[tuple[str, Any]]:
    """The map of rows or genes, and which of them a modality has, as mudata stores them."""
    yield f"{axis}m/{modality}", places >= 0
    yield f"{axis}map/{modality}", (places + 1).astype(np.min_scalar_type(len(places)))
