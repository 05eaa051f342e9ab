"""Rows of a dataset with modalities as a MuData in memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, Rows
from zloader.dataset.elements import load_anndata
from zloader.dataset.in_memory import as_scipy, used_categories
from zloader.dataset.matrices import Matrices
from zloader.dataset.modalities import modality_of
from zloader.dataset.observations import Observations


def load_mudata() -> Any:
    """The module mudata. Raises OptionError, which names the extra, without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mudata
    except ImportError as error:
        raise OptionError(f'a MuData in memory needs mudata ({error}): pip install "zloader[mudata]"') from error
    return mudata


def as_mudata(matrices: Matrices, observations: Observations, rows: Rows, names: Sequence[str]) -> Any:
    """Some rows as a MuData, in its own order, with the matrices `names`, and obs, obsm and var of all.

    Raises OptionError for rows that occur twice, or that have one name, because MuData aligns modalities by names.
    """
    mudata, obs_names = load_mudata(), pd.Index(observations.names(rows))
    if not obs_names.is_unique:
        raise OptionError(
            f"a MuData aligns its modalities by obs names, and {obs_names[obs_names.duplicated()][0]!r} would occur "
            "twice: take each row once"
        )
    present = matrices.present(matrices.modalities)
    lacking = ~np.any([has[rows] for has in present.values()], axis=0)
    if lacking.any():
        raise OptionError(f"no modality has the row {obs_names[lacking][0]!r}, so no MuData can: leave it out")
    made_of = partial(_modality, matrices, observations, names)
    modalities = {each: made_of(each, rows[has[rows]]) for each, has in present.items()}
    whole = list(observations.columns_of(None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns that versions before 0.4 copy to obs, which is replaced
        made = mudata.MuData(modalities)[obs_names].copy()
    made.obs = used_categories(observations.frame_of(rows, whole)).loc[made.obs_names]
    order = obs_names.get_indexer(made.obs_names)
    for name in observations.arrays.of_modality(None):
        if name not in made.mod:  # MuData keeps there which rows a modality has
            made.obsm[name] = observations.arrays.rows(name, rows)[order]
    return made


def _modality(matrices: Matrices, observations: Observations, names: Sequence[str], modality: str, rows: Rows) -> Any:
    """The AnnData of one modality, whose rows these are."""
    columns, values = observations.columns_of(modality), {}
    arrays = observations.arrays.of_modality(modality)
    for name in names:
        if modality_of(name) == modality:
            x = matrices.read_rows(rows, x=name, options=FetchOptions())
            values[name.removeprefix(f"{modality}:")] = as_scipy(x) if isinstance(x, CsrArrays) else x
    return load_anndata().AnnData(
        X=values.pop("X", None),
        obs=used_categories(observations.frame_of(rows, list(columns))).rename(columns=columns),
        var=matrices.var_of(f"{modality}:X"),
        obsm={plain: observations.arrays.rows(name, rows) for name, plain in arrays.items()},
        layers={name.removeprefix("layers/"): layer for name, layer in values.items()},
    )
