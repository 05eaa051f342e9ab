"""How a bucket on S3 is reached, as `storage_options`, AWS_* variables, profiles and roles say together.

botocore, which s3fs stands on, is asked once, and both clients are told the answer: they cannot differ, TensorStore
never looks for anything itself, and where there are no credentials that shows at once and before it is asked to read.
(Alone it asks the instance metadata service, which takes 4.5 s where nothing answers, and goes on unsigned.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import botocore.session
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError

from zloader.common.errors import AccessDeniedError, OptionError

# What s3fs takes under several names: option, the same in client_kwargs, and another word for it.
_NAMES = (
    ("key", "aws_access_key_id", "username"),
    ("secret", "aws_secret_access_key", "password"),
    ("token", "aws_session_token", None),
    ("endpoint_url", "endpoint_url", None),
)
# Credentials of these kinds, as botocore calls them, are found and renewed by TensorStore itself.
_RENEWED = {"iam-role": "imds", "container-role": "ecs", "assume-role-with-web-identity": "default"}


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """What both clients are told. Holds secrets, which are never shown.

    `options` are s3fs's. `region` is None where none is named. `secrets` are the key, secret and token to sign with;
    empty where `provider` (of TensorStore's) finds them.
    """

    options: dict[str, Any] = field(repr=False)
    endpoint: str | None
    region: str | None
    provider: str
    profile: str | None
    requester_pays: bool
    secrets: dict[str, str] = field(repr=False)


def s3_access(storage_options: Mapping[str, Any]) -> S3Access:
    """Looks at options, environment and files; asks for a role's credentials where nothing else is named.

    Raises AccessDeniedError where there are no credentials, OptionError for options that TensorStore cannot follow.
    """
    options = _in_one_place(storage_options)
    client = options["client_kwargs"]
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        endpoint = options.get("endpoint_url") or _configured_endpoint(session)
        if endpoint:
            options["endpoint_url"] = endpoint
            # A server of one's own may have no regions, but signatures name one.
            client.setdefault("region_name", _configured_region(session) or "us-east-1")
        provider, secrets = _credentials(session, options)
    except BotoCoreError as error:
        raise AccessDeniedError(
            f"the credentials for S3 cannot be had ({error}): check storage_options, the AWS_* variables and ~/.aws"
        ) from error
    return S3Access(
        options=options,
        endpoint=endpoint,
        # Without an endpoint TensorStore asks for the bucket's region; the one configured may be that of the machine.
        region=client.get("region_name"),
        provider=provider,
        profile=options.get("profile"),
        requester_pays=bool(options.get("requester_pays")),
        secrets=secrets,
    )


def _in_one_place(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs's options with each thing said once, as an option."""
    options, client = dict(storage_options), dict(storage_options.get("client_kwargs") or {})
    if options.get("session") is not None:
        raise OptionError("storage_options cannot hold a session: give its profile, or key and secret")
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
    places = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return next((place for place in places if place), None)


def _configured_region(session: Any) -> str | None:
    region: str | None = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    return region


def _credentials(session: Any, options: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """TensorStore's provider and what it provides. Credentials that do not expire are put into s3fs's options, too.

    fsspec gives out one client for equal options for ever, so they must show in the options: else credentials mended
    in a running process would not be seen.
    """
    if options.get("anon"):
        return "anonymous", {}
    names = ("key", "secret", "token")
    if options.get("key"):
        return "profile", {name: options[name] for name in names if name in options}
    found = session.get_credentials()
    if found is None:
        raise AccessDeniedError(
            "there are no credentials for S3: give key and secret in storage_options (or anon=True for a public "
            "bucket), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if found.method in _RENEWED:
        return _RENEWED[found.method], {}
    secrets = dict(zip(names, found.get_frozen_credentials()[:3], strict=True))
    secrets = {name: value for name, value in secrets.items() if value}
    if not isinstance(found, RefreshableCredentials):
        options |= secrets
    return "profile", secrets
