"""Every kind of URL gives the same minibatches, and errors name what cannot be read or written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import http.server
import itertools
import json
import shutil
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr
from helpers import PATIENCE_S, counts, digest, web_server, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.access import buckets
from zloader.access.location import Location, location_of
from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    FormatError,
    MissingObjectError,
    OptionError,
    ReadError,
    StoreChangedError,
    StoreError,
    StoreNotFoundError,
)

ADATA = counts(160, 41, seed=8)
ADATA.obs["odd & #name? 50%"] = np.arange(160, dtype=np.float32)
OBS = ["cell_type", "donor", "n_counts", "passed", "odd & #name? 50%"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains `bucket/two words/counts.zarr`."""
    folder = tmp_path_factory.mktemp("root")
    write_store(ADATA, folder / "bucket" / "two words" / "counts.zarr", folder / "tmp")
    return folder


def open_web(server, path: str = "bucket/two words/counts.zarr", **options: Any) -> zl.Dataset:
    return zl.open_dataset(f"{server.url}/{path}", **options)


def loader(dataset: zl.Dataset, **options: Any) -> zl.Loader:
    sampling = zl.BlockShuffling(4)
    fetching = zl.FetchOptions(**options)
    return zl.Loader(dataset, batch_size=16, fetch_factor=3, sampling=sampling, obs=OBS, options=fetching)


@pytest.mark.slow
def test_minibatches_are_the_same_from_everywhere(root, sim, s3, tmp_path):
    path = root / "bucket" / "two words" / "counts.zarr"
    location = Location(url=s3.url("two words/counts.zarr"), storage_options=s3.storage_options)
    location.filesystem().put(f"{path}/", f"{location.path}/", recursive=True)
    server = sim(root=root)
    anonymous = {"anon": True, "endpoint_url": server.url}
    datasets = {
        "path": zl.open_dataset(path),
        "file": zl.open_dataset("file://" + str(path).replace(" ", "%20")),
        "s3": zl.open_dataset(location.url, storage_options=s3.storage_options),
        "anonymous s3": zl.open_dataset("s3://bucket/two words/counts.zarr", storage_options=anonymous),
        "http": open_web(server),
        "http, encoded": open_web(server, "bucket/two%20words/counts.zarr/"),
        "http, mirrored": open_web(server, cache=tmp_path / "cache"),
    }
    digests = {name: digest(loader(dataset)) for name, dataset in datasets.items()}
    assert digests == dict.fromkeys(datasets, digests["path"])
    np.testing.assert_array_equal(datasets["http"].take([7, 3]).X.toarray(), ADATA.X[[7, 3]].toarray())
    mirrored = datasets["http, mirrored"]
    server.faults = [{"kind": "status", "status": 500}]
    assert digest(loader(mirrored)) == digests["path"]


# ---- web servers: finding the objects


OPEN = """
import sys, zloader
print(len(zloader.open_dataset(sys.argv[1]).obs()))
"""


