"""The Loader yields every row once, with the right values and in the same order, from disk and S3, with any cache."""

from __future__ import annotations

import doctest
import pickle
import re
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import check_minibatch, counts, dense, digest, fetch_options, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import zloader as zl
from zloader.commands import flags
from zloader.common.errors import MissingColumnError, OptionError, StoreChangedError
from zloader.training import loader as loader_module
from zloader.training import minibatch as minibatch_module
from zloader.training.recipes import LAYOUTS

OBS = ["cell_type", "donor", "n_counts", "passed", "lane"]
ADATA = counts(503, 97)
STATISTICS = (
    "epoch", "rows", "minibatches", "gets", "spans", "retries", "bytes_read", "chunks_decoded", "chunks_from_mirror",
    "bytes_from_mirror", "in_flight_bytes", "most_in_flight_bytes", "decode_s", "gather_s",
    "wait_s", "elapsed_s", "fallback_controls", "rows_per_s", "wait_share",
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return str(folder / "counts.zarr")


@pytest.fixture(scope="module")
def s3_store(seaweed, tmp_path_factory):
    url = f"s3://{seaweed.bucket}/{uuid.uuid4().hex}/counts.zarr"
    write_store(ADATA, url, tmp_path_factory.mktemp("s3"), storage_options=seaweed.storage_options)
    return url, seaweed.storage_options


@pytest.fixture(params=["local", "local, mirror", "s3", "s3, mirror"])
def dataset(request, store, tmp_path) -> zl.Dataset:
    """The same rows from disk and from a real S3 server, with an empty mirror and without one."""
    url, storage_options = request.getfixturevalue("s3_store") if "s3" in request.param else (store, None)
    cache = tmp_path / "cache" if "mirror" in request.param else None
    return zl.open_dataset(url, cache=cache, storage_options=storage_options)


def check_canonical(x: torch.Tensor) -> None:
    """Checks that genes ascend strictly within each row, and that crow_indices are valid."""
    torch._validate_sparse_csr_tensor_args(x.crow_indices(), x.col_indices(), x.values(), x.shape)


SIZES = {
    "batch_size": st.integers(1, 70),
    "fetch_factor": st.integers(1, 20),
    "block_size": st.integers(1, 40),
    "cached": st.booleans(),
    "drop_last": st.booleans(),
    "world_size": st.integers(1, 3),
    "seed": st.integers(0, 3),
    "in_flight_bytes": st.sampled_from([1, 5_000, 1 << 26]),
    "gap_bytes": st.sampled_from([0, 300, 1 << 16]),
    "prefetch": st.integers(1, 4),
}


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**SIZES)
def test_every_row_once_with_its_values_and_obs(
    store, tmp_path, batch_size, fetch_factor, block_size, cached, drop_last, world_size, seed, **fetching
):
    """Invariants 1, 8 and 9, with all values compared."""
    dataset = zl.open_dataset(store, cache=tmp_path / "cache" if cached else None)
    seen = []
    for rank in range(world_size):
        loader = zl.Loader(
            dataset,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            sampling=zl.BlockShuffling(min(block_size, batch_size * fetch_factor)),
            obs=OBS,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            options=fetch_options(**fetching),
        )
        minibatches = list(loader)
        assert len(minibatches) == len(loader)
        assert loader.statistics().rows == sum(map(len, minibatches))
        for minibatch in minibatches:
            seen.append(check_minibatch(minibatch, ADATA))
            assert len(minibatch) == batch_size or not drop_last
            check_canonical(minibatch.x)
    rows = np.concatenate(seen) if seen else np.empty(0, np.int64)
    assert len(np.unique(rows)) == len(rows)
    dropped = 503 - len(rows)
    if drop_last:
        assert dropped < world_size * batch_size
    else:
        assert dropped == (503 % world_size if batch_size == 1 else 0)


@pytest.mark.every(6)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_epoch_has_every_row_once_wherever_it_comes_from(dataset, drop_last):
    sizes = {"batch_size": 32, "fetch_factor": 4, "sampling": zl.BlockShuffling(16), "obs": OBS}
    loader = zl.Loader(dataset, **sizes, drop_last=drop_last)
    orders = []
    for _ in range(3):
        minibatches = list(loader)
        rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in minibatches])
        assert len(minibatches) == len(loader)
        assert len(rows) == len(np.unique(rows)) == (480 if drop_last else 503)
        for minibatch in minibatches:
            check_canonical(minibatch.x)
        orders.append(rows.tolist())
        assert (loader.statistics().gets > 0) == (loader.statistics().epoch == 0 or dataset.cache is None)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_examples_in_the_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adata = ADATA.copy()
    adata.layers["spliced"] = adata.X
    write_store(adata, "cells.zarr", tmp_path)
    assert doctest.testmod(loader_module) == (0, 9)
    assert doctest.testmod(minibatch_module) == (0, 4)


