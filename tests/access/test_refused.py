"""Where nothing listens, opening a store ends after few attempts to connect."""

from __future__ import annotations

import socket
from typing import Any

import pytest

import zloader as zl
from zloader.common.errors import StoreError


@pytest.fixture
def nowhere() -> str:
    """The address of a port where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def azure(endpoint: str) -> dict[str, Any]:
    key = "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
    return {"connection_string": f"AccountName=account;{key}BlobEndpoint={endpoint}/account;"}


STORES = {
    "gs": ("gs://bucket/a.zarr", lambda at: {"token": "anon", "endpoint_url": at}),
    "az": ("az://container/a.zarr", azure),
    "http": ("", lambda _: {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("url", "options"), STORES.values(), ids=STORES)
def test_few_attempts(nowhere: str, url: str, options: Any) -> None:
    with pytest.raises(StoreError, match=r"cannot .*Is the .* correct, and is its server running\?") as caught:
        zl.open_dataset(url or f"{nowhere}/a.zarr", storage_options=options(nowhere))
    assert "after 4 retries" in str(caught.value.__cause__)
    assert "Connection refused" in str(caught.value)
