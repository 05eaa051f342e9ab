"""gs://, az://, abfs:// and http(s):// URLs: which credentials each has, and which objects are on a web server.

Google's default credentials are found and renewed by google-auth. Azure's account and credentials are those of
`storage_options`, else of the AZURE_STORAGE_* variables. Without any, DefaultAzureCredential of azure-identity finds an
identity.

A web server cannot be listed. The consolidated metadata implies which objects to look for (listed_store.py). The first
byte of each is requested, 64 at a time. The answer has the size and the ETag, and proves that the server supports byte
ranges. HEAD is not used, because servers may refuse it for addresses that are signed for GET.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from zloader.access.listed_store import implied_objects
from zloader.access.object_files import ObjectScheme, awaited, tag_of
from zloader.access.scheme import libraries, require_endpoint, status_of
from zloader.access.stored_objects import TRUSTED_SINCE, Listing, StoredObject
from zloader.common.errors import OptionError, StoreError
from zloader.common.messages import cause

_BLOBS = re.compile(r"[^@:/]+@(?P<account>[a-z0-9-]+)\.(?:dfs|blob)\.(?P<domain>[a-z0-9.-]+)", re.IGNORECASE)
# Azure's options that have a variable, such as AZURE_STORAGE_ACCOUNT_KEY.
_SECRET = ("client_id", "client_secret", "tenant_id")
_VARIABLES = ("account_name", "account_key", "sas_token", "connection_string", *_SECRET)
_CONCURRENCY = 64  # requests
# Parameters that sign an address of Amazon, Google, Azure and CloudFront, and change each time.
_SIGNING = re.compile(
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|signature|expires|token|"
    r"s[vsrtepi]|srt|spr|sip|sig|sk(oid|tid|t|e|s|v)|sdd|(sao|suo|sc)id",
    re.IGNORECASE,
)
_ANONYMOUS = {"skip_signature": True}


class Google(ObjectScheme):
    """gs:// URLs."""

    library = "GCSStore"
    options = ("token", "anon", "requester_pays", "project", "endpoint_url")
    advice = 'GOOGLE_APPLICATION_CREDENTIALS, or pass {"token": "anon"} for a public bucket'

    def access(self, location: Any) -> tuple[str, dict[str, Any]]:
        options = location.storage_options
        access: dict[str, Any] = {}
        if endpoint := str(options.get("endpoint_url") or ""):
            require_endpoint(endpoint, "gs://")
            access["base_url"] = endpoint.rstrip("/")
        token = options.get("token") or ("anon" if options.get("anon") else "google_default")
        if token not in ("google_default", "anon"):
            raise OptionError(
                'the token for gs:// can only be "anon", for public buckets. To use credentials, leave it out and set '
                "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file or run 'gcloud auth application-default "
                "login'"
            )
        if pays := options.get("requester_pays"):
            project = pays if isinstance(pays, str) else options.get("project")
            if not project:
                raise OptionError('name the project that pays for gs://: {"requester_pays": "PROJECT"}')
            if token == "anon":
                raise OptionError("requester_pays for gs:// needs credentials: leave out anon and token")
            access["headers"] = {"x-goog-user-project": str(project)}
        if token == "anon":
            return "anonymous", access | _ANONYMOUS
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        with location.translated("find credentials for"):
            provider = _of_google(named)
        kind = type(provider.credentials)
        found = f"{'GOOGLE_APPLICATION_CREDENTIALS, ' * bool(named)}{kind.__module__}.{kind.__name__}"
        return found, access | {"credential_provider": provider}


@functools.lru_cache
def _of_google(named: str | None) -> Any:
    """The default credentials, where GOOGLE_APPLICATION_CREDENTIALS is `named`."""
    with libraries("gs", "google-auth for credentials", "gs"):
        from obstore.auth.google import GoogleCredentialProvider
    return GoogleCredentialProvider()


