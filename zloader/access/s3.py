"""s3:// URLs: s3fs lists and writes, TensorStore reads, and obstore reads buckets whose requester pays.

TensorStore 0.1.86 names the header x-amz-requester-payer, which AWS ignores, instead of x-amz-request-payer. s3fs names
it correctly. The clients take half a second to import, so functions import them.

botocore, the library below s3fs, resolves endpoint, region and credentials once, from `storage_options`, AWS_*
variables, profiles and roles, and all clients receive the result. So they always agree, and missing credentials raise
an error before the first read. On its own, TensorStore would query the instance metadata service, which takes 4.5 s if
nothing answers, and then send unsigned requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from zloader.access.object_files import kept_store, read_once
from zloader.access.scheme import ReadRange, Scheme, require_endpoint
from zloader.common.errors import AccessDeniedError, OptionError, StoreError
from zloader.common.locks import cached_property

_AWS = "https://s3.amazonaws.com"
_DEADLINE_S = 20.0
_KEPT = timedelta(minutes=5)  # then botocore is asked again; it renews what expires in less than 10 minutes
# Options that s3fs accepts under several names: the option, its name in client_kwargs, and its alias.
_NAMES = (
    ("key", "aws_access_key_id", "username"),
    ("secret", "aws_secret_access_key", "password"),
    ("token", "aws_session_token", None),
    ("endpoint_url", "endpoint_url", None),
)
# TensorStore finds and renews these kinds of credentials itself: botocore's name of each, and TensorStore's.
_RENEWED = {"iam-role": "imds", "container-role": "ecs", "assume-role-with-web-identity": "default"}
# fsspec drops its file systems in a forked process. Without another reference, the fork would close their connections.
# Both processes share one epoll, so the parent would then wait forever for answers on them.
_FILES: dict[int, Any] = {}


class S3(Scheme):
    """s3:// URLs."""

    is_writable = True
    advice = "the key and secret in storage_options or the AWS_* variables"

    @cached_property
    def files(self) -> Any:
        from s3fs import S3FileSystem

        found = S3FileSystem(asynchronous=False, **{"use_listings_cache": False, **s3_access(self.options).options})
        return _FILES.setdefault(id(found), found)

    def read_range(self) -> ReadRange | None:
        if not self.options.get("requester_pays"):
            return None
        with self.location.translated("open"):
            store = self._paid_bucket()

        async def read(key: str, start: int, stop: int, tag: str) -> tuple[str, bytes]:
            return await read_once(store, key, start, stop, tag)

        return read

    def _paid_bucket(self) -> Any:
        """The store of obstore for a location whose requester pays."""
        bucket, _, prefix = self.path.partition("/")
        access = s3_access(self.options)
        options: dict[str, Any] = {"region": access.region or bucket_region(bucket), "prefix": prefix or None}
        if access.endpoint:
            options["endpoint"] = access.endpoint
        if access.provider == "anonymous":
            options["skip_signature"] = True
        elif access.options.get("key"):
            names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
            options |= {names[name]: secret for name, secret in access.secrets.items()}
        else:
            options["credential_provider"] = _renewed(access.options.get("profile"))
        return kept_store("S3Store", bucket, retries=False, request_payer=True, **options)

    def credentials(self) -> str:
        """Where the credentials are, with profile, endpoint and region."""
        access = s3_access(self.options)
        profile = access.options.get("profile") or os.environ.get("AWS_PROFILE")
        endpoint = access.endpoint and access.endpoint.rpartition("@")[2]
        named = {"profile": profile, "endpoint": endpoint, "region": access.region}
        return ", ".join([access.found, *(f"{name} {value}" for name, value in named.items() if value)])


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """How both clients reach S3. The secrets in it never appear in its repr.

    `options` are passed to s3fs. `region` is None if none is configured. `secrets` holds the key, secret and session
    token for signing; it is empty if TensorStore's credentials `provider` finds them itself. `found` says where they
    are: `storage_options`, `anonymous`, or botocore's name, such as `env` or `iam-role`.
    """

    options: dict[str, Any] = field(repr=False)
    endpoint: str | None
    region: str | None
    provider: str
    found: str
    secrets: dict[str, str] = field(repr=False)


