"""Minibatches that a thread sends to a device: a fake one here, whose copies are as late as they can be."""

from __future__ import annotations

import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from helpers import assert_same_minibatches, assert_threads_end, counts, fetch_options, of_genes, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError, ReadError
from zloader.testing import assert_resumes_anywhere
from zloader.training.device import Device, Finish, LentMemory, PlainDevice, Sent

pytestmark = pytest.mark.any_version

SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}
ADATA = counts(203, 300)
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((203, 5), np.float32)
ADATA.layers["dense"] = counts(203, 300, density=0.9, seed=5).X.toarray()
LAYOUTS = ["csr", "dense", "packed"]


class LateDevice(Device):
    """Copies when it must: when the staging memory is needed, or the minibatch. `careless` ones skip the former."""

    def __init__(self, *, careless: bool = False) -> None:
        self.careless = careless
        self.staged = 0  # blocks of staging memory
        self.sent: list[threading.Thread] = []

    def __reduce__(self) -> Any:
        return LateDevice, ()

    def staging(self, n_bytes: int) -> torch.Tensor:
        self.staged += 1
        return torch.empty(n_bytes, dtype=torch.uint8)

    def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
        self.sent.append(threading.current_thread())
        copies: list[torch.Tensor] = []
        lock = threading.Lock()

        def copy() -> None:
            with lock:
                if not copies:
                    copies.extend(tensor.clone() for tensor in staged)

        def take() -> zl.Minibatch:
            copy()
            return finish(copies)

        return Sent(copied=(lambda: None) if self.careless else copy, take=take)


