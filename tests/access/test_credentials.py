"""Credentials from any source have the same effect on the listing and on the reads, and are never exposed."""

from __future__ import annotations

import contextlib
import gc
import http.server
import json
import logging
import os
import pickle
import re
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import counts, digest, web_server, write_store

import zloader as zl
from benchmarks.harness.s3 import Sim
from zloader.access.location import Location
from zloader.access.s3 import s3_access
from zloader.common.errors import AccessDeniedError, StoreError
from zloader.reading.tensorstore_reader import Credentials, kvstore_spec

pytestmark = pytest.mark.any_version

ADATA = counts(120, 31, seed=5)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that contains `atlas/counts.zarr`."""
    folder = tmp_path_factory.mktemp("bucket")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder / "tmp")
    return folder


@pytest.fixture
def url(bucket, s3) -> str:
    """The same store on a server that checks signatures."""
    location = Location(url=s3.url("counts.zarr"), storage_options=s3.storage_options)
    location.filesystem().put(f"{bucket}/atlas/counts.zarr/", f"{location.path}/", recursive=True)
    return location.url


class Recording(Sim):
    """Records the headers of requests; does not check signatures."""

    def __init__(self, root: Path) -> None:
        self.heads: list[dict[str, str]] = []
        super().__init__(root=root)

    def _begin(self, connection: Any, request: Any, *rest: Any) -> float:
        self.heads.append(dict(request.fields))
        return super()._begin(connection, request, *rest)


@pytest.fixture(scope="module")
def recording(bucket) -> Iterator[Recording]:
    """One server for all tests: creating an s3fs client takes 0.5 s, and equal options reuse the client."""
    with Recording(bucket) as server:
        yield server


@pytest.fixture
def server(recording) -> Recording:
    recording.faults = []
    return recording


def endpoint(server: Sim) -> dict[str, str]:
    return {"endpoint_url": server.url}


def open_loader(url: str, storage_options: dict[str, Any]) -> zl.Loader:
    dataset = zl.open_dataset(url, storage_options=storage_options)
    return zl.Loader(dataset, batch_size=16, fetch_factor=2, obs=["donor"])


# ---- every source of credentials


def options_only(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    return dict(s3.storage_options)


def username_and_password(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    return {"username": key, "password": secret, "endpoint_url": s3.endpoint_url}


def all_in_client_kwargs(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    client = {"endpoint_url": s3.endpoint_url, "region_name": "us-east-1"}
    return {"client_kwargs": client | {"aws_access_key_id": key, "aws_secret_access_key": secret}}


def variables(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    return {}


def write_profiles(s3, monkeypatch, folder: Path, *, name: str) -> None:
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    (folder / "credentials").write_text(f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    section = name if name == "default" else f"profile {name}"
    (folder / "config").write_text(f"[{section}]\nendpoint_url = {s3.endpoint_url}\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))


def default_profile(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    write_profiles(s3, monkeypatch, tmp_path, name="default")
    return {}


def profile_variable(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    write_profiles(s3, monkeypatch, tmp_path, name="lab")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    return {}


def profile_option(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    write_profiles(s3, monkeypatch, tmp_path, name="lab")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")  # an explicit profile takes precedence over the variables
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "else")
    return {"profile": "lab"}


def services_of_a_profile(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    write_profiles(s3, monkeypatch, tmp_path, name="lab")
    (tmp_path / "config").write_text(
        f"[profile lab]\nservices = mine\nendpoint_url = http://127.0.0.1:9\n"
        f"[services mine]\ns3 =\n  endpoint_url = {s3.endpoint_url}\n"
    )
    return {"profile": "lab"}


def credential_process(s3, monkeypatch, tmp_path) -> dict[str, Any]:
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    answer = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Expiration": "2999-01-01T00:00:00Z"}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    profile = tmp_path.name  # s3fs caches the output of the process until it expires
    (tmp_path / "config").write_text(f"[profile {profile}]\ncredential_process = cat {tmp_path}/answer.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return {"profile": profile, "endpoint_url": s3.endpoint_url}


FORMS = [
    options_only,
    username_and_password,
    all_in_client_kwargs,
    variables,
    default_profile,
    profile_variable,
    profile_option,
    services_of_a_profile,
    credential_process,
]


@pytest.mark.every(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_source_works_for_the_listing_and_the_reads(url, s3, monkeypatch, tmp_path, form):
    loader = open_loader(url, form(s3, monkeypatch, tmp_path))
    assert sum(len(minibatch.index) for minibatch in loader) == 120


@pytest.mark.every(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_source_with_a_wrong_secret_is_denied_at_once(url, s3, monkeypatch, tmp_path, form):
    @dataclass
    class Wrong:
        storage_options: dict[str, Any]
        endpoint_url: str

    wrong = Wrong({**s3.storage_options, "secret": "wrong-but-secret"}, s3.endpoint_url)
    options = form(wrong, monkeypatch, tmp_path)
    with pytest.raises(AccessDeniedError, match="not allowed to list s3://") as caught:
        zl.open_dataset(url, storage_options=options)
    assert "wrong-but-secret" not in "".join(traceback.format_exception(caught.value))


# ---- the requests of both clients


@dataclass
class Sent:
    """The headers of requests, by the client that sent them."""

    listing: list[dict[str, str]]
    reads: list[dict[str, str]]


def recorded(server: Recording, options: dict[str, Any]) -> Sent:
    """Opens and reads the store with some options; returns the requests."""
    server.heads.clear()
    loader = open_loader("s3://atlas/counts.zarr", options | endpoint(server))
    assert sum(len(minibatch.index) for minibatch in loader) == 120
    reads = [head for head in server.heads if head["user-agent"].startswith("tensorstore")]
    return Sent(listing=[head for head in server.heads if head not in reads], reads=reads)


def signed_with(heads: list[dict[str, str]]) -> set[tuple[str, str, str | None]]:
    """Key, region and session token in the signatures of requests."""
    found = (re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3/", head["authorization"]) for head in heads)
    return {(match[1], match[2], head.get("x-amz-security-token")) for match, head in zip(found, heads, strict=True)}


def test_requests_to_a_public_bucket_are_unsigned(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "with a secret")
    sent = recorded(server, {"anon": True})
    assert sent.listing
    assert sent.reads
    assert not any("authorization" in head for head in sent.listing + sent.reads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        pytest.param({"key": "K1", "secret": "s"}, {}, ("K1", "us-east-1", None), id="no region"),
        pytest.param({"key": "K2", "secret": "s", "token": "T2"}, {}, ("K2", "us-east-1", "T2"), id="token"),
        pytest.param(
            {"key": "K3", "secret": "s", "client_kwargs": {"region_name": "eu-west-3"}},
            {"AWS_DEFAULT_REGION": "ap-east-1"},
            ("K3", "eu-west-3", None),
            id="region option",
        ),
        pytest.param(
            {"client_kwargs": {"aws_access_key_id": "K4", "aws_secret_access_key": "s", "aws_session_token": "T4"}},
            {"AWS_DEFAULT_REGION": "eu-south-1"},
            ("K4", "eu-south-1", "T4"),
            id="client_kwargs",
        ),
        pytest.param(
            {},
            {
                "AWS_ACCESS_KEY_ID": "K5",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_SESSION_TOKEN": "T5",
                "AWS_REGION": "eu-north-1",
                "AWS_DEFAULT_REGION": "sa-east-1",
            },
            ("K5", "eu-north-1", "T5"),
            id="variables",
        ),
        pytest.param(
            {"key": "K6", "secret": "s"},
            {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "T6"},
            ("K6", "us-east-1", None),
            id="options before variables",
        ),
    ],
)
def test_both_clients_sign_alike(server, monkeypatch, options, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sent = recorded(server, options)
    assert signed_with(sent.listing) == {expected}
    assert signed_with(sent.reads) == {expected}


def test_both_clients_sign_alike_with_a_profile(server, monkeypatch, tmp_path):
    lines = "[lab]\naws_access_key_id = K7\naws_secret_access_key = s\naws_session_token = T7\n"
    (tmp_path / "credentials").write_text(lines)
    (tmp_path / "config").write_text("[profile lab]\nregion = ca-west-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    sent = recorded(server, {"profile": "lab"})
    assert signed_with(sent.listing) == signed_with(sent.reads) == {("K7", "ca-west-1", "T7")}


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata service of a machine with a role; also serves as that of a container."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_PUT(self) -> None:
        self._send(b"a-token", {"x-aws-ec2-metadata-token-ttl-seconds": "600"})

    def do_GET(self) -> None:
        role = {"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "K8", "SecretAccessKey": "s", "Token": "T8"}
        role |= {"LastUpdated": "2020-01-01T00:00:00Z", "Expiration": "2999-01-01T00:00:00Z"}
        self._send(b"the-role" if self.path.endswith("/security-credentials/") else json.dumps(role).encode(), {})

    def _send(self, body: bytes, fields: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**fields, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def metadata_service() -> Iterator[str]:
    with web_server(_Metadata) as url:
        yield f"{url}/"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["machine", "container"])
def test_both_clients_sign_alike_with_a_role(server, monkeypatch, metadata_service, kind):
    if kind == "machine":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata_service)
    else:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{metadata_service}container")
    sent = recorded(server, {})
    assert signed_with(sent.listing) == signed_with(sent.reads) == {("K8", "us-east-1", "T8")}


# ---- missing and expired credentials


def test_missing_credentials_raise_at_once(server):
    with pytest.raises(AccessDeniedError, match=r"no credentials for S3.*anon=True.*AWS_ACCESS_KEY_ID"):
        zl.open_dataset("s3://atlas/counts.zarr", storage_options=endpoint(server))


@pytest.mark.slow
def test_no_credentials_and_a_metadata_service_that_never_answers(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        with pytest.raises(AccessDeniedError, match="no credentials for S3"):
            zl.open_dataset("s3://atlas/counts.zarr", storage_options=endpoint(server))
        silent.setblocking(False)
        requests = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                requests += 1
        assert requests == 2  # from botocore, which waits one second each; TensorStore would add more


def test_a_key_without_a_secret(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K9")
    with pytest.raises(AccessDeniedError, match="Partial credentials"):
        zl.open_dataset("s3://atlas/counts.zarr")


def test_a_profile_that_does_not_exist():
    with pytest.raises(AccessDeniedError, match="nobody"):
        zl.open_dataset("s3://atlas/counts.zarr", storage_options={"profile": "nobody"})


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken")])
def test_credentials_that_expire_during_training(server, status, code):
    loader = open_loader("s3://atlas/counts.zarr", {"key": "K", "secret": "hush", **endpoint(server)})
    digest(loader)
    server.faults = [{"kind": "status", "status": status, "code": code, "message": "The token has expired."}]
    with pytest.raises(AccessDeniedError, match=r"reading X/\w+/c/\d+") as caught:
        digest(loader)
    assert "hush" not in "".join(traceback.format_exception(caught.value))


# ---- secrets

SECRETS = {"key": "key-5b1d", "secret": "secret-77aa", "token": "token-90cd"}
SOURCES = ["storage_options", "client_kwargs", "variables", "profile"]


def hide(source: str, monkeypatch, tmp_path) -> dict[str, Any]:
    """Puts the secrets into a source of credentials; returns the storage_options."""
    names = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
    if source == "storage_options":
        return dict(SECRETS)
    if source == "client_kwargs":
        return {"client_kwargs": {names[name]: value for name, value in SECRETS.items()}}
    if source == "variables":
        for name, value in SECRETS.items():
            monkeypatch.setenv(names[name].upper(), value)
        return {}
    lines = "\n".join(["[lab]", *(f"{names[name]} = {value}" for name, value in SECRETS.items())])
    (tmp_path / "credentials").write_text(lines)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return {"profile": "lab"}


def leaks(text: str) -> list[str]:
    return [name for name, value in SECRETS.items() if value in text]


@pytest.mark.every(2)
@pytest.mark.parametrize("source", SOURCES)
def test_secrets_are_in_no_repr_and_only_in_pickles_that_need_them(server, monkeypatch, tmp_path, source):
    options = hide(source, monkeypatch, tmp_path) | endpoint(server)
    loader = open_loader("s3://atlas/counts.zarr", options)
    digest(loader)
    shown = [
        loader,
        loader.dataset,
        loader.dataset.store.location,
        loader.options,
        loader.statistics(),
        s3_access(options),
    ]
    for thing in shown:
        assert not leaks(repr(thing) + str(thing))
    assert not leaks(pickle.dumps(loader.statistics()).decode("latin-1"))
    needed = pickle.dumps(loader.dataset).decode("latin-1")
    assert leaks(needed) == (list(SECRETS) if source in ("storage_options", "client_kwargs") else [])


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_secrets_are_in_no_error(server, monkeypatch, tmp_path, source):
    options = hide(source, monkeypatch, tmp_path) | endpoint(server)
    refusal = {"kind": "status", "status": 403, "code": "AccessDenied", "method": "*"}
    loader = open_loader("s3://atlas/counts.zarr", options)
    loader.dataset.store.offsets(loader.dataset.store.matrix("X")).load()
    server.faults = [{**refusal, "match": "X/"}]
    with pytest.raises(AccessDeniedError) as while_reading:
        digest(loader)
    server.faults = [refusal]
    with pytest.raises(AccessDeniedError) as while_opening:
        zl.open_dataset("s3://atlas/counts.zarr", storage_options=options)
    nowhere = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(StoreError) as without_server:
        zl.open_dataset("s3://atlas/counts.zarr", storage_options=options | nowhere)
    for caught in (while_reading, while_opening, without_server):
        assert not leaks("".join(traceback.format_exception(caught.value)))


# At level DEBUG, botocore logs the headers that it sends, which include the key and the session token.
LOGS_HEADERS = ("botocore", "aiobotocore")


@pytest.mark.parametrize("source", SOURCES)
def test_secrets_are_in_no_log_record(server, monkeypatch, tmp_path, source, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    options = hide(source, monkeypatch, tmp_path) | endpoint(server)
    digest(open_loader("s3://atlas/counts.zarr", options))
    assert any(record.name.startswith("botocore") for record in caplog.records)
    for record in caplog.records:
        found = leaks(record.getMessage())
        assert "secret" not in found
        assert not found or record.name.startswith(LOGS_HEADERS)
    printed = capfd.readouterr()
    assert not leaks(printed.out + printed.err)


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:  # the descriptor of this listing itself
            continue
    return found


def files(found: dict[str, str]) -> set[tuple[str, str]]:
    return {(name, target) for name, target in found.items() if not target.startswith("socket:")}


@pytest.mark.slow
def test_the_in_memory_credentials_file_is_closed_after_each_epoch(server):
    loader = open_loader("s3://atlas/counts.zarr", {**SECRETS, **endpoint(server)})
    digest(loader)
    minibatches = iter(loader)
    next(minibatches)
    del minibatches  # an epoch that was abandoned
    gc.collect()
    assert not [target for target in descriptors().values() if "zloader-credentials" in target]
    before = descriptors()
    for _ in range(6):
        digest(loader)
    gc.collect()
    after = descriptors()
    assert not files(after) - files(before)
    assert len(after) < len(before) + 16  # curl keeps connections open for a while


def test_the_in_memory_credentials_file_is_private_to_the_process():
    gc.collect()  # files left by other tests
    credentials = Credentials()
    access = s3_access({**SECRETS, "endpoint_url": "http://127.0.0.1:9"})
    path = credentials.spec(access)["credentials_file"]
    assert "secret-77aa" in Path(path).read_text()
    assert not os.get_inheritable(int(Path(path).name))
    credentials.spec(access)  # closes the previous file
    assert sum("zloader-credentials" in target for target in descriptors().values()) == 1
    del credentials
    assert not [target for target in descriptors().values() if "zloader-credentials" in target]


def test_the_spec_for_tensorstore_is_minimal(monkeypatch):
    plain = kvstore_spec(Location(url="s3://bucket/a b", storage_options={"anon": True}), Credentials())
    assert (plain["bucket"], plain["path"], plain["aws_credentials"]) == ("bucket", "a b/", {"type": "anonymous"})
    assert not plain.keys() & {"endpoint", "aws_region"}  # TensorStore looks up the bucket's region
    signed = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}}
    spec = kvstore_spec(Location(url="s3://bucket", storage_options=signed), Credentials())
    assert (spec["path"], spec["aws_region"]) == ("", "eu-west-1")
    assert "k" not in json.dumps(spec["aws_credentials"]["profile"])


def test_configured_endpoints_can_be_ignored(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert s3_access({"anon": True}).endpoint is None
