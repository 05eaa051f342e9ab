"""The errors of file systems and of botocore, the library below s3fs.

botocore takes a fifth of a second to import, so it is imported only for URLs that lead to S3.
"""

from __future__ import annotations

import re

_S3 = re.compile("s3a?://", re.IGNORECASE)


def access_errors(url: str) -> tuple[type[Exception], ...]:
    """The exceptions for failed operations at a local path or at S3."""
    if not _S3.search(url):
        return (OSError,)
    from aiohttp import ClientPayloadError  # botocore does not translate a body that ends early
    from botocore.exceptions import BotoCoreError, ClientError

    return OSError, BotoCoreError, ClientError, ClientPayloadError


def denials(url: str) -> tuple[type[Exception], ...]:
    """Those of `access_errors` that mean that permissions or credentials are missing."""
    if not _S3.search(url):
        return (PermissionError,)
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    return PermissionError, NoCredentialsError, PartialCredentialsError