def test_each_layout_is_named_where_users_look():
    page = (Path(zl.__file__).parents[1] / "docs" / "loader.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `layout`"))
    (doc,) = re.findall(r"\n +layout: (.*?)\n +\w+: ", zl.Loader.__doc__, re.DOTALL)
    of_type, of_flag = zl.Loader.__annotations__["layout"], str(flags.Layout.__metadata__[0].help)
    for text in (row, doc, of_type, of_flag):
        assert set(LAYOUTS) <= set(re.findall(r"\w+", text)), text


@pytest.mark.every(21)  # each layout, and each kind in two dtypes
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("kind", ["csr", "dense"])
def test_layouts_and_dtypes(tmp_path, layout, dtype, kind):
    adata = counts(60, 40)
    stored = adata.copy()
    if kind == "dense":
        stored.X = adata.X.toarray()
    write_store(stored, tmp_path / "s.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    loader = zl.Loader(dataset, batch_size=7, fetch_factor=2, layout=layout, dtype=dtype, obs=OBS)
    rows = [check_minibatch(minibatch, adata) for minibatch in loader]
    assert sorted(np.concatenate(rows)) == list(range(60))
    x = next(iter(loader)).x
    assert str(x.dtype).removeprefix("torch.") == dtype


def test_an_epoch_is_the_same_whatever_memory_it_may_take(store, tmp_path):
    """Invariant 4. It also holds if a fetch is larger than all bounds."""
    sizes = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8), "obs": OBS}
    loaders = [
        zl.Loader(zl.open_dataset(store, cache=cache), **sizes, options=options)
        for options in (zl.FetchOptions(memory=1 << 34), fetch_options(buffer_bytes=1, ready_bytes=2))
        for cache in (None, tmp_path / f"{options.memory}")
    ]
    assert len({digest(loader) for loader in loaders}) == 1


def test_decoded_fetches_stay_within_their_bound(store):
    sizes = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(8)}
    for buffer_bytes, most in ((1, 1), (1 << 30, 5)):
        options = fetch_options(buffer_bytes=buffer_bytes, ready_bytes=2, prefetch=4)
        loader = zl.Loader(zl.open_dataset(store), **sizes, options=options)
        minibatches = iter(loader)
        next(minibatches)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and loader.statistics().in_flight_bytes:
            time.sleep(0.01)  # until reads stop, because the consumer takes nothing
        list(minibatches)
        assert 1 <= len(loader._buffers._free) <= most


def test_a_mirror_that_holds_a_part_and_takes_no_more(store, tmp_path):
    """As on a full disk: rows in the mirror come from there, the rest from the store."""
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    dataset.take([3, 100, 250, 251, 400])
    dataset.store.mirror(dataset.store.matrix("X")).rows.writable = False
    sizes = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(4), "obs": OBS}
    loader, other = zl.Loader(dataset, **sizes), zl.Loader(zl.open_dataset(store), **sizes)
    assert digest(loader) == digest(other)
    assert loader.statistics().chunks_from_mirror
    assert 0 < loader.statistics().bytes_read < other.statistics().bytes_read


def test_one_dial_sets_what_is_not_given():
    options = fetch_options(memory=1 << 30, ready_bytes=123)
    assert options.memory == 1 << 30
    # The rest is left for freed memory and the minibatch that the consumer holds.
    assert options.in_flight_bytes + options.buffer_bytes + options.ready_bytes == 13 * options.memory // 16
    assert options.ready_bytes == 123
    laptop, node = zl.FetchOptions(threads=2), zl.FetchOptions(threads=96)
    assert laptop.in_flight_bytes <= node.in_flight_bytes
    assert zl.FetchOptions(memory=64 << 20).in_flight_bytes < laptop.in_flight_bytes
    with pytest.raises(OptionError, match="memory"):
        zl.FetchOptions(memory=1)


def test_statistics_count_spans_retries_and_what_the_mirror_gave(store, tmp_path):
    loader = zl.Loader(zl.open_dataset(store, cache=tmp_path / "cache"), batch_size=50, fetch_factor=2)
    for _ in loader:
        pass
    cold = loader.statistics()
    assert 0 < cold.spans < cold.gets  # gets include the reads of shard indexes
    assert cold.retries == 0
    for _ in loader:
        pass
    warm = loader.statistics()
    assert (warm.spans, warm.gets, warm.bytes_read) == (0, 0, 0)
    layouts = loader.dataset.store.matrix("X").arrays
    assert warm.bytes_from_mirror >= sum(layout.n_elements * layout.dtype.itemsize for layout in layouts)


