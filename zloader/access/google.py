"""gs:// addresses: gcsfs, which is optional, with Google's default credentials or with none.

TensorStore finds the default credentials in the same places: GOOGLE_APPLICATION_CREDENTIALS, what gcloud wrote, and the
metadata service of Google's machines. It cannot be handed any others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from zloader.access.web import ReadOnly
from zloader.common.errors import OptionError


def google_token(storage_options: Mapping[str, Any]) -> str:
    """How requests are signed: `"google_default"` or `"anon"`. Raises OptionError for anything else."""
    token = storage_options.get("token") or "google_default"
    if token not in ("google_default", "anon"):
        raise OptionError(
            'a token for gs:// is "anon" (public buckets) or left out: for the default credentials of Google, set '
            "GOOGLE_APPLICATION_CREDENTIALS to the file of a key or run 'gcloud auth application-default login'"
        )
    if "endpoint_url" in storage_options and token != "anon":
        raise OptionError('an endpoint_url for gs:// goes with {"token": "anon"} alone')
    return str(token)


def google_files(storage_options: Mapping[str, Any], *, asynchronous: bool) -> Any:
    """The file system for gs://, with nothing cached of its listings."""
    options = {"use_listings_cache": False, **storage_options, "token": google_token(storage_options)}
    return _read_only_class()(access="read_only", asynchronous=asynchronous, **options)


def google_errors() -> tuple[type[Exception], ...]:
    """What it raises beside OSError. Raises OptionError where gcsfs is not installed."""
    _read_only_class()
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return HttpError, GoogleAuthError


def is_refusal(error: Exception) -> bool:
    """Whether it says that credentials are missing or do not suffice."""
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

    # It logs the traceback of an error that it raises as well.
    logging.getLogger("gcsfs").addFilter(lambda record: not (record.module == "retry" and record.exc_info))

    class GoogleFiles(ReadOnly, GCSFileSystem):  # type: ignore[misc]
        """Objects below gs:// addresses."""

        # 0, 1.5, 2.5 and 4.5 s apart; the six attempts that are gcsfs's take half a minute where nobody answers.
        _request = retry_request(GCSFileSystem._request.__wrapped__, retries=4)

        @staticmethod
        def close_session(loop: Any, session: Any, asynchronous: bool = False) -> None:
            # At the interpreter's exit gcsfs would await on fsspec's loop what belongs to zarr's, and fail aloud.
            if not asynchronous:
                GCSFileSystem.close_session(loop, session)

    return GoogleFiles
