"""The cache as a whole: shared by processes, within its limits, private to its owner, and sufficient offline."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, check_minibatch, counts, digest, fetch_options

import zloader as zl
from zloader.caching.directory import MirrorDirectory, cache_bytes, drop, mirrors
from zloader.caching.inspection import inspect_mirror
from zloader.caching.leases import Leases
from zloader.caching.rows_file import RowsFile
from zloader.common.errors import CacheError, OptionError, ReadError
from zloader.common.options import Cache
from zloader.conversion.encode import ConvertOptions
from zloader.dataset.warm import warm
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version

ROWS = 3000
ADATA = counts(ROWS, 400, density=0.5, seed=3)
ADATA.obsm["X_pca"] = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


EVERY_FORM = pytest.mark.parametrize("form", ["raw", "compact"])


def _convert(adata, dest: Path) -> Path:
    dest.parent.mkdir(parents=True, exist_ok=True)
    adata.write_h5ad(dest.with_suffix(".h5ad"), convert_strings_to_categoricals=False)
    zl.convert(
        dest.with_suffix(".h5ad"), dest, options=ConvertOptions(chunk_rows=16, shard_size="64KiB"), progress=False
    )
    return dest


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return _convert(ADATA, tmp_path_factory.mktemp("caches") / "bucket" / "counts.zarr")


def _loader(store, cache, **options) -> zl.Loader:
    dataset = zl.open_dataset(store, cache=cache)
    return zl.Loader(
        dataset, batch_size=32, fetch_factor=8, sampling=zl.BlockShuffling(8), obs=["cell_type"], **options
    )


def _epoch(loader) -> zl.Statistics:
    """Reads one epoch and compares every minibatch with the AnnData."""
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
    assert np.sort(rows).tolist() == list(range(ROWS))
    return loader.statistics()


def _first_minibatch(store, cache) -> None:
    """Fills the mirror with the first few fetches, which contain the first rows."""
    dataset = zl.open_dataset(store, cache=cache)
    fetching = fetch_options(least_read_bytes=1, prefetch=1)
    loader = zl.Loader(dataset, batch_size=32, fetch_factor=8, sampling=zl.Streaming(), options=fetching)
    iterator = iter(loader)
    next(iterator)
    iterator.close()


def _options(server) -> dict[str, str]:
    return {"key": "any", "secret": "any", "endpoint_url": server.url}


def _stored(store: Path) -> int:
    return sum(path.stat().st_size for part in ("data", "indices") for path in (store / "X" / part).rglob("c/*"))


# ---- leases

KEPT = RowForm(
    name="X", n_rows=1000, block_rows=10, genes=None, values=np.dtype("<u2"), width=4, coded=False, decoded_bytes=8000
)
SOME = np.arange(3, 9)


def _directory(cache) -> MirrorDirectory:
    return MirrorDirectory(Cache(directory=cache), "f" * 32, "store")


def test_only_leases_of_live_owners_are_alive(tmp_path):
    one, other = (Leases(_directory(tmp_path).path) for _ in range(2))
    words = np.array([one.word, other.word, 0, one.word], np.uint64)
    assert one.alive(words).tolist() == other.alive(words).tolist() == [True, True, False, True]
    other.close()
    assert one.alive(words).tolist() == [True, False, False, True]
    one.close()


def test_without_a_file_of_locks_no_lease_is_alive(tmp_path):
    """As in a mirror on a read-only disk, which a killed process was filling before."""
    other, without = Leases(_directory(tmp_path).path), Leases(tmp_path / "missing")
    assert without.alive(np.array([other.word, 0], np.uint64)).tolist() == [False, False]
    with without.exclusive():
        without.close()


def test_leased_chunks_are_not_leased_twice(tmp_path):
    mirrors = [RowsFile(_directory(tmp_path), KEPT) for _ in range(2)]
    first, second = (Leases(_directory(tmp_path).path) for _ in range(2))
    mine, others = mirrors[0].acquire(SOME, first)
    assert (mine.tolist(), others.tolist()) == (SOME.tolist(), [])
    mine, others = mirrors[1].acquire(np.arange(6, 12), second)
    assert (mine.tolist(), others.tolist()) == ([9, 10, 11], [6, 7, 8])
    mine, others = mirrors[0].acquire(SOME, first)  # another load of the same epoch
    assert (mine.tolist(), others.tolist()) == ([], SOME.tolist())
    mirrors[0].put(np.array([3]), np.array([80]), np.arange(80, dtype="u1"))
    mirrors[0].release(SOME, first)
    mine, others = mirrors[1].acquire(SOME, second)
    assert (mine.tolist(), others.tolist()) == ([4, 5, 6, 7, 8], [])  # 3 is present
    assert mirrors[1].missing(SOME).tolist() == [4, 5, 6, 7, 8]


def test_leases_expire_with_their_owner(tmp_path):
    mirror = RowsFile(_directory(tmp_path), KEPT)
    first, second = (Leases(_directory(tmp_path).path) for _ in range(2))
    mirror.acquire(SOME, first)
    first.close()
    mine, others = mirror.acquire(SOME, second)
    assert (mine.tolist(), others.tolist()) == (SOME.tolist(), [])


_LEASES = """
import pickle, sys
import numpy as np
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.rows_file import RowsFile
from zloader.common.options import Cache
form = pickle.loads(bytes.fromhex(sys.argv[2]))
directory = MirrorDirectory(Cache(directory=sys.argv[1]), "f" * 32, "store")
leases = Leases(directory.path)
RowsFile(directory, form).acquire(np.arange(3, 9), leases)
print("leased", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_leases_of_a_killed_process_expire(interpreter, tmp_path):
    layout = pickle.dumps(KEPT).hex()
    with interpreter.running(_LEASES, tmp_path, layout) as process:
        assert process.stdout.readline() == "leased\n"
        mirror, leases = RowsFile(_directory(tmp_path), KEPT), Leases(_directory(tmp_path).path)
        mine, others = mirror.acquire(SOME, leases)
        assert (mine.tolist(), others.tolist()) == ([], SOME.tolist())
        process.kill()
        process.wait()
        mine, others = mirror.acquire(SOME, leases)
        assert (mine.tolist(), others.tolist()) == (SOME.tolist(), [])


# ---- processes

_FILLS = """
import json, sys
import zloader as zl
from zloader.caching import leases
leases._TRIES = 10**9  # the process that has the lock may be descheduled for longer than others wait
store, cache, form, options, rank, world_size, seed = json.loads(sys.argv[1])
dataset = zl.open_dataset(store, cache=zl.Cache(cache, form=form), storage_options=options)
loader = zl.Loader(
    dataset, batch_size=32, fetch_factor=8, sampling=zl.BlockShuffling(8), seed=seed, rank=rank, world_size=world_size
)
print("ready", flush=True)
sys.stdin.readline()
rows = sum(len(minibatch) for minibatch in loader)
statistics = loader.statistics()
print(json.dumps([rows, statistics.bytes_read, statistics.gets]), flush=True)
"""


def _run_at_once(interpreter, requests):
    """Runs `_FILLS` in one process per request, all at the same time; returns their outputs."""
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(interpreter.running(_FILLS, json.dumps(request))) for request in requests]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("as_ranks", "form"),
    [(True, "raw"), (False, "raw"), (False, "compact")],
    ids=["ranks", "jobs of their own", "jobs of their own, compact"],
)
def test_four_processes_on_one_cold_mirror_read_each_chunk_about_once(
    interpreter, store, sim, tmp_path, as_ranks, form
):
    server = sim(root=store.parent.parent, ttfb_ms=10)
    url = f"s3://{store.parent.name}/{store.name}"
    cache = str(tmp_path / "cache")
    shares = [(rank, 4, 0) if as_ranks else (0, 1, rank) for rank in range(4)]
    said = _run_at_once(interpreter, [(url, cache, form, _options(server), *share) for share in shares])
    assert sum(rows for rows, _, _ in said) == (ROWS if as_ranks else 4 * ROWS)
    assert sum(n_bytes for _, n_bytes, _ in said) < 1.1 * _stored(store)
    assert _epoch(_loader(store, None)).bytes_read  # the store is unchanged
    dataset = zl.open_dataset(url, cache=Cache(cache, form=form), storage_options=_options(server))
    after = zl.Loader(dataset, batch_size=32, fetch_factor=8, sampling=zl.BlockShuffling(8), obs=["cell_type"])
    assert _epoch(after).gets == 0


