"""az:// and abfs:// URLs: Azure Blob Storage.

Account and credentials are those of `storage_options`, else of the AZURE_STORAGE_* variables. Without any,
DefaultAzureCredential of azure-identity finds an identity.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import re
from typing import Any

from zloader.access.object_files import ObjectScheme, kept_store
from zloader.access.scheme import libraries
from zloader.access.storage_options import require_endpoint, require_known
from zloader.common.errors import OptionError

_ACCOUNT = re.compile(r"[^@:/]+@(?P<account>[a-z0-9-]+)\.(?:dfs|blob)\.(?P<domain>[a-z0-9.-]+)", re.IGNORECASE)
# Those that have a variable, such as AZURE_STORAGE_ACCOUNT_KEY.
_NAMED = ("account_name", "account_key", "sas_token", "connection_string", "client_id", "client_secret", "tenant_id")
_OPTIONS = {*_NAMED, "account_host", "anon"}


class Azure(ObjectScheme):
    """az:// and abfs:// URLs."""

    form = "CONTAINER/KEY"
    advice = (
        "account_name with account_key, sas_token or connection_string in storage_options or the AZURE_STORAGE_* "
        "variables, or the identity that DefaultAzureCredential finds; anon=True is for a public container"
    )
    if_nothing = "check the account, the container and the key"

    def path(self, location: Any, rest: str) -> str:
        return re.sub("^([^/@]*)@[^/]*", r"\1", rest)

    def require_url(self, authority: str, shown: str) -> None:
        """Raises OptionError unless what precedes the path is CONTAINER or CONTAINER@ACCOUNT.dfs.core.windows.net."""
        if "@" in authority and not _ACCOUNT.fullmatch(authority):
            raise OptionError(
                f"cannot open {shown!r}: write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY, and pass credentials "
                "in storage_options"
            )

    def store(self, location: Any, *, prefix: str = "", retries: bool) -> Any:
        kind, access = _access(location)
        if kind == "identity":
            access |= {"credential_provider": _identity()}
        container = self.split(location)[0]
        endpoint = access["endpoint"]
        return kept_store(
            "AzureStore", container, endpoint_url=endpoint, retries=retries, prefix=prefix or None, **access
        )

    def errors(self) -> tuple[type[Exception], ...]:
        try:
            from azure.core.exceptions import AzureError
        except ImportError:
            return super().errors()
        return *super().errors(), AzureError

    def is_denial(self, error: BaseException) -> bool:
        return super().is_denial(error) or type(error).__name__ == "ClientAuthenticationError"

    def credentials(self, location: Any) -> str:
        """The kind of credentials, the account and the variables. Raises OptionError for unusable options."""
        kind, access = _access(location)
        variables = sorted(name for name in os.environ if name.startswith("AZURE_STORAGE_"))
        found = "identity of DefaultAzureCredential" if kind == "identity" else kind
        return ", ".join([found, f"account {access['account_name']}", *variables])


def _access(location: Any) -> tuple[str, dict[str, Any]]:
    """The kind of credentials, and account, endpoint and credentials as keywords of AzureStore. Raises OptionError."""
    given = location.storage_options
    if given.get("credential") is not None:
        raise OptionError(
            "storage_options for az:// cannot contain a credential: leave it out, so that DefaultAzureCredential "
            "finds one, or pass client_id, client_secret and tenant_id"
        )
    require_known(given, "az", _OPTIONS)
    named = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _NAMED}
    options = {**named, **_of_url(location.url), **{name: value for name, value in given.items() if value}}
    for name, value in _of_url(location.url).items():
        if options[name] != value:
            raise OptionError(f"{location.url} names another account than {name} in storage_options: give it once")
    anonymous = given.get("anon", os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f"))
    if text := options["connection_string"]:
        return "connection_string", _of_connection_string(text)
    if not (account := options["account_name"]):
        raise OptionError(f"no account for {location.url}: pass connection_string or account_name in storage_options")
    host = str(options.get("account_host") or f"{account}.blob.core.windows.net")
    access = {"account_name": account, "endpoint": host if "://" in host else f"https://{host}"}
    if options["account_key"] or options["sas_token"]:
        return _signed(access, options["account_key"], options["sas_token"])
    if options["client_secret"]:
        names = {"client_id": "client_id", "client_secret": "client_secret", "tenant_id": "tenant_id"}
        return "client_secret", access | {name: options[name] for name in names}
    return ("anonymous", access | {"skip_signature": True}) if anonymous else ("identity", access)


def _of_url(url: str) -> dict[str, str]:
    """The options that a URL itself contains."""
    found = _ACCOUNT.fullmatch(url.partition("://")[2].partition("/")[0])
    if not found:
        return {}
    return {"account_name": found["account"], "account_host": f"{found['account']}.blob.{found['domain']}"}


def _of_connection_string(text: str) -> dict[str, Any]:
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    parts = {name.strip().lower(): value.strip() for name, _, value in pairs}
    account = parts.get("accountname")
    protocol, suffix = parts.get("defaultendpointsprotocol", "https"), parts.get("endpointsuffix", "core.windows.net")
    endpoint = (parts.get("blobendpoint") or (f"{protocol}://{account}.blob.{suffix}" if account else "")).rstrip("/")
    if not endpoint:
        raise OptionError(
            "the connection_string in storage_options names no account: copy it from 'Access keys' of the account"
        )
    require_endpoint(endpoint, "az://")
    host = re.sub("^https?://", "", endpoint)
    account = account or (host.rpartition("/")[2] if "/" in host else host.partition(".")[0])
    access = {"account_name": account, "endpoint": endpoint}
    return _signed(access, parts.get("accountkey"), parts.get("sharedaccesssignature"))[1]


def _signed(access: dict[str, Any], key: str | None, sas: str | None) -> tuple[str, dict[str, Any]]:
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise OptionError("the account key for az:// is not base64: copy it whole") from None
        return "account_key", access | {"account_key": key, "credential_type": "access_key"}
    if sas:
        return "sas_token", access | {"sas_key": sas.lstrip("?"), "credential_type": "sas_token"}
    return "anonymous", access | {"skip_signature": True}


@functools.lru_cache
def _identity() -> Any:
    with libraries("az", "azure-identity to find an identity", "azure"):
        from obstore.auth.azure import AzureCredentialProvider
    return AzureCredentialProvider()
