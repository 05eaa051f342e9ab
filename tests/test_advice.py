"""What an error advises works: each is provoked, and then done."""

from __future__ import annotations

import functools
import gzip
import http.server
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import mudata as md
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import counts, web_server

import zloader as zl

pytestmark = pytest.mark.filterwarnings("ignore:.*zarr v[23]:UserWarning", "ignore:Consolidated metadata:UserWarning")

ADATA = counts(40, 8, seed=3)


def refused(*steps: Callable[[], Any]) -> str:
    """The message with which all steps are refused; of several, the last one's."""
    for step in steps:
        with pytest.raises(zl.ZloaderError) as caught:
            step()
    return str(caught.value)


def both(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Opening and converting a file."""
    return (
        lambda: zl.convert(path, path.parent / "never.zarr", progress=False),
        lambda: zl.open_dataset(path),
    )


def write(path: Path, **arrays: Any) -> Path:
    """An HDF5 file with these arrays; `__` separates groups."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace("__", "/")] = array
    return path


# ---- files of other tools


def test_loom(tmp_path: Path) -> None:
    names = {"row_attrs__Gene": [b"a", b"b"], "col_attrs__CellID": [b"x", b"y", b"z"]}
    version = {"attrs__LOOM_SPEC_VERSION": "3.0.0"}
    path = write(tmp_path / "cells.loom", matrix=np.ones((2, 3), np.float32), **names, **version)
    call = re.search(r"zl\.convert\(.*\)", refused(*both(path)))
    assert call is not None
    assert call[0] == "zl.convert(ad.io.read_loom('cells.loom'), 'cells.zarr')"
    pytest.importorskip("loompy")
    eval(call[0].replace("'cells", f"'{tmp_path}/cells"), {"zl": zl, "ad": ad})
    assert zl.open_dataset(tmp_path / "cells.zarr").shape == (3, 2)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"assays__RNA__features": [b"a"], "cell.names": [b"x"]}, "SeuratDisk::Convert"),
        ({"matrix__barcodes": [b"x"], "matrix__data": [1]}, "download the whole file"),
        ({"matrix__indptr": [0, 1], "matrix__data": [1]}, "download the whole file"),
        ({"x": [1]}, r"zl\.convert\(adata, 'cells\.zarr'\)"),
    ],
    ids=["h5seurat", "10x without indptr", "10x without barcodes", "anything"],
)
@pytest.mark.parametrize("name", ["cells.h5", "cells.h5seurat"])
def test_files_that_convert_refuses(tmp_path: Path, arrays: dict[str, Any], says: str, name: str) -> None:
    for message in map(refused, both(write(tmp_path / name, **arrays))):
        assert re.search(says, message)
        assert "zloader convert" not in message


@pytest.mark.parametrize("suffix", ["h5mu", "zarr"])
def test_modalities_that_share_genes(tmp_path: Path, suffix: str) -> None:
    one, other = ADATA.copy(), ADATA.copy()
    other.obs_names = [f"other {name}" for name in other.obs_names]
    whole = md.MuData({"one": one, "other": other}, axis=1)
    path = tmp_path / f"both.{suffix}"
    whole.write(path) if suffix == "h5mu" else whole.write_zarr(path)
    message = refused(lambda: zl.open_dataset(path))
    advised = message.rpartition("such as ")[2]
    if "convert them" in message:
        zl.convert(advised, tmp_path / "one.zarr", progress=False)
        advised = tmp_path / "one.zarr"
    assert zl.open_dataset(advised).obs_names.tolist() == one.obs_names.tolist()


# ---- what was not unpacked or downloaded


