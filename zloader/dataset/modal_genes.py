"""The genes of a panel of several modalities, such as `rna:CD3E`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed, suggestion
from zloader.common.records import Rows
from zloader.dataset.elements import StoredElements
from zloader.dataset.in_memory import used_categories
from zloader.selecting.genes import ChosenGenes, Genes, GenesOf
from zloader.selecting.row_maps import checked_map, in_whole


def genes_of_modalities(genes: GenesOf, names: Mapping[str, pd.Index]) -> Mapping[str, Genes | None]:
    """What `genes` has of each modality: of those that a mapping names, or of all; None for no genes.

    In a list, a gene is `rna:CD3E`, or `CD3E` if only one modality has it. `names` has the genes of each modality.
    Raises OptionError for a list of anything but names, for unknown and ambiguous ones, and for unknown modalities.
    """
    if isinstance(genes, Mapping):
        for modality in genes:
            if modality not in names:
                raise OptionError(f"genes has a choice for {modality!r:.100}, but the modalities are: {listed(names)}")
        return genes
    chosen = [] if isinstance(genes, slice) else list(genes)
    if not chosen or not all(isinstance(gene, str) for gene in chosen):
        first = next(iter(names))
        raise OptionError(
            f"genes of {listed(names)} are chosen by name: dataset[:, ['{first}:GENE', ...]], or by modality: "
            f"dataset[:, {{'{first}': genes}}]"
        )
    known = {modality: set(of_modality) for modality, of_modality in names.items()}
    found: dict[str, list[str]] = {modality: [] for modality in names}
    for gene in chosen:
        modality, name = _found(str(gene), known)
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


def var_of_panel(store: StoredElements, panels: Mapping[str, ChosenGenes | None]) -> pd.DataFrame:
    """The rows of var of the whole for the chosen genes of each modality, or for all of it."""
    return used_categories(store.element("var").iloc[_genes_in_whole(store, panels)])


def _genes_in_whole(store: StoredElements, panels: Mapping[str, ChosenGenes | None]) -> Rows:
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