class Azure(ObjectScheme):
    """az:// and abfs:// URLs."""

    library = "AzureStore"
    options = (*_VARIABLES, "account_host", "anon", "credential")
    form = "CONTAINER/KEY"
    advice = (
        "account_name with account_key, sas_token or connection_string in storage_options or the AZURE_STORAGE_* "
        "variables, or the identity that DefaultAzureCredential finds; anon=True is for a public container"
    )
    if_nothing = "check the account, the container and the key"

    def path(self, location: Any, rest: str) -> str:
        return re.sub("^([^/@]*)@[^/]*", r"\1", rest)

    def require_authority(self, authority: str, shown: str) -> None:
        """Raises OptionError unless what precedes the path is CONTAINER or CONTAINER@ACCOUNT.dfs.core.windows.net."""
        if "@" in authority and not _BLOBS.fullmatch(authority):
            raise OptionError(
                f"cannot open {shown!r}: write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY, and pass credentials "
                "in storage_options"
            )

    def access(self, location: Any) -> tuple[str, dict[str, Any]]:
        options = _azure_options(location)
        kind, access = _of_string(options["connection_string"]) if options["connection_string"] else _of(options)
        if not access["account_name"]:
            raise OptionError(
                f"no account for {location.url}: pass connection_string or account_name in storage_options"
            )
        return kind, access

    def credentials(self, location: Any) -> str:
        """The kind of credentials, the account and the variables. Raises OptionError for unusable options."""
        kind, access = self.access(location)
        variables = sorted(name for name in os.environ if name.startswith("AZURE_STORAGE_"))
        return ", ".join([kind, f"account {access['account_name']}", *variables])


def _azure_options(location: Any) -> dict[str, Any]:
    """The options that are given, else those of the URL, else the variables."""
    given = location.storage_options
    if given.get("credential") is not None:
        raise OptionError(
            "storage_options for az:// cannot contain a credential: leave it out, so that DefaultAzureCredential "
            "finds one, or pass client_id, client_secret and tenant_id"
        )
    of_url = {}
    if found := _BLOBS.fullmatch(location.url.partition("://")[2].partition("/")[0]):
        host = f"{found['account']}.blob.{found['domain']}"
        of_url = {"account_name": found["account"], "account_host": host}
    anonymous = os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f")
    named = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _VARIABLES}
    options = {"account_host": "", **named, **of_url, **{name: value for name, value in given.items() if value}}
    for name, value in of_url.items():
        if options[name] != value:
            raise OptionError(f"{location.url} names another account than {name} in storage_options: give it once")
    return options | {"anon": given.get("anon", anonymous)}


