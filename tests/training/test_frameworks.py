"""Loaders of NumPy arrays: the same values as tensors have, and no torch in the process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import PATIENCE_S, check_seen_once, counts, of_genes, write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.testing import assert_resumes_anywhere

N_ROWS, N_GENES = 150, 60
IDS = [f"gene {number}" for number in range(N_GENES)]
TOKENS = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3} | {name: 4 + number for number, name in enumerate(IDS)}
SIZES: dict[str, Any] = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(4), "seed": 3}
OBS = ["cell_type", "donor", "passed", "lane", "n_counts"]


def source() -> Any:
    adata = counts(N_ROWS, N_GENES)
    adata.obsm["place"] = np.arange(2.0 * N_ROWS).reshape(N_ROWS, 2).astype(np.float32)
    adata.layers["dense"] = adata.X.toarray()
    adata.layers["halves"] = adata.X / 2
    adata.obs["large"] = 2**40 + np.arange(N_ROWS)
    adata.obs["line"] = [["A", "B"][row % 2] for row in range(N_ROWS)]
    graph = scipy.sparse.random(N_ROWS, N_ROWS, 0.05, "csr", np.float32, random_state=np.random.default_rng(1))
    adata.obsp["distances"] = graph
    return adata


ADATA = source()
GENEFORMER = zl.tokenizers.Geneformer(TOKENS, dict.fromkeys(IDS, 1.0), max_length=20)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("frameworks")
    write_store(ADATA, folder / "counts.zarr", folder)
    return str(folder / "counts.zarr")


@pytest.fixture
def dataset(url) -> zl.Dataset:
    return zl.open_dataset(url)


# ---- minibatches as NumPy arrays, whatever holds them


def csr_parts(x: Any) -> tuple[np.ndarray, ...]:
    if isinstance(x, zl.PackedRows):
        return tuple(map(plain, (x.indptr, x.genes, x.values)))
    return tuple(map(plain, (x.crow_indices(), x.col_indices(), x.values())))


def plain(found: Any) -> Any:
    """Arrays of a part of a minibatch as a tree of NumPy arrays."""
    if found is None:
        return None
    if isinstance(found, zl.Minibatch):
        return {name: plain(part) for name, part in found.items()}
    if isinstance(found, zl.PackedRows) or (torch.is_tensor(found) and found.layout == torch.sparse_csr):
        return [tuple(found.shape), *csr_parts(found)]
    if isinstance(found, dict):
        return {name: plain(part) for name, part in found.items()}
    if torch.is_tensor(found):
        return (found.view(torch.int16) if found.dtype == torch.bfloat16 else found).numpy()
    return np.asarray(found)


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for name, part in wanted.items():
            assert_equal(found[name], part, f"{where}/{name}")
    elif isinstance(wanted, list):
        assert found[0] == wanted[0], where
        for one, other in zip(found[1:], wanted[1:], strict=True):
            assert_equal(one, other, where)
    elif wanted is not None:
        np.testing.assert_array_equal(found, wanted, where, strict=True)
    else:
        assert found is None


def assert_as_torch(dataset, n_epochs: int = 2, **options: Any) -> None:
    options = SIZES | {"obs": OBS, "obsm": ["place"]} | options
    dataset = of_genes(dataset, options.pop("genes", None))
    found, wanted = zl.Loader(dataset, framework="numpy", **options), zl.Loader(dataset, **options)
    assert len(found) == len(wanted)
    for _ in range(n_epochs):
        for one, other in zip(found, wanted, strict=True):
            assert type(one.index) is np.ndarray
            assert_equal(plain(one), plain(other))
    assert found.statistics().rows == wanted.statistics().rows > 0
    assert found.state_dict() == wanted.state_dict()


CASES: dict[str, dict[str, Any]] = {
    "csr": {"layout": "csr"},
    "dense": {"layout": "dense"},
    "packed": {"layout": "packed"},
    "no x": {"x": None},
    "integers": {"layout": "dense", "dtype": "int32"},
    "several": {"x": ["X", "layers/dense", "layers/halves"]},
    "several packed": {"x": ["X", "layers/dense", "layers/halves"], "layout": "packed"},
    "genes": {"genes": IDS[5:25][::-1], "layout": "packed"},
    "transforms": {"transforms": [zl.transforms.LogNormalize(1e4)], "layout": "dense"},
    "tokens": {"tokens": GENEFORMER, "x": None},
    "sets": {
        "sampling": zl.CellSets(["line"], set_size=4),
        "controls": zl.MatchedControls("lane == 1", match=["line"]),
    },
    "neighbours": {"neighbors": zl.Neighbors("distances", k=3), "layout": "dense"},
    "weighted": {"sampling": zl.ClassBalancedSampling("line", block_size=4)},
    "rank": {"rank": 1, "world_size": 2, "drop_last": True},
    "rows 1": {"batch_size": 1, "fetch_factor": 8, "layout": "packed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_are_those_of_torch(dataset, options):
    assert_as_torch(dataset, **options)


def test_a_view_has_the_same_rows(dataset):
    assert_as_torch(dataset.where("lane > 1")[:, IDS[::3]], layout="dense")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_csr_rows_become_tables(dataset, dtype):
    sizes = SIZES | {"layout": "packed", "x": "layers/halves" if dtype == "float32" else "X"}
    for found, wanted in zip(zl.Loader(dataset, framework="numpy", **sizes), zl.Loader(dataset, **sizes), strict=True):
        assert_equal(plain(found.x.dense(dtype)), plain(wanted.x.dense(dtype)))
        for length in (None, 1, 7, 80):
            one, other = found.x.padded(length, dtype), wanted.x.padded(length, dtype)
            assert_equal(plain(one._asdict()), plain(other._asdict()))
        assert_equal(plain(found.x[3:9].dense()), plain(wanted.x[3:9].dense()))
        assert_equal(plain(found.x[3:3].padded(4)._asdict()), plain(wanted.x[3:3].padded(4)._asdict()))


@pytest.mark.slow
def test_repeated_genes_are_summed():
    rows = zl.PackedRows(np.array([0, 3, 3]), np.array([1, 1, 0], np.uint8), np.array([2, 3, 4], np.uint8), 2)
    assert np.asarray(rows.dense("float16")).tolist() == [[4, 5], [0, 0]]


@pytest.mark.slow
def test_every_minibatch_can_be_resumed_from(dataset):
    assert_resumes_anywhere(lambda: zl.Loader(dataset, framework="numpy", layout="dense", **SIZES), every=3)


def test_states_are_those_of_torch(dataset):
    loader, tensors = zl.Loader(dataset, framework="numpy", **SIZES), zl.Loader(dataset, **SIZES)
    minibatches = iter(loader)
    seen = [next(minibatches).index.tolist() for _ in range(4)]
    tensors.load_state_dict(loader.state_dict())
    rest = [minibatch.index.tolist() for minibatch in tensors]
    assert sorted(row for rows in seen + rest for row in rows) == list(range(N_ROWS))
    assert rest == [minibatch.index.tolist() for minibatch in minibatches]


def test_ranks_share_the_rows(dataset):
    loaders = [zl.Loader(dataset, framework="numpy", rank=rank, world_size=3, **SIZES) for rank in range(3)]
    seen = [row for loader in loaders for minibatch in loader for row in minibatch.index.tolist()]
    check_seen_once(loaders[0].plan(0), seen, 3)


def doubled(minibatch: zl.Minibatch) -> zl.Minibatch:
    assert isinstance(minibatch.x, np.ndarray)
    assert minibatch.x.flags.writeable
    return zl.Minibatch(minibatch, x=minibatch.x * 2)


def test_own_functions_get_numpy(dataset):
    sizes = SIZES | {"layout": "dense"}
    loader = zl.Loader(dataset, framework="numpy", **sizes, batch_transform=doubled)
    for found, wanted in zip(loader, zl.Loader(dataset, **sizes), strict=True):
        assert isinstance(found.x, np.ndarray)
        np.testing.assert_array_equal(found.x, wanted.x.numpy() * 2)
        assert found.index.tolist() == wanted.index.tolist()


def test_what_a_batch_transform_returns_is_left_alone(dataset):
    found = list(zl.Loader(dataset, framework="numpy", batch_transform=lambda minibatch: len(minibatch), **SIZES))
    assert sum(found) == N_ROWS


# ---- the class of a loader


class Own(zl.Loader):
    """A loader of a user."""


@pytest.mark.parametrize("kind", [zl.Loader, Own])
def test_loaders_of_tensors_are_datasets_of_torch(dataset, kind):
    expected = next(iter(zl.Loader(dataset, framework="numpy", **SIZES))).index.tolist()
    loader = kind(dataset, **SIZES)
    for each in (loader, copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(each) is kind
        assert isinstance(each, torch.utils.data.IterableDataset)
        each.set_epoch(0)  # shallow copies share their count
        assert next(iter(torch.utils.data.DataLoader(each, batch_size=None))).index.tolist() == expected


@pytest.mark.slow
def test_another_process_knows_the_class_from_a_pickle(dataset, tmp_path):
    (tmp_path / "loader").write_bytes(pickle.dumps(zl.Loader(dataset, **SIZES)))
    script = (
        f"import pickle; loader = pickle.load(open({str(tmp_path / 'loader')!r}, 'rb'))\n"
        "import torch.utils.data; print(isinstance(loader, torch.utils.data.IterableDataset))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "True\n"


def test_workers_of_torch_are_for_tensors(dataset):
    loader = zl.Loader(dataset, framework="numpy", **SIZES)
    zl.Loader(dataset, **SIZES)  # from here on, torch knows the class
    in_process = torch.utils.data.DataLoader(loader, batch_size=None)
    assert [len(each) for each in in_process] == [len(each) for each in loader]
    with pytest.raises(OptionError, match="does not work in DataLoader workers"):
        next(iter(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1)))


def test_copies_count_epochs_for_themselves(dataset):
    loader = zl.Loader(dataset, framework="numpy", **SIZES)
    list(loader)
    other = pickle.loads(pickle.dumps(loader))
    list(other)
    assert (loader.state_dict()["epoch"], other.state_dict()["epoch"]) == (1, 2)


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "tensorflow"}, "framework must be one of 'torch', 'numpy', not 'tensorflow'"),
        ({"framework": "numpy", "device": "cuda"}, "NumPy has no devices: leave device='cuda' out"),
        ({"framework": "numpy", "dtype": "bfloat16"}, "half floats are made on the device"),
    ],
)
def test_what_does_not_go_together_is_refused(dataset, options, message):
    with pytest.raises(OptionError, match=message):
        zl.Loader(dataset, **options)


def test_arrays_are_not_moved(dataset):
    minibatch = next(iter(zl.Loader(dataset, framework="numpy", **SIZES)))
    for move in (minibatch.pin_memory, lambda: minibatch.to("cpu")):
        with pytest.raises(OptionError, match="a minibatch of ndarray has no tensors to move"):
            move()
    with pytest.raises(OptionError, match=r"PackedRows cannot give x\[3\]"):
        minibatch.x[3]


# ---- processes without torch

_EPOCH = """
import sys

if sys.argv[2] == "blocked":
    class NoTorch:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    sys.meta_path.insert(0, NoTorch)

import zloader as zl

dataset = zl.open_dataset(sys.argv[1])
ids = {f"gene {number}": number + 4 for number in range(60)}
special = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3}
options = {
    "framework": "numpy", "batch_size": 16, "obs": ["lane"], "obsm": ["place"],
    "tokens": zl.tokenizers.Geneformer(special | ids, dict.fromkeys(ids, 1.0), max_length=20),
}
for layout in ["csr", "dense", "packed", "scipy"]:
    loader = zl.Loader(dataset, layout=layout, batch_transform=lambda minibatch: minibatch, **options)
    assert sorted(row for minibatch in loader for row in minibatch.index.tolist()) == list(range(150)), layout
    state = loader.state_dict()
    loader.load_state_dict(state)
    repr(next(iter(loader)))
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("torch_is", ["there", "blocked"])
def test_an_epoch_does_not_import_torch(url, torch_is):
    command = [sys.executable, "-c", _EPOCH, url, torch_is]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
