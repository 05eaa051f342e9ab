"""az:// and abfs:// against Azurite, a real server of Azure Blob Storage."""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, digest, write_store

import zloader as zl
from benchmarks.harness.azurite import ACCOUNT, KEY, Azurite, find_azurite
from zloader.access import buckets
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

pytest.importorskip("azure.storage.blob")
needs_azurite = pytest.mark.skipif(
    find_azurite() is None, reason="needs Azurite: 'npm install -g azurite', or AZURITE=/path/to/azurite-blob"
)

ADATA = counts(160, 41, seed=8)
ADATA.obs["odd & #name? 50%"] = np.arange(160, dtype=np.float32)
WRONG_KEY = base64.b64encode(bytes(64)).decode()
URL = "az://cells/two words/counts.zarr"
OBS = ["cell_type", "donor", "n_counts", "odd & #name? 50%"]


class Blobs:
    """A container of Azurite, and what is in it."""

    def __init__(self, server: Azurite) -> None:
        from azure.storage.blob import BlobServiceClient

        self.options = server.storage_options
        self.server = server
        self.service = BlobServiceClient.from_connection_string(server.connection_string)
        self.container = self.service.create_container("cells")

    def upload(self, folder: Path, prefix: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def put(self, key: str, content: bytes) -> None:
        self.container.upload_blob(key, content, overwrite=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder


@pytest.fixture(scope="module")
def blobs(local: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blobs]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        found = Blobs(server)
        found.upload(local / "counts.zarr", "two words/counts.zarr")
        found.put("counts.h5ad", (local / "source.h5ad").read_bytes())
        yield found
        found.service.close()


def loader(dataset: zl.Dataset, **options: Any) -> zl.Loader:
    sampling = zl.BlockShuffling(4)
    return zl.Loader(
        dataset, batch_size=16, fetch_factor=3, sampling=sampling, obs=OBS, options=zl.FetchOptions(**options)
    )


@needs_azurite
def test_minibatches_are_those_of_the_local_store(local: Path, blobs: Blobs, tmp_path: Path) -> None:
    wanted = digest(loader(zl.open_dataset(local / "counts.zarr")))
    dataset = zl.open_dataset(URL, storage_options=blobs.options)
    assert dataset.store.object_sizes() == zl.open_dataset(local / "counts.zarr").store.object_sizes()
    assert digest(loader(dataset)) == wanted
    assert digest(loader(pickle.loads(pickle.dumps(dataset)))) == wanted
    mirrored = zl.open_dataset(URL, storage_options=blobs.options, cache=tmp_path / "cache")
    assert [digest(loader(mirrored)), digest(loader(mirrored))] == [wanted, wanted]
    offline = zl.open_dataset(URL, storage_options=blobs.options, cache=tmp_path / "cache", offline=True)
    assert digest(loader(offline)) == wanted
    np.testing.assert_array_equal(dataset.take([7, 3]).X.toarray(), ADATA.X[[7, 3]].toarray())


@needs_azurite
def test_a_file_in_place_and_as_a_source(local: Path, blobs: Blobs, tmp_path: Path) -> None:
    wanted = digest(loader(zl.open_dataset(local / "source.h5ad")))
    assert digest(loader(zl.open_dataset("az://cells/counts.h5ad", storage_options=blobs.options))) == wanted
    assert zl.verify(URL, storage_options=blobs.options, progress=False).problems == ()
    for source in ("az://cells/counts.h5ad", "az://cells/*.h5ad", URL):
        dest = tmp_path / "converted.zarr"
        zl.convert(source, dest, source_options=blobs.options, progress=False, overwrite=True)
        np.testing.assert_array_equal(zl.open_dataset(dest).take(range(160)).X.toarray(), ADATA.X.toarray())


@needs_azurite
def test_globs(blobs: Blobs) -> None:
    dataset = zl.open_dataset("az://cells/two*/*.zarr", storage_options=blobs.options)
    assert dataset.stores[0].location.url == URL
    with pytest.raises(StoreNotFoundError, match=r"nothing matches az://cells/\*\.zarr"):
        zl.open_dataset("az://cells/*.zarr", storage_options=blobs.options)


@needs_azurite
def test_keys_and_signatures(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    from azure.storage.blob import generate_account_sas

    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    sas = generate_account_sas(ACCOUNT, KEY, "sco", "rl", until)
    endpoint = blobs.server.endpoint_url
    signed = {"connection_string": f"BlobEndpoint={endpoint};SharedAccessSignature={sas}"}
    assert len(list(loader(zl.open_dataset(URL, storage_options=signed)))) == 10
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", blobs.server.connection_string)
    assert zl.open_dataset(URL).n_obs == 160


@needs_azurite
def test_a_store_that_is_the_whole_container(local: Path, blobs: Blobs) -> None:
    container = blobs.service.create_container("whole")
    for path in (local / "counts.zarr").rglob("*"):
        if path.is_file():
            container.upload_blob(str(path.relative_to(local / "counts.zarr")), path.read_bytes())
    dataset = zl.open_dataset("az://whole", storage_options=blobs.options)
    assert digest(loader(dataset)) == digest(loader(zl.open_dataset(local / "counts.zarr")))


@needs_azurite
def test_names_with_any_characters(local: Path, blobs: Blobs) -> None:
    name = "Größe +1 %2F #2 &=~"
    blobs.upload(local / "counts.zarr", f"{name}/a+b%.zarr")
    dataset = zl.open_dataset(f"az://cells/{name}/a+b%.zarr", storage_options=blobs.options)
    assert digest(loader(dataset)) == digest(loader(zl.open_dataset(local / "counts.zarr")))


FORK = """
import os, sys, zloader as zl
dataset = zl.open_dataset("az://cells/two words/counts.zarr")
print(len(list(zl.Loader(dataset, batch_size=16))), flush=True)
if (child := os.fork()) == 0:
    try:
        list(zl.Loader(dataset, batch_size=16))
    except zl.ZloaderError as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@needs_azurite
@pytest.mark.slow
def test_a_process_ends_without_warnings_and_its_forks_raise_an_error(blobs: Blobs) -> None:
    environment = os.environ | {"AZURE_STORAGE_CONNECTION_STRING": blobs.server.connection_string}
    command = [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
    assert (done.stdout.split(), done.stderr) == (["10", "ForkError"], "")


# ---- what can go wrong


@needs_azurite
def test_what_does_not_exist(blobs: Blobs) -> None:
    for url in ("az://cells/nothing", "az://no-such-container/a.zarr"):
        with pytest.raises(StoreNotFoundError, match=f"nothing is stored at {url}: check the account"):
            zl.open_dataset(url, storage_options=blobs.options)


@needs_azurite
def test_wrong_keys(blobs: Blobs) -> None:
    wrong = {"connection_string": blobs.server.connection_string.replace(KEY, WRONG_KEY)}
    with pytest.raises(AccessDeniedError, match=r"not allowed to list az://cells.*account_key") as caught:
        zl.open_dataset(URL, storage_options=wrong)
    assert WRONG_KEY not in str(caught.value)
    dataset = zl.open_dataset(URL, storage_options=blobs.options)
    dataset.store.read_from = Location(url=URL, storage_options=wrong)
    with pytest.raises(AccessDeniedError, match=r"X/.*was denied.*403.*account_key") as caught:
        digest(loader(dataset))
    assert WRONG_KEY not in str(caught.value)


@needs_azurite
def test_objects_that_change_or_vanish(local: Path, blobs: Blobs) -> None:
    blobs.upload(local / "counts.zarr", "changing.zarr")
    epochs = loader(zl.open_dataset("az://cells/changing.zarr", storage_options=blobs.options))
    digest(epochs)
    key, stored = "changing.zarr/X/data/c/1", (local / "counts.zarr/X/data/c/1").read_bytes()
    blobs.put(key, stored[::-1])
    with pytest.raises(StoreChangedError, match="X/data/c/1"):
        digest(epochs)
    again = loader(zl.open_dataset("az://cells/changing.zarr", storage_options=blobs.options))
    blobs.container.delete_blob(key)
    with pytest.raises(MissingObjectError, match="X/data/c/1"):
        digest(again)


@needs_azurite
def test_a_server_that_is_gone(local: Path, tmp_path: Path) -> None:
    with Azurite(tmp_path) as server:
        found = Blobs(server)
        found.upload(local / "counts.zarr", "a.zarr")
        found.service.close()
        dataset = zl.open_dataset("az://cells/a.zarr", storage_options=server.storage_options)
        dataset.take([0])
    with pytest.raises(DeadlineError, match=r"az://cells/a\.zarr.*deadline_s=0\.7"):
        digest(loader(dataset, deadline_s=0.7))


# ---- URLs and options


def test_urls() -> None:
    with_account = Location(url="abfs://cells@acme.dfs.core.windows.net/a/b.zarr/")
    assert with_account.path == "cells/a/b.zarr"
    assert with_account.address == "abfs://cells@acme.dfs.core.windows.net/a/b.zarr"
    kind = Location(url=with_account.url, storage_options={"account_key": KEY}).kind
    assert kind.access()["endpoint"] == "https://acme.blob.core.windows.net"
    for url in ("az://me:hush@cells/a.zarr", "abfs://cells@host/a.zarr"):
        with pytest.raises(OptionError, match="cannot contain user and password") as caught:
            Location(url=url)
        assert "hush" not in str(caught.value)
    with pytest.raises(OptionError, match="az://CONTAINER/KEY"):
        Location(url="az://")
    with pytest.raises(OptionError, match="written to a local path or s3://"):
        zl.convert(ADATA, "az://cells/new.zarr", progress=False)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"acount_name": "x"}, r"no 'acount_name' in the storage_options of az://. Did you mean 'account_name'"),
    "credential": ({"credential": object()}, "no 'credential' in the storage_options of az://"),
    "nothing": ({"anon": True}, "connection_string or account_name"),
    "no string": ({"connection_string": "nonsense"}, "connection_string in storage_options names no account"),
    "no key": ({"account_name": "acme", "account_key": "no key"}, "not base64"),
}


@pytest.mark.parametrize(("options", "says"), OPTIONS.values(), ids=OPTIONS)
def test_invalid_options(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    url = "az://cells/a.zarr"
    with pytest.raises(ZloaderError, match=says):
        zl.open_dataset(url, storage_options=options)


def test_without_azure_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets._identity.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore.auth.azure", None)
    with pytest.raises(OptionError, match=r'az:// needs azure-identity.*pip install "zloader\[azure\]"'):
        zl.open_dataset("az://cells/a.zarr", storage_options={"account_name": "acme"})


def test_which_credentials_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acme")
    given = {"account_key": KEY}
    assert Location(url=URL, storage_options=given).kind.credentials() == "account_key, AZURE_STORAGE_ACCOUNT_NAME"
    assert Location(url=URL).kind.credentials() == "AZURE_STORAGE_ACCOUNT_NAME"
    ways: list[tuple[dict[str, Any], str]] = [
        ({"account_key": KEY}, "account_key"),
        ({"sas_token": "?sig=x"}, "sas_key"),
        ({"connection_string": f"AccountName=acme;AccountKey={KEY}"}, "account_key"),
        ({"client_secret": "x"}, "client_secret"),
        ({"anon": True}, "skip_signature"),
        ({}, "credential_provider"),
    ]
    for options, says in ways:
        assert says in Location(url=URL, storage_options=options).kind.access()
