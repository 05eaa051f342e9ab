"""zl.Neighbors: the nearest rows of each row in a graph, checked against the graph with NumPy."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
import zarr
from helpers import assert_same_minibatches, counts, dense, write_store
from scipy.spatial import cKDTree
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import FormatError, OptionError

N_ROWS, K = 150, 4


def spatial(n_rows: int = N_ROWS, seed: int = 0) -> Any:
    """Cells at random places, with their 7 nearest others: distances, and connectivities without those of row 5."""
    adata = counts(n_rows, 20, seed=seed)
    places = np.random.default_rng(seed).random((n_rows, 2))
    adata.obsm["spatial"] = places
    distances, others = cKDTree(places).query(places, k=8)
    rows = np.repeat(np.arange(n_rows), 7)
    graph = scipy.sparse.csr_matrix((distances[:, 1:].ravel(), (rows, others[:, 1:].ravel())), (n_rows, n_rows))
    adata.obsp["distances"] = graph.astype(np.float32)
    near = graph.copy()
    near.data = (1 / (1 + near.data)).astype(np.float32)
    near.data[near.indptr[5] : near.indptr[6]] = 0
    near.setdiag(9.0)  # a row is no neighbour of its own
    adata.obsp["connectivities"] = near.tocsr()
    adata.obs["slide"] = pd.Categorical(np.where(np.arange(n_rows) % 3, "a", "b"))
    return adata


@pytest.fixture(scope="module")
def adata() -> Any:
    return spatial()


@pytest.fixture(scope="module")
def store(adata: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neighbors")
    write_store(adata, folder / "a.zarr", folder)
    return folder / "a.zarr"


def nearest(graph: Any, row: int, k: int, *, smallest: bool, among: Any = None) -> tuple[list[int], list[float]]:
    """The oracle: neighbours and weights of one row, padded with the row itself."""
    entries = [
        (weight if smallest else -weight, int(other))
        for other, weight in zip(graph[row].indices, graph[row].data, strict=True)
        if other != row and (smallest or weight) and (among is None or among[other])
    ]
    found = sorted(entries)[:k]
    rows = [other for _, other in found] + [row] * (k - len(found))
    return rows, [abs(weight) for weight, _ in found] + [0.0] * (k - len(found))


def check(
    minibatch: zl.Minibatch, adata: Any, name: str, *, smallest: bool, k: int = K, among: Any = None
) -> list[int]:
    graph, x = adata.obsp[name], adata.X.toarray()
    assert minibatch.neighbor_weights.dtype == torch.float32
    others = minibatch.neighbors.index.numpy().reshape(-1, k)
    assert len(others) == len(minibatch)
    for row, found, weights in zip(minibatch.index.tolist(), others, minibatch.neighbor_weights.numpy(), strict=True):
        rows, wanted = nearest(graph, row, k, smallest=smallest, among=among)
        np.testing.assert_allclose(weights, wanted, rtol=1e-6)
        assert found.tolist() == rows or len(set(wanted)) < len(wanted)  # of equal weights
    np.testing.assert_array_equal(dense(minibatch.x), x[minibatch.index.numpy()])
    np.testing.assert_array_equal(dense(minibatch.neighbors.x), x[minibatch.neighbors.index.numpy()])
    return minibatch.index.tolist()


@pytest.mark.parametrize(("name", "smallest"), [("distances", True), ("obsp/connectivities", False)])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_each_row_comes_with_its_nearest(store: Path, adata: Any, name: str, smallest: bool, layout: Any) -> None:
    neighbors = zl.Neighbors(name, k=K, smallest=smallest)
    loader = zl.Loader(zl.open_dataset(store), neighbors=neighbors, batch_size=16, fetch_factor=3, layout=layout)
    for _ in range(2):
        seen = [
            row
            for minibatch in loader
            for row in check(minibatch, adata, name.removeprefix("obsp/"), smallest=smallest)
        ]
        assert sorted(seen) == list(range(N_ROWS))


def test_more_neighbours_than_the_graph_has(store: Path, adata: Any) -> None:
    loader = zl.Loader(zl.open_dataset(store), neighbors=zl.Neighbors("connectivities", k=9), batch_size=32)
    for minibatch in loader:
        check(minibatch, adata, "connectivities", smallest=False, k=9)
        own = minibatch.neighbors.index.reshape(-1, 9)[:, 7:]
        assert (own == minibatch.index[:, None]).all()
        assert not minibatch.neighbor_weights[:, 7:].any()


@pytest.mark.parametrize(
    ("weights", "smallest", "expected"),
    [
        ([0, 16777217.0, 16777216.0, 0, 0], True, [2, 1]),
        ([0, 1e-50, 1e-46, 0, 0], False, [2, 1]),
        (np.array([0, 2**53 + 1, 2**53, 2**53 + 2, 0]), False, [3, 1]),
        (np.array([0, 2**64 - 2, 5, 2**64 - 1, 0], np.uint64), False, [3, 1]),
        (np.array([0, 1, 0, 1, 0], bool), False, [1, 3]),
    ],
)
def test_weights_are_compared_as_they_are_stored(tmp_path: Path, weights: Any, smallest: bool, expected: Any) -> None:
    adata, graph = counts(5, 3), np.zeros((5, 5), np.asarray(weights).dtype)
    graph[0] = weights
    adata.obsp["g"] = scipy.sparse.csr_matrix(graph)
    adata.write_h5ad(tmp_path / "a.h5ad")
    neighbors = zl.Neighbors("obsp/g", k=2, smallest=smallest)
    minibatch = next(iter(zl.Loader(zl.open_dataset(tmp_path / "a.h5ad"), neighbors=neighbors, shuffle=False)))
    assert minibatch.neighbors.index[:2].tolist() == expected
    np.testing.assert_array_equal(minibatch.neighbor_weights[0], graph[0, expected].astype(np.float32))


def test_a_view_has_its_own_neighbours_only(store: Path, adata: Any) -> None:
    dataset = zl.open_dataset(store)
    view = dataset.where("slide == 'a'")
    inside = (adata.obs["slide"] == "a").to_numpy()
    for minibatch in zl.Loader(view, neighbors=zl.Neighbors("distances", k=K, smallest=True), batch_size=16):
        check(minibatch, adata, "distances", smallest=True, among=inside)
    among = zl.Neighbors("distances", k=K, smallest=True, among=dataset)
    for minibatch in zl.Loader(view, neighbors=among, batch_size=16):
        check(minibatch, adata, "distances", smallest=True)
    condition = zl.Neighbors("distances", k=K, smallest=True, among="slide == 'b'")
    for minibatch in zl.Loader(dataset, neighbors=condition, batch_size=16):
        check(minibatch, adata, "distances", smallest=True, among=~inside)


def test_controls_and_sets_and_neighbours_together(store: Path, adata: Any) -> None:
    loader = zl.Loader(
        zl.open_dataset(store),
        sampling=zl.CellSets(["slide"], set_size=4),
        controls=zl.MatchedControls("slide == 'b'", match=[], n=2),
        neighbors=zl.Neighbors("distances", k=K, smallest=True),
        batch_size=8,
        obs=["slide"],
    )
    for minibatch in loader:
        check(minibatch, adata, "distances", smallest=True)
        assert len(minibatch.control) == 2 * len(minibatch)
        labels = loader.labels["slide"][minibatch.control.obs["slide"].numpy()]
        assert set(labels) == {"b"}
        assert minibatch.set_of_row.tolist() == np.repeat(np.arange(len(minibatch) // 4), 4).tolist()
    assert loader.statistics().rows == sum(len(m) * (1 + 2 + K) for m in loader)


def test_several_stores_and_files(store: Path, adata: Any, tmp_path: Path) -> None:
    other = spatial(60, seed=3)
    other.write_h5ad(tmp_path / "b.h5ad")
    dataset = zl.open_dataset([store, tmp_path / "b.h5ad"], cache=tmp_path / "cache")
    for minibatch in zl.Loader(dataset, neighbors=zl.Neighbors("distances", k=K, smallest=True), batch_size=16):
        others = minibatch.neighbors.index.numpy().reshape(-1, K)
        for row, found in zip(minibatch.index.tolist(), others, strict=True):
            graph, first = (adata.obsp["distances"], 0) if row < N_ROWS else (other.obsp["distances"], N_ROWS)
            assert (found - first).tolist() == nearest(graph, row - first, K, smallest=True)[0]


def test_resuming_pickling_and_workers(store: Path, adata: Any) -> None:
    def loader() -> zl.Loader:
        neighbors = zl.Neighbors("distances", k=K, smallest=True)
        return zl.Loader(zl.open_dataset(store), neighbors=neighbors, batch_size=16, fetch_factor=2)

    first = loader()
    minibatches = iter(first)
    for _ in range(3):
        next(minibatches)
    state, rest = first.state_dict(), list(minibatches)
    again = pickle.loads(pickle.dumps(loader()))
    again.load_state_dict(state)
    resumed = list(again)
    assert_same_minibatches(resumed, rest)
    for one, other in zip(resumed, rest, strict=True):
        assert one.neighbor_weights.equal(other.neighbor_weights)
        assert one.neighbors.index.equal(other.neighbors.index)
    with pytest.raises(OptionError, match="sampling"):
        zl.Loader(zl.open_dataset(store), batch_size=16, fetch_factor=2).load_state_dict(state)
    moved = rest[0].to("cpu")
    assert moved.neighbors.x.shape == rest[0].neighbors.x.shape
    assert moved.neighbor_weights.equal(rest[0].neighbor_weights)


@pytest.mark.slow
def test_spawned_workers(store: Path, adata: Any) -> None:
    loader = zl.Loader(
        zl.open_dataset(store), neighbors=zl.Neighbors("distances", k=K, smallest=True), batch_size=16, fetch_factor=2
    )
    workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    seen = [row for minibatch in workers for row in check(minibatch, adata, "distances", smallest=True)]
    assert sorted(seen) == list(range(N_ROWS))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"graph": "nothing"}, OptionError, "there is no obsp/nothing .*'connectivities', 'distances'"),
        ({"graph": "conectivities"}, OptionError, "'connectivities'"),
        ({"graph": ""}, OptionError, "graph must be the name"),
        ({"graph": "distances", "k": 0}, OptionError, "k must be"),
        ({"graph": "distances", "smallest": 1}, OptionError, "smallest must be"),
        ({"graph": "distances", "k": 1 << 40}, OptionError, "take a smaller k"),
        ({"graph": "distances", "among": "slide == 'c'"}, OptionError, "slide"),
    ],
)
def test_unusable_options(store: Path, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        zl.Loader(zl.open_dataset(store), neighbors=zl.Neighbors(**options))


def test_other_types_are_refused(store: Path) -> None:
    dataset = zl.open_dataset(store)
    with pytest.raises(OptionError, match=r"neighbors must be a zl\.Neighbors"):
        zl.Loader(dataset, neighbors="distances")


def _far(graph: Any) -> None:
    graph["indices"][3] = 150


def _nan(graph: Any) -> None:
    graph["data"][30] = np.nan


def _descending(graph: Any) -> None:
    graph["indptr"][4] = 2


def _twice(graph: Any) -> None:
    graph["indices"][1] = graph["indices"][0]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_far, FormatError, "row 0 has the neighbour 150 of 150 rows"),
        (_nan, FormatError, "row 4 has a neighbour whose weight is NaN"),
        (_descending, FormatError, "indptr .*does not fit"),
        (_twice, FormatError, r"lists a neighbour of row 0 twice: run sum_duplicates"),
    ],
)
def test_damaged_graphs(adata: Any, tmp_path: Path, damage: Any, error: type[Exception], says: str) -> None:
    with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata.write_zarr(tmp_path / "a.zarr")
    damage(zarr.open_group(tmp_path / "a.zarr", mode="r+", use_consolidated=False)["obsp/distances"])
    with pytest.raises(error, match=says):
        zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), neighbors=zl.Neighbors("distances", smallest=True))


@pytest.mark.parametrize("form", ["tocsc", "toarray"])
def test_graphs_in_other_forms_are_refused(adata: Any, tmp_path: Path, form: str) -> None:
    other = adata.copy()
    other.obsp["distances"] = getattr(other.obsp["distances"], form)()
    other.write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(OptionError, match=r"but a graph has to be a csr_matrix.*tocsr"):
        zl.Loader(zl.open_dataset(tmp_path / "a.h5ad"), neighbors=zl.Neighbors("distances", smallest=True))


def test_rows_without_neighbours_are_logged(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = zl.Loader(zl.open_dataset(store), neighbors=zl.Neighbors("connectivities", k=2), shuffle=False)
    assert "1 of 150 rows have no neighbour in connectivities" in caplog.text
    minibatch = next(iter(loader))
    assert minibatch.neighbors.index[10:12].tolist() == [5, 5]
    assert minibatch.neighbor_weights[5].tolist() == [0, 0]
