"""Sources in buckets and on web servers, also in Parquet: they are stored as local ones are."""

from __future__ import annotations

import functools
import http.server
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr
from helpers import web_server
from sources import counts, full_anndata

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import AccessDeniedError, StoreError, StoreNotFoundError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Writing zarr v2")]
NAMES = ["a.h5ad", "a.zarr"]


def write(folder: Path) -> Path:
    """A file and a store with the same cells."""
    folder.mkdir(exist_ok=True)
    full_anndata().write_h5ad(folder / "a.h5ad", compression="gzip")
    full_anndata().write_zarr(folder / "a.zarr")
    zarr.consolidate_metadata(folder / "a.zarr")
    return folder


def convert(source: Any, dest: Path, **options: Any) -> zl.ConversionReport:
    return zl.convert(source, dest, source_options=options, progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_s3(tmp_path: Path, s3: Any, name: str) -> None:
    local = write(tmp_path / "local") / name
    filesystem = Location(url=s3.url(), storage_options=s3.storage_options).filesystem()
    filesystem.put(str(local), f"{s3.bucket}/{s3.prefix}/{name}", recursive=local.is_dir())
    report = convert(s3.url(name), tmp_path / "b.zarr", **s3.read_only_storage_options)
    assert report.sources == [s3.url(name)]
    assert zl.verify(tmp_path / "b.zarr", against=local, progress=False).ok
    with pytest.raises(AccessDeniedError, match="storage_options") as caught:
        convert(s3.url(name), tmp_path / "d.zarr", **s3.storage_options | {"secret": "not-the-secret"})
    assert "not-the-secret" not in str(caught.value)
    with pytest.raises(StoreNotFoundError):
        convert(s3.url("none.h5ad"), tmp_path / "d.zarr", **s3.storage_options)


@pytest.mark.parametrize("name", NAMES)
def test_a_web_server(tmp_path: Path, sim: Any, name: str) -> None:
    local, server = write(tmp_path / "bucket") / name, sim()
    report = convert(f"{server.url}/bucket/{name}?signature=secret", tmp_path / "b.zarr")
    assert zl.verify(tmp_path / "b.zarr", against=local, progress=False).ok
    assert report.sources == [f"{server.url}/bucket/{name}"]
    assert "secret" not in (tmp_path / "b.zarr" / "zarr.json").read_text()
    server.faults = [{"kind": "status", "value": 404, "count": 1 << 30}]
    with pytest.raises(StoreError, match=name) as caught:
        convert(f"{server.url}/bucket/{name}?signature=secret", tmp_path / "d.zarr")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "d.zarr" / "zarr.json").exists()


def test_a_web_server_without_ranges(tmp_path: Path) -> None:
    write(tmp_path / "local")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with (
        web_server(functools.partial(Quiet, directory=str(tmp_path / "local"))) as url,
        pytest.raises(StoreError, match=r"a\.h5ad"),
    ):
        convert(f"{url}/a.h5ad", tmp_path / "b.zarr")


def test_parquet_in_a_bucket(tmp_path: Path, s3: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = counts()
    rows = [slice(*x.indptr[row : row + 2]) for row in range(x.shape[0])]
    cells = {"genes": [x.indices[row] for row in rows], "expressions": [x.data[row] for row in rows]}
    cells["batch"] = np.arange(x.shape[0]) % 3
    pq.write_table(pa.table(cells), tmp_path / "cells.parquet", row_group_size=7)
    names = [f"g{i}" for i in range(x.shape[1])]
    pq.write_table(pa.table({"token_id": range(x.shape[1]), "name": names}), tmp_path / "genes.parquet")
    filesystem = Location(url=s3.url(), storage_options=s3.storage_options).filesystem()
    for name in ("cells.parquet", "genes.parquet"):
        filesystem.put_file(str(tmp_path / name), f"{s3.bucket}/{s3.prefix}/{name}")
    given = zl.Parquet(s3.url("*cells.parquet"), gene_metadata=s3.url("genes.parquet"))
    convert(given, tmp_path / "a.zarr", **s3.read_only_storage_options)
    found = ad.read_zarr(tmp_path / "a.zarr")
    np.testing.assert_array_equal(found.X.toarray(), x.toarray())
    assert found.obs["batch"].tolist() == cells["batch"].tolist()
    assert found.var_names.tolist() == names
