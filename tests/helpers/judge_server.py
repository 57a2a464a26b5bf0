"""A judge as a program: `python judge_server.py HOST PORT` serves a chat endpoint that gives every answer half a point.

As the reason it names the GPUs that it sees.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """POST /v1/chat/completions, whatever is asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        verdict = json.dumps({"reason": os.environ.get("CUDA_VISIBLE_DEVICES", "all"), "score": 0.5})
        message = {"role": "assistant", "content": verdict}
        body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    print("a judge without an opinion", flush=True)
    ThreadingHTTPServer.request_queue_size = 128  # a step's answers come at once
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Judge).serve_forever()
