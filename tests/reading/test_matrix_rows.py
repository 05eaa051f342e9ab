"""Rows of several stores gathered in one loop, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zloader.reading import gather
from zloader.reading.gather import SourceRows
from zloader.reading.matrix_rows import kind_of, memory, place_of
from zloader.selecting.genes import ChosenGenes

pytestmark = pytest.mark.any_version

N_COLUMNS, N_STORED = 70, 40


def choice(rng: np.random.Generator, kind: str) -> ChosenGenes:
    """A choice of 70 columns from the 40 genes of a store, of which it lacks some."""
    positions = np.full(N_COLUMNS, -1)
    n_taken = N_STORED if kind != "left out" else 25
    genes = rng.permutation(N_STORED)[:n_taken]
    positions[np.sort(rng.permutation(N_COLUMNS)[:n_taken])] = np.sort(genes) if kind == "sorted" else genes
    return ChosenGenes(positions=positions, n_stored=N_STORED)


def with_columns(stored: np.ndarray, genes: ChosenGenes) -> np.ndarray:
    return np.where(genes.positions >= 0, stored[:, genes.positions], 0)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), dtype=st.sampled_from(["uint8", "int64", "float32"])
)
def test_memory_has_the_elements_of_every_array(lengths, dtype):
    arrays = [np.arange(n).astype(dtype) + 10 * number for number, n in enumerate(lengths)]
    everything = memory(np.dtype(dtype))
    assert everything.dtype == dtype
    assert everything.flags.c_contiguous
    assert everything.flags.aligned
    assert not everything.flags.writeable
    for array in arrays:
        start = place_of(array)
        assert everything[start : start + len(array)].tolist() == array.tolist()


def rows_in(genes: np.ndarray | None, values: np.ndarray, chosen: ChosenGenes | None) -> SourceRows:
    none = np.zeros(0, np.int64)
    return SourceRows(at=slice(None), genes=genes, values=values, starts=(none, none), lengths=none, chosen=chosen)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "left out"])
@given(data=st.data(), n_stores=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_of_several_stores_are_gathered_as_those_of_one(kind, data, n_stores, seed):
    rng = np.random.default_rng(seed)
    chosen = [choice(rng, kind) for _ in range(n_stores)]
    stored = [data.draw(hnp.arrays("uint8", (3, N_STORED), elements=st.just(0) | st.integers(0, 9))) for _ in chosen]
    taken = data.draw(st.lists(st.tuples(st.integers(0, n_stores - 1), st.integers(0, 2)), max_size=8))
    wanted = np.zeros((len(taken), N_COLUMNS), "uint8")
    for row, (store, of_store) in enumerate(taken):
        wanted[row] = with_columns(stored[store], chosen[store])[of_store]

    csr = [scipy.sparse.csr_matrix(matrix) for matrix in stored]
    sources = [
        rows_in(matrix.indices.astype("uint16"), matrix.data, genes) for matrix, genes in zip(csr, chosen, strict=True)
    ]
    assert len({kind_of(each) for each in sources}) == 1
    of, within = (np.array([each[k] for each in taken], np.int64) for k in range(2))
    places = [[place_of(array) for array in (each.genes, each.values, each.chosen.column_of)] for each in sources]
    genes, values, tables = np.array(places, np.int64).T[:, of]
    starts = np.array([matrix.indptr[:-1] for matrix in csr], np.int64)[of, within]
    lengths = np.array([np.diff(matrix.indptr) for matrix in csr], np.int64)[of, within]
    rows = gather.SourceRows(
        at=slice(None),
        genes=memory(sources[0].genes.dtype),
        values=memory(sources[0].values.dtype),
        starts=(starts + genes, starts + values),
        lengths=lengths,
    )
    joined = gather.choose(rows, chosen[0], (memory(chosen[0].column_of.dtype), tables))
    x = gather.csr_rows([joined], len(taken), n_genes=N_COLUMNS, dtype="float32")
    found = scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), (len(taken), N_COLUMNS))
    np.testing.assert_array_equal(found.toarray(), wanted)
    assert all((np.diff(x.indices[a:b]) > 0).all() for a, b in zip(x.indptr[:-1], x.indptr[1:], strict=True))
    dense = gather.dense_rows([joined], len(taken), n_genes=N_COLUMNS, dtype="float32")
    np.testing.assert_array_equal(dense, wanted)


def test_stores_that_are_gathered_in_other_ways_are_not_alike():
    rng = np.random.default_rng(0)
    genes, values = np.zeros(1, np.uint16), np.zeros(1, np.uint8)
    kinds = [choice(rng, kind) for kind in ("sorted", "unsorted", "left out")] + [None]
    keys = [kind_of(rows_in(genes, values, kind)) for kind in kinds]
    keys += [kind_of(rows_in(None, values, kind)) for kind in kinds]  # dense stores differ in the positions of genes
    others = [(genes, values.astype("int8")), (genes.astype("int32"), values)]
    keys += [kind_of(rows_in(*arrays, kinds[0])) for arrays in others]
    keys += [kind_of(replace(rows_in(*arrays, None), coded=(values, *arrays))) for arrays in [(genes, values), *others]]
    assert len(set(keys)) == len(keys)
    assert kind_of(rows_in(genes, values, choice(rng, "sorted"))) == keys[0]
