"""`zl.Soma`: a TileDB-SOMA experiment, or the cells of it that a filter selects. `soma_rows` has the rows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zloader.common.child import Child
from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.common.options import MiB
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.arrow import digest_of
from zloader.conversion.sources.locations import Objects, source_locations
from zloader.conversion.sources.row_source import RowInput
from zloader.conversion.sources.soma_rows import SomaRows, names_in
from zloader.conversion.sources.source_format import Place, SourceFormat, require_library, s3_access

_READER = "zloader.conversion.sources.soma_reader:SomaReader"
_ATTEMPTS = 5  # tiledbsoma crashes now and then, mostly while it filters, not at every attempt
_BUFFER_BYTES = 16 * MiB  # per column; the library takes 1 GiB
_TILES_BYTES = 256 * MiB  # of decompressed tiles; the library takes 10 GiB


@dataclass(frozen=True)
class Soma(SourceFormat):
    """A TileDB-SOMA experiment, such as the CELLxGENE Census, as a source of `zl.convert`, `zl.append`, `zl.verify`.

    >>> import zloader as zl
    >>> lung = zl.Soma(
    ...     "s3://cellxgene-census-public-us-west-2/cell-census/2025-01-30/soma/census_data/homo_sapiens",
    ...     measurement="RNA", layer="raw", where="tissue_general == 'lung' and is_primary_data == True",
    ... )
    >>> zl.convert(lung, "lung.zarr")  # doctest: +SKIP

    - `url`: the experiment: a local path, an `s3://` or `tiledb://` URL, or `soma://` and one of them.
    - `where`: which cells, as a value filter of SOMA over the columns of obs. By default all.
    - `measurement`: the measurement in `ms`. By default the only one.
    - `layer`: the array in `X` of the measurement, which becomes X. By default the only one.

    obs and var become those of AnnData. Cells are named by `obs_id`, or by `soma_joinid` without it.
    """

    schemes = ("soma://", "tiledb://")
    marks = ("__tiledb_group.tdb",)

    url: Place
    where: str | None = field(default=None, kw_only=True)
    measurement: str | None = field(default=None, kw_only=True)
    layer: str | None = field(default=None, kw_only=True)

    def open(self, storage_options: Mapping[str, Any]) -> Input:
        url = os.fspath(self.url).removeprefix("soma://")
        name, label, uri, objects = _located(url, storage_options)
        require_library("tiledbsoma", source=name, extra="soma")
        now_ms = time.time_ns() // 1_000_000
        reader = Child(_READER, uri, _config(storage_options), now_ms, attempts=_ATTEMPTS)
        with contextlib.ExitStack() as opened:
            opened.callback(reader.close)
            names_in(reader, (), name, "cannot be opened as a SOMA experiment")
            measurement = _one(names_in(reader, ("ms",), name), self.measurement, "measurement", f"{name}: ms")
            within = ("ms", measurement, "X")
            layer = _one(names_in(reader, within, name), self.layer, "layer", f"{name}: ms/{measurement}/X")
            source = SomaRows(reader, name, self.where, (*within, layer))
            opened.pop_all()
        source.fingerprint = digest_of(objects, self.where, measurement, layer) if objects else None
        return RowInput(source, name, label, objects=objects)


def _located(url: str, storage_options: Mapping[str, Any]) -> tuple[str, str, str, Objects]:
    """The name and label of an experiment, its URI for TileDB, and its objects, unless TileDB's server has them."""
    if url.startswith("tiledb://"):
        return url, url.rpartition("/")[2], url, []
    (place,) = source_locations(url, storage_options)
    place.entry()
    return place.name, place.label, place.path if place.is_local else place.url, place.objects()


def _one(names: list[str], wanted: str | None, option: str, at: str) -> str:
    """The name that is wanted, or the only one. Raises SourceError."""
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or wanted not in names:
        said = f"has no {wanted!r}" if wanted is not None else f"has {len(names)} members"
        flag = {"measurement": "--measurement", "layer": "--soma-layer"}[option]
        chosen = f"choose one of {listed(sorted(names))} with zl.Soma(..., {option}=...) ({flag} NAME)"
        raise SourceError(f"{at} {said}: {chosen}")
    return wanted


def _config(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of TileDB for these options of s3fs."""
    given = s3_access(storage_options)
    scheme, _, host = given.pop("endpoint", "").partition("://")
    if host:
        given |= {"endpoint_override": host, "scheme": scheme, "use_virtual_addressing": "false"}
    names = {"access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key"}
    names |= {"session_token": "aws_session_token", "skip_signature": "no_sign_request"}
    s3 = {f"vfs.s3.{names.get(name, name)}": value for name, value in given.items()}
    return s3 | {"soma.init_buffer_bytes": _BUFFER_BYTES, "sm.mem.total_budget": _TILES_BYTES}
