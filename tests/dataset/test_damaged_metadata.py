"""Invalid metadata in an otherwise intact store lead to a ZloaderError or to correct values, never to wrong values."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import check_minibatch, counts

import zloader as zl
from zloader.common.errors import ZloaderError
from zloader.insight.summary import summarize

N_ROWS, N_GENES = 40, 12
LEFT_OUT = object()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adata = counts(N_ROWS, N_GENES)
    adata.obs["maybe"] = pd.array([1, None] * (N_ROWS // 2), dtype="Int32")
    adata.obsm["e"] = np.ones((N_ROWS, 2), np.float32)
    adata.layers["d"] = adata.X.toarray()
    path = tmp_path_factory.mktemp("whole") / "a.zarr"
    zl.convert(adata, path, progress=False)
    return path


def load(store: Path) -> None:
    dataset = zl.open_dataset(store)
    columns = ["cell_type", "donor", "n_counts", "passed", "lane"]
    seen = 0
    for x in ("X", "layers/d"):
        loader = zl.Loader(dataset, x=x, obs=columns, obsm=["e"], batch_size=8, fetch_factor=5, seed=1)
        for minibatch in loader:
            seen += len(check_minibatch(minibatch, counts(N_ROWS, N_GENES)))
    assert seen == 2 * N_ROWS
    assert np.isnan(dataset.obs_column("maybe").values).sum() == N_ROWS // 2
    assert dataset.take([0, 1]).obs.index.tolist() == counts(N_ROWS, N_GENES).obs_names[:2].tolist()


def convert(store: Path) -> None:
    zl.convert(store, store.parent / "b.zarr", overwrite=True, progress=False)


def info(store: Path) -> None:
    summarize(zl.open_dataset(store))


def verify(store: Path) -> None:
    zl.verify(store, progress=False)


USES: dict[str, Callable[[Path], None]] = {
    "load": load,
    "convert": convert,
    "info": info,
    "verify": verify,
}
ATTRIBUTES: list[Any] = [LEFT_OUT, None, 5, [1], {}]
SHAPES: list[Any] = [
    LEFT_OUT,
    None,
    "x",
    {},
    [],
    [5],
    ["a", "b"],
    [N_ROWS, 2**60],
    [2**62, N_GENES],
    [N_ROWS, N_GENES, 3],
    [N_ROWS, 1.5],
    10**40,
    [10**40],
]
NAMES: list[Any] = [LEFT_OUT, None, 5, "", ".", "..", "../var/_index", "/c", "none", ["_index"], True]
ORDERS: list[Any] = [LEFT_OUT, None, 5, "cell_type", {}, [1], [None], [".."], ["../var/_index"], ["none"], [["a"]]]
# The path of a node, the place in its metadata, and the values to put there.
PLACES: dict[str, tuple[str, tuple[str, ...], list[Any]]] = {
    "attributes of X": ("X", ("attributes",), ATTRIBUTES),
    "attributes of data": ("X/data", ("attributes",), ATTRIBUTES),
    "attributes of obs": ("obs", ("attributes",), ATTRIBUTES),
    "attributes of a column": ("obs/cell_type", ("attributes",), ATTRIBUTES),
    "encoding of X": ("X", ("attributes", "encoding-type"), ATTRIBUTES),
    "encoding of a column": ("obs/cell_type", ("attributes", "encoding-type"), ATTRIBUTES),
    "what we noted of X": ("X", ("attributes", "zloader"), ATTRIBUTES),
    "shape of X": ("X", ("attributes", "shape"), SHAPES),
    "shape of a dense layer": ("layers/d", ("shape",), SHAPES),
    "shape of data": ("X/data", ("shape",), SHAPES),
    "shape of indptr": ("X/indptr", ("shape",), SHAPES),
    "shape of an index": ("obs/_index", ("shape",), SHAPES),
    "shape of a column": ("obs/n_counts", ("shape",), SHAPES),
    "shape of codes": ("obs/cell_type/codes", ("shape",), SHAPES),
    "shape of labels": ("obs/cell_type/categories", ("shape",), SHAPES),
    "shape of a mask": ("obs/maybe/mask", ("shape",), SHAPES),
    "shape of obsm": ("obsm/e", ("shape",), SHAPES),
    "index of obs": ("obs", ("attributes", "_index"), NAMES),
    "index of var": ("var", ("attributes", "_index"), NAMES),
    "columns of obs": ("obs", ("attributes", "column-order"), ORDERS),
    "fill value": ("X/data", ("fill_value",), [LEFT_OUT, None, "x", 10**40, [1], {}]),
    "codecs": ("X/data", ("codecs",), ATTRIBUTES),
    "data type": ("X/data", ("data_type",), [*ATTRIBUTES, "float128"]),
    "kind of node": ("X/data", ("node_type",), [*ATTRIBUTES, "group"]),
    "format": ("X/data", ("zarr_format",), [*ATTRIBUTES, 4]),
    "chunks": ("obs/n_counts", ("chunk_grid", "configuration"), ATTRIBUTES),
}


def changed(document: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    part = document
    for name in place[:-1]:
        part = part[name]
    part.pop(place[-1], None)
    if value is not LEFT_OUT:
        part[place[-1]] = value
    return document


@pytest.fixture
def damages(whole: Path, tmp_path: Path) -> Callable[..., Iterator[Path]]:
    """Yields the store once per value, with the value in the node's metadata and in the consolidated metadata."""
    store = tmp_path / "a.zarr"
    shutil.copytree(whole, store)

    def give(path: str, place: tuple[str, ...], values: list[Any]) -> Iterator[Path]:
        root, own = store / "zarr.json", store / path / "zarr.json"
        before = root.read_text(), own.read_text()
        for value in values:
            node, all_nodes = changed(json.loads(before[1]), place, value), json.loads(before[0])
            all_nodes["consolidated_metadata"]["metadata"][path] = node
            own.write_text(json.dumps(node))
            root.write_text(json.dumps(all_nodes))
            yield store
        root.write_text(before[0])
        own.write_text(before[1])

    return give


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", PLACES)
def test_metadata_that_make_no_sense(damages: Callable[..., Iterator[Path]], place: str, use: str) -> None:
    path, where, values = PLACES[place]
    some = values if use == "load" else values[len(place) % 5 :: 5]  # a different selection for each place
    for store in damages(path, where, some):
        try:
            USES[use](store)
        except ZloaderError as error:
            said = str(error)
        else:
            continue
        assert "a.zarr" in said or "c.zarr" in said


def test_the_whole_store_is_used(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "a.zarr")
    for use in USES.values():
        use(tmp_path / "a.zarr")
