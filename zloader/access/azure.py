"""az:// and abfs:// URLs: Azure Blob Storage, found with adlfs and read with obstore.

adlfs resolves account and credentials once, from `storage_options`, the AZURE_STORAGE_* variables, or else by
DefaultAzureCredential of azure-identity, and obstore receives the result. So the two clients always agree.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

from zloader.access.object_stores import ObjectStore, ReadOnly, claim_process, client_options, libraries
from zloader.access.scheme import Scheme
from zloader.access.storage_options import parameters, require_known
from zloader.common.errors import OptionError

_ACCOUNT = re.compile(r"[^@:/]+@(?P<account>[a-z0-9-]+)\.(?:dfs|blob)\.(?P<domain>[a-z0-9.-]+)", re.IGNORECASE)
_needed = functools.partial(libraries, "az", "adlfs and obstore", "azure")


class Azure(Scheme):
    """az:// and abfs:// URLs."""

    form = "CONTAINER/KEY"
    is_source = True
    advice = (
        "account_name with account_key, sas_token or connection_string in storage_options or the AZURE_STORAGE_* "
        "variables, or the identity that DefaultAzureCredential finds; anon=True is for a public container"
    )
    if_nothing = "check the account, the container and the key"
    is_writable = False

    def path(self, location: Any, rest: str) -> str:
        return re.sub("^([^/@]*)@[^/]*", r"\1", rest)

    def require_url(self, authority: str, shown: str) -> None:
        """Raises OptionError unless what precedes the path is CONTAINER or CONTAINER@ACCOUNT.dfs.core.windows.net."""
        if "@" in authority and not _ACCOUNT.fullmatch(authority):
            raise OptionError(
                f"cannot open {shown!r}: write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY, and pass credentials "
                "in storage_options"
            )

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        given = dict(location.storage_options)
        if given.get("credential") is not None:
            raise OptionError(
                "storage_options for az:// cannot contain a credential: leave it out, so that DefaultAzureCredential "
                "finds one, or pass client_id, client_secret and tenant_id"
            )
        files = _read_only_class()
        require_known(given, "az", parameters(files.__mro__[2].__init__) - {"credential", "loop", "request_session"})
        named = _account(location.url)
        options = {"use_listings_cache": False, **named, **given}
        for name, value in named.items():
            if options[name] != value:
                raise OptionError(f"{location.url} names another account than {name} in storage_options: give it once")
        return files(asynchronous=asynchronous, **options)

    def zarr_store(self, location: Any) -> Any:
        from zarr.storage import ObjectStore as ZarrStore

        claim_process("obstore")
        container, _, prefix = location.path.partition("/")
        return ZarrStore(_store(location, container, prefix=prefix or None, retries=True), read_only=True)

    def object_store(self, location: Any) -> ObjectStore:
        container, _, prefix = location.path.partition("/")
        return ObjectStore(open=functools.partial(_store, location, container), prefix=prefix)

    def errors(self) -> tuple[type[Exception], ...]:
        with _needed():
            from azure.core.exceptions import AzureError
            from obstore.exceptions import BaseError
        return OSError, AzureError, BaseError

    def is_denial(self, error: BaseException) -> bool:
        from azure.core.exceptions import ClientAuthenticationError
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        denied = PermissionError | ClientAuthenticationError | PermissionDeniedError | UnauthenticatedError
        return isinstance(error, denied) or getattr(error, "status_code", None) in (401, 403)

    def credentials(self, location: Any) -> str:
        """The kind of credentials that adlfs has resolved, and the account. Raises OptionError for unusable options."""
        files = location.filesystem()
        kinds = {
            "connection_string": files.connection_string,
            "account_key": files.account_key,
            "sas_token": files.sas_token,
            "identity of DefaultAzureCredential or client_id": files.sync_credential,
        }
        kind = next((name for name, value in kinds.items() if value), "anonymous")
        variables = sorted(name for name in os.environ if name.startswith("AZURE_STORAGE_"))
        return ", ".join([kind, *([f"account {files.account_name}"] if files.account_name else []), *variables])


def _account(url: str) -> dict[str, str]:
    """The options that a URL itself contains."""
    found = _ACCOUNT.fullmatch(url.partition("://")[2].partition("/")[0])
    if not found:
        return {}
    return {"account_name": found["account"], "account_host": f"{found['account']}.blob.{found['domain']}"}


def _store(location: Any, container: str, *, prefix: str | None = None, retries: bool = False) -> Any:
    with location.translated("open"), _needed():
        from obstore.store import AzureStore

        access = _access(location.filesystem())
        options = client_options(endpoint=access.get("endpoint") or "", retries=retries)
        return AzureStore(container, prefix=prefix, **access, **options)


def _access(files: Any) -> dict[str, Any]:
    """Account and credentials as adlfs has resolved them, as keywords of obstore's AzureStore."""
    if files.connection_string:
        return _of_connection_string(files.connection_string)
    access: dict[str, Any] = {"account_name": files.account_name, "endpoint": files.account_url}
    if files.sync_credential is not None:
        from obstore.auth.azure import AzureCredentialProvider

        return access | {"credential_provider": AzureCredentialProvider(files.sync_credential)}
    return access | _signed_with(files.account_key, files.sas_token)


def _of_connection_string(text: str) -> dict[str, Any]:
    from azure.core.utils import parse_connection_string

    parts: Mapping[str, str] = parse_connection_string(text)  # its names are in lower case
    account = parts.get("accountname")
    protocol, suffix = parts.get("defaultendpointsprotocol", "https"), parts.get("endpointsuffix", "core.windows.net")
    endpoint = (parts.get("blobendpoint") or f"{protocol}://{account}.blob.{suffix}").rstrip("/")
    host = re.sub("^https?://", "", endpoint)
    account = account or (host.rpartition("/")[2] if "/" in host else host.partition(".")[0])
    access = {"account_name": account, "endpoint": endpoint}
    return access | _signed_with(parts.get("accountkey"), parts.get("sharedaccesssignature"))


def _signed_with(key: str | None, sas: str | None) -> dict[str, Any]:
    if key:
        return {"account_key": key, "credential_type": "access_key"}
    return {"sas_key": sas.lstrip("?"), "credential_type": "sas_token"} if sas else {"skip_signature": True}


@functools.cache
def _read_only_class() -> Any:
    with _needed():
        import obstore  # noqa: F401 - both are needed to read
        from adlfs import AzureBlobFileSystem

    class AzureFiles(ReadOnly, AzureBlobFileSystem):  # type: ignore[misc]
        """Blobs below az:// URLs."""

        def do_connect(self) -> None:
            super().do_connect()
            # Azure's client would take a minute per request if the server fails: it retries after 16, 18 and 24 s.
            for policy in self.service_client._pipeline._impl_policies:
                if hasattr(policy, "initial_backoff"):
                    policy.total_retries, policy.initial_backoff, policy.increment_base = 2, 0.5, 2
                    policy.random_jitter_range = 0.25
                    policy.connect_retries = 1  # nothing listens

        async def _find(self, path: str, withdirs: bool = False, prefix: str = "", **options: Any) -> Any:
            found = await super()._find(path, withdirs=withdirs, prefix=prefix, **options)
            if isinstance(found, list) and options.get("detail"):  # adlfs returns no entry of a single blob
                return {name: await self._info(name) for name in found}
            return found

    return AzureFiles
