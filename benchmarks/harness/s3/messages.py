"""HTTP messages of the S3 simulator, and a response with what a fault makes of it."""

from __future__ import annotations

import http
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from benchmarks.harness.s3.faults import HttpFault

_SECONDS_BEFORE_RESET = 0.05  # RST discards bytes that the client has not read yet, so give it time to read
_STALL_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head of an HTTP message: its first line, its headers by lower-case name, and its raw bytes."""

    first_line: str
    fields: Mapping[str, str]
    raw: bytes

    @property
    def length(self) -> int:
        """Content-Length in bytes, or 0 if it is missing."""
        return int(self.fields.get("content-length") or 0)

    def says(self, name: str, value: str) -> bool:
        """Whether the header `name` has this value, compared in lower case."""
        return self.fields.get(name, "").lower() == value

    @cached_property
    def method(self) -> str:
        """The method of a request: GET, HEAD, ..."""
        return self.first_line.partition(" ")[0]

    @cached_property
    def target(self) -> str:
        """The path and query of a request, as sent."""
        return self.first_line.split(" ")[1]

    @cached_property
    def path(self) -> str:
        """The decoded path of a request."""
        return unquote(self.target.partition("?")[0])

    @cached_property
    def query(self) -> dict[str, str]:
        """The first value of each query parameter of a request."""
        return {k: v[0] for k, v in parse_qs(self.target.partition("?")[2], keep_blank_values=True).items()}


def parse_head(raw: bytes) -> Head:
    """Parses the head of an HTTP message, including the empty line that ends it."""
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(first_line=first, fields={k.strip().lower(): v.strip() for k, _, v in pairs}, raw=raw)


def response_head(status: int, fields: Iterable[str]) -> bytes:
    """The head of a response."""
    return "\r\n".join([f"HTTP/1.1 {status} {_reason(status)}", *fields, "", ""]).encode("latin-1")


def error_document(code: str, message: str, path: str) -> str:
    """S3's error document."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(code)}</Code><Message>{escape(message)}'
        f"</Message><Resource>{escape(path)}</Resource><RequestId>SIM</RequestId></Error>"
    )


def document(method: str, status: int, text: str, *fields: str) -> Reply:
    """A response with an XML document, without the document for HEAD."""
    body = text.encode()
    lengths = ("Content-Type: application/xml", f"Content-Length: {len(body)}")
    head = response_head(status, [*lengths, *fields])
    return Reply(status=status, head=head, body=InMemory(body), stop=len(body) * (method != "HEAD"))


class Body(Protocol):
    """The bytes that a response is sent from."""

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes [start, stop), fewer if they are no longer there."""

    def close(self) -> None:
        """Releases what it holds."""


class InMemory:
    """A body in memory."""

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._content = memoryview(content)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop)."""
        return self._content[start:stop]

    def close(self) -> None:
        """Does nothing."""


@dataclass(eq=False, kw_only=True)
class Reply:
    """A response that is sent piece by piece: the head, then bytes [start, stop) of the body, then how it ends.

    After the last byte and `linger_s`, the connection can be reused, or closes with FIN or RST, as `ends` says.
    """

    status: int
    head: bytes
    body: Body
    start: int = 0  # of what was not taken yet
    stop: int = 0
    ends: str = "reuse"  # or "close", "reset"
    linger_s: float = 0.0
    bytes_per_s: float | None = None  # instead of the connection's rate
    flipped: range = range(0)  # bytes of the body to invert

    def take(self, most: int) -> memoryview:
        """The next piece of the body."""
        start, self.start = self.start, min(self.stop, self.start + most)
        piece = self.body.read(start, self.start)
        if len(piece) < self.start - start:  # the file has been truncated
            self.stop, self.ends = self.start, "close"
        if self.flipped and start < self.flipped.stop and self.flipped.start < self.start:
            piece = bytes(byte ^ 0xFF * (at in self.flipped) for at, byte in enumerate(piece, start))
        return memoryview(piece)

    def change(self, fault: HttpFault) -> None:
        """Changes how the body is sent, and how the response ends."""
        size = self.stop - self.start
        if fault.kind in ("reset", "truncate", "noclen", "stall"):
            self.stop, self.ends = self.start + min(size, max(0, fault.after)), "close"
        if fault.kind == "reset":
            self.ends, self.linger_s = "reset", _SECONDS_BEFORE_RESET
        elif fault.kind == "stall":
            self.linger_s = _STALL_S if fault.seconds is None else fault.seconds
        elif fault.kind == "slow":
            self.bytes_per_s = fault.bps
        elif fault.kind == "flip" and size:
            at = self.start + (size // 2 if fault.at is None else fault.at) % size
            self.flipped = range(at, min(self.stop, at + fault.n))


def _reason(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Simulated"
