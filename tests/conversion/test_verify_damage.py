"""verify finds any flipped byte, truncated and lost object of any store, with anndata's own readers as the oracle."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import SMALL, convert, counts, frame

import zloader as zl

pytestmark = pytest.mark.slow


def cells() -> ad.AnnData:
    """Every kind of array: sparse by rows and by columns, dense, text, categories, missing values, numbers alone."""
    x = counts(40)
    obs = frame(40, "cell").assign(
        kind=pd.Categorical.from_codes(np.arange(40) % 3 - 1, ["a", "b"]),
        text=[f"name {i}" for i in range(40)],
        maybe=pd.array([None, 1, 2, 3] * 10, "Int64"),
        number=np.linspace(0, 1, 40),
    )
    made = ad.AnnData(x, obs=obs, var=frame(300, "gene"))
    made.layers["dense"] = x.toarray()
    made.layers["columns"] = x.tocsc()
    made.obsm["pca"] = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    made.obsp["graph"] = sp.random(40, 40, 0.1, "csr", np.float32, random_state=0)
    made.varm["loadings"] = np.random.default_rng(1).normal(size=(300, 2))
    made.uns = {"list": np.arange(7), "word": "hello", "nested": {"flag": True}}
    made.raw = made.copy()
    return made


CELLS = cells()


def write_ours(path: Path, **options: Any) -> None:
    convert(CELLS, path, zl.ConvertOptions(chunk_rows=SMALL.chunk_rows, shard_size="64KiB", **options))


def write_zarr(path: Path, zarr_format: int, *, sharded: bool = False) -> None:
    with (
        warnings.catch_warnings(),
        ad.settings.override(zarr_write_format=zarr_format, auto_shard_zarr_v3=sharded),
        zarr.config.set({"array.write_empty_chunks": True}),
    ):
        warnings.simplefilter("ignore")
        CELLS.copy().write_zarr(path, chunks=(13, 70))


def write_h5ad(path: Path, **options: Any) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        CELLS.copy().write_h5ad(path, **options)


WRITERS: dict[str, Callable[[Path], None]] = {
    "ours": write_ours,
    "ours, zstd, shuffled": lambda path: write_ours(path, codec="zstd", shuffle_seed=1),
    "ours, no codec": lambda path: write_ours(path, codec="none", preserve_dtype=True),
    "zarr v3": lambda path: write_zarr(path, 3),
    "zarr v3, sharded": lambda path: write_zarr(path, 3, sharded=True),
    "zarr v2": lambda path: write_zarr(path, 2),
    "h5ad": write_h5ad,
    "h5ad, gzip": lambda path: write_h5ad(path, compression="gzip"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Stores by the name of their writer, each written once."""
    directory, made = tmp_path_factory.mktemp("written"), dict[str, Path]()

    def of(writer: str) -> Path:
        if writer not in made:
            suffix = "h5ad" if "h5ad" in writer else "zarr"
            WRITERS[writer](made.setdefault(writer, directory / f"{len(made)}.{suffix}"))
        return made[writer]

    return of


def read(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


def in_arrays(element: Any, path: str = "") -> dict[str, Any]:
    """The arrays of an AnnData or one of its elements by path, so that equal bits are equal."""
    if isinstance(element, ad.AnnData):
        parts = {name: getattr(element, name) for name in ("obs", "var", "obsm", "obsp", "varm", "uns", "layers", "X")}
        parts["raw"] = element.raw.X, element.raw.var
        return in_arrays(parts, path)
    if isinstance(element, pd.DataFrame):
        return in_arrays({"_index": element.index} | {name: element[name] for name in element}, path)
    if isinstance(element, tuple):
        element = dict(enumerate(element))
    if hasattr(element, "items") and not isinstance(element, pd.Series):
        parts = [in_arrays(part, f"{path}/{name}") for name, part in element.items()]
        return {key: found for part in parts for key, found in part.items()}
    if sp.issparse(element):  # which SciPy may crash on, if its parts do not fit together
        parts = {name: getattr(element, name) for name in ("indptr", "indices", "data")}
        return in_arrays(parts | {"shape": np.array(element.shape)}, path)
    return {path: (str(getattr(element, "dtype", type(element))), np.asarray(element).tolist())}


def is_same(path: Path, wanted: dict[str, Any]) -> bool:
    """Whether anndata reads a store, and reads the same."""
    try:
        return repr(in_arrays(read(path))) == repr(wanted)
    except Exception:  # noqa: BLE001 - whatever h5py, zarr and anndata raise
        return path.suffix == ".h5ad"  # attributes of HDF5, which have no checksums, may say that it is no AnnData


def damage(path: Path, draw: Callable[..., Any]) -> str:
    """Flips a bit of, truncates or removes one of the objects, and returns what was done."""
    if path.is_file():
        target = path
    else:
        objects = sorted(key for key in path.rglob("*") if key.is_file())
        target = draw(st.sampled_from(objects))
    content = target.read_bytes()
    how = draw(st.sampled_from(["flip", "flip", "cut", "empty", "remove"][: 4 if path.is_file() else 5]))
    if how == "flip":
        at = draw(st.integers(0, len(content) - 1))
        changed = bytearray(content)
        changed[at] ^= 1 << draw(st.integers(0, 7))
        target.write_bytes(changed)
        return f"{target.relative_to(path)}: bit of byte {at} flipped"
    if how == "remove":
        target.unlink()
    else:
        target.write_bytes(content[: 0 if how == "empty" else draw(st.integers(0, len(content) - 1))])
    return f"{target.relative_to(path)}: {how}"


@settings(max_examples=60)
@given(data=st.data(), writer=st.sampled_from([name for name in WRITERS if "ours" in name]))
def test_any_damage_of_a_store_of_ours(written: Callable[[str], Path], data: st.DataObject, writer: str) -> None:
    """Everything in it has a checksum, but the metadata of the root itself."""
    whole = written(writer)
    path = Path(shutil.copytree(whole, whole.with_name("damaged.zarr"), dirs_exist_ok=False))
    try:
        what = damage(path, data.draw)
        if not what.startswith("zarr.json: bit"):
            assert not zl.verify(path, progress=False).ok, what
        elif not is_same(path, in_arrays(read(whole))):
            assert not zl.verify(path, progress=False, against=CELLS).ok, what
    finally:
        shutil.rmtree(path)


@settings(max_examples=80)
@given(data=st.data(), writer=st.sampled_from([name for name in WRITERS if "ours" not in name]))
def test_any_damage_that_anndata_sees(written: Callable[[str], Path], data: st.DataObject, writer: str) -> None:
    """Other stores may have no checksums, so that damage is found by comparing with the source."""
    whole = written(writer)
    path = whole.with_name(f"damaged{whole.suffix}")
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, path)
    try:
        what = damage(path, data.draw)
        if not is_same(path, in_arrays(read(whole))):
            assert not zl.verify(path, progress=False, against=CELLS).ok, what
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("writer", WRITERS)
def test_all_of_them_are_sound(written: Callable[[str], Path], writer: str) -> None:
    problems = zl.verify(written(writer), progress=False, against=CELLS).problems
    assert [problem for problem in problems if "is Zarr v2" not in problem.what] == []
