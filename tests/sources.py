"""Sources for conversion: valid and invalid .h5ad files, and destinations where writing fails."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
import zarr

import zloader as zl
from zloader.access.location import Location
from zloader.conversion.destination import Destination
from zloader.conversion.object_writer import ObjectWriter, translated

# Chunks of 1 024 elements, shards of at most two chunks, windows of a few rows.
SMALL = zl.ConvertOptions(chunk_rows=1, shard_size="4KiB", window_bytes=4096)
# Since pandas 3, text has its own dtype, which anndata stores with a mask. STRINGS is the path of a column's strings.
HAS_TEXT_DTYPE = isinstance(pd.Series(["a"]).dtype, pd.StringDtype)
STRINGS = "values" if HAS_TEXT_DTYPE else ""
LAYOUTS: dict[str, Callable[[sp.csr_matrix], Any]] = {
    "csr": lambda x: x,
    "csc": lambda x: x.tocsc(),
    "dense": lambda x: x.toarray(),
}


def counts(n_rows: int = 60, n_genes: int = 300, seed: int = 0, dtype: Any = np.float32) -> sp.csr_matrix:
    """Counts with about 5 000 values and some empty rows."""
    x = sp.random(n_rows, n_genes, 0.3, "csr", random_state=seed)
    x.data = np.random.default_rng(seed).integers(1, 100, x.nnz).astype(dtype)
    x.data[np.repeat(np.arange(n_rows) % 7 == 3, np.diff(x.indptr))] = 0
    x.eliminate_zeros()
    return x


def frame(length: int, prefix: str) -> pd.DataFrame:
    return pd.DataFrame(index=[f"{prefix}{i}" for i in range(length)])


def write_h5ad(path: Path, x: Any, **parts: Any) -> Path:
    n_rows, n_genes = x.shape
    parts = {"obs": frame(n_rows, "cell"), "var": frame(n_genes, "gene")} | parts
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.AnnData(X=x, **parts).write_h5ad(path, convert_strings_to_categoricals=False)
    return path


def write_csr(path: Path, x: sp.csr_matrix, **parts: Any) -> Path:
    """Like `write_h5ad`, but writes the arrays of X as they are: any order, any dtype, invalid or not."""
    empty = sp.csr_matrix(x.shape, dtype=np.float32)
    write_h5ad(path, empty, **parts)
    with h5py.File(path, "r+") as file:
        for name in ("data", "indices", "indptr"):
            del file["X"][name]
            file["X"][name] = getattr(x, name)
    return path


def convert(source: Path, dest: str | Path, options: zl.ConvertOptions = SMALL, **more: Any) -> zl.ConversionReport:
    return zl.convert(source, dest, options=options, progress=False, **more)


def dense(x: Any) -> np.ndarray:
    return x.toarray() if sp.issparse(x) else np.asarray(x)


def assert_same(out: Any, wanted: Any) -> None:
    """Asserts equal types, dtypes and values, recursively."""
    if isinstance(wanted, Mapping):
        assert set(out) == set(wanted)
        for key in wanted:
            assert_same(out[key], wanted[key])
    elif isinstance(wanted, pd.DataFrame):
        pd.testing.assert_frame_equal(out, wanted)
    elif sp.issparse(wanted):
        assert (out.format, out.dtype) == (wanted.format, wanted.dtype)
        np.testing.assert_array_equal(out.toarray(), wanted.toarray())
    elif isinstance(wanted, np.ndarray):
        assert out.dtype == wanted.dtype or (out.dtype.kind, wanted.dtype.kind) == ("T", "O")  # strings
        np.testing.assert_array_equal(out, wanted)
    else:
        assert type(out) is type(wanted)
        assert out == wanted


def layers_of(adata: ad.AnnData) -> dict[str, Any]:
    """The layers by name, without X, which anndata 0.13 includes under the name None."""
    return {name: layer for name, layer in adata.layers.items() if name is not None}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def assert_not_a_store(dest: Path) -> None:
    with pytest.raises((FileNotFoundError, KeyError)):
        zarr.open_group(dest, mode="r")
    with pytest.raises((FileNotFoundError, KeyError)):
        ad.read_zarr(dest)


def full_anndata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    n_rows, n_genes = 60, 300
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(rng.integers(-1, 3, n_rows), ["a", "b", "c", "unused"]),
            "ordered": pd.Categorical(rng.choice(["lo", "hi"], n_rows), categories=["lo", "hi"], ordered=True),
            "numbered": pd.Categorical(rng.integers(0, 3, n_rows)),
            "string": [f"name {i % 9} ä" for i in range(n_rows)],
            "flag": rng.random(n_rows) > 0.5,
            "maybe": pd.array([True, None] * 30, dtype="boolean"),
            "count": pd.array([None, 3] * 30, dtype="Int32"),
            "nullable string": pd.array(["x", None] * 30, dtype="string"),
            "float": rng.random(n_rows),
            "zero": np.zeros(n_rows, np.int16),
        },
        index=pd.Index([f"cell{i}" for i in range(n_rows)], name="barcode"),
    )
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(n_genes)]}, index=[f"g{i}" for i in range(n_genes)])
    adata = ad.AnnData(
        X=counts(),
        obs=obs,
        var=var,
        layers={"csr": counts(seed=1), "csc": counts(seed=2).tocsc(), "dense": rng.random((n_rows, n_genes))},
        obsm={
            "X_pca": rng.random((n_rows, 5), np.float32),
            "frame": obs[["float"]].copy(),
            "sparse": counts(n_rows, 4),
        },
        varm={"PCs": rng.random((n_genes, 5))},
        obsp={"graph": sp.random(n_rows, n_rows, 0.1, "csr", random_state=0)},
        varp={"pairs": rng.random((n_genes, n_genes)).astype(np.float32)},
        uns={
            "text": "hello",
            "number": 3.5,
            "none": None,
            "flag": True,
            "list": np.array(["a", "b"]),
            "nested": {"array": np.arange(6).reshape(2, 3), "frame": var.head(3), "empty": {}},
            "records": np.array([(1, 0.5), (2, 0.25)], dtype=[("n", "i4"), ("p", "f8")]),
        },
    )
    adata.raw = ad.AnnData(
        X=counts(n_rows, 400, seed=3),
        obs=obs,
        var=frame(400, "raw"),
        varm={"loadings": rng.random((400, 2))},
    )
    return adata


class FailingDestination(Destination):
    """A destination that calls `fail` for every object after the first `survives`; `stored` lists the keys tried."""

    def __init__(self, location: Location, *, survives: int = 10**9, fail: Callable[[], None] = lambda: None) -> None:
        super().__init__(location)
        self._survives, self._fail = survives, fail
        self._counting = threading.Lock()
        self.stored: list[str] = []

    def _count(self, key: str) -> None:
        with self._counting:
            fails = len(self.stored) >= self._survives
            self.stored.append(key)
        if fails:
            self._fail()

    def create_object(self, key: str) -> ObjectWriter:
        with translated(f"write {key} to", self.location.url):
            self._count(key)
        return super().create_object(key)


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def write_10x_h5(path: Path, x: sp.csr_matrix) -> Path:
    n_rows, n_genes = x.shape
    with h5py.File(path, "w") as file:
        matrix = file.create_group("matrix")
        matrix["shape"] = np.array([n_genes, n_rows], np.int32)
        matrix["data"] = x.data.astype(np.int32)
        matrix["indices"], matrix["indptr"] = x.indices.astype(np.int64), x.indptr.astype(np.int64)
        matrix["barcodes"] = np.array([f"cell{i}" for i in range(n_rows)], "S")
        features = matrix.create_group("features")
        features["id"] = np.array([f"ENSG{i}" for i in range(n_genes)], "S")
        features["name"] = np.array(TENX_GENES, "S")
        features["feature_type"] = np.array(TENX_KINDS, "S")
        features["genome"] = np.array(["GRCh38"] * n_genes, "S")
    return path


def write_10x_mtx(path: Path, x: sp.csr_matrix) -> Path:
    path.mkdir()
    with gzip.open(path / "matrix.mtx.gz", "wb") as file:
        scipy.io.mmwrite(file, x.T.astype(np.int32))
    lines = zip([f"ENSG{i}" for i in range(x.shape[1])], TENX_GENES, TENX_KINDS, strict=True)
    with gzip.open(path / "features.tsv.gz", "wt") as file:
        file.writelines("\t".join(line) + "\n" for line in lines)
    with gzip.open(path / "barcodes.tsv.gz", "wt") as file:
        file.writelines(f"cell{i}\n" for i in range(x.shape[0]))
    return path


TENX_GENES = [f"gene{i}" for i in range(299)] + ["gene0"]
TENX_KINDS = ["Gene Expression"] * 290 + ["Antibody Capture"] * 10
TENX = {"plate.h5": write_10x_h5, "plate": write_10x_mtx}