@pytest.mark.slow
def test_a_process_that_read_from_a_web_server_exits_without_warnings(root, sim):
    command = [sys.executable, "-c", OPEN, f"{sim(root=root).url}/bucket/two words/counts.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.strip(), done.stderr) == ("160", "")


def test_the_objects_found_on_a_web_server_match_a_local_listing(root, sim):
    server = sim(root=root)
    there = zl.open_dataset(root / "bucket" / "two words" / "counts.zarr").store.location.listing()
    web = open_web(server).store.location
    found = web.listing()
    assert {key: entry.size for key, entry in found.items()} == {key: entry.size for key, entry in there.items()}
    assert web.find_object("zarr.json") == found["zarr.json"]
    assert web.find_object("X/data/c/99") is None


def test_concurrent_requests_are_bounded(root, sim):
    server = sim(root=root, ttfb_ms=20)
    location = open_web(server).store.location
    server.tally.clear()
    n_objects = len(location.listing())
    assert server.tally.wait_idle(30)
    assert n_objects < server.stats()["requests"] < n_objects + 10
    assert server.stats()["peak_active"] <= 64
    assert server.stats()["bytes_out"] < 100_000  # only metadata


@given(shape=st.lists(st.integers(0, 7), max_size=3), zarr_format=st.sampled_from([2, 3]), sharded=st.booleans())
def test_the_keys_of_an_array_match_those_that_zarr_writes(shape, zarr_format, sharded):
    from zloader.access.zarr_groups import stored_keys

    store = zarr.storage.MemoryStore()
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    chunks = tuple(2 for _ in shape)
    shards = tuple(4 for _ in shape) if sharded and zarr_format == 3 and shape else None
    array = group.create_array("a", shape=tuple(shape), chunks=chunks, shards=shards, dtype="i4", fill_value=0)
    with zarr.config.set({"array.write_empty_chunks": True}):
        array[...] = 1
    metadata = {"zarr.json", "a/zarr.json", ".zgroup", ".zattrs", "a/.zarray", "a/.zattrs"}
    assert set(stored_keys(array)) == set(store._store_dict) - metadata


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_a_zarr_v2_store_with_chunks_left_out(tmp_path, sim):
    adata = counts(60, 9)
    adata.X = adata.X.toarray()
    adata.X[10:30] = 0
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=2):
        warnings.simplefilter("ignore")  # anndata 0.13 deprecates writing this format
        adata.write_zarr(tmp_path / "bucket" / "v2.zarr", chunks=(10, 9))
    zarr.consolidate_metadata(tmp_path / "bucket" / "v2.zarr", zarr_format=2)
    for chunk in ("1.0", "2.0"):
        (tmp_path / "bucket" / "v2.zarr" / "X" / chunk).unlink(missing_ok=True)
    dataset = open_web(sim(), "bucket/v2.zarr")
    assert not {"X/1.0", "X/2.0"} & dataset.store.location.listing().keys()
    np.testing.assert_array_equal(dataset.take(range(60)).X, adata.X)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_web_store_that_is_not_consolidated(root, sim, tmp_path):
    store = tmp_path / "bucket" / "a.zarr"
    shutil.copytree(root / "bucket" / "two words" / "counts.zarr", store)
    metadata = json.loads((store / "zarr.json").read_text())
    del metadata["consolidated_metadata"]
    (store / "zarr.json").write_text(json.dumps(metadata))
    server = sim()
    with pytest.raises(FormatError, match=r"not consolidated.*consolidate_metadata"):
        open_web(server, "bucket/a.zarr")
    zarr.consolidate_metadata(store)
    assert open_web(server, "bucket/a.zarr").n_obs == 160


def test_an_address_without_a_store(root, sim):
    server = sim(root=root)
    with pytest.raises(StoreNotFoundError, match=r"no zarr\.json or \.zgroup at http://.*/bucket/nothing"):
        open_web(server, "bucket/nothing")
    server.stop()
    with pytest.raises(StoreError, match=r"cannot list http://.*is its server running"):
        open_web(server)


def test_an_object_that_is_missing(root, sim, tmp_path):
    shutil.copytree(root / "bucket", tmp_path / "bucket")
    (tmp_path / "bucket" / "two words" / "counts.zarr" / "X" / "data" / "c" / "1").unlink()
    dataset = open_web(sim())
    with pytest.raises((MissingObjectError, FormatError), match="X/data/c/1"):
        digest(loader(dataset))


def test_an_object_that_changes(root, sim, tmp_path):
    shutil.copytree(root / "bucket", tmp_path / "bucket")
    epochs = loader(open_web(sim()))
    digest(epochs)
    path = tmp_path / "bucket" / "two words" / "counts.zarr" / "X" / "data" / "c" / "1"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(StoreChangedError, match="X/data/c/1"):
        digest(epochs)


# ---- misbehaving web servers


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


class _Away(_Quiet):
    """Redirects everything."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"https://elsewhere.example{self.path}?signature=hush")
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Barred(_Quiet):
    """Requires a password; supports ranges."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        stored = path.read_bytes() if path.is_file() else b""
        first, _, last = self.headers.get("Range", f"bytes=0-{len(stored)}").removeprefix("bytes=").partition("-")
        part = stored[int(first) : int(last) + 1]
        allowed = self.headers.get("Authorization") == "Bearer open sesame"
        self.send_response(401 if not allowed else 404 if not stored else 206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part) if allowed else 0))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(stored)}")
        self.end_headers()
        self.wfile.write(part if allowed else b"")


