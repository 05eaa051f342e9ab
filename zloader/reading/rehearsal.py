"""Loads the compiled loops of an epoch when a Loader is made, by decoding no chunk and gathering no row.

Loading the machine code of a loop takes 10 to 15 ms of Python, so that the four loops of a usual epoch take longer than
an epoch of some thousand rows. When a Loader is made, nothing waits for minibatches yet, and processes that are forked
later have the loops too. A loop that is not rehearsed here, such as that of a transform, is loaded when it is called.

numba itself takes half a second to a second, which is as long as many epochs of FEW values in NumPy take more than
compiled ones. So for those, it is loaded only if the loader goes on to EPOCHS_IN_NUMPY. Rehearsing with NumPy takes no
time, but for a form that needs other loops, it loads numba.
"""

from __future__ import annotations

import numpy as np

from zloader.order.permutation import permute, shuffled
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming
from zloader.reading.forms import Form
from zloader.reading.gather import SourceRows, widened
from zloader.storage.decode import CHUNK, Decoder
from zloader.storage.layout import MatrixLayout

FEW = 1 << 23  # values and rows, of which NumPy gathers an epoch in some 30 ms more than a compiled loop
EPOCHS_IN_NUMPY = 16
IN_NUMPY = BlockShuffling, MixtureOfScanners, Streaming  # the samplings that permute at most


def rehearse(matrix: MatrixLayout, form: Form, *, decoding: bool) -> None:
    """Loads the loops that make `form` of all genes of a matrix, and those that decode it if `decoding`."""
    permute(np.zeros(1, np.int64), 1, 0)
    shuffled(1, 0)  # imports numpy.random
    arrays = [np.empty(0, array.dtype) for array in matrix.arrays]
    for layout, elements in zip(matrix.arrays, arrays, strict=True) if decoding else ():
        Decoder(layout).decode_all([], np.empty(0, CHUNK), elements)
    *genes, values = arrays
    none = np.empty(0, np.int64)
    rows = SourceRows(
        at=slice(None), genes=genes[0] if genes else None, values=values, starts=(none, none), lengths=none
    )
    form.gathered([widened(rows)], 0, n_genes=matrix.n_genes, stored=[values.dtype])
