"""An online engine on a real port, for the tests of the source, the server and the launch scripts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response


def _pages(query: str) -> list[dict[str, Any]]:
    if query == "nothing":
        return []
    hosts = ("a.org", "denied.org", "b.org", "c.org")
    return [{"title": query, "address": f"https://{host}/{query}", "text": f"About {query}."} for host in hosts]


def _renamed(query: str, address: str, text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"title": page["title"], address: page["address"], text: page["text"], **more} for page in _pages(query)]


SHAPES: dict[str, Callable[[str], dict[str, Any]]] = {
    "serper": lambda query: {"organic": _renamed(query, "link", "snippet")},
    "serpapi": lambda query: {"organic_results": _renamed(query, "link", "snippet")},
    "google": lambda query: {"items": _renamed(query, "link", "snippet")},
    "brave": lambda query: {"type": "search", "web": {"results": _renamed(query, "url", "description")}},
    "tavily": lambda query: {"results": _renamed(query, "url", "content", score=0.5)},
}


class Engine:
    """Answers like the engine `name`; first it plays a script of troubles: answers, or seconds to hang.

    It finds nothing for the query "nothing", refuses the query "refused" and fails at the query "down" each time. While
    `door` is not set, and until `company` requests have run at a time, nothing is answered.
    """

    def __init__(self, name: str = "serper", *script: Response | float, delay_s: float = 0.0, company: int = 0) -> None:
        self.name, self.script, self.delay_s, self.company = name, list(script), delay_s, company
        self.door = threading.Event()
        self.door.set()
        self.requests: list[tuple[Request, str]] = []
        self.fields: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = self.most_running = 0
        self.app = FastAPI()
        self.app.api_route("/engine", methods=["GET", "POST"])(self._answer)

    async def _answer(self, request: Request) -> Response:
        fields = json.loads(await request.body()) if request.method == "POST" else dict(request.query_params)
        query = fields.get("q") or fields["query"]
        self.requests.append((request, query))
        self.fields.append(fields)
        self.times.append(time.monotonic())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while not self.door.is_set() or self.most_running < self.company:
                await asyncio.sleep(0.005)
            if query in ("refused", "down"):
                return Response("no", 403) if query == "refused" else Response("down", 500)
            step = self.script.pop(0) if self.script else self.delay_s
            if isinstance(step, Response):
                return step
            await asyncio.sleep(step)
            return Response(json.dumps(SHAPES[self.name](query)), media_type="application/json")
        finally:
            self.running -= 1

    @property
    def asked(self) -> list[str]:
        return [query for _, query in self.requests]
