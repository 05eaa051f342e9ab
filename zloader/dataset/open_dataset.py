"""`zl.open_dataset`: opens stores by their URLs as one Dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from zloader.access.location import location_of
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.messages import warn_user
from zloader.common.options import Cache
from zloader.dataset.dataset import Dataset
from zloader.dataset.opening import open_all
from zloader.selecting.gene_names import GeneJoin, GenesBy

URL = str | os.PathLike[str]


@answers
def open_dataset(
    url: URL | Sequence[URL],
    *,
    cache: str | os.PathLike[str] | Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool = False,
    join: Literal["inner", "outer"] | Sequence[str] | None = None,
    genes_by: GenesBy = None,
) -> Dataset:
    """Opens an AnnData Zarr store, or several stores in the given order, as one Dataset.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr", cache="cache")
    >>> dataset.n_obs, dataset.n_vars, dataset.obs_columns
    (1000, 50, ['cell_type', 'donor', 'n_counts'])

    - `url`: a local path, or a URL that begins with `file://`, `s3://`, `gs://`, `az://`, `abfs://`, `hf://`, `http://`
      or `https://`; or a list of them. Each is an AnnData or MuData store, an .h5ad or .h5mu file, or an annbatch
      collection.
    - `cache`: the directory, or zl.Cache, that keeps mirrors of the stores, best on a local NVMe disk. With None, every
      epoch reads from the stores.
    - `storage_options`: options for all URLs. For S3 those of s3fs (key, secret, token, anon, profile, endpoint_url,
      requester_pays, client_kwargs); for GCS token, requester_pays and endpoint_url; for Azure account_name,
      account_key, sas_token, connection_string and others; for the Hub token and endpoint; for web servers headers, and
      query for that of a signed address, which a URL may have itself. They are part of a pickled dataset.
    - `offline`: open from the cache alone, without any network request. Reading values that are not in the cache then
      raises ReadError.
    - `join`: the genes of several stores. With None, all stores need the same genes in the same order. "inner" takes
      the genes that every store has and "outer" all genes, in the order of `anndata.concat`. A list takes exactly
      these genes in this order, also those that no store has. Genes that a store lacks are zeros.
    - `genes_by`: what names the genes, also for joining them. With None, var_names. Otherwise the var column of that
      name, such as "ensembl_id"; or a mapping from names to new ones, such as orthologs; or a function of a name, such
      as str.upper. A gene without a new name keeps its own. A list has one of these for each store.

    Genes are mapped while minibatches are gathered, so no store is rewritten. The mirrors are those of the stores, and
    the order of the rows does not depend on `join`.

    >>> merged = zl.open_dataset(["atlas.zarr", "other.zarr"], join="outer")
    >>> merged.n_obs, merged.n_vars, merged.var_names[-1]
    (1100, 60, 'gene9')

    Opening reads metadata only, and the names of genes to join. Raises StoreNotFoundError, AccessDeniedError or
    FormatError if a store cannot be opened or has genes that cannot be joined, MissingColumnError if a store lacks the
    column `genes_by`, OptionError for unusable arguments, and CacheError if there is no mirror to open offline. Warns
    of a join in which more than half of the genes of a store match no gene of the others, with the likely reason.
    """
    if cache is not None and not isinstance(cache, Cache):
        cache = Cache(directory=cast("Path", cache))  # Cache checks the type
    rule = GeneJoin(join=join, genes_by=genes_by)
    given = [location_of(each_url, storage_options) for each_url in _urls_of(url)]
    locations = [found for each in given for found in each.matches(offline=offline)]
    dataset = Dataset(open_all(locations, cache, offline=offline), rule)
    lost = dataset.matrices.lost if len(dataset.stores) > 1 or not rule.as_stored else ""
    if lost:
        warn_user(lost)
    return dataset


def _urls_of(url: Any) -> list[URL]:
    """One URL or many as a list. Raises OptionError for anything else."""
    urls = [url] if isinstance(url, str | bytes) or not isinstance(url, Iterable) else url
    if isinstance(urls, Mapping):
        raise OptionError("a dataset has no labels for its stores: pass a list of paths or URLs instead of a mapping")
    listed: list[Any] = list(urls)
    for each in listed:
        if not isinstance(each, str | os.PathLike):
            raise OptionError(
                f"a store is opened by its path or URL, not by an object of type {type(each).__name__}. To make a "
                "store of an AnnData in memory, run zl.convert(adata, 'x.zarr')"
            )
    return listed
