"""Resolves the endpoint, region and credentials of S3 from `storage_options`, AWS_* variables, profiles and roles.

botocore, the library below s3fs, resolves them once, and s3fs and TensorStore both receive the result. So the two
clients always agree, and missing credentials raise an error before the first read. On its own, TensorStore would query
the instance metadata service, which takes 4.5 s if nothing answers, and then send unsigned requests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import botocore.session
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError

from zloader.access.storage_options import require_endpoint, require_s3
from zloader.common.errors import AccessDeniedError, OptionError

# Options that s3fs accepts under several names: the option, its name in client_kwargs, and its alias.
_NAMES = (
    ("key", "aws_access_key_id", "username"),
    ("secret", "aws_secret_access_key", "password"),
    ("token", "aws_session_token", None),
    ("endpoint_url", "endpoint_url", None),
)
# TensorStore finds and renews these kinds of credentials itself: botocore's name of each, and TensorStore's.
_RENEWED = {"iam-role": "imds", "container-role": "ecs", "assume-role-with-web-identity": "default"}


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
    profile: str | None
    found: str
    secrets: dict[str, str] = field(repr=False)


def s3_access(storage_options: Mapping[str, Any]) -> S3Access:
    """Resolves S3 access from the options, the environment and the AWS configuration files, then from a role.

    Raises AccessDeniedError if there are no credentials, and OptionError for an option that cannot be supported.
    """
    options = _normalized(storage_options)
    client = options["client_kwargs"]
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        endpoint = options.get("endpoint_url") or _configured_endpoint(session)
        if endpoint:
            require_endpoint(endpoint)
            options["endpoint_url"] = endpoint
            # A self-hosted server may have no regions, but every signature includes one.
            region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
            client.setdefault("region_name", region or "us-east-1")
        provider, secrets, found = _credentials(session, options)
    except BotoCoreError as error:
        raise AccessDeniedError(
            f"cannot load credentials for S3 ({error}): check storage_options, the AWS_* variables and ~/.aws"
        ) from error
    return S3Access(
        options=options,
        endpoint=endpoint,
        # Without an endpoint, TensorStore looks up the bucket's region. The configured region may be the machine's.
        region=client.get("region_name"),
        provider=provider,
        profile=options.get("profile"),
        found=found,
        secrets=secrets,
    )


def credentials_found(storage_options: Mapping[str, Any]) -> str:
    """Where the credentials for S3 are, with profile, endpoint and region. Holds no secret. Raises as `s3_access`."""
    access = s3_access(storage_options)
    endpoint = access.endpoint and access.endpoint.rpartition("@")[2]
    names = {"profile": access.profile or os.environ.get("AWS_PROFILE"), "endpoint": endpoint, "region": access.region}
    return ", ".join([access.found, *(f"{name} {value}" for name, value in names.items() if value)])


def _normalized(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs's options without aliases: each value appears once, under its option name."""
    require_s3(storage_options)
    options, client = dict(storage_options), dict(storage_options.get("client_kwargs") or {})
    if options.get("session") is not None:
        raise OptionError("storage_options cannot contain a session: pass its profile, or a key and secret, instead")
    for option, in_client, alias in _NAMES:
        values = [options.pop(option, None), client.pop(in_client, None), options.pop(alias, None) if alias else None]
        value = next((value for value in values if value), None)
        if value:
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
    return next((endpoint for endpoint in endpoints if endpoint), None)


def _credentials(session: Any, options: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """TensorStore's credentials provider, the secrets for it, and where they were found.

    Adds secrets that do not expire to s3fs's `options`.

    fsspec reuses one client for equal options for the life of the process. Credentials corrected in a running process
    take effect only because they change the options.
    """
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