_FILLS_AND_REPORTS = """
import json, os, sys
import zloader as zl
store, cache, form, options, seed = json.loads(sys.argv[1])
dataset = zl.open_dataset(store, cache=zl.Cache(cache, form=form), storage_options=options)
fetching = zl.FetchOptions()
vars(fetching).update(least_read_bytes=16_000, prefetch=1)
loader = zl.Loader(
    dataset, batch_size=32, fetch_factor=8, sampling=zl.BlockShuffling(8), seed=seed, options=fetching
)
for minibatch in loader:
    os.write(1, b".")
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".zarr", ".h5ad"])
@pytest.mark.parametrize(
    ("form", "minibatches"),
    [
        *(("raw", minibatches) for minibatches in (0, 3, 20, 60)),
        *(("compact", minibatches) for minibatches in (3, 20)),
    ],
)
def test_loaders_killed_while_filling_leave_no_wrong_values_and_block_nobody(
    interpreter, store, sim, tmp_path, form, minibatches, suffix
):
    server = sim(root=store.parent.parent, ttfb_ms=20)
    url, cache = f"s3://{store.parent.name}/{store.stem}{suffix}", str(tmp_path / "cache")
    request = [url, cache, form, _options(server), minibatches]
    with interpreter.running(_FILLS_AND_REPORTS, json.dumps(request)) as process:
        assert all(process.stdout.read(1) == "." for _ in range(minibatches))
        if not minibatches:
            while server.stats().get("requests", 0) < 8:  # it is reading its first fetch
                assert process.poll() is None
        process.kill()
    dataset = zl.open_dataset(url, cache=Cache(cache, form=form), storage_options=_options(server))
    sizes = {"batch_size": 32, "fetch_factor": 8, "sampling": zl.BlockShuffling(8)}
    patient = zl.FetchOptions(deadline_s=2 * PATIENCE_S)
    loader = zl.Loader(dataset, **sizes, obs=["cell_type"], options=patient)
    assert _epoch(loader).elapsed_s < PATIENCE_S  # waiting for the killed process would take a whole deadline
    assert _epoch(loader).gets == 0


# ---- limits


class _Watch:
    """Measures the disk space of a cache continuously, in a thread."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self.most = 0
        self._ended = threading.Event()

    def _look(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, cache_bytes(self._cache))

    def __enter__(self) -> _Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _bytes_of(cache: Path, store: Path) -> tuple[int, int]:
    """Bytes of a full mirror: its disk space, and the elements in it."""
    dataset = zl.open_dataset(store, cache=cache)
    warmed = warm(dataset)
    assert warmed.bytes_held == warmed.bytes_in_all
    return cache_bytes(cache), warmed.bytes_held


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_mirror_fills_up_to_its_limit_and_the_rest_is_read_from_the_store(store, tmp_path, share):
    whole, elements = _bytes_of(tmp_path / "whole", store)
    limit = int(share * elements) + 300 * 1024 + (whole - elements)
    cache = Cache(directory=tmp_path / "limited", max_bytes=limit)
    unmirrored, of_whole = _epoch(_loader(store, None)), _epoch(_loader(store, tmp_path / "whole"))
    with _Watch(cache.directory) as watch:
        zl.open_dataset(
            store, cache=cache
        ).observations.cache_all()  # `warm` keeps them too, and they count in the limit
        cold = _epoch(_loader(store, cache))
        warm_epochs = [_epoch(_loader(store, cache)) for _ in range(2)]
    assert limit - 530 * 1024 < watch.most <= limit
    assert cold.bytes_read <= unmirrored.bytes_read
    warmed = warm(zl.open_dataset(store, cache=cache))
    assert warmed.full
    capacity = warmed.chunks_held / warmed.chunks
    assert share - 0.15 < capacity < share + 0.1
    for epoch in warm_epochs:
        assert abs(epoch.chunks_from_mirror / of_whole.chunks_from_mirror - capacity) < 0.02
        assert 0 < epoch.bytes_read < unmirrored.bytes_read
    assert digest(_loader(store, cache)) == digest(_loader(store, None))


