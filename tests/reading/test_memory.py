"""The bounds on memory count every matrix of a loader, not only the first."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from helpers import counts, plan_of, write_store

import zloader as zl
from zloader.reading import gather
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.gates import ByteBudget
from zloader.reading.matrix_reader import opened_readers
from zloader.reading.matrix_rows import LoadedRows
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool, Counters
from zloader.selecting.genes import ChosenGenes

pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 64, 1 << 15
ROW_BYTES = 8 * N_GENES  # of a dense minibatch of float64


class CountedBudget(ByteBudget):
    """Remembers every number of bytes that was acquired."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.acquired: list[int] = []

    async def acquire(self, n_bytes, turn=0):
        self.acquired.append(n_bytes)
        await super().acquire(n_bytes, turn)


class CountedPool(BufferPool):
    """Remembers the size of every buffer that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def take(self, n_bytes):
        self.taken.append(n_bytes)
        return super().take(n_bytes)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with three matrices of different sizes."""
    folder = tmp_path_factory.mktemp("store")
    adata = counts(N_ROWS, N_GENES, density=0.01)
    for name, density in (("a", 0.02), ("b", 0.005)):
        adata.layers[name] = scipy.sparse.random(N_ROWS, N_GENES, density, "csr", np.float32, random_state=1)
    write_store(adata, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def epoch_of(dataset, names, *, batch_size, fetch_factor, dense=False, memory="2GiB"):
    """The bytes held per fetch, the sizes of its buffers, and the bytes of each group gathered together."""
    options, pool, groups = zl.FetchOptions(memory=memory), CountedPool(), []
    matrices = {name: dataset.matrices.parts(name, options) for name in names}
    scheduler = FetchScheduler(Recipe(x=matrices, form=Form(dense=dense, dtype="float64")), options, pool)
    budget = scheduler._room = CountedBudget(options.buffer_bytes)
    plan = plan_of(dataset_rows=N_ROWS, sampling=zl.Streaming(), batch_size=batch_size, fetch_factor=fetch_factor)
    bridge = scheduler.start(plan.fetches(), name="test")
    while group := bridge.next_group():
        groups.append((len(group), sum(minibatch.nbytes for minibatch in group)))
    assert plan.n_minibatches == sum(size for size, _ in groups)
    return budget.acquired, pool.taken, groups


@pytest.mark.parametrize("mirrored", [False, True], ids=["store", "mirror"])
def test_a_fetch_holds_the_bytes_of_all_its_matrices(store, tmp_path, mirrored):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache" if mirrored else None)
    sizes = {"batch_size": 4, "fetch_factor": 4}
    names = ["X", "layers/a", "layers/b"]
    together = epoch_of(dataset, names, **sizes)
    alone = [epoch_of(dataset, [name], **sizes) for name in names]
    held, buffers = (np.array([each[kind] for each in alone]) for kind in (0, 1))
    assert together[0] == held.sum(axis=0).tolist()
    assert together[1] == buffers.sum(axis=0).tolist()
    assert held.shape == (3, 4)
    assert held.all()
    assert buffers.any() != mirrored  # elements in a decoded mirror need no buffer


@pytest.mark.parametrize(
    ("names", "together"), [(["X"], 8), (["X", "layers/a"], 4), (["X", "layers/a", "layers/b"], 2)]
)
def test_minibatches_that_are_gathered_together_are_fewer_the_more_matrices_they_have(store, names, together):
    _, _, groups = epoch_of(zl.open_dataset(store), names, batch_size=8, fetch_factor=8, dense=True)
    assert groups == [(together, together * len(names) * 8 * ROW_BYTES + 8 * 8 * together)] * (8 // together)


def test_groups_are_small_beside_the_memory_for_minibatches(store):
    dataset = zl.open_dataset(store)
    _, _, groups = epoch_of(dataset, ["X"], batch_size=8, fetch_factor=8, dense=True, memory="256MiB")
    assert [size for size, _ in groups] == [1] * 8  # 2 MiB each, of 48 MiB


@pytest.mark.parametrize("dense", [False, True], ids=["csr", "dense"])
def test_copies_of_the_values_of_chosen_genes_are_counted(store, dense):
    """They are far larger than x if most genes are left out."""
    chosen = ChosenGenes(positions=np.arange(5), n_stored=N_GENES)
    parts = zl.open_dataset(store)[:, np.arange(5)].matrices.parts("X", zl.FetchOptions())
    lengths, starts = np.full(N_ROWS, 3000), np.zeros(N_ROWS, np.int64)
    with opened_readers(parts, zl.FetchOptions(), Counters(), sweeps=False) as [reader]:
        needed = [reader.needed(slice(None), np.arange(N_ROWS))]
    genes, values = np.arange(3000, dtype=np.uint16), np.ones(3000, parts[0].matrix.values.dtype)
    rows = gather.SourceRows(at=slice(None), genes=genes, values=values, starts=(starts, starts), lengths=lengths)
    form, loaded = Form(dense=dense, dtype="float32"), LoadedRows.of(parts, needed, [rows], N_ROWS)
    for measured in (False, True):  # the first call compiles
        if measured:
            tracemalloc.start()
        form.gathered([gather.choose(rows, chosen)], N_ROWS, n_genes=5, stored=loaded.stored)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= loaded.row_bytes(form).sum() + 64 * N_ROWS + 50_000