@pytest.fixture
def static(root) -> Iterator[Callable[..., str]]:
    """Serves `root` with a handler class of http.server; returns the URL of the store or of another path."""
    with contextlib.ExitStack() as running:

        def start(handler: type, path: str = "/bucket/two%20words/counts.zarr") -> str:
            return running.enter_context(web_server(functools.partial(handler, directory=str(root)))) + path

        yield start


def test_a_server_without_ranges(static):
    with pytest.raises(StoreError, match=r"does not support byte ranges.*Use another server"):
        zl.open_dataset(static(_Quiet))


def test_a_server_that_redirects_nowhere(static):
    with pytest.raises(StoreError, match=r"error sending request .*lookup") as caught:
        zl.open_dataset(static(_Away))
    assert "hush" not in str(caught.value)


@pytest.mark.slow
def test_a_server_that_requires_credentials(static):
    url = static(_Barred)
    with pytest.raises(AccessDeniedError, match=r"401.*headers"):
        zl.open_dataset(url)
    dataset = zl.open_dataset(url, storage_options={"headers": {"Authorization": "Bearer open sesame"}})
    assert sum(len(minibatch.index) for minibatch in loader(dataset)) == 160
    assert "sesame" not in repr(dataset) + repr(dataset.store.location) + repr(loader(dataset))


LATER = {
    "ranges ignored": ({"kind": "ignore_range"}, ReadError, "X/"),
    "403": ({"kind": "status", "status": 403, "code": "AccessDenied"}, AccessDeniedError, "X/"),
    "redirect": ({"kind": "status", "status": 302, "code": "Found"}, StoreError, "X/.*redirect"),
    "404": ({"kind": "status", "status": 404, "code": "NoSuchKey"}, MissingObjectError, "X/"),
    "too few bytes": ({"kind": "short", "by": 1}, StoreError, "X/"),
    "stall": ({"kind": "stall", "after": 10}, DeadlineError, r"X/.*deadline_s=1\.5"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("fault", "error", "says"), LATER.values(), ids=LATER)
def test_a_server_that_fails_after_opening(root, sim, fault, error, says):
    server = sim(root=root)
    dataset = open_web(server)
    dataset.take([0])
    server.faults = [{"match": "X/(indices|data)/c/", **fault}]
    with pytest.raises(error, match=says):
        digest(loader(dataset, **({"deadline_s": 1.5} if error is DeadlineError else {})))


@pytest.mark.slow
def test_a_server_that_is_briefly_overloaded(root, sim):
    server = sim(root=root)
    server.faults = [{"kind": "status", "status": 503, "p": 0.3, "count": 30}]
    assert open_web(server).n_obs == 160
    server.faults = [{"kind": "status", "status": 503}]
    with pytest.raises(StoreError, match="503"):
        open_web(server)


# ---- writing


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.zarr", "https://host/a.zarr", "gs://bucket/a.zarr"])
def test_read_only_locations(url):
    with pytest.raises(OptionError, match="written to a local path or s3://"):
        Location(url=url).require_writable()


def test_convert_to_a_web_server_is_refused(root, sim, tmp_path):
    source = root / "tmp" / "source.h5ad"
    server = sim(root=root)
    with pytest.raises(OptionError, match="written to a local path or s3://"):
        zl.convert(source, f"{server.url}/bucket/new.zarr", progress=False)
    assert not {"PUT", "POST", "DELETE"} & server.stats().keys()


def test_verify_reads_a_web_store(root, sim):
    verified = zl.verify(f"{sim(root=root).url}/bucket/two words/counts.zarr", progress=False)
    assert (verified.problems, verified.rows) == ((), 160)


# ---- URLs


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param("ftp://host/a.zarr", "gs://, az://, abfs://, abfss://, hf://, http://", id="scheme"),
        pytest.param("http://", "http://HOST/PATH", id="no host"),
        pytest.param("gs://", "gs://BUCKET/KEY", id="no bucket"),
        pytest.param("https://host/a.zarr?token=hush#hush", "cannot have a fragment", id="query and fragment"),
        pytest.param("https://host/a.zarr#hush", "cannot have a fragment", id="fragment"),
        pytest.param("https://me:hush@host/a.zarr", "user and password", id="password"),
        pytest.param("s3://me:hush@bucket/a.zarr", "user and password", id="password of s3"),
    ],
)
def test_invalid_urls(url, says):
    with pytest.raises(OptionError, match=says) as caught:
        zl.open_dataset(url)
    assert "hush" not in str(caught.value)


