"""gs:// URLs, read with the optional gcsfs: either with Google's default credentials or anonymously.

TensorStore finds the default credentials in the same places as gcsfs: GOOGLE_APPLICATION_CREDENTIALS, the file written
by gcloud, and the metadata service of Google's machines. It does not accept any other credentials.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from zloader.access.storage_options import parameters, require_known
from zloader.access.web import ReadOnly
from zloader.common.errors import OptionError


def google_token(storage_options: Mapping[str, Any]) -> str:
    """The kind of credentials: `"google_default"` or `"anon"`. Raises OptionError for any other token."""
    token = storage_options.get("token") or "google_default"
    if token not in ("google_default", "anon"):
        raise OptionError(
            'the token for gs:// can only be "anon", for public buckets. To use credentials, leave it out and set '
            "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file or run 'gcloud auth application-default login'"
        )
    if "endpoint_url" in storage_options and token != "anon":
        raise OptionError('an endpoint_url for gs:// can only be used with {"token": "anon"}')
    return str(token)


def google_files(storage_options: Mapping[str, Any], *, asynchronous: bool) -> Any:
    """gcsfs's file system for gs://, without a listings cache."""
    options = {"use_listings_cache": False, **storage_options, "token": google_token(storage_options)}
    files = _read_only_class()
    require_known(storage_options, "gs", parameters(files.__init__) - {"access"})
    return files(access="read_only", asynchronous=asynchronous, **options)


def google_errors() -> tuple[type[Exception], ...]:
    """The exceptions that gcsfs raises besides OSError. Raises OptionError if gcsfs is not installed."""
    _read_only_class()
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return HttpError, GoogleAuthError


def is_denial(error: Exception) -> bool:
    """Whether an error means that credentials are missing or not sufficient."""
    from google.auth.exceptions import GoogleAuthError

    denied = str(getattr(error, "code", "")) in ("401", "403") or str(error).startswith("Forbidden")
    return denied or isinstance(error, GoogleAuthError)


@functools.cache
def _read_only_class() -> Any:
    try:
        from gcsfs.core import GCSFileSystem
        from gcsfs.retry import retry_request
    except ImportError as error:
        raise OptionError('gs:// needs gcsfs, which is not installed: pip install "zloader[gs]"') from error

    # gcsfs logs the traceback of an error and also raises the error; the log entry would be a duplicate.
    logging.getLogger("gcsfs").addFilter(lambda record: not (record.module == "retry" and record.exc_info))

    class GoogleFiles(ReadOnly, GCSFileSystem):  # type: ignore[misc]
        """Objects below gs:// URLs."""

        # 4 attempts, after 0, 1.5, 2.5 and 4.5 s. gcsfs's default, 6, takes half a minute if nothing answers.
        _request = retry_request(GCSFileSystem._request.__wrapped__, retries=4)

        @staticmethod
        def close_session(loop: Any, session: Any, asynchronous: bool = False) -> None:
            # An asynchronous session belongs to zarr's loop. At exit gcsfs would await it on fsspec's loop and fail.
            if not asynchronous:
                GCSFileSystem.close_session(loop, session)

    return GoogleFiles
