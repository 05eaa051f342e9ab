"""What NumPy does for few rows, until numba is loaded, against the compiled loops: the same, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.common import page_cache
from zloader.order import permutation
from zloader.reading import loops
from zloader.reading.fetch import FetchScheduler
from zloader.reading.resources import BufferPool
from zloader.storage import decode

# Stored dtypes of genes and values, the wanted dtype, and whether genes have other columns. Not all cases are tested,
# because each is compiled.
DTYPES = [
    ("uint16", "uint16", "float32", False),
    ("uint32", "int64", "int32", True),
    ("int32", "float64", "float32", False),
]
N_GENES = 9


def both(loop: Any, *arguments: Any) -> list[tuple[Any, list[Any]]]:
    """What the compiled loop and NumPy return, each with the arguments afterwards, which may be changed."""
    results = []
    for function in (loop._compiled(), loop._plain):
        own = [each.copy() if isinstance(each, np.ndarray) and each.flags.writeable else each for each in arguments]
        results.append((function(*own), own))
    return results


def same_bits(given: np.ndarray, expected: np.ndarray) -> None:
    """Whether arrays are equal in every bit, but for the payload of NaNs, which processors choose."""
    np.testing.assert_array_equal(given, expected)
    if given.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(given[given == 0]), np.signbit(expected[expected == 0]))


@st.composite
def stored_rows(draw, genes, values):
    """Rows of stored genes and values, some with a gene twice, and where some of them begin."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=40))
    n = sum(lengths)
    columns = np.array(draw(st.lists(st.integers(0, N_GENES - 1), min_size=n, max_size=n)), genes)
    ends = np.cumsum(lengths)
    if draw(st.booleans()):
        for first, last in zip(ends - lengths, ends, strict=True):
            columns[first:last] = np.sort(np.arange(last - first, dtype=genes))
    kind = np.dtype(values)
    if kind.kind == "f":
        usual = [0.0, -0.0, 0.1, -7.0, 3.0, np.float32(2**24 + 2)]
        special = st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 1e300 if kind.itemsize == 8 else 1.0])
        one = st.sampled_from(usual) if draw(st.booleans()) else st.sampled_from(usual) | special
    elif kind.kind == "b":
        one = st.booleans()
    else:
        limits = np.iinfo(kind)
        one = st.sampled_from([0, 1, 200]) | st.integers(int(limits.min), int(limits.max))
    stored = np.array(draw(st.lists(one, min_size=n, max_size=n)), kind)
    taken = np.array(draw(st.lists(st.integers(0, len(lengths) - 1), max_size=40)), np.int64)
    for array in (columns, stored):
        array.flags.writeable = False
    return columns, stored, (ends - lengths)[taken], np.array(lengths, np.int64)[taken]


@pytest.mark.every(2)
@pytest.mark.parametrize(("genes", "values", "wanted", "mapped"), DTYPES)
@given(draw=st.data())
def test_scattered_rows_are_the_same(genes, values, wanted, mapped, draw):
    columns, stored, starts, lengths = draw.draw(stored_rows(genes, values))
    at = np.array(draw.draw(st.permutations(range(len(lengths) + 2))), np.int64)[: len(lengths)]
    tables = None
    if mapped:
        table = np.array(draw.draw(st.permutations(range(2 * N_GENES))), np.uint32)
        tables = table, np.array([N_GENES * (row % 2) for row in range(len(lengths))], np.int64)
    out = np.full((len(lengths) + 2, 2 * N_GENES), 7, wanted)  # which is overwritten, but in two rows
    (_, by_loop), (_, by_numpy) = both(
        loops.scatter_rows, (columns, tables), stored, (starts, starts), lengths, at, out
    )
    same_bits(by_numpy[5], by_loop[5])


def test_repeated_genes_without_a_finite_sum_are_no_warning():
    """As in the compiled loops. Warnings are errors in tests."""
    genes, ends = np.zeros(2, np.int32), (np.zeros(1, np.int64),) * 2
    for values in ([np.inf, -np.inf], [3e38, 3e38]):
        out, stored = np.zeros((1, 1), np.float32), np.array(values, np.float32)
        loops._scatter_rows((genes, None), stored, ends, np.array([2]), np.zeros(1, np.int64), out)
        assert not np.isfinite(out).any()


@pytest.mark.every(4)
@pytest.mark.parametrize(("genes", "values", "wanted"), [each[:3] for each in DTYPES])
@given(draw=st.data())
def test_copied_rows_are_the_same(genes, values, wanted, draw):
    _, stored, starts, lengths = draw.draw(stored_rows(genes, values))
    at = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), wanted)
    (_, by_loop), (_, by_numpy) = both(loops.copy_rows, stored, starts, lengths, at, out)
    same_bits(by_numpy[4], by_loop[4])


