"""Sets, controls, tokens, several matrices and large obs columns while S3 fails: the same minibatches, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, assert_same_minibatches, assert_threads_end, counts, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import ReadError
from zloader.dataset import obsm_arrays

ADATA = counts(240, 40)
ADATA.layers["twice"] = ADATA.X * 2
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((240, 3), np.float32)
TOKENS = {name: number for number, name in enumerate(["<pad>", "<mask>", "<cls>", "<eoc>", *ADATA.var_names])}
PARTS: dict[str, dict[str, Any]] = {
    "sets with controls": {
        "sampling": zl.CellSets("donor", set_size=4),
        "controls": zl.MatchedControls("passed", match="lane", n=1),
        "obs": ["donor"],
    },
    "tokens": {"tokens": zl.tokenizers.ScGPT(TOKENS, max_length=12), "x": None},
    "matrices with transforms": {"x": ["X", "layers/twice"], "transforms": [zl.transforms.LogNormalize(1e3)]},
    "large columns": {"obs": ["cell_type", "n_counts", "lane"], "obsm": ["X_pca"]},
}
# Each of these passes. Chunks are read several times until every fault has been used up.
PASSING = [
    {"kind": "status", "status": 503, "code": "SlowDown", "count": 2},
    {"kind": "reset", "count": 1, "skip": 3},
    {"kind": "truncate", "count": 1, "skip": 6},
    {"kind": "short", "count": 1, "skip": 9},
]


@pytest.fixture(autouse=True)
def _small_columns_are_large(monkeypatch):
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 8)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bucket")
    write_store(ADATA, folder / "atlas" / "s.zarr", folder)
    return folder


def loader_of(url: Any, parts: dict[str, Any], retries: int = 9, **opening: Any) -> zl.Loader:
    options = zl.FetchOptions(deadline_s=PATIENCE_S, retries=retries)
    return zl.Loader(zl.open_dataset(url, **opening), batch_size=16, fetch_factor=2, options=options, **parts)


def in_a_worker(loader: zl.Loader) -> DataLoader:
    return DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")


def extras(minibatch: zl.Minibatch) -> list[Any]:
    """What `assert_same_minibatches` does not compare."""
    tokens, sets = minibatch.tokens, minibatch.set_of_row
    of_tokens = [] if tokens is None else [tensor.tolist() for tensor in tokens.values()]
    return [*of_tokens, None if sets is None else sets.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["raw", None])
@pytest.mark.parametrize("parts", PARTS)
def test_the_epoch_is_the_same_or_raises(bucket, sim, tmp_path, parts, form):
    def cache(name: str) -> zl.Cache | None:
        return None if form is None else zl.Cache(tmp_path / name, form=form)

    wanted = list(loader_of(bucket / "atlas" / "s.zarr", PARTS[parts]))
    server = sim(root=bucket)
    opening = {"storage_options": {"key": "any", "secret": "any", "endpoint_url": server.url}}
    loader = loader_of("s3://atlas/s.zarr", PARTS[parts], cache=cache("cache"), **opening)
    server.faults = [fault | {"match": "(X|layers|obs|obsm)/.*/c/"} for fault in PASSING]
    found = list(loader)
    assert sum(server.stats().get(f"fault_{fault['kind']}", 0) for fault in PASSING) >= 3
    assert_same_minibatches(found, wanted)
    assert [extras(each) for each in found] == [extras(each) for each in wanted]
    if form is not None:  # nothing is read again, and the mirror holds no wrong byte
        server.faults = [{"kind": "status", "match": ".*/c/"}]
        again = loader_of("s3://atlas/s.zarr", PARTS[parts], cache=cache("cache"), **opening)
        assert_same_minibatches(list(again), wanted)
        server.faults = []
    controls = [(each.control, other.control) for each, other in zip(found, wanted, strict=True) if other.control]
    assert_same_minibatches([one for one, _ in controls], [other for _, other in controls])

    lasting = loader_of("s3://atlas/s.zarr", PARTS[parts], cache=cache("other"), **opening)
    lasting.options = zl.FetchOptions(deadline_s=PATIENCE_S, retries=1)
    minibatches = iter(lasting)
    server.faults = [{"kind": "status", "match": "(X|layers|obs|obsm)/.*/c/", "skip": 2}]
    with pytest.raises(ReadError, match=r"s3://atlas/s.zarr"):
        list(minibatches)
    del minibatches
    assert_threads_end()


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_a_worker_makes_the_same_epoch_or_raises(bucket, sim, tmp_path, parts):
    wanted = list(loader_of(bucket / "atlas" / "s.zarr", PARTS[parts]))
    server = sim(root=bucket)
    opening = {"storage_options": {"key": "any", "secret": "any", "endpoint_url": server.url}}
    options = PARTS[parts]
    loader = loader_of("s3://atlas/s.zarr", options, cache=tmp_path / "cache", **opening)
    server.faults = [fault | {"match": "(X|layers|obs|obsm)/.*/c/"} for fault in PASSING]
    found = list(in_a_worker(loader))
    assert sum(server.stats().get(f"fault_{fault['kind']}", 0) for fault in PASSING) >= 3
    assert_same_minibatches(found, wanted)
    assert [extras(each) for each in found] == [extras(each) for each in wanted]

    server.faults = [{"kind": "status", "match": ".*/c/"}]  # the worker has filled the mirror, and another finds it
    again = loader_of("s3://atlas/s.zarr", options, cache=tmp_path / "cache", **opening)
    assert_same_minibatches(in_a_worker(again), wanted)

    server.faults = []
    lasting = loader_of("s3://atlas/s.zarr", options, retries=1, cache=tmp_path / "other", **opening)
    server.faults = [{"kind": "status", "match": "(X|layers)/(data|indices)/c/"}]
    with pytest.raises(ReadError, match=r"s3://atlas/s.zarr"):
        list(in_a_worker(lasting))
