"""Refuses storage_options that a client would ignore, or that would fail later. Values, maybe secret, are not shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

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


def require_known(given: Mapping[str, Any], scheme: str, known: Collection[str], option: str = "") -> None:
    """Raises OptionError, which names the nearest option, for a storage option that `scheme` does not have.

    The options may be those in one of the storage options, an `option` that is a dict.
    """
    elsewhere = _ELSEWHERE if scheme == "s3" and not option else {}
    for name in given:
        if name not in known:
            right = elsewhere.get(str(name).lower())
            near = f". Did you mean {right}?" if right else suggestion(name, known)
            near = near or f"; there are: {', '.join(sorted(known))}"
            within = f"{option} of storage_options" if option else f"the storage_options of {scheme}://"
            raise OptionError(f"there is no {name!r:.100} in {within}{near}")


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