def test_invalid_options():
    with pytest.raises(OptionError, match=r"no 'anon' in the storage_options of http://; there are: headers, query"):
        zl.open_dataset("http://host/a.zarr", storage_options={"anon": True, "auth": ("a", "b")})
    with pytest.raises(OptionError, match=r"with these storage_options: .*'no_such_option'"):
        zl.open_dataset("s3://bucket/a.zarr", storage_options={"key": "k", "secret": "s", "no_such_option": 1})
    with pytest.raises(OptionError, match="cannot contain a session"):
        zl.open_dataset("s3://bucket/a.zarr", storage_options={"session": object()})


# ---- gs://, against a minimal imitation of Google's servers


class _Google(_Quiet):
    """The parts of Google's XML API that reading needs; requires a token and a payer if the class has one."""

    protocol_version = "HTTP/1.1"
    token = payer = ""

    def do_POST(self) -> None:
        """Issues tokens."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, json.dumps({"access_token": self.token, "token_type": "Bearer", "expires_in": 3600}).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        bucket, _, key = address.path.lstrip("/").partition("/")
        folder, key = Path(self.directory, bucket), urllib.parse.unquote(key)
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(401, b"<Error><Code>AuthenticationRequired</Code></Error>")
        elif self.payer not in ("", self.headers.get("x-goog-user-project")):
            self._send(400, b"<Error><Message>Bucket is requester pays but no user project provided.</Message></Error>")
        elif not key:
            self._send(200, self._listing(folder, query.get("prefix", ""), query.get("delimiter", "")))
        elif not (folder / key).is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send_object((folder / key).read_bytes())

    @staticmethod
    def _etag(stored: bytes) -> str:
        return f'"{hashlib.md5(stored).hexdigest()}"'

    def _listing(self, folder: Path, prefix: str, delimiter: str) -> bytes:
        entries, groups = [], set()
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            below = name[len(prefix) :]
            if path.is_dir():  # the console makes an empty object for a folder
                name, stored = f"{name}/", b""
            else:
                stored = path.read_bytes()
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in below:
                groups.add(prefix + below.partition(delimiter)[0] + delimiter)
                continue
            facts = {"Key": html.escape(name), "Size": len(stored), "ETag": html.escape(self._etag(stored))}
            facts["LastModified"] = "2026-11-25T12:00:00.000Z"
            entries.append("".join(f"<{fact}>{value}</{fact}>" for fact, value in facts.items()))
        found = [f"<Contents>{entry}</Contents>" for entry in entries]
        found += [f"<CommonPrefixes><Prefix>{html.escape(each)}</Prefix></CommonPrefixes>" for each in sorted(groups)]
        return f"<ListBucketResult>{''.join(found)}</ListBucketResult>".encode()

    def _send_object(self, stored: bytes) -> None:
        fields = {"ETag": self._etag(stored), "Last-Modified": "Wed, 25 Nov 2026 12:00:00 GMT"}
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, stored, fields)
            return
        first, last = asked.removeprefix("bytes=").split("-")
        part = stored[int(first) : int(last) + 1]
        fields["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(stored)}"
        self._send(206, part, fields)

    def _send(self, status: int, body: bytes, fields: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(fields or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Signed(_Google):
    token = "a-token-of-google"


class _Paid(_Signed):
    payer = "our-project"


class _Expiring(_Google):
    """Issues tokens that expire soon. Those of an earlier day are refused."""

    day = 1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, json.dumps({"access_token": f"of day {self.day}", "expires_in": 1}).encode())

    def do_GET(self) -> None:
        type(self).token = f"of day {self.day}"
        super().do_GET()


class _Forbidden(_Google):
    def do_GET(self) -> None:
        self._send(403, b"<Error><Code>AccessDenied</Code></Error>")


GOOGLE = "gs://bucket/two words/counts.zarr"


def test_google_without_google_auth(monkeypatch):
    buckets._of_google.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore.auth.google", None)
    with pytest.raises(OptionError, match=r'pip install "zloader\[gs\]"'):
        zl.open_dataset("gs://bucket/a.zarr", storage_options={"endpoint_url": "http://127.0.0.1:9"})


def test_a_public_bucket_of_google(root, static):
    options = {"token": "anon", "endpoint_url": static(_Google, "")}
    dataset = zl.open_dataset(GOOGLE, storage_options=options)
    there = zl.open_dataset(root / "bucket" / "two words" / "counts.zarr")
    assert dataset.store.object_sizes() == there.store.object_sizes()
    assert digest(loader(dataset)) == digest(loader(there))
    with pytest.raises(StoreNotFoundError, match="gs://bucket/nothing"):
        zl.open_dataset("gs://bucket/nothing", storage_options=options)
    with pytest.raises(OptionError, match="written to a local path or s3://"):
        zl.convert(root / "tmp" / "source.h5ad", "gs://bucket/new.zarr", storage_options=options, progress=False)
    assert not (root / "bucket" / "new.zarr").exists()


@pytest.mark.parametrize("server", [_Signed, _Forbidden])
def test_a_bucket_of_google_that_is_not_public(static, server):
    options = {"token": "anon", "endpoint_url": static(server, "")}
    with pytest.raises(AccessDeniedError, match=r"(?s)not allowed to list gs://.*GOOGLE_APPLICATION_CREDENTIALS"):
        zl.open_dataset(GOOGLE, storage_options=options)


def key_file(folder: Path, address: str) -> str:
    """A file of default credentials, for which the server issues tokens."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    made = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key = {"type": "service_account", "client_email": "a@b", "private_key_id": "1", "private_key": made.decode()}
    (folder / "key.json").write_text(json.dumps(key | {"project_id": "p", "token_uri": f"{address}/token"}))
    return str(folder / "key.json")


