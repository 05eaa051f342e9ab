"""Minibatches on a CUDA GPU. Where there is none, test_devices.py has the same tests with a fake device."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same, assert_same_minibatches, assert_threads_end, counts, fetch_options, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.testing import assert_resumes_anywhere
from zloader.training.device import Finish, Sent, StreamDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}
ADATA = counts(1203, 300)
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((1203, 5), np.float32)
ADATA.layers["dense"] = counts(1203, 300, density=0.9, seed=5).X.toarray()
ROWS = {"obs": ["cell_type", "n_counts", "passed", "lane"], "obsm": ["X_pca"]}
LAYOUTS = ["csr", "dense", "packed"]
LONG = 3_000_000  # cycles, one or two milliseconds


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("gpu")
    write_store(ADATA, folder / "s.zarr", folder)
    return zl.open_dataset(folder / "s.zarr", cache=folder / "cache")


class SlowDevice(StreamDevice):
    """A GPU whose copies begin late."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))

    def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LONG)
        return super().send(staged, finish)


def allocated_bytes() -> int:
    """Bytes of tensors on the GPU, after all work and without memory that waits to be freed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def dense_of(x: Any) -> torch.Tensor:
    return x.dense() if isinstance(x, zl.PackedRows) else x.to_dense()


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x", ["X", "layers/dense", ["X", "layers/dense"], None], ids=str)
def test_minibatches_equal_those_of_the_host(dataset, device, layout, x):
    options = {**SIZES, **ROWS, "x": x, "layout": layout}
    here, there = zl.Loader(dataset, **options), zl.Loader(dataset, device=device, **options)
    for _ in range(2):
        found = list(there)
        assert {minibatch.index.device.type for minibatch in found} == {"cuda"}
        assert all(minibatch.obs["lane"].is_cuda and minibatch.obsm["X_pca"].is_cuda for minibatch in found)
        assert_same_minibatches([minibatch.to("cpu") for minibatch in found], here)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_dtypes_equal_those_of_the_host(dataset, dtype, layout):
    options = {**SIZES, "dtype": dtype, "layout": layout, "x": ["X", "layers/dense"]}
    found = [minibatch.to("cpu") for minibatch in zl.Loader(dataset, device="cuda", **options)]
    assert_same_minibatches(found, zl.Loader(dataset, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slow", [False, True], ids=["", "late copies"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_no_memory_is_used_again_too_early(dataset, layout, slow, own_stream):
    """The consumer's stream is late by random times, and every minibatch is dropped before it was used there."""
    rng = np.random.default_rng(0)
    weights = torch.arange(1.0, 301, dtype=torch.float64)
    wanted = [dense_of(each.x).double() @ weights for each in zl.Loader(dataset, layout=layout, **SIZES)]
    there = weights.to("cuda")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        found = []
        loader = zl.Loader(dataset, layout=layout, device=SlowDevice() if slow else "cuda", obs=["lane"], **SIZES)
        with torch.cuda.stream(stream):
            for minibatch in loader:
                torch.cuda._sleep(int(rng.integers(0, LONG)))
                found.append((dense_of(minibatch.x).double() * there).sum(dim=1))
                del minibatch
        stream.synchronize()
        for one, other in zip(found, wanted, strict=True):
            assert_same(one.cpu(), other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaving_early_ends_all_threads_and_frees_the_memory(dataset, layout):
    before = allocated_bytes()
    for _ in range(20):
        for number, _minibatch in enumerate(zl.Loader(dataset, device="cuda", layout=layout, **SIZES)):
            if number == 3:
                break
        del _minibatch
        assert_threads_end()
    minibatches = iter(zl.Loader(dataset, device="cuda", layout=layout, **SIZES))
    next(minibatches)
    minibatches.close()
    assert list(minibatches) == []
    assert_threads_end()
    assert allocated_bytes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_grow_however_late_training_is(dataset, layout):
    """The training loop waits for nothing, so it could take a whole epoch before the GPU has begun with it."""
    sizes = {**SIZES, "batch_size": 64, "fetch_factor": 2}
    loader = zl.Loader(dataset, device="cuda", layout=layout, options=fetch_options(ready_bytes=10**6), **sizes)
    largest = 64 * 300 * 4 + 100_000
    before, ends = allocated_bytes(), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        for _minibatch in loader:
            torch.cuda._sleep(LONG)
        del _minibatch
        ends.append(allocated_bytes())
    assert torch.cuda.max_memory_allocated() - before < 16 * largest
    assert set(ends) == {before}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_dataloader_pins_minibatches(dataset, layout):
    loader = zl.Loader(dataset, layout=layout, **SIZES, **ROWS)
    here = list(zl.Loader(dataset, layout=layout, **SIZES, **ROWS))
    for workers in ({}, {"num_workers": 2, "multiprocessing_context": "fork"}):
        pinned = list(DataLoader(loader, batch_size=None, pin_memory=True, **workers))
        for minibatch in pinned:
            assert isinstance(minibatch, zl.Minibatch)
            x = minibatch.x
            parts = {"csr": lambda x: x.values(), "dense": lambda x: x, "packed": lambda x: x.genes}
            assert parts[layout](x).is_pinned()
            assert minibatch.obs["lane"].is_pinned()
        if not workers:
            moved = [minibatch.to("cuda", non_blocking=True) for minibatch in pinned]
            torch.cuda.synchronize()
            assert_same_minibatches([minibatch.to("cpu") for minibatch in moved], here)


def test_packed_rows_become_other_layouts_on_the_gpu(dataset):
    here = next(iter(zl.Loader(dataset, layout="packed", **SIZES))).x
    there = here.to("cuda")
    assert there.device.type == "cuda"
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        assert_same(there.dense(dtype).cpu(), here.dense(dtype))
        assert_same(there.csr(dtype).cpu(), here.csr(dtype))
        for length in (None, 5, 1000):
            for one, other in zip(there.padded(length, dtype), here.padded(length, dtype), strict=True):
                assert_same(one.cpu(), other)
    assert_same(here.pin_memory(), here)
    assert_same(pickle.loads(pickle.dumps(there)).to("cpu"), here)


def test_states_and_statistics_count_received_minibatches(dataset):
    view = dataset.where(np.arange(1203) < 120)

    def make(**options: Any) -> zl.Loader:
        return zl.Loader(view, device="cuda", **SIZES, **options)

    assert_resumes_anywhere(make, every=5)
    loader = pickle.loads(pickle.dumps(make()))
    assert loader.device == "cuda"
    minibatches = iter(loader)
    next(minibatches)
    assert loader.statistics().minibatches == 1
    minibatches.close()


def test_a_gpu_that_does_not_exist_is_refused(dataset):
    with pytest.raises(OptionError, match=r"device='cuda:99' is not available. Available: cpu, cuda:0"):
        zl.Loader(dataset, device="cuda:99")


def test_workers_have_no_gpu(dataset):
    workers = DataLoader(
        zl.Loader(dataset, device="cuda", **SIZES), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(OptionError, match="does not work in DataLoader workers"):
        next(iter(workers))
