"""Files as R, Julia, Java and old versions of anndata and mudata write them. The oracle is anndata or mudata."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr

import zloader as zl
from zloader.common.errors import FormatError, OptionError

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
        for kind in (UserWarning, DeprecationWarning):  # about the format
            warnings.simplefilter("ignore", kind)
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
        if wanted.obs[name].dtype.kind in "biuf":
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


@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("categorical", [False, True])
def test_text_that_is_marked_as_ascii_may_be_utf8(tmp_path: Path, length: int | None, categorical: bool) -> None:
    """anndata and h5py refuse it."""
    path, labels = tmp_path / "a.h5ad", ["é", "b", "ß", "é"]
    obs = pd.DataFrame({"t": labels}, index=["c0", "c1", "µ", "c3"])
    obs["t"] = obs["t"].astype("category" if categorical else object)
    ad.AnnData(np.eye(4, dtype=np.float32), obs=obs).write_h5ad(path, convert_strings_to_categoricals=False)
    with h5py.File(path, "r+") as file:
        for name in ("obs/_index", "obs/t/categories" if categorical else "obs/t"):
            stored = [value.encode() for value in np.asarray(ad.io.read_elem(file[name]))]
            del file[name]
            text = file.create_dataset(name, len(stored), h5py.string_dtype("ascii", length))
            text[:] = np.array(stored, object if length is None else "S4")
            text.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    with pytest.raises(UnicodeDecodeError):
        ad.read_h5ad(path)
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    assert zl.verify(tmp_path / "a.zarr", against=path, progress=False).problems == ()
    for found in (zl.open_dataset(path).obs(), ad.read_zarr(tmp_path / "a.zarr").obs):
        assert (found["t"].tolist(), found.index.tolist()) == (labels, obs.index.tolist())


@pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:Transforming to str index")
def test_names_of_bytes_in_zarr(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    with ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False):
        ad.AnnData(np.eye(3, dtype=np.float32)).write_zarr(path)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    for frame in ("obs", "var"):
        del root[f"{frame}/_index"]
        names = root.create_array(f"{frame}/_index", data=np.array([b"a1", b"b", b"c22"]))
        names.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    zarr.consolidate_metadata(path)
    wanted, dataset = ad.read_zarr(path), zl.open_dataset(path)
    assert dataset.obs().index.tolist() == dataset.take([0, 1, 2]).obs_names.tolist() == wanted.obs_names.tolist()
    assert dataset.var_names.tolist() == wanted.var_names.tolist()
    assert dataset[:, ["c22"]].take([2]).X.tolist() == wanted[[2], ["c22"]].X.tolist() == [[1]]


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


def age(frame: Any) -> None:
    """Makes a frame of an HDF5 file or a Zarr v2 store one of anndata 0.7, whose categories lie apart."""
    in_zarr = isinstance(frame, zarr.Group)
    frame.attrs["encoding-version"] = "0.1.0"
    for name in [*frame.attrs["column-order"], frame.attrs["_index"]]:
        if not isinstance(frame[name], h5py.Dataset | zarr.Array):
            found, ordered = ad.io.read_elem(frame[name]), frame[name].attrs.get("ordered")
            del frame[name]
            if ordered is None:  # the strings of pandas 3
                ad.io.write_elem(frame, name, np.asarray(found, object))
            else:
                labels = frame.require_group("__categories")
                ad.io.write_elem(labels, name, found.categories.to_numpy(object))
                ad.io.write_elem(frame, name, found.codes)
                labels[name].attrs["ordered"] = bool(ordered)
                frame[name].attrs["categories"] = f"__categories/{name}" if in_zarr else labels[name].ref
        for part in ("encoding-type", "encoding-version"):
            del frame[name].attrs[part]


def frames_of(root: Any) -> list[Any]:
    frames = [root[path] for path in ("obs", "var", "raw/var") if path in root]
    return frames + [frame for name in root.get("mod", {}) for frame in frames_of(root["mod"][name])]


def written_old(adata: Any, path: Path) -> Path:
    if path.suffix == ".zarr":
        write_zarr(adata, path)
        root = zarr.open_group(path, mode="r+", use_consolidated=False)
        (path / ".zmetadata").unlink(missing_ok=True)
        for frame in frames_of(root):
            age(frame)
    else:
        adata.write(path)
        with h5py.File(path, "r+") as file:
            for frame in frames_of(file):
                age(frame)
    return path


def read_anndata(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ad.OldFormatWarning)
        return ad.read_zarr(path) if path.suffix == ".zarr" else ad.read_h5ad(path)


def labelled(labels: list[Any], first: int = 0) -> ad.AnnData:
    n = len(labels)
    stages = pd.Categorical(["late", None, "early", "late"][:n], ["early", "middle", "late"], ordered=True)
    obs = pd.DataFrame(
        {"label": pd.Categorical(labels), "stage": stages, "n": np.arange(n), "text": [f"t{i % 2}" for i in range(n)]},
        index=[f"c{first + i}" for i in range(n)],
    )
    obs["text"] = obs["text"].astype("category")
    var = pd.DataFrame({"kind": pd.Categorical(["x", "y", "x"]), "symbol": pd.Categorical(list("pqr"))}, list("abc"))
    x = scipy.sparse.csr_matrix(np.arange(first + 1, first + 1 + 3 * n, dtype=np.float32).reshape(n, 3))
    adata = ad.AnnData(x, obs=obs, var=var)
    adata.raw = adata
    return adata


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_frames_of_anndata_0_7(tmp_path: Path, suffix: str) -> None:
    paths = [
        written_old(labelled(["B", "T", None, "B"]), tmp_path / f"one{suffix}"),
        written_old(labelled(["NK", "T", "T", "NK"], 4), tmp_path / f"two{suffix}"),
    ]
    of_paths = [read_anndata(path) for path in paths]
    with opened(paths[1]) as root:
        root.attrs["encoding-type"] = "AnnData"  # as MuDataSeurat writes it
    for path, wanted in zip(paths, of_paths, strict=True):
        dataset = zl.open_dataset(path)
        assert_reads_as(dataset, wanted)
        assert dataset.categories("label").tolist() == wanted.obs["label"].cat.categories.tolist()
        assert dataset.obs(["stage"])["stage"].dtype == wanted.obs["stage"].dtype
        pd.testing.assert_frame_equal(dataset.matrices.var_of("raw/X"), wanted.raw.var, check_index_type=False)
        assert zl.open_dataset(path, genes_by="symbol").var_names.tolist() == list("pqr")
        zl.convert(path, tmp_path / "converted.zarr", overwrite=True, progress=False)
        assert_reads_as(zl.open_dataset(tmp_path / "converted.zarr"), wanted)
        assert zl.verify(tmp_path / "converted.zarr", against=path, progress=False).problems == ()
        if suffix == ".h5ad":
            assert zl.verify(path, against=path, progress=False).problems == ()
    joined = ad.concat(of_paths)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        both = zl.open_dataset(paths, cache=cache)
        assert both.shape == joined.shape
        assert plain(both.obs()["label"]) == plain(joined.obs["label"])
        (minibatch,) = zl.Loader(both, x=None, obs=["label"], shuffle=False, batch_size=8)
        assert minibatch.obs["label"].tolist() == [0, 1, -1, 0, 2, 1, 1, 2]
        assert both.categories("label").tolist() == ["B", "T", "NK"]
        assert both.where("label == 'T'").n_obs == 3
    new = tmp_path / "new.h5ad"
    of_paths[1].write_h5ad(new)
    mixed = zl.open_dataset([paths[0], new])
    assert plain(mixed.obs()["label"]) == plain(joined.obs["label"])
    zl.convert([*paths], tmp_path / "both.zarr", progress=False)
    assert plain(ad.read_zarr(tmp_path / "both.zarr").obs["label"]) == plain(joined.obs["label"])
    assert zl.verify(tmp_path / "both.zarr", against=paths, progress=False).problems == ()


def test_a_categorical_index_of_anndata_0_7(tmp_path: Path) -> None:
    adata = labelled(["B", "T", "B"])
    path = tmp_path / "a.h5ad"
    adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file["obs/_index"]
        ad.io.write_elem(file["obs"], "_index", pd.Categorical(["z", "y", "x"]))
        age(file["obs"])
    assert zl.open_dataset(path).obs_names.tolist() == read_anndata(path).obs_names.tolist() == ["z", "y", "x"]
    assert zl.open_dataset(path).take(["y"]).obs["label"].tolist() == ["T"]


def test_codes_without_a_category_are_damage(tmp_path: Path) -> None:
    path = written_old(labelled(["B", "T", "B"]), tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        file["obs/label"][1] = 2
    words = r"cannot read obs of .*a\.h5ad: codes need to be between -1 and"
    with pytest.raises(FormatError, match=words):
        zl.open_dataset(path).obs_column("label")
    problem = next(found for found in zl.verify(path, progress=False).problems if found.where == "obs")
    assert re.search(words, problem.what)


def test_genes_that_are_not_there_in_a_file_of_anndata_0_6(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    write_as_anndata_06(path)
    with h5py.File(path, "r+") as file:
        file["raw.X/indices"][1] = 9
    (problem,) = zl.verify(path, progress=False).problems
    assert (problem.where, problem.what) == ("raw/X", "row 1 has a value for gene 9, but there are 2 genes")


@pytest.mark.parametrize("suffix", [".h5mu", ".zarr"])
def test_modalities_of_mudata_0_1(tmp_path: Path, suffix: str) -> None:
    mudata = pytest.importorskip("mudata")
    parts = {"rna": labelled(["B", "T", None, "B"]), "prot": labelled(["p", "q", "q", "p"])[:, :2].copy()}
    parts["prot"].var_names = ["P1", "P2"]
    del parts["prot"].raw
    old = hasattr(mudata, "set_options")
    with mudata.set_options(pull_on_update=False) if old else contextlib.nullcontext():
        whole = mudata.MuData(parts)
        whole.obs["donor"] = pd.Categorical(["d2", "d1", "d2", "d1"])
        path = written_old(whole, tmp_path / f"a{suffix}")
    with opened(path) as root:
        rows = root["obsmap/rna"][...].astype(float)  # R's numbers
        del root["obsmap/rna"]
        ad.io.write_elem(root["obsmap"], "rna", rows)
    dataset = zl.open_dataset(path)
    assert dataset.obs(["donor"])["donor"].tolist() == ["d2", "d1", "d2", "d1"]
    assert plain(dataset.obs(["rna:label"])["rna:label"]) == ["B", "T", None, "B"]
    (minibatch,) = zl.Loader(dataset, x=["rna:X"], obs=["donor", "prot:label"], shuffle=False)
    assert minibatch.obs["donor"].tolist() == [1, 0, 1, 0]
    assert [dataset.labels("prot:label")[code] for code in minibatch.obs["prot:label"].tolist()] == ["p", "q", "q", "p"]
    assert dataset.where("`prot:label` == 'q'").n_obs == 2
    for name, part in parts.items() if suffix == ".zarr" else ():  # a modality of a file cannot be opened by itself
        taken, wanted = zl.open_dataset(f"{path}/mod/{name}").take([2, 1]), part[[2, 1]]
        assert plain(taken.obs["label"]) == plain(wanted.obs["label"])
        assert taken.var["kind"].tolist() == part.var["kind"].tolist()
    zl.convert(path, tmp_path / "converted.zarr", progress=False)
    assert zl.verify(tmp_path / "converted.zarr", against=path, progress=False).problems == ()
    one = f"{path}/rna" if suffix == ".h5mu" else f"{path}/mod/rna"
    zl.convert(one, tmp_path / "rna.zarr", progress=False)
    obs = ad.read_zarr(tmp_path / "rna.zarr").obs
    assert plain(obs["label"]) == ["B", "T", None, "B"]
    assert obs["donor"].tolist() == ["d2", "d1", "d2", "d1"]


def bits_of(kind: str) -> Any:
    """A type of HDF5 that h5py reads as a usual dtype, but that has other bits."""
    if kind == "bfloat16":
        of = h5py.h5t.IEEE_F16LE.copy()
        of.set_fields(15, 7, 8, 0, 7)
        of.set_ebias(127)
    elif kind == "20 bits":
        of = h5py.h5t.NATIVE_INT32.copy()
        of.set_precision(20)
        of.set_offset(4)
    else:
        of = h5py.h5t.enum_create(h5py.h5t.NATIVE_INT32)
        for number, name in enumerate((b"FALSE", b"TRUE")):
            of.enum_insert(name, number)
    return of


def stored_as(file: h5py.File, name: str, of: Any, values: Any, *, gzip: bool) -> None:
    attrs, created = dict(file[name].attrs), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    del file[name]
    if gzip:
        created.set_chunk((2,))
        created.set_deflate(4)
    stored = h5py.h5d.create(file.id, name.encode(), of, h5py.h5s.create_simple(values.shape), created)
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    h5py.Dataset(stored).attrs.update(attrs)


@pytest.mark.parametrize("gzip", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "20 bits", "booleans of 4 bytes"])
def test_numbers_of_types_that_numpy_lacks(tmp_path: Path, kind: str, gzip: bool) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 1"])
    values = {"bfloat16": np.float32([1, 2.5, -3]), "20 bits": np.int32([1, -2, 3])}.get(
        kind, np.array([1, 0, 1], bool)
    )
    x = np.resize(values, 6)
    with h5py.File(path, "r+") as file:
        stored_as(file, "obs/n", bits_of(kind), values, gzip=gzip)
        stored_as(file, "X/data", bits_of(kind), x, gzip=gzip)
    wanted = ad.read_h5ad(path)
    assert wanted.obs["n"].tolist() == values.tolist()
    dataset = zl.open_dataset(path)
    assert dataset.obs_column("n").values.tolist() == dataset.obs()["n"].tolist() == values.tolist()
    with pytest.raises(FormatError, match=r"its numbers are of an HDF5 type that NumPy lacks.* Convert it once"):
        next(iter(zl.Loader(dataset)))
    assert zl.Loader(dataset, x=["raw/X"], obs=["label"]) is not None
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    assert_reads_as(zl.open_dataset(tmp_path / "a.zarr"), wanted)
    assert zl.verify(tmp_path / "a.zarr", against=path, progress=False).problems == ()


def test_a_column_of_16_bytes_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 1"])
    with h5py.File(path, "r+") as file:
        stored_as(file, "obs/n", h5py.h5t.NATIVE_LDOUBLE, np.arange(3.0), gzip=False)
    dataset = zl.open_dataset(path)
    assert dataset.obs(["label"])["label"].tolist() == TEXT["length 1"]
    with pytest.raises(FormatError, match="it holds float128"):
        dataset.obs(["n"])


@pytest.mark.parametrize("names", [("FALSE", "TRUE"), ("FALSE", "TRUE", "NA")])
def test_booleans_of_hdf5r(tmp_path: Path, names: tuple[str, ...]) -> None:
    """They are bytes with a precision of 1 or 2 bits."""
    path = tmp_path / "a.h5ad"
    adata = labelled(["B", "T", None, "B"])
    adata.obs["flag"], adata.obs["maybe"] = True, pd.array([1, None, 3, 4], "Int64")
    adata.write_h5ad(path)
    base = h5py.h5t.NATIVE_UINT8.copy()
    base.set_precision(len(names) - 1)
    of = h5py.h5t.enum_create(base)
    for number, name in enumerate(names):
        of.enum_insert(name.encode(), number)
    with h5py.File(path, "r+") as file:
        logical = h5py.enum_dtype({name: number for number, name in enumerate(names)}, "u1")
        values = np.array([0, 1, len(names) - 1, 0], bool if len(names) == 2 else logical)
        stored_as(file, "obs/flag", of, values, gzip=True)
        if len(names) == 2:
            stored_as(file, "obs/maybe/mask", of, np.array([False, True, False, False]), gzip=False)
    wanted = ad.read_h5ad(path)
    assert wanted.obs["flag"].tolist() == values.tolist()
    dataset = zl.open_dataset(path)
    assert dataset.obs()["flag"].tolist() == values.tolist()
    assert plain(dataset.obs()["maybe"]) == [1, None, 3, 4]
    assert dataset.obs_column("flag").taken(np.arange(4)).tolist() == values.tolist()
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    assert ad.read_zarr(tmp_path / "a.zarr").obs["flag"].tolist() == values.tolist()
    assert zl.verify(path, against=path, progress=False).problems == ()


def test_ordered_is_an_array_of_one_number(tmp_path: Path) -> None:
    """As R writes numbers."""
    path = tmp_path / "a.h5ad"
    adata = labelled(["B", "T", None, "B"])
    adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        for name in ("obs/label", "obs/stage", "var/kind"):
            file[name].attrs["ordered"] = np.array([file[name].attrs["ordered"]], np.int32)
    wanted, dataset = ad.read_h5ad(path), zl.open_dataset(path)
    assert_reads_as(dataset, wanted)
    assert dataset.obs().dtypes.tolist() == wanted.obs.dtypes.tolist()
    assert dataset.obs()["stage"].cat.ordered
    assert not dataset.obs()["label"].cat.ordered
    assert not dataset.var["kind"].cat.ordered


def test_soft_links(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 1"])
    with h5py.File(path, "r+") as file:
        for name in ("X", "obs/label", "var"):
            file.move(name, f"uns/{name}")
            file[name] = h5py.SoftLink(f"/uns/{name}")
        file["uns/again"] = h5py.SoftLink("/")
        file["uns/nowhere"] = h5py.SoftLink("/uns/nowhere")
    with h5py.File(path) as file:
        wanted = ad.AnnData(*(ad.io.read_elem(file[name]) for name in ("X", "obs", "var")))
    assert_reads_as(zl.open_dataset(path), wanted)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file, or a Zarr v2 store, to be changed."""
    if path.suffix == ".zarr":
        (path / ".zmetadata").unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield zarr.open_group(path, mode="r+", use_consolidated=False)
    else:
        with h5py.File(path, "r+") as file:
            yield file


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_x_is_none(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    adata = labelled(["B", "T"])
    adata.layers["counts"] = adata.X
    adata.write_h5ad(path) if suffix == ".h5ad" else write_zarr(adata, path)
    with opened(path) as root:
        del root["X"]
        ad.io.write_elem(root, "X", None)
    dataset = zl.open_dataset(path)
    assert dataset.matrix_names == ["raw/X", "layers/counts"]
    taken, wanted = dataset.take([1, 0], layers=["counts"]), read_anndata(path)
    assert taken.X is None
    assert wanted.X is None
    assert taken.layers["counts"].toarray().tolist() == wanted[[1, 0]].layers["counts"].toarray().tolist()
    with pytest.raises(FormatError, match=r"there is no matrix 'X'.*; there are: raw/X, layers/counts"):
        zl.Loader(dataset)
    assert [found for found in zl.verify(path, progress=False).problems if "v2" not in found.what] == []


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_categories_that_are_nullable_strings(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    adata = labelled(["B", "T", None, "B"])
    adata.write_h5ad(path) if suffix == ".h5ad" else write_zarr(adata, path)
    with opened(path) as root, ad.settings.override(allow_write_nullable_strings=True):
        for name, labels in (("obs/label", ["B", "T"]), ("var/kind", ["x", "y"])):
            del root[f"{name}/categories"]
            ad.io.write_elem(root[name], "categories", pd.array(labels, "string"))
    wanted = read_anndata(path)
    assert_reads_as(zl.open_dataset(path), wanted)
    zl.convert([path, path], tmp_path / "b.zarr", progress=False)
    assert plain(zl.open_dataset(tmp_path / "b.zarr").obs()["label"]) == ["B", "T", None, "B"] * 2
    assert zl.verify(tmp_path / "b.zarr", against=[path, path], progress=False).problems == ()


def test_nullable_integers_in_foreign_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    adata = write(path, TEXT["length 1"])
    adata.obs["nullable"] = pd.array([1, None, 3], "Int64")
    adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        values = file["obs/nullable/values"][...]
        stored_as(file, "obs/nullable/values", h5py.h5t.STD_I64BE, values, gzip=False)
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    for store in (path, tmp_path / "a.zarr"):
        column = zl.open_dataset(store).obs(["nullable"])["nullable"]
        assert column.dtype == "Int64"
        assert column.tolist() == [1, pd.NA, 3]
    assert zl.verify(tmp_path / "a.zarr", against=path, progress=False).problems == ()


def test_columns_that_are_not_listed_are_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    write(path, TEXT["length 1"])
    with h5py.File(path, "r+") as file:
        file["obs"].attrs["column-order"] = h5py.Empty("S1")
    assert ("obs", "its metadata list None as its columns") in [
        (found.where, found.what) for found in zl.verify(path, progress=False).problems
    ]


def test_awkward_arrays_are_compared(tmp_path: Path) -> None:
    awkward = pytest.importorskip("awkward")
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    for path, last in zip(paths, (5.0, 6.0), strict=True):
        labelled(["B", "T", "B"]).write_h5ad(path)
        with opened(path) as root:
            ad.io.write_elem(root["obsm"], "lists", awkward.Array([[1.0, np.nan], [], [last]]))
    zl.convert(paths[0], tmp_path / "a.zarr", progress=False)
    assert zl.verify(tmp_path / "a.zarr", against=paths[0], progress=False).problems == ()
    (problem,) = (
        found
        for found in zl.verify(tmp_path / "a.zarr", against=paths[1], progress=False).problems
        if found.where != "the sources"
    )
    assert (problem.where, problem.what) == (
        "obsm/lists",
        "its node1-data entry 2: 5.0 in the store, but 6.0 in the sources; 1 differ",
    )


def write_as_anndata_06(path: Path) -> None:
    """Tables of records, categories in uns, sparse matrices of h5sparse, and raw beside the rest."""
    x = scipy.sparse.csr_matrix(np.arange(6, dtype=np.float32).reshape(3, 2))
    with h5py.File(path, "w") as file:
        for name in ("X", "raw.X"):
            file.create_group(name).attrs.update({"h5sparse_format": "csr", "h5sparse_shape": x.shape})
            for part in ("data", "indices", "indptr"):
                file[f"{name}/{part}"] = getattr(x, part)
        obs = [("a", 1, 0.5), ("b", 0, 1.5), ("c", -1, 2.5)]
        file["obs"] = np.array(obs, [("index", "S1"), ("louvain", "i1"), ("n", "f4")])
        file["uns/louvain_categories"] = np.array([b"B", b"T"])
        file["var"] = file["raw.var"] = np.array([("gene a", 7), ("gene b", 9)], [("index", "S6"), ("length", "i8")])
        file["obsm"] = np.array([((1, 2),), ((3, 4),), ((5, 6),)], [("X_pca", "f4", (2,))])
        file["varm"] = np.array([((1, 2),), ((3, 4),)], [("PCs", "f4", (2,))])


def read_quietly(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_h5ad(path)


@pytest.mark.filterwarnings("ignore:.*written without encoding metadata")  # says the newest anndata
def test_files_of_anndata_0_6(tmp_path: Path) -> None:
    path = tmp_path / "old.h5ad"
    write_as_anndata_06(path)
    wanted = read_quietly(path)
    assert wanted.obs.louvain.tolist() == ["T", "B", np.nan]
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    assert zl.verify(tmp_path / "a.zarr", against=path).ok
    assert zl.verify(path, against=path, progress=False).problems == ()
    np.testing.assert_array_equal(ad.read_zarr(tmp_path / "a.zarr").varm["PCs"], wanted.varm["PCs"])
    cached = {"cache": tmp_path / "cache"}
    zl.warm(zl.open_dataset(path, **cached), x=["X", "raw/X"])
    given = [(path, {}), (path, cached), (tmp_path / "a.zarr", {}), (path, cached | {"offline": True})]
    for url, options in given:
        if "offline" in options:
            path.rename(tmp_path / "gone.h5ad")
        dataset = zl.open_dataset(url, **options)
        read, (dense, raw) = dataset.to_adata(), read_all(dataset)
        assert dataset.matrices.gene_names("raw/X").tolist() == wanted.raw.var_names.tolist()
        assert dataset.where("louvain == 'B'").obs_names.tolist() == ["b"]
        pd.testing.assert_frame_equal(read.obs, wanted.obs, check_names=False)
        pd.testing.assert_frame_equal(read.var, wanted.var, check_names=False)
        np.testing.assert_array_equal(read.X.toarray(), wanted.X.toarray())
        np.testing.assert_array_equal(read.obsm["X_pca"], wanted.obsm["X_pca"])
        np.testing.assert_array_equal(dense.x, wanted.X.toarray())
        np.testing.assert_array_equal(raw.x, wanted.raw.X.toarray())
        assert dense.obs["louvain"].tolist() == [1, 0, -1]
        np.testing.assert_array_equal(dense.obsm["X_pca"], wanted.obsm["X_pca"])


def read_all(dataset: zl.Dataset) -> list[Any]:
    options: dict[str, Any] = {"batch_size": 3, "shuffle": False, "layout": "dense"}
    loaders = (
        zl.Loader(dataset, obs=["louvain", "n"], obsm=["X_pca"], **options),
        zl.Loader(dataset, x="raw/X", **options),
    )
    return [next(iter(loader)) for loader in loaders]


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_roots_that_do_not_say_what_they_are(tmp_path: Path, suffix: str) -> None:
    """As before anndata 0.8."""
    path = written_old(labelled(["B", "T", None, "B"]), tmp_path / f"a{suffix}")
    with opened(path) as root:
        for name in ("encoding-type", "encoding-version"):
            del root.attrs[name]
    assert_reads_as(zl.open_dataset(path), read_anndata(path))


def test_records_without_labels_of_their_own(tmp_path: Path) -> None:
    """In uns, the labels of obs and var share their names, so those with too few labels are of the other frame."""
    path = tmp_path / "old.h5ad"
    write_as_anndata_06(path)
    with h5py.File(path, "r+") as file:
        del file["uns/louvain_categories"], file["obsm"], file["obs"]
        file["uns/louvain_categories"] = np.array(["only"], h5py.string_dtype())
        file["uns/n_categories"] = np.array([b"x", b"y"])
        obs = [(f"c{number}", number // 2, number, number % 2) for number in range(3)]
        text = h5py.string_dtype()
        file["obs"] = np.array(obs, [("index", text), ("louvain", "i4"), ("n", "i8"), ("flag", "i1")])
    wanted = read_quietly(path).obs
    pd.testing.assert_frame_equal(zl.open_dataset(path).obs(), wanted, check_names=False)
    with h5py.File(path, "r+") as file:
        del file["obs"]
        file["obs"] = np.zeros(0, [("index", "S3"), ("n", "f4")])
        del file["X"], file["raw.X"]
    assert zl.open_dataset(path).obs().shape == (0, 1)
