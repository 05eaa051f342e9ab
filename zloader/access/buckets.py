"""gs://, az://, abfs:// and http(s):// URLs: which credentials each has, and which objects are on a web server.

Google's default credentials are found and renewed by google-auth. Azure's account and credentials are those of
`storage_options`, else of the AZURE_STORAGE_* variables. Without any, DefaultAzureCredential of azure-identity finds an
identity.

A web server cannot be listed. The consolidated metadata implies which objects to look for (listed_store.py). The first
byte of each is requested, 64 at a time. The answer has the size and the ETag, and proves that the server supports byte
ranges. HEAD is not used, because servers may refuse it for addresses that are signed for GET.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from zloader.access.listed_store import implied_objects
from zloader.access.object_files import ObjectScheme, kept_store, tag_of
from zloader.access.scheme import libraries, require_endpoint, status_of
from zloader.access.stored_objects import TRUSTED_SINCE, Listing, StoredObject
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import OptionError, StoreError
from zloader.common.messages import cause

_BLOBS = re.compile(r"[^@:/]+@(?P<account>[a-z0-9-]+)\.(?:dfs|blob)\.(?P<domain>[a-z0-9.-]+)", re.IGNORECASE)
# Azure's options that have a variable, such as AZURE_STORAGE_ACCOUNT_KEY.
_SECRET = ("client_id", "client_secret", "tenant_id")
_VARIABLES = ("account_name", "account_key", "sas_token", "connection_string", *_SECRET)
_REQUESTS = 64  # at once
_KEYS = 4096  # in memory
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
    known = ("token", "anon", "requester_pays", "project", "endpoint_url")
    variables = "GOOGLE_"
    default = "the default credentials of google-auth"
    advice = 'GOOGLE_APPLICATION_CREDENTIALS, or pass {"token": "anon"} for a public bucket'

    def access(self) -> dict[str, Any]:
        access: dict[str, Any] = {}
        if endpoint := str(self.options.get("endpoint_url") or ""):
            require_endpoint(endpoint, "gs://")
            access["base_url"] = endpoint.rstrip("/")
        token = self.options.get("token") or ("anon" if self.options.get("anon") else "google_default")
        if token not in ("google_default", "anon"):
            raise OptionError(
                'the token for gs:// can only be "anon", for public buckets. To use credentials, leave it out and set '
                "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file or run 'gcloud auth application-default "
                "login'"
            )
        if pays := self.options.get("requester_pays"):
            project = pays if isinstance(pays, str) else self.options.get("project")
            if not project:
                raise OptionError('name the project that pays for gs://: {"requester_pays": "PROJECT"}')
            access["headers"] = {"x-goog-user-project": str(project)}
        if token == "anon":
            return access | _ANONYMOUS
        with self.location.translated("find credentials for"):
            return access | {"credential_provider": _of_google(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"))}


@functools.lru_cache
def _of_google(named: str | None) -> Any:
    """The default credentials, where GOOGLE_APPLICATION_CREDENTIALS is `named`."""
    with libraries("gs", "google-auth for credentials", "gs"):
        from obstore.auth.google import GoogleCredentialProvider
    return GoogleCredentialProvider()


class Azure(ObjectScheme):
    """az:// and abfs:// URLs."""

    library = "AzureStore"
    known = (*_VARIABLES, "account_host", "anon")
    variables = "AZURE_"
    form = "CONTAINER/KEY"
    advice = (
        "account_name with account_key, sas_token or connection_string in storage_options or the AZURE_STORAGE_* "
        "variables, or the identity that DefaultAzureCredential finds; anon=True is for a public container"
    )
    if_nothing = "check the account, the container and the key"

    @property
    def path(self) -> str:
        return re.sub("^([^/@]*)@[^/]*", r"\1", self.rest)

    def is_authority(self, authority: str) -> bool:
        """Whether it is CONTAINER@ACCOUNT.dfs.core.windows.net."""
        return _BLOBS.fullmatch(authority) is not None

    def access(self) -> dict[str, Any]:
        variables = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _VARIABLES}
        options = {**variables, **{name: value for name, value in self.options.items() if value}}
        if found := _BLOBS.fullmatch(self.rest.partition("/")[0]):
            options |= {"account_name": found["account"], "account_host": f"{found['account']}.blob.{found['domain']}"}
        access = _of_string(options["connection_string"]) if options["connection_string"] else _of_names(options)
        if not access["account_name"]:
            raise OptionError(f"no account for {self.url}: pass connection_string or account_name in storage_options")
        if key := access.get("account_key"):
            try:
                base64.b64decode(key, validate=True)
            except binascii.Error:
                raise OptionError("the account key for az:// is not base64: copy it whole") from None
            return access | {"credential_type": "access_key"}
        if access.get("sas_key"):
            return access | {"credential_type": "sas_token"}
        if options["connection_string"] or options.get("anon", os.environ.get("AZURE_STORAGE_ANON") == "true"):
            return access | _ANONYMOUS
        if options["client_secret"]:
            return access | {name: options[name] for name in _SECRET}
        return access | {"credential_provider": _identity()}


def _of_names(options: dict[str, Any]) -> dict[str, Any]:
    """Account, endpoint and credentials as keywords of AzureStore."""
    host = str(options.get("account_host") or f"{options['account_name']}.blob.core.windows.net")
    access = {"account_name": options["account_name"], "endpoint": host if "://" in host else f"https://{host}"}
    if options["account_key"]:
        return access | {"account_key": options["account_key"]}
    return access | ({"sas_key": options["sas_token"].lstrip("?")} if options["sas_token"] else {})


