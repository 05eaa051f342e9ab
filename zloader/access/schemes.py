"""The kinds of URL, in one table: SCHEMES.

Each says how objects are found and read, how credentials are found, which errors its libraries raise, and what to check
then. TensorStore and s3fs serve s3://. obstore serves all the others, and local files need no library.
"""

from __future__ import annotations

import re

from zloader.access.azure import Azure
from zloader.access.google import Google
from zloader.access.hub import Hub
from zloader.access.s3 import S3
from zloader.access.scheme import Scheme
from zloader.access.web import Web

_SCHEMES_IN_URL = re.compile(r"([a-z][a-z0-9]*)://", re.IGNORECASE)


_AZURE, _WEB = Azure(), Web()
SCHEMES: dict[str, Scheme] = {
    "file": Scheme(),
    "s3": S3(),
    "gs": Google(),
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hf": Hub(),
    "http": _WEB,
    "https": _WEB,
}


def _schemes_in(url: str) -> list[Scheme]:
    """Those of a path or URL, which may be chained, such as zip://...::s3://..."""
    named = [name.lower().replace("s3a", "s3") for name in _SCHEMES_IN_URL.findall(url)]
    return [SCHEMES[name] for name in named if name in SCHEMES] or [SCHEMES["file"]]


def access_errors(url: str) -> tuple[type[Exception], ...]:
    """The exceptions for failed operations at a path or URL."""
    return tuple(dict.fromkeys(error for scheme in _schemes_in(url) for error in scheme.errors()))


def is_denial(url: str, error: BaseException) -> bool:
    """Whether an error at a path or URL means that permissions or credentials are missing."""
    return any(scheme.is_denial(error) for scheme in _schemes_in(url))


def advice(url: str) -> str:
    """What to check if access to a path or URL is denied."""
    return _schemes_in(url)[-1].advice
