"""Minibatches of jax.Arrays: where they are, how they are divided, and in functions that JAX compiles."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, write_store

import zloader as zl
from zloader.common.errors import OptionError

jax = pytest.importorskip("jax")
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

SIZES: dict[str, Any] = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(4), "framework": "jax"}
N_ROWS, N_GENES = 150, 60


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("jax")
    adata = counts(N_ROWS, N_GENES)
    adata.obs["large"] = 2**40 + np.arange(N_ROWS)
    adata.obsm["place"] = np.zeros((N_ROWS, 2), np.float32)
    write_store(adata, folder / "counts.zarr", folder)
    return str(folder / "counts.zarr")


@pytest.fixture
def dataset(url) -> zl.Dataset:
    return zl.open_dataset(url)


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4]), PartitionSpec(*spec))


@pytest.fixture(autouse=True)
def _four_devices() -> None:
    assert len(jax.devices()) >= 4, "conftest.py asks for four of the processor"


@pytest.mark.parametrize("spec", [("rows",), ("rows", None)])
def test_rows_are_divided_over_devices(dataset, spec):
    options = SIZES | {"layout": "dense", "obs": ["lane"], "obsm": ["place"], "remainder": "pad"}
    plain = zl.Loader(dataset, **options | {"framework": "numpy"})
    for found, wanted in zip(zl.Loader(dataset, device=sharding(*spec), **options), plain, strict=True):
        for one, other in ((found.x, wanted.x), (found.obs["lane"], wanted.obs["lane"]), (found.index, wanted.index)):
            shards = one.addressable_shards
            assert [shard.device for shard in shards] == jax.devices()[:4]
            for number, shard in enumerate(shards):
                np.testing.assert_array_equal(shard.data, other[4 * number : 4 * number + 4])
        assert len(found.obsm["place"].addressable_shards) == 4


def test_arrays_are_on_the_device_that_was_given(dataset):
    device = jax.devices()[2]
    for given in (device, SingleDeviceSharding(device)):
        minibatch = next(iter(zl.Loader(dataset, device=given, layout="packed", **SIZES)))
        assert minibatch.x.values.devices() == minibatch.index.devices() == {device}


def test_a_replicated_minibatch_is_on_all_devices(dataset):
    loader = zl.Loader(dataset, device=sharding(), layout="dense", **SIZES)
    assert sum(len(minibatch) for minibatch in loader) == N_ROWS
    assert next(iter(loader)).x.is_fully_replicated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "packed"}, "layout='packed' cannot be divided over 4 devices"),
        ({"layout": "dense"}, "give drop_last=True, or remainder='pad'"),
        ({"layout": "dense", "drop_last": True, "batch_size": 18}, "batch_size=18 cannot be divided over the devices"),
        ({"layout": "dense", "drop_last": True, "batch_transform": len}, "batch_transform run on the host"),
    ],
)
def test_what_cannot_be_divided_is_refused(dataset, options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        zl.Loader(dataset, device=sharding("rows"), **SIZES | options)


def test_large_numbers_are_not_cut_down(dataset):
    loader = zl.Loader(dataset, obs=["large"], x=None, **SIZES)
    with pytest.raises(OptionError, match=r"'large' of obs or obsm has 10995\d+, and JAX .*jax_enable_x64"):
        next(iter(loader))
    with jax.enable_x64(True):
        found = np.concatenate([minibatch.obs["large"] - minibatch.index for minibatch in loader])
    assert (found == 2**40).all()


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_bfloat16_has_the_bits_of_torch(dataset, layout):
    torch = pytest.importorskip("torch")
    options = SIZES | {"layout": layout, "dtype": "bfloat16"}
    for found, wanted in zip(
        zl.Loader(dataset, **options), zl.Loader(dataset, **options | {"framework": "torch"}), strict=True
    ):
        x, y = (found.x, wanted.x) if layout == "dense" else (found.x.values, wanted.x.values())
        assert x.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(np.asarray(x).view(np.int16)[: len(y)], y.view(torch.int16).numpy())


def test_x_is_not_copied(dataset):
    addresses = set()

    def seen(minibatch: zl.Minibatch) -> zl.Minibatch:
        addresses.add(minibatch.x.ctypes.data)
        return minibatch

    loader = zl.Loader(dataset, layout="dense", batch_transform=seen, **SIZES)
    found = [minibatch.x.unsafe_buffer_pointer() for minibatch in loader]
    assert set(found) <= addresses


def test_memory_is_not_used_again(dataset):
    loader = zl.Loader(dataset, layout="dense", **SIZES)
    kept = [(minibatch.x, minibatch.x.sum().item(), minibatch) for _ in range(3) for minibatch in loader]
    assert all(x.sum().item() == total for x, total, _ in kept)


@pytest.mark.slow
def test_compiled_functions_take_minibatches_and_are_compiled_seldom(dataset):
    compiled = []

    @jax.jit
    def step(minibatch: zl.Minibatch, weight: Any) -> Any:
        compiled.append(minibatch.x.values.shape)
        genes, values, _ = minibatch.x.padded(32)
        embedded = jax.numpy.take(weight, genes, axis=0, fill_value=0) * values[..., None]
        return minibatch.x.dense() @ weight, minibatch.x.bcsr() @ weight, embedded.sum(1), minibatch.obs["lane"].sum()

    weight = np.random.default_rng(0).integers(0, 3, (N_GENES, 2)).astype(np.float32)
    loader = zl.Loader(dataset, layout="csr", obs=["lane"], obs_names=True, drop_last=True, **SIZES)
    for minibatch in loader:
        dense, sparse, embedded, _ = step(minibatch, weight)
        wanted = np.asarray(minibatch.x.dense()) @ weight
        for found in (dense, sparse, embedded):
            np.testing.assert_array_equal(found, wanted)
    assert len(compiled) == 1
    leaves, tree = jax.tree_util.tree_flatten(minibatch)
    assert isinstance(jax.tree_util.tree_unflatten(tree, leaves).obs, type(minibatch.obs))


_RANK = """
import sys
import jax

jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import zloader as zl
from zloader.common.errors import OptionError

dataset = zl.open_dataset(sys.argv[1])
mesh = jax.make_mesh((jax.device_count(),), ("rows",))
options = {"framework": "jax", "batch_size": 16, "fetch_factor": 2, "layout": "dense", "remainder": "pad"}
loader = zl.Loader(dataset, device=NamedSharding(mesh, PartitionSpec("rows")), **options)
assert (loader.plan(0).rank, loader.plan(0).world_size) == (int(sys.argv[3]), 2)
rows = set()
for minibatch, alone in zip(loader, zl.Loader(dataset, **options), strict=True):
    assert minibatch.index.shape == (32,), minibatch.index.shape
    mine = np.concatenate([np.asarray(shard.data) for shard in minibatch.index.addressable_shards])
    assert mine.tolist() == alone.index.tolist()
    rows.update(mine.tolist())
try:
    zl.Loader(dataset, device=NamedSharding(mesh, PartitionSpec()), **options)
except OptionError as error:
    assert "does not give each of 2 processes other rows" in str(error), error
else:
    sys.exit("every process has other rows, and yet they are said to be the same")
print(*sorted(rows))
"""


@pytest.mark.slow
def test_processes_of_jax_are_ranks(url, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    commands = [[sys.executable, "-c", _RANK, url, address, str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        done = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-2000:] for _, error in done]
    rows = [set(map(int, out.split())) for out, _ in done]
    assert rows[0] | rows[1] == set(range(N_ROWS))
    assert Path(url).exists()
