"""A stand-in for the Hugging Face Hub, its API and its CDN, which checks what it is sent."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from helpers import web_server

WRITTEN = "2026-01-01T00:00:00.000Z"
TOKEN = "hf_a-token"


class Hub:
    """The repository and the bucket `lab/cells`, of which a folder has the files: COMMIT/PATH. Main is at one commit.

    While it is `private`, it answers only requests with TOKEN.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.commit, self.private = root, "c" * 40, False
        self.asked: Counter[str] = Counter()  # by what was asked for
        self.revisions: set[str] = set()  # that files were read at
        self.busy: dict[
            str, list[dict[str, str]]
        ] = {}  # headers of answers 429 still to be given, by what is asked for
        self.not_before = 0.0  # asking earlier is an error
        self.too_early = 0
        self.faults: list[str] = []  # of the CDN: "expired", "short", "drop", "500"
        self.signature = "a%2Fb"
        self.lock = threading.Lock()

    def running(self) -> AbstractContextManager[str]:
        """Serves, and yields the address."""
        return web_server(functools.partial(_Handler, hub=self))

    @property
    def folder(self) -> Path:
        return self.root / self.commit

    def fault(self) -> str:
        with self.lock:
            return self.faults.pop(0) if self.faults else ""


class _Handler(http.server.BaseHTTPRequestHandler):
    """The Hub below / and the CDN below /cdn/, under another host name."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *given: Any, hub: Hub) -> None:
        self.hub = hub
        super().__init__(*given)

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/api/buckets/"):
            folder, paths = self.hub.folder, json.loads(asked)["paths"]
        else:
            folder = self.hub.root / self.path.rpartition("/")[2]
            paths = urllib.parse.parse_qs(asked.decode())["paths"]
        found = [folder / each for each in paths if (folder / each).exists()]
        self._send(200, self._json([self._entry(folder, each) for each in found]))

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        if address.path.startswith("/cdn/"):
            self._send_object(address)
            return
        what = self._what(address.path)
        with self.hub.lock:
            self.hub.asked[what] += 1
            self.hub.too_early += time.monotonic() < self.hub.not_before
            busy = self.hub.busy[what].pop(0) if self.hub.busy.get(what) else None
        if busy is not None:
            self.hub.not_before = time.monotonic() + float(busy.get("Retry-After", 0))
            self._send(429, b"{}", busy)
        elif self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Message": "no"})
        else:
            getattr(self, f"_{what}")(urllib.parse.unquote(address.path))

    def _what(self, path: str) -> str:
        return next((name for name in ("tree", "revision", "resolve") if f"/{name}" in path), "about")

    def _about(self, path: str) -> None:
        missing = not path.endswith("lab/cells")
        about = {"id": "lab/cells", "sha": self.hub.commit, "private": False, "size": 1, "totalFiles": 1}
        self._send(404 if missing else 200, self._json(about | {"createdAt": WRITTEN}), self._why(missing))

    def _revision(self, path: str) -> None:
        missing = path.rpartition("/")[2] not in ("main", self.hub.commit, "old")
        headers = {"X-Error-Code": "RevisionNotFound"} if missing else {}
        self._send(404 if missing else 200, self._json({"id": "lab/cells", "sha": self.hub.commit}), headers)

    @staticmethod
    def _why(missing: bool) -> dict[str, str]:
        return {"X-Error-Code": "RepoNotFound"} if missing else {}

    def _tree(self, path: str) -> None:
        if path.startswith("/api/buckets/"):
            folder, inside = self.hub.folder, path.partition("/tree")[2].strip("/")
        else:
            commit, _, inside = path.partition("/tree/")[2].partition("/")
            folder = self.hub.root / commit
        found = folder / inside
        recursive = "recursive=true" in self.path.lower()
        paths = sorted(found.rglob("*") if recursive else found.glob("*"))
        if not paths:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, self._json([self._entry(folder, each) for each in paths]))

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "t", "uploadedAt": WRITTEN}
        stored = path.read_bytes()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(stored), "oid": _sha1(stored)}
        if self.path.startswith("/api/buckets/"):
            return entry | {"xetHash": _sha256(stored), "uploadedAt": WRITTEN, "mtime": None}
        if _is_large(path):
            entry["lfs"] = {"oid": _sha256(stored), "size": len(stored), "pointerSize": 100}
        return entry

    def _resolve(self, path: str) -> None:
        inside = path.partition("/resolve/")[2]
        commit, key = (self.hub.commit, inside) if path.startswith("/buckets/") else inside.split("/", 1)
        self.hub.revisions.add(commit)
        file = self.hub.root / commit / key
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        stored = file.read_bytes()
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(stored))}
        if not _is_large(file) and not path.startswith("/buckets/"):
            self._send_part(stored, headers | {"ETag": f'"{_sha1(stored)}"'})
            return
        port = self.server.server_address[1]
        place = urllib.parse.quote(f"{commit}/{key}")
        location = f"http://localhost:{port}/cdn/{place}?Signature={self.hub.signature}"
        xet = {"X-Xet-Hash": _sha256(stored), "X-Xet-Refresh-Route": f"http://127.0.0.1:{port}/x"}
        headers |= {"X-Linked-ETag": f'"{_sha256(stored)}"', "Location": location}
        self._send(302, b"", headers | (xet if path.startswith("/buckets/") else {}))

    def _send_object(self, address: urllib.parse.SplitResult) -> None:
        assert "Authorization" not in self.headers, "the token has left the Hub"
        fault = self.hub.fault()
        self.hub.asked["cdn"] += 1
        if fault == "expired" or address.query != f"Signature={self.hub.signature}":
            self._send(403, b"<Error>the signature has expired</Error>")
            return
        if fault == "500":
            self._send(500, b"")
            return
        file = self.hub.root / urllib.parse.unquote(address.path.removeprefix("/cdn/"))
        if not file.is_file():
            self._send(404, b"")
            return
        stored = file.read_bytes()
        self._send_part(stored, {"ETag": '"of the CDN"'}, fault)

    def _send_part(self, stored: bytes, headers: dict[str, str], fault: str = "") -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._send(200, stored, headers)
            return
        first, last = int(asked[1]), int(asked[2])
        part = stored[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(stored)}"
        if fault == "drop":
            self.send_response(206)
            self.send_header("Content-Range", headers["Content-Range"])
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self._send(206, part[:-1] if fault == "short" else part, headers)

    @staticmethod
    def _json(found: Any) -> bytes:
        return json.dumps(found).encode()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _is_large(path: Path) -> bool:
    return path.name not in ("zarr.json", "README.md")


def _sha1(stored: bytes) -> str:
    return hashlib.sha1(stored).hexdigest()


def _sha256(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()
