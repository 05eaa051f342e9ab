"""storage_options that S3 does not have are refused, and the error names the option that was probably meant."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import zloader as zl
from zloader.access.location import Location
from zloader.access.s3 import s3_access
from zloader.common.errors import OptionError, ZloaderError

pytestmark = pytest.mark.any_version

KEYS = {"key": "K", "secret": "sesame"}
NOWHERE = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "secret_key": ({"key": "K", "secret_key": "sesame"}, r"no 'secret_key' in .*s3://. Did you mean 'secret'\?"),
    "access_key": ({"access_key": "K", "secret": "sesame"}, r"Did you mean 'key'\?"),
    "aws_secret_access_key": ({"aws_secret_access_key": "sesame"}, r"Did you mean 'secret'\?"),
    "session_token": (KEYS | {"session_token": "sesame"}, r"Did you mean 'token'\?"),
    "endpoint": (KEYS | {"endpoint": "http://host"}, r"Did you mean 'endpoint_url'\?"),
    "region": (KEYS | {"region": "eu-west-1"}, r'Did you mean "client_kwargs": \{"region_name": \.\.\.\}\?'),
    "spelling": (KEYS | {"endpiont_url": "http://host"}, r"Did you mean 'endpoint_url'\?"),
    "case": ({"Key": "K", "secret": "sesame"}, r"Did you mean 'key'\?"),
    "nothing near": (KEYS | {"colour": "sesame"}, "no 'colour' in .*; there are: anon, cache_regions, client_kwargs"),
    "not a string": ({5: "sesame"}, "no 5 in .*; there are: anon"),
    "asynchronous": (KEYS | {"asynchronous": True}, "no 'asynchronous' in"),
    "in client_kwargs": (KEYS | {"client_kwargs": {"regoin": "x"}}, r"no 'regoin' in client_kwargs.* 'region_name'\?"),
    "client_kwargs": (
        KEYS | {"client_kwargs": ["sesame"]},
        "client_kwargs in storage_options must be a dict, not list",
    ),
    "config_kwargs": (KEYS | {"config_kwargs": "sesame"}, "config_kwargs in storage_options must be a dict, not str"),
    "no scheme": (KEYS | {"endpoint_url": "host:8333"}, "must have the form http://HOST:PORT .* not 'host:8333'"),
    "no host": (KEYS | {"endpoint_url": "http://"}, "must have the form"),
    "no port": (KEYS | {"endpoint_url": "http://host:99999"}, "must have the form"),
    "a number": (KEYS | {"endpoint_url": 9}, "must have the form http://HOST:PORT or https://HOST, not '9'"),
    "password": (KEYS | {"endpoint_url": "ftp://me:sesame@host"}, "must have the form .* not 'host'"),
}


@pytest.mark.parametrize(("options", "says"), MISTAKES.values(), ids=MISTAKES)
def test_options_that_s3_does_not_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        zl.open_dataset("s3://bucket/a.zarr", storage_options=options)
    assert "sesame" not in str(caught.value)


# What aiobotocore finds wrong only when it connects.
LATE: dict[str, dict[str, Any]] = {
    "config_kwargs": {"config_kwargs": {"regoin": "x"}},
    "retries": {"config_kwargs": {"retries": "x"}},
    "region": {"client_kwargs": {"region_name": 5}},
    "loop": {"loop": True},
    "max_concurrency": {"max_concurrency": "x"},
}


@pytest.mark.parametrize("options", LATE.values(), ids=LATE)
def test_values_that_the_client_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"s3://bucket/a\.zarr with these storage_options: ") as caught:
        zl.open_dataset("s3://bucket/a.zarr", storage_options=KEYS | NOWHERE | options)
    assert caught.value.__cause__ is not None


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
            Location(url="gs://bucket/a", storage_options={"token": "anon", name: "sesame"}).filesystem()
    Location(url="gs://bucket/a", storage_options={"token": "anon", "project": "p"}).filesystem()


SLASHES = {
    "s3:/bucket/a.zarr": "s3://bucket/a.zarr",
    "s3:bucket/a.zarr": "s3://bucket/a.zarr",
    "S3:/bucket/a.zarr": "S3://bucket/a.zarr",
    "s3:": "s3://BUCKET/KEY",
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
