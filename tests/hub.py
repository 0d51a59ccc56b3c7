"""A hub on 127.0.0.1: directories served as model repositories, over the few requests that huggingface_hub makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The repository `test/model`, which is a directory; `taken` has each request for a file's data.

    Of files in `broken` the header can be had, but not the whole; those in `slow` come when the hub closes.
    """

    def __init__(self, directory: Path):
        self.directory, self.taken, self.address = directory, list[tuple[str, str]](), ""
        self.broken, self.slow, self.closing = set[str](), set[str](), threading.Event()

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": etag(path)}
            for path in sorted(self.directory.iterdir())
        ]


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(directory: Path) -> Generator[Hub]:
    hub = Hub(directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, has_body: bool) -> None:
            place = urlparse(self.path).path
            if place.startswith("/api/models/test/model/tree/"):
                self.send(json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"})
            elif place.startswith("/api/models/test/model"):
                info = {"id": "test/model", "sha": COMMIT, "siblings": [{"rfilename": f["path"]} for f in hub.tree()]}
                self.send(json.dumps(info).encode(), {"Content-Type": "application/json"})
            elif place.startswith("/test/model/resolve/"):
                self.send_file(hub.directory / place.rpartition("/")[2], has_body)
            else:
                self.send(b"", {}, 404)

        def send_file(self, path: Path, has_body: bool) -> None:
            is_whole = has_body and "range" not in self.headers
            if path.name in hub.slow and is_whole:
                hub.closing.wait(120)
            if not path.exists() or (path.name in hub.broken and is_whole):
                self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
                return
            data, status = path.read_bytes(), 200
            headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if asked := self.headers.get("range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = min(int(last or len(data) - 1), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
                data, status = data[int(first) : end + 1], 206
            if has_body:
                hub.taken.append((path.name, asked or "whole"))
            self.send(data, headers, status, has_body)

        def send(self, data: bytes, headers: dict[str, str], status: int = 200, has_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body and self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
