"""hf:// against a stand-in for the Hub's API and its CDN, which checks what it is sent."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TESTS, counts, digest, write_store
from hubs import TOKEN, Hub

import zloader as zl
from zloader.access.location import Location
from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    OptionError,
    StoreChangedError,
    StoreNotFoundError,
    ZloaderError,
)

pytest.importorskip("huggingface_hub")

ADATA = counts(160, 41, seed=8)
ADATA.obs["odd & #name? 50%"] = np.arange(160, dtype=np.float32)
OBS = ["cell_type", "donor", "n_counts", "odd & #name? 50%"]
URL = "hf://datasets/lab/cells/two words/counts.zarr"
BUCKET = "hf://buckets/lab/cells/two words/counts.zarr"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    write_store(ADATA, folder / ("c" * 40) / "two words" / "counts.zarr", folder)
    (folder / ("c" * 40) / "counts.h5ad").write_bytes((folder / "source.h5ad").read_bytes())
    return folder


@pytest.fixture
def standin(local: Path) -> Hub:
    return Hub(local)


@pytest.fixture
def options(standin: Hub) -> Iterator[dict[str, Any]]:
    with standin.running() as address:
        yield {"endpoint": address}


def loader(dataset: zl.Dataset, **given: Any) -> zl.Loader:
    sampling = zl.BlockShuffling(4)
    return zl.Loader(
        dataset, batch_size=16, fetch_factor=3, sampling=sampling, obs=OBS, options=zl.FetchOptions(**given)
    )


def wanted(local: Path) -> str:
    return digest(loader(zl.open_dataset(local / ("c" * 40) / "two words" / "counts.zarr")))


URLS = [
    URL,
    BUCKET,
    pytest.param(URL.replace("cells/", "cells@main/", 1), marks=pytest.mark.slow),
    pytest.param(URL.replace("/cells/", f"/cells@{'c' * 40}/"), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("url", URLS, ids=["branch", "bucket", "named branch", "commit"])
def test_minibatches_are_those_of_the_local_store(
    local: Path, standin: Hub, options: Any, url: str, tmp_path: Path
) -> None:
    dataset = zl.open_dataset(url, storage_options=options)
    assert digest(loader(dataset)) == wanted(local)
    assert digest(loader(pickle.loads(pickle.dumps(dataset)))) == wanted(local)
    mirrored = zl.open_dataset(url, storage_options=options, cache=tmp_path / "cache")
    assert [digest(loader(mirrored)), digest(loader(mirrored))] == [wanted(local)] * 2
    offline = zl.open_dataset(url, storage_options=options, cache=tmp_path / "cache", offline=True)
    assert digest(loader(offline)) == wanted(local)


@pytest.mark.slow
def test_a_file_in_place_and_as_a_source(local: Path, options: Any, tmp_path: Path) -> None:
    url = "hf://datasets/lab/cells/counts.h5ad"
    there = zl.open_dataset(local / "source.h5ad")
    assert digest(loader(zl.open_dataset(url, storage_options=options))) == digest(loader(there))
    assert zl.verify(URL, storage_options=options, progress=False).problems == ()
    for source in (url, "hf://datasets/lab/cells/*.h5ad", URL):
        zl.convert(source, tmp_path / "a.zarr", source_options=options, progress=False, overwrite=True)
        np.testing.assert_array_equal(
            zl.open_dataset(tmp_path / "a.zarr").take(range(160)).X.toarray(), ADATA.X.toarray()
        )


@pytest.mark.parametrize("root", ["datasets", "buckets"])
def test_names_with_any_characters(local: Path, options: Any, root: str) -> None:
    name = "Größe +1 %2F #2 &=~"
    there = local / ("c" * 40)
    if not (there / name).exists():
        shutil.copytree(there / "two words", there / name)
    dataset = zl.open_dataset(f"hf://{root}/lab/cells/{name}/counts.zarr", storage_options=options)
    assert digest(loader(dataset)) == wanted(local)


def test_a_branch_is_pinned(local: Path, standin: Hub, options: Any) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    before = dataset.stores[0].fingerprint
    new = local / ("d" * 40) / "two words"
    if not new.exists():
        new.mkdir(parents=True)
        write_store(counts(90, 41), new / "counts.zarr", local / "tmp")
    standin.commit = "d" * 40
    assert digest(loader(dataset)) == wanted(local)
    later = zl.open_dataset(URL, storage_options=options)
    assert (later.n_obs, later.stores[0].location.revision) == (90, "d" * 40)
    assert later.stores[0].fingerprint != before
    pinned = zl.open_dataset(URL.replace("/cells/", f"/cells@{'d' * 40}/"), storage_options=options)
    assert pinned.stores[0].fingerprint == later.stores[0].fingerprint


def test_an_address_is_asked_for_once(standin: Hub, options: Any) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    epochs = loader(dataset)
    digest(epochs)
    asked = standin.asked["resolve"]
    assert standin.asked["cdn"] > 2 * 6  # several reads of each object
    digest(epochs)
    assert standin.asked["resolve"] == asked


LIMITS = [
    {"Retry-After": "1"},
    pytest.param({"RateLimit": '"resolvers";r=0;t=1', "Retry-After": "1"}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("headers", LIMITS, ids=["Retry-After", "RateLimit"])
def test_rate_limits_are_respected(local: Path, standin: Hub, options: Any, headers: Any) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    epochs = loader(dataset)
    _ = dataset.obs(OBS)
    standin.busy = {"resolve": [headers]}
    assert digest(epochs) == wanted(local)
    assert standin.too_early <= 16  # those that had been asked for at the same time
    standin.busy = {"resolve": [headers], "tree": [headers]}
    assert zl.open_dataset(URL, storage_options=options).n_obs == 160
    assert standin.busy == {"resolve": [], "tree": []}


def test_a_rate_limit_beyond_the_deadline(standin: Hub, options: Any) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    dataset.take([0])
    standin.busy = {"resolve": [{"Retry-After": "300"}] * 99}
    with pytest.raises(DeadlineError, match=r"X/.*did not finish within deadline_s=2.*429"):
        list(zl.Loader(dataset, batch_size=16, options=zl.FetchOptions(deadline_s=2)))


@pytest.mark.every(4)
@pytest.mark.parametrize("fault", ["expired", "short", "drop", "500"])
def test_one_failure_of_the_cdn(local: Path, standin: Hub, options: Any, fault: str) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    digest(loader(dataset))
    standin.faults = [fault]
    assert digest(loader(dataset)) == wanted(local)
    assert not standin.faults


def test_a_cdn_that_always_refuses(standin: Hub, options: Any) -> None:
    dataset = zl.open_dataset(URL, storage_options=options)
    dataset.take([0])
    standin.faults = ["expired"] * 999
    with pytest.raises(AccessDeniedError, match=r"X/.*was denied.*403.*HF_TOKEN") as caught:
        list(zl.Loader(dataset, batch_size=16))
    assert standin.signature not in str(caught.value)


def test_objects_of_a_bucket_that_change_or_vanish(local: Path, standin: Hub, options: Any) -> None:
    standin.commit = "e" * 40
    write_store(ADATA, standin.folder / "two words" / "counts.zarr", local / "tmp")
    first, second = (zl.open_dataset(BUCKET, storage_options=options) for _ in range(2))
    file = standin.folder / "two words" / "counts.zarr" / "X" / "data" / "c" / "1"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(StoreChangedError, match="X/data/c/1"):
        digest(loader(first))
    file.unlink()
    with pytest.raises(MissingObjectError, match="X/data/c/1"):
        digest(loader(second))


def test_a_private_repository(standin: Hub, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.private = True
    with pytest.raises(AccessDeniedError, match=r"(?s)not allowed to look up .*Check HF_TOKEN"):
        zl.open_dataset(URL, storage_options=options)
    dataset = zl.open_dataset(URL, storage_options=options | {"token": TOKEN})
    assert len(list(loader(dataset))) == 10
    assert TOKEN not in repr(dataset) + repr(dataset.store.location)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(list(loader(zl.open_dataset(BUCKET, storage_options=options)))) == 10


READ = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/access"]
import test_hub as tests
print(tests.digest(tests.loader(tests.zl.open_dataset(tests.URL))))
"""


