"""Refuses storage_options that a client would ignore, or that would fail later. Imports no client by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec.dircache import DirCache

from zloader.common.errors import OptionError
from zloader.common.messages import suggestion

# Names that other tools use for options of s3fs.
_ELSEWHERE = {
    **dict.fromkeys(("access_key", "access_key_id", "aws_access_key_id"), "'key'"),
    **dict.fromkeys(("secret_key", "secret_access_key", "aws_secret_access_key"), "'secret'"),
    **dict.fromkeys(("session_token", "aws_session_token"), "'token'"),
    **dict.fromkeys(("endpoint", "endpoint_override", "aws_endpoint_url", "host"), "'endpoint_url'"),
    **dict.fromkeys(("profile_name", "aws_profile"), "'profile'"),
    **dict.fromkeys(("anonymous", "skip_signature", "no_sign_request"), "'anon'"),
    **dict.fromkeys(("region", "region_name", "aws_region"), '"client_kwargs": {"region_name": ...}'),
    "verify": '"client_kwargs": {"verify": ...}',
}
_OURS = {"asynchronous"}  # zloader opens one file system of each kind
_DICTS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")


def parameters(*functions: Callable[..., Any]) -> set[str]:
    """The names of all arguments that can be passed by keyword."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = (inspect.signature(function).parameters.items() for function in functions)
    return {name for each in found for name, parameter in each if parameter.kind in by_name} - {"self"}


def require_known(storage_options: Mapping[str, Any], scheme: str, known: Collection[str]) -> None:
    """Raises OptionError, which names the nearest option, for an option that `scheme` does not have."""
    elsewhere = _ELSEWHERE if scheme == "s3" else {}
    _refuse_unknown(storage_options, known, option=f"the storage_options of {scheme}://", elsewhere=elsewhere)


def require_s3(storage_options: Mapping[str, Any]) -> None:
    """Raises OptionError for an option that s3fs or botocore's client does not have, and for options of another type.

    Values are not shown, because they may be secrets.
    """
    from aiobotocore.session import AioSession
    from botocore.session import Session
    from s3fs import S3FileSystem

    known = parameters(S3FileSystem.__init__, AioSession.__init__, DirCache.__init__) | {"skip_instance_cache"}
    require_known(storage_options, "s3", known - _OURS)
    for name in _DICTS:
        value = storage_options.get(name) or {}
        if not isinstance(value, Mapping):
            raise OptionError(f"{name} in storage_options must be a dict, not {type(value).__name__}")
    client = storage_options.get("client_kwargs") or {}
    known = parameters(Session.create_client) - {"service_name", "config"}
    _refuse_unknown(client, known, option="client_kwargs of storage_options", elsewhere={})


def require_endpoint(endpoint: str, of: str = "S3") -> None:
    """Raises OptionError unless `endpoint`, of a kind of storage, is the address of a web server."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        usable = False
    if not usable:
        shown = endpoint.rpartition("@")[2]
        raise OptionError(
            f"the endpoint_url of {of} must have the form http://HOST:PORT or https://HOST, not {shown!r:.100}"
        )


def _refuse_unknown(
    given: Mapping[str, Any], known: Collection[str], *, option: str, elsewhere: Mapping[str, str]
) -> None:
    for name in given:
        if name not in known:
            right = elsewhere.get(str(name).lower())
            near = f". Did you mean {right}?" if right else suggestion(name, known)
            near = near or f"; there are: {', '.join(sorted(known))}"
            raise OptionError(f"there is no {name!r:.100} in {option}{near}")