def _of_string(text: str) -> dict[str, Any]:
    """What a connection string says, as `_of_names`. Raises OptionError."""
    pairs = (part.partition("=") for part in text.split(";"))
    parts = {name.strip().lower(): value.strip() for name, _, value in pairs}
    account = parts.get("accountname", "")
    protocol, suffix = parts.get("defaultendpointsprotocol", "https"), parts.get("endpointsuffix", "core.windows.net")
    endpoint = (parts.get("blobendpoint") or (f"{protocol}://{account}.blob.{suffix}" if account else "")).rstrip("/")
    if not endpoint:
        raise OptionError(
            "the connection_string in storage_options names no account: copy it from 'Access keys' of the account"
        )
    require_endpoint(endpoint, "az://")
    host = endpoint.partition("://")[2]
    account = account or (host.rpartition("/")[2] if "/" in host else host.partition(".")[0])
    signed = {"account_key": parts.get("accountkey"), "sas_key": parts.get("sharedaccesssignature", "").lstrip("?")}
    return {"account_name": account, "endpoint": endpoint, **{name: value for name, value in signed.items() if value}}


@functools.lru_cache
def _identity() -> Any:
    with libraries("az", "azure-identity to find an identity", "azure"):
        from obstore.auth.azure import AzureCredentialProvider
    return AzureCredentialProvider()


class Web(ObjectScheme):
    """http(s):// URLs."""

    library = "HTTPStore"
    known = ("headers", "query")
    form = "HOST/PATH"
    default = "none"
    advice = (
        'the headers that the server requires, in storage_options: {"headers": {"Authorization": ...}}; a signed '
        "address may have expired"
    )
    is_web = True

    @property
    def path(self) -> str:
        """The whole address, unquoted."""
        return f"{self.location.scheme}://{unquote(self.rest)}"

    def require_url(self, shown: str) -> None:
        super().require_url(shown)
        if not isinstance(self.options.get("query", ""), str):
            raise OptionError("the query in storage_options for http(s) must be text, as it follows ? in an address")
        try:
            port = urlsplit(self.url).port
        except ValueError as error:
            raise OptionError(f"cannot open {shown!r}: {error}") from error
        if port == 0:
            raise OptionError(f"cannot open {shown!r}: 0 is not a valid port")
        if "?" in self.url or "#" in self.url:
            raise OptionError(
                f"cannot open {shown!r}: a store's URL cannot have a fragment. Write ? and # that belong to the path "
                "as %3F and %23"
            )

    def split(self) -> tuple[str, str]:
        scheme, _, rest = self.path.partition("://")
        host, _, prefix = rest.partition("/")
        return f"{scheme}://{host}", prefix

    def access(self) -> dict[str, Any]:
        return {"headers": self.options.get("headers")}

    def open(self, *, retries: bool) -> Any:
        """obstore sends the query of its own address with each request, so that the address is that of the location."""
        self.require_options()
        root, prefix = self.split()
        address, query = f"{root}/{quote(prefix)}".rstrip("/"), self.options.get("query")
        address = f"{address}?{query}" if query else address
        return kept_store(self.library, address, retries=retries, **self.access())

    def key(self, key: str) -> str:
        return key

    def listing(self) -> Listing:
        return Listing(implied_objects(self.location, self._find).items())

    def find(self, key: str) -> StoredObject:
        if (found := self._stored_object(key)) is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        return found

    def _find(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        """The objects of `keys` that exist."""
        found: dict[str, StoredObject] = {}
        keys = iter(keys)
        while some := list(islice(keys, _KEYS)):
            stored = concurrently(self._stored_object, some, most=_REQUESTS)
            found |= {key: entry for key, entry in zip(some, stored, strict=True) if entry is not None}
        return found

    def _stored_object(self, key: str) -> StoredObject | None:
        """What the server says of an object: its tag is the ETag, else the time of its last change, else empty."""
        from obstore.exceptions import BaseError, NotSupportedError

        try:
            result = self.store.get(key, options={"range": (0, 1)})
            result.bytes()
        except FileNotFoundError:
            return None
        except BaseError as error:
            if status_of(error) == 410:
                return None
            if status_of(error) != 416 and not isinstance(error, NotSupportedError):
                raise
            result = self.store.get(key)
            if result.meta["size"]:  # not an empty object, which has no first byte
                raise StoreError(
                    f"the server of {self.url}/{key} does not support byte ranges, which reading shards requires: it "
                    "answered a request of the first byte with the whole object. Use another server, or copy the store"
                ) from cause(error)
        tag, modified = tag_of(result.meta), result.meta["last_modified"].timestamp()
        # An ETag does not help if the time is artificial: most servers derive the ETag from the file's time and size.
        trusted = modified == 0 or modified >= TRUSTED_SINCE
        return StoredObject(size=result.meta["size"], tag=tag, stamp=tag if trusted else "")

    def origin(self) -> str:
        """The address, with what of a query does not sign it: that may say which file it is."""
        query = parse_qsl(self.options.get("query", ""), keep_blank_values=True)
        named = [(name, value) for name, value in query if not _SIGNING.fullmatch(name)]
        return f"{self.path}?{urlencode(named)}" if named else self.path
