"""A retrieval server that is far away: passes requests on to a real one after a pause.

    .venv/bin/python scripts/bench/slow_retriever.py --upstream http://127.0.0.1:8000 --port 8001 --ms 200 --tail_ms 100

A query takes `--ms` and an exponentially distributed time with mean `--tail_ms`, at most `--cap_ms`. A request is
answered when its slowest query is (`--draw query`), or draws one time for all of its queries (`--draw request`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import AsyncIterator

from aiohttp import ClientSession, TCPConnector, web

UPSTREAM = web.AppKey("upstream", ClientSession)


def main() -> None:
    options = parser().parse_args()
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(connection)
    app.router.add_route("*", "/{path:.*}", Delay(options).handle)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--port", type=int, required=True)
    found.add_argument("--upstream", required=True, help="http://host:port of the server")
    found.add_argument("--ms", type=float, default=200.0)
    found.add_argument("--tail_ms", type=float, default=100.0)
    found.add_argument("--cap_ms", type=float, default=1000.0)
    found.add_argument("--draw", choices=["query", "request"], default="query")
    found.add_argument("--seed", type=int, default=0)
    return found


class Delay:
    """One handler for all routes; only searches are late."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._draws = options, random.Random(options.seed)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST":
            each = self._options.draw == "query"
            await asyncio.sleep(self.pause_s(len(json.loads(body)["queries"]) if each else 1))
        url = self._options.upstream + request.path_qs
        headers = {"Content-Type": "application/json"}
        async with request.app[UPSTREAM].request(request.method, url, data=body, headers=headers) as reply:
            # Without X-Batch-Size: the client alone decides how many queries a request has.
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)

    def pause_s(self, num_queries: int) -> float:
        """Of the slowest of so many queries."""
        options, rate = self._options, 1 / max(self._options.tail_ms, 1e-9)
        tail_ms = max(self._draws.expovariate(rate) for _ in range(num_queries))
        return float(min(options.cap_ms, options.ms + tail_ms)) / 1000


async def connection(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        app[UPSTREAM] = session
        yield


if __name__ == "__main__":
    main()
