"""Files as R, Julia, Java and old versions of anndata and mudata write them. The oracle is anndata or mudata."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import zloader as zl
from zloader.common.errors import OptionError

TEXT = {"length 1": list("BTB"), "length 6": ["CD4", "CD8α", "CD4"], "length 64": ["é" * 32, "T cell", "T cell"]}


def write(path: Path, labels: list[str], **uns: Any) -> ad.AnnData:
    obs = {
        "label": pd.Categorical(labels),
        "text": np.array(labels, object),
        "nullable": pd.array([labels[0], None, labels[2]], "string"),
        "n": np.arange(3),
    }
    var = pd.DataFrame({"symbol": pd.Categorical(["A1", "ß2"]), "length": [7, 9]}, index=["gene a", "gene b"])
    x = scipy.sparse.csr_matrix(np.arange(1, 7, dtype=np.float32).reshape(3, 2))
    adata = ad.AnnData(x, obs=pd.DataFrame(obs, index=[f"cell {n}" for n in range(3)]), var=var, uns=uns)
    adata.raw = adata
    with ad.settings.override(allow_write_nullable_strings=True):
        adata.write_h5ad(path)
    return adata


def write_zarr(adata: ad.AnnData, path: Path, version: int = 2) -> None:
    with ad.settings.override(zarr_write_format=version), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the format
        adata.write_zarr(path)


def fix_text(path: Path, charset: str = "utf-8", length: int | None = None) -> None:
    """Stores all strings of a file, and all attributes, as text of a fixed length."""

    def fixed(file: h5py.File, name: str) -> None:
        node, attrs = file[name], dict(file[name].attrs)
        encoded = [text.encode() for text in node.asstr()[...].reshape(-1)]
        dtype = h5py.string_dtype(charset, length or max(1, *map(len, encoded)))
        values = np.array(encoded).reshape(node.shape).astype(dtype)
        del file[name]
        file.create_dataset(name, data=values, dtype=dtype).attrs.update(attrs)

    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        for name in names:
            if isinstance(file[name], h5py.Dataset) and h5py.check_string_dtype(file[name].dtype) is not None:
                fixed(file, name)
        for name in ["/", *names]:
            for key, value in list(file[name].attrs.items()):
                if isinstance(value, str):
                    file[name].attrs.create(key, value.encode(), dtype=f"S{len(value)}")
                elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
                    encoded = np.array([each.encode() for each in value], "S")
                    # Some tools write an empty list of names as numbers.
                    file[name].attrs[key] = encoded if len(value) else np.empty(0)


def plain(values: Any) -> list[Any]:
    return [None if pd.isna(value) else value for value in values]


def assert_reads_as(dataset: zl.Dataset, wanted: ad.AnnData) -> None:
    """Names, frames, labels, conditions and rows of a dataset are those of an AnnData."""
    columns = list(wanted.obs.columns)
    assert dataset.obs_columns[: len(columns)] == columns
    assert list(dataset.obs_names) == list(wanted.obs_names)
    pd.testing.assert_frame_equal(dataset.var, wanted.var, check_index_type=False)
    read = dataset.obs()
    for name in columns:
        assert plain(read[name]) == plain(wanted.obs[name])
        assert isinstance(read[name].dtype, pd.CategoricalDtype) == isinstance(
            wanted.obs[name].dtype, pd.CategoricalDtype
        )
    (minibatch,) = zl.Loader(dataset, x=None, obs=columns, shuffle=False, batch_size=dataset.n_obs)
    for name in columns:
        if wanted.obs[name].dtype.kind in "iuf":
            continue
        labels = dataset.labels(name)
        codes = minibatch.obs[name].tolist()
        assert [labels[code] if code >= 0 else None for code in codes] == plain(wanted.obs[name])
        for label in labels:
            assert dataset.where(f"{name} == {label!r}").n_obs == (wanted.obs[name] == label).sum()
    rows = dataset.take([2, 0])
    assert rows.obs_names.tolist() == wanted.obs_names[[2, 0]].tolist()
    for name in columns:
        assert plain(rows.obs[name]) == plain(wanted.obs[name].iloc[[2, 0]])
    np.testing.assert_array_equal(rows.X.toarray(), wanted[[2, 0]].X.toarray())


@pytest.mark.parametrize("charset", ["ascii", "utf-8"])
@pytest.mark.parametrize("labels", TEXT.values(), ids=TEXT.keys())
def test_text_of_fixed_length(tmp_path: Path, labels: list[str], charset: str) -> None:
    path = tmp_path / "a.h5ad"
    wanted = write(path, labels, method="leiden", names=np.array(["a", "b"], object))
    fix_text(path, charset)
    if charset == "utf-8":  # anndata refuses other characters in text that is marked as ASCII
        wanted = ad.read_h5ad(path)
    dataset = zl.open_dataset(path)
    assert_reads_as(dataset, wanted)
    assert zl.open_dataset(path, genes_by="symbol").var_names.tolist() == ["A1", "ß2"]
    joined = zl.open_dataset([path, path], join="inner")
    assert joined.obs_column("label").taken(np.arange(6)).tolist() == [*wanted.obs["label"].cat.codes] * 2


def test_files_with_text_of_fixed_length_are_converted_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 6"], method="leiden", names=np.array(["a", "b"], object))
    fix_text(path)
    wanted = ad.read_h5ad(path)
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    assert_reads_as(zl.open_dataset(tmp_path / "a.zarr"), wanted)
    assert ad.read_zarr(tmp_path / "a.zarr").uns["method"] == "leiden"
    assert zl.verify(tmp_path / "a.zarr", against=path, progress=False).problems == ()
    assert zl.verify(path, against=path, progress=False).problems == ()


def test_many_rows_of_fixed_text_are_read_in_windows(tmp_path: Path) -> None:
    path, n = tmp_path / "a.h5ad", 600_000  # more than are kept with the metadata, and than one window has
    names = np.array([f"c{number}" for number in range(n)])
    obs = pd.DataFrame({"donor": np.where(np.arange(n) % 3, "d1", "d2").astype(object)}, index=names)
    adata = ad.AnnData(scipy.sparse.csr_matrix((n, 1), dtype=np.float32), obs=obs, var=pd.DataFrame(index=["g"]))
    adata.write_h5ad(path, convert_strings_to_categoricals=False)
    fix_text(path)
    dataset = zl.open_dataset(path)
    some = np.array([0, 131_072, 524_287, 524_288, n - 1])
    assert dataset.names_of(some).tolist() == names[some].tolist()
    assert dataset.where("donor == 'd2'").n_obs == (obs["donor"] == "d2").sum()


def test_bytes_that_are_no_text_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 1"])
    with h5py.File(path, "r+") as file:
        stored = file.create_dataset("uns/raw bytes", data=np.array([b"\xff\xfe\x00a", b"b"], "S5"), chunks=(1,))
        stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    wanted = ad.read_h5ad(path).uns["raw bytes"]
    assert zl.open_dataset(path).store.element("uns/raw bytes").tolist() == wanted.tolist()


def test_a_column_of_complex_numbers_is_no_tensor_and_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    adata = write(path, TEXT["length 1"])
    adata.obs["c"] = np.array([1 + 2j, 0, -1j])
    del adata.obs["nullable"]
    adata.write_h5ad(path)
    stores = [tmp_path / "v2.zarr", tmp_path / "v3.zarr"]
    for version, store in enumerate(stores, 2):
        write_zarr(adata, store, version)
    zl.convert(path, tmp_path / "converted.zarr", progress=False)
    for stored in (path, *stores, tmp_path / "converted.zarr"):
        dataset = zl.open_dataset(stored)
        assert dataset.obs()["c"].tolist() == adata.obs["c"].tolist()
        assert dataset.take([1, 2]).obs["c"].tolist() == [0, -1j]
        with pytest.raises(OptionError, match="obs column 'c' holds complex numbers"):
            zl.Loader(dataset, obs=["c"])
        assert len(list(zl.Loader(dataset, obs=["n"], batch_size=3))) == 1
    assert ad.read_zarr(tmp_path / "converted.zarr").obs["c"].tolist() == adata.obs["c"].tolist()
    assert zl.verify(tmp_path / "converted.zarr", against=path, progress=False).problems == ()
