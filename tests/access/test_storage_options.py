"""storage_options that a client does not have are refused, and so are URLs without their slashes."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest

import zloader as zl
from zloader.access.location import Location
from zloader.access.s3 import s3_access
from zloader.common.errors import OptionError, ZloaderError

pytestmark = pytest.mark.any_version

KEYS = {"key": "K", "secret": "sesame"}
NOWHERE = {"endpoint_url": "http://127.0.0.1:9"}

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "secret_key": ({"key": "K", "secret_key": "sesame"}, "with these storage_options: .*'secret_key'"),
    "access_key": ({"access_key": "K", "secret": "sesame"}, "found no credentials for S3"),
    "endpoint": (KEYS | {"endpoint": "http://host"}, "with these storage_options: .*'endpoint'"),
    "asynchronous": (KEYS | {"asynchronous": True}, "with these storage_options: .*'asynchronous'"),
    "in client_kwargs": (KEYS | {"client_kwargs": {"regoin": "x"}}, "with these storage_options: .*'regoin'"),
    "client_kwargs": (
        KEYS | {"client_kwargs": ["sesame"]},
        "client_kwargs in storage_options must be a dict, not list",
    ),
    "config_kwargs": (KEYS | {"config_kwargs": {"regoin": "x"}}, "with these storage_options: .*'regoin'"),
    "retries": (KEYS | {"config_kwargs": {"retries": "x"}}, "with these storage_options: "),
    "region": (KEYS | {"client_kwargs": {"region_name": 5}}, "with these storage_options: "),
    "loop": (KEYS | {"loop": True}, "with these storage_options: "),
    "no scheme": (KEYS | {"endpoint_url": "host:8333"}, "must have the form http://HOST:PORT .* not 'host:8333'"),
    "no host": (KEYS | {"endpoint_url": "http://"}, "must have the form"),
    "no port": (KEYS | {"endpoint_url": "http://host:99999"}, "must have the form"),
    "a number": (KEYS | {"endpoint_url": 9}, "must have the form http://HOST:PORT or https://HOST, not '9'"),
    "password": (KEYS | {"endpoint_url": "ftp://me:sesame@host"}, "must have the form .* not 'host'"),
}


@pytest.mark.parametrize(("options", "says"), MISTAKES.values(), ids=MISTAKES)
def test_options_that_s3_does_not_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ZloaderError, match=says) as caught:
        zl.open_dataset("s3://bucket/a.zarr", storage_options=NOWHERE | options)
    assert "sesame" not in "".join(traceback.format_exception(caught.value))


VALID: dict[str, Any] = {
    **KEYS,
    "token": "T",
    "anon": False,
    "profile": None,
    "use_ssl": False,
    "requester_pays": True,
    "default_block_size": 1 << 20,
    "default_fill_cache": False,
    "default_cache_type": "none",
    "version_aware": False,
    "cache_regions": False,
    "max_concurrency": 4,
    "fixed_upload_size": False,
    "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
    "config_kwargs": {"s3": {"addressing_style": "path"}, "max_pool_connections": 5},
    "client_kwargs": {"region_name": "eu-west-1", "verify": False, "use_ssl": True, "api_version": None},
    "use_listings_cache": True,
    "listings_expiry_time": 5,
    "max_paths": 10,
    "skip_instance_cache": True,
}


@pytest.mark.parametrize("name", VALID)
def test_options_of_s3fs_are_accepted(name: str) -> None:
    options = KEYS | {name: VALID[name]}
    assert s3_access(options).secrets["key"] == "K"
    assert s3_access(pickle.loads(pickle.dumps(options))).options["secret"] == "sesame"


def test_aliases_of_s3fs_are_accepted() -> None:
    assert s3_access({"username": "K", "password": "sesame"}).options["key"] == "K"


def test_options_that_google_does_not_have() -> None:
    for name in ("projet", "use_listings_cache"):
        with pytest.raises(OptionError, match=f"no '{name}' in the storage_options of gs://"):
            Location(url="gs://bucket/a", storage_options={"token": "anon", name: "sesame"}).kind.credentials()
    Location(url="gs://bucket/a", storage_options={"token": "anon", "project": "p"}).kind.credentials()


SLASHES = {
    "s3:/bucket/a.zarr": "s3://bucket/a.zarr",
    "s3:bucket/a.zarr": "s3://bucket/a.zarr",
    "S3:/bucket/a.zarr": "S3://bucket/a.zarr",
    "gs:/bucket/a.zarr": "gs://bucket/a.zarr",
    "https:/host/a.zarr": "https://host/a.zarr",
    "http:host/a.zarr?sesame": "http://host/a.zarr",
    "http:/me:sesame@host/a.zarr": "http://host/a.zarr",
    "file:/tmp/a.zarr": "file:///tmp/a.zarr",
}


@pytest.mark.parametrize("url", SLASHES)
def test_a_url_without_its_slashes(url: str) -> None:
    with pytest.raises(OptionError, match=f"a slash is missing in a URL: write '{SLASHES[url]}'") as caught:
        zl.open_dataset(url)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("name", ["s3", "s3.zarr", "a:b.zarr", "file.zarr"])
def test_names_that_resemble_urls_are_local_paths(tmp_path, name: str) -> None:
    with pytest.raises(ZloaderError, match=f"no such directory: {tmp_path}/{name}"):
        zl.open_dataset(tmp_path / name)


def test_a_glob_that_matches_nothing(tmp_path, s3) -> None:
    with pytest.raises(ZloaderError, match=r"nothing matches .*\*\.zarr"):
        zl.open_dataset(tmp_path / "*.zarr")
    with pytest.raises(ZloaderError, match=r"nothing matches s3://"):
        zl.open_dataset(s3.url("*.zarr"), storage_options=s3.storage_options)
