"""A stand-in for the Hugging Face Hub: what `HfFileSystem` asks, for one dataset in a directory."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves the files below `root` as `datasets/lab/atlas`. A context manager.

    `revisions` are those that files were read at. While it is `closed`, it refuses everything.
    """

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, root: Path) -> None:
        self.root, self.revisions, self.closed = root, set(), False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: Any) -> None:
        path = unquote(urlsplit(request.path).path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        api, files = "/api/datasets/lab/atlas", "/datasets/lab/atlas/resolve/"
        if self.closed:
            self._send(request, 401, {"error": "closed"})
        elif path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            self._file(request, revision, name)
        elif path.startswith(f"{api}/tree/"):
            below = path.removeprefix(f"{api}/tree/").partition("/")[2]
            self._send(request, 200, [self._entry(each) for each in sorted((self.root / below).iterdir())])
        elif path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            found = [self.root / name for name in wanted if (self.root / name).exists()]
            self._send(request, 200, [self._entry(each) for each in found])
        elif path.startswith(api):
            self._send(request, 200, {"id": "lab/atlas", "_id": "1", "sha": self.commit, "siblings": [], "tags": []})
        else:
            self._send(request, 404, {"error": path})

    def _entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.root))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0", "size": 0}
        return {
            "type": "file",
            "path": name,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }

    def _file(self, request: Any, revision: str, name: str) -> None:
        self.revisions.add(revision)
        path = self.root / name
        if not path.is_file():
            self._send(request, 404, {"error": name})
            return
        content, status = path.read_bytes(), 200
        if "Range" in request.headers:
            first, last = request.headers["Range"].removeprefix("bytes=").split("-")
            status, content = 206, content[int(first) : int(last) + 1]
        self._send(request, status, content)

    def _send(self, request: Any, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("X-Repo-Commit", self.commit)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
