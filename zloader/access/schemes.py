"""The kinds of URL, in one table: SCHEMES.

Each says how objects are found and read, how credentials are found, and what to check if access is denied. TensorStore
and s3fs serve s3://. obstore serves all the others, and local files need no library.
"""

from __future__ import annotations

import re

from zloader.access.buckets import Azure, Google, Web
from zloader.access.hub import Hub
from zloader.access.s3 import S3
from zloader.access.scheme import LocalFiles, Scheme

_AZURE, _WEB = Azure(), Web()
SCHEMES: dict[str, Scheme] = {
    "file": LocalFiles(),
    "s3": S3(),
    "gs": Google(),
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hf": Hub(),
    "http": _WEB,
    "https": _WEB,
}


def advice(url: str) -> str:
    """What to check if access to a path or URL is denied, which may be chained, such as zip://...::s3://..."""
    named = [name.lower().replace("s3a", "s3") for name in re.findall("([A-Za-z0-9]+)://", url)]
    return SCHEMES[next((name for name in reversed(named) if name in SCHEMES), "file")].advice