@pytest.mark.slow
def test_endpoint_and_token_of_the_environment(interpreter: Any, local: Path, standin: Hub, options: Any) -> None:
    standin.private = True
    done = interpreter.run(READ, TESTS, HF_ENDPOINT=options["endpoint"], HF_TOKEN=TOKEN)
    said = [line for line in done.stderr.splitlines() if "have no label" not in line]
    assert (done.stdout.strip(), said) == (wanted(local), [])


MISSING = {
    "repository": ("hf://datasets/lab/nothing/a.zarr", "there is no such repository"),
    "revision": ("hf://datasets/lab/cells@nothing/a.zarr", "there is no such revision"),
    "path": ("hf://datasets/lab/cells/nothing.zarr", "nothing is stored at hf://.*check the repository"),
    "bucket": ("hf://buckets/lab/cells/nothing.zarr", "nothing is stored at hf://"),
    "match": ("hf://datasets/lab/cells/*.zarr", "nothing matches hf://"),
}


@pytest.mark.parametrize(("url", "says"), MISSING.values(), ids=MISSING)
def test_what_does_not_exist(options: Any, url: str, says: str) -> None:
    with pytest.raises(StoreNotFoundError, match=says):
        zl.open_dataset(url, storage_options=options)


INVALID = {
    "only a name": ("hf://lab", "hf://datasets/ORG/NAME/PATH"),
    "no name": ("hf://datasets/lab", "hf://datasets/ORG/NAME/PATH"),
    "bucket with revision": ("hf://buckets/lab/cells@main/a.zarr", "a bucket has no revisions. Leave out @main"),
    "password": ("hf://me:hush@lab/cells/a.zarr", "cannot contain user and password"),
}


@pytest.mark.parametrize(("url", "says"), INVALID.values(), ids=INVALID)
def test_invalid_urls(url: str, says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        zl.open_dataset(url)
    assert "hush" not in str(caught.value)


def test_paths() -> None:
    commit = "c" * 40
    assert Location(url="hf://datasets/a/b/c/d.zarr/").path == "datasets/a/b/c/d.zarr"
    assert Location(url="hf://datasets/a/b/c", revision=commit).path == f"datasets/a/b@{commit}/c"
    assert Location(url="hf://datasets/a/b@refs/pr/3/c").path == "datasets/a/b@refs%2Fpr%2F3/c"
    assert Location(url="hf://a/b@v1/c", revision=commit).path == f"a/b@{commit}/c"


def test_invalid_options_and_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"no 'tokn' in the storage_options of hf://. Did you mean 'token'"):
        zl.open_dataset(URL, storage_options={"tokn": "x"})
    with pytest.raises(ZloaderError, match="written to a local path or s3://"):
        zl.convert(ADATA, URL, progress=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(OptionError, match=r'hf:// needs huggingface_hub.*pip install "zloader\[hf\]"'):
        _ = Location(url=URL).kind.api
