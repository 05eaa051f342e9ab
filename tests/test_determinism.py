"""The same seed gives the same bytes, for any timing, cache state, concurrency and storage."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, digest, fetch_options, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zloader as zl
from benchmarks.harness.s3 import Sim
from zloader.common.options import Cache

pytestmark = pytest.mark.any_version

ADATA = counts(700, 90, density=0.5, seed=4)
SAMPLINGS = {
    "streaming": zl.Streaming(shuffle=True),
    "blocks": zl.BlockShuffling(7),
    "single rows": zl.BlockShuffling(1),
    "strata": zl.BlockShuffling(7, n_strata=11),
    "scanners": zl.MixtureOfScanners(n_scanners=5, active=3),
    "weighted": zl.BlockWeightedSampling(np.arange(700.0), block_size=4),
    "classes": zl.ClassBalancedSampling("donor", block_size=4),
}
MIRRORS = ("none", "empty", "half", "full", "limited")
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("determinism")
    (folder / "bucket").mkdir()
    write_store(ADATA, folder / "bucket" / "counts.zarr", folder)
    return folder / "bucket" / "counts.zarr"


def _loader(dataset, sampling, **options) -> zl.Loader:
    fetching = fetch_options(**options)
    return zl.Loader(
        dataset, batch_size=16, fetch_factor=5, sampling=sampling, obs=["donor", "n_counts"], seed=3, options=fetching
    )


@pytest.fixture(scope="module")
def wanted(store) -> dict[str, str]:
    """The digest of epoch 0 with each sampling, read from disk without concurrency."""
    plain = {"prefetch": 1, "threads": 1, "in_flight_bytes": 1}
    return {name: digest(_loader(zl.open_dataset(store), sampling, **plain)) for name, sampling in SAMPLINGS.items()}


def _cache(opened: Callable[[Cache], zl.Dataset], where: Path, mirror: str) -> Cache | None:
    """A cache in the state `mirror`, filled with the dataset that `opened` returns."""
    if mirror == "none":
        return None
    cache = Cache(where, max_bytes="400KB" if mirror == "limited" else None)
    epochs = _loader(opened(cache), zl.BlockShuffling(3), prefetch=1, least_read_bytes=1)
    for _ in itertools.islice(epochs, {"half": 18, "full": 100, "limited": 100}.get(mirror, 0)):
        pass
    return cache


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(SAMPLINGS)),
    mirror=st.sampled_from(MIRRORS),
    remote=st.booleans(),
    prefetch=st.integers(1, 8),
    threads=st.integers(1, 4),
    in_flight_bytes=st.sampled_from([1, 3_000, 1 << 26]),
    ready_bytes=st.sampled_from([1, 50_000, 1 << 26]),
)
def test_an_epoch_is_the_same_bytes(store, wanted, tmp_path, name, mirror, remote, **options):
    """From one read in flight to all reads at once. The simulator answers with random latency."""
    directory = tmp_path / str(next(_NUMBERS))
    with contextlib.ExitStack() as stack:
        location: dict[str, Any] = {"url": store}
        if remote:
            server = stack.enter_context(Sim(root=store.parent.parent, ttfb_ms=3, ttfb_sigma=1.0))
            access = {"key": "any", "secret": "any", "endpoint_url": server.url}
            location = {"url": f"s3://{store.parent.name}/{store.name}", "storage_options": access}
        cache = _cache(lambda cache: zl.open_dataset(cache=cache, **location), directory, mirror)
        dataset = zl.open_dataset(cache=cache, **location)
        assert digest(_loader(dataset, SAMPLINGS[name], **options)) == wanted[name]


_DIGEST = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import digest
import zloader as zl
loader = zl.Loader(
    zl.open_dataset(sys.argv[2]), batch_size=16, fetch_factor=5, obs=["donor", "n_counts"], seed=3,
    sampling=zl.ClassBalancedSampling("donor", block_size=4),
)
print(json.dumps(digest(loader)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_another_process_gives_the_same_bytes(store, wanted, hash_seed, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    command = [sys.executable, "-c", _DIGEST, str(Path(__file__).parent), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert json.loads(done.stdout) == wanted["classes"]


def test_seeds_and_epochs_differ(store, wanted):
    dataset = zl.open_dataset(store)
    loader = _loader(dataset, SAMPLINGS["blocks"])
    digests = [digest(loader) for _ in range(3)]
    other = zl.Loader(dataset, batch_size=16, fetch_factor=5, sampling=SAMPLINGS["blocks"], obs=["donor"], seed=4)
    assert digests[0] == wanted["blocks"]
    assert len({*digests, digest(other), *wanted.values()}) == 3 + len(wanted)
