"""A server of an older version of the Model Context Protocol, without the SDK: `mcp_old_program.py PORT`.

It answers each request by an event stream, and does not check its results against its schemas.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEGREES = {"type": "object", "properties": {"degrees": {"type": "number"}}, "required": ["degrees"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "big", "description": "A text of that size.", "inputSchema": {"type": "object"}},
    {"name": "meet", "description": "Wait for so many calls.", "inputSchema": {"type": "object"}},
    {"name": "reading", "description": "Read.", "inputSchema": {"type": "object"}, "outputSchema": DEGREES},
    {"name": "page", "description": "A page as a file.", "inputSchema": {"type": "object"}},
]
waiting = 0
changed = threading.Condition()


def meet(number: int) -> str:
    """Wait until `number` calls are here at once."""
    global waiting
    with changed:
        waiting += 1
        changed.notify_all()
        changed.wait_for(lambda: waiting >= number)
    return "met"


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a call."""
    if name == "reading":
        return {"content": [{"type": "text", "text": "none"}], "structuredContent": {"degrees": None}}
    if name == "page":
        page = {"uri": "file:///page", "mimeType": "application/pdf", "blob": "AAAA"}
        return {"content": [{"type": "resource", "resource": page}]}
    text = "x" * arguments["size"] if name == "big" else meet(arguments["number"])
    return {"content": [{"type": "text", "text": text}]}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request."""
    if method == "initialize":
        server = {"name": "old", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}}
    if method == "tools/list":
        return {"result": {"tools": TOOLS}}
    if method == "tools/call":
        return {"result": call(parameters["name"], parameters.get("arguments") or {})}
    return {"error": {"code": -32601, "message": "no such method"}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # noqa: N802  the name that http.server looks up
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in asked:
            self.send_response(202)
            self.end_headers()
            return
        reply = {"jsonrpc": "2.0", "id": asked["id"], **answer(asked["method"], asked.get("params") or {})}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"event: message\ndata: {json.dumps(reply)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