def test_statistics_say_what_was_in_flight(store):
    options = fetch_options(in_flight_bytes=20_000, max_read_bytes=4_000, gap_bytes=0)
    loader = zl.Loader(zl.open_dataset(store), batch_size=50, fetch_factor=2, options=options)
    for _ in loader:
        assert loader.statistics().in_flight_bytes <= loader.statistics().most_in_flight_bytes
    seen = loader.statistics()
    assert seen.in_flight_bytes == 0
    assert 0 < seen.most_in_flight_bytes <= 20_000
    assert repr(seen).startswith(f"<Statistics of epoch 0: 503 rows in {seen.minibatches} minibatches, ")
    assert f"{seen.gets:,} GETs, {seen.bytes_read / 1e6:,.1f} MB read" in repr(seen)


def test_flat_statistics_are_plain_numbers_by_stable_names(store):
    loader = zl.Loader(zl.open_dataset(store), batch_size=50, fetch_factor=2)
    list(loader)
    seen = loader.statistics()
    flat = seen.flat("loader/")
    assert {type(figure) for figure in flat.values()} == {int, float}
    assert flat == {f"loader/{name}": getattr(seen, name) for name in STATISTICS}
    assert seen.flat().keys() == set(STATISTICS)


def test_obs_alone_reads_no_matrix(store):
    loader = zl.Loader(zl.open_dataset(store), x=None, obs=OBS, batch_size=50, fetch_factor=2)
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
    assert len(rows) == 503
    assert loader.statistics().gets == 0


def test_layers_and_raw(tmp_path):
    adata = counts(80, 30)
    adata.layers["doubled"] = adata.X * 2
    adata.raw = adata.copy()
    adata.X = adata.X * 3
    write_store(adata, tmp_path / "s.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    for x, wanted in (("X", adata.X), ("layers/doubled", adata.layers["doubled"]), ("raw/X", adata.raw.X)):
        for minibatch in zl.Loader(dataset, x=x, batch_size=16, fetch_factor=2, sampling=zl.BlockShuffling(4)):
            np.testing.assert_array_equal(dense(minibatch.x), wanted[minibatch.index.numpy()].toarray())


def test_streaming_keeps_the_order_and_subsets(store):
    dataset = zl.open_dataset(store)
    wanted = [5, 3, 99, 3 + 400, 0]
    in_order = zl.Loader(dataset, sampling=zl.Streaming(indices=wanted), batch_size=2, fetch_factor=1)
    assert [row for minibatch in in_order for row in minibatch.index.tolist()] == wanted
    subset = np.arange(100, 300, 3)
    shuffled = zl.Loader(dataset, sampling=zl.BlockShuffling(4, indices=subset), batch_size=8, fetch_factor=2)
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in shuffled])
    assert rows.tolist() != subset.tolist()
    assert sorted(rows) == subset.tolist()


@pytest.mark.every(3)
@pytest.mark.parametrize("n_rows", [1, 2, 5])
def test_tiny_and_empty_stores(tmp_path, n_rows):
    adata = counts(n_rows, 7)
    for name, density in (("some", 1), ("none", 0)):
        adata.X = adata.X * density
        adata.X.eliminate_zeros()
        write_store(adata, tmp_path / f"{name}.zarr", tmp_path)
        dataset = zl.open_dataset(tmp_path / f"{name}.zarr", cache=tmp_path / "cache")
        for _ in range(2):
            rows = [check_minibatch(minibatch, adata) for minibatch in zl.Loader(dataset, batch_size=2)]
            assert sorted(np.concatenate(rows)) == list(range(n_rows))


# ------------------------------------------------------------------------------------------------ determinism