def s3_access(storage_options: Mapping[str, Any]) -> S3Access:
    """Resolves S3 access from the options, the environment and the AWS configuration files, then from a role.

    Raises AccessDeniedError if there are no credentials, and OptionError for an option that cannot be supported.
    """
    import botocore.session
    from botocore.exceptions import BotoCoreError

    options = _normalized(storage_options)
    client = options["client_kwargs"]
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        endpoint = options.get("endpoint_url") or _configured_endpoint(session)
        if endpoint:
            require_endpoint(endpoint, "S3")
            options["endpoint_url"] = endpoint
            # A self-hosted server may have no regions, but every signature includes one.
            region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
            client.setdefault("region_name", region or "us-east-1")
        provider, secrets, found = _credentials(session, options)
    except BotoCoreError as error:
        raise AccessDeniedError(
            f"cannot load credentials for S3 ({error}): check storage_options, the AWS_* variables and ~/.aws"
        ) from error
    # Without an endpoint, TensorStore looks up the bucket's region. The configured region may be the machine's.
    region = client.get("region_name")
    return S3Access(options=options, endpoint=endpoint, region=region, provider=provider, found=found, secrets=secrets)


def _normalized(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs's options without aliases: each value appears once, under its option name."""
    options, client = dict(storage_options), storage_options.get("client_kwargs") or {}
    if not isinstance(client, Mapping):
        raise OptionError(f"client_kwargs in storage_options must be a dict, not {type(client).__name__}")
    if options.get("session") is not None:
        raise OptionError("storage_options cannot contain a session: pass its profile, or a key and secret, instead")
    client = dict(client)
    for option, in_client, alias in _NAMES:
        values = [options.pop(option, None), client.pop(in_client, None), options.pop(alias, None) if alias else None]
        if value := next(filter(None, values), None):
            options[option] = str(value)
    return options | {"client_kwargs": client}


def _configured_endpoint(session: Any) -> str | None:
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    endpoints = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return next(filter(None, endpoints), None)


def _credentials(session: Any, options: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """TensorStore's credentials provider, the secrets for it, and where they were found.

    Adds secrets that do not expire to s3fs's `options`.

    fsspec reuses one client for equal options for the life of the process. Credentials corrected in a running process
    take effect only because they change the options.
    """
    from botocore.credentials import RefreshableCredentials

    if options.get("anon"):
        return "anonymous", {}, "anonymous"
    names = ("key", "secret", "token")
    if options.get("key"):
        return "profile", {name: options[name] for name in names if name in options}, "storage_options"
    found = session.get_credentials()
    if found is None:
        raise AccessDeniedError(
            "found no credentials for S3: pass key and secret in storage_options (or anon=True for a public bucket), "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if found.method in _RENEWED:
        return _RENEWED[found.method], {}, found.method
    secrets = dict(zip(names, found.get_frozen_credentials()[:3], strict=True))
    secrets = {name: value for name, value in secrets.items() if value}
    if not isinstance(found, RefreshableCredentials):
        options |= secrets
    return "profile", secrets, str(found.method)


def _renewed(profile: str | None) -> Callable[[], dict[str, Any]]:
    """What botocore finds, such as the credentials of a role, which it renews."""
    import botocore.session

    found = botocore.session.Session(profile=profile).get_credentials()

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
        return {**keys, "expires_at": datetime.now(UTC) + _KEPT}

    return provide


def bucket_region(bucket: str) -> str:
    """The region of a bucket at AWS, which says it even to those who may not read the bucket. Raises StoreError."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{_AWS}/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    if region := headers.get("x-amz-bucket-region"):
        return str(region)
    raise StoreError(f'the region of bucket {bucket} is unknown: pass "client_kwargs": {{"region_name": ...}}')