@pytest.mark.slow
@pytest.mark.parametrize("server", [_Signed, _Paid])
def test_the_default_credentials_of_google(root, static, tmp_path, monkeypatch, server):
    pytest.importorskip("google.auth")
    address = static(server, "")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", key_file(tmp_path, address))
    options = {"endpoint_url": address, **({"requester_pays": server.payer} if server.payer else {})}
    found = Location(url=GOOGLE, storage_options=options).kind.credentials()
    assert found.startswith("endpoint_url, ")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in found
    shutil.copytree(root / "bucket", root / "changing", dirs_exist_ok=True)
    dataset = zl.open_dataset(GOOGLE.replace("bucket", "changing"), storage_options=options)
    assert digest(loader(dataset)) == digest(loader(zl.open_dataset(root / "bucket" / "two words" / "counts.zarr")))
    path = root / "changing" / "two words" / "counts.zarr" / "X" / "data" / "c" / "1"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(StoreChangedError, match="X/data/c/1"):
        digest(loader(dataset))
    path.unlink()
    with pytest.raises(MissingObjectError, match="X/data/c/1"):
        digest(loader(dataset))
    if server.payer:
        with pytest.raises(StoreError, match="Bucket is requester pays"):
            zl.open_dataset(GOOGLE, storage_options={"endpoint_url": address})
        named = {"endpoint_url": address, "requester_pays": True, "project": server.payer}
        assert zl.open_dataset(GOOGLE, storage_options=named).n_obs == 160


@pytest.mark.slow
def test_expired_credentials_of_google_are_renewed(static, tmp_path, monkeypatch):
    pytest.importorskip("google.auth")
    address = static(_Expiring, "")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", key_file(tmp_path, address))
    dataset = zl.open_dataset(GOOGLE, storage_options={"endpoint_url": address})
    wanted = digest(loader(dataset))
    monkeypatch.setattr(_Expiring, "day", 2)
    time.sleep(0.2)  # obstore uses a token for a tenth of a second without asking when it expires
    assert digest(loader(dataset)) == wanted