@pytest.mark.parametrize("name", ["cells.h5ad", "cells", "cells.h5ad.gz"])
def test_a_file_compressed_with_gzip(tmp_path: Path, name: str) -> None:
    ADATA.write_h5ad(tmp_path / "plain.h5ad")
    path = tmp_path / name
    path.write_bytes(gzip.compress((tmp_path / "plain.h5ad").read_bytes()))
    for message in map(refused, both(path)):
        assert "is compressed with gzip: unpack it with 'gunzip'" in message
    path.write_bytes(gzip.decompress(path.read_bytes()))
    assert zl.open_dataset(path).shape == ADATA.shape


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        (b"/annex/objects/SHA256E-s123--abc.h5ad\n", "git annex get"),
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b"PK\x03\x04abc", "unzip"),
        (b"BZh91AY", "bunzip2"),
    ],
    ids=["git-lfs", "git-annex", "html", "zip", "bzip2"],
)
@pytest.mark.parametrize("name", ["cells.h5ad", "cells.h5mu", "cells.bin"])
def test_no_file_of_hdf5(tmp_path: Path, begin: bytes, says: str, name: str) -> None:
    (tmp_path / name).write_bytes(begin)
    for message in map(refused, both(tmp_path / name)):
        assert says in message
        assert "damaged" not in message


# ---- stale metadata


def _replace(name: str, column: Any) -> Callable[[Any], None]:
    return lambda group: ad.io.write_elem(group["obs"], name, column)


def _add(group: Any) -> None:
    ad.io.write_elem(group["obs"], "new", np.arange(40))
    group["obs"].attrs["column-order"] = [*group["obs"].attrs["column-order"], "new"]


