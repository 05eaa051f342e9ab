"""The memory that transforms take beside gathered rows is bounded by what the scheduler counts for it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp

from zloader.common.records import CsrArrays
from zloader.reading.forms import Transforming
from zloader.selecting.genes import ChosenGenes
from zloader.transforms import Binarize, Clip, Downsample, LogNormalize, Scale

pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 300, 2000
COUNTS = sp.random(N_ROWS, N_GENES, 0.2, "csr", np.float32, random_state=np.random.default_rng(0))
COUNTS.data[:] = np.random.default_rng(1).integers(1, 5, COUNTS.nnz)
CHOSEN = ChosenGenes(positions=np.arange(0, N_GENES, 2), n_stored=N_GENES)
SCALE = Scale(np.ones(N_GENES), np.ones(N_GENES))
CASES = {
    "log": ([LogNormalize(1e4)], False, "float32", None),
    "log, dense": ([LogNormalize(1e4), SCALE], True, "float32", None),
    "log, half": ([LogNormalize(1e4)], False, "float16", None),
    "log, dense and half": ([LogNormalize(1e4)], True, "bfloat16", None),
    "downsampled": ([Downsample(20)], False, "float32", None),
    "downsampled, half": ([Downsample(20)], False, "float16", None),
    "clipped": ([Clip(0, 2), Binarize()], False, "int32", None),
    "genes": ([Downsample(400), LogNormalize(1e4)], False, "float32", CHOSEN),
    "genes, dense": ([LogNormalize(1e4)], True, "float32", CHOSEN),
}


@pytest.mark.parametrize("name", CASES)
def test_making_x_takes_no_more_memory_than_it_says(name):
    transforms, dense, dtype, genes = CASES[name]
    transforming = Transforming(transforms=transforms, seed=0, epoch=0, dense=dense, dtype=dtype, genes=genes)
    for measured in (False, True):  # the first call compiles
        values = COUNTS.data.astype(transforming.gathering_dtype)
        indptr, indices = COUNTS.indptr.astype(np.int32), COUNTS.indices.astype(np.int32)
        gathered = CsrArrays(indptr=indptr, indices=indices, values=values, n_genes=N_GENES)
        if transforming.gathers_dense:
            gathered = COUNTS.toarray().astype(transforming.gathering_dtype)
        if measured:
            tracemalloc.start()
        transforming.x(gathered, np.arange(N_ROWS))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= transforming.more_bytes(N_ROWS, gathered.nbytes) + 64 * N_ROWS + 100_000