@pytest.mark.slow
def test_same_seed_same_bytes_whatever_the_means(store, s3_store, sim, tmp_path):
    """Invariant 4, for timing, concurrency, prefetch, mirror, threads, workers and the source of the bytes."""
    sizes = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8), "obs": OBS, "seed": 3}
    plain = zl.open_dataset(store)
    wanted = digest(zl.Loader(plain, **sizes))
    variants = [
        fetch_options(in_flight_bytes=1, prefetch=1, threads=1),
        fetch_options(prefetch=8, threads=4, ready_bytes=1),
        fetch_options(gap_bytes=0, max_read_bytes=1),
        fetch_options(gap_bytes=1 << 20),
    ]
    for options in variants:
        assert digest(zl.Loader(plain, **sizes, options=options)) == wanted
    mirrored = zl.open_dataset(store, cache=tmp_path / "cache")
    for n_rows in (100, None):  # half-full, then full
        half = zl.Loader(mirrored, sampling=zl.Streaming(indices=range(n_rows)) if n_rows else None)
        assert sum(map(len, half)) == (n_rows or 503)
        assert digest(zl.Loader(mirrored, **sizes)) == wanted
    url, storage_options = s3_store
    for cache in (None, tmp_path / "cache of s3"):
        from_s3 = zl.Loader(zl.open_dataset(url, cache=cache, storage_options=storage_options), **sizes)
        assert digest(from_s3) == wanted
        from_s3.set_epoch(0)  # again, now from the mirror if there is one
        assert digest(from_s3) == wanted
    jittery = sim(root=Path(store).parent.parent, ttfb_ms=3, ttfb_sigma=1.0)
    over_sim = zl.open_dataset(
        f"s3://{Path(store).parent.name}/counts.zarr",
        storage_options={"key": "any", "secret": "any", "endpoint_url": jittery.url},
    )
    assert digest(zl.Loader(over_sim, **sizes)) == wanted
    assert digest(zl.Loader(plain, **(sizes | {"seed": 4}))) != wanted


@pytest.mark.slow
def test_one_worker_gives_the_same_bytes_as_none(store):
    dataset = zl.open_dataset(store)
    sizes = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8), "obs": OBS}
    wanted = digest(zl.Loader(dataset, **sizes))
    one = DataLoader(zl.Loader(dataset, **sizes), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert digest(one) == wanted


# ------------------------------------------------------------------------------------------------ epochs and workers


def test_epochs_count_up_and_set_epoch_goes_back(store):
    loader = zl.Loader(zl.open_dataset(store), batch_size=16, fetch_factor=4, sampling=zl.BlockShuffling(8))
    epochs = [[minibatch.index.tolist() for minibatch in loader] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    loader.set_epoch(1)
    assert [minibatch.index.tolist() for minibatch in loader] == epochs[1]
    assert loader.statistics().epoch == 1
    assert [minibatch.index.tolist() for minibatch in loader] == epochs[2]


def test_a_store_changed_between_pickling_and_opening_is_refused(tmp_path):
    write_store(counts(20, 9), tmp_path / "s.zarr", tmp_path)
    pickled = pickle.dumps(zl.open_dataset(tmp_path / "s.zarr"))
    write_store(counts(20, 9, seed=1), tmp_path / "s.zarr", tmp_path, overwrite=True)
    with pytest.raises(StoreChangedError, match="changed"):
        pickle.loads(pickled)


# ------------------------------------------------------------------------------------------------ bad options


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batch_size": 0}, OptionError, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": 2, "fetch_factor": 2, "sampling": zl.BlockShuffling(5)}, OptionError, "raise fetch_factor or"),
        ({"obs": "cell_type"}, OptionError, r"obs=\['cell_type'\]"),
        ({"obs": ["cell type"]}, MissingColumnError, "'cell_type', 'donor'"),
        ({"obs": None}, OptionError, r"write obs=\[\]"),
        ({"options": {"memory": "1GiB"}}, OptionError, "must be a zl.FetchOptions"),
        ({"sampling": zl.BlockShuffling}, OptionError, r"zl.BlockShuffling\(64\), not .* which is a class"),
        ({"sampling": "block"}, OptionError, "sampling must be one of 'block_shuffling', .* not 'block'"),
        ({"rank": 2, "world_size": 2}, OptionError, "ranks are numbered from 0"),
        ({"rank": 1}, OptionError, "together"),
        ({"layout": "anndata"}, OptionError, "layout must be one of 'csr', .*, not 'anndata'"),
        ({"sampling": zl.Streaming(indices=[503])}, OptionError, "row 503"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_when_the_loader_is_made(store, options, error, says):
    with pytest.raises(error, match=says):
        zl.Loader(**{"dataset": zl.open_dataset(store)} | options)


def test_sizes_of_numpy_are_numbers(store):
    dataset = zl.open_dataset(store)
    plan = zl.Loader(dataset, batch_size=np.uint8(64), fetch_factor=np.int8(8)).plan(0)
    assert (plan.fetch_rows, plan.order.block_size) == (512, 64)


def test_set_epoch_refuses_nonsense(store):
    loader = zl.Loader(zl.open_dataset(store))
    for epoch in (-1, 1.5, True, 2**63):
        with pytest.raises(OptionError, match="epoch"):
            loader.set_epoch(epoch)


@pytest.mark.parametrize("option", ["in_flight_bytes", "threads", "deadline_s", "retries"])
def test_bad_fetch_options(option):
    with pytest.raises(OptionError, match=option):
        zl.FetchOptions(**{option: -1})