@pytest.mark.slow
@EVERY_FORM
def test_processes_share_one_limit(store, tmp_path, form):
    """Four loaders fill the mirrors of two stores, two loaders per store."""
    other = _convert(counts(2000, 300, density=0.5, seed=9), tmp_path / "bucket" / "other.zarr")
    cache = Cache(directory=tmp_path / "cache", max_bytes="2MB", form=form)
    with _Watch(cache.directory) as watch, ThreadPoolExecutor(4) as threads:
        loaders = [_loader(url, cache) for url in (store, other, store, other)]
        rows = list(threads.map(lambda loader: sum(map(len, loader)), loaders))
    assert rows == [ROWS, 2000, ROWS, 2000]
    assert 1_000_000 < watch.most <= 2_000_000


def test_min_free_bytes_are_left_free(store, tmp_path):
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    cache = Cache(directory=tmp_path / "cache", min_free_bytes=free + (1 << 40))
    assert _epoch(_loader(store, cache)).rows == ROWS
    assert cache_bytes(cache.directory) < 200_000


@pytest.mark.slow
def test_unused_mirrors_are_dropped_stale_ones_first(store, tmp_path, caplog):
    caplog.set_level(logging.INFO, "zloader")
    one, two, three = (tmp_path / "bucket" / name for name in ("one.zarr", "two.zarr", "three.zarr"))
    for copy in (one, two, three):
        shutil.copytree(store, copy)
    whole, _ = _bytes_of(tmp_path / "whole", store)
    cache = Cache(directory=tmp_path / "cache", max_bytes=int(2.5 * whole) + 300 * 1024)
    for copy in (one, two):
        warm(zl.open_dataset(copy, cache=cache))
    os.utime(two / "zarr.json")  # makes its mirror stale
    assert zl.open_dataset(two, cache=cache).n_obs == ROWS
    first, *_ = mirrors(cache.directory)
    assert (first.url, first.stale) == (str(two), True)
    with _Watch(cache.directory) as watch:
        assert warm(zl.open_dataset(three, cache=cache)).full is False
    assert watch.most <= cache.most
    assert [entry.stale for entry in mirrors(cache.directory)] == [False] * 3
    assert str(one) in {entry.url for entry in mirrors(cache.directory)}
    assert _epoch(_loader(one, cache)).gets == 0


