"""Forwards the S3 simulator's requests to a real S3 server.

Heads are forwarded as they came, so a signature that the client made for the simulator's address stays valid. A
response is held in memory while it is sent.
"""

from __future__ import annotations

import http.client
import socket

from benchmarks.harness.s3.faults import HttpFault
from benchmarks.harness.s3.messages import Head, InMemory, Reply

_PATIENCE_S = 60.0  # between two pieces of a response
_OF_THE_CONNECTION = ("connection", "keep-alive", "transfer-encoding")


def forwarded(address: tuple[str, int], request: Head, body: bytes, fault: HttpFault | None) -> Reply:
    """Sends a request to the real server on a connection of its own, and returns the response to it."""
    with socket.create_connection(address, timeout=_PATIENCE_S) as sock:
        sock.sendall(request.raw + body)
        response = http.client.HTTPResponse(sock, method=request.method)
        response.begin()  # skips 100 Continue
        content = response.read()
    fields = {name: value for name, value in response.getheaders() if name.lower() not in _OF_THE_CONNECTION}
    if response.chunked:
        fields["Content-Length"] = str(len(content))
    content = _changed(fields, content, fault)
    lines = [f"HTTP/1.1 {response.status} {response.reason}", *(f"{name}: {fields[name]}" for name in fields)]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return Reply(status=response.status, head=head, body=InMemory(content), stop=len(content))


def _changed(fields: dict[str, str], content: bytes, fault: HttpFault | None) -> bytes:
    """Changes the head as a fault says. Returns the body, of which a fault may remove the end."""
    names = {name.lower(): name for name in fields}
    if fault and fault.kind == "etag" and "etag" in names:
        fields[names["etag"]] = fault.value
    elif fault and fault.kind == "noclen" and "content-length" in names:
        del fields[names["content-length"]]
        fields["Connection"] = "close"
    elif fault and fault.kind == "short" and len(content) > 1:
        content = content[: max(1, len(content) - fault.by)]
        fields[names.get("content-length", "Content-Length")] = str(len(content))
    return content