class CopyingDevice(PlainDevice):
    """A device without streams, which copies within the host's memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def _copied(self, tensor: Any) -> Any:
        return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor.each(torch.clone)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("devices")
    write_store(ADATA, folder / "s.zarr", folder)
    return zl.open_dataset(folder / "s.zarr")


# ---- the same values


@pytest.mark.every(24)
@pytest.mark.parametrize("device", [LateDevice, CopyingDevice])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x", ["X", "layers/dense", ["X", "layers/dense"], None], ids=str)
def test_minibatches_equal_those_of_the_host(dataset, device, layout, x):
    options = {**SIZES, "x": x, "layout": layout, "obs": ["cell_type", "n_counts", "passed"], "obsm": ["X_pca"]}
    here, there = zl.Loader(dataset, **options), zl.Loader(dataset, device=device(), **options)
    for _ in range(2):
        assert_same_minibatches(there, here)


@pytest.mark.every(10)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize(
    ("layout", "genes"), [("csr", None), ("dense", [7, 2, 250])], ids=["csr", "dense, three genes"]
)
def test_dtypes_equal_those_of_the_host(dataset, dtype, layout, genes):
    options = {**SIZES, "dtype": dtype, "layout": layout, "x": ["X", "layers/dense"]}
    dataset = of_genes(dataset, genes)
    assert_same_minibatches(zl.Loader(dataset, device=LateDevice(), **options), zl.Loader(dataset, **options))


@pytest.mark.every(6)
@pytest.mark.parametrize("stored", ["uint8", "uint16", "int32", "int64", "float16", "float32", "float64"])
def test_stored_dtypes_are_rounded_once(tmp_path, stored):
    adata = counts(60, 40)
    adata.X = adata.X.astype(np.float64)
    adata.X.data = (adata.X.data * 150.3 if stored != "uint8" else adata.X.data % 255).astype(stored)
    if stored in ("int32", "int64", "float64"):
        adata.X.data[:2] = 16_777_217, 16_777_219  # halfway between two floats
    options = zl.ConvertOptions(preserve_dtype=True)
    zl.convert(adata, tmp_path / "s.zarr", options=options, progress=False)
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    for layout in ("csr", "dense"):
        made = {**SIZES, "layout": layout}
        assert_same_minibatches(zl.Loader(dataset, device=LateDevice(), **made), zl.Loader(dataset, **made))


@pytest.mark.parametrize("layout", ["csr", "dense", "packed"])
def test_sets_and_controls_equal_those_of_the_host(dataset, layout):
    sets, controls = zl.CellSets("lane", 4), zl.MatchedControls("passed", match="lane", n=2)
    options = {"batch_size": 12, "fetch_factor": 3, "layout": layout, "sampling": sets, "controls": controls}
    for found, wanted in zip(
        zl.Loader(dataset, device=LateDevice(), **options), zl.Loader(dataset, **options), strict=True
    ):
        assert_same_minibatches([found, found.control], [wanted, wanted.control])
        assert found.set_of_row.equal(wanted.set_of_row)
        assert found.group["lane"].tolist() == wanted.group["lane"].tolist()


def test_views_row_numbers_and_kept_labels(dataset):
    view = dataset.where("n_counts > 0")
    loader = zl.Loader(view, obs=["lane"], layout="dense", device=LateDevice(), **SIZES)
    kept = []
    for minibatch in loader:
        np.testing.assert_array_equal(minibatch.x.numpy(), ADATA.X[minibatch.index.numpy()].toarray())
        kept.append(minibatch.obs["lane"])
    assert all(lane.untyped_storage().nbytes() < 1000 for lane in kept)  # x is not kept with them


def test_repeated_genes_are_summed_as_on_the_host(tmp_path):
    x = counts(40, 300).X.astype(np.uint8)
    x.data[:] = 200
    x.indices[1] = x.indices[0]  # rows are not canonical then, and 400 does not fit into the stored dtype
    adata = ad.AnnData(X=x)
    with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anndata warns of what it will do in future
        adata.write_zarr(tmp_path / "s.zarr")
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    for dtype in ("float32", "int64"):
        options = {**SIZES, "layout": "dense", "dtype": dtype}
        assert_same_minibatches(zl.Loader(dataset, device=LateDevice(), **options), zl.Loader(dataset, **options))
    found = next(iter(zl.Loader(dataset, batch_size=40, shuffle=False, layout="packed"))).x
    np.testing.assert_array_equal(found.dense().numpy(), x.astype(np.int64).toarray())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_transformed_values_equal_those_of_the_host(dataset, layout, dtype):
    transforms = [zl.transforms.LogNormalize(1e4)]
    options = {**SIZES, "layout": layout, "dtype": dtype, "transforms": transforms}
    here, there = (list(zl.Loader(dataset, device=device, **options)) for device in (None, LateDevice()))
    assert_same_minibatches(there, here)


# ---- staging memory


@pytest.mark.slow
@pytest.mark.parametrize("n_genes", [300, 20], ids=["lent memory and blocks", "blocks alone"])
def test_no_staging_memory_is_filled_before_its_copy_is_done(tmp_path, n_genes):
    write_store(counts(1203, n_genes), tmp_path / "s.zarr", tmp_path)
    dataset, device = zl.open_dataset(tmp_path / "s.zarr"), LateDevice()
    loader, here = (zl.Loader(dataset, obs=["lane"], device=each, **SIZES) for each in (device, None))
    assert_same_minibatches(loader, here)
    assert 4 <= device.staged < 0.4 * len(device.sent)  # it is reused
    with pytest.raises(AssertionError):  # this test would notice
        assert_same_minibatches(zl.Loader(dataset, obs=["lane"], device=LateDevice(careless=True), **SIZES), here)


def test_lent_memory_comes_back_when_its_last_array_is_dropped():
    device = LateDevice()
    lent = LentMemory(device)
    array = lent.empty(10_000, np.dtype(np.uint16))
    part = array[5000:]
    address = array.ctypes.data
    others = [lent.empty(10_000, np.dtype(np.uint16)) for _ in range(2)]
    assert lent.held([torch.from_numpy(part), torch.zeros(3), torch.from_numpy(others[1])]) == [True, False, True]
    del array
    assert address not in {lent.empty(10_000, np.dtype(np.uint16)).ctypes.data for _ in range(3)}
    part[:] = 7
    del part
    taken = [lent.empty(10_000, np.dtype(np.uint8)) for _ in range(3)]
    assert address in {array.ctypes.data for array in taken}
    staged = device.staged
    del taken
    large = lent.empty(100_000, np.dtype(np.float64))
    assert (large.shape, large.dtype, device.staged) == ((100_000,), np.float64, staged + 1)
    assert not lent.held([torch.from_numpy(lent.empty(7, np.dtype(np.uint8)))])[0]


def test_minibatches_are_sent_ahead_by_another_thread_and_not_all_of_them(dataset):
    device = LateDevice()
    minibatches = iter(zl.Loader(dataset, device=device, **SIZES))
    for taken in range(1, 6):
        next(minibatches)
        assert len(device.sent) <= taken + 8
    minibatches.close()
    assert {thread.name for thread in device.sent} == {"zloader-device"}
    assert_threads_end()


def test_the_next_minibatches_are_ready_before_they_are_asked_for(dataset):
    sent = threading.Semaphore(0)

    class Counting(LateDevice):
        def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
            sent.release()
            return super().send(staged, finish)

    minibatches = iter(zl.Loader(dataset, device=Counting(), options=fetch_options(ready_bytes=1), **SIZES))
    next(minibatches)
    for _ in range(3):  # the one that was taken, and two more, although each takes more than the limit
        assert sent.acquire(timeout=600)
    minibatches.close()


# ---- ends


def leave_by_break(loader: zl.Loader) -> None:
    for _ in loader:
        break


def leave_by_close(loader: zl.Loader) -> Any:
    minibatches = iter(loader)
    next(minibatches)
    minibatches.close()
    assert list(minibatches) == []
    return minibatches


def leave_in_a_cycle(loader: zl.Loader) -> None:
    cycle: list[Any] = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    iterator = weakref.ref(cycle[0])
    del cycle
    for _ in range(100):  # a call does nothing while another thread collects garbage
        if iterator() is not None:
            gc.collect()
    assert iterator() is None


def leave_by_exception(loader: zl.Loader) -> Any:
    def train() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    return caught


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_in_a_cycle, leave_by_exception])
def test_leaving_ends_all_threads(dataset, leave):
    loader = zl.Loader(dataset, device=LateDevice(), **SIZES)
    kept = leave(loader)
    assert_threads_end()
    assert sum(map(len, loader)) == 203
    assert_threads_end()
    del kept


def test_errors_of_reads_and_of_the_device_are_raised_after_the_minibatches_before_them(dataset, tmp_path):
    write_store(ADATA, tmp_path / "broken.zarr", tmp_path)
    chunks = sorted((tmp_path / "broken.zarr/X/data/c").rglob("*"), key=str)
    chunks[len(chunks) // 2].unlink()
    loader = zl.Loader(zl.open_dataset(tmp_path / "broken.zarr"), device=LateDevice(), shuffle=False, batch_size=8)
    with pytest.raises(ReadError, match="X/data"):
        list(loader)
    assert_threads_end()

    class Full(LateDevice):
        def send(self, staged: list[torch.Tensor], finish: Finish) -> Sent:
            if len(self.sent) == 5:
                raise MemoryError("the device is full")
            return super().send(staged, finish)

    seen = []
    minibatches = iter(zl.Loader(dataset, device=Full(), **SIZES))
    with pytest.raises(MemoryError, match="full"):
        seen.extend(minibatches)
    assert len(list(minibatches)) == 0
    assert_threads_end()


@pytest.mark.slow
def test_states_count_received_minibatches(dataset):
    def make(**options: Any) -> zl.Loader:
        return zl.Loader(dataset, device=LateDevice(), **SIZES, **options)

    assert_resumes_anywhere(make, every=5)
    loader = make()
    minibatches = iter(loader)
    for _ in range(3):
        next(minibatches)
    assert (loader.statistics().minibatches, loader.statistics().rows) == (3, 24)
    minibatches.close()


# ---- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu-like"}, "device='tpu-like' is not available. Available: cpu"),
        ({"device": 3}, "device=3 is not available"),
        ({"device": True}, "device=True is not available"),
        ({"device": "meta"}, "device='meta' is not available. Available: cpu"),
        ({"device": "cuda:99"}, "device='cuda:99' is not available. Available: cpu"),
        ({"device": LateDevice(), "layout": "scipy"}, "layout='scipy' has no tensors"),
        ({"device": LateDevice(), "batch_transform": len}, "batch_transform runs on the host"),
        (
            {"layout": "packed", "dtype": "float32"},
            "layout='packed' has the stored dtypes",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_that_do_not_fit_are_refused_when_the_loader_is_made(dataset, options, says):
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_a_missing_gpu_is_refused_also_by_a_loader_from_elsewhere(dataset, monkeypatch):
    with pytest.raises(OptionError, match=r"device='cuda' is not available. Available: cpu"):
        zl.Loader(dataset, device="cuda")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.cuda, "is_available", lambda: True)
        elsewhere.setattr(torch.cuda, "device_count", lambda: 1)
        loader = zl.Loader(dataset, device="cuda", **SIZES)
    with pytest.raises(OptionError, match="not available"):
        next(iter(pickle.loads(pickle.dumps(loader))))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"], ids=str)
def test_the_cpu_is_no_device(dataset, device):
    loader = zl.Loader(dataset, device=device, **SIZES)
    assert loader.device is None
    assert next(iter(loader)).x.device.type == "cpu"


@pytest.mark.slow
def test_workers_have_no_device(dataset):
    loader = zl.Loader(dataset, device=LateDevice(), **SIZES)
    workers = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(OptionError, match="does not work in DataLoader workers: use num_workers=0"):
        next(iter(workers))
    assert sum(map(len, DataLoader(loader, batch_size=None))) == 203