def test_a_mirror_in_use_is_never_dropped(store, tmp_path):
    loader = _loader(store, tmp_path)
    _epoch(loader)
    (entry,) = mirrors(tmp_path)
    assert drop(entry.directory) is False
    assert _epoch(loader).gets == 0
    del loader
    assert drop(entry.directory) is True
    assert not entry.directory.exists()


@pytest.mark.every(3)
@EVERY_FORM
def test_a_directory_that_is_deleted_while_in_use_does_no_harm(store, tmp_path, form):
    cache = Cache(tmp_path / "cache", form=form)
    loader = _loader(store, cache)
    iterator = iter(loader)
    next(iterator)
    shutil.rmtree(tmp_path / "cache")
    assert sum(map(len, iterator)) == ROWS - 32
    assert _epoch(loader).rows == ROWS
    assert _epoch(_loader(store, cache)).rows == ROWS


def _raw_bytes(x) -> int:
    """The bytes of raw rows of uint16 genes and values: a head and padding each, and an entry in the table of a block.

    The table of the last block has entries for all rows of a block.
    """
    lengths = np.diff(x.indptr)
    return int((-(-(4 + 4 * lengths) // 8) * 8).sum()) + 24 * 32 * -(-len(lengths) // 32)


def test_cache_statistics(store, tmp_path):
    dataset = zl.open_dataset(store, cache=Cache(directory=tmp_path, max_bytes="1GB"))
    before = dataset.cache_statistics()
    assert (before.chunks_held, before.bytes_held, before.share, before.full) == (0, 0, 0.0, False)
    assert 0 < before.allocated_bytes < 200_000
    warm(dataset)
    after = dataset.cache_statistics()
    assert (after.chunks_held, after.bytes_held, after.share) == (after.chunks, _raw_bytes(ADATA.X), 1.0)
    assert after.allocated_bytes == cache_bytes(tmp_path) > after.bytes_held
    assert after.max_bytes == 10**9
    with pytest.raises(OptionError, match="no cache"):
        zl.open_dataset(store).cache_statistics()


@pytest.mark.parametrize("first", ["raw", "compact"])
def test_a_mirror_stays_in_the_form_in_which_it_was_begun(store, tmp_path, first):
    """A cache of the other form reads and fills it, so that nothing is read or kept twice."""
    other = {"raw": "compact", "compact": "raw"}[first]
    _first_minibatch(store, Cache(tmp_path, form=first))
    begun = inspect_mirror(*mirrors(tmp_path)).arrays["X"]
    assert 0 < begun.chunks_held < begun.chunks
    assert _epoch(_loader(store, Cache(tmp_path, form=other))).gets
    (entry,) = mirrors(tmp_path)
    held = inspect_mirror(entry).arrays["X"].bytes_held
    assert held == _raw_bytes(ADATA.X) if first == "raw" else held < _raw_bytes(ADATA.X)
    for form in (first, other):
        epoch = _epoch(_loader(store, Cache(tmp_path, form=form)))
        assert (epoch.gets, epoch.chunks_decoded) == (0, 0)
        dataset = zl.open_dataset(store, cache=Cache(tmp_path, form=form))
        statistics = dataset.cache_statistics()
        assert (statistics.share, statistics.chunks_held) == (1.0, statistics.chunks)
        assert [mirror.rows.form.coded for mirror in dataset.matrices.mirrors("X")] == [first == "compact"]
    with pytest.raises(OptionError, match="form must be one of 'raw', 'compact', not 'stored'"):
        Cache(tmp_path, form="stored")


@contextlib.contextmanager
def _mounted(directory: Path, *arguments: str):
    """A mount on `directory`; skips the test if mounting is not permitted."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.slow
@EVERY_FORM
@pytest.mark.parametrize("size", ["64k", "1m"])
def test_a_full_disk_causes_a_warning_and_reading_continues(store, tmp_path, caplog, size, form):
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
        for _ in range(2):
            assert _epoch(_loader(store, Cache(disk / "cache", form=form))).rows == ROWS
        assert "cannot" in caplog.text
    assert digest(_loader(store, tmp_path / "cache")) == digest(_loader(store, None))


@pytest.mark.every(2)
@EVERY_FORM
def test_a_mirror_on_a_read_only_disk_is_used(store, tmp_path, form):
    warm(zl.open_dataset(store, cache=Cache(tmp_path / "cache", form=form)))
    with _mounted(tmp_path / "cache", "--bind", "-o", "ro", str(tmp_path / "cache")) as cache:
        with pytest.raises(OSError, match="Read-only"):
            (cache / "x").touch()
        assert _epoch(_loader(store, Cache(cache, form=form))).gets == 0


# ---- changed objects, and offline use


@pytest.mark.slow
@EVERY_FORM
def test_offline_opens_and_reads_the_mirror(store, tmp_path, form):
    cache = Cache(tmp_path / "cache", form=form)
    moved = tmp_path / "bucket" / "moved.zarr"
    shutil.copytree(store, moved)
    warm(zl.open_dataset(moved, cache=cache))
    shutil.rmtree(moved)
    dataset = zl.open_dataset(moved, cache=cache, offline=True)
    assert dataset.n_obs == ROWS
    assert list(dataset.var_names) == list(ADATA.var_names)
    loader = zl.Loader(dataset, batch_size=32, fetch_factor=8, obs=["cell_type", "donor", "lane"], obsm=["X_pca"])
    assert _epoch(loader).gets == 0
    assert dataset.categories("cell_type").tolist() == ["a", "b", "c", "never used"]
    for minibatch in zl.Loader(dataset, layout="scipy", obs=["passed"], obsm=["X_pca"]):
        np.testing.assert_array_equal(minibatch.obsm["X_pca"], ADATA.obsm["X_pca"][minibatch.index])
    again = pickle.loads(pickle.dumps(dataset))
    assert again.n_obs == ROWS


@EVERY_FORM
def test_offline_errors_name_what_is_missing(store, tmp_path, form):
    cache = Cache(tmp_path / "cache", form=form)
    with pytest.raises(CacheError, match=r"no mirror of .*counts\.zarr.*zloader warm"):
        zl.open_dataset(store, cache=cache, offline=True)
    with pytest.raises(OptionError, match="give cache="):
        zl.open_dataset(store, offline=True)
    _first_minibatch(store, cache)
    dataset = zl.open_dataset(store, cache=cache, offline=True)
    with pytest.raises(ReadError, match=r"reading X/(data|indices)/.*opened offline.*zloader warm"):
        list(zl.Loader(dataset, batch_size=32, fetch_factor=8))
    with pytest.raises(CacheError, match="not in the mirror"):
        dataset.obs()


@pytest.mark.slow
@EVERY_FORM
def test_opening_with_a_warm_cache_only_requests_a_listing(store, sim, tmp_path, form):
    server = sim(root=store.parent.parent)
    url = f"s3://{store.parent.name}/{store.name}"

    def opened() -> zl.Loader:
        cache = Cache(tmp_path / "cache", form=form)
        dataset = zl.open_dataset(url, cache=cache, storage_options=_options(server))
        return zl.Loader(dataset, batch_size=32, fetch_factor=8, obs=["cell_type"])

    _epoch(opened())
    before = server.stats()["requests"]
    assert _epoch(opened()).gets == 0
    assert server.stats()["requests"] - before == 1


# ---- permissions and secrets


@pytest.mark.every(3)
@EVERY_FORM
def test_all_files_are_private_and_contain_no_secret(store, sim, tmp_path, form):
    server = sim(root=store.parent.parent)
    options = _options(server) | {"key": "AKIAVERYSECRETKEY", "secret": "sesame-open-now"}
    cache = Cache(tmp_path / "cache", form=form)
    dataset = zl.open_dataset(f"s3://{store.parent.name}/{store.name}", cache=cache, storage_options=options)
    warm(dataset)
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.name == "CACHEDIR.TAG", path
        if path.is_file():
            content = path.read_bytes()
            assert b"sesame-open-now" not in content
            assert b"AKIAVERYSECRETKEY" not in content


@pytest.mark.slow
def test_warm_continues_where_it_stopped(store, tmp_path):
    _first_minibatch(store, tmp_path)
    seen = []
    first = warm(zl.open_dataset(store, cache=tmp_path), on_progress=seen.append)
    assert 0 < first.bytes_read < _stored(store) * 1.02
    assert (first.chunks_held, first.full) == (first.chunks, False)
    assert [warmed.chunks_held for warmed in seen] == sorted(warmed.chunks_held for warmed in seen)
    assert warm(zl.open_dataset(store, cache=tmp_path)).gets == 0
    with pytest.raises(OptionError, match="no cache"):
        warm(zl.open_dataset(store))


_EXIT = """
import sys
from IPython.core.interactiveshell import InteractiveShell
import zloader as zl
kept = []
for form in ("raw", "compact"):
    dataset = zl.open_dataset(sys.argv[1], cache=zl.Cache(f"{sys.argv[2]}/{form}", form=form))
    whole, begun, never = (zl.Loader(dataset, batch_size=64, obs=["cell_type"]) for _ in range(3))
    kept += [dataset, dataset[:100], never, list(whole), next(minibatches := iter(begun)), minibatches]
InteractiveShell.instance().user_ns["kept"] = kept  # IPython keeps objects until modules have lost their names
"""


@pytest.mark.slow  # imports everything
def test_nothing_is_said_at_the_end_of_ipython(store, tmp_path):
    pytest.importorskip("IPython")
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", _EXIT, str(store), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "have no label" not in line]) == (0, [])
