"""Where nothing listens, opening a store ends after few attempts to connect, whatever the scheme."""

from __future__ import annotations

import asyncio
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
    "s3": ("s3://bucket/a.zarr", lambda at: {"key": "k", "secret": "s", "endpoint_url": at}),
    "gs": ("gs://bucket/a.zarr", lambda at: {"token": "anon", "endpoint_url": at}),
    "az": ("az://container/a.zarr", azure),
    "http": ("", lambda _: {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("url", "options"), STORES.values(), ids=STORES)
def test_few_attempts(nowhere: str, monkeypatch: pytest.MonkeyPatch, url: str, options: Any) -> None:
    connected: list[Any] = []
    loop = asyncio.SelectorEventLoop
    connect = loop.sock_connect

    async def counted(self: Any, sock: Any, address: Any) -> Any:
        connected.append(address)
        return await connect(self, sock, address)

    monkeypatch.setattr(loop, "sock_connect", counted)
    with pytest.raises(StoreError, match=r"cannot .*Is the .* correct, and is its server running\?") as caught:
        zl.open_dataset(url or f"{nowhere}/a.zarr", storage_options=options(nowhere))
    if url.startswith("s3"):
        assert 2 <= len(connected) <= 3
    else:  # obstore connects in threads of its own, and says how often
        assert "after 4 retries" in str(caught.value.__cause__)
        assert "Connection refused" in str(caught.value)
