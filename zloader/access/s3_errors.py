"""The errors of botocore, the library below s3fs. It takes a fifth of a second to import, so only S3 URLs import it."""

from __future__ import annotations

import re

_S3 = re.compile("s3a?://", re.IGNORECASE)


def s3_errors(url: str) -> tuple[type[Exception], ...]:
    """The exceptions that the S3 client raises besides OSError; none if `url` does not lead to S3."""
    if not _S3.search(url):
        return ()
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def s3_denials(url: str) -> tuple[type[Exception], ...]:
    """Those of `s3_errors` that mean that there are no complete credentials."""
    if not _S3.search(url):
        return ()
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    return NoCredentialsError, PartialCredentialsError
