"""gs:// URLs: either with Google's default credentials, which google-auth finds and renews, or anonymously."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from zloader.access.object_files import ObjectScheme, kept_store
from zloader.access.scheme import libraries
from zloader.access.storage_options import require_endpoint, require_known
from zloader.common.errors import OptionError

_GOOGLE = "https://storage.googleapis.com"
_OPTIONS = {"token", "anon", "requester_pays", "project", "endpoint_url"}
_needed = functools.partial(libraries, "gs", "google-auth for credentials", "gs")


class Google(ObjectScheme):
    """gs:// URLs."""

    form = "BUCKET/KEY"
    advice = 'GOOGLE_APPLICATION_CREDENTIALS, or pass {"token": "anon"} for a public bucket'

    def store(self, location: Any, *, prefix: str = "", retries: bool) -> Any:
        options = location.storage_options
        require_known(options, "gs", _OPTIONS)
        endpoint, project = _endpoint(options), _paying_project(options)
        if _token(options) == "anon":
            signed: dict[str, Any] = {"skip_signature": True}
        else:
            with location.translated("find credentials for"):
                signed = {"credential_provider": _credentials(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"))}
        return kept_store(
            "GCSStore",
            self.split(location)[0],
            endpoint_url=endpoint or _GOOGLE,
            headers={"x-goog-user-project": project} if project else {},
            retries=retries,
            prefix=prefix or None,
            **signed,
            **({"base_url": endpoint} if endpoint else {}),
        )

    def errors(self) -> tuple[type[Exception], ...]:
        try:
            from google.auth.exceptions import GoogleAuthError
        except ImportError:
            return super().errors()
        return *super().errors(), GoogleAuthError

    def is_denial(self, error: BaseException) -> bool:
        return super().is_denial(error) or type(error).__module__.startswith("google.auth")

    def credentials(self, location: Any) -> str:
        if _token(location.storage_options) == "anon":
            return "anonymous"
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        with location.translated("find credentials for"):
            found = _credentials(named).credentials
        return f"{'GOOGLE_APPLICATION_CREDENTIALS, ' * bool(named)}{type(found).__module__}.{type(found).__name__}"


@functools.lru_cache
def _credentials(named: str | None) -> Any:
    """The default credentials, where GOOGLE_APPLICATION_CREDENTIALS is `named`."""
    with _needed():
        from obstore.auth.google import GoogleCredentialProvider
    return GoogleCredentialProvider()


def _token(options: Mapping[str, Any]) -> str:
    """The kind of credentials: `"google_default"` or `"anon"`. Raises OptionError for any other token."""
    token = options.get("token") or ("anon" if options.get("anon") else "google_default")
    if token not in ("google_default", "anon"):
        raise OptionError(
            'the token for gs:// can only be "anon", for public buckets. To use credentials, leave it out and set '
            "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file or run 'gcloud auth application-default login'"
        )
    return str(token)


def _paying_project(options: Mapping[str, Any]) -> str:
    """The Google Cloud project that pays for requests; empty if the bucket's owner does. Raises OptionError."""
    pays = options.get("requester_pays")
    if not pays:
        return ""
    project = pays if isinstance(pays, str) else options.get("project")
    if not project:
        raise OptionError('name the project that pays for gs://: {"requester_pays": "PROJECT"}')
    if _token(options) == "anon":
        raise OptionError("requester_pays for gs:// needs credentials: leave out anon and token")
    return str(project)


def _endpoint(options: Mapping[str, Any]) -> str:
    """The stated endpoint; empty if there is none. Raises OptionError if it is not the address of a web server."""
    endpoint = str(options.get("endpoint_url") or "")
    if endpoint:
        require_endpoint(endpoint, "gs://")
    return endpoint.rstrip("/")