OF_GOOGLE = {
    "token": ({"token": "/path/to/key.json"}, "GOOGLE_APPLICATION_CREDENTIALS"),
    "endpoint": ({"token": "anon", "endpoint_url": "127.0.0.1:1"}, "endpoint_url of gs:// must have the form"),
    "unknown": ({"tokn": "anon"}, r"no 'tokn' in the storage_options of gs://. Did you mean 'token'"),
    "no project": ({"requester_pays": True}, "name the project that pays"),
}


@pytest.mark.parametrize(("options", "says"), OF_GOOGLE.values(), ids=OF_GOOGLE)
def test_invalid_options_of_google(options, says):
    with pytest.raises(OptionError, match=says):
        zl.open_dataset("gs://bucket/c.zarr", storage_options=options)


# ---- s3:// with requester pays


class _PaidS3(http.server.BaseHTTPRequestHandler):
    """Forwards what says that the requester pays to a server of S3, and refuses the rest, as AWS does."""

    protocol_version = "HTTP/1.1"
    server_url = ""

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.headers.get("x-amz-request-payer") != "requester":
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        fields = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        request = urllib.request.Request(self.server_url + self.path, headers=fields, method=self.command)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                    self.send_header(name, value)
            size = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            self.wfile.write(body)


@pytest.mark.slow
def test_every_request_says_that_the_requester_pays(root, sim, tmp_path, monkeypatch):
    monkeypatch.setattr(_PaidS3, "server_url", sim(root=root).url)
    url = "s3://bucket/two words/counts.zarr"
    with web_server(_PaidS3) as address:
        options = {"key": "k", "secret": "s", "endpoint_url": address, "requester_pays": True}
        wanted = digest(loader(zl.open_dataset(root / "bucket" / "two words" / "counts.zarr")))
        assert digest(loader(zl.open_dataset(url, storage_options=options))) == wanted
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        found = {"endpoint_url": address, "requester_pays": True}
        assert digest(loader(zl.open_dataset(url, storage_options=found))) == wanted
        zl.convert(url, tmp_path / "a.zarr", source_options=options, progress=False)
        with pytest.raises(AccessDeniedError, match=r"not allowed to list s3://"):
            zl.open_dataset(url, storage_options=options | {"requester_pays": False})


class _Regions(http.server.BaseHTTPRequestHandler):
    """Says the region of a bucket, as AWS does, to anyone."""

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.send_response(403)
        if self.path == "/bucket":
            self.send_header("x-amz-bucket-region", "eu-west-1")
        self.end_headers()


def test_the_region_of_a_paid_bucket(monkeypatch):
    from zloader.access import s3

    with web_server(_Regions) as address:
        monkeypatch.setattr(s3, "_AWS", address)
        assert s3.bucket_region("bucket") == "eu-west-1"
        with pytest.raises(StoreError, match="the region of bucket other is unknown"):
            s3.bucket_region("other")


# ---- addresses that are signed, and keys with any characters


class _Moving(_Barred):
    """Redirects each request to an address with another signature. Refuses HEAD, and sends no ETag."""

    signatures = itertools.count()

    def do_HEAD(self) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if query:
            assert query.startswith("Signature=a%2Fb%2B")
            self.path = path
            self.headers["Authorization"] = "Bearer open sesame"
            super().do_GET()
            return
        self.send_response(302)
        self.send_header("Location", f"{path}?Signature=a%2Fb%2B{next(self.signatures)}")
        self.send_header("Content-Length", "0")
        self.end_headers()