def _of(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of credentials, and account, endpoint and credentials as keywords of AzureStore."""
    host = str(options["account_host"] or f"{options['account_name']}.blob.core.windows.net")
    access = {"account_name": options["account_name"], "endpoint": host if "://" in host else f"https://{host}"}
    if options["account_key"] or options["sas_token"]:
        return _signed(access, options["account_key"], options["sas_token"])
    if options["client_secret"]:
        return "client_secret", access | {name: options[name] for name in _SECRET}
    if options["anon"] or not options["account_name"]:
        return "anonymous", access | _ANONYMOUS
    return "identity of DefaultAzureCredential", access | {"credential_provider": _identity()}


def _of_string(text: str) -> tuple[str, dict[str, Any]]:
    """What a connection string says, as `_of`. Raises OptionError."""
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
    return "connection_string", _signed(access, parts.get("accountkey"), parts.get("sharedaccesssignature"))[1]


def _signed(access: dict[str, Any], key: str | None, sas: str | None) -> tuple[str, dict[str, Any]]:
    if key:
        try:
            base64.b64decode(key, validate=True)
        except binascii.Error:
            raise OptionError("the account key for az:// is not base64: copy it whole") from None
        return "account_key", access | {"account_key": key, "credential_type": "access_key"}
    if sas:
        return "sas_token", access | {"sas_key": sas.lstrip("?"), "credential_type": "sas_token"}
    return "anonymous", access | _ANONYMOUS


@functools.lru_cache
def _identity() -> Any:
    with libraries("az", "azure-identity to find an identity", "azure"):
        from obstore.auth.azure import AzureCredentialProvider
    return AzureCredentialProvider()


class Web(ObjectScheme):
    """http(s):// URLs."""

    library = "HTTPStore"
    form = "HOST/PATH"
    advice = (
        'the headers that the server requires, in storage_options: {"headers": {"Authorization": ...}}; a signed '
        "address may have expired"
    )
    is_web = True

    def path(self, location: Any, rest: str) -> str:
        """The whole address, unquoted."""
        return f"{location.scheme}://{unquote(rest)}"

    def require_url(self, location: Any, shown: str) -> None:
        super().require_url(location, shown)
        if not isinstance(location.storage_options.get("query", ""), str):
            raise OptionError("the query in storage_options for http(s) must be text, as it follows ? in an address")
        try:
            port = urlsplit(location.url).port
        except ValueError as error:
            raise OptionError(f"cannot open {shown!r}: {error}") from error
        if port == 0:
            raise OptionError(f"cannot open {shown!r}: 0 is not a valid port")
        if "?" in location.url or "#" in location.url:
            raise OptionError(
                f"cannot open {shown!r}: a store's URL cannot have a fragment. Write ? and # that belong to the path "
                "as %3F and %23"
            )

    def split(self, location: Any) -> tuple[str, str]:
        scheme, _, rest = location.path.partition("://")
        host, _, prefix = rest.partition("/")
        return f"{scheme}://{host}", prefix

    def require_options(self, location: Any) -> None:
        if unknown := location.storage_options.keys() - {"headers", "query"}:
            raise OptionError(
                f"storage_options for http(s) accept only headers and query, not {', '.join(sorted(unknown))}: "
                'pass {"headers": {"Authorization": ...}} if the server requires credentials'
            )

    def access(self, location: Any) -> tuple[str, dict[str, Any]]:
        headers, query = location.storage_options.get("headers"), location.storage_options.get("query")
        found = f"headers: {', '.join(headers or ()) or 'none'}{', and the query of the address' * bool(query)}"
        return found, {"headers": headers}

    def address(self, location: Any, prefix: str) -> tuple[str, dict[str, Any]]:
        address, query = f"{self.split(location)[0]}/{quote(prefix)}", location.storage_options.get("query")
        return f"{address.rstrip('/')}?{query}" if query else address.rstrip("/"), {}  # of each request

    def listing(self, location: Any) -> Listing:
        store = location.zarr_store(read_only=True)
        return Listing(implied_objects(store, location.path, functools.partial(self._find, location)).items())

    def find_object(self, location: Any, key: str) -> StoredObject:
        found = self._find(location, [key])
        if key not in found:
            raise FileNotFoundError(f"{location.url}/{key}")
        return found[key]

    def _find(self, location: Any, keys: Iterable[str]) -> dict[str, StoredObject]:
        """The objects of `keys` below a location that exist."""
        from fsspec.asyn import get_loop, sync

        store = self.store(location, prefix=self.split(location)[1], retries=True)
        found: dict[str, StoredObject] = sync(get_loop(), _find, store, iter(keys), location.path)
        return found

    def origin(self, location: Any) -> str:
        """The address, with what of a query does not sign it: that may say which file it is."""
        query = parse_qsl(location.storage_options.get("query", ""), keep_blank_values=True)
        named = [(name, value) for name, value in query if not _SIGNING.fullmatch(name)]
        return f"{location.path}?{urlencode(named)}" if named else str(location.path)


async def _find(store: Any, keys: Iterator[str], url: str) -> dict[str, StoredObject]:
    found: dict[str, StoredObject] = {}

    async def work() -> None:
        for key in keys:  # the workers share one iterator, so at most _CONCURRENCY keys are in memory
            if (entry := await _stored_object(store, key, url)) is not None:
                found[key] = entry

    tasks = [asyncio.ensure_future(work()) for _ in range(_CONCURRENCY)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _stored_object(store: Any, key: str, url: str) -> StoredObject | None:
    """What the server says of an object: its tag is the ETag, else the time of its last change, else empty."""
    from obstore.exceptions import BaseError, NotSupportedError

    try:
        result = await awaited(store.get_async(key, options={"range": (0, 1)}))
        await awaited(result.bytes_async())
    except FileNotFoundError:
        return None
    except BaseError as error:
        if status_of(error) == 410:
            return None
        if status_of(error) != 416 and not isinstance(error, NotSupportedError):
            raise
        result = await awaited(store.get_async(key))
        if result.meta["size"]:  # not an empty object, which has no first byte
            raise StoreError(
                f"the server of {url}/{key} does not support byte ranges, which reading shards requires: it answered a "
                "request of the first byte with the whole object. Use another server, or copy the store"
            ) from cause(error)
    tag, modified = tag_of(result.meta), result.meta["last_modified"].timestamp()
    # An ETag does not help if the time is artificial: most servers derive the ETag from the file's time and size.
    trusted = modified == 0 or modified >= TRUSTED_SINCE
    return StoredObject(size=result.meta["size"], tag=tag, stamp=tag if trusted else "")
