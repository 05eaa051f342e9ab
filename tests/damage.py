"""Randomly damaged sources, by seed: `check` converts them and yields the outcomes. Run it in its own process.

HDF5 itself may crash on a damaged file, which ends the process.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from sources import SMALL, assert_same, counts, files, frame

import zloader as zl

# Sources that HDF5 reads, the kind of damage, and the number of seeds.
IN_HDF5 = (
    ("h5ad", "bytes", 20),
    ("h5ad", "head", 20),
    ("h5ad", "cut", 10),
    ("gzip h5ad", "bytes", 10),
    ("gzip h5ad", "head", 10),
    ("gzip h5ad", "cut", 10),
)
METADATA = ("zarr.json", ".zmetadata")  # files of the root with the metadata of all nodes
NAME = "broken"


def original() -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(np.arange(60) % 4 - 1, ["a", "b", "c"]),
            "string": [f"name {i % 9}" for i in range(60)],
            "maybe": pd.array([True, None] * 30, dtype="boolean"),
            "float": np.arange(60) / 7,
        },
        index=[f"cell{i}" for i in range(60)],
    )
    layers = {"csc": counts(seed=1).tocsc(), "dense": counts(seed=2).toarray()}
    return ad.AnnData(counts(), obs=obs, var=frame(300, "g"), layers=layers, obsm={"X_pca": np.eye(60, 3)})


def h5ad(path: Path, **options: Any) -> Path:
    original().write_h5ad(path, convert_strings_to_categoricals=False, **options)
    return path


def anndata_zarr(path: Path, zarr_format: Any) -> Path:
    with ad.settings.override(zarr_write_format=zarr_format):
        original().write_zarr(path, convert_strings_to_categoricals=False)
    return path


def our_zarr(path: Path) -> Path:
    zl.convert(original(), path, options=SMALL, progress=False)
    return path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "h5ad": h5ad,
    "gzip h5ad": lambda path: h5ad(path, compression="gzip"),
    "zarr v2": lambda path: anndata_zarr(path, 2),
    "zarr v3": lambda path: anndata_zarr(path, 3),
    "our zarr": our_zarr,
}


def change_bytes(path: Path, chance: random.Random) -> None:
    """Changes twenty bytes of one file, or of random chunks of a directory."""
    content = _content(path)
    for _ in range(20):
        name = chance.choice(sorted(name for name, stored in content.items() if stored))
        content[name][chance.randrange(len(content[name]))] = chance.randrange(256)
    _store(path, content)


def change_head(path: Path, chance: random.Random) -> None:
    """Changes three of the first 20 000 bytes, which contain most metadata of a small .h5ad file."""
    content = _content(path)
    for stored in content.values():
        for _ in range(3):
            stored[chance.randrange(min(len(stored), 20_000))] = chance.randrange(256)
    _store(path, content)


def change_metadata(path: Path, chance: random.Random) -> None:
    """Changes three characters of the metadata of all nodes, which usually leaves valid JSON."""
    content = _content(path)
    name = next(name for name in METADATA if name in content)
    for _ in range(3):
        content[name][chance.randrange(len(content[name]))] = ord(chance.choice('0123456789abnu"{}[],:-'))
    _store(path, content)


def change_nodes(path: Path, chance: random.Random) -> None:
    """Changes three characters of the metadata of one node of a store of Zarr v2, and removes the copies of all."""
    (path / ".zmetadata").unlink()
    content = _content(path)
    name = chance.choice(sorted(name for name in content if name.endswith((".zarray", ".zattrs"))))
    for _ in range(3):
        content[name][chance.randrange(len(content[name]))] = ord(chance.choice('0123456789abnu"{}[],:-'))
    _store(path, content)


def cut(path: Path, chance: random.Random) -> None:
    """Cuts off the end of a file or of a chunk."""
    content = _content(path)
    name = chance.choice(sorted(name for name, stored in content.items() if stored and "zarr" not in name))
    del content[name][chance.randrange(len(content[name])) :]
    _store(path, content)


DAMAGES = {"bytes": change_bytes, "head": change_head, "metadata": change_metadata, "nodes": change_nodes, "cut": cut}


def _content(path: Path) -> dict[str, bytearray]:
    found = files(path) if path.is_dir() else {"": path.read_bytes()}
    return {name: bytearray(stored) for name, stored in found.items()}


def _store(path: Path, content: dict[str, bytearray]) -> None:
    for name, stored in content.items():
        (path / name if name else path).write_bytes(stored)


def as_read(source: Path) -> ad.AnnData:
    """The source as read by anndata."""
    return ad.read_zarr(source) if source.is_dir() else ad.read_h5ad(source)


def check(kind: str, damage: str, n: int, directory: Path) -> Iterator[str]:
    """Converts `n` damaged copies of a source. Yields `refused` or `equal` for each, and raises for anything else."""
    directory.mkdir()
    whole = SOURCES[kind](directory / "whole")
    untouched = as_read(whole)
    for seed in range(n):
        at = directory / f"{seed}"
        at.mkdir()
        source = at / NAME
        shutil.copytree(whole, source) if whole.is_dir() else shutil.copy(whole, source)
        DAMAGES[damage](source, random.Random(seed))
        try:
            zl.convert(source, at / "out.zarr", options=SMALL, progress=False)
        except zl.ZloaderError as error:
            if str(source) not in str(error):
                raise AssertionError(f"seed {seed}: the error does not name the source") from error
            yield "refused"
        else:
            wanted = untouched
            with contextlib.suppress(Exception):  # the damage may be in metadata that only anndata reads
                wanted = as_read(source)
            assert_equal(ad.read_zarr(at / "out.zarr"), wanted)
            yield "equal"
        shutil.rmtree(at)


def assert_equal(out: ad.AnnData, wanted: ad.AnnData) -> None:
    """Compares names and values. The canonical form and the stored dtypes may differ from the source."""
    np.testing.assert_array_equal(plain(out.X), plain(wanted.X))
    for frames in ("obs", "var"):
        pd.testing.assert_frame_equal(
            getattr(out, frames), getattr(wanted, frames), check_dtype=False, check_column_type=False
        )
    for part in ("layers", "obsm", "varm", "obsp", "varp"):
        assert set(getattr(out, part)) == set(getattr(wanted, part))
        for name, element in getattr(wanted, part).items():
            np.testing.assert_array_equal(plain(getattr(out, part)[name]), plain(element))
    assert_same(dict(out.uns), dict(wanted.uns))


def plain(x: Any) -> np.ndarray:
    return x.toarray() if sp.issparse(x) else np.asarray(x)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for kind, damage, n in IN_HDF5:
        for outcome in check(kind, damage, n, Path(sys.argv[1]) / f"{kind}, {damage}"):
            print(f"{kind}, {damage}: {outcome}", flush=True)