STALE = {
    "other dtype": _replace("n_counts", np.arange(40, dtype=np.int16)),
    "to labels": _replace("n_counts", pd.Categorical(["a", "b"] * 20)),
    "from labels": _replace("cell_type", np.arange(40.0)),
    "added": _add,
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_stale_consolidated_metadata(tmp_path: Path, zarr_format: Any, change: Any, caplog: Any) -> None:
    path = str(tmp_path / "a.zarr")
    with ad.settings.override(zarr_write_format=zarr_format), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ADATA.write_zarr(path)
        zarr.consolidate_metadata(path)
        change(zarr.open_group(path, mode="r+", use_consolidated=False))
    if change is STALE["other dtype"]:
        with pytest.raises(zl.ZloaderError, match="obs/n_counts"):
            zl.open_dataset(path).obs()
        zarr.consolidate_metadata(path)
    else:
        zl.open_dataset(path).obs()
        advised = re.search(r"stale .*run (zarr\.consolidate_metadata\(.*?\))", caplog.text)
        assert advised is not None
        eval(advised[1], {"zarr": zarr})
    caplog.clear()
    found, wanted = zl.open_dataset(path).obs(), ad.read_zarr(path).obs
    for name in wanted:
        assert found[name].tolist() == wanted[name].tolist()
    zl.convert(path, tmp_path / "b.zarr", progress=False)
    assert caplog.text == ""


@pytest.mark.parametrize("change", ["to labels", "from labels", "added"])
def test_columns_changed_behind_consolidated_metadata_are_read(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.zarr"
    ADATA.write_zarr(path)
    zarr.consolidate_metadata(path)
    STALE[change](zarr.open_group(path, mode="r+", use_consolidated=False))
    wanted = ad.io.read_elem(zarr.open_group(path, mode="r", use_consolidated=False)["obs"])
    zl.convert(path, tmp_path / "b.zarr", progress=False)
    for found in (zl.open_dataset(path).obs(), ad.read_zarr(tmp_path / "b.zarr").obs):
        for name in wanted:
            assert found[name].tolist() == wanted[name].tolist()


# ---- web servers


class _Signed(http.server.SimpleHTTPRequestHandler):
    """Redirects /files/NAME to /bucket/NAME with a signature that is good for some reads."""

    protocol_version = "HTTP/1.1"
    reads: dict[str, int]
    number: Iterator[int]

    def do_HEAD(self) -> None:
        self._send(403)

    def do_GET(self) -> None:
        path, _, signature = self.path.partition("?")
        if path.startswith("/files/"):
            to = f"/bucket/{path.removeprefix('/files/')}?X-Amz-Credential=a%2Fb&Signature={next(self.number)}"
            return self._send(302, Location=to)
        self.reads[signature] = self.reads.get(signature, 0) + 1
        if not signature.startswith("X-Amz-Credential=a%2Fb&") or self.reads[signature] > 9:
            return self._send(403)
        file = Path(self.directory, path.removeprefix("/bucket/"))
        if not file.is_file():
            return self._send(404)
        stored = file.read_bytes()
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-")).groups()  # type: ignore[union-attr]
        part = stored[int(first) : int(last or len(stored)) + 1]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(stored)}"
        return self._send(206, part, **{"Content-Range": place, "ETag": '"x"'})

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize("name", ["cells.h5ad", "12345", "cells.zarr"])
def test_a_redirect_to_an_address_that_expires(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".zarr"):
        ADATA.write_zarr(path)
        zarr.consolidate_metadata(path)
    else:
        ADATA.write_h5ad(path)
    handler = type("Handler", (_Signed,), {"reads": {}, "number": itertools.count()})
    with web_server(functools.partial(handler, directory=str(tmp_path))) as server:
        url = f"{server}/files/{name}"
        for retries in (0, 16):  # to follow a redirect is no retry
            dataset = zl.open_dataset(url)
            for minibatch in zl.Loader(dataset, batch_size=8, options=zl.FetchOptions(retries=retries)):
                np.testing.assert_array_equal(minibatch.x.to_dense(), ADATA.X[np.asarray(minibatch.index)].toarray())
        assert dataset.obs()["cell_type"].tolist() == ADATA.obs["cell_type"].tolist()
        if not name.endswith(".zarr"):
            zl.convert(url, tmp_path / "converted.zarr", progress=False)
            assert ad.read_zarr(tmp_path / "converted.zarr").obs_names.tolist() == ADATA.obs_names.tolist()


class _Barred(_Signed):
    """Requires a password."""

    def do_GET(self) -> None:
        return self.do_HEAD() if "Authorization" in self.headers else self._send(401)

    def do_HEAD(self) -> None:
        if "Authorization" not in self.headers:
            return self._send(401)
        self.path = self.path.replace("/files/", "/bucket/") + f"?X-Amz-Credential=a%2Fb&{next(self.number)}"
        return _Signed.do_GET(self)


def test_a_source_that_needs_headers(tmp_path: Path) -> None:
    ADATA.write_h5ad(tmp_path / "cells.h5ad")
    handler = type("Handler", (_Barred,), {"reads": {}, "number": itertools.count()})
    with web_server(functools.partial(handler, directory=str(tmp_path))) as server:
        url, into = f"{server}/files/cells.h5ad", tmp_path / "a.zarr"
        for step in (lambda: zl.convert(url, into, progress=False), lambda: zl.open_dataset(url)):
            assert re.search(r"(not allowed|denied).*401.*headers", refused(step))
        options = {"headers": {"Authorization": "Bearer open sesame"}}
        zl.convert(url, into, source_options=options, progress=False)
    assert zl.open_dataset(into).shape == ADATA.shape


# ---- hints


@pytest.fixture
def dataset(tmp_path: Path) -> zl.Dataset:
    adata = ADATA.copy()
    adata.obs["label"] = pd.Categorical([None, "T", "B", "T"] * 10)
    adata.layers["same"] = adata.X.copy()
    adata.write_h5ad(tmp_path / "cells.h5ad")
    return zl.open_dataset(tmp_path / "cells.h5ad")


def test_a_file_shows_what_a_store_shows(dataset: zl.Dataset, tmp_path: Path) -> None:
    zl.convert(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", progress=False)
    store = zl.open_dataset(tmp_path / "cells.zarr")
    for one, other in ((dataset, store), (dataset[:5], store[:5])):
        assert repr(one).replace(".h5ad", ".zarr") == repr(other)
    assert "label" in repr(dataset)
    assert "layers: 'same'" in repr(zl.open_dataset([tmp_path / "cells.h5ad", tmp_path / "cells.zarr"]))


@pytest.mark.parametrize(
    ("condition", "says", "right"),
    [
        ("label = 'T'", "write == to compare", "label == 'T'"),
        ("label == T", "If it is a label, put it in quotes: 'T'", "label == 'T'"),
        ("label in (T, B)", "a string in quotes or a number", "label in ('T', 'B')"),
    ],
)
def test_conditions(dataset: zl.Dataset, condition: str, says: str, right: str) -> None:
    assert says in refused(lambda: dataset.where(condition))
    assert len(dataset.where(right)) == len(dataset.obs().query(right))


def test_a_minibatch_names_its_parts(dataset: zl.Dataset) -> None:
    minibatch = next(iter(zl.Loader(dataset, batch_size=8)))
    with pytest.raises(AttributeError, match=r"has no 'X' here, only: row, index, x, obs.*Did you mean 'x'\? A Loader"):
        _ = minibatch.X  # type: ignore[attr-defined]
    assert not hasattr(minibatch, "_nothing")


def test_missing_labels_are_told_once(dataset: zl.Dataset, caplog: Any) -> None:
    loader = zl.Loader(dataset, batch_size=8, obs=["label", "donor"])
    for _ in range(2):
        codes = np.concatenate([minibatch.obs["label"] for minibatch in loader])
        assert (codes < 0).sum() == 10
    assert len(caplog.records) == 1
    advised = re.search(r"dataset\.where\('(.*?)'\)", caplog.text)
    assert "ignore_index=-1" in caplog.text
    assert advised is not None
    caplog.clear()
    assert all(
        (each.obs["label"] >= 0).all() for each in zl.Loader(dataset.where(advised[1]), batch_size=8, obs=["label"])
    )
    assert caplog.text == ""


def test_controls_outside_of_the_view(dataset: zl.Dataset) -> None:
    others = dataset.where("label != 'T'")
    message = refused(lambda: zl.Loader(others, batch_size=5, controls=zl.MatchedControls("label == 'T'", match=[])))
    assert "none meets the condition" in message
    advised = re.search(r"MatchedControls\((dataset\.where\(.*?\)), \.\.\.\)", message)
    assert advised is not None
    controls = zl.MatchedControls(eval(advised[1], {"dataset": dataset}), match=[])
    for minibatch in zl.Loader(others, batch_size=5, controls=controls):
        assert minibatch.control is not None
        assert (ADATA.obs_names[rows := np.asarray(minibatch.control.row)] == dataset.obs_names[rows]).all()
        assert set(np.asarray(minibatch.control.row) % 4) <= {1, 3}


@pytest.mark.parametrize("flavor", ["seurat", "seurat_v3", "cell_ranger"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_highly_variable_genes_of_values_that_are_not_finite(tmp_path: Path, flavor: Any, value: float) -> None:
    adata = counts(60, 30, seed=3)
    adata.X = np.log1p(adata.X.astype(np.float32).toarray())
    adata.X[5, 7] = value
    zl.convert(adata, tmp_path / "a.zarr", progress=False)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    assert re.search(
        r"^X has values.*such as 'gene 7'", refused(lambda: dataset.highly_variable_genes(3, flavor=flavor))
    )


def test_a_mirror_of_a_file_that_may_change_unseen(caplog: Any) -> None:
    from zloader.access.stored_objects import StoredObject, mirror_fingerprint

    assert mirror_fingerprint("http://x/a.h5ad", "", {"": StoredObject(1, "", "")}) is None  # type: ignore[arg-type]
    assert "a change of the file could not be detected" in caplog.text


def test_mouse_genes(tmp_path: Path) -> None:
    adata = counts(20, 3, seed=1)
    adata.var_names = ["Gapdh", "Actb", "Cd4"]
    adata.write_h5ad(tmp_path / "mouse.h5ad")
    tokens = zl.tokenizers.ScGPT({"<pad>": 0, "<cls>": 1, "GAPDH": 2, "ACTB": 3, "CD4": 4}, x="X")
    options: dict[str, Any] = {"batch_size": 5, "tokens": tokens}
    message = refused(lambda: zl.Loader(zl.open_dataset(tmp_path / "mouse.h5ad"), **options))
    assert "genes_by=str.upper" in message
    next(iter(zl.Loader(zl.open_dataset(tmp_path / "mouse.h5ad", genes_by=str.upper), **options)))
    orthologs = {"Gapdh": "GAPDH", "Actb": "ACTB", "Cd4": "CD4"}
    next(iter(zl.Loader(zl.open_dataset(tmp_path / "mouse.h5ad", genes_by=orthologs), **options)))