ANY = "Größe +1 %2F #2 ?&=~"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store and a file whose names, and those of an obs column, hold any characters."""
    folder = tmp_path_factory.mktemp("odd")
    adata = counts(60, 21, seed=3)
    adata.obs[ANY.replace("/", "")] = np.arange(60, dtype=np.float32)
    write_store(adata, folder / ANY / "a+b%.zarr", folder / "tmp")
    shutil.copy(folder / "tmp" / "source.h5ad", folder / ANY / "a+b%.h5ad")
    return folder


@pytest.mark.parametrize("handler", [_Barred, _Moving])
@pytest.mark.parametrize("name", ["a+b%.zarr", "a+b%.h5ad"])
def test_names_with_any_characters(odd, handler, name):
    quoted = urllib.parse.quote(f"/{ANY}/{name}")
    options = {"headers": {"Authorization": "Bearer open sesame"}}
    with web_server(functools.partial(handler, directory=str(odd))) as address:
        dataset = zl.open_dataset(address + quoted, storage_options=options)
        there = zl.open_dataset(odd / ANY / name)
        column = ANY.replace("/", "")
        epochs = [zl.Loader(each, batch_size=8, obs=[column]) for each in (dataset, there)]
        assert digest(epochs[0]) == digest(epochs[1])


class _Querying(_Moving):
    """Answers a request whose address is signed, and no other."""

    def end_headers(self) -> None:
        self.send_header("ETag", '"tag"')
        super().end_headers()

    def do_GET(self) -> None:
        if self.headers.get("If-Match") not in (None, '"tag"'):
            self.send_error(412)
        elif "?" in self.path:
            super().do_GET()
        else:
            self.send_error(403)


@pytest.mark.parametrize("name", ["a+b%.zarr", "a+b%.h5ad"])
def test_the_query_of_an_address_is_sent_with_each_request(odd, tmp_path, name, caplog):
    """As of addresses that are signed, and of tokens for a container of Azure. They are shown nowhere."""
    (tmp_path / "web").mkdir()
    quoted, shown = urllib.parse.quote(f"/{ANY}/{name}"), ""
    with web_server(functools.partial(_Querying, directory=str(odd))) as address:
        there = zl.open_dataset(odd / ANY / name)
        for number in range(2):  # another signature has the same mirror
            url = f"{address}{quoted}?Signature=a%2Fb%2Bhush{number}"
            dataset = zl.open_dataset(url, cache=tmp_path / "cache")
            assert digest(zl.Loader(dataset, batch_size=8)) == digest(zl.Loader(there, batch_size=8))
            shown += f"{dataset!r} {dataset.url} {dataset.cache_statistics()}"
        assert len({path.parent for path in (tmp_path / "cache").rglob("*.rows")}) == 1
        with pytest.raises(AccessDeniedError, match="expired") as caught:
            zl.open_dataset(f"{address}{quoted}")
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert "hush" not in f"{shown} {caught.value} {caplog.text}"
    assert b"hush" not in kept


SECRET: dict[str, tuple[str, dict[str, Any]]] = {
    "query": ("http://127.0.0.1:9/a.zarr?sig=hush", {}),
    "headers": ("http://127.0.0.1:9/a.zarr", {"headers": {"Authorization": "Bearer hush\n"}}),
    "query as a dict": ("http://127.0.0.1:9/a.zarr", {"query": {"sig": "hush"}}),
    "endpoint": ("gs://bucket/a.zarr", {"token": "anon", "endpoint_url": "http://me:hush@127.0.0.1:9"}),
    "s3": ("s3://bucket/a.zarr", {"key": "k", "secret": "hush", "endpoint_url": "http://me:hush@127.0.0.1:9"}),
    "azure": ("az://cells/a", {"account_name": "a", "sas_token": "hush%%", "account_host": "http://127.0.0.1:9"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("url", "options"), SECRET.values(), ids=SECRET)
def test_tracebacks_have_no_secrets(url, options):
    with pytest.raises((OptionError, StoreError)) as caught:
        zl.open_dataset(url, storage_options=options)
    assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_files_that_only_a_query_tells_apart():
    places = [location_of(f"https://host/get?{query}", None) for query in ("id=5", "id=6", "id=5&sig=hush&se=9&sv=1")]
    first, other, signed = (place.origin for place in places)
    assert first == signed != other
    assert "hush" not in repr(places)


def test_a_bucket_of_google_with_any_characters(odd, tmp_path):
    (tmp_path / "bucket").symlink_to(odd)
    options = {"token": "anon"}
    with web_server(functools.partial(_Google, directory=str(tmp_path))) as address:
        options["endpoint_url"] = address
        there = zl.open_dataset(odd / ANY / "a+b%.zarr")
        for url in (f"gs://bucket/{ANY}/a+b%.zarr", "gs://bucket/*/*.zarr"):
            dataset = zl.open_dataset(url, storage_options=options)
            assert digest(zl.Loader(dataset, batch_size=8)) == digest(zl.Loader(there, batch_size=8))