@given(
    n=st.integers(1, 10**9),
    key=st.integers(0, 2**64 - 1),
    which=st.lists(st.integers(0, 2**40), max_size=30),
    each=st.booleans(),
    draw=st.data(),
)
def test_permuted_numbers_are_the_same(n, key, which, each, draw):
    sizes = np.array([draw.draw(st.integers(max(1, n // 8), n)) if each else n for _ in which], np.int64)
    index = np.array([draw.draw(st.integers(0, int(size) - 1)) for size in sizes], np.int64)
    if not each:
        sizes = np.array([n])
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = permutation.words_at(key, np.arange(1, 9, dtype=np.uint64))
    of = np.array(which, np.int64) if each else np.zeros(1, np.int64)
    out = np.empty(len(index), np.int64)
    (_, by_loop), (_, by_numpy) = both(permutation._permute, index, sizes, of, keys, half, out)
    np.testing.assert_array_equal(by_numpy[5], by_loop[5])


def test_many_numbers_and_rows_are_left_to_the_loops():
    many = np.zeros(permutation._FEW + 1, np.int64)
    arguments = many, np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(8, np.uint64), np.uint64(1), many
    assert permutation._permute._plain(*arguments) is NotImplemented
    rows = np.zeros(loops._MANY + 1, np.int64)
    assert loops._copy_rows(rows, rows, rows, rows, rows) is NotImplemented


@pytest.mark.parametrize("dtype", ["uint16", "uint64"])
@given(draw=st.data())
def test_sums_of_differences_are_the_same(dtype, draw):
    words = st.integers(0, np.iinfo(dtype).max)
    differences = np.array(draw.draw(st.lists(words, max_size=9)), dtype)
    expected = np.cumsum(differences.astype(object), dtype=object)
    for function in (decode.accumulate._compiled(), decode.accumulate._plain):
        out = differences.copy()
        function(out)
        assert out.tolist() == [total % 2 ** (8 * out.itemsize) for total in expected]


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 5], [7] * 6], ids=str)
def test_ranges_of_a_file_are_prefetched_alike(tmp_path, lengths):
    (tmp_path / "bytes").write_bytes(bytes(range(45)))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    with (tmp_path / "bytes").open("rb") as file:
        results = both(page_cache._prefetch, file.fileno(), starts, starts + lengths)
    assert [result for result, _ in results] == [None, None]


_EPOCHS = """
import hashlib, sys
import numpy as np
import zloader as zl
from zloader.common import compiled
if sys.argv[1] == "compiled":
    compiled.load_compiler()

def told(minibatch):
    x = minibatch.x
    parts = [getattr(x, each) for each in sys.argv[2].split() if hasattr(x, each)]
    arrays = [x] if isinstance(x, np.ndarray) else parts
    assert arrays
    return [(each.dtype.str, each.shape, each.tobytes()) for each in (*arrays, minibatch.index)]

for x in ("X", "layers/dense", "layers/doubled"):
    for layout in ("dense", "csr", "packed"):
        for cache in (None, "cache"):
            dataset = zl.open_dataset(["counts.zarr", "more.zarr"], cache=cache)
            loader = zl.Loader(dataset, x=x, layout=layout, framework="numpy", seed=2, batch_size=32)
            if sys.argv[1] == "few" and (x, layout) in EASY:
                print((x, layout), "numba" in sys.modules, file=sys.stderr)
            for epoch in range(2):
                print(x, layout, hashlib.sha256(repr(list(map(told, loader))).encode()).hexdigest())
"""


def told(folder: Path, code: str, *arguments: str) -> tuple[str, str]:
    """What a new process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def stores(tmp_path):
    for name, n_rows in (("counts", 150), ("more", 41)):
        adata = counts(n_rows, 300)
        adata.layers["dense"] = adata.X.toarray()
        adata.layers["doubled"] = adata.X.astype(np.float64) / 3
        write_store(adata, tmp_path / f"{name}.zarr", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_epochs_are_the_same_with_and_without_compiled_loops(stores: Path) -> None:
    attributes = "indptr indices values data genes columns counts"
    epochs = _EPOCHS.replace("EASY", repr([("X", "dense"), ("X", "csr"), ("layers/doubled", "packed")]))
    by_loops, _ = told(stores, epochs, "compiled", attributes)
    (stores / "cache").rename(stores / "old-cache")
    by_numpy, without = told(stores, epochs, "few", attributes)
    assert by_numpy == by_loops
    assert without.splitlines()[:2] == 2 * ["('X', 'dense') False"]


_UNTIL = """
import sys
import zloader as zl
from zloader.training import recipes
dataset = zl.open_dataset("counts.zarr")
loader = zl.Loader(dataset, framework="numpy", layout="dense", batch_size=16, **eval(sys.argv[1]))
print("numba" in sys.modules)
loader.set_epoch(recipes.EPOCHS_IN_NUMPY - 1)
for _ in range(2):
    assert sum(map(len, loader)) == 150
    print("numba" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "loaded"),
    [
        ("{}", [False, False, True]),
        ("{'sampling': 'mixture_of_scanners'}", [False, False, True]),
        ("{'sampling': 'random', 'obs': ['cell_type', 'n_counts']}", [False, False, True]),
        ("{'transforms': [zl.transforms.LogNormalize(1e4)]}", 3 * [True]),
        ("{'layout': 'csr', 'x': 'layers/dense'}", [False, True, True]),  # when its first rows are gathered
    ],
)
def test_numba_is_loaded_when_a_loader_needs_it_or_goes_on_for_many_epochs(stores, options, loaded):
    code = _UNTIL.replace('layout="dense", ', "") if "layout" in options else _UNTIL
    printed, _ = told(stores, code, options)
    assert printed.split() == list(map(str, loaded))


@pytest.mark.slow
def test_numba_is_loaded_for_many_values(stores, monkeypatch):
    code = _UNTIL.replace("dataset = ", "import zloader.dataset.matrices as m; m.FEW = 100; dataset = ")
    printed, _ = told(stores, code, "{}")
    assert printed.split() == 3 * ["True"]
    assert loops.FEW > 10**6


@pytest.mark.parametrize("compiled", [True, False])
def test_whoever_makes_fetches_loads_the_compiler(stores, monkeypatch, compiled):
    """So do the tasks of Ray, which do not begin epochs as a Loader does."""
    loads = []
    monkeypatch.setattr("zloader.reading.fetch.load_compiler", lambda: loads.append(True))
    loader = zl.Loader(zl.open_dataset(stores / "counts.zarr"), batch_size=16)
    recipe = replace(loader.recipes.recipe(0), compiled=compiled)
    FetchScheduler(recipe, zl.FetchOptions(), BufferPool())
    assert loads == [True] * compiled
