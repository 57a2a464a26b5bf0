"""A retrieval server behind a door: searches can be held up or refused, and are written down."""

from __future__ import annotations

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Relay(ThreadingHTTPServer):
    """Passes `POST /retrieve` on to the real server at `target` while `door` is set, unless it `refuses`."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.door = threading.Event()
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{urlsplit(self.target).path}"

    def reset(self) -> None:
        self.queries: list[str] = []
        self.refuses = False
        self.door.set()


class _Handler(BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.queries += json.loads(body)["queries"]
        self.server.door.wait(120)
        if self.server.refuses:
            self.send_error(403, "closed for today")
            return
        request = urllib.request.Request(self.server.target, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            found = response.read()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *_: object) -> None: ...
