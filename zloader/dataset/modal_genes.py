"""The genes of a panel of several modalities, such as `rna:CD3E`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from zloader.common.errors import OptionError
from zloader.common.messages import listed, suggestion
from zloader.common.records import Rows
from zloader.dataset.in_memory import used_categories
from zloader.dataset.modalities import ModalElements
from zloader.selecting.genes import ChosenGenes, Genes
from zloader.selecting.row_maps import checked_map, in_whole


def require_known_modalities(genes: Mapping[str, Any], modalities: list[str]) -> None:
    """Raises OptionError for genes of a modality that is not there."""
    for name in genes:
        if name not in modalities:
            raise OptionError(
                f"genes has a choice for {name!r:.100}, but the modalities are: {listed(modalities)}"
                f"{suggestion(str(name), modalities)}"
            )


def genes_of_modalities(genes: Genes, find_names: Callable[[], Mapping[str, pd.Index]]) -> dict[str, list[str] | None]:
    """The names that `genes` has of each modality, in their order; None for a modality of which it has none.

    A gene is `rna:CD3E`, or `CD3E` if only one modality has it. `find_names` returns the genes of each modality.
    Raises OptionError for anything but names, and for unknown and ambiguous ones.
    """
    chosen = [] if isinstance(genes, slice) else list(genes)
    names = {modality: set(of_modality) for modality, of_modality in find_names().items()}
    if not chosen or not all(isinstance(gene, str) for gene in chosen):
        raise OptionError(
            f"genes of {listed(names)} are chosen by name: dataset[:, ['{next(iter(names))}:GENE', ...]], or by "
            f"modality: dataset[:, {{'{next(iter(names))}': genes}}]"
        )
    found: dict[str, list[str]] = {modality: [] for modality in names}
    for gene in chosen:
        modality, name = _found(str(gene), names)
        found[modality].append(name)
    return {modality: of_modality or None for modality, of_modality in found.items()}


def _found(gene: str, names: Mapping[str, set[str]]) -> tuple[str, str]:
    """The modality and the name there of a gene."""
    before, _, after = gene.partition(":")
    having = [(modality, gene) for modality, known in names.items() if gene in known]
    having += [(before, after)] if after in names.get(before, ()) else []
    if not having:
        every = [f"{modality}:{name}" for modality, known in names.items() for name in known]
        raise OptionError(f"no modality has the gene {gene!r}{suggestion(gene, every)}")
    if len(having) > 1:
        ways = " or ".join(repr(f"{modality}:{name}") for modality, name in having)
        raise OptionError(
            f"the gene {gene!r} is in {listed(modality for modality, _ in having)}: write {ways}, or choose by "
            f"modality, as in dataset[:, {{{having[0][0]!r}: [{having[0][1]!r}]}}]"
        )
    return having[0]


def var_of_panel(store: ModalElements, panels: Mapping[str, ChosenGenes | None]) -> pd.DataFrame:
    """The rows of var of the whole for the chosen genes of each modality, or for all of it."""
    return used_categories(store.element("var").iloc[_genes_in_whole(store, panels)])


def _genes_in_whole(store: ModalElements, panels: Mapping[str, ChosenGenes | None]) -> Rows:
    """The positions in var of the whole, by the varmap of each modality."""
    found = []
    for modality, chosen in panels.items():
        path, n_genes = f"varmap/{modality}", store.length(f"mod/{modality}/var")

        def refused(why: str, path: str = path) -> Exception:
            return store.damaged(path, why)

        stored = np.asarray(store.element(path))
        rows = in_whole(checked_map(stored, n_whole=store.n_vars, n_rows=n_genes, refused=refused), n_genes)
        found.append(rows if chosen is None else rows[chosen.positions])
    return np.concatenate(found)
