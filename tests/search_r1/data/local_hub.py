"""A server with the hub's addresses for listing a repository and for its files, ranges included."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

from huggingface_hub import constants

REVISION = "0123456789abcdef0123456789abcdef01234567"
_LISTING = re.compile(r"/api/(?:datasets|models)/([\w.-]+/[\w.-]+)(\?.*)?")
_FILE = re.compile(rf"(?:/datasets)?/([\w.-]+/[\w.-]+)/resolve/(?:{REVISION}|main)/(.+)")


class LocalHub(ThreadingHTTPServer):
    """`files`: content by repository and path. `plain` paths are not in large file storage: git's SHA-1 only."""

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]], plain: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.plain = files, plain
        self.asked: list[tuple[str, str | None]] = []
        """(path, Range header) of each request for a file."""
        self.stalls_after: int | None = None
        """Bytes of a file after which nothing more is sent."""
        self.sends_wrong_bytes = False
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = []
        for path, content in self.files[repo].items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling = {"rfilename": path, "size": len(content), "blobId": blob}
            if path not in self.plain:
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return {"id": repo, "sha": REVISION, "siblings": siblings, "tags": [], "downloads": 0, "private": False}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def do_GET(self) -> None:
        if (found := _LISTING.fullmatch(self.path)) and found[1] in self.server.files:
            self._send(200, json.dumps(self.server.listing(found[1])).encode(), {"Content-Type": "application/json"})
        elif (found := _FILE.fullmatch(self.path)) and found[2] in self.server.files.get(found[1], {}):
            self._send_file(found[2], self.server.files[found[1]][found[2]])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        """What a single file is, or that the repository has none of this name."""
        found = _FILE.fullmatch(self.path)
        content = self.server.files.get(found[1], {}).get(found[2]) if found else None
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            size = {"Content-Length": str(len(content))}
            self._send(200, b"", size | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": REVISION})

    def _send_file(self, path: str, content: bytes) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((path, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        body = content[start:]
        if self.server.sends_wrong_bytes:
            body = bytes(len(body))
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if wanted else {}
        self._send(206 if wanted else 200, body, headers, self.server.stalls_after)

    def _send(self, status: int, body: bytes, headers: dict[str, str], stalls_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:stalls_after])
        if stalls_after is not None and len(body) > stalls_after:
            self.wfile.flush()
            self.server.released.wait(60)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running(hub: LocalHub) -> Iterator[LocalHub]:
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        hub.shutdown()
        hub.server_close()
        thread.join()


@contextmanager
def asked_from_here(hub: LocalHub | None) -> Iterator[None]:
    """The hub's client in this process asks `hub`, or nobody: it is offline."""
    url = hub.url if hub else "http://127.0.0.1:9"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    with patch.multiple(constants, ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=template, HF_HUB_OFFLINE=hub is None):
        yield
